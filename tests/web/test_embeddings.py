"""Embeddings: texts in, vectors out, one for each."""

from __future__ import annotations

import base64
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import CreateEmbeddingResponse

from core.catalog import Model
from core.errors import BadRequest, ForebayError, RequestFailed
from core.stream.frames import Run
from core.values import ANSWERED, Outcome
from tests.web.answers import ending, json_values
from web import bounds
from web.dialects import chat, embeddings


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "input": "a", **fields}


def vector(*numbers: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()


@pytest.mark.parametrize(
    ("given_", "prompts"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1], [2]], ((1,), (2,)))],
)
def test_an_input_has_four_forms(given_: object, prompts: tuple[Any, ...]) -> None:
    draft = embeddings.parse(body(input=given_))

    assert (draft.prompts, draft.width, draft.stream) == (prompts, len(prompts), False)


def test_null_is_unset_for_every_optional_field() -> None:
    optional = set(embeddings.EmbeddingsBody.model_fields) - {"model", "input"} | set(embeddings._UNSERVED)

    assert embeddings.parse(body(**dict.fromkeys(optional))) == embeddings.parse(body())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": "\ud800"}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "text"}]}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 64}, "dimensions"),
        ({"stream": True}, "stream"),
        ({"user": 5}, "user"),
        ({"model": None}, "model"),
    ],
)
def test_a_bad_field_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        embeddings.parse(body(**fields))

    assert (caught.value.status, caught.value.param) == (400, param)


@given(st.dictionaries(st.sampled_from([*embeddings.EmbeddingsBody.model_fields]), json_values, max_size=4))
def test_any_body_is_a_draft_or_a_bad_request(fields: dict[str, Any]) -> None:
    try:
        embeddings.parse(body() | fields)
    except BadRequest as e:
        f"{e.message}{e.param}".encode()


def test_one_vector_comes_as_numbers_or_as_base64() -> None:
    runs = [Run("embedding", vector(0.5, -1.0))]

    plain = embeddings.whole(runs, ending(), embeddings.parse(body()))
    CreateEmbeddingResponse.model_validate(plain, strict=True)
    assert plain == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [0.5, -1.0]}],
        "model": "m",
        "usage": {"prompt_tokens": 7, "total_tokens": 7},
    }
    packed = embeddings.whole(runs, ending(), embeddings.parse(body(encoding_format="base64")))
    assert packed["data"][0]["embedding"] == vector(0.5, -1.0)


@given(st.permutations(range(5)))
def test_vectors_come_in_the_order_of_their_inputs(order: list[int]) -> None:
    """However the worker made them, and however a run was cut."""
    whole = "".join(f"{index}" for index in order)
    runs = [Run(f"{index}/embedding", vector(index)) for index in order]
    answer = embeddings.whole(runs, ending(), embeddings.parse(body(input=list(whole))))

    assert [(each["index"], each["embedding"]) for each in answer["data"]] == [(n, [float(n)]) for n in range(5)]


def test_an_answer_that_lacks_a_vector_is_none() -> None:
    with pytest.raises(RequestFailed):
        embeddings.whole([Run("0/embedding", vector(1.0))], ending(), embeddings.parse(body(input=["a", "b"])))


@pytest.mark.parametrize("outcome", sorted(set(Outcome) - ANSWERED))
def test_a_failure_is_an_error(outcome: Outcome) -> None:
    """It says why; what an operator shed is told what to do instead, and not whose doing it was."""
    with pytest.raises(ForebayError, match="not served for the moment" if outcome == Outcome.SHED else "why"):
        embeddings.whole([], ending(outcome, message="why"), embeddings.parse(body()))


def test_a_model_does_what_it_is_for_and_nothing_else() -> None:
    embedding, answering = Model(name="e", context_tokens=64, kind="embedding"), Model(name="c", context_tokens=64)
    asked = embeddings.parse(body(input=["a"] * 2048))
    said = chat.parse({"model": "m", "messages": [{"role": "user", "content": "hi"}]})

    bounds.check(embedding, asked)
    bounds.check(answering, said)
    for model, draft in ((embedding, said), (answering, asked)):
        with pytest.raises(BadRequest) as caught:
            bounds.check(model, draft)
        assert (caught.value.param, caught.value.error_code) == ("model", "unsupported_model")
