"""The router prefers who holds most of a prompt, says why, and no preference keeps a request waiting for long."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.prefix import chain, checkpoints, depths, hold, holders
from core.redis import Store
from tasks.queue import STEAL_MS, Claimed, Queue, Room, Task
from tests.conftest import Clock
from web.router import NAMED_STEAL_MS, NEAR, PREFERRED_MAX, WORTH, Route, by_name, prefer

WORKERS = ("w1", "w2", "w3", "w4", "w5")
BLOCK_TOKENS = 16
BLOCK_MS = 25.0

held_by = st.lists(st.lists(st.sampled_from(WORKERS), max_size=4, unique=True), max_size=12)


def route(blocks: int, held: list[list[str]], live: Any = WORKERS) -> Route:
    return prefer(blocks, depths(blocks)[: len(held)], held, live, block_ms=BLOCK_MS)


@given(held_by, st.sets(st.sampled_from(WORKERS)))
def test_at_most_three_live_holders_are_preferred_the_deepest_first(held: list[list[str]], live: set[str]) -> None:
    """And it is told how deep: a share of the prompt that is worth it, and nobody among them holds much less."""
    blocks = 256
    chosen = route(blocks, held, live)
    at = depths(blocks)
    deepest = {w: max(at[n] for n, workers in enumerate(held) if w in workers) for workers in held for w in workers}
    best = max((depth for worker, depth in deepest.items() if worker in live), default=0)

    assert len(set(chosen.preferred)) == len(chosen.preferred) <= PREFERRED_MAX
    assert set(chosen.preferred) <= live
    assert [deepest[worker] for worker in chosen.preferred] == sorted(
        (deepest[worker] for worker in chosen.preferred), reverse=True
    )
    assert all(deepest[worker] >= NEAR * best for worker in chosen.preferred)
    assert bool(chosen.preferred) == (best >= WORTH * blocks) == (chosen.reason == "held")
    assert bool(chosen.preferred) == (chosen.steal_ms > 0)


@pytest.mark.parametrize(("held", "live", "expected"), [
    ([], WORKERS, Route(reason="nobody holds it", blocks=4)),
    ([[], [], []], WORKERS, Route(reason="nobody holds it", blocks=4)),
    ([["w1"], ["w1"], []], ("w2",), Route(reason="its holders are gone", blocks=4)),
    ([["w1"], [], []], WORKERS, Route(reason="held", preferred=("w1",), steal_ms=200, held_blocks=1, blocks=4)),
    ([["w1", "w2"], ["w2"], []], WORKERS,
     Route(reason="held", preferred=("w2",), steal_ms=400, held_blocks=2, blocks=4)),
    ([["w2", "w1"], ["w2", "w1"], []], WORKERS,
     Route(reason="held", preferred=("w2", "w1"), steal_ms=400, held_blocks=2, blocks=4)),
])  # fmt: skip
def test_each_decision_says_why(held: list[list[str]], live: Any, expected: Route) -> None:
    assert route(4, held, live) == expected


def test_a_short_common_beginning_is_no_reason_to_wait() -> None:
    assert route(100, [["w1"], ["w1"], ["w1"], ["w1"]]) == Route(reason="too little of it", held_blocks=8, blocks=100)


def test_what_is_soon_computed_is_no_reason_to_wait() -> None:
    chosen = prefer(4, depths(4), [["w1"]] * 3, WORKERS, block_ms=1.6)

    assert (chosen.reason, chosen.preferred) == ("too little of it", ())


def test_the_wait_grows_with_what_it_saves() -> None:
    waits_ms = [route(blocks, [["w1"]] * len(depths(blocks))).steal_ms for blocks in (1, 16, 256)]

    assert waits_ms == sorted(set(waits_ms))


# --- with the index and the queue


class Place:
    """A gateway and workers that meet in a real queue."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self.store, self.clock, self.queue = store, clock, Queue("m")
        self.nonces = itertools.count()
        self.prompts: dict[str, tuple[bytes, ...]] = {}

    def ask(self, name: str, prompt: list[int]) -> Route:
        """As admission does it."""
        hashes = chain(prompt, BLOCK_TOKENS, "salt")
        marks = self.prompts[name] = checkpoints(hashes)
        held = self.store.run(holders("m", marks))
        chosen = prefer(len(hashes), depths(len(hashes)), held, WORKERS, block_ms=1.6)
        task = Task(
            id=name, message=b"m", input_tokens=len(prompt), preferred=chosen.preferred, steal_ms=chosen.steal_ms
        )
        self.store.run(self.queue.enqueue(task))
        return chosen

    def put(self, name: str, **more: Any) -> None:
        """One whose prompt is its own."""
        self.prompts[name] = ()
        self.store.run(self.queue.enqueue(Task(id=name, message=b"m", **more)))

    def look(self, worker: str, want: int = 1, **room: Any) -> Claimed:
        """As a worker does it."""
        nonce = str(next(self.nonces))
        call = self.queue.claim(worker, want, lease_ms=10_000, nonce=nonce, room=Room(**room))
        claimed = self.store.run(call)
        for claim in claimed.claims:
            self.store.run(hold("m", worker, self.prompts[claim.id]))
        return claimed

    def claim(self, worker: str, want: int = 1, **room: Any) -> list[str]:
        return [claim.id for claim in self.look(worker, want, **room).claims]


