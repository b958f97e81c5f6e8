"""One worker's life: load the model, prove it with a canary, serve until told to stop, drain, go.

Run by its host's agent (workers/host.py): `python -m workers.main MODEL NAME`. A worker's id is made of its host,
its name there and its process id, so that the agent knows which worker a death was. Exit codes: 0 told to stop,
1 the engine died, hung or answered wrong, 2 the settings are bad.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import dramatiq
import msgspec
import psutil

from core import catalog, fleet, lengths
from core.catalog import Model
from core.redis import AWAY, AsyncStore, RedisError, Store
from core.settings import BadSettings, Settings, read
from core.telemetry import logs
from core.values import Caller, Request, Sampling, WorkerState
from tasks.broker import QueueBroker
from tasks.queue import Queue, Room
from tasks.runner import IDLE_S, VICTIMS_MAX, Held, Runner, Victim
from workers import headroom
from workers.engine import Engine, EngineDead, EngineFacts
from workers.generate import Generator, Publisher
from workers.leash import Leash
from workers.watchdog import LOOK_S, Watchdog, hung_after_s

log = logs.get(__name__)

#: How long a well engine may take to stop, seconds, less than supervise.GRACE_S; a sick one is not asked.
STOP_S = 4.0
#: Most tokens that a canary may take.
CANARY_TOKENS = 32


class CanaryFailed(Exception):
    """The engine started and answers nonsense."""


def worker_id(host: str, name: str, pid: int) -> str:
    """The id of one life of a worker. The agent and the worker each make it for themselves."""
    return f"{host}:{name}:{pid}"


def host_id(settings: Settings) -> str:
    return settings.host_id or socket.gethostname()


def gpus() -> int:
    """How many NVIDIA GPUs this machine shows."""
    try:
        return sum(name.startswith("nvidia") and name[6:].isdigit() for name in os.listdir("/dev"))
    except OSError:
        return 0


def on_cpu(settings: Settings) -> bool:
    """Whether a real model runs on this machine's CPU."""
    return settings.engine == "vllm" and gpus() == 0


def engine_for(settings: Settings, model: Model) -> Engine:
    """The engine that the settings ask for."""
    if settings.engine == "scripted":
        from workers.scripted import ScriptedEngine

        return ScriptedEngine(model, settings.tally)
    from workers.vllm.engine import VllmEngine

    ping_s = min(hung_after_s(model, on_cpu=on_cpu(settings)) / 2, 10.0)
    return VllmEngine(model, settings.data, timed=settings.engine == "timed", ping_s=ping_s)


