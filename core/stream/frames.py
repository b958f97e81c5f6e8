"""The frame codec: what one engine step sends to one gateway, and what all of it comes to. Pure.

    Frame   msgpack map   {v, worker, deltas: [Delta], endings: [Ending], takeovers: [Takeover]}
    Delta   msgpack array [id, attempt, offset, tokens, text, at, kind, cut, finish, logprobs]

A worker's frames carry deltas; the queue's scripts send frames with an ending or a takeover. A Delta is an array,
since there is one for every token streamed; new fields go at its end, with a default, and old readers skip them.
`offset` is the index of the delta's first token in the request's output, and `at` of its first character (the text
of one token may come with a later one), so whoever reads knows what it misses and what it has already.

An answer may be more than text. It is one string of characters all the same, cut into runs: a run's kind says what its
characters are, and `at` counts them all in the order they came. One step may give several deltas; the tokens are the
first one's.

    text         of the answer
    reasoning    what the model thinks before it
    call:N       the name of the function of the answer's call N, whole
    arguments:N  JSON, the arguments of that call
    stop         the stop string that ended it, which is not part of the answer
    end          "stop" or "length": an answer that is one of several has ended
    embedding    a vector: base64 of little-endian float32

Of one of several answers (n > 1, or several prompts) the kind is preceded by its number and a slash: "1/text".
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from itertools import chain
from typing import NamedTuple

import msgspec

from core.values import Ending

VERSION = 1


class Kind(NamedTuple):
    """A run's kind, read."""

    choice: int  #: which of several answers
    what: str
    call: int  #: which call of the answer


class Logprob(msgspec.Struct, frozen=True, array_like=True):
    """One token of the output, and what else it could have been."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()  #: the likeliest first


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """One request's new piece."""

    id: str
    attempt: int
    offset: int
    tokens: tuple[int, ...]
    text: str
    at: int = 0
    kind: str = "text"
    cut: str = ""  #: on the first delta of a second or later attempt: hash of the token ids before `offset`
    finish: str = ""  #: on an output's last delta: "stop" or "length"; whoever takes over then has nothing to generate
    logprobs: tuple[Logprob, ...] = ()  #: of these tokens, if they were asked for


class Run(msgspec.Struct, frozen=True):
    """Consecutive characters of one kind."""

    kind: str
    text: str
    logprobs: tuple[Logprob, ...] = ()


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


@lru_cache(maxsize=4096)
def kind_of(kind: str) -> Kind:
    """A kind that is not known reads as what it says, so that a newer worker's is passed over, not stumbled over."""
    choice, _, rest = kind.rpartition("/")
    what, _, call = rest.partition(":")
    return Kind(int(choice or 0), what, int(call or 0))


def joined(runs: Iterable[Run]) -> list[Run]:
    """The runs with neighbours of one kind put together; what has no characters belongs to what it follows."""
    whole: list[list[Run]] = []
    kind = ""  #: of the last one, once it has characters
    for run in runs:
        if not whole or (run.text and kind not in ("", run.kind)):
            whole.append([])
        whole[-1].append(run)
        kind = run.kind if run.text else kind
    return [_joined(some) for some in whole]


def _joined(some: list[Run]) -> Run:
    kind = next((run.kind for run in some if run.text), some[0].kind)
    logprobs = tuple(chain.from_iterable(run.logprobs for run in some))
    return Run(kind, "".join(run.text for run in some), logprobs)


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
        """Its characters, of whatever kind."""
        return "".join(delta.text for delta in self.deltas)

    @property
    def runs(self) -> list[Run]:
        return joined(Run(delta.kind, delta.text, delta.logprobs) for delta in self.deltas)

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
            delta = msgspec.structs.replace(
                delta, offset=offset, at=at, tokens=tokens, text=text, cut="", logprobs=delta.logprobs[known:]
            )
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
        beyond: list[Delta] = []
        while self.deltas and (len(self.tokens) > delta.offset or self.chars > delta.at):
            beyond.append(self.deltas.pop())
            del self.tokens[beyond[-1].offset :]
            self.chars = beyond[-1].at
        for last in reversed(beyond):  # the first may reach into what stays, and so may text without tokens after it
            offset, at = len(self.tokens), self.chars
            tokens, text = last.tokens[: delta.offset - offset], last.text[: delta.at - at]
            if tokens or text:
                logprobs = last.logprobs[: len(tokens)]
                self._take(
                    msgspec.structs.replace(
                        last, offset=offset, at=at, tokens=tokens, text=text, finish="", logprobs=logprobs
                    )
                )
