"""The limiter's laws, on a real Valkey with its clock in the test's hand."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import redis
from hypothesis import HealthCheck, given, settings

from core.limits.counters import Refused, Reserved, open_before, progress, reserve, settle
from core.limits.scopes import Limit, of_key
from core.redis import Store
from tests.conftest import Clock

STORES = ("single", "cluster")

SCOPES = ["key:k"]


def ask(store: Store, name: str, rpm: int | None = None, concurrent: int | None = None) -> Reserved | Refused:
    return store.run(reserve("o", name, "m", of_key("k", rpm, concurrent)))


def test_requests_per_minute_hold_in_any_window(store: Store, clock: Clock) -> None:
    clock.set(60_500)
    got = [ask(store, f"r{n}", rpm=3) for n in range(4)]

    assert [type(one).__name__ for one in got] == ["Reserved"] * 3 + ["Refused"]
    refused = got[3]
    assert isinstance(refused, Refused) and refused.retry_after_ms is not None
    clock.advance(refused.retry_after_ms - 1)
    assert isinstance(ask(store, "early", rpm=3), Refused)
    clock.advance(1)
    assert isinstance(ask(store, "in time", rpm=3), Reserved)


def test_concurrency_frees_with_the_ending(store: Store) -> None:
    assert isinstance(ask(store, "a", concurrent=1), Reserved)
    assert ask(store, "b", concurrent=1) == Refused(
        limit=of_key("k", None, 1)[0], reason="concurrency", retry_after_ms=None
    )

    assert store.run(settle("o", "a", SCOPES, 10)) is True
    assert isinstance(ask(store, "b", concurrent=1), Reserved)


def test_a_hold_is_settled_once(store: Store) -> None:
    ask(store, "a", concurrent=2)

    assert [store.run(settle("o", "a", SCOPES, 10)) for _ in range(3)] == [True, False, False]
    assert store.run(settle("o", "never reserved", SCOPES, 10)) is False


def test_a_repeated_reserve_opens_one_hold(store: Store) -> None:
    """The gateway repeats a call whose reply was lost."""
    first, again = ask(store, "a", rpm=5, concurrent=1), ask(store, "a", rpm=5, concurrent=1)

    assert isinstance(first, Reserved) and isinstance(again, Reserved)
    assert store.run(open_before("o", 10**15)) == ["a"]
    assert again.requests_left == first.requests_left == 4


def test_progress_charges_each_token_once(store: Store, valkey: redis.Redis) -> None:
    ask(store, "a")

    assert store.run(progress("o", [("a", "key:k", 10), ("gone", "key:k", 5)])) == [True, False]
    assert store.run(progress("o", [("a", "key:k", 10)])) == [True]
    store.run(settle("o", "a", SCOPES, 25))

    assert valkey.hget("f1:{org:o}:used:key:k", "t1000") == b"25"


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(["reserve", "settle", "wait"]), st.integers(1, 40_000)), max_size=60))
def test_any_window_has_at_most_the_limit(
    store: Store, clock: Clock, valkey: redis.Redis, steps: list[tuple[str, int]]
) -> None:
    """Against a plain model: begun times and open requests."""
    valkey.flushall()
    clock.set(1_000_000)
    begun: list[int] = []
    live: list[str] = []
    for n, (step, amount) in enumerate(steps):
        if step == "wait":
            clock.advance(amount)
        elif step == "settle" and live:
            assert store.run(settle("o", live.pop(amount % len(live)), SCOPES, amount))
        elif step == "reserve":
            inside = sum(1 for at in begun if at > clock.now_ms - 60_000)
            if isinstance(ask(store, f"r{n}", rpm=5, concurrent=3), Reserved):
                begun.append(clock.now_ms)
                live.append(f"r{n}")
                assert inside < 5
            assert len(live) <= 3

    assert valkey.hget("f1:{org:o}:used:key:k", "running") in (None, str(len(live)).encode())


def test_every_scope_or_none(store: Store, valkey: redis.Redis) -> None:
    limits = (Limit(scope="a", requests_per_minute=9), Limit(scope="b", requests_per_minute=0))

    refused = store.run(reserve("o", "r", "m", limits))

    assert isinstance(refused, Refused) and refused.limit.scope == "b"
    assert list(valkey.scan_iter("f1:{org:o}:*")) == []


@pytest.mark.parametrize("rpm", [None, 0])
def test_no_limit_is_not_a_limit_of_zero(store: Store, rpm: int | None) -> None:
    assert isinstance(ask(store, "a", rpm=rpm), Reserved if rpm is None else Refused)
