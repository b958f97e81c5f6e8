"""What a worker takes in and gives back: on the scripted engine, and on real vLLM with a timed step."""

from __future__ import annotations

import asyncio
import functools
import os
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import dramatiq
import pytest
import redis
from structlog.testing import capture_logs

import core.catalog
from core.catalog import EngineKnobs, Model, StepProfile
from core.redis import AsyncStore, Store
from core.values import Caller, Class, Request, Sampling
from tasks.broker import QueueBroker
from tasks.queue import Queue, generation
from tasks.runner import IDLE_S, Runner
from tests.conftest import PATIENCE_S
from workers.engine import Engine
from workers.generate import Generator, Publisher
from workers.leash import Leash
from workers.main import Intake
from workers.scripted import ScriptedEngine
from workers.vllm.engine import VllmEngine

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("FOREBAY_DATA", ROOT / ".forebay"))
LOCAL = core.catalog.load()["smollm2-135m-instruct"]


def patient(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run on a loop of its own, for longer than a unit test may: a timed engine starts in ten seconds and more."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**fixtures), 6 * PATIENCE_S))

    return run


class Worker:
    """An engine with all that a worker has round it, and the queue seen from the side."""

    def __init__(self, url: str, model: Model, engine: Engine) -> None:
        self.url, self.model, self.engine = url, model, engine
        self.queue = Queue(model.name)
        self.side = Store.connect(url)
        self.sent_s: dict[str, float] = {}
        self.first_s: dict[str, float] = {}
        self.first_step: dict[str, int] = {}
        self.waiting: list[int] = []  #: vLLM's own queue, after each step
        self.kv_used: list[float] = []
        self.steps = 0

    async def __aenter__(self) -> Worker:
        facts = await self.engine.start()
        self.store = AsyncStore.connect(self.url)
        self.blocking = AsyncStore.connect(self.url, timeout_s=IDLE_S + 3)
        self.intake = Intake(self.engine, self.model, facts)
        self.runner = Runner(
            QueueBroker(self.side),
            self.store,
            self.blocking,
            self.queue,
            worker="w",
            lease_ms=10_000,
            beat_ms=1_000,
            room=self.intake.slots,
            headroom=self.intake.room,
            victims=self.intake.victims,
            again_s=self.intake.again_s,
        )
        publisher = Publisher(self.store, self.runner, self.model.name, buffer_s=30)
        self.runner.before_back = publisher.put_away
        self.generator = Generator(self.engine, self.runner, publisher, Leash(self.store, self.runner, self.model.pace))
        self.intake.serve(self.runner, self.generator)
        generate: Any = self.generator.generate
        dramatiq.Actor(
            generate,
            broker=self.runner.broker,
            actor_name="generate",
            queue_name=self.model.name,
            priority=0,
            options={},
        )
        for told in (publisher.step, self.intake.stepped, self._stepped):
            self.engine.on_step(told)
        self.loops = [asyncio.create_task(self.runner.run()), asyncio.create_task(publisher.run())]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.runner.drain(0)
        for loop in self.loops:
            loop.cancel()
        await asyncio.wait(self.loops)
        await self.engine.stop()
        await self.store.close()
        await self.blocking.close()
        self.side.close()

    def _stepped(self) -> None:
        self.steps += 1
        stats = self.engine.stats()
        self.waiting.append(stats.waiting)
        self.kv_used.append(stats.kv_used)
        for id_, held in self.runner.held.items():
            if held.usage.output_tokens > 0 and id_ not in self.first_s:
                self.first_s[id_], self.first_step[id_] = time.monotonic(), self.steps

    def send(self, name: str, prompt_tokens: int = 3, max_tokens: int = 20, cls: int = Class.BULK, **more: Any) -> str:
        asked = Request(
            id=name,
            model=self.model.name,
            caller=Caller(org_id=more.pop("org", "o"), project_id="p", key_id="k"),
            gateway="g",
            prompt_token_ids=[1000 + (crc32(name.encode()) + n) % 5000 for n in range(prompt_tokens)],
            sampling=Sampling(max_tokens=max_tokens, ignore_eos=True),
            cls=cls,
            **more,
        )
        self.sent_s[name] = time.monotonic()
        self.side.run(self.queue.enqueue(generation(asked)))
        return name

    def ttft_s(self, name: str) -> float:
        return self.first_s[name] - self.sent_s[name]

    async def until(self, true: Callable[[], Any]) -> None:
        while not true():
            await asyncio.sleep(0.003)

    async def ended(self, *names: str) -> None:
        await self.until(lambda: all(seen.state == "ended" for seen in self.seen(*names)))

    def seen(self, *names: str) -> list[Any]:
        return self.side.run(self.queue.watch("g", list(names))).seen

    def output_tokens(self) -> Counter[str]:
        """What each request was billed, in all its entries."""
        counted: Counter[str] = Counter()
        for _, entry in self.side.client.xrange(f"f1:{{{self.model.name}}}:usage"):
            counted[entry[b"id"].decode()] += int(entry[b"output"])
        return counted

    def entries(self) -> int:
        return int(self.side.client.xlen(f"f1:{{{self.model.name}}}:usage"))


def scripted(url: str, slots: int, step_ms: float = 5.0) -> Worker:
    model = Model(
        name="m",
        context_tokens=2000,
        slots=slots,
        step=StepProfile(base_ms=step_ms, sequence_ms=0, prefill_ms=0.01),
    )
    return Worker(url, model, ScriptedEngine(model))


@pytest.fixture(autouse=True)
def _quiet(valkey: redis.Redis) -> Iterator[None]:
    with capture_logs():
        yield


@patient
async def test_an_urgent_request_starts_within_a_few_steps_and_who_made_room_ends_complete(valkey_url: str) -> None:
    """Four slots of bulk, and somebody comes who waits in person."""
    async with scripted(valkey_url, slots=4) as worker:
        bulk = [worker.send(f"bulk{n}", max_tokens=200) for n in range(4)]
        await worker.until(lambda: len(worker.first_s) == 4 and worker.steps > 20)
        before = worker.steps
        urgent = worker.send("urgent", max_tokens=10, cls=Class.INTERACTIVE)
        await worker.ended(urgent, *bulk)

        assert worker.first_step[urgent] - before <= 8
        assert sorted(seen.ending.attempt for seen in worker.seen(*bulk)) == [1, 1, 1, 2]
        assert worker.output_tokens() == {urgent: 10} | dict.fromkeys(bulk, 200)
        assert worker.entries() == 5


@patient
async def test_who_has_often_made_room_is_spared(valkey_url: str) -> None:
    async with scripted(valkey_url, slots=1) as worker:
        bulk = worker.send("bulk", max_tokens=400)
        await worker.until(lambda: "bulk" in worker.first_s)
        for n in range(5):
            urgent = worker.send(f"urgent{n}", max_tokens=5, cls=Class.INTERACTIVE)
            await worker.ended(urgent)
            await worker.until(lambda: bulk in worker.runner.held or worker.seen(bulk)[0].state == "ended")
        await worker.ended(bulk)

        assert worker.seen(bulk)[0].ending.attempt == 4
        assert worker.output_tokens()[bulk] == 400


@patient
async def test_lengths_are_learned_from_answers_that_ended(valkey_url: str) -> None:
    async with scripted(valkey_url, slots=4) as worker:
        await worker.ended(*[worker.send(f"r{n}", max_tokens=10 + n) for n in range(4)])

        assert sorted(worker.generator.learned) == [("k", 10), ("k", 11), ("k", 12), ("k", 13)]


# --- real vLLM, timed

TIMED = Model(
    name="t",
    weights=LOCAL.weights,
    context_tokens=4096,
    slots=8,
    engine=EngineKnobs(dtype="bfloat16", kv_cache_mib=256, block_tokens=16, batched_tokens=512),
    step=StepProfile(base_ms=4, sequence_ms=0.1, prefill_ms=0.03),
)


@patient
async def test_vllms_own_queue_stays_empty_under_four_times_what_it_can_do(valkey_url: str) -> None:
    """Long prompts, far beyond what its KV cache (11,000 tokens) and its steps hold; and short ones between them are
    not held up by one that waits for KV (vLLM #31731)."""
    async with Worker(valkey_url, TIMED, VllmEngine(TIMED, DATA, timed=True)) as worker:
        long = [worker.send(f"long{n}", 1500 + 100 * (n % 5), 60, org="long") for n in range(24)]
        await worker.until(lambda: len(worker.first_s) >= 2)
        short: list[str] = []
        for n in range(20):
            short.append(worker.send(f"short{n}", 20, 5, cls=Class.INTERACTIVE, org="short"))
            await asyncio.sleep(0.1)
        await worker.ended(*long, *short)

        waits_ms = [worker.ttft_s(name) * 1000 for name in short]
        print(f"steps {worker.steps}, waiting {Counter(worker.waiting)}, KV at most {max(worker.kv_used):.2f}")
        print(f"short TTFT p50 {statistics.median(waits_ms):.0f} ms, max {max(waits_ms):.0f} ms")
        attempts = Counter(seen.ending.attempt for seen in worker.seen(*long))
        print(f"{sum(worker.output_tokens().values())} tokens, attempts of the long {attempts}")
        assert max(worker.waiting) <= 1
        assert worker.output_tokens() == dict.fromkeys(long, 60) | dict.fromkeys(short, 5)
