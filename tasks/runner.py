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
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import dramatiq
import msgspec
from dramatiq.broker import MessageProxy
from dramatiq.errors import ActorNotFound
from dramatiq.message import Message
from dramatiq.middleware import AsyncIO, ShutdownNotifications, SkipMessage, TimeLimit

from core.redis import AWAY, AsyncStore, RedisError, command
from core.telemetry import logs, metrics
from core.values import Class, Outcome, Usage
from tasks.queue import NOBODY, Claim, Claimed, Close, Order, Queue, Room, order

log = logs.get(__name__)

#: Longest an idle worker sleeps without asking the queue; a lost wake-up costs at most this, seconds.
IDLE_S = 2.0
#: Longest a worker waits before it asks again for what did not fit, seconds.
PASSED_S = 0.25
#: And at the soonest, seconds: an engine step is longer.
AGAIN_S = 0.005
#: Who may have somebody preempted: classes up to this one, behind which a person waits.
URGENT = Class.INTERACTIVE
#: How many of those that may be preempted are tried, until something urgent fits in the place of one.
VICTIMS_MAX = 3
#: Pause after the store was away, seconds.
PAUSE_S = 0.1
#: Output that a tenant is charged for before its request ends: often enough to be fair, too seldom to cost a beat much.
SERVED_TOKENS = 64
#: Most endings in one exchange.
FINISH_MAX = 64
#: Most claims in one exchange.
CLAIM_MAX = 64


@dataclass
class Held:
    """A claim in hand."""

    claim: Claim
    task: asyncio.Task[None] | None = None
    cut: int = 0  #: output of earlier attempts, from which this one goes on; its usage counts that too
    usage: Usage = field(default_factory=Usage)  #: counted so far; what a cancelled request is billed for
    let_go: str = ""  #: why its task was stopped: "cancelled", "fenced", "handed back"
    message: str = ""  #: of one that was cancelled: why, for people
    begun: bool = False  #: asyncio drops a task that is cancelled before its first step, its `finally` too
    ended: bool = False  #: it is over but for the telling
    finishing: bool = False
    served_tokens: int = 0  #: output that its tenant was charged for


@dataclass(frozen=True, kw_only=True)
class Victim:
    """A claim in hand that may be handed back for something more urgent, and the room there would be without it."""

    id: str
    cls: int
    room: Room


