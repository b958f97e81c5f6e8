"""The limiter as it should be, in exact integers, and a twin that runs every call on it and on the store."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any

import redis

from core.limits import balances, stopped
from core.limits.balances import UNITS, Account, Figures
from core.limits.counters import (
    SWEEP_MS,
    Leash,
    Left,
    Need,
    Refused,
    Report,
    Reserved,
    Terms,
    Unleased,
    late,
    open_before,
    progress,
    reserve,
    settle,
    used,
)
from core.redis import Call, Script, Store
from core.values import Limit, Usage
from tests.conftest import Clock, TimedStore

ORG = "o"
BIN_MS, WINDOW_MS, DAY_MS = 500, 60_000, 86_400_000
#: What is held is looked at now, for what comes in the next 1.25 s, and after each of twelve steps, as if 2.25 s later.
STEP_MS, STEPS, FIRM_MS, SLACK_MS = 5_000, 12, 1_250, 2_250
MILLION = 10**6
EVER_MS = 50 * 365 * DAY_MS
#: Kinds of tokens that a scope may limit, as (input counts, output counts).
KINDS = {"tokens": (1, 1), "input_tokens": (1, 0), "output_tokens": (0, 1)}


def cost_of(prices: Sequence[int], uncached: int, cached: int, output: int) -> int:
    return -(-(uncached * prices[0] + cached * prices[1] + output * prices[2]) // MILLION)


def covered(prices: Sequence[int], uncached: int, cached: int, output: int, units: int) -> int:
    """Tokens of output after `output` that so many units pay for."""
    rest = units * MILLION - uncached * prices[0] - cached * prices[1] - output * prices[2]
    if rest < 0:
        return 0
    return min(rest // prices[2], 2**31) if prices[2] else 2**31


def month_of(day: int) -> int:
    then = date.fromordinal(date(1970, 1, 1).toordinal() + day)
    return then.year * 12 + then.month - 1


def units_of(money: Decimal | None) -> int | None:
    return None if money is None else int(money * UNITS)


@dataclass
class Event:
    """What was counted, and when: its bin is its time, as the store sees it."""

    at_ms: int
    requests: int
    input: int
    output: int

    @property
    def bin(self) -> int:
        return self.at_ms // BIN_MS

    @property
    def leaves_ms(self) -> int:
        return (self.bin + 1) * BIN_MS + WINDOW_MS


@dataclass
class Counter:
    running: int = 0
    held_in: int = 0
    held_out: int = 0
    events: list[Event] = field(default_factory=list)
    debts: list[tuple[int, int]] = field(default_factory=list)  #: (when, tokens) that it bore beyond its limits

    def seen(self, now_ms: int) -> list[Event]:
        """What is in the window. What lies in the future came, as the clock tells it now, just now."""
        found = [replace(one, at_ms=min(one.at_ms, now_ms)) for one in self.events]
        return [one for one in found if one.leaves_ms > now_ms]

    def touch(self, now_ms: int) -> None:
        self.events = self.seen(now_ms)
        self.debts = [(min(at_ms, now_ms), tokens) for at_ms, tokens in self.debts]

    def sums(self, now_ms: int) -> tuple[int, int, int]:
        seen = self.seen(now_ms)
        return sum(e.requests for e in seen), sum(e.input for e in seen), sum(e.output for e in seen)

    def used(self, at_ms: int, kind: str) -> int:
        _, t_in, t_out = self.sums(at_ms)
        return KINDS[kind][0] * t_in + KINDS[kind][1] * t_out

    def load(self, now_ms: int, kind: str) -> int:
        """Tokens of a kind used and held."""
        of_in, of_out = KINDS[kind]
        return self.used(now_ms, kind) + of_in * self.held_in + of_out * self.held_out

    def room(self, now_ms: int, limit: Limit, kinds: Iterable[str]) -> int:
        lefts = [most - self.load(now_ms, kind) for kind, most in mosts(limit) if kind in kinds and most is not None]
        return min(lefts, default=2**53)


def mosts(limit: Limit) -> list[tuple[str, int | None]]:
    return [(kind, getattr(limit, f"{kind}_per_minute")) for kind in KINDS]


@dataclass
class Money:
    lease: int
    granted: int
    grants: int
    spent: int
    held: int
    day: int
    day_spent: int
    month: int
    month_spent: int

    def at(self, now_ms: int) -> Money:
        today = now_ms // DAY_MS
        one = copy.copy(self)
        if one.day < today:
            one.day, one.day_spent = today, 0
        if one.month < month_of(today):
            one.month, one.month_spent = month_of(today), 0
        return one

    def purses(self, limit: Limit) -> dict[str, int]:
        day, month = units_of(limit.money_per_day), units_of(limit.money_per_month)
        found = {"balance": self.granted - self.spent - self.held} if limit.prepaid else {}
        found |= {} if day is None else {"day": day - self.day_spent - self.held}
        return found | ({} if month is None else {"month": month - self.month_spent - self.held})

    def spend(self, units: int, born_ms: int) -> None:
        self.spent += units
        born = born_ms // DAY_MS
        if units >= 0 or born == self.day:
            self.day_spent = max(0, self.day_spent + units)
        if units >= 0 or month_of(born) == self.month:
            self.month_spent = max(0, self.month_spent + units)


def comes(pace: float, tokens: int, in_ms: int) -> int:
    """Of so many tokens those that come in a time, at a pace."""
    thousandths = max(round(pace * 1000), 1)
    return min(tokens, -(-thousandths * in_ms // 10**6)) if pace else tokens


@dataclass
class Hold:
    limits: tuple[Limit, ...]
    need_in: int
    terms: Terms
    held_in: int
    held_out: int
    born_ms: int
    allowance: int = -1
    leases: dict[str, int] = field(default_factory=dict)
    open: bool = True
    charged_in: int = 0
    charged_out: int = 0
    debt: int = 0
    money: int = 0
    money_held: int = 0
    pace: float = 0.0
    left: int = 0
    taken_up: bool = False
    late: bool = False


@dataclass
class Model:
    counters: dict[str, Counter] = field(default_factory=dict)
    accounts: dict[str, Money] = field(default_factory=dict)
    holds: dict[str, Hold] = field(default_factory=dict)
    opened_ms: dict[str, int] = field(default_factory=dict)
    stopped: dict[str, str] = field(default_factory=dict)
    ingested: int = 0

    def counter(self, scope: str) -> Counter:
        return self.counters.setdefault(scope, Counter())

    def ahead(self, scope: str, step: int) -> int:
        """How much of what is held in a scope will have come after so many steps."""
        its = [hold for hold in self.holds.values() if hold.open and any(one.scope == scope for one in hold.limits)]
        return sum(comes(hold.pace, hold.left, step * STEP_MS + SLACK_MS) for hold in its)

    # --- reserve

    def refusal(
        self, now_ms: int, key: str, limits: Sequence[Limit], need: Need, terms: Terms
    ) -> tuple[str, int, int | None] | int:
        """Why not, where (1..; 0: nowhere), and for how long; or how much output is held."""
        why = self.stopped.get("org") or self.stopped.get(key)
        if why:
            return why, 0, None
        for n, limit in enumerate(limits, 1):
            if limit.pays and limit.scope not in self.accounts:
                return "unleased", n, None
        output, coming = _shrunk(limits, need)
        for n, limit in enumerate(limits, 1):
            wants = {"tokens": need.input_tokens + output, "input_tokens": need.input_tokens, "output_tokens": output}
            if any(most is not None and wants[kind] > most for kind, most in mosts(limit)):
                return "too_large", n, None
        stands = [
            one
            for n, limit in enumerate(limits, 1)
            for one in self._stands(now_ms, n, limit, need.input_tokens, coming, need.pace, terms)
        ]
        for one in stands:
            if one[2] is None:
                return one
        return max(stands, key=lambda one: one[2] or 0) if stands else output

    def _stands(
        self, now_ms: int, n: int, limit: Limit, t_in: int, coming: int, pace: float, terms: Terms
    ) -> Iterable[tuple[str, int, int | None]]:
        counter = self.counter(limit.scope)
        if limit.concurrent_requests is not None and counter.running >= limit.concurrent_requests:
            yield "concurrency", n, None
        most = limit.requests_per_minute
        if most is not None and counter.sums(now_ms)[0] >= most:
            yield "requests", n, self._wait(counter, now_ms, lambda at: counter.sums(at)[0] < most)
        for kind, tokens in mosts(limit):
            of_in, of_out = KINDS[kind]
            firm, room = of_out * comes(pace, coming, FIRM_MS), (tokens or 0) - of_in * (t_in + counter.held_in)
            rooms = [room - of_out * counter.held_out - firm]
            for k in range(1, STEPS + 1) if of_out else ():
                after = self.ahead(limit.scope, k) + comes(pace, coming, k * STEP_MS + SLACK_MS)
                rooms.append(min(rooms[-1], room - after))

            def fits(at_ms: int, kind: str = kind, rooms: list[int] = rooms) -> bool:
                leave = {one.leaves_ms for one in counter.seen(at_ms) if one.input or one.output}
                return rooms[-1] >= 0 and all(counter.used(at - 1, kind) <= _room_at(rooms, at - at_ms) for at in leave)

            if tokens is not None and not fits(now_ms):
                yield kind, n, self._wait(counter, now_ms, fits)
        if limit.pays:
            yield from self._broke(now_ms, n, limit, cost_of(terms.prices, t_in, 0, min(1, coming)))

    def _wait(self, counter: Counter, now_ms: int, fits: Callable[[int], bool]) -> int | None:
        last_ms = max((one.leaves_ms for one in counter.seen(now_ms)), default=now_ms)
        if not fits(last_ms):
            return None
        return bisect_left(range(now_ms, last_ms), True, key=fits)

    def _broke(self, now_ms: int, n: int, limit: Limit, cost: int) -> Iterable[tuple[str, int, int | None]]:
        account = self.accounts[limit.scope].at(now_ms)
        ends = {"day": account.day + 1, "month": _next_month(account)}
        for name, left in account.purses(limit).items():
            if cost > left:
                whole = {"day": units_of(limit.money_per_day), "month": units_of(limit.money_per_month)}.get(name)
                later = whole is not None and cost + account.held <= whole
                yield name, n, ends[name] * DAY_MS - now_ms if later else None

    def reserve(self, now_ms: int, request: str, key: str, limits: Sequence[Limit], need: Need, terms: Terms) -> Any:
        """Reserved's allowance, or what `refusal` says."""
        self._put_right(now_ms, limits)
        if request in self.holds:
            return self.holds[request].allowance
        found = self.refusal(now_ms, key, limits, need, terms)
        if not isinstance(found, int):
            return found
        coming = _shrunk(limits, need)[1]
        firm = comes(need.pace, coming, FIRM_MS)
        hold = Hold(tuple(limits), need.input_tokens, terms, need.input_tokens, firm, now_ms)
        hold.pace, hold.left = need.pace, coming
        paying = [limit for limit in limits if limit.pays]
        if paying:
            purses = [u for one in paying for u in self.accounts[one.scope].at(now_ms).purses(one).values()]
            hold.money_held = min(*purses, cost_of(terms.prices, need.input_tokens, 0, found), 2**53)
            hold.allowance = covered(terms.prices, need.input_tokens, 0, 0, hold.money_held)
        for limit in limits:
            counter = self.counter(limit.scope)
            counter.touch(now_ms)
            counter.running += 1
            counter.held_in, counter.held_out = counter.held_in + need.input_tokens, counter.held_out + firm
            counter.events.append(Event(now_ms, 1, 0, 0))
        for limit in paying:
            account = self.accounts[limit.scope] = self.accounts[limit.scope].at(now_ms)
            account.held += hold.money_held
            hold.leases[limit.scope] = account.lease
        self.holds[request], self.opened_ms[request] = hold, now_ms
        return hold.allowance

    def _put_right(self, now_ms: int, limits: Sequence[Limit]) -> None:
        """A counter in the future is put right by any call that comes to it."""
        for limit in limits:
            counter = self.counter(limit.scope)
            if any(one.bin > now_ms // BIN_MS for one in counter.events):
                counter.touch(now_ms)

    # --- progress and settle

    def _charge(self, now_ms: int, hold: Hold, usage: Usage, end: bool) -> tuple[int, int]:
        """Room for output that is left, and new debt."""
        weighed = usage.input_tokens - usage.cached_tokens
        weighed -= -usage.cached_tokens * hold.terms.cached_weight // 1000
        more_in, more_out = max(0, weighed - hold.charged_in), max(0, usage.output_tokens - hold.charged_out)
        free_in = hold.held_in if usage.input_tokens or end else 0
        free_out = hold.held_out if end else min(more_out, hold.held_out)
        room, bears = 2**53, 2**53
        for limit in hold.limits:
            counter = self.counter(limit.scope)
            counter.touch(now_ms)
            counter.held_in, counter.held_out = counter.held_in - free_in, counter.held_out - free_out
            if more_in or more_out:
                counter.events.append(Event(now_ms, 0, more_in, more_out))
            room = min(room, counter.room(now_ms, limit, ("tokens", "output_tokens")))
            bears = min(bears, counter.room(now_ms, limit, KINDS))
        hold.charged_in, hold.charged_out = hold.charged_in + more_in, hold.charged_out + more_out
        hold.held_in, hold.held_out = hold.held_in - free_in, hold.held_out - free_out
        unheld = max(0, more_in - free_in) + max(0, more_out - free_out)
        debt = min(unheld, max(0, -bears))
        hold.debt += debt
        for limit in hold.limits:  # nothing limits what was taken up, so all that it makes is beyond
            stated = more_in + more_out if hold.taken_up else debt
            self.counter(limit.scope).debts.append((now_ms, stated))
        return room, debt

    def progress(self, now_ms: int, report: Report) -> Leash:
        hold = self.holds.get(report.request_id)
        stop = self.stopped.get("org") or self.stopped.get(f"key:{report.key_id}", "")
        if hold is None:
            hold = self._take_up(now_ms, report)
        if not hold.open:
            return Leash(open=False, allowance_tokens=None, stopped=stop, debt_tokens=0)
        room, debt = self._charge(now_ms, hold, report.usage, end=False)
        more = min(comes(report.pace, report.hold_tokens, FIRM_MS) - hold.held_out, max(0, room))
        hold.held_out += more
        hold.pace, hold.left = report.pace, report.hold_tokens if report.pace else hold.held_out
        for limit in hold.limits:
            self.counter(limit.scope).held_out += more
        hold.allowance = self._pay(now_ms, hold, report.usage, report.money_tokens)
        told = None if hold.allowance < 0 else hold.allowance
        return Leash(open=True, allowance_tokens=told, stopped=stop, debt_tokens=debt)

    def _take_up(self, now_ms: int, report: Report) -> Hold:
        hold = Hold(tuple(Limit(scope=scope) for scope in report.scopes), 0, Terms(cached_weight=1000), 0, 0, now_ms)
        hold.charged_in, hold.charged_out = report.usage.input_tokens, report.usage.output_tokens
        hold.taken_up = True
        for scope in report.scopes:
            self.counter(scope).touch(now_ms)
            self.counter(scope).running += 1
        self.holds[report.request_id], self.opened_ms[report.request_id] = hold, now_ms
        return hold

    def _purse(self, now_ms: int, hold: Hold) -> list[tuple[Limit, Money]]:
        """Accounts that it was reserved in, and that are still the same."""
        found = []
        for limit in hold.limits:
            account = self.accounts.get(limit.scope)
            if account and hold.leases.get(limit.scope) == account.lease:
                self.accounts[limit.scope] = account.at(now_ms)
                found.append((limit, self.accounts[limit.scope]))
        return found

    def _pay(self, now_ms: int, hold: Hold, usage: Usage, want: int) -> int:
        bound, prices = self._purse(now_ms, hold), hold.terms.prices
        if not bound:
            return -1
        uncached = usage.input_tokens - usage.cached_tokens if usage.input_tokens else hold.need_in
        cost = max(hold.money, cost_of(prices, uncached, usage.cached_tokens, usage.output_tokens))
        most = min(units for limit, one in bound for units in (*one.purses(limit).values(), 2**53))
        wanted = cost_of(prices, uncached, usage.cached_tokens, usage.output_tokens + want) - cost
        left = hold.money_held - (cost - hold.money)
        held = max(0, left, min(wanted, left + most))
        for _, account in bound:
            account.spend(cost - hold.money, hold.born_ms)
            account.held += held - hold.money_held
        hold.money, hold.money_held = cost, held
        return usage.output_tokens + covered(prices, uncached, usage.cached_tokens, usage.output_tokens, cost + held)

    def settle(self, now_ms: int, request: str, usage: Usage, billed: bool, forgo: bool) -> bool:
        hold = self.holds.get(request)
        if hold is None or not hold.open:
            return False
        self._charge(now_ms, hold, usage, end=True)
        uncached = usage.input_tokens - usage.cached_tokens
        cost = cost_of(hold.terms.prices, uncached, usage.cached_tokens, usage.output_tokens) if billed else 0
        for limit in hold.limits:
            counter = self.counter(limit.scope)
            counter.running -= 1
            if forgo and not hold.taken_up:
                _forgo(counter, hold.born_ms)
        for _, account in self._purse(now_ms, hold):
            account.spend(cost - hold.money, hold.born_ms)
            account.held -= hold.money_held
        hold.open, hold.money, hold.money_held = False, cost, 0
        self.opened_ms.pop(request, None)
        return True

    def late(self, now_ms: int, request: str, scopes: Sequence[str], ingest: int, cost: int) -> bool:
        self.ingested = max(self.ingested, ingest)
        hold = self.holds.get(request)
        if hold and hold.late:
            return False
        charged = False
        for scope in scopes:
            account, units = self.accounts.get(scope), 0
            if account and hold and hold.leases.get(scope) == account.lease:
                units = cost - hold.money
            elif account and ingest > account.lease:
                units = cost
            if account and units:
                self.accounts[scope] = account.at(now_ms)
                self.accounts[scope].spend(units, hold.born_ms if hold else now_ms)
                charged = True
        if charged:
            hold = self.holds.setdefault(request, Hold((), 0, Terms(), 0, 0, now_ms, open=False))
            hold.late = True
        return charged

    # --- what can be asked

    def _later(self, scope: str, kind: str) -> int:
        of_in, of_out = KINDS[kind]
        return of_in * self.counter(scope).held_in + of_out * self.ahead(scope, STEPS) if of_out else 0

    def left(self, now_ms: int, limit: Limit) -> Left:
        counter = self.counter(limit.scope)
        requests, _, _ = sums = counter.sums(now_ms)
        lefts = {
            kind: None
            if most is None
            else max(0, most - max(counter.load(now_ms, kind), self._later(limit.scope, kind)))
            for kind, most in mosts(limit)
        }
        held = counter.held_in + counter.held_out
        last_ms = max(
            (one.leaves_ms for one in counter.seen(now_ms) if one.requests or one.input or one.output), default=0
        )
        reset_ms = (now_ms // BIN_MS + 1) * BIN_MS + WINDOW_MS if held else last_ms
        return Left(
            limit=limit,
            requests=_at_least_0(limit.requests_per_minute, requests),
            reset_ms=reset_ms - now_ms if held or any(sums) else 0,
            **lefts,
        )


def _room_at(rooms: list[int], in_ms: int) -> Fraction:
    """On a straight line between two steps."""
    k, beyond_ms = divmod(in_ms, STEP_MS)
    if k >= len(rooms) - 1:
        return Fraction(rooms[-1])
    return rooms[k] + Fraction((rooms[k + 1] - rooms[k]) * beyond_ms, STEP_MS)


def _at_least_0(most: int | None, load: int) -> int | None:
    return None if most is None else max(0, most - load)


def _shrunk(limits: Sequence[Limit], need: Need) -> tuple[int, int]:
    """What can come in one window, and what may come in all. A hold that nobody asked for in so many words is no larger
    than what can ever be."""
    mosts = [one.tokens_per_minute - need.input_tokens for one in limits if one.tokens_per_minute is not None]
    mosts += [one.output_tokens_per_minute for one in limits if one.output_tokens_per_minute is not None]
    most_out = comes(need.pace, need.output_tokens, STEPS * STEP_MS + SLACK_MS)
    output = min([most_out, *(max(need.least_output_tokens, most) for most in mosts)])
    return output, need.output_tokens if output == most_out else output


def _next_month(account: Money) -> int:
    day = account.day
    while month_of(day) <= account.month:
        day += 1
    return day


def _forgo(counter: Counter, born_ms: int) -> None:
    """Of its bin's requests one is none; which one makes no difference."""
    for one in counter.events:
        if one.bin == born_ms // BIN_MS and one.requests:
            one.requests -= 1
            return


# --- both at once


class Twin:
    """Runs each call on the store and on the model, and compares all that can be seen of either."""

    def __init__(self, store: Store, clock: Clock, limits: Sequence[Limit], terms: Terms) -> None:
        self.store, self.clock, self.limits, self.terms = store, clock, {one.scope: one for one in limits}, terms
        self.model, self.latest_ms = Model(), clock.now_ms
        self.obeyed = True  #: nobody went further than its money
        self.asked: dict[str, tuple[str, tuple[Limit, ...], Need]] = {}
        self.saved: tuple[Model, dict[bytes, bytes]] | None = None

    @property
    def now_ms(self) -> int:
        return self.clock.now_ms

    @property
    def went_back(self) -> bool:
        """The clock was later once."""
        return self.now_ms < self.latest_ms

    def keys(self) -> list[bytes]:
        client: redis.Redis = self.store.client
        return sorted(client.scan_iter("f1:{org:o}:*", count=1000))

    def content(self) -> dict[bytes, Any]:
        """All that the store holds. Not as DUMP tells it: of a hash that is read the order of fields may change."""
        pipe = self.store.client.pipeline(transaction=False)
        names = self.keys()
        for name in names:
            pipe.zrange(name, 0, -1, withscores=True) if name.endswith(b":open") else pipe.hgetall(name)
        return dict(zip(names, pipe.execute(), strict=True))

    def reserve(self, request: str, key: str, scopes: Sequence[str], need: Need) -> Reserved | Refused | Unleased:
        limits = tuple(self.limits.get(scope, Limit(scope=scope)) for scope in scopes)
        self.asked[request] = key, limits, need
        before = self.content()
        known = request in self.model.holds
        got = self.store.run(reserve(ORG, request, key, "m", limits, need, self.terms))
        expected = self.model.reserve(self.now_ms, request, f"key:{key}", limits, need, self.terms)
        if isinstance(expected, int):
            assert isinstance(got, Reserved), (got, expected)
            assert (-1 if got.allowance_tokens is None else got.allowance_tokens) == expected
        else:
            self._refused(got, expected, limits)
            if isinstance(got, Refused) and got.retry_after_ms is not None:
                self._honest(got.retry_after_ms, key, limits, need)
            elif expected[0] != "unleased":
                assert not self._fits(EVER_MS, key, limits, need)
        if (known or not isinstance(expected, int)) and not self.went_back:
            assert self.content() == before, "a refusal and a repeat write nothing"
        if not isinstance(got, Unleased):
            assert got.left == tuple(self.model.left(self.now_ms, limit) for limit in limits)
        return got

    def _refused(self, got: object, expected: tuple[str, int, int | None], limits: Sequence[Limit]) -> None:
        why, where, wait_ms = expected
        if why == "unleased":
            assert got == Unleased(scope=limits[where - 1].scope)
            return
        assert isinstance(got, Refused), (got, expected)
        limit = limits[where - 1] if where else None
        assert (got.reason, got.limit, got.retry_after_ms) == (why, limit, wait_ms), (got, expected)

    def _fits(self, wait_ms: int, key: str, limits: Sequence[Limit], need: Need) -> bool:
        return isinstance(self.model.refusal(self.now_ms + wait_ms, f"key:{key}", limits, need, self.terms), int)

    def _honest(self, wait_ms: int, key: str, limits: Sequence[Limit], need: Need) -> None:
        assert wait_ms > 0
        assert self._fits(wait_ms, key, limits, need) and not self._fits(wait_ms - 1, key, limits, need)

    def progress(self, reports: Sequence[Report]) -> list[Leash]:
        got = self.store.run(progress(ORG, reports))
        assert got == [self.model.progress(self.now_ms, one) for one in reports]
        return got

    def settle(self, request: str, usage: Usage, *, billed: bool = True, forgo: bool = False) -> bool:
        hold = self.model.holds.get(request)
        scopes = [limit.scope for limit in (hold.limits if hold else self.asked[request][1])]
        got = self.store.run(settle(ORG, request, scopes, usage, billed=billed, forgo=forgo))
        assert got == self.model.settle(self.now_ms, request, usage, billed, forgo)
        return got

    def late(self, request: str, ingest: int, cost: int) -> bool:
        """After settle, as it is to be."""
        scopes = [limit.scope for limit in self.asked[request][1]]
        got = self.store.run(late(ORG, request, scopes, ingest, cost))
        assert got == self.model.late(self.now_ms, request, scopes, ingest, cost)
        return got

    def again(self, call: Callable[[], Any]) -> None:
        """What is repeated at once changes nothing."""
        call()
        before = self.content()
        call()
        assert self.content() == before

    def stop(self, field_of: str) -> None:
        self.store.run(stopped.stop(ORG, field_of, "suspended" if field_of == "org" else "revoked"))
        self.model.stopped[field_of] = "suspended" if field_of == "org" else "revoked"

    def go_on(self) -> None:
        self.store.run(stopped.clear(ORG))
        self.model.stopped.pop("org", None)

    def lease(self, scope: str, figures: Figures) -> bool:
        today = self.now_ms // DAY_MS
        f = replace(figures, day=today, month=month_of(today))
        got = self.store.run(balances.open_lease(ORG, scope, f))
        fits = scope not in self.model.accounts and self.model.ingested <= f.lease
        assert got == fits
        if fits:
            spent = f.spent, 0, f.day, f.day_spent, f.month, f.month_spent
            self.model.accounts[scope] = Money(f.lease, f.granted, f.grants, *spent)
        return got

    def grant(self, granted: int, grants: int) -> bool:
        account = self.model.accounts.get("org")
        got = self.store.run(balances.grant(ORG, granted, grants))
        assert got == (account is not None and account.grants <= grants)
        if got and account:
            account.granted, account.grants = granted, grants
        return got

    def advance(self, by_ms: int) -> None:
        self.clock.advance(by_ms)
        self.latest_ms = max(self.latest_ms, self.now_ms)

    def sweep(self, live: Callable[[str], bool]) -> None:
        """Settle what the queue does not know, and nothing that began just now."""
        old = self.store.run(open_before(ORG, self.now_ms - SWEEP_MS))
        due = {one for one, at_ms in self.model.opened_ms.items() if at_ms <= self.now_ms - SWEEP_MS}
        assert set(old) == due
        for request in old:
            if not live(request):
                assert self.settle(request, Usage(), billed=False)

    def flush(self) -> None:
        self.store.client.flushall()
        self.model, self.obeyed = Model(), False

    def save(self) -> None:
        """A replica is as far as this."""
        self.saved = copy.deepcopy(self.model), {name: self.store.client.dump(name) for name in self.keys()}

    def fail_over(self) -> None:
        """What came since is lost, and what runs does not know it."""
        if self.saved is None:
            return
        self.model = copy.deepcopy(self.saved[0])
        self.store.client.flushall()
        for name, value in self.saved[1].items():
            self.store.client.restore(name, 0, value)
        self.obeyed = False

    # --- the laws

    def check(self) -> None:
        """All that can be seen is as the model has it, and the model keeps the laws."""
        scopes = sorted({*self.limits, *self.model.counters})
        limits = [self.limits.get(scope, Limit(scope=scope)) for scope in scopes]
        for limit, got in zip(limits, self.store.run(used(ORG, limits)), strict=True):
            counter = self.model.counter(limit.scope)
            figures = *counter.sums(self.now_ms), counter.held_in + counter.held_out, counter.running
            assert (got.requests, got.input_tokens, got.output_tokens, got.held_tokens, got.open) == figures, (
                limit.scope
            )
            assert got.left == self.model.left(self.now_ms, limit)
        assert set(self.store.run(open_before(ORG, 2**53))) == set(self.model.opened_ms)
        self._check_money()
        self._check_laws()

    def _check_money(self) -> None:
        for scope, account in self.model.accounts.items():
            one = account.at(self.now_ms)
            limit = self.limits.get(scope, Limit(scope=scope))
            assert not self.obeyed or min(one.purses(limit).values(), default=0) >= 0, scope
            got = self.store.run(balances.account(ORG, scope))
            assert got == Account(
                granted=one.granted,
                spent=one.spent,
                held=one.held,
                day_spent=one.day_spent,
                month_spent=one.month_spent,
            )

    def _check_laws(self) -> None:
        held: dict[str, list[int]] = {scope: [0, 0, 0] for scope in self.model.counters}
        for hold in self.model.holds.values():
            for limit in hold.limits if hold.open else ():
                one = held[limit.scope]
                one[0], one[1], one[2] = one[0] + 1, one[1] + hold.held_in, one[2] + hold.held_out
        beyond = {scope: [0, 0] for scope in self.model.counters}
        for hold in self.model.holds.values():
            for limit in hold.limits if hold.open and hold.taken_up else ():
                beyond[limit.scope] = [beyond[limit.scope][0] + hold.held_in, beyond[limit.scope][1] + hold.held_out]
        for scope, counter in self.model.counters.items():
            assert [counter.running, counter.held_in, counter.held_out] == held[scope], "a counter is what is open"
            assert min(held[scope]) >= 0
            debts = sum(tokens for at_ms, tokens in counter.debts if at_ms // BIN_MS + 121 > self.now_ms // BIN_MS)
            for kind, most in mosts(self.limits.get(scope, Limit(scope=scope))):
                unlimited = sum(of * tokens for of, tokens in zip(KINDS[kind], beyond[scope], strict=True))
                assert most is None or counter.load(self.now_ms, kind) <= most + debts + unlimited, (scope, kind)

    def end(self) -> None:
        """When all has ended nothing is held, and a minute later nothing is used."""
        for request in [name for name, hold in self.model.holds.items() if hold.open]:
            assert self.settle(request, Usage(), billed=False)
        self.check()
        assert self.store.run(open_before(ORG, 2**53)) == []
        limits = [] if self.went_back else [Limit(scope=scope) for scope in self.model.counters]
        self.advance(WINDOW_MS + BIN_MS)
        for one in self.store.run(used(ORG, limits)) if limits else ():
            assert (one.requests, one.input_tokens, one.output_tokens, one.held_tokens, one.open) == (0, 0, 0, 0, 0)


# --- faults on purpose


class Mutated(TimedStore):
    """A store whose scripts have a fault: `old` is `new` in them."""

    def __init__(self, client: redis.Redis, clock: Clock, old: str, new: str) -> None:
        super().__init__(client, clock)
        self.old, self.new, self.known, self.mutated = old, new, dict[str, Script](), False

    def run(self, call: Call[Any]) -> Any:
        return super().run(replace(call, script=self._mutated(call.script)) if call.script else call)

    def _mutated(self, script: Script) -> Script:
        if script.name not in self.known:
            self.known[script.name] = Script(script.name, script.body.replace(self.old, self.new))
            self.mutated = self.mutated or self.old in script.body
        return self.known[script.name]


def utc_ms(year: int, month: int, day: int) -> int:
    return int(datetime(year, month, day, tzinfo=UTC).timestamp() * 1000)
