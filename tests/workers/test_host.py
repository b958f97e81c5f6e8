"""The host agent: real processes, trivial ones in the workers' place except where a worker itself matters."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
from redis.exceptions import ConnectionError as RedisConnectionError
from structlog.testing import capture_logs

from core import catalog, fleet
from core.catalog import Catalog, Model
from core.fleet import Host
from core.redis import Call, Store
from core.settings import Settings
from core.supervise import Backoff
from core.values import Caller, Request, Sampling, WorkerState
from tasks.queue import Queue, Task, generation
from tests.conftest import Clock, TimedStore
from workers.host import MARK, Agent, _fixed, reap, room
from workers.main import worker_id

#: How long a test waits for a real process, seconds. Only a failing test waits so long.
PATIENCE_S = 30.0
MODELS = Catalog({name: Model(name=name, context_tokens=100) for name in ("m", "n")})

#: Stands where `python -m workers.main` looks first: it says how it was started, and waits for its end.
TRIVIAL = """
import json, os, signal, sys
from pathlib import Path
path = Path(os.environ["HERE"], f"{sys.argv[2]}:{os.getpid()}")
new = Path(f"{path}.new")
new.write_text(json.dumps({"argv": sys.argv[1:], "env": dict(os.environ)}))
new.rename(path)
signal.pause()
"""

#: The same, with a process of its own that the death of its group does not end, as an engine's may not.
WITH_ENGINE = """
import os, signal, subprocess, sys
from pathlib import Path
engine = subprocess.Popen(["sleep", "1000"], start_new_session=True)
new = Path(os.environ["HERE"], "new")
new.write_text(str(engine.pid))
new.rename(Path(os.environ["HERE"], sys.argv[2]))
signal.pause()
"""

#: A model that takes its time, so that a kill finds it at work.
SLOW = """
[models.m]
tokenizer = "bytes"
context_tokens = 100
max_output_tokens = 50
step = { base_ms = 200 }
"""


class Away(TimedStore):
    """A store that can be taken away."""

    away = False

    def run(self, call: Call[Any]) -> Any:
        if self.away:
            raise RedisConnectionError("away")
        return super().run(call)


class Machine:
    """An agent under test, and the processes it runs."""

    def __init__(self, folder: Path, store: Store, clock: Clock, **settings: Any) -> None:
        self.folder = folder
        self.store = Away(store.client, clock)
        (folder / "workers").mkdir()
        (folder / "workers" / "__init__.py").touch()
        (folder / "workers" / "main.py").write_text(TRIVIAL)
        (folder / "said").mkdir()
        environ = {
            **os.environ,
            "PYTHONSAFEPATH": "1",
            "PYTHONPATH": str(folder),
            "HERE": str(folder / "said"),
            "DATABASE_URL": "postgresql://secret",
            "FOREBAY_PEPPER": "a secret that workers need not know",
        }
        self.agent = Agent(Settings(host_id="h", drain_s=5, **settings), MODELS, self.store, environ)
        self.now_s = 0.0

    def tend(self) -> None:
        """One step, a second after the last as far as the agent knows: each looks at the assignment."""
        self.now_s += 1
        self.agent.tend(self.now_s)

    def until(self, true: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := true()):
            assert time.monotonic() < deadline, "it never came true"
            self.tend()
            time.sleep(0.01)
        return found

    def pids(self) -> dict[str, int]:
        return self.agent.supervisor.pids()

    def said(self) -> dict[str, Any]:
        """What each process said of itself, by its name and process id."""
        found = [path for path in (self.folder / "said").iterdir() if path.suffix != ".new"]
        return {path.name: json.loads(path.read_text()) for path in found}

    def runs(self, *names: str) -> bool:
        """Exactly these run, and are past their start."""
        return set(self.pids()) == set(names) and {f"{n}:{pid}" for n, pid in self.pids().items()} <= set(self.said())


@pytest.fixture
def machine(tmp_path: Path, store: Store, clock: Clock) -> Iterator[Machine]:
    machine = Machine(tmp_path, store, clock)
    yield machine
    machine.agent.supervisor.stop()


# --- what runs


def test_what_is_missing_is_started_and_the_newest_of_too_many_are_dropped(machine: Machine, store: Store) -> None:
    store.run(fleet.assign("h", {"m": 3, "n": 1}))
    machine.until(lambda: len(machine.said()) == 4)
    names = list(machine.agent.model_of)
    mine = [name for name in names if name.startswith("m.")]
    before = machine.pids()

    store.run(fleet.assign("h", {"m": 1, "n": 1}))
    machine.until(lambda: len(machine.pids()) == 2)

    other = next(name for name in names if name.startswith("n."))
    assert machine.pids() == {mine[0]: before[mine[0]], other: before[other]}, "the oldest stay as they are"
    assert not any(psutil.pid_exists(before[name]) for name in mine[1:])


def test_a_shift_ends_one_models_worker_and_starts_anothers(machine: Machine, store: Store) -> None:
    store.run(fleet.assign("h", {"m": 1}))
    machine.until(lambda: machine.runs("m.1"))

    store.run(fleet.assign("h", {"n": 1}))
    machine.until(lambda: machine.runs("n.2"))

    assert [said["argv"] for said in machine.said().values() if said["argv"][0] == "n"] == [["n", "n.2"]]


def test_a_model_that_the_catalogue_does_not_have_is_not_started(machine: Machine, store: Store) -> None:
    store.run(fleet.assign("h", {"unheard of": 2, "m": 1}))

    machine.until(lambda: machine.runs("m.1"))
    machine.tend()

    assert set(machine.agent.model_of.values()) == {"m"}


def test_a_worker_that_died_is_started_again_under_its_name(machine: Machine, store: Store) -> None:
    store.run(fleet.assign("h", {"m": 1}))
    machine.until(lambda: machine.runs("m.1"))
    first = machine.pids()["m.1"]

    with capture_logs() as said:
        os.kill(first, signal.SIGKILL)
        machine.until(lambda: machine.runs("m.1") and machine.pids()["m.1"] != first)

    assert [(one["name"], one["pid"], one["status"]) for one in said if one["event"] == "worker_died"] == [
        ("m.1", first, -signal.SIGKILL)
    ]


def test_without_a_scaler_the_environment_says_what_runs(tmp_path: Path, store: Store, clock: Clock) -> None:
    """Until a scaler has spoken; an empty assignment is spoken too."""
    machine = Machine(tmp_path, store, clock, workers="m=2")
    machine.until(lambda: machine.runs("m.1", "m.2"))

    store.run(fleet.assign("h", {"m": 1}))
    machine.until(lambda: machine.runs("m.1"))
    store.run(fleet.assign("h", {}))
    machine.until(lambda: not machine.agent.supervisor.names())

    machine.agent.supervisor.stop()


def test_the_environments_words_are_models_and_counts() -> None:
    assert _fixed("") == {}
    assert _fixed("a=2, b ,org/c.d=0") == {"a": 2, "b": 1, "org/c.d": 0}
    with pytest.raises(ValueError):
        _fixed("a=many")


def test_the_host_says_that_it_is_there_and_what_it_runs(machine: Machine, store: Store) -> None:
    store.run(fleet.assign("h", {"m": 1}))

    machine.tend()

    assert store.run(fleet.hosts()) == [Host(host="h", room=room(), workers={"m": 1})]


def test_while_the_store_is_away_everything_goes_on(machine: Machine, store: Store) -> None:
    store.run(fleet.assign("h", {"m": 2}))
    machine.until(lambda: machine.runs("m.1", "m.2"))
    before = machine.pids()
    machine.store.away = True

    with capture_logs() as said:
        for _ in range(3):
            machine.tend()
        os.kill(before["m.2"], signal.SIGKILL)
        machine.until(lambda: machine.runs("m.1", "m.2") and machine.pids() != before)

    assert machine.pids()["m.1"] == before["m.1"]
    assert {one["event"] for one in said} == {"store_away", "worker_died"}


def test_workers_are_told_neither_the_database_nor_the_pepper(machine: Machine, store: Store) -> None:
    store.run(fleet.assign("h", {"m": 1}))

    machine.until(lambda: machine.runs("m.1"))
    [said] = machine.said().values()

    assert "secret" not in json.dumps(said["env"])
    assert not {"DATABASE_URL", "FOREBAY_PEPPER"} & set(said["env"])
    assert said["env"]["FOREBAY_SUPERVISED"] == "1"
    assert said["argv"] == ["m", "m.1"]


def test_an_agent_told_to_end_leaves_no_process(machine: Machine, store: Store) -> None:
    store.run(fleet.assign("h", {"m": 2}))
    machine.until(lambda: machine.runs("m.1", "m.2"))
    pids = machine.pids()

    machine.agent.supervisor.ending = True
    machine.agent.run()

    assert not any(psutil.pid_exists(pid) for pid in pids.values())
    assert machine.agent.unburied == []


# --- deaths


def claimed_by(machine: Machine, name: str) -> Queue:
    """The queue, one request of which a worker of this machine runs."""
    queue = Queue("m")
    worker = worker_id("h", name, machine.pids()[name])
    machine.store.run(queue.enqueue(Task(id="r", message=b"")))
    assert machine.store.run(queue.claim(worker, 1, lease_ms=60_000, nonce="n")).claims
    machine.store.run(fleet.announce_worker(fleet.Worker(worker=worker, host="h", model="m", state=WorkerState.READY)))
    return queue


def state(store: Store, queue: Queue) -> str:
    return store.run(queue.peek("r")).state


def test_a_death_is_told_to_the_queue_at_once(machine: Machine, store: Store) -> None:
    """The store's clock stands still, so no lease runs out here."""
    store.run(fleet.assign("h", {"m": 1}))
    machine.until(lambda: machine.runs("m.1"))
    queue = claimed_by(machine, "m.1")
    assert state(store, queue) == "running"

    os.kill(machine.pids()["m.1"], signal.SIGKILL)
    machine.until(lambda: state(store, queue) == "waiting")

    assert store.run(fleet.workers("m")) == []


