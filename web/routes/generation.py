"""Generation: chat completions and Responses over HTTP and SSE, and Responses mode over WebSocket."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import flask_sock
import msgspec
import simple_websocket
from flask import Blueprint, Flask, Response, g, jsonify, request

from web.admission import Admitted
from web.app import gateway
from web.dialects import chat, responses
from web.dialects.draft import Draft
from web.dialects.framing import ChatFraming, ResponsesFraming
from web.transports import safe_socket
from web.transports.http import BODY_MAX, COMMENT, body, data_line, event_lines, events, sse, whole
from web.transports.sockets import GOING_AWAY, Socket

blueprint = Blueprint("generation", __name__)

_SECONDS = re.compile(r"\d{1,5}(\.\d{1,6})?")

#: Sockets are pinged this often; two pings without an answer close one, seconds.
PING_S = 25


@blueprint.post("/v1/chat/completions")
def chat_completions() -> Response:
    return _answer(chat.parse(body()), ChatFraming, _chat_lines)


@blueprint.post("/v1/responses")
def create_response() -> Response:
    return _answer(responses.parse(body()), ResponsesFraming, _responses_lines)


def _answer(draft: Draft, framing: Callable[..., Any], lines: Callable[[Admitted, Any], Iterator[bytes]]) -> Response:
    parts = gateway()
    draft = msgspec.structs.replace(draft, timeout_s=draft.timeout_s or _read_timeout_s(draft))
    admitted = parts.admission.admit(g.caller, draft, "sse" if draft.stream else "http")
    g.request_id, g.reserved = admitted.stream.request.id, admitted.reserved
    frames = framing(admitted.stream.request, draft)
    if draft.stream:
        return sse(parts.admission, admitted, lines(admitted, frames), parts.watch)
    try:
        with parts.watch.over(admitted.stream, parts.admission):
            text, ending = whole(admitted)
        return jsonify(frames.whole(text, ending))
    finally:
        parts.admission.release(admitted.stream)


def _read_timeout_s(draft: Draft) -> float | None:
    """When the client itself gives up, which SDKs say of every request. Of a stream it measures silence, which a queue
    that says its place does not keep."""
    said = request.headers.get("x-stainless-read-timeout", "")
    return float(said) if not draft.stream and _SECONDS.fullmatch(said) else None


def _chat_lines(admitted: Admitted, framing: ChatFraming) -> Iterator[bytes]:
    for chunk in events(admitted, framing):
        yield COMMENT if chunk is None else data_line(chunk)
    yield b"data: [DONE]\n\n"


def _responses_lines(admitted: Admitted, framing: ResponsesFraming) -> Iterator[bytes]:
    for event in events(admitted, framing):
        yield COMMENT if event is None else event_lines(event)


def add_socket(app: Flask) -> None:
    """The WebSocket on the same path. flask-sock makes the server; ours sends whole frames."""
    flask_sock.Server = safe_socket.Server
    app.config["SOCK_SERVER_OPTIONS"] = {
        "ping_interval": PING_S,
        "max_message_size": BODY_MAX,
        "receive_bytes": 65536,
    }
    flask_sock.Sock(app).route("/v1/responses", endpoint="responses_socket")(_serve_socket)


def _serve_socket(ws: simple_websocket.Server) -> None:
    parts = gateway()
    socket = Socket(ws, parts.admission, g.caller)
    if parts.admission.draining:
        socket.close(GOING_AWAY, "draining")
        return
    parts.sockets.add(socket)
    try:
        socket.serve()
    finally:
        parts.sockets.discard(socket)