class Intake:
    """What the runner asks before it claims. headroom.py does the sums; here are engine and requests."""

    def __init__(
        self, engine: Engine, model: Model, facts: EngineFacts, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.engine, self.now_s = engine, now_s
        self.shape = headroom.Shape.of(facts, model)
        self.prefill = headroom.unmeasured(model)

    def serve(self, runner: Runner, generator: Generator) -> None:
        self.runner, self.generator = runner, generator

    def slots(self) -> int:
        """Not taken. A request whose body is not read yet is taken for one run."""
        wider = sum(request.width - 1 for request, _ in self.generator.progress())
        return self.shape.slots - len(self.runner.held) - wider

    def room(self) -> Room:
        return _room(headroom.headroom(self.shape, self.engine.stats(), self._look(), self.prefill))

    def victims(self, cls: int) -> list[Victim]:
        if self.slots() > 0 and headroom.worth_waiting(self.shape, self.prefill, cls):
            return []
        in_hand, stats, held = self._look(), self.engine.stats(), self.runner.held
        may = [one for one in in_hand if not held[one.id].let_go and not held[one.id].finishing]
        return [
            Victim(id=one.id, cls=one.cls, room=_room(headroom.without(one, self.shape, stats, in_hand, self.prefill)))
            for one in headroom.victims(may, cls)[:VICTIMS_MAX]
        ]

    def again_s(self) -> float:
        return headroom.again_s(self.shape, self.prefill)

    def stepped(self) -> None:
        """After each step: first tokens make room for other prompts."""
        waiting = self.prefill.waiting
        if any(id_ not in self.runner.held or _prefilled(self.runner.held[id_]) for id_ in waiting):
            self._look()
            self.runner.stir()

    def _look(self) -> list[headroom.InHand]:
        """The requests in hand; and what is known of their prompts is brought up to now."""
        requests = {request.id: request for request, _ in self.generator.progress()}
        held = self.runner.held.values()
        in_hand = [_in_hand(order, one, requests.get(one.claim.id)) for order, one in enumerate(held)]
        waiting = {one.id: one.kv_tokens for one in in_hand if not one.prefilled}
        before = self.prefill.waiting
        done = sum(before[one.id] - one.cached_tokens for one in in_hand if one.prefilled and one.id in before)
        self.prefill = headroom.advance(self.prefill, self.now_s(), waiting, done, self.shape.step_tokens)
        return in_hand


def _room(free: headroom.Headroom) -> Room:
    return Room(**vars(free))


def _prefilled(held: Held) -> bool:
    return held.usage.output_tokens > held.cut


def _in_hand(order: int, held: Held, request: Request | None) -> headroom.InHand:
    claim, usage = held.claim, held.usage
    known = headroom.InHand(
        id=claim.id,
        cls=claim.cls,
        attempt=claim.attempt,
        order=order,
        input_tokens=claim.input_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=max(usage.output_tokens, held.cut),
        expected_tokens=claim.need_tokens - claim.input_tokens,
        prefilled=_prefilled(held),
    )
    if request is None:
        return known
    most_tokens = request.width * request.sampling.max_tokens if request.task == "generate" else 0
    return msgspec.structs.replace(known, width=request.width, most_tokens=most_tokens, resumable=request.resumable)


class Life:
    """From start to end. `run` is the whole story."""

    def __init__(self, settings: Settings, model: Model, name: str) -> None:
        self.settings, self.model = settings, model
        self.host = host_id(settings)
        self.worker = worker_id(self.host, name, os.getpid())
        self.store = AsyncStore.connect(settings.redis_url)
        self.blocking = AsyncStore.connect(settings.redis_url, timeout_s=IDLE_S + 3)
        self.limits = AsyncStore.connect(settings.limits_url or settings.redis_url)
        self.engine = engine_for(settings, model)
        self.stopping = asyncio.Event()
        self.state = WorkerState.BOOTING
        self.detail = ""
        self._entered_s = time.monotonic()
        self.facts = EngineFacts(slots=0, context_tokens=0, kv_tokens=0)  #: once the engine has started
        self.sick = False  #: the engine is past being asked for anything
        self.lease_ms, self.beat_ms = settings.lease(on_cpu=gpus() == 0)
        self.runner: Runner | None = None

    async def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stopping.set)
        presence = asyncio.create_task(_forever(self._announce, self.beat_ms / 1000))
        try:
            if not await self._until_stopped(self._load()):
                return 0  # the agent ends what is left of the engine with this process's group
            return await self._serve()
        except (CanaryFailed, EngineDead) as e:
            log.error("engine_unfit", error=str(e))
            self.sick = True
            return 1
        finally:
            presence.cancel()
            await self._leave()

    async def _load(self) -> None:
        """From nothing to ready."""
        self._enter(WorkerState.LOADING, "the model goes into the engine")
        self.facts = await self.engine.start()
        self._enter(WorkerState.WARMING, "asking the canary")
        await self._canary()

    async def _canary(self) -> None:
        """A prompt with a known answer turns warming into ready. An engine that starts is not yet one that is right."""
        prompt = await self.engine.prompt_ids(self.model.canary.prompt)
        request = Request(
            id=f"canary-{self.worker}",
            model=self.model.name,
            caller=Caller(org_id="", project_id="", key_id=""),
            gateway="",
            prompt_token_ids=prompt,
            sampling=Sampling(max_tokens=CANARY_TOKENS, temperature=0),
        )
        try:
            async with asyncio.timeout(2 * self._hung_s), aclosing(self.engine.generate(request)) as pieces:
                answer = "".join([piece.text async for piece in pieces])
        except TimeoutError:
            raise CanaryFailed(f"asked {self.model.canary.prompt!r}, it says nothing") from None
        expected = self.model.canary.answer if self.settings.engine == "vllm" else ""
        if expected and answer.strip() != expected:
            raise CanaryFailed(f"asked {self.model.canary.prompt!r}, it answers {answer.strip()!r}")

    async def _serve(self) -> int:
        """Claim and generate until told to stop, or the engine is gone."""
        intake = Intake(self.engine, self.model, self.facts)
        runner = self.runner = self._make_runner(intake)
        publisher = Publisher(self.store, runner, self.model.name, buffer_s=self.settings.buffer_s)
        runner.before_back = publisher.put_away
        leash = Leash(self.limits, runner, self.model.pace)
        generator = Generator(self.engine, runner, publisher, leash, kv_tokens=self.facts.kv_tokens)
        intake.serve(runner, generator)
        generate: Any = generator.generate  # Dramatiq's types know no bound coroutine
        dramatiq.Actor(
            generate, broker=runner.broker, actor_name="generate", queue_name=self.model.name, priority=0, options={}
        )
        self.engine.on_step(publisher.step)
        watchdog = Watchdog(self.engine, lambda: len(generator.progress()), hung_s=self._hung_s)
        self.engine.on_step(watchdog.stepped)
        self.engine.on_step(intake.stepped)
        background = [
            asyncio.create_task(runner.run()),
            asyncio.create_task(_forever(publisher.run, 0)),
            asyncio.create_task(_forever(publisher.saves, 0)),
            asyncio.create_task(_forever(leash.run, 0)),
            asyncio.create_task(_forever(lambda: self._learn(generator), 1.0)),
            asyncio.create_task(_forever(watchdog.look, LOOK_S)),
        ]
        self._enter(WorkerState.READY)
        waits = [asyncio.create_task(event.wait()) for event in (generator.dead, watchdog.sick, self.stopping)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        self.sick = generator.dead.is_set() or watchdog.sick.is_set()
        self._enter(WorkerState.DRAINING, watchdog.reason)
        if self.sick:
            await runner.drain(0.0, reason=watchdog.reason or "its engine died", died=True)
        else:
            await self._drain(runner, waits[:2])
        for task in (*background, *waits):
            task.cancel()
        return 1 if self.sick else 0

    async def _drain(self, runner: Runner, sick: list[asyncio.Task[Any]]) -> None:
        """Let what runs end, unless the engine falls sick over it."""
        draining = asyncio.create_task(runner.drain(self.settings.drain_s))
        await asyncio.wait({draining, *sick}, return_when=asyncio.FIRST_COMPLETED)
        if not draining.done():
            self.sick = True
            draining.cancel()
            await asyncio.wait({draining})
            await runner.drain(0.0, reason="its engine died", died=True)

    @property
    def _hung_s(self) -> float:
        return hung_after_s(self.model, on_cpu=on_cpu(self.settings))

    def _make_runner(self, intake: Intake) -> Runner:
        return Runner(
            QueueBroker(Store.connect(self.settings.redis_url)),
            self.store,
            self.blocking,
            Queue(self.model.name),
            worker=self.worker,
            lease_ms=self.lease_ms,
            beat_ms=self.beat_ms,
            room=intake.slots,
            headroom=intake.room,
            victims=intake.victims,
            again_s=intake.again_s,
        )

    async def _learn(self, generator: Generator) -> None:
        """How long answers came out. What is lost on the way is not missed."""
        answers = list(generator.learned)
        generator.learned.clear()
        if answers:
            await self.store.run_all([lengths.learn(self.model.name, key, tokens) for key, tokens in answers])

    async def _announce(self) -> None:
        row = fleet.Worker(
            worker=self.worker,
            host=self.host,
            model=self.model.name,
            state=self.state,
            pid=os.getpid(),
            slots=self.facts.slots,
            running=len(self.runner.held) if self.runner else 0,
            detail=self.detail,
            since_ms=int((time.monotonic() - self._entered_s) * 1000),
            kv_tokens=self.facts.kv_tokens,
            context_tokens=self.facts.context_tokens,
        )
        await self.store.run(fleet.announce_worker(row))

    def _enter(self, state: WorkerState, detail: str = "") -> None:
        log.info("worker_state", state=state, worker=self.worker)
        self.state, self.detail, self._entered_s = state, detail, time.monotonic()
        asyncio.create_task(self._announce_once())  # noqa: RUF006  (the beat says it again)

    async def _announce_once(self) -> None:
        try:
            await self._announce()
        except (*AWAY, RedisError) as e:
            log.warning("not_announced", error=repr(e))

    async def _until_stopped(self, work: Awaitable[None]) -> bool:
        """Do the work, unless told to stop before it is done."""
        working = asyncio.ensure_future(work)
        told = asyncio.create_task(self.stopping.wait())
        await asyncio.wait({working, told}, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        if working.done():
            await working
            return True
        working.cancel()
        return False

    async def _leave(self) -> None:
        self.state = WorkerState.GONE
        await self._stop_engine()
        try:
            await self.store.run(fleet.remove_worker(self.model.name, self.worker))
        except (*AWAY, RedisError) as e:
            log.warning("not_removed", error=repr(e))
        await self.store.close()
        await self.blocking.close()
        await self.limits.close()

    async def _stop_engine(self) -> None:
        """The engine ends, gently if it is well, and nothing of it stays behind."""
        if not self.sick:
            try:
                async with asyncio.timeout(STOP_S):
                    await self.engine.stop()
            except (TimeoutError, EngineDead) as e:
                log.warning("engine_not_stopped", error=repr(e))
        for process in psutil.Process().children(recursive=True):  # a worker has no other children
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


async def _forever(step: Callable[[], Awaitable[None]], pause_s: float) -> None:
    """Do it again and again; a store that is away, or a fault, ends one round and not the loop."""
    while True:
        try:
            await step()
        except (*AWAY, RedisError) as e:
            log.warning("store_away", loop=getattr(step, "__name__", "step"), error=repr(e))
            await asyncio.sleep(0.1)
        except Exception:  # the outermost edge of a background loop: it must not die silently
            log.exception("loop_failed", loop=getattr(step, "__name__", "step"))
            await asyncio.sleep(0.1)
        await asyncio.sleep(pause_s)


def main() -> None:
    try:
        settings = read(os.environ)
        models = catalog.load(settings.catalog)
        model, name = models[sys.argv[1]], sys.argv[2]
    except (BadSettings, catalog.BadCatalog, KeyError, IndexError) as e:
        sys.stderr.write(f"workers.main: {e}\nuse: python -m workers.main MODEL NAME\n")
        sys.exit(2)
    logs.set_up("worker", settings.log_level)
    if settings.supervised:
        from core.supervise import follow_parent

        follow_parent()

    async def live() -> int:
        return await Life(settings, model, name).run()

    code = asyncio.run(live())
    sys.stdout.flush()
    # Threads of an engine that is being torn down must not keep a process that is done.
    os._exit(code)


if __name__ == "__main__":
    main()
