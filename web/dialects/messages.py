"""Anthropic's Messages: a body becomes a draft, an answer becomes events or one object, an error Anthropic's own.

The blocks of a turn become turns of the chat template: results of tools one each, before the text beside them; of an
assistant's blocks one turn with its thoughts, text and calls. Turns of one role in a row are one, as Anthropic has it.

An answer is a list of blocks with growing index: thinking, text, and a `tool_use` for each call. A block ends where
something of another kind begins, so that how the answer was cut on its way makes no difference to what it adds up to.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError, from_json

from core.errors import BadRequest, ForebayError, MoneySpent
from core.stream.frames import Kind, Run, kind_of
from core.values import ANSWERED, DELIVERED, Ending, Outcome, Sampling, Tools, Usage
from web.dialects.choices import Piece, with_partial
from web.dialects.draft import (
    INT32_MAX,
    MESSAGES_MAX,
    NAME_CHARS_MAX,
    STOP_CHARS_MAX,
    Call,
    Count,
    Draft,
    Json,
    Message,
    Schema,
    Text,
    check_parts,
    described,
    error_of,
    needed,
    not_served,
    nullable,
    validated,
    without_nulls,
)
from web.dialects.tools import tools_of

Event = dict[str, Any]
Value = TypeVar("Value", bound=BaseModel)

STOPS_MAX = 16  #: stop sequences in a request
TOOLS_MAX = 1024  #: tools in a request: agents bring those of every server they are connected to
THINKING_TOKENS_MIN = 1024  #: Anthropic's own bound of `budget_tokens`

#: A line that Claude Code puts first, different each time: with it no two prompts would share a prefix. vLLM drops it.
_BILLING = "x-anthropic-billing-header"

_UNSERVED: dict[str, tuple[Any, ...]] = {"mcp_servers": ([],), "container": ()}

_ERROR_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    410: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
#: Of its statuses one is not HTTP's.
_STATUSES = {503: 529}


# --- what a body may ask for


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


def _is(kind: str, *unset: str) -> ConfigDict:
    """Says in a schema the type of a block, which `_conversation` looks at, and which fields of it may be null."""

    def extra(schema: dict[str, Any]) -> None:
        schema["properties"]["type"] = {"const": kind}
        schema.setdefault("required", []).append("type")
        for name in unset:
            schema["properties"][name] = {"anyOf": [schema["properties"][name], {"type": "null"}]}

    return ConfigDict(json_schema_extra=extra)


class _TextBlock(_Part):
    model_config = _is("text")

    text: Text


class _ThinkingBlock(_Part):
    model_config = _is("thinking")

    thinking: Text


class _RedactedBlock(_Part):
    """It is passed over."""

    model_config = _is("redacted_thinking")


class _ToolUse(_Part):
    model_config = _is("tool_use", "input")

    id: Annotated[Text, Field(min_length=1, max_length=NAME_CHARS_MAX)]
    name: Annotated[Text, Field(min_length=1, max_length=NAME_CHARS_MAX)]
    input: dict[str, Any] = {}

    @model_validator(mode="before")
    @classmethod
    def _null_is_unset(cls, block: Any) -> Any:
        return without_nulls(block)

    def call(self) -> Call:
        return Call(self.id, self.name, json.dumps(self.input, ensure_ascii=False))


class _ToolResult(_Part):
    model_config = _is("tool_result")

    tool_use_id: Annotated[Text, Field(min_length=1, max_length=NAME_CHARS_MAX)]
    content: Annotated[Any, described(str | list[_TextBlock] | None)] = None
    is_error: bool | None = None


def _blocks(content: object) -> object:
    """Blocks, of whatever form a content has."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise PydanticCustomError("content", "Input should be a string or a list of blocks")
    check_parts(content)
    return content


_AnyBlock = _TextBlock | _ThinkingBlock | _RedactedBlock | _ToolUse | _ToolResult
_SystemBlocks = Annotated[list[dict[str, Any]], BeforeValidator(_blocks, json_schema_input_type=str | list[_TextBlock])]
_Blocks = Annotated[list[dict[str, Any]], BeforeValidator(_blocks, json_schema_input_type=str | list[_AnyBlock])]


