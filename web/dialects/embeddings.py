"""OpenAI's embeddings: texts in, vectors out, one for each."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, WithJsonSchema

from core.errors import RequestFailed
from core.stream.frames import Run, kind_of
from core.values import ANSWERED, Ending
from web.dialects.draft import UNSERVED, Asked, Count, Draft, error_of, not_served, validated
from web.dialects.prompts import Prompt, PromptForms, at_most, prompts

INPUTS_MAX = 2048  #: in a request, as at OpenAI

_UNSERVED: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "messages": (),
    "truncate_prompt_tokens": UNSERVED["truncate_prompt_tokens"],
    "add_special_tokens": (True,),
}


class EmbeddingsBody(Asked):
    input: Annotated[
        tuple[Prompt, ...], BeforeValidator(prompts, json_schema_input_type=PromptForms), at_most(INPUTS_MAX)
    ]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[Count | None, WithJsonSchema({"type": "null"})] = None


def parse(body: object) -> Draft:
    """The draft that an embeddings body asks for.

    Raises:
      BadRequest: the first fault, naming its field.
    """
    asked = validated(EmbeddingsBody, body, _UNSERVED)
    if asked.dimensions is not None:
        raise not_served("dimensions", "leave it out: a vector has as many as the model gives it")
    return Draft(
        dialect="embeddings", prompts=asked.input, echo={"encoding_format": asked.encoding_format}, **asked.facts()
    )


def whole(runs: Iterable[Run], ending: Ending, draft: Draft) -> dict[str, Any]:
    """The answer.

    Raises:
      ForebayError: it ended without one.
    """
    if ending.outcome not in ANSWERED:
        raise error_of(ending)
    vectors: dict[int, str] = {}
    for run in runs:
        kind = kind_of(run.kind)
        if kind.what == "embedding":
            vectors[kind.choice] = vectors.get(kind.choice, "") + run.text
    if set(vectors) != set(range(draft.width)):
        raise RequestFailed("A part of the answer was lost on its way. Please retry.")
    tell = _floats if draft.echo["encoding_format"] == "float" else str
    used = {"prompt_tokens": ending.usage.input_tokens, "total_tokens": ending.usage.input_tokens}
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": tell(vectors[index])} for index in sorted(vectors)
        ],
        "model": draft.model,
        "usage": used,
    }


def _floats(vector: str) -> list[float]:
    raw = base64.b64decode(vector)
    return list(struct.unpack(f"<{len(raw) // 4}f", raw))
