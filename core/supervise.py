"""The one process supervisor: keeps named processes running, ends them gently, leaves nothing behind.

Used by `forebay up` and by the host agent. Each process leads a session of its own, so that

- SIGTERM goes to the leader only: a worker drains, and its engine process is not torn away beneath it;
- after the drain limit SIGKILL goes to the whole group, and whatever a dead leader left in its group is killed too.

A process that dies is started again after a pause that doubles while it keeps dying young. `tend()` is one step of
all that; `run()` is the loop round it. A supervisor that is itself killed says so by closing a pipe, which is the
standard input of everything it started: `follow_parent()` on the other side ends the process then.
"""

from __future__ import annotations

import os
import select
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

#: How soon `run` sees a death, or that a drain is over, seconds.
LOOK_S = 0.1
#: What a process may take to end on top of its own drain limit, or after it lost its parent, seconds.
GRACE_S = 5.0
#: The same for one that was told twice, seconds.
HURRY_S = 2.0


class BadProcfile(Exception):
    """A line of the Procfile is not `name: command`."""


@dataclass(frozen=True, kw_only=True)
class Process:
    """What is to run."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    log: Path | None = None  #: standard output and error are appended here; none: they are ours


@dataclass(frozen=True, kw_only=True)
class Death:
    """A leader ended; `status` is as in subprocess: negative for a signal."""

    name: str
    pid: int
    status: int
    asked: bool  #: we had told it to stop


@dataclass(frozen=True, kw_only=True)
class Backoff:
    """How long to wait before a process that died is started again."""

    first_s: float = 0.2
    most_s: float = 30.0
    steady_s: float = 30.0  #: who lived this long starts again as if it had never died

    def pause_s(self, deaths: int) -> float:
        """The pause after so many deaths in a row."""
        return min(self.first_s * 2.0 ** min(deaths - 1, 32), self.most_s)


@dataclass(kw_only=True)
class _Child:
    """A process that is wanted, or not yet rid of."""

    process: Process
    wanted: bool = True
    popen: subprocess.Popen[bytes] | None = None  #: none: waiting for `start_at`
    start_at: float = 0.0
    started_at: float = 0.0
    kill_at: float | None = None  #: set once it was told to stop
    deaths: int = 0  #: in a row, each young


class Supervisor:
    """Times are monotonic seconds of `clock`, which only tests change. Not thread-safe: one thread tends.

    `drain_s` is when SIGKILL follows SIGTERM: the drain limit that the processes know, plus GRACE_S for its last step.
    """

    def __init__(
        self,
        *,
        drain_s: float,
        died: Callable[[Death], None] = lambda death: None,
        backoff: Backoff | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.drain_s = drain_s
        self.died = died
        self.backoff = backoff or Backoff()
        self.clock = clock
        self.ending = False  #: set by anyone, a signal handler too (an Event could deadlock there): `run` ends
        self._children: dict[str, _Child] = {}
        # The write end is never inherited: when this process dies, however, every reader sees the end of the file.
        self._leash, self._hand = os.pipe()

    def keep(self, process: Process) -> None:
        """Have this process running from the next `tend` on.

        Raises:
          ValueError: for a name in use, also by a process that is still draining.
        """
        if process.name in self._children:
            raise ValueError(f"{process.name} is already kept")
        self._children[process.name] = _Child(process=process)

    def drop(self, name: str) -> None:
        """Tell a process to stop, and do not start it again. `tend` sees it out; unknown names are gone already."""
        child = self._children.get(name)
        if child is None or not child.wanted:
            return
        child.wanted = False
        if child.popen is None:
            del self._children[name]
        else:
            child.kill_at = self.clock() + self.drain_s
            # Not Popen.send_signal, which waits for a child that has just died and so loses its group.
            os.kill(child.popen.pid, signal.SIGTERM)

    def pids(self) -> dict[str, int]:
        """The leaders that run now, those that drain included."""
        return {name: child.popen.pid for name, child in self._children.items() if child.popen is not None}

    def names(self) -> set[str]:
        """Everything kept or still draining."""
        return set(self._children)

    def tend(self) -> bool:
        """One step: bury the dead, kill who outstayed the drain limit, start what is due. True if anything is kept."""
        for child in list(self._children.values()):
            if child.popen is not None and _has_ended(child.popen):
                self._bury(child)
            elif child.kill_at is not None and self.clock() >= child.kill_at:
                child.kill_at = None
                _kill_group(child)
            elif child.popen is None and child.wanted and self.clock() >= child.start_at:
                self._start(child)
        return bool(self._children)

    def run(self) -> None:
        """Tend until `ending` is set; then stop everything."""
        while not self.ending:
            self.tend()
            time.sleep(LOOK_S)
        self.stop()

    def stop(self, *names: str) -> None:
        """Stop these processes (without names: all) and return when nothing of them is left."""
        leaving = set(names) or self.names()
        for name in leaving:
            self.drop(name)
        while self.tend() and leaving & self.names():
            time.sleep(LOOK_S / 5)

    def hurry(self) -> None:
        """Tell what drains a second time, which to our own processes means "at once", and kill it soon after.

        What is stopped from now on has no longer either. Safe in a signal handler.
        """
        self.drain_s = HURRY_S
        for child in self._children.values():
            if child.popen is not None and child.kill_at is not None:
                child.kill_at = self.clock() + HURRY_S
                os.kill(child.popen.pid, signal.SIGTERM)

    def _start(self, child: _Child) -> None:
        process = child.process
        log = process.log.open("ab") if process.log else None
        try:
            child.popen = subprocess.Popen(
                process.argv, env=process.env, stdin=self._leash, stdout=log, stderr=log, start_new_session=True
            )
            child.started_at = self.clock()
        except OSError as e:
            # A command that cannot be started counts as one that died at once, with the shell's status for it.
            if log is not None:
                log.write(f"{process.argv[0]}: {e}\n".encode())
            self._postpone(child)
            self.died(Death(name=process.name, pid=0, status=127, asked=False))
        finally:
            if log is not None:
                log.close()

    def _bury(self, child: _Child) -> None:
        """The leader is dead and not yet waited for, so its group's number cannot have passed to a stranger."""
        assert child.popen is not None
        _kill_group(child)
        status = child.popen.wait()
        pid, child.popen = child.popen.pid, None
        if child.wanted:
            if self.clock() - child.started_at >= self.backoff.steady_s:
                child.deaths = 0
            self._postpone(child)
        else:
            del self._children[child.process.name]
        self.died(Death(name=child.process.name, pid=pid, status=status, asked=not child.wanted))

    def _postpone(self, child: _Child) -> None:
        child.deaths += 1
        child.start_at = self.clock() + self.backoff.pause_s(child.deaths)


