"""What the leases of money in Redis are told and asked: each ending as it is ingested, and whether the two agree.

| what      | when                | does                                                                               |
|-----------|---------------------|------------------------------------------------------------------------------------|
| charge    | after each COMMIT   | settles what its gateway may not have, and charges what no lease has               |
| forget    | after the strike-   | lets the holds go, that a repeat would have asked                                  |
|           | out                 |                                                                                    |
| reconcile | each minute         | tells balances that changed (an expiry too), closes leases that nothing needs any  |
|           |                     | more, and compares some of the others with the ledger, in turn                     |

Drift     what Redis has as spent, against what Postgres has: less by no more than what is still in the usage log, more
          by no more than that and what runs. A difference that two looks in a row find is told (a metric, an error in
          the log) and left as it is: nobody's balance is changed because two stores disagree. An operator who knows why
          drops the lease, or enters a correction.
Repeat    all of it is safe to repeat, and in two processes at once.
Dies      between COMMIT and strike-out: the entries come again with the number of the ingest that wrote them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal

import msgspec

from billing import prices, rating
from billing.credits import Spent, drop_lease, hold, spent_since, tell
from billing.events import Ingested
from core import usage
from core.limits import balances, counters
from core.limits.balances import sum_up, units_up
from core.limits.scopes import ORGANISATION, names, of_key, of_model, of_project
from core.postgres import Connection, Engine, text, transaction
from core.redis import Call, Store, command
from core.usage import BadEntry, Entry, Facts

#: Calls that are made in one round trip.
PIPE = 500
#: Leases that one run compares with the ledger; and the longest usage log, and most running requests, that it looks at.
LOOKS = 100
LOG_MAX = 2_000
RUNNING_MAX = 5_000

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """A lease that does not say what the ledger does, in units."""

    org_id: str
    scope: str
    redis: int  #: spent, as it says
    postgres: int  #: spent, as the ledger says
    units: int  #: how much more, or less, than what waits or runs explains


def charge(limits: Store, ingested: Sequence[Ingested]) -> None:
    """Settle what its gateway may not have, and then charge it where money does not have it yet. Repeat at will."""
    limits.run_all([
        counters.settle(one.facts.org_id, one.id, _named(one.facts), one.usage, billed=one.billed) for one in ingested
    ])  # fmt: skip
    limits.run_all([
        counters.late(one.facts.org_id, one.id, _paying(one.facts), one.ingest, units_up(one.cost)) for one in ingested
    ])  # fmt: skip


def forget(limits: Store, ingested: Sequence[Ingested]) -> None:
    """These will not come again."""
    limits.run_all([counters.ingested(one.facts.org_id, one.id) for one in ingested])


def _named(facts: Facts) -> tuple[str, ...]:
    return names(facts.scopes, facts.key_id)


def _paying(facts: Facts) -> tuple[str, ...]:
    """Every scope that may have a lease: those of its hold, in its order, then those that had no limit when it came."""
    named = _named(facts)
    others = (of_key(facts.key_id), of_project(facts.project_id), ORGANISATION, of_model(facts.model))
    return (*named, *(scope for scope in others if scope not in named))


# --- do both agree?


class Leases:
    """The clock's look at all leases. It remembers where it was, and what it found."""

    def __init__(self, engine: Engine, limits: Store, store: Store, models: Iterable[str]) -> None:
        """`limits`: the store of leases; `store`: the one of usage logs."""
        self.engine, self.limits, self.store, self.models = engine, limits, store, tuple(models)
        self.suspects: dict[tuple[str, str], Drift] = {}  #: found by the last look at each
        self._looked: tuple[str, str] = ("", "")  #: the last of the turn

    def reconcile(self) -> list[Drift]:
        """One run. Returns the drifts that two looks have found.

        Raises:
          DatabaseAway, RedisError: the next run finds what this one left.
        """
        with transaction(self.engine) as connection:
            organisations, paying, credited = _accounts(connection)
        open_leases = set(self._open(organisations))
        for org_id, scope in open_leases - paying:
            self._close(org_id, scope)
        for org_id in sorted(credited):
            if (org_id, ORGANISATION) in open_leases:
                tell(self.engine, self.limits, org_id)
        return self._compare(sorted(open_leases & paying))

    def _open(self, organisations: Sequence[str]) -> Iterator[tuple[str, str]]:
        for start in range(0, len(organisations), PIPE):
            some = organisations[start : start + PIPE]
            found = self.limits.run_all([balances.leases(org_id) for org_id in some])
            for org_id, scopes in zip(some, found, strict=True):
                yield from ((org_id, scope) for scope in scopes)

    def _close(self, org_id: str, scope: str) -> None:
        """Nothing limits its money any more."""
        self.suspects.pop((org_id, scope), None)
        if opened := self.limits.run(balances.opened(org_id, scope)):
            drop_lease(self.engine, self.limits, org_id, scope, opened[0])

    def _compare(self, leases: Sequence[tuple[str, str]]) -> list[Drift]:
        """Those that were suspect, and of the others the next in turn."""
        turn = [one for one in leases if one > self._looked] + [one for one in leases if one <= self._looked]
        found = []
        again = [one for one in self.suspects if one in set(leases)]
        self._looked = turn[:LOOKS][-1] if turn else self._looked
        for lease in dict.fromkeys([*again, *turn[:LOOKS]]):
            before, drift = self.suspects.pop(lease, None), self.drift(*lease)
            if drift is None:
                continue
            self.suspects[lease] = drift
            if before is not None and (before.units > 0) == (drift.units > 0):
                found.append(drift)
        return found

    def drift(self, org_id: str, scope: str) -> Drift | None:
        """Whether a lease says otherwise than the ledger; None: it does not, or there is too much going on to tell.
        Nothing of the organisation is ingested meanwhile."""
        with transaction(self.engine) as connection:
            hold(connection, org_id)
            opened, account = self.limits.run_all([balances.opened(org_id, scope), balances.account(org_id, scope)])
            if opened is None or account is None:
                return None
            running, waiting = self._running(org_id, scope), self._waiting(connection, org_id, scope)
            since = _EPOCH + timedelta(milliseconds=opened[1])
            ledger = spent_since(connection, org_id, scope, since)
        if running is None or waiting is None:
            return None
        units = _beyond(account.spent, ledger, waiting, running)
        postgres = sum_up(ledger.amount)
        return Drift(org_id=org_id, scope=scope, redis=account.spent, postgres=postgres, units=units) if units else None

    def _running(self, org_id: str, scope: str) -> int | None:
        """What requests that run have been charged, in units. None: they are too many."""
        total = 0
        for seen in range(0, RUNNING_MAX, counters.SWEEP_PAGE):
            ids = self.limits.run(counters.open_before(org_id, 2**53, skip=seen))
            charged: list[int] = self.limits.run_all([_charged(org_id, one, scope) for one in ids])
            total += sum(charged)
            if len(ids) < counters.SWEEP_PAGE:
                return total
        return None

    def _waiting(self, connection: Connection, org_id: str, scope: str) -> int | None:
        """What is in the usage log, in units. None: it is too long."""
        items = [item for model in self.models for item in self.store.run(usage.peek(model, LOG_MAX))]
        if len(items) >= LOG_MAX:
            return None
        entries = [one for one in _readable(items) if one.facts.org_id == org_id and scope in _paying(one.facts)]
        book = prices.by_id(connection, {entry.facts.price_id for entry in entries})
        costs = (
            rating.amount(rating.billed(entry.outcome, entry.usage), book[entry.facts.price_id])
            for entry in entries
            if entry.facts.price_id in book
        )
        return sum_up(sum(costs, Decimal(len(entries)) / balances.UNITS))


