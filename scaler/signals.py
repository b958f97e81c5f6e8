"""What the scaler looks at: the queues and the fleet, read into the policy's snapshots."""

from __future__ import annotations

from core import fleet
from core.catalog import Catalog, Model
from core.redis import Store
from core.telemetry import metrics
from core.values import Class, WorkerState
from scaler.policy import HostSnapshot, ModelSnapshot
from scaler.providers import Provider
from tasks.queue import Depth, Queue

#: A worker in one of these states will claim, or does.
_COMING = frozenset(WorkerState) - {WorkerState.DRAINING, WorkerState.GONE}


def look(store: Store, models: Catalog, provider: Provider) -> tuple[list[ModelSnapshot], list[HostSnapshot]]:
    """The state of everything now. It also runs the queues' timers, which otherwise only claims and beats do.

    Raises:
      RedisError: the store is away; nothing is known.
    """
    depths = store.run_all([Queue(name).tick() for name in models])
    workers = store.run_all([fleet.workers(name) for name in models])
    wanted = _wanted(store, models, workers)
    seen = [
        _model(model, depth, rows, model.name in wanted)
        for model, depth, rows in zip(models.values(), depths, workers, strict=True)
    ]
    return seen, [_host(store, host) for host in provider.hosts()]


def _wanted(store: Store, models: Catalog, workers: list[list[fleet.Worker]]) -> set[str]:
    """The models that a worker was asked for and has not appeared. A worker that is there answers the asking."""
    asked = store.run(fleet.wanted())
    there = {name for name, rows in zip(models, workers, strict=True) if any(row.state in _COMING for row in rows)}
    answered = [name for name in asked if name in there or name not in models]
    store.run_all([fleet.met(name) for name in answered])
    return set(asked) - set(answered)


def _model(model: Model, depth: Depth, workers: list[fleet.Worker], wanted: bool) -> ModelSnapshot:
    _measure(model, depth, workers)
    return ModelSnapshot(
        model=model.name,
        least=model.workers.min,
        most=model.workers.max,
        slots=model.slots,
        waiting=sum(depth.waiting),
        running=depth.running,
        oldest_wait_ms=depth.oldest_wait_ms,
        workers=len(workers),
        wanted=wanted,
    )


def _host(store: Store, host: fleet.Host) -> HostSnapshot:
    assigned = store.run(fleet.assignment(host.host))
    return HostSnapshot(host=host.host, room=host.room, assigned=assigned or {})


def _measure(model: Model, depth: Depth, workers: list[fleet.Worker]) -> None:
    for cls in Class:
        metrics.queue_waiting.labels(model.name, cls.name.lower()).set(depth.waiting[cls])
    metrics.queue_oldest_seconds.labels(model.name).set(depth.oldest_wait_ms / 1000)
    for state in WorkerState:
        metrics.fleet_workers.labels(model.name, state.value).set(sum(row.state == state for row in workers))
