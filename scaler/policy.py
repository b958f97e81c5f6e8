"""How many workers each model should have, and where. Pure: a snapshot and the memory of the last look in, a plan out.

Thin for now: as many workers as the queued and running requests fill, within the catalogue's bounds; up at once,
down only after the smaller number has sufficed for a while, so that a lull costs no cold start. A model that a request
found without a worker gets one at once.
"""

from __future__ import annotations

import msgspec

#: How long a smaller number must have sufficed before workers are let go, ms.
SHRINK_AFTER_MS = 120_000


class ModelSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One model as the scaler sees it."""

    model: str
    least: int
    most: int
    slots: int  #: per worker
    waiting: int
    running: int
    oldest_wait_ms: int
    workers: int  #: in any state but gone
    wanted: bool = False  #: a request came while no worker was alive, and none has appeared since


class HostSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One host as the scaler sees it."""

    host: str
    room: int
    assigned: dict[str, int]


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What the next look must know of this one."""

    desired: dict[str, int] = {}
    fewer_since_ms: dict[str, int] = {}  #: since when less than `desired` would have sufficed
    sufficed: dict[str, int] = {}  #: the most that was needed since then


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """How many workers a model gets, and why."""

    model: str
    current: int
    desired: int
    action: str  #: "grow", "shrink", "hold"
    reason: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    decisions: tuple[Decision, ...]
    assignments: dict[str, dict[str, int]]  #: host -> model -> workers
    memory: Memory


def plan(models: list[ModelSnapshot], hosts: list[HostSnapshot], memory: Memory, now_ms: int) -> Plan:
    """Decide for every model, then place what was decided."""
    decided = [_decide(model, _before(model, hosts, memory), memory, now_ms) for model in models]
    desired = {decision.model: decision.desired for decision, _ in decided}
    fewer = {decision.model: lull for decision, lull in decided if lull is not None}
    return Plan(
        decisions=tuple(decision for decision, _ in decided),
        assignments=place(desired, hosts),
        memory=Memory(
            desired=desired,
            fewer_since_ms={model: since_ms for model, (since_ms, _) in fewer.items()},
            sufficed={model: most for model, (_, most) in fewer.items()},
        ),
    )


def _before(model: ModelSnapshot, hosts: list[HostSnapshot], memory: Memory) -> int:
    """What was desired so far. A scaler that has just begun to lead takes what its predecessor assigned for that."""
    assigned = sum(host.assigned.get(model.model, 0) for host in hosts)
    return min(max(memory.desired.get(model.model, assigned), model.least), model.most)


def _decide(model: ModelSnapshot, before: int, memory: Memory, now_ms: int) -> tuple[Decision, tuple[int, int] | None]:
    """The decision, and since when fewer would suffice, and how many of them."""
    work = model.waiting + model.running
    wanted = min(max(-(-work // model.slots), model.least, int(model.wanted)), model.most)
    facts = f"{model.waiting} wait and {model.running} run on {model.slots} slots a worker"
    if model.wanted:
        facts += ", and a request found no worker"
    if wanted > before:
        return _decision(model, wanted, "grow", f"{facts}: {wanted} are needed"), None
    if wanted == before:
        return _decision(model, before, "hold", f"{facts}: {before} are right"), None
    since_ms = memory.fewer_since_ms.get(model.model, now_ms)
    most = min(max(memory.sufficed.get(model.model, wanted), wanted), before)
    if now_ms - since_ms >= SHRINK_AFTER_MS:
        return _decision(model, most, "shrink", f"{facts}: {most} have sufficed for {SHRINK_AFTER_MS // 1000} s"), None
    return _decision(model, before, "hold", f"{facts}: {most} would suffice, but not yet for long"), (since_ms, most)


def _decision(model: ModelSnapshot, desired: int, action: str, reason: str) -> Decision:
    return Decision(model=model.model, current=model.workers, desired=desired, action=action, reason=reason)


def place(desired: dict[str, int], hosts: list[HostSnapshot]) -> dict[str, dict[str, int]]:
    """Who runs what: what runs stays where it is; the rest goes where most room is left."""
    placed: dict[str, dict[str, int]] = {host.host: {} for host in hosts}
    left = dict(desired)
    for host in sorted(hosts, key=lambda host: host.host):
        for model, count in sorted(host.assigned.items()):
            keep = min(count, left.get(model, 0), host.room - sum(placed[host.host].values()))
            if keep > 0:
                placed[host.host][model] = keep
                left[model] -= keep
    # In turns, so that where room is scarce every model gets its first worker before any gets its second.
    for turn in range(max(left.values(), default=0)):
        for model in sorted(model for model, count in left.items() if count > turn):
            roomiest = max(
                hosts, key=lambda host: (host.room - sum(placed[host.host].values()), host.host), default=None
            )
            if roomiest is None or roomiest.room <= sum(placed[roomiest.host].values()):
                break  # no host has room: a provider must launch one
            placed[roomiest.host][model] = placed[roomiest.host].get(model, 0) + 1
    return placed
