"""The items of a Responses conversation: as a body has them, as they are kept and listed, and as turns for the model.

read       a body's item, checked; its type decides how. What other servers' tools left behind is passed over.
kept       the same as a plain object, as `input_items` lists it: every one with an id
turns      what is kept of a whole conversation, as the chat template takes it: what the model thought, said and called
           one after the other is one turn
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Annotated, Any, ClassVar, Literal, NoReturn

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import PydanticCustomError

from web.dialects.draft import NAME_CHARS_MAX, Call, Message, Text, check_parts, text_part

Kept = dict[str, Any]

#: Items that a client may send back which no model of ours made or reads: other servers' own tools.
_FOREIGN = frozenset(
    {
        *("additional_tools", "apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "computer_call"),
        *("computer_call_output", "configuration_update", "file_search_call", "image_generation_call"),
        *("local_shell_call", "local_shell_call_output", "mcp_approval_request", "mcp_approval_response", "mcp_call"),
        *("mcp_list_tools", "program", "program_output", "shell_call", "shell_call_output", "tool_search_call"),
        *("tool_search_output", "web_search_call"),
    }
)
_TEXTS = frozenset({"text", "input_text", "output_text", "reasoning_text", "summary_text"})
_STATUSES = frozenset({"in_progress", "completed", "incomplete"})

_Name = Annotated[Text, Field(min_length=1, max_length=NAME_CHARS_MAX)]


def _text_or_refusal(schema: dict[str, Any]) -> None:
    """Says in a schema what `_only_text` takes."""
    schema.clear()
    schema.update(text_part(*sorted(_TEXTS)))


class _Part(BaseModel):
    """A part of a content, which is text."""

    model_config = ConfigDict(strict=True, json_schema_extra=_text_or_refusal)

    text: Text
    refusal: bool = False

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, part: Any) -> Any:
        if isinstance(part, str):
            return {"text": part}
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, dict) or not isinstance(kind, str):
            raise PydanticCustomError("content_part", "Every content part should be an object with a 'type'")
        if kind == "refusal":
            return {"text": part.get("refusal"), "refusal": True}
        if kind not in _TEXTS:
            raise PydanticCustomError(
                "content_part",
                "Content parts of type '{kind}' are not supported, only text",
                {"kind": _shown(kind)},
            )
        return {name: part[name] for name in ("text",) if name in part}

    def kept(self, role: str) -> Kept:
        if role != "assistant":
            return {"type": "input_text", "text": self.text}
        if self.refusal:
            return {"type": "refusal", "refusal": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}


def _parts(content: object) -> object:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if isinstance(content, list):
        check_parts(content)
        return content
    raise PydanticCustomError("content", "Input should be a string, null or a list of text parts")


def _shown(kind: str) -> str:
    return kind.encode("ascii", "replace").decode()[:NAME_CHARS_MAX]


_Content = Annotated[list[_Part], BeforeValidator(_parts, json_schema_input_type=str | list[_Part] | None)]


def _not_null(content: object) -> object:
    if content is None:
        raise PydanticCustomError("content", "Input should be a string or a list of text parts")
    return content


def _typed(schema: dict[str, Any], kind: type[_Item]) -> None:
    """Says in a schema which types an item of this kind may have; None: it may have none."""
    schema["properties"]["type"] = {"enum": list(kind.types)}
    if None not in kind.types:
        schema.setdefault("required", []).append("type")


class _Item(BaseModel):
    """What every item may have. Statuses and ids are taken as they come: clients send back what they were given."""

    model_config = ConfigDict(strict=True, json_schema_extra=_typed)

    prefix: ClassVar[str]  #: of an id that we give it
    types: ClassVar[tuple[str | None, ...]] = ()  #: that a body calls it; None: it need not say

    id: Annotated[Text, Field(max_length=NAME_CHARS_MAX)] | None = None
    status: Any = None

    @abstractmethod
    def kept(self) -> Kept | None:
        """It, without an id; None: it is left out."""

    @property
    def _status(self) -> str:
        return self.status if isinstance(self.status, str) and self.status in _STATUSES else "completed"


def _typed_or_without_role(schema: dict[str, Any], kind: type[_Item]) -> None:
    _typed(schema, kind)
    typed = {"properties": {"type": {"const": "item_reference"}}, "required": ["type"]}
    schema["anyOf"] = [typed, {"not": {"required": ["role"]}}]


class _Message(_Item):
    prefix, types = "msg", ("message", None)

    role: Literal["developer", "system", "user", "assistant"]
    content: _Content
    phase: Literal["commentary", "final_answer"] | None = None

    def kept(self) -> Kept:
        content = [part.kept(self.role) for part in self.content]
        phase = {"phase": self.phase} if self.phase and self.role == "assistant" else {}
        return {"type": "message", "status": self._status, "role": self.role, "content": content, **phase}


class _Call(_Item):
    prefix, types = "fc", ("function_call",)

    call_id: _Name
    name: _Name
    arguments: Text

    def kept(self) -> Kept:
        call = {"call_id": self.call_id, "name": self.name, "arguments": self.arguments}
        return {"type": "function_call", **call, "status": self._status}


class _Result(_Item):
    prefix, types = "fco", ("function_call_output",)

    call_id: _Name
    output: Annotated[_Content, BeforeValidator(_not_null, json_schema_input_type=str | list[_Part])]

    def kept(self) -> Kept:
        texts = [{"type": "input_text", "text": part.text} for part in self.output]
        output = texts[0]["text"] if len(texts) == 1 else texts
        return {"type": "function_call_output", "call_id": self.call_id, "output": output, "status": self._status}


class _CustomCall(_Item):
    """A call of a tool that takes free text: to the model, one of a function with one argument, as vLLM has it."""

    prefix, types = "ctc", ("custom_tool_call",)

    call_id: _Name
    name: _Name
    input: Text = ""

    def kept(self) -> Kept:
        call = {"call_id": self.call_id, "name": self.name, "input": self.input}
        return {"type": "custom_tool_call", **call, "status": self._status}


class _CustomResult(_Result):
    prefix, types = "ctco", ("custom_tool_call_output",)

    def kept(self) -> Kept:
        return {**super().kept(), "type": "custom_tool_call_output"}


class _Reasoning(_Item):
    """What the model thought, in full or, for want of that, in short. What is encrypted is others' and stays closed."""

    prefix, types = "rs", ("reasoning",)

    summary: _Content = []
    content: _Content = []

    def kept(self) -> Kept:
        summary = [{"type": "summary_text", "text": part.text} for part in self.summary]
        content = [{"type": "reasoning_text", "text": part.text} for part in self.content]
        return {"type": "reasoning", "summary": summary, "content": content, "status": self._status}


