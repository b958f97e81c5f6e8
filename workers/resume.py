"""Where an attempt goes on from what earlier ones delivered. Pure.

The cut is a token boundary whose text is whole: an engine that is given half a character as the end of its prompt
would take it for the prompt's, and give text of the prompt as output. What an earlier attempt had held back, because
a stop string might have begun in it, was delivered to nobody: a resumed attempt delivers it, and looks for the stop
strings itself, since the engine sees only what comes after the cut.

Where a reader tells calls and thinking from the answer, what was delivered is no longer the text of the tokens. A fresh
reader reads them again then, and what it says must begin with what was delivered: only what lies beyond that is put.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from core.stream.frames import Delta, Logprob, Output, Run
from core.values import Request
from workers.engine import Piece

#: Output token ids -> their text, as the engine's own detokenizer would give it.
Decode = Callable[[Sequence[int]], str]

#: Token ids that come before, and output token ids -> the text of these there.
DecodeAfter = Callable[[Sequence[int], Sequence[int]], str]

#: Tokens before others that their text may depend on.
BEFORE_TOKENS = 32

#: Most tokens by which a cut is moved back: no character has more bytes.
BACK_TOKENS = 4

#: What a decoder puts where a character is not whole.
_BROKEN = "\ufffd"


class Differs(Exception):
    """What is read now is not what was delivered: going on would splice two answers."""


class StopMatcher:
    """Looks for stop strings in text that comes in pieces. The match that is complete first wins, then list order."""

    def __init__(self, stop: Sequence[str], text: str = "") -> None:
        """`text`: decoded and not delivered yet."""
        self._stop = tuple(filter(None, stop))
        self._hold = max(map(len, self._stop), default=1) - 1
        self._text = ""
        self._passed = 0  #: characters given out
        self.end: int | None = None  #: of the match, in characters from the first one
        self.stop = ""  #: what matched
        self._take(text)

    @property
    def found(self) -> bool:
        return self.end is not None

    def add(self, text: str) -> str:
        """What is now known to lie before any stop string."""
        self._take(text)
        return self._give(len(self._text) if self.found else max(0, len(self._text) - self._hold))

    def rest(self) -> str:
        """No more text comes."""
        return self._give(len(self._text))

    def _take(self, text: str) -> None:
        if self.found:
            return
        self._text += text
        ends = [(at + len(stop), at, stop) for stop in self._stop if (at := self._text.find(stop)) >= 0]
        if ends:
            end, at, self.stop = min(ends, key=lambda match: match[0])
            self.end = self._passed + end
            self._text = self._text[:at]

    def _give(self, chars: int) -> str:
        ready, self._text = self._text[:chars], self._text[chars:]
        self._passed += chars
        return ready


@dataclass(eq=False)
class Parts:
    """Part of one attempt's output, as few deltas: one for each change of kind."""

    request_id: str
    attempt: int
    offset: int  #: of its first token, and of its first character
    at: int
    parts: list[Part] = field(default_factory=list)

    def add(self, kind: str, tokens: Sequence[int], text: str, logprobs: Sequence[Logprob] = ()) -> None:
        """More of it. Tokens without a character belong to what is there."""
        if not (tokens or text):
            return
        if not self.parts or (kind != self.parts[-1].kind and text):
            self.parts.append(Part(kind))
        part = self.parts[-1]
        part.tokens += tokens
        part.text += text
        if logprobs:
            part.logprobs += logprobs

    def deltas(self, finish: str = "") -> list[Delta]:
        """All of it; of nothing, one without anything."""
        offset, at = self.offset, self.at
        made, last = [], len(self.parts) - 1
        for n, part in enumerate(self.parts or [Part("text")]):
            end, tokens, logprobs = finish if n >= last else "", tuple(part.tokens), tuple(part.logprobs)
            made.append(
                Delta(self.request_id, self.attempt, offset, tokens, part.text, at, part.kind, "", end, logprobs)
            )
            offset, at = offset + len(tokens), at + len(part.text)
        return made

    def forget(self, deltas: Sequence[Delta]) -> None:
        """These, which `deltas` gave, are no longer part of it; it may have grown since."""
        for delta in deltas:
            self.offset, self.at = self.offset + len(delta.tokens), self.at + len(delta.text)
            if self.parts:
                part = self.parts[0]
                del part.tokens[: len(delta.tokens)], part.logprobs[: len(delta.logprobs)]
                part.text = part.text[len(delta.text) :]
                if not (part.tokens or part.text):
                    del self.parts[0]


