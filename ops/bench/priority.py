"""`forebay bench priority`: how soon something urgent starts behind a long queue of something that is not.

Ours (the runner) beside Dramatiq's stock RedisBroker (its Worker, its default middleware), one after the other in the
same run, on one Valkey of their own. A worker with so many slots gets so many low jobs at once, each as long as the
next; while it works at them, urgent ones come one by one, whose place would be the end of the line. Ours are told
apart by class (`bulk`, `interactive`), Dramatiq's by the priority of their actors, on one queue both.

    urgent_start_ms    from before an urgent job's enqueue to its actor's first line: of the one that waited longest
    slot_remainder_ms  how long the first of the slots to be free would still be taken when that one was sent
    overtakes          low jobs that started between the sending and the start of that one
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dramatiq
import redis
from dramatiq.brokers.redis import RedisBroker

from core.redis import Store
from core.values import Class
from ops import stores
from ops.bench.platform import BenchFailed
from ops.bench.queue import MODEL, runner_on_a_thread
from ops.bench.report import Found, Say
from tasks.broker import QueueBroker

#: A job counts as under way while it has more than this left, seconds.
MARGIN_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Options:
    low: int = 400
    slots: int = 64
    job_s: float = 1.0
    urgent: int = 5


@dataclass
class Starts:
    """When each job was begun, by its number; low ones count from 0, urgent ones from -1 down."""

    job_s: float
    begun_s: dict[int, float] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def note(self, n: int) -> None:
        with self.changed:
            self.begun_s[n] = time.monotonic()
            self.changed.notify_all()

    def wait_for(self, begun: Callable[[], bool], limit_s: float) -> None:
        with self.changed:
            if not self.changed.wait_for(begun, limit_s):
                text = f"jobs did not start in {limit_s:.0f} s"
                raise BenchFailed(text)

    def is_running(self) -> bool:
        """A job is under way: on a busy machine all slots may be between two for a moment."""
        return any(begun_s + self.job_s > time.monotonic() + MARGIN_S for begun_s in self.begun_s.values())

    def remainder_ms(self, sent_s: float) -> float:
        """How long after `sent_s` the first running job ends."""
        ends_s = [begun_s + self.job_s for begun_s in self.begun_s.values() if begun_s <= sent_s]
        return 1000 * (min(end_s for end_s in ends_s if end_s > sent_s) - sent_s)

    def overtakes(self, n: int, sent_s: float) -> int:
        return sum(sent_s < begun_s < self.begun_s[n] for other, begun_s in self.begun_s.items() if other >= 0)


@dataclass
class Side:
    low: Callable[[int], Any]  #: send a job
    urgent: Callable[[int], Any]
    worker: Callable[[], Any]  #: a context in which one worker runs


def figures(options: Options, say: Say) -> Found:
    """Our figures, and Dramatiq's."""
    with tempfile.TemporaryDirectory(prefix="fb-", ignore_cleanup_errors=True) as folder:
        server = stores.start_valkey(Path(folder))
        try:
            say(f"Ours: {options.urgent} urgent jobs behind {options.low} low ones, {options.slots} at once")
            ours = _overtaken(_ours(server.url, options, starts := Starts(options.job_s)), starts, options)
            say("Dramatiq's RedisBroker: the same")
            peer = _overtaken(_stock(server.url, options, starts := Starts(options.job_s)), starts, options)
        finally:
            server.stop()
    return ours, {"dramatiq": peer}


def _overtaken(side: Side, starts: Starts, options: Options) -> dict[str, Any]:
    limit_s = 30 + 3 * options.job_s * options.low / options.slots
    sent: dict[int, tuple[float, float]] = {}
    with side.worker():
        for n in range(options.low):
            side.low(n)
        starts.wait_for(lambda: len(starts.begun_s) >= options.slots, limit_s)
        time.sleep(options.job_s / 2)
        for n in range(1, options.urgent + 1):
            starts.wait_for(starts.is_running, limit_s)
            sent_s = time.monotonic()
            side.urgent(-n)
            sent[-n] = sent_s, starts.remainder_ms(sent_s)
            time.sleep(options.job_s * 0.7)  # each at another moment of the slots' turns
        starts.wait_for(lambda: len(starts.begun_s) == options.low + options.urgent, limit_s)
    worst = max(sent, key=lambda n: starts.begun_s[n] - sent[n][0])
    sent_s, remainder_ms = sent[worst]
    return {
        "urgent_start_ms": round(1000 * (starts.begun_s[worst] - sent_s), 1),
        "slot_remainder_ms": round(remainder_ms, 1),
        "overtakes": starts.overtakes(worst, sent_s),
    }


def _ours(url: str, options: Options, starts: Starts) -> Side:
    broker = QueueBroker(Store.connect(url))

    @dramatiq.actor(broker=broker, queue_name=MODEL)
    async def job(n: int) -> None:
        starts.note(n)
        await asyncio.sleep(options.job_s)

    def send(n: int, cls: int) -> None:
        options_of: dict[str, Any] = {"class": cls}
        job.send_with_options(args=(n,), **options_of)

    return Side(
        low=lambda n: send(n, Class.BULK),
        urgent=lambda n: send(n, Class.INTERACTIVE),
        worker=lambda: runner_on_a_thread(url, broker, options.slots),
    )


def _stock(url: str, options: Options, starts: Starts) -> Side:
    pool = redis.BlockingConnectionPool.from_url(url, max_connections=options.slots + 16)
    broker = RedisBroker(client=redis.Redis(connection_pool=pool))  # type: ignore[no-untyped-call]

    @dramatiq.actor(broker=broker, queue_name=MODEL, priority=10)
    def low(n: int) -> None:
        starts.note(n)
        time.sleep(options.job_s)

    @dramatiq.actor(broker=broker, queue_name=MODEL, priority=0)
    def urgent(n: int) -> None:
        starts.note(n)
        time.sleep(options.job_s)

    @contextmanager
    def worker() -> Iterator[None]:
        running = dramatiq.Worker(broker, worker_threads=options.slots)
        running.start()
        try:
            yield
        finally:
            running.stop()

    return Side(low=low.send, urgent=urgent.send, worker=worker)
