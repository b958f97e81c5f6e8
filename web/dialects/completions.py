"""OpenAI's completions: prompts as they are, and text that goes on from them. Cursors are those of chat completions."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from core.errors import BadRequest
from core.stream.frames import Kind, Logprob, Run
from web.dialects.choices import Answer, Choice, Chunk, ended_as, text_of, told
from web.dialects.draft import ANSWERS_MAX, UNSERVED, Body, Count, Draft, ResponseFormat, Text, not_served, validated
from web.dialects.prompts import Prompt, PromptForms, at_most, prompts
from web.dialects.view import View

PROMPTS_MAX = 16  #: in a request
WIDTH_MAX = 128  #: answers to all of them
#: What a request gets that names no limit; so it is at OpenAI and in vLLM.
MAX_TOKENS = 16
#: Alternatives told of each token.
LOGPROBS_MAX = 5

_UNSERVED: dict[str, tuple[Any, ...]] = {
    **{name: nothing for name, nothing in UNSERVED.items() if name != "best_of"},
    "add_special_tokens": (True,),
    "chat_template_kwargs": ({},),
}

#: A prompt is not parsed for what its answer means, so all of it is text.
_TEXT = ("text", "reasoning")


class _StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class CompletionsBody(Body):
    prompt: Annotated[
        tuple[Prompt, ...], BeforeValidator(prompts, json_schema_input_type=PromptForms), at_most(PROMPTS_MAX)
    ]
    max_tokens: Count = MAX_TOKENS
    n: Annotated[int, Field(ge=1, le=ANSWERS_MAX)] = 1
    best_of: Annotated[int, Field(ge=1, le=ANSWERS_MAX)] | None = None
    echo: bool = False
    suffix: Annotated[Text, WithJsonSchema({"type": "string", "maxLength": 0})] = ""
    logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_MAX)] | None = None
    response_format: ResponseFormat | None = None
    stream_options: _StreamOptions = _StreamOptions()

    def grammar(self) -> dict[str, Any]:
        return super().grammar() or (self.response_format.terms() if self.response_format else {})


def parse(body: object) -> Draft:
    """The draft that a completions body asks for.

    Raises:
      BadRequest: the first fault, naming its field.
    """
    asked = validated(CompletionsBody, body, _UNSERVED)
    _refuse(asked)
    knobs = asked.knobs()
    knobs["sampling"] = msgspec.structs.replace(knobs["sampling"], logprobs=asked.logprobs)
    return Draft(
        dialect="completions",
        prompts=asked.prompt,
        n=asked.n,
        max_tokens=asked.max_tokens,
        reasons=False,
        include_usage=bool(asked.stream_options.include_usage),
        echo={"echo": True} if asked.echo else {},
        **knobs,
    )


def _refuse(asked: CompletionsBody) -> None:
    if asked.suffix:
        raise not_served("suffix", "leave it out or send an empty one")
    if asked.best_of not in (None, asked.n):
        raise not_served("best_of", "leave it out or send the same as n")
    if asked.n * len(asked.prompt) > WIDTH_MAX:
        raise BadRequest(f"Invalid 'n': all prompts together may have {WIDTH_MAX} answers.", param="n")
    if asked.echo and asked.logprobs is not None:
        raise not_served("echo", "leave it out or 'logprobs': those of a prompt are not told")
    if asked.echo and not all(isinstance(prompt, str) for prompt in asked.prompt):
        raise not_served("echo", "leave it out, or send the prompt as text")


class CompletionsAnswer(Answer):
    """The answer to one completions request."""

    whole_object = chunk_object = "text_completion"

    def __init__(self, request_id: str, shown: Draft | View, created_s: int) -> None:
        super().__init__("cmpl-" + request_id.replace("-", ""), created_s, shown)
        self._prompts = _echoed(shown)

    def opening(self) -> list[Chunk]:
        """The prompts, where they are to be repeated."""
        return [self._chunk(choice, prompt) for choice in self._choices if (prompt := self._prompt(choice))]

    def _prompt(self, choice: Choice) -> str:
        """What a choice repeats."""
        return self._prompts[choice.index * len(self._prompts) // len(self._choices)] if self._prompts else ""

    def _delta(self, choice: Choice, kind: Kind, fresh: str) -> Any:
        return fresh if kind.what in _TEXT else None

    def _part(self, choice: Choice, delta: Any, finish_reason: str | None) -> dict[str, Any]:
        logprobs, choice.logprobs = choice.logprobs, []
        return self._said(choice, delta or "", logprobs, finish_reason)

    def _answered(self, choice: Choice, runs: list[Run], finish: str | None) -> dict[str, Any]:
        text = self._prompt(choice) + text_of(runs, *_TEXT)
        return self._said(choice, text, [each for run in runs for each in run.logprobs], ended_as(runs, finish))

    def _said(self, choice: Choice, text: str, logprobs: list[Logprob], finish_reason: str | None) -> dict[str, Any]:
        shown = _logprobs(choice, logprobs) if logprobs else None
        return {"index": choice.index, "text": text, "logprobs": shown, "finish_reason": finish_reason}


def _echoed(shown: Draft | View) -> list[str]:
    """The prompts that the answer repeats. A view has none of them."""
    texts = shown.prompts if isinstance(shown, Draft) and shown.echo.get("echo") else ()
    return [text for text in texts if isinstance(text, str)]


def _logprobs(choice: Choice, logprobs: list[Logprob]) -> dict[str, list[Any]]:
    """Four lists beside each other. Offsets count the characters of the tokens, and go on from chunk to chunk."""
    offsets = []
    for each in logprobs:
        offsets.append(choice.token_chars)
        choice.token_chars += len(each.token)
    return {
        "tokens": [each.token for each in logprobs],
        "token_logprobs": [told(each.logprob) for each in logprobs],
        # The token itself is always among them, as at OpenAI.
        "top_logprobs": [
            {token: told(logprob) for token, logprob in ((each.token, each.logprob), *each.top)} for each in logprobs
        ],
        "text_offset": offsets,
    }
