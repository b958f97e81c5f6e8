"""The host agent: runs the workers that are assigned to this machine, and says when one dies.

The scaler writes what this host is to run (core/fleet.py); without a scaler it runs what FOREBAY_WORKERS says. Each
worker is a process in a session of its own, without DATABASE_URL. A death is reported at once, so that the queue
does not wait for the dead worker's lease.

An engine's processes may outlive their worker and keep the GPU. Each carries the mark that its worker's agent put into
the environment; when an agent begins, and when a worker has died, marked processes that no worker stands behind are
killed. Nobody else's are touched.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from types import FrameType

import psutil

from core import catalog, fleet, supervise
from core.catalog import Catalog
from core.redis import AWAY, RedisError, Store
from core.settings import WITHHELD, BadSettings, Settings, read, variable
from core.supervise import Death, Process, Supervisor
from core.telemetry import logs
from tasks.queue import Queue
from workers.main import gpus, host_id, worker_id

log = logs.get(__name__)

#: Workers that a machine without a GPU holds at most; its memory is the real bound.
CPU_ROOM = 8
#: The environment variable by which an agent knows what it, or its predecessor, has started. `SPT_NOENV` keeps it
#: readable where a process changes its title, as vLLM's do.
MARK = variable("engine_of")
#: How often the agent looks at its processes and at its assignment, seconds.
TEND_S = 0.1
LOOK_S = 0.5


class Agent:
    """One host's agent. `tend` is one step."""

    def __init__(self, settings: Settings, models: Catalog, store: Store, environ: Mapping[str, str]) -> None:
        self.settings, self.models, self.store = settings, models, store
        self.host = host_id(settings)
        self.environ = {name: value for name, value in environ.items() if name not in WITHHELD}
        self.mark = f"{self.host}:{settings.data.resolve()}"
        self.environ |= {"FOREBAY_SUPERVISED": "1", MARK: self.mark, "SPT_NOENV": "1"}
        self.supervisor = Supervisor(drain_s=settings.drain_s + supervise.GRACE_S, died=self._died)
        self.assigned = _fixed(settings.workers)  #: what to run, as was last said
        self.model_of: dict[str, str] = {}  #: process -> model
        self.unburied: list[tuple[str, str]] = []  #: (model, worker) whose death the queue has not heard of
        self._next_look_s = 0.0
        self._count = 0

    def run(self) -> None:
        """Tend until told to end; then let the workers drain."""
        reap(self.mark)
        while not self.supervisor.ending:
            self.tend(time.monotonic())
            time.sleep(TEND_S)
        log.info("host_draining", workers=len(self.supervisor.names()))
        self.supervisor.stop()
        self._attempt(self._bury)

    def tend(self, now_s: float) -> None:
        """Look after the processes; now and then, after the assignment."""
        self.supervisor.tend()
        if self.unburied:
            self._attempt(self._bury)
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_S
            self._attempt(self._look)

    def _look(self) -> None:
        # Without an assignment the last one holds: a store that has lost it must not empty the host.
        counts = self.store.run(fleet.assignment(self.host))
        self.assigned = self.assigned if counts is None else counts
        self.obey(self.assigned)
        self.store.run(fleet.announce_host(fleet.Host(host=self.host, room=room(), workers=self._running())))

    def obey(self, counts: Mapping[str, int]) -> None:
        """Start what is missing, and stop, newest first, what is too many."""
        for model in {*counts, *self._running()}:
            mine = [name for name, of in self.model_of.items() if of == model]
            want = counts.get(model, 0) if model in self.models else 0
            for name in mine[want:]:
                log.info("worker_dropped", name=name)
                self.supervisor.drop(name)
                del self.model_of[name]
            for _ in range(want - len(mine)):
                self._start(model)

    def _start(self, model: str) -> None:
        self._count += 1
        name = f"{model}.{self._count}"
        argv = (sys.executable, "-m", "workers.main", model, name)
        self.supervisor.keep(Process(name=name, argv=argv, env=self.environ))
        self.model_of[name] = model
        log.info("worker_started", name=name)

    def _running(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for model in self.model_of.values():
            counts[model] = counts.get(model, 0) + 1
        return counts

    def _died(self, death: Death) -> None:
        log.warning("worker_died", name=death.name, pid=death.pid, status=death.status, asked=death.asked)
        reap(self.mark)
        model = death.name.rpartition(".")[0]
        self.unburied.append((model, worker_id(self.host, death.name, death.pid)))

    def _bury(self) -> None:
        while self.unburied:
            model, worker = self.unburied[0]
            if self.store.run(Queue(model).tick(worker)).buried:
                self.store.run(fleet.remove_worker(model, worker))
                del self.unburied[0]

    def _attempt(self, step: Callable[[], None]) -> None:
        """One exchange with the store; while it is away the processes are tended all the same."""
        try:
            step()
        except (*AWAY, RedisError) as e:
            log.warning("store_away", error=repr(e))


def reap(mark: str) -> list[int]:
    """Kill the processes of our engines whose worker is gone; returns their ids."""
    ours = {process.pid: process for process in psutil.process_iter() if _marked(process, mark)}
    workers = {pid for pid, process in ours.items() if _is_worker(process)}
    killed = []
    for pid, process in ours.items():
        if pid in workers:
            continue  # one whose agent is gone hands back and ends by itself
        try:
            if not workers.isdisjoint(parent.pid for parent in process.parents()):
                continue
            process.kill()
        except psutil.Error:
            continue  # it has ended meanwhile
        log.warning("orphan_killed", pid=pid)
        killed.append(pid)
    return killed


def _marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark
    except psutil.Error:
        return False  # another user's, or gone


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "workers.main" in process.cmdline()
    except psutil.Error:
        return False


def room() -> int:
    """How many workers this machine holds: one a GPU."""
    return gpus() or CPU_ROOM


def _fixed(workers: str) -> dict[str, int]:
    """FOREBAY_WORKERS: "model=count,…"."""
    pairs = (one.partition("=") for one in workers.split(",") if one.strip())
    return {model.strip(): int(count or 1) for model, _, count in pairs}


def main() -> None:
    try:
        settings = read(os.environ)
        models = catalog.load(settings.catalog).only(settings.models)
        _fixed(settings.workers)
    except (BadSettings, catalog.BadCatalog, ValueError) as e:
        sys.exit(str(e))
    logs.set_up("host", settings.log_level)
    if settings.supervised:
        supervise.follow_parent()
    agent = Agent(settings, models, Store.connect(settings.redis_url), os.environ)

    def end(number: int, frame: FrameType | None) -> None:
        if agent.supervisor.ending:
            agent.supervisor.hurry()
        agent.supervisor.ending = True

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    agent.run()


if __name__ == "__main__":
    main()
