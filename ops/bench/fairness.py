"""`forebay bench fairness`: who gets how many tokens when more is asked for than there is.

The real queue and real runners, on engines that make one token of every running request each step, as continuous
batching does. The peer `fifo` is the same queue with one tenant for all: first come, first served. Tokens are counted
as the queue charges them, input once and output twice, where they are made: input at the start, output step by step.

    service_gap_tokens   two tenants that always have something waiting come by turns, one's requests ten times as
                         large as the other's: the largest difference ever of the tokens served to the two
    vtc_bound_tokens     what that may be at most (VTC, arXiv 2401.00588): twice the larger of the longest input and of
                         the output, charged twice, that all slots together can be making
    light_wait_ms_p99    a tenant that sends something short now and then, beside another's flood: from before its
                         enqueue to its actor's first line
    light_alone_ms_p99   the same tenant without the flood
    slot_remainder_ms    how long after a light request was sent beside the flood the first slot was free, p99
    jain                 fifty tenants of sizes between one and ten, all with something waiting: Jain's index of the
                         tokens served, 1: all the same
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from bisect import bisect
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import dramatiq
import redis

from core.redis import AsyncStore, Store
from core.telemetry import logs
from core.values import Usage
from ops import stores
from ops.bench.queue import BOUNDS, MODEL
from ops.bench.report import Found, Say
from tasks.broker import QueueBroker
from tasks.queue import Queue, Task
from tasks.runner import IDLE_S, Runner

#: What the queue charges for a token of output (tasks/lua/order.lua).
OUTPUT_COST = 2
LEASE_MS = 3_000


@dataclass(frozen=True, kw_only=True)
class Options:
    seconds: float = 8.0  #: of each of the four scenes, about
    workers: int = 2
    slots: int = 8  #: of each worker
    step_s: float = 0.005
    tenants: int = 50
    seed: int = 1


@dataclass(frozen=True)
class Size:
    input_tokens: int
    output_tokens: int

    @property
    def cost(self) -> int:
        return self.input_tokens + OUTPUT_COST * self.output_tokens


LARGE, SMALL, LIGHT = Size(1000, 100), Size(100, 10), Size(20, 4)


@dataclass
class Running:
    """A request on an engine."""

    tenant: str
    size: Size
    done: asyncio.Future[None]
    made: int = 0


@dataclass
class Scene:
    """Workers, and what was served while they ran."""

    url: str
    options: Options
    store: AsyncStore
    queue: Queue
    fair: bool  #: False: one tenant for all
    runners: list[Runner] = field(default_factory=list)
    running: dict[str, Running] = field(default_factory=dict)
    begun_s: dict[str, float] = field(default_factory=dict)
    freed_s: list[float] = field(default_factory=list)  #: when a slot was
    left: Counter[str] = field(default_factory=Counter)  #: requests of a tenant that have not begun
    served: Counter[str] = field(default_factory=Counter)
    gap_tokens: int = 0
    watched: tuple[str, str] | None = None
    names: Iterable[int] = field(default_factory=count)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def send(self, requests: list[tuple[str, Size]]) -> list[str]:
        """Put requests of (tenant, size) on the queue, in this order."""
        tasks = [self._task(tenant, size) for tenant, size in requests]
        self.left.update(tenant for tenant, _ in requests)
        for at in range(0, len(tasks), 500):
            await self.store.run_all([self.queue.enqueue(task) for task in tasks[at : at + 500]])
        return [task.id for task in tasks]

    def _task(self, tenant: str, size: Size) -> Task:
        name = f"r{next(iter(self.names))}"
        message: dramatiq.Message[None] = dramatiq.Message(
            queue_name=MODEL,
            actor_name="generate",
            args=(name, tenant, size.input_tokens, size.output_tokens),
            kwargs={},
            options={},
        )
        whose = tenant if self.fair else "everybody"
        return Task(id=name, message=message.encode(), tenant=whose, input_tokens=size.input_tokens)

    async def generate(self, name: str, tenant: str, input_tokens: int, output_tokens: int) -> None:
        """The actor: on the engine from its next step on."""
        self.begun_s[name] = time.monotonic()
        self.left[tenant] -= 1
        self._serve(tenant, input_tokens)
        size = Size(input_tokens, output_tokens)
        run = self.running[name] = Running(tenant, size, asyncio.get_running_loop().create_future())
        self.changed.set()
        try:
            await run.done
        finally:
            del self.running[name]

    async def engine(self) -> None:
        """Make a token of whatever runs, over and over."""
        while True:
            await asyncio.sleep(self.options.step_s)
            for name, run in list(self.running.items()):
                run.made += 1
                self._serve(run.tenant, OUTPUT_COST)
                for held in filter(None, (runner.held.get(name) for runner in self.runners)):
                    held.usage = Usage(input_tokens=run.size.input_tokens, output_tokens=run.made)
                if run.made == run.size.output_tokens and not run.done.done():
                    self.freed_s.append(time.monotonic())
                    run.done.set_result(None)

    def _serve(self, tenant: str, tokens: int) -> None:
        self.served[tenant] += tokens
        if self.watched and all(self.left[name] > 0 for name in self.watched):
            one, other = self.watched
            self.gap_tokens = max(self.gap_tokens, abs(self.served[one] - self.served[other]))

    async def until(self, done: Callable[[], bool], limit_s: float | None = None) -> None:
        """Wait, at most so long; looked at whenever something begins."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not done():
                    self.changed.clear()
                    await self.changed.wait()

    @property
    def full(self) -> bool:
        return len(self.running) == self.options.workers * self.options.slots

    def remainder_ms(self, at_s: float) -> float:
        """How long after `at_s` the first slot was free, if all were taken then."""
        return 1000 * (self.freed_s[bisect(self.freed_s, at_s)] - at_s)


