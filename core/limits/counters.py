"""Holds and counters: what a caller may still use, exact across gateways.

| key                       | type | ttl   | writer                     | reader        | holds                        |
|---------------------------|------|-------|----------------------------|---------------|------------------------------|
| {org:<id>}:hold:<request> | HASH | *     | reserve, progress, settle, | the same      | state, scopes, held, charged |
|                           |      |       | late                       |               | debt, money (reserve.lua)    |
| {org:<id>}:open           | ZSET | none  | reserve, progress, settle  | sweep         | request -> reserved at, ms   |
| {org:<id>}:window:<scope> | HASH | 2 min | reserve, progress, settle  | reserve, used | sums and bins of the window  |
|                           |      | idle  |                            |               | (window.lua)                 |

* none while it is open: it lives as long as its request, and every request ends. Then REMEMBER_S; where money
  binds it MONEY_REMEMBER_S, or until its usage was ingested.

Promise   in any 60 s, tokens used + held <= limit in every scope at once, but for the debt of streams admitted before:
          tokens of theirs that came when no room was left. Of what a request may come to, the next moment is held; the
          rest is laid ahead at its pace (window.lua), so a stream that keeps to its pace makes no debt, and one that
          speeds up at most the rest of its max_tokens; new admissions wait for it. A refusal changes nothing,
          and costs nothing. Tokens are added as they are used and never taken back, so a late settle mints nothing.
          A request that money binds generates no more than its allowance (core/limits/balances.py).
Window    half-second bins, each counted until all of it has left: at most half a second more than a minute.
Dies      gateway before enqueue: `sweep` (scaler/clock.py) asks the queue about holds older than SWEEP_MS and settles
          those it does not know; what comes under such an id after all is held anew, or taken up. Worker: the hold goes
          on with the next attempt. Settle lost: the usage consumer makes it again. Redis: web/admission.py. Its data:
          what runs is taken up again by its next report, without limits, and a minute's use is forgotten. Its clock
          goes back: what was used later than now counts as used now, so for longer, and a minute from now at most.
          Cluster: one tag, {org:<id>}.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.limits.balances import UNITS_MAX, leases_key, units_down
from core.limits.balances import key as money_key
from core.limits.pace import in_window
from core.limits.scopes import Left, Limit, of_key
from core.redis import Call, command, scripts, tag
from core.values import Usage

_SCRIPTS = scripts(
    Path(__file__).with_name("lua"),
    shared=("window", "money", "hold"),
    verbs=("reserve", "progress", "settle", "late", "used"),
)

#: Seconds a settled hold is remembered, so that a repeat is told from a stranger.
REMEMBER_S = 3600
#: The same of one that money binds, until its usage is ingested: the longest that Postgres may be away.
MONEY_REMEMBER_S = 30 * 86_400
#: A hold younger than this may belong to a request that is just being enqueued, ms.
SWEEP_MS = 30_000
#: Holds that a sweep looks at at once.
SWEEP_PAGE = 1000
#: Requests in one report of progress: what one exchange costs the store stays below a few milliseconds.
REPORT_MAX = 100

#: Numbers that `reserve` and `used` tell of each scope.
_LEFT = 5


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a request asks for."""

    input_tokens: int
    output_tokens: int  #: that it may come to, as far as is known (core/limits/pace.py)
    least_output_tokens: int  #: of it in a window, will do: less than all where nobody named a limit
    pace: float = 0.0  #: tokens a second that it may come at; 0: all at once

    @property
    def window_tokens(self) -> int:
        """Output that it can come to in one window."""
        return in_window(self.pace, self.output_tokens)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How its tokens count."""

    cached_weight: int = 0  #: thousandths that a cached token of input counts
    prices: tuple[int, int, int] = (0, 0, 0)  #: units for a million tokens of input, cached input, output (balances.py)


FREE = Terms()


@dataclass(frozen=True, kw_only=True)
class Reserved:
    """A hold is open."""

    left: tuple[Left, ...]
    allowance_tokens: int | None = None  #: output that money covers; None: money does not bind it


@dataclass(frozen=True, kw_only=True)
class Refused:
    """No hold was opened."""

    reason: str  #: as reserve.lua names them
    limit: Limit | None  #: the one in the way; None: it is not a limit
    retry_after_ms: int | None  #: None: never, or when something that runs has ended
    left: tuple[Left, ...]


@dataclass(frozen=True, kw_only=True)
class Unleased:
    """The money of a scope is not known here: open its lease (billing/credits.py), and ask again."""

    scope: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a request has come to."""

    request_id: str
    key_id: str
    scopes: tuple[str, ...]
    usage: Usage  #: with no input until it is known what of it was cached
    hold_tokens: int  #: output that may still come, as far as is known (core/limits/pace.py)
    money_tokens: int  #: output that it wants money held for
    pace: float = 0.0  #: tokens a second that it comes at; 0: all at once


