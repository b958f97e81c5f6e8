"""One open stream: deltas come in any order and from any attempt, and its reader gets the answer once, or an error.

A stream follows one attempt. It is told of a takeover, and from then on fences the older one. A newer attempt goes on
from its cut: the hash of the tokens before it must be that of our own; what lies before the cut and is missing here is
filled in first; what we have beyond it and have not shown is dropped, and what we have shown must come again, token by
token. Anything else ends the stream with an error, never with a splice of two samples.

A gap does not end it: deltas are kept while what is missing is read from saved output and logs (web/subscriber.py).
"""

from __future__ import annotations

import io
import queue
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import msgspec

from core.errors import ForebayError, KeyRevoked, OrganisationSuspended, RequestFailed
from core.outlook import Starting
from core.stream.frames import Delta, Logprob, Run, cut_of
from core.stream.log import Output
from core.telemetry import logs, metrics
from core.values import CALLER_STOPPED, DELIVERED, Ending, Outcome, Request

log = logs.get(__name__)

#: A stream that has nothing to say says so this often, so that proxies (60 s is usual) keep it, seconds.
KEEPALIVE_S = 15.0
#: Deltas that are kept while a gap is filled. What comes beyond them is dropped, and is another gap.
KEPT_MAX = 256


class Text(msgspec.Struct, frozen=True, gc=False):
    """More of the answer. There is one for every token, so it is the cheapest of the events."""

    text: str
    offset: int  #: tokens of the output up to and with this text
    kind: str = "text"  #: as in core/stream/frames.py
    logprobs: tuple[Logprob, ...] = ()  #: of the tokens since the last one


@dataclass(frozen=True)
class Again:
    """What came so far has not reached the client and is not the answer: forget it."""


@dataclass(frozen=True)
class Waiting:
    """It waits, and so many go first. 1: next."""

    place: int
    estimate_ms: int | None = None  #: None: no telling
    worker: Starting | None = None  #: the one that is awaited, when none is ready


@dataclass(frozen=True)
class Running:
    """A worker has it, and nothing of the answer was told before."""


@dataclass(frozen=True)
class Idle:
    """Nothing was said for KEEPALIVE_S."""


@dataclass(frozen=True)
class Ended:
    """Its ending. Nothing comes after it."""

    ending: Ending


@dataclass(frozen=True)
class Broken:
    """The stream cannot go on here. Nothing comes after it."""

    error: ForebayError


@dataclass(frozen=True)
class Rest:
    """What was told straight, and not to its end: its reader is to do the rest."""

    do: Callable[[], object]


Event = Text | Again | Waiting | Running | Idle | Rest | Ended | Broken


