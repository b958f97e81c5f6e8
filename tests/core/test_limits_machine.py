"""The limiter against its exact model: any history, on a real Valkey; and faults put into it, which must be found.

A short run is part of the suite; FOREBAY_LIMITS_EXAMPLES=5000 makes it as long as one likes, and with
FOREBAY_LIMITS_MUTANTS=1 the machine has to find by itself each fault that a scene of the suite finds.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

import hypothesis.strategies as st
import pytest
import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import FlakyFailure
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from redis.exceptions import ResponseError

from core.limits.balances import UNITS, Figures
from core.limits.counters import FREE, SWEEP_MS, Need, Report, Reserved, Terms
from core.values import Limit, Usage
from tests.conftest import Clock, TimedStore
from tests.core.limits_model import BIN_MS, DAY_MS, WINDOW_MS, Mutated, Twin, utc_ms

EXAMPLES = int(os.environ.get("FOREBAY_LIMITS_EXAMPLES", "0"))
#: In the suite a failure is told as it was found: to make it smaller takes minutes.
SHORT = {"max_examples": 60, "phases": [Phase.generate]}
STEPS = 50

KEYS = ("k", "l")
SHARED = ("project:p", "org", "model:m")
#: What may follow what, as often as it stands here.
ACTIONS = (
    *["reserve"] * 8, *["progress"] * 6, *["settle"] * 3, *["wait"] * 3, "wait", "repeat", "repeat_late", "repeat_late",
    "jump", "sweep", "stop", "go_on", "go_on", "replicate", "fail_over", "lease", "grant", "late", "lose_all",
)  # fmt: skip
#: Before the end of a day, and of a month; and a moment that is neither a bin's end nor its beginning.
BEGINNINGS_MS = (1_000_123, utc_ms(2024, 2, 29) + 86_340_000, utc_ms(2025, 12, 31) + 86_399_000)
WAITS_MS = (0, 1, 250, 499, 500, 501, 1_000, 5_000, 30_000, 59_999, 60_000, 60_001, 60_500, 61_000)
JUMPS_MS = (3_600_000, 86_400_000, -1, -500, -1_700, -30_000, -61_000, -3_600_000, -86_400_000)

few = st.sampled_from([None, None, None, 0, 2, 3, 4, 6])
some = st.none() | st.integers(30, 90) | st.integers(100, 600)
money = st.none() | st.none() | st.integers(50, 2000).map(lambda units: Decimal(units) / UNITS)
rates = st.fixed_dictionaries(
    {
        "requests_per_minute": few,
        "tokens_per_minute": some,
        "input_tokens_per_minute": some,
        "output_tokens_per_minute": some,
        "concurrent_requests": few,
        "money_per_day": money,
        "money_per_month": money,
    }
)
terms = st.sampled_from(
    [
        FREE,
        Terms(prices=(10**6, 10**5, 2 * 10**6)),
        Terms(cached_weight=333, prices=(1_500_000, 333_333, 2_750_001)),
        Terms(cached_weight=1000, prices=(7, 3, 11)),
    ]
)


#: Tokens a second; 0: all at once.
PACES = st.sampled_from([0.0, 0.0, 0.4, 7.25, 40.0])

#: How an action gets at what hypothesis decides.
Draw = Callable[[st.SearchStrategy[Any]], Any]


@dataclass
class Going:
    """A request, as its worker knows it."""

    key: str
    scopes: tuple[str, ...]
    need_in: int
    input: tuple[int, int] | None = None  #: of which cached; None: not known yet
    output: int = 0
    allowance: int | None = None
    ended: bool = False


class Limiter(RuleBasedStateMachine):
    """Clients, workers, operators and accidents, in any order."""

    def __init__(self, store: Callable[[Clock], TimedStore]) -> None:
        super().__init__()
        self.made, self.going, self.calls = store, dict[str, Going](), list[Callable[[], Any]]()
        self.n = self.ingests = 0

    @initialize(
        at_ms=st.sampled_from(BEGINNINGS_MS),
        limits=st.fixed_dictionaries(dict.fromkeys(("key:k", *SHARED), rates)),
        prepaid=st.booleans(),
        terms=terms,
        obeys=st.booleans(),
    )
    def begin(self, at_ms: int, limits: dict[str, Any], prepaid: bool, terms: Terms, obeys: bool) -> None:
        clock = Clock()
        clock.set(at_ms)
        store = self.made(clock)
        store.client.flushall()
        scopes = [Limit(scope=scope, prepaid=prepaid and scope == "org", **one) for scope, one in limits.items()]
        self.twin, self.obeys = Twin(store, clock, scopes, terms), obeys
        self.twin.obeyed = obeys
        for scope in ("key:k", "key:l", *SHARED):
            self.twin.lease(scope, Figures(lease=1, granted=2_000, grants=1))

    def _do(self, call: Callable[[], Any]) -> Any:
        self.calls.append(call)
        return call()

    @rule(data=st.data(), action=st.sampled_from(ACTIONS))
    def act(self, data: st.DataObject, action: str) -> None:
        getattr(self, "_" + action)(data.draw)

    def _reserve(self, draw: Draw) -> None:
        self.n += 1
        name, key, shared = f"r{self.n}", draw(st.sampled_from(KEYS)), draw(st.sets(st.sampled_from(SHARED)))
        scopes = (f"key:{key}", *(scope for scope in SHARED if scope in shared))
        input_tokens, output_tokens = draw(st.integers(0, 60)), draw(st.integers(0, 90))
        least = draw(st.integers(0, output_tokens))
        need = Need(input_tokens=input_tokens, output_tokens=output_tokens, least_output_tokens=least, pace=draw(PACES))
        got = self._do(lambda: self.twin.reserve(name, key, scopes, need))
        if isinstance(got, Reserved):
            self.going[name] = Going(key, scopes, input_tokens, allowance=got.allowance_tokens)

    def _progress(self, draw: Draw) -> None:
        running = [name for name, one in self.going.items() if not one.ended]
        if not running:
            return
        names = draw(st.lists(st.sampled_from(running), min_size=1, max_size=3))
        reports = [self._report(draw, name) for name in names]
        for name, leash in zip(names, self._do(lambda: self.twin.progress(reports)), strict=True):
            self.going[name].allowance = leash.allowance_tokens

    def _report(self, draw: Draw, name: str) -> Report:
        one, usage = self.going[name], self._usage(draw, name)
        return Report(
            request_id=name,
            key_id=one.key,
            scopes=one.scopes,
            usage=usage,
            hold_tokens=draw(st.integers(0, 90)),
            pace=draw(PACES),
            money_tokens=draw(st.integers(0, 200)),
        )

    def _usage(self, draw: Draw, name: str, *, ended: bool = False) -> Usage:
        one = self.going[name]
        more = draw(st.integers(0, 60))
        if self.obeys and one.allowance is not None:
            more = max(0, min(more, one.allowance - one.output))
        one.output += more
        if one.input is None and not ended and draw(st.booleans()):
            return Usage(output_tokens=one.output)
        if one.input is None or not self.obeys:
            total = one.need_in + (0 if self.obeys else draw(st.sampled_from([0, 0, 3])))
            one.input = total, draw(st.integers(0, total))
        return Usage(input_tokens=one.input[0], cached_tokens=one.input[1], output_tokens=one.output)

    def _settle(self, draw: Draw) -> None:
        if not self.going:
            return
        running = sorted(name for name, one in self.going.items() if not one.ended)
        name = draw(st.sampled_from(running * 3 + sorted(self.going)))
        usage, billed, forgo = self._usage(draw, name, ended=True), draw(st.booleans()), draw(st.booleans())
        self.going[name].ended = True
        self._do(lambda: self.twin.settle(name, usage, billed=billed, forgo=forgo))

    def _repeat(self, draw: Draw) -> None:
        """What comes a second time at once changes nothing."""
        if self.calls:
            self.twin.again(self.calls[-1])

    def _repeat_late(self, draw: Draw) -> None:
        if self.calls:
            draw(st.sampled_from(self.calls))()

    def _wait(self, draw: Draw) -> None:
        self.twin.advance(draw(st.sampled_from(WAITS_MS)))

    def _jump(self, draw: Draw) -> None:
        by_ms = draw(st.sampled_from(JUMPS_MS))
        if self.twin.now_ms + by_ms > 0:
            self.twin.advance(by_ms)

    def _sweep(self, draw: Draw) -> None:
        """Gateways died before they enqueued theirs."""
        lost = draw(st.sets(st.integers(0, 60)))
        self.twin.sweep(lambda name: int(name[1:]) not in lost)

    def _stop(self, draw: Draw) -> None:
        self.twin.stop(draw(st.sampled_from(["org", "key:k", "key:l"])))

    def _go_on(self, draw: Draw) -> None:
        self.twin.go_on()

    def _lose_all(self, draw: Draw) -> None:
        """FLUSHALL; the lease of one scope is opened again."""
        self.twin.flush()
        self.twin.lease(draw(st.sampled_from(["key:k", "org"])), Figures(lease=self.ingests + 2, granted=300, grants=9))

    def _replicate(self, draw: Draw) -> None:
        self.twin.save()

    def _fail_over(self, draw: Draw) -> None:
        self.twin.fail_over()

    def _lease(self, draw: Draw) -> None:
        granted = draw(st.integers(100, 900))
        scope = draw(st.sampled_from(["key:k", "key:l", *SHARED]))
        self.twin.lease(scope, Figures(lease=self.ingests + 2, granted=granted, grants=5, spent=10))

    def _grant(self, draw: Draw) -> None:
        account = self.twin.model.accounts.get("org")
        if account:
            self.twin.grant(account.granted + draw(st.integers(0, 300)), draw(st.integers(0, 12)))

    def _late(self, draw: Draw) -> None:
        ended = [name for name in self.twin.asked if name not in self.going or self.going[name].ended]
        if not ended or self.obeys:
            return
        self.ingests += 1
        name, cost = draw(st.sampled_from(ended)), draw(st.integers(0, 200))
        hold = self.twin.model.holds.get(name)
        if hold is None or not hold.open:
            self.twin.late(name, self.ingests, cost)

    @invariant()
    def agree(self) -> None:
        if hasattr(self, "twin"):
            self.twin.check()

    def teardown(self) -> None:
        if hasattr(self, "twin"):
            self.twin.end()


def run_machine(store: Callable[[Clock], TimedStore], **how: Any) -> None:
    run_state_machine_as_test(
        lambda: Limiter(store),
        settings=settings(
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            **how,
        ),
    )


def test_any_history_is_as_the_model_has_it(valkey: redis.Redis) -> None:
    run_machine(lambda clock: TimedStore(valkey, clock), **({"max_examples": EXAMPLES} if EXAMPLES else SHORT))


# --- faults put in on purpose, and for each a scene that finds it

Scene = Callable[[Twin], None]


def need(input_tokens: int, output_tokens: int) -> Need:
    return Need(input_tokens=input_tokens, output_tokens=output_tokens, least_output_tokens=output_tokens)


def going(
    twin: Twin, name: str, output: int, hold: int = 0, money: int = 0, prompt: tuple[int, int] = (0, 0)
) -> Report:
    """`prompt`: tokens, and how many of them were cached."""
    scopes = tuple(limit.scope for limit in twin.asked[name][1])
    usage = Usage(input_tokens=prompt[0], cached_tokens=prompt[1], output_tokens=output)
    return Report(request_id=name, key_id="k", scopes=scopes, usage=usage, hold_tokens=hold, money_tokens=money)


BOTH = ("key:k", "org")


def it_is_settled_twice(twin: Twin) -> None:
    twin.reserve("a", "k", BOTH, need(5, 5))
    twin.settle("a", Usage(input_tokens=5, output_tokens=2))
    twin.settle("a", Usage(input_tokens=5, output_tokens=5))


def it_ends_with_less_than_it_reported(twin: Twin) -> None:
    twin.reserve("a", "k", BOTH, need(5, 30))
    twin.progress([going(twin, "a", 20, hold=10)])
    twin.settle("a", Usage(input_tokens=5, output_tokens=3))


def a_sweep_comes_while_it_runs(twin: Twin) -> None:
    twin.reserve("a", "k", BOTH, need(5, 30))
    twin.advance(SWEEP_MS - 1)
    twin.sweep(lambda name: False)
    twin.progress([going(twin, "a", 20, hold=10)])


def two_ask_where_one_may(twin: Twin) -> None:
    for name in "abcde":
        twin.reserve(name, "k", ("model:m",), need(5, 5))
        twin.reserve(name * 2, "k", ("key:l",), need(5, 5))


def the_second_scope_refuses(twin: Twin) -> None:
    for name in "abcd":
        twin.reserve(name, "k", ("key:l", "org"), need(10, 30))


def its_reservation_comes_twice(twin: Twin) -> None:
    twin.again(lambda: twin.reserve("a", "k", BOTH, need(5, 5)))


def it_ends_early(twin: Twin) -> None:
    twin.reserve("a", "k", BOTH, need(5, 50))
    twin.settle("a", Usage(input_tokens=5, output_tokens=3))


def a_minute_passes(twin: Twin) -> None:
    twin.reserve("a", "k", BOTH, need(5, 5))
    twin.settle("a", Usage(input_tokens=5, output_tokens=5))
    for by_ms in (WINDOW_MS - 1, 1, BIN_MS - 1, 1):
        twin.advance(by_ms)
        twin.check()


def it_makes_more_than_it_held(twin: Twin) -> None:
    """Its first two reports are within what it held, its third is not."""
    twin.reserve("a", "k", BOTH, need(10, 60))
    twin.reserve("b", "k", BOTH, need(10, 10))
    for output in (20, 60, 90):
        twin.progress([going(twin, "a", output, hold=70, prompt=(10, 0))])
        twin.check()
    twin.reserve("c", "k", BOTH, need(1, 0))


def money_is_asked_for_on_the_way(twin: Twin) -> None:
    twin.reserve("a", "k", ("key:m",), need(10, 5))
    twin.progress([going(twin, "a", 5, hold=10, money=400)])


def usage_is_ingested_late(twin: Twin) -> None:
    twin.reserve("never", "k", ("key:m",), need(10**6, 5))
    for _ in range(2):
        twin.late("never", 9, 20)


def grants_come_in_the_wrong_order(twin: Twin) -> None:
    twin.grant(700, 3)
    twin.grant(600, 2)


def it_is_refused_after_all(twin: Twin) -> None:
    """At once, later, and after it has left the window."""
    for wait_ms in (0, 2_000, 61_000):
        twin.reserve(f"a{wait_ms}", "k", BOTH, need(5, 5))
        twin.advance(wait_ms)
        twin.settle(f"a{wait_ms}", Usage(), billed=False, forgo=True)
        twin.check()


def the_clock_goes_back(twin: Twin) -> None:
    it_ends_early(twin)
    twin.advance(-30_000)
    twin.check()


def a_key_is_revoked(twin: Twin) -> None:
    twin.reserve("a", "k", BOTH, need(5, 5))
    twin.stop("key:k")
    twin.progress([going(twin, "a", 2)])
    twin.reserve("b", "k", BOTH, need(5, 5))


def it_is_not_paid_for_and_a_day_has_passed(twin: Twin) -> None:
    twin.reserve("a", "k", ("key:m",), need(10, 20))
    twin.progress([going(twin, "a", 20)])
    twin.advance(DAY_MS)
    twin.reserve("b", "k", ("key:m",), need(10, 20))
    twin.progress([going(twin, "b", 20)])
    twin.settle("a", Usage(input_tokens=10, output_tokens=20), billed=False)


def part_of_a_prompt_was_cached(twin: Twin) -> None:
    twin.reserve("a", "k", BOTH, need(10, 5))
    twin.progress([going(twin, "a", 1, prompt=(10, 4))])


def all_of_a_prompt_was_cached(twin: Twin) -> None:
    part_of_a_prompt_was_cached(twin)
    twin.terms = Terms(cached_weight=0)
    twin.reserve("b", "k", BOTH, need(10, 5))
    twin.progress([going(twin, "b", 1, prompt=(10, 10))])


def two_are_reported_at_once(twin: Twin) -> None:
    for name in "ab":
        twin.reserve(name, "k", BOTH, need(5, 10))
    twin.progress([going(twin, "a", 3, hold=9), going(twin, "b", 4, hold=20), going(twin, "a", 5, hold=7)])


def money_is_all_spent(twin: Twin) -> None:
    twin.reserve("a", "k", ("key:m",), need(10, 1000))
    twin.settle("a", Usage(input_tokens=10, output_tokens=67))
    twin.reserve("b", "k", ("key:m",), need(10, 1000))


def it_comes_slowly(twin: Twin) -> None:
    """Of 60 tokens at one a second two are firm; what was used half a minute ago leaves before the rest has come."""
    slow = Need(input_tokens=0, output_tokens=60, least_output_tokens=60, pace=1.0)
    twin.reserve("a", "k", BOTH, need(50, 0))
    twin.settle("a", Usage(input_tokens=50))
    twin.advance(30_000)
    for name in "bc":
        twin.reserve(name, "k", BOTH, slow)
        twin.check()
    twin.progress([replace(going(twin, "b", 8, hold=52), pace=1.0)])
    twin.settle("b", Usage(output_tokens=9))
    twin.check()
    twin.reserve("d", "k", BOTH, slow)


#: name: (what stands there, what is put in its place, the scene that finds it)
MUTANTS: dict[str, tuple[str, str, Scene]] = {
    "settle twice": ("if raw[1] ~= 'open' then", "if not raw[1] then", it_is_settled_twice),
    "refund minted": (
        "more_out = math.max(0, output - hold.charged_out)",
        "more_out = output - hold.charged_out",
        it_ends_with_less_than_it_reported,
    ),
    "sweep of a live hold": (
        "'ZADD', KEYS[2], now, id",
        "'ZADD', KEYS[2], now - 30000, id",
        a_sweep_comes_while_it_runs,
    ),
    "floor time": (
        "return (bin + 1) * BIN_MS + WINDOW_MS - now end",
        "return math.floor(((bin + 1) * BIN_MS + WINDOW_MS - now) / 1000) * 1000 end",
        two_ask_where_one_may,
    ),
    "partial scope write": (
        "  stand_rates(i, one.counter, one.limit)\n",
        "  stand_rates(i, one.counter, one.limit)\n  if not why then call('HINCRBY', KEYS[4], 'held_in', 1) end\n",
        the_second_scope_refuses,
    ),
    "no idempotent reserve": (
        "if known[1] then return told(",
        "if false then return told(",
        its_reservation_comes_twice,
    ),
    "hold leaks on settle": ("local free_out = all and hold.held_out or ", "local free_out = ", it_ends_early),
    "window a bin short": (
        "oldest = math.floor((now - WINDOW_MS) / BIN_MS)",
        "oldest = math.floor((now - WINDOW_MS) / BIN_MS) + 1",
        a_minute_passes,
    ),
    "window a bin long": (
        "oldest = math.floor((now - WINDOW_MS) / BIN_MS)",
        "oldest = math.floor((now - WINDOW_MS) / BIN_MS) - 1",
        a_minute_passes,
    ),
    "debt not counted": ("add(c, 0, more_in, more_out)", "add(c, 0, more_in, free_out)", it_makes_more_than_it_held),
    "debt not told": ("hold.new_debt = math.min(", "hold.new_debt = 0 * math.min(", it_makes_more_than_it_held),
    "extension without room": (", math.max(0, room))", ", 2 ^ 53)", it_makes_more_than_it_held),
    "allowance a token too many": (
        "return output + covered(",
        "return output + 1 + covered(",
        money_is_asked_for_on_the_way,
    ),
    "late charged twice": ("if known[2] then return 0 end", "", usage_is_ingested_late),
    "stale grant": (" or tonumber(grants) > tonumber(ARGV[2])", "", grants_come_in_the_wrong_order),
    "money stays held": ("a.held = math.max(0, a.held - hold.money_held)", "", money_is_all_spent),
    "forgone after it has left": ("if bin < c.first or bin > newest then return end", "", it_is_refused_after_all),
    "clock that goes back mints": ("if c.last > newest then", "if false then", the_clock_goes_back),
    "revoked key admitted": ("if stops[1] or stops[2] then", "if stops[1] then", a_key_is_revoked),
    "one more at once": ("c.running >= limit.running", "c.running > limit.running", two_ask_where_one_may),
    "one more a minute": ("requests + 1 > limit.requests", "requests > limit.requests", two_ask_where_one_may),
    "yesterday's money back today": (
        "if units >= 0 or born == a.day then",
        "if true then",
        it_is_not_paid_for_and_a_day_has_passed,
    ),
    "cached tokens rounded down": ("math.ceil(cached * plan", "math.floor(cached * plan", part_of_a_prompt_was_cached),
    "cached prompt held for ever": (
        "free_in = (input > 0 or all)",
        "free_in = (weighed(hold.plan, input, cached) > 0 or all)",
        all_of_a_prompt_was_cached,
    ),
    "cost rounded down": (
        "whole + math.ceil(rest / MILLION)",
        "whole + math.floor(rest / MILLION)",
        money_is_all_spent,
    ),
    "last report of a scope wins": (
        "if counters[key] then return counters[key] end",
        "",
        two_are_reported_at_once,
    ),
    "what comes later takes no room": (
        "rooms[k] = math.min(rooms[k - 1], room - c.ahead[k] - ahead[k])",
        "rooms[k] = rooms[k - 1]",
        it_comes_slowly,
    ),
    "what comes later takes room now": ("return wait_ms end", "return at_ms end", it_comes_slowly),
    "what has ended is still to come": ("expect(c, before, NOTHING)", "", it_comes_slowly),
    "what was reported comes again": ("expect(one.counter, before, after)", "", it_comes_slowly),
    "held money lent twice": ("a.held = a.held + money_held", "", money_is_asked_for_on_the_way),
}


def scene_store(valkey: redis.Redis, clock: Clock, mutant: str | None) -> TimedStore:
    old, new, _ = MUTANTS[mutant] if mutant else ("", "", None)
    return Mutated(valkey, clock, old, new) if mutant else TimedStore(valkey, clock)


def set_stage(store: TimedStore, clock: Clock) -> Twin:
    """Limits that a few requests reach, one of each kind, and money."""
    clock.set(10 * DAY_MS + 12_345)
    limits = [
        Limit(scope="key:l", concurrent_requests=3),
        Limit(scope="key:m", money_per_day=Decimal(200) / UNITS),
        Limit(scope="org", tokens_per_minute=100),
        Limit(scope="model:m", requests_per_minute=2),
    ]
    twin = Twin(store, clock, limits, Terms(cached_weight=333, prices=(1_500_000, 333_333, 2_750_001)))
    for scope in ("key:m", "org"):
        twin.lease(scope, Figures(lease=1, granted=500, grants=1))
    return twin


SCENES = sorted({scene for _, _, scene in MUTANTS.values()}, key=lambda scene: scene.__name__)


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_a_scene_is_as_the_model_has_it(valkey: redis.Redis, clock: Clock, scene: Scene) -> None:
    twin = set_stage(scene_store(valkey, clock, None), clock)
    scene(twin)
    twin.check()
    twin.end()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_fault_is_found(valkey: redis.Redis, clock: Clock, mutant: str) -> None:
    store = scene_store(valkey, clock, mutant)
    twin, fault = set_stage(store, clock), None
    try:
        MUTANTS[mutant][2](twin)
        twin.check()
    except (AssertionError, ResponseError) as e:
        fault = e
    assert fault is not None
    assert store.mutated, "the fault was put in"


@pytest.mark.skipif("FOREBAY_LIMITS_MUTANTS" not in os.environ, reason="takes minutes: FOREBAY_LIMITS_MUTANTS=1")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_machine_finds_a_fault_by_itself(valkey: redis.Redis, mutant: str) -> None:
    with pytest.raises((AssertionError, ResponseError, FlakyFailure)):
        run_machine(
            lambda clock: scene_store(valkey, clock, mutant),
            max_examples=400,
            phases=[Phase.generate],
            derandomize=True,
        )
