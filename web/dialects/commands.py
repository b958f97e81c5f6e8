"""What a WebSocket of Responses says: a client's frame becomes a command, what is no event becomes a frame. Pure."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from core.errors import BadRequest, ForebayError
from web.dialects.draft import Draft
from web.dialects.events import Event
from web.dialects.nesting import decoded
from web.dialects.responses import cursor, parse

_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")
#: Fields of a create that are no part of its body, or say what a socket does in any case.
_SOCKETS_OWN = frozenset({"type", "stream_id", "generate", "background", "stream"})


class Create(msgspec.Struct, frozen=True, kw_only=True):
    """Start a response. `generate=False` asks for an answer without output, which only warms up."""

    draft: Draft
    stream_id: str | None = None
    generate: bool = True


class Resume(msgspec.Struct, frozen=True, kw_only=True):
    """Go on with a response, here or begun on another connection. Ours: OpenAI has it over HTTP only."""

    response_id: str
    starting_after: int = -1
    stream_id: str | None = None


class Cancel(msgspec.Struct, frozen=True, kw_only=True):
    """Stop a response. Ours: OpenAI's WebSocket mode has only the closing of the socket."""

    response_id: str
    stream_id: str | None = None


class Steer(msgspec.Struct, frozen=True, kw_only=True):
    """Change the course of a running response, which is not supported."""

    previous_response_id: str
    input: Any = None


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """A frame that is none of these, with the error to send and the lane to send it on."""

    error: BadRequest
    stream_id: str | None = None
    previous: str = ""  #: the response that it would have gone on from


Command = Create | Resume | Cancel | Steer | Refused


def parse_event(text: str) -> Command:
    """What a client's text frame asks for. Never raises: a bad frame leaves the socket open."""
    stream_id, event = None, {}
    try:
        event = _event_object(text)
        stream_id = _stream_id(event)
        return _command(event, stream_id)
    except BadRequest as error:
        previous = event.get("previous_response_id")
        return Refused(error=error, stream_id=stream_id, previous=previous if isinstance(previous, str) else "")


def _event_object(text: str) -> dict[str, Any]:
    event = decoded(text)
    if not isinstance(event, dict):
        raise BadRequest("The frame must be a JSON object.", code="invalid_json")
    return event


def _stream_id(event: dict[str, Any]) -> str | None:
    stream_id = event.get("stream_id")
    if stream_id is None or (isinstance(stream_id, str) and _STREAM_ID.fullmatch(stream_id)):
        return stream_id
    raise BadRequest(
        "A 'stream_id' has 1 to 256 characters, letters, digits and _ . - only.",
        param="stream_id",
        code="invalid_stream_id",
    )


def _command(event: dict[str, Any], stream_id: str | None) -> Command:
    match event.get("type"):
        case "response.create":
            return _create(event, stream_id)
        case "response.resume":
            after = cursor(event.get("starting_after"))
            return Resume(response_id=_string(event, "response_id"), starting_after=after, stream_id=stream_id)
        case "response.cancel":
            return Cancel(response_id=_string(event, "response_id"), stream_id=stream_id)
        case "response.steer":
            return Steer(previous_response_id=_string(event, "previous_response_id"), input=event.get("input"))
        case None:
            raise BadRequest("The event has no 'type'.", param="type", code="missing_required_parameter")
        case _:
            raise BadRequest("There is no such event. Send response.create.", param="type", code="unknown_event")


def _create(event: dict[str, Any], stream_id: str | None) -> Create:
    body = {name: value for name, value in event.items() if name not in _SOCKETS_OWN}
    generate = event.get("generate")
    if generate is not None and not isinstance(generate, bool):
        raise BadRequest("Invalid 'generate': Input should be a valid boolean.", param="generate")
    # A socket always streams, whatever the body says: Codex says true, the specification says nothing.
    return Create(draft=parse({**body, "stream": True}), stream_id=stream_id, generate=generate is not False)


def _string(event: dict[str, Any], name: str) -> str:
    value = event.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"Invalid '{name}': Input should be a valid string.", param=name)
    return value


def steer_failed(steer: Steer) -> Event:
    """The answer to any steering: the input comes back, so that the client can send it as a turn of its own."""
    error = {
        "type": "invalid_request_error",
        "code": "steering_not_supported",
        "message": "Steering is not supported. Cancel the response, or send the input as the next turn.",
    }
    submission = {"previous_response_id": steer.previous_response_id, "input": steer.input}
    return {"type": "response.steer.failed", "sequence_number": 0, "error": error, "steer": submission}


def error_frame(error: ForebayError, stream_id: str | None = None) -> Event:
    """The frame that refuses a request and leaves the socket open. A named lane's frames name it."""
    envelope = error.envelope()
    fault = {
        "type": envelope["type"],
        "code": envelope["code"] or envelope["type"],
        "message": envelope["message"],
        "param": envelope["param"],
    }
    retry = {} if error.retry_after_ms is None else _retry_headers(error.retry_after_ms)
    if told := {**error.headers, **retry}:
        fault["headers"] = told
    lane = {} if stream_id is None else {"stream_id": stream_id}
    return {"type": "error", "status": error.status, **lane, "error": fault}


def _retry_headers(retry_after_ms: int) -> dict[str, str]:
    return {"retry-after-ms": str(retry_after_ms), "retry-after": str(-(-retry_after_ms // 1000))}
