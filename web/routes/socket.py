"""Responses mode over WebSocket, on the address that takes POST too. Whatever is wrong with a handshake is refused
before the upgrade, while there is a status to say it with."""

from __future__ import annotations

from typing import Any

import flask_sock
from flask import Flask, g, request

from core.accounts.keys import KeyRecord
from core.accounts.secrets import Grant
from core.errors import BadRequest, Draining, UpgradeNeeded
from web.app import Gateway, gateway
from web.auth import SUBPROTOCOLS, Policy, check_origin, check_unexposed, credential, secret_of
from web.routes.generation import linger_ms
from web.transports import safe_socket
from web.transports.http import BODY_MAX
from web.transports.safe_socket import is_key, offered
from web.transports.sockets import Socket

ENDPOINT = "responses_socket"


def add_to(app: Flask) -> None:
    """flask-sock makes the server; ours sends whole frames, and within bounds."""
    flask_sock.Server = safe_socket.Server
    parts: Gateway = app.extensions["forebay"]
    app.config["SOCK_SERVER_OPTIONS"] = {
        "subprotocols": SUBPROTOCOLS,
        "message_bytes_max": BODY_MAX,
        "send_s": parts.stalled_s,
    }
    app.before_request(_prepare)
    flask_sock.Sock(app).route("/v1/responses", endpoint=ENDPOINT)(_serve)


def check_handshake() -> None:
    """What must be right before anybody is asked who they are.

    Raises:
      UpgradeNeeded, BadRequest: it is no handshake of this protocol.
      NotAllowed: a page of another origin.
      Unauthenticated: a long-lived key where it will be seen.
    """
    if request.headers.get("Sec-WebSocket-Version") != "13":
        raise UpgradeNeeded
    if not is_key(request.headers.get("Sec-WebSocket-Key", "")):
        raise BadRequest("The WebSocket handshake needs a Sec-WebSocket-Key: 16 bytes in base64.")
    check_origin(request.headers.get("Origin"), request.host, gateway().origins)
    check_unexposed([request.query_string.decode("latin-1"), *offered(request.environ)])


def caller(address: str) -> KeyRecord:
    """Who opens the socket: by a key in the header, or by a client secret among the subprotocols. Cookies say nothing.

    Raises:
      ForebayError: nobody that we know, or it cannot be told.
    """
    shown = credential(request.headers.get("Authorization", ""), request.headers.get("x-api-key", ""))
    secret = secret_of(offered(request.environ))
    if shown or secret is None:
        return gateway().gate.authenticate(shown, policy=Policy.SOCKET, address=address)
    record, g.grant = gateway().gate.redeem(secret, address=address)
    return record


def _prepare() -> None:
    if request.endpoint != ENDPOINT:
        return
    g.linger_ms = linger_ms()
    if gateway().admission.draining:
        raise Draining
    g.seat = gateway().sockets.sit(g.caller)
    request.environ[safe_socket.REQUEST_ID] = g.request_id


def _serve(ws: Any) -> None:
    parts = gateway()
    grant: Grant | None = g.get("grant")
    model = grant.model if grant else ""
    socket = Socket(ws, parts.admission, g.caller, g.linger_ms, history=parts.history, model=model, seat=g.seat)
    parts.sockets.add(socket)
    try:
        socket.serve()
    finally:
        parts.sockets.discard(socket)
