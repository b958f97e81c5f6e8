"""OpenAI's older completions: prompts as they are, and text that goes on from them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion

from core.errors import BadRequest, ForebayError
from core.stream.frames import Logprob, Run
from core.values import ANSWERED, Caller, Ending, Outcome, Sampling
from tests.web.answers import ID, Answered, answers, chunk_of, cut, edges, ending, json_values, run
from web.dialects import completions
from web.dialects.draft import Draft
from web.dialects.framing import CompletionsFraming, Numbered
from web.dialects.view import decode, encode, view_of


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": "Once", **fields}


def refusal(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        completions.parse(body(**fields))
    return caught.value


def framed(asked: Draft, runs: Sequence[Run], last: Ending, **options: Any) -> list[Numbered]:
    framing = CompletionsFraming(ID, asked, **options)
    chunks = [one for one in framing.began() if isinstance(one, Numbered)]
    for piece in runs:
        chunks += framing.text(piece)
    return chunks + framing.ending(last)


def test_a_bare_body_asks_for_sixteen_tokens() -> None:
    """So it is at OpenAI and in vLLM, for a client that sends null too (vllm#19862)."""
    draft = completions.parse(body())
    optional = set(completions.CompletionsBody.model_fields) - {"model", "prompt"} | set(completions._UNSERVED)

    assert (draft.prompts, draft.max_tokens, draft.sampling) == (("Once",), 16, Sampling(max_tokens=0))
    assert not draft.reasons, "what a prompt goes on with is text, whatever it looks like"
    assert completions.parse(body(**dict.fromkeys(optional))) == draft


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("", ("",)),
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        (["a", [1]], ("a", (1,))),
        (["a"] * 16, ("a",) * 16),
    ],
)
def test_a_prompt_has_four_forms(prompt: object, prompts: tuple[Any, ...]) -> None:
    draft = completions.parse(body(prompt=prompt))

    assert (draft.prompts, draft.width) == (prompts, len(prompts))


