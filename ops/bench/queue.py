"""`forebay bench queue`: how soon an idle worker starts a task, how many it gets through, what the store pays.

Ours beside Dramatiq's stock RedisBroker, one after the other in the same run, on one Valkey of their own. Both run an
actor that does nothing but note the time. Ours is the runner that GPU workers use: one loop, so many tasks in flight;
Dramatiq's is its own Worker with a thread for each.

    idle start    enqueue one message at a time to an idle worker; from before the enqueue to the actor's first line
    messages/s    from the start of a worker on a full queue to the end of the last message
    idle commands what one idle worker asks of the store, a second
    script us     server time per call (INFO commandstats), with so many other tasks waiting
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dramatiq
import redis
from dramatiq.brokers.redis import RedisBroker

from core.redis import AsyncStore, Store
from core.values import Outcome, Usage
from ops import stores
from ops.bench.report import Found, Say
from tasks.broker import QueueBroker
from tasks.queue import Claim, Queue, Task
from tasks.runner import IDLE_S, Runner

MODEL = "bench"
#: Between two messages to an idle worker, so that it is idle again, seconds. Whoever polls backs off meanwhile.
GAP_S = 0.5
#: What a client sends; commands inside scripts are counted too and do not matter here.
SENT = ("cmdstat_evalsha", "cmdstat_bzpopmin", "cmdstat_publish", "cmdstat_ping")
#: How long an idle worker is watched, seconds.
IDLE_LOOK_S = 5.0
LEASE_MS = 3_000


@dataclass(frozen=True, kw_only=True)
class Options:
    starts: int = 40  #: messages to an idle worker
    messages: int = 10_000  #: on the full queue
    in_flight: int = 256
    depths: tuple[int, ...] = (0, 100_000)


@dataclass
class Notes:
    """When each message's actor began, and how many have."""

    begun_s: dict[int, float] = field(default_factory=dict)
    all_begun: threading.Event = field(default_factory=threading.Event)
    expected: int = 0

    def expect(self, count: int) -> None:
        self.begun_s.clear()
        self.all_begun.clear()
        self.expected = count

    def note(self, n: int) -> None:
        self.begun_s[n] = time.monotonic()
        if len(self.begun_s) == self.expected:
            self.all_begun.set()


def figures(options: Options, say: Say) -> Found:
    """Our figures, and Dramatiq's."""
    with tempfile.TemporaryDirectory(prefix="fb-", ignore_cleanup_errors=True) as folder:
        server = stores.start_valkey(Path(folder))
        client = redis.Redis.from_url(server.url)
        try:
            say("Ours: an idle worker, then a full queue")
            ours = _worked(_ours(server.url, options), options, client)
            say("Ours: what each script costs the store")
            ours["script_us"] = _script_us(client, options.depths)
            client.flushall()
            say("Dramatiq's RedisBroker: the same")
            peer = _worked(_stock(server.url, options), options, client)
        finally:
            client.close()
            server.stop()
    return ours, {"dramatiq": peer}


@dataclass
class Side:
    """One of the two: how a message is sent, and how a worker is run."""

    send: Callable[[int], object]
    worker: Callable[[], Any]  #: a context in which one worker runs
    notes: Notes


def _worked(side: Side, options: Options, client: redis.Redis) -> dict[str, Any]:
    with side.worker():
        starts_ms = sorted(_idle_starts(side, options.starts))
        commands_per_s = _commands_per_s(client)
    for n in range(options.messages):
        side.send(n)
    side.notes.expect(options.messages)
    begin_s = time.monotonic()
    with side.worker():
        if not side.notes.all_begun.wait(120):
            raise TimeoutError("the queue was not drained in 120 s")
        took_s = time.monotonic() - begin_s
    return {
        "idle_start_ms_p50": round(statistics.median(starts_ms), 2),
        "idle_start_ms_p99": round(starts_ms[int(len(starts_ms) * 0.99)], 2),
        "messages_per_s": round(options.messages / took_s),
        "idle_commands_per_s": round(commands_per_s, 2),
    }


def _idle_starts(side: Side, count: int) -> Iterator[float]:
    for n in range(count):
        side.notes.expect(1)
        time.sleep(GAP_S)
        sent_s = time.monotonic()
        side.send(n)
        if not side.notes.all_begun.wait(30):
            raise TimeoutError("an idle worker did not start a message in 30 s")
        yield (side.notes.begun_s[n] - sent_s) * 1000


