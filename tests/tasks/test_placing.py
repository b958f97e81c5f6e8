"""Which worker gets what: room, prefixes, reserves, what is too large, what is urgent."""

from __future__ import annotations

import pytest

from core.values import Class
from tasks.queue import DUE_MS
from tests.tasks.conftest import LEASE_MS, Bench

STORES = ("single", "cluster")

# --- room


@pytest.mark.parametrize(("request_", "room", "fits"), [
    ({"need_tokens": 100}, {"kv_tokens": 100}, True),
    ({"need_tokens": 101}, {"kv_tokens": 100}, False),
    ({"need_tokens": 101}, {}, True),
    ({"most_tokens": 201}, {"context_tokens": 200}, False),
    ({"most_tokens": 200}, {"context_tokens": 200}, True),
    ({"input_tokens": 51}, {"prefill_tokens": (50,) * 4, "idle": False}, False),
    ({"input_tokens": 50}, {"prefill_tokens": (50,) * 4, "idle": False}, True),
    ({"input_tokens": 5000}, {"prefill_tokens": (50,) * 4, "idle": True}, True),
    ({"input_tokens": 51, "cls": 1}, {"prefill_tokens": (0, 99, 50, 0), "idle": False}, True),
    ({"input_tokens": 51, "cls": 2}, {"prefill_tokens": (0, 99, 50, 0), "idle": False}, False),
])  # fmt: skip
def test_a_worker_gets_only_what_fits_its_room(bench: Bench, request_: dict, room: dict, fits: bool) -> None:  # type: ignore[type-arg]
    bench.put("a", **request_)

    claimed = bench.look(**room)

    assert ([claim.id for claim in claimed.claims] == ["a"]) is fits
    assert claimed.passed_class == (9 if fits else request_.get("cls", 2))


def test_each_claim_takes_of_the_room(bench: Bench) -> None:
    for n in range(4):
        bench.put(f"r{n}", need_tokens=40, input_tokens=10)

    assert bench.claim(want=4, kv_tokens=100) == ["r0", "r1"]
    assert bench.claim(want=2, prefill_tokens=(0,) * 4, idle=True) == ["r2"], "the first one ends the idleness"


def test_a_small_request_goes_past_one_of_its_tenant_that_does_not_fit(bench: Bench) -> None:
    bench.put("large", need_tokens=1000)
    bench.put("small", need_tokens=10)

    claimed = bench.look(want=2, kv_tokens=100)

    assert [claim.id for claim in claimed.claims] == ["small"]
    assert claimed.passed_class == Class.DEFAULT


def test_the_last_slots_are_left_to_what_may_be_preempted(bench: Bench) -> None:
    """A sampled answer that cannot be gone on with elsewhere must not fill them, or nothing urgent could start."""
    bench.put("fixed", rerunnable=False)
    bench.put("loose")

    assert bench.claim("w1", 1, reserve=1) == ["loose"]
    assert bench.claim("w1", 1, reserve=1) == []
    assert bench.claim("w1", 2, reserve=1) == ["fixed"]
    bench.put("urgent", rerunnable=False, cls=Class.INTERACTIVE)
    assert bench.claim("w1", 1, reserve=1) == ["urgent"]


# --- prefixes


def test_of_a_tenants_next_requests_a_worker_takes_the_one_whose_prefix_it_holds(bench: Bench) -> None:
    for n in range(16):
        bench.put(f"r{n}")
    bench.put("mine", preferred=("w0", "w1"))

    assert bench.claim("w1") == ["r0"], "it looks through sixteen"
    assert bench.claim("w1", 2) == ["mine", "r1"]


def test_a_request_waits_for_its_prefix_while_that_worker_has_room_and_no_longer_than_the_steal(bench: Bench) -> None:
    bench.look("w1", 2)  # it has room
    bench.put("a", preferred=("w1",))

    claimed = bench.look("w2", steal_ms=200)
    assert (claimed.claims, claimed.due_ms, claimed.passed_class) == ((), 200, 9)
    bench.clock.advance(150)
    assert bench.look("w2", steal_ms=200).due_ms == 50
    bench.clock.advance(50)
    assert bench.claim("w2", steal_ms=200) == ["a"]


