"""The asyncio worker: Dramatiq's semantics on one loop, and an ending for every task, on a real Valkey."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import AsyncIO, Middleware, ShutdownNotifications, SkipMessage, TimeLimit
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from structlog.testing import capture_logs

from core.redis import AsyncStore, Call, Store
from core.values import Outcome, Usage
from tasks.broker import QueueBroker
from tasks.queue import Claim, Queue, Task
from tasks.runner import IDLE_S, Finished, Held, Runner
from tests.conftest import PATIENCE_S, on_loop

STORES = ("single", "cluster")

#: Longer than any test: what happens then was not caused by a beat or a lease.
NEVER_MS = 60_000


class Flaky(AsyncStore):
    """The store does what it is asked, and its replies are lost, or replaced by an error, as often as a test says."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.losing: dict[str, int] = {}  #: script -> replies to lose
        self.error: Exception = RedisConnectionError("lost")
        self.lost: list[str] = []
        self.together: list[int] = []  #: how many endings went in each exchange

    async def run(self, call: Call[Any]) -> Any:
        reply = await super().run(call)
        if call.script and call.script.name == "finish":
            self.together.append(len(reply))
        self._lose(call, reply)
        return reply

    def _lose(self, call: Call[Any], reply: Any) -> None:
        name = call.script.name if call.script else str(call.args[0])
        if self.losing.get(name, 0) > 0 and not (name == "claim" and not reply.claims):
            self.losing[name] -= 1
            self.lost.append(name)
            raise self.error


class Deaf(Queue):
    """A queue whose cancels never reach the worker that is meant."""

    def worker_channel(self, worker: str) -> str:
        return "nowhere"


class Bench:
    """A runner under test, and the queue seen from the side."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.side = Store.connect(url)
        self.queue = Queue("q")
        self.broker = QueueBroker(self.side)
        self.marks: list[str] = []

    def make(
        self,
        *,
        queue: Queue | None = None,
        room: int = 4,
        lease_ms: int = NEVER_MS,
        beat_ms: int = NEVER_MS,
    ) -> Bench:
        self.store = Flaky.connect(self.url)
        self.blocking = AsyncStore.connect(self.url, timeout_s=IDLE_S + 3)
        self.runner = Runner(
            self.broker,
            self.store,
            self.blocking,
            queue or self.queue,
            worker="w",
            lease_ms=lease_ms,
            beat_ms=beat_ms,
            room=lambda: room - len(self.runner.held),
        )
        return self

    async def __aenter__(self) -> Bench:
        self.running = asyncio.create_task(self.runner.run())
        await self.until(lambda: self.side.client.pubsub_numsub(self.runner.queue.worker_channel("w"))[0][1] == 1)
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self.runner.draining.is_set():
            await self.runner.drain(0)
        await self.running
        await self.close()

    async def close(self) -> None:
        await self.store.close()
        await self.blocking.close()

    async def until(self, true: Callable[[], Any]) -> None:
        """Wait for something outside this loop. `on_loop` bounds it."""
        while not true():
            await asyncio.sleep(0.003)

    def put(self, task_id: str, message: bytes, **more: Any) -> None:
        self.side.run(self.queue.enqueue(Task(id=task_id, message=message, facts=b"f", **more)))

    def send(self, actor: dramatiq.Actor[..., Any], *args: Any, **options: Any) -> str:
        """Enqueue a message as a task that leaves a usage entry."""
        message = actor.message_with_options(args=args, **options)
        self.put(message.message_id, message.encode())
        return message.message_id

    def claim(self, worker: str, nonce: str = "side") -> list[Claim]:
        return list(self.side.run(self.queue.claim(worker, 1, lease_ms=NEVER_MS, nonce=nonce)).claims)

    def state(self, task_id: str) -> str:
        return self.side.run(self.queue.watch("side", [task_id])).seen[0].state

    async def ending(self, task_id: str) -> Any:
        await self.until(lambda: self.state(task_id) == "ended")
        return self.side.run(self.queue.watch("side", [task_id])).seen[0].ending

    async def marked(self, mark: str) -> None:
        await self.until(lambda: mark in self.marks)

    def waiter(self) -> dramatiq.Actor[..., Any]:
        """An actor that waits until it is stopped, and leaves marks."""

        async def wait(name: str = "task") -> None:
            self.marks.append(f"{name} began")
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.marks.append(f"{name} stopped")
                raise

        return self.actor(wait)

    def actor(self, fn: Callable[..., Any], **options: Any) -> dramatiq.Actor[..., Any]:
        return dramatiq.Actor(
            fn, broker=self.broker, actor_name=fn.__name__, queue_name="q", priority=0, options=options
        )


@pytest.fixture
def bench(valkey_url: str, valkey: redis.Redis) -> Iterator[Bench]:
    bench = Bench(valkey_url)
    yield bench
    bench.side.close()


# --- Dramatiq's semantics


class Recorder(Middleware):
    """Writes down which hooks of a worker and a message it sees."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self.name, self.seen = name, seen

    def note(self, hook: str, said: object = "") -> None:
        self.seen.append(f"{self.name} {hook} {said}".rstrip())

    def before_worker_boot(self, broker: Any, worker: Any) -> None:
        self.note("before_worker_boot")

    def after_worker_boot(self, broker: Any, worker: Any) -> None:
        self.note("after_worker_boot")

    def before_worker_shutdown(self, broker: Any, worker: Any) -> None:
        self.note("before_worker_shutdown")

    def after_worker_shutdown(self, broker: Any, worker: Any) -> None:
        self.note("after_worker_shutdown")

    def before_process_message(self, broker: Any, message: Any) -> None:
        self.note("before_process_message", message.args)
        if self.name == "inner" and message.args[0] == "skip":
            raise SkipMessage("not this one")

    def after_process_message(self, broker: Any, message: Any, *, result: Any = None, exception: Any = None) -> None:
        self.note("after_process_message", repr(exception or result))

    def after_skip_message(self, broker: Any, message: Any) -> None:
        self.note("after_skip_message")


