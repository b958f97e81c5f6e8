"""Anthropic's Messages over HTTP and SSE."""

from __future__ import annotations

from flask import Blueprint, Response, g, jsonify

from web.app import gateway
from web.dialects import messages
from web.dialects.draft import Draft
from web.dialects.framing import MessagesFraming
from web.routes.generation import admit, answer
from web.stream import Stream
from web.transports.http import Lines, body, event_lines

blueprint = Blueprint("messages", __name__)


@blueprint.post("/v1/messages")
def create_message() -> Response:
    draft = messages.parse(body())
    admitted = admit(draft)
    request = admitted.stream.request
    input_tokens = request.input_tokens or _counted(draft)  # one that is shown again is without its prompt
    framing = MessagesFraming(request.id, draft, input_tokens)
    return answer(admitted, draft, framing, _lines)


@blueprint.post("/v1/messages/count_tokens")
def count_tokens() -> Response:
    """What the same body would count as its input."""
    draft = messages.parse_count(body())
    return jsonify(input_tokens=_counted(draft))


def _counted(draft: Draft) -> int:
    [prompt] = gateway().admission.prompts(g.caller, draft)
    return len(prompt)


def _lines(stream: Stream, framing: MessagesFraming) -> Lines:
    return Lines(stream, framing, event_lines)
