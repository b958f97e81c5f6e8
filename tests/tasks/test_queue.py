"""The queue's scripts, on a real Valkey with its clock in the test's hand."""

from __future__ import annotations

import msgspec
import pytest
import redis

from core.redis import Store
from core.values import Class, Outcome, Usage
from tasks.queue import Claim, Queue, Task, checksum
from tests.conftest import Clock
from tests.tasks.conftest import Bench

STORES = ("single", "cluster")

LEASE_MS = 3000
USED = Usage(input_tokens=7, output_tokens=5)


@pytest.fixture
def queue() -> Queue:
    return Queue("m")


def task(name: str, **more: object) -> Task:
    return Task(id=name, message=b"msg-" + name.encode(), facts=b"f", **{"tenant": "t", "input_tokens": 3, **more})  # type: ignore[arg-type]


def claim(store: Store, queue: Queue, worker: str = "w1", want: int = 1, nonce: str = "n") -> list[Claim]:
    claim.count += 1  # type: ignore[attr-defined]
    nonce = f"{nonce}{claim.count}" if nonce == "n" else nonce  # type: ignore[attr-defined]
    return list(store.run(queue.claim(worker, want, lease_ms=LEASE_MS, nonce=nonce)).claims)


claim.count = 0  # type: ignore[attr-defined]


def outcomes(valkey: redis.Redis) -> list[tuple[str, str]]:
    return [(e[b"id"].decode(), e[b"outcome"].decode()) for _, e in valkey.xrange("f1:{m}:usage")]


