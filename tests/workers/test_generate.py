"""One worker's requests from body to ending, on the scripted engine and a real Valkey."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import dramatiq
import msgspec
import pytest
import redis
import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError
from structlog.testing import capture_logs

from core import prefix
from core.catalog import EngineKnobs, Model, StepProfile
from core.redis import AsyncStore, Call, Store
from core.stream.frames import Delta, Frame, Output, cut_of, decode, joined
from core.stream.log import gateway_channel, logged, save, saved
from core.values import Caller, Ending, Request, Sampling, Tools, Usage
from tasks.broker import QueueBroker
from tasks.queue import Queue, generation
from tasks.runner import IDLE_S, Runner
from tests.conftest import PATIENCE_S, on_loop
from workers.engine import EngineFacts, EngineRefused, Piece
from workers.generate import BUFFER_BYTES, Generator, Publisher
from workers.leash import Leash
from workers.main import Intake
from workers.markup import MarkReader
from workers.scripted import REASONING_TOKENS, ScriptedEngine, script_seed, scripted_tokens, scripted_vector

MODEL = "m"
PROMPT = [10, 11, 12]
#: Longer than any test: what happens then was not caused by a beat or a lease.
NEVER_MS = 60_000


def request(
    name: str,
    *,
    gateway: str = "g",
    n: int = 20,
    seed: int | None = 7,
    prompt: list[int] | None = None,
    stop: tuple[str, ...] = (),
    **more: Any,
) -> Request:
    """`more`: fields of the sampling, or of the request."""
    of_sampling = {field: more.pop(field) for field in Sampling.__struct_fields__ if field in more}
    return Request(
        id=name,
        model=MODEL,
        caller=Caller(org_id="o", project_id="p", key_id="k"),
        gateway=gateway,
        prompt_token_ids=prompt or PROMPT,
        sampling=Sampling(max_tokens=n, seed=seed, stop=stop, **of_sampling),
        **more,
    )


def name_of(call: Call[Any]) -> str:
    return call.script.name if call.script else str(call.args[0])


def said(output: Output) -> list[tuple[str, str]]:
    return [(run.kind, run.text) for run in joined(run for run in output.runs if run.text)]


class Watched(AsyncStore):
    """Writes down what it was asked, and loses replies where a test says so."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.asked: list[str] = []
        self.losing: dict[str, int] = {}
        self.away: set[str] = set()  #: names of what it does not take; "all"
        self.exchanges: list[list[str]] = []

    async def run(self, call: Call[Any]) -> Any:
        self._fail([call])
        reply = await super().run(call)
        self._note(call)
        return reply

    async def run_all(self, calls: Any) -> list[Any]:
        self._fail(calls)
        replies = await super().run_all(calls)
        self.exchanges.append([name_of(call) for call in calls])
        for call in calls:
            self._note(call)
        return replies

    def _fail(self, calls: Any) -> None:
        if self.away & {"all", *map(name_of, calls)}:
            raise RedisConnectionError("away")

    def _note(self, call: Call[Any]) -> None:
        name = name_of(call)
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
        """Its tokens in order; what came twice counts once, a gap fails, and so does a token that changes."""
        tokens: list[int] = []
        for delta in self.deltas(name):
            assert delta.offset <= len(tokens), "a gap"
            known = len(tokens) - delta.offset
            assert tuple(tokens[delta.offset :][: len(delta.tokens)]) == delta.tokens[:known], "it changed"
            tokens += delta.tokens[known:]
        return tokens

    def said(self, name: str) -> list[tuple[str, str]]:
        """Its runs."""
        output, chars = Output(name), 0
        for delta in self.deltas(name):
            assert delta.at <= chars, "a gap"
            chars = max(chars, delta.at + len(delta.text))
            output.add([delta])
        return said(output)

    def text(self, name: str, kind: str = "text") -> str:
        return "".join(text for one, text in self.said(name) if one == kind)


