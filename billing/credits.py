"""Prepaid balances, and the leases of money that Redis spends from: what Postgres knows, and when it says so.

| table          | writer                         | reader        | holds                                              |
|----------------|--------------------------------|---------------|----------------------------------------------------|
| credit_grants  | grant (forebay credit grant);  | credits       | money to be spent: amount, when it expires, why    |
|                | append-only                    |               |                                                    |
| credit_entries | enter (forebay credit entry);  | credits       | corrections, signed                                |
|                | append-only                    |               |                                                    |
| money_marks    | count_up: events.ingest, and   | credits       | per organisation, how often its usage was          |
|                | whoever drops a lease          |               | ingested; its row's lock puts that in order        |

Balance   granted - spent. It pays for usage that enters the log from the first grant or entry on. What is spent is
          taken from the grant that expires first, of those that are there at that time; those that never expire, and
          entries above 0, come last. An entry below 0 is spent like usage. What no grant was there to pay for, the next
          one pays. A grant loses at `expires_at` what was not spent of it: usage that entered the log earlier, though
          it is ingested later, is still paid from it. Nothing is converted: prices are in the organisation's currency.
Lease     the figures of a scope, read under the lock of the organisation's mark, and put into Redis before it is let
          go: each request is in the figures, or its ingest has a higher number (core/limits/lua/late.lua). A number is
          not given to two leases: a lease is dropped only after the mark was counted up, and committed.
Periods   days and months are UTC's. Postgres counts a request when its ending enters the log, Redis its tokens as they
          are generated. What runs over midnight is split there between two days, and here it is the second one's: a
          lease that is opened later in that day may count up to one such split more, and never lets more be spent.
Dies      Postgres: no lease is opened; those that there are go on. Whoever opens one: nothing is written but Redis's
          key. Its lock: `open_lease` refuses figures that are older than what was charged; they are read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, Literal

import msgspec
import uuid6

from billing import prices, rating
from billing.rating import Price
from core.limits import balances
from core.limits.balances import Figures, sum_down, sum_up, units_up
from core.limits.scopes import ORGANISATION
from core.postgres import Connection, DatabaseAway, Engine, IntegrityError, text, transaction
from core.redis import NOW_MS, Store
from core.values import Usage

#: The largest grant or entry, and the digits after the point that are kept. A balance may come to any sum of them.
AMOUNT_MAX, AMOUNT_PLACES = Decimal(1_000_000_000), 10
#: How often figures are read for one lease, if usage is charged in between without our lock.
TRIES = 3

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_HOUR = timedelta(hours=1)


class CreditRefused(Exception):
    """An amount, an expiry or an organisation is not valid."""


class Credit(msgspec.Struct, frozen=True, kw_only=True):
    """A grant or an entry."""

    id: str
    kind: Literal["grant", "entry"]
    amount: Decimal
    reason: str
    expires_at: datetime | None
    created_at: datetime

    def shown(self) -> dict[str, Any]:
        """For JSON: money as a string, so that no reader makes a float of it."""
        return {**msgspec.structs.asdict(self), "amount": rating.plain(self.amount)}


class Balance(msgspec.Struct, frozen=True, kw_only=True):
    """What an organisation has, exactly."""

    granted: Decimal  #: all grants and entries, without what expired
    expired: Decimal
    spent: Decimal
    left: Decimal
    currency: str

    def shown(self) -> dict[str, str]:
        """For JSON."""
        money = {name: rating.plain(getattr(self, name)) for name in ("granted", "expired", "spent", "left")}
        return {**money, "currency": self.currency}


# --- grants and entries


def grant(
    connection: Connection, org_id: str, amount: Decimal, *, reason: str, expires_at: datetime | None = None
) -> Credit:
    """Give an organisation money to spend, in its own currency. `tell` lets Redis know.

    Raises:
      CreditRefused: the amount is not above 0, or the expiry is past.
    """
    _check(amount)
    if amount <= 0:
        raise CreditRefused(f"a grant is above 0, and this is {amount}; `forebay credit entry` takes away")
    query = text("""INSERT INTO credit_grants (id, org_id, amount, currency, reason, expires_at)
      SELECT :id, id, :amount, currency, :reason, :expires_at FROM organisations WHERE id = CAST(:org_id AS uuid)
        AND (CAST(:expires_at AS timestamptz) IS NULL OR CAST(:expires_at AS timestamptz) > now())
      RETURNING id::text AS id, 'grant' AS kind, amount, reason, expires_at, created_at""")
    values = {"org_id": org_id, "amount": amount, "reason": reason, "expires_at": expires_at}
    return _insert(connection, query, values)


def enter(connection: Connection, org_id: str, amount: Decimal, *, reason: str) -> Credit:
    """Correct an organisation's balance, by more or by less. `tell` lets Redis know.

    Raises:
      CreditRefused: the amount is 0, or not valid.
    """
    _check(amount)
    if amount == 0:
        raise CreditRefused("an entry of 0 corrects nothing")
    query = text("""INSERT INTO credit_entries (id, org_id, amount, reason)
      SELECT :id, id, :amount, :reason FROM organisations WHERE id = CAST(:org_id AS uuid)
      RETURNING id::text AS id, 'entry' AS kind, amount, reason, NULL AS expires_at, created_at""")
    return _insert(connection, query, {"org_id": org_id, "amount": amount, "reason": reason})


def _check(amount: Decimal) -> None:
    if not amount.is_finite() or abs(amount) > AMOUNT_MAX:
        raise CreditRefused(f"an amount is at most {AMOUNT_MAX}, and this is {amount}")
    if amount != round(amount, AMOUNT_PLACES):
        raise CreditRefused(f"an amount has at most {AMOUNT_PLACES} digits after the point, and this is {amount}")


def _insert(connection: Connection, query: Any, values: dict[str, Any]) -> Credit:
    """Under the organisation's mark, so that credits are numbered in the order in which they are committed."""
    try:
        with connection.begin_nested():
            hold(connection, values["org_id"])
            row = connection.execute(query, {"id": str(uuid6.uuid7()), **values}).mappings().one_or_none()
    except IntegrityError as e:
        raise CreditRefused(str(e.orig).partition("\n")[0]) from e
    if row is None:
        raise CreditRefused("there is no such organisation, or that is past")
    return Credit(**row)


