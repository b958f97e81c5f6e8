"""What a caller is told of its limits: OpenAI's `x-ratelimit-*` headers, Anthropic's, and OpenAI's event. Pure.

Of each thing that is limited, the scope with least left is told of; `x-limit-scope` names the kind of scope that is
nearest to its end. Where nothing is limited there is nothing to tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from core.limits.scopes import Left
from core.values import Limit

#: What is limited by the minute: its name in headers, its limit, and what is left of it.
_RATES: tuple[tuple[str, Callable[[Limit], int | None], Callable[[Left], int | None]], ...] = (
    ("requests", lambda limit: limit.requests_per_minute, lambda left: left.requests),
    ("tokens", lambda limit: limit.tokens_per_minute, lambda left: left.tokens),
    ("input-tokens", lambda limit: limit.input_tokens_per_minute, lambda left: left.input_tokens),
    ("output-tokens", lambda limit: limit.output_tokens_per_minute, lambda left: left.output_tokens),
)


@dataclass(frozen=True)
class Rate:
    """One rate of one scope."""

    name: str
    scope: str
    limit: int
    left: int
    reset_ms: int  #: until all of it is free again

    @property
    def share(self) -> float:
        """What is left, of all; a limit of nothing has nothing left."""
        return self.left / self.limit if self.limit else 0.0


def told(lefts: Sequence[Left], *, now_ms: int, anthropic: bool = False, scope: str = "") -> dict[str, str]:
    """The headers. `now_ms`: since the epoch, for Anthropic's times. `scope`: the one that refused, if one did."""
    headers: dict[str, str] = {}
    rates = _tightest(lefts)
    for rate in rates:
        headers |= _openai(rate)
        if anthropic:
            headers |= _anthropic(rate, now_ms)
    binding = scope or (min(rates, key=lambda rate: rate.share).scope if rates else "")
    return headers | ({"x-limit-scope": kind(binding)} if binding else {})


def event(lefts: Sequence[Left], event_id: str) -> dict[str, Any] | None:
    """The same for a WebSocket, as OpenAI's `rate_limits.updated` says it; None: nothing is limited."""
    rates = [
        {
            "name": rate.name.replace("-", "_"),
            "limit": rate.limit,
            "remaining": rate.left,
            "reset_seconds": rate.reset_ms / 1000,
        }
        for rate in _tightest(lefts)
    ]
    return {"type": "rate_limits.updated", "event_id": event_id, "rate_limits": rates} if rates else None


def kind(scope: str) -> str:
    """ "key", "project", "org" or "model"."""
    return scope.partition(":")[0]


def duration(ms: int) -> str:
    """As Go writes it, which clients parse: "76ms", "1.5s", "6m0s", "1h0m0s"."""
    if ms < 1000:
        return f"{max(ms, 0)}ms"
    minutes, rest_ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{rest_ms / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{hours}h{minutes}m{seconds}" if hours else f"{minutes}m{seconds}" if minutes else seconds


def _tightest(lefts: Sequence[Left]) -> list[Rate]:
    """Of each rate that is limited, the scope with least left."""
    found: dict[str, Rate] = {}
    for rate in _rates(lefts):
        if rate.name not in found or rate.left < found[rate.name].left:
            found[rate.name] = rate
    return list(found.values())


def _rates(lefts: Sequence[Left]) -> Iterator[Rate]:
    for name, limit_of, left_of in _RATES:
        for one in lefts:
            limit, left = limit_of(one.limit), left_of(one)
            if limit is not None and left is not None:
                left = max(left, 0)
                yield Rate(name, one.limit.scope, limit, left, one.reset_ms if left < limit else 0)


def _openai(rate: Rate) -> dict[str, str]:
    return {
        f"x-ratelimit-limit-{rate.name}": str(rate.limit),
        f"x-ratelimit-remaining-{rate.name}": str(rate.left),
        f"x-ratelimit-reset-{rate.name}": duration(rate.reset_ms),
    }


def _anthropic(rate: Rate, now_ms: int) -> dict[str, str]:
    """Anthropic tells when, in whole seconds; never before it is so."""
    at = datetime.fromtimestamp(-(-(now_ms + rate.reset_ms) // 1000), UTC)
    return {
        f"anthropic-ratelimit-{rate.name}-limit": str(rate.limit),
        f"anthropic-ratelimit-{rate.name}-remaining": str(rate.left),
        f"anthropic-ratelimit-{rate.name}-reset": at.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
