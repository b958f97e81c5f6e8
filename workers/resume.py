"""Where an attempt goes on from what earlier ones delivered. Pure.

The cut is a token boundary whose text is whole: an engine that is given half a character as the end of its prompt
would take it for the prompt's, and give text of the prompt as output. What an earlier attempt had held back, because
a stop string might have begun in it, was delivered to nobody: a resumed attempt delivers it, and looks for the stop
strings itself, since the engine sees only what comes after the cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from core.stream.frames import Delta, Output
from core.values import Request
from workers.engine import Piece

#: Output token ids -> their text, as the engine's own detokenizer would give it.
Decode = Callable[[Sequence[int]], str]

#: Most tokens by which a cut is moved back: no character has more bytes.
BACK_TOKENS = 4

#: What a decoder puts where a character is not whole.
_BROKEN = "\ufffd"


class StopMatcher:
    """Looks for stop strings in text that comes in pieces. The match that is complete first wins, then list order."""

    def __init__(self, stop: Sequence[str], text: str = "") -> None:
        """`text`: decoded and not delivered yet."""
        self._stop = tuple(filter(None, stop))
        self._hold = max(map(len, self._stop), default=1) - 1
        self._text = ""
        self._passed = 0  #: characters given out
        self.end: int | None = None  #: of the match, in characters from the first one
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
        ends = [(at + len(stop), at) for stop in self._stop if (at := self._text.find(stop)) >= 0]
        if ends:
            end, at = min(ends, key=lambda match: match[0])
            self.end = self._passed + end
            self._text = self._text[:at]

    def _give(self, chars: int) -> str:
        ready, self._text = self._text[:chars], self._text[chars:]
        self._passed += chars
        return ready


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How an attempt begins."""

    tokens: tuple[int, ...] = ()  #: delivered, and gone on from; the cut is after them
    at: int = 0  #: characters delivered
    held: str = ""  #: text of these tokens that was not delivered
    finish: str = ""  #: the output had come to its end

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

    def marker(self, output: Output, attempt: int, saved_tokens: int, saved_chars: int) -> Delta:
        """What the new attempt saves before it delivers anything: the rest of what was delivered, under its own number,
        so that nothing an older attempt still saves is taken."""
        offset, at = min(saved_tokens, self.cut), min(saved_chars, self.at)
        text = output.text[at : self.at]
        return Delta(output.request_id, attempt, offset, self.tokens[offset:], text, at, finish=output.finish)


def plan(request: Request, output: Output, decode: Decode) -> Plan:
    """Go on from the output, or begin anew, or end at once."""
    tokens = tuple(output.tokens)
    if output.finish:
        return Plan(tokens=tokens, at=output.chars, finish=output.finish)
    full = len(tokens) >= request.sampling.max_tokens
    if not tokens or not (full or request.sampling.resumable):
        return Plan()
    cut, text = (len(tokens), decode(tokens).rstrip(_BROKEN)) if full else _whole(tokens, decode)
    delivered = output.text
    # A decoder that gives other text than was streamed: the tokens are right all the same, and nothing is shown twice.
    held = text[len(delivered) :] if text.startswith(delivered) else ""
    matcher = StopMatcher(request.sampling.stop, held)
    if matcher.end is not None:
        cut = completed_by(matcher.end + len(delivered), tokens, decode)
        return Plan(tokens=tokens[:cut], at=len(delivered), held=matcher.rest(), finish="stop")
    return Plan(tokens=tokens[:cut], at=len(delivered), held=held, finish="length" if full else "")


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


class Seam:
    """The pieces of a resumed attempt, joined to what was delivered before the cut."""

    def __init__(self, begun: Plan, request: Request, decode: Decode) -> None:
        self._plan, self._decode = begun, decode
        self._tokens = list(begun.tokens)
        self._stops = StopMatcher(request.sampling.stop, begun.held) if begun.tokens else None

    def join(self, piece: Piece) -> Piece:
        """The piece as its reader is to have it."""
        if self._stops is None:
            return piece
        known = len(self._tokens)
        self._tokens += piece.tokens
        text = self._stops.add(piece.text)
        if self._stops.end is not None:
            return self._stopped(piece, text, known, self._plan.at + self._stops.end)
        if piece.finish is not None:
            text += self._stops.rest()
        return msgspec.structs.replace(piece, text=text)

    def _stopped(self, piece: Piece, text: str, known: int, chars: int) -> Piece:
        """Tokens count up to the one that completed the stop string; a slow reader's piece may have more."""
        tokens = piece.tokens
        if len(tokens) > 1:
            tokens = tokens[: completed_by(chars, self._tokens, self._decode, known + 1) - known]
        return msgspec.structs.replace(piece, tokens=tokens, text=text, finish="stop")
