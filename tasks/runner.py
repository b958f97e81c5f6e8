"""The asyncio worker: claims tasks, runs their actors on one loop, ends each exactly once.

It keeps Dramatiq's messages, actors and middleware. A message's actor is awaited as a task of this loop, so hundreds
of generations run at once without a thread each. Nothing is prefetched: a claim is made when there is room, and a
claim costs a fraction of an engine step.

Background tasks (claims, beats, control) are supervised: one that fails is logged, counted and started again.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import dramatiq
from dramatiq.broker import MessageProxy
from dramatiq.errors import ActorNotFound
from dramatiq.message import Message
from dramatiq.middleware import AsyncIO, ShutdownNotifications, SkipMessage, TimeLimit

from core.redis import AWAY, AsyncStore, RedisError, command
from core.telemetry import logs, metrics
from core.values import Outcome, Usage
from tasks.queue import Claim, Close, Order, Queue, Room, order

log = logs.get(__name__)

#: Longest an idle worker sleeps without asking the queue; a lost wake-up costs at most this, seconds.
IDLE_S = 2.0
#: Longest a worker waits before it asks again for what did not fit, seconds.
PASSED_S = 0.25
#: Pause after the store was away, seconds.
PAUSE_S = 0.1
#: Output that a tenant is charged for before its request ends: often enough to be fair, too seldom to cost a beat much.
SERVED_TOKENS = 64
#: Most endings in one exchange.
FINISH_MAX = 64
#: Most claims in one exchange.
CLAIM_MAX = 32


@dataclass
class Held:
    """A claim in hand."""

    claim: Claim
    task: asyncio.Task[None] | None = None
    usage: Usage = field(default_factory=Usage)  #: counted so far; what a cancelled request is billed for
    let_go: str = ""  #: why its task was stopped: "cancelled", "fenced", "handed back"
    begun: bool = False  #: asyncio drops a task that is cancelled before its first step, its `finally` too
    finishing: bool = False
    served_tokens: int = 0  #: output that its tenant was charged for


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What an actor says of the end of its task. Any other return value means completed."""

    outcome: Outcome
    usage: Usage = Usage()
    message: str = ""
    dead: bool = False  #: nobody could run it: it is kept as a dead letter


