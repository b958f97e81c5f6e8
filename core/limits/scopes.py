"""Which limits bind a request. Pure."""

from __future__ import annotations

import msgspec


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """What one scope may use. None: no limit."""

    scope: str  #: "key:<id>"; later also project, organisation, organisation and model
    requests_per_minute: int | None = None
    concurrent_requests: int | None = None


def of_key(key_id: str, requests_per_minute: int | None, concurrent_requests: int | None) -> tuple[Limit, ...]:
    """The limits of a key, the only scope so far. It is counted even where nothing limits it."""
    return (
        Limit(
            scope=f"key:{key_id}",
            requests_per_minute=requests_per_minute,
            concurrent_requests=concurrent_requests,
        ),
    )
