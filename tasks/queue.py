"""The queue of one model: what waits, who has what, how it ends. One hash tag a model; every key begins `f1:{model}:`.

| key       | type      | writer                  | reader          | holds                                        |
|-----------|-----------|-------------------------|-----------------|----------------------------------------------|
| waiting   | ZSET, lex | enqueue, claim, endings | claim, watch    | `class|tenant|arrival|id`, score 0           |
| tenants   | ZSET      | with waiting, service   | claim           | `class|tenant` by class, then service        |
| service   | HASH      | claim, beat, finish     | with tenants    | tenant -> virtual tokens it was served       |
| due       | ZSET      | with waiting            | claim           | id -> since when its wait is too long, ms    |
| rows      | HASH      | every verb              | every verb      | id -> msgpack map: state, attempt, worker, … |
| tasks     | HASH      | enqueue, endings        | claim           | id -> Dramatiq message (ids only)            |
| body:<id> | STRING    | enqueue; finish, cancel | the worker      | the Request; TTL BODY_MS at the latest       |
| claims    | ZSET, lex | claim, endings          | beat, reaper    | `worker|id`                                  |
| leases    | ZSET      | claim, beat             | reaper          | worker -> when its claims are given up, ms   |
| sums      | HASH      | claim, cancel, endings  | beat            | worker -> sum over its claims, 48 bits       |
| nonces    | HASH      | claim                   | claim           | worker -> its last claim, told again if lost |
| deadlines | ZSET      | with waiting            | timers          | id -> ms                                     |
| delays    | ZSET      | enqueue                 | timers          | id -> when it may run, ms                    |
| forget    | ZSET      | endings                 | timers          | id -> when its ended row goes, ms            |
| counters  | HASH      | every verb              | tick, watch     | depth per class, tokens, totals              |
| wake      | ZSET      | enqueue, claim          | idle workers    | one marker; carries no data, may be lost     |
| gateways  | ZSET      | watch                   | (later: attach) | gateway -> lease end, ms                     |
| usage     | STREAM    | endings                 | core/usage.py   | one entry per ending that has facts          |

Channels: `gateway:<id>` frames and endings (core/stream), `worker:<id>` ids that their callers cancelled.

Promise   an id is accepted once, and ends once. A claim is a right to one attempt; who lost it changes nothing more.
Dies      worker: its agent says so (`tick`), or its lease runs out; its claims go back to the front of their line, or
          end as `worker_lost` where a second run would show. Gateway: its requests run on and end. Store: scripts are
          atomic; after a silence every lease starts anew (endings.lua `hear`), so an outage re-runs nothing.
          Cluster: one slot a model, every key in KEYS.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from dramatiq.message import Message

from core.redis import Call, command, scripts, tag
from core.usage import facts
from core.values import Class, Ending, Outcome, Request, Usage

_KEYS = (
    "waiting", "tenants", "rows", "tasks", "claims", "leases", "sums", "deadlines", "delays", "forget", "counters",
    "wake", "usage", "nonces", "gateways", "service", "due",
)  # fmt: skip
_VERBS = ("enqueue", "claim", "beat", "deliver", "finish", "hand_back", "cancel", "watch", "tick")
_SCRIPTS = scripts(Path(__file__).with_name("lua"), shared=("prelude", "order", "endings"), verbs=_VERBS)

#: How long a body outlives everything that should have deleted it, ms.
BODY_MS = 24 * 3600 * 1000
#: Most that may wait for one model. Past it enqueue refuses.
WAITING_MAX = 100_000
#: How long a request may wait before it is overdue, ms: one claim in sixteen goes to whoever is overdue longest.
DUE_MS = {Class.SYSTEM: 1_000, Class.INTERACTIVE: 5_000, Class.DEFAULT: 30_000, Class.BULK: 300_000}
#: Most ids that one `watch` asks after.
WATCH_MAX = 500


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is put on the queue: a message that carries ids only, and what the queue must know of it."""

    id: str
    message: bytes
    cls: int = Class.DEFAULT
    tenant: str = "-"  #: whom fairness counts; never contains "|"
    gateway: str = ""  #: where its ending is told; empty: nowhere
    rerunnable: bool = True  #: may run again after tokens were published
    input_tokens: int = 0
    weight: float = 1.0  #: a tenant of weight 2 gets twice the tokens of one of weight 1
    patience_ms: int = 0  #: how long it may wait before it is ended unrun; 0: as long as it takes
    delay_ms: int = 0
    facts: bytes = b""  #: for the usage entry; empty: it makes none
    body: bytes = b""


