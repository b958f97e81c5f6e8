"""The fleet: who is there, in which state, and what each host is to run.

| key                     | type | ttl  | writer                 | reader            | holds                     |
|-------------------------|------|------|------------------------|-------------------|---------------------------|
| f1:{model}:workers      | HASH | none | the worker, every beat | scaler, web, ops  | worker -> Worker, msgpack |
| f1:{model}:workers_seen | ZSET | none | with workers           | `present`         | worker -> last seen, ms   |
| f1:{fleet}:hosts        | HASH | none | the host's agent       | scaler, ops       | host -> Host, msgpack     |
| f1:{fleet}:hosts_seen   | ZSET | none | with hosts             | `present`         | host -> last seen, ms     |
| f1:{fleet}:assignments  | HASH | none | the scaler             | that host's agent | host -> {model: count}    |
| f1:{fleet}:wanted       | ZSET | none | gateways; the scaler   | scaler            | model -> since when, ms   |

Promise   a row not renewed for FORGET_MS is gone; times are the store's, those of `wanted` the gateway's. However many
          requests find a model without a worker, it is wanted once, until a worker of it is there.
Dies      worker: its agent removes its row, else it is forgotten. Host: forgotten, with what it was assigned. Scaler:
          agents go on with the last assignment. Store: agents go on, rows come back with the next beat.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from core.outlook import Starting
from core.redis import Call, command, scripts, tag
from core.values import WorkerState

_SCRIPTS = scripts(Path(__file__).with_name("lua"), shared=(), verbs=("announce", "present"))
_FLEET = tag("fleet")

#: Nobody is this late and comes back, ms.
FORGET_MS = 30_000


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One process, one engine, one life."""

    worker: str
    host: str
    model: str
    state: WorkerState
    pid: int = 0
    slots: int = 0
    running: int = 0
    detail: str = ""  #: what it is doing, for people
    since_ms: int = 0  #: how long it has been in this state
    kv_tokens: int = 0  #: what its engine's KV cache holds in all; 0: not known yet
    context_tokens: int = 0  #: the longest context its engine takes; 0: not known yet
    seen_ms: int = 0  #: ago; filled by the reader


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """A machine and its agent."""

    host: str
    room: int = 1  #: workers it can hold in all
    draining: bool = False
    workers: dict[str, int] = {}  #: model -> processes that run
    seen_ms: int = 0  #: ago; filled by the reader


def announce_worker(row: Worker) -> Call[bool]:
    return _announce(f"{tag(row.model)}workers", row.worker, row)


def announce_host(row: Host) -> Call[bool]:
    return _announce(f"{_FLEET}hosts", row.host, row)


def workers(model: str) -> Call[list[Worker]]:
    """The workers of a model, in any state."""
    return _present(f"{tag(model)}workers", Worker)


def hosts() -> Call[list[Host]]:
    return _present(f"{_FLEET}hosts", Host)


def remove_worker(model: str, worker: str) -> Call[int]:
    """The worker is gone, and somebody knows it."""
    return command("HDEL", f"{tag(model)}workers", worker, reply=int)


def assign(host: str, counts: dict[str, int]) -> Call[int]:
    """What the host is to run: model -> workers."""
    return command("HSET", f"{_FLEET}assignments", host, msgspec.msgpack.encode(counts), reply=int)


def assignment(host: str) -> Call[dict[str, int] | None]:
    """What the host is to run; None: no scaler has said."""
    return command("HGET", f"{_FLEET}assignments", host, reply=_counts)


def assigned() -> Call[list[str]]:
    """Hosts that something was assigned to, gone ones included."""
    return command("HKEYS", f"{_FLEET}assignments", reply=lambda raw: [host.decode() for host in raw])


def unassign(host: str) -> Call[int]:
    """The host is gone."""
    return command("HDEL", f"{_FLEET}assignments", host, reply=int)


def want(model: str, now_ms: int) -> Call[bool]:
    """A request waits for this model, and no worker is alive. True: nobody had asked for one yet."""
    return command("ZADD", f"{_FLEET}wanted", "NX", now_ms, model, reply=bool)


def wanted() -> Call[dict[str, int]]:
    """The models that a worker was asked for, and since when, ms."""
    return command("ZRANGE", f"{_FLEET}wanted", 0, -1, "WITHSCORES", reply=_times)


def met(model: str) -> Call[int]:
    """A worker of it is there, or on its way."""
    return command("ZREM", f"{_FLEET}wanted", model, reply=int)


# --- what the rows say


def starting(rows: Iterable[Worker]) -> Starting | None:
    """The worker that is awaited: the one nearest to being ready, when none is. Without any row one was asked for."""
    states = {row.state: row for row in sorted(rows, key=lambda row: row.since_ms)}
    if WorkerState.READY in states:
        return None
    for state in (WorkerState.WARMING, WorkerState.LOADING, WorkerState.FETCHING, WorkerState.BOOTING):
        if state in states:
            row = states[state]
            return Starting(state=state, detail=row.detail, since_ms=row.since_ms + row.seen_ms)
    return Starting(state=WorkerState.LAUNCHING, detail="a worker was asked for")


def largest(rows: Iterable[Worker]) -> tuple[int, int]:
    """The most KV cache and the longest context, in tokens, that any worker has; 0: none has said."""
    seen = list(rows)
    return max((row.kv_tokens for row in seen), default=0), max((row.context_tokens for row in seen), default=0)


def _announce(key: str, name: str, row: msgspec.Struct) -> Call[bool]:
    return Call(
        script=_SCRIPTS["announce"], keys=(key, key + "_seen"), args=(name, msgspec.msgpack.encode(row)), reply=bool
    )


def _present(key: str, kind: type[Any]) -> Call[list[Any]]:
    return Call(
        script=_SCRIPTS["present"],
        keys=(key, key + "_seen"),
        args=(FORGET_MS,),
        reply=lambda raw: [
            msgspec.structs.replace(msgspec.msgpack.decode(row, type=kind), seen_ms=int(ago))
            for row, ago in zip(raw[0::2], raw[1::2], strict=True)
            if row is not None
        ],
    )


def _times(raw: Any) -> dict[str, int]:
    # In pairs, one by one or nested, as the protocol's version has it.
    flat = [word for one in raw for word in (one if isinstance(one, list | tuple) else (one,))]
    return {model.decode(): int(float(ms)) for model, ms in zip(flat[0::2], flat[1::2], strict=True)}


def _counts(raw: Any) -> dict[str, int] | None:
    return None if raw is None else msgspec.msgpack.decode(raw, type=dict[str, int])