@pytest.fixture
def place(store: Store, clock: Clock) -> Place:
    return Place(store, clock)


PROMPT = list(range(1024))
BUSY: dict[str, Any] = {"prefill_tokens": (0,) * 4, "idle": False}


def test_a_second_request_of_a_prefix_goes_to_the_worker_that_holds_it(place: Place) -> None:
    place.ask("first", PROMPT)
    assert place.claim("w1", 2) == ["first"]
    place.ask("stranger", [7] * 1024)
    chosen = place.ask("second", [*PROMPT, *range(500)])

    assert (chosen.reason, chosen.preferred, chosen.held_blocks) == ("held", ("w1",), 64)
    assert place.claim("w2", 2) == ["stranger"], "it leaves the other to whom it prefers"
    assert place.claim("w1", 2) == ["second"]


def test_it_waits_for_a_holder_that_has_room_or_only_computes_other_prompts_and_not_for_long(place: Place) -> None:
    place.ask("first", PROMPT)
    place.claim("w1", 2)
    place.ask("another", [7] * 1024)
    assert place.claim("w1", 2, **BUSY) == []
    steal_ms = place.ask("second", PROMPT).steal_ms
    place.claim("w2")  # the other one

    assert 0 < steal_ms < STEAL_MS
    assert place.look("w2").due_ms == steal_ms
    place.clock.advance(steal_ms - 1)
    assert place.claim("w2") == []
    place.clock.advance(1)
    assert place.claim("w2") == ["second"]


@pytest.mark.parametrize("gone", ["no slots", "dead"])
def test_who_has_no_room_is_not_waited_for(place: Place, gone: str) -> None:
    place.ask("first", PROMPT)
    place.claim("w1", 1 if gone == "no slots" else 2)
    if gone == "dead":
        place.store.run(place.queue.tick("w1"))
    place.ask("second", PROMPT)

    assert "second" in place.claim("w2", 4)


def test_a_prefix_that_many_want_spreads_to_whoever_took_one(place: Place) -> None:
    place.ask("first", PROMPT)
    place.claim("w1")  # and is full
    place.ask("second", PROMPT)
    assert place.claim("w2") == ["second"]

    assert place.ask("third", PROMPT).preferred == ("w2", "w1")


def test_a_crowded_holder_is_not_waited_for(place: Place) -> None:
    """It has slots, but all that begins so would run there and nothing elsewhere: six where the mean is 1.2."""
    for worker in WORKERS:
        place.look(worker, 64)
    for n in range(6):
        place.ask(f"r{n}", PROMPT)
        assert n == 0 or place.claim("w2", 64) == []
        assert place.claim("w1", 64) == [f"r{n}"]
    place.ask("one more", PROMPT)

    assert place.claim("w2", 64) == ["one more"]


def test_no_steal_is_later_than_the_queues_own_bound(place: Place) -> None:
    """However much the prefix saves, and whatever a gateway says."""
    place.look("w1")
    place.put("a", preferred=("w1",), steal_ms=10**9)

    assert place.look("w2").due_ms == STEAL_MS


def test_classes_come_before_locality(place: Place) -> None:
    place.ask("first", PROMPT)
    place.claim("w1", 2)
    place.ask("mine", PROMPT)
    place.put("urgent", cls=1)

    assert place.claim("w1") == ["urgent"]


# --- by name


@given(st.text(), st.sets(st.sampled_from(WORKERS), min_size=1), st.sampled_from(WORKERS))
def test_a_name_leads_to_one_worker_until_that_is_gone(name: str, live: set[str], gone: str) -> None:
    """Whoever else comes or goes: so prompts that share a prefix nobody has announced yet meet."""
    first = by_name(route(64, []), name, live, block_ms=BLOCK_MS)
    [chosen] = first.preferred
    left = live - {gone}

    assert (first.reason, first.steal_ms) == ("its name", NAMED_STEAL_MS) and chosen in live
    if left and gone != chosen:
        assert by_name(route(64, []), name, left, block_ms=BLOCK_MS).preferred == (chosen,)


def test_names_are_spread_over_the_workers_and_count_less_than_what_is_held() -> None:
    named = [by_name(route(64, []), str(n), WORKERS, block_ms=BLOCK_MS).preferred[0] for n in range(1000)]
    assert min(named.count(worker) for worker in WORKERS) > 120

    held = route(4, [["w1"], [], []])
    assert by_name(held, "name", WORKERS, block_ms=BLOCK_MS) is held
    short, nobody = Route(reason="nobody holds it"), route(64, [])
    assert by_name(short, "name", WORKERS, block_ms=BLOCK_MS) is short, "not worth it"
    assert by_name(nobody, "name", (), block_ms=BLOCK_MS) is nobody
