"""Responses that were made before: shown, cancelled, deleted; and the tokens that one would take."""

from __future__ import annotations

from collections.abc import Iterator

from flask import Blueprint, Response, g, jsonify, request

from core.errors import BadRequest, Gone, NotFound
from web.app import gateway
from web.dialects import responses
from web.dialects.events import Event
from web.history import PAGE, PAGE_MAX, listed, page
from web.routes.generation import responses_lines, shown
from web.transports.http import SSE_HEADERS, body, event_lines

blueprint = Blueprint("responses", __name__)


@blueprint.get("/v1/responses/<response_id>")
def show(response_id: str) -> Response:
    """A response as it is now; or, with `stream=true`, its stream, after `starting_after`."""
    history = gateway().history
    after = responses.cursor(request.args.get("starting_after"))
    if not _flag("stream") or request.method == "HEAD":  # which takes no stream from its reader
        return jsonify(history.show(g.caller, response_id))
    try:
        stream, framing = history.resumed(g.caller, response_id, after)
    except (NotFound, Gone):
        if (events := history.replayed(g.caller, response_id, after)) is None:
            raise
        return Response(_lines(events), mimetype="text/event-stream", headers=SSE_HEADERS)
    return shown(stream, responses_lines(stream, framing))


@blueprint.delete("/v1/responses/<response_id>")
def delete(response_id: str) -> Response:
    """Gone at once: its contents, here and in the queue. One that runs is cancelled."""
    gateway().history.delete(g.caller, response_id)
    return jsonify(id=response_id, object="response", deleted=True)


@blueprint.post("/v1/responses/<response_id>/cancel")
def cancel(response_id: str) -> Response:
    """Stop a response, in the background or not. Again, or too late, it is shown as it ended."""
    return jsonify(gateway().history.cancel(g.caller, response_id))


@blueprint.get("/v1/responses/<response_id>/input_items")
def input_items(response_id: str) -> Response:
    """What the response itself was given, not the turns before it; newest first, if not asked otherwise."""
    order = request.args.get("order", "desc")
    if order not in ("asc", "desc"):
        raise BadRequest("Invalid 'order': Input should be asc or desc.", param="order")
    items = listed(response_id, gateway().history.items(g.caller, response_id))
    return jsonify(page(items, limit=_limit(), after=request.args.get("after"), order=order))


@blueprint.post("/v1/responses/input_tokens")
def input_tokens() -> Response:
    """How many tokens the prompt of such a response has, with the conversation that it goes on from."""
    parts = gateway()
    draft = parts.history.continued(g.caller, responses.parse(body()))
    counted = sum(map(len, parts.admission.prompts(g.caller, draft)))
    return jsonify(object="response.input_tokens", input_tokens=counted)


def _lines(events: Iterator[Event]) -> Iterator[bytes]:
    yield from map(event_lines, events)


def _limit() -> int:
    said = request.args.get("limit", str(PAGE))
    if not (said.isascii() and said.isdecimal() and len(said) <= 4 and 1 <= int(said) <= PAGE_MAX):
        raise BadRequest(f"Invalid 'limit': Input should be a number from 1 to {PAGE_MAX}.", param="limit")
    return int(said)


def _flag(name: str) -> bool:
    said = request.args.get(name, "false").lower()
    if said not in ("true", "false", "1", "0"):
        raise BadRequest(f"Invalid '{name}': Input should be true or false.", param=name)
    return said in ("true", "1")