class _Turn(_Part):
    role: Literal["user", "assistant", "system"]
    content: _Blocks


def _of_a_tool(schema: dict[str, Any]) -> None:
    """Says in a schema what `_function` asks of a tool."""
    nullable(schema)
    schema["properties"]["input_schema"] = {"type": "object"}
    schema["required"].append("input_schema")


class _Tool(_Part):
    model_config = ConfigDict(json_schema_extra=_of_a_tool)

    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
    description: Text | None = None
    input_schema: Json | None = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_unset(cls, tool: Any) -> Any:
        return without_nulls(tool)


class _ToolChoice(_Part):
    model_config = ConfigDict(json_schema_extra=needed("tool", "name"))

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_one(self) -> _ToolChoice:
        if self.type == "tool" and not self.name:
            raise PydanticCustomError("tool_choice", "Its 'name' is missing")
        return self

    @property
    def choice(self) -> str:
        """The same in the words of core/values.py."""
        return {"any": "required", "tool": f"={self.name}"}.get(self.type, self.type)


class _Thinking(_Part):
    model_config = ConfigDict(json_schema_extra=needed("enabled", "budget_tokens"))

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=THINKING_TOKENS_MIN, le=INT32_MAX)] | None = None

    @model_validator(mode="after")
    def _has_budget(self) -> _Thinking:
        if self.type == "enabled" and self.budget_tokens is None:
            raise PydanticCustomError("thinking", "Its 'budget_tokens' is missing")
        return self

    @property
    def told(self) -> dict[str, Any]:
        """What the chat template is told of it: whether to think is for it to say in most models."""
        return {"enable_thinking": self.type == "enabled"} if self.type in ("enabled", "disabled") else {}


class _Format(_Part):
    type: Literal["json_schema"]
    as_json: Schema = Field(alias="schema")


class _OutputConfig(_Part):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: _Format | None = None


class _Metadata(_Part):
    user_id: Annotated[Text, Field(max_length=512)] | None = None


class CountBody(_Part):
    """What makes the prompt, and nothing else."""

    model_config = ConfigDict(json_schema_extra=nullable)

    model: Annotated[Text, Field(min_length=1, max_length=NAME_CHARS_MAX)]
    messages: Annotated[list[_Turn], Field(min_length=1, max_length=MESSAGES_MAX)]
    system: _SystemBlocks = []
    tools: Annotated[list[dict[str, Any]], described(list[_Tool]), Field(max_length=TOOLS_MAX)] = []
    tool_choice: _ToolChoice = _ToolChoice(type="auto")
    thinking: _Thinking = _Thinking(type="adaptive")
    output_config: _OutputConfig = _OutputConfig()

    @model_validator(mode="before")
    @classmethod
    def _null_is_unset(cls, body: Any) -> Any:
        return without_nulls(body)

    def told(self) -> dict[str, Any]:
        effort = self.output_config.effort
        return {**self.thinking.told, **({"reasoning_effort": effort} if effort else {})}


class MessagesBody(CountBody):
    max_tokens: Count
    temperature: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    stop_sequences: Annotated[
        list[Annotated[Text, Field(min_length=1, max_length=STOP_CHARS_MAX)]], Field(max_length=STOPS_MAX)
    ] = []
    stream: bool = False
    metadata: _Metadata = _Metadata()
    service_tier: Literal["auto", "standard_only"] = "auto"

    def sampling(self) -> Sampling:
        wanted = self.output_config.format
        return Sampling(
            max_tokens=0,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stop=tuple(self.stop_sequences),
            grammar={"json": wanted.as_json} if wanted else {},
        )


def parse(body: object) -> Draft:
    """The draft that a Messages body asks for.

    Raises:
      BadRequest: the first fault, naming its field.
    """
    asked = validated(MessagesBody, body, _UNSERVED)
    if asked.thinking.budget_tokens is not None and asked.thinking.budget_tokens >= asked.max_tokens:
        raise BadRequest("'thinking.budget_tokens' must be less than 'max_tokens'.", param="thinking.budget_tokens")
    if asked.messages[-1].role == "assistant":
        # A chat template would begin another turn, where the caller wants this one gone on with.
        raise BadRequest("The conversation must end with a user message: prefill is not supported.", param="messages")
    prompt = _prompt(asked)
    return msgspec.structs.replace(
        prompt,
        max_tokens=asked.max_tokens,
        sampling=asked.sampling(),
        stream=asked.stream,
        affinity=asked.metadata.user_id or "",
    )