def play(name: str, seen: list[str]) -> str:
    """What the actor does."""
    seen.append(f"actor {name}")
    if name == "fail":
        raise ValueError("no")
    if name == "late skip":
        raise SkipMessage("after all")
    return name


@on_loop
async def test_middleware_sees_what_it_would_see_under_dramatiqs_own_worker(bench: Bench) -> None:
    """Two middlewares, four messages: one that is done, one that fails, one skipped before and one while it runs."""
    names = ["done", "fail", "skip", "late skip"]
    ours: list[str] = []
    theirs: list[str] = []

    async def ours_plays(name: str) -> str:
        return play(name, ours)

    for name in ("outer", "inner"):
        bench.broker.add_middleware(Recorder(name, ours))
    actor = bench.actor(ours_plays)
    async with bench.make(room=1):
        for name in names:
            await bench.ending(bench.send(actor, name))
    await asyncio.to_thread(under_dramatiq, names, theirs)

    assert ours == theirs
    assert len(ours) > 20


def under_dramatiq(names: list[str], seen: list[str]) -> None:
    broker = StubBroker(middleware=[Recorder("outer", seen), Recorder("inner", seen)])

    @dramatiq.actor(broker=broker, queue_name="q")
    def theirs_plays(name: str) -> str:
        return play(name, seen)

    worker = dramatiq.Worker(broker, worker_timeout=10, worker_threads=1)
    worker.start()
    for name in names:
        theirs_plays.send(name)
        broker.join("q", fail_fast=False)
        worker.join()
    worker.stop()


@on_loop
async def test_what_an_actor_returns_is_its_ending(bench: Bench, valkey: redis.Redis) -> None:
    async def plain() -> str:
        return "anything"

    async def counted() -> Finished:
        return Finished(outcome=Outcome.LENGTH, usage=Usage(input_tokens=2, output_tokens=3), message="so it was")

    async with bench.make():
        endings = [await bench.ending(bench.send(bench.actor(one))) for one in (plain, counted)]

    assert [(e.outcome, e.usage.output_tokens, e.message) for e in endings] == [
        ("completed", 0, ""),
        ("length", 3, "so it was"),
    ]