class Worker:
    """An engine with all that a worker has round it, and the queue seen from the side."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.side = Store.connect(url)
        self.queue = Queue(MODEL)

    def make(
        self,
        name: str = "w",
        *,
        slots: int = 8,
        step_ms: float = 2.0,
        buffer_s: float = 30.0,
        buffer_bytes: int = BUFFER_BYTES,
        beat_ms: int = NEVER_MS,
        **more: Any,
    ) -> Worker:
        """`more`: fields of the model."""
        self.name = name
        step = StepProfile(base_ms=step_ms, sequence_ms=0)
        model = self.model = Model(**{"name": MODEL, "context_tokens": 500, "slots": slots, "step": step} | more)
        self.engine = ScriptedEngine(model)
        self.store = cast(Watched, Watched.connect(self.url))
        self.blocking = AsyncStore.connect(self.url, timeout_s=IDLE_S + 3)
        self.runner = Runner(
            QueueBroker(self.side),
            self.store,
            self.blocking,
            self.queue,
            worker=name,
            lease_ms=NEVER_MS,
            beat_ms=beat_ms,
            room=lambda: slots - len(self.runner.held),
        )
        self.publisher = Publisher(self.store, self.runner, MODEL, buffer_s=buffer_s, buffer_bytes=buffer_bytes)
        self.runner.before_back = self.publisher.put_away
        self.limits = Watched.connect(self.url)
        self.leash = Leash(self.limits, self.runner, model.pace)
        self.generator = Generator(self.engine, self.runner, self.publisher, self.leash)
        generate: Any = self.generator.generate
        dramatiq.Actor(
            generate, broker=self.runner.broker, actor_name="generate", queue_name=MODEL, priority=0, options={}
        )
        self.steps = 0
        return self

    async def __aenter__(self) -> Worker:
        await self.engine.start()
        self.engine.on_step(self._step)
        loops = (self.runner.run, self.publisher.run, self.publisher.saves)
        self.background: list[asyncio.Task[None]] = [asyncio.create_task(loop()) for loop in loops]
        channel = self.queue.worker_channel(self.name)
        await self.until(lambda: self.side.client.pubsub_numsub(channel)[0][1] == 1)
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self.runner.draining.is_set():
            await self.runner.drain(0)
        await asyncio.wait([self.background[0]])
        await self._close()

    async def die(self) -> None:
        """At once, handing nothing back, as a killed process would; its host's agent says so."""
        self.runner.draining.set()
        tasks = [*self.background, *self.runner._background]
        tasks += [held.task for held in self.runner.held.values() if held.task]
        while going := [task for task in tasks if not task.done()]:
            for task in going:
                task.cancel()
            await asyncio.wait(going, timeout=0.1)
        self.side.run(self.queue.tick(self.name))

    async def _close(self) -> None:
        for task in self.background:
            task.cancel()
        await asyncio.wait(self.background)
        await self.engine.stop()
        await self.store.close()
        await self.blocking.close()
        await self.limits.close()

    async def beat(self) -> None:
        """One beat, as after a lease that nobody vouched for."""
        await self.runner._beat()

    def output(self, name: str) -> Output:
        """What whoever takes over now would read."""
        output = Output(name)
        frames = self.side.run(logged(MODEL, self.name))
        kept = self.side.run(saved(MODEL, name))
        output.add(kept)
        for frame in frames:
            output.add(frame.deltas)
        return output

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
        return self.side.run(self.queue.watch("side", [name])).seen[0].ending

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
        commands = valkey.info("commandstats")
        publishes, entries = commands["cmdstat_publish"]["calls"], commands["cmdstat_xadd"]["calls"]

    assert all(gateways[n % 2].tokens(name) == scripted_tokens(n, 40) for n, name in enumerate(names))
    carrying = [sum(bool(frame.deltas) for frame in gateway.frames) for gateway in gateways]
    assert publishes == sum(carrying) + len(names)
    assert max(carrying) <= entries - len(names) <= worker.steps, "and one entry of the log; each ending has one too"
    assert publishes < 2 * 45 + len(names), "320 tokens"
    assert max(len({delta.id for delta in frame.deltas}) for frame in g0.frames) == 4


@on_loop
async def test_what_nobody_listens_to_can_be_read(worker: Worker) -> None:
    """A publish is made once. Whoever missed it reads saved output and the log, at any moment while it runs."""
    async with worker.make(step_ms=5):
        worker.send(request("a", n=40))
        await worker.until(lambda: len(worker.output("a").tokens) >= 10)
        running = worker.output("a")
        await worker.ended("a")
        ended = worker.output("a")

    assert list(running.tokens) == scripted_tokens(7, 40)[: len(running.tokens)]
    assert (list(ended.tokens), ended.finish) == (scripted_tokens(7, 40), "length")
    assert ended.text == bytes(scripted_tokens(7, 40)).decode()


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
            await worker.until(lambda: not worker.publisher.waiting_bytes)
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
async def test_what_the_engine_refuses_is_refused_and_says_why(worker: Worker) -> None:
    async with worker.make():
        worker.send(request("long", prompt=[1] * 600))
        refused = await worker.ended("long")

    assert refused.outcome == "refused"
    assert "do not fit a context of 500" in refused.message


@on_loop
async def test_a_request_nobody_listens_to_needs_no_gateway(worker: Worker) -> None:
    async with worker.make():
        worker.send(request("a", gateway="", n=10))
        ending = await worker.ended("a")

    assert (ending.outcome, ending.usage.output_tokens) == ("length", 10)
    assert "PUBLISH" not in worker.store.asked
    assert list(worker.output("a").tokens) == scripted_tokens(7, 10), "another worker could go on with it"


@on_loop
async def test_when_the_engine_dies_its_requests_go_back_to_the_queue(worker: Worker) -> None:
    """The process ends then, and its drain hands back what it holds; nothing ends as failed."""
    with capture_logs():
        async with worker.make():
            await worker.engine.stop()
            worker.send(request("a"))
            await worker.generator.dead.wait()
            await worker.runner.drain(0)

    [seen] = worker.side.run(worker.queue.watch("g", ["a"])).seen
    assert (seen.state, seen.ending) == ("waiting", None)


@on_loop
async def test_what_a_newer_gateway_says_of_a_request_is_passed_over(worker: Worker) -> None:
    """Two releases side by side: the body has fields that this worker does not know."""
    asked = generation(request("a"))
    body = msgspec.msgpack.decode(asked.body) | {"novelty": [1]}
    body["sampling"] |= {"novelty": 0.5}
    body["caller"] |= {"novelty": "x"}
    async with Gateway(worker.url) as gateway, worker.make():
        worker.side.run(worker.queue.enqueue(replace(asked, body=msgspec.msgpack.encode(body))))
        ending = await gateway.ending("a")

    assert (ending.outcome, gateway.tokens("a")) == ("length", scripted_tokens(7, 20))


@on_loop
async def test_an_engine_that_breaks_fails_its_request_alone_and_after_its_tokens(worker: Worker) -> None:
    """What was made is delivered and saved before the ending says that it failed; nothing of it stays behind."""
    with capture_logs():
        async with Gateway(worker.url) as gateway, worker.make():
            generate = worker.engine.generate

            async def breaks(asked: Request, cut: int = 0) -> AsyncGenerator[Piece]:
                async for piece in generate(asked, cut):
                    if asked.id == "bad" and worker.runner.held["bad"].usage.output_tokens >= 5:
                        raise RuntimeError("a decoder broke")
                    yield piece

            worker.engine.generate = breaks  # type: ignore[method-assign]
            worker.send(request("bad"), request("good", n=60))
            bad, good = await gateway.ending("bad"), await gateway.ending("good")
            assert gateway.tokens("bad") == scripted_tokens(7, 5)
            assert list(worker.output("bad").tokens) == scripted_tokens(7, 5)
            await worker.until(lambda: not (worker.runner.held or worker.publisher._streams))

    assert (bad.outcome, bad.message, bad.usage.output_tokens) == ("failed", "a decoder broke", 5)
    assert (good.outcome, gateway.tokens("good")) == ("length", scripted_tokens(7, 60))


