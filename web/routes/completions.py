"""OpenAI's older completions, over HTTP and SSE, and embeddings."""

from __future__ import annotations

from functools import partial

from flask import Blueprint, Response, request

from web.app import gateway
from web.dialects import completions, embeddings
from web.dialects.framing import CompletionsFraming
from web.routes.generation import admit, answer, chat_lines, go_on
from web.transports.http import answer_whole, body

blueprint = Blueprint("completions", __name__)


@blueprint.post("/v1/completions")
def create_completion() -> Response:
    if last_event := request.headers.get("Last-Event-ID"):
        return go_on(last_event, "completions", CompletionsFraming)
    draft = completions.parse(body())
    admitted = admit(draft)
    framing = CompletionsFraming(admitted.stream.request.id, draft, keep_alive=gateway().chat_keepalive)
    return answer(admitted, draft, framing, chat_lines)


@blueprint.post("/v1/embeddings")
def create_embeddings() -> Response:
    draft, parts = embeddings.parse(body()), gateway()
    stream = admit(draft).stream
    whole = partial(embeddings.whole, draft=draft)
    return answer_whole(parts.admission, stream, whole, parts.watch, keepalive_s=parts.keepalive_s)
