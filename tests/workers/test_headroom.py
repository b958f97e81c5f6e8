"""What the engine can start now: never more than there is, and whom to preempt for what is urgent."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given
from msgspec.structs import replace as changed

from core.catalog import EngineKnobs, Model, Slo, StepProfile
from core.values import Class
from workers.engine import EngineFacts, EngineStats
from workers.headroom import (
    BOUNDLESS,
    InHand,
    Prefill,
    Shape,
    Turnover,
    advance,
    again_s,
    free_kv_tokens,
    headroom,
    unmeasured,
    victims,
    without,
)

MODEL = Model(context_tokens=8192, slots=16, step=StepProfile(prefill_ms=0.1), engine=EngineKnobs(watermark=0.01))
SHAPE = Shape.of(EngineFacts(slots=16, context_tokens=8192, kv_tokens=40_000), MODEL)
IDLE = EngineStats(running=0, waiting=0, kv_used=0.0)
QUIET = Prefill(tokens_per_s=10_000)


def in_hand(**more: Any) -> InHand:
    fields: dict[str, Any] = {"id": "r", "input_tokens": 100, "expected_tokens": 50, "most_tokens": 200}
    return InHand(**fields | more)


def stats(used_tokens: int) -> EngineStats:
    return EngineStats(running=1, waiting=0, kv_used=used_tokens / SHAPE.kv_tokens)


@st.composite
def requests(draw: st.DrawFn) -> list[InHand]:
    def one(at: int) -> InHand:
        input_tokens, max_tokens = draw(st.integers(1, 8000)), draw(st.integers(1, 4000))
        output_tokens = draw(st.integers(0, max_tokens))
        return InHand(
            id=f"r{at}",
            cls=draw(st.integers(0, 3)),
            attempt=draw(st.integers(1, 5)),
            order=at,
            input_tokens=input_tokens,
            cached_tokens=draw(st.integers(0, input_tokens)) if output_tokens else 0,
            output_tokens=output_tokens,
            expected_tokens=draw(st.integers(0, max_tokens)),
            prefilled=output_tokens > 0,
            most_tokens=max_tokens,
            resumable=draw(st.booleans()),
        )

    return [one(at) for at in range(draw(st.integers(0, 12)))]


# --- KV cache


@given(requests(), st.floats(0, 1.2))
def test_no_more_kv_is_promised_than_is_free(asked: list[InHand], used: float) -> None:
    free = free_kv_tokens(SHAPE, replace(IDLE, kv_used=used), asked)

    assert 0 <= free <= max(0, SHAPE.kv_tokens * (1 - used))


@given(requests(), st.integers(0, 40_000))
def test_what_is_promised_leaves_everybody_in_hand_what_it_is_expected_to_need(
    asked: list[InHand], shared: int
) -> None:
    """The engine's true use: what the prefilled hold, less what they share with one another."""
    holds = sum(one.kv_tokens for one in asked if one.prefilled)
    used = max(0, holds - shared)
    needs = used + sum(one.coming_tokens + (0 if one.prefilled else one.kv_tokens) for one in asked)
    assume(used <= SHAPE.kv_tokens)

    free = free_kv_tokens(SHAPE, stats(used), asked)

    assert free == 0 or needs + free <= SHAPE.kv_tokens + 1


@given(requests(), requests(), st.floats(0, 1), st.floats(0, 1))
def test_more_in_hand_or_more_in_use_never_makes_more_room(
    some: list[InHand], more: list[InHand], used: float, other: float
) -> None:
    low, high = sorted([used, other])

    assert free_kv_tokens(SHAPE, replace(IDLE, kv_used=low), some) >= free_kv_tokens(
        SHAPE, replace(IDLE, kv_used=high), some
    )
    assert free_kv_tokens(SHAPE, replace(IDLE, kv_used=low), some) >= free_kv_tokens(
        SHAPE, replace(IDLE, kv_used=low), some + more
    )


def test_an_empty_engine_offers_all_of_it() -> None:
    """Or the largest request that was let in could never start."""
    room = headroom(SHAPE, IDLE, [], QUIET)

    assert (room.kv_tokens, room.total_kv_tokens, room.context_tokens, room.idle) == (40_000, 40_000, 8192, True)


def test_what_was_claimed_a_moment_ago_counts_although_the_engine_does_not_show_it_yet() -> None:
    claimed = in_hand(input_tokens=30_000, expected_tokens=500, most_tokens=500)

    assert free_kv_tokens(SHAPE, IDLE, [claimed]) == 40_000 - 30_500 - SHAPE.spare_tokens