def figures(options: Options, say: Say) -> Found:
    """Ours, and what the same queue gives without tenants."""
    logs.set_up("bench", "WARNING")
    with tempfile.TemporaryDirectory(prefix="fb-", ignore_cleanup_errors=True) as folder:
        server = stores.start_valkey(Path(folder))
        try:
            say("Ours: two that always wait, a light one beside a flood, fifty")
            ours = asyncio.run(_measured(server.url, options, fair=True))
            say("First come, first served: the same")
            fifo = asyncio.run(_measured(server.url, options, fair=False))
        finally:
            server.stop()
    return ours, {"fifo": fifo}


async def _measured(url: str, options: Options, *, fair: bool) -> dict[str, Any]:
    slots = options.workers * options.slots
    wait_ms, remainder_ms = await _light(url, options, fair=fair, flood=True)
    alone_ms, _ = await _light(url, options, fair=fair, flood=False)
    return {
        "service_gap_tokens": await _gap_tokens(url, options, fair=fair),
        "vtc_bound_tokens": 2 * max(LARGE.input_tokens, OUTPUT_COST * slots * LARGE.output_tokens),
        "light_wait_ms_p99": _p99(wait_ms),
        "light_alone_ms_p99": _p99(alone_ms),
        "slot_remainder_ms": _p99(remainder_ms),
        "jain": await _jain(url, options, fair=fair),
    }


async def _gap_tokens(url: str, options: Options, *, fair: bool) -> int:
    """Both always have something waiting: the small one's share of the tokens is ten times as many requests."""
    large = int(_steps(options) / 2 / LARGE.output_tokens) + 1
    async with _scene(url, options, fair=fair) as scene:
        scene.watched = ("large", "small")
        await scene.send([("large", LARGE), ("small", SMALL)] * large + [("small", SMALL)] * (9 * large))
        async with _workers(scene):
            await scene.until(lambda: not all(scene.left[name] > 0 for name in ("large", "small")))
            return scene.gap_tokens