@dataclass(frozen=True, kw_only=True)
class Leash:
    """What a running request is told."""

    open: bool  #: False: it was settled
    allowance_tokens: int | None  #: output in all that its money covers; None: money does not bind it
    stopped: str  #: "revoked", "suspended", or nothing
    debt_tokens: int  #: that this report added


@dataclass(frozen=True, kw_only=True)
class Used:
    """What a scope has used in the window, holds, and has left."""

    requests: int
    input_tokens: int
    output_tokens: int
    held_tokens: int
    open: int
    left: Left


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a hold was opened for."""

    model: str
    scopes: tuple[str, ...]


def reserve(
    org_id: str, request_id: str, key_id: str, model: str, limits: Sequence[Limit], need: Need, terms: Terms = FREE
) -> Call[Reserved | Refused | Unleased]:
    """Open a hold in every scope, or in none."""
    args = [request_id, of_key(key_id), model, _joined([limit.scope for limit in limits])]
    numbers = [need.input_tokens, need.output_tokens, need.least_output_tokens, terms.cached_weight, *terms.prices]
    numbers.append(_thousandths(need.pace))
    for limit in limits:
        day, month = (None if one is None else units_down(one) for one in (limit.money_per_day, limit.money_per_month))
        numbers += [-1 if one is None else min(one, UNITS_MAX) for one in (*limit.rates, day, month)]
        numbers.append(int(limit.prepaid))
    keys: tuple[str, ...] = (hold_key(org_id, request_id), _open(org_id), f"{tag('org:' + org_id)}stopped")
    keys += _accounts(org_id, [limit.scope for limit in limits])
    return Call(script=_SCRIPTS["reserve"], keys=keys, args=(*args, *numbers), reply=lambda raw: _reserved(raw, limits))


def progress(org_id: str, reports: Sequence[Report]) -> Call[list[Leash]]:
    """Report what running requests of an organisation have come to; REPORT_MAX at most. Their leashes."""
    keys = [f"{tag('org:' + org_id)}stopped", _open(org_id)]
    args: list[Any] = []
    for one in reports:
        keys += [hold_key(org_id, one.request_id), *_accounts(org_id, one.scopes)]
        args += [one.request_id, of_key(one.key_id), _joined(one.scopes), len(one.scopes)]
        args += [one.usage.input_tokens, one.usage.cached_tokens, one.usage.output_tokens]
        args += [one.hold_tokens, _thousandths(one.pace), one.money_tokens]
    return Call(
        script=_SCRIPTS["progress"], keys=tuple(keys), args=tuple(args), reply=lambda raw: [_leash(r) for r in raw]
    )


def settle(
    org_id: str, request_id: str, scopes: Sequence[str], usage: Usage, *, billed: bool, forgo: bool = False
) -> Call[bool]:
    """Close a hold at what was used. True the first time, False ever after.

    `billed`: its tokens are paid for; `forgo`: it was refused after all, and counts as no request.
    """
    tokens = (usage.input_tokens, usage.cached_tokens, usage.output_tokens)
    args = (request_id, *tokens, int(billed), int(forgo), REMEMBER_S, MONEY_REMEMBER_S)
    keys = (hold_key(org_id, request_id), _open(org_id), *_accounts(org_id, scopes))
    return Call(script=_SCRIPTS["settle"], keys=keys, args=args, reply=bool)


def late(org_id: str, request_id: str, scopes: Sequence[str], ingest: int, cost: int) -> Call[bool]:
    """Usage was ingested, as the organisation's ingest of that number, and costs so many units (balances.py): charge it
    where neither a lease's figures nor the hold have, and where the hold has charged otherwise, make it so. `scopes`:
    the hold's, in its order, and any others that may have a lease. After `settle`; repeat at will, until `ingested`."""
    keys = (hold_key(org_id, request_id), leases_key(org_id), *(money_key(org_id, scope) for scope in scopes))
    return Call(script=_SCRIPTS["late"], keys=keys, args=(ingest, cost, MONEY_REMEMBER_S), reply=bool)


def ingested(org_id: str, request_id: str) -> Call[bool]:
    """Its usage is struck out of the log: it will not come again, so its hold need not be remembered for longer."""
    return command("EXPIRE", hold_key(org_id, request_id), REMEMBER_S, "LT", reply=bool)