def test_a_long_prompt_half_computed_is_not_counted_twice() -> None:
    """The engine shows half of it; the sum over those in hand knows all."""
    claimed = in_hand(input_tokens=20_000, expected_tokens=500, most_tokens=None)

    assert free_kv_tokens(SHAPE, stats(10_000), [claimed]) == 40_000 - 20_500 - SHAPE.spare_tokens


def test_a_shared_prefix_is_counted_once_where_the_engine_shows_it() -> None:
    asked = [in_hand(id=f"r{n}", input_tokens=10_000, output_tokens=10, prefilled=True) for n in range(8)]

    assert free_kv_tokens(SHAPE, stats(12_000), asked) == 28_000 - 8 * OVERRUN - SHAPE.spare_tokens


#: One that has made 10 of the 50 that are expected is reckoned to make this many more.
OVERRUN = 64


def test_who_outgrew_what_was_expected_is_expected_to_go_on_but_never_beyond_its_limit() -> None:
    grown = in_hand(output_tokens=150, prefilled=True)

    assert grown.coming_tokens == 50
    assert changed(grown, most_tokens=1000).coming_tokens == OVERRUN
    assert changed(grown, most_tokens=150).coming_tokens == 0


def test_an_engine_that_does_not_tell_its_kv_is_not_bounded_by_it() -> None:
    room = headroom(replace(SHAPE, kv_tokens=0), IDLE, [in_hand()], QUIET)

    assert (room.kv_tokens, room.total_kv_tokens) == (-1, -1)


# --- prefill


def looked(prefill: Prefill, now_s: float, done: int = 0, **waiting: int) -> Prefill:
    return advance(prefill, now_s, waiting, done, SHAPE.step_tokens)


def test_a_backlog_flows_off_at_the_rate_of_prefill() -> None:
    prefill = looked(QUIET, 1.0, a=8000)
    assert prefill.backlog_tokens == 8000

    prefill = looked(prefill, 1.5, a=8000)
    assert (prefill.backlog_tokens, again_s(SHAPE, prefill)) == (3000, 0.1976)

    assert looked(prefill, 1.6, done=8000).backlog_tokens == 0, "it has its first token"


def test_all_but_one_prompt_is_surely_still_to_do() -> None:
    """One goes after the other; so however long it takes, the second waits until the first has its token."""
    prefill = looked(QUIET, 1.0, a=8000, b=3000)

    assert looked(prefill, 60.0, a=8000, b=3000).backlog_tokens == 3000


@given(st.lists(st.tuples(st.floats(0, 5), st.dictionaries(st.sampled_from("abcd"), st.integers(0, 9000)))))
def test_the_backlog_lies_between_nothing_and_all_that_waits(looks: list[tuple[float, dict[str, int]]]) -> None:
    prefill, now_s = QUIET, 0.0
    for since_s, waiting in looks:
        now_s += since_s
        prefill = advance(prefill, now_s, waiting, 0, SHAPE.step_tokens)
        assert 0 <= prefill.backlog_tokens <= sum(waiting.values())


@given(st.integers(0, 20_000), st.floats(1, 10**6))
def test_what_may_be_added_holds_the_objective_and_a_step(backlog: int, rate: float) -> None:
    prefill = replace(QUIET, tokens_per_s=rate, backlog_tokens=backlog)

    room = headroom(SHAPE, IDLE, [], prefill)

    assert list(room.prefill_tokens) == sorted(room.prefill_tokens)
    for tokens, ttft_s in zip(room.prefill_tokens, SHAPE.ttft_s, strict=True):
        assert tokens == 0 or (backlog + tokens) <= min(rate * ttft_s, SHAPE.step_tokens)


def test_one_long_prompt_may_come_when_less_than_half_a_step_is_waiting() -> None:
    assert headroom(SHAPE, IDLE, [], looked(QUIET, 1, a=1023)).idle
    assert not headroom(SHAPE, IDLE, [], looked(QUIET, 1, a=1024)).idle


def test_the_rate_is_measured_while_a_steps_worth_is_waiting() -> None:
    """Half as fast as the catalogue says: 8000 tokens in 1.6 s."""
    prefill = looked(QUIET, 1.0, a=8000)
    for tenth in range(1, 16):
        prefill = looked(prefill, 1 + tenth / 10, a=8000)
    prefill = looked(prefill, 2.6, done=8000)

    assert round(prefill.tokens_per_s) == 10_000 - 0.3 * 5000


def test_small_prompts_do_not_pass_for_a_slow_engine() -> None:
    """A prompt of ten tokens takes a step as well: that says nothing of how many would fit in it."""
    prefill = QUIET
    for n in range(1000):
        prefill = looked(looked(prefill, n, a=10), n + 0.5, done=10)

    assert prefill.tokens_per_s == 10_000


