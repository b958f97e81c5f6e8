"""The frame codec: what one engine step sends to one gateway. Pure.

    Frame   msgpack map   {v, worker, deltas: [Delta], endings: [Ending], takeovers: [Takeover]}
    Delta   msgpack array [id, attempt, offset, tokens, text, at, kind, cut]

A worker's frames carry deltas; the queue's scripts send frames with an ending or a takeover. A Delta is an array,
since there is one for every token streamed; new fields go at its end, with a default, and old readers skip them.
`offset` is the index of the delta's first token in the request's output, and `at` of its first character (the text
of one token may come with a later one), so whoever reads knows what it misses and what it has already.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
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
    cut: str = ""  #: on an attempt's first delta: hash of the token ids before `offset`


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