def listed(connection: Connection, org_id: str) -> list[Credit]:
    """All grants and entries of an organisation, oldest first."""
    rows = connection.execute(_CREDITS, {"org_id": org_id}).mappings()
    return [Credit(**row) for row in rows]


_CREDITS = text("""SELECT id::text AS id, 'grant' AS kind, amount, reason, expires_at, created_at
  FROM credit_grants WHERE org_id = CAST(:org_id AS uuid)
  UNION ALL SELECT id::text, 'entry', amount, reason, NULL, created_at
  FROM credit_entries WHERE org_id = CAST(:org_id AS uuid) ORDER BY created_at, id""")


def balance(connection: Connection, org_id: str, now: datetime) -> Balance:
    """What an organisation has now, as far as its usage is ingested."""
    found = listed(connection, org_id)
    spends = _spends(connection, org_id, ORGANISATION, _breaks(found)) if found else {}
    lost = expired(found, spends, now)
    granted = sum((credit.amount for credit in found), Decimal(0)) - lost
    spent = sum(spends.values(), Decimal(0))
    query = text("SELECT currency FROM organisations WHERE id = CAST(:org_id AS uuid)")
    currency = connection.execute(query, {"org_id": org_id}).scalar_one()
    return Balance(granted=granted, expired=lost, spent=spent, left=granted - spent, currency=currency)