def _beyond(spent: int, ledger: Spent, waiting: int, running: int) -> int:
    """How much more than what explains it, or how much less (below 0)."""
    known = sum_up(ledger.amount)
    least, most = known - waiting, known + ledger.rounded + waiting + running
    return max(0, spent - most) or min(0, spent - least)


def _readable(items: Iterable[usage.Item]) -> Iterator[Entry]:
    for item in items:
        try:
            yield usage.read(item)
        except BadEntry:  # it waits for quarantine, and costs nothing
            continue


def _charged(org_id: str, request_id: str, scope: str) -> Call[int]:
    def read(raw: list[bytes | None]) -> int:
        money, named = raw
        return int(money or 0) if named and scope in named.decode().split(",") else 0

    return command("HMGET", counters.hold_key(org_id, request_id), "money", "scopes", reply=read)


def _accounts(connection: Connection) -> tuple[list[str], set[tuple[str, str]], set[str]]:
    """All organisations; the scopes that money binds; whose balances may change by themselves."""
    organisations = connection.execute(text("SELECT id::text FROM organisations ORDER BY id")).scalars().all()
    paying = connection.execute(_PAYING)
    credited = connection.execute(text("SELECT DISTINCT org_id::text FROM credit_grants")).scalars()
    return list(organisations), {(row.org_id, row.scope) for row in paying}, set(credited)


_PAYING = text("""SELECT org_id::text AS org_id, scope FROM limits
  WHERE money_per_day IS NOT NULL OR money_per_month IS NOT NULL
  UNION SELECT id::text, 'org' FROM organisations WHERE plan = 'prepaid'""")