@on_loop
async def test_an_actor_that_raises_ends_as_failed_and_says_why(bench: Bench) -> None:
    async def fails(message: str) -> None:
        raise ValueError(*[message] if message else [])

    actor = bench.actor(fails)
    async with bench.make():
        with capture_logs():
            told, mute = [await bench.ending(bench.send(actor, message)) for message in ("the engine is out", "")]

    assert (told.outcome, told.message) == ("failed", "the engine is out")
    assert (mute.outcome, mute.message) == ("failed", "ValueError")


POISON = {
    "nothing": b"",
    "not json": b"\xff\xfe",
    "no object": b"null",
    "a list": b"[]",
    "no fields": b"{}",
    "no such actor": b'{"queue_name":"q","actor_name":"nobody","args":[],"kwargs":{},"options":{},"message_id":"x","message_timestamp":1}',  # noqa: E501
    "no arguments": b'{"queue_name":"q","actor_name":"fine","args":7,"kwargs":{},"options":{},"message_id":"x","message_timestamp":1}',  # noqa: E501
    "no options": b'{"queue_name":"q","actor_name":"fine","args":[],"kwargs":{},"options":null,"message_id":"x","message_timestamp":1}',  # noqa: E501
}


@on_loop
async def test_a_message_that_cannot_be_read_ends_as_failed_and_stops_nobody(bench: Bench) -> None:
    async def fine() -> None: ...

    actor = bench.actor(fine)
    async with bench.make(room=1):
        with capture_logs():
            for name, message in POISON.items():
                bench.put(name, message)
            good = bench.send(actor)
            endings = {name: (await bench.ending(name)).outcome for name in POISON}
            last = await bench.ending(good)

    assert endings == dict.fromkeys(POISON, "failed")
    assert last.outcome == "completed"


@on_loop
async def test_a_time_limit_of_the_message_or_the_actor_ends_the_task(bench: Bench) -> None:
    async def short(name: str) -> None:
        await asyncio.Event().wait()

    actor = bench.waiter()
    limited = bench.actor(short, time_limit=20)
    async with bench.make():
        with capture_logs():
            by_message = await bench.ending(bench.send(actor, "task", time_limit=20))
            by_actor = await bench.ending(bench.send(limited, "task"))

    assert (by_message.outcome, by_message.message) == ("failed", "TimeoutError")
    assert (by_actor.outcome, by_actor.message) == ("failed", "TimeoutError")
    assert bench.marks == ["task began", "task stopped"]


@on_loop
async def test_a_thousand_time_limits_take_no_place_away(bench: Bench) -> None:
    """Each frees what it held: sixteen places are sixteen places afterwards."""
    actor = bench.waiter()
    async with bench.make(room=16):
        with capture_logs():
            for n in range(1000):
                bench.send(actor, f"t{n}", time_limit=5)
            await bench.until(lambda: bench.side.client.xlen(bench.queue.prefix + "usage") == 1000)
            await bench.until(lambda: not bench.runner.held)
        assert bench.runner.room() == 16
        for _ in range(16):
            bench.send(actor)
        await bench.until(lambda: len(bench.runner.held) == 16)

    assert all(bench.marks.count(f"t{n} stopped") == 1 for n in range(1000))


@pytest.mark.parametrize("unfit", [TimeLimit, ShutdownNotifications, AsyncIO])
def test_middleware_that_works_on_threads_is_refused_at_once(unfit: type[Middleware], bench: Bench) -> None:
    bench.broker.add_middleware(unfit())

    with pytest.raises(ValueError, match=unfit.__name__):
        bench.make()


# --- the store loses something