def wait_for(store: Store, queue: Queue, clock: Clock, ms: int) -> None:
    """Let time pass while somebody is heard, so that the store does not count as having been away."""
    for _ in range(ms // 1000):
        clock.advance(1000)
        store.run(queue.tick())


def test_an_id_is_accepted_once(store: Store, queue: Queue) -> None:
    first = store.run(queue.enqueue(task("a")))
    again = store.run(queue.enqueue(task("a")))

    assert (first.status, first.place) == ("accepted", 1)
    assert (again.status, again.state) == ("known", "waiting")
    assert [c.id for c in claim(store, queue, want=5)] == ["a"]


def test_an_ended_id_is_still_known(store: Store, queue: Queue) -> None:
    """A client's late retry must not run a finished request again."""
    store.run(queue.enqueue(task("a")))
    [a] = claim(store, queue)
    store.run(queue.finish("w1", a, Outcome.COMPLETED, USED))

    assert store.run(queue.enqueue(task("a"))).state == "ended"


def test_classes_are_strict_and_a_tenants_requests_keep_their_order(store: Store, queue: Queue) -> None:
    for name, cls in [("d1", 2), ("b1", 3), ("d2", 2), ("i1", 1), ("s1", 0), ("i2", 1)]:
        store.run(queue.enqueue(task(name, cls=cls)))

    taken = [claim(store, queue)[0].id for _ in range(6)]

    assert taken == ["s1", "i1", "i2", "d1", "d2", "b1"]


def serve_one(store: Store, queue: Queue, output: int) -> str:
    """Claim the next request and finish it with so many tokens; returns its id."""
    [taken] = claim(store, queue)
    assert store.run(queue.finish("w1", taken, Outcome.COMPLETED, Usage(output_tokens=output)))
    return taken.id


def test_tenants_that_wait_get_equal_tokens_whatever_the_size_of_their_requests(store: Store, queue: Queue) -> None:
    """Input once and output twice: the gap stays below twice the larger of the longest input and twice the output."""
    for n in range(110):
        store.run(queue.enqueue(task(f"large{n}", tenant="large", input_tokens=1000)))
        store.run(queue.enqueue(task(f"small{n}", tenant="small", input_tokens=100)))

    tokens = {"large": 0, "small": 0}
    for _ in range(100):
        tenant = serve_one(store, queue, 50).rstrip("0123456789")
        tokens[tenant] += (1000 if tenant == "large" else 100) + 2 * 50

    assert abs(tokens["large"] - tokens["small"]) <= 2 * max(1000, 2 * 50)
    assert min(tokens.values()) > 5000


def test_weights_divide_the_tokens(store: Store, queue: Queue) -> None:
    for n in range(60):
        store.run(queue.enqueue(task(f"double{n}", tenant="double", weight=2.0, input_tokens=100)))
        store.run(queue.enqueue(task(f"single{n}", tenant="single", input_tokens=100)))

    served = [serve_one(store, queue, 10).rstrip("0123456789") for _ in range(45)]

    assert abs(served.count("double") - 2 * served.count("single")) <= 2


def test_who_was_idle_has_saved_nothing_up(store: Store, queue: Queue) -> None:
    """A tenant that comes back does not get all it did not use: it is lifted to the least served of those that wait."""
    for n in range(60):
        store.run(queue.enqueue(task(f"busy{n}", tenant="busy", input_tokens=100)))
    for _ in range(30):
        serve_one(store, queue, 10)

    for n in range(20):
        store.run(queue.enqueue(task(f"late{n}", tenant="late", input_tokens=100)))
    served = [serve_one(store, queue, 10).rstrip("0123456789") for _ in range(20)]

    assert 9 <= served.count("late") <= 11


def test_output_is_charged_as_it_is_made_and_once(store: Store, queue: Queue, valkey: redis.Redis) -> None:
    """A long generation counts while it runs; its end charges only the rest."""
    store.run(queue.enqueue(task("long", tenant="t", input_tokens=10)))
    [long] = claim(store, queue)

    store.run(queue.beat("w1", [long], lease_ms=LEASE_MS, served=[(long, 100)]))
    assert valkey.hget("f1:{m}:service", "t") == b"210"
    store.run(queue.beat("w1", [long], lease_ms=LEASE_MS, served=[(long, 100)]))
    store.run(queue.finish("w1", long, Outcome.COMPLETED, Usage(output_tokens=130)))

    assert valkey.hget("f1:{m}:service", "t") == b"270"


def test_bulk_trickles_under_a_flood_of_more_urgent_work(store: Store, queue: Queue, clock: Clock) -> None:
    """One claim in sixteen goes to the request that is overdue longest. Nothing overdue: strict."""
    store.run(queue.enqueue(task("bulk", cls=Class.BULK, tenant="b")))

    def flood(name: str) -> list[str]:
        for n in range(20):
            store.run(queue.enqueue(task(f"{name}{n}", cls=Class.INTERACTIVE)))
        return [serve_one(store, queue, 1) for _ in range(20)]

    young = flood("a")
    wait_for(store, queue, clock, 301_000)
    old = flood("b")

    assert "bulk" not in young
    assert "bulk" in old


def test_a_claim_whose_reply_was_lost_is_told_again(store: Store, queue: Queue) -> None:
    for name in "abc":
        store.run(queue.enqueue(task(name)))

    first = claim(store, queue, want=2, nonce="same")
    again = claim(store, queue, want=2, nonce="same")

    assert again == first and len(first) == 2
    assert [c.id for c in claim(store, queue, want=2, nonce="next")] == ["c"]


def test_a_request_is_finished_once_and_leaves_one_usage_entry(store: Store, queue: Queue, valkey: redis.Redis) -> None:
    store.run(queue.enqueue(task("a", body=b"body")))
    [a] = claim(store, queue)

    assert store.run(queue.finish("w1", a, Outcome.COMPLETED, USED))
    assert store.run(queue.finish("w1", a, Outcome.FAILED, USED)), "a repeat is told that it has ended"

    assert outcomes(valkey) == [("a", "completed")]
    assert store.run(queue.body("a")) is None
    [seen] = store.run(queue.watch("g", ["a"])).seen
    assert seen.ending is not None
    assert (seen.ending.outcome, seen.ending.usage, seen.ending.attempt) == ("completed", USED, 1)


def test_the_terminal_frame_is_published_with_the_ending(store: Store, queue: Queue, valkey: redis.Redis) -> None:
    listening = valkey.pubsub(ignore_subscribe_messages=True)
    listening.subscribe("f1:{m}:gateway:g")
    listening.get_message(timeout=1)
    store.run(queue.enqueue(task("a", gateway="g")))
    [a] = claim(store, queue)

    store.run(queue.finish("w1", a, Outcome.LENGTH, USED, "so it was"))

    message = listening.get_message(timeout=1) or listening.get_message(timeout=1)
    [ending] = msgspec.msgpack.decode(message["data"])["endings"]
    assert (ending["id"], ending["outcome"], ending["usage"]["output_tokens"]) == ("a", "length", 5)
    listening.close()


def test_another_worker_cannot_finish_it(store: Store, queue: Queue, valkey: redis.Redis) -> None:
    store.run(queue.enqueue(task("a")))
    [a] = claim(store, queue)

    assert not store.run(queue.finish("w2", a, Outcome.COMPLETED, USED))
    assert outcomes(valkey) == []


def test_who_leaves_wakes_the_others_to_what_it_leaves(store: Store, queue: Queue, valkey: redis.Redis) -> None:
    """While it left it may still have slept beside the queue, and have taken the marker of what it handed back."""
    store.run(queue.enqueue(task("a")))
    claims = claim(store, queue, "w1")
    store.run(queue.hand_back("w1", claims))
    valkey.delete(queue.wake_key)

    store.run(queue.part("w1"))

    assert valkey.zcard(queue.wake_key) == 1


def test_a_dead_workers_request_runs_again_and_the_dead_attempt_is_fenced(
    store: Store, queue: Queue, clock: Clock, valkey: redis.Redis
) -> None:
    store.run(queue.enqueue(task("a")))
    [dead] = claim(store, queue, "w1")

    wait_for(store, queue, clock, LEASE_MS)
    [alive] = claim(store, queue, "w2")

    assert (alive.id, alive.attempt) == ("a", 2)
    assert not store.run(queue.finish("w1", dead, Outcome.COMPLETED, USED))
    assert store.run(queue.deliver("w1", [dead])) == [False]
    assert store.run(queue.finish("w2", alive, Outcome.COMPLETED, USED))
    assert outcomes(valkey) == [("a", "completed")]


@pytest.mark.parametrize(("rerunnable", "delivered", "then"), [
    (False, False, "waiting"), (True, True, "waiting"), (False, True, "ended"),
])  # fmt: skip
def test_a_sampled_answer_is_never_sampled_anew_once_delivered(
    store: Store, queue: Queue, rerunnable: bool, delivered: bool, then: str
) -> None:
    store.run(queue.enqueue(task("a", rerunnable=rerunnable)))
    [a] = claim(store, queue)
    if delivered:
        assert store.run(queue.deliver("w1", [a])) == [True]

    store.run(queue.tick(dead_worker="w1"))

    [seen] = store.run(queue.watch("g", ["a"])).seen
    assert seen.state == then
    assert seen.ending is None or seen.ending.outcome == "worker_lost"


def test_a_request_that_ends_every_worker_is_given_up(store: Store, queue: Queue, valkey: redis.Redis) -> None:
    store.run(queue.enqueue(task("poison")))

    for n in (1, 2, 3):
        [taken] = claim(store, queue, f"w{n}")
        assert taken.attempt == n
        store.run(queue.tick(dead_worker=f"w{n}"))

    assert claim(store, queue, "w4") == []
    assert outcomes(valkey) == [("poison", "failed")]


def test_a_store_outage_longer_than_the_lease_re_runs_nothing(store: Store, queue: Queue, clock: Clock) -> None:
    """After a silence of everybody it was the store that was away: each worker gets a full lease to be heard in."""
    store.run(queue.enqueue(task("a")))
    [a] = claim(store, queue)

    clock.advance(20_000)
    store.run(queue.tick())
    clock.advance(1000)
    assert store.run(queue.beat("w1", [a], lease_ms=LEASE_MS)).claims is None

    wait_for(store, queue, clock, 2000)
    assert store.run(queue.finish("w1", a, Outcome.COMPLETED, USED))


def test_after_the_grace_the_dead_are_reaped(store: Store, queue: Queue, clock: Clock) -> None:
    store.run(queue.enqueue(task("a")))
    claim(store, queue)
    clock.advance(20_000)

    wait_for(store, queue, clock, LEASE_MS + 1000)

    assert [c.attempt for c in claim(store, queue, "w2")] == [2]


def test_beats_that_come_seldom_are_no_silence_of_the_store(
    store: Store, queue: Queue, clock: Clock, valkey: redis.Redis
) -> None:
    """With the CPU engine's lease a lone worker beats every two seconds; the dead must be reaped all the same."""
    store.run(queue.enqueue(task("a")))
    for worker in ("dead", "alive"):
        store.run(queue.claim(worker, 1, lease_ms=10_000, nonce=worker))

    for _ in range(6):
        clock.advance(2000)
        store.run(queue.beat("alive", [], lease_ms=10_000))

    assert [(c.id, c.attempt) for c in claim(store, queue, "w2")] == [("a", 2)]


def test_a_clock_that_is_set_back_keeps_no_dead_worker_alive(store: Store, queue: Queue, clock: Clock) -> None:
    """Such as that of a replica that takes over."""
    store.run(queue.enqueue(task("a")))
    claim(store, queue)
    clock.advance(20_000)
    store.run(queue.tick())

    clock.advance(-3_600_000)
    wait_for(store, queue, clock, 2 * LEASE_MS + 1000)

    assert [(c.id, c.attempt) for c in claim(store, queue, "w2")] == [("a", 2)]


def test_cancelling_what_waits_costs_no_engine_work(store: Store, queue: Queue, valkey: redis.Redis) -> None:
    store.run(queue.enqueue(task("a")))

    assert store.run(queue.cancel("a")) == "cancelled"
    assert store.run(queue.cancel("a")) == "ended"
    assert claim(store, queue) == []
    assert outcomes(valkey) == [("a", "cancelled")]


def test_a_gateway_that_a_stream_has_moved_from_cannot_cancel_it(store: Store, queue: Queue) -> None:
    """It may not have learned of the move yet, and sees its own client's connection break."""
    store.run(queue.enqueue(task("a", gateway="g1", owner="k")))
    claim(store, queue)
    store.run(queue.attach("a", "k", "g2"))

    assert store.run(queue.cancel("a", "g1")) == "elsewhere"
    assert store.run(queue.cancel("a", "g2")) == "running"


def test_cancelling_what_runs_keeps_the_claim_until_its_worker_ends_it(store: Store, queue: Queue) -> None:
    store.run(queue.enqueue(task("a")))
    [a] = claim(store, queue)

    assert store.run(queue.cancel("a")) == "running"

    differ = store.run(queue.beat("w1", [a], lease_ms=LEASE_MS)).claims
    assert differ is not None and differ["a"].cancelled
    assert store.run(queue.beat("w1", differ.values(), lease_ms=LEASE_MS)).claims is None, "now the sums agree"
    assert store.run(queue.finish("w1", a, Outcome.CANCELLED, USED))
    assert store.run(queue.beat("w1", [], lease_ms=LEASE_MS)).claims is None


def test_a_cancelled_request_of_a_dead_worker_ends_cancelled(store: Store, queue: Queue, valkey: redis.Redis) -> None:
    store.run(queue.enqueue(task("a")))
    claim(store, queue)
    store.run(queue.cancel("a"))

    store.run(queue.tick(dead_worker="w1"))

    assert outcomes(valkey) == [("a", "cancelled")]


def test_a_deadline_passed_in_the_queue_ends_the_request_unrun(
    store: Store, queue: Queue, clock: Clock, valkey: redis.Redis
) -> None:
    claim(store, queue, "alive")
    store.run(queue.enqueue(task("a", patience_ms=500)))
    clock.advance(500)

    assert claim(store, queue) == []
    assert outcomes(valkey) == [("a", "expired")]


def test_a_delayed_task_runs_when_it_is_due(store: Store, queue: Queue, clock: Clock) -> None:
    store.run(queue.enqueue(task("a", delay_ms=700)))

    assert store.run(queue.claim("w1", 1, lease_ms=LEASE_MS, nonce="x")).due_ms == 700
    clock.advance(700)
    assert [c.id for c in claim(store, queue)] == ["a"]


def test_what_is_handed_back_goes_to_the_front_of_its_line(store: Store, queue: Queue) -> None:
    for name in "ab":
        store.run(queue.enqueue(task(name)))
    [a] = claim(store, queue)

    assert store.run(queue.hand_back("w1", [a])) == 1
    assert store.run(queue.hand_back("w1", [a])) == 0
    assert [(c.id, c.attempt) for c in claim(store, queue, "w2", want=2)] == [("a", 2), ("b", 1)]


def test_a_request_that_the_store_forgot_is_taken_up_again(store: Store, queue: Queue) -> None:
    """Attempt numbers go on from those the gateway saw, so an old attempt's frames stay fenced."""
    store.run(queue.enqueue(task("goes on"), attempt=2, shown=True))
    store.run(queue.enqueue(task("seeded", rerunnable=False), attempt=1, shown=True))
    store.run(queue.enqueue(task("unseen", rerunnable=False), attempt=1))

    assert [(c.id, c.attempt) for c in claim(store, queue, want=9)] == [("goes on", 3), ("unseen", 2)]
    [seen] = store.run(queue.watch("g", ["seeded"])).seen
    assert seen.ending is not None and (seen.ending.outcome, seen.ending.attempt) == ("worker_lost", 1)


def test_what_a_newer_release_writes_into_a_row_disturbs_nobody_and_is_kept(bench: Bench) -> None:
    """Two releases side by side: this one reads over fields that it does not know, and writes them back."""
    bench.put("a", gateway="g", owner="o")
    for _ in range(2):
        row = bench.row("a") | {"novelty": "x", "novelties": [1, {"y": 2}]}
        bench.valkey.hset(bench.key("rows"), "a", msgspec.msgpack.encode(row))
        claim = bench.take()
        assert bench.row("a")["novelty"] == "x" and bench.row("a")["novelties"] == [1, {"y": 2}]
        assert bench.beat(claims=[claim]).claims is None
        assert bench.attach("a", "g", "o").state == "running"
        bench.die()

    assert bench.finish(bench.take())
    assert bench.ending("a").outcome == "completed"
    ended = bench.row("a")
    bench.valkey.hset(bench.key("rows"), "a", msgspec.msgpack.encode(ended | {"novelty": "x"}))
    assert bench.ending("a").outcome == bench.attach("a", "g", "o").ending.outcome == "completed"  # type: ignore[union-attr]


def test_nothing_is_left_when_everything_has_ended_and_is_forgotten(
    store: Store, queue: Queue, clock: Clock, valkey: redis.Redis
) -> None:
    for n in range(20):
        store.run(queue.enqueue(task(f"r{n}", cls=n % 4, tenant=f"t{n % 3}", body=b"b")))
    for taken in claim(store, queue, want=15):
        store.run(queue.finish("w1", taken, Outcome.COMPLETED, USED))
    for n in range(20):
        store.run(queue.cancel(f"r{n}"))
    store.run(queue.part("w1"))

    clock.advance(900_001)
    store.run(queue.tick())
    store.run(queue.tick())

    left = {key.decode().rpartition(":")[2] for key in valkey.scan_iter("f1:{m}:*")}
    assert left == {"counters", "usage", "wake", "service"}
    depth = store.run(queue.tick())
    assert (depth.waiting, depth.waiting_tokens, depth.running) == ((0, 0, 0, 0), 0, 0)
    assert len(outcomes(valkey)) == 20


def test_place_counts_higher_classes_and_ones_own_line(store: Store, queue: Queue) -> None:
    for name, cls in [
        ("i1", Class.INTERACTIVE),
        ("d1", Class.DEFAULT),
        ("d2", Class.DEFAULT),
        ("i2", Class.INTERACTIVE),
    ]:
        store.run(queue.enqueue(task(name, cls=cls)))

    places = [seen.place for seen in store.run(queue.watch("g", ["i1", "i2", "d1", "d2"])).seen]

    assert places == [1, 2, 3, 4]


def test_the_sum_of_claims_is_the_same_on_both_sides(store: Store, queue: Queue, valkey: redis.Redis) -> None:
    for n in range(50):
        store.run(queue.enqueue(task(f"r{n}")))
    held = claim(store, queue, want=50)
    for taken in held[:20]:
        store.run(queue.finish("w1", taken, Outcome.COMPLETED, USED))

    assert valkey.hget("f1:{m}:sums", "w1") == checksum(held[20:]).encode()