async def _light(url: str, options: Options, *, fair: bool, flood: bool) -> tuple[list[float], list[float]]:
    """What the light tenant's requests waited, and what was left of a slot when each was sent."""
    chance = random.Random(options.seed)
    async with _scene(url, options, fair=fair) as scene:
        flooding = int(_steps(options) * 1.2 / LARGE.output_tokens) if flood else 0
        await scene.send([("flood", Size(1000, chance.randint(50, 150))) for _ in range(flooding)])
        async with _workers(scene):
            if flood:
                await scene.until(lambda: scene.full)
            sent_s: dict[str, float] = {}
            found_full: list[float] = []
            end_s = time.monotonic() + options.seconds * 0.9
            while time.monotonic() < end_s:
                await asyncio.sleep(chance.expovariate(15))
                now_s = time.monotonic()
                if scene.full:
                    found_full.append(now_s)
                [name] = await scene.send([("light", LIGHT)])
                sent_s[name] = now_s
            await scene.until(lambda: sent_s.keys() <= scene.begun_s.keys())
            wait_ms = [1000 * (scene.begun_s[name] - at_s) for name, at_s in sent_s.items()]
            return wait_ms, [0.0, *map(scene.remainder_ms, found_full)]


async def _jain(url: str, options: Options, *, fair: bool) -> float:
    """Jain's index of the tokens that the tenants were served before the first of them had nothing waiting."""
    chance = random.Random(options.seed)
    names = [f"t{n}" for n in range(options.tenants)]
    sizes = {name: Size(50 + 450 * n // len(names), 5 + 45 * n // len(names)) for n, name in enumerate(names)}
    share = _steps(options) / len(names)  # of output, were it the same for all
    rounds = {
        name: int(2 * share / size.output_tokens) + 5 for name, size in sizes.items()
    }  # twice that: none runs out
    arrivals: list[tuple[str, Size]] = []
    for n in range(max(rounds.values())):
        chance.shuffle(names)
        arrivals += [(name, sizes[name]) for name in names if n < rounds[name]]
    async with _scene(url, options, fair=fair) as scene:
        await scene.send(arrivals)
        async with _workers(scene):
            await scene.until(lambda: min(scene.left.values()) <= 0, options.seconds)
            served = [scene.served[name] for name in names]
    return round(sum(served) ** 2 / (len(served) * sum(tokens**2 for tokens in served)), 4)


def _steps(options: Options) -> float:
    """Tokens of output that the engines make in a scene."""
    return options.seconds / options.step_s * options.workers * options.slots


def _p99(values: list[float]) -> float:
    return round(sorted(values)[int(len(values) * 0.99)], 1)


@asynccontextmanager
async def _scene(url: str, options: Options, *, fair: bool) -> AsyncIterator[Scene]:
    """An empty queue."""
    with redis.Redis.from_url(url) as client:
        client.flushall()
    store = AsyncStore.connect(url)
    try:
        yield Scene(url=url, options=options, store=store, queue=Queue(MODEL, BOUNDS), fair=fair)
    finally:
        await store.close()


@asynccontextmanager
async def _workers(scene: Scene) -> AsyncIterator[None]:
    """Runners and an engine, until the block ends. What runs then is handed back."""
    options = scene.options
    broker = QueueBroker(Store.connect(scene.url))
    actor: Any = dramatiq.actor  # whose types know functions only
    actor(scene.generate, broker=broker, queue_name=MODEL, actor_name="generate")
    blocking = AsyncStore.connect(scene.url, timeout_s=IDLE_S + 3)
    scene.runners = [_runner(scene, broker, blocking, f"w{n}") for n in range(options.workers)]
    tasks = [asyncio.create_task(scene.engine()), *(asyncio.create_task(runner.run()) for runner in scene.runners)]
    try:
        yield
    finally:
        await asyncio.gather(*(runner.drain(0.0) for runner in scene.runners))
        tasks[0].cancel()
        await asyncio.wait(tasks)
        await blocking.close()
        broker.store.close()


def _runner(scene: Scene, broker: QueueBroker, blocking: AsyncStore, worker: str) -> Runner:
    runner = Runner(
        broker, scene.store, blocking, scene.queue, worker=worker, lease_ms=LEASE_MS, beat_ms=LEASE_MS // 3,
        room=lambda: scene.options.slots - len(runner.held),
    )  # fmt: skip
    return runner