def test_a_death_while_the_store_is_away_is_told_when_it_is_back(machine: Machine, store: Store) -> None:
    store.run(fleet.assign("h", {"m": 1}))
    machine.until(lambda: machine.runs("m.1"))
    queue = claimed_by(machine, "m.1")
    machine.store.away = True

    with capture_logs():
        os.kill(machine.pids()["m.1"], signal.SIGKILL)
        machine.until(lambda: machine.agent.unburied)
        machine.tend()
    assert state(store, queue) == "running"
    machine.store.away = False
    machine.tend()

    assert state(store, queue) == "waiting"
    assert machine.agent.unburied == []


def test_a_real_worker_is_known_to_the_queue_by_the_name_that_its_agent_gives_it(
    tmp_path: Path, valkey_url: str, valkey: redis.Redis
) -> None:
    """kill -9 of a worker in the middle of a request, under a lease of two minutes: it goes back at once."""
    path = tmp_path / "catalog.toml"
    path.write_text(
        '[models.m]\ntokenizer = "bytes"\ncontext_tokens = 100\nmax_output_tokens = 50\nstep = { base_ms = 200 }\n'
    )
    store = Store.connect(valkey_url)
    settings = Settings(
        host_id="h", redis_url=valkey_url, engine="scripted", catalog=path, lease_ms=120_000, drain_s=5, workers="m=1"
    )
    environ = {
        **os.environ,
        "REDIS_URL": valkey_url,
        "FOREBAY_HOST_ID": "h",
        "FOREBAY_ENGINE": "scripted",
        "FOREBAY_CATALOG": str(path),
        "FOREBAY_LEASE_MS": "120000",
    }
    agent, queue, now_s = Agent(settings, catalog.load(path), store, environ), Queue("m"), 0.0

    def until(true: Callable[[], Any]) -> Any:
        nonlocal now_s
        deadline = time.monotonic() + PATIENCE_S
        while not (found := true()):
            assert time.monotonic() < deadline, "it never came true"
            now_s += 1
            agent.tend(now_s)
            time.sleep(0.02)
        return found

    request = Request(
        id="r",
        model="m",
        caller=Caller(org_id="o", project_id="p", key_id="k"),
        gateway="",
        prompt_token_ids=[1],
        sampling=Sampling(max_tokens=90),
    )
    agent.supervisor.backoff = Backoff(first_s=3600, most_s=3600)  # nobody takes it up again
    try:
        until(lambda: [row for row in store.run(fleet.workers("m")) if row.state == "ready"])
        [victim] = store.run(fleet.workers("m"))
        store.run(queue.enqueue(generation(request)))
        until(lambda: state(store, queue) == "running")

        os.kill(victim.pid, signal.SIGKILL)
        until(lambda: state(store, queue) == "waiting")

        assert victim.worker == worker_id("h", "m.1", victim.pid)
        assert store.run(fleet.workers("m")) == []
    finally:
        agent.supervisor.stop()
        store.close()


