"""The frame codec: what one engine step sends to one gateway, and what all of it comes to. Pure.

    Frame   msgpack map   {v, worker, deltas: [Delta], endings: [Ending], takeovers: [Takeover]}
    Delta   msgpack array [id, attempt, offset, tokens, text, at, kind, cut, finish]

A worker's frames carry deltas; the queue's scripts send frames with an ending or a takeover. A Delta is an array,
since there is one for every token streamed; new fields go at its end, with a default, and old readers skip them.
`offset` is the index of the delta's first token in the request's output, and `at` of its first character (the text
of one token may come with a later one), so whoever reads knows what it misses and what it has already.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec

from core.values import Ending

VERSION = 1


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """One request's new piece."""

    id: str
    attempt: int
    offset: int
    tokens: tuple[int, ...]
    text: str
    at: int = 0
    kind: str = "text"  #: text | reasoning | tool_call
    cut: str = ""  #: on the first delta of a second or later attempt: hash of the token ids before `offset`
    finish: str = ""  #: on an output's last delta: "stop" or "length"; whoever takes over then has nothing to generate


class Takeover(msgspec.Struct, frozen=True):
    """A worker has claimed a request that another had delivered a part of: older attempts are fenced from here on."""

    id: str
    attempt: int


class Frame(msgspec.Struct, frozen=True):
    """The deltas of one step for one gateway, or endings, or takeovers."""

    v: int = VERSION
    worker: str = ""
    deltas: tuple[Delta, ...] = ()
    endings: tuple[Ending, ...] = ()
    takeovers: tuple[Takeover, ...] = ()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode(frame: Frame) -> bytes:
    return _encoder.encode(frame)


def decode(raw: bytes) -> Frame:
    """Read a frame of this version or an older one.

    Raises:
      msgspec.DecodeError: it is no frame.
    """
    return _decoder.decode(raw)


def cut_of(tokens: Iterable[int]) -> str:
    """The hash of the token ids before a cut. Both sides of a hand-over make it, and a difference ends the stream."""
    return blake2b(array("I", tokens).tobytes(), digest_size=8).hexdigest()


@dataclass
class Output:
    """What was delivered of one request, put together from saved output and logs, in that order."""

    request_id: str
    attempt: int = 0
    tokens: array[int] = field(default_factory=lambda: array("I"))
    deltas: list[Delta] = field(default_factory=list)  #: that make it up, in order, without a gap or a repeat
    chars: int = 0
    finish: str = ""  #: how it ended, when its last delta is among them

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    def add(self, deltas: Iterable[Delta]) -> None:
        """Take what continues the output; what is known or belongs to an older attempt is passed over."""
        for delta in deltas:
            if delta.id != self.request_id or delta.attempt < self.attempt:
                continue
            if delta.attempt > self.attempt:
                self._cut_back(delta)
            self._continue(delta)

    def _continue(self, delta: Delta) -> None:
        """Take what of it is new: a save made again after a lost reply may begin before what is missing."""
        known, shown = len(self.tokens) - delta.offset, self.chars - delta.at
        if known < 0 or shown < 0:
            return  # a gap: what lies between is nowhere
        if known or shown:
            tokens, text = delta.tokens[known:], delta.text[shown:]
            offset, at = len(self.tokens), self.chars
            delta = msgspec.structs.replace(delta, offset=offset, at=at, tokens=tokens, text=text, cut="")
        if delta.tokens or delta.text or (delta.finish and not self.finish):
            self._take(delta)

    def _take(self, delta: Delta) -> None:
        self.tokens.extend(delta.tokens)
        self.chars += len(delta.text)
        self.finish = delta.finish or self.finish
        self.deltas.append(delta)

    def _cut_back(self, delta: Delta) -> None:
        """A newer attempt begins here: what an older one had beyond is not the output."""
        self.attempt, self.finish = delta.attempt, ""
        while self.deltas and (len(self.tokens) > delta.offset or self.chars > delta.at):
            last = self.deltas.pop()
            del self.tokens[last.offset :]
            self.chars = last.at
            if last.offset <= delta.offset and last.at <= delta.at:
                tokens, text = last.tokens[: delta.offset - last.offset], last.text[: delta.at - last.at]
                if tokens or text:
                    self._take(msgspec.structs.replace(last, tokens=tokens, text=text, finish=""))
                return