@pytest.mark.parametrize("gone", ["full", "dead", "never there"])
def test_a_request_whose_prefix_has_no_room_is_free_to_all_at_once(bench: Bench, gone: str) -> None:
    if gone != "never there":
        bench.look("w1", 1)
    bench.put("a", preferred=("w1",))
    if gone == "full":
        bench.look("w1", 0)
    elif gone == "dead":
        bench.die("w1")

    assert bench.claim("w2") == ["a"]


@pytest.mark.parametrize("room", [{"kv_tokens": 10}, {"prefill_tokens": (9,) * 4, "idle": False}])
def test_a_request_waits_also_for_a_worker_that_is_busy_for_the_moment(bench: Bench, room: dict) -> None:  # type: ignore[type-arg]
    """What did not fit was another; and it has slots. But it is not woken, and counts as full for what is urgent."""
    bench.put("large", need_tokens=1000, input_tokens=1000)
    bench.look("w1", 1, **room)
    bench.put("a", preferred=("w1",), tenant="u", steal_ms=500)

    assert bench.look("w2", **room).due_ms == 500
    assert bench.valkey.exists(bench.queue.wake_key) == 1
    bench.heard("urgent")
    bench.put("u", cls=Class.INTERACTIVE, need_tokens=1000, input_tokens=1000)
    assert bench.heard("urgent") == [b"1"]
    assert bench.claim("w1", **room) == ["a"]


def test_a_request_does_not_wait_for_a_worker_that_saves_its_cache_for_another(bench: Bench) -> None:
    bench.put("large", need_tokens=100)
    bench.look("w1", 2, kv_tokens=10, total_kv_tokens=100)
    bench.wait(2000)
    bench.look("w1", 2, kv_tokens=10, total_kv_tokens=100)
    bench.put("a", preferred=("w1",), tenant="u")

    assert bench.claim("w2", kv_tokens=10) == ["a"]


def test_a_preferred_worker_gets_its_own_however_little_it_looks_at(bench: Bench) -> None:
    bench.look("w1", 1)
    bench.put("a", preferred=("w1",))

    assert bench.claim("w1", scan=1) == ["a"]


def test_only_the_worker_that_holds_the_prefix_is_woken(bench: Bench) -> None:
    bench.look("w1", 1)
    bench.look("w2", 1)
    bench.put("a", preferred=("w1", "w2"))
    wakes = [bench.valkey.exists(bench.key(name)) for name in ("wake:w1", "wake:w2", "wake")]
    assert wakes == [1, 0, 0]
    assert 0 < bench.valkey.pttl(bench.key("wake:w1")) <= 60_000

    bench.put("b", preferred=("gone",))
    assert bench.valkey.exists(bench.key("wake"))


def test_who_passes_a_request_over_wakes_another_once(bench: Bench) -> None:
    """It took the marker; whoever has the room for it would sleep on."""
    bench.put("a", need_tokens=100)
    bench.valkey.delete(bench.key("wake"))

    bench.claim("small", kv_tokens=50)
    assert bench.valkey.exists(bench.key("wake"))

    bench.valkey.delete(bench.key("wake"))
    bench.claim("small", kv_tokens=50)
    assert not bench.valkey.exists(bench.key("wake")), "it looks again and again"


# --- what is too large for now


def passed_over(bench: Bench, **more: int) -> None:
    """A large request that has waited so long that the next worker which could hold it saves for it."""
    bench.put("large", need_tokens=100, **more)
    bench.claim("w1", kv_tokens=50, total_kv_tokens=100)
    for _ in range(2):
        bench.clock.advance(1000)
        bench.beat("w1")


def saving(bench: Bench) -> dict[bytes, bytes]:
    saving: dict[bytes, bytes] = bench.valkey.hgetall(bench.key("saving"))
    return saving


