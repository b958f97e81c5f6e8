"""`forebay bench queue`: how soon an idle worker starts a task, how many it gets through, what the store pays.

Ours beside Dramatiq's stock RedisBroker, one after the other in the same run, on one Valkey of their own. Both run an
actor that does nothing but note the time. Ours is the runner that GPU workers use: one loop, so many tasks in flight;
Dramatiq's is its own Worker with a thread for each, as it comes (`dramatiq`: with its default middleware) and stripped
(`dramatiq_bare`: with none). The queue is filled while some worker is alive, then that leaves and the one that is
measured starts.

    idle start    enqueue one message at a time to an idle worker; from before the enqueue to the actor's first line
    messages/s    from the start of a worker on a full queue to the end of the last message's actor
    requests/s    ours only: the same of what a gateway sends: 50 tenants, a body, charged tokens, a deadline, a usage
                  entry and an ending told to the gateway
    idle commands what one idle worker asks of the store, a second
    script us     server time per call (INFO commandstats), with so many other tasks of a hundred tenants waiting;
                  claim_64 and finish_64: per request, in exchanges of 64; beat_256 and watch_256: of 256 that run
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import dramatiq
import redis
from dramatiq.brokers.redis import RedisBroker

from core.redis import AsyncStore, Call, Store
from core.values import Outcome, Usage
from ops import stores
from ops.bench.platform import BenchFailed
from ops.bench.report import Found, Say
from tasks.broker import QueueBroker
from tasks.queue import Bounds, Claim, Close, Queue, Task
from tasks.runner import IDLE_S, Runner

MODEL = "bench"
#: Between two messages to an idle worker, so that it is idle again, seconds. Whoever polls backs off meanwhile.
GAP_S = 0.5
#: What a client sends; commands inside scripts are counted too and do not matter here.
SENT = ("cmdstat_evalsha", "cmdstat_bzpopmin", "cmdstat_publish", "cmdstat_ping")
LEASE_MS = 3_000


@dataclass(frozen=True, kw_only=True)
class Options:
    starts: int = 40  #: messages to an idle worker
    messages: int = 10_000  #: on the full queue
    in_flight: int = 256
    look_s: float = 5.0  #: how long an idle worker is watched
    depths: tuple[int, ...] = (0, 100_000)


#: Room for whatever a bench puts down.
BOUNDS = Bounds(waiting=10**7, tokens=10**12, tenant_waiting=10**7, tenant_tokens=10**12)
TENANTS = 50


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
            ours = _worked(lambda: _ours(server.url, options), options, client)
            ours["requests_per_s"] = _requests_per_s(server.url, options)
            say("Ours: what each script costs the store")
            ours["script_us"] = _script_us(client, options.depths)
            client.flushall()
            say("Dramatiq's RedisBroker: the same")
            stock = _worked(lambda: _stock(server.url, options), options, client)
            client.flushall()
            say("Dramatiq's RedisBroker without middleware: the same")
            bare = _worked(lambda: _stock(server.url, options, middleware=[]), options, client)
        finally:
            client.close()
            server.stop()
    return ours, {"dramatiq": stock, "dramatiq_bare": bare}


@dataclass
class Side:
    """One of the two: how a message is sent, and how a worker is run."""

    send: Callable[[int], object]
    worker: Callable[[], Any]  #: a context in which one worker runs
    notes: Notes
    filling: Callable[[], Any] = nullcontext  #: a context in which the queue is filled


def _worked(made: Callable[[], Side], options: Options, client: redis.Redis) -> dict[str, Any]:
    side = made()
    with side.worker():
        starts_ms = sorted(_idle_starts(side, options.starts))
        commands_per_s = _commands_per_s(client, options.look_s)
    messages_per_s = _drained(made(), options.messages)
    return {
        "idle_start_ms_p50": round(statistics.median(starts_ms), 2),
        "idle_start_ms_p99": round(starts_ms[int(len(starts_ms) * 0.99)], 2),
        "messages_per_s": messages_per_s,
        "idle_commands_per_s": round(commands_per_s, 2),
    }


def _drained(side: Side, count: int) -> int:
    """Fill the queue, then let one worker empty it; per second."""
    with side.filling():
        for n in range(count):
            side.send(n)
    side.notes.expect(count)
    begin_s = time.monotonic()
    with side.worker():
        if not side.notes.all_begun.wait(120):
            raise BenchFailed("the queue was not drained in 120 s")
        took_s = time.monotonic() - begin_s
    return round(count / took_s)


def _idle_starts(side: Side, count: int) -> Iterator[float]:
    for n in range(count):
        side.notes.expect(1)
        time.sleep(GAP_S)
        sent_s = time.monotonic()
        side.send(n)
        if not side.notes.all_begun.wait(30):
            raise BenchFailed("an idle worker did not start a message in 30 s")
        yield (side.notes.begun_s[n] - sent_s) * 1000


def _commands_per_s(client: redis.Redis, look_s: float) -> float:
    time.sleep(GAP_S)
    client.config_resetstat()
    time.sleep(look_s)
    stats = client.info("commandstats")
    return sum(int(stats[name]["calls"]) for name in SENT if name in stats) / look_s


# --- ours


def _ours(url: str, options: Options) -> Side:
    store, notes = Store.connect(url), Notes()
    broker = QueueBroker(store)

    @dramatiq.actor(broker=broker, queue_name=MODEL)
    async def note(n: int) -> None:
        notes.note(n)

    queue = broker.queues[MODEL] = Queue(MODEL, BOUNDS)
    return Side(
        send=note.send,
        worker=lambda: runner_on_a_thread(url, broker, options.in_flight),
        notes=notes,
        filling=lambda: _alive(store, queue),
    )


@contextmanager
def _alive(store: Store, queue: Queue) -> Iterator[None]:
    """Some worker is alive, and takes nothing: what comes meanwhile is not held for want of one."""
    store.run(queue.beat("alive", [], lease_ms=10**8))
    yield
    store.run(queue.part("alive"))


def _requests_per_s(url: str, options: Options) -> int:
    """As messages a second, of tasks that have everything a gateway gives them."""
    side = _ours(url, options)
    store, queue = Store.connect(url), Queue(MODEL, BOUNDS)
    store.client.flushall()

    def send(n: int) -> None:
        message: dramatiq.Message[None] = dramatiq.Message(
            queue_name=MODEL, actor_name="note", args=(n,), kwargs={}, options={}
        )
        store.run(queue.enqueue(_request(message.message_id, n, message.encode())))

    side.send = send
    return _drained(side, options.messages)


def _request(name: str, n: int, message: bytes) -> Task:
    return Task(
        id=name, message=message, tenant=f"t{n % TENANTS}", owner="key", gateway="g", input_tokens=100, need_tokens=300,
        most_tokens=500, patience_ms=10**7, facts=b"f" * 150, body=b"b" * 500, view=b"v" * 100,
    )  # fmt: skip


@contextmanager
def runner_on_a_thread(url: str, broker: QueueBroker, in_flight: int) -> Iterator[None]:
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
    store, queue = Store(client), Queue(MODEL, BOUNDS)
    client.flushall()
    store.run(queue.beat("w", [], lease_ms=10**9))
    waiting = 0
    for depth in sorted(depths):
        for start in range(waiting, depth, 1000):
            store.run_all([queue.enqueue(_task(f"d{n}")) for n in range(start, min(start + 1000, depth))])
        waiting = depth
        _settled(client)
        for name, us in _exercise(client, store, queue).items():
            cost.setdefault(name, {})[str(depth)] = us
    return cost


def _settled(client: redis.Redis) -> None:
    """Wait until the server does nothing but answer: it rewrites its log after it has grown much."""
    while client.info("persistence")["aof_rewrite_in_progress"]:
        time.sleep(0.1)


def _task(name: str) -> Task:
    return Task(
        id=name, message=b"m" * 300, tenant=f"t{crc32(name.encode()) % 100}", input_tokens=100, facts=b"f" * 100
    )


def _exercise(client: redis.Redis, store: Store, queue: Queue, rounds: int = 320) -> dict[str, float]:
    """Run each script so often and leave the depth as it was."""
    lease_ms, batch = 10**9, 64
    cost: dict[str, float] = {}

    def timed(name: str, calls: list[Call[Any]], each: int = 1) -> list[Any]:
        client.config_resetstat()
        replies = [store.run(call) for call in calls]
        cost[name] = round(float(client.info("commandstats")["cmdstat_evalsha"]["usec_per_call"]) / each, 1)
        return replies

    def close(claim: Claim) -> Close:
        return Close(claim=claim, outcome=Outcome.COMPLETED, usage=Usage(input_tokens=100, output_tokens=50))

    def claims(name: str, want: int) -> list[Claim]:
        unique = str(time.monotonic_ns())
        calls = [queue.claim("w", want, lease_ms=lease_ms, nonce=f"{unique}-{n}") for n in range(rounds // want)]
        return [claim for claimed in timed(name, calls, want) for claim in claimed.claims]

    names = [f"x{time.monotonic_ns()}-{n}" for n in range(2 * rounds)]
    timed("enqueue", [queue.enqueue(_task(name)) for name in names])
    singly, together = claims("claim", 1), claims("claim_64", batch)
    timed(
        "finish_64",
        [queue.finish_all("w", [*map(close, together[n : n + batch])]) for n in range(0, rounds, batch)],
        batch,
    )
    timed("finish", [queue.finish_all("w", [close(claim)]) for claim in singly[256:]])
    running = singly[:256]
    timed("beat_256", [queue.beat("w", running, lease_ms=lease_ms)] * 50)
    timed("watch_256", [queue.watch("g", [claim.id for claim in running])] * 50)
    store.run(queue.finish_all("w", [*map(close, running)]))
    return cost


# --- Dramatiq's


def _stock(url: str, options: Options, **more: Any) -> Side:
    pool = redis.BlockingConnectionPool.from_url(url, max_connections=options.in_flight + 16)
    connection = redis.Redis(connection_pool=pool)
    broker = RedisBroker(client=connection, **more)  # type: ignore[no-untyped-call]
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
