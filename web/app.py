"""The Flask application: one gate in front of every route, and the OpenAI error envelope for every status."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from flask import Flask, Response, current_app, g, jsonify, request
from werkzeug.exceptions import ClientDisconnected, HTTPException, MethodNotAllowed, RequestEntityTooLarge

from core import errors
from core.accounts.keys import KeyRecord
from core.accounts.sightings import Sightings
from core.catalog import Catalog
from core.errors import (
    BadFraming,
    BadRequest,
    BodyTooLarge,
    Draining,
    ForebayError,
    TooSlow,
    UpgradeNeeded,
    WrongMethod,
)
from core.limits import headers as limit_headers
from core.limits.scopes import Left
from core.postgres import Engine
from core.redis import Store
from core.telemetry import logs, metrics
from web.admission import Admission, new_id
from web.auth import Gate, Network, Policy, credential, peer
from web.background import Backlog
from web.dialects.framing import KeepAlive
from web.history import History
from web.stopping import Stopping
from web.stream import KEEPALIVE_S
from web.subscriber import Subscriber
from web.transports.edge import CLOSE
from web.transports.http import BODY_MAX, UPLOAD_S, DisconnectWatch, error_answer, is_anthropic, retry_headers
from web.transports.idempotency import Once
from web.transports.safe_socket import SEND_S
from web.transports.sockets import KEY_SOCKETS, Sockets

log = logs.get(__name__)

#: Who may call each endpoint. An application with one that is not named here, or without one that is, does not start.
POLICIES: dict[str, Policy] = {
    "account.key": Policy.USAGE,
    "completions.create_completion": Policy.GENERATE,
    "completions.create_embeddings": Policy.GENERATE,
    "generation.chat_completions": Policy.GENERATE,
    "generation.chat_completions_again": Policy.GENERATE,
    "generation.create_response": Policy.GENERATE,
    "health.health": Policy.PUBLIC,
    "health.metrics": Policy.ADMIN,
    "health.ready": Policy.PUBLIC,
    "messages.count_tokens": Policy.GENERATE,
    "messages.create_message": Policy.GENERATE,
    "models.model": Policy.MODELS,
    "models.models": Policy.MODELS,
    "reference.docs": Policy.PUBLIC,
    "reference.docs_asset": Policy.PUBLIC,
    "reference.llms_txt": Policy.PUBLIC,
    "reference.openapi": Policy.PUBLIC,
    "responses.cancel": Policy.GENERATE,
    "responses.delete": Policy.GENERATE,
    "responses.input_items": Policy.GENERATE,
    "responses.input_tokens": Policy.GENERATE,
    "responses.show": Policy.GENERATE,
    "responses_socket": Policy.SOCKET,
    "secrets.create_secret": Policy.GENERATE,
    "tokens.detokenize": Policy.GENERATE,
    "tokens.tokenize": Policy.GENERATE,
}
#: Characters of a client's own name for a request that are logged.
CLIENT_ID_CHARS = 512
#: After these the connection is closed: where the next request begins on it is not known, or another gateway takes it.
CLOSING = (BadFraming, BodyTooLarge, Draining, TooSlow)
#: What is told of faults that Werkzeug finds, by status.
FAULTS: dict[int, type[ForebayError]] = {
    404: errors.NotFound,
    405: WrongMethod,
    408: TooSlow,
    411: errors.LengthNeeded,
    414: errors.AddressTooLong,
    415: errors.WrongForm,
    431: errors.HeadersTooLarge,
}


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
    keepalive_s: float = KEEPALIVE_S
    upload_s: float = UPLOAD_S
    watch: DisconnectWatch = field(default_factory=DisconnectWatch)
    stalled_s: float = SEND_S  #: how long a socket's client may take nothing of what is sent to it
    origins: frozenset[str] = frozenset()  #: pages that may open sockets, beside our own
    key_sockets: int = KEY_SOCKETS
    proxies: tuple[Network, ...] = ()  #: whose X-Forwarded-For counts
    database: Engine | None = None  #: where responses are stored; None: none are
    history: History = field(init=False)
    backlog: Backlog = field(init=False)
    sockets: Sockets = field(init=False)
    stopping: Stopping = field(init=False)
    sightings: Sightings | None = None  #: when keys were used; None: nobody writes it down
    once: Once = field(init=False)

    def __post_init__(self) -> None:
        self.history = History(self.admission, self.database)
        self.backlog = Backlog(self.history)
        self.once = Once(self.admission)
        self.sockets = Sockets(self.store, key_sockets=self.key_sockets)
        self.stopping = Stopping(self.admission.limiter.store, self.subscriber, self.sockets)


def gateway() -> Gateway:
    """The gateway that serves the current request."""
    found: Gateway = current_app.extensions["forebay"]
    return found


def create(parts: Gateway) -> Flask:
    """The application over its parts. Starts nothing."""
    from web.routes import (
        account,
        completions,
        generation,
        health,
        messages,
        models,
        reference,
        responses,
        secrets,
        socket,
        tokens,
    )

    app = Flask("forebay", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = BODY_MAX
    app.extensions["forebay"] = parts
    app.before_request(_identify)
    app.before_request(_authenticate)
    app.after_request(_headers)
    app.register_error_handler(ForebayError, _refused)
    app.register_error_handler(HTTPException, _http_fault)
    app.register_error_handler(Exception, _broken)
    for routes in (account, completions, generation, health, messages, models, reference, responses, secrets, tokens):
        app.register_blueprint(routes.blueprint)
    socket.add_to(app)
    check_policies(rule.endpoint for rule in app.url_map.iter_rules())
    return app


class BadPolicies(Exception):
    """The table of policies (web/app.py) is not that of the routes."""


def check_policies(endpoints: Iterable[str]) -> None:
    """Every endpoint has one policy, and every policy an endpoint.

    Raises:
      BadPolicies: with those that do not.
    """
    if left := set(endpoints) ^ POLICIES.keys():
        without = ", ".join(sorted(left - POLICIES.keys())) or "none"
        of_nothing = ", ".join(sorted(left & POLICIES.keys())) or "none"
        raise BadPolicies(
            f"{BadPolicies.__doc__} Routes without a policy: {without}; policies of no route: {of_nothing}."
        )


def _identify() -> None:
    g.request_id, g.began_s = new_id(), time.monotonic()


def _authenticate() -> None:
    from web.routes import socket

    if request.url_rule is None:
        return  # no such address or method: answered without a key, as nothing is behind it
    policy = POLICIES[request.endpoint or ""]
    if policy is Policy.PUBLIC or request.method == "OPTIONS":
        return  # which tells no more than a 405 does
    address = peer(request.remote_addr or "", request.headers.get("X-Forwarded-For", ""), gateway().proxies)
    if policy is Policy.SOCKET:
        socket.check_handshake()
        g.caller = socket.caller(address)
        return
    shown = credential(request.headers.get("Authorization", ""), request.headers.get("x-api-key", ""))
    caller: KeyRecord = gateway().gate.authenticate(shown, policy=policy, address=address)
    g.caller = caller


def _headers(response: Response) -> Response:
    told = response.headers
    told.setdefault("x-request-id", g.get("request_id", ""))
    told["openai-processing-ms"] = str(int((time.monotonic() - g.get("began_s", time.monotonic())) * 1000))
    if is_anthropic(request.path):
        told["request-id"] = told["x-request-id"]
    if "x-limit-scope" not in told and POLICIES.get(request.endpoint or "") is Policy.GENERATE and "caller" in g:
        told.update(_limits_left())
    if g.get("replayed"):
        told["idempotent-replayed"] = "true"
    if told.get("Connection") == "close":
        request.environ.get(CLOSE, _nothing)()
    _log_client_id(told["x-request-id"])
    return response


def _limits_left() -> dict[str, str]:
    """What is left, as it was when the answer's request was admitted; of an answer without one, as it is now."""
    left: tuple[Left, ...] = g.get("left", ())
    if not left:
        admission, caller = gateway().admission, g.caller
        left = admission.limiter.left(caller.org_id, admission.limits(caller, ""))
    return limit_headers.told(left, now_ms=time.time_ns() // 1_000_000, anthropic=is_anthropic(request.path))


def _log_client_id(request_id: str) -> None:
    """What the client calls this request, for who looks it up by that. Ours stays ours."""
    if named := request.headers.get("X-Client-Request-Id"):
        log.info("request_named", request_id=request_id, client_request_id=named[:CLIENT_ID_CHARS])


def _nothing() -> None:
    """A server that does not let its connections be closed."""


def _refused(error: ForebayError) -> Response:
    metrics.requests_refused.labels(error.error_code or error.type).inc()
    status, body = error_answer(error, request.path, g.get("request_id", ""))
    response = jsonify(body)
    response.status_code = status
    response.headers.update(retry_headers(error) | error.headers)
    if isinstance(error, UpgradeNeeded):
        response.headers["Sec-WebSocket-Version"] = "13"
    if isinstance(error, CLOSING):
        response.headers["Connection"] = "close"
    return response


def _http_fault(fault: HTTPException) -> Response:
    """Werkzeug's faults in our envelope."""
    response = _refused(_translated(fault))
    if isinstance(fault, MethodNotAllowed) and fault.valid_methods:
        response.headers["Allow"] = ", ".join(fault.valid_methods)
    return response


def _translated(fault: HTTPException) -> ForebayError:
    if isinstance(fault, RequestEntityTooLarge):
        return BodyTooLarge(f"The body is larger than {BODY_MAX // 2**20} MiB.")
    if isinstance(fault, ClientDisconnected):
        return BadFraming("The body is shorter than its Content-Length.")
    if fault.code in FAULTS:
        return FAULTS[fault.code]()
    return BadRequest(fault.description) if fault.code is not None and fault.code < 500 else ForebayError()


def _broken(error: Exception) -> Response:
    log.error("request_broken", path=request.path, exc_info=error)
    return _refused(ForebayError())
