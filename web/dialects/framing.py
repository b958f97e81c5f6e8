"""How each dialect says what happens to a request: the same few occasions, each its own chunks or events. Pure.

A framing may be of a client that comes back and has everything up to a cursor, `after`. The stream is said to it from
its beginning all the same, since later events repeat the whole text; what the client has is left out here. Something is
said at once even so: the headers leave with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Literal
from uuid import UUID

import msgspec

from core.errors import ForebayError
from core.outlook import Starting
from core.values import Ending
from web.dialects.chat import ChatAnswer, Chunk
from web.dialects.draft import Draft
from web.dialects.responses import Event, ResponsesAnswer, unseen
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

    chunk: Chunk
    cursor: int | None


def created_s(request_id: str) -> int:
    """When a request was accepted. Its id says so, and so every gateway says the same."""
    return (UUID(request_id).int >> 80) // 1000


class ChatFraming:
    """Chat completions know nothing of queues: the role comes at once, then text."""

    def __init__(
        self, request_id: str, shown: Draft | View, *, after: int = -1, keep_alive: KeepAlive = "comment"
    ) -> None:
        opened = after >= 0
        made_s = created_s(request_id)
        self.answer = ChatAnswer(request_id, shown.model, made_s, shown.include_usage, opened=opened)
        self._after, self._keep_alive = after, keep_alive
        self._chars = 0

    def began(self) -> list[Comment | Numbered]:
        opening = [Numbered(chunk, 0) for chunk in self.answer.opening()]
        return [*opening] or self._alive("resumed")

    def waiting(self, place: int, estimate_ms: int | None, worker: Starting | None) -> list[Comment | Numbered]:
        known = f" estimate_ms={estimate_ms}" if estimate_ms is not None else ""
        starting = f" worker={worker.state}" if worker is not None else ""
        return self._alive(f"queued place={place}{known}{starting}")

    def idle(self) -> list[Comment | Numbered]:
        return self._alive("keep-alive")

    def running(self) -> list[Any]:
        return []

    def text(self, text: str) -> list[Numbered]:
        fresh = unseen(text, self._chars, self._after)
        self._chars = cursor = self._chars + len(text)
        chunks = self.answer.text(fresh)
        # One, for all but the first: a comprehension would cost more than the chunk.
        return [Numbered(chunks[0], cursor)] if len(chunks) == 1 else [Numbered(chunk, cursor) for chunk in chunks]

    def ending(self, ending: Ending) -> list[Numbered]:
        last = enumerate(self.answer.ending(ending), self._chars + 1)
        return [Numbered(chunk, cursor) for cursor, chunk in last if cursor > self._after]

    def failure(self, error: ForebayError) -> list[Numbered]:
        """The stream may be whole elsewhere, so this has no number: a client comes back for what follows its text."""
        return [Numbered(self.answer.failure(error), None)]

    def whole(self, text: str, ending: Ending) -> dict[str, Any]:
        return self.answer.whole(text, ending)

    def _alive(self, comment: str) -> list[Comment | Numbered]:
        match self._keep_alive:
            case "comment":
                return [Comment(comment)]
            case "chunk":
                return [Numbered(self.answer.nothing(), None)]
            case _:
                return []


class ResponsesFraming:
    """Responses show the wait: `queued` with a place, again whenever the place changes."""

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

    def text(self, text: str) -> Iterable[Event]:
        begins = self.answer.chars
        if begins >= self._fine:
            return self.answer.text(text)
        pieces = _finely(text, self._fine - FINE_CHARS - begins, self._fine - begins)
        return chain.from_iterable(map(self.answer.text, pieces))

    def ending(self, ending: Ending) -> list[Event]:
        return self.answer.ending(ending)

    def failure(self, error: ForebayError) -> list[Event]:
        return self.answer.failure(error)

    def whole(self, text: str, ending: Ending) -> dict[str, Any]:
        return self.answer.whole(text, ending)

    def so_far(self, text: str, waiting: bool, ending: Ending | None) -> dict[str, Any]:
        self.answer.text(text)
        return self.answer.so_far(waiting, ending)


def _finely(text: str, start: int, end: int) -> Iterator[str]:
    """The pieces of a text that is cut at each character from `start` to `end`, and left whole before and after."""
    start, end = max(start, 0), max(end, 0)
    if head := text[:start]:
        yield head
    yield from text[start:end]
    if tail := text[end:]:
        yield tail
