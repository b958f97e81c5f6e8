"""Generation: chat completions and Responses over HTTP and SSE, and Responses mode over WebSocket."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import flask_sock
import msgspec
import simple_websocket
from flask import Blueprint, Flask, Response, g, jsonify, request
from werkzeug.exceptions import MethodNotAllowed

from core.errors import BadRequest
from web.admission import Admitted
from web.app import gateway
from web.dialects import chat, responses
from web.dialects.draft import Draft
from web.dialects.framing import ChatFraming, Comment, ResponsesFraming
from web.stream import Stream
from web.transports import safe_socket
from web.transports.http import (
    BODY_MAX,
    body,
    comment_line,
    data_line,
    event_lines,
    events,
    identified_lines,
    recalled,
    resumed,
    sse,
    whole,
)
from web.transports.sockets import GOING_AWAY, Socket

blueprint = Blueprint("generation", __name__)

_SECONDS = re.compile(r"\d{1,5}(\.\d{1,6})?")

#: The header with which a client asks for its request to go on a while without it, so that it can come back.
LINGER = "X-Forebay-Linger"
LINGER_MAX_S = 300
SOCKET = "responses_socket"
#: Sockets are pinged this often; two pings without an answer close one, seconds.
PING_S = 25


@blueprint.post("/v1/chat/completions")
def chat_completions() -> Response:
    if last_event := request.headers.get("Last-Event-ID"):
        return _go_on(last_event)
    draft = chat.parse(body())
    admitted = _admit(draft)
    framing = ChatFraming(admitted.stream.request.id, draft, keep_alive=gateway().chat_keepalive)
    return _answer(admitted, draft, framing, _chat_lines)


@blueprint.get("/v1/chat/completions")
def chat_completions_again() -> Response:
    """For browsers, whose EventSource can only GET: it goes on with a stream, and begins none."""
    last_event = request.headers.get("Last-Event-ID")
    if not last_event or request.method == "HEAD":
        raise MethodNotAllowed(["POST"])
    return _go_on(last_event)


@blueprint.post("/v1/responses")
def create_response() -> Response:
    draft = responses.parse(body())
    admitted = _admit(draft)
    return _answer(admitted, draft, ResponsesFraming(admitted.stream.request.id, draft), _responses_lines)


@blueprint.get("/v1/responses/<response_id>")
def show_response(response_id: str) -> Response:
    """A response as it is now; or, with `stream=true`, its stream, after `starting_after`."""
    parts = gateway()
    after = responses.cursor(request.args.get("starting_after"))
    if not _flag("stream") or request.method == "HEAD":  # which takes no stream from its reader
        kept = recalled(parts.admission, g.caller, response_id)
        framing = ResponsesFraming(kept.request.id, kept.view)
        return jsonify(framing.so_far(kept.text, kept.seen.state == "waiting", kept.seen.ending))
    stream, framing = resumed(parts.admission, g.caller, response_id, after)
    return _shown(stream, _responses_lines(stream, framing))


def _admit(draft: Draft) -> Admitted:
    draft = msgspec.structs.replace(draft, timeout_s=draft.timeout_s or _read_timeout_s(draft), linger_ms=_linger_ms())
    admitted = gateway().admission.admit(g.caller, draft, "sse" if draft.stream else "http")
    g.request_id, g.reserved = admitted.stream.request.id, admitted.reserved
    return admitted


def _answer(admitted: Admitted, draft: Draft, framing: Any, lines: Callable[..., Iterator[bytes]]) -> Response:
    parts, stream = gateway(), admitted.stream
    if draft.stream:
        return _shown(stream, lines(stream, framing))
    try:
        with parts.watch.over(stream, parts.admission):
            text, ending = whole(stream)
        return jsonify(framing.whole(text, ending))
    finally:
        parts.admission.release(stream)


def _shown(stream: Stream, lines: Iterator[bytes]) -> Response:
    parts = gateway()
    g.request_id = stream.request.id
    return sse(parts.admission, stream, lines, parts.watch)


def _go_on(last_event: str) -> Response:
    """A chat stream for a client that comes back. Nothing is admitted: the body is the one it sent before."""
    parts = gateway()
    request_id, after = chat.last_event(last_event)
    kept = parts.admission.recall(g.caller, request_id, "chat")
    if not kept.view.stream:
        raise BadRequest("That answer was not streamed.", param="Last-Event-ID")
    chat.check_cursor(after, len(kept.text), kept.seen.state == "ended")
    stream = parts.admission.attach(kept)
    framing = ChatFraming(request_id, kept.view, after=after, keep_alive=parts.chat_keepalive)
    return _shown(stream, _chat_lines(stream, framing))


def _flag(name: str) -> bool:
    said = request.args.get(name, "false").lower()
    if said not in ("true", "false", "1", "0"):
        raise BadRequest(f"Invalid '{name}': Input should be true or false.", param=name)
    return said in ("true", "1")


def _linger_ms() -> int:
    """How long what this client asks for goes on when it is gone."""
    said = request.headers.get(LINGER, "0")
    if not _SECONDS.fullmatch(said) or float(said) > LINGER_MAX_S:
        raise BadRequest(f"Invalid '{LINGER}': it should be seconds, at most {LINGER_MAX_S}.", param=LINGER)
    return int(float(said) * 1000)


def _read_timeout_s(draft: Draft) -> float | None:
    """When the client itself gives up, which SDKs say of every request. Of a stream it measures silence, which a queue
    that says its place does not keep."""
    said = request.headers.get("x-stainless-read-timeout", "")
    return float(said) if not draft.stream and _SECONDS.fullmatch(said) else None


def _chat_lines(stream: Stream, framing: ChatFraming) -> Iterator[bytes]:
    return _chat_lines_of(stream, framing, gateway().chat_ids)


def _chat_lines_of(stream: Stream, framing: ChatFraming, ids: bool) -> Iterator[bytes]:
    request_id = stream.request.id.encode()
    for said in events(stream, framing):
        if isinstance(said, Comment):
            yield comment_line(said.text)
        elif said.cursor is None or not ids:
            yield data_line(said.chunk)
        else:
            yield identified_lines(said.chunk, request_id, said.cursor)
    yield b"data: [DONE]\n\n"


def _responses_lines(stream: Stream, framing: ResponsesFraming) -> Iterator[bytes]:
    for said in events(stream, framing):
        yield comment_line(said.text) if isinstance(said, Comment) else event_lines(said)


@blueprint.before_app_request
def _check_socket() -> None:
    """A handshake with a fault is refused before the upgrade, while there is a status to say it with."""
    if request.endpoint == SOCKET:
        g.linger_ms = _linger_ms()


def add_socket(app: Flask) -> None:
    """The WebSocket on the same path. flask-sock makes the server; ours sends whole frames."""
    flask_sock.Server = safe_socket.Server
    app.config["SOCK_SERVER_OPTIONS"] = {
        "ping_interval": PING_S,
        "max_message_size": BODY_MAX,
        "receive_bytes": 65536,
    }
    flask_sock.Sock(app).route("/v1/responses", endpoint=SOCKET)(_serve_socket)


def _serve_socket(ws: simple_websocket.Server) -> None:
    parts = gateway()
    socket = Socket(ws, parts.admission, g.caller, g.linger_ms)
    if parts.admission.draining:
        socket.close(GOING_AWAY, "draining")
        return
    parts.sockets.add(socket)
    try:
        socket.serve()
    finally:
        parts.sockets.discard(socket)