def _has_ended(popen: subprocess.Popen[bytes]) -> bool:
    """Whether a child has ended, leaving it to be waited for."""
    return os.waitid(os.P_PID, popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill_group(child: _Child) -> None:
    assert child.popen is not None
    try:
        os.killpg(child.popen.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # a zombie alone is a group without members on some kernels


def follow_parent(grace_s: float = GRACE_S) -> None:
    """End this process when the supervisor that started it is gone. Call it when FOREBAY_SUPERVISED is set.

    SIGTERM first, as the supervisor would have; after `grace_s` the whole group is killed. That is shorter than a
    drain: an orphan is watched by nobody, and its successor needs the GPU. Under gevent, call it before or after
    patching: both wait for the pipe without blocking.
    """
    threading.Thread(target=_follow, args=(grace_s,), name="follow-parent", daemon=True).start()


def _follow(grace_s: float) -> None:
    select.select([0], [], [])  # nothing is ever written: readable means closed
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    # Only a leader's group is its own; in somebody else's, end this process alone.
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def procfile(text: str) -> dict[str, tuple[str, ...]]:
    """The commands of a Procfile by name, in its order.

    Raises:
      BadProcfile: naming the line.
    """
    commands: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, colon, command = line.partition(":")
        words = _words(command)
        if not colon or not name.strip().isidentifier() or not words:
            raise BadProcfile(f"line {number}: expected `name: command`, found {line.strip()!r}")
        if name.strip() in commands:
            raise BadProcfile(f"line {number}: {name.strip()} is there twice")
        commands[name.strip()] = words
    return commands


def _words(command: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(command))
    except ValueError:
        return ()


def with_python(argv: Sequence[str], interpreter: str) -> tuple[str, ...]:
    """A Procfile's `python` is whatever is current; ours is the one with our packages."""
    return (interpreter, *argv[1:]) if argv[0] in ("python", "python3") else tuple(argv)