def parse_count(body: object) -> Draft:
    """The same of a body whose tokens are to be counted: it has no need of `max_tokens`."""
    return _prompt(validated(CountBody, body, _UNSERVED))


def _prompt(asked: CountBody) -> Draft:
    system = _system_text(asked.system, "system")
    messages = [Message("system", system)] if system else []
    return Draft(
        dialect="messages",
        model=asked.model,
        messages=(*messages, *_conversation(asked.messages)),
        tools=_tools(asked),
        reasons=asked.thinking.type != "disabled",
        template=asked.told(),
    )


def _tools(asked: CountBody) -> Tools | None:
    functions = [_function(f"tools.{n}", tool) for n, tool in enumerate(asked.tools)]
    names = [function["name"] for function in functions]
    if len(set(names)) < len(names):
        raise BadRequest("Tool names must be unique.", param="tools")
    choice = asked.tool_choice
    return tools_of(functions, choice.choice, parallel=not choice.disable_parallel_tool_use)


def _function(where: str, tool: dict[str, Any]) -> dict[str, Any]:
    kind = tool.get("type") or "custom"
    if kind != "custom":  # ignored, the model would never get what it was promised
        raise not_served(where, f"tools of type {_shown(kind)} run at Anthropic; leave it out")
    asked = _read(_Tool, tool, where)
    if asked.input_schema is None:
        raise BadRequest(f"{where}: 'input_schema' is missing.", param=where, code="missing_required_parameter")
    # vLLM gives a schema without a type that of an object, and so the prompt has it.
    schema = asked.input_schema if "type" in asked.input_schema else {**asked.input_schema, "type": "object"}
    function = {"name": asked.name, "description": asked.description, "parameters": schema, "strict": asked.strict}
    return {name: value for name, value in function.items() if value is not None}


def _conversation(turns: Sequence[_Turn]) -> Iterator[Message]:
    numbered = [
        (turn.role, f"messages.{n}.content.{m}", block)
        for n, turn in enumerate(turns)
        for m, block in enumerate(turn.content)
    ]
    for role, some in groupby(numbered, key=lambda each: each[0]):
        blocks = [(where, block) for _, where, block in some]
        match role:
            case "user":
                yield from _of_user(blocks)
            case "assistant":
                yield from _of_assistant(blocks)
            case _:
                yield from _of_system(blocks)


