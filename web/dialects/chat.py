"""OpenAI's chat completions: a body becomes a draft, an answer becomes chunks or one object.

A chunk's cursor counts the characters of the answer, which every gateway knows of any piece of it: the role has 0, text
up to character c has c, and of n characters the chunk with the reason, or the error, has n + 1, the usage n + 2. As an
event's `id:` it follows the request's id and a colon.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from core.errors import BadRequest, ForebayError, NotFound
from core.values import ANSWERED, Ending, Outcome, Usage
from web.dialects.draft import UNSERVED, Body, Content, Count, Draft, Message, Text, error_of, validated

Chunk = dict[str, Any]

_UNSERVED: dict[str, tuple[Any, ...]] = {
    **UNSERVED,
    "n": (1,),
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "echo": (False,),
}

#: A request's id and a cursor, which is looked at by itself.
_EVENT_ID = re.compile(r"([0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}):(.*)", re.DOTALL)
#: No cursor is longer: digits.
_CURSOR_DIGITS_MAX = 10

_FINISH_REASONS = {Outcome.COMPLETED: "stop", Outcome.LENGTH: "length"}


def _no_calls(calls: object) -> None:
    if calls:  # dropped, the model would not see what it did
        raise PydanticCustomError("tool_calls", "Tool calls are not supported yet")


class _Message(BaseModel):
    model_config = ConfigDict(strict=True)

    role: Literal["developer", "system", "user", "assistant", "tool", "function"]
    content: Content
    tool_calls: Annotated[None, BeforeValidator(_no_calls)] = None
    function_call: Annotated[None, BeforeValidator(_no_calls)] = None

    def message(self) -> Message:
        # Chat templates know no developer; OpenAI made it a new name for system.
        return Message("system" if self.role == "developer" else self.role, self.content)


class _StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class _ChatBody(Body):
    messages: Annotated[list[_Message], Field(min_length=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    stream_options: _StreamOptions = _StreamOptions()
    reasoning_effort: Text | None = None
    verbosity: Text | None = None


def parse(body: object) -> Draft:
    """The draft that a chat completions body asks for.

    Raises:
      BadRequest: the first fault, naming its field.
    """
    asked = validated(_ChatBody, body, _UNSERVED)
    return Draft(
        dialect="chat",
        messages=tuple(message.message() for message in asked.messages),
        max_tokens=asked.max_completion_tokens or asked.max_tokens,
        include_usage=bool(asked.stream_options.include_usage),
        **asked.knobs(),
    )


class ChatAnswer:
    """The answer to one chat request. Every chunk of it has the same id, time and model, and so on every gateway."""

    def __init__(
        self, request_id: str, model: str, created_s: int, include_usage: bool, *, opened: bool = False
    ) -> None:
        self._head = {"id": "chatcmpl-" + request_id.replace("-", ""), "created": created_s, "model": model}
        self._chunk_head = {**self._head, "object": "chat.completion.chunk"}
        # With usage asked for, its absence is said in each chunk; without, strict clients want no such key.
        self._tail = {"usage": None} if include_usage else {}
        self._include_usage = include_usage
        self._opened = opened

    def opening(self) -> list[Chunk]:
        """The chunk with the role, once: SDKs append it wherever it comes again."""
        if self._opened:
            return []
        self._opened = True
        return [self._chunk({"role": "assistant", "content": ""})]

    def text(self, delta: str) -> list[Chunk]:
        """The chunk with a piece of text; none for an empty piece."""
        if not delta:
            return []
        chunk = self._chunk({"content": delta})
        return [chunk] if self._opened else [*self.opening(), chunk]

    def nothing(self) -> Chunk:
        """A chunk that says only that the stream is alive."""
        return self._chunk({})

    def ending(self, ending: Ending) -> list[Chunk]:
        """The last chunks: why it ended, then the usage if it was asked for; or the error."""
        if ending.outcome not in ANSWERED:
            return [self.failure(error_of(ending))]
        chunks = [*self.opening(), self._chunk({}, _FINISH_REASONS[Outcome(ending.outcome)])]
        if self._include_usage:
            chunks.append({**self._chunk({}), "choices": [], "usage": usage_object(ending.usage)})
        return chunks

    def whole(self, text: str, ending: Ending) -> dict[str, Any]:
        """The whole answer as one object.

        Raises:
          ForebayError: it ended without an answer.
        """
        if ending.outcome not in ANSWERED:
            raise error_of(ending)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None,
            "finish_reason": _FINISH_REASONS[Outcome(ending.outcome)],
        }
        usage = usage_object(ending.usage)
        return {**self._head, "object": "chat.completion", "choices": [choice], "usage": usage}

    def failure(self, error: ForebayError) -> Chunk:
        """An error after the stream began, which no status can tell any more."""
        return {"error": error.envelope()}

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> Chunk:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {**self._chunk_head, "choices": [choice], **self._tail}


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


def usage_object(usage: Usage) -> dict[str, Any]:
    """Token counts in the words of chat completions."""
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
