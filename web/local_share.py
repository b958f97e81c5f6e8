"""What one gateway admits by itself while limits cannot be counted together: a share of each rate, for a while. Pure.

    share     limit / live gateways * SHARE, rounded down: all gateways together stay below the limit, also if twice as
              many are alive as were seen. Only a minute with both sides of an outage in it may see both: up to the
              limit before it, and the shares
    LOCAL_S   from the first failure; then nothing is admitted until the store is back

Counted as the scripts do (core/limits/lua/window.lua): half-second bins, each until all of it has left the minute.
What runs holds what it needs until it is settled. An outage that follows soon after another finds what was used then.
Times are a monotonic clock's, seconds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from core.limits.counters import Need
from core.values import Limit

#: How long a gateway goes by its share, seconds.
LOCAL_S = 60.0
#: How much of what would be its part a gateway takes.
SHARE = 0.5

BIN_S, WINDOW_S = 0.5, 60.0


@dataclass
class _Bin:
    number: int
    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0


@dataclass
class _Counter:
    """One scope."""

    bins: deque[_Bin] = field(default_factory=deque)
    held_in: int = 0
    held_out: int = 0
    running: int = 0

    def add(self, now_s: float, requests: int, input_tokens: int, output_tokens: int) -> None:
        number = int(now_s / BIN_S)
        if not self.bins or self.bins[-1].number != number:
            self.bins.append(_Bin(number))
        newest = self.bins[-1]
        newest.requests += requests
        newest.input_tokens += input_tokens
        newest.output_tokens += output_tokens

    def used(self, now_s: float) -> tuple[int, int, int]:
        """Requests, input, output of the window, with what is held."""
        while self.bins and (self.bins[0].number + 1) * BIN_S + WINDOW_S <= now_s:
            self.bins.popleft()
        requests, *tokens = (sum(column) for column in zip((0, 0, 0), *map(_row, self.bins), strict=True))
        return requests, tokens[0] + self.held_in, tokens[1] + self.held_out


def _row(one: _Bin) -> tuple[int, int, int]:
    return one.requests, one.input_tokens, one.output_tokens


class LocalShare:
    """The counters of one process."""

    def __init__(self) -> None:
        self._counters: dict[str, dict[str, _Counter]] = {}  #: organisation -> scope -> its counter
        self._holds: dict[str, tuple[list[_Counter], Need]] = {}  #: request -> where it holds, and what

    def admit(
        self, org_id: str, request_id: str, limits: Sequence[Limit], need: Need, *, gateways: int, now_s: float
    ) -> Limit | None:
        """Hold what a request needs in every scope, or in none: then the limit whose share is too small is returned."""
        if request_id in self._holds:
            return None
        ours = self._counters.setdefault(org_id, {})
        counters = [ours.setdefault(limit.scope, _Counter()) for limit in limits]
        for limit, counter in zip(limits, counters, strict=True):
            if not _fits(limit, counter, need, gateways, now_s):
                return limit
        for counter in counters:
            counter.running += 1
            counter.held_in += need.input_tokens
            counter.held_out += need.window_tokens
            counter.add(now_s, 1, 0, 0)
        self._holds[request_id] = counters, need
        return None

    def settle(self, request_id: str, input_tokens: int, output_tokens: int, *, now_s: float) -> None:
        """It has ended; what it used counts for a minute. One that was not admitted here changes nothing."""
        counters, need = self._holds.pop(request_id, ([], _NOTHING))
        for counter in counters:
            counter.running -= 1
            counter.held_in -= need.input_tokens
            counter.held_out -= need.window_tokens
            counter.add(now_s, 0, input_tokens, output_tokens)


_NOTHING = Need(input_tokens=0, output_tokens=0, least_output_tokens=0)


def part(limit: int, gateways: int) -> int:
    """What one gateway takes of a limit."""
    return math.floor(limit * SHARE / max(gateways, 1))


def _fits(limit: Limit, counter: _Counter, need: Need, gateways: int, now_s: float) -> bool:
    requests, input_tokens, output_tokens = counter.used(now_s)
    wants = (
        (limit.requests_per_minute, requests + 1),
        (limit.tokens_per_minute, input_tokens + output_tokens + need.input_tokens + need.window_tokens),
        (limit.input_tokens_per_minute, input_tokens + need.input_tokens),
        (limit.output_tokens_per_minute, output_tokens + need.window_tokens),
        (limit.concurrent_requests, counter.running + 1),
    )
    return all(most is None or want <= part(most, gateways) for most, want in wants)
