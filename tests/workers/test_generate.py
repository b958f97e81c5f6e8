"""One worker's requests from body to ending, on the scripted engine and a real Valkey."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import dramatiq
import pytest
import redis
import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError
from structlog.testing import capture_logs

from core.catalog import Model, StepProfile
from core.redis import AsyncStore, Call, Store
from core.stream.frames import Delta, Frame, decode
from core.stream.log import gateway_channel
from core.values import Caller, Ending, Request, Sampling, Usage
from tasks.broker import QueueBroker
from tasks.queue import Queue, generation
from tasks.runner import IDLE_S, Runner
from tests.conftest import PATIENCE_S, on_loop
from workers.generate import Generator, Publisher
from workers.scripted import ScriptedEngine, scripted_tokens

MODEL = "m"
PROMPT = [10, 11, 12]
#: Longer than any test: what happens then was not caused by a beat or a lease.
NEVER_MS = 60_000


def request(name: str, *, gateway: str = "g", n: int = 20, seed: int = 7, prompt: list[int] | None = None) -> Request:
    return Request(
        id=name,
        model=MODEL,
        caller=Caller(org_id="o", project_id="p", key_id="k"),
        gateway=gateway,
        prompt_token_ids=prompt or PROMPT,
        sampling=Sampling(max_tokens=n, seed=seed),
    )


class Watched(AsyncStore):
    """Writes down what it was asked, and loses replies where a test says so."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.asked: list[str] = []
        self.losing: dict[str, int] = {}

    async def run(self, call: Call[Any]) -> Any:
        reply = await super().run(call)
        self._note(call)
        return reply

    async def run_all(self, calls: Any) -> list[Any]:
        replies = await super().run_all(calls)
        for call in calls:
            self._note(call)
        return replies

    def _note(self, call: Call[Any]) -> None:
        name = call.script.name if call.script else str(call.args[0])
        self.asked.append(name)
        if self.losing.get(name, 0) > 0:
            self.losing[name] -= 1
            raise RedisConnectionError("lost")


class Gateway:
    """What one gateway receives while it listens."""

    def __init__(self, url: str, name: str = "g") -> None:
        self.url, self.name = url, name
        self.frames: list[Frame] = []
        self.came = asyncio.Condition()

    async def __aenter__(self) -> Gateway:
        self.client = redis.asyncio.Redis.from_url(self.url)
        self.pubsub = self.client.pubsub()
        await self.pubsub.subscribe(gateway_channel(MODEL, self.name))
        await self.pubsub.get_message(timeout=PATIENCE_S)
        self.reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.reading.cancel()
        await asyncio.wait([self.reading])
        await self.pubsub.aclose()
        await self.client.aclose()

    async def _read(self) -> None:
        async for message in self.pubsub.listen():
            async with self.came:
                self.frames.append(decode(message["data"]))
                self.came.notify_all()

    async def until(self, true: Callable[[], Any]) -> None:
        async with self.came:
            await self.came.wait_for(true)

    async def ending(self, name: str) -> Ending:
        await self.until(lambda: any(ending.id == name for ending in self.endings()))
        return next(ending for ending in self.endings() if ending.id == name)

    def endings(self) -> list[Ending]:
        return [ending for frame in self.frames for ending in frame.endings]

    def deltas(self, name: str) -> list[Delta]:
        return [delta for frame in self.frames for delta in frame.deltas if delta.id == name]

    def tokens(self, name: str) -> list[int]:
        """Its tokens in order; what came twice counts once, and a gap fails."""
        tokens: list[int] = []
        for delta in self.deltas(name):
            assert delta.offset <= len(tokens), "a gap"
            if delta.offset == len(tokens):
                tokens += delta.tokens
        return tokens