def test_the_knobs_of_completions() -> None:
    draft = completions.parse(
        body(n=2, best_of=2, logprobs=0, max_tokens=5, suffix="", stop=["a"], logit_bias={"1": 1}, service_tier="flex")
    )

    assert draft.sampling == Sampling(max_tokens=0, logprobs=0, stop=("a",), logit_bias={1: 1.0})
    assert (draft.n, draft.max_tokens, draft.tier) == (2, 5, "flex")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", None]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[-1]]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [2**31]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": ["a\0"]}, "prompt"),
        ({"prompt": ["a"] * 17}, "prompt"),
        ({"prompt": ["a"] * 16, "n": 16}, "n"),
        ({"n": 17}, "n"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": "yes"}, "echo"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"echo": True, "prompt": [1]}, "echo"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_a_bad_field_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    """Negative token ids among them, which an engine takes for something else (vllm#35231)."""
    error = refusal(**fields)

    assert (error.status, error.param) == (400, param)
    assert param in error.message and "pydantic" not in error.message


@given(
    st.dictionaries(
        st.sampled_from([*completions.CompletionsBody.model_fields, *completions._UNSERVED]), json_values, max_size=4
    )
)
def test_any_body_is_a_draft_or_a_bad_request(fields: dict[str, Any]) -> None:
    try:
        completions.parse(body() | fields)
    except BadRequest as e:
        f"{e.message}{e.param}".encode()


asked = st.builds(
    lambda usage, echo: completions.parse(body(stream_options={"include_usage": usage}, echo=echo)),
    st.booleans(),
    st.booleans(),
)


def of_width(draft: Draft, answered: Answered) -> Draft:
    return msgspec.structs.replace(draft, n=answered.width)


def put_together(chunks: Sequence[dict[str, Any]]) -> dict[Any, Any]:
    whole: dict[Any, Any] = {}
    for chunk in chunks:
        for name in ("usage", "error"):
            if chunk.get(name):
                whole[name] = chunk[name]
        for choice in chunk.get("choices", []):
            own = whole.setdefault(choice["index"], {"text": "", "finish_reason": None, "logprobs": None})
            own["text"] += choice["text"]
            own["finish_reason"] = own["finish_reason"] or choice["finish_reason"]
            if choice["logprobs"]:
                own["logprobs"] = own["logprobs"] or {name: [] for name in choice["logprobs"]}
                for name, values in choice["logprobs"].items():
                    own["logprobs"][name] += values
    return whole


@given(asked, answers(), edges)
def test_the_chunks_of_a_stream_come_to_what_a_whole_answer_says(
    draft: Draft, answered: Answered, at: set[int]
) -> None:
    draft = of_width(draft, answered)
    chunks = [chunk_of(one) for one in framed(draft, cut(answered.runs, at), answered.ending)]
    whole = CompletionsFraming(ID, draft).whole(answered.runs, answered.ending)

    Completion.model_validate(whole, strict=True)
    for chunk in (*chunks, whole):
        assert (chunk["object"], chunk["id"]) == ("text_completion", "cmpl-" + ID.replace("-", ""))
        assert all("finish_reason" in choice and "logprobs" in choice for choice in chunk["choices"])
    got = put_together(chunks)
    assert got.pop("usage", None) == (whole["usage"] if draft.include_usage else None)
    assert got == put_together([{"choices": whole["choices"]}])
    assert all(chunk.get("usage") is None for chunk in chunks[:-1])
    assert (chunks[-1]["choices"] == []) is draft.include_usage


@given(answers(), edges, edges, st.data(), st.sampled_from(Outcome))
def test_what_a_client_that_comes_back_is_told_is_what_it_missed(
    answered: Answered, here: set[int], there: set[int], data: st.DataObject, outcome: Outcome
) -> None:
    draft = of_width(completions.parse(body(echo=True)), answered)
    shown = decode(encode(view_of(draft, Caller(org_id="o", project_id="p", key_id="k"))))
    first = framed(draft, cut(answered.runs, here), ending(outcome))
    had = data.draw(st.sampled_from([n for n, one in enumerate(first, 1) if one.cursor is not None]))
    after = first[had - 1].cursor

    again = framed(shown, cut(answered.runs, there), ending(outcome), after=after)

    assert all(a < b for a, b in pairwise(one.cursor for one in first if one.cursor is not None))
    both = [chunk_of(one) for one in first[:had] + again]
    assert put_together(both) == put_together([chunk_of(one) for one in first])


def test_the_prompt_is_repeated_where_it_is_asked_for() -> None:
    draft = completions.parse(body(prompt=["a", "b"], n=2, echo=True))
    runs = [run(f"{index}/text", str(index)) for index in range(4)]

    whole = CompletionsFraming(ID, draft).whole(runs, ending())
    assert [choice["text"] for choice in whole["choices"]] == ["a0", "a1", "b2", "b3"]
    assert put_together([chunk_of(one) for one in framed(draft, runs, ending())])[3]["text"] == "b3"


def test_no_prompt_is_put_down() -> None:
    draft = completions.parse(body(prompt="a secret", echo=True))

    assert b"secret" not in encode(view_of(draft, Caller(org_id="o", project_id="p", key_id="k")))


def test_thoughts_are_text_here_and_a_stop_string_is_not() -> None:
    runs = [run("reasoning", "Hm. "), run("text", "Yes"), run("stop", "!")]

    assert CompletionsFraming(ID, completions.parse(body())).whole(runs, ending())["choices"][0]["text"] == "Hm. Yes"


def test_tokens_are_told_in_four_lists() -> None:
    tokens = (Logprob("On", -0.5, (("On", -0.5), ("At", -1.5))), Logprob("ce", float("-inf"), ()))
    whole = CompletionsFraming(ID, completions.parse(body(logprobs=2))).whole([Run("text", "Once", tokens)], ending())

    assert whole["choices"][0]["logprobs"] == {
        "tokens": ["On", "ce"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [{"On": -0.5, "At": -1.5}, {"ce": -9999.0}],
        "text_offset": [0, 2],
    }


@pytest.mark.parametrize("outcome", sorted(set(Outcome) - ANSWERED))
def test_a_failure_is_an_error_object_and_never_a_finish_reason(outcome: Outcome) -> None:
    draft, last = completions.parse(body()), ending(outcome, message="why")
    chunks = [chunk_of(one) for one in framed(draft, [run("text", "Hel")], last)]

    why = "are not served" if outcome == Outcome.SHED else "why"  # an operator's reason is nobody else's business
    assert set(chunks[-1]) == {"error"} and why in chunks[-1]["error"]["message"]
    with pytest.raises(ForebayError, match=why):
        CompletionsFraming(ID, draft).whole([], last)
