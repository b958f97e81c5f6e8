"""Limits as they are set: rows in Postgres, each an organisation's, of one scope.

| table  | writer                                   | reader                     | holds                             |
|--------|------------------------------------------|----------------------------|-----------------------------------|
| limits | ops (forebay limits, forebay key create) | quotas; keys, for gateways | scope -> rates, places and money; |
|        |                                          |                            | null: no limit                    |

Scopes are `org`, `key:ID`, `project:ID` and `model:NAME`, the last the organisation's at one model. The database
refuses a scope that names another tenant's key or project. What is set holds once the records are projected
(keys.project_all); what has been used is counted elsewhere (core/limits) and never forgotten by a change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal

import msgspec

from core.postgres import Connection, IntegrityError, text
from core.values import Limit

ORGANISATION = "org"
#: What may be limited, and the highest limit there is: above it say that there is none.
COUNTS: Mapping[str, int] = {
    "requests_per_minute": 10**9,
    "tokens_per_minute": 10**12,
    "input_tokens_per_minute": 10**12,
    "output_tokens_per_minute": 10**12,
    "concurrent_requests": 10**9,
    "connections": 10**9,
}
#: A budget is one integer of 1e-10 in Redis, exact up to there (a balance has no such bound, core/limits/balances.py);
#: ten digits after the point are kept.
MONEY_MAX, MONEY_PLACES = Decimal(900_000), 10
MONEY = ("money_per_day", "money_per_month")

#: A row as JSON, as `Limit` reads it; money as text, so that no float comes between.
LIMIT_JSON = """json_build_object('scope', scope, 'requests_per_minute', requests_per_minute,
  'tokens_per_minute', tokens_per_minute, 'input_tokens_per_minute', input_tokens_per_minute,
  'output_tokens_per_minute', output_tokens_per_minute, 'concurrent_requests', concurrent_requests,
  'connections', connections, 'money_per_day', trim_scale(money_per_day)::text,
  'money_per_month', trim_scale(money_per_month)::text)"""


class LimitRefused(Exception):
    """There is no such scope, or no such limit of it."""


def scope_of(connection: Connection, org_id: str, told: str) -> str:
    """The scope that people name: `org`, `key:ID`, `project:NAME` or `project:ID`, `model:NAME`.

    Raises:
      LimitRefused: it is none, or not the organisation's.
    """
    kind, _, name = told.partition(":")
    if told == ORGANISATION or (kind == "model" and name):
        return told
    if kind not in ("key", "project") or not name:
        raise LimitRefused(f"{told!r} is no scope: they are org, key:ID, project:NAME and model:NAME")
    query = {
        "key": "SELECT id FROM api_keys WHERE org_id = CAST(:org_id AS uuid) AND id = :name",
        "project": """SELECT id::text FROM projects
          WHERE org_id = CAST(:org_id AS uuid) AND (id::text = :name OR name = :name) ORDER BY name = :name""",
    }[kind]
    found = connection.execute(text(query), {"org_id": org_id, "name": name}).scalars().first()
    if found is None:
        raise LimitRefused(f"the organisation has no {kind} {name!r}")
    return f"{kind}:{found}"


def set_limits(connection: Connection, org_id: str, scope: str, changes: Mapping[str, int | Decimal | None]) -> Limit:
    """Change some of a scope's limits, None taking one away, and leave the others: all of them, as they are now.

    Raises:
      LimitRefused: a value is not valid, or the scope is not the organisation's.
    """
    for name, value in changes.items():
        _check(scope, name, value)
    if not changes:
        raise LimitRefused(f"say what to limit: {', '.join([*COUNTS, *MONEY])}")
    names = ", ".join(changes)
    query = text(f"""INSERT INTO limits (org_id, scope, {names})
      VALUES (CAST(:org_id AS uuid), :scope, {", ".join(f":{name}" for name in changes)})
      ON CONFLICT (org_id, scope) DO UPDATE
        SET {", ".join(f"{name} = excluded.{name}" for name in changes)}, changed_at = now()
      RETURNING {LIMIT_JSON}::text""")
    try:
        with connection.begin_nested():
            row = connection.execute(query, {"org_id": org_id, "scope": scope, **changes}).scalar_one()
    except IntegrityError:
        raise LimitRefused(f"{scope!r} is no scope of this organisation") from None
    return msgspec.json.decode(row, type=Limit)


def _check(scope: str, name: str, value: int | Decimal | None) -> None:
    """
    Raises:
      LimitRefused: there is no such limit of that scope, or it cannot be so much.
    """
    if name not in COUNTS and name not in MONEY:
        raise LimitRefused(f"{name!r} cannot be limited; these can: {', '.join([*COUNTS, *MONEY])}")
    if name == "connections" and scope.startswith("model:"):
        raise LimitRefused("a connection is not of one model: limit those of the key, the project or the organisation")
    if value is None:
        return
    if name in MONEY:
        _check_money(name, Decimal(value))
    elif isinstance(value, Decimal) or not 0 <= value <= COUNTS[name]:
        raise LimitRefused(f"{name} is a whole number from 0 to {COUNTS[name]}, and this is {value}")


def _check_money(name: str, value: Decimal) -> None:
    """
    Raises:
      LimitRefused: it is not an amount that can be kept to exactly.
    """
    if not value.is_finite() or not 0 <= value <= MONEY_MAX:
        raise LimitRefused(
            f"{name} is from 0 to {MONEY_MAX:,}, whatever the organisation's currency, and this is {value}; who may "
            "spend more is bound by a prepaid balance (`forebay org plan`), which may be as large as it likes"
        )
    if value != round(value, MONEY_PLACES):
        raise LimitRefused(f"{name} has at most {MONEY_PLACES} digits after the point, and this is {value}")


def limits(connection: Connection, org_id: str) -> list[Limit]:
    """All of an organisation's, by scope."""
    query = text(f"SELECT {LIMIT_JSON}::text FROM limits WHERE org_id = CAST(:org_id AS uuid) ORDER BY scope")
    return [msgspec.json.decode(row, type=Limit) for row in connection.execute(query, {"org_id": org_id}).scalars()]


def clear(connection: Connection, org_id: str, scope: str) -> bool:
    """Take all limits of a scope away. False: it had none."""
    query = text("DELETE FROM limits WHERE org_id = CAST(:org_id AS uuid) AND scope = :scope")
    return connection.execute(query, {"org_id": org_id, "scope": scope}).rowcount > 0


def shown(limit: Limit, names: Iterable[str] = (*COUNTS, *MONEY)) -> dict[str, str | int | None]:
    """A limit as people see it: money as text, so that no reader makes a float of it."""
    values = {name: getattr(limit, name) for name in names}
    return {name: f"{value:f}" if isinstance(value, Decimal) else value for name, value in values.items()}
