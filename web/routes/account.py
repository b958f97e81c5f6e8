"""What a key may do, and has used."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from flask import Blueprint, Response, g, jsonify

from billing.rating import plain
from core.accounts.keys import KeyRecord
from core.errors import StoreDown
from core.limits import balances, counters
from core.limits.balances import Account, money
from core.limits.counters import Used
from core.redis import AWAY
from core.values import Limit
from web.app import gateway
from web.auth import may_use

blueprint = Blueprint("account", __name__)


@blueprint.get("/v1/key")
def key() -> Response:
    """The key that asks. Reserves nothing, and asks Redis alone."""
    caller: KeyRecord = g.caller
    limits = _limits(caller)
    paid = [limit for limit in limits if limit.pays]
    try:
        found = gateway().admission.limiter.run_all([
            counters.used(caller.org_id, limits),
            *(balances.account(caller.org_id, limit.scope) for limit in paid),
        ])  # fmt: skip
    except AWAY:
        raise StoreDown from None
    used: list[Used] = found[0]
    accounts = dict(zip((limit.scope for limit in paid), found[1:], strict=True))
    own = used[0]
    return jsonify(
        object="key",
        id=caller.key_id,
        kind=caller.kind,
        project=caller.project_id,
        organization=caller.org_id,
        plan=caller.plan,
        scopes=list(caller.scopes),
        models=sorted(name for name in gateway().catalog if may_use(caller, name)),
        networks=list(caller.networks),
        limits={
            "requests_per_minute": own.left.limit.requests_per_minute,
            "concurrent_requests": own.left.limit.concurrent_requests,
        },
        used={
            "requests_last_minute": own.requests,
            "tokens_last_minute": own.input_tokens + own.output_tokens,
            "open_requests": own.open,
            "reset_ms": own.left.reset_ms,
        },
        limited=[_scope(one, accounts.get(one.left.limit.scope)) for one in used],
        expires_at=_iso(caller.expires_ms),
    )


def _limits(caller: KeyRecord) -> tuple[Limit, ...]:
    """All that may bind it: its own, its project's, its organisation's, and those of each model that it may use."""
    found = {limit.scope: limit for limit in gateway().admission.limits(caller, "")}
    for model in filter(lambda name: may_use(caller, name), gateway().catalog):
        found |= {limit.scope: limit for limit in gateway().admission.limits(caller, model)}
    return tuple(found.values())


def _scope(used: Used, account: Account | None) -> dict[str, Any]:
    """One scope: its limits, what it has used and what is left."""
    limit, left = used.left.limit, used.left
    told: dict[str, Any] = {
        "scope": limit.scope,
        "limits": {name: _plain(getattr(limit, name)) for name in _NAMES},
        "used": {
            "requests": used.requests,
            "input_tokens": used.input_tokens,
            "output_tokens": used.output_tokens,
            "held_tokens": used.held_tokens,
            "open_requests": used.open,
        },
        "remaining": {
            "requests": left.requests,
            "tokens": left.tokens,
            "input_tokens": left.input_tokens,
            "output_tokens": left.output_tokens,
        },
        "debt_tokens": _debt(used),
        "reset_ms": left.reset_ms,
    }
    return told | ({"money": _money(limit, account)} if limit.pays else {})


_NAMES = (
    "requests_per_minute", "tokens_per_minute", "input_tokens_per_minute", "output_tokens_per_minute",
    "concurrent_requests", "connections", "money_per_day", "money_per_month",
)  # fmt: skip


def _debt(used: Used) -> int:
    """By how much what was admitted before has come to more than its limit: new requests wait for it."""
    limit, held = used.left.limit, used.held_tokens
    total = used.input_tokens + used.output_tokens + held
    wants = (
        (limit.tokens_per_minute, total),
        (limit.input_tokens_per_minute, used.input_tokens),
        (limit.output_tokens_per_minute, used.output_tokens),
    )
    return max(0, *(got - most for most, got in wants if most is not None), 0)


def _money(limit: Limit, account: Account | None) -> dict[str, Any]:
    """What there is and what is left, as strings: exact. Nothing is known (null) until the first request after a loss
    of the store."""
    if account is None:
        return {"balance_left": None, "day_left": None, "month_left": None}
    day, month = limit.money_per_day, limit.money_per_month
    held, balance = money(account.held), money(account.granted - account.spent - account.held)
    return {
        "held": plain(held),
        "balance_left": plain(balance) if limit.prepaid else None,
        "day_left": None if day is None else plain(max(day - money(account.day_spent) - held, Decimal(0))),
        "month_left": None if month is None else plain(max(month - money(account.month_spent) - held, Decimal(0))),
    }


def _plain(value: int | Decimal | None) -> int | str | None:
    return plain(value) if isinstance(value, Decimal) else value


def _iso(ms: int | None) -> str | None:
    return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC).isoformat()