class _Reference(_Item):
    """An item that is kept already. Without a type it is told from a message by having no role."""

    model_config = ConfigDict(json_schema_extra=_typed_or_without_role)
    types = ("item_reference", None)

    id: _Name

    def kept(self) -> Kept:
        return {"type": "item_reference"}


class _Foreign(_Item):
    types = tuple(sorted(_FOREIGN))

    def kept(self) -> None:
        return None


def _refuse(item: object) -> NoReturn:
    kind = item.get("type") if isinstance(item, dict) else None
    if isinstance(kind, str):
        raise PydanticCustomError("item", "Items of type '{kind}' are not supported", {"kind": _shown(kind)})
    raise PydanticCustomError("item", "Every item should be an object with a known 'type'")


_TAGS = {
    "message": "<message>",
    "function_call": "<call>",
    "function_call_output": "<result>",
    "custom_tool_call": "<custom call>",
    "custom_tool_call_output": "<custom result>",
    "reasoning": "<reasoning>",
    "item_reference": "<reference>",
    **dict.fromkeys(_FOREIGN, "<foreign>"),
}


def _tag(item: object) -> str:
    if not isinstance(item, dict):
        return "<unknown>"
    kind = item.get("type")
    if kind is None:  # the easy form of a message, or of a reference
        return "<reference>" if "id" in item and "role" not in item else "<message>"
    return _TAGS.get(kind, "<unknown>") if isinstance(kind, str) else "<unknown>"


