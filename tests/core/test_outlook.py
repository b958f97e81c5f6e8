"""How long a wait will be: what a pace learns, and what is told of it."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core import outlook
from core.outlook import (
    ESTIMATE_MAX_MS,
    LEAD_MS,
    RETRY_MAX_MS,
    RETRY_MIN_MS,
    RETRY_UNKNOWN_MS,
    STALE_MS,
    Pace,
    Starting,
    estimate_ms,
    over,
    retry_after_ms,
)
from core.values import WorkerState

looks = st.tuples(st.integers(0, 10**6), st.integers(0, 1000), st.integers(0, 8), st.integers(0, 10**7))


def paced(per_s: float, seconds: int, *, pace: Pace | None = None, workers: int = 1) -> Pace:
    """A queue that always has something waiting, looked at each second."""
    pace = pace or Pace()
    first, began_ms = max(pace.started, 0), pace.looked_ms
    for second in range(1, seconds + 1):
        pace = pace.look(first + int(per_s * second), 10, workers, began_ms + second * 1000)
    return pace


@pytest.mark.parametrize("per_s", [0.2, 1, 7, 300])
def test_a_pace_is_what_the_queue_starts_in_a_second(per_s: float) -> None:
    assert paced(per_s, 120).per_s == pytest.approx(per_s, rel=0.1)


def test_a_pace_follows_a_change_within_two_minutes() -> None:
    assert paced(20, 120, pace=paced(2, 300)).per_s == pytest.approx(20, rel=0.2)


def test_an_empty_queue_teaches_nothing() -> None:
    """Its starts are its arrivals: a queue that is asked for little is not slow."""
    pace = busy = paced(50, 60)
    for second in range(61, 300):
        pace = pace.look(busy.started + (second - 60) // 10, 0, 1, second * 1000)

    assert pace.per_s == pytest.approx(50, rel=0.1)


def test_chance_arrivals_do_not_shake_the_estimate_much() -> None:
    seeded = random.Random(7)
    pace, started = Pace(), 0
    seen = []
    for second in range(600):
        started += sum(seeded.random() < 0.1 for _ in range(50))  # five a second
        pace = pace.look(started, 10, 1, second * 1000)
        seen.append(pace.per_s)

    assert all(rate is not None and 3.5 < rate < 6.5 for rate in seen[60:])


@pytest.mark.parametrize(
    ("started", "workers", "after_ms"),
    [(5000, 0, 1000), (1, 1, 1000), (5000, 1, STALE_MS + 1)],
    ids=["nobody moves it", "another store", "too long ago"],
)
def test_a_pace_that_means_nothing_any_more_is_forgotten(started: int, workers: int, after_ms: int) -> None:
    known = paced(10, 60)

    assert known.look(started, 10, workers, known.looked_ms + after_ms).per_s is None


@given(st.lists(looks, max_size=20))
def test_whatever_is_seen_a_pace_is_unknown_or_above_zero(seen: list[tuple[int, int, int, int]]) -> None:
    pace = Pace()
    for look in seen:
        pace = pace.look(*look)

    assert pace.per_s is None or pace.per_s > 0


@given(st.integers(1, 10**6), st.floats(0.001, 10**5))
def test_an_estimate_grows_with_the_place_and_has_a_bound(place: int, per_s: float) -> None:
    pace = Pace(starts=per_s, ms=1000.0)

    first, second = estimate_ms(place, pace), estimate_ms(place + 1, pace)

    assert first is not None and second is not None
    assert 0 < first <= second <= ESTIMATE_MAX_MS


def test_without_a_pace_there_is_no_telling() -> None:
    assert estimate_ms(3, Pace()) is None


def test_a_worker_that_starts_is_waited_for_first() -> None:
    loading = Starting(state=WorkerState.LOADING, since_ms=5_000)

    assert estimate_ms(1, Pace(), loading) == LEAD_MS[WorkerState.LOADING] - 5_000 + LEAD_MS[WorkerState.WARMING]
    assert estimate_ms(10, Pace(starts=2.0, ms=1000.0), loading) == loading.left_ms + 5_000


@pytest.mark.parametrize("detail", ["", "asking the canary"])
def test_a_worker_is_nearer_in_each_state_and_never_there(detail: str) -> None:
    states = [state for state in LEAD_MS if state is not WorkerState.FETCHING]
    left = [Starting(state=state, detail=detail).left_ms for state in states]

    assert all(after < before for before, after in itertools.pairwise(left))
    assert Starting(state=WorkerState.WARMING, since_ms=10**9).left_ms == 1000


@given(
    st.integers(-10, 10**6),
    st.one_of(st.just(Pace()), st.builds(Pace, starts=st.floats(0.0, 10**6), ms=st.floats(1.0, 10**6))),
    st.one_of(st.none(), st.builds(Starting, state=st.sampled_from(sorted(LEAD_MS)), since_ms=st.integers(0, 10**6))),
)
def test_nobody_is_told_to_come_at_once_or_next_week(above: int, pace: Pace, starting: Starting | None) -> None:
    assert RETRY_MIN_MS <= retry_after_ms(above, pace, starting) <= RETRY_MAX_MS


def test_when_to_come_again_follows_from_what_is_above_the_bound_and_the_pace() -> None:
    pace = Pace(starts=0.5, ms=1000.0)

    assert retry_after_ms(1, pace) == 2_000
    assert retry_after_ms(20, pace) == 40_000
    assert retry_after_ms(20, Pace()) == RETRY_UNKNOWN_MS


def test_a_long_request_must_wait_for_more_of_the_queue_than_a_short_one() -> None:
    """Ten wait with 1,000 tokens each, of 12,000 that may: one of 1,500 fits, one of 5,000 needs room for three."""
    bounds = {"waiting_max": 100, "tokens_max": 12_000}

    assert over(10, 10_000, **bounds, input_tokens=5_000) == 3
    assert over(10, 10_000, **bounds, input_tokens=50_000) == 10, "no more than there are"
    assert over(100, 1_000, **bounds, input_tokens=10) == 1


def test_what_is_told_can_be_carried() -> None:
    starting = Starting(state=WorkerState.LOADING, detail="d", since_ms=3)

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(starting), type=Starting) == starting
    assert outlook.Pace() == msgspec.msgpack.decode(msgspec.msgpack.encode(Pace()), type=Pace)
