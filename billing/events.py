"""From the usage log to Postgres: each ending is one row, in effect exactly once.

| table            | writer                    | reader        | holds                                       |
|------------------|---------------------------|---------------|---------------------------------------------|
| usage_events     | ingest; append-only       | billing/hours | one row per request, by month of its id     |
| usage_hours      | ingest marks, hours rolls | billing/hours | per hour: marks made, marks rolled up       |
| usage_conflicts  | ingest                    | people        | endings that say otherwise than their row   |
| usage_quarantine | ingest                    | people        | entries that nobody can read, or that       |
|                  |                           |               | usage_events refuses: as they came, and why |

A step: take entries, write them in one transaction, COMMIT, settle, and only then strike them out of the log. A death
anywhere in between means that the entries come again; their ids are known, so they change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from core import usage
from core.postgres import Connection, DataError, Engine, IntegrityError, lock, text, transaction
from core.redis import Store
from core.usage import BadEntry, Entry, Item

#: How many months of partitions there are before this one and after it. Entries of other months are quarantined.
MONTHS_BEFORE = 1
MONTHS_AHEAD = 2

#: Tells the limiter about endings whose settle may have been lost; it must be safe to repeat.
Settle = Callable[[Sequence[Entry]], None]


@dataclass(frozen=True)
class Refused:
    """An entry that usage_events cannot take, and why."""

    item: Item
    reason: str


def ingest(store: Store, engine: Engine, models: Iterable[str], consumer: str, *, settle: Settle | None = None) -> int:
    """Take up to usage.COUNT entries of each model to Postgres; returns how many. 0: there is nothing more to do.

    `settle` gets every readable entry, new or repeated, after the COMMIT and before it is struck out: if it raises,
    the entries come again.

    Raises:
      DatabaseAway, RedisError: nothing is lost; call again.
    """
    return sum(_ingest_model(store, engine, model, consumer, settle) for model in models)


def _ingest_model(store: Store, engine: Engine, model: str, consumer: str, settle: Settle | None) -> int:
    items = _take(store, model, consumer)
    if not items:
        return 0
    entries, refused = _read(items)
    with transaction(engine) as connection:
        refused += _keep(connection, entries, {item.entry_id: item for item in items})
        _quarantine(connection, model, refused)
    if settle is not None and entries:
        settle(entries)
    store.run(usage.strike_out(model, [item.entry_id for item in items]))
    return len(items)


def _take(store: Store, model: str, consumer: str) -> list[Item]:
    """What this consumer left unfinished, else what dead ones left, else what is new."""
    store.run(usage.open_group(model))  # each time: a store that lost its data has lost the group as well
    return (
        store.run(usage.read_pending(model, consumer))
        or _stale(store, model, consumer)
        or store.run(usage.read_new(model, consumer))
    )


def _stale(store: Store, model: str, consumer: str) -> list[Item]:
    claimed = store.run(usage.claim_stale(model, consumer))
    while not claimed.items and claimed.cursor != "0-0":
        claimed = store.run(usage.claim_stale(model, consumer, claimed.cursor))
    return claimed.items


def _read(items: Sequence[Item]) -> tuple[list[Entry], list[Refused]]:
    entries, refused = [], []
    for item in items:
        try:
            entries.append(usage.read(item))
        except BadEntry as e:
            refused.append(Refused(item, str(e)))
    return entries, refused


def _keep(connection: Connection, entries: Sequence[Entry], items: dict[str, Item]) -> list[Refused]:
    """Write what is new, mark its hours dirty, put conflicts aside. Returns what the table refuses."""
    ensure_partitions(connection, datetime.now(UTC))
    kept, refusals = _insert(connection, entries)
    _mark(connection, {entry.entered_at.replace(minute=0, second=0, microsecond=0) for entry in kept})
    _compare(connection, entries)
    return [Refused(items[entry.entry_id], reason) for entry, reason in refusals]


def _insert(connection: Connection, entries: Sequence[Entry]) -> tuple[list[Entry], list[tuple[Entry, str]]]:
    """Insert entries; the table's constraints are the judge. One refused row fails its statement: halve and retry."""
    if not entries:
        return [], []
    try:
        with connection.begin_nested():
            return _insert_all(connection, entries), []
    except (IntegrityError, DataError) as e:
        if len(entries) == 1:
            return [], [(entries[0], str(e.orig).strip())]
    middle = len(entries) // 2
    kept, refused = _insert(connection, entries[:middle])
    more_kept, more_refused = _insert(connection, entries[middle:])
    return kept + more_kept, refused + more_refused


def _insert_all(connection: Connection, entries: Sequence[Entry]) -> list[Entry]:
    """One statement for all. Returns one entry for each row that is new."""
    rows = msgspec.json.encode([_row(entry) for entry in entries]).decode()
    new = set(connection.execute(_INSERT, {"rows": rows}).scalars())
    first = {entry.id: entry for entry in reversed(entries)}
    return [first[event_id] for event_id in new]


