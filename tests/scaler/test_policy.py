"""The policy's laws: pure, so any snapshot and any memory will do."""

from __future__ import annotations

from collections import Counter

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from scaler.policy import SHRINK_AFTER_MS, Decision, HostSnapshot, Memory, ModelSnapshot, Plan, place, plan

NAMES = ("a", "b", "c")
counts = st.integers(0, 12)
assigned = st.dictionaries(st.sampled_from(NAMES), st.integers(0, 6))


@st.composite
def snapshots(draw: st.DrawFn) -> ModelSnapshot:
    least = draw(st.integers(0, 4))
    return model(
        name=draw(st.sampled_from(NAMES)),
        least=least,
        most=least + draw(st.integers(0, 8)),
        slots=draw(st.integers(1, 8)),
        waiting=draw(st.integers(0, 100)),
        running=draw(st.integers(0, 40)),
        wanted=draw(st.booleans()),
    )


models = st.lists(snapshots(), unique_by=lambda one: one.model, max_size=3)
fleets = st.lists(
    st.builds(HostSnapshot, host=st.sampled_from(["h1", "h2", "h3", "h4"]), room=st.integers(0, 8), assigned=assigned),
    unique_by=lambda one: one.host,
)
memories = st.builds(
    Memory,
    desired=st.dictionaries(st.sampled_from(NAMES), counts),
    fewer_since_ms=st.dictionaries(st.sampled_from(NAMES), st.integers(0, 2 * SHRINK_AFTER_MS)),
    sufficed=st.dictionaries(st.sampled_from(NAMES), counts),
)
times = st.integers(0, 4 * SHRINK_AFTER_MS)


def model(
    work: int = 0,
    *,
    name: str = "m",
    least: int = 0,
    most: int = 10,
    slots: int = 1,
    waiting: int = 0,
    running: int = 0,
    wanted: bool = False,
) -> ModelSnapshot:
    return ModelSnapshot(
        model=name,
        least=least,
        most=most,
        slots=slots,
        waiting=waiting + work,
        running=running,
        oldest_wait_ms=0,
        workers=0,
        wanted=wanted,
    )


def host(name: str, room: int, **assigned: int) -> HostSnapshot:
    return HostSnapshot(host=name, room=room, assigned=assigned)


class Scaler:
    """Looks at one model again and again."""

    def __init__(self, **bounds: int) -> None:
        self.bounds, self.memory = bounds, Memory()

    def look(self, work: int, at_ms: int) -> Decision:
        found = plan([model(work, **self.bounds)], [], self.memory, at_ms)
        self.memory = found.memory
        [decision] = found.decisions
        return decision


@given(models, fleets, memories, times)
def test_every_model_gets_what_its_bounds_allow(
    models: list[ModelSnapshot], hosts: list[HostSnapshot], memory: Memory, now_ms: int
) -> None:
    found = plan(models, hosts, memory, now_ms)

    for one, decision in zip(models, found.decisions, strict=True):
        assert one.least <= decision.desired <= one.most
        assert found.memory.desired[one.model] == decision.desired
        assert decision.reason


@given(models, fleets, memories, times)
def test_the_same_snapshot_and_memory_give_the_same_plan(
    models: list[ModelSnapshot], hosts: list[HostSnapshot], memory: Memory, now_ms: int
) -> None:
    """Also read back from a row of decisions, and with the hosts listed in another order."""
    kept = msgspec.json.encode((models, hosts, memory))

    models_again, hosts_again, memory_again = msgspec.json.decode(
        kept, type=tuple[list[ModelSnapshot], list[HostSnapshot], Memory]
    )

    assert plan(models_again, hosts_again[::-1], memory_again, now_ms) == plan(models, hosts, memory, now_ms)


def test_growing_is_at_once_and_as_far_as_the_work_goes() -> None:
    scaler = Scaler(slots=4, most=5)
    assert scaler.look(0, 0).desired == 0

    decisions = [scaler.look(work, 1 + work) for work in (1, 4, 5, 100)]

    assert [(one.desired, one.action) for one in decisions] == [(1, "grow"), (1, "hold"), (2, "grow"), (5, "grow")]


def test_a_model_that_was_found_without_a_worker_gets_one_at_once_and_within_its_bounds() -> None:
    """Also when the request that asked has gone again: who asks once will ask more. What waits is never too few."""
    asked = [model(wanted=True), model(9, slots=4, wanted=True), model(wanted=True, most=0)]
    plans = [plan([one], [host("h", 4)], Memory(), 0) for one in asked]

    assert [(found.decisions[0].desired, found.assignments["h"]) for found in plans] == [
        (1, {"m": 1}),
        (3, {"m": 3}),
        (0, {}),
    ]
    assert "found no worker" in plans[0].decisions[0].reason


def test_shrinking_waits_until_the_smaller_number_has_sufficed_for_long_enough() -> None:
    scaler = Scaler(least=1)
    scaler.look(5, 0)

    early = [scaler.look(2, at_ms) for at_ms in (1000, 1000 + SHRINK_AFTER_MS - 1)]
    due = scaler.look(2, 1000 + SHRINK_AFTER_MS)

    assert [(one.desired, one.action) for one in early] == [(5, "hold")] * 2
    assert (due.desired, due.action) == (2, "shrink")