# --- the store is away


@on_loop
async def test_no_step_is_lost_while_the_store_is_away(worker: Worker) -> None:
    """All of it is generated before the store takes any; then it leaves in order, and ends once."""
    names = [f"r{n}" for n in range(6)]
    async with Gateway(worker.url) as gateway, worker.make(step_ms=1):
        worker.send(*(request(name, n=300, seed=n) for n, name in enumerate(names)))
        await gateway.until(lambda: all(len(gateway.tokens(name)) >= 3 for name in names))
        worker.store.away = {"all"}
        for name in names:
            await worker.generated(name, 300)
        assert not any(worker.ending(name) for name in names)
        assert worker.publisher.waiting_bytes > 0
        worker.store.away = set()
        endings = [await gateway.ending(name) for name in names]

    assert all(gateway.tokens(name) == scripted_tokens(n, 300) for n, name in enumerate(names))
    assert all((ending.outcome, ending.attempt) == ("length", 1) for ending in endings)
    assert worker.publisher.waiting_bytes == 0


@pytest.mark.parametrize("bound", [{"buffer_s": 0.1}, {"buffer_bytes": 2000}])
@on_loop
async def test_generation_stops_at_the_bound_and_goes_on_from_there(worker: Worker, bound: dict[str, Any]) -> None:
    """Nothing that was made is dropped: it leaves before the request goes back, and the next attempt goes on there."""
    with capture_logs() as said:
        async with Gateway(worker.url) as gateway, worker.make(step_ms=3, **bound):
            asked = request("a", n=400, seed=None)
            worker.send(asked)
            await gateway.until(lambda: len(gateway.tokens("a")) >= 3)
            worker.store.away = {"all"}
            await worker.until(lambda: worker.engine.stats().running == 0)
            made = worker.runner.held["a"].usage.output_tokens
            worker.store.away = set()
            ending = await gateway.ending("a")

    whole = scripted_tokens(script_seed(asked), 400)
    assert gateway.tokens("a") == whole
    assert (ending.outcome, ending.attempt, ending.usage.output_tokens) == ("length", 2, 400)
    first = next(delta for delta in gateway.deltas("a") if delta.attempt == 2)
    assert (first.offset, first.cut) == (made, cut_of(whole[:made]))
    assert sum(one["event"] == "buffer_full" for one in said) == 1


@on_loop
async def test_what_ended_while_the_store_was_away_too_long_is_only_told_late(worker: Worker) -> None:
    """A seeded answer could not be gone on with, and need not be: it is whole."""
    with capture_logs():
        async with Gateway(worker.url) as gateway, worker.make(step_ms=3, buffer_s=0.2):
            worker.send(request("short", n=10), request("long", n=400, seed=None))
            await gateway.until(lambda: gateway.tokens("long"))
            worker.store.away = {"all"}
            await worker.until(lambda: worker.engine.stats().running == 0)
            worker.store.away = set()
            endings = [await gateway.ending(name) for name in ("short", "long")]

    assert [(ending.outcome, ending.attempt) for ending in endings] == [("length", 1), ("length", 2)]
    assert gateway.tokens("short") == scripted_tokens(7, 10)


@on_loop
async def test_a_worker_that_was_fenced_while_the_store_was_away_publishes_nothing_more(worker: Worker) -> None:
    """What waits goes out only once a beat has said whose the request is."""
    with capture_logs():
        async with Gateway(worker.url) as gateway, worker.make(step_ms=5):
            worker.send(request("a", n=400, seed=None))
            await gateway.until(lambda: len(gateway.tokens("a")) >= 3)
            worker.runner._vouched_s = float("-inf")  # the lease has run out meanwhile
            await worker.until(lambda: worker.publisher.waiting_bytes > 500)
            worker.side.run(worker.queue.tick("w"))
            [claim] = worker.side.run(worker.queue.claim("w2", 1, lease_ms=NEVER_MS, nonce="n")).claims
            entries = worker.side.client.xlen(f"f1:{{{MODEL}}}:log:w")
            await worker.beat()
            await worker.until(lambda: not worker.runner.held and not worker.publisher.waiting_bytes)
            worker.side.client.publish(gateway_channel(MODEL, "g"), b"\x81\xa6worker\xa3end")
            await gateway.until(lambda: gateway.frames[-1].worker == "end")

    takeover = next(n for n, frame in enumerate(gateway.frames) if frame.takeovers)
    assert (claim.attempt, claim.trail) == (2, "w")
    assert not any(frame.deltas for frame in gateway.frames[takeover:])
    assert worker.side.client.xlen(f"f1:{{{MODEL}}}:log:w") == entries
    assert worker.ending("a") is None


# --- saving


@on_loop
async def test_the_log_is_cut_as_output_is_saved(worker: Worker) -> None:
    """It stays a few beats long, however long the requests are, and nothing is missing in between."""
    async with worker.make(step_ms=2, beat_ms=20):
        worker.send(request("a", n=450), request("b", n=450, seed=8))
        longest = 0
        while worker.ending("a") is None or worker.ending("b") is None:
            output = worker.output("a")
            assert list(output.tokens) == scripted_tokens(7, 450)[: len(output.tokens)]
            longest = max(longest, worker.side.client.xlen(f"f1:{{{MODEL}}}:log:w"))
            await asyncio.sleep(0.01)

    assert worker.store.asked.count("XTRIM") > 3
    assert longest < 225
    assert [list(worker.output(name).tokens) for name in "ab"] == [scripted_tokens(seed, 450) for seed in (7, 8)]


