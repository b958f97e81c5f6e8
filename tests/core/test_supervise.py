"""The supervisor, with real processes and, where time matters, a clock under the test's hand."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from core.supervise import Backoff, BadProcfile, Death, Process, Supervisor, procfile, with_python

#: How long a test waits for a real process, seconds. Only a failing test waits so long.
PATIENCE_S = 20.0


class Now:
    """A monotonic clock that stands still."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Bench:
    """A supervisor under test, and what it said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = Now()
        self.deaths: list[Death] = []
        self.supervisor = Supervisor(
            drain_s=5.0,
            died=self.deaths.append,
            backoff=Backoff(first_s=1.0, most_s=8.0, steady_s=60.0),
            clock=self.now,
        )

    def shell(self, script: str, name: str = "p") -> None:
        env = os.environ | {"HERE": str(self.folder)}
        self.supervisor.keep(Process(name=name, argv=("bash", "-c", script), env=env, log=self.folder / f"{name}.log"))

    def until(self, true: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not true():
            assert time.monotonic() < deadline, "it never came true"
            self.supervisor.tend()
            time.sleep(0.005)

    def read(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    def number(self, name: str) -> int:
        """A process id that a script wrote to a file."""
        self.until(lambda: self.read(name).endswith("\n"))
        return int(self.read(name))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    for name in bench.supervisor.names():
        bench.supervisor.drop(name)
    bench.now.now_s += 1000.0
    bench.supervisor.stop()


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_dead_process_is_started_again_and_its_death_reported(bench: Bench) -> None:
    """`kill -9` of a leader: the callback gets name, pid and signal; after the pause there is a new pid."""
    bench.shell("sleep 1000")
    bench.supervisor.tend()
    first = bench.supervisor.pids()["p"]

    os.kill(first, signal.SIGKILL)
    bench.until(lambda: bench.deaths)
    bench.now.now_s += 1.0
    bench.supervisor.tend()

    assert bench.deaths == [Death(name="p", pid=first, status=-signal.SIGKILL, asked=False)]
    assert bench.supervisor.pids()["p"] != first


def test_the_pause_doubles_while_a_process_dies_young(bench: Bench) -> None:
    """With first_s=1 and most_s=8 the pauses are 1, 2, 4, 8, 8 seconds, exactly."""
    bench.shell("exit 3")
    pauses = []

    for _ in range(5):
        bench.supervisor.tend()
        bench.until(lambda: not bench.supervisor.pids())
        died_s = bench.now.now_s
        while not bench.supervisor.pids():
            bench.now.now_s += 0.5
            bench.supervisor.tend()
        pauses.append(bench.now.now_s - died_s)

    assert pauses == [1.0, 2.0, 4.0, 8.0, 8.0]
    assert {death.status for death in bench.deaths} == {3}


def test_a_process_that_lived_long_starts_again_as_if_it_had_never_died(bench: Bench) -> None:
    """After steady_s of life the next pause is the first one again."""
    bench.shell("test -f $HERE/long && exec sleep 1000; exit 1")
    for pause_s in (1.0, 2.0, 4.0):
        bench.supervisor.tend()
        bench.until(lambda: not bench.supervisor.pids())
        bench.now.now_s += pause_s
    (bench.folder / "long").touch()
    bench.supervisor.tend()

    bench.now.now_s += 60.0
    os.kill(bench.supervisor.pids()["p"], signal.SIGKILL)
    bench.until(lambda: not bench.supervisor.pids())

    bench.now.now_s += 1.0
    bench.supervisor.tend()
    assert bench.supervisor.pids()


def test_a_command_that_cannot_start_dies_like_any_other(bench: Bench) -> None:
    """A missing program is reported with the shell's status 127, and tried again after the pause."""
    bench.supervisor.keep(Process(name="p", argv=("/nowhere/at-all",), log=bench.folder / "p.log"))

    bench.supervisor.tend()
    bench.supervisor.tend()

    assert bench.deaths == [Death(name="p", pid=0, status=127, asked=False)]
    assert "/nowhere/at-all" in bench.read("p.log")


CHILD = "(trap 'echo term >> $HERE/child.said' TERM; echo $BASHPID > $HERE/child; while :; do sleep 0.02; done) & "


def test_term_reaches_the_leader_only(bench: Bench) -> None:
    """The leader drains while its child, like vLLM's engine process, hears nothing; then both are gone."""
    bench.shell(CHILD + "trap 'echo drained > $HERE/leader.said; exit 0' TERM; echo $$ > $HERE/leader; wait")
    child = bench.number("child")
    bench.number("leader")

    bench.supervisor.stop()

    assert bench.read("leader.said") == "drained\n"
    assert bench.read("child.said") == ""
    bench.until(lambda: not alive(child))
    assert [(death.status, death.asked) for death in bench.deaths] == [(0, True)]


