"""The audit log: one chain, whoever writes; and no change to it that is not found."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from decimal import Decimal

import pytest

from core.accounts import audit, keys
from core.accounts.secrets import mint
from core.postgres import DBAPIError, Engine, text, transaction
from tests.conftest import Database


@pytest.fixture
def engine(database: Database) -> Engine:
    return database.engine()


def write(engine: Engine, subject: str = "org:1", **detail: object) -> None:
    with transaction(engine) as connection:
        audit.write(connection, actor="root", action="org.create", subject=subject, **detail)  # type: ignore[arg-type]


def verified(engine: Engine, contains: str = "") -> audit.Verdict:
    with transaction(engine) as connection:
        return audit.verify(connection, contains=contains)


def test_what_was_written_is_there_and_linked(engine: Engine) -> None:
    assert verified(engine) == audit.Verdict(rows=0, head="00" * 32)
    moment = datetime(2026, 11, 30, 12, tzinfo=UTC)

    write(engine, name="acme – ü", weight=2.5, models=["a", "b"], money_per_day=Decimal("1E+2"), expires_at=moment)
    write(engine, tokens_per_minute=10**18, reason="", networks=[])

    with transaction(engine) as connection:
        first, second = audit.entries(connection)
    assert first.detail == {
        "name": "acme – ü", "weight": "2.5", "models": ["a", "b"], "money_per_day": "100",
        "expires_at": "2026-11-30T12:00:00+00:00",
    }  # fmt: skip
    assert second.detail == {"tokens_per_minute": 10**18} and second.prev_hash == first.hash
    assert verified(engine) == audit.Verdict(rows=2, head=second.hash.hex())


def test_a_change_that_is_not_committed_is_not_in_the_log(engine: Engine) -> None:
    write(engine)
    with pytest.raises(RuntimeError), transaction(engine) as connection:
        audit.write(connection, actor="root", action="org.create", subject="org:2")
        raise RuntimeError

    write(engine)

    assert verified(engine).rows == 2 and verified(engine).broken_at is None


def test_many_at_once_make_one_chain(engine: Engine) -> None:
    """Each link has one that follows it, and `n` is their order; two at a time would make a fork."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: write(engine, f"org:{n}"), range(24)))

    with transaction(engine) as connection:
        entries = audit.entries(connection)
    assert sorted(int(entry.subject[4:]) for entry in entries) == list(range(24))
    assert [entry.prev_hash for entry in entries[1:]] == [entry.hash for entry in entries[:-1]]
    assert [entry.at for entry in entries] == sorted(entry.at for entry in entries)
    assert verified(engine).broken_at is None


@pytest.mark.parametrize("sql", ["UPDATE audit_log SET actor = 'x'", "DELETE FROM audit_log", "TRUNCATE audit_log"])
def test_nothing_in_the_log_is_changed(engine: Engine, sql: str) -> None:
    write(engine)

    with pytest.raises(DBAPIError, match="append-only"), transaction(engine) as connection:
        connection.execute(text(sql))


def around(engine: Engine, sql: str) -> None:
    """As the owner of the database can, who takes the triggers away."""
    with transaction(engine) as connection:
        connection.execute(text("ALTER TABLE audit_log DISABLE TRIGGER ALL"))
        connection.execute(text(sql))


#: What is done to a log of three, how many entries are still linked before it, and which one is not.
FORGERIES = {
    "another actor": ("UPDATE audit_log SET actor = 'x' WHERE n = 2", 1, 2),
    "another time": ("UPDATE audit_log SET at = at + interval '1 microsecond' WHERE n = 2", 1, 2),
    "another subject": ("UPDATE audit_log SET subject = 'org:9' WHERE n = 2", 1, 2),
    "another organisation": ("UPDATE audit_log SET org_id = gen_random_uuid() WHERE n = 2", 1, 2),
    "another detail": ("""UPDATE audit_log SET detail = '{"name": "x"}' WHERE n = 2""", 1, 2),
    "another hash": ("UPDATE audit_log SET hash = sha256('x') WHERE n = 2", 1, 2),
    "another link": ("UPDATE audit_log SET prev_hash = sha256('x') WHERE n = 2", 1, 2),
    "one less": ("DELETE FROM audit_log WHERE n = 2", 1, 3),
    "the first less": ("DELETE FROM audit_log WHERE n = 1", 0, 2),
    "one more": (
        """INSERT INTO audit_log (at, actor, action, subject, detail, prev_hash, hash)
          SELECT at, 'x', 'y', 'z', '{}', hash, sha256('y') FROM audit_log WHERE n = 3""",
        3,
        4,
    ),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forgery_is_found_where_it_begins(engine: Engine, forgery: str) -> None:
    sql, linked, broken_at = FORGERIES[forgery]
    for name in "abc":
        write(engine, name=name)
    assert verified(engine).broken_at is None

    around(engine, sql)

    found = verified(engine)
    assert (found.rows, found.broken_at) == (linked, broken_at)


def test_a_log_cut_short_is_told_by_a_head_that_was_kept(engine: Engine) -> None:
    """What is left is a chain, so only who noted its head can tell."""
    write(engine)
    first = verified(engine).head
    write(engine)
    second = verified(engine).head
    around(engine, "DELETE FROM audit_log WHERE n = 2")

    assert verified(engine).broken_at is None
    assert verified(engine, contains=first).found and not verified(engine, contains=second).found


def test_the_head_of_an_empty_log_is_the_beginning_of_every_other(engine: Engine) -> None:
    empty = verified(engine).head
    write(engine)

    assert verified(engine, contains=empty).found


def test_a_detail_has_only_fields_that_hold_no_secret(engine: Engine) -> None:
    for field in ("key", "secret", "secret_hmac", "pepper", "plain"):
        with pytest.raises(ValueError, match=field):
            write(engine, **{field: "x"})

    assert verified(engine).rows == 0


@pytest.mark.parametrize("paste", [lambda: keys.mint("live", "a" * 12), lambda: keys.mint("admin", "a" * 12), mint])
def test_a_secret_that_was_pasted_somewhere_is_cut_out(engine: Engine, paste: Callable[[], str]) -> None:
    secret = paste()

    write(engine, subject=f"org:{secret}", reason=f"leaked: {secret}, sorry", models=[secret], name=secret[:40])

    with transaction(engine) as connection:
        logged = connection.execute(text("SELECT string_agg(audit_log::text, '') FROM audit_log")).scalar_one()
    assert secret not in logged and secret[22:40] not in logged
    assert "leaked: " in logged and "..., sorry" in logged