# --- orphans


def engines(machine: Machine, *names: str) -> list[psutil.Process]:
    """The engine processes of these workers."""
    files = [machine.folder / "said" / name for name in names]
    machine.until(lambda: all(file.exists() for file in files))
    return [psutil.Process(int(file.read_text())) for file in files]


def marked(mark: str) -> psutil.Popen:
    """An engine process that nobody of ours stands behind: it lives in a session of its own, and hangs."""
    process = psutil.Popen(["sleep", "1000"], env={MARK: mark, "PATH": os.environ["PATH"]}, start_new_session=True)
    process.suspend()
    return process


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_what_a_dead_workers_engine_leaves_is_killed_before_another_is_started(machine: Machine, store: Store) -> None:
    (machine.folder / "workers" / "main.py").write_text(WITH_ENGINE)
    store.run(fleet.assign("h", {"m": 2}))
    orphan, other = engines(machine, "m.1", "m.2")
    orphan.suspend()  # what hangs cannot follow its parent into the grave
    (machine.folder / "said" / "m.1").unlink()

    with capture_logs():
        os.kill(machine.pids()["m.1"], signal.SIGKILL)
        [successor] = engines(machine, "m.1")

    assert is_gone(orphan)
    assert other.is_running() and successor.is_running(), "they have their workers"
    other.kill()
    successor.kill()


