"""Usage and its cost, as people and programs are shown it: read from usage_hourly, never from the events."""

from __future__ import annotations

from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any

import msgspec

from billing.rating import plain
from core.postgres import Connection, text


class By(StrEnum):
    """What a report has one row for."""

    HOUR = "hour"
    DAY = "day"
    MODEL = "model"
    KEY = "key"
    ORG = "org"


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What one hour, day, model, key or organisation used. Days are UTC."""

    group: str
    currency: str
    requests: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    amount: Decimal

    def shown(self, by: By) -> dict[str, Any]:
        """For JSON: money as a string, so that no reader makes a float of it."""
        fields = msgspec.structs.asdict(self)
        return {str(by): fields.pop("group"), **fields, "amount": plain(self.amount)}


_GROUPS = {
    By.HOUR: """to_char(h.hour AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24"\\:00Z"')""",
    By.DAY: "to_char(h.hour AT TIME ZONE 'UTC', 'YYYY-MM-DD')",
    By.MODEL: "h.model",
    By.KEY: "h.key_id",
    By.ORG: "h.org_id::text",
}


def usage(
    connection: Connection,
    *,
    by: By,
    org_id: str | None = None,
    since: datetime | None = None,
    until: datetime | None = None,
) -> list[Row]:
    """Totals of the hours in [since, until), in the order of their names. Currencies are never added up."""
    query = text(_QUERY.format(group=_GROUPS[by]))
    rows = connection.execute(query, {"org_id": org_id, "since": since, "until": until}).mappings()
    return [Row(**row) for row in rows]


_QUERY = """
SELECT {group} AS group, coalesce(p.currency, o.currency, 'USD') AS currency,
  sum(h.requests)::bigint AS requests, sum(h.input_tokens)::bigint AS input_tokens,
  sum(h.cached_tokens)::bigint AS cached_tokens, sum(h.output_tokens)::bigint AS output_tokens,
  sum(h.reasoning_tokens)::bigint AS reasoning_tokens, sum(h.amount) AS amount
FROM usage_hourly AS h LEFT JOIN prices AS p ON p.id = h.price_id LEFT JOIN organisations AS o ON o.id = h.org_id
WHERE (CAST(:org_id AS uuid) IS NULL OR h.org_id = CAST(:org_id AS uuid))
  AND (CAST(:since AS timestamptz) IS NULL OR h.hour >= :since)
  AND (CAST(:until AS timestamptz) IS NULL OR h.hour < :until)
GROUP BY 1, 2 ORDER BY 1, 2
"""
