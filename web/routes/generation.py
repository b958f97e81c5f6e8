"""Generation: chat completions and Responses over HTTP and SSE. Sockets have a file of their own."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec
from flask import Blueprint, Response, g, jsonify, request
from werkzeug.exceptions import MethodNotAllowed

from core.errors import BadRequest, Gone, NotFound, StoreDown
from web.admission import Admitted
from web.app import gateway
from web.dialects import chat, responses
from web.dialects.draft import Dialect, Draft
from web.dialects.events import Event
from web.dialects.framing import ChatFraming, Comment, CompletionsFraming, Numbered, ResponsesFraming
from web.stream import Stream
from web.transports.http import (
    SSE_HEADERS,
    Lines,
    answer_whole,
    body,
    comment_line,
    data_line,
    event_lines,
    identified_lines,
    sse,
)
from web.transports.idempotency import attach

blueprint = Blueprint("generation", __name__)

_SECONDS = re.compile(r"\d{1,5}(\.\d{1,6})?")

#: The header with which a client asks for its request to go on a while without it, so that it can come back.
LINGER = "X-Forebay-Linger"
LINGER_MAX_S = 300


@blueprint.post("/v1/chat/completions")
def chat_completions() -> Response:
    if last_event := request.headers.get("Last-Event-ID"):
        return go_on(last_event)
    draft = chat.parse(body())
    admitted = admit(draft)
    framing = ChatFraming(admitted.stream.request.id, draft, keep_alive=gateway().chat_keepalive)
    return answer(admitted, draft, framing, chat_lines)


@blueprint.get("/v1/chat/completions")
def chat_completions_again() -> Response:
    """For browsers, whose EventSource can only GET: it goes on with a stream, and begins none."""
    last_event = request.headers.get("Last-Event-ID")
    if not last_event or request.method == "HEAD":
        raise MethodNotAllowed(["POST"])
    return go_on(last_event)


@blueprint.post("/v1/responses")
def create_response() -> Response:
    history = gateway().history
    draft = history.prepared(g.caller, responses.parse(body()))
    if draft.background:
        return _in_background(draft)
    admitted = admit(draft)
    return answer(admitted, draft, history.framing(admitted.stream, draft), responses_lines)


def _in_background(draft: Draft) -> Response:
    """Accepted, and answered at once; with `stream=true`, read like any other: its reader may go and come back."""
    parts = gateway()

    def accept(request_id: str | None = None) -> dict[str, Any]:
        accepted, g.left, queued = parts.backlog.accept(g.caller, draft, request_id)
        g.request_id = accepted.id
        return queued

    def find(request_id: str) -> dict[str, Any] | None:
        try:
            found = parts.history.show(g.caller, responses.response_id_of(request_id))
        except (NotFound, Gone):
            return None
        g.request_id, g.replayed = request_id, True
        return found

    if (once := g.get("once")) is None:
        queued = accept()
    else:
        key, said = once
        queued = parts.once.background(g.caller, key, said, accept, find)
    if not draft.stream:
        return jsonify(queued)
    try:
        stream, framing = parts.history.resumed(g.caller, queued["id"], -1)
    except (NotFound, Gone, StoreDown):
        return _unread(queued)
    return shown(stream, responses_lines(stream, framing))


def _unread(queued: dict[str, Any]) -> Response:
    """Accepted, and not to be read from the queue now, or any more. An error would have it made a second time."""
    events = gateway().history.unread(g.caller, queued)
    return Response(map(event_lines, events), mimetype="text/event-stream", headers=SSE_HEADERS)


def admit(draft: Draft) -> Admitted:
    """Accept what a body asks for, with what its headers say of it."""
    draft = msgspec.structs.replace(draft, timeout_s=draft.timeout_s or _read_timeout_s(draft), linger_ms=linger_ms())
    transport = "sse" if draft.stream else "http"
    if (once := g.get("once")) is None:
        admitted = gateway().admission.admit(g.caller, draft, transport)
    else:
        admitted = gateway().once.admit(g.caller, draft, transport, *once)
    g.request_id, g.left, g.replayed = admitted.stream.request.id, admitted.left, admitted.replayed
    return admitted


def answer(admitted: Admitted, draft: Draft, framing: Any, lines: Callable[..., Iterable[bytes]]) -> Response:
    """Answer an accepted request, as it asked to be."""
    parts, stream = gateway(), admitted.stream
    stream.reader = g.caller.key_id
    if draft.stream:
        return shown(stream, lines(stream, framing))
    return answer_whole(parts.admission, stream, framing.whole, parts.watch, keepalive_s=parts.keepalive_s)


def shown(stream: Stream, lines: Iterable[bytes]) -> Response:
    parts = gateway()
    g.request_id, stream.reader = stream.request.id, g.caller.key_id
    return sse(parts.admission, stream, lines, parts.watch)


def go_on(
    last_event: str, dialect: Dialect = "chat", made: type[ChatFraming] | type[CompletionsFraming] = ChatFraming
) -> Response:
    """A stream for a client that comes back. Nothing is admitted: the body is the one it sent before."""
    parts = gateway()
    request_id, after = chat.last_event(last_event)
    kept = parts.admission.recall(g.caller, request_id, dialect)
    if not kept.view.stream:
        raise BadRequest("That answer was not streamed.", param="Last-Event-ID")
    chat.check_cursor(after, kept.chars, kept.seen.state == "ended")
    stream = attach(parts.admission, kept)
    framing = made(request_id, kept.view, after=after, keep_alive=parts.chat_keepalive)
    return shown(stream, chat_lines(stream, framing))


def linger_ms() -> int:
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


def chat_lines(stream: Stream, framing: ChatFraming | CompletionsFraming) -> Lines:
    of = stream.request.id.encode() if gateway().chat_ids else b""
    return Lines(stream, framing, partial(_chat_line, of), b"data: [DONE]\n\n")


def _chat_line(of: bytes, said: Comment | Numbered) -> bytes:
    """`of`: whose stream it is, if its chunks have ids."""
    if isinstance(said, Comment):
        return comment_line(said.text)
    if said.cursor is None or not of:
        return data_line(said.chunk)
    return identified_lines(said.chunk, of, said.cursor)


def responses_lines(stream: Stream, framing: ResponsesFraming) -> Lines:
    return Lines(stream, framing, _response_line)


def _response_line(said: Comment | Event) -> bytes:
    return comment_line(said.text) if isinstance(said, Comment) else event_lines(said)