@on_loop
async def test_a_claim_whose_reply_was_lost_runs_its_task_once(bench: Bench) -> None:
    async def once() -> None:
        bench.marks.append("ran")

    actor = bench.actor(once)
    bench.make().store.losing = {"claim": 2}
    async with bench:
        ending = await bench.ending(bench.send(actor))

    assert bench.store.lost == ["claim", "claim"]
    assert (bench.marks, ending.outcome, ending.attempt) == (["ran"], "completed", 1)


@on_loop
async def test_an_ending_whose_reply_was_lost_is_told_again_and_counts_once(bench: Bench, valkey: redis.Redis) -> None:
    async def once() -> None:
        bench.marks.append("ran")

    actor = bench.actor(once)
    bench.make().store.losing = {"finish": 2}
    async with bench:
        task = bench.send(actor)
        await bench.ending(task)
        await bench.until(lambda: not bench.runner.held)

    assert bench.store.lost == ["finish", "finish"]
    assert outcomes(valkey) == [(task, "completed")]
    assert bench.marks == ["ran"]


@on_loop
async def test_a_background_loop_that_breaks_is_started_again(bench: Bench) -> None:
    async def once() -> None: ...

    actor = bench.actor(once)
    bench.make(beat_ms=10).store.losing = {"beat": 1}
    bench.store.error = ZeroDivisionError("a fault of ours")
    with capture_logs() as said:
        async with bench:
            await bench.until(lambda: bench.store.lost)
            ending = await bench.ending(bench.send(actor))
            await asyncio.wait_for(bench.runner.vouched(), PATIENCE_S)

    assert [one["event"] for one in said if one["log_level"] == "error"] == ["loop_failed"]
    assert ending.outcome == "completed"


@on_loop
async def test_a_beat_that_failed_is_tried_again_before_the_next_is_due(bench: Bench) -> None:
    """An outage just too short to be known for one leaves half a second of a lease of three: less than a beat."""
    async with bench.make(beat_ms=1500):
        bench.store.losing = {"beat": 3}
        await bench.until(lambda: bench.store.lost)
        first_s = time.monotonic()
        await bench.until(lambda: len(bench.store.lost) == 3)

    assert time.monotonic() - first_s < 1.5


@on_loop
async def test_nobody_is_vouched_for_once_the_lease_may_have_passed(bench: Bench) -> None:
    """What a worker publishes while it is vouched for is surely not a dead attempt's."""
    async with bench.make(lease_ms=150, beat_ms=10):
        await asyncio.wait_for(bench.runner.vouched(), PATIENCE_S)
        with capture_logs():
            bench.store.losing = {"beat": 10**6}
            await asyncio.sleep(0.15)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(bench.runner.vouched(), 0.05)
            bench.store.losing = {}
            await asyncio.wait_for(bench.runner.vouched(), PATIENCE_S)


# --- cancels


@on_loop
async def test_a_cancel_stops_the_task_at_once(bench: Bench) -> None:
    """By message: the next beat is a minute away."""
    async with bench.make():
        task = bench.send(bench.waiter())
        await bench.marked("task began")
        assert bench.side.run(bench.queue.cancel(task)) == "running"
        ending = await bench.ending(task)

    assert (ending.outcome, bench.marks) == ("cancelled", ["task began", "task stopped"])


@on_loop
async def test_a_cancel_that_never_arrived_is_learned_from_the_next_beat(bench: Bench) -> None:
    async with bench.make(queue=Deaf("q"), beat_ms=10):
        task = bench.send(bench.waiter())
        await bench.marked("task began")
        bench.side.run(bench.queue.cancel(task))
        ending = await bench.ending(task)

    assert (ending.outcome, bench.marks) == ("cancelled", ["task began", "task stopped"])