@on_loop
async def test_an_output_is_saved_whole_before_its_request_ends_and_endings_share_the_exchange(worker: Worker) -> None:
    names = [f"r{n}" for n in range(8)]
    async with worker.make(step_ms=10):
        worker.send(*(request(name, n=20, seed=n) for n, name in enumerate(names)))
        for name in names:
            await worker.ended(name)

    for n, name in enumerate(names):
        [kept] = worker.side.run(saved(MODEL, name))
        assert (list(kept.tokens), kept.finish) == (scripted_tokens(n, 20), "length")
        assert 0 < worker.side.client.pttl(f"f1:{{{MODEL}}}:output:{name}") <= 15 * 60 * 1000
    saves = [exchange.count("RPUSH") for exchange in worker.store.exchanges if "RPUSH" in exchange]
    assert sum(saves) == 8 and len(saves) <= 4
    asked = worker.store.asked
    assert asked.index("RPUSH") < asked.index("finish")
    assert worker.side.client.pttl(f"f1:{{{MODEL}}}:log:w") > 0, "a log has a TTL from its first entry on"


@on_loop
async def test_a_log_that_was_forgotten_while_its_worker_was_idle_has_a_ttl_from_its_next_entry_on(
    worker: Worker,
) -> None:
    """Else a worker that is killed just then would leave it for ever."""
    async with worker.make():
        worker.send(request("a", n=5))
        await worker.ended("a")
        worker.publisher._save_due = True
        assert await worker.publisher.flush()
        worker.side.client.delete(f"f1:{{{MODEL}}}:log:w")
        worker.send(request("b", n=5))
        await worker.ended("b")

    assert worker.side.client.pttl(f"f1:{{{MODEL}}}:log:w") > 0


# --- taking over


async def hand_over(old: Worker, new: Worker, gateway: Gateway, asked: Request, *, after: int, how: str) -> None:
    """Let the old worker deliver so much, take it away, and let the new one bring it to its end."""
    old.send(asked)
    await gateway.until(lambda: len(gateway.tokens(asked.id)) >= after)
    if how == "death":
        await old.die()
    else:
        await old.runner.drain(0)
    async with new.make("v", step_ms=1):
        await gateway.ending(asked.id)


@pytest.fixture
def other(valkey_url: str) -> Iterator[Worker]:
    other = Worker(valkey_url)
    yield other
    other.side.close()


@pytest.mark.parametrize("beat_ms", [NEVER_MS, 10])
@pytest.mark.parametrize("how", ["death", "drain"])
@on_loop
async def test_another_worker_goes_on_at_the_very_token(worker: Worker, other: Worker, how: str, beat_ms: int) -> None:
    """Token k depends on the request and on k alone, so its client knows which it must be given."""
    asked = request("a", n=200, seed=None)
    async with Gateway(worker.url) as gateway, worker.make(step_ms=2, beat_ms=beat_ms):
        await hand_over(worker, other, gateway, asked, after=40, how=how)
        ending = await gateway.ending("a")

    whole = scripted_tokens(script_seed(asked), 200)
    assert gateway.tokens("a") == whole and gateway.text("a") == bytes(whole).decode()
    assert (ending.attempt, ending.usage) == (2, Usage(input_tokens=3, output_tokens=200))
    first = next(delta for delta in gateway.deltas("a") if delta.attempt == 2)
    assert first.offset >= 40 and first.cut == cut_of(whole[: first.offset])
    assert sum(len(delta.tokens) for delta in gateway.deltas("a")) == 200, "no token was made twice"
    assert list(other.output("a").tokens) == whole


@pytest.mark.parametrize("how", ["death", "drain"])
@on_loop
async def test_a_stop_string_across_the_seam_is_found(worker: Worker, other: Worker, how: str) -> None:
    """The old worker had held back its beginning, and the new one's engine sees only its end."""
    script = bytes(scripted_tokens(script_seed(request("a", seed=None)), 200)).decode()
    stop = script[60:120]
    end = script.index(stop)
    asked = request("a", n=200, seed=None, stop=(stop, "never"))
    async with Gateway(worker.url) as gateway, worker.make(step_ms=4):
        await hand_over(worker, other, gateway, asked, after=90, how=how)
        ending = await gateway.ending("a")

    assert gateway.said("a") == [("text", script[:end]), ("stop", stop)]
    assert (ending.outcome, ending.attempt, ending.usage.output_tokens) == ("completed", 2, end + len(stop))
    assert len(gateway.tokens("a")) == end + len(stop)


@on_loop
async def test_an_output_that_had_come_to_its_end_is_not_gone_on_with(worker: Worker, other: Worker) -> None:
    """Its worker died before it could say so."""
    asked = request("a", n=400, seed=None, stop=("k",))
    script = bytes(scripted_tokens(script_seed(asked), 400)).decode()
    async with Gateway(worker.url) as gateway, worker.make():
        worker.store.away = {"finish"}
        worker.send(asked)
        await worker.until(lambda: worker.output("a").finish)
        await worker.die()
        async with other.make("v"):
            ending = await gateway.ending("a")

    assert (ending.outcome, ending.attempt) == ("completed", 2)
    assert gateway.said("a") == [("text", script[: script.index("k")]), ("stop", "k")]
    assert ending.usage.output_tokens == script.index("k") + 1
    [last] = [delta for delta in gateway.deltas("a") if delta.attempt == 2]
    assert (last.tokens, last.text, last.cut) == ((), "", cut_of(gateway.tokens("a")))


@on_loop
async def test_many_that_are_taken_over_together_read_their_old_workers_log_once(worker: Worker, other: Worker) -> None:
    names = [f"r{n}" for n in range(8)]
    asked = [request(name, n=150, seed=None) for name in names]
    async with Gateway(worker.url) as gateway, worker.make(step_ms=4):
        worker.send(*asked)
        await gateway.until(lambda: all(len(gateway.tokens(name)) >= 5 for name in names))
        await worker.die()
        async with other.make("v"):
            for name in names:
                await gateway.ending(name)

    assert all(gateway.tokens(one.id) == scripted_tokens(script_seed(one), 150) for one in asked)
    assert other.store.asked.count("XRANGE") == 1


