"""One worker's life: load the model, prove it with a canary, serve until told to stop, drain, go.

Run by its host's agent (workers/host.py): `python -m workers.main MODEL NAME`. A worker's id is made of its host,
its name there and its process id, so that the agent knows which worker a death was. Exit codes: 0 told to stop,
1 the engine died or answered wrong, 2 the settings are bad.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import dramatiq

from core import catalog, fleet
from core.catalog import Model
from core.limits import counters
from core.redis import AWAY, AsyncStore, RedisError, Store
from core.settings import BadSettings, Settings, read
from core.telemetry import logs
from core.values import Caller, Request, Sampling, WorkerState
from tasks.broker import QueueBroker
from tasks.queue import Queue
from tasks.runner import IDLE_S, Runner
from workers.engine import Engine, EngineDead
from workers.generate import Generator, Publisher

log = logs.get(__name__)

#: How often an idle engine is asked whether it is there, seconds.
PING_S = 5.0
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


def engine_for(settings: Settings, model: Model) -> Engine:
    """The engine that the settings ask for."""
    if settings.engine == "scripted":
        from workers.scripted import ScriptedEngine

        return ScriptedEngine(model)
    from workers.vllm.engine import VllmEngine

    return VllmEngine(model, settings.data, timed=settings.engine == "timed")


class Life:
    """From start to end. `run` is the whole story."""

    def __init__(self, settings: Settings, model: Model, name: str) -> None:
        self.settings, self.model = settings, model
        self.host = host_id(settings)
        self.worker = worker_id(self.host, name, os.getpid())
        self.store = AsyncStore.connect(settings.redis_url)
        self.blocking = AsyncStore.connect(settings.redis_url, timeout_s=IDLE_S + 3)
        self.engine = engine_for(settings, model)
        self.stopping = asyncio.Event()
        self.state = WorkerState.BOOTING
        self.detail = ""
        self.slots = 0
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
            return 1
        finally:
            presence.cancel()
            await self._leave()

    async def _load(self) -> None:
        """From nothing to ready."""
        self._enter(WorkerState.LOADING, "the model goes into the engine")
        facts = await self.engine.start()
        self.slots = facts.slots
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
        async with aclosing(self.engine.generate(request)) as pieces:
            answer = "".join([piece.text async for piece in pieces])
        expected = self.model.canary.answer if self.settings.engine == "vllm" else ""
        if expected and answer.strip() != expected:
            raise CanaryFailed(f"asked {self.model.canary.prompt!r}, it answers {answer.strip()!r}")

    async def _serve(self) -> int:
        """Claim and generate until told to stop, or the engine is gone."""
        runner = self.runner = self._make_runner()
        publisher = Publisher(self.store, runner, self.model.name, buffer_s=self.settings.buffer_s)
        generator = Generator(self.engine, runner, publisher)
        generate: Any = generator.generate  # Dramatiq's types know no bound coroutine
        dramatiq.Actor(
            generate, broker=runner.broker, actor_name="generate", queue_name=self.model.name, priority=0, options={}
        )
        self.engine.on_step(publisher.step)
        background = [
            asyncio.create_task(runner.run()),
            asyncio.create_task(_forever(publisher.run, 0)),
            asyncio.create_task(_forever(lambda: self._report(generator), 1.0)),
            asyncio.create_task(_forever(lambda: self._ping(generator), PING_S)),
        ]
        self._enter(WorkerState.READY)
        dead = asyncio.create_task(generator.dead.wait())
        told = asyncio.create_task(self.stopping.wait())
        await asyncio.wait({dead, told}, return_when=asyncio.FIRST_COMPLETED)
        self._enter(WorkerState.DRAINING)
        await runner.drain(0.0 if dead.done() else self.settings.drain_s)
        for task in (*background, dead, told):
            task.cancel()
        return 1 if generator.dead.is_set() else 0

    def _make_runner(self) -> Runner:
        broker = QueueBroker(Store.connect(self.settings.redis_url))
        runner = Runner(
            broker,
            self.store,
            self.blocking,
            Queue(self.model.name),
            worker=self.worker,
            lease_ms=self.lease_ms,
            beat_ms=self.beat_ms,
            room=lambda: self.slots - len(runner.held),
        )
        return runner

    async def _ping(self, generator: Generator) -> None:
        """A dead engine is noticed by the requests in it; an idle one has none."""
        try:
            await self.engine.ping()
        except EngineDead:
            generator.dead.set()

    async def _report(self, generator: Generator) -> None:
        """Tokens so far, one call per organisation: the limiter's view of running requests."""
        by_org: dict[str, list[tuple[str, str, int]]] = defaultdict(list)
        for request, usage in generator.progress():
            caller = request.caller
            by_org[caller.org_id].append((request.id, f"key:{caller.key_id}", usage.input_tokens + usage.output_tokens))
        if by_org:
            await self.store.run_all([counters.progress(org_id, so_far) for org_id, so_far in by_org.items()])

    async def _announce(self) -> None:
        row = fleet.Worker(
            worker=self.worker,
            host=self.host,
            model=self.model.name,
            state=self.state,
            pid=os.getpid(),
            slots=self.slots,
            running=len(self.runner.held) if self.runner else 0,
            detail=self.detail,
        )
        await self.store.run(fleet.announce_worker(row))

    def _enter(self, state: WorkerState, detail: str = "") -> None:
        log.info("worker_state", state=state, worker=self.worker)
        self.state, self.detail = state, detail
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
        await self.engine.stop()
        try:
            await self.store.run(fleet.remove_worker(self.model.name, self.worker))
        except (*AWAY, RedisError) as e:
            log.warning("not_removed", error=repr(e))
        await self.store.close()
        await self.blocking.close()


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