@on_loop
async def test_a_cancelled_task_is_billed_for_what_it_had_counted(bench: Bench) -> None:
    async def counts() -> None:
        [held] = bench.runner.held.values()
        held.usage = Usage(input_tokens=4, output_tokens=2)
        bench.marks.append("counted")
        await asyncio.Event().wait()

    actor = bench.actor(counts)
    async with bench.make():
        task = bench.send(actor)
        await bench.marked("counted")
        bench.side.run(bench.queue.cancel(task))
        ending = await bench.ending(task)

    assert (ending.outcome, ending.usage) == ("cancelled", Usage(input_tokens=4, output_tokens=2))


@on_loop
async def test_a_cancel_that_comes_before_the_task_has_begun_ends_it_unrun(bench: Bench) -> None:
    """asyncio never runs a task that is cancelled before its first step, so the runner must not leave it to asyncio."""
    actor = bench.waiter()
    runner = bench.make().runner
    task = bench.send(actor)
    [claim] = bench.claim("w")

    runner._start(claim)
    runner.let_go(task, "cancelled")
    telling = asyncio.create_task(runner._finishes())
    ending = await bench.ending(task)
    await bench.until(lambda: not runner.held)
    telling.cancel()
    await bench.close()

    assert (ending.outcome, bench.marks) == ("cancelled", [])


# --- fences


@on_loop
async def test_a_task_that_another_worker_has_is_stopped_and_not_ended(bench: Bench, valkey: redis.Redis) -> None:
    """Somebody buried us. The next beat tells, and the other's attempt is none of our business."""
    async with bench.make(room=1, beat_ms=10):
        task = bench.send(bench.waiter())
        await bench.marked("task began")
        bench.side.run(bench.queue.tick("w"))
        [theirs] = bench.claim("w2")
        await bench.marked("task stopped")
        await bench.until(lambda: not bench.runner.held)
        assert (theirs.attempt, bench.state(task)) == (2, "running")
        assert outcomes(valkey) == []

        assert bench.side.run(bench.queue.finish("w2", theirs, Outcome.COMPLETED, Usage()))

    assert outcomes(valkey) == [(task, "completed")]


@on_loop
async def test_a_task_that_comes_back_to_its_worker_before_that_knows_it_was_lost_begins_anew_at_once(
    bench: Bench, valkey: redis.Redis
) -> None:
    """It slept past its lease, was reaped, and is the only worker: its next claim brings its own tasks."""
    async with bench.make(room=2):
        task = bench.send(bench.waiter())
        await bench.marked("task began")
        bench.side.run(bench.queue.tick("w"))
        await bench.until(lambda: bench.marks == ["task began", "task stopped", "task began"])
        assert [held.claim.attempt for held in bench.runner.held.values()] == [2]
        bench.side.run(bench.queue.cancel(task))
        ending = await bench.ending(task)

    assert (ending.outcome, ending.attempt) == ("cancelled", 2)


@on_loop
async def test_a_fenced_worker_that_does_not_know_it_yet_ends_nothing(bench: Bench, valkey: redis.Redis) -> None:
    go = asyncio.Event()

    async def late() -> None:
        bench.marks.append("began")
        await go.wait()

    actor = bench.actor(late)
    with capture_logs() as said:
        async with bench.make(room=1):
            task = bench.send(actor)
            await bench.marked("began")
            bench.side.run(bench.queue.tick("w"))
            bench.claim("w2")
            go.set()
            await bench.until(lambda: not bench.runner.held)

    assert bench.state(task) == "running"
    assert outcomes(valkey) == []
    assert "finish_fenced" in [one["event"] for one in said]


@on_loop
async def test_claims_that_nobody_here_knows_of_are_handed_back(bench: Bench) -> None:
    """Such as those of a claim whose every reply was lost. Two beats in a row: one may just be on its way."""

    async def once() -> None: ...

    actor = bench.actor(once)
    task = bench.send(actor)
    assert bench.claim("w")
    with capture_logs() as said:
        async with bench.make(beat_ms=10):
            ending = await bench.ending(task)

    assert (ending.outcome, ending.attempt) == ("completed", 2)
    assert "stray_claims" in [one["event"] for one in said]


# --- drain


