"""How each dialect says what happens to a request: the same few occasions, each its own chunks or events. Pure."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from core.errors import ForebayError
from core.values import Ending, Request
from web.dialects.chat import ChatAnswer
from web.dialects.draft import Draft
from web.dialects.responses import ResponsesAnswer


def created_s(request_id: str) -> int:
    """When a request was accepted. Its id says so, and so every gateway says the same."""
    return (UUID(request_id).int >> 80) // 1000


class ChatFraming:
    """Chat completions know nothing of queues: the role comes at once, then text."""

    def __init__(self, request: Request, draft: Draft) -> None:
        self.answer = ChatAnswer(request.id, draft.model, created_s(request.id), draft.include_usage)

    def began(self, place: int) -> list[Any]:
        return self.answer.opening()

    def waiting(self, place: int) -> list[Any]:
        return []

    def running(self) -> list[Any]:
        return []

    def text(self, text: str, offset: int) -> list[Any]:
        return self.answer.text(text)

    def ending(self, ending: Ending) -> list[Any]:
        return self.answer.ending(ending)

    def failure(self, error: ForebayError) -> list[Any]:
        return [self.answer.failure(error)]

    def whole(self, text: str, ending: Ending) -> dict[str, Any]:
        return self.answer.whole(text, ending)


class ResponsesFraming:
    """Responses show the wait: `queued` with a place, again whenever the place changes."""

    def __init__(self, request: Request, draft: Draft) -> None:
        self.answer = ResponsesAnswer(request.id, draft, created_s(request.id))

    def began(self, place: int) -> list[Any]:
        return [*self.answer.created(), *self.waiting(place)]

    def waiting(self, place: int) -> list[Any]:
        return self.answer.queued(place, None) if place else []

    def running(self) -> list[Any]:
        return self.answer.in_progress()

    def text(self, text: str, offset: int) -> list[Any]:
        return self.answer.text(text, offset)

    def ending(self, ending: Ending) -> list[Any]:
        return self.answer.ending(ending)

    def failure(self, error: ForebayError) -> list[Any]:
        return self.answer.failure(error)

    def whole(self, text: str, ending: Ending) -> dict[str, Any]:
        return self.answer.whole(text, ending)
