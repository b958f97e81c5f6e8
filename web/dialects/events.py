"""An answer of OpenAI's Responses: its runs become items, and items are told as events or shown whole. Pure.

SSE and WebSocket carry the same events. `sequence_number` is the cursor that a client resumes from. It is a function of
where in the answer an event belongs, which every gateway knows of any piece of it, however tokens were put together: of
the characters `c` before it, of whatever kind, and of the number `r` of the run they are in, counted from 0. A run is
what core/stream/frames.py says; one that is not shown, such as a stop string, is counted too.

    created                                   0
    queued                                    1 .. 99, each one more, and then 99 again and again: a place is news, not
                                              history
    in_progress                               100
    a run that begins after c characters      item added 101 + 6r + c, part added + 1: if it begins an item
    text, thought or arguments up to c        103 + 6r + c
    the end of an item, its last run at c     103 + 6r + c, and: text done + 1, part done + 2, item done + 3
    the same of a call                        arguments done + 2, item done + 3
    the end of a call's name                  103 + 6r + c, and: item added + 1
    the terminal event                        103 + 6r + c + 4, of the last run and all characters
    a gateway's own end                       the number of what was said last: nothing of the answer lies beyond it

Of a plain answer, which is one run, that makes 103 + c. An item goes on until another begins: what is not shown in
between does not end it. An answer without any has one message, empty, as if it had begun at 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, ClassVar, Literal

from core.errors import BadRequest, ForebayError, KeyRevoked, LimitReached, MoneySpent, OrganisationSuspended
from core.outlook import Starting
from core.stream.frames import Logprob, Run, joined, kind_of
from core.values import ANSWERED, Ending, Outcome, Usage
from web.dialects.choices import Piece, told
from web.dialects.draft import Draft, error_of
from web.dialects.tools import call_id
from web.dialects.view import View, echo_of

Event = dict[str, Any]
Item = dict[str, Any]
Status = Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]

#: The last number that a queued event may have.
QUEUED_LAST = 99
_IN_PROGRESS, _PART_ADDED, _TEXT = 100, 102, 103
_RUN = 6  #: numbers that a run has beside those of its characters: three to end an item, two to begin one, one spare
_TERMINAL = 4  #: its number after that of the last text

_STATUSES: dict[Outcome, Status] = {
    Outcome.COMPLETED: "completed",
    Outcome.LENGTH: "incomplete",
    Outcome.CANCELLED: "cancelled",
}


class _Item(ABC):
    """One item of the output, as far as it is."""

    prefix: ClassVar[str]

    def __init__(self, code: str, index: int) -> None:
        self.id, self.index = f"{self.prefix}_{code}_{index}", index
        self.status = ""  #: until it has ended
        self.pieces: list[str] = []

    @abstractmethod
    def added(self, begins: int) -> list[Event]:
        """It is there. `begins`: the number of a character 0 of it; `ends`, below, of its last."""

    @abstractmethod
    def delta(self, number: int, text: str, logprobs: list[Item]) -> Event:
        """More of it, up to the character of this number."""

    @abstractmethod
    def done(self, ends: int, status: str) -> list[Event]:
        """It has ended, so."""

    @abstractmethod
    def shown(self, status: str) -> Item:
        """All of it, so far."""

    def _told(self, name: str, number: int, **fields: Any) -> Event:
        return _event(name, number, output_index=self.index, **fields)


class _Thought(_Item):
    """What was thought before the answer. It has one part."""

    prefix = "rs"
    part: ClassVar[str] = "reasoning_text"  #: its type, which its events are named for
    head: ClassVar[Item] = {"type": "reasoning", "summary": []}

    def added(self, begins: int) -> list[Event]:
        item = {**self.shown("in_progress"), "content": []}
        return [
            self._told("response.output_item.added", begins - 2, item=item),
            self._of_part("response.content_part.added", begins - 1, part=self._part("")),
        ]

    def delta(self, number: int, text: str, logprobs: list[Item]) -> Event:
        return self._of_part("response.reasoning_text.delta", number, delta=text)

    def done(self, ends: int, status: str) -> list[Event]:
        self.status = status
        text = "".join(self.pieces)
        return [
            self._of_part(f"response.{self.part}.done", ends + 1, **self._text(text)),
            self._of_part("response.content_part.done", ends + 2, part=self._part(text)),
            self._told("response.output_item.done", ends + 3, item=self.shown(status)),
        ]

    def shown(self, status: str) -> Item:
        return {**self.head, "id": self.id, "status": status, "content": [self._part("".join(self.pieces))]}

    def _part(self, text: str) -> Item:
        return {"type": self.part, **self._text(text)}

    def _text(self, text: str) -> Item:
        return {"text": text}

    def _of_part(self, name: str, number: int, **fields: Any) -> Event:
        return self._told(name, number, item_id=self.id, content_index=0, **fields)


class _Said(_Thought):
    """What is said. Of its tokens the log probabilities may be told too."""

    prefix, part = "msg", "output_text"
    head: ClassVar[Item] = {"type": "message", "role": "assistant"}

    def __init__(self, code: str, index: int) -> None:
        super().__init__(code, index)
        self.logprobs: list[Item] = []

    def delta(self, number: int, text: str, logprobs: list[Item]) -> Event:
        # Spelled out: there is one for every token.
        return {
            "type": "response.output_text.delta",
            "sequence_number": number,
            "item_id": self.id,
            "output_index": self.index,
            "content_index": 0,
            "delta": text,
            "logprobs": logprobs,
        }

    def _part(self, text: str) -> Item:
        return {**super()._part(text), "annotations": []}

    def _text(self, text: str) -> Item:
        return {"text": text, "logprobs": self.logprobs if text else []}


class _Called(_Item):
    """A call. Its name comes first, and it is told of when that is whole."""

    prefix = "fc"

    def __init__(self, code: str, index: int, call: str) -> None:
        super().__init__(code, index)
        self.call, self.name = call, ""

    def added(self, begins: int) -> list[Event]:
        return []

    def name_ended(self, ends: int) -> list[Event]:
        """The pieces so far were its name. `ends`: the number of its last character."""
        if self.name:
            return []
        self.name, self.pieces = "".join(self.pieces), []
        return [self._told("response.output_item.added", ends + 1, item=self.shown("in_progress"))]

    def delta(self, number: int, text: str, logprobs: list[Item]) -> Event:
        return self._told("response.function_call_arguments.delta", number, item_id=self.id, delta=text)

    def done(self, ends: int, status: str) -> list[Event]:
        events = self.name_ended(ends)
        self.status, item = status, self.shown(status)
        whole = item["arguments"]
        return [
            *events,
            self._told("response.function_call_arguments.done", ends + 2, item_id=self.id, arguments=whole),
            self._told("response.output_item.done", ends + 3, item=item),
        ]

    def shown(self, status: str) -> Item:
        text = "".join(self.pieces)
        name, arguments = (self.name, text) if self.name else (text, "")
        call = {"call_id": self.call, "name": name, "arguments": arguments}
        return {"type": "function_call", "id": self.id, **call, "status": status}


class ResponsesAnswer:
    """The answer to one Responses request, as events or whole. What was already said is not said again.

    `after` is the cursor of a client that comes back: it is told what has a higher number. -1: it has nothing.
    """

    def __init__(self, request_id: str, shown: Draft | View, created_s: int, after: int = -1) -> None:
        self._request_id, self._code = request_id, request_id.replace("-", "")
        self.id = "resp_" + self._code
        self._model, self._echo = shown.model, echo_of(shown)
        self._created_s = created_s
        self._after = after
        self._last = after  #: the highest number said
        self._started = after >= _IN_PROGRESS
        self.chars = 0  #: told so far, or had before
        self.final: Item | None = None  #: the Response object that the client was given at the end, to be kept
        self._items: list[_Item] = []
        self._ends = _TEXT  #: number of the last character of the last item
        self._run = -1
        self._kind = ""  #: of the run
        self._base = _TEXT  #: number that a run would have begun with at 0
        self._item: _Item | None = None  #: that the run belongs to; None: it is not shown
        self._mute = False  #: its characters are told otherwise: a name

    def created(self) -> list[Event]:
        """The first event. SDKs fail on a stream that begins with another."""
        return self._fresh([self._lifecycle("created", 0, "in_progress")])

    def queued(self, place: int, estimate_ms: int | None = None, worker: Starting | None = None) -> list[Event]:
        """A place in the queue, how long it may take, and the worker that is being started for it."""
        if self._started:
            return []
        self._last = min(max(self._last, 0) + 1, QUEUED_LAST)
        event = self._lifecycle("queued", self._last, "queued")
        starting = None if worker is None else {"state": worker.state, "detail": worker.detail}
        # An extra key, since strict clients refuse an event type they do not know.
        return [{**event, "queue": {"place": place, "estimate_ms": estimate_ms, "worker": starting}}]

    def in_progress(self) -> list[Event]:
        """A worker has it."""
        if self._started:
            return []
        self._started = True
        return self._fresh([self._lifecycle("in_progress", _IN_PROGRESS, "in_progress")])

    def text(self, text: str, kind: str = "text", logprobs: Sequence[Logprob] = ()) -> list[Event]:
        """What follows, of one kind, or what of it the client does not have."""
        if not text:
            self._keep_logprobs(logprobs)
            return []
        events = [] if kind == self._kind else self._turn_to(kind)
        begins = self.chars
        self.chars = ends = begins + len(text)
        item = self._item
        if item is None:
            return events
        item.pieces.append(text)
        if self._mute:
            return events
        known = self._keep_logprobs(logprobs) if logprobs else []
        seen = self._after - self._base - begins
        if seen < len(text):
            if seen > 0:
                text, known = text[seen:], known[_within(logprobs, len(text), seen) :]
            self._last = self._base + ends
            events.append(item.delta(self._last, text, known))
        return events

    def _keep_logprobs(self, logprobs: Sequence[Logprob]) -> list[Item]:
        """Only what is said has them."""
        if not isinstance(self._item, _Said):
            return []
        known = [_logprob(each) for each in logprobs]
        self._item.logprobs += known
        return known

    def _turn_to(self, kind: str) -> list[Event]:
        """A run begins."""
        events = self.in_progress()
        self._mark_end()
        self._run, self._kind = self._run + 1, kind
        self._base = _TEXT + _RUN * self._run
        said = self._go_to(kind)
        return events + self._fresh(said)

    def _mark_end(self) -> None:
        """The run ends here, and perhaps its item."""
        if self._item is not None:
            self._ends = self._base + self.chars

    def _go_to(self, kind: str) -> list[Event]:
        """To the item that a run belongs to: the last, a new one, or none."""
        _, what, number = kind_of(kind)
        last = self._items[-1] if self._items else None
        self._mute = what == "call"
        match what:
            case "text" | "reasoning":
                kinds = _Said if what == "text" else _Thought
                if type(last) is kinds:
                    self._item = last
                    return []
                return self._begin(kinds(self._code, len(self._items)))
            case "call":
                return self._begin(_Called(self._code, len(self._items), call_id(self._request_id, 0, number)))
            case "arguments" if isinstance(last, _Called) and last.call == call_id(self._request_id, 0, number):
                self._item = last
                return last.name_ended(self._ends)
            case _:
                self._item = None
                return []

    def _begin(self, item: _Item) -> list[Event]:
        closing = self._end_last("completed")
        self._items.append(item)
        self._item = item
        return closing + item.added(self._base + self.chars)

    def _end_last(self, status: str) -> list[Event]:
        return self._items[-1].done(self._ends, status) if self._items else []

    def ending(self, ending: Ending) -> list[Event]:
        """The last events. An answer, even a cut or empty one, is closed part by part; a failure just ends."""
        status = _STATUSES.get(Outcome(ending.outcome), "failed")
        terminal = self._base + self.chars + _TERMINAL
        if status == "failed":
            return self._ended([self._failed(error_of(ending), terminal, ending.usage)])
        events = self._closing(status, answered=ending.outcome in ANSWERED)
        # No event is named cancelled: SDKs end a turn at an incomplete response, whose status says it.
        name = "completed" if status == "completed" else "incomplete"
        facts = {
            "completed_at": ending.ended_ms // 1000 if status == "completed" else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._output("incomplete"),
            "usage": usage_object(ending.usage),
        }
        return events + self._ended([self._lifecycle(name, terminal, status, **facts)])

    def _closing(self, status: Status, *, answered: bool) -> list[Event]:
        events: list[Event] = []
        self._mark_end()
        self._item = None
        if answered and not self._items:
            self._items.append(_Said(self._code, 0))
            events = self.in_progress() + self._fresh(self._items[0].added(_TEXT))
        return events + self._fresh(self._end_last("completed" if status == "completed" else "incomplete"))

    def _ended(self, events: list[Event]) -> list[Event]:
        self.final = events[-1]["response"]
        return self._fresh(events)

    def failure(self, error: ForebayError) -> list[Event]:
        """The last event when the gateway itself must give up on the request, which may be whole elsewhere."""
        return [self._failed(error, max(self._last, 0), None)]

    def so_far(self, runs: Iterable[Run], waiting: bool, ending: Ending | None) -> Item:
        """The response as an object, ended or not, of all that was delivered: told to nobody else."""
        for run in runs:
            self.text(run.text, run.kind, run.logprobs)
        if ending is None:
            status: Status = "queued" if waiting and not self._items else "in_progress"
            return self._response(status, output=self._output("in_progress"))
        self.ending(ending)
        assert self.final is not None
        return self.final

    def whole(self, runs: Iterable[Run], ending: Ending) -> Item:
        """The whole answer as one object; of one that was cancelled, or money ended, what was made until then.

        Raises:
          ForebayError: it ended without an answer.
        """
        made = ending.outcome == Outcome.STOPPED and ending.usage.output_tokens
        if not made and ending.outcome not in ANSWERED | {Outcome.CANCELLED}:
            raise error_of(ending)
        return self.so_far(runs, False, ending)

    def warmed(self) -> list[Event]:
        """The whole stream of a response without output, which clients ask for to open the way."""
        facts = {"completed_at": self._created_s, "usage": usage_object(Usage())}
        completed = self._lifecycle("completed", _TEXT + _TERMINAL, "completed", **facts)
        return [*self.created(), *self.in_progress(), *self._ended([completed])]

    def _fresh(self, events: list[Event]) -> list[Event]:
        """Those that the client does not have."""
        fresh = [event for event in events if event["sequence_number"] > self._after]
        if fresh:
            self._last = fresh[-1]["sequence_number"]
        return fresh

    def _failed(self, error: ForebayError, number: int, usage: Usage | None) -> Event:
        fault = {"code": _fault_code(error), "message": error.message}
        facts = {"error": fault, "output": self._output("incomplete"), "usage": usage and usage_object(usage)}
        return self._lifecycle("failed", number, "failed", **facts)

    def _lifecycle(self, name: str, number: int, status: Status, **facts: Any) -> Event:
        return _event(f"response.{name}", number, response=self._response(status, **facts))

    def _response(self, status: Status, **facts: Any) -> Item:
        """The Response object, with every key of the specification: clients check for their presence."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created_s,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": [],
            "usage": None,
            **self._echo,
            **facts,
        }

    def _output(self, last: str) -> list[Item]:
        """The items. All but the last have ended well; of that one `last` says it, if it has not ended."""
        return [item.shown(item.status or last) for item in self._items]


