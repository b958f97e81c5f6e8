"""What a key may do, and has used."""

from __future__ import annotations

from datetime import UTC, datetime

from flask import Blueprint, Response, g, jsonify

from core.accounts.keys import KeyRecord
from core.errors import StoreDown
from core.limits import counters
from core.redis import AWAY
from web.app import gateway

blueprint = Blueprint("account", __name__)


@blueprint.get("/v1/key")
def key() -> Response:
    """The key that asks. Reserves nothing, and asks Redis alone."""
    caller: KeyRecord = g.caller
    try:
        used = gateway().store.run(counters.used(caller.org_id, f"key:{caller.key_id}"))
    except AWAY:
        raise StoreDown from None
    return jsonify(
        object="key",
        id=caller.key_id,
        kind=caller.kind,
        project=caller.project_id,
        organization=caller.org_id,
        models=sorted(gateway().catalog),
        limits={
            "requests_per_minute": caller.requests_per_minute,
            "concurrent_requests": caller.concurrent_requests,
        },
        used={
            "requests_last_minute": used.requests,
            "tokens_last_minute": used.tokens,
            "open_requests": used.open,
            "reset_ms": used.reset_ms,
        },
        expires_at=_iso(caller.expires_ms),
    )


def _iso(ms: int | None) -> str | None:
    return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC).isoformat()
