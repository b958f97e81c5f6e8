"""OpenAI's chat completions: a body becomes a draft, an answer becomes chunks or one object.

A chunk's cursor counts the characters of the answer, of whatever kind, which every gateway knows of any piece of it:
the roles have 0, what ends with character c has c, and of n characters the chunk with the reason, or the error, has
n + 1, the usage n + 2. As an event's `id:` it follows the request's id and a colon.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from core.errors import BadRequest, NotFound
from core.stream.frames import Kind, Logprob, Run, kind_of
from core.values import Tools
from web.dialects.choices import Answer, Choice, Chunk, ended_as, text_of, told, usage_object
from web.dialects.draft import (
    ANSWERS_MAX,
    LOGPROBS_MAX,
    MESSAGES_MAX,
    NAME_CHARS_MAX,
    UNSERVED,
    Body,
    Call,
    Content,
    Count,
    Draft,
    Message,
    ResponseFormat,
    Text,
    not_served,
    validated,
)
from web.dialects.tools import TOOLS_MAX, Function, FunctionName, call_id, tools_of
from web.dialects.view import View

__all__ = ["ChatAnswer", "Chunk", "check_cursor", "last_event", "parse", "usage_object"]

_UNSERVED: dict[str, tuple[Any, ...]] = {
    **UNSERVED,
    "modalities": (["text"],),
    "audio": (),
    "moderation": (),
    "web_search_options": (),
    "echo": (False,),
}

#: A request's id and a cursor, which is looked at by itself.
_EVENT_ID = re.compile(r"([0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}):(.*)", re.DOTALL)
#: No cursor is longer: digits.
_CURSOR_DIGITS_MAX = 10

_Name = Annotated[Text, Field(max_length=NAME_CHARS_MAX)]


def _legacy(value: object) -> None:
    if value is not None:  # dropped, the model would not see what it did
        raise PydanticCustomError("legacy", "This form was replaced by tool_calls and is not supported; send those")


class _Called(BaseModel):
    model_config = ConfigDict(strict=True)

    name: _Name
    arguments: Text


class _ToolCall(BaseModel):
    model_config = ConfigDict(strict=True)

    id: _Name
    type: Literal["function"] = "function"
    function: _Called

    def call(self) -> Call:
        return Call(self.id, self.function.name, self.function.arguments)


def _needs_content(schema: dict[str, Any]) -> None:
    """Says in a schema what `_calls_need_no_content` does."""
    schema["required"].remove("content")
    calls = {"tool_calls": {"type": "array", "minItems": 1}}
    schema["anyOf"] = [{"required": ["content"]}, {"required": ["tool_calls"], "properties": calls}]


class _Message(BaseModel):
    model_config = ConfigDict(strict=True, json_schema_extra=_needs_content)

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: Content
    name: _Name | None = None
    tool_calls: Annotated[list[_ToolCall], Field(max_length=TOOLS_MAX)] | None = None
    tool_call_id: _Name | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    function_call: Annotated[None, BeforeValidator(_legacy)] = None
    audio: Annotated[None, BeforeValidator(_legacy)] = None

    @model_validator(mode="before")
    @classmethod
    def _calls_need_no_content(cls, message: Any) -> Any:
        calls = isinstance(message, dict) and message.get("tool_calls")
        return {"content": None, **message} if calls else message

    def message(self) -> Message:
        # Chat templates know no developer; OpenAI made it a new name for system.
        return Message(
            "system" if self.role == "developer" else self.role,
            self.content,
            calls=tuple(call.call() for call in self.tool_calls or ()),
            reasoning=self.reasoning_content or self.reasoning or "",
            call_id=self.tool_call_id or "",
            name=self.name or "",
        )


class _StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class _Tool(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: Function


class _Named(BaseModel):
    model_config = ConfigDict(strict=True)

    name: FunctionName


class _NamedTool(BaseModel):
    model_config = ConfigDict(strict=True)

    type: Literal["function"]
    function: _Named


class _Allowed(BaseModel):
    model_config = ConfigDict(strict=True)

    mode: Literal["auto", "required"]
    tools: Annotated[list[_NamedTool], Field(min_length=1, max_length=TOOLS_MAX)]


def _each_its_own(schema: dict[str, Any]) -> None:
    """Says in a schema that a choice has what its type names."""
    fields = schema.pop("properties")
    schema["anyOf"] = [
        {"properties": {"type": {"const": kind}, kind: fields[kind]["anyOf"][0]}, "required": ["type", kind]}
        for kind in fields.pop("type")["enum"]
    ]


class _ToolChoice(BaseModel):
    """One function, or some of them; or a word, which stands for itself."""

    model_config = ConfigDict(strict=True, json_schema_extra=_each_its_own)

    type: Literal["function", "allowed_tools"]
    function: _Named | None = None
    allowed_tools: _Allowed | None = None
    word: SkipJsonSchema[str] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _has_its_own(cls, choice: Any) -> Any:
        if not isinstance(choice, dict):
            raise PydanticCustomError("tool_choice", "Input should be 'none', 'auto', 'required' or an object")
        kind = choice.get("type")
        if kind in ("function", "allowed_tools") and choice.get(kind) is None:
            raise PydanticCustomError("tool_choice", "Its '{kind}' is missing", {"kind": kind})
        return {name: choice[name] for name in ("type", kind) if name in choice} if isinstance(kind, str) else choice

    @property
    def choice(self) -> str:
        """In the words of Tools."""
        if self.allowed_tools:
            return self.allowed_tools.mode
        return f"={self.function.name}" if self.function else self.word

    @property
    def only(self) -> list[str]:
        """The functions that it is to be one of; none: any."""
        return [tool.function.name for tool in self.allowed_tools.tools] if self.allowed_tools else []


def _tool_choice(asked: object) -> object:
    if isinstance(asked, str) and asked in ("none", "auto", "required"):
        return _ToolChoice.model_construct(type="function", word=asked)
    return asked


class ChatBody(Body):
    messages: Annotated[list[_Message], Field(min_length=1, max_length=MESSAGES_MAX)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    n: Annotated[int, Field(ge=1, le=ANSWERS_MAX)] = 1
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_MAX)] = 0
    response_format: ResponseFormat | None = None
    tools: Annotated[list[_Tool], Field(max_length=TOOLS_MAX)] = Field(default_factory=list)
    tool_choice: Annotated[
        _ToolChoice,
        BeforeValidator(_tool_choice, json_schema_input_type=Literal["none", "auto", "required"] | _ToolChoice),
    ] = Field(default_factory=partial(_ToolChoice.model_construct, type="function", word="auto"))
    functions: Annotated[list[Any], WithJsonSchema({"type": "array", "maxItems": 0})] = Field(default_factory=list)
    function_call: Annotated[Any, WithJsonSchema({"enum": ["none", "auto"]})] = None
    stream_options: _StreamOptions = _StreamOptions()
    reasoning_effort: _Name | None = None
    verbosity: _Name | None = None
    prediction: dict[str, Any] | None = None

    def grammar(self) -> dict[str, Any]:
        return super().grammar() or (self.response_format.terms() if self.response_format else {})

    def called(self) -> Tools | None:
        """The functions that the model may call."""
        functions = [tool.function.plain() for tool in self.tools]
        choice = self.tool_choice
        return tools_of(functions, choice.choice, parallel=self.parallel_tool_calls, only=choice.only)

    def told(self) -> dict[str, Any]:
        """What the chat template is told, as vLLM does of the effort: what the caller tells it itself goes first."""
        if self.reasoning_effort is None:
            return self.chat_template_kwargs
        effort = {"reasoning_effort": self.reasoning_effort, "enable_thinking": self.reasoning_effort != "none"}
        return effort | self.chat_template_kwargs


def parse(body: object) -> Draft:
    """The draft that a chat completions body asks for.

    Raises:
      BadRequest: the first fault, naming its field.
    """
    asked = validated(ChatBody, body, _UNSERVED)
    _refuse(asked)
    knobs, tools = asked.knobs(), asked.called()
    # Where the answer is a call, there is none that could have a form.
    grammar = {} if tools and tools.forced else asked.grammar()
    logprobs = asked.top_logprobs if asked.logprobs else None
    knobs["sampling"] = msgspec.structs.replace(knobs["sampling"], logprobs=logprobs, grammar=grammar)
    return Draft(
        dialect="chat",
        messages=tuple(message.message() for message in asked.messages),
        max_tokens=asked.max_completion_tokens or asked.max_tokens,
        n=asked.n,
        tools=tools,
        reasons=asked.reasoning_effort != "none",
        include_usage=bool(asked.stream_options.include_usage),
        **{**knobs, "template": asked.told()},
    )


def _refuse(asked: ChatBody) -> None:
    if asked.functions:
        raise not_served("functions", "it was replaced by 'tools', send those")
    if asked.function_call not in (None, "none", "auto"):
        raise not_served("function_call", "it was replaced by 'tool_choice', send that")
    if asked.top_logprobs and not asked.logprobs:
        raise BadRequest("Invalid 'top_logprobs': it needs 'logprobs' to be true.", param="top_logprobs")
    if asked.structured_outputs and asked.response_format and asked.response_format.terms():
        raise BadRequest("Invalid 'structured_outputs': there is a 'response_format' too.", param="structured_outputs")


class ChatAnswer(Answer):
    """The answer to one chat request."""

    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(self, request_id: str, shown: Draft | View, created_s: int) -> None:
        super().__init__("chatcmpl-" + request_id.replace("-", ""), created_s, shown)
        self._request_id = request_id

    def opening(self) -> list[Chunk]:
        """The roles, in the order of their choices: SDKs count on it, and append a role wherever it comes again."""
        return [self._chunk(choice, {"role": "assistant", "content": ""}) for choice in self._choices]

    def _delta(self, choice: Choice, kind: Kind, fresh: str) -> Any:
        match kind.what:
            case "text":
                return {"content": fresh}
            case "reasoning":
                return {"reasoning_content": fresh}
            case "call":
                return {"tool_calls": [self._begun(choice, kind.call, fresh, "")]}
            case "arguments" if kind.call not in choice.calls:
                return {"tool_calls": [self._begun(choice, kind.call, "", fresh)]}
            case "arguments":
                # Neither id nor type again: SDKs append the one, and fail on the other.
                return {"tool_calls": [{"index": choice.calls[kind.call], "function": {"arguments": fresh}}]}
            case _:
                return None

    def _begun(self, choice: Choice, call: int, name: str, arguments: str) -> dict[str, Any]:
        index = choice.calls.setdefault(call, len(choice.calls))
        return {"index": index, **self._call(choice, call, name, arguments)}

    def _call(self, choice: Choice, call: int, name: str, arguments: str) -> dict[str, Any]:
        called = {"name": name, "arguments": arguments}
        return {"id": call_id(self._request_id, choice.index, call), "type": "function", "function": called}

    def _part(self, choice: Choice, delta: Any, finish_reason: str | None) -> dict[str, Any]:
        logprobs, choice.logprobs = choice.logprobs, []
        return {
            "index": choice.index,
            "delta": delta or {},
            "logprobs": _logprobs(logprobs),
            "finish_reason": finish_reason,
        }

    def _answered(self, choice: Choice, runs: list[Run], finish: str | None) -> dict[str, Any]:
        calls = {kind.call: ["", ""] for kind in (kind_of(run.kind) for run in runs) if kind.what in _CALLS}
        for kind, text in ((kind_of(run.kind), run.text) for run in runs):
            if kind.what in _CALLS:
                calls[kind.call][_CALLS.index(kind.what)] += text
        choice.calls = dict.fromkeys(calls, 0)
        text, reasoning = text_of(runs, "text"), text_of(runs, "reasoning")
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = [self._call(choice, call, *called) for call, called in calls.items()]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": _logprobs([logprob for run in runs for logprob in run.logprobs]),
            "finish_reason": self._reason(choice, ended_as(runs, finish)),
        }


_CALLS = ("call", "arguments")


def _logprobs(logprobs: list[Logprob]) -> dict[str, Any] | None:
    return {"content": [_logprob(each) for each in logprobs], "refusal": None} if logprobs else None


def _logprob(logprob: Logprob) -> dict[str, Any]:
    top = [_token(token, likely) for token, likely in logprob.top]
    return {**_token(logprob.token, logprob.logprob), "top_logprobs": top}


def _token(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "logprob": told(logprob), "bytes": list(token.encode("utf-8", "replace"))}


def last_event(text: str) -> tuple[str, int]:
    """The request and the cursor that a `Last-Event-ID` names.

    Raises:
      NotFound: it names no request of ours.
      BadRequest: its cursor is no number.
    """
    found = _EVENT_ID.fullmatch(text)
    if found is None:
        raise NotFound("There is no stream with that event.")
    if not (found[2].isascii() and found[2].isdecimal() and len(found[2]) <= _CURSOR_DIGITS_MAX):
        raise BadRequest("Invalid 'Last-Event-ID': its cursor should be a number.", param="Last-Event-ID")
    return found[1], int(found[2])


def check_cursor(after: int, chars: int, ended: bool) -> None:
    """A client cannot have seen more than there is.

    Raises:
      BadRequest: it says it has.
    """
    if after > chars + (2 if ended else 0):
        raise BadRequest("Invalid 'Last-Event-ID': it lies beyond the end of the stream.", param="Last-Event-ID")