@on_loop
async def test_a_drain_lets_tasks_end_and_hands_back_what_outlasts_it(bench: Bench, valkey: redis.Redis) -> None:
    async def ends() -> None:
        bench.marks.append("short began")
        await bench.runner.draining.wait()

    short, long = bench.actor(ends), bench.waiter()
    with capture_logs():
        async with bench.make(room=2):
            first, second = bench.send(short), bench.send(long, "long")
            third = bench.send(short)
            await bench.marked("short began")
            await bench.marked("long began")

            await bench.runner.drain(0.1)

    assert (await bench.ending(first)).outcome == "completed"
    assert "long stopped" in bench.marks
    assert [bench.state(task) for task in (second, third)] == ["waiting", "waiting"]
    assert [(c.id, c.attempt) for c in bench.claim("w2", "a") + bench.claim("w2", "b")] == [(second, 2), (third, 1)]
    assert valkey.zscore("f1:{q}:leases", "w") is None
    assert outcomes(valkey) == [(first, "completed")]


@on_loop
async def test_what_breaks_as_it_is_stopped_goes_back_all_the_same(bench: Bench) -> None:
    async def sore() -> None:
        bench.marks.append("began")
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("as it was stopped")

    async def put_away(held: list[Held]) -> None:
        await asyncio.wait([one.task for one in held if one.task])

    actor = bench.actor(sore)
    async with bench.make():
        bench.runner.before_back = put_away
        task = bench.send(actor)
        await bench.marked("began")
        await bench.runner.drain(0)

    assert bench.state(task) == "waiting"


@on_loop
async def test_a_drain_with_nothing_in_hand_is_over_at_once(bench: Bench, valkey: redis.Redis) -> None:
    async with bench.make():
        await asyncio.wait_for(bench.runner.drain(3600), 5)

    assert valkey.zcard("f1:{q}:leases") == 0


@on_loop
async def test_a_runner_takes_no_more_than_it_has_room_for(bench: Bench) -> None:
    async with bench.make(room=2):
        actor = bench.waiter()
        tasks = [bench.send(actor, str(n)) for n in range(5)]
        await bench.marked("1 began")
        assert [bench.state(task) for task in tasks] == ["running"] * 2 + ["waiting"] * 3

        bench.side.run(bench.queue.cancel(tasks[0]))
        await bench.marked("2 began")

    assert "3 began" not in bench.marks


def outcomes(valkey: redis.Redis) -> list[tuple[str, str]]:
    """Every ending, in order."""
    return [(e[b"id"].decode(), e[b"outcome"].decode()) for _, e in valkey.xrange("f1:{q}:usage")]


# --- endings


@on_loop
async def test_endings_of_one_moment_are_told_in_one_exchange(bench: Bench, valkey: redis.Redis) -> None:
    """Hundreds of requests may end in one engine step; a round trip for each would hold up their slots."""
    release = asyncio.Event()

    async def wait() -> None:
        await release.wait()

    actor = bench.actor(wait)
    async with bench.make(room=40):
        for _ in range(40):
            bench.send(actor)
        await bench.until(lambda: len(bench.runner.held) == 40)
        release.set()
        await bench.until(lambda: not bench.runner.held)

    assert sum(bench.store.together) == 40 == len(outcomes(valkey))
    assert len(bench.store.together) <= 4


@on_loop
async def test_an_ending_that_the_store_refuses_keeps_no_other_from_ending(bench: Bench, valkey: redis.Redis) -> None:
    """Say, a script that the store will not run: the others of the same exchange are told one by one."""
    release = asyncio.Event()

    async def wait() -> None:
        await release.wait()

    actor = bench.actor(wait)
    bench.make(room=3).store.error = ResponseError("refused")
    async with bench:
        tasks = [bench.send(actor) for _ in range(3)]
        await bench.until(lambda: len(bench.runner.held) == 3)
        bench.store.losing = {"finish": 2}
        release.set()
        await bench.until(lambda: len(outcomes(valkey)) == 3)

    assert {name for name, _ in outcomes(valkey)} == set(tasks)
