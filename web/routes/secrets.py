"""Client secrets: what a server gives its page, so that the page may open one socket and never sees the key."""

from __future__ import annotations

import time

from flask import Blueprint, Response, g, jsonify
from pydantic import BaseModel, ConfigDict, Field

from core.accounts import secrets
from core.accounts.secrets import SECRET_MAX_S, SECRET_MIN_S, SECRET_S, Grant
from core.errors import LimitReached, StoreDown, UnknownModel
from core.redis import AWAY
from web.app import gateway
from web.auth import may_use
from web.dialects.draft import NAME_CHARS_MAX, nullable, validated, without_nulls
from web.transports.http import body

blueprint = Blueprint("secrets", __name__)


class _Expiry(BaseModel):
    model_config = ConfigDict(strict=True)

    anchor: str = Field("created_at", pattern="^created_at$")
    seconds: int = Field(SECRET_S, ge=SECRET_MIN_S, le=SECRET_MAX_S)


class _Session(BaseModel):
    model_config = ConfigDict(strict=True)

    model: str = Field("", max_length=NAME_CHARS_MAX)


class SecretBody(BaseModel):
    """What may be said of a secret that is asked for."""

    model_config = ConfigDict(strict=True, json_schema_extra=nullable)

    expires_after: _Expiry = _Expiry()
    session: _Session = _Session()


@blueprint.post("/v1/client_secrets")
def create_secret() -> Response:
    """A new secret. It opens one socket, within a minute if nothing else is asked for."""
    given = body()
    asked = validated(SecretBody, without_nulls(given), {})
    if (name := asked.session.model) and not (name in gateway().catalog and may_use(g.caller, name)):
        raise UnknownModel(f"The model `{name}` does not exist, or this key may not use it.", param="session.model")
    secret = secrets.mint()
    grant = Grant(key_id=g.caller.key_id, model=asked.session.model)
    try:
        wait_ms = gateway().store.run(secrets.count(g.caller.org_id, g.caller.key_id, secret))
        if not wait_ms:
            gateway().store.run(secrets.give(secret, grant, asked.expires_after.seconds))
    except AWAY:
        raise StoreDown from None
    if wait_ms:
        message = f"This API key may be given {secrets.MINTED_MAX} client secrets in a minute."
        raise LimitReached(message, retry_after_ms=wait_ms)
    session = {"type": "responses", "model": asked.session.model or None}
    response = jsonify(value=secret, expires_at=int(time.time()) + asked.expires_after.seconds, session=session)
    response.headers["Cache-Control"] = "no-store"
    return response