def no_victims(_cls: int) -> Sequence[Victim]:
    return ()


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor says of the end of its task. Any other return value means completed."""

    outcome: Outcome
    usage: Usage = Usage()
    message: str = ""
    dead: bool = False  #: nobody could run it: it is kept as a dead letter


_COMPLETED = Finished(outcome=Outcome.COMPLETED)


async def _within(limit_s: float, work: Awaitable[Any]) -> Any:
    async with asyncio.timeout(limit_s):
        return await work


@cache
def _ended_counter(model: str, outcome: str) -> Any:
    """The counter of these endings: to look it up costs three times what it costs to count."""
    return metrics.tasks_ended.labels(model, outcome)


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
        victims: Callable[[int], Sequence[Victim]] = no_victims,
        again_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """`room`: free slots; `headroom`: what else the engine can take; `victims`: whom to preempt for a class, best
        first; `again_s`: when what did not fit may, 0: no telling. `blocking` is a client for the waits: its time-out
        must be longer than IDLE_S."""
        unfit = [
            type(m).__name__ for m in broker.middleware if isinstance(m, TimeLimit | ShutdownNotifications | AsyncIO)
        ]
        if unfit:
            raise ValueError(f"{', '.join(unfit)} work on threads; the runner has its own time limit and cancellation")
        self.broker, self.store, self.blocking, self.queue = broker, store, blocking, queue
        self.worker, self.lease_ms, self.beat_ms = worker, lease_ms, beat_ms
        self.room, self.headroom, self.victims, self.again_s = room, headroom, victims, again_s
        self.held: dict[str, Held] = {}
        #: What must be put away before requests go back.
        self.before_back: Callable[[list[Held]], Awaitable[None]] | None = None
        self.draining = asyncio.Event()
        self._changed = asyncio.Event()  #: room may have appeared, or be wanted, or the last claim is gone
        self._urgent: int = NOBODY  #: a class of which something waits, and found no room
        self._vouched = asyncio.Condition()  #: a beat has succeeded
        self._vouched_s = float("-inf")
        self._strays: set[str] = set()
        self._ending: list[tuple[Close, asyncio.Future[bool]]] = []  #: endings on their way to the store
        self._ended = asyncio.Event()
        self._background: list[asyncio.Task[None]] = []
        self._going_back: set[asyncio.Task[None]] = set()

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

    async def drain(self, limit_s: float, *, reason: str = "its worker was shut down", died: bool = False) -> None:
        """Claim nothing more; let what runs end for `limit_s`; hand the rest back; leave.

        `died`: the engine did, perhaps of one of them, which counts as a loss of each.
        """
        self.broker.emit_before("worker_shutdown", self)
        self.draining.set()
        self._changed.set()
        deadline = time.monotonic() + limit_s
        while self.held and time.monotonic() < deadline:
            self._changed.clear()
            await self._change(deadline - time.monotonic())
        await self._hand_back(list(self.held.values()), reason, died=died)
        # redis-py's pub/sub may swallow a cancellation: ask until all have gone.
        while going := [task for task in self._background if not task.done()]:
            for task in going:
                task.cancel()
            await asyncio.wait(going, timeout=PAUSE_S)
        await self._supervised_once(lambda: self.store.run(self.queue.part(self.worker)))
        self.broker.emit_after("worker_shutdown", self)

    async def _change(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(max(timeout_s, 0)):
                await self._changed.wait()
        except TimeoutError:
            return

    # --- claims

    async def _claims(self) -> None:
        while not self.draining.is_set():
            self._changed.clear()
            want = min(self.room(), CLAIM_MAX)
            if want <= 0:
                if not await self._make_room(self._urgent):
                    await self._change(self._soon_s() if self._urgent <= URGENT else IDLE_S)
                continue
            self._urgent = NOBODY
            claimed = await self._claim(want, self.headroom())
            if claimed.passed:
                if not await self._make_room(min(self._urgent, claimed.passed_class)):
                    await self._change(self._soon_s())
            elif not claimed.claims:
                await self._sleep(claimed.due_ms)

    async def _claim(self, want: int, room: Room) -> Claimed:
        """Take what fits, and begin it."""
        nonce = secrets.token_hex(8)  # the same again when the store was away: a lost reply is told once more
        while True:
            call = self.queue.claim(self.worker, want, lease_ms=self.lease_ms, nonce=nonce, room=room)
            try:
                claimed = await self.store.run(call)
            except AWAY:
                if self.draining.is_set():
                    return Claimed(claims=(), due_ms=-1)
                await asyncio.sleep(PAUSE_S)
                continue
            for claim in claimed.claims:
                self._start(claim)
            return claimed

    async def _make_room(self, urgent: int) -> bool:
        """Hand back something less urgent, once something urgent is surely ours in its place. Whether it was."""
        self._urgent = NOBODY
        if urgent > URGENT:
            return False
        for victim in self.victims(urgent)[:VICTIMS_MAX]:
            claimed = await self._claim(1, replace(victim.room, below=min(victim.cls, URGENT + 1)))
            if claimed.claims:
                await self._preempt(victim)
                self._urgent = urgent  # there may be more of it
                return True
            if not claimed.passed:
                return False
            self._urgent = urgent  # it fits in nobody's place now
        return False

    def _soon_s(self) -> float:
        """When to look again for what did not fit: when the engine says, else in a while. An ending comes first."""
        again_s = self.again_s()
        return min(max(again_s, AGAIN_S), PASSED_S) if again_s > 0 else PASSED_S

    async def _preempt(self, victim: Victim) -> None:
        held = self.held.get(victim.id)
        if held is not None and not self.draining.is_set():
            log.info("preempted", request_id=victim.id, cls=victim.cls)
            metrics.requests_preempted.labels(self.queue.model).inc()
            await self._hand_back([held], "it made room for something more urgent")

    def stir(self, urgent: int = NOBODY) -> None:
        """Room may have appeared, or something of this class may wait that found none anywhere."""
        self._urgent = min(self._urgent, urgent)
        self._changed.set()

    async def _sleep(self, due_ms: int) -> None:
        """Until there may be work. The marker carries nothing; losing it costs IDLE_S."""
        wait_s = IDLE_S if due_ms < 0 else min(max(due_ms / 1000, 0.001), IDLE_S)
        keys = (self.queue.wake_key_of(self.worker), self.queue.wake_key)
        await self.blocking.run(command("BZPOPMIN", *keys, wait_s, reply=bool))

    def _start(self, claim: Claim) -> None:
        known = self.held.get(claim.id)
        if known is not None:
            if known.claim.attempt >= claim.attempt:  # told again after a lost reply that was not lost
                return
            self.let_go(claim.id, "fenced")  # it was lost, and is back before we knew
        held = self.held[claim.id] = Held(claim)
        held.task = asyncio.create_task(self._work(held))

    # --- one task

    async def _work(self, held: Held) -> None:
        held.begun = True
        try:
            logs.bind(request_id=held.claim.id, attempt=held.claim.attempt)  # for this task, whose context is its own
            finished = await self._perform(held)
            if finished is not None:
                held.finishing = True
                await self._finish(held, finished)
        finally:
            if held.let_go != "handed back":  # what goes back is held until it has
                self._drop(held)

    def _drop(self, held: Held) -> None:
        if self.held.get(held.claim.id) is held:
            del self.held[held.claim.id]
        self._changed.set()

    async def _perform(self, held: Held) -> Finished | None:
        """Run the actor. None: the task is no longer ours to end."""
        if held.let_go:
            return self._stopped(held)
        try:
            message = Message.decode(held.claim.message)
            actor = self.broker.get_actor(message.actor_name)
        except (dramatiq.DramatiqError, ActorNotFound, KeyError, TypeError, ValueError) as e:
            log.error("task_unreadable", error=repr(e))
            return Finished(outcome=Outcome.FAILED, message="its task cannot be read", dead=True)
        try:
            return await self._process(MessageProxy(message), message, actor)
        except asyncio.CancelledError:
            return self._stopped(held)
        except Exception as e:  # an actor may raise anything; it is told, logged and ends the task
            log.exception("task_failed", actor=message.actor_name)
            return self._failed(held, e)

    def _failed(self, held: Held, e: Exception) -> Finished | None:
        if held.let_go:  # it broke as it was stopped
            return self._stopped(held)
        return Finished(outcome=Outcome.FAILED, usage=held.usage, message=str(e) or type(e).__name__)

    def _stopped(self, held: Held) -> Finished | None:
        if held.let_go != "cancelled":
            return None
        return Finished(outcome=Outcome.CANCELLED, usage=held.usage, message=held.message)

    async def _process(self, proxy: MessageProxy, message: Message[Any], actor: Any) -> Finished:
        """Dramatiq's life of a message: its hooks around the actor."""
        try:
            self.broker.emit_before("process_message", proxy)
            limit_s = (message.options.get("time_limit") or actor.options.get("time_limit") or 0) / 1000
            work = inspect.unwrap(actor.fn)(*message.args, **message.kwargs)
            result = await (_within(limit_s, work) if limit_s else work)
        except SkipMessage:
            self.broker.emit_after("skip_message", proxy)
            return Finished(outcome=Outcome.CANCELLED, message="skipped")
        except BaseException as e:
            proxy.stuff_exception(e)
            self.broker.emit_after("process_message", proxy, exception=e)
            raise
        self.broker.emit_after("process_message", proxy, result=result)
        return result if isinstance(result, Finished) else _COMPLETED

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
        _ended_counter(self.queue.model, finished.outcome.value if ours else "fenced").inc()
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

    def let_go(self, request_id: str, why: str, message: str = "") -> None:
        """Stop a task: "cancelled" ends it as cancelled, "fenced" and "handed back" leave the ending to others.
        `message`: what its caller is told of the reason."""
        held = self.held.get(request_id)
        if held is None or held.finishing:
            return
        if held.let_go and not (why == "fenced" and held.let_go == "handed back"):
            return
        held.let_go, held.message = why, message
        if why == "cancelled":
            held.claim = msgspec.structs.replace(held.claim, cancelled=True)
        if held.task is not None and held.begun:
            held.task.cancel()

    def stop_all(self, reason: str) -> int:
        """Stop all that runs now, at once; it goes back when the store is there and `before_back` is done."""
        running = [held for held in self.held.values() if not (held.ended or held.finishing or held.let_go)]
        for held in running:
            self.let_go(held.claim.id, "handed back")
        if running:
            task = asyncio.create_task(self._supervised_once(lambda: self._hand_back(running, reason)))
            self._going_back.add(task)
            task.add_done_callback(self._going_back.discard)
        return len(running)

    async def _hand_back(self, held: list[Held], reason: str, *, died: bool = False) -> None:
        back = [one for one in held if not one.finishing and one.let_go in ("", "handed back")]
        for one in back:
            self.let_go(one.claim.id, "handed back")
        tasks = [one.task for one in held if one.task]
        if back:
            await self._return(back, reason, died=died)
        if tasks:
            await asyncio.wait(tasks, timeout=self.lease_ms / 1000)

    async def _return(self, back: list[Held], reason: str, *, died: bool) -> None:
        if self.before_back is not None:
            await self.before_back(back)
        ours = [one.claim for one in back if one.let_go == "handed back"]
        log.info("handed_back", requests=len(ours))
        if ours:
            call = self.queue.hand_back(self.worker, ours, reason, died=died)
            await self.insist(lambda: self.store.run(call))
        for one in back:
            self._drop(one)

    # --- lease

    async def _beats(self) -> None:
        while True:
            await asyncio.sleep(self.beat_ms / 1000)
            # Again at once while the store is away: after a short outage less than a beat may be left of the lease.
            await self.insist(self._beat)

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
        if beaten.urgent <= URGENT:
            self.stir(beaten.urgent)
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
        pubsub = self.blocking.pubsub()
        try:
            await pubsub.subscribe(self.queue.worker_channel(self.worker), self.queue.urgent_channel)
            while True:
                message = await pubsub.get_message(timeout=IDLE_S)
                if message is None:
                    continue
                if message["channel"].decode() == self.queue.urgent_channel:
                    self.stir(int(message["data"]))
                else:
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
            held.claim = msgspec.structs.replace(held.claim, gateway=gateway)

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