def test_an_agent_that_begins_kills_what_its_predecessors_engines_left(machine: Machine) -> None:
    orphan = marked(machine.agent.mark)
    machine.agent.supervisor.ending = True

    with capture_logs() as said:
        machine.agent.run()

    assert [one["pid"] for one in said if one["event"] == "orphan_killed"] == [orphan.pid]
    orphan.wait(5)


def test_only_what_carries_our_mark_is_killed(machine: Machine, tmp_path: Path) -> None:
    """Another host's on the same machine, another data folder's, and whatever carries none."""
    mark = machine.agent.mark
    others = [marked(other) for other in (f"other:{mark.partition(':')[2]}", f"h:{tmp_path}/other", "")]
    stranger = psutil.Popen(["sleep", "1000"], start_new_session=True)

    assert reap(mark) == []
    assert not any(map(is_gone, [*others, stranger]))

    for process in [*others, stranger]:
        process.kill()
        process.wait(5)


def test_a_worker_whose_agent_is_gone_is_left_to_end_by_itself(machine: Machine) -> None:
    """It hands back what it has, which a kill would not."""
    worker = subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.pause()", "workers.main"],
        env={**os.environ, MARK: machine.agent.mark},
        start_new_session=True,
    )

    assert reap(machine.agent.mark) == []

    worker.kill()
    worker.wait(5)
