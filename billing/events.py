"""From the usage log to Postgres: each ending is one row, in effect exactly once.

| table            | writer                    | reader        | holds                                       |
|------------------|---------------------------|---------------|---------------------------------------------|
| usage_events     | ingest; append-only       | billing/hours | one row per request, by month of its id     |
| usage_hours      | ingest marks, hours rolls | billing/hours | per hour: marks made, marks rolled up       |
| usage_conflicts  | ingest                    | people        | endings that say otherwise than their row   |
| usage_quarantine | ingest                    | people        | entries that nobody can read, or that       |
|                  |                           |               | usage_events refuses: as they came, and why |
| money_marks      | ingest (billing/credits)  | credits       | per organisation: how many ingests; a row   |
|                  |                           |               | keeps the number of its own (`ingest`)      |

A step: take entries, write them in one transaction, COMMIT, settle, and only then strike them out of the log. A death
anywhere in between means that the entries come again; their ids are known, so they change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import msgspec

from billing import prices, rating
from billing.credits import count_up
from billing.rating import Price
from core import usage
from core.postgres import Connection, DataError, Engine, IntegrityError, lock, text, transaction
from core.redis import Store
from core.usage import BadEntry, Entry, Facts, Item
from core.values import Usage

#: How many months of partitions there are before this one and after it. Entries of other months are quarantined.
MONTHS_BEFORE = 1
MONTHS_AHEAD = 2


class Ingested(msgspec.Struct, frozen=True, kw_only=True):
    """What a request came to, as Postgres has it: of several entries with its id, what the first one said."""

    id: str
    facts: Facts
    usage: Usage
    billed: bool  #: it is paid for
    cost: Decimal  #: what it costs, exactly
    ingest: int  #: which of its organisation's ingests wrote its row; 0: it has none, for it is in quarantine
    new: bool  #: this one did


#: Tells the limiter about endings; it must be safe to repeat.
Tell = Callable[[Sequence[Ingested]], None]


@dataclass(frozen=True)
class Refused:
    """An entry that usage_events cannot take, and why."""

    item: Item
    reason: str


def ingest(
    store: Store,
    engine: Engine,
    models: Iterable[str],
    consumer: str,
    *,
    settle: Tell | None = None,
    done: Tell | None = None,
) -> int:
    """Take up to usage.COUNT entries of each model to Postgres; returns how many. 0: there is nothing more to do.

    `settle` gets every request with a readable entry, new or repeated, after the COMMIT and before its entries are
    struck out: if it raises, they come again. `done` gets the same when they are struck out, and will not.

    Raises:
      DatabaseAway, RedisError: nothing is lost; call again.
    """
    return sum(_ingest_model(store, engine, model, consumer, settle, done) for model in models)


def _ingest_model(
    store: Store, engine: Engine, model: str, consumer: str, settle: Tell | None, done: Tell | None
) -> int:
    items = _take(store, model, consumer)
    if not items:
        return 0
    entries, refused = _read(items)
    with transaction(engine) as connection:
        ingested, more = _keep(connection, entries, {item.entry_id: item for item in items})
        _quarantine(connection, model, refused + more)
    if settle is not None and ingested:
        settle(ingested)
    store.run(usage.strike_out(model, [item.entry_id for item in items]))
    if done is not None and ingested:
        done(ingested)
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


def _keep(
    connection: Connection, entries: Sequence[Entry], items: dict[str, Item]
) -> tuple[list[Ingested], list[Refused]]:
    """Write what is new, mark its hours dirty, put conflicts aside. Returns what there is now of each request, and what
    the table refuses."""
    numbers = count_up(connection, filter(None, map(_organisation, entries)))
    ensure_partitions(connection, datetime.now(UTC))
    kept, refusals = _insert(connection, entries, numbers)
    _mark(connection, {entry.entered_at.replace(minute=0, second=0, microsecond=0) for entry in kept})
    rows = _rows(connection, entries)
    _compare(connection, entries, rows)
    return (
        _ingested(connection, entries, rows, {entry.id for entry in kept}),
        [Refused(items[entry.entry_id], reason) for entry, reason in refusals],
    )


def _organisation(entry: Entry) -> str | None:
    """Whose it is, as Postgres spells it; None: nobody's, which its table will refuse."""
    try:
        return str(UUID(entry.facts.org_id))
    except ValueError:
        return None


def _insert(
    connection: Connection, entries: Sequence[Entry], numbers: dict[str, int]
) -> tuple[list[Entry], list[tuple[Entry, str]]]:
    """Insert entries; the table's constraints are the judge. One refused row fails its statement: halve and retry."""
    if not entries:
        return [], []
    try:
        with connection.begin_nested():
            return _insert_all(connection, entries, numbers), []
    except (IntegrityError, DataError) as e:
        if len(entries) == 1:
            return [], [(entries[0], str(e.orig).strip())]
    middle = len(entries) // 2
    kept, refused = _insert(connection, entries[:middle], numbers)
    more_kept, more_refused = _insert(connection, entries[middle:], numbers)
    return kept + more_kept, refused + more_refused