def test_a_moment_in_which_all_are_needed_starts_the_wait_anew() -> None:
    scaler = Scaler()
    for work, at_ms in [(5, 0), (1, 1), (5, SHRINK_AFTER_MS), (1, SHRINK_AFTER_MS + 1)]:
        scaler.look(work, at_ms)

    assert scaler.look(1, 2 * SHRINK_AFTER_MS).desired == 5
    assert scaler.look(1, 2 * SHRINK_AFTER_MS + 1).desired == 1


def test_a_lull_at_the_end_of_the_wait_lets_go_only_who_was_idle_all_along() -> None:
    scaler = Scaler()
    for work, at_ms in [(5, 0), (2, 1), (3, SHRINK_AFTER_MS // 2), (4, SHRINK_AFTER_MS - 1)]:
        scaler.look(work, at_ms)

    due = scaler.look(0, SHRINK_AFTER_MS + 1)

    assert (due.desired, due.action) == (4, "shrink")
    assert "4 have sufficed" in due.reason


steps = st.sampled_from([1, SHRINK_AFTER_MS // 3, SHRINK_AFTER_MS // 2, SHRINK_AFTER_MS])


@given(st.lists(st.tuples(st.integers(0, 12), steps), min_size=1, max_size=30))
def test_no_worker_is_let_go_that_was_needed_within_the_wait(looks: list[tuple[int, int]]) -> None:
    """Not only the last look counts: whatever was needed since the wait began is kept."""
    scaler, now_ms, needed = Scaler(least=1), 0, []
    before = scaler.look(0, 0).desired

    for work, passed_ms in looks:
        now_ms += passed_ms
        wanted = min(max(work, 1), 10)
        needed.append((now_ms, wanted))
        desired = scaler.look(work, now_ms).desired

        assert desired >= wanted
        if desired < before:
            assert desired >= max(count for at_ms, count in needed if at_ms > now_ms - SHRINK_AFTER_MS)
        before = desired


def test_a_new_leader_lets_nobody_go_at_its_first_look() -> None:
    """A scaler that has just begun to lead remembers nothing; what is assigned stands for what was desired."""
    hosts = [host("h1", 4, m=3), host("h2", 4, m=2)]

    found = plan([model(1)], hosts, Memory(), 0)
    later = plan([model(1)], hosts, found.memory, SHRINK_AFTER_MS)

    assert found.assignments == {"h1": {"m": 3}, "h2": {"m": 2}}
    assert (found.decisions[0].desired, later.decisions[0].desired) == (5, 1)


@given(st.dictionaries(st.sampled_from(NAMES), counts), fleets)
def test_no_host_is_given_more_than_it_has_room_for(desired: dict[str, int], hosts: list[HostSnapshot]) -> None:
    placed = place(desired, hosts)

    assert set(placed) == {host.host for host in hosts}
    for one in hosts:
        assert sum(placed[one.host].values()) <= one.room
        assert all(count > 0 for count in placed[one.host].values())


@given(st.dictionaries(st.sampled_from(NAMES), counts), fleets)
def test_as_many_are_placed_as_there_is_room_for(desired: dict[str, int], hosts: list[HostSnapshot]) -> None:
    placed = total(place(desired, hosts))

    assert all(placed[name] <= desired.get(name, 0) for name in NAMES)
    assert placed.total() == min(sum(desired.values()), sum(one.room for one in hosts))


@given(st.dictionaries(st.sampled_from(NAMES), counts), fleets)
def test_what_runs_stays_where_it_is(desired: dict[str, int], hosts: list[HostSnapshot]) -> None:
    """A worker is dropped only where its model has too many, or its host too little room."""
    hosts = [one for one in hosts if sum(one.assigned.values()) <= one.room]

    placed = place(desired, hosts)

    running = total({one.host: one.assigned for one in hosts})
    for name in NAMES:
        kept = sum(min(one.assigned.get(name, 0), placed[one.host].get(name, 0)) for one in hosts)
        assert kept == min(running[name], desired.get(name, 0))


@given(st.dictionaries(st.sampled_from(NAMES), counts), fleets)
def test_placing_again_changes_nothing(desired: dict[str, int], hosts: list[HostSnapshot]) -> None:
    placed = place(desired, hosts)

    again = [msgspec.structs.replace(one, assigned=placed[one.host]) for one in hosts]

    assert place(desired, again) == placed


def test_new_workers_go_where_most_room_is_left() -> None:
    hosts = [host("small", 2), host("busy", 4, other=3), host("empty", 3)]

    assert place({"m": 3, "other": 3}, hosts) == {"small": {"m": 1}, "busy": {"other": 3}, "empty": {"m": 2}}


def test_without_a_host_nothing_is_placed_and_the_wish_is_kept() -> None:
    found: Plan = plan([model(7)], [], Memory(), 0)

    assert found.assignments == {} and found.memory.desired == {"m": 7}


def total(placed: dict[str, dict[str, int]]) -> Counter[str]:
    summed: Counter[str] = Counter()
    for counts_ in placed.values():
        summed.update(counts_)
    return summed
