"""Holds and counters: what a caller may still use, exact across gateways.

| key                       | type | ttl  | writer                    | reader   | holds                         |
|---------------------------|------|------|---------------------------|----------|-------------------------------|
| {org:<id>}:hold:<request> | HASH | 1 h* | reserve, progress, settle | the same | state, model, scopes, charged |
| {org:<id>}:open           | ZSET | none | reserve, settle           | sweep    | request -> reserved at, ms    |
| {org:<id>}:used:<scope>   | HASH | none | reserve, progress, settle | reserve  | running; r<second>, t<second> |

* from settle on; an open hold has none: it lives as long as its request, and every request ends.
  r<second> counts requests begun, t<second> tokens; bins older than a minute go with the next reserve.

Promise   in any 60 s at most `requests_per_minute` are begun, and never more than `concurrent_requests` are open, in
          every scope at once. A refusal changes nothing.
Dies      gateway before enqueue: `sweep` (scaler/clock.py) asks the queue about holds older than SWEEP_MS and settles
          those it does not know. Worker: the hold goes on with the next attempt. Settle lost: the usage consumer makes
          it again. Redis: no admission (503). Cluster: one tag, {org:<id>}.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.limits.scopes import Limit
from core.redis import Call, command, scripts, tag

_SCRIPTS = scripts(Path(__file__).with_name("lua"), shared=(), verbs=("reserve", "progress", "settle", "used"))

#: Seconds a settled hold is remembered, so that a repeat is told from a stranger.
REMEMBER_S = 3600
#: A hold younger than this may belong to a request that is just being enqueued, ms.
SWEEP_MS = 30_000
#: Holds that a sweep looks at at once.
SWEEP_PAGE = 1000


@dataclass(frozen=True, kw_only=True)
class Reserved:
    """A hold was opened: what the tightest scope has left."""

    requests_limit: int | None
    requests_left: int | None
    reset_ms: int


@dataclass(frozen=True, kw_only=True)
class Refused:
    """No hold was opened."""

    limit: Limit
    reason: str  #: "requests" or "concurrency"
    retry_after_ms: int | None  #: None: when a running request ends


@dataclass(frozen=True, kw_only=True)
class Used:
    """What a scope has used in the last 60 s, and has open."""

    requests: int
    tokens: int
    open: int
    reset_ms: int  #: until the oldest of these requests is counted no more


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a hold was opened for."""

    model: str
    scopes: tuple[str, ...]


def reserve(org_id: str, request_id: str, model: str, limits: Sequence[Limit]) -> Call[Reserved | Refused]:
    """Open a hold in every scope, or in none."""
    numbers = (n for limit in limits for n in (limit.requests_per_minute, limit.concurrent_requests))
    names = ",".join(limit.scope for limit in limits)
    args = (request_id, model, names, *(-1 if n is None else n for n in numbers))
    keys = _keys(org_id, request_id, [limit.scope for limit in limits])
    return Call(script=_SCRIPTS["reserve"], keys=keys, args=args, reply=lambda raw: _reserved(raw, limits))


def progress(org_id: str, so_far: Sequence[tuple[str, str, int]]) -> Call[list[bool]]:
    """Report (request, scope of its key, tokens so far) of one organisation. False: the hold is not open."""
    keys = tuple(key for request, scope, _ in so_far for key in (_hold(org_id, request), _used(org_id, scope)))
    tokens = tuple(tokens for _, _, tokens in so_far)
    return Call(script=_SCRIPTS["progress"], keys=keys, args=tokens, reply=lambda raw: [one == 1 for one in raw])


def settle(org_id: str, request_id: str, scopes: Sequence[str], used_tokens: int) -> Call[bool]:
    """Close a hold. True the first time, False ever after."""
    args = (request_id, used_tokens, REMEMBER_S)
    return Call(script=_SCRIPTS["settle"], keys=_keys(org_id, request_id, scopes), args=args, reply=bool)


def used(org_id: str, scope: str) -> Call[Used]:
    """What a scope has used. Changes nothing."""
    return Call(script=_SCRIPTS["used"], keys=(_used(org_id, scope),), reply=_read)


def open_before(org_id: str, at_ms: int, *, page: int = 0) -> Call[list[str]]:
    """Requests reserved before `at_ms` whose holds are open, oldest first, SWEEP_PAGE of them."""
    words = ("ZRANGEBYSCORE", f"{tag('org:' + org_id)}open", "-inf", at_ms, "LIMIT", page * SWEEP_PAGE, SWEEP_PAGE)
    return command(*words, reply=lambda raw: [one.decode() for one in raw])


def held_for(org_id: str, request_id: str) -> Call[Held | None]:
    """What a hold was opened for; None: there is no such hold."""
    return command("HMGET", _hold(org_id, request_id), "model", "scopes", reply=_held)


def forget(org_id: str, request_id: str) -> Call[int]:
    """An open request without a hold: there is nothing to settle."""
    return command("ZREM", f"{tag('org:' + org_id)}open", request_id, reply=int)


def _hold(org_id: str, request_id: str) -> str:
    return f"{tag('org:' + org_id)}hold:{request_id}"


def _used(org_id: str, scope: str) -> str:
    return f"{tag('org:' + org_id)}used:{scope}"


def _keys(org_id: str, request_id: str, scopes: Sequence[str]) -> tuple[str, ...]:
    used = (_used(org_id, scope) for scope in scopes)
    return (_hold(org_id, request_id), f"{tag('org:' + org_id)}open", *used)


def _reserved(raw: list[Any], limits: Sequence[Limit]) -> Reserved | Refused:
    if raw[0] == 0:
        reason = raw[2].decode() if isinstance(raw[2], bytes) else str(raw[2])
        return Refused(limit=limits[raw[1] - 1], reason=reason, retry_after_ms=None if raw[3] < 0 else raw[3])
    left = [
        (limit.requests_per_minute, n, ms) for limit, n, ms in zip(limits, raw[1::2], raw[2::2], strict=True) if n >= 0
    ]
    if not left:
        return Reserved(requests_limit=None, requests_left=None, reset_ms=0)
    most, requests_left, reset_ms = min(left, key=lambda one: one[1])
    return Reserved(requests_limit=most, requests_left=requests_left, reset_ms=reset_ms)


def _read(raw: list[int]) -> Used:
    requests, tokens, running, reset_ms = raw
    return Used(requests=requests, tokens=tokens, open=running, reset_ms=reset_ms)


def _held(raw: list[bytes | None]) -> Held | None:
    model, names = raw
    if model is None or names is None:
        return None
    return Held(model=model.decode(), scopes=tuple(names.decode().split(",")))
