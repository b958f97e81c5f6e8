"""Answers as workers give them, made up: runs of every kind, of one choice or several, cut anywhere."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

from hypothesis import strategies as st

from core.stream.frames import Logprob, Run, kind_of
from core.values import Ending, Outcome, Usage
from web.dialects.framing import Numbered

ID = "01939c1e-6f00-7abc-8def-0123456789ab"
USAGE = Usage(input_tokens=7, cached_tokens=4, output_tokens=3)

#: Anything that a body may have in a field.
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(), max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)

#: Kinds that come whole: a name, and how a choice ended.
WHOLE = ("call", "end")


def ending(outcome: Outcome = Outcome.COMPLETED, **fields: Any) -> Ending:
    return Ending(id=ID, attempt=1, outcome=outcome, usage=USAGE, **fields)


class Answered(NamedTuple):
    """What a worker gave, and the request's ending."""

    width: int
    runs: list[Run]
    ending: Ending


def run(kind: str, text: str, *, logprobs: bool = False) -> Run:
    """A run; with logprobs, every character is a token."""
    told = tuple(Logprob(each, -0.5, ((each, -0.5), ("x", float("-inf")))) for each in text) if logprobs else ()
    return Run(kind, text, told)


def cut(runs: Sequence[Run], edges: Iterable[int]) -> list[Run]:
    """The same in pieces, cut at these characters of the whole answer."""
    at, pieces = 0, []
    for one in runs:
        inner = {edge - at for edge in edges if at < edge < at + len(one.text)}
        bounds = [0, *sorted(inner), len(one.text)] if kind_of(one.kind).what not in WHOLE else [0, len(one.text)]
        pieces += [Run(one.kind, one.text[a:b], one.logprobs[a:b]) for a, b in pairwise(bounds)]
        at += len(one.text)
    return pieces


texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=6)
edges = st.sets(st.integers(1, 80))


def chunk_of(one: Numbered) -> dict[str, Any]:
    """A chunk of a stream, which may be JSON already."""
    chunk: dict[str, Any] = json.loads(one.chunk) if isinstance(one.chunk, bytes) else one.chunk
    return chunk


@st.composite
def answers(
    draw: st.DrawFn, width: int | None = None, *, plain: bool = False, logprobs: bool | None = None
) -> Answered:
    """`plain`: text only."""
    width = width or draw(st.integers(1, 3))
    told = draw(st.booleans()) if logprobs is None else logprobs
    each = [draw(_choice(index if width > 1 else None, plain, told)) for index in range(width)]
    outcome = draw(st.sampled_from([Outcome.COMPLETED, Outcome.LENGTH]))
    order = draw(st.permutations([index for index, runs in enumerate(each) for _ in runs]))
    sources = [iter(runs) for runs in each]
    return Answered(width, [next(sources[index]) for index in order], ending(outcome))


@st.composite
def _choice(draw: st.DrawFn, index: int | None, plain: bool, told: bool) -> list[Run]:
    prefix = "" if index is None else f"{index}/"
    kinds = ["text"] if plain else draw(st.lists(st.sampled_from(["reasoning", "text"]), max_size=3))
    runs = [run(prefix + kind, draw(texts), logprobs=told) for kind in kinds]
    calls = 0 if plain else draw(st.integers(0, 3))
    called = [
        [run(f"{prefix}call:{call}", "f" + str(call)), run(f"{prefix}arguments:{call}", draw(texts), logprobs=told)]
        for call in range(calls)
    ]
    runs += chain.from_iterable(called)
    if draw(st.booleans()):
        runs.append(run(prefix + "stop", draw(texts), logprobs=told))
    if draw(st.booleans()):
        runs.append(run(prefix + "unheard-of", draw(texts)))
    if index is not None:
        last = (Logprob("", -2.0),) if told else ()  # a token without a character
        runs.append(Run(prefix + "end", draw(st.sampled_from(["stop", "length"])), last))
    return runs