@dataclass(frozen=True, kw_only=True)
class Accepted:
    status: Literal["accepted", "known", "full"]
    place: int = 0  #: 1: next
    state: str = ""  #: of the row, when known


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A worker's right to one attempt."""

    id: str
    attempt: int
    message: bytes
    cancelled: bool = False


@dataclass(frozen=True, kw_only=True)
class Claimed:
    claims: tuple[Claim, ...]
    due_ms: int  #: until a delayed task is due; -1: none


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What the queue says of an open request."""

    state: Literal["unknown", "waiting", "running", "ended"]
    place: int = 0
    attempt: int = 0
    ending: Ending | None = None


@dataclass(frozen=True, kw_only=True)
class Depth:
    """The queue at a glance."""

    waiting: tuple[int, int, int, int]  #: per class
    waiting_tokens: int
    running: int
    oldest_wait_ms: int
    buried: bool  #: the dead worker named has no claim left


def generation(request: Request) -> Task:
    """The task of a request: the message names the actor and the id; the request itself is the task's body."""
    message: Message[None] = Message(
        queue_name=request.model,
        actor_name="generate",
        args=(request.id,),
        kwargs={},
        options={},
        message_id=request.id,
    )
    return Task(
        id=request.id,
        message=message.encode(),
        cls=request.cls,
        tenant=request.caller.org_id,
        gateway=request.gateway,
        rerunnable=request.rerunnable,
        input_tokens=len(request.prompt_token_ids),
        patience_ms=request.patience_ms,
        facts=facts(request),
        body=msgspec.msgpack.encode(request),
    )


class Queue:
    """Builds the Calls of one model's queue."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.prefix = tag(model)
        self.keys = tuple(self.prefix + name for name in _KEYS)
        self.wake_key = self.prefix + "wake"

    def worker_channel(self, worker: str) -> str:
        return f"{self.prefix}worker:{worker}"

    def enqueue(self, task: Task, *, attempt: int = 0, delivered_tokens: int = 0) -> Call[Accepted]:
        """Put a task on the queue, once. `attempt` and `delivered_tokens`: when the store forgot a running request."""
        args = (
            task.id, task.message, int(task.cls), task.tenant, task.gateway, int(task.rerunnable), task.input_tokens,
            task.patience_ms, task.delay_ms, task.facts, task.body, BODY_MS, WAITING_MAX, attempt, delivered_tokens,
            task.weight, DUE_MS[Class(task.cls)],
        )  # fmt: skip
        return self._call("enqueue", *args, body_of=task.id, reply=_accepted)

    def claim(self, worker: str, want: int, *, lease_ms: int, nonce: str) -> Call[Claimed]:
        """Take at most `want` tasks, and renew the worker's lease."""
        return self._call("claim", worker, want, lease_ms, nonce, reply=_claimed)

    def beat(
        self, worker: str, claims: Iterable[Claim], *, lease_ms: int, served: Sequence[tuple[Claim, int]] = ()
    ) -> Call[dict[str, Claim] | None]:
        """Renew the lease, and charge tenants for output so far: (claim, tokens).

        None: the queue agrees on the claims; else the claims as the queue has them.
        """
        triples = (word for claim, tokens in served for word in (claim.id, claim.attempt, tokens))
        return self._call("beat", worker, lease_ms, checksum(claims), *triples, reply=_claims_differ)

    def part(self, worker: str) -> Call[Any]:
        """The worker is leaving, with nothing in hand: its lease is forgotten."""
        return self._call("beat", worker, 0, "", reply=lambda raw: None)

    def deliver(self, worker: str, claims: Sequence[Claim]) -> Call[list[bool]]:
        """Their first tokens are about to be published. False: fenced."""
        pairs = (word for claim in claims for word in (claim.id, claim.attempt))
        return self._call("deliver", worker, *pairs, reply=lambda raw: [bool(ours) for ours in raw])

    def finish(self, worker: str, claim: Claim, outcome: Outcome, usage: Usage, message: str = "") -> Call[bool]:
        """End a request. False: fenced, somebody else has it. True also for a repeat."""
        counts = (usage.input_tokens, usage.cached_tokens, usage.output_tokens, usage.reasoning_tokens)
        args = (worker, claim.id, claim.attempt, outcome.value, *counts, message)
        return self._call("finish", *args, body_of=claim.id, reply=bool)

    def hand_back(self, worker: str, claims: Sequence[Claim]) -> Call[int]:
        """Return what this worker will not finish."""
        pairs = (word for claim in claims for word in (claim.id, claim.attempt))
        return self._call("hand_back", worker, *pairs, reply=int)

    def cancel(self, request_id: str) -> Call[str]:
        """The caller wants it no more: "unknown", "ended", "cancelled" (it waited), "running" (its worker was told)."""
        return self._call("cancel", request_id, body_of=request_id, reply=_text)

    def watch(self, gateway: str, ids: Sequence[str], *, lease_ms: int) -> Call[list[Seen]]:
        """A gateway asks after its open requests, at most WATCH_MAX of them."""
        assert len(ids) <= WATCH_MAX, "ask in pieces"
        return self._call("watch", gateway, lease_ms, *ids, reply=lambda raw: [_seen(one) for one in raw])

    def tick(self, dead_worker: str = "") -> Call[Depth]:
        """Run the timers and look; bury a worker that its host saw die."""
        return self._call("tick", dead_worker, reply=_depth)

    def body(self, request_id: str) -> Call[bytes | None]:
        """The body of a request; None when it has ended."""
        return command("GET", self._body_key(request_id), reply=_bytes_or_none)

    def _body_key(self, request_id: str) -> str:
        return f"{self.prefix}body:{request_id}"

    def _call(self, verb: str, *args: Any, reply: Any, body_of: str | None = None) -> Call[Any]:
        keys = self.keys if body_of is None else (*self.keys, self._body_key(body_of))
        return Call(script=_SCRIPTS[verb], keys=keys, args=(self.prefix, *args), reply=reply)


