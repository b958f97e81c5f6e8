"""The Flask application: one gate in front of every route, and the OpenAI error envelope for every status."""

from __future__ import annotations

from dataclasses import dataclass, field

from flask import Flask, Response, current_app, g, jsonify, request
from werkzeug.exceptions import HTTPException, MethodNotAllowed, NotFound, RequestEntityTooLarge

from core import errors
from core.accounts.keys import KeyRecord
from core.catalog import Catalog
from core.errors import BadRequest, BodyTooLarge, ForebayError, UpgradeNeeded, WrongMethod
from core.limits.counters import Reserved
from core.redis import Store
from core.telemetry import logs, metrics
from web.admission import Admission, new_id
from web.auth import Gate
from web.dialects.framing import KeepAlive
from web.subscriber import Subscriber
from web.transports.http import BODY_MAX, DisconnectWatch
from web.transports.sockets import Socket

log = logs.get(__name__)

#: Who may call an endpoint. An endpoint that is not named needs a generating key.
PUBLIC = frozenset({"health.health", "health.ready", "static"})
ADMIN = frozenset({"health.metrics"})


@dataclass
class Gateway:
    """What one gateway process is made of."""

    catalog: Catalog
    store: Store
    gate: Gate
    admission: Admission
    subscriber: Subscriber
    chat_keepalive: KeepAlive = "comment"
    chat_ids: bool = True
    watch: DisconnectWatch = field(default_factory=DisconnectWatch)
    sockets: set[Socket] = field(default_factory=set)


def gateway() -> Gateway:
    """The gateway that serves the current request."""
    found: Gateway = current_app.extensions["forebay"]
    return found


def create(parts: Gateway) -> Flask:
    """The application over its parts. Starts nothing."""
    from web.routes import generation, health, models

    app = Flask("forebay", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = BODY_MAX
    app.extensions["forebay"] = parts
    app.before_request(_identify)
    app.before_request(_authenticate)
    app.after_request(_headers)
    app.register_error_handler(ForebayError, _refused)
    app.register_error_handler(HTTPException, _http_fault)
    app.register_error_handler(Exception, _broken)
    for routes in (generation, health, models):
        app.register_blueprint(routes.blueprint)
    generation.add_socket(app)
    return app


def _identify() -> None:
    g.request_id = new_id()


def _authenticate() -> None:
    if request.url_rule is None or request.endpoint in PUBLIC:
        return  # no such address or method: answered without a key, as nothing is behind it
    if request.headers.get("Upgrade", "").lower() == "websocket":
        _check_handshake()
    caller: KeyRecord = gateway().gate.authenticate(
        request.headers.get("Authorization", ""), admin=request.endpoint in ADMIN
    )
    g.caller = caller


def _check_handshake() -> None:
    if request.headers.get("Sec-WebSocket-Version") != "13":
        raise UpgradeNeeded
    if not request.headers.get("Sec-WebSocket-Key"):
        raise BadRequest("The WebSocket handshake has no Sec-WebSocket-Key.")


def _headers(response: Response) -> Response:
    response.headers.setdefault("x-request-id", g.get("request_id", ""))
    reserved: Reserved | None = g.get("reserved")
    if reserved is not None and reserved.requests_limit is not None:
        response.headers["x-ratelimit-limit-requests"] = str(reserved.requests_limit)
        response.headers["x-ratelimit-remaining-requests"] = str(reserved.requests_left)
        response.headers["x-ratelimit-reset-requests"] = f"{reserved.reset_ms // 1000}s"
    return response


def _refused(error: ForebayError) -> Response:
    metrics.requests_refused.labels(error.error_code or error.type).inc()
    response = jsonify(error=error.envelope())
    response.status_code = error.status
    response.headers["x-should-retry"] = "true" if error.retry else "false"
    if error.retry_after_ms is not None:
        response.headers["retry-after-ms"] = str(error.retry_after_ms)
        response.headers["retry-after"] = str(-(-error.retry_after_ms // 1000))
    if isinstance(error, UpgradeNeeded):
        response.headers["Sec-WebSocket-Version"] = "13"
    return response


def _http_fault(fault: HTTPException) -> Response:
    """Werkzeug's faults in our envelope."""
    response = _refused(_translated(fault))
    if isinstance(fault, MethodNotAllowed) and fault.valid_methods:
        response.headers["Allow"] = ", ".join(fault.valid_methods)
    return response


def _translated(fault: HTTPException) -> ForebayError:
    match fault:
        case NotFound():
            return errors.NotFound()
        case MethodNotAllowed():
            return WrongMethod()
        case RequestEntityTooLarge():
            return BodyTooLarge(f"The body is larger than {BODY_MAX // 2**20} MiB.")
        case _ if fault.code is not None and fault.code < 500:
            return BadRequest(fault.description)
        case _:
            return ForebayError()


def _broken(error: Exception) -> Response:
    log.error("request_broken", path=request.path, exc_info=error)
    return _refused(ForebayError())
