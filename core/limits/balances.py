"""Money, where admission can ask for it: a lease of what Postgres knows, per scope that money binds.

| key                      | type | ttl  | writer                                   | reader   | holds                |
|--------------------------|------|------|------------------------------------------|----------|----------------------|
| {org:<id>}:money:<scope> | HASH | none | open_lease, grant (billing/credits.py),  | the same | lease, granted,      |
|                          |      |      | with figures from Postgres; reserve,     | scripts, | grants, spent, held, |
|                          |      |      | progress, settle, late (counters.py)     | account  | granted_whole,       |
|                          |      |      |                                          |          | spent_whole, day,    |
|                          |      |      |                                          |          | day_spent, month,    |
|                          |      |      |                                          |          | month_spent, since   |
| {org:<id>}:leases        | HASH | none | open_lease, drop, late                   | leases   | scope -> its lease;  |
|                          |      |      |                                          |          | ingested: the last   |
|                          |      |      |                                          |          | that `late` told of  |

Postgres is the truth. `lease` is the number of the last ingest (money_marks) whose usage is in the figures that it was
opened with; what is ingested later was charged here as it was generated, or is brought by `late` when it is ingested.
`grants` numbers the grants and entries that `granted` sums up; an older sum never replaces a newer one.
`spent` is all that was paid since `since`: of an organisation all that its balance paid; day and month are UTC's, and
start at nothing by themselves. Two leases of a scope never have one number (billing/credits.py).

Units     integers of 1e-10 of the organisation's currency, each request rounded up once; what Postgres bills is exact.
          Integers are exact in Lua up to UNITS_MAX, so what was ever granted and spent is kept in two: whole ones of
          the currency, and units beside them. A lease may be as old, and its sums as large, as they will.
Bounds    of a balance no more than 900,000 of the currency (lua/money.lua) is held at one moment, for all that runs
          together; what is beyond it is held once that is spent or given back. A day or a month that has cost UNITS_MAX
          counts as that until it ends: no budget is as large (core/accounts/quotas.py). One request costs UNITS_MAX at
          most, as Redis sees it.
Promise   spent + held <= granted, and the same of a day's and a month's budget, however many gateways and workers: a
          request may generate no more than what is held for it covers, to the token.
Dies      Redis, or FLUSHALL: no lease, so nothing that money binds is admitted until one is opened from Postgres; with
          Postgres away too, 503. A worker that cannot report goes no further than its allowance.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from pathlib import Path
from typing import Any

from core.redis import Call, command, scripts, tag

#: What one unit of currency is, here.
UNITS = 10**10
#: Nine hundred thousand of the currency, about.
UNITS_MAX = 2**53 - 1

_SCRIPTS = scripts(
    Path(__file__).with_name("lua"), shared=("window", "money"), verbs=("open_lease", "drop_lease", "grant", "account")
)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What Postgres knows of a scope's money, at one moment, in units. `granted` and `spent` have no bound."""

    lease: int  #: number of the last ingest that is in them
    granted: int = 0  #: all grants and entries, those that have expired taken off
    grants: int = 0  #: their number: grows with each
    spent: int = 0  #: all that was paid since `since`
    since: int = 0  #: ms since the epoch
    day: int = 0  #: which day it is, counted from the epoch
    day_spent: int = 0
    month: int = 0  #: year * 12 + month - 1
    month_spent: int = 0


@dataclass(frozen=True, kw_only=True)
class Account:
    """A scope's money as Redis has it, in units."""

    granted: int
    spent: int
    held: int
    day_spent: int
    month_spent: int


def units_up(money: Decimal) -> int:
    """What is spent, in units: rounded up."""
    return min(sum_up(money), UNITS_MAX)


def units_down(money: Decimal) -> int:
    """What there is to spend, in units: rounded down."""
    return max(min(sum_down(money), UNITS_MAX), -UNITS_MAX)


def sum_up(money: Decimal) -> int:
    """All that was ever spent, or a price: as `units_up`, without a bound."""
    return int((money * UNITS).to_integral_value(ROUND_CEILING))


def sum_down(money: Decimal) -> int:
    """All that was ever granted: as `units_down`, without a bound."""
    return int((money * UNITS).to_integral_value(ROUND_FLOOR))


def money(units: int) -> Decimal:
    return Decimal(units) / UNITS


def open_lease(org_id: str, scope: str, figures: Figures) -> Call[bool]:
    """Let a scope's money be spent from these figures on. False: it could be already, or they are no longer true."""
    f = figures
    (granted_whole, granted), (spent_whole, spent) = divmod(f.granted, UNITS), divmod(f.spent, UNITS)
    periods = (f.day, f.day_spent, f.month, f.month_spent, f.since)
    args = (scope, f.lease, granted, f.grants, spent, *periods, granted_whole, spent_whole)
    keys = (key(org_id, scope), leases_key(org_id))
    return Call(script=_SCRIPTS["open_lease"], keys=keys, args=args, reply=bool)


def drop_lease(org_id: str, scope: str, lease: int, *, held: bool = False) -> Call[bool]:
    """Close the lease of that number; `held`: even where running requests hold money of it. False: it stays."""
    keys = (key(org_id, scope), leases_key(org_id))
    return Call(script=_SCRIPTS["drop_lease"], keys=keys, args=(scope, lease, int(held)), reply=bool)


def leases(org_id: str) -> Call[list[str]]:
    """The scopes that have a lease."""
    return command("HKEYS", leases_key(org_id), reply=lambda raw: sorted(f.decode() for f in raw if f != b"ingested"))


def ingested(org_id: str) -> Call[int]:
    """The last ingest of an organisation that `late` was told of."""
    return command("HGET", leases_key(org_id), "ingested", reply=lambda raw: int(raw or 0))


def opened(org_id: str, scope: str) -> Call[tuple[int, int] | None]:
    """A lease's number, and since when its `spent` counts, ms; None: there is none."""
    return command("HMGET", key(org_id, scope), "lease", "since", reply=_opened)


def grant(org_id: str, granted: int, grants: int) -> Call[bool]:
    """An organisation's grants and entries come to so much now. False: no lease, or it knows of a newer sum."""
    whole, units = divmod(granted, UNITS)
    return Call(script=_SCRIPTS["grant"], keys=(key(org_id, "org"),), args=(units, grants, whole), reply=bool)


def account(org_id: str, scope: str) -> Call[Account | None]:
    """What Redis has of a scope's money; None: no lease. Changes nothing."""
    return Call(script=_SCRIPTS["account"], keys=(key(org_id, scope),), reply=_account)


def key(org_id: str, scope: str) -> str:
    return f"{tag('org:' + org_id)}money:{scope}"


def leases_key(org_id: str) -> str:
    return f"{tag('org:' + org_id)}leases"


def _opened(raw: list[bytes | None]) -> tuple[int, int] | None:
    lease, since = raw
    return None if lease is None else (int(lease), int(since or 0))


def _account(raw: list[Any]) -> Account | None:
    if not raw:
        return None
    granted_whole, granted, spent_whole, spent, held, day_spent, month_spent = (int(one) for one in raw)
    return Account(
        granted=granted_whole * UNITS + granted,
        spent=spent_whole * UNITS + spent,
        held=held,
        day_spent=day_spent,
        month_spent=month_spent,
    )
