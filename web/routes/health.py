"""Whether this gateway lives and can serve, and its metrics."""

from __future__ import annotations

from typing import Any

from flask import Blueprint, Response, jsonify
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from core import fleet
from core.redis import AWAY
from core.values import WorkerState
from web.app import Gateway, gateway

blueprint = Blueprint("health", __name__)


@blueprint.get("/health")
def health() -> Response:
    """The process answers."""
    return jsonify(status="ok")


@blueprint.get("/ready")
def ready() -> tuple[Response, int]:
    """200 when a request sent now would be served: the store answers, and every model that keeps a worker has one."""
    found = state(gateway())
    return jsonify(found), 200 if found["ready"] else 503


@blueprint.get("/metrics")
def metrics() -> Response:
    """For an admin key."""
    return Response(generate_latest(), content_type=CONTENT_TYPE_LATEST)


def state(parts: Gateway) -> dict[str, Any]:
    """What this gateway waits for, if anything."""
    try:
        workers = parts.store.run_all([fleet.workers(model) for model in parts.catalog])
    except AWAY:
        return {"ready": False, "store": False, "listening": False, "draining": parts.admission.draining, "models": {}}
    models = {name: _model_state(rows) for name, rows in zip(parts.catalog, workers, strict=True)}
    served = all(models[name]["ready"] > 0 or model.workers.min == 0 for name, model in parts.catalog.items())
    listening = parts.subscriber.listening.is_set()
    return {
        "ready": served and listening and not parts.admission.draining,
        "store": True,
        "listening": listening,
        "draining": parts.admission.draining,
        "models": models,
    }


def _model_state(rows: list[fleet.Worker]) -> dict[str, Any]:
    return {
        "ready": sum(row.state == WorkerState.READY for row in rows),
        "workers": [{"worker": row.worker, "state": row.state, "detail": row.detail} for row in rows],
    }