def expired(found: Sequence[Credit], spends: Mapping[datetime, Decimal], now: datetime) -> Decimal:
    """What grants have lost by `now`. `spends`: what was spent from each moment to the next; all of `_breaks` are keys.

    The story is told again from the beginning: at each moment what expires goes, then what is granted comes, then what
    is spent until the next one is taken from what expires first.
    """
    if not any(credit.expires_at and credit.expires_at <= now for credit in found):
        return Decimal(0)
    live: list[list[Any]] = []  # [expires at, order, what is left of it]
    lost = owed = Decimal(0)
    far = datetime.max.replace(tzinfo=UTC)
    for moment in sorted({*spends, *_breaks(found)}):
        if moment > now:
            break
        lost += sum((left for expires_at, _, left in live if expires_at <= moment), Decimal(0))
        live = [one for one in live if one[0] > moment]
        for order, credit in enumerate(found):
            if credit.created_at == moment and credit.amount > 0:
                live.append([credit.expires_at or far, order, credit.amount])
            elif credit.created_at == moment:
                owed -= credit.amount
        owed = _take(live, owed + spends.get(moment, Decimal(0)))
    return lost


def _take(live: list[list[Any]], amount: Decimal) -> Decimal:
    """Spend an amount of what is there, what expires first, first. Returns what it does not cover."""
    for one in sorted(live, key=lambda one: (one[0], one[1])):
        taken = min(amount, one[2])
        one[2], amount = one[2] - taken, amount - taken
    return amount


def _breaks(found: Iterable[Credit]) -> list[datetime]:
    """The moments at which a balance changes otherwise than by spending."""
    return sorted({moment for credit in found for moment in (credit.created_at, credit.expires_at) if moment})


# --- marks


def count_up(connection: Connection, org_ids: Iterable[str]) -> dict[str, int]:
    """Number an ingest of each organisation, first thing in its transaction; whoever is next waits until it has ended.
    In one order, so that two that have organisations in common wait in one direction only."""
    rows = connection.execute(_COUNT_UP, {"org_ids": sorted(set(org_ids))})
    return {row.org_id: row.ingested for row in rows}


_COUNT_UP = text("""INSERT INTO money_marks AS mark (org_id, ingested)
  SELECT org_id, 1 FROM unnest(CAST(:org_ids AS uuid[])) AS org_id ORDER BY org_id
  ON CONFLICT (org_id) DO UPDATE SET ingested = mark.ingested + 1 RETURNING org_id::text AS org_id, ingested""")


def hold(connection: Connection, org_id: str, *, least: int = 0) -> int:
    """The number of an organisation's last ingest. No other commits before this transaction has ended. `least`: what it
    is raised to, where Postgres knows of fewer than Redis."""
    query = text("""INSERT INTO money_marks AS mark (org_id, ingested) VALUES (CAST(:org_id AS uuid), :least)
      ON CONFLICT (org_id) DO UPDATE SET ingested = greatest(mark.ingested, :least) RETURNING ingested""")
    return int(connection.execute(query, {"org_id": org_id, "least": least}).scalar_one())


# --- figures


def figures(connection: Connection, org_id: str, scope: str, now: datetime) -> Figures:
    """What Postgres knows of a scope's money. Holds the organisation's mark to the end of the transaction."""
    mark = hold(connection, org_id)
    found = listed(connection, org_id) if scope == ORGANISATION else []
    day = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    month = day.replace(day=1)
    since = found[0].created_at if found else month
    spends = _spends(connection, org_id, scope, [since, day, month, *_breaks(found)])
    lost = expired(found, {moment: spent for moment, spent in spends.items() if moment >= since}, now)
    return Figures(
        lease=mark,
        granted=sum_down(sum((credit.amount for credit in found), Decimal(0)) - lost),
        grants=_number(found, now),
        spent=sum_up(_from(spends, since)),
        since=_ms(since),
        day=(day - _EPOCH).days,
        day_spent=units_up(_from(spends, day)),
        month=month.year * 12 + month.month - 1,
        month_spent=units_up(_from(spends, month)),
    )


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """What a scope's usage came to."""

    amount: Decimal
    rounded: int  #: requests whose tokens do not cost whole units: each is rounded up in Redis, and here none is


def spent_since(connection: Connection, org_id: str, scope: str, since: datetime) -> Spent:
    """What a scope has cost since then, exactly, as far as it is ingested."""
    rows, book = _sums(connection, org_id, scope, [since])
    rounded = sum(row["requests"] for row in rows if row["price_id"] in book and not _whole(book[row["price_id"]]))
    amount = sum((_amount(row, book) for row in rows), Decimal(0))
    return Spent(amount=amount, rounded=rounded)