def _of_user(blocks: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[Message]:
    texts: list[str] = []
    for where, block in blocks:
        match block.get("type"):
            case "text":
                texts.append(_read(_TextBlock, block, where).text)
            case "tool_result":
                yield _result(block, where)
            case kind:
                raise _unserved_block(where, kind)
    if texts := [text for text in texts if text]:
        yield Message("user", "\n".join(texts))


def _of_assistant(blocks: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[Message]:
    texts, thoughts, calls = [], [], []
    for where, block in blocks:
        match block.get("type"):
            case "text":
                texts.append(_read(_TextBlock, block, where).text)
            case "thinking":
                thoughts.append(_read(_ThinkingBlock, block, where).thinking)
            case "redacted_thinking":
                pass  # nobody but Anthropic can read it
            case "tool_use":
                calls.append(_call(block, where))
            case kind:
                raise _unserved_block(where, kind)
    text = "\n".join(text for text in texts if text)
    if text or thoughts or calls:
        yield Message("assistant", text, calls=tuple(calls), reasoning="".join(thoughts))


def _call(block: dict[str, Any], where: str) -> Call:
    try:
        return _read(_ToolUse, block, where).call()
    except RecursionError:
        raise BadRequest(f"{where}.input: Input is nested too deeply.", param=f"{where}.input") from None


def _of_system(blocks: Iterable[tuple[str, dict[str, Any]]]) -> Iterator[Message]:
    text = "".join(_system_block(block, where) for where, block in blocks)
    if text:
        yield Message("system", text)


def _system_text(blocks: Sequence[dict[str, Any]], where: str) -> str:
    return "".join(_system_block(block, f"{where}.{n}") for n, block in enumerate(blocks))


def _system_block(block: dict[str, Any], where: str) -> str:
    if block.get("type") != "text":
        raise _unserved_block(where, block.get("type"))
    text = _read(_TextBlock, block, where).text
    return "" if text.startswith(_BILLING) else text


def _result(block: dict[str, Any], where: str) -> Message:
    """What a tool gave. That it failed is said in words, since chat templates have no place for it."""
    asked = _read(_ToolResult, block, where)
    content = [] if asked.content is None else asked.content
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise BadRequest(f"{where}.content: Input should be a string or a list of blocks.", param=where)
    text = "\n".join(_result_text(part, f"{where}.content.{n}") for n, part in enumerate(content))
    return Message("tool", f"Error: {text}" if asked.is_error else text, call_id=asked.tool_use_id)


def _result_text(part: Any, where: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise _unserved_block(where, part.get("type") if isinstance(part, dict) else None)
    return _read(_TextBlock, part, where).text


def _read(schema: type[Value], block: dict[str, Any], where: str) -> Value:
    try:
        return validated(schema, block, {})
    except BadRequest as e:
        raise BadRequest(f"{where}: {e.message}", param=f"{where}.{e.param}", code=e.error_code) from None


def _unserved_block(where: str, kind: object) -> BadRequest:
    if not isinstance(kind, str):
        return BadRequest(f"{where}: Every block should be an object with a 'type'.", param=where)
    message = f"{where}: Blocks of type {_shown(kind)} are not supported here. Send text."
    return BadRequest(message, param=where, code="unsupported_parameter")


def _shown(kind: object) -> str:
    return repr(str(kind).encode("ascii", "replace").decode()[:NAME_CHARS_MAX])


# --- what an answer says


class _Block:
    """One block of an answer, as far as it is known."""

    def __init__(self, what: str, call: int, call_id: str) -> None:
        self.what, self.call, self.call_id = what, call, call_id
        self.name = ""  #: of the function, which may come in pieces
        self.started = False
        self.text: list[str] = []

    def holds(self, kind: Kind) -> bool:
        """More of this kind belongs to it."""
        if self.what != "tool_use":
            return self.what == _BLOCKS[kind.what]
        # A name after arguments is another call's.
        return _BLOCKS[kind.what] == "tool_use" and kind.call == self.call and not (kind.what == "call" and self.text)

    def empty(self) -> dict[str, Any]:
        """How it begins."""
        match self.what:
            case "thinking":
                return {"type": "thinking", "thinking": "", "signature": ""}
            case "tool_use":
                caller = {"type": "direct"}
                return {"type": "tool_use", "id": self.call_id, "name": self.name, "input": {}, "caller": caller}
            case _:
                return {"type": "text", "text": "", "citations": None}

    def whole(self) -> dict[str, Any]:
        text = "".join(self.text)
        match self.what:
            case "thinking":
                return {**self.empty(), "thinking": text}
            case "tool_use":
                return {**self.empty(), "input": _input(text)}
            case _:
                return {**self.empty(), "text": text}


_BLOCKS = {"text": "text", "reasoning": "thinking", "call": "tool_use", "arguments": "tool_use"}


class MessagesAnswer:
    """The answer to one request, event by event, or whole."""

    def __init__(self, request_id: str, model: str, input_tokens: int) -> None:
        self._hex = request_id.replace("-", "")
        self._request_id, self._model, self._input_tokens = request_id, model, input_tokens
        self._blocks: list[_Block] = []
        self._stop = ""  #: the stop sequence that ended it, as far as it is known

    def began(self) -> list[Event]:
        """The event that must come first."""
        usage = usage_object(Usage(input_tokens=self._input_tokens))
        return [{"type": "message_start", "message": self._message([], None, None, usage)}]

    def piece(self, piece: Piece) -> list[Event]:
        """The events of more characters."""
        kind, text = kind_of(piece.kind), piece.text
        if kind.what == "stop":
            self._stop += text
        if kind.what not in _BLOCKS or not text:
            return []
        closing = [] if self._blocks and self._blocks[-1].holds(kind) else self._close()
        block = self._block(kind)
        if kind.what == "call":
            block.name += text  # it is told when the whole of it is known
            return closing
        block.text.append(text)
        return [*closing, *self._start(), self._delta(block, text)]

    def ending(self, ending: Ending) -> list[Event]:
        """The last events: why it ended and what it took; or the error."""
        if ending.outcome not in ANSWERED:
            return [self.failure(error_of(ending))]
        reason, stop = self._reason(ending)
        delta = {"stop_reason": reason, "stop_sequence": stop, "stop_details": None, "container": None}
        last = {"type": "message_delta", "delta": delta, "usage": usage_object(ending.usage)}
        return [*self._close(), last, {"type": "message_stop"}]

    def failure(self, error: ForebayError) -> Event:
        """An error after the stream began, which no status can tell any more."""
        return error_body(error, self._request_id)[1]

    def whole(self, runs: Iterable[Run], ending: Ending) -> dict[str, Any]:
        """The whole answer as one object.

        Raises:
          ForebayError: it ended without an answer; of one that money ended, with what was made of it.
        """
        if ending.outcome not in DELIVERED:
            raise error_of(ending)
        for run in runs:
            self.piece(run)
        content = [block.whole() for block in self._blocks]
        if ending.outcome not in ANSWERED:
            made = self._message(content, None, None, usage_object(ending.usage))
            raise with_partial(error_of(ending), {"message": made}, ending)
        return self._message(content, *self._reason(ending), usage_object(ending.usage))

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, stop: str | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": f"msg_{self._hex}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "stop_details": None,
            "container": None,
            "usage": usage,
        }

    def _block(self, kind: Kind) -> _Block:
        """The block that more of this kind belongs to: the last one, or a new one."""
        if not (self._blocks and self._blocks[-1].holds(kind)):
            self._blocks.append(_Block(_BLOCKS[kind.what], kind.call, f"toolu_{self._hex}{kind.call:02x}"))
        return self._blocks[-1]

    def _start(self) -> list[Event]:
        block = self._blocks[-1]
        if block.started:
            return []
        block.started = True
        return [{"type": "content_block_start", "index": self._index, "content_block": block.empty()}]

    def _close(self) -> list[Event]:
        """The end of the last block; a call without arguments begins here."""
        if not self._blocks:
            return []
        return [*self._start(), {"type": "content_block_stop", "index": self._index}]

    def _delta(self, block: _Block, text: str) -> Event:
        match block.what:
            case "thinking":
                delta = {"type": "thinking_delta", "thinking": text}
            case "tool_use":
                delta = {"type": "input_json_delta", "partial_json": text}
            case _:
                delta = {"type": "text_delta", "text": text}
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    @property
    def _index(self) -> int:
        return len(self._blocks) - 1

    def _reason(self, ending: Ending) -> tuple[str, str | None]:
        """Why it ended, and at which stop sequence. A call that a stop sequence cut short must not be made."""
        if ending.outcome == Outcome.LENGTH:
            return "max_tokens", None
        calls = [block for block in self._blocks if block.what == "tool_use"]
        if calls and (not self._stop or _is_json("".join(calls[-1].text))):
            return "tool_use", None
        return ("stop_sequence", self._stop) if self._stop else ("end_turn", None)


def usage_object(usage: Usage) -> dict[str, Any]:
    """Token counts in Anthropic's words: the input is what was not in the cache, and what was."""
    return {
        "input_tokens": usage.input_tokens - usage.cached_tokens,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "server_tool_use": None,
        "service_tier": "standard",
        "inference_geo": None,
    }


def error_body(error: ForebayError, request_id: str) -> tuple[int, dict[str, Any]]:
    """An error's status and body, as Anthropic has them."""
    if isinstance(error, MoneySpent):
        kind = _ERROR_TYPES[402]
    else:
        kind = _ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    body = {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}
    return status_of(error.status), body


def status_of(status: int) -> int:
    """Anthropic's, of an error that has this one."""
    return _STATUSES.get(status, status)


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object: as much as there is of one that was cut short, as the SDK reads it. What is no
    JSON is handed on under the name that Anthropic gives such."""
    try:
        value = from_json(arguments.encode(), allow_partial=True) if arguments else {}
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}


def _is_json(text: str) -> bool:
    try:
        from_json(text.encode())
    except ValueError:
        return not text
    return True
