"""From the log to Postgres: every ending is one row, whatever dies in between."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
import uuid6

from billing import events, hours
from core import usage
from core.postgres import DatabaseAway, Engine, IntegrityError, connect, migrate, text, transaction
from core.redis import Store
from core.usage import Entry
from core.values import Outcome
from ops import stores

MODEL = "tiny"


def test_an_entry_delivered_twice_makes_one_row(log: Any, ledger: Any, ingest: Callable[[], int]) -> None:
    request_id = log.enter()
    log.enter(request_id)

    assert ingest() == 2

    assert ledger.rows("SELECT event_id::text, input_tokens, output_tokens FROM usage_events") == [(request_id, 10, 7)]
    assert (ledger.count("usage_conflicts"), ledger.count("usage_quarantine"), log.length()) == (0, 0, 0)


def test_an_ending_entered_again_later_changes_nothing(log: Any, ledger: Any, ingest: Callable[[], int]) -> None:
    """Not even the hour: the first entry's counts."""
    request_id = log.enter()
    ingest()
    before = ledger.rows("SELECT * FROM usage_events"), ledger.rows("SELECT * FROM usage_hours")

    log.enter(request_id)
    ingest()

    assert (ledger.rows("SELECT * FROM usage_events"), ledger.rows("SELECT * FROM usage_hours")) == before


def test_a_death_between_commit_and_acknowledgement_makes_one_row(
    log: Any, ledger: Any, store: Store, engine: Engine
) -> None:
    """`settle` runs between the two. The entries come again, and so does their settle."""
    request_id = log.enter()
    settled: list[str] = []

    def dies(entries: Sequence[Entry]) -> None:
        assert ledger.count("usage_events") == 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        events.ingest(store, engine, [MODEL], "c1", settle=dies)
    assert log.length() == 1
    events.ingest(store, engine, [MODEL], "c1", settle=lambda entries: settled.extend(entry.id for entry in entries))

    assert (settled, ledger.count("usage_events"), log.length()) == ([request_id], 1, 0)


def test_postgres_stopped_in_the_middle_loses_nothing(log: Any, store: Store) -> None:
    """Entries taken and not committed stay with their consumer; entries that come meanwhile wait in the log."""
    with tempfile.TemporaryDirectory(prefix="fb-", ignore_cleanup_errors=True) as folder:
        server = stores.start_postgres(Path(folder))
        migrate(server.url)
        engine = connect(server.url)
        entered = {log.enter()}
        store.run_all([usage.open_group(MODEL), usage.read_new(MODEL, "c1")])
        entered.add(log.enter())

        server.stop()
        with pytest.raises(DatabaseAway):
            events.ingest(store, engine, [MODEL], "c1")
        entered.add(log.enter())
        server = stores.start_postgres(Path(folder))
        while events.ingest(store, engine, [MODEL], "c1"):
            pass

        with transaction(engine) as connection:
            kept = set(connection.execute(text("SELECT event_id::text FROM usage_events")).scalars())
        engine.dispose()
        server.stop()
    assert kept == entered
    assert log.length() == 0


def test_what_a_dead_consumer_took_is_ingested_by_another(
    log: Any, ledger: Any, store: Store, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage.claim_stale, "__kwdefaults__", {"stale_ms": 0})
    log.enter()
    store.run_all([usage.open_group(MODEL), usage.read_new(MODEL, "dead")])

    assert events.ingest(store, engine, [MODEL], "c2") == 1

    assert (ledger.count("usage_events"), log.length()) == (1, 0)


def test_an_ending_that_says_otherwise_is_kept_aside(log: Any, ledger: Any, ingest: Callable[[], int]) -> None:
    request_id = log.enter()
    log.enter(request_id, tokens=(10, 4, 8, 0))
    ingest()
    log.enter(request_id, outcome="cancelled")
    ingest()

    assert ledger.rows("SELECT output_tokens, outcome FROM usage_events") == [(7, "completed")]
    others = ledger.rows(
        "SELECT event_id::text, other->'usage'->'output_tokens', other->>'outcome' FROM usage_conflicts"
    )
    assert sorted(others) == [(request_id, 7, "cancelled"), (request_id, 8, "completed")]
    assert log.length() == 0


def test_every_way_to_end_has_its_row(log: Any, ledger: Any, ingest: Callable[[], int]) -> None:
    """An outcome that the table did not know would be a request without a bill."""
    for outcome in Outcome:
        log.enter(outcome=outcome.value)

    assert ingest() == len(Outcome)
    assert {outcome for (outcome,) in ledger.rows("SELECT outcome FROM usage_events")} == set(Outcome)