def test_cached_prompts_do_not_pass_for_a_slow_engine() -> None:
    """Nor do such as were handed back: what was not computed took no time."""
    prefill = QUIET
    for n in range(200):
        prefill = looked(looked(prefill, n, a=8000, b=8000), n + 0.1, done=100)

    assert prefill.tokens_per_s == 10_000


def test_a_profile_without_prefill_time_bounds_nothing() -> None:
    prefill = unmeasured(Model(context_tokens=10, step=StepProfile(prefill_ms=0)))

    assert prefill.tokens_per_s == BOUNDLESS
    assert headroom(SHAPE, IDLE, [], prefill).prefill_tokens == (SHAPE.step_tokens,) * 4


def test_a_slow_engine_takes_only_what_its_objective_allows() -> None:
    slow = replace(QUIET, tokens_per_s=1000)

    assert headroom(SHAPE, IDLE, [], slow).prefill_tokens == (500, 1000, 2048, 2048)
    assert Slo().ttft_s == SHAPE.ttft_s


# --- preemption


@given(requests(), st.integers(0, 3))
def test_only_who_is_less_urgent_and_loses_nothing_is_preempted(asked: list[InHand], cls: int) -> None:
    chosen = victims(asked, cls)

    for one in chosen:
        assert one.cls > cls and one.attempt <= 3 and (one.resumable or one.output_tokens == 0)
    assert [one.cls for one in chosen] == sorted((one.cls for one in chosen), reverse=True)


def test_the_least_urgent_goes_first_then_who_has_made_least_then_who_began_last() -> None:
    asked = [
        in_hand(id="default", cls=Class.DEFAULT, output_tokens=0),
        in_hand(id="long", cls=Class.BULK, output_tokens=90, most_tokens=200, resumable=True),
        in_hand(id="old", cls=Class.BULK, output_tokens=0, order=1),
        in_hand(id="new", cls=Class.BULK, output_tokens=0, order=2),
        in_hand(id="seeded", cls=Class.BULK, output_tokens=5),
        in_hand(id="often", cls=Class.BULK, attempt=4),
    ]

    assert [one.id for one in victims(asked, Class.INTERACTIVE)] == ["new", "old", "long", "default"]
    assert victims(asked, Class.BULK) == []


@given(requests(), st.floats(0, 1))
def test_without_a_victim_there_is_never_less_room_and_never_more_than_it_had(asked: list[InHand], used: float) -> None:
    seen = replace(IDLE, kv_used=used)
    waiting = {one.id: one.kv_tokens for one in asked if not one.prefilled}
    prefill = advance(QUIET, 1, waiting, 0, SHAPE.step_tokens)
    before = headroom(SHAPE, seen, asked, prefill)

    for victim in asked:
        after = without(victim, SHAPE, seen, asked, prefill)
        gained = after.kv_tokens - before.kv_tokens
        assert gained >= 0
        assert all(now >= then for now, then in zip(after.prefill_tokens, before.prefill_tokens, strict=True))
        if len(asked) > 1 and before.kv_tokens > 0:
            assert gained <= victim.kv_tokens + victim.coming_tokens + 1


def test_a_victim_in_the_middle_of_its_prompt_takes_its_backlog_along() -> None:
    bulk = in_hand(cls=Class.BULK, input_tokens=8000)
    prefill = looked(QUIET, 1, r=8000)
    assert not headroom(SHAPE, IDLE, [bulk], prefill).idle

    assert without(bulk, SHAPE, IDLE, [bulk], prefill).idle


@given(st.floats(1.0, 10_000.0), st.floats(1_000.0, 1e6))
def test_what_is_computed_is_held_as_long_as_it_takes_to_fill_the_cache_anew(per_s: float, kv_tokens: float) -> None:
    """A steady load for ten times the memory: the residency is the cache's size over the rate."""
    turnover, now_s = Turnover(), 0.0
    for _ in range(1200):
        now_s += 1.0
        turnover = turnover.after(round(per_s), now_s)

    expected_s = kv_tokens / max(round(per_s), 1)
    assert turnover.residency_s(int(kv_tokens), now_s) == pytest.approx(expected_s, rel=0.05)


def test_an_idle_engine_keeps_what_it_has() -> None:
    assert Turnover().residency_s(1000, 5.0) == math.inf
    busy = Turnover().after(10_000, 0.0)
    assert busy.residency_s(1000, 600.0) > 10 * busy.residency_s(1000, 0.0)