def test_who_outstays_the_drain_limit_is_killed_with_its_whole_group(bench: Bench) -> None:
    """A leader that ignores SIGTERM has until the limit, and not a moment less."""
    bench.shell(CHILD + "trap '' TERM; echo $$ > $HERE/leader; while :; do sleep 0.02; done")
    child, leader = bench.number("child"), bench.number("leader")

    bench.supervisor.drop("p")
    bench.now.now_s += 4.9
    bench.supervisor.tend()
    before_the_limit = alive(leader)
    bench.now.now_s += 0.1
    bench.until(lambda: not bench.supervisor.names())

    assert before_the_limit
    bench.until(lambda: not alive(leader) and not alive(child))
    assert [death.status for death in bench.deaths] == [-signal.SIGKILL]


def test_who_is_told_twice_ends_at_once(bench: Bench) -> None:
    """The second SIGTERM comes at once; who ignores that too is killed two seconds later, whatever the limit was."""
    bench.shell("trap 'echo term >> $HERE/said' TERM; echo $$ > $HERE/leader; while :; do sleep 0.02; done")
    leader = bench.number("leader")
    bench.supervisor.drop("p")
    bench.until(lambda: bench.read("said") == "term\n")

    bench.supervisor.hurry()
    bench.until(lambda: bench.read("said") == "term\nterm\n")
    bench.now.now_s += 2.0
    bench.until(lambda: not bench.supervisor.names())

    assert not alive(leader)


def test_what_a_dead_leader_leaves_in_its_group_is_killed(bench: Bench) -> None:
    """An engine process does not outlive its killed worker, which would keep the GPU's memory."""
    bench.shell(CHILD + "echo $$ > $HERE/leader; wait")
    child, leader = bench.number("child"), bench.number("leader")

    os.kill(leader, signal.SIGKILL)

    bench.until(lambda: bench.deaths and not alive(child))


def test_the_buried_are_no_zombies(bench: Bench) -> None:
    """Every child is waited for: nothing of it is left in the process table."""
    for name in ("a", "b", "c"):
        bench.shell("exit 0", name)
    bench.supervisor.tend()
    pids = list(bench.supervisor.pids().values())

    bench.until(lambda: len(bench.deaths) == 3)

    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


def test_stopping_one_process_leaves_the_others_running(bench: Bench) -> None:
    """`stop("web")` waits for that one alone; a stopped name may be kept again."""
    bench.shell("exec sleep 1000", "web")
    bench.shell("exec sleep 1000", "worker")
    bench.supervisor.tend()

    bench.supervisor.stop("web")

    assert set(bench.supervisor.pids()) == {"worker"}
    bench.shell("exec sleep 1000", "web")


SUPERVISOR = """
import os, sys
from core.supervise import Process, Supervisor
supervisor = Supervisor(drain_s=0.5)
child = "import os, signal, sys, time; from core.supervise import follow_parent; follow_parent(grace_s=0.5); " \\
        "signal.signal(signal.SIGTERM, signal.SIG_IGN if sys.argv[1] == 'deaf' else signal.SIG_DFL); " \\
        "os.write(1, str(os.getpid()).encode() + bytes([10])); time.sleep(1000)"
for name in ("hears", "deaf"):
    supervisor.keep(Process(name=name, argv=(sys.executable, "-c", child, name)))
supervisor.run()
"""


def test_kill_9_of_the_supervisor_leaves_no_process(tmp_path: Path) -> None:
    """Nobody can react to SIGKILL, so the children follow: by SIGTERM, and the deaf one by SIGKILL after its limit."""
    root = Path(__file__).resolve().parents[2]
    supervisor = subprocess.Popen([sys.executable, "-c", SUPERVISOR], stdout=subprocess.PIPE, cwd=root)
    assert supervisor.stdout is not None
    children = [int(supervisor.stdout.readline()) for _ in range(2)]

    supervisor.kill()
    supervisor.wait()
    rest = supervisor.stdout.read()  # ends when the last child has closed it

    assert rest == b""
    deadline = time.monotonic() + PATIENCE_S
    while any(map(alive, children)):
        assert time.monotonic() < deadline, "a process outlived its supervisor"
    supervisor.stdout.close()


def test_a_procfile_is_read_in_its_order() -> None:
    """Comments and blank lines say nothing; quotes are the shell's."""
    commands = procfile("# who runs\nweb: python -m web.serve\n\nworker: nice 'a b'\n")

    assert commands == {"web": ("python", "-m", "web.serve"), "worker": ("nice", "a b")}
    assert list(commands) == ["web", "worker"]
    assert with_python(commands["web"], "/venv/python") == ("/venv/python", "-m", "web.serve")


@pytest.mark.parametrize("line", ["web", "web:", ": python", "a b: c", "web: 'open", "web: x\nweb: y"])
def test_a_bad_procfile_line_is_named(line: str) -> None:
    with pytest.raises(BadProcfile, match=r"line [12]: "):
        procfile(line)
