"""The store of limits is away and the queue is there: who is served, how much, for how long, and when that ends."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import ForebayError, LimitsDown
from core.limits import counters
from core.limits.counters import Need, Terms
from core.redis import AWAY, Store
from core.values import Caller, Limit, Request, Sampling, Usage
from ops import stores
from web.limiter import LIMITS_S, Limiter
from web.local_share import LOCAL_S, LocalShare, part
from web.refusals import Asked

KEY = Limit(scope="key:k", requests_per_minute=100, tokens_per_minute=1000, concurrent_requests=40)
FREE = Limit(scope="key:k")


def need(input_tokens: int = 10, output_tokens: int = 0) -> Need:
    return Need(input_tokens=input_tokens, output_tokens=output_tokens, least_output_tokens=output_tokens)


# --- the share


def test_half_of_its_part_is_a_gateways_share() -> None:
    assert [part(100, gateways) for gateways in (1, 2, 3, 0)] == [50, 25, 16, 50]


@given(
    asked=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 60), st.integers(0, 60), st.booleans()), max_size=60),
    limit=st.integers(0, 400),
    gateways=st.integers(1, 4),
)
def test_in_any_minute_what_was_used_and_is_held_stays_below_the_share(
    asked: list[tuple[int, int, int, bool]], limit: int, gateways: int
) -> None:
    """Against a count of all that happened: at each admission, the last 60 s and what is open, in any order of times
    and ends. A token's moment is that of its end, for what ended, as the scripts have it."""
    share, limits = LocalShare(), [Limit(scope="org", tokens_per_minute=limit, requests_per_minute=limit // 10)]
    used: list[tuple[float, int]] = []
    begun: list[float] = []
    held: dict[str, int] = {}
    now_s = 1000.0
    for number, (pause, wants, holds, ends) in enumerate(asked):
        now_s += pause / 10
        request_id = str(number)
        refused = share.admit("o", request_id, limits, need(wants, holds), gateways=gateways, now_s=now_s)
        recent = sum(tokens for at, tokens in used if at > now_s - 60)
        requests = sum(at > now_s - 60 for at in begun)
        if refused is None:
            held[request_id] = wants + holds
            begun.append(now_s)
            assert recent + sum(held.values()) <= part(limit, gateways)
            assert requests + 1 <= part(limit // 10, gateways)
        if ends and held:
            over = next(iter(held))
            used.append((now_s, held.pop(over)))
            share.settle(over, used[-1][1], 0, now_s=now_s)


def test_what_has_left_the_window_is_free_again_and_what_runs_is_not() -> None:
    share, limits = LocalShare(), [Limit(scope="org", tokens_per_minute=100)]

    def admit(name: str, now_s: float, tokens: int = 25) -> bool:
        return share.admit("o", name, limits, need(tokens), gateways=1, now_s=now_s) is None

    assert admit("a", 0.0) and admit("b", 0.0) and not admit("c", 30.0)
    share.settle("a", 25, 0, now_s=1.2)
    assert not admit("c", 61.4), "its half second has not left"
    assert admit("c", 61.5) and not admit("d", 61.5), "b runs"
    assert not admit("d", 600.0)


def test_a_repeat_holds_nothing_more_and_settles_once() -> None:
    share = LocalShare()
    for _ in range(3):
        assert share.admit("o", "a", [KEY], need(500), gateways=1, now_s=0.0) is None
    for _ in range(3):
        share.settle("a", 0, 0, now_s=0.0)
    assert share.admit("o", "b", [KEY], need(500), gateways=1, now_s=0.0) is None


def test_organisations_share_nothing_and_no_scope_is_held_alone() -> None:
    share = LocalShare()
    tight = Limit(scope="org", concurrent_requests=2)
    assert share.admit("o", "a", [KEY, tight], need(500), gateways=1, now_s=0.0) is None
    assert share.admit("o", "b", [FREE, tight], need(1), gateways=1, now_s=0.0) == tight
    assert share.admit("p", "c", [KEY, tight], need(500), gateways=1, now_s=0.0) is None
    share.settle("a", 0, 0, now_s=0.0)
    assert share.admit("o", "d", [KEY, tight], need(500), gateways=1, now_s=0.0) is None, "b held nothing of the key"


def test_each_limit_binds() -> None:
    for name in (
        "requests_per_minute", "tokens_per_minute", "input_tokens_per_minute", "output_tokens_per_minute",
        "concurrent_requests",
    ):  # fmt: skip
        share, limit = LocalShare(), Limit(scope="key:k", **{name: 2})
        got = [share.admit("o", f"{n}", [limit], need(1, 1), gateways=1, now_s=0.0) for n in range(3)]
        most = 0 if name == "tokens_per_minute" else 1
        assert [one is None for one in got].count(True) == most, name


# --- an outage


class Limits:
    """A Valkey of its own for limits, that can be stopped, frozen and started again."""

    def __init__(self, data: Path) -> None:
        self.data, self.server = data, stores.start_valkey(data)

    def stop(self) -> None:
        self.server.stop()

    def start(self) -> None:
        self.server = stores.start_valkey(self.data)

    def freeze(self) -> None:
        os.kill(self.server.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.server.pid, signal.SIGCONT)


@pytest.fixture
def limits() -> Iterator[Limits]:
    with tempfile.TemporaryDirectory(prefix="fb-", ignore_cleanup_errors=True) as folder:
        server = Limits(Path(folder))
        yield server
        server.start()
        server.stop()


@pytest.fixture
def ours(limits: Limits) -> Iterator[Limiter]:
    store = Store.connect(limits.server.url, exchange_s=LIMITS_S)
    yield Limiter(store, apart=True, gateways=lambda: 2)
    store.close()


def request(name: str) -> Request:
    caller = Caller(org_id="o", project_id="p", key_id="k")
    return Request(
        id=name, model="m", caller=caller, gateway="g", prompt_token_ids=[1], sampling=Sampling(max_tokens=5)
    )


def reserve(ours: Limiter, name: str, limit: Limit = KEY, plan: str = "postpaid", asked: Need | None = None) -> str:
    """ "held", "local", or the code of the refusal."""
    try:
        reserved = ours.reserve(request(name), [limit], Asked("m", asked or need()), Terms(), plan=plan)
    except ForebayError as e:
        return e.error_code or ""
    return "held" if reserved.left else "local"


def test_postpaid_goes_on_by_a_share_and_no_refusal_is_a_429(limits: Limits, ours: Limiter) -> None:
    assert reserve(ours, "before") == "held"
    limits.stop()

    got = [reserve(ours, f"r{n}") for n in range(30)]

    assert got == ["local"] * 10 + ["limits_unavailable"] * 20, "half of 40 at once, by two gateways"


def test_what_is_not_limited_stays_so(limits: Limits, ours: Limiter) -> None:
    limits.stop()
    assert {reserve(ours, f"r{n}", FREE) for n in range(50)} == {"local"}


@pytest.mark.parametrize(
    ("limit", "plan"),
    [
        (FREE, "prepaid"),
        (FREE, "free"),
        (Limit(scope="key:k", money_per_day=Decimal(1)), "postpaid"),
        (Limit(scope="org", prepaid=True), "postpaid"),
    ],
)
def test_what_money_binds_and_what_is_free_is_refused_and_told_why(
    limits: Limits, ours: Limiter, limit: Limit, plan: str
) -> None:
    limits.stop()
    with pytest.raises(LimitsDown) as refused:
        ours.reserve(request("a"), [limit], Asked("m", need()), Terms(), plan=plan)
    assert refused.value.status == 503 and refused.value.retry_after_ms and "money" in refused.value.message


def test_after_a_minute_nobody_is_served_until_it_is_back(limits: Limits, ours: Limiter) -> None:
    limits.stop()
    assert reserve(ours, "a", FREE) == "local"
    assert ours.away_since_s is not None

    ours.away_since_s -= LOCAL_S + 0.01
    assert [reserve(ours, "b", FREE), reserve(ours, "c")] == ["limits_unavailable"] * 2

    limits.start()
    assert reserve(ours, "d") == "held"
    assert ours.away_since_s is None


def test_its_return_is_seen_by_the_very_next_request(limits: Limits, ours: Limiter) -> None:
    limits.stop()
    assert reserve(ours, "a") == "local"
    limits.start()
    assert [reserve(ours, f"r{n}") for n in range(3)] == ["held"] * 3


def test_a_store_that_hangs_costs_one_request_at_a_time_a_moment(limits: Limits, ours: Limiter) -> None:
    """Of many at once one waits for it, LIMITS_S; the others go by their share at once."""
    assert reserve(ours, "before") == "held"
    limits.freeze()
    try:
        began_s = time.monotonic()
        assert reserve(ours, "first", FREE) == "local"
        assert time.monotonic() - began_s < 4 * LIMITS_S

        def timed(name: str) -> float:
            began_s = time.monotonic()
            assert reserve(ours, name, FREE) == "local"
            return time.monotonic() - began_s

        with ThreadPoolExecutor(8) as pool:
            took = sorted(pool.map(timed, [f"r{n}" for n in range(40)]))
        assert took[20] < LIMITS_S / 2, "most do not wait"
    finally:
        limits.thaw()
    until_held(ours)


def until_held(ours: Limiter) -> None:
    deadline = time.monotonic() + 5
    while reserve(ours, "after") != "held":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_was_admitted_alone_frees_its_share_as_it_ends_and_settles_nothing(limits: Limits, ours: Limiter) -> None:
    limits.stop()
    assert reserve(ours, "a", asked=need(200)) == "local"
    assert reserve(ours, "b", asked=need(200)) == "limits_unavailable"

    ours.settle(request("a"), Usage(input_tokens=50), billed=True)

    assert reserve(ours, "c", asked=need(200)) == "local", "50 of 250 are used"
    limits.start()
    [used] = ours.store.run(counters.used("o", [KEY]))
    assert (used.open, used.held_tokens) == (0, 0)


def test_a_second_outage_finds_what_was_used_in_the_first(limits: Limits, ours: Limiter) -> None:
    limits.stop()
    assert reserve(ours, "a", asked=need(200)) == "local"
    limits.start()
    assert reserve(ours, "b") == "held"
    limits.stop()
    assert reserve(ours, "c", asked=need(200)) == "limits_unavailable"


def test_where_the_queue_is_in_the_same_store_there_is_no_share(limits: Limits) -> None:
    """What cannot be queued is not admitted either: `Admission` says that the store is away."""
    store = Store.connect(limits.server.url)
    limits.stop()
    with pytest.raises(AWAY):
        Limiter(store).reserve(request("a"), [FREE], Asked("m", need()), Terms(), plan="postpaid")
    store.close()


def test_headers_say_nothing_while_nobody_can_count(limits: Limits, ours: Limiter) -> None:
    assert ours.left("o", [KEY])
    limits.stop()
    assert ours.left("o", [KEY]) == ()