@on_loop
async def test_a_dead_workers_late_save_is_not_taken(worker: Worker, other: Worker) -> None:
    """It was only slow. The next attempt had put its own number down before it delivered anything."""
    asked = request("a", n=100, seed=None)
    async with Gateway(worker.url) as gateway, worker.make(step_ms=3):
        worker.send(asked)
        await gateway.until(lambda: len(gateway.tokens("a")) >= 20)
        late = Delta("a", 1, len(gateway.tokens("a")), (1, 2, 3), "xyz", len(gateway.tokens("a")))
        await worker.die()
        async with other.make("v"):
            await other.until(lambda: "RPUSH" in other.store.asked)
            worker.side.run_all(save(MODEL, late))
            await gateway.ending("a")

    assert list(other.output("a").tokens) == scripted_tokens(script_seed(asked), 100)


@on_loop
async def test_a_stream_that_moves_gets_the_rest_at_its_new_gateway(worker: Worker) -> None:
    async with Gateway(worker.url, "g") as old, Gateway(worker.url, "h") as new, worker.make(step_ms=5):
        worker.send(request("a", n=60))
        await old.until(lambda: len(old.tokens("a")) >= 10)
        worker.side.run(worker.queue.attach("a", "k", "h"))
        ending = await new.ending("a")

    assert ending.outcome == "length"
    first = new.deltas("a")[0].offset
    rest = [token for delta in new.deltas("a") for token in delta.tokens]
    assert old.tokens("a") + rest == scripted_tokens(7, 60) and first == len(old.tokens("a"))


@on_loop
async def test_an_abort_that_nobody_asked_for_is_no_ending(worker: Worker) -> None:
    """The engine is shutting down: what it made so far is kept, and the request goes back."""
    with capture_logs():
        async with Gateway(worker.url) as gateway, worker.make(step_ms=3):
            worker.send(request("a", n=400, seed=None))
            await gateway.until(lambda: len(gateway.tokens("a")) >= 10)
            await worker.engine.abort("a")
            await worker.generator.dead.wait()
            await worker.runner.drain(0)

    [seen] = worker.side.run(worker.queue.watch("g", ["a"])).seen
    assert (seen.state, seen.ending) == ("waiting", None)
    [kept] = worker.side.run(saved(MODEL, "a"))
    assert list(kept.tokens) == gateway.tokens("a")


@on_loop
async def test_a_worker_says_which_prefixes_it_holds(worker: Worker) -> None:
    marks = (b"one", b"two")
    async with worker.make():
        worker.send(msgspec.structs.replace(request("a"), prefix=marks))
        await worker.ended("a")
        await worker.until(lambda: "hold" in worker.store.asked)

    assert worker.side.run(prefix.holders(MODEL, marks)) == [["w"], ["w"]]


# --- kinds


THINKS = EngineKnobs(tool_parser="scripted", reasoning_parser="scripted")
CALLS = EngineKnobs(tool_parser="scripted")


def script(seed: int, n: int) -> str:
    return bytes(scripted_tokens(seed, n)).decode()


def tools(choice: str = "auto", chars: int = 60) -> Tools:
    """Two functions, the first with an argument of so many characters."""
    city = {"type": "string", "minLength": chars}
    weather = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    return Tools(functions=({"name": "get_weather", "parameters": weather}, {"name": "get_time"}), choice=choice)


def conversation(*turns: str) -> list[int]:
    return list("".join(f"{turn}\n" for turn in turns).encode() + b"assistant: ")


#: What calls `get_weather`, by the scripted engine's rule.
ASKS = conversation("user: What is the weather in Paris?")
CALLED = [("call:0", "get_weather"), ("arguments:0", '{"city": "' + "abc" * 20 + '"}')]


@on_loop
async def test_calls_and_thinking_leave_as_runs_of_their_own(worker: Worker) -> None:
    async with Gateway(worker.url) as gateway, worker.make(engine=THINKS):
        worker.send(request("a", n=200, seed=5, prompt=ASKS, tools=tools()))
        worker.send(request("b", n=40, seed=5, prompt=conversation("user: hello"), tools=tools()))
        endings = [await gateway.ending(name) for name in "ab"]
        outputs = [worker.output(name) for name in "ab"]

    thought = ("reasoning", script(5 ^ 1, REASONING_TOKENS))
    assert gateway.said("a") == [thought, *CALLED]
    assert gateway.said("b") == [thought, ("text", script(5, 40 - REASONING_TOKENS - 2))]
    assert [ending.outcome for ending in endings] == ["completed", "length"]
    assert [ending.usage.reasoning_tokens for ending in endings] == [REASONING_TOKENS + 2] * 2
    assert [said(output) for output in outputs] == [gateway.said(name) for name in "ab"], "and are saved as such"
    assert [len(output.tokens) for output in outputs] == [ending.usage.output_tokens for ending in endings]


@on_loop
async def test_the_stop_string_that_ended_an_answer_is_told_after_it(worker: Worker) -> None:
    text = script(7, 40)
    stop = text[20:24]
    async with Gateway(worker.url) as gateway, worker.make():
        worker.send(request("a", n=40, stop=("never", stop)))
        ending = await gateway.ending("a")

    assert gateway.said("a") == [("text", text[: text.index(stop)]), ("stop", stop)]
    assert ending.outcome == "completed"
    assert [delta.finish for delta in gateway.deltas("a")][-2:] == ["", "stop"], "the end is on the very last"


