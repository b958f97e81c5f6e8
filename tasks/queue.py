"""The queue of one model: what waits, who has what, how it ends. One hash tag a model; every key begins `f1:{model}:`.

| key       | type      | writer                  | reader          | holds                                            |
|-----------|-----------|-------------------------|-----------------|--------------------------------------------------|
| waiting   | ZSET, lex | enqueue, claim, endings | claim, watch    | `class|tenant|arrival|preferred|id`, score 0     |
| tenants   | ZSET      | with waiting, service   | claim           | `class|tenant` by class, then service            |
| service   | HASH      | claim, beat, finish     | with tenants    | tenant -> virtual tokens it was served           |
| depths    | HASH      | with waiting            | enqueue         | tenant, `tenant|tokens` -> what it has waiting   |
| due       | ZSET      | with waiting            | claim           | id -> since when its wait is too long, ms        |
| rows      | HASH      | every verb              | every verb      | id -> msgpack map: state, attempt, worker, …     |
| tasks     | HASH      | enqueue, endings        | claim           | id -> Dramatiq message (ids only)                |
| body:<id> | STRING    | enqueue; finish, cancel | the worker      | the Request; TTL BODY_MS at the latest           |
| view:<id> | STRING    | enqueue, web; endings   | web             | how to show it again; FORGET_MS past its end     |
| claims    | ZSET, lex | claim, endings          | beat, reaper    | `worker|id`                                      |
| leases    | ZSET      | claim, beat             | reaper          | worker -> when its claims are given up, ms       |
| rooms     | HASH      | claim                   | enqueue, claim  | worker -> slots left after its last claim *      |
| saving    | HASH      | claim, endings          | claim           | worker -> large request it saves KV cache for    |
| sums      | HASH      | claim, attach, endings  | beat            | worker -> sum over its claims, 48 bits           |
| nonces    | HASH      | claim                   | claim           | worker -> its last claim, told again if lost     |
| deadlines | ZSET      | with waiting            | timers          | id -> ms                                         |
| held      | ZSET      | enqueue, timers         | timers          | ids that wait while no worker is alive           |
| delays    | ZSET      | enqueue                 | timers          | id -> when it may run, ms                        |
| forget    | ZSET      | endings                 | timers          | id -> when its ended row goes, ms                |
| dead      | ZSET      | endings, mend           | mend            | dead letter -> when it was given up, ms          |
| letters   | HASH      | with dead               | mend            | id -> msgpack map: row, message, reason; a week  |
| counters  | HASH      | every verb, halt        | tick, watch     | depth per class, tokens, totals; `stops` **      |
| wake      | ZSET      | enqueue, claim, endings | idle workers    | one marker; carries no data, may be lost         |
| wake:<w>  | ZSET      | enqueue                 | that worker     | the same, for what prefers it; TTL 60 s          |
| gateways  | ZSET      | watch, enqueue, attach  | timers          | gateway -> when what is open there is lost, ms   |
| homes     | ZSET, lex | enqueue, attach, ends   | timers          | `gateway|id` of open requests                    |
| usage     | STREAM    | endings                 | core/usage.py   | one entry per ending that has facts              |

* less than 0 when something did not fit: it is busy for the moment. 0 also when it saves KV cache, or preempts.
** `mark|p|23`: which change was the last, whether the model is paused, which classes are shed (`halt`, which says what
   Postgres says: tasks/stops.py). `sweep<class>`: where to go on ending what waits of a class that is shed.

Channels: `gateway:<id>` frames, endings and takeovers (core/stream), `worker:<id>` Orders for that worker, `urgent` the
class of something urgent that found no room.

Promise   an id is accepted once, and ends once. A claim is a right to one attempt; who lost it changes nothing more.
Dies      worker: its agent says so (`tick`), or its lease runs out; its claims go back to the front of their line, or
          end as `worker_lost` where another run would show. Gateway: another attaches, or its requests end as
          `gateway_lost` LOST_MS after its lease; background work goes on. Store: scripts are atomic; after a silence
          every lease starts anew (endings.lua `hear`), so an outage re-runs nothing. Cluster: one slot a model, every
          key in KEYS.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec
from dramatiq.message import Message

from core.redis import Call, command, scripts, tag
from core.usage import facts
from core.values import Class, Ending, Outcome, Request, Usage

_KEYS = (
    "waiting", "tenants", "rows", "tasks", "claims", "leases", "sums", "deadlines", "delays", "forget", "counters",
    "wake", "usage", "nonces", "gateways", "service", "due", "depths", "rooms", "saving", "homes", "held", "dead",
    "letters",
)  # fmt: skip
_VERBS = (
    "enqueue", "claim", "beat", "deliver", "finish", "hand_back", "cancel", "watch", "attach", "logs_of", "mend",
    "tick", "halt",
)  # fmt: skip
_SCRIPTS = scripts(
    Path(__file__).with_name("lua"), shared=("prelude", "order", "endings"), verbs=_VERBS, last="settle()"
)

#: How long a body outlives everything that should have deleted it, ms.
BODY_MS = 24 * 3600 * 1000
#: How long a request may wait before it is overdue, ms: one claim in sixteen goes to whoever is overdue longest.
DUE_MS = {Class.SYSTEM: 1_000, Class.INTERACTIVE: 5_000, Class.DEFAULT: 30_000, Class.BULK: 300_000}
#: Most ids that one `watch` asks after.
WATCH_MAX = 500
#: A gateway that has not watched for this long is gone, ms.
GATEWAY_LEASE_MS = 5_000
#: How long after that what was open there may still be attached to, ms. Then it ends as `gateway_lost`.
LOST_MS = 30_000
#: How long a request waits at most for the worker that holds its prefix, while that has room, ms. (Measured with
#: `forebay bench prefix`: what is stolen is computed again, and takes another prefix's place in the thief's cache.)
STEAL_MS = 3_000
#: A class that stands for no class: nothing waits.
NOBODY = 9
#: How many of a tenant's next requests a claim looks through for one that prefers its worker.
SCAN = 16


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What may wait for one model, and of one tenant. A request alone is never too many tokens."""

    waiting: int = 100_000
    tokens: int = 200_000_000
    tenant_waiting: int = 20_000
    tenant_tokens: int = 50_000_000


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is put on the queue: a message that carries ids only, and what the queue must know of it."""

    id: str
    message: bytes
    cls: int = Class.DEFAULT
    tenant: str = "-"  #: whom fairness counts; never contains "|"
    owner: str = ""  #: who may attach to its stream: a key
    gateway: str = ""  #: where its ending is told; empty: nowhere
    rerunnable: bool = True  #: may be claimed again after tokens were published: another attempt goes on, or compares
    input_tokens: int = 0
    need_tokens: int = 0  #: KV cache it will probably come to: input and expected output
    most_tokens: int = 0  #: the longest context of it, at most: a prompt and max_tokens
    preferred: tuple[str, ...] = ()  #: workers that hold its prefix, best first, at most three
    steal_ms: int = STEAL_MS  #: how long it waits for one of them before another worker may have it
    weight: float = 1.0  #: a tenant of weight 2 gets twice the tokens of one of weight 1
    patience_ms: int = 0  #: how long it may wait before it is ended unrun; 0: as long as it takes
    delay_ms: int = 0
    background: bool = False  #: nobody need wait for it: a reader's going, or its gateway's, does not end it
    facts: bytes = b""  #: for the usage entry; empty: it makes none
    body: bytes = b""
    view: bytes = b""  #: what a gateway needs to show the stream again


@dataclass(frozen=True, kw_only=True)
class Accepted:
    status: Literal["accepted", "known", "full", "paused", "shed"]  #: the last two: an operator stopped it
    place: int = 0  #: 1: next
    alive: bool = True  #: some worker is there to run it
    state: str = ""  #: of the row, when known
    whose: str = ""  #: when full: "model" or "tenant", and what waits there
    waiting: int = 0
    waiting_tokens: int = 0

    @property
    def refused(self) -> bool:
        """Nothing was accepted."""
        return self.status not in ("accepted", "known")


@dataclass(frozen=True, kw_only=True)
class Stops:
    """What operators have stopped of a model."""

    paused: bool = False  #: nothing is accepted or claimed; what runs goes on
    shed: frozenset[int] = frozenset()  #: the same of these classes, and what waits of them ends


@dataclass(frozen=True, kw_only=True)
class Room:
    """What a worker can start now, beside its free slots. -1: unknown, no bound."""

    kv_tokens: int = -1
    context_tokens: int = -1
    total_kv_tokens: int = -1
    prefill_tokens: tuple[int, int, int, int] = (2**40,) * 4  #: per class: what may be added to the prefill backlog
    idle: bool = True  #: nothing is being prefilled: the next request fits, however long
    reserve: int = 0  #: slots that what cannot be preempted must leave free
    below: int = NOBODY  #: only classes below this: what a full worker would preempt for
    steal_ms: int = STEAL_MS
    scan: int = SCAN


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's right to one attempt."""

    id: str
    attempt: int
    message: bytes = b""
    gateway: str = ""  #: where its stream is open
    trail: str = ""  #: the worker whose log holds what was delivered and is not saved
    cls: int = Class.DEFAULT
    input_tokens: int = 0
    need_tokens: int = 0  #: KV cache it will probably come to
    cancelled: bool = False