@dataclass(eq=False)
class Part:
    """Characters of one kind that follow one another, and the tokens that they came with."""

    kind: str
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Logprob] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How an attempt begins."""

    tokens: tuple[int, ...] = ()  #: delivered, and gone on from; the cut is after them
    at: int = 0  #: characters delivered
    held: str = ""  #: text of these tokens that was not delivered
    finish: str = ""  #: the output had come to its end
    stop: str = ""  #: the stop string that it ended at, where that is still owed
    told: bool = False  #: its end was delivered, too
    runs: tuple[Run, ...] = ()  #: what was delivered, where a reader is to find it again

    @property
    def cut(self) -> int:
        return len(self.tokens)

    def request(self, request: Request) -> Request:
        """What the engine is asked: the output so far is part of the prompt, and stop strings are ours to find."""
        if not self.tokens:
            return request
        sampling = msgspec.structs.replace(request.sampling, max_tokens=request.sampling.max_tokens - self.cut, stop=())
        prompt = [*request.prompt_token_ids, *self.tokens]
        return msgspec.structs.replace(request, prompt_token_ids=prompt, sampling=sampling)

    def marker(self, output: Output, attempt: int, saved_tokens: int, saved_chars: int) -> list[Delta]:
        """What the new attempt saves before it delivers anything: the rest of what was delivered, under its own number,
        so that nothing an older attempt still saves is taken."""
        offset, at = min(saved_tokens, self.cut), min(saved_chars, self.at)
        rest = Parts(output.request_id, attempt, offset, at)
        for delta in output.deltas:
            first, last = max(0, offset - delta.offset), max(0, self.cut - delta.offset)
            text = delta.text[max(0, at - delta.at) : max(0, self.at - delta.at)]
            rest.add(delta.kind, delta.tokens[first:last], text, delta.logprobs[first:last])
        return rest.deltas(output.finish)


def plan(request: Request, output: Output, decode: Decode, *, reads: bool = False) -> Plan:
    """Go on from the output, or begin anew, or end at once. `reads`: its tokens go through a reader."""
    tokens, runs = tuple(output.tokens), tuple(output.runs) if reads else ()
    if output.finish:
        return Plan(tokens=tokens, at=output.chars, finish=output.finish, told=True, runs=runs)
    full = request.width == 1 and len(tokens) >= request.sampling.max_tokens
    if not tokens or not (full or request.resumable):
        return Plan()
    cut, text = (len(tokens), decode(tokens).rstrip(_BROKEN)) if full else _whole(tokens, decode)
    delivered = "" if reads else output.text
    # A decoder that gives other text than was streamed: the tokens are right all the same, and nothing is shown twice.
    held = text[len(delivered) :] if text.startswith(delivered) else ""
    matcher = StopMatcher(request.sampling.stop, held)
    finish = "length" if full else ""
    if matcher.end is not None:
        cut, held, finish = completed_by(matcher.end + len(delivered), tokens, decode), matcher.rest(), "stop"
    return Plan(tokens=tokens[:cut], at=output.chars, held=held, finish=finish, stop=matcher.stop, runs=runs)


def spelled(begun: Plan, prompt: Sequence[int], decode: DecodeAfter) -> Iterator[Piece]:
    """The tokens that were delivered, with their text: as an engine gives them that makes one in a step."""
    tokens, before = begun.tokens, [*prompt[-BEFORE_TOKENS:], *begun.tokens]
    began, skipped = 0, len(before) - len(tokens)
    for end in range(1, len(tokens) + 1):
        place = skipped + began
        text = decode(before[max(0, place - BEFORE_TOKENS) : place], tokens[began:end])
        if end < len(tokens) and text.endswith(_BROKEN) and end - began <= BACK_TOKENS:
            continue  # a character is not whole yet
        finish = begun.finish if end == len(tokens) and begun.finish else None
        yield Piece(tokens=tokens[began:end], text=text.rstrip(_BROKEN) if finish else text, finish=finish)
        began = end


class Delivered:
    """What was delivered, held against what a fresh reader says."""

    def __init__(self, runs: Iterable[Run] = ()) -> None:
        self._runs = [(run.kind, run.text) for run in reversed(list(runs)) if run.text]

    def beyond(self, runs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
        """What of these lies beyond it.

        Raises:
          Differs: what does not is something else.
        """
        new = ((kind, self._beyond(kind, text)) for kind, text in runs)
        return [(kind, text) for kind, text in new if text]

    def _beyond(self, kind: str, text: str) -> str:
        while text and self._runs:
            known, shown = self._runs.pop()
            chars = min(len(shown), len(text))
            if known != kind or shown[:chars] != text[:chars]:
                raise Differs
            if shown[chars:]:
                self._runs.append((known, shown[chars:]))
            text = text[chars:]
        return text


def _whole(tokens: tuple[int, ...], decode: Decode) -> tuple[int, str]:
    """The last boundary, and the text before it, at which no character is broken off."""
    for cut in range(len(tokens), max(-1, len(tokens) - BACK_TOKENS - 1), -1):
        text = decode(tokens[:cut])
        if not text.endswith(_BROKEN):
            return cut, text
    return len(tokens), decode(tokens).rstrip(_BROKEN)  # it is no character at all


def completed_by(chars: int, tokens: Sequence[int], decode: Decode, known: int = 0) -> int:
    """How many tokens it takes to have so many characters; `known` of them are too few, or nearly."""
    for count in range(known, len(tokens)):
        if len(decode(tokens[:count]).rstrip(_BROKEN)) >= chars:
            return count
    return len(tokens)


def said_until(tokens: Sequence[int], shown: str, piece: Piece, keep: int, decode: Decode) -> str:
    """What an output that ends inside a piece says beyond what was shown: the text of its first tokens, and what was
    held back of it because a stop string might have begun there. Nothing that came with a later token is in it.

    `tokens` and `shown`: of the pieces before; `keep`: tokens of this one that count, less than 0: as many of those
    before do not.
    """
    whole = [*tokens, *piece.tokens]
    made, kept = decode(whole), decode(whole[: len(tokens) + keep]).rstrip(_BROKEN)
    if made.startswith(shown + piece.text):
        upto = len(shown) + len(piece.text) if piece.stop else len(kept)  # what follows is the stop string
        return kept[len(shown) : upto]
    # A decoder that leaves special tokens out, which the stream has: what is surely of later tokens is cut off.
    dropped = made.rstrip(_BROKEN)[len(kept) :]
    if keep >= len(piece.tokens):
        return piece.text
    return piece.text[: -len(dropped)] if dropped and piece.text.endswith(dropped) else ""


class Seam:
    """The pieces of a resumed attempt, joined to what was delivered before the cut."""

    def __init__(self, begun: Plan, request: Request, decode: Decode, *, reads: bool = False) -> None:
        """`reads`: what was delivered is joined as well, piece by piece, before what the engine gives."""
        self._at, self._decode = 0 if reads else begun.at, decode
        self._tokens = [] if reads else list(begun.tokens)
        self._stops = StopMatcher(request.sampling.stop, "" if reads else begun.held) if begun.tokens else None

    def join(self, piece: Piece) -> Piece:
        """The piece as its reader is to have it."""
        if self._stops is None:
            return piece
        known = len(self._tokens)
        self._tokens += piece.tokens
        text = self._stops.add(piece.text)
        if self._stops.end is not None:
            return self._stopped(piece, text, known, self._at + self._stops.end, self._stops.stop)
        if piece.finish is not None:
            text += self._stops.rest()
        return msgspec.structs.replace(piece, text=text)

    def _stopped(self, piece: Piece, text: str, known: int, chars: int, stop: str) -> Piece:
        """Tokens count up to the one that completed the stop string; a slow reader's piece may have more."""
        tokens = piece.tokens
        if len(tokens) > 1:
            tokens = tokens[: completed_by(chars, self._tokens, self._decode, known + 1) - known]
        logprobs = piece.logprobs[: len(tokens)]
        return msgspec.structs.replace(piece, tokens=tokens, text=text, finish="stop", stop=stop, logprobs=logprobs)
