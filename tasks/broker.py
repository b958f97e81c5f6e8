"""A Dramatiq broker over the queue (tasks/queue.py): one Dramatiq queue is one model's queue.

Generations run under `tasks.runner`; Dramatiq's own Worker also runs on this broker, for actors that are CPU work.
There is no global broker: actors are declared on one that is handed in.

What differs from Dramatiq's RedisBroker: an enqueue may be repeated (the message id is the queue's id), priorities
hold across processes (`class` in a message's options), nothing is prefetched past free threads, a dead worker's
messages come back within its lease.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterable
from typing import Any

import dramatiq
from dramatiq.broker import Broker, Consumer, MessageProxy
from dramatiq.errors import ConnectionClosed, QueueJoinTimeout, QueueNotFound, RateLimitExceeded
from dramatiq.message import Message
from dramatiq.middleware import Callbacks, Middleware, Pipelines, Retries, TimeLimit

from core.redis import AWAY, Call, Store, command
from core.values import Class, Outcome, Usage
from tasks.queue import Claim, Queue, Task

#: Leases of Dramatiq's own workers, ms. Their consumers beat on every look at the queue.
LEASE_MS = 10_000
#: Longest a consumer waits for a message before it lets its worker look around, seconds.
IDLE_S = 1.0


def jobs_middleware() -> list[Middleware]:
    """What CPU actors need; Dramatiq's defaults retry twenty times over seven days, which no job of ours should."""
    return [TimeLimit(), Callbacks(), Pipelines(), Retries(max_retries=3, max_backoff=60_000)]


class QueueBroker(Broker):
    """Every message is a task on the queue named by its `queue_name`."""

    def __init__(self, store: Store, *, middleware: list[Middleware] | None = None) -> None:
        super().__init__(middleware=middleware if middleware is not None else [])
        self.store = store
        self.queues: dict[str, Queue] = {}

    def declare_queue(self, queue_name: str) -> None:
        if queue_name not in self.queues:
            self.emit_before("declare_queue", queue_name)
            self.queues[queue_name] = Queue(queue_name)
            self.emit_after("declare_queue", queue_name)

    def declare_actor(self, actor: dramatiq.Actor[Any, Any]) -> None:
        self.emit_before("declare_actor", actor)
        self.declare_queue(actor.queue_name)
        self.actors[actor.actor_name] = actor
        self.emit_after("declare_actor", actor)

    def queue(self, queue_name: str) -> Queue:
        try:
            return self.queues[queue_name]
        except KeyError:
            raise QueueNotFound(queue_name) from None  # type: ignore[no-untyped-call]

    def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        """Put a message on its queue. Repeating it is safe; a retry of Dramatiq's is another id."""
        self.emit_before("enqueue", message, delay)
        queue = self.queue(message.queue_name)
        task = Task(
            id=_task_id(message),
            message=message.encode(),
            cls=message.options.get("class", Class.DEFAULT),
            tenant=message.options.get("tenant", "-"),
            delay_ms=delay or 0,
        )
        accepted = self._run(queue.enqueue(task))
        if accepted.refused:
            full = f"queue {message.queue_name} is {accepted.status} ({accepted.waiting} wait)"
            raise RateLimitExceeded(full)  # type: ignore[no-untyped-call]
        self.emit_after("enqueue", message, delay)
        return message

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 30000) -> Consumer:
        return QueueConsumer(self, self.queue(queue_name), prefetch)

    def get_declared_queues(self) -> set[str]:
        return set(self.queues)

    def get_declared_delay_queues(self) -> set[str]:
        return set()  # delayed tasks wait in the queue itself

    def flush(self, queue_name: str) -> None:
        queue = self.queue(queue_name)
        self._run(command("DEL", *queue.keys, reply=int))

    def flush_all(self) -> None:
        for queue_name in self.queues:
            self.flush(queue_name)

    def join(self, queue_name: str, *, timeout: int | None = None) -> None:
        """Wait until nothing waits or runs.

        Raises:
          QueueJoinTimeout: after `timeout` ms.
        """
        deadline = None if timeout is None else time.monotonic() + timeout / 1000
        while True:
            depth = self._run(self.queue(queue_name).tick())
            delayed = self._run(command("ZCARD", self.queue(queue_name).prefix + "delays", reply=int))
            if not any(depth.waiting) and not depth.running and not delayed:
                return
            if deadline is not None and time.monotonic() > deadline:
                raise QueueJoinTimeout(queue_name)  # type: ignore[no-untyped-call]
            time.sleep(0.02)

    def _run(self, call: Call[Any]) -> Any:
        try:
            return self.store.run(call)
        except AWAY as e:
            raise ConnectionClosed(e) from None  # type: ignore[no-untyped-call]


