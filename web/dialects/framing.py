"""How each dialect says what happens to a request: the same few occasions, each its own chunks or events. Pure.

A framing may be of a client that comes back and has everything up to a cursor, `after`. The stream is said to it from
its beginning all the same, since later events repeat the whole text; what the client has is left out here. Something is
said at once even so: the headers leave with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal
from uuid import UUID

import msgspec
import orjson

from core.errors import ForebayError
from core.outlook import Starting
from core.stream.frames import Run
from core.values import ANSWERED, Ending
from web.dialects.chat import ChatAnswer
from web.dialects.choices import Answer, Chunk, Piece
from web.dialects.completions import CompletionsAnswer
from web.dialects.draft import Draft, error_of
from web.dialects.events import Event, ResponsesAnswer, cut_at
from web.dialects.messages import Event as MessageEvent
from web.dialects.messages import MessagesAnswer
from web.dialects.view import View

#: What a chat stream sends while it has nothing to say: chat has no event for it, and some clients take no comments.
KeepAlive = Literal["comment", "chunk", "off"]


#: Of what was delivered before, the last so many characters are shown again one by one to a client that asks for the
#: whole stream: the SDKs' own helpers do, leave out by number what they have, and so need it cut where they left.
FINE_CHARS = 8_192


class Comment(msgspec.Struct, frozen=True):
    """Something for whoever looks at the bytes. Clients pass over it; a WebSocket has none."""

    text: str


class Numbered(msgspec.Struct, frozen=True, gc=False):
    """A chunk with its cursor. None: the client shall not come back to here."""

    chunk: Chunk | bytes  #: bytes: the same as JSON
    cursor: int | None


def created_s(request_id: str) -> int:
    """When a request was accepted. Its id says so, and so every gateway says the same."""
    return (UUID(request_id).int >> 80) // 1000


#: Stands for the text of a chunk, and is no text of any.
_MARK = "\ue000text\ue000"


class _Splice:
    """A chunk of which only one string changes, as JSON: cheaper than to write all of it for every token."""

    def __init__(self, chunk: Chunk) -> None:
        self._head, self._tail = orjson.dumps(chunk).split(orjson.dumps(_MARK))

    def json(self, text: str) -> bytes:
        return self._head + orjson.dumps(text) + self._tail


class _ChunkFraming:
    """Chat completions and completions know nothing of queues: they open at once, then comes text."""

    def __init__(self, answer: Answer, after: int, keep_alive: KeepAlive) -> None:
        self.answer = answer
        self._after, self._keep_alive = after, keep_alive
        self._chars = 0
        self._splice: _Splice | None = None
        self._logprobs = False  #: they are told

    def began(self) -> list[Comment | Numbered]:
        chunks = self.answer.opening() if self._after < 0 else []
        return [*_numbered(chunks, 0)] or self._alive("accepted" if self._after < 0 else "resumed")

    def waiting(self, place: int, estimate_ms: int | None, worker: Starting | None) -> list[Comment | Numbered]:
        known = f" estimate_ms={estimate_ms}" if estimate_ms is not None else ""
        starting = f" worker={worker.state}" if worker is not None else ""
        return self._alive(f"queued place={place}{known}{starting}")

    def idle(self) -> list[Comment | Numbered]:
        return self._alive("keep-alive")

    def running(self) -> list[Any]:
        return []

    def text(self, piece: Piece) -> list[Numbered]:
        begins = self._chars
        self._chars = cursor = begins + len(piece.text)
        if piece.kind == "text" and piece.text and begins >= self._after and not piece.logprobs and not self._logprobs:
            return [Numbered(self._spliced().json(piece.text), cursor)]
        self._logprobs = self._logprobs or bool(piece.logprobs)
        chunk = self.answer.piece(piece, max(0, self._after - begins))
        return [] if chunk is None else [Numbered(chunk, cursor)]

    def _spliced(self) -> _Splice:
        if self._splice is None:
            chunk = self.answer.piece(Run("text", _MARK))
            assert chunk is not None
            self._splice = _Splice(chunk)
        return self._splice

    def ending(self, ending: Ending) -> list[Numbered]:
        last = self._chars + 1
        if ending.outcome not in ANSWERED:
            return self._unseen([Numbered(self.answer.failure(error_of(ending)), last)], last)
        finishes = self._unseen(_numbered(self.answer.finishes(ending.outcome), last), last)
        return finishes + self._unseen(_numbered(self.answer.usage(ending), last + 1), last + 1)

    def failure(self, error: ForebayError) -> list[Numbered]:
        """The stream may be whole elsewhere, so this has no number: a client comes back for what follows its text."""
        return [Numbered(self.answer.failure(error), None)]

    def whole(self, runs: Sequence[Run], ending: Ending) -> dict[str, Any]:
        return self.answer.whole(runs, ending)

    def _unseen(self, chunks: list[Numbered], cursor: int) -> list[Numbered]:
        return chunks if cursor > self._after else []

    def _alive(self, comment: str) -> list[Comment | Numbered]:
        match self._keep_alive:
            case "comment":
                return [Comment(comment)]
            case "chunk":
                return [Numbered(self.answer.nothing(), None)]
            case _:
                return []


def _numbered(chunks: list[Chunk], cursor: int) -> list[Numbered]:
    """Chunks that go together: who has the last has all of them."""
    return [Numbered(chunk, cursor if chunk is chunks[-1] else None) for chunk in chunks]


class ChatFraming(_ChunkFraming):
    """Chat completions."""

    def __init__(
        self, request_id: str, shown: Draft | View, *, after: int = -1, keep_alive: KeepAlive = "comment"
    ) -> None:
        super().__init__(ChatAnswer(request_id, shown, created_s(request_id)), after, keep_alive)


class CompletionsFraming(_ChunkFraming):
    """Completions."""

    def __init__(
        self, request_id: str, shown: Draft | View, *, after: int = -1, keep_alive: KeepAlive = "comment"
    ) -> None:
        super().__init__(CompletionsAnswer(request_id, shown, created_s(request_id)), after, keep_alive)


class ResponsesFraming:
    """Responses show the wait: `queued` with a place, again whenever the place changes.

    `answer.final` is the Response object that the client was given at the end, to be stored as it is; None before.
    """

    def __init__(self, request_id: str, shown: Draft | View, *, after: int = -1, delivered: int = 0) -> None:
        """`delivered`: characters that a client may have had before."""
        self.answer = ResponsesAnswer(request_id, shown, created_s(request_id), after)
        self._fine = delivered if after < 0 else 0

    def began(self) -> list[Comment] | list[Event]:
        return self.answer.created() or [Comment("resumed")]

    def waiting(self, place: int, estimate_ms: int | None, worker: Starting | None) -> list[Event]:
        return self.answer.queued(place, estimate_ms, worker)

    def idle(self) -> list[Comment]:
        return [Comment("keep-alive")]

    def running(self) -> list[Event]:
        return self.answer.in_progress()

    def text(self, piece: Piece) -> Iterable[Event]:
        begins = self.answer.chars
        if begins >= self._fine or not piece.text:  # of which nothing can be cut
            return self.answer.text(piece.text, piece.kind, piece.logprobs)
        pieces = _finely(piece, self._fine - FINE_CHARS - begins, self._fine - begins)
        return chain.from_iterable(self.answer.text(one.text, one.kind, one.logprobs) for one in pieces)

    def ending(self, ending: Ending) -> list[Event]:
        return self.answer.ending(ending)

    def failure(self, error: ForebayError) -> list[Event]:
        return self.answer.failure(error)

    def whole(self, runs: Sequence[Run], ending: Ending) -> dict[str, Any]:
        return self.answer.whole(runs, ending)

    def so_far(self, runs: Sequence[Run], waiting: bool, ending: Ending | None) -> dict[str, Any]:
        """The Response object of all that was delivered, whatever came of it. It is asked of a framing that has told
        nothing."""
        return self.answer.so_far(runs, waiting, ending)


class MessagesFraming:
    """Messages have pings: for the wait, with a place, and for silence."""

    def __init__(self, request_id: str, shown: Draft | View, input_tokens: int) -> None:
        self.answer = MessagesAnswer(request_id, shown.model, input_tokens)

    def began(self) -> list[MessageEvent]:
        return self.answer.began()

    def waiting(self, place: int, estimate_ms: int | None, worker: Starting | None) -> list[MessageEvent]:
        starting = None if worker is None else {"state": worker.state, "detail": worker.detail}
        return [{"type": "ping", "queue": {"place": place, "estimate_ms": estimate_ms, "worker": starting}}]

    def idle(self) -> list[MessageEvent]:
        return [{"type": "ping"}]

    def running(self) -> list[MessageEvent]:
        return []

    def text(self, piece: Piece) -> list[MessageEvent]:
        return self.answer.piece(piece)

    def ending(self, ending: Ending) -> list[MessageEvent]:
        return self.answer.ending(ending)

    def failure(self, error: ForebayError) -> list[MessageEvent]:
        return [self.answer.failure(error)]

    def whole(self, runs: Sequence[Run], ending: Ending) -> dict[str, Any]:
        return self.answer.whole(runs, ending)


def _finely(piece: Piece, start: int, end: int) -> Iterator[Run]:
    """The pieces of one that is cut at each character from `start` to `end`, and left whole before and after."""
    last = len(piece.text)
    start, end = min(max(start, 0), last), min(max(end, 0), last)
    return cut_at(piece, [0, *range(start, end), end, last] if start < end else [0, last])