#: An item of a body. The tags are in the paths of errors, where `draft` leaves them out.
Item = Annotated[
    Annotated[_Message, Tag("<message>")]
    | Annotated[_Call, Tag("<call>")]
    | Annotated[_Result, Tag("<result>")]
    | Annotated[_CustomCall, Tag("<custom call>")]
    | Annotated[_CustomResult, Tag("<custom result>")]
    | Annotated[_Reasoning, Tag("<reasoning>")]
    | Annotated[_Reference, Tag("<reference>")]
    | Annotated[_Foreign, Tag("<foreign>")]
    | Annotated[SkipJsonSchema[_Foreign], BeforeValidator(_refuse), Tag("<unknown>")],
    Discriminator(_tag),
]


def kept(items: Iterable[_Item], of: str) -> list[Kept]:
    """The items as they are kept. Those without an id get one that is a function of the whole input and of what it goes
    on from, so that every gateway gives the same, and the turns of a conversation others."""
    told = [(item, plain) for item in items if (plain := item.kept()) is not None]
    whole = blake2b(msgspec.json.encode([of, [plain for _, plain in told]]), digest_size=16)
    return [{"id": item.id or _new_id(item.prefix, whole.digest(), n), **plain} for n, (item, plain) in enumerate(told)]


def _new_id(prefix: str, whole: bytes, number: int) -> str:
    return f"{prefix}_{blake2b(whole + number.to_bytes(4), digest_size=16).hexdigest()}"


def messages_of(items: Iterable[Kept]) -> tuple[Message, ...]:
    """The turns of a conversation, from what is kept of its items, a response's own output among them."""
    turns = _Turns()
    for item in items:
        turns.take(item)
    return turns.all()


class _Turns:
    """Puts items into turns. A result ends the model's turn, and so does whoever else speaks."""

    def __init__(self) -> None:
        self._turns: list[Message] = []
        self._names: dict[str, str] = {}  #: of calls, for their results: some templates show them
        self._said: list[str] = []
        self._thought = ""
        self._calls: list[Call] = []

    def all(self) -> tuple[Message, ...]:
        self._end()
        return tuple(self._turns)

    def take(self, item: Kept) -> None:
        match item["type"]:
            case "message" if item["role"] == "assistant":
                self._say(_text(item["content"]))
            case "message":
                role = item["role"]
                # Chat templates know no developer; OpenAI made it a new name for system.
                self._other(Message("system" if role == "developer" else role, _text(item["content"])))
            case "reasoning":
                self._think(_text(item.get("content") or item["summary"]))
            case "function_call":
                self._call(Call(item["call_id"], item["name"], item["arguments"]))
            case "custom_tool_call":
                self._call(Call(item["call_id"], item["name"], msgspec.json.encode({"input": item["input"]}).decode()))
            case "function_call_output" | "custom_tool_call_output":
                call = item["call_id"]
                name = self._names.get(call, "")
                self._other(Message("tool", _text(item["output"]), call_id=call, name=name))

    def _say(self, text: str) -> None:
        if self._said and not self._calls:
            self._end()
        self._said.append(text)

    def _think(self, text: str) -> None:
        if self._said or self._calls or self._thought:
            self._end()
        self._thought = text

    def _call(self, call: Call) -> None:
        self._names[call.id] = call.name
        self._calls.append(call)

    def _other(self, turn: Message) -> None:
        self._end()
        self._turns.append(turn)

    def _end(self) -> None:
        if self._said or self._thought or self._calls:
            said = "\n".join(self._said)
            self._turns.append(Message("assistant", said, calls=tuple(self._calls), reasoning=self._thought))
        self._said, self._thought, self._calls = [], "", []


def _text(content: str | Sequence[Kept]) -> str:
    """One string. Parts are joined by a newline, as vLLM does."""
    if isinstance(content, str):
        return content
    return "\n".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in content)
