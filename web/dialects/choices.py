"""An answer in chunks, of one choice or several: what chat completions and completions have in common.

A request may have several answers, its choices. Each is put together from the runs that carry its number, and has its
own finish. Runs of kinds that are not known are passed over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol

from core.errors import ForebayError
from core.stream.frames import Kind, Logprob, Run, kind_of
from core.values import ANSWERED, DELIVERED, Ending, Outcome, Usage
from web.dialects.draft import Draft, error_of
from web.dialects.view import View

Chunk = dict[str, Any]

#: The least that JSON can say of a probability of nothing.
_LOGPROB_MIN = -9999.0

_FINISHES = {Outcome.COMPLETED: "stop", Outcome.LENGTH: "length"}


class Piece(Protocol):
    """More of the answer, all of one kind: an event of a stream (web/stream.py), or a run."""

    @property
    def kind(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def logprobs(self) -> tuple[Logprob, ...]: ...


class Choice:
    """How far one of the answers is."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.calls: dict[int, int] = {}  #: begun: number -> place
        self.ended = False
        self.logprobs: list[Logprob] = []  #: that no chunk has told yet
        self.token_chars = 0  #: of the tokens that were told


class Answer(ABC):
    """The answer to one request. Every chunk of it has the same id, time and model, and so on every gateway."""

    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, answer_id: str, created_s: int, shown: Draft | View) -> None:
        head = {"id": answer_id, "created": created_s, "model": shown.model, "service_tier": shown.tier}
        self._head, self._chunk_head = head, {**head, "object": self.chunk_object}
        # With usage asked for, its absence is said in each chunk; without, strict clients want no such key.
        self._tail = {"usage": None} if shown.include_usage else {}
        self._include_usage, self._named = shown.include_usage, shown.named
        self._choices = [Choice(index) for index in range(shown.width)]

    # --- what each API says in its own way

    @abstractmethod
    def opening(self) -> list[Chunk]:
        """What comes before any text, once."""

    @abstractmethod
    def _delta(self, choice: Choice, kind: Kind, fresh: str) -> Any:
        """What a chunk says of new characters; None: nothing."""

    @abstractmethod
    def _part(self, choice: Choice, delta: Any, finish_reason: str | None) -> dict[str, Any]:
        """A choice of a chunk; without a delta it says only how it finished. What is still to be told of tokens goes
        with it."""

    @abstractmethod
    def _answered(self, choice: Choice, runs: list[Run], finish: str | None) -> dict[str, Any]:
        """A choice of a whole answer."""

    # --- what both say

    def piece(self, piece: Piece, seen: int = 0) -> Chunk | None:
        """The chunk with a piece, of which the client has so many characters; None: it is nothing to show."""
        kind = kind_of(piece.kind)
        if kind.choice >= len(self._choices):
            return None
        choice, fresh = self._choices[kind.choice], piece.text[seen:] if seen else piece.text
        ends = kind.what == "end"
        # A name is told whole or not at all.
        delta = None if ends else self._delta(choice, kind, piece.text if kind.what == "call" else fresh)
        if piece.logprobs or choice.logprobs:
            known = seen if ends or delta is not None else 0  # what is not shown is told with what follows it
            self._note(choice, piece.logprobs, len(fresh) if known else None)
        if ends:
            choice.ended = True
            return self._chunk(choice, None, self._reason(choice, piece.text)) if fresh else None
        return self._chunk(choice, delta) if fresh and delta is not None else None

    def nothing(self) -> Chunk:
        """A chunk that says only that the stream is alive."""
        return self._chunk(Choice(0), None)

    def finishes(self, outcome: str) -> list[Chunk]:
        """The chunks that say why it ended, of those choices that have not said so."""
        waiting = [choice for choice in self._choices if not choice.ended]
        return [self._chunk(choice, None, self._reason(choice, _FINISHES[Outcome(outcome)])) for choice in waiting]

    def usage(self, ending: Ending) -> list[Chunk]:
        """The chunk with the usage, if it was asked for."""
        if not self._include_usage:
            return []
        return [{**self._chunk_head, "choices": [], "usage": usage_object(ending.usage)}]

    def failure(self, error: ForebayError) -> Chunk:
        """An error after the stream began, which no status can tell any more."""
        return {"error": error.envelope()}

    def whole(self, runs: Iterable[Run], ending: Ending) -> dict[str, Any]:
        """The whole answer as one object.

        Raises:
          ForebayError: it ended without an answer; of one that money ended, with what was made of it.
        """
        if ending.outcome not in DELIVERED:
            raise error_of(ending)
        theirs: defaultdict[int, list[Run]] = defaultdict(list)
        for run in runs:
            theirs[kind_of(run.kind).choice].append(run)
        finish = _FINISHES.get(Outcome(ending.outcome))
        choices = [self._answered(choice, theirs[choice.index], finish) for choice in self._choices]
        made = {**self._head, "object": self.whole_object, "choices": choices, "usage": usage_object(ending.usage)}
        if ending.outcome not in ANSWERED:
            raise with_partial(error_of(ending), made, ending)
        return made

    def _chunk(self, choice: Choice, delta: Any, finish_reason: str | None = None) -> Chunk:
        return {**self._chunk_head, "choices": [self._part(choice, delta, finish_reason)], **self._tail}

    def _reason(self, choice: Choice, finish: str | None) -> str | None:
        """Why a choice ended. Of one function that had to be called, OpenAI says "stop"."""
        return "tool_calls" if finish == "stop" and choice.calls and not self._named else finish

    def _note(self, choice: Choice, logprobs: Sequence[Logprob], fresh: int | None) -> None:
        """Keep what is to be told of tokens. Of a piece that the client has a part of, so many of its last tokens as
        its new characters need; and what came before the piece was told with that part."""
        known = 0 if fresh is None else len(logprobs)
        while fresh is not None and fresh > 0 and known:
            known -= 1
            fresh -= len(logprobs[known].token)
        told_before = [*choice.logprobs, *logprobs[:known]] if fresh is not None else []
        choice.token_chars += sum(len(logprob.token) for logprob in told_before)
        choice.logprobs = [*([] if fresh is not None else choice.logprobs), *logprobs[known:]]


def text_of(runs: Iterable[Run], *whats: str) -> str:
    """The characters of these kinds."""
    return "".join(run.text for run in runs if kind_of(run.kind).what in whats)


def with_partial(error: ForebayError, made: dict[str, Any], ending: Ending) -> ForebayError:
    """The error, with what was made of the answer."""
    if ending.usage.output_tokens:
        error.partial = made
    return error


def ended_as(runs: Iterable[Run], finish: str | None) -> str | None:
    """How a choice finished: as it says itself, or as its request did; None: it did not."""
    return text_of(runs, "end") or finish


def told(logprob: float) -> float:
    """A log probability that JSON can carry."""
    return max(logprob, _LOGPROB_MIN)


def usage_object(usage: Usage) -> dict[str, Any]:
    """Token counts in the words of chat completions."""
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }
