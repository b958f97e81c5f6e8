"""The table of stored responses: who sees a row, when it ends, how long it stays."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import uuid6

from core import responses
from core.accounts import tenants
from core.postgres import Engine, text, transaction
from core.responses import Stored
from tests.conftest import Database

ITEMS = json.dumps([{"type": "message", "role": "user", "content": "hello \ud83d \u0000"}])


@pytest.fixture
def engine(database: Database) -> Engine:
    return database.engine()


@pytest.fixture
def org_id(engine: Engine) -> str:
    with transaction(engine) as connection:
        return tenants.create_organisation(connection, "acme").id


PROJECT = str(uuid6.uuid7())


def a_row(org_id: str, **fields: Any) -> Stored:
    values = {"id": str(uuid6.uuid7()), "project_id": PROJECT, "key_id": "k", "model": "m", "status": "completed"}
    return Stored(**{**values, "org_id": org_id, "response": '{"output":[]}', **fields})


def keep(engine: Engine, row: Stored, items: str = ITEMS, body: bytes | None = None) -> bool:
    with transaction(engine) as connection:
        return responses.keep(connection, row, items, body)


def find(engine: Engine, row: Stored, project_id: str = PROJECT) -> Stored | None:
    with transaction(engine) as connection:
        return responses.find(connection, project_id, row.id)


def chain(engine: Engine, row: Stored) -> list[str]:
    with transaction(engine) as connection:
        return [turn.id for turn in responses.chain(connection, PROJECT, row.id)]


def execute(engine: Engine, sql: str) -> None:
    with transaction(engine) as connection:
        connection.execute(text(sql))


def test_a_response_comes_back_as_it_was_kept_to_its_project_alone(engine: Engine, org_id: str) -> None:
    """Whatever JSON can spell, also what jsonb would refuse."""
    row = a_row(org_id, response='{"output":[{"text":"\\u0000 \\ud83d"}],"b":1,"a":2}', streamed=True)

    assert keep(engine, row)

    assert find(engine, row) == row
    assert find(engine, row, str(uuid6.uuid7())) is None
    with transaction(engine) as connection:
        assert responses.items(connection, PROJECT, row.id) == ITEMS


def test_what_has_ended_is_not_changed_any_more(engine: Engine, org_id: str) -> None:
    row = a_row(org_id)
    assert keep(engine, row)

    assert keep(engine, msgspec.structs.replace(row, status="failed", response='{"output":[1]}')), "it is stored"
    assert find(engine, row) == row


def test_an_organisation_that_keeps_nothing_has_no_row(engine: Engine, org_id: str) -> None:
    """Whatever the gateway thinks, which may have been told a minute ago."""
    with transaction(engine) as connection:
        assert tenants.set_retention(connection, org_id, 0).retention_days == 0

    row = a_row(org_id)

    assert not keep(engine, row) and not keep(engine, a_row(org_id, status="queued", background=True), body=b"b")
    with transaction(engine) as connection:
        assert connection.execute(text("SELECT count(*) FROM responses")).scalar_one() == 0


def test_keeping_for_fewer_days_concerns_what_is_there_too(engine: Engine, org_id: str) -> None:
    old, new = a_row(org_id), a_row(org_id)
    keep(engine, old), keep(engine, new)
    execute(engine, f"UPDATE responses SET created_at = created_at - interval '10 days' WHERE id = '{old.id}'")

    with transaction(engine) as connection:
        assert responses.shorten(connection, org_id, 5) == 2

    assert find(engine, old) is None and find(engine, new) is not None
    with transaction(engine) as connection:
        assert responses.purge(connection) == 1


@pytest.mark.parametrize("wrong", [-1, tenants.RETENTION_DAYS_MAX + 1])
def test_retention_has_bounds(engine: Engine, org_id: str, wrong: int) -> None:
    with pytest.raises(tenants.TenantError), transaction(engine) as connection:
        tenants.set_retention(connection, org_id, wrong)


def test_a_deleted_response_is_gone_at_once_and_is_not_kept_again(engine: Engine, org_id: str) -> None:
    """Also one that was not kept yet when it was deleted: its stream may end later."""
    before, never = a_row(org_id), a_row(org_id)
    keep(engine, before)

    for row in (before, never):
        with transaction(engine) as connection:
            responses.delete(connection, row)
        assert find(engine, row) is None and not keep(engine, row)

    with transaction(engine) as connection:
        left = connection.execute(text("SELECT items, response, body FROM responses")).all()
    assert left == [(None, None, None)] * 2


def test_a_conversation_is_read_whole_oldest_first(engine: Engine, org_id: str) -> None:
    rows = [a_row(org_id)]
    for _ in range(5):
        rows.append(a_row(org_id, previous_id=rows[-1].id))
    fork = a_row(org_id, previous_id=rows[2].id)
    for row in [*rows, fork]:
        keep(engine, row)

    assert chain(engine, rows[-1]) == [row.id for row in rows]
    assert chain(engine, fork) == [row.id for row in [*rows[:3], fork]]

    with transaction(engine) as connection:
        responses.delete(connection, rows[1])
        turns = responses.chain(connection, PROJECT, rows[3].id)
    assert [turn.id for turn in turns] == [rows[2].id, rows[3].id] and turns[0].previous_id == rows[1].id


def test_a_conversation_is_never_read_without_bound(engine: Engine, org_id: str) -> None:
    """Not even one that goes on from itself."""
    row = a_row(org_id)
    keep(engine, row)
    execute(engine, f"UPDATE responses SET previous_id = id WHERE id = '{row.id}'")

    assert len(chain(engine, row)) == responses.TURNS_MAX + 1


def test_background_work_is_looked_at_by_one_gateway_at_a_time(engine: Engine, org_id: str) -> None:
    rows = [a_row(org_id, status="queued", background=True) for _ in range(20)]
    for row in rows:
        keep(engine, row, body=b"what the queue is given")
    keep(engine, a_row(org_id))

    def due(_: int) -> list[str]:
        with transaction(engine) as connection:
            return [one.id for one in responses.due(connection, rest_s=60, limit=5)]

    assert due(0) == [], "each was accepted a moment ago"
    execute(engine, "UPDATE responses SET looked_at = now() - interval '2 minutes'")
    with ThreadPoolExecutor(4) as pool:
        found = [one for some in pool.map(due, range(4)) for one in some]

    assert len(found) == len(set(found)), "none twice"
    while some := due(0):
        found += some
    assert sorted(found) == sorted(row.id for row in rows)


def test_background_work_ends_once_and_its_body_goes(engine: Engine, org_id: str) -> None:
    row = a_row(org_id, status="queued", background=True)
    keep(engine, row, body=b"body")
    with transaction(engine) as connection:
        assert responses.body(connection, row.id) == b"body"

    ended = msgspec.structs.replace(row, status="completed", response='{"output":[2]}')
    assert keep(engine, ended, "[]")
    assert keep(engine, msgspec.structs.replace(row, status="cancelled"), "[]")

    assert find(engine, row) == ended
    with transaction(engine) as connection:
        assert responses.body(connection, row.id) is None
        assert responses.items(connection, PROJECT, row.id) == ITEMS, "its items are what they were"
        assert responses.due(connection, rest_s=-1, limit=9) == []


def test_expired_rows_are_purged_in_batches_the_oldest_first(engine: Engine, org_id: str) -> None:
    rows = [a_row(org_id) for _ in range(5)]
    for age, row in enumerate(rows):
        keep(engine, row)
        execute(engine, f"UPDATE responses SET expires_at = now() - interval '{age} hours' WHERE id = '{row.id}'")
    fresh = a_row(org_id)
    keep(engine, fresh)

    with transaction(engine) as connection:
        assert responses.purge(connection, 3) == 3
        left = connection.execute(text("SELECT id::text FROM responses ORDER BY expires_at")).scalars().all()
    assert left == [rows[1].id, rows[0].id, fresh.id]
    assert find(engine, rows[0]) is None, "what has expired is not seen, purged or not"
    with transaction(engine) as connection:
        assert responses.purge(connection, 3) == 2
    assert find(engine, fresh) == fresh


def test_contents_are_in_no_fault_that_is_told(engine: Engine, org_id: str) -> None:
    from core.postgres import DBAPIError

    with pytest.raises(DBAPIError) as refused:
        keep(engine, a_row(org_id, status="a secret word"))
    assert "a secret word" not in repr(type(refused.value))