def used(org_id: str, limits: Sequence[Limit]) -> Call[list[Used]]:
    """What scopes have used. Changes nothing."""
    keys = tuple(_used(org_id, limit.scope) for limit in limits)
    args = tuple(-1 if one is None else min(one, UNITS_MAX) for limit in limits for one in limit.rates[:4])
    return Call(
        script=_SCRIPTS["used"],
        keys=keys,
        args=args,
        reply=lambda raw: [_read(one, limit) for one, limit in zip(raw, limits, strict=True)],
    )


def open_before(org_id: str, at_ms: int, *, skip: int = 0) -> Call[list[str]]:
    """Requests reserved before `at_ms` whose holds are open, oldest first: SWEEP_PAGE of them, after `skip`."""
    words = ("ZRANGEBYSCORE", _open(org_id), "-inf", at_ms, "LIMIT", skip, SWEEP_PAGE)
    return command(*words, reply=lambda raw: [one.decode() for one in raw])


def held_for(org_id: str, request_id: str) -> Call[Held | None]:
    """What a hold was opened for; None: there is no such hold."""
    return command("HMGET", hold_key(org_id, request_id), "model", "scopes", reply=_held)


def forget(org_id: str, request_id: str) -> Call[int]:
    """An open request without a hold: there is nothing to settle."""
    return command("ZREM", _open(org_id), request_id, reply=int)


def unknown(org_id: str, request_id: str) -> Call[int]:
    """The hold was settled, and its request never came. Should it come yet, it is a new one, and counts."""
    return command("DEL", hold_key(org_id, request_id), reply=int)


def hold_key(org_id: str, request_id: str) -> str:
    return f"{tag('org:' + org_id)}hold:{request_id}"


def _open(org_id: str) -> str:
    return f"{tag('org:' + org_id)}open"


def _used(org_id: str, scope: str) -> str:
    return f"{tag('org:' + org_id)}window:{scope}"


def _accounts(org_id: str, scopes: Sequence[str]) -> tuple[str, ...]:
    """The counter and the money of each scope."""
    return tuple(key for scope in scopes for key in (_used(org_id, scope), money_key(org_id, scope)))


def _thousandths(pace: float) -> int:
    """The slowest pace is no standstill, which would mean all at once."""
    return max(round(pace * 1000), 1) if pace else 0


def _joined(scopes: Sequence[str]) -> str:
    return ",".join(scopes)


def _reserved(raw: list[Any], limits: Sequence[Limit]) -> Reserved | Refused | Unleased:
    if raw[0] == 1:
        return Reserved(left=_lefts(raw[2:], limits), allowance_tokens=None if raw[1] < 0 else raw[1])
    reason, scope, retry_after_ms = raw[1].decode(), raw[2], raw[3]
    limit = limits[scope - 1] if scope else None
    if reason == "unleased" and limit is not None:
        return Unleased(scope=limit.scope)
    after_ms = None if retry_after_ms < 0 else retry_after_ms
    return Refused(reason=reason, limit=limit, retry_after_ms=after_ms, left=_lefts(raw[4:], limits))


def _lefts(raw: Sequence[int], limits: Sequence[Limit]) -> tuple[Left, ...]:
    return tuple(_left(raw[_LEFT * n : _LEFT * (n + 1)], limit) for n, limit in enumerate(limits))


def _left(raw: Sequence[int], limit: Limit) -> Left:
    requests, tokens, input_tokens, output_tokens = (None if one < 0 else one for one in raw[:4])
    return Left(
        limit=limit,
        requests=requests,
        tokens=tokens,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        reset_ms=raw[4],
    )


def _leashes(raw: Sequence[Any]) -> list[Leash]:
    return [_leash(one) for one in raw]


def _leash(raw: Sequence[Any]) -> Leash:
    return Leash(
        open=raw[0] == 1,
        allowance_tokens=None if raw[1] < 0 else raw[1],
        stopped=raw[2].decode(),
        debt_tokens=raw[3],
    )


def _read(raw: Sequence[int], limit: Limit) -> Used:
    requests, input_tokens, output_tokens, held_in, held_out, running = raw[:6]
    return Used(
        requests=requests,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        held_tokens=held_in + held_out,
        open=running,
        left=_left(raw[6:], limit),
    )


def _held(raw: list[bytes | None]) -> Held | None:
    model, names = raw
    if names is None:
        return None
    return Held(model=model.decode() if model else "", scopes=tuple(names.decode().split(",")))
