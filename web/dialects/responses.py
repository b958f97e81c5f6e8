"""OpenAI's Responses: a body becomes a draft, an answer becomes events, and a WebSocket frame becomes a command.

SSE and WebSocket carry the same events. `sequence_number` is the cursor that a client resumes from. It counts the
characters of the answer, which is what every gateway knows of any piece of it, however tokens were put together:

    created                0
    queued                 1 .. 99, each one more, and then 99 again and again: a place is news, not history
    in_progress            100, item added 101, part added 102
    text up to character c 103 + c
    text done              103 + n + 1 of n characters, part done + 2, item done + 3, the terminal event + 4
    a gateway's own end    the number of what was said last: nothing of the answer lies beyond it
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from core.errors import BadRequest, ForebayError, LimitReached
from core.outlook import Starting
from core.values import ANSWERED, Ending, Outcome, Usage
from web.dialects.draft import (
    ECHO_CHARS_MAX,
    UNSERVED,
    Body,
    Content,
    Count,
    Draft,
    Message,
    Text,
    error_of,
    not_served,
    validated,
)
from web.dialects.view import View

Event = dict[str, Any]
Status = Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]

#: The last number that a queued event may have.
QUEUED_LAST = 99
_IN_PROGRESS, _ITEM_ADDED, _PART_ADDED, _TEXT = 100, 101, 102, 103
_TERMINAL = 4  #: its number after that of the last text
#: No cursor is longer: digits.
_CURSOR_DIGITS_MAX = 10

_UNSERVED: dict[str, tuple[Any, ...]] = {
    **UNSERVED,
    "background": (False,),
    "conversation": (),
    "prompt": (),
}

_STATUSES: dict[Outcome, Status] = {
    Outcome.COMPLETED: "completed",
    Outcome.LENGTH: "incomplete",
    Outcome.CANCELLED: "cancelled",
}

_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_RESPONSE_ID = re.compile(r"resp_([0-9a-f]{32})")


class _Item(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Text = "message"
    role: Literal["developer", "system", "user", "assistant"]
    content: Content

    @model_validator(mode="before")
    @classmethod
    def _only_messages(cls, item: Any) -> Any:
        kind = item.get("type", "message") if isinstance(item, dict) else "message"
        if kind == "reasoning":
            # Clients send back what they were given. No template takes it in again, so it is read and left out.
            return {"type": kind, "role": "assistant", "content": None}
        if kind != "message":
            raise PydanticCustomError("item", "Only items of type 'message' are supported")
        return item

    def message(self) -> Message:
        return Message("system" if self.role == "developer" else self.role, self.content)


def _items(given: object) -> object:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class _Reasoning(BaseModel):
    model_config = ConfigDict(strict=True)

    effort: Annotated[Text, Field(max_length=ECHO_CHARS_MAX)] | None = None
    summary: Annotated[Text, Field(max_length=ECHO_CHARS_MAX)] | None = None


class _ResponsesBody(Body):
    input: Annotated[list[_Item], BeforeValidator(_items)]
    instructions: Text | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: Count | None = None
    previous_response_id: Text | None = None
    reasoning: _Reasoning | None = None
    text: dict[str, Any] = Field(default_factory=dict)
    tools: list[Any] = Field(default_factory=list)
    tool_choice: Any = "auto"
    include: list[str] = Field(default_factory=list)
    truncation: Literal["auto", "disabled"] = "disabled"

    def messages(self) -> tuple[Message, ...]:
        first = (Message("system", self.instructions),) if self.instructions else ()
        return first + tuple(item.message() for item in self.input if item.type == "message")


def parse(body: object) -> Draft:
    """The draft that a Responses body asks for.

    Raises:
      BadRequest: the first fault, naming its field.
    """
    asked = validated(_ResponsesBody, body, _UNSERVED)
    _refuse_unserved(asked)
    messages = asked.messages()
    if not messages:
        raise BadRequest("Invalid 'input': it has no message.", param="input")
    return Draft(
        dialect="responses",
        messages=messages,
        max_tokens=asked.max_output_tokens,
        echo=_echo(asked),
        **asked.knobs(),
    )


def _refuse_unserved(asked: _ResponsesBody) -> None:
    if asked.previous_response_id is not None:
        raise BadRequest(
            f"Previous response with id '{asked.previous_response_id}' not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    if asked.text.get("format") not in (None, {"type": "text"}):
        raise not_served("text.format", 'leave it out or send {"type":"text"}')
    if "message.output_text.logprobs" in asked.include:
        raise not_served("include", "leave out message.output_text.logprobs")
    # Codex sends its tools with every request, so tools that the model may leave alone are left alone.
    choice = asked.tool_choice
    mode = choice.get("mode") if isinstance(choice, dict) and choice.get("type") == "allowed_tools" else choice
    if mode not in ("auto", "none"):
        raise not_served("tool_choice", 'leave it out or send "auto"')


def _echo(asked: _ResponsesBody) -> dict[str, Any]:
    """The fields of the answer that come from the request. They say what was done, not what was wished."""
    return {
        "background": False,
        "frequency_penalty": asked.frequency_penalty,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "metadata": asked.metadata,
        "parallel_tool_calls": asked.parallel_tool_calls,
        "presence_penalty": asked.presence_penalty,
        "previous_response_id": None,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": asked.reasoning.model_dump() if asked.reasoning else None,
        "safety_identifier": asked.safety_identifier,
        "service_tier": asked.service_tier if asked.service_tier in ("priority", "flex") else "default",
        "store": False,  # nothing is kept yet
        "temperature": asked.temperature,
        "text": {"format": {"type": "text"}},
        "tool_choice": "none" if asked.tool_choice == "none" else "auto",
        "tools": [],  # the model was given none
        "top_logprobs": 0,
        "top_p": asked.top_p,
        "truncation": "disabled",
    }


class ResponsesAnswer:
    """The answer to one Responses request, as events or whole. What was already said is not said again.

    `after` is the cursor of a client that comes back: it is told what has a higher number. -1: it has nothing.
    """

    def __init__(self, request_id: str, shown: Draft | View, created_s: int, after: int = -1) -> None:
        code = request_id.replace("-", "")
        self.id = "resp_" + code
        self._item_id = "msg_" + code
        self._shown = shown
        self._created_s = created_s
        self._after = after
        self._last = after  #: the highest number said
        self._started = after >= _IN_PROGRESS
        self._opened = False
        self.chars = 0  #: told so far, or had before
        self._text: list[str] = []

    def created(self) -> list[Event]:
        """The first event. SDKs fail on a stream that begins with another."""
        return self._said([self._lifecycle("created", 0, "in_progress")])

    def queued(self, place: int, estimate_ms: int | None = None, worker: Starting | None = None) -> list[Event]:
        """A place in the queue, how long it may take, and the worker that is being started for it."""
        if self._started:
            return []
        self._last = min(max(self._last, 0) + 1, QUEUED_LAST)
        event = self._lifecycle("queued", self._last, "queued")
        starting = None if worker is None else {"state": worker.state, "detail": worker.detail}
        # An extra key, since strict clients refuse an event type they do not know.
        return [{**event, "queue": {"place": place, "estimate_ms": estimate_ms, "worker": starting}}]

    def in_progress(self) -> list[Event]:
        """A worker has it."""
        if self._started:
            return []
        self._started = True
        return self._said([self._lifecycle("in_progress", _IN_PROGRESS, "in_progress")])

    def opening(self) -> list[Event]:
        """Everything that must come before the first text."""
        if self._opened:
            return []
        self._opened = True
        item = {**self._item("in_progress", ""), "content": []}
        added = [
            _event("response.output_item.added", _ITEM_ADDED, output_index=0, item=item),
            self._part_event("response.content_part.added", _PART_ADDED, part=_part("")),
        ]
        return self.in_progress() + self._said(added)

    def text(self, delta: str) -> list[Event]:
        """The next piece of text, or what of it the client does not have."""
        if not delta:
            return []
        fresh = unseen(delta, self.chars, self._after - _TEXT)
        self.chars += len(delta)
        self._text.append(delta)
        events = self.opening()
        if fresh:
            self._last = _TEXT + self.chars
            events.append(self._part_event("response.output_text.delta", self._last, delta=fresh, logprobs=[]))
        return events

    def ending(self, ending: Ending) -> list[Event]:
        """The last events. An answer, even a cut or empty one, is closed part by part; a failure just ends."""
        status = _STATUSES.get(Outcome(ending.outcome), "failed")
        terminal = _TEXT + self.chars + _TERMINAL
        if status == "failed":
            return self._said([self._failed(error_of(ending), terminal, ending.usage)])
        events = self.opening() if ending.outcome in ANSWERED else []
        closing = self._closing("completed" if status == "completed" else "incomplete") if self._opened else []
        # No event is named cancelled: SDKs end a turn at an incomplete response, whose status says it.
        name = "completed" if status == "completed" else "incomplete"
        closing.append(self._lifecycle(name, terminal, status, **self._facts(status, ending)))
        return events + self._said(closing)

    def failure(self, error: ForebayError) -> list[Event]:
        """The last event when the gateway itself must give up on the request, which may be whole elsewhere."""
        return [self._failed(error, max(self._last, 0), None)]

    def so_far(self, waiting: bool, ending: Ending | None) -> dict[str, Any]:
        """The response as an object, ended or not."""
        if ending is not None:
            self._after = -1
            response: dict[str, Any] = self.ending(ending)[-1]["response"]
            return response
        status: Status = "queued" if waiting and not self._opened else "in_progress"
        return self._response(status, output=self._output("in_progress"))

    def warmed(self) -> list[Event]:
        """The whole stream of a response without output, which clients ask for to open the way."""
        facts = {"completed_at": self._created_s, "usage": usage_object(Usage())}
        completed = self._lifecycle("completed", _TEXT + _TERMINAL, "completed", **facts)
        return [*self.created(), *self.in_progress(), completed]

    def whole(self, text: str, ending: Ending) -> dict[str, Any]:
        """The whole answer as one object.

        Raises:
          ForebayError: it ended without an answer.
        """
        if ending.outcome not in ANSWERED:
            raise error_of(ending)
        self._opened, self._text = True, [text]
        status = _STATUSES[Outcome(ending.outcome)]
        return self._response(status, **self._facts(status, ending))

    def _said(self, events: list[Event]) -> list[Event]:
        """Those that the client does not have."""
        fresh = [event for event in events if event["sequence_number"] > self._after]
        if fresh:
            self._last = fresh[-1]["sequence_number"]
        return fresh

    def _closing(self, item_status: str) -> list[Event]:
        text, number = "".join(self._text), _TEXT + self.chars + 1
        return [
            self._part_event("response.output_text.done", number, text=text, logprobs=[]),
            self._part_event("response.content_part.done", number + 1, part=_part(text)),
            _event("response.output_item.done", number + 2, output_index=0, item=self._item(item_status, text)),
        ]

    def _facts(self, status: Status, ending: Ending) -> dict[str, Any]:
        """What a response says once it has ended with an answer, or with a part of one."""
        item_status = "completed" if status == "completed" else "incomplete"
        return {
            "completed_at": ending.ended_ms // 1000 if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._output(item_status),
            "usage": usage_object(ending.usage),
        }

    def _failed(self, error: ForebayError, number: int, usage: Usage | None) -> Event:
        fault = {"code": _fault_code(error), "message": error.message}
        facts = {"error": fault, "output": self._output("incomplete"), "usage": usage and usage_object(usage)}
        return self._lifecycle("failed", number, "failed", **facts)

    def _lifecycle(self, name: str, number: int, status: Status, **facts: Any) -> Event:
        return _event(f"response.{name}", number, response=self._response(status, **facts))

    def _response(self, status: Status, **facts: Any) -> dict[str, Any]:
        """The Response object, with every key of the specification: clients check for their presence."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created_s,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._shown.model,
            "output": [],
            "usage": None,
            **self._shown.echo,
            **facts,
        }

    def _output(self, item_status: str) -> list[dict[str, Any]]:
        return [self._item(item_status, "".join(self._text))] if self._opened else []

    def _item(self, status: str, text: str) -> dict[str, Any]:
        return {"type": "message", "id": self._item_id, "status": status, "role": "assistant", "content": [_part(text)]}

    def _part_event(self, name: str, number: int, **fields: Any) -> Event:
        return _event(name, number, item_id=self._item_id, output_index=0, content_index=0, **fields)