@on_loop
async def test_every_token_says_what_it_was_asked_for(worker: Worker) -> None:
    async with Gateway(worker.url) as gateway, worker.make():
        worker.send(request("a", n=20, logprobs=3), request("b", n=20, logprobs=0), request("c", n=20))
        for name in "abc":
            await gateway.ending(name)
        kept = worker.output("a")

    for name, top in (("a", 3), ("b", 0)):
        told = [one for delta in gateway.deltas(name) for one in delta.logprobs]
        assert "".join(one.token for one in told) == script(7, 20) and all(len(one.top) == top for one in told)
    assert not any(delta.logprobs for delta in gateway.deltas("c"))
    assert [one.token for run in kept.runs for one in run.logprobs] == list(script(7, 20))


@on_loop
async def test_what_the_model_cannot_do_is_refused_and_says_so(worker: Worker) -> None:
    async with Gateway(worker.url) as gateway, worker.make():
        worker.send(request("a", tools=tools()), request("b", grammar={"regex": "a+"}), request("c", task="embed"))
        endings = [await gateway.ending(name) for name in "abc"]

    assert [ending.outcome for ending in endings] == ["refused"] * 3
    assert "tools" in endings[0].message and "regular" in endings[1].message and "vectors" in endings[2].message
    assert not any(ending.usage.output_tokens for ending in endings)


# --- several answers


@on_loop
async def test_several_answers_to_several_prompts_are_one_request(worker: Worker) -> None:
    """Run k is prompt k // n, answer k % n; each prompt counts once, and all that was made counts."""
    asked = msgspec.structs.replace(request("a", n=30, seed=7), n=2, more_prompts=([20, 21], [30]))
    async with Gateway(worker.url) as gateway, worker.make():
        worker.send(asked)
        ending = await gateway.ending("a")
        kept = worker.output("a")

    assert {kind for kind, _ in gateway.said("a")} == {f"{k}/{what}" for k in range(6) for what in ("text", "end")}
    for k in range(6):
        assert gateway.text("a", f"{k}/text") == script(7 + k % 2, 30)
        assert gateway.text("a", f"{k}/end") == "length"
    assert (ending.outcome, ending.usage) == ("length", Usage(input_tokens=6, output_tokens=180))
    assert said(kept) == gateway.said("a") and list(kept.tokens) == gateway.tokens("a")
    assert [delta.finish for delta in gateway.deltas("a") if delta.finish] == ["length"]
    assert [tokens for _, tokens in worker.generator.learned] == [30] * 6


@on_loop
async def test_answers_that_are_not_seeded_differ_and_greedy_ones_do_not(worker: Worker) -> None:
    sampled = msgspec.structs.replace(request("a", seed=None), n=3)
    greedy = msgspec.structs.replace(request("b", seed=None, temperature=0.0), n=2)
    async with Gateway(worker.url) as gateway, worker.make():
        worker.send(sampled, greedy)
        await gateway.ending("a")
        await gateway.ending("b")

    assert len({gateway.text("a", f"{k}/text") for k in range(3)}) == 3
    assert gateway.text("a", "0/text") == script(script_seed(sampled), 20)
    assert gateway.text("b", "0/text") == gateway.text("b", "1/text") == script(script_seed(greedy), 20)


@on_loop
async def test_all_has_stopped_only_when_every_answer_has(worker: Worker) -> None:
    stop = script(7, 40)[20:26]
    assert stop not in script(8, 40)
    some = msgspec.structs.replace(request("some", n=40, stop=(stop,)), n=2)
    every = msgspec.structs.replace(request("every", n=40, grammar={"choice": ["yes"]}), n=2)
    async with Gateway(worker.url) as gateway, worker.make():
        worker.send(some, every)
        endings = [await gateway.ending(name) for name in ("some", "every")]

    assert [ending.outcome for ending in endings] == ["length", "completed"]
    assert (gateway.text("some", "0/stop"), gateway.text("some", "0/end")) == (stop, "stop")
    assert (gateway.text("some", "1/stop"), gateway.text("some", "1/end")) == ("", "length")
    assert [gateway.text("every", f"{k}/text") for k in range(2)] == ["yes", "yes"]


@on_loop
async def test_what_the_tokens_of_several_answers_say_stays_with_their_own_text(worker: Worker) -> None:
    """A token whose text is held back, for a stop string may begin in it, waits for it; else it went to another's."""
    asked = msgspec.structs.replace(request("a", n=40, logprobs=1, stop=("b ", "c ", "nope")), n=3)
    async with Gateway(worker.url) as gateway, worker.make():
        worker.send(asked)
        ending = await gateway.ending("a")

    for k in range(3):
        mine = [delta for delta in gateway.deltas("a") if delta.kind.startswith(f"{k}/")]
        spelled = "".join(one.token for delta in mine for one in delta.logprobs)
        assert spelled == script(7 + k, 40)[: len(spelled)] and spelled.startswith(gateway.text("a", f"{k}/text"))
    assert len(gateway.tokens("a")) == ending.usage.output_tokens
    assert sum(len(delta.logprobs) for delta in gateway.deltas("a")) == ending.usage.output_tokens


@on_loop
async def test_a_cached_prompt_of_several_answers_counts_once(worker: Worker) -> None:
    """What the first had to compute the others found; of another prompt, what its answers all found."""
    asked = msgspec.structs.replace(request("a", prompt=[1] * 40), n=2, more_prompts=([2] * 30,))
    cached = {0: 0, 1: 32, 2: 16, 3: 16}
    async with Gateway(worker.url) as gateway, worker.make():
        generate = worker.engine.generate

        async def caches(asked: Request, cut: int = 0) -> AsyncGenerator[Piece]:
            async for piece in generate(asked, cut):
                yield msgspec.structs.replace(piece, cached_tokens=cached[asked.choice])

        worker.engine.generate = caches  # type: ignore[method-assign]
        worker.send(asked)
        ending = await gateway.ending("a")

    assert (ending.usage.input_tokens, ending.usage.cached_tokens) == (70, 16)


