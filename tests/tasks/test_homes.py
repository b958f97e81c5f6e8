"""Where a stream is open: attach, gateways that die, what a new worker is told of an old one's tokens."""

from __future__ import annotations

import msgspec
import pytest

from core.values import Outcome
from tasks.queue import GATEWAY_LEASE_MS, LOST_MS, Claim, Order, Queue
from tests.tasks.conftest import Bench

STORES = ("single", "cluster")

HOME_MS = GATEWAY_LEASE_MS + LOST_MS


# --- attach


def test_a_stream_moves_to_the_gateway_that_attaches_and_its_worker_is_told(bench: Bench) -> None:
    bench.put("a", gateway="g1", owner="key")
    claim = bench.take()

    seen = bench.attach("a", "g2", "key")

    assert (seen.state, seen.attempt) == ("running", 1)
    assert bench.orders("w1") == [Order(verb="home", id="a", gateway="g2")]
    assert bench.seen("a", "g1").state == "elsewhere"
    assert bench.seen("a", "g2").state == "running"
    assert bench.finish(claim)
    assert bench.heard("gateway:g1") == []
    [frame] = bench.heard("gateway:g2")
    assert msgspec.msgpack.decode(frame)["endings"][0]["id"] == "a"
    assert bench.attach("a", "g3", "key").state == "ended"


def test_a_home_order_that_never_arrived_is_learned_from_the_next_beat(bench: Bench) -> None:
    bench.put("a", gateway="g1", owner="key")
    claim = bench.take()
    assert claim.gateway == "g1"
    assert bench.beat("w1", [claim]).claims is None
    bench.attach("a", "g2", "key")

    differ = bench.beat("w1", [claim]).claims
    assert differ is not None and differ["a"].gateway == "g2"
    assert bench.beat("w1", list(differ.values())).claims is None


def test_only_the_owner_may_attach(bench: Bench) -> None:
    bench.put("a", gateway="g1", owner="key")

    assert bench.attach("a", "g2", "other").state == "unknown"
    assert bench.attach("nobody", "g2", "key").state == "unknown"
    assert bench.seen("a", "g1").state == "waiting"
    claim = bench.take()
    bench.finish(claim)
    assert bench.attach("a", "g2", "other").state == "unknown"
    assert bench.attach("a", "g2", "key").ending is not None


def test_what_waits_moves_without_a_word_to_anybody(bench: Bench) -> None:
    bench.put("a", gateway="g1", owner="key")

    assert (bench.attach("a", "g2", "key").state, bench.attach("a", "g2", "key").place) == ("waiting", 1)
    assert bench.take().gateway == "g2"
    assert [home.decode() for home in bench.valkey.zrange(bench.key("homes"), 0, -1)] == ["g2|a"]


# --- gateways that die


def watch(bench: Bench, *gateways: str, seconds: int) -> None:
    """Let time pass while these gateways watch."""
    for _ in range(seconds):
        bench.clock.advance(1000)
        for gateway in gateways:
            bench.store.run(bench.queue.watch(gateway, []))