def _task_id(message: Message[Any]) -> str:
    """Dramatiq's retries re-enqueue under the same message id while it runs: each retry is a task of its own."""
    retries = message.options.get("retries", 0)
    return f"{message.message_id}.{retries}" if retries else str(message.message_id)


class _Message(MessageProxy):
    """A message with the claim it came by."""

    def __init__(self, message: Message[Any], claim: Claim) -> None:
        super().__init__(message)
        self.claim = claim


class QueueConsumer(Consumer):
    """Dramatiq's Worker reads here, in one thread, and acknowledges from its worker threads."""

    def __init__(self, broker: QueueBroker, queue: Queue, prefetch: int) -> None:
        self.broker, self.queue, self.prefetch = broker, queue, prefetch
        self.worker = "d-" + secrets.token_hex(6)
        self.claims: dict[str, Claim] = {}
        self.ready: list[_Message] = []
        self.lock = threading.Lock()
        self.beat_s = 0.0
        self.nonce = ""

    def __next__(self) -> MessageProxy | None:
        self._beat()
        if not self.ready:
            self._claim()
        return self.ready.pop(0) if self.ready else None

    def _claim(self) -> None:
        with self.lock:
            room = self.prefetch - len(self.claims)
        if room <= 0:
            time.sleep(0.002)  # full: Dramatiq's Worker asks again at once
            return
        self.nonce = self.nonce or secrets.token_hex(8)
        claimed = self.broker._run(self.queue.claim(self.worker, room, lease_ms=LEASE_MS, nonce=self.nonce))
        self.nonce = ""
        for claim in claimed.claims:
            self._take(claim)
        if not claimed.claims:
            wait_s = IDLE_S if claimed.due_ms < 0 else min(max(claimed.due_ms / 1000, 0.001), IDLE_S)
            # Shorter than the client's own time-out, so that an empty queue is not taken for a lost store.
            self.broker._run(command("BZPOPMIN", self.queue.wake_key, min(wait_s, 0.5), reply=bool))

    def _take(self, claim: Claim) -> None:
        with self.lock:
            self.claims[claim.id] = claim
        try:
            self.ready.append(_Message(Message.decode(claim.message), claim))
        except (dramatiq.errors.DecodeError, KeyError, TypeError):
            self._finish(claim, Outcome.FAILED, "its task cannot be read", dead=True)

    def _beat(self) -> None:
        now_s = time.monotonic()
        if now_s - self.beat_s < LEASE_MS / 1000 / 4:
            return
        with self.lock:
            claims = list(self.claims.values())
        self.broker._run(self.queue.beat(self.worker, claims, lease_ms=LEASE_MS))
        self.beat_s = now_s

    def _finish(self, claim: Claim, outcome: Outcome, message: str = "", *, dead: bool = False) -> None:
        self.broker._run(self.queue.finish(self.worker, claim, outcome, Usage(), message, dead=dead))
        with self.lock:
            self.claims.pop(claim.id, None)

    def ack(self, message: MessageProxy) -> None:
        assert isinstance(message, _Message)
        self._finish(message.claim, Outcome.COMPLETED)

    def nack(self, message: MessageProxy) -> None:
        assert isinstance(message, _Message)
        self._finish(message.claim, Outcome.FAILED, "its actor failed", dead=True)

    def requeue(self, messages: Iterable[MessageProxy]) -> None:
        claims = [message.claim for message in messages if isinstance(message, _Message)]
        self.broker._run(self.queue.hand_back(self.worker, claims, "its worker does not run it"))
        with self.lock:
            for claim in claims:
                self.claims.pop(claim.id, None)

    def close(self) -> None:
        with self.lock:
            left = list(self.claims.values())
        self.broker._run(self.queue.hand_back(self.worker, left, "its worker was shut down"))
        self.broker._run(self.queue.part(self.worker))