def test_small_ones_do_not_go_past_a_large_one_for_ever(bench: Bench) -> None:
    passed_over(bench)
    assert bench.claim("w1", kv_tokens=50, total_kv_tokens=100) == []
    for n in range(3):
        bench.put(f"small{n}", need_tokens=1, tenant="small")

    assert bench.claim("w1", kv_tokens=50, total_kv_tokens=100) == []
    assert saving(bench) == {b"w1": b"large"}
    assert bench.claim("w2", kv_tokens=50, total_kv_tokens=100) == ["small0"], "the others are not held up"
    assert bench.claim("w1", kv_tokens=99, total_kv_tokens=100) == []
    bench.put("urgent", need_tokens=1, cls=Class.INTERACTIVE)
    assert bench.claim("w1", kv_tokens=99, total_kv_tokens=100) == ["urgent"]

    assert bench.claim("w1", kv_tokens=100, total_kv_tokens=100) == ["large"]
    assert saving(bench) == {} and bench.row("large").get("saver", "") == ""
    assert bench.claim("w1", kv_tokens=50, total_kv_tokens=100) == ["small1"]


def test_once_a_large_one_is_overdue_its_worker_takes_nothing_more_urgent_either(bench: Bench) -> None:
    """A steady stream of urgent small requests would keep the cache too full for it for ever."""
    passed_over(bench, cls=Class.BULK)
    bench.claim("w1", kv_tokens=50, total_kv_tokens=100)
    for _ in range(DUE_MS[Class.BULK] // 1000 + 1):
        bench.clock.advance(1000)
        bench.beat("w1")
    bench.put("urgent", need_tokens=1, cls=Class.INTERACTIVE)
    bench.put("probe", need_tokens=1, cls=Class.SYSTEM)

    assert bench.claim("w1", 2, kv_tokens=99, total_kv_tokens=100) == ["probe"]
    assert bench.claim("w2", kv_tokens=99, total_kv_tokens=99) == ["urgent"]
    assert bench.claim("w1", kv_tokens=100, total_kv_tokens=100) == ["large"]


def test_large_ones_of_many_tenants_do_not_hold_up_those_behind_them(bench: Bench) -> None:
    """However many lines begin with one: what fits is found further back."""
    for n in range(40):
        bench.put(f"large{n}", need_tokens=100, tenant=f"large{n}")
    for n in range(3):
        bench.put(f"small{n}", need_tokens=1, tenant="small")

    taken = [name for _ in range(12) for name in bench.claim("w1", kv_tokens=50, total_kv_tokens=100)]
    assert taken == ["small0", "small1", "small2"]


def test_only_a_worker_that_could_ever_hold_it_saves_for_it(bench: Bench) -> None:
    passed_over(bench, most_tokens=500)
    bench.claim("w1", kv_tokens=50, total_kv_tokens=99)
    bench.claim("w1", kv_tokens=50, total_kv_tokens=100, context_tokens=499)
    assert saving(bench) == {}

    bench.claim("w1", kv_tokens=50, total_kv_tokens=100, context_tokens=500)
    assert saving(bench) == {b"w1": b"large"}


def test_what_no_worker_could_ever_hold_is_ended_and_not_kept_waiting_for_ever(bench: Bench) -> None:
    """Admission refuses it where it knows how large workers are; before the first has said so it cannot."""
    bench.put("large", need_tokens=100)
    small = {"kv_tokens": 50, "total_kv_tokens": 99}
    for _ in range(58):
        assert bench.claim("w1", **small) == []
        bench.wait(1000)
    bench.claim("w2", kv_tokens=50, total_kv_tokens=100)  # this one could, and would save for it, but dies
    bench.die("w2")
    for _ in range(59):
        bench.claim("w1", **small)
        bench.wait(1000)
    assert bench.seen("large").state == "waiting"

    for _ in range(2):
        bench.wait(1000)
        bench.claim("w1", **small)
    ending = bench.ending("large")
    assert (ending.outcome, ending.attempt) == ("refused", 0) and "too large" in ending.message


def test_what_a_busy_worker_could_hold_waits_for_it_however_often_others_pass_it_over(bench: Bench) -> None:
    bench.claim("large", kv_tokens=500, total_kv_tokens=500)  # and it runs something long, and claims no more
    bench.put("a", need_tokens=100)
    for _ in range(150):
        bench.claim("small", kv_tokens=50, total_kv_tokens=99)
        bench.beat("large")
        bench.wait(1000)

    assert bench.seen("a").state == "waiting"
    assert bench.claim("large", kv_tokens=500, total_kv_tokens=500) == ["a"]


def test_one_worker_saves_for_one_request(bench: Bench) -> None:
    passed_over(bench)
    bench.put("second", need_tokens=90)
    bench.claim("w1", kv_tokens=50, total_kv_tokens=100)
    bench.claim("w2", kv_tokens=50, total_kv_tokens=80)
    for _ in range(3):
        bench.clock.advance(1000)
        bench.beat("w1")

    bench.claim("w1", kv_tokens=50, total_kv_tokens=100)
    assert saving(bench) == {b"w1": b"large"}
    bench.claim("w2", kv_tokens=50, total_kv_tokens=100)
    assert saving(bench) == {b"w1": b"large", b"w2": b"second"}


@pytest.mark.parametrize("end", ["dies", "silent", "leaves"])
def test_when_the_saver_is_gone_another_saves(bench: Bench, end: str) -> None:
    passed_over(bench)
    bench.claim("w1", kv_tokens=50, total_kv_tokens=100)
    assert saving(bench) == {b"w1": b"large"}

    if end == "dies":
        bench.die("w1")
    elif end == "leaves":
        bench.store.run(bench.queue.part("w1"))
    else:
        bench.wait(LEASE_MS)

    assert saving(bench) == {} and bench.row("large").get("saver", "") == ""
    bench.claim("w2", kv_tokens=50, total_kv_tokens=100)
    assert saving(bench) == {b"w2": b"large"}


def test_what_is_saved_for_may_be_cancelled_or_go_to_another(bench: Bench) -> None:
    passed_over(bench)
    bench.claim("w1", kv_tokens=50, total_kv_tokens=100)
    bench.store.run(bench.queue.cancel("large"))
    assert saving(bench) == {}

    bench.put("large2", need_tokens=100)
    bench.claim("w1", kv_tokens=50, total_kv_tokens=100)
    bench.clock.advance(1000)
    bench.beat()
    bench.clock.advance(1000)
    bench.beat()
    bench.claim("w1", kv_tokens=50, total_kv_tokens=100)
    assert saving(bench) == {b"w1": b"large2"}
    assert bench.claim("w2", kv_tokens=100) == ["large2"]
    assert saving(bench) == {}


# --- what is urgent


def test_a_full_worker_may_claim_only_what_it_would_preempt_for(bench: Bench) -> None:
    bench.put("default")
    bench.put("system", cls=Class.SYSTEM)

    assert bench.claim("w1", 2, below=Class.DEFAULT) == ["system"]
    assert bench.claim("w1", 2, below=Class.DEFAULT) == []
    assert bench.valkey.hget(bench.key("rooms"), "w1") == b"0", "it has made room only for that"


def test_a_preempting_claim_does_not_take_what_is_overdue_or_saved_for(bench: Bench) -> None:
    passed_over(bench)
    bench.claim("w1", kv_tokens=50, total_kv_tokens=100)
    bench.wait(31_000)
    bench.beat()
    bench.put("bulk", cls=Class.BULK)

    for _ in range(17):
        assert bench.claim("w1", below=Class.DEFAULT, kv_tokens=100, total_kv_tokens=100) == []


def test_something_urgent_that_finds_no_room_anywhere_is_called_out(bench: Bench) -> None:
    bench.look("w1", 1)
    bench.put("a", cls=Class.INTERACTIVE)
    assert bench.heard("urgent") == []

    bench.claim("w1")  # now it is full
    bench.put("b", cls=Class.INTERACTIVE)
    bench.put("c", cls=Class.SYSTEM)
    bench.put("d", cls=Class.DEFAULT)
    assert bench.heard("urgent") == [b"1", b"0"]


def test_a_beat_says_what_most_urgent_waits(bench: Bench) -> None:
    assert bench.beat().urgent == 9
    bench.put("a", cls=Class.BULK)
    assert bench.beat().urgent == 3
    bench.put("b", cls=Class.INTERACTIVE)
    assert bench.beat().urgent == 1