class Stream:
    """One open request. The pump puts, one reader takes; what the reader has not taken yet is merged.

    Memory: 4 bytes a token, the text, and what waits for the reader; while a gap is filled, KEPT_MAX deltas.
    """

    def __init__(self, request: Request, lost: Callable[[Stream], None], *, attached: bool = False) -> None:
        """`lost` is called once for every gap, and sees to it that `fill` is called. An attached stream has begun
        elsewhere: its request is without its prompt, and it is filled from its beginning."""
        self.request, self.attached = request, attached
        self.reader = request.caller.key_id  #: whose key reads it: of a response, any of its project
        self.accepted = False  #: the queue has it; until then `watch` does not ask
        self.view = b""  #: how to show it again, as it is put down with it
        self.leave: Callable[[], bool] | None = None  #: of one with several readers: this one goes; are there others?
        self.settled = False  #: its ending was accounted for, perhaps by an earlier reader
        self.put_back = False  #: what the store lost of its output is there again, but not itself: its queue is full
        self.attempt = 0  #: the newest known; older ones are fenced
        self.tokens = array("I")  #: delivered so far
        self.over = False  #: nothing more is put
        self.moved = False  #: it goes on at another reader
        self.failed = False  #: it cannot go on
        self.ending: Ending | None = None
        self._lost, self._lock = lost, threading.Lock()
        self._text, self._chars = io.StringIO(), 0  #: delivered so far
        self._kind = ""  #: of its last run
        self._begins: list[tuple[int, int, str]] = []  #: of each run: its first character, its first token, its kind
        self._logprobs: list[Logprob] = []  #: of each token, if they were asked for
        self._told = 0  #: of these, put
        self._shown = 0  #: tokens up to the last text
        self._follows = 0  #: the attempt that is relayed
        self._live = -1  #: the same, while its next delta can be relayed as it comes
        self._repeated: tuple[int, int] | None = None  #: (tokens, characters) where it is, while it repeats ours
        self._filling = attached
        self._kept: list[Delta] = []
        self._late: Ending | None = None  #: it came before the last of the output
        self._read = True  #: somebody takes the events
        #: Tells its reader's client a text at once, or gives back what its reader is to do of it. Never waits, never
        #: raises. Used while the reader waits for an event: to wake it for each token would cost as much as the rest.
        self.straight: Callable[[Text], Rest | None] | None = None
        self._waited = False  #: the reader waits for an event
        self._waits: object = None  #: what was last said of its wait
        self._opened_s = self._spoke_s = time.monotonic()
        self._said: object = (0, None)  #: tokens and wait when the watch last looked
        self._count: Callable[[int], object] = _nothing if attached else metrics.stream_tokens.labels(request.model).inc
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._next: Event | None = None  #: read on too far, while texts were merged

    @property
    def ended(self) -> bool:
        """The queue has ended it, so there is nothing to cancel."""
        return self.ending is not None

    @property
    def text(self) -> str:
        """Delivered so far, whatever kind of characters."""
        return self._text.getvalue()

    @property
    def runs(self) -> list[Run]:
        """The same, by kind."""
        if not self._begins:
            return []
        text, ends = self.text, [*self._begins[1:], (self._chars, len(self.tokens), "")]
        return [
            Run(kind, text[at:end], tuple(self._logprobs[token:last]))
            for (at, token, kind), (end, last, _) in zip(self._begins, ends, strict=True)
        ]

    def delivered(self) -> list[Delta]:
        """The same, to be saved: each run with the tokens that it came with."""
        ends = [*(token for _, token, _ in self._begins[1:]), len(self.tokens)]
        deltas: list[Delta] = []
        offset = at = 0
        for run, end in zip(self.runs or [Run("text", "")], ends, strict=True):
            tokens, logprobs = tuple(self.tokens[offset:end]), tuple(self._logprobs[offset:end])
            deltas.append(
                Delta(self.request.id, self.attempt, offset, tokens, run.text, at, run.kind, logprobs=logprobs)
            )
            offset, at = end, at + len(run.text)
        return deltas

    # --- the pump's side

    def take(self, delta: Delta) -> None:
        """A delta of this request."""
        if delta.attempt == self._live and delta.offset == len(self.tokens) and delta.at == self._chars:
            self._relay(delta.tokens, delta.text, delta.kind, delta.logprobs)
            return
        with self._lock:
            self._take(delta)
            self._settle()

    def fence(self, attempt: int) -> None:
        """A worker has taken it over: what older attempts still send is not the answer."""
        with self._lock:
            self.attempt = max(self.attempt, attempt)
            self._settle()

    def end(self, ending: Ending) -> None:
        """Its ending came. What is missing of its output is filled in first."""
        with self._lock:
            if self.over:
                return
            self.attempt = max(self.attempt, ending.attempt)
            self._late = ending
            if not self._conclude():
                self._gap()
            self._settle()

    def _take(self, delta: Delta) -> None:
        if self.over or delta.attempt < self.attempt:
            metrics.stream_fenced.inc()
            return
        self.attempt = delta.attempt
        if self._filling:
            if len(self._kept) < KEPT_MAX:
                self._kept.append(delta)
        elif not self._continue(delta):
            self._kept = [delta]
            self._gap()

    def _continue(self, delta: Delta) -> bool:
        """Take the next delta, or pass over one that is known. False: something before it is missing."""
        if delta.attempt > self._follows and not self._switch(delta):
            return self.over
        offset, at = self._place
        if delta.offset > offset or delta.at > at:
            return False
        if (delta.offset, delta.at) != (offset, at):
            metrics.stream_fenced.inc()
        elif self._repeated is None:
            self._relay(delta.tokens, delta.text, delta.kind, delta.logprobs)
        else:
            self._compare(delta)
        return True

    @property
    def _place(self) -> tuple[int, int]:
        """Where the attempt that is followed is in the output."""
        return self._repeated or (len(self.tokens), self._chars)

    def _relay(self, tokens: tuple[int, ...], text: str, kind: str, logprobs: tuple[Logprob, ...]) -> None:
        if tokens and not self.tokens and not self.attached:
            metrics.request_ttft_seconds.labels(self.request.model).observe(time.monotonic() - self._opened_s)
        if text and kind != self._kind:
            self._turn_to(kind)
        self.tokens.extend(tokens)
        if logprobs:
            self._logprobs.extend(logprobs)
        if text:
            self._chars += len(text)
            self._text.write(text)
            self._shown = len(self.tokens)
            if self._read:
                self._tell(Text(text, self._shown, kind, self._fresh_logprobs() if self._logprobs else ()))
        self._count(len(tokens))

    def _turn_to(self, kind: str) -> None:
        """A run begins. Tokens without a character belong to the one before, if there is one."""
        if self._begins and self._told < len(self._logprobs) and self._read:
            self._tell(Text("", len(self.tokens), self._kind, self._fresh_logprobs()))
        self._begins.append((self._chars, len(self.tokens) if self._begins else 0, kind))
        self._kind = kind

    def _tell(self, text: Text) -> None:
        if self.straight is None or not self._waited or not self._events.empty():
            self._events.put(text)
        elif (rest := self.straight(text)) is not None:
            self._events.put(rest)

    def _fresh_logprobs(self) -> tuple[Logprob, ...]:
        fresh = tuple(self._logprobs[self._told :])
        self._told = len(self._logprobs)
        return fresh

    def _settle(self) -> None:
        """Whether the next delta may be relayed as it comes."""
        aside = self.over or self._filling or self._repeated is not None or self._follows < self.attempt
        self._live = -1 if aside else self._follows

    # --- a newer attempt

    def _switch(self, delta: Delta) -> bool:
        """Follow the attempt that begins here. False: it does not begin here, or what lies before is missing."""
        cut, at = delta.offset, delta.at
        if cut > len(self.tokens) or at > self._chars or (cut and not delta.cut):
            return False
        if cut and delta.cut != cut_of(self.tokens[:cut]):
            self._differ()
            return False
        self._begin(delta.attempt, cut, at)
        return True

    def _begin(self, attempt: int, cut: int, at: int) -> None:
        """What we have beyond the cut is dropped if it was not shown, and compared if it was."""
        if self.request.stream:
            del self.tokens[max(cut, self._shown) :]
            del self._logprobs[max(cut, self._shown) :]
        elif not cut or len(self.tokens) > cut:
            self._forget(cut, at)
        self._follows = attempt
        self._repeated = (cut, at) if (cut, at) != (len(self.tokens), self._chars) else None
        if not self.tokens:
            self._put(Running())

    def _forget(self, cut: int, at: int) -> None:
        """Nothing has reached the client, so the answer may be another one from here on."""
        del self.tokens[cut:], self._logprobs[cut:]
        self._text.seek(at)
        self._text.truncate()
        self._chars, self._shown, self._told = at, cut, 0
        self._begins = [begin for begin in self._begins if begin[0] < at]
        self._kind = self._begins[-1][2] if self._begins else ""
        self._put(Again())
        for run in self.runs:
            self._put(Text(run.text, cut, run.kind, run.logprobs))
        self._told = len(self._logprobs)

    def _compare(self, delta: Delta) -> None:
        """What an attempt repeats must be what was shown; what follows it is new."""
        offset, at = self._place
        end = (offset + len(delta.tokens), at + len(delta.text))
        known = max(0, len(self.tokens) - offset)
        if array("I", delta.tokens[:known]) != self.tokens[offset : end[0]]:
            self._differ()
            return
        text = delta.text[max(0, self._chars - at) :]
        self._relay(delta.tokens[known:], text, delta.kind, delta.logprobs[known:])
        self._repeated = end if end != (len(self.tokens), self._chars) else None

    def _differ(self) -> None:
        self._fail(RequestFailed("Its worker died, and another gave a different answer. Please retry."))

    # --- gaps and the end

    def _gap(self) -> None:
        if not self._filling:
            self._filling = True
            metrics.stream_gaps.inc()
            log.info("stream_gap", request_id=self.request.id, attempt=self.attempt, tokens=len(self.tokens))
            self._lost(self)

    def fill(self, output: Output) -> bool:
        """What was found of its output. False: something is still missing."""
        with self._lock:
            if not self.over and (output.attempt >= self.attempt or self._is_final()):
                self._catch_up(output)
            whole = self.over or self._resume()
            self._settle()
            return whole

    def _is_final(self) -> bool:
        """It was ended without an answer. Else what the newest attempt has not begun to save may yet change."""
        return self._late is not None and self._late.outcome not in DELIVERED

    def give_up(self) -> None:
        """What is missing cannot be found."""
        with self._lock:
            if self._late is not None and self._is_final():
                self._close(Ended(self._late))
            else:
                self._fail(RequestFailed("A part of the answer was lost on its way. Please retry."))

    def _catch_up(self, output: Output) -> None:
        """Go through the output from its beginning: what we have must be the same."""
        before = self._place
        newer = output.attempt > self._follows
        if newer:
            self._begin_output(output)
        self.attempt = max(self.attempt, output.attempt)
        deltas, self._repeated = self._beyond(output)
        for delta in deltas:
            if self.over or not self._continue(delta):
                break
        if not newer and self._place < before:
            self._repeated = before
        if self._repeated == (len(self.tokens), self._chars):
            self._repeated = None

    def _beyond(self, output: Output) -> tuple[list[Delta], tuple[int, int]]:
        """The deltas that go on from what we have, and where they begin; all of them if it is not the same."""
        known = min(len(output.tokens), len(self.tokens))
        if output.tokens[:known] != self.tokens[:known]:
            return output.deltas, (0, 0)
        first = len(output.deltas)
        while first and output.deltas[first - 1].offset >= known:
            first -= 1
        first = max(0, first - 1)  # the one before may reach beyond, or have more text
        deltas = output.deltas[first:]
        return deltas, (deltas[0].offset, deltas[0].at) if deltas else (0, 0)

    def _begin_output(self, output: Output) -> None:
        """Like `_begin`, with the tokens before the cut at hand."""
        known = min(len(self.tokens), len(output.tokens))
        if self.request.stream or output.tokens[:known] != self.tokens[:known] or known < len(self.tokens):
            self._begin(output.attempt, 0, 0)
        else:
            self._follows, self._repeated = output.attempt, (0, 0)

    def _resume(self) -> bool:
        """Go on with what was kept. False: there is a gap still."""
        kept, self._kept = self._kept, []
        for i, delta in enumerate(kept):
            if delta.attempt >= self.attempt and not self.over and not self._continue(delta):
                self._kept = kept[i:]
                return False
        self._filling = False
        self._filling = not self._conclude()
        if self.attached:
            self._count = metrics.stream_tokens.labels(self.request.model).inc
        return not self._filling

    def _conclude(self) -> bool:
        """End it, if its ending came. False: not yet, a part of its output is missing."""
        if self.over or self._late is None:
            return True
        if not self._is_whole(self._late):
            return False
        self._close(Ended(self._late))
        return True

    def _is_whole(self, ending: Ending) -> bool:
        if ending.outcome not in DELIVERED:
            return not (self.attached and self._filling)
        if self.request.task == "embed":  # it has no tokens to be counted
            return len({kind for _, _, kind in self._begins}) >= self.request.width
        if ending.usage.output_tokens == 0 and not self.tokens:
            return True
        follows = self._follows == ending.attempt and self._repeated is None
        return follows and len(self.tokens) >= ending.usage.output_tokens

    def break_off(self, error: ForebayError) -> None:
        """Its reader is to go."""
        with self._lock:
            if self._read:
                self._close(Broken(error))

    def move(self) -> None:
        """It goes on at another reader, here or at another gateway."""
        with self._lock:
            self.moved = True
            self._close(Broken(RequestFailed("This stream goes on at another connection.", code="stream_moved")))

    def linger(self) -> None:
        """Its reader has gone and may come back: tokens and text are kept, events are not."""
        with self._lock:
            self.over = self._read = False
            self._forget_events()
            if self._filling:  # a stream that is over is not filled
                self._lost(self)
            self._settle()

    def _forget_events(self) -> None:
        """But the last, which may be what tells its reader to go."""
        last: Event | None = None
        while not self._events.empty():
            last = self._events.get()
        if last is not None:
            self._events.put(last)

    def fail(self, error: ForebayError) -> None:
        """It cannot go on, for whatever reader."""
        with self._lock:
            self._fail(error)

    def _fail(self, error: ForebayError) -> None:
        self.failed = True
        self._close(Broken(error))

    def _close(self, last: Ended | Broken) -> None:
        if self.over:
            return
        self.over, self._kept, self._live = True, [], -1
        if isinstance(last, Ended):
            self.ending = last.ending
            if self._told < len(self._logprobs):  # of tokens without a character
                self._put(Text("", len(self.tokens), self._kind or "text", self._fresh_logprobs()))
        self._put(_as_told(last))

    # --- what the watch sees

    def waits(self, place: int, estimate_ms: int | None = None, worker: Starting | None = None) -> None:
        """Its place; said when it changes, and when something becomes known of the wait."""
        said = (place, estimate_ms is not None, worker and (worker.state, worker.detail))
        if said != self._waits and not self.over:
            self._waits = said
            self._put(Waiting(place, estimate_ms, worker))

    def keep_alive(self, now_s: float, every_s: float = KEEPALIVE_S) -> None:
        """Say Idle after so much silence. Called by the watch: a time-out of the reader's own would cost a
        timer for every token."""
        said = (len(self.tokens), self._waits)
        if not self._events.empty() or self._said != said:
            self._said, self._spoke_s = said, now_s
        elif now_s - self._spoke_s >= every_s:
            self._spoke_s = now_s
            self._put(Idle())

    def _put(self, event: Event) -> None:
        if self._read:
            self._events.put(event)

    # --- the reader's side

    def next(self, timeout_s: float | None = None) -> Event | None:
        """The next event; texts that wait are one. None: nothing came in time."""
        event, self._next = self._next, None
        if event is None:
            self._waited = True
            try:
                event = self._events.get(timeout=timeout_s)
            except queue.Empty:
                return None
            finally:
                self._waited = False
        if not isinstance(event, Text) or self._events.empty():
            return event
        texts = [event]
        while not self._events.empty():
            after = self._events.get()
            if not isinstance(after, Text) or after.kind != event.kind:
                self._next = after
                break
            texts.append(after)
        return event if len(texts) == 1 else _merged(texts)


#: What the reader is told of an ending with such a message: its worker was quicker than this gateway (web/stopping.py).
_STOPPED = {CALLER_STOPPED["revoked"]: KeyRevoked, CALLER_STOPPED["suspended"]: OrganisationSuspended}


def _as_told(last: Ended | Broken) -> Ended | Broken:
    if isinstance(last, Ended) and last.ending.outcome == Outcome.CANCELLED and last.ending.message in _STOPPED:
        return Broken(_STOPPED[last.ending.message]())
    return last


def _merged(texts: list[Text]) -> Text:
    last = texts[-1]
    logprobs = tuple(chain.from_iterable(text.logprobs for text in texts))
    return Text("".join([text.text for text in texts]), last.offset, last.kind, logprobs)


def _nothing(tokens: int) -> None:
    """Tokens that were counted where they were relayed first."""