def checksum(claims: Iterable[Claim]) -> str:
    """The sum of a worker's claims, as prelude.lua keeps it."""
    return str(sum(_hash(claim) for claim in claims) % 2**48)


def _hash(claim: Claim) -> int:
    mark = f"{claim.id}#{claim.attempt}" + ("#c" if claim.cancelled else "")
    return int(hashlib.sha1(mark.encode(), usedforsecurity=False).hexdigest()[:12], 16)


def _text(raw: Any) -> str:
    return raw.decode() if isinstance(raw, bytes) else str(raw)


def _bytes_or_none(raw: Any) -> bytes | None:
    return raw if raw is None or isinstance(raw, bytes) else str(raw).encode()


def _accepted(raw: list[Any]) -> Accepted:
    status = _text(raw[0])
    if status == "accepted":
        return Accepted(status="accepted", place=int(raw[1]))
    if status == "known":
        return Accepted(status="known", state=_text(raw[1]))
    return Accepted(status="full", place=int(raw[1]))


def _claimed(raw: list[Any]) -> Claimed:
    flat, due_ms = raw
    triples = zip(flat[0::3], flat[1::3], flat[2::3], strict=True)
    claims = tuple(Claim(id=_text(i), attempt=int(attempt), message=message) for i, attempt, message in triples)
    return Claimed(claims=claims, due_ms=int(due_ms))


def _claims_differ(raw: list[Any]) -> dict[str, Claim] | None:
    if raw[0] == 1:
        return None
    triples = zip(raw[1::3], raw[2::3], raw[3::3], strict=True)
    claims = (Claim(id=_text(i), attempt=int(a), message=b"", cancelled=bool(c)) for i, a, c in triples)
    return {claim.id: claim for claim in claims}


def _seen(raw: Any) -> Seen:
    if not isinstance(raw, list):
        return Seen(state="unknown")
    state = _text(raw[0])
    if state == "ended":
        return Seen(state="ended", ending=msgspec.msgpack.decode(raw[1], type=Ending))
    if state == "running":
        return Seen(state="running", attempt=int(raw[1]))
    return Seen(state="waiting", place=int(raw[1]))


def _depth(raw: list[Any]) -> Depth:
    c0, c1, c2, c3, tokens, running, oldest_ms, left = (int(one) for one in raw)
    return Depth(
        waiting=(c0, c1, c2, c3), waiting_tokens=tokens, running=running, oldest_wait_ms=oldest_ms, buried=left == 0
    )