class Runner:
    """One worker's hold on one queue."""

    def __init__(
        self,
        broker: dramatiq.Broker,
        store: AsyncStore,
        blocking: AsyncStore,
        queue: Queue,
        *,
        worker: str,
        lease_ms: int,
        beat_ms: int,
        room: Callable[[], int],
        headroom: Callable[[], Room] = Room,
    ) -> None:
        """`room`: free slots; `headroom`: what else the engine can take. `blocking` is a client for the waits: its
        time-out must be longer than IDLE_S."""
        unfit = [
            type(m).__name__ for m in broker.middleware if isinstance(m, TimeLimit | ShutdownNotifications | AsyncIO)
        ]
        if unfit:
            raise ValueError(f"{', '.join(unfit)} work on threads; the runner has its own time limit and cancellation")
        self.broker, self.store, self.blocking, self.queue = broker, store, blocking, queue
        self.worker, self.lease_ms, self.beat_ms = worker, lease_ms, beat_ms
        self.room, self.headroom = room, headroom
        self.held: dict[str, Held] = {}
        self.draining = asyncio.Event()
        self._changed = asyncio.Event()  #: room may have appeared, or the last claim is gone
        self._vouched = asyncio.Condition()  #: a beat has succeeded
        self._vouched_s = float("-inf")
        self._strays: set[str] = set()
        self._ending: list[tuple[Close, asyncio.Future[bool]]] = []  #: endings on their way to the store
        self._ended = asyncio.Event()
        self._background: list[asyncio.Task[None]] = []

    # --- life

    async def run(self) -> None:
        """Work until `drain` is called and done."""
        self.broker.emit_before("worker_boot", self)
        await self._supervised_once(self._beat)
        self._background = [
            asyncio.create_task(self._supervised(loop))
            for loop in (self._claims, self._beats, self._control, self._finishes)
        ]
        self.broker.emit_after("worker_boot", self)
        await asyncio.gather(*self._background, return_exceptions=True)

    async def drain(self, limit_s: float) -> None:
        """Claim nothing more; let what runs end for `limit_s`; hand the rest back; leave."""
        self.broker.emit_before("worker_shutdown", self)
        self.draining.set()
        self._changed.set()
        deadline = time.monotonic() + limit_s
        while self.held and time.monotonic() < deadline:
            await self._change(deadline - time.monotonic())
        await self._hand_back(list(self.held.values()))
        # redis-py's pub/sub may swallow a cancellation: ask until all have gone.
        while going := [task for task in self._background if not task.done()]:
            for task in going:
                task.cancel()
            await asyncio.wait(going, timeout=PAUSE_S)
        await self._supervised_once(lambda: self.store.run(self.queue.part(self.worker)))
        self.broker.emit_after("worker_shutdown", self)

    async def _change(self, timeout_s: float) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(max(timeout_s, 0)):
                await self._changed.wait()
        except TimeoutError:
            return

    # --- claims

    async def _claims(self) -> None:
        nonce = ""
        while not self.draining.is_set():
            want = min(self.room(), CLAIM_MAX)
            if want <= 0:
                await self._change(IDLE_S)
                continue
            nonce = nonce or secrets.token_hex(8)
            try:
                claimed = await self.store.run(
                    self.queue.claim(self.worker, want, lease_ms=self.lease_ms, nonce=nonce, room=self.headroom())
                )
            except AWAY:
                await asyncio.sleep(PAUSE_S)  # the same nonce again: a lost reply is told once more
                continue
            nonce = ""
            for claim in claimed.claims:
                self._start(claim)
            if claimed.passed:  # it fits when something that runs has ended, which no marker says
                await self._change(PASSED_S)
            elif not claimed.claims:
                await self._sleep(claimed.due_ms)

    async def _sleep(self, due_ms: int) -> None:
        """Until there may be work. The marker carries nothing; losing it costs IDLE_S."""
        wait_s = IDLE_S if due_ms < 0 else min(max(due_ms / 1000, 0.001), IDLE_S)
        keys = (self.queue.wake_key_of(self.worker), self.queue.wake_key)
        await self.blocking.run(command("BZPOPMIN", *keys, wait_s, reply=bool))

    def _start(self, claim: Claim) -> None:
        if claim.id in self.held:  # told again after a lost reply that was not lost
            return
        held = self.held[claim.id] = Held(claim)
        held.task = asyncio.create_task(self._work(held))

    # --- one task

    async def _work(self, held: Held) -> None:
        held.begun = True
        try:
            with logs.bound(request_id=held.claim.id, attempt=held.claim.attempt):
                finished = await self._perform(held)
                if finished is not None:
                    held.finishing = True
                    await self._finish(held, finished)
        finally:
            self.held.pop(held.claim.id, None)
            self._changed.set()

    async def _perform(self, held: Held) -> Finished | None:
        """Run the actor. None: the task is no longer ours to end."""
        if held.let_go:
            return self._stopped(held)
        try:
            message = MessageProxy(Message.decode(held.claim.message))
            actor = self.broker.get_actor(message.actor_name)
        except (dramatiq.DramatiqError, ActorNotFound, KeyError, TypeError, ValueError) as e:
            log.error("task_unreadable", error=repr(e))
            return Finished(outcome=Outcome.FAILED, message="its task cannot be read", dead=True)
        try:
            return await self._process(message, actor)
        except asyncio.CancelledError:
            return self._stopped(held)
        except Exception as e:  # an actor may raise anything; it is told, logged and ends the task
            log.exception("task_failed", actor=message.actor_name)
            return Finished(outcome=Outcome.FAILED, usage=held.usage, message=str(e) or type(e).__name__)

    def _stopped(self, held: Held) -> Finished | None:
        return Finished(outcome=Outcome.CANCELLED, usage=held.usage) if held.let_go == "cancelled" else None

    async def _process(self, message: MessageProxy, actor: Any) -> Finished:
        """Dramatiq's life of a message: its hooks around the actor."""
        try:
            self.broker.emit_before("process_message", message)
            limit_ms = message.options.get("time_limit") or actor.options.get("time_limit")
            async with asyncio.timeout(limit_ms / 1000 if limit_ms else None):
                result = await inspect.unwrap(actor.fn)(*message.args, **message.kwargs)
        except SkipMessage:
            self.broker.emit_after("skip_message", message)
            return Finished(outcome=Outcome.CANCELLED, message="skipped")
        except BaseException as e:
            message.stuff_exception(e)
            self.broker.emit_after("process_message", message, exception=e)
            raise
        self.broker.emit_after("process_message", message, result=result)
        return result if isinstance(result, Finished) else Finished(outcome=Outcome.COMPLETED)

    async def _finish(self, held: Held, finished: Finished) -> None:
        """Say that it ended, until the store has heard it or somebody else has the claim."""
        close = Close(
            claim=held.claim,
            outcome=finished.outcome,
            usage=finished.usage,
            message=finished.message,
            dead=finished.dead,
        )
        told: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._ending.append((close, told))
        self._ended.set()
        try:
            ours = await told
        except RedisError:
            return  # said where it was refused; the claim is a stray now, which the next beats give back
        metrics.tasks_ended.labels(self.queue.model, finished.outcome if ours else "fenced").inc()
        if not ours:
            log.warning("finish_fenced")

    async def _finishes(self) -> None:
        """Tell the store of endings, those of one moment together. Each may be told twice: `finish` knows a repeat."""
        while True:
            await self._ended.wait()
            self._ended.clear()
            while self._ending:
                batch, self._ending = self._ending[:FINISH_MAX], self._ending[FINISH_MAX:]
                await self._tell(batch)

    async def _tell(self, batch: list[tuple[Close, asyncio.Future[bool]]]) -> None:
        call = self.queue.finish_all(self.worker, [close for close, _ in batch])
        try:
            replies = await self.insist(lambda: self.store.run(call))
        except RedisError as e:  # one that is refused must not keep the others from ending
            log.error("finish_refused", error=repr(e), endings=len(batch))
            if len(batch) > 1:
                for one in batch:
                    await self._tell([one])
            elif not batch[0][1].done():
                batch[0][1].set_exception(e)
            return
        for (_, told), ours in zip(batch, replies, strict=True):
            if not told.done():
                told.set_result(ours)

    async def insist(self, exchange: Callable[[], Awaitable[Any]]) -> Any:
        """Make an exchange, however long the store is away."""
        while True:
            try:
                return await exchange()
            except AWAY:
                await asyncio.sleep(PAUSE_S)

    def let_go(self, request_id: str, why: str) -> None:
        """Stop a task: "cancelled" ends it as cancelled, "fenced" and "handed back" leave the ending to others."""
        held = self.held.get(request_id)
        if held is None or held.finishing or held.let_go:
            return
        held.let_go = why
        if why == "cancelled":
            held.claim = replace(held.claim, cancelled=True)
        if held.task is not None and held.begun:
            held.task.cancel()

    async def _hand_back(self, held: list[Held], reason: str = "its worker was shut down") -> None:
        back = [one for one in held if not one.finishing and not one.let_go]
        for one in back:
            self.let_go(one.claim.id, "handed back")
        tasks = [one.task for one in held if one.task]
        if back:
            log.info("handed_back", requests=len(back))
            call = self.queue.hand_back(self.worker, [one.claim for one in back], reason)
            await self.insist(lambda: self.store.run(call))
        if tasks:
            await asyncio.wait(tasks, timeout=self.lease_ms / 1000)

    # --- lease

    async def _beats(self) -> None:
        while True:
            await asyncio.sleep(self.beat_ms / 1000)
            await self._beat()

    async def _beat(self) -> None:
        """Renew the lease, and mend what differs between the queue's claims and ours."""
        asked_s = time.monotonic()
        before = {id_: held.claim.attempt for id_, held in self.held.items()}
        claims = [held.claim for held in self.held.values()]
        served = [held for held in self.held.values() if held.usage.output_tokens - held.served_tokens >= SERVED_TOKENS]
        so_far = [(held.claim, held.usage.output_tokens) for held in served]
        call = self.queue.beat(self.worker, claims, lease_ms=self.lease_ms, served=so_far)
        beaten = await self.store.run(call)
        for held, (_, tokens) in zip(served, so_far, strict=True):
            held.served_tokens = tokens
        if beaten.claims is not None:
            await self._mend(before, beaten.claims)
        async with self._vouched:
            self._vouched_s = asked_s
            self._vouched.notify_all()

    async def _mend(self, before: dict[str, int], theirs: dict[str, Claim]) -> None:
        for id_, attempt in before.items():
            if id_ not in theirs or theirs[id_].attempt != attempt:
                self.let_go(id_, "fenced")
                continue
            self._move(id_, theirs[id_].gateway)
            if theirs[id_].cancelled:
                self.let_go(id_, "cancelled")
        # A claim that we do not know of twice in a row is nobody's: a claim in flight is known by the next beat.
        strays = {id_ for id_ in theirs if id_ not in before and id_ not in self.held}
        lost = [theirs[id_] for id_ in strays & self._strays]
        self._strays = strays
        if lost:
            log.error("stray_claims", requests=len(lost))
            await self.store.run(self.queue.hand_back(self.worker, lost, "its worker had no room for it"))

    async def vouched(self) -> None:
        """Return when this worker's lease is surely its own: whatever it publishes then is not a dead attempt's."""
        async with self._vouched:
            await self._vouched.wait_for(lambda: time.monotonic() - self._vouched_s < self.lease_ms / 1000 * 0.8)

    # --- control

    async def _control(self) -> None:
        """Orders, as they come. One that is missed is learned from the next beat."""
        pubsub = self.blocking.client.pubsub(ignore_subscribe_messages=True)
        try:
            await pubsub.subscribe(self.queue.worker_channel(self.worker))
            while True:
                message = await pubsub.get_message(timeout=IDLE_S)
                if message is not None:
                    self._obey(order(message["data"]))
        finally:
            await pubsub.aclose()

    def _obey(self, said: Order) -> None:
        if said.verb == "cancel":
            self.let_go(said.id, "cancelled")
        elif said.verb == "home":
            self._move(said.id, said.gateway)

    def _move(self, request_id: str, gateway: str) -> None:
        """Its stream is open at another gateway now."""
        held = self.held.get(request_id)
        if held is not None and held.claim.gateway != gateway:
            held.claim = replace(held.claim, gateway=gateway)

    # --- supervision

    async def _supervised(self, loop: Callable[[], Awaitable[None]]) -> None:
        while not (self.draining.is_set() and loop == self._claims):
            await self._supervised_once(loop)
            await asyncio.sleep(PAUSE_S)

    async def _supervised_once(self, step: Callable[[], Awaitable[Any]]) -> None:
        name = getattr(step, "__name__", "step")
        try:
            await step()
        except (*AWAY, RedisError) as e:
            log.warning("store_away", loop=name, error=repr(e))
        except Exception:  # the outermost edge of a background loop: it must not die silently
            log.exception("loop_failed", loop=name)
            metrics.loops_failed.labels(name).inc()