def _whole(price: Price) -> bool:
    """A token of each kind costs a whole number of units."""
    per_mtok = (price.input_per_mtok, price.cached_input_per_mtok, price.output_per_mtok)
    return all(one * balances.UNITS % 10**6 == 0 for one in per_mtok)


def _from(spends: Mapping[datetime, Decimal], since: datetime) -> Decimal:
    """What was spent since then, exactly: to be rounded up once."""
    return sum((spent for moment, spent in spends.items() if moment >= since), Decimal(0))


def _number(found: Sequence[Credit], now: datetime) -> int:
    """Grows whenever `granted` changes by a credit that comes, or goes."""
    return len(found) + sum(1 for credit in found if credit.expires_at and credit.expires_at <= now)


def _ms(moment: datetime) -> int:
    """The first one that is not before it: entries enter on whole ones."""
    return -((_EPOCH - moment) // timedelta(milliseconds=1))


def _spends(connection: Connection, org_id: str, scope: str, moments: Iterable[datetime]) -> dict[datetime, Decimal]:
    """What a scope's usage cost from each of these moments to the next, by when it entered the log; exactly."""
    bounds = sorted(set(moments))
    rows, book = _sums(connection, org_id, scope, bounds)
    spends = dict.fromkeys(bounds, Decimal(0))
    for row in rows:
        spends[bounds[row["bucket"] - 1]] += _amount(row, book)
    return spends


def _sums(
    connection: Connection, org_id: str, scope: str, bounds: Sequence[datetime]
) -> tuple[Sequence[Mapping[Any, Any]], dict[int, Price]]:
    """Tokens that are paid for, by price and by which of these moments is the last before them; and the prices.

    An hour that is rolled up is one row per price; others are summed up from their events, and so are those that a
    moment divides. All in one statement: it sees hours, their totals and events as they are at one time.
    """
    values = {
        "org_id": org_id,
        "bounds": bounds,
        "split": [hour for hour in {_hour(bound) for bound in bounds} if hour not in bounds],
        "first": bounds[0],
        "first_hour": _hour(bounds[0]),
        "billed": [str(outcome) for outcome in rating.BILLED],
        "name": scope.partition(":")[2],
    }
    rows = connection.execute(_SUMS[scope.partition(":")[0]], values).mappings().all()
    return rows, prices.by_id(connection, {row["price_id"] for row in rows})


def _amount(row: Mapping[Any, Any], book: Mapping[int, Price]) -> Decimal:
    """What tokens cost; nothing, where they had no price."""
    if row["price_id"] not in book:
        return Decimal(0)
    usage = Usage(
        input_tokens=row["input_tokens"], cached_tokens=row["cached_tokens"], output_tokens=row["output_tokens"]
    )
    return rating.amount(usage, book[row["price_id"]])


def _hour(moment: datetime) -> datetime:
    return moment.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


#: Which of an organisation's usage is a scope's.
_FILTERS = {
    "org": "",
    "project": "AND project_id = CAST(:name AS uuid)",
    "key": "AND key_id = :name",
    "model": "AND model = :name",
}
_TOTALS = """
WITH dirty AS MATERIALIZED (
  SELECT hour, hour = ANY(:split) AS split, width_bucket(hour, :bounds) AS bucket
  FROM usage_hours WHERE hour >= :first_hour AND (marks > rolled OR hour = ANY(:split))
), part AS (
  SELECT price_id, width_bucket(hour, :bounds) AS bucket, sum(input_tokens) AS input_tokens,
    sum(cached_tokens) AS cached_tokens, sum(output_tokens) AS output_tokens, sum(requests) AS requests
  FROM usage_hourly WHERE org_id = CAST(:org_id AS uuid) AND hour >= :first_hour {which}
    AND NOT EXISTS (SELECT FROM dirty WHERE dirty.hour = usage_hourly.hour)
  GROUP BY 1, 2
  UNION ALL
  SELECT event.price_id, event.bucket, sum(input_tokens), sum(cached_tokens), sum(output_tokens), count(*)
  FROM dirty CROSS JOIN LATERAL (
    SELECT price_id, CASE WHEN split THEN width_bucket(entered_at, :bounds) ELSE dirty.bucket END AS bucket,
      input_tokens, cached_tokens, output_tokens
    FROM usage_events WHERE org_id = CAST(:org_id AS uuid) AND price_id IS NOT NULL AND outcome = ANY(:billed)
      AND entered_at >= greatest(hour, :first) AND entered_at < hour + interval '1 hour' {which}) AS event
  GROUP BY 1, 2
)
SELECT price_id, bucket, sum(input_tokens)::bigint AS input_tokens, sum(cached_tokens)::bigint AS cached_tokens,
  sum(output_tokens)::bigint AS output_tokens, sum(requests)::bigint AS requests FROM part GROUP BY 1, 2
"""
_SUMS = {kind: text(_TOTALS.format(which=which)) for kind, which in _FILTERS.items()}


# --- leases

#: Leases that are being opened by this process: whoever wants the same one waits for that, and shares what comes of it.
_opening: dict[tuple[int, str, str], Future[None]] = {}


def lease(engine: Engine, store: Store, org_id: str, scope: str, now: datetime | None = None) -> None:
    """Let a scope's money be spent, from what Postgres knows on. Where it could be already, nothing changes. `now` says
    what day it is; by default the store does.

    Raises:
      DatabaseAway: it could not be opened.
      RedisError, OSError: the store is away.
    """
    mine: Future[None] = Future()
    wanted = (id(store), org_id, scope)
    theirs = _opening.setdefault(wanted, mine)
    if theirs is not mine:
        return theirs.result()
    try:
        _open(engine, store, org_id, scope, now)
        mine.set_result(None)
    except Exception as e:
        mine.set_exception(e)
        raise
    finally:
        del _opening[wanted]
        if not mine.done():  # this request is being ended, and those that wait for it are not
            mine.set_exception(DatabaseAway("whoever opened the lease was stopped"))


def _open(engine: Engine, store: Store, org_id: str, scope: str, now: datetime | None) -> None:
    """Figures that Redis finds too old were read under a lock that was lost: read again. Or Postgres has gone back, and
    counts on from where it was."""
    for again in range(TRIES):
        with transaction(engine) as connection:
            if again:
                hold(connection, org_id, least=store.run(balances.ingested(org_id)))
            found = figures(connection, org_id, scope, now or _now(store))
            if store.run(balances.open_lease(org_id, scope, found)) or store.run(balances.opened(org_id, scope)):
                return
    raise DatabaseAway("the lock of the organisation's mark is lost again and again")


def tell(engine: Engine, store: Store, org_id: str, now: datetime | None = None) -> bool:
    """Let Redis know what an organisation's grants and entries come to now. False: it has no lease; one is opened with
    the next request that needs it.

    Raises:
      DatabaseAway, RedisError, OSError: the clock tells it within a minute of their return.
    """
    with transaction(engine) as connection:
        opened = store.run(balances.opened(org_id, ORGANISATION))
        if opened is None:
            return False
        number, since_ms = opened
        found = figures(connection, org_id, ORGANISATION, now or _now(store))
        if not found.grants or found.since == since_ms:
            return store.run(balances.grant(org_id, found.granted, found.grants))
    drop_lease(engine, store, org_id, ORGANISATION, number, held=True)  # it counts from before the balance began
    return False


def drop_lease(engine: Engine, store: Store, org_id: str, scope: str, number: int, *, held: bool = False) -> bool:
    """Close a lease. The mark is counted up, and that is committed, first: no later lease has its number. `held`: even
    where running requests hold money of it."""
    with transaction(engine) as connection:
        count_up(connection, [org_id])
    return store.run(balances.drop_lease(org_id, scope, number, held=held))


def _now(store: Store) -> datetime:
    return _EPOCH + timedelta(milliseconds=store.run(NOW_MS))
