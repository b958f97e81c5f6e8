"""OpenAI's Responses: a body becomes a draft, and what names a response or a place in its stream is read.

Answers are in events.py, what a WebSocket asks in commands.py.

What a draft goes on from is not known here: `continued` puts it before the draft's own input, once it has been read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from core.errors import BadRequest
from core.stream.frames import Run
from core.values import Sampling, Tools
from web.dialects.draft import (
    ECHO_CHARS_MAX,
    LOGPROBS_MAX,
    MESSAGES_MAX,
    UNSERVED,
    Body,
    Count,
    Draft,
    Message,
    Schema,
    Text,
    needed,
    nullable,
    validated,
)
from web.dialects.events import last_number
from web.dialects.items import Item, Kept, kept, messages_of
from web.dialects.tools import TOOLS_MAX, Function, FunctionName, tools_of

#: No cursor is longer: digits.
_CURSOR_DIGITS_MAX = 10

_UNSERVED: dict[str, tuple[Any, ...]] = {**UNSERVED, "n": (1,), "conversation": (), "prompt": ()}

_RESPONSE_ID = re.compile(r"resp_([0-9a-f]{32})")
#: Of an item of an answer of ours.
_ITEM_ID = re.compile(r"(?:msg|rs|fc)_([0-9a-f]{32})_\d{1,6}")


def _input(given: object) -> object:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)


class _FunctionTool(Function):
    type: Literal["function"]

    def plain(self) -> dict[str, Any]:
        return self.model_dump(exclude={"type"}, exclude_none=True)

    def echo(self) -> dict[str, Any]:
        """It, with every key that the specification has."""
        return {"type": "function", **self.model_dump(include={"name", "description", "parameters", "strict"})}


class _HostedTool(_Strict):
    """One that another server would run, such as a search. The model is not told of it."""

    type: Annotated[Text, Field(json_schema_extra={"not": {"const": "function"}})]


def _tool_tag(tool: object) -> str:
    return "<function>" if isinstance(tool, dict) and tool.get("type") == "function" else "<hosted>"


_Tool = Annotated[
    Annotated[_FunctionTool, Tag("<function>")] | Annotated[_HostedTool, Tag("<hosted>")], Discriminator(_tool_tag)
]


class _Named(_Strict):
    type: Literal["function"]
    name: FunctionName


class _AllowedTool(_Strict):
    type: Text
    name: Text | None = None


class _Allowed(_Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[_AllowedTool], Field(max_length=TOOLS_MAX)]

    @property
    def names(self) -> list[str]:
        return [tool.name for tool in self.tools if tool.type == "function" and tool.name]


def _choice_tag(choice: object) -> str | None:
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(choice, str):
        return "<mode>"
    return f"<{kind}>" if kind in ("function", "allowed_tools") else None


_Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")]
    | Annotated[_Named, Tag("<function>")]
    | Annotated[_Allowed, Tag("<allowed_tools>")],
    Discriminator(
        _choice_tag,
        custom_error_type="tool_choice",
        custom_error_message="Input should be 'none', 'auto', 'required', a function or allowed_tools, "
        "since tools of other types are not run here",
    ),
]


class _Format(_Strict):
    """What the text is to be like."""

    model_config = ConfigDict(json_schema_extra=needed("json_schema", "name", "schema"))

    type: Literal["text", "json_object", "json_schema"]
    name: FunctionName | None = None
    description: Text | None = None
    as_json: Schema | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> _Format:
        missing = "name" if self.name is None else "schema" if self.as_json is None else ""
        if self.type == "json_schema" and missing:
            raise PydanticCustomError("format", "Its '{missing}' is missing", {"missing": missing})
        return self

    def grammar(self) -> dict[str, Any]:
        """It in the words of Sampling."""
        match self.type:
            case "json_schema":
                return {"json": self.as_json}
            case "json_object":
                return {"json_object": True}
            case _:
                return {}

    def echo(self) -> dict[str, Any]:
        if self.type != "json_schema":
            return {"type": self.type}
        named = {"name": self.name, "description": self.description}
        return {"type": self.type, **named, "schema": self.as_json, "strict": bool(self.strict)}


class _TextConfig(_Strict):
    format: _Format | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  #: no chat template asks for it


class _Reasoning(_Strict):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


def _needs_input(schema: dict[str, Any]) -> None:
    """Says in a schema that there is something to answer: an input, or a conversation."""
    nullable(schema)
    ways = ("input", "previous_response_id")
    schema["anyOf"] = [{"properties": {name: {"not": {"type": "null"}}}, "required": [name]} for name in ways]


class ResponsesBody(Body):
    model_config = ConfigDict(json_schema_extra=_needs_input)

    input: Annotated[
        list[Item],
        Field(max_length=MESSAGES_MAX),
        BeforeValidator(_input, json_schema_input_type=str | Annotated[list[Item], Field(max_length=MESSAGES_MAX)]),
    ] = Field(default_factory=list)
    instructions: Text | None = None
    max_output_tokens: Count | None = None
    max_tool_calls: Count | None = None  #: of tools that a server runs, which there are none of
    previous_response_id: Annotated[Text, Field(max_length=ECHO_CHARS_MAX)] | None = None
    reasoning: _Reasoning | None = None
    text: _TextConfig = _TextConfig()
    tools: Annotated[list[_Tool], Field(max_length=TOOLS_MAX)] = Field(default_factory=list)
    tool_choice: _Choice = "auto"
    include: list[Text] = Field(default_factory=list)
    top_logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_MAX)] = 0
    truncation: Literal["auto", "disabled"] = "disabled"
    store: bool = True
    background: bool = False

    def grammar(self) -> dict[str, Any]:
        return super().grammar() or (self.text.format.grammar() if self.text.format else {})

    def functions(self) -> list[_FunctionTool]:
        return [tool for tool in self.tools if isinstance(tool, _FunctionTool)]

    def called(self) -> Tools | None:
        """The functions that the model may call."""
        choice, functions = self.tool_choice, [tool.plain() for tool in self.functions()]
        if isinstance(choice, _Allowed):
            functions = functions if choice.names else []
            return tools_of(functions, choice.mode, parallel=self.parallel_tool_calls, only=choice.names)
        mode = f"={choice.name}" if isinstance(choice, _Named) else choice
        return tools_of(functions, mode, parallel=self.parallel_tool_calls)

    @property
    def effort(self) -> str | None:
        return self.reasoning.effort if self.reasoning else None

    def told(self) -> dict[str, Any]:
        """What the chat template is told, as vLLM does of the effort: what the caller tells it itself goes first."""
        if self.effort is None:
            return self.chat_template_kwargs
        return {"reasoning_effort": self.effort, "enable_thinking": self.effort != "none"} | self.chat_template_kwargs

    def drawn(self, sampling: Sampling) -> Sampling:
        """With the log probabilities that were asked for."""
        asked = self.top_logprobs or "message.output_text.logprobs" in self.include
        return msgspec.structs.replace(sampling, logprobs=self.top_logprobs) if asked else sampling


def parse(body: object) -> Draft:
    """The draft that a Responses body asks for.

    Raises:
      BadRequest: the first fault, naming its field.
    """
    asked = validated(ResponsesBody, body, _UNSERVED)
    if asked.background and not asked.store:
        raise BadRequest(
            "Invalid 'background': what runs there is to be fetched, so it needs store=true.", param="background"
        )
    knobs, tools = asked.knobs(), asked.called()
    items = kept(asked.input, asked.previous_response_id or "")
    own = messages_of(items)
    previous, refers = asked.previous_response_id or "", _refers(items)
    if not previous:
        _check_known(refers, items)
    if not (own or previous or refers):
        raise _no_input(isinstance(body, dict) and body.get("input") is not None)
    return Draft(
        dialect="responses",
        messages=_instructions(asked.instructions) + own,
        tools=tools,
        reasons=asked.effort != "none",
        max_tokens=asked.max_output_tokens,
        echo=_echo(asked),
        store=asked.store,
        background=asked.background,
        previous=previous,
        refers=() if previous else refers,
        items=items,
        **{**knobs, "template": asked.told(), "sampling": asked.drawn(knobs["sampling"])},
    )


def _instructions(text: str | None) -> tuple[Message, ...]:
    return (Message("system", text),) if text else ()


def _no_input(given: bool) -> BadRequest:
    if not given:
        return BadRequest("Missing required parameter: 'input'.", param="input", code="missing_required_parameter")
    return BadRequest("Invalid 'input': it has no message.", param="input")


def _refers(items: Iterable[Kept]) -> tuple[str, ...]:
    """The responses whose items are named among these."""
    named = [item["id"] for item in items if item["type"] == "item_reference"]
    return tuple(dict.fromkeys(response_of(name) or "" for name in named))


def _check_known(refers: tuple[str, ...], items: Iterable[Kept]) -> None:
    """An id that is none of ours can be of an input item only, and so of what is gone on from."""
    if "" in refers:
        for item in items:
            if item["type"] == "item_reference" and response_of(item["id"]) is None:
                raise _not_found(item)


def continued(draft: Draft, items: Sequence[Kept], named: Iterable[Kept] = ()) -> Draft:
    """The draft with the conversation that it goes on from: inputs and outputs, the oldest first. Instructions are not
    inherited; its own stay first. `named`: items of the responses that it `refers` to.

    Raises:
      BadRequest: it names an item that is in neither, or nothing is left to answer.
    """
    before = {item["id"] for item in items}
    known = {item["id"]: item for item in (*named, *items)}
    own = [found for item in draft.items if (found := _found(item, known))["id"] not in before or found is item]
    _check_called([*items, *own])
    messages = messages_of([*items, *own])
    if not messages:
        raise _no_input(True)
    messages = _instructions(draft.echo["instructions"]) + messages
    return msgspec.structs.replace(draft, messages=messages, items=own, refers=())


def _check_called(items: Iterable[Kept]) -> None:
    """Each result belongs to a call of the conversation, or a model would be told of what it never asked for."""
    called: set[str] = set()
    for item in items:
        if item["type"] in ("function_call", "custom_tool_call"):
            called.add(item["call_id"])
        elif item["type"] in ("function_call_output", "custom_tool_call_output") and item["call_id"] not in called:
            raise BadRequest(f"No tool call found for the output with call_id '{item['call_id']}'.", param="input")


def _found(item: Kept, known: dict[str, Kept]) -> Kept:
    if item["type"] != "item_reference":
        return item
    if item["id"] not in known:
        raise _not_found(item)
    return known[item["id"]]


def _not_found(item: Kept) -> BadRequest:
    return BadRequest(f"Item with id '{item['id']}' not found.", param="input", code="item_not_found")


def _echo(asked: ResponsesBody) -> dict[str, Any]:
    """The fields of the answer that come from the request. They say what was done, not what was wished."""
    return {
        "background": asked.background,
        "frequency_penalty": asked.frequency_penalty,
        "instructions": asked.instructions,
        "max_output_tokens": asked.max_output_tokens,
        "max_tool_calls": asked.max_tool_calls,
        "metadata": asked.metadata,
        "parallel_tool_calls": asked.parallel_tool_calls,
        "presence_penalty": asked.presence_penalty,
        "previous_response_id": asked.previous_response_id,
        "prompt_cache_key": asked.prompt_cache_key,
        "reasoning": asked.reasoning.model_dump() if asked.reasoning else None,
        "safety_identifier": asked.safety_identifier,
        "service_tier": asked.tier,
        "store": asked.store,
        "temperature": asked.temperature,
        "text": {"format": asked.text.format.echo() if asked.text.format else {"type": "text"}},
        "tool_choice": _echoed_choice(asked.tool_choice),
        "tools": [tool.echo() for tool in asked.functions()],
        "top_logprobs": asked.top_logprobs,
        "top_p": asked.top_p,
        "truncation": asked.truncation,
    }


def _echoed_choice(choice: _Choice) -> Any:
    if isinstance(choice, _Allowed):
        tools = [{"type": "function", "name": name} for name in choice.names]
        return {"type": "allowed_tools", "mode": choice.mode, "tools": tools}
    return choice.model_dump() if isinstance(choice, _Named) else choice


def response_of(item_id: str) -> str | None:
    """The response that an item is of; None: it is no id of an answer's item."""
    found = _ITEM_ID.fullmatch(item_id)
    return f"resp_{found[1]}" if found else None


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


def check_cursor(after: int, runs: Iterable[Run], ended: bool) -> None:
    """A client cannot have seen more than there is.

    Raises:
      BadRequest: it says it has.
    """
    if after > last_number(runs, ended):
        raise BadRequest("Invalid 'starting_after': It lies beyond the end of the stream.", param="starting_after")


def request_id_of(response_id: str) -> str | None:
    """The request behind a response; None: it is no id of a response."""
    found = _RESPONSE_ID.fullmatch(response_id)
    return str(UUID(found[1])) if found else None


def response_id_of(request_id: str) -> str:
    """The id of the response that a request makes."""
    return "resp_" + request_id.replace("-", "")
