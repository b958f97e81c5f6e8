"""Lanes: one lane's requests in order and one at a time, lanes side by side, everything bounded; what is remembered."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from web.transports.lanes import LANES_MAX, RUNNING_MAX, WAITING_MAX, Lane, Lanes, Recent

LANES = [None, "a", "b", "c", "d"]


class Connection(RuleBasedStateMachine):
    """Any order of asking and answering, with small bounds so that each is met often."""

    RUNNING, WAITING, NAMES = 2, 4, 3

    def __init__(self) -> None:
        super().__init__()
        self.lanes: Lanes[tuple[Lane, int]] = Lanes(
            running_max=self.RUNNING, lanes_max=self.NAMES, waiting_max=self.WAITING, waiting_bytes_max=100
        )
        self.number = 0
        self.accepted: list[tuple[Lane, int]] = []
        self.started: list[tuple[Lane, int]] = []
        self.running: dict[Lane, int] = {}
        self.names: set[Lane] = set()

    def begin(self, asked: tuple[Lane, int]) -> None:
        lane, number = asked
        assert lane not in self.running, "two of one lane at once"
        self.running[lane] = number
        self.started.append(asked)

    @rule(lane=st.sampled_from(LANES), size=st.integers(0, 40))
    def ask(self, lane: Lane, size: int) -> None:
        self.number += 1
        asked = (lane, self.number)
        room = len(self.accepted) - len(self.started) < self.WAITING and self.lanes.waiting_bytes + size <= 100
        new = lane is not None and lane not in self.names
        match self.lanes.ask(lane, asked, size):
            case "start":
                self.accepted.append(asked)
                self.begin(asked)
            case "wait":
                assert room
                self.accepted.append(asked)
            case "too many lanes":
                assert new and len(self.names) == self.NAMES
                return
            case "flood":
                assert not room
                return
        if lane is not None:
            self.names.add(lane)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(sorted(self.running, key=str)))
        del self.running[lane]
        for asked in self.lanes.done(lane):
            self.begin(asked)

    @invariant()
    def bounds_hold(self) -> None:
        assert len(self.running) <= self.RUNNING and len(self.names) <= self.NAMES
        assert self.lanes.running == set(self.running)
        assert len(self.lanes.waiting) == len(self.accepted) - len(self.started) <= self.WAITING
        assert self.lanes.waiting_bytes == sum(size for _, _, size in self.lanes.waiting) <= 100
        assert self.lanes.idle == (not self.running and len(self.accepted) == len(self.started))

    @invariant()
    def each_lane_is_in_order_and_nothing_is_lost_or_repeated(self) -> None:
        waiting = {asked for _, asked, _ in self.lanes.waiting}
        for lane in LANES:
            accepted = [asked for asked in self.accepted if asked[0] == lane]
            started = [asked for asked in self.started if asked[0] == lane]
            assert accepted[: len(started)] == started
            assert set(accepted[len(started) :]) == {asked for asked in waiting if asked[0] == lane}

    @invariant()
    def nobody_waits_who_could_run(self) -> None:
        if len(self.running) < self.RUNNING:
            assert all(lane in self.running for lane, _, _ in self.lanes.waiting)


TestConnection = Connection.TestCase


def test_of_those_that_wait_the_oldest_begins_whose_lane_is_free() -> None:
    lanes: Lanes[str] = Lanes(running_max=2)
    assert [lanes.ask(lane, what) for lane, what in (("a", "a1"), ("b", "b1"))] == ["start", "start"]
    assert [lanes.ask(lane, what) for lane, what in (("a", "a2"), ("c", "c1"), ("d", "d1"))] == ["wait"] * 3

    assert lanes.done("b") == ["c1"], "a2 is older, and its lane is not free"
    assert lanes.done("a") == ["a2"]
    assert lanes.done("c") == ["d1"]


def test_the_bounds_are_those_of_the_protocol() -> None:
    """16 responses at once and further ones wait; 32 named lanes, and the default lane is none of them."""
    lanes: Lanes[int] = Lanes()
    verdicts = [lanes.ask(f"lane{i}", i) for i in range(LANES_MAX)]

    assert verdicts == ["start"] * RUNNING_MAX + ["wait"] * (LANES_MAX - RUNNING_MAX)
    assert lanes.ask("lane32", 32) == "too many lanes"
    assert lanes.ask(None, 33) == "wait"
    verdicts = [lanes.ask("lane0", i) for i in range(WAITING_MAX)]
    assert verdicts.index("flood") == WAITING_MAX - (LANES_MAX - RUNNING_MAX) - 1


# What is remembered


@given(st.lists(st.tuples(st.sampled_from(LANES), st.binary(max_size=30))))
def test_what_is_remembered_is_each_lanes_newest_within_its_bytes(kept: list[tuple[Lane, bytes]]) -> None:
    recent = Recent(bytes_max=64)
    for number, (lane, conversation) in enumerate(kept):
        recent.keep(lane, f"r{number}", (conversation,))
        assert recent.find(f"r{number}") == (conversation,) and recent.size_bytes <= 64

    newest = {lane: number for number, (lane, _) in enumerate(kept)}
    found = {number for number in range(len(kept)) if recent.find(f"r{number}") is not None}
    assert found <= set(newest.values())


def test_one_that_is_too_large_is_not_remembered() -> None:
    recent = Recent(bytes_max=8)
    recent.keep("a", "r1", (b"small",))
    recent.keep("b", "r2", (b"far ", b"too large"))

    assert (recent.find("r1"), recent.find("r2")) == ((b"small",), None)


def test_a_failed_turn_forgets_the_response_on_its_own_lane_and_a_failed_fork_keeps_it() -> None:
    recent = Recent()
    recent.keep("a", "r1", (b"[]",))

    recent.failed("b", "r1")
    recent.failed(None, "r1")
    recent.failed("b", "")
    recent.failed("a", "another")
    assert recent.find("r1") == (b"[]",)
    recent.failed("a", "r1")
    assert recent.find("r1") is None
