"""A gateway's way to the limits store: a hold before anything is queued, and its end.

Where limits have a store of their own (FOREBAY_LIMITS_URL), it may be away while the queue is there:

    postpaid                    a share of each rate is counted here (local_share.py), LOCAL_S from the first failure
    prepaid, free, with budgets 503 `limits_unavailable`, at once
    after LOCAL_S               503 `limits_unavailable`, for all

While it is away one request at a time asks it, and others do not wait for that: the first that it answers ends the
outage. What was admitted meanwhile is taken up by its next report (core/limits/lua/progress.lua). Where limits and
the queue share one store, nothing is admitted without it: 503 `store_unavailable`.

A hold that was asked for, and no answer came, may be open: it is given up as soon as the store answers, or what never
ran would keep places and money until the sweep (scaler/clock.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from billing.rating import BILLED, Price
from core.errors import LimitsDown, MoneyDown
from core.limits import counters, scopes
from core.limits.balances import sum_up
from core.limits.counters import Need, Refused, Reserved, Terms, Unleased
from core.limits.scopes import Left
from core.postgres import DatabaseAway
from core.redis import AWAY, Call, RedisConnectionError, RedisError, Store
from core.telemetry import logs
from core.values import Ending, Limit, Request, Usage
from web import refusals
from web.local_share import LOCAL_S, LocalShare
from web.refusals import Asked

log = logs.get(__name__)

T = TypeVar("T")

#: How long an exchange with a store of limits of its own may take: it may cost a request no more, seconds.
LIMITS_S = 0.1
#: How often it is tried to give up what may be held, and how long that may still be opened by what was on its way,
#: seconds.
GIVE_UP_S, ON_ITS_WAY_S = 0.25, 5.0
#: How long such a hold is remembered, seconds, and how many are: the sweep finds the others.
DOUBT_S, DOUBTFUL_MAX = 60.0, 10_000
#: When to ask again for what this gateway's share is too small for, ms.
LOCAL_RETRY_MS = 1_000


class Limiter:
    """Reserves, settles and reads, for all requests of one process."""

    def __init__(
        self,
        store: Store,
        *,
        lease: Callable[[str, str], object] | None = None,
        apart: bool = False,
        gateways: Callable[[], int] = lambda: 1,
    ) -> None:
        """`lease` opens that of an organisation's scope from Postgres (billing/credits.py); None: nothing that money
        binds is admitted. `apart`: the store is not the queue's. `gateways`: how many are alive, as the queue's store
        knows."""
        self.store, self.lease, self.apart, self.gateways = store, lease, apart, gateways
        self.away_since_s: float | None = None  #: the first failure of an outage
        self.share = LocalShare()
        self._shared_by = 1  #: gateways, at the first failure
        self._probing = threading.Lock()
        self._doubtful: dict[str, tuple[Request, float]] = {}  #: whose holds may be open, and since when, seconds
        self._giving_up = False

    def reserve(self, request: Request, limits: Sequence[Limit], asked: Asked, terms: Terms, *, plan: str) -> Reserved:
        """Open a hold for a request.

        Raises:
          ForebayError: a limit is in the way (web/refusals.py), or nobody can tell.
          AWAY: the store is, and it is the queue's too.
        """
        self._doubtful.pop(request.id, None)
        try:
            answer = self._reserve(request, limits, asked.need, terms)
        except AWAY:
            if not self.apart:
                self.doubt(request)
                raise
            try:
                self._admit_alone(request, limits, asked, plan)
            except LimitsDown:
                self.doubt(request)
                raise
            return Reserved(left=())
        if isinstance(answer, Refused):
            raise refusals.told(answer, asked, _now_ms())
        return answer

    def doubt(self, request: Request) -> None:
        """It was not accepted, and nobody knows whether its hold is open: give it up."""
        while len(self._doubtful) >= DOUBTFUL_MAX:
            del self._doubtful[next(iter(self._doubtful))]
        self._doubtful[request.id] = request, time.monotonic()
        if not self._giving_up:
            self._giving_up = True
            threading.Thread(target=self._give_up_all, name="giving up", daemon=True).start()

    def _give_up_all(self) -> None:
        while self._doubtful:
            time.sleep(GIVE_UP_S)
            for request, since_s in list(self._doubtful.values()):
                age_s = time.monotonic() - since_s
                try:
                    known = request.id in self._doubtful and (self._give_up(request) or age_s > ON_ITS_WAY_S)
                except (*AWAY, RedisError):  # whoever asks for something tells of it
                    if age_s < DOUBT_S:
                        break  # those after it are younger
                    known = True
                if known:
                    self._doubtful.pop(request.id, None)
        self._giving_up = False

    def _give_up(self, request: Request) -> bool:
        """Whether it was open. Who asks under this id again is not let in by what was. Beside whoever probes a store
        that is away, in nobody's place."""
        caller = request.caller
        named = scopes.names(request.scopes, caller.key_id)
        was_open = self.store.run(counters.settle(caller.org_id, request.id, named, Usage(), billed=False, forgo=True))
        if was_open:
            self.store.run(counters.unknown(caller.org_id, request.id))
        return was_open

    def settle(self, request: Request, usage: Usage, *, billed: bool, forgo: bool = False) -> None:
        """A request has ended, or never began. What is lost on the way the usage's consumer makes again."""
        self.share.settle(request.id, usage.input_tokens, usage.output_tokens, now_s=time.monotonic())
        if forgo:
            try:
                self._give_up(request)
            except AWAY:
                self.doubt(request)
            return
        caller = request.caller
        named = scopes.names(request.scopes, caller.key_id)
        try:
            self._run(counters.settle(caller.org_id, request.id, named, usage, billed=billed))
        except AWAY:
            log.warning("settle_lost", request_id=request.id)

    def settle_attached(self, request: Request, ending: Ending) -> None:
        """The same of one that was admitted elsewhere: its hold knows its scopes."""
        org_id = request.caller.org_id
        try:
            if held := self._run(counters.held_for(org_id, request.id)):
                billed = ending.outcome in BILLED
                self._run(counters.settle(org_id, request.id, held.scopes, ending.usage, billed=billed))
        except AWAY:
            log.warning("settle_lost", request_id=request.id)

    def left(self, org_id: str, limits: Sequence[Limit]) -> tuple[Left, ...]:
        """What is left of these limits; nothing, where the store is away. Changes nothing."""
        if not any(limit.limited for limit in limits):
            return ()
        try:
            return tuple(one.left for one in self._run(counters.used(org_id, limits)))
        except AWAY:
            return ()

    def run_all(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Read several things at once.

        Raises:
          AWAY: the store is.
        """
        return self._asked(lambda: self.store.run_all(calls))

    # --- the store

    def _reserve(self, request: Request, limits: Sequence[Limit], need: Need, terms: Terms) -> Reserved | Refused:
        """Ask, and open what leases of money it names."""
        caller = request.caller
        call = counters.reserve(caller.org_id, request.id, caller.key_id, request.model, limits, need, terms)
        for _ in range(len(limits) + 1):
            answer = self._run(call)
            if not isinstance(answer, Unleased):
                return answer
            self._lease(caller.org_id, answer.scope)
        raise MoneyDown

    def _lease(self, org_id: str, scope: str) -> None:
        if self.lease is None:
            raise MoneyDown
        try:
            self.lease(org_id, scope)
        except DatabaseAway:
            raise MoneyDown from None

    def _run(self, call: Call[T]) -> T:
        return self._asked(lambda: self.store.run(call))

    def _asked(self, ask: Callable[[], T]) -> T:
        """Ask the store; while it is known to be away, only if nobody else is trying."""
        if not self.apart:
            return ask()
        probing = self.away_since_s is not None
        if probing and not self._probing.acquire(blocking=False):
            raise RedisConnectionError("the store of limits is away")
        try:
            answer = ask()
            self._came_back()
            return answer
        except AWAY:
            self._went_away()
            raise
        finally:
            if probing:
                self._probing.release()

    def _went_away(self) -> None:
        if self.away_since_s is None:
            self.away_since_s = time.monotonic()
            self._shared_by = self._alive()
            log.error("limits_away", gateways=self._shared_by)

    def _alive(self) -> int:
        """Where even the queue cannot say, nothing will be queued either."""
        try:
            return self.gateways()
        except AWAY:
            return 1

    def _came_back(self) -> None:
        if self.away_since_s is not None:
            log.warning("limits_back", away_s=round(time.monotonic() - self.away_since_s, 1))
            self.away_since_s = None

    # --- without it

    def _admit_alone(self, request: Request, limits: Sequence[Limit], asked: Asked, plan: str) -> None:
        """Within this gateway's share.

        Raises:
          LimitsDown: nothing more, or nothing of this caller.
        """
        now_s = time.monotonic()
        if plan != "postpaid" or any(limit.pays for limit in limits):
            raise LimitsDown(_NO_MONEY)
        if now_s - (self.away_since_s or now_s) > LOCAL_S:
            raise LimitsDown(
                f"Limits could not be counted for {LOCAL_S:.0f} s, and nothing is accepted until they can."
            )
        org_id = request.caller.org_id
        limit = self.share.admit(org_id, request.id, limits, asked.need, gateways=self._shared_by, now_s=now_s)
        if limit is not None:
            who = refusals.whose(limit, asked.model).replace("This", "this", 1)
            raise LimitsDown(
                f"Limits cannot be counted together at the moment, and the share of {who} at this gateway is used up.",
                retry_after_ms=LOCAL_RETRY_MS,
            )


_NO_MONEY = (
    "Limits cannot be counted at the moment, and what money binds, or costs nothing, is not accepted without that."
)


@lru_cache(maxsize=1024)
def terms(price: Price | None, cached_weight: float) -> Terms:
    """How the tokens of a request count that pays this price."""
    weight = round(cached_weight * 1000)
    if price is None:
        return Terms(cached_weight=weight)
    per_mtok = (price.input_per_mtok, price.cached_input_per_mtok, price.output_per_mtok)
    uncached, cached, output = map(sum_up, per_mtok)  # split before it is multiplied (money.lua): it has no bound
    return Terms(cached_weight=weight, prices=(uncached, cached, output))


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
