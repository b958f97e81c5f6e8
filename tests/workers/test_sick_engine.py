"""A real engine process that is killed, and one that hangs: what ran there is finished elsewhere, token by token.

The engine is vLLM with the timed step; another worker is scripted: the same request has the same tokens in both.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import uuid6

from core import catalog, fleet
from core.redis import Store
from core.settings import Settings
from core.stream.log import Output, saved
from core.supervise import Death
from core.values import Caller, Request, Sampling, WorkerState
from ops import stores
from tasks.queue import Queue, generation
from workers.host import MARK, Agent
from workers.scripted import script_seed, scripted_tokens
from workers.watchdog import HUNG_GPU_S

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("FOREBAY_DATA", ROOT / ".forebay")).resolve()
#: How long a test waits for an engine to start on two busy cores, seconds.
PATIENCE_S = 150.0
#: Three seconds of steps, and the engine is ill after so many.
REQUESTS, TOKENS, STEPS = 5, 200, 20
CATALOG = """
[models.m]
weights = "local:smollm2-135m-instruct"
context_tokens = 2048
max_output_tokens = 1024
slots = 8
step = { base_ms = 15 }
"""

pytestmark = pytest.mark.timeout(400)


class Site:
    """A host whose agent runs one timed worker, a scripted worker beside it, and a gateway that only watches."""

    def __init__(self, folder: Path, url: str) -> None:
        (folder / "catalog.toml").write_text(CATALOG)
        self.environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")},
            "REDIS_URL": url,
            "FOREBAY_DATA": str(DATA),
            "FOREBAY_CATALOG": str(folder / "catalog.toml"),
            "FOREBAY_HOST_ID": "sick",
            "FOREBAY_ENGINE": "timed",
            "FOREBAY_DRAIN_S": "0",
        }
        self.store, self.queue = Store.connect(url), Queue("m")
        settings = Settings(host_id="sick", redis_url=url, engine="timed", data=DATA, drain_s=0, workers="m=1")
        self.agent = Agent(settings, catalog.load(folder / "catalog.toml"), self.store, self.environ)
        self.deaths: list[Death] = []
        self._mourn, self.agent.supervisor.died = self.agent.supervisor.died, self._died
        self.running = threading.Thread(target=self.agent.run)
        self.running.start()
        well = {**self.environ, "FOREBAY_ENGINE": "scripted", "FOREBAY_HOST_ID": "well"}
        self.second = psutil.Popen([sys.executable, "-m", "workers.main", "m", "second"], env=well, cwd=ROOT)

    def _died(self, death: Death) -> None:
        self.deaths.append(death)
        self._mourn(death)

    def end(self) -> None:
        self.agent.supervisor.ending = True
        self.second.terminate()
        self.running.join(60)
        self.second.wait(20)
        self.store.close()

    def until(self, true: Callable[[], Any], within_s: float = PATIENCE_S) -> Any:
        """Wait for something, and watch as a gateway does."""
        deadline = time.monotonic() + within_s
        while not (found := true()):
            assert time.monotonic() < deadline, "it never came true"
            self.store.run(self.queue.watch("g", []))
            time.sleep(0.05)
        return found

    def rows(self, host: str) -> list[fleet.Worker]:
        """Its workers that live."""
        rows = self.store.run(fleet.workers("m"))
        return [row for row in rows if row.host == host and psutil.pid_exists(row.pid)]

    def ready(self, host: str) -> fleet.Worker:
        rows = self.until(lambda: [row for row in self.rows(host) if row.state is WorkerState.READY])
        found: fleet.Worker = rows[0]
        return found

    def ask(self, worker: fleet.Worker) -> list[Request]:
        """Requests that prefer this worker, run there, and have delivered something."""
        requests = [
            Request(
                id=str(uuid6.uuid7()),
                model="m",
                caller=Caller(org_id="o", project_id="p", key_id="k"),
                gateway="g",
                prompt_token_ids=list(range(1000, 1020)),
                sampling=Sampling(max_tokens=TOKENS, ignore_eos=True),
                preferred=(worker.worker,),
                steal_ms=int(PATIENCE_S * 1000),
            )
            for _ in range(REQUESTS)
        ]
        for request in requests:
            self.store.run(self.queue.enqueue(generation(request)))
        self.until(lambda: self.store.client.xlen(f"{self.queue.prefix}log:{worker.worker}") > STEPS)
        assert self.claims(worker.worker) == {request.id for request in requests}
        return requests

    def claims(self, worker: str) -> set[str]:
        pairs = [claim.decode().split("|") for claim in self.store.client.zrange(f"{self.queue.prefix}claims", 0, -1)]
        return {request_id for name, request_id in pairs if name == worker}

    def all_run(self, requests: list[Request], attempt: int) -> bool:
        seen = [self.store.run(self.queue.peek(request.id)) for request in requests]
        return all((one.state, one.attempt) == ("running", attempt) for one in seen)

    def finished(self, requests: list[Request]) -> list[tuple[int, str, int]]:
        """Attempt, outcome and tokens of each, once all have ended."""

        def endings() -> list[Any]:
            found = [self.store.run(self.queue.peek(request.id)).ending for request in requests]
            return [] if None in found else found

        return [(one.attempt, one.outcome, one.usage.output_tokens) for one in self.until(endings)]

    def tokens(self, request: Request) -> list[int]:
        output = Output(request.id)
        output.add(self.store.run(saved("m", request.id)))
        return list(output.tokens)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="fb-", ignore_cleanup_errors=True) as folder:
        valkey = stores.start_valkey(Path(folder))
        site = Site(Path(folder), valkey.url)
        try:
            yield site
        finally:
            site.end()
            valkey.stop()


def engine_of(worker: fleet.Worker) -> psutil.Process:
    """vLLM's engine process, which runs the scheduler and the step."""
    children = psutil.Process(worker.pid).children(recursive=True)
    return next(child for child in children if child.name().startswith("VLLM::Engin"))


@pytest.mark.parametrize(
    ("ill", "within_s"), [(signal.SIGKILL, 5.0), (signal.SIGSTOP, 2 * HUNG_GPU_S)], ids=["killed", "hung"]
)
def test_what_ran_on_an_engine_that_died_or_hangs_is_finished_elsewhere(
    site: Site, ill: signal.Signals, within_s: float
) -> None:
    """Every request gets its second attempt on the other worker, every token once, and one ending; the worker ends
    with 1, nothing of its engine stays, and its agent starts another."""
    site.ready("well")
    worker, before = site.ready("sick"), len(site.deaths)
    known = {row.pid for row in site.rows("sick")}
    engine = engine_of(worker)
    assert engine.environ()[MARK] == site.agent.mark, "the reaper would know it"
    requests = site.ask(worker)

    began_s = time.monotonic()
    engine.send_signal(ill)
    site.until(lambda: site.all_run(requests, 2))
    took_s = time.monotonic() - began_s

    assert site.finished(requests) == [(2, "length", TOKENS)] * REQUESTS
    for request in requests:
        assert site.tokens(request) == scripted_tokens(script_seed(request), TOKENS)
    site.until(lambda: len(site.deaths) > before)
    assert (site.deaths[before].pid, site.deaths[before].status) == (worker.pid, 1)
    assert not engine.is_running()
    print(f"{ill.name}: taken up by another worker after {took_s:.2f} s")
    assert took_s < within_s
    site.until(lambda: {row.pid for row in site.rows("sick")} - known)