def test_a_poison_entry_does_not_stop_the_rest(log: Any, ledger: Any, ingest: Callable[[], int]) -> None:
    """Each in another way: not readable, or refused by the table."""
    priced = log.at_price(ledger.price())
    stranger = msgspec.structs.replace(log.facts, org_id="not a uuid")
    good = [log.enter(), priced.enter()]
    bad = {
        "id": log.enter("no id"),
        "tokens": log.enter(tokens=(1, 2, 0, 0)),
        "outcome": log.enter(outcome="exploded"),
        "nul": log.enter(worker="a\0b"),
        "facts": log.enter(facts=b"\xc1"),
        "organisation": log.enter(facts=msgspec.msgpack.encode(stranger)),
        "price": log.enter(facts=msgspec.msgpack.encode(msgspec.structs.replace(log.facts, price_id=999))),
        "another model's price": priced.enter(
            facts=msgspec.msgpack.encode(msgspec.structs.replace(priced.facts, model="other"))
        ),
        "age": log.enter(str(UUID(int=UUID(good[0]).int & ((1 << 80) - 1)))),
        "future": log.enter(str(UUID(int=UUID(good[0]).int + (86_400_000 << 80)))),
    }
    good.append(log.enter())

    assert ingest() == len(good) + len(bad)

    assert set(ledger.rows("SELECT event_id::text FROM usage_events")) == {(request_id,) for request_id in good}
    reasons = ledger.rows("SELECT reason FROM usage_quarantine ORDER BY entry_id")
    assert len(reasons) == len(bad) and all(reason for (reason,) in reasons)
    assert log.length() == 0


def test_what_is_quarantined_is_kept_as_it_came(log: Any, ledger: Any, ingest: Callable[[], int]) -> None:
    log.enter(outcome="exploded", worker=b"\xff\x00")

    ingest()

    [(fields,)] = ledger.rows("SELECT fields FROM usage_quarantine")
    kept = msgspec.msgpack.decode(bytes(fields), type=dict[bytes, bytes])
    assert (kept[b"outcome"], kept[b"worker"]) == (b"exploded", b"\xff\x00")


def test_a_whole_batch_of_poison_is_put_aside_in_one_step(log: Any, ledger: Any, store: Store, engine: Engine) -> None:
    for _ in range(40):
        log.enter(tokens=(1, 2, 0, 0))
    log.enter()

    assert events.ingest(store, engine, [MODEL], "c1") == 41

    assert (ledger.count("usage_quarantine"), ledger.count("usage_events")) == (40, 1)


@pytest.mark.parametrize(
    "change", ["UPDATE usage_events SET output_tokens = 0", "DELETE FROM usage_events", "TRUNCATE usage_events"]
)
def test_an_event_is_never_changed(log: Any, ledger: Any, ingest: Callable[[], int], change: str) -> None:
    log.enter()
    ingest()

    with pytest.raises(IntegrityError, match="append-only"):
        ledger.execute(change)

    assert ledger.rows("SELECT output_tokens FROM usage_events") == [(7,)]


def test_an_id_whose_time_is_not_its_partitions_is_refused(log: Any, ledger: Any, ingest: Callable[[], int]) -> None:
    """So a repeat can never slip into another month and be counted twice."""
    log.enter()
    ingest()
    columns = """org_id, project_id, key_id, model, tier, input_tokens, cached_tokens, output_tokens, reasoning_tokens,
      outcome, attempt, worker, payload_sha256"""

    with pytest.raises(IntegrityError, match="admitted_at"):
        ledger.execute(
            f"""INSERT INTO usage_events (event_id, admitted_at, entered_at, {columns})
            SELECT event_id, admitted_at + interval '1 second', entered_at + interval '1 second', {columns}
            FROM usage_events"""
        )


def test_partitions_are_made_ahead_and_only_once(engine: Engine, ledger: Any) -> None:
    december = datetime(2026, 12, 31, 23, 59, tzinfo=UTC)

    for _ in range(2):
        with transaction(engine) as connection:
            events.ensure_partitions(connection, december)

    names = ledger.rows("SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'usage_events'::regclass")
    assert sorted(name for (name,) in names) == [
        "usage_events_202611", "usage_events_202612", "usage_events_202701", "usage_events_202702",
    ]  # fmt: skip


def test_a_model_without_a_price_is_counted_and_costs_nothing(
    log: Any, ledger: Any, engine: Engine, ingest: Callable[[], int]
) -> None:
    log.enter()
    ingest()
    hours.roll_dirty(engine)

    assert ledger.rows("SELECT price_id, input_tokens, amount FROM usage_hourly") == [(0, 10, 0)]


def test_ids_of_ours_say_when_they_were_made() -> None:
    """The partition key is derived from the id, so the id must be a UUIDv7 of now."""
    made = uuid6.uuid7()

    assert abs((made.int >> 80) / 1000 - datetime.now(UTC).timestamp()) < 5


def test_a_store_that_lost_everything_is_read_again_from_its_beginning(
    log: Any, ledger: Any, store: Store, ingest: Callable[[], int]
) -> None:
    """The consumer group went with the data, and so did every script."""
    log.enter()
    ingest()

    store.client.flushall()
    store.client.script_flush()
    log.enter()

    assert ingest() == 1
    assert ledger.count("usage_events") == 2
