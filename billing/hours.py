"""Hourly totals, made again from the events whenever an hour has new ones.

| table        | writer                          | reader          | holds                                        |
|--------------|---------------------------------|-----------------|----------------------------------------------|
| usage_hours  | events.ingest adds a mark; roll | roll_dirty      | per hour: marks made, marks rolled up;       |
|              | notes those it has seen         |                 | dirty: they differ                           |
| usage_hourly | roll                            | billing/reports | per hour, key, model, tier, price: requests, |
|              |                                 |                 | the tokens that are paid for, their amount   |

An event's hour is the one in which its entry entered the log. Rolling up is idempotent: delete and insert in one
transaction, under a lock of the hour. Dies anywhere: the hour stays dirty, and the next tick rolls it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from billing import prices, rating
from billing.rating import Price
from core.postgres import Connection, Engine, lock, text, transaction
from core.values import Usage

#: Hours rolled up in one call; more wait for the next.
HOURS = 100
#: How long rolling up one hour may take, milliseconds.
ROLL_MS = 120_000


def roll_dirty(engine: Engine) -> int:
    """Roll up the hours that have new events, oldest first; returns how many. 0: all totals are as the events say."""
    with transaction(engine) as connection:
        query = text("SELECT hour FROM usage_hours WHERE marks > rolled AND state = 'open' ORDER BY hour LIMIT :hours")
        dirty = connection.execute(query, {"hours": HOURS}).scalars().all()
    for hour in dirty:
        roll(engine, hour)
    return len(dirty)


def roll(engine: Engine, hour: datetime) -> None:
    """Make an hour's totals again.

    The marks are read before the events, so every event behind a mark that was seen is counted; a mark that is made
    meanwhile leaves the hour dirty. Ingest waits for none of it.
    """
    with transaction(engine, statement_ms=ROLL_MS) as connection:
        lock(connection, f"usage hour {hour.timestamp():.0f}")
        marks = connection.execute(_MARKS, {"hour": hour}).scalar_one_or_none()
        if marks is None:
            return
        rows = _totals(connection, hour)
        connection.execute(text("DELETE FROM usage_hourly WHERE hour = :hour"), {"hour": hour})
        connection.execute(_INSERT, {"rows": msgspec.json.encode(rows).decode()})
        connection.execute(_ROLLED, {"hour": hour, "marks": marks})


_MARKS = text("SELECT marks FROM usage_hours WHERE hour = :hour AND state = 'open'")
_ROLLED = text("UPDATE usage_hours SET rolled = greatest(rolled, :marks), rolled_up_at = now() WHERE hour = :hour")


def _totals(connection: Connection, hour: datetime) -> list[dict[str, Any]]:
    """The hour's rows, rated."""
    values = {"hour": hour, "billed": [str(outcome) for outcome in rating.BILLED]}
    sums = connection.execute(_SUMS, values).mappings().all()
    book = prices.by_id(connection, {row["price_id"] for row in sums})
    return [{**row, "hour": hour.isoformat(), "amount": _amount(row, book)} for row in sums]


# Every ending counts as a request; only what is paid for counts as tokens (rating.BILLED).
_SUMS = text("""
SELECT org_id::text, project_id::text, key_id, model, tier, coalesce(price_id, 0) AS price_id, count(*) AS requests,
  coalesce(sum(input_tokens) FILTER (WHERE paid), 0)::bigint AS input_tokens,
  coalesce(sum(cached_tokens) FILTER (WHERE paid), 0)::bigint AS cached_tokens,
  coalesce(sum(output_tokens) FILTER (WHERE paid), 0)::bigint AS output_tokens,
  coalesce(sum(reasoning_tokens) FILTER (WHERE paid), 0)::bigint AS reasoning_tokens
FROM (SELECT *, outcome = ANY(:billed) AS paid FROM usage_events
  WHERE entered_at >= :hour AND entered_at < CAST(:hour AS timestamptz) + interval '1 hour') AS event
GROUP BY 1, 2, 3, 4, 5, 6
""")

_INSERT = text("""
INSERT INTO usage_hourly (hour, org_id, project_id, key_id, model, tier, price_id, requests,
  input_tokens, cached_tokens, output_tokens, reasoning_tokens, amount)
SELECT hour, org_id, project_id, key_id, model, tier, price_id, requests,
  input_tokens, cached_tokens, output_tokens, reasoning_tokens, amount
FROM jsonb_to_recordset(CAST(:rows AS jsonb)) AS total (
  hour timestamptz, org_id uuid, project_id uuid, key_id text, model text, tier text, price_id bigint,
  requests bigint, input_tokens bigint, cached_tokens bigint, output_tokens bigint, reasoning_tokens bigint,
  amount numeric)
""")


def _amount(row: Mapping[Any, Any], book: Mapping[int, Price]) -> str:
    """A total's amount; nothing when its requests were admitted without a price."""
    if row["price_id"] == 0:
        return "0"
    usage = Usage(
        input_tokens=row["input_tokens"],
        cached_tokens=row["cached_tokens"],
        output_tokens=row["output_tokens"],
    )
    return rating.plain(rating.amount(usage, book[row["price_id"]]))
