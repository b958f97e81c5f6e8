"""What a caller is told that is refused for a limit: which, whose, how much it is, and when to come again. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from billing.rating import plain
from core.errors import (
    BadRequest,
    ForebayError,
    LimitReached,
    MoneySpent,
    OrganisationSuspended,
    TokensReached,
    Unauthenticated,
)
from core.limits import headers
from core.limits.counters import Need, Refused
from core.values import Limit

#: When to try again where that depends on a request that runs, and nobody knows when it ends, ms: a guess.
GUESS_MS = 1_000

_WHOSE = {"key": "This key", "project": "This project", "org": "This organisation"}


@dataclass(frozen=True)
class Asked:
    """What is refused."""

    model: str
    need: Need
    prompt_field: str = "messages"  #: where its dialect has the prompt
    anthropic: bool = False  #: its API has headers of its own


def told(refused: Refused, asked: Asked, now_ms: int) -> ForebayError:
    """The error for it. `now_ms`: since the epoch."""
    if refused.limit is None:
        return OrganisationSuspended() if refused.reason == "suspended" else Unauthenticated()
    scope = refused.limit.scope
    error = _MADE[refused.reason](refused, refused.limit, asked, now_ms)
    error.headers |= headers.told(refused.left, now_ms=now_ms, anthropic=asked.anthropic, scope=scope)
    return error


def whose(limit: Limit, model: str) -> str:
    """Who is bound by a limit, as the first words of a sentence."""
    return _WHOSE.get(headers.kind(limit.scope), f"This organisation at model `{model}`")


def _too_large(refused: Refused, limit: Limit, asked: Asked, now_ms: int) -> ForebayError:
    """It would not fit if nothing else ran. The first bound that it is beyond is named, as the script looks."""
    need, who = asked.need, whose(limit, asked.model)
    most, input_most = limit.tokens_per_minute, limit.input_tokens_per_minute
    if most is not None and need.input_tokens + need.least_output_tokens > most:
        by_prompt = need.input_tokens + min(1, need.least_output_tokens) > most
        needs = f"{need.input_tokens} tokens of input and up to {need.least_output_tokens} of output"
        kind = "tokens"
    elif input_most is not None and need.input_tokens > input_most:
        most, by_prompt, kind, needs = input_most, True, "tokens of input", f"{need.input_tokens}"
    else:
        most, by_prompt, kind = limit.output_tokens_per_minute, False, "tokens of output"
        needs = f"up to {need.least_output_tokens}"
    return BadRequest(
        f"{who} may use {most} {kind} a minute, and this request alone needs {needs}. It is refused however long you "
        f"wait: {'shorten the prompt' if by_prompt else 'ask for less'}.",
        param=asked.prompt_field if by_prompt else "max_tokens",
        code="request_exceeds_limit",
    )


def _concurrency(refused: Refused, limit: Limit, asked: Asked, now_ms: int) -> ForebayError:
    most = limit.concurrent_requests
    if not most:
        return LimitReached(f"{whose(limit, asked.model)} may have no requests open.")
    return LimitReached(
        f"{whose(limit, asked.model)} may have {most} requests open at once, and has. Retry when one has ended; nobody "
        "knows when that is, and `retry-after` is a guess.",
        retry_after_ms=GUESS_MS,
    )


def _requests(refused: Refused, limit: Limit, asked: Asked, now_ms: int) -> ForebayError:
    most = limit.requests_per_minute
    if not most:
        return LimitReached(f"{whose(limit, asked.model)} may make no requests.")
    return LimitReached(
        f"{whose(limit, asked.model)} may make {most} requests per minute, and has.",
        retry_after_ms=refused.retry_after_ms,
    )


def _tokens(kind: str, most_of: Callable[[Limit], int | None]) -> Callable[..., ForebayError]:
    def made(refused: Refused, limit: Limit, asked: Asked, now_ms: int) -> ForebayError:
        message = (
            f"{whose(limit, asked.model)} may use {most_of(limit)} {kind} per minute, and too few are left for this."
        )
        if refused.retry_after_ms is not None:
            return TokensReached(message, retry_after_ms=refused.retry_after_ms)
        message += (
            " The others are held for requests that run. Retry when one has ended; nobody knows when that is, and "
            "`retry-after` is a guess."
        )
        return TokensReached(message, retry_after_ms=GUESS_MS)

    return made


def _balance(refused: Refused, limit: Limit, asked: Asked, now_ms: int) -> ForebayError:
    return MoneySpent(
        f"{whose(limit, asked.model)} has too little of its prepaid balance left for this request. It does not renew "
        "by itself: add credit."
    )


def _day(refused: Refused, limit: Limit, asked: Asked, now_ms: int) -> ForebayError:
    return _budget(f"{_money(limit.money_per_day)} a day", limit, asked, _next_day(now_ms), now_ms)


def _month(refused: Refused, limit: Limit, asked: Asked, now_ms: int) -> ForebayError:
    return _budget(f"{_money(limit.money_per_month)} a month", limit, asked, _next_month(now_ms), now_ms)


def _budget(budget: str, limit: Limit, asked: Asked, renews: datetime, now_ms: int) -> ForebayError:
    return MoneySpent(
        f"{whose(limit, asked.model)} may spend {budget}, and too little of it is left for this request. It renews at "
        f"{renews:%Y-%m-%dT%H:%M:%SZ}.",
        retry_after_ms=int(renews.timestamp() * 1000) - now_ms,
    )


_MADE: Mapping[str, Callable[[Refused, Limit, Asked, int], ForebayError]] = {
    "too_large": _too_large,
    "concurrency": _concurrency,
    "requests": _requests,
    "tokens": _tokens("tokens", lambda limit: limit.tokens_per_minute),
    "input_tokens": _tokens("tokens of input", lambda limit: limit.input_tokens_per_minute),
    "output_tokens": _tokens("tokens of output", lambda limit: limit.output_tokens_per_minute),
    "balance": _balance,
    "day": _day,
    "month": _month,
}


def _money(amount: Decimal | None) -> str:
    return plain(amount or Decimal(0))


def _next_day(now_ms: int) -> datetime:
    return _midnight(now_ms) + timedelta(days=1)


def _next_month(now_ms: int) -> datetime:
    return (_midnight(now_ms).replace(day=1) + timedelta(days=32)).replace(day=1)


def _midnight(now_ms: int) -> datetime:
    return datetime.fromtimestamp(now_ms / 1000, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