# Ordered by id, so that two consumers with the same entries wait for each other in one direction only.
_INSERT = text("""
INSERT INTO usage_events (event_id, admitted_at, entered_at, org_id, project_id, key_id, model, tier, price_id,
  input_tokens, cached_tokens, output_tokens, reasoning_tokens, outcome, attempt, worker, payload_sha256)
SELECT event_id, uuid7_time(event_id), entered_at, org_id, project_id, key_id, model, tier, nullif(price_id, 0),
  input_tokens, cached_tokens, output_tokens, reasoning_tokens, outcome, attempt, worker, decode(sha256, 'hex')
FROM ROWS FROM (jsonb_to_recordset(CAST(:rows AS jsonb)) AS (
  event_id uuid, entered_at timestamptz, org_id uuid, project_id uuid, key_id text, model text, tier text,
  price_id bigint, input_tokens bigint, cached_tokens bigint, output_tokens bigint, reasoning_tokens bigint,
  outcome text, attempt int, worker text, sha256 text)) WITH ORDINALITY AS entry
ORDER BY event_id, ordinality
ON CONFLICT DO NOTHING
RETURNING event_id::text
""")


def _row(entry: Entry) -> dict[str, Any]:
    facts, tokens = entry.facts, entry.usage
    return {
        "event_id": entry.id,
        "entered_at": entry.entered_at.isoformat(),
        "org_id": facts.org_id,
        "project_id": facts.project_id,
        "key_id": facts.key_id,
        "model": facts.model,
        "tier": facts.tier,
        "price_id": facts.price_id,
        "input_tokens": tokens.input_tokens,
        "cached_tokens": tokens.cached_tokens,
        "output_tokens": tokens.output_tokens,
        "reasoning_tokens": tokens.reasoning_tokens,
        "outcome": entry.outcome,
        "attempt": entry.attempt,
        "worker": entry.worker,
        "sha256": entry.sha256().hex(),
    }


def _mark(connection: Connection, hours: Iterable[datetime]) -> None:
    """Count a mark for each hour, in the transaction of its events: whoever sees the mark sees the events."""
    for hour in sorted(hours):
        connection.execute(_MARK, {"hour": hour})


_MARK = text("""INSERT INTO usage_hours AS h (hour, marks) VALUES (:hour, 1)
  ON CONFLICT (hour) DO UPDATE SET marks = h.marks + 1""")


def _compare(connection: Connection, entries: Sequence[Entry]) -> None:
    """Keep aside each entry that says otherwise than the row of its id."""
    query = text("SELECT event_id::text, payload_sha256 FROM usage_events WHERE event_id = ANY(CAST(:ids AS uuid[]))")
    rows = connection.execute(query, {"ids": [entry.id for entry in entries]})
    kept = {event_id: bytes(sha256) for event_id, sha256 in rows}
    for entry in entries:
        if entry.sha256() != kept.get(entry.id, entry.sha256()):
            connection.execute(_CONFLICT, _conflict(entry, kept[entry.id]))


_CONFLICT = text("""INSERT INTO usage_conflicts (event_id, kept_sha256, other_sha256, other)
  VALUES (:id, :kept, :other_sha256, CAST(:other AS jsonb)) ON CONFLICT DO NOTHING""")


def _conflict(entry: Entry, kept: bytes) -> dict[str, Any]:
    other = msgspec.json.encode(entry).decode()
    return {"id": entry.id, "kept": kept, "other_sha256": entry.sha256(), "other": other}


def _quarantine(connection: Connection, model: str, refused: Iterable[Refused]) -> None:
    query = text("""INSERT INTO usage_quarantine (model, entry_id, reason, fields)
      VALUES (:model, :entry_id, :reason, :fields) ON CONFLICT DO NOTHING""")
    for one in refused:
        item = one.item
        values = {"model": model, "entry_id": item.entry_id, "reason": one.reason, "fields": usage.field_bytes(item)}
        connection.execute(query, values)


def ensure_partitions(connection: Connection, now: datetime) -> None:
    """Make the months round `now` that are not there yet. Cheap when they are, so ask before every batch."""
    for shift in range(-MONTHS_BEFORE, MONTHS_AHEAD + 1):
        month = _month(now, shift)
        name = f"usage_events_{month:%Y%m}"
        if connection.execute(text("SELECT to_regclass(:name)"), {"name": name}).scalar_one() is None:
            _attach(connection, name, month, _month(month, 1))


def _attach(connection: Connection, name: str, start: datetime, end: datetime) -> None:
    # IF NOT EXISTS alone does not do: two that create at the same moment still collide.
    lock(connection, "usage partitions")
    connection.execute(
        text(
            f"CREATE TABLE IF NOT EXISTS {name} PARTITION OF usage_events "
            f"FOR VALUES FROM ('{start.isoformat()}') TO ('{end.isoformat()}')"
        )
    )


def _month(now: datetime, shift: int) -> datetime:
    """The first moment of the month that many months on."""
    years, month = divmod(now.astimezone(UTC).month - 1 + shift, 12)
    return datetime(now.astimezone(UTC).year + years, month + 1, 1, tzinfo=UTC)
