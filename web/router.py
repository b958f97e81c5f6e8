"""Which workers a request is best run by: those that hold most of its prompt. Pure: a snapshot in, a decision out.

It is a preference. The queue puts classes and fairness first, and another worker may have the request when none of
these has room, or after `steal_ms`: as long as the wait is worth it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Literal

#: Workers that a request may prefer; the queue's own bound.
PREFERRED_MAX = 3
#: A prefix of less than this share of the prompt is not worth a preference.
WORTH = 0.1
#: Nor is one that is computed in less than this, ms. What many prompts begin with is soon everywhere.
WORTH_MS = 25
#: Who holds less than this share of what the best holds is no better than anybody.
NEAR = 0.9
#: A request waits for its holders at most so many times as long as it takes to compute what they hold. More than once,
#: since a copy also takes the place of another prefix in the cache of whoever makes it.
PATIENCE = 8
#: How long a prompt that nobody holds waits for the worker of its name, ms: long enough for an idle one to take it.
NAMED_STEAL_MS = 50


@dataclass(frozen=True, kw_only=True)
class Route:
    """The decision, and why."""

    reason: Literal["nobody holds it", "too little of it", "its holders are gone", "held", "its name"]
    preferred: tuple[str, ...] = ()  #: best first
    steal_ms: int = 0  #: how long it waits for one of them
    held_blocks: int = 0  #: of the prompt, by the best; a lower bound, as checkpoints are
    blocks: int = 0  #: whole blocks of the prompt


def prefer(
    blocks: int, depths: Sequence[int], holders: Sequence[Sequence[str]], live: Collection[str], *, block_ms: float
) -> Route:
    """Choose at most three workers for a prompt of so many blocks.

    `holders`: for each of `depths` (block counts, ascending) who holds so much of it, newest first; `live`: who claims
    now; `block_ms`: how long a block takes to compute.
    """
    held: dict[str, int] = {}  # by worker, deepest first; the newest first where equal
    for depth, workers in zip(reversed(depths), reversed(holders), strict=True):
        for worker in workers:
            held.setdefault(worker, depth)
    alive = [(worker, depth) for worker, depth in held.items() if worker in live]
    if not alive:
        return Route(reason="its holders are gone" if held else "nobody holds it", blocks=blocks)
    best = alive[0][1]
    if best < WORTH * blocks or best * block_ms < WORTH_MS:
        return Route(reason="too little of it", held_blocks=best, blocks=blocks)
    near = tuple(worker for worker, depth in alive if depth >= NEAR * best)
    return Route(
        reason="held",
        preferred=near[:PREFERRED_MAX],
        steal_ms=int(PATIENCE * best * block_ms),
        held_blocks=best,
        blocks=blocks,
    )


def by_name(route: Route, name: str, live: Collection[str], *, block_ms: float) -> Route:
    """The route of a prompt that nobody holds, whose caller says which others it has much in common with: the same name
    leads to the same worker, so that they meet there (rendezvous hashing: Thaler and Ravishankar, 1996)."""
    if route.preferred or not live or route.blocks * block_ms < WORTH_MS:
        return route
    best = max(live, key=lambda worker: blake2b(f"{name}\0{worker}".encode(), digest_size=8).digest())
    return replace(route, reason="its name", preferred=(best,), steal_ms=NAMED_STEAL_MS)
