"""How long answers come out: learned per key and model, one sketch for all who must reckon with them.

| key                      | type   | ttl    | writer                        | reader   | holds           |
|--------------------------|--------|--------|-------------------------------|----------|-----------------|
| f1:{model}:lengths       | STRING | TTL_MS | the worker, after each answer | gateways | counts per bin* |
| f1:{model}:lengths:<key> | STRING | TTL_MS | the same                      | the same | the same*       |

* a msgpack array; of everybody's answers, and of one API key's.

A sketch counts answers in BINS bins, each half an octave wide. At MODEL_MAX (KEY_MAX) answers its counts are halved, so
what was learned last weighs most and a sketch never grows: 34 small numbers.

Promise   none. An expectation too low costs the engine a recompute, one too high a slot that waits; what is charged and
          limited is counted, never expected. Nothing personal is in it.
Dies      worker: what it had not told yet is not learned. Store: nothing is known, and max_tokens stands in until a few
          answers have come. Cluster: one tag, the model's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from core.redis import Call, command, scripts, tag

_SCRIPTS = scripts(Path(__file__).with_name("lua"), shared=(), verbs=("learn",))

#: Bins of a sketch: 1, 2, 3, 4, 6, 8, 12, … up to 2^17 tokens.
BINS = 35
#: Answers after which a sketch's counts are halved.
KEY_MAX = 256
MODEL_MAX = 4096
#: A sketch of fewer answers says nothing.
ANSWERS_MIN = 8
#: How long a sketch lasts that learns nothing, ms.
TTL_MS = 14 * 24 * 3600 * 1000
#: The quantile that is taken for the length of an answer: three in ten come out longer.
EXPECTED = 0.7


class Lengths(msgspec.Struct, frozen=True):
    """What was learned of a key's answers, and of everybody's; the counts of each bin."""

    key: tuple[int, ...] = ()
    model: tuple[int, ...] = ()

    def quantile(self, q: float) -> int:
        """The length that this share of the answers does not exceed: the key's own, else everybody's; 0: not known."""
        for counts in (self.key, self.model):
            if sum(counts) >= ANSWERS_MIN:
                return _quantile(counts, q)
        return 0

    def expected(self, max_tokens: int) -> int:
        """What to reckon with for one more answer; 0: not known."""
        return min(self.quantile(EXPECTED), max_tokens)


def learn(model: str, key_id: str, output_tokens: int) -> Call[bool]:
    """An answer has ended well. May be lost, and may be told twice."""
    args = (_bin(output_tokens), BINS, TTL_MS, KEY_MAX, MODEL_MAX)
    return Call(script=_SCRIPTS["learn"], keys=_keys(model, key_id), args=args, reply=bool)


def lengths(model: str, key_id: str) -> Call[Lengths]:
    """What is known of such answers: one plain command."""
    return command("MGET", *_keys(model, key_id), reply=_lengths)


def _keys(model: str, key_id: str) -> tuple[str, str]:
    return f"{tag(model)}lengths:{key_id}", f"{tag(model)}lengths"


def _bin(tokens: int) -> int:
    """The bin that a length falls into."""
    return next((at for at in range(BINS - 1) if tokens <= _upper(at)), BINS - 1)


def _upper(at: int) -> int:
    """The longest length of a bin: half an octave longer than that of the bin before."""
    return math.ceil(2 ** (at / 2))


def _quantile(counts: Sequence[int], q: float) -> int:
    """Within the bin, lengths are taken to lie evenly."""
    wanted = q * sum(counts)
    for at, count in enumerate(counts):
        if wanted <= count:
            lower = _upper(at - 1) if at else 0
            return math.ceil(lower + (_upper(at) - lower) * wanted / count) if count else lower
        wanted -= count
    return _upper(len(counts) - 1)


def _lengths(raw: Sequence[Any]) -> Lengths:
    return Lengths(*(tuple(map(int, msgspec.msgpack.decode(one))) if one else () for one in raw))