def _event(name: str, number: int, **fields: Any) -> Event:
    return {"type": name, "sequence_number": number, **fields}


def _logprob(one: Logprob) -> Item:
    return {**_token(one.token, one.logprob), "top_logprobs": [_token(*other) for other in one.top]}


def _token(token: str, logprob: float) -> Item:
    return {"token": token, "logprob": told(logprob), "bytes": list(token.encode("utf-8", "replace"))}


def cut_at(piece: Piece, edges: Iterable[int]) -> Iterator[Run]:
    """The parts of a piece between these characters of it, from its first. A token goes with the part it ends in."""
    known = 0
    for begin, end in pairwise(sorted(set(edges))):
        upto = _within(piece.logprobs, len(piece.text), end)
        yield Run(piece.kind, piece.text[begin:end], piece.logprobs[known:upto])
        known = upto


def _within(logprobs: Sequence[Logprob], chars: int, upto: int) -> int:
    """How many tokens of so many characters end within the first `upto`. The last ends with them; the first may have
    begun before."""
    if not logprobs or upto >= chars:
        return len(logprobs)
    ends = list(accumulate(len(one.token) for one in logprobs))
    return bisect_right(ends, upto + ends[-1] - chars)


def last_number(runs: Iterable[Run], ended: bool) -> int:
    """The highest number that a client can have been told of an answer."""
    shown = joined(run for run in runs if run.text)
    chars = sum(len(run.text) for run in shown)
    last = _TEXT + _RUN * max(len(shown) - 1, 0) + chars
    return last + _TERMINAL if ended else last if chars else _PART_ADDED


def _fault_code(error: ForebayError) -> str:
    """A failed response has its own few codes, which SDKs know by heart; those of a key that may not go on, and of
    money that is used up, are as anywhere, since no retry helps."""
    if isinstance(error, KeyRevoked | OrganisationSuspended | MoneySpent):
        return error.error_code or error.type
    if isinstance(error, LimitReached):
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, BadRequest) else "server_error"


def usage_object(usage: Usage) -> dict[str, Any]:
    """Token counts in the words of Responses."""
    return {
        "input_tokens": usage.input_tokens,
        # A write to the prefix cache costs nothing here and is not counted; SDKs require the key.
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.input_tokens + usage.output_tokens,
    }