def _event(name: str, number: int, **fields: Any) -> Event:
    return {"type": name, "sequence_number": number, **fields}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def unseen(text: str, start: int, seen: int) -> str:
    """What of a text that begins at character `start` lies beyond the first `seen` characters."""
    return text if seen <= start else text[seen - start :]


def _fault_code(error: ForebayError) -> str:
    """A failed response has its own few codes, which SDKs know by heart."""
    if isinstance(error, LimitReached):
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, BadRequest) else "server_error"


def usage_object(usage: Usage) -> dict[str, Any]:
    """Token counts in the words of Responses."""
    return {
        "input_tokens": usage.input_tokens,
        # A write to the prefix cache costs nothing here and is not counted; SDKs require the key.
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }


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


Command = Create | Resume | Cancel | Steer | Refused


def parse_event(text: str) -> Command:
    """What a client's text frame asks for. Never raises: a bad frame leaves the socket open."""
    stream_id = None
    try:
        event = _event_object(text)
        stream_id = _stream_id(event)
        return _command(event, stream_id)
    except BadRequest as error:
        return Refused(error=error, stream_id=stream_id)


def _event_object(text: str) -> dict[str, Any]:
    try:
        event = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        raise BadRequest("The frame is not valid JSON.", code="invalid_json") from None
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
    body = {name: value for name, value in event.items() if name not in ("type", "stream_id", "generate")}
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