class Worker:
    """An engine with all that a worker has round it, and the queue seen from the side."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.side = Store.connect(url)
        self.queue = Queue(MODEL)

    def make(self, *, slots: int = 8, step_ms: float = 2.0, buffer_s: float = 30.0) -> Worker:
        model = Model(name=MODEL, context_tokens=500, slots=slots, step=StepProfile(base_ms=step_ms, sequence_ms=0))
        self.engine = ScriptedEngine(model)
        self.store = Watched.connect(self.url)
        self.blocking = AsyncStore.connect(self.url, timeout_s=IDLE_S + 3)
        self.runner = Runner(
            QueueBroker(self.side),
            self.store,
            self.blocking,
            self.queue,
            worker="w",
            lease_ms=NEVER_MS,
            beat_ms=NEVER_MS,
            room=lambda: slots - len(self.runner.held),
        )
        self.publisher = Publisher(self.store, self.runner, MODEL, buffer_s=buffer_s)
        self.generator = Generator(self.engine, self.runner, self.publisher)
        generate: Any = self.generator.generate
        dramatiq.Actor(
            generate, broker=self.runner.broker, actor_name="generate", queue_name=MODEL, priority=0, options={}
        )
        self.steps = 0
        return self

    async def __aenter__(self) -> Worker:
        await self.engine.start()
        self.engine.on_step(self._step)
        self.background = [asyncio.create_task(self.runner.run()), asyncio.create_task(self.publisher.run())]
        channel = self.queue.worker_channel("w")
        await self.until(lambda: self.side.client.pubsub_numsub(channel)[0][1] == 1)
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self.runner.draining.is_set():
            await self.runner.drain(0)
        await self.background[0]
        self.background[1].cancel()
        await asyncio.wait(self.background)
        await self.engine.stop()
        await self.store.close()
        await self.blocking.close()

    def _step(self) -> None:
        self.steps += 1
        self.publisher.step()

    def send(self, *requests: Request) -> None:
        self.side.run_all([self.queue.enqueue(generation(one)) for one in requests])

    async def until(self, true: Callable[[], Any]) -> None:
        """Wait for something outside this loop. `on_loop` bounds it."""
        while not true():
            await asyncio.sleep(0.003)

    async def generated(self, name: str, tokens: int) -> None:
        """The engine has made so many tokens of a request."""
        await self.until(lambda: name in self.runner.held and self.runner.held[name].usage.output_tokens >= tokens)

    def ending(self, name: str) -> Ending | None:
        return self.side.run(self.queue.watch("side", [name], lease_ms=1000))[0].ending

    async def ended(self, name: str) -> Ending:
        await self.until(lambda: self.ending(name))
        ending = self.ending(name)
        assert ending is not None
        return ending


@pytest.fixture
def worker(valkey_url: str, valkey: redis.Redis) -> Iterator[Worker]:
    worker = Worker(valkey_url)
    yield worker
    worker.side.close()


@on_loop
async def test_a_gateway_gets_every_token_in_order_and_the_ending_after_them(worker: Worker) -> None:
    async with Gateway(worker.url) as gateway, worker.make():
        worker.send(request("a", n=25, seed=3))
        ending = await gateway.ending("a")

    assert gateway.tokens("a") == scripted_tokens(3, 25)
    assert "".join(delta.text for delta in gateway.deltas("a")) == bytes(scripted_tokens(3, 25)).decode()
    assert gateway.frames[-1].endings == (ending,)
    assert all(frame.worker == "w" for frame in gateway.frames if frame.deltas)
    assert {delta.attempt for delta in gateway.deltas("a")} == {1}


@on_loop
async def test_usage_is_counted_at_the_engine(worker: Worker) -> None:
    async with Gateway(worker.url) as gateway, worker.make():
        worker.send(request("a", n=25), request("b", n=1, prompt=[5] * 40))
        endings = [await gateway.ending(name) for name in "ab"]

    assert [ending.usage for ending in endings] == [
        Usage(input_tokens=3, output_tokens=25),
        Usage(input_tokens=40, output_tokens=1),
    ]
    assert [ending.outcome for ending in endings] == ["length", "length"]


@on_loop
async def test_a_step_is_one_publish_for_each_gateway_however_many_requests_it_has(
    worker: Worker, valkey: redis.Redis
) -> None:
    """Counted by the store itself: each ending is one publish of its own, everything else is one a step and gateway."""
    names = [f"r{n}" for n in range(8)]
    async with Gateway(worker.url, "g0") as g0, Gateway(worker.url, "g1") as g1, worker.make(step_ms=5):
        gateways = [g0, g1]
        valkey.config_resetstat()
        worker.send(*(request(name, gateway=f"g{n % 2}", n=40, seed=n) for n, name in enumerate(names)))
        for n, name in enumerate(names):
            await gateways[n % 2].ending(name)
        publishes = valkey.info("commandstats")["cmdstat_publish"]["calls"]

    assert all(gateways[n % 2].tokens(name) == scripted_tokens(n, 40) for n, name in enumerate(names))
    carrying = [sum(bool(frame.deltas) for frame in gateway.frames) for gateway in gateways]
    assert publishes == sum(carrying) + len(names)
    assert max(carrying) <= worker.steps
    assert publishes < 2 * 45 + len(names), "320 tokens"
    assert max(len({delta.id for delta in frame.deltas}) for frame in g0.frames) == 4


@on_loop
async def test_nothing_is_lost_while_nobody_listens_for_a_while(worker: Worker) -> None:
    """All of it is generated before the gateway listens; it ends only when the gateway has it."""
    async with worker.make():
        worker.send(request("a", n=30))
        await worker.generated("a", 30)
        await worker.until(lambda: "PUBLISH" in worker.store.asked)
        assert worker.ending("a") is None

        async with Gateway(worker.url) as gateway:
            ending = await gateway.ending("a")

    assert gateway.tokens("a") == scripted_tokens(7, 30)
    assert gateway.frames[-1].endings == (ending,)


@on_loop
async def test_nothing_is_lost_or_out_of_order_when_a_gateway_stops_listening_in_between(worker: Worker) -> None:
    async with worker.make(step_ms=5):
        async with Gateway(worker.url) as before:
            worker.send(request("a", n=40))
            await before.until(lambda: len(before.tokens("a")) >= 10)
        await worker.generated("a", 30)
        async with Gateway(worker.url) as after:
            await after.ending("a")

    both = Gateway(worker.url)
    both.frames = before.frames + after.frames
    assert both.tokens("a") == scripted_tokens(7, 40)
    assert len(before.tokens("a")) < 30


@on_loop
async def test_a_publish_whose_reply_was_lost_is_made_again(worker: Worker) -> None:
    """The gateway tells by the offset what it has; nothing is missing, and the ending still comes last."""
    async with Gateway(worker.url) as gateway, worker.make():
        worker.store.losing = {"PUBLISH": 4}
        worker.send(request("a", n=20))
        await gateway.ending("a")

    assert gateway.tokens("a") == scripted_tokens(7, 20)
    assert sum(len(delta.tokens) for delta in gateway.deltas("a")) > 20, "some came twice"
    assert gateway.frames[-1].endings


@on_loop
async def test_requests_of_a_gateway_that_is_silent_for_too_long_are_cancelled(worker: Worker) -> None:
    """Others are none the worse for it."""
    with capture_logs() as said:
        async with Gateway(worker.url, "here") as here, worker.make(step_ms=5, buffer_s=0.1):
            worker.send(request("lost", gateway="gone", n=400), request("fine", gateway="here", n=40))
            lost = await worker.ended("lost")
            await here.ending("fine")
            await worker.until(lambda: not worker.publisher.outlets)

    assert lost.outcome == "cancelled"
    assert 0 < lost.usage.output_tokens < 400
    assert here.tokens("fine") == scripted_tokens(7, 40)
    assert [one["gateway"] for one in said if one["event"] == "gateway_gone"] == ["gone"]


@on_loop
async def test_an_attempt_is_marked_as_delivered_before_its_first_publish(worker: Worker) -> None:
    """Else a sampled answer whose worker dies right then could be sampled anew before the eyes of its client."""
    async with Gateway(worker.url) as gateway, worker.make(step_ms=5):
        worker.store.losing = {"deliver": 1}
        worker.send(request("a"), request("b"))
        await gateway.ending("a")
        await gateway.ending("b")

    asked = [name for name in worker.store.asked if name in ("deliver", "PUBLISH")]
    assert asked[:3] == ["deliver", "deliver", "PUBLISH"], "a lost mark is made again"
    assert asked.count("deliver") <= 3, "once for each attempt, not for each delta"


@on_loop
async def test_a_worker_that_lost_the_request_before_its_first_token_publishes_none(worker: Worker) -> None:
    """The other worker may sample it anew, so nothing of ours may reach its client."""
    with capture_logs():
        async with Gateway(worker.url) as gateway, worker.make(step_ms=150, slots=1):
            worker.send(request("a"))
            await worker.until(lambda: worker.engine.stats().running)
            worker.side.run(worker.queue.tick("w"))
            assert worker.side.run(worker.queue.claim("w2", 1, lease_ms=NEVER_MS, nonce="n")).claims

            await worker.until(lambda: not worker.runner.held)
            await worker.until(lambda: not any(outlet.frames for outlet in worker.publisher.outlets.values()))
            worker.side.client.publish(gateway_channel(MODEL, "g"), b"\x81\xa6worker\xa3end")
            await gateway.until(lambda: gateway.frames and gateway.frames[-1].worker == "end")

    assert gateway.deltas("a") == []
    assert worker.ending("a") is None


@on_loop
async def test_a_cancel_frees_the_engine_and_bills_what_was_generated(worker: Worker) -> None:
    async with Gateway(worker.url) as gateway, worker.make():
        worker.send(request("a", n=400))
        await gateway.until(lambda: len(gateway.tokens("a")) >= 5)
        worker.side.run(worker.queue.cancel("a"))
        ending = await gateway.ending("a")
        assert worker.engine.stats().running == 0
        assert worker.generator.progress() == []

    assert ending.outcome == "cancelled"
    assert 5 <= ending.usage.output_tokens < 400


@on_loop
async def test_a_store_that_is_away_as_a_request_begins_does_not_fail_it(worker: Worker) -> None:
    async with Gateway(worker.url) as gateway, worker.make():
        worker.store.losing = {"GET": 2}
        worker.send(request("a"))
        ending = await gateway.ending("a")

    assert (ending.outcome, gateway.tokens("a")) == ("length", scripted_tokens(7, 20))


@on_loop
async def test_what_the_engine_refuses_fails_and_says_why(worker: Worker) -> None:
    async with worker.make():
        worker.send(request("long", prompt=[1] * 600))
        refused = await worker.ended("long")

    assert refused.outcome == "failed"
    assert "do not fit a context of 500" in refused.message


@on_loop
async def test_a_request_nobody_listens_to_needs_no_gateway(worker: Worker) -> None:
    async with worker.make():
        worker.send(request("a", gateway="", n=10))
        ending = await worker.ended("a")

    assert (ending.outcome, ending.usage.output_tokens) == ("length", 10)
    assert "PUBLISH" not in worker.store.asked


@on_loop
async def test_when_the_engine_dies_its_requests_go_back_to_the_queue(worker: Worker) -> None:
    """The process ends then, and its drain hands back what it holds; nothing ends as failed."""
    with capture_logs():
        async with worker.make():
            await worker.engine.stop()
            worker.send(request("a"))
            await worker.generator.dead.wait()
            await worker.runner.drain(0)

    [seen] = worker.side.run(worker.queue.watch("side", ["a"], lease_ms=1000))
    assert (seen.state, seen.ending) == ("waiting", None)