@dataclass(frozen=True, kw_only=True)
class Claimed:
    claims: tuple[Claim, ...]
    due_ms: int  #: until there may be more; -1: no telling
    passed_class: int = NOBODY  #: the most urgent class of which something waits that did not fit

    @property
    def passed(self) -> bool:
        """Something waits that did not fit."""
        return self.passed_class < NOBODY


@dataclass(frozen=True, kw_only=True)
class Beaten:
    """What the queue says to a beat."""

    urgent: int  #: the most urgent class in which something waits, or NOBODY
    claims: dict[str, Claim] | None  #: None: it agrees on the claims; else the claims as it has them


class Close(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one attempt, as its worker tells it."""

    claim: Claim
    outcome: Outcome
    usage: Usage = Usage()
    message: str = ""
    dead: bool = False  #: to be kept as a dead letter


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a worker is told of one of its claims."""

    verb: str  #: "cancel", "home": its stream has moved to `gateway`
    id: str
    gateway: str = ""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What the queue says of an open request."""

    state: Literal["unknown", "waiting", "running", "ended", "elsewhere"]
    place: int = 0
    attempt: int = 0
    ending: Ending | None = None
    cancelled: bool = False  #: its worker was told to end it; said by `peek` alone


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What a gateway's watch is told."""

    waiting: int
    waiting_tokens: int
    started: int  #: requests ever claimed: its growth is the rate at which the queue moves
    workers: int  #: alive
    seen: list[Seen]


@dataclass(frozen=True, kw_only=True)
class Depth:
    """The queue at a glance."""

    waiting: tuple[int, int, int, int]  #: per class
    waiting_tokens: int
    running: int
    oldest_wait_ms: int
    buried: bool  #: the dead worker named has no claim left
    dead: int = 0  #: dead letters
    workers: int = 0  #: alive
    stops: Stops = Stops()


@dataclass(frozen=True, kw_only=True)
class Halted:
    done: bool  #: False: somebody changed the stops meanwhile; nothing was changed, and both are to be read again
    left: bool  #: something that was shed is left to end


@dataclass(frozen=True, kw_only=True)
class Letter:
    """A dead letter."""

    id: str
    reason: str
    dead_ms: int
    attempt: int
    losses: int
    cls: int
    tenant: str
    input_tokens: int
    message: bytes


def generation(request: Request, view: bytes = b"") -> Task:
    """The task of a request: the message names the actor and the id; the request itself is the task's body."""
    message: Message[None] = Message(
        queue_name=request.model,
        actor_name="generate",
        args=(request.id,),
        kwargs={},
        options={},
        message_id=request.id,
    )
    input_tokens, max_tokens = request.input_tokens, request.sampling.max_tokens if request.task == "generate" else 0
    longest_tokens = max(map(len, (request.prompt_token_ids, *request.more_prompts)))
    return Task(
        id=request.id,
        message=message.encode(),
        cls=request.cls,
        tenant=request.caller.org_id,
        owner=request.caller.key_id,
        gateway=request.gateway,
        rerunnable=request.rerunnable,
        input_tokens=input_tokens,
        need_tokens=input_tokens + request.width * min(request.expected_tokens or max_tokens, max_tokens),
        most_tokens=longest_tokens + max_tokens,
        preferred=request.preferred,
        weight=request.weight,
        steal_ms=request.steal_ms,
        patience_ms=request.patience_ms,
        background=request.background,
        facts=facts(request),
        body=msgspec.msgpack.encode(request),
        view=view,
    )


class Queue:
    """Builds the Calls of one model's queue."""

    def __init__(self, model: str, bounds: Bounds = Bounds(), *, home_ms: int = GATEWAY_LEASE_MS + LOST_MS) -> None:
        """`home_ms`: a gateway that has not watched for so long is given up, with what is open there."""
        self.model, self.bounds, self.home_ms = model, bounds, home_ms
        self.prefix = tag(model)
        self.keys = tuple(self.prefix + name for name in _KEYS)
        self.wake_key = self.prefix + "wake"
        self.urgent_channel = self.prefix + "urgent"

    def worker_channel(self, worker: str) -> str:
        return f"{self.prefix}worker:{worker}"

    def wake_key_of(self, worker: str) -> str:
        return f"{self.prefix}wake:{worker}"

    def enqueue(self, task: Task, *, attempt: int = 0, shown: bool = False, again: bool = False) -> Call[Accepted]:
        """Put a task on the queue, once. `attempt` and `shown`: when the store forgot a request that had been running,
        and whether something of it has reached its client. `again`: it was accepted before, and the store forgot it: a
        model that is paused takes it, and it waits; of a class that is shed it ends, unless it is background work."""
        row = {
            "class": int(task.cls), "tenant": task.tenant, "owner": task.owner, "gateway": task.gateway,
            "rerunnable": task.rerunnable, "input": task.input_tokens, "need": task.need_tokens,
            "most": task.most_tokens, "preferred": ",".join(task.preferred), "patience_ms": task.patience_ms,
            "steal_ms": task.steal_ms, "weight": task.weight, "delay_ms": task.delay_ms, "background": task.background,
            "due_ms": DUE_MS[Class(task.cls)], "home_ms": self.home_ms, "attempt": attempt, "shown": shown,
            "again": again,
            "waiting_max": self.bounds.waiting, "tokens_max": self.bounds.tokens,
            "tenant_waiting_max": self.bounds.tenant_waiting, "tenant_tokens_max": self.bounds.tenant_tokens,
        }  # fmt: skip
        args = (task.id, task.message, task.facts, task.body, task.view, BODY_MS, msgspec.msgpack.encode(row))
        extra = [*self._own_keys(task.id), *map(self.wake_key_of, task.preferred)]
        return self._call("enqueue", *args, extra=extra, reply=_accepted)

    def claim(self, worker: str, want: int, *, lease_ms: int, nonce: str, room: Room = Room()) -> Call[Claimed]:
        """Take at most `want` tasks that fit the room, and renew the worker's lease."""
        packed = _packed_room(room)
        return self._call("claim", worker, want, lease_ms, nonce, packed, reply=_claimed)

    def beat(
        self, worker: str, claims: Iterable[Claim], *, lease_ms: int, served: Sequence[tuple[Claim, int]] = ()
    ) -> Call[Beaten]:
        """Renew the lease, compare the claims, and charge tenants for output so far: (claim, tokens)."""
        triples = (word for claim, tokens in served for word in (claim.id, claim.attempt, tokens))
        return self._call("beat", worker, lease_ms, checksum(claims), *triples, reply=_beaten)

    def part(self, worker: str) -> Call[Any]:
        """The worker is leaving: its lease is forgotten, and what it may still have goes back."""
        return self._call("beat", worker, 0, "", reply=lambda raw: None)

    def deliver(self, worker: str, claims: Sequence[Claim]) -> Call[list[bool]]:
        """Their first tokens are about to be published. False: fenced."""
        pairs = (word for claim in claims for word in (claim.id, claim.attempt))
        return self._call("deliver", worker, *pairs, reply=lambda raw: [bool(ours) for ours in raw])

    def finish(
        self, worker: str, claim: Claim, outcome: Outcome, usage: Usage, message: str = "", *, dead: bool = False
    ) -> Call[bool]:
        """End a request. False: fenced, somebody else has it. True also for a repeat."""
        close = Close(claim=claim, outcome=outcome, usage=usage, message=message, dead=dead)
        ended: Call[Any] = self.finish_all(worker, [close])
        return replace(ended, reply=lambda raw: bool(raw[0]))

    def finish_all(self, worker: str, closes: Sequence[Close]) -> Call[list[bool]]:
        """End requests in one exchange, each by itself; as `finish`."""
        told = [
            (
                close.claim.id, close.claim.attempt, close.outcome.value, close.usage.input_tokens,
                close.usage.cached_tokens, close.usage.output_tokens, close.usage.reasoning_tokens, close.message,
                close.dead,
            )
            for close in closes
        ]  # fmt: skip
        extra = [key for close in closes for key in self._own_keys(close.claim.id)]
        packed = msgspec.msgpack.encode(told)
        return self._call("finish", worker, packed, extra=extra, reply=lambda raw: [bool(ended) for ended in raw])

    def hand_back(
        self, worker: str, claims: Sequence[Claim], reason: str = "its worker gave it back", *, died: bool = False
    ) -> Call[int]:
        """Return what this worker will not finish. `died`: its engine did, perhaps of one of them."""
        pairs = (word for claim in claims for word in (claim.id, claim.attempt))
        return self._call("hand_back", worker, reason, int(died), *pairs, reply=int)

    def cancel(self, request_id: str, gateway: str = "") -> Call[str]:
        """The caller wants it no more: "unknown", "ended", "cancelled" (it waited), "running" (its worker was told);
        "elsewhere": its stream has moved from the gateway that says so, which may not have learned of it yet; "left":
        background work goes on without that gateway."""
        return self._call("cancel", request_id, gateway, extra=self._own_keys(request_id), reply=_text)

    def watch(self, gateway: str, ids: Sequence[str]) -> Call[Watched]:
        """A gateway is alive, and asks after its open requests, at most WATCH_MAX of them."""
        assert len(ids) <= WATCH_MAX, "ask in pieces"
        return self._call("watch", gateway, self.home_ms, *ids, reply=_watched)

    def attach(self, request_id: str, owner: str, gateway: str) -> Call[Seen]:
        """Move a stream to this gateway. "unknown" also when it is not this owner's."""
        return self._call("attach", request_id, owner, gateway, self.home_ms, reply=_seen)

    def logs_of(self, request_id: str) -> Call[list[str]]:
        """The workers whose logs hold what was delivered of a request and is not saved, in order."""
        return self._call("logs_of", request_id, reply=lambda raw: [_text(worker) for worker in raw])

    def tick(self, dead_worker: str = "") -> Call[Depth]:
        """Run the timers and look; bury a worker that its host saw die."""
        return self._call("tick", dead_worker, reply=_depth)

    def gateways(self) -> Call[int]:
        """How many gateways are alive, or were a moment ago."""
        return command("ZCARD", self.prefix + "gateways", reply=int)

    # --- what operators stop

    def mark(self) -> Call[str]:
        """Which change of the stops was the last. It is read before Postgres is."""
        return command("HGET", self.prefix + "counters", "stops", reply=lambda raw: _text(raw or b"").partition("|")[0])

    def halt(self, stops: Stops, mark: str) -> Call[Halted]:
        """Stop what Postgres says is stopped, and nothing else; `mark` was read before Postgres was. To be repeated
        while something is left to end."""
        paused, shed = "p" if stops.paused else "", "".join(str(int(cls)) for cls in sorted(stops.shed))
        return self._call("halt", mark, secrets.token_hex(8), paused, shed, reply=_halted)

    # --- dead letters

    def dead_letters(self, start: int, count: int) -> Call[tuple[int, list[Letter]]]:
        """How many there are, and `count` of them from `start` on, newest first."""
        return self._call("mend", "list", start, count, extra=[self._body_key("")], reply=_letters)

    def dead_letter(self, request_id: str) -> Call[Letter | None]:
        extra = [self._body_key(request_id)]
        return self._call("mend", "show", request_id, extra=extra, reply=lambda raw: _letter(raw) if raw else None)

    def retry_dead(self, request_id: str) -> Call[str]:
        """Let it wait again: "retried", "unknown", "gone", when its body is, "open": it waits or runs already, or
        "shed": an operator shed its class."""
        return self._call("mend", "retry", request_id, extra=[self._body_key(request_id)], reply=_text)

    def purge_dead(self, request_id: str) -> Call[bool]:
        return self._call("mend", "purge", request_id, extra=[self._body_key(request_id)], reply=bool)

    # --- what lies beside the scripts

    def peek(self, request_id: str) -> Call[Seen]:
        """A request's state, for whoever has no part in it."""
        return command("HGET", self.prefix + "rows", request_id, reply=_peeked)

    def body(self, request_id: str) -> Call[bytes | None]:
        """The body of a request; None when it has ended."""
        return command("GET", self._body_key(request_id), reply=_bytes_or_none)

    def view(self, request_id: str) -> Call[bytes | None]:
        """What was put down to show the stream again; None when it is forgotten."""
        return command("GET", f"{self.prefix}view:{request_id}", reply=_bytes_or_none)

    def show(self, request_id: str, view: bytes) -> Call[bool]:
        """Another view in its place, if it is not forgotten."""
        return command("SET", f"{self.prefix}view:{request_id}", view, "XX", "KEEPTTL", reply=bool)

    def hide(self, request_id: str) -> Call[bool]:
        """Forget the view: its stream is shown no more."""
        return command("DEL", f"{self.prefix}view:{request_id}", reply=bool)

    def _body_key(self, request_id: str) -> str:
        return f"{self.prefix}body:{request_id}"

    def _own_keys(self, request_id: str) -> list[str]:
        return [self._body_key(request_id), f"{self.prefix}view:{request_id}"]

    def _call(self, verb: str, *args: Any, reply: Any, extra: Sequence[str] = ()) -> Call[Any]:
        return Call(script=_SCRIPTS[verb], keys=(*self.keys, *extra), args=(self.prefix, *args), reply=reply)


def order(raw: bytes) -> Order:
    """Read a message of a worker's channel."""
    verb, request_id, *more = raw.decode().split("|")
    return Order(verb=verb, id=request_id, gateway=more[0] if more else "")


def checksum(claims: Iterable[Claim]) -> str:
    """The sum of a worker's claims, as prelude.lua keeps it."""
    return str(sum(_hash(claim) for claim in claims) % 2**48)


def _hash(claim: Claim) -> int:
    mark = f"{claim.id}#{claim.attempt}" + ("#c" if claim.cancelled else "") + "@" + claim.gateway
    return int(hashlib.sha1(mark.encode(), usedforsecurity=False).hexdigest()[:12], 16)


@lru_cache(maxsize=64)
def _packed_room(room: Room) -> bytes:
    return msgspec.msgpack.encode(
        {
            "kv": room.kv_tokens, "context": room.context_tokens, "total_kv": room.total_kv_tokens,
            "prefill": list(room.prefill_tokens), "idle": room.idle, "reserve": room.reserve, "below": room.below,
            "steal_ms": room.steal_ms, "scan": room.scan,
        }
    )  # fmt: skip


def _text(raw: Any) -> str:
    return raw.decode() if isinstance(raw, bytes) else str(raw)


def _bytes_or_none(raw: Any) -> bytes | None:
    return raw if raw is None or isinstance(raw, bytes) else str(raw).encode()


def _accepted(raw: list[Any]) -> Accepted:
    status = _text(raw[0])
    if status == "accepted":
        return Accepted(status="accepted", place=int(raw[1]), alive=bool(raw[2]))
    if status == "known":
        return Accepted(status="known", state=_text(raw[1]))
    if status != "full":
        return Accepted(status="paused" if status == "paused" else "shed")
    return Accepted(status="full", whose=_text(raw[1]), waiting=int(raw[2]), waiting_tokens=int(raw[3]))


def _claimed(raw: list[Any]) -> Claimed:
    flat, due_ms, passed = raw
    claims = tuple(_claim(*flat[at : at + 8]) for at in range(0, len(flat), 8))
    return Claimed(claims=claims, due_ms=int(due_ms), passed_class=int(passed))


def _claim(
    i: Any, attempt: Any, gateway: Any, trail: Any, cls: Any, input_tokens: Any, need_tokens: Any, message: Any
) -> Claim:
    return Claim(
        id=_text(i), attempt=int(attempt), gateway=_text(gateway), trail=_text(trail), cls=int(cls),
        input_tokens=int(input_tokens), need_tokens=int(need_tokens), message=message,
    )  # fmt: skip


def _beaten(raw: list[Any]) -> Beaten:
    agreed, urgent, *flat = raw
    if agreed == 1:
        return Beaten(urgent=int(urgent), claims=None)
    fours = zip(flat[0::4], flat[1::4], flat[2::4], flat[3::4], strict=True)
    claims = (
        Claim(id=_text(i), attempt=int(attempt), cancelled=bool(cancelled), gateway=_text(gateway))
        for i, attempt, cancelled, gateway in fours
    )
    return Beaten(urgent=int(urgent), claims={claim.id: claim for claim in claims})


def _watched(raw: list[Any]) -> Watched:
    waiting, tokens, started, workers = (int(one) for one in raw[0])
    seen = [_seen(one) for one in raw[1:]]
    return Watched(waiting=waiting, waiting_tokens=tokens, started=started, workers=workers, seen=seen)


def _seen(raw: Any) -> Seen:
    """What `watch` and `attach` say: {state, attempt or place, place}."""
    if not isinstance(raw, list):
        return Seen(state="unknown")
    state = _text(raw[0])
    if state == "ended":
        return Seen(state="ended", ending=msgspec.msgpack.decode(raw[1], type=Ending))
    if state == "elsewhere":
        return Seen(state="elsewhere")
    if state == "running":
        return Seen(state="running", attempt=int(raw[1]))
    return Seen(state="waiting", place=int(raw[-1]))


class _Row(msgspec.Struct):
    """The fields of a row that Python reads."""

    state: str
    attempt: int
    ending: Ending | None = None
    cancelled: str = ""


def _peeked(raw: bytes | None) -> Seen:
    if raw is None:
        return Seen(state="unknown")
    row = msgspec.msgpack.decode(raw, type=_Row)
    state: Any = row.state if row.state in ("running", "ended") else "waiting"
    return Seen(state=state, attempt=row.attempt, ending=row.ending, cancelled=row.cancelled != "")


def _depth(raw: list[Any]) -> Depth:
    *numbers, shed = raw
    c0, c1, c2, c3, tokens, running, oldest_ms, left, dead, workers, paused = (int(one) for one in numbers)
    return Depth(
        waiting=(c0, c1, c2, c3), waiting_tokens=tokens, running=running, oldest_wait_ms=oldest_ms, buried=left == 0,
        dead=dead, workers=workers, stops=Stops(paused=paused == 1, shed=frozenset(map(int, _text(shed)))),
    )  # fmt: skip


def _halted(raw: list[Any]) -> Halted:
    done, left = raw
    return Halted(done=done == 1, left=left == 1)


def _letters(raw: list[Any]) -> tuple[int, list[Letter]]:
    total, letters = raw
    return int(total), [_letter(one) for one in letters]


def _letter(raw: list[Any]) -> Letter:
    request_id, reason, dead_ms, attempt, losses, cls, tenant, input_tokens, message = raw
    return Letter(
        id=_text(request_id), reason=_text(reason), dead_ms=int(dead_ms), attempt=int(attempt), losses=int(losses),
        cls=int(cls), tenant=_text(tenant), input_tokens=int(input_tokens), message=message,
    )  # fmt: skip