def cursor(given: object) -> int:
    """A `starting_after`, of a query or of a frame; -1: from the beginning.

    Raises:
      BadRequest: it is not a number, or no number that an event may have.
    """
    text = str(given) if isinstance(given, str | int) and not isinstance(given, bool) else ""
    if given is None:
        return -1
    if not (text.isascii() and text.isdecimal() and len(text) <= _CURSOR_DIGITS_MAX):
        raise BadRequest("Invalid 'starting_after': Input should be a sequence number.", param="starting_after")
    return int(text)


def check_cursor(after: int, chars: int, ended: bool) -> None:
    """A client cannot have seen more than there is.

    Raises:
      BadRequest: it says it has.
    """
    if after > max(_PART_ADDED, _TEXT + chars + (_TERMINAL if ended else 0)):
        raise BadRequest("Invalid 'starting_after': It lies beyond the end of the stream.", param="starting_after")


def request_id_of(response_id: str) -> str | None:
    """The request behind a response; None: it is no id of a response."""
    found = _RESPONSE_ID.fullmatch(response_id)
    return str(UUID(found[1])) if found else None


def steer_failed(steer: Steer) -> Event:
    """The answer to any steering: the input comes back, so that the client can send it as a turn of its own."""
    error = {
        "type": "invalid_request_error",
        "code": "steering_not_supported",
        "message": "Steering is not supported. Cancel the response, or send the input as the next turn.",
    }
    submission = {"previous_response_id": steer.previous_response_id, "input": steer.input}
    return _event("response.steer.failed", 0, error=error, steer=submission)


def error_frame(error: ForebayError, stream_id: str | None = None) -> Event:
    """The frame that refuses a request and leaves the socket open. A named lane's frames name it."""
    envelope = error.envelope()
    fault = {
        "type": envelope["type"],
        "code": envelope["code"] or envelope["type"],
        "message": envelope["message"],
        "param": envelope["param"],
    }
    if error.retry_after_ms is not None:
        fault["headers"] = _retry_headers(error.retry_after_ms)
    lane = {} if stream_id is None else {"stream_id": stream_id}
    return {"type": "error", "status": error.status, **lane, "error": fault}


def _retry_headers(retry_after_ms: int) -> dict[str, str]:
    return {"retry-after-ms": str(retry_after_ms), "retry-after": str(-(-retry_after_ms // 1000))}
