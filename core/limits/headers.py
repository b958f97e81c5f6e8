"""What a caller is told of its limits: OpenAI's `x-ratelimit-*` headers. Pure."""

from __future__ import annotations


def requests(limit: int, left: int, reset_ms: int) -> dict[str, str]:
    """Of requests per minute."""
    return {
        "x-ratelimit-limit-requests": str(limit),
        "x-ratelimit-remaining-requests": str(max(left, 0)),
        "x-ratelimit-reset-requests": duration(reset_ms),
    }


def duration(ms: int) -> str:
    """As Go writes it, which clients parse: "76ms", "1.5s", "6m0s", "1h0m0s"."""
    if ms < 1000:
        return f"{max(ms, 0)}ms"
    minutes, rest_ms = divmod(ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{rest_ms / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    return f"{hours}h{minutes}m{seconds}" if hours else f"{minutes}m{seconds}" if minutes else seconds
