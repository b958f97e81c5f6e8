"""What a limit binds, and which limits bind a request. Pure.

    key:<id>        one API key, through all its rotations
    project:<id>    all keys of a project
    org             the organisation
    model:<name>    the organisation, at one model

The scopes of one organisation share its slot, so one call decides over all of them. What a model can bear of everybody
is the queue's to bound, not the limiter's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from core.values import Limit

__all__ = ["Left", "Limit", "binding", "names", "of_key", "of_model", "of_project"]


def of_key(key_id: str) -> str:
    return f"key:{key_id}"


def of_project(project_id: str) -> str:
    return f"project:{project_id}"


def of_model(model: str) -> str:
    return f"model:{model}"


ORGANISATION = "org"


@dataclass(frozen=True, kw_only=True)
class Left:
    """What a scope has left. None: no limit."""

    limit: Limit
    requests: int | None
    tokens: int | None
    input_tokens: int | None
    output_tokens: int | None
    reset_ms: int  #: until all of it is free again, if nothing more comes


def binding(
    limits: Iterable[Limit], *, key_id: str, project_id: str, model: str, prepaid: bool = False
) -> tuple[Limit, ...]:
    """Of an organisation's limits those that bind a request, narrowest first. Its key is counted even where nothing
    limits it; other scopes only where something does."""
    known = {limit.scope: limit for limit in limits}
    return tuple(_binding(known, key_id, project_id, model, prepaid))


def _binding(known: dict[str, Limit], key_id: str, project_id: str, model: str, prepaid: bool) -> Iterator[Limit]:
    own = of_key(key_id)
    yield known.get(own, Limit(scope=own))
    for scope in (of_project(project_id), ORGANISATION, of_model(model)):
        limit = known.get(scope, Limit(scope=scope))
        if scope == ORGANISATION and prepaid:
            limit = msgspec.structs.replace(limit, prepaid=True)
        if limit.limited:
            yield limit


def names(scopes: tuple[str, ...], key_id: str) -> tuple[str, ...]:
    """The scopes that a request was reserved in, as it carries them."""
    return scopes or (of_key(key_id),)