@on_loop
async def test_cancelling_stops_every_answer(worker: Worker) -> None:
    async with Gateway(worker.url) as gateway, worker.make(step_ms=5):
        worker.send(msgspec.structs.replace(request("a", n=400), n=4))
        await gateway.until(lambda: len(gateway.tokens("a")) >= 12)
        assert worker.engine.stats().running == 4
        worker.side.run(worker.queue.cancel("a"))
        ending = await gateway.ending("a")
        assert worker.engine.stats().running == 0
        await worker.until(lambda: not worker.publisher._streams)

    assert ending.outcome == "cancelled"
    assert ending.usage.output_tokens == len(gateway.tokens("a")) > 0


@on_loop
async def test_one_answer_that_is_refused_or_breaks_ends_them_all(worker: Worker) -> None:
    async with Gateway(worker.url) as gateway, worker.make(step_ms=5):
        generate = worker.engine.generate

        async def fails(asked: Request, cut: int = 0) -> AsyncGenerator[Piece]:
            async for piece in generate(asked, cut):
                if asked.choice == 1 and len(gateway.tokens(asked.id)) >= 10:
                    raise EngineRefused("not this one") if asked.id == "refused" else RuntimeError("it broke")
                yield piece

        worker.engine.generate = fails  # type: ignore[method-assign]
        worker.send(*(msgspec.structs.replace(request(name, n=400), n=2) for name in ("refused", "broken")))
        endings = [await gateway.ending(name) for name in ("refused", "broken")]
        await worker.until(lambda: worker.engine.stats().running == 0 and not worker.publisher._streams)

    assert [(one.outcome, one.message) for one in endings] == [("refused", "not this one"), ("failed", "it broke")]
    assert all(one.usage.output_tokens >= 10 for one in endings), "what was made before that counts against limits"


@on_loop
async def test_an_engine_that_goes_away_under_several_answers_hands_them_back(worker: Worker) -> None:
    with capture_logs():
        async with Gateway(worker.url) as gateway, worker.make(step_ms=3):
            worker.send(msgspec.structs.replace(request("a", n=400), n=3, stream=False))
            await gateway.until(lambda: len(gateway.tokens("a")) >= 10)
            await worker.engine.abort("a")
            await worker.generator.dead.wait()
            await worker.runner.drain(0)

    [seen] = worker.side.run(worker.queue.watch("g", ["a"])).seen
    assert (seen.state, seen.ending) == ("waiting", None)


@on_loop
async def test_several_answers_that_nobody_has_seen_are_made_again(worker: Worker, other: Worker) -> None:
    """What an older attempt saved does not mix with it."""
    asked = msgspec.structs.replace(request("a", n=200), n=2, stream=False)
    async with Gateway(worker.url) as gateway, worker.make(beat_ms=10):
        worker.send(asked)
        await gateway.until(lambda: len(gateway.tokens("a")) >= 60)
        await worker.die()
        async with other.make("v", step_ms=1):
            ending = await gateway.ending("a")
            kept = other.output("a")

    assert (ending.attempt, ending.usage.output_tokens) == (2, 400)
    texts = ["".join(text for kind, text in said(kept) if kind == f"{k}/text") for k in range(2)]
    assert texts == [script(7, 200), script(8, 200)] and len(kept.tokens) == 400


@on_loop
async def test_wide_requests_take_as_many_slots_as_they_have_answers(worker: Worker) -> None:
    async with Gateway(worker.url) as gateway, worker.make(step_ms=5, slots=16):
        intake = Intake(worker.engine, worker.model, EngineFacts(slots=16, context_tokens=500, kv_tokens=8000))
        intake.serve(worker.runner, worker.generator)
        assert intake.slots() == 16
        worker.send(msgspec.structs.replace(request("a", n=100), n=3, more_prompts=([1, 2],)), request("b", n=100))
        await gateway.until(lambda: gateway.tokens("a") and gateway.tokens("b"))
        [wide] = [one for one in intake._look() if one.id == "a"]
        assert intake.slots() == 16 - 7

    assert (wide.width, wide.input_tokens, wide.expected_tokens, wide.most_tokens) == (6, 5, 600, 600)
    assert not wide.resumable


def test_the_queue_counts_all_prompts_and_answers_and_the_longest_context() -> None:
    wide = generation(msgspec.structs.replace(request("a", n=100), n=3, more_prompts=([1] * 10,)))
    vectors = generation(msgspec.structs.replace(request("a", n=1), task="embed", more_prompts=([1] * 10,)))

    assert (wide.input_tokens, wide.need_tokens, wide.most_tokens) == (13, 13 + 600, 110)
    assert (vectors.input_tokens, vectors.need_tokens, vectors.most_tokens) == (13, 13, 10)


# --- vectors


@on_loop
async def test_a_vector_of_each_prompt(worker: Worker) -> None:
    prompts = ([1, 2, 3], [4, 5], [6] * 40)
    many = msgspec.structs.replace(request("many", prompt=prompts[0]), task="embed", more_prompts=prompts[1:])
    one = msgspec.structs.replace(request("one", prompt=prompts[2]), task="embed")
    async with Gateway(worker.url) as gateway, worker.make(kind="embedding"):
        worker.send(many, one)
        endings = [await gateway.ending(name) for name in ("many", "one")]
        kept = worker.output("many")

    runs = dict(gateway.said("many"))
    assert [vector_of(runs[f"{k}/embedding"]) for k in range(3)] == [single(scripted_vector(one)) for one in prompts]
    assert [kind for kind, _ in gateway.said("one")] == ["embedding"]
    assert vector_of(gateway.text("one", "embedding")) == single(scripted_vector(prompts[2]))
    assert [ending.outcome for ending in endings] == ["completed"] * 2
    assert [ending.usage for ending in endings] == [Usage(input_tokens=45), Usage(input_tokens=40)]
    assert said(kept) == gateway.said("many") and kept.finish == "stop"
    assert not worker.generator.learned