def _insert_all(connection: Connection, entries: Sequence[Entry], numbers: dict[str, int]) -> list[Entry]:
    """One statement for all. Returns one entry for each row that is new."""
    rows = msgspec.json.encode([_row(entry, numbers) for entry in entries]).decode()
    new = set(connection.execute(_INSERT, {"rows": rows}).scalars())
    first = {entry.id: entry for entry in reversed(entries)}
    return [first[event_id] for event_id in new]


# Ordered by id, so that two consumers with the same entries wait for each other in one direction only.
_INSERT = text("""
INSERT INTO usage_events (event_id, admitted_at, entered_at, org_id, project_id, key_id, model, tier, price_id,
  input_tokens, cached_tokens, output_tokens, reasoning_tokens, outcome, attempt, worker, payload_sha256, ingest)
SELECT event_id, uuid7_time(event_id), entered_at, org_id, project_id, key_id, model, tier, nullif(price_id, 0),
  input_tokens, cached_tokens, output_tokens, reasoning_tokens, outcome, attempt, worker, decode(sha256, 'hex'), ingest
FROM ROWS FROM (jsonb_to_recordset(CAST(:rows AS jsonb)) AS (
  event_id uuid, entered_at timestamptz, org_id uuid, project_id uuid, key_id text, model text, tier text,
  price_id bigint, input_tokens bigint, cached_tokens bigint, output_tokens bigint, reasoning_tokens bigint,
  outcome text, attempt int, worker text, sha256 text, ingest bigint)) WITH ORDINALITY AS entry
ORDER BY event_id, ordinality
ON CONFLICT DO NOTHING
RETURNING event_id::text
""")


def _row(entry: Entry, numbers: dict[str, int]) -> dict[str, Any]:
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
        "ingest": numbers.get(_organisation(entry) or ""),
    }


def _mark(connection: Connection, hours: Iterable[datetime]) -> None:
    """Count a mark for each hour, in the transaction of its events: whoever sees the mark sees the events."""
    for hour in sorted(hours):
        connection.execute(_MARK, {"hour": hour})


_MARK = text("""INSERT INTO usage_hours AS h (hour, marks) VALUES (:hour, 1)
  ON CONFLICT (hour) DO UPDATE SET marks = h.marks + 1""")


def _rows(connection: Connection, entries: Sequence[Entry]) -> dict[str, Any]:
    """The row of each entry's id, where there is one."""
    rows = connection.execute(_ROWS, {"ids": [entry.id for entry in entries]})
    return {row.event_id: row for row in rows}


_ROWS = text("""SELECT event_id::text AS event_id, payload_sha256, outcome, price_id, coalesce(ingest, 0) AS ingest,
    input_tokens, cached_tokens, output_tokens, reasoning_tokens
  FROM usage_events WHERE event_id = ANY(CAST(:ids AS uuid[]))""")


def _compare(connection: Connection, entries: Sequence[Entry], rows: dict[str, Any]) -> None:
    """Keep aside each entry that says otherwise than the row of its id."""
    for entry in entries:
        if entry.id in rows and entry.sha256() != (kept := bytes(rows[entry.id].payload_sha256)):
            connection.execute(_CONFLICT, _conflict(entry, kept))


def _ingested(connection: Connection, entries: Sequence[Entry], rows: dict[str, Any], new: set[str]) -> list[Ingested]:
    """One for each request."""
    book = prices.by_id(connection, {row.price_id for row in rows.values() if row.price_id is not None})
    first = {entry.id: entry for entry in reversed(entries)}
    return [_found(entry, rows.get(entry.id), book, new=entry.id in new) for entry in first.values()]


def _found(entry: Entry, row: Any, book: dict[int, Price], *, new: bool) -> Ingested:
    """What a request came to: what its row says. What has none is paid for by nobody."""
    if row is None:
        return Ingested(
            id=entry.id, facts=entry.facts, usage=entry.usage, billed=False, cost=Decimal(0), ingest=0, new=False
        )
    usage, billed = _usage(row), row.outcome in rating.BILLED
    cost = rating.amount(usage, book[row.price_id]) if billed and row.price_id is not None else Decimal(0)
    return Ingested(id=entry.id, facts=entry.facts, usage=usage, billed=billed, cost=cost, ingest=row.ingest, new=new)


def _usage(row: Any) -> Usage:
    return Usage(
        input_tokens=row.input_tokens,
        cached_tokens=row.cached_tokens,
        output_tokens=row.output_tokens,
        reasoning_tokens=row.reasoning_tokens,
    )


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