def _commands_per_s(client: redis.Redis) -> float:
    time.sleep(GAP_S)
    client.config_resetstat()
    time.sleep(IDLE_LOOK_S)
    stats = client.info("commandstats")
    return sum(int(stats[name]["calls"]) for name in SENT if name in stats) / IDLE_LOOK_S


# --- ours


def _ours(url: str, options: Options) -> Side:
    store, notes = Store.connect(url), Notes()
    broker = QueueBroker(store)

    @dramatiq.actor(broker=broker, queue_name=MODEL)
    async def note(n: int) -> None:
        notes.note(n)

    return Side(send=note.send, worker=lambda: _runner(url, broker, options.in_flight), notes=notes)


@contextmanager
def _runner(url: str, broker: QueueBroker, in_flight: int) -> Iterator[None]:
    """A runner on a loop of its own thread, until the block ends."""
    ready, stop = threading.Event(), threading.Event()

    async def live() -> None:
        store, blocking = AsyncStore.connect(url), AsyncStore.connect(url, timeout_s=IDLE_S + 3)
        runner = Runner(
            broker, store, blocking, Queue(MODEL), worker=f"w{time.monotonic_ns()}", lease_ms=LEASE_MS,
            beat_ms=LEASE_MS // 3, room=lambda: in_flight - len(runner.held),
        )  # fmt: skip
        running = asyncio.create_task(runner.run())
        ready.set()
        await asyncio.to_thread(stop.wait)
        await runner.drain(10.0)
        await running
        await store.close()
        await blocking.close()

    thread = threading.Thread(target=lambda: asyncio.run(live()), daemon=True)
    thread.start()
    ready.wait()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _script_us(client: redis.Redis, depths: tuple[int, ...]) -> dict[str, dict[str, float]]:
    """Server time of each script, with so many tasks of a hundred tenants waiting."""
    cost: dict[str, dict[str, float]] = {}
    store, queue = Store(client), Queue(MODEL)
    client.flushall()
    waiting = 0
    for depth in depths:
        for start in range(waiting, depth, 1000):
            store.run_all([queue.enqueue(_task(f"d{n}")) for n in range(start, min(start + 1000, depth))])
        waiting = depth
        for name, us in _exercise(client, store, queue).items():
            cost.setdefault(name, {})[str(depth)] = us
    return cost


def _task(name: str) -> Task:
    return Task(id=name, message=b"m" * 300, tenant=f"t{hash(name) % 100}", input_tokens=100, facts=b"f" * 100)


def _exercise(client: redis.Redis, store: Store, queue: Queue, rounds: int = 300) -> dict[str, float]:
    """Run each script so often and leave the depth as it was."""
    names = [f"x{time.monotonic_ns()}-{n}" for n in range(rounds)]
    cost = {"enqueue": _us(client, lambda: [store.run(queue.enqueue(_task(name))) for name in names])}
    claims: list[Claim] = []

    def claim() -> None:
        for name in names:
            claims.extend(store.run(queue.claim("w", 1, lease_ms=10**6, nonce=name)).claims)

    cost["claim"] = _us(client, claim)
    held = claims[:256]
    cost["beat_256"] = _us(client, lambda: [store.run(queue.beat("w", claims, lease_ms=10**6)) for _ in range(50)])
    cost["watch_256"] = _us(
        client, lambda: [store.run(queue.watch("g", [c.id for c in held], lease_ms=10**6)) for _ in range(50)]
    )
    usage = Usage(input_tokens=100, output_tokens=50)
    cost["finish"] = _us(client, lambda: [store.run(queue.finish("w", c, Outcome.COMPLETED, usage)) for c in claims])
    return cost


def _us(client: redis.Redis, run: Callable[[], object]) -> float:
    """Mean server time of the scripts that `run` runs, after one pass of the clock's own."""
    client.config_resetstat()
    run()
    stats = client.info("commandstats")
    return round(float(stats["cmdstat_evalsha"]["usec_per_call"]), 1)


# --- Dramatiq's


def _stock(url: str, options: Options) -> Side:
    pool = redis.BlockingConnectionPool.from_url(url, max_connections=options.in_flight + 16)
    connection = redis.Redis(connection_pool=pool)
    broker = RedisBroker(client=connection, middleware=[])  # type: ignore[no-untyped-call]
    notes = Notes()

    @dramatiq.actor(broker=broker, queue_name=MODEL)
    def note(n: int) -> None:
        notes.note(n)

    @contextmanager
    def worker() -> Iterator[None]:
        running = dramatiq.Worker(broker, worker_threads=options.in_flight)
        running.start()
        try:
            yield
        finally:
            running.stop()

    return Side(send=note.send, worker=worker, notes=notes)