def test_what_waits_for_a_gateway_that_died_ends_when_nobody_came_for_it(bench: Bench) -> None:
    bench.put("a", gateway="dead")
    watch(bench, "alive", seconds=HOME_MS // 1000 - 1)
    assert bench.seen("a", "looker").state == "elsewhere"

    watch(bench, "alive", seconds=1)

    assert bench.ending("a").outcome == "gateway_lost"
    assert bench.outcomes() == [("a", "gateway_lost")]
    assert bench.valkey.zscore(bench.key("gateways"), "dead") is None
    assert bench.valkey.zcard(bench.key("homes")) == 0


def test_what_runs_for_a_gateway_that_died_is_stopped_and_ends_as_that(bench: Bench) -> None:
    bench.put("a", gateway="dead")
    claim = bench.take()
    for _ in range(HOME_MS // 1000):
        bench.clock.advance(1000)
        bench.beat("w1", [claim])

    assert bench.orders("w1") == [Order(verb="cancel", id="a")]
    assert bench.valkey.zcard(bench.key("homes")) == 0, "it is told once"
    assert bench.finish(claim, outcome=Outcome.CANCELLED)

    assert bench.outcomes() == [("a", "gateway_lost")]


def test_a_request_that_is_done_before_it_hears_of_its_gateways_death_is_done(bench: Bench) -> None:
    bench.put("a", gateway="dead")
    claim = bench.take()
    for _ in range(HOME_MS // 1000):
        bench.clock.advance(1000)
        bench.beat("w1", [claim])
    assert bench.finish(claim)

    assert bench.outcomes() == [("a", "completed")]


def test_who_comes_back_within_the_time_keeps_the_stream(bench: Bench) -> None:
    bench.put("a", gateway="dead", owner="key")
    watch(bench, "other", seconds=HOME_MS // 1000 - 1)

    assert bench.attach("a", "new", "key").state == "waiting"
    watch(bench, "other", "new", seconds=HOME_MS // 1000)

    assert bench.seen("a", "new").state == "waiting"


def test_attach_counts_as_a_sign_of_life(bench: Bench) -> None:
    bench.put("a", gateway="dead", owner="key")
    bench.attach("a", "new", "key")
    watch(bench, "other", seconds=HOME_MS // 1000 - 1)
    assert bench.valkey.zscore(bench.key("gateways"), "new") is not None
    watch(bench, "other", seconds=2)

    assert bench.ending("a").outcome == "gateway_lost"


def test_a_request_accepted_early_does_not_shorten_its_gateways_life(bench: Bench) -> None:
    """The lease of a gateway only ever grows by enqueues and attaches; a watch sets it."""
    patient = Queue("m", home_ms=100_000)
    bench.store.run(patient.watch("g", []))
    bench.put("a", gateway="g", owner="key")
    bench.attach("a", "g", "key")

    assert bench.valkey.zscore(bench.key("gateways"), "g") == bench.clock.now_ms + 100_000


def test_a_store_outage_loses_no_gateway(bench: Bench) -> None:
    """After a silence of everybody it was the store that was away: each gateway gets time to be heard in."""
    bench.put("a", gateway="g1")
    bench.put("b", gateway="g2")
    watch(bench, "g1", "g2", seconds=1)
    bench.clock.advance(HOME_MS + 1000)

    bench.store.run(bench.queue.watch("g1", ["a"]))
    watch(bench, "g1", seconds=1)
    bench.store.run(bench.queue.watch("g2", ["b"]))
    watch(bench, "g1", "g2", seconds=5)

    assert (bench.seen("a", "g1").state, bench.seen("b", "g2").state) == ("waiting", "waiting")


def test_more_is_open_at_a_dead_gateway_than_one_round_of_timers_ends(bench: Bench) -> None:
    for n in range(50):
        bench.put(f"r{n}", gateway="dead")
    watch(bench, "alive", seconds=HOME_MS // 1000 + 5)

    assert len(bench.outcomes()) == 50
    assert bench.valkey.zcard(bench.key("homes")) == 0


# --- what the next worker is told


def deliver(bench: Bench, worker: str, claim: Claim) -> bool:
    [ours] = bench.store.run(bench.queue.deliver(worker, [claim]))
    return bool(ours)


def test_who_takes_over_is_told_whose_log_to_read_until_it_has_saved_it(bench: Bench) -> None:
    bench.put("a", gateway="g")
    assert deliver(bench, "w1", bench.take("w1"))
    assert bench.store.run(bench.queue.logs_of("a")) == ["w1"]
    bench.die("w1")
    assert bench.store.run(bench.queue.logs_of("a")) == ["w1"]

    second = bench.take("w2")
    assert second.trail == "w1"
    assert bench.store.run(bench.queue.logs_of("a")) == ["w1", "w2"]
    bench.store.run(bench.queue.hand_back("w2", [second]))
    third = bench.take("w3")
    assert third.trail == "w1", "the second delivered nothing, so what there is lies where it lay"

    deliver(bench, "w3", third)
    assert bench.store.run(bench.queue.logs_of("a")) == ["w3"]
    bench.die("w3")
    fourth = bench.take("w4")
    assert fourth.trail == "w3"
    bench.finish(fourth, "w4")
    assert bench.store.run(bench.queue.logs_of("a")) == []


def test_what_was_lost_with_its_worker_is_still_found_in_its_log(bench: Bench) -> None:
    """Its client may come back for what it was shown, and for the ending."""
    bench.put("a", gateway="g", rerunnable=False)
    assert bench.store.run(bench.queue.logs_of("nothing")) == []
    assert deliver(bench, "w1", bench.take("w1"))
    bench.die("w1")

    assert bench.ending("a").outcome == "worker_lost"
    assert bench.store.run(bench.queue.logs_of("a")) == ["w1"]


@pytest.mark.parametrize("delivered", [True, False])
def test_a_takeover_is_told_to_the_gateway_with_the_claim_if_anything_was_shown(bench: Bench, delivered: bool) -> None:
    """From then on it drops what the older attempt may still send."""
    bench.put("a", gateway="g")
    first = bench.take("w1")
    if delivered:
        deliver(bench, "w1", first)
    bench.die("w1")
    assert bench.heard("gateway:g") == []

    bench.take("w2")

    frames = [msgspec.msgpack.decode(raw) for raw in bench.heard("gateway:g")]
    assert frames == ([{"v": 1, "takeovers": [{"id": "a", "attempt": 2}]}] if delivered else [])


def test_once_shown_always_shown(bench: Bench) -> None:
    """The second worker delivered nothing, yet the gateway must be told of the third."""
    bench.put("a", gateway="g")
    deliver(bench, "w1", bench.take("w1"))
    bench.die("w1")
    bench.take("w2")
    bench.die("w2")
    bench.heard("gateway:g")
    bench.take("w3")

    [frame] = bench.heard("gateway:g")
    assert msgspec.msgpack.decode(frame)["takeovers"] == [{"id": "a", "attempt": 3}]


def test_a_fenced_worker_delivers_nothing(bench: Bench) -> None:
    bench.put("a")
    first = bench.take("w1")
    bench.die("w1")
    second = bench.take("w2")

    assert not deliver(bench, "w1", first)
    assert not deliver(bench, "w1", second)
    assert not bench.row("a").get("shown")
    assert deliver(bench, "w2", second) and deliver(bench, "w2", second)


def test_what_ends_while_it_waits_to_be_gone_on_with_still_says_whose_log_has_the_rest(bench: Bench) -> None:
    bench.put("a", gateway="g", rerunnable=True)
    claim = bench.take("w1")
    bench.store.run(bench.queue.deliver("w1", [claim]))
    bench.die("w1")
    assert bench.store.run(bench.queue.logs_of("a")) == ["w1"]

    bench.store.run(bench.queue.cancel("a"))
    assert bench.store.run(bench.queue.logs_of("a")) == ["w1"]


# --- background work


def test_background_work_outlives_its_readers_and_their_gateways(bench: Bench) -> None:
    """Its reader goes, another comes, that one's gateway dies: its worker is told where to send, and it goes on."""
    bench.put("a", owner="key", background=True)
    claim = bench.take()
    bench.attach("a", "g1", "key")

    assert bench.store.run(bench.queue.cancel("a", "g1")) == "left"
    bench.attach("a", "g2", "key")
    for _ in range(HOME_MS // 1000 + 2):  # and nobody watches as g2
        bench.clock.advance(1000)
        bench.beat("w1", [])

    assert [order.gateway for order in bench.orders("w1")] == ["g1", "", "g2", ""]
    assert bench.seen("a").state == "running" and bench.finish(claim)
    assert bench.ending("a").outcome == Outcome.COMPLETED


def test_background_work_that_waits_is_left_and_can_be_cancelled(bench: Bench) -> None:
    bench.put("a", owner="key", background=True)
    bench.attach("a", "g1", "key")

    assert bench.store.run(bench.queue.cancel("a", "g1")) == "left"
    assert bench.seen("a", "g2").state == "waiting"
    assert bench.store.run(bench.queue.cancel("a")) == "cancelled"


def test_background_work_waits_a_day_for_a_worker(bench: Bench) -> None:
    bench.put("a", background=True)
    bench.put("b")

    bench.wait(1_200_000, 60_000)

    assert bench.seen("a").state == "waiting" and bench.ending("b").outcome == Outcome.EXPIRED