def vector_of(text: str) -> tuple[float, ...]:
    raw = base64.b64decode(text)
    return struct.unpack(f"<{len(raw) // 4}f", raw)


def single(vector: tuple[float, ...]) -> tuple[float, ...]:
    return struct.unpack(f"<{len(vector)}f", struct.pack(f"<{len(vector)}f", *vector))


@on_loop
async def test_a_prompt_that_has_no_vector_fails_the_request_and_cancelling_stops_all(worker: Worker) -> None:
    asked = msgspec.structs.replace(request("a"), task="embed", more_prompts=([1] * 501,))
    slow = msgspec.structs.replace(request("b"), task="embed", more_prompts=([1], [2]))
    step = StepProfile(base_ms=60_000, sequence_ms=0)
    async with Gateway(worker.url) as gateway, worker.make(kind="embedding", step=step):
        worker.send(asked, slow)
        failed = await gateway.ending("a")
        await worker.until(lambda: "b" in worker.runner.held)
        worker.side.run(worker.queue.cancel("b"))
        cancelled = await gateway.ending("b")

    assert failed.outcome == "refused" and "501" in failed.message
    assert cancelled.outcome == "cancelled"


# --- taking over what is read


@pytest.mark.parametrize("beat_ms", [NEVER_MS, 10])
@pytest.mark.parametrize("how", ["death", "drain"])
@pytest.mark.parametrize("after", [4, REASONING_TOKENS + 8, REASONING_TOKENS + 30])
@on_loop
async def test_another_worker_goes_on_within_thinking_a_name_or_arguments(
    worker: Worker, other: Worker, how: str, beat_ms: int, after: int
) -> None:
    """The runs are those of an unbroken attempt: a name once, arguments whole, and thinking counted once."""
    asked = request("a", n=200, seed=None, prompt=ASKS, tools=tools())
    async with Gateway(worker.url) as gateway, worker.make(step_ms=4, beat_ms=beat_ms, engine=THINKS):
        worker.send(asked)
        await gateway.until(lambda: len(gateway.tokens("a")) >= after)
        await (worker.die() if how == "death" else worker.runner.drain(0))
        async with other.make("v", step_ms=1, engine=THINKS):
            ending = await gateway.ending("a")
            kept = other.output("a")

    thought = script(script_seed(asked) ^ 1, REASONING_TOKENS)
    assert gateway.said("a") == [("reasoning", thought), *CALLED] == said(kept)
    assert (ending.attempt, ending.outcome) == (2, "completed")
    assert ending.usage.reasoning_tokens == REASONING_TOKENS + 2
    assert ending.usage.output_tokens == len(gateway.tokens("a")) == len(kept.tokens)
    assert sum(len(delta.tokens) for delta in gateway.deltas("a")) == len(kept.tokens), "no token was made twice"


@on_loop
async def test_what_is_read_differently_is_lost_and_never_spliced(worker: Worker, other: Worker) -> None:
    """A worker of another release, say, whose reader takes for the answer what the first took for thinking."""

    class Unlike(MarkReader):
        def feed(self, text: str, tokens: Any, *, finished: bool) -> list[tuple[str, str]]:
            return [("text", text)] if text else []

    asked = request("a", n=200, seed=None, prompt=ASKS, tools=tools())
    with capture_logs():
        async with Gateway(worker.url) as gateway, worker.make(step_ms=4, engine=THINKS):
            worker.send(asked)
            await gateway.until(lambda: len(gateway.tokens("a")) >= 8)
            await worker.die()
            other.make("v", engine=THINKS)
            other.engine.reader = lambda _: Unlike()  # type: ignore[method-assign]
            async with other:
                ending = await gateway.ending("a")

    assert (ending.outcome, ending.attempt) == ("worker_lost", 2)
    assert {kind for kind, _ in gateway.said("a")} == {"reasoning"}
    assert not any(delta.text for delta in gateway.deltas("a") if delta.attempt == 2)


@on_loop
async def test_a_call_that_had_come_to_its_end_is_told_once(worker: Worker, other: Worker) -> None:
    """Its worker died before it could say so; the next reads what was thought, for the bill, and says no more."""
    asked = request("a", n=200, seed=None, prompt=ASKS, tools=tools())
    async with Gateway(worker.url) as gateway, worker.make(engine=THINKS):
        worker.store.away = {"finish"}
        worker.send(asked)
        await worker.until(lambda: worker.output("a").finish)
        await worker.die()
        async with other.make("v", engine=THINKS):
            ending = await gateway.ending("a")

    assert [kind for kind, _ in gateway.said("a")] == ["reasoning", "call:0", "arguments:0"]
    assert (ending.outcome, ending.attempt, ending.usage.reasoning_tokens) == ("completed", 2, REASONING_TOKENS + 2)
    assert not any(delta.tokens or delta.text for delta in gateway.deltas("a") if delta.attempt == 2)


@pytest.mark.parametrize("stream", [True, False])
@on_loop
async def test_a_call_that_must_be_is_made_anew_unless_it_was_seen(worker: Worker, other: Worker, stream: bool) -> None:
    """A grammar bound it, and no engine begins one in the middle."""
    asked = msgspec.structs.replace(request("a", n=200, seed=None, prompt=ASKS, tools=tools("required")), stream=stream)
    async with Gateway(worker.url) as gateway, worker.make(step_ms=4, engine=CALLS):
        worker.send(asked)
        await gateway.until(lambda: len(gateway.tokens("a")) >= 30)
        await worker.die()
        async with other.make("v", step_ms=1, engine=CALLS):
            ending = await gateway.ending("a")
            kept = other.output("a")

    assert ending.outcome == ("worker_lost" if stream else "completed")
    assert stream or said(kept) == CALLED
