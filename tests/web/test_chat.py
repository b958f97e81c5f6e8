"""Chat completions: what a body may ask for, and what an answer looks like to the SDK."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from core.errors import BadRequest, ForebayError, GatewayLost, NotFound, WorkerLost
from core.outlook import Starting
from core.stream.frames import Logprob, Run
from core.values import ANSWERED, Caller, Class, Ending, Outcome, Sampling, WorkerState
from tests.web.answers import ID, Answered, answers, chunk_of, cut, edges, ending, json_values, run
from web.dialects import chat, responses
from web.dialects.draft import HARMFUL, Call, Draft, Message
from web.dialects.framing import ChatFraming, KeepAlive, Numbered
from web.dialects.view import decode, encode, view_of
from web.transports.http import comment_line, identified_lines

HEX = ID.replace("-", "")


SCHEMA = {"type": "json_schema"}


def nested(deep: int) -> Any:
    value: Any = []
    for _ in range(deep):
        value = [value]
    return value


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}


def refusal(asked: object) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        chat.parse(asked)
    return caught.value


def framed(asked: Draft, runs: Sequence[Run], last: Ending, **options: Any) -> list[Numbered]:
    """A whole stream, with its cursors."""
    framing = ChatFraming(ID, asked, **options)
    chunks = [one for one in framing.began() if isinstance(one, Numbered)]
    for piece in runs:
        chunks += framing.text(piece)
    return chunks + framing.ending(last)


def chunks_of(asked: Draft, runs: Sequence[Run], last: Ending) -> list[dict[str, Any]]:
    return [chunk_of(one) for one in framed(asked, runs, last)]


def accumulated(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the SDK makes of a stream. A content that never came is an empty one there."""
    state = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk, strict=True))
    got = state.current_completion_snapshot.to_dict()
    for choice in got["choices"]:  # type: ignore[attr-defined]
        choice["message"] = {name: value for name, value in choice["message"].items() if name != "parsed" and value}
        for call in choice["message"].get("tool_calls", []):
            call.pop("index")
            call["function"].pop("parsed_arguments", None)
    return got


def without_empties(answer: dict[str, Any]) -> dict[str, Any]:
    ChatCompletion.model_validate(answer, strict=True)
    for choice in answer["choices"]:
        choice["message"] = {name: value for name, value in choice["message"].items() if value}
    return answer


def test_a_bare_body_asks_for_the_engines_defaults() -> None:
    """What is not said is what `Sampling` says, so no default stands in two places with two values."""
    draft = chat.parse(body())

    assert draft.messages == (Message("user", "hi"),)
    assert draft.max_tokens is None
    assert not draft.stream
    assert draft.sampling == Sampling(max_tokens=0)


def test_null_is_unset_for_every_optional_field() -> None:
    """Typed clients send every field they know, most of them null (vllm#19862)."""
    optional = set(chat.ChatBody.model_fields) - {"model", "messages"} | set(chat._UNSERVED) | {"guided_json"}

    assert chat.parse(body(**dict.fromkeys(optional))) == chat.parse(body())


def test_every_knob_reaches_the_engine() -> None:
    draft = chat.parse(
        body(
            temperature=0,
            top_p=0.5,
            top_k=-1,
            min_p=0.1,
            seed=-(2**63),
            stop="END",
            presence_penalty=-2,
            frequency_penalty=2,
            repetition_penalty=1.1,
            ignore_eos=True,
            min_tokens=3,
            stop_token_ids=[5, 6],
            logit_bias={"7": -100, "8": 2.5},
            logprobs=True,
            top_logprobs=20,
            structured_outputs={"choice": ["a", "b"], "json": None},
            n=8,
            prompt_cache_key="k",
            chat_template_kwargs={"thinking": True, "thinking_budget": None},
            reasoning_effort="low",
            max_tokens=9,
            stream=True,
            stream_options={"include_usage": True, "include_obfuscation": None},
        )
    )

    assert draft.sampling == Sampling(
        max_tokens=0,
        temperature=0.0,
        top_p=0.5,
        top_k=0,
        min_p=0.1,
        seed=-(2**63),
        stop=("END",),
        presence_penalty=-2.0,
        frequency_penalty=2.0,
        repetition_penalty=1.1,
        ignore_eos=True,
        min_tokens=3,
        stop_token_ids=(5, 6),
        logit_bias={7: -100.0, 8: 2.5},
        logprobs=20,
        grammar={"choice": ["a", "b"]},
    )
    assert (draft.n, draft.width, draft.affinity, draft.reasons) == (8, 8, "k", True)
    assert draft.template == {"thinking": True, "reasoning_effort": "low", "enable_thinking": True}
    assert (draft.max_tokens, draft.stream, draft.include_usage) == (9, True, True)


@pytest.mark.parametrize("role", ["developer", "system", "user", "assistant", "tool", "function"])
@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("hi", "hi"),
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": ""}, {"type": "text", "text": "b"}], "a\n\nb"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
        (["plain"], "plain"),
    ],
)
def test_every_role_may_have_every_form_of_text(role: str, content: object, text: str) -> None:
    """A content that is not understood is refused, never blanked (command-code#820)."""
    draft = chat.parse(body(messages=[{"role": role, "content": content}]))

    assert draft.messages == (Message("system" if role == "developer" else role, text),)


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_a_part_that_is_not_text_is_refused_by_its_place(kind: str) -> None:
    parts = [{"type": "text", "text": "what is this?"}, {"type": kind, kind: {}}]
    error = refusal(body(messages=[{"role": "system", "content": ""}, {"role": "user", "content": parts}]))

    assert error.param == "messages[1].content"
    assert f"'{kind}'" in error.message and "part [1]" in error.message


def test_what_the_model_said_and_did_before_comes_back_whole() -> None:
    """An answer is a valid turn of the next request, keys that are null included."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    draft = chat.parse(
        body(
            messages=[
                {"role": "user", "content": "hi", "name": "ann"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [call],
                    "reasoning_content": "so",
                    "refusal": None,
                    "audio": None,
                    "function_call": None,
                    "annotations": [],
                },
                {"role": "assistant", "tool_calls": [call], "reasoning": "so"},
                {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "2"}], "name": "f"},
            ]
        )
    )

    calls = (Call("c1", "f", '{"a": 1}'),)
    assert draft.messages == (
        Message("user", "hi", name="ann"),
        Message("assistant", "", calls=calls, reasoning="so"),
        Message("assistant", "", calls=calls, reasoning="so"),
        Message("tool", "2", call_id="c1", name="f"),
    )


@pytest.mark.parametrize(
    ("asked", "grammar"),
    [
        ({}, {}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}},
            {"json": {"type": "object"}},
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, {"json_object": True}),
        ({"structured_outputs": {"json": {"type": "object"}}}, {"json": {"type": "object"}}),
        ({"structured_outputs": {"json": '{"type": "object"}'}}, {"json": {"type": "object"}}),
        ({"structured_outputs": {"choice": ["a", "b"], "regex": None}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"json_object": True, "disable_any_whitespace": False}}, {"json_object": True}),
        ({"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "text"}}, {"choice": ["a"]}),
    ],
)
def test_the_form_of_an_answer_becomes_a_grammar(asked: dict[str, Any], grammar: dict[str, Any]) -> None:
    assert chat.parse(body(**asked)).sampling.grammar == grammar


def test_logprobs_are_told_only_if_asked_for() -> None:
    """Asked for none beside the token itself is not the same as not asked (vllm#16805)."""
    assert chat.parse(body(logprobs=True, top_logprobs=0)).sampling.logprobs == 0
    assert chat.parse(body(logprobs=True)).sampling.logprobs == 0
    assert chat.parse(body(logprobs=False, top_logprobs=0)).sampling.logprobs is None


def test_no_effort_is_no_reasoning() -> None:
    draft = chat.parse(body(reasoning_effort="none"))

    assert not draft.reasons
    assert draft.template == {"reasoning_effort": "none", "enable_thinking": False}


def test_the_newer_name_of_the_token_limit_wins() -> None:
    assert chat.parse(body(max_tokens=5)).max_tokens == 5
    assert chat.parse(body(max_completion_tokens=6)).max_tokens == 6
    assert chat.parse(body(max_tokens=5, max_completion_tokens=6)).max_tokens == 6


@pytest.mark.parametrize(
    ("asked", "cls", "tier"),
    [
        ("priority", Class.INTERACTIVE, "priority"),
        ("fast", Class.INTERACTIVE, "priority"),
        ("flex", Class.BULK, "flex"),
        ("auto", Class.DEFAULT, "default"),
        ("default", Class.DEFAULT, "default"),
        ("scale", Class.DEFAULT, "default"),
        (None, Class.DEFAULT, "default"),
    ],
)
def test_the_tier_decides_the_class_and_is_told_as_it_is(asked: str | None, cls: Class, tier: str) -> None:
    draft = chat.parse(body(service_tier=asked))

    assert (draft.cls, draft.tier) == (cls, tier)
    assert {chunk["service_tier"] for chunk in chunks_of(draft, [run("text", "a")], ending())} == {tier}
    assert ChatFraming(ID, draft).whole([], ending())["service_tier"] == tier


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
        ({"model": ""}, "model"),
        ({"model": "m\ud800"}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "boss", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": {"text": "hi"}}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"text": "hi"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "{x}\ud800"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a\0b"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a", "name": 5}]}, "messages[0].name"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": {}}]}, "messages[0].tool_calls"),
        (
            {"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]},
            "messages[0].function_call",
        ),
        ({"messages": [{"role": "tool", "content": "", "tool_call_id": 1}]}, "messages[0].tool_call_id"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": "2"}, "n"),
        ({"logprobs": 5}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": False, "top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias[1]"),
        ({"logit_bias": {"1": "a"}}, "logit_bias[1]"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
        ({"stop_token_ids": list(range(129))}, "stop_token_ids"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"date": "today"}}, "chat_template_kwargs"),
        *(
            ({"chat_template_kwargs": {"thinking": told}}, "chat_template_kwargs.thinking")
            for told in ("x" * 65, 10**30, -2, 0.5, "\ud800", "\0", [], {})
        ),
        ({"structured_outputs": {"json": {"a": nested(100)}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {"a": nested(900)}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {"a": "x" * 70_000}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {"a": 10**30}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {"a": "\ud800"}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {"a": "\0"}}}, "structured_outputs.json"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        (
            {"response_format": SCHEMA | {"json_schema": {"name": "a b", "schema": {}}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": SCHEMA | {"json_schema": {"name": "a", "schema": 5}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a"], "json": {}}}, "structured_outputs"),
        ({"structured_outputs": {"choice": ["a"], "whitespace_pattern": "b"}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "5"}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a" * 20_000]}}, "structured_outputs.choice[0]"),
        ({"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"reasoning_effort": 5}, "reasoning_effort"),
        ({"verbosity": {}}, "verbosity"),
        ({"prediction": 5}, "prediction"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop": "x" * 2000}, "stop"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"service_tier": 1}, "service_tier"),
        ({"user": 1}, "user"),
        ({"safety_identifier": "x" * 129}, "safety_identifier"),
        ({"prompt_cache_key": "x" * 513}, "prompt_cache_key"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
    ],
)
def test_a_bad_field_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refusal(body(**fields))

    assert (error.status, error.param) == (400, param)
    assert param in error.message
    assert "pydantic" not in error.message and "_Message" not in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"guided_json": {}}, "guided_json"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"modalities": ["audio"]}, "modalities"),
    ],
)
def test_what_is_not_served_yet_is_refused_rather_than_ignored(fields: dict[str, Any], param: str) -> None:
    """An answer that silently lacks what was asked for is worse than none (vllm#53975)."""
    error = refusal(body(**fields))

    assert (error.status, error.param, error.error_code) == (400, param, "unsupported_parameter")
    assert f"'{param}' is not supported yet" in error.message


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "logprobs": False},
        {"logit_bias": {}, "top_logprobs": 0, "modalities": ["text"]},
        {"unheard_of": {"a": [1]}, "priority": 1, "verbosity": "low", "store": True, "user": "u"},
        {"functions": [], "function_call": "auto", "include_stop_str_in_output": False, "skip_special_tokens": True},
        {"prediction": {"type": "content", "content": "x"}, "safety_identifier": "s", "stream_options": {}},
    ],
)
def test_fields_that_ask_for_nothing_or_are_unknown_change_nothing(fields: dict[str, Any]) -> None:
    assert chat.parse(body(**fields)) == chat.parse(body())


@pytest.mark.parametrize("asked", [None, [], "x", 5, True])
def test_a_body_must_be_an_object(asked: object) -> None:
    assert "JSON object" in refusal(asked).message


@given(
    st.dictionaries(
        st.sampled_from([*chat.ChatBody.model_fields, *chat._UNSERVED, *HARMFUL, "guided_regex"]),
        json_values,
        max_size=4,
    )
)
def test_any_body_is_a_draft_or_a_bad_request_in_plain_unicode(fields: dict[str, Any]) -> None:
    """Nothing that JSON can spell may end as a 500, and no refusal may carry what cannot be sent back."""
    try:
        chat.parse(body() | fields)
    except BadRequest as e:
        f"{e.message}{e.param}".encode()


asked = st.builds(lambda usage: chat.parse(body(stream_options={"include_usage": usage}, n=3)), st.booleans())


def of_width(draft: Draft, answered: Answered) -> Draft:
    return msgspec.structs.replace(draft, n=answered.width)


@given(asked, answers(), edges)
def test_the_sdks_own_accumulator_gets_what_a_whole_answer_says(draft: Draft, answered: Answered, at: set[int]) -> None:
    """A stream and a whole answer are two ways to say the same thing, however it was cut (litellm#3276)."""
    draft = of_width(draft, answered)

    got = accumulated(chunks_of(draft, cut(answered.runs, at), answered.ending))
    told = without_empties(ChatFraming(ID, draft).whole(answered.runs, answered.ending))

    assert (got.pop("object"), told.pop("object")) == ("chat.completion", "chat.completion")
    usage = told.pop("usage")
    assert got.pop("usage", None) == (usage if draft.include_usage else None)
    assert usage["total_tokens"] == 10
    assert without_nulls(got) == without_nulls(told)


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


@given(asked, answers(), edges)
def test_a_stream_is_roles_then_pieces_then_one_reason_for_each(draft: Draft, answered: Answered, at: set[int]) -> None:
    """Every chunk carries id, time, model and `finish_reason`, which only a choice's last one fills (vllm#19650,
    vllm#27572), with an empty delta (vllm#35705); the usage comes once, if it was asked for (apfel#100)."""
    draft = of_width(draft, answered)
    chunks = chunks_of(draft, cut(answered.runs, at), answered.ending)
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]

    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert all(len(chunk["choices"]) == 1 for chunk in chunks[: len(choices)])
    for index, choice in enumerate(choices[: answered.width]):
        assert (choice["index"], choice["delta"]) == (index, {"role": "assistant", "content": ""})
    for index in range(answered.width):
        own = [choice for choice in choices if choice["index"] == index]
        assert not any("role" in choice["delta"] for choice in own[1:])
        assert [choice["finish_reason"] is None for choice in own] == [True] * (len(own) - 1) + [False]
        assert own[-1]["delta"] == {}
        assert all(choice["delta"] for choice in own[:-1])
    usage = draft.include_usage
    assert all("usage" in chunk for chunk in chunks) is usage is any("usage" in chunk for chunk in chunks)
    assert sum(chunk.get("usage") is not None for chunk in chunks) == (1 if usage else 0)
    assert (chunks[-1]["choices"] == []) is usage


@pytest.mark.parametrize(("outcome", "reason"), [(Outcome.COMPLETED, "stop"), (Outcome.LENGTH, "length")])
def test_an_answer_without_text_still_begins_with_its_role(outcome: Outcome, reason: str) -> None:
    chunks = chunks_of(chat.parse(body()), [], ending(outcome))

    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"role": "assistant", "content": ""}, {}]
    assert chunks[-1]["choices"][0]["finish_reason"] == reason


def test_usage_names_what_was_cached() -> None:
    assert chunks_of(chat.parse(body(stream_options={"include_usage": True})), [], ending())[-1]["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_a_stop_string_is_not_a_part_of_the_answer() -> None:
    """Nothing of it, nor of what a newer worker may say, is shown (vmlx-swift#109)."""
    runs = [run("text", "Hel"), run("stop", "lo"), run("unheard-of", "x")]

    assert content(framed(chat.parse(body()), runs, ending())) == "Hel"
    assert ChatFraming(ID, chat.parse(body())).whole(runs, ending())["choices"][0]["message"]["content"] == "Hel"


def test_a_token_is_told_once_with_what_else_it_could_have_been() -> None:
    """Tokens without a character of their own go with the next chunk, the last at the latest (litellm#4898); minus
    infinity is no JSON."""
    token = Logprob("é", -0.5, (("é", -0.5), ("e", float("-inf"))))
    runs = [Run("text", "é", (token,)), Run("stop", "!", (Logprob("!", -1.0),)), Run("text", "", (Logprob("", -2.0),))]
    chunks = chunks_of(chat.parse(body(logprobs=True, top_logprobs=2)), runs, ending())

    told = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert told[0] is None
    assert told[1] == {
        "content": [
            {
                "token": "é",
                "logprob": -0.5,
                "bytes": [195, 169],
                "top_logprobs": [
                    {"token": "é", "logprob": -0.5, "bytes": [195, 169]},
                    {"token": "e", "logprob": -9999.0, "bytes": [101]},
                ],
            }
        ],
        "refusal": None,
    }
    assert [each["token"] for each in told[2]["content"]] == ["!", ""]


@pytest.mark.parametrize("outcome", sorted(set(Outcome) - ANSWERED))
def test_a_failure_is_an_error_object_and_never_a_finish_reason(outcome: Outcome) -> None:
    """A stream that just stops is recorded by clients as an empty success (litellm#39748)."""
    draft, last = chat.parse(body()), ending(outcome, message="why")
    chunks = chunks_of(draft, [run("text", "Hel")], last)

    assert set(chunks[-1]) == {"error"}
    assert set(chunks[-1]["error"]) == {"message", "type", "param", "code"}
    why = "are not served" if outcome == Outcome.SHED else "why"  # an operator's reason is nobody else's business
    assert why in chunks[-1]["error"]["message"]
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
    with pytest.raises(ForebayError, match=why):
        ChatFraming(ID, draft).whole([run("text", "Hel")], last)


@pytest.mark.parametrize(("outcome", "error"), [(Outcome.WORKER_LOST, WorkerLost), (Outcome.GATEWAY_LOST, GatewayLost)])
def test_what_was_lost_is_told_as_such(outcome: Outcome, error: type[ForebayError]) -> None:
    with pytest.raises(error):
        ChatFraming(ID, chat.parse(body())).whole([], ending(outcome))


# Streams that are gone on with


def content(chunks: list[Numbered]) -> str:
    deltas = [chunk_of(one)["choices"][0]["delta"] for one in chunks if chunk_of(one).get("choices")]
    return "".join(delta.get("content", "") for delta in deltas)


def put_together(chunks: Sequence[dict[str, Any]]) -> dict[Any, Any]:
    """What a stream comes to: the SDK's own accumulator takes a second for a few hundred chunks."""
    whole: dict[Any, Any] = {}
    for chunk in chunks:
        for name in ("usage", "error"):
            if chunk.get(name):
                whole[name] = chunk[name]
        for choice in chunk.get("choices", []):
            own = whole.setdefault(choice["index"], {"finish_reason": [], "logprobs": []})
            own["finish_reason"] += [choice["finish_reason"]] if choice["finish_reason"] else []
            own["logprobs"] += choice["logprobs"]["content"] if choice["logprobs"] else []
            append(own, choice["delta"])
    return whole


def append(own: dict[Any, Any], delta: dict[str, Any]) -> None:
    for name, value in delta.items():
        if isinstance(value, str):
            own[name] = own.get(name, "") + value
        elif isinstance(value, list):
            for each in value:
                append(own.setdefault((name, each["index"]), {}), each)
        elif isinstance(value, dict):
            append(own.setdefault(name, {}), value)


@given(answers(), edges, edges, st.data(), st.booleans(), st.sampled_from(Outcome))
def test_what_a_client_that_comes_back_is_told_is_what_it_missed(
    answered: Answered, here: set[int], there: set[int], data: st.DataObject, usage: bool, outcome: Outcome
) -> None:
    """After any event that has a number, however either gateway cut the answer: both parts make one stream."""
    draft = of_width(chat.parse(body(stream_options={"include_usage": usage}, n=3)), answered)
    shown = decode(encode(view_of(draft, Caller(org_id="o", project_id="p", key_id="k"))))
    last = ending(outcome)
    first = framed(draft, cut(answered.runs, here), last)
    had = data.draw(st.sampled_from([n for n, one in enumerate(first, 1) if one.cursor is not None]))
    after = first[had - 1].cursor

    again = framed(shown, cut(answered.runs, there), last, after=after)  # type: ignore[arg-type]

    cursors = [one.cursor for one in first if one.cursor is not None]
    assert all(a < b for a, b in pairwise(cursors))
    assert all(one.cursor is None or one.cursor > after for one in again)  # type: ignore[operator]
    assert not any(delta_of(one).get("role") for one in again), "SDKs append it wherever it comes again"
    both = [chunk_of(one) for one in first[:had] + again]
    assert put_together(both) == put_together([chunk_of(one) for one in first])


def delta_of(one: Numbered) -> dict[str, Any]:
    choices = chunk_of(one).get("choices")
    delta: dict[str, Any] = choices[0]["delta"] if choices else {}
    return delta


def test_a_gateways_own_failure_has_no_number() -> None:
    """The stream may be whole elsewhere, so a client comes back for what follows the text it has."""
    draft = chat.parse(body())

    assert [one.cursor for one in framed(draft, [run("text", "Hel")], ending())] == [0, 3, 4]
    assert [one.cursor for one in ChatFraming(ID, draft).failure(GatewayLost())] == [None]


def test_waiting_is_said_as_the_operator_chose() -> None:
    shown = chat.parse(body())
    starting = Starting(state=WorkerState.LOADING)

    def waits(how: KeepAlive) -> list[Any]:
        framing = ChatFraming(ID, shown, keep_alive=how)
        return framing.waiting(3, None, None) + framing.waiting(2, 1500, starting) + framing.idle()

    assert waits("off") == []
    assert [one.text for one in waits("comment")] == [
        "queued place=3",
        "queued place=2 estimate_ms=1500 worker=loading",
        "keep-alive",
    ]
    for one in waits("chunk"):
        ChatCompletionChunk.model_validate(chunk_of(one), strict=True)
        assert (chunk_of(one)["choices"][0]["delta"], chunk_of(one)["choices"][0]["finish_reason"], one.cursor) == (
            {},
            None,
            None,
        )


def test_the_sdk_reads_ids_and_comments() -> None:
    """It takes every empty line after the first id as an event, so that a comment must not end with one."""
    numbered = framed(chat.parse(body()), [run("text", "Hi")], ending())[:2]
    lines = [identified_lines(one.chunk, ID.encode(), one.cursor or 0) for one in numbered]
    raw = lines[0] + comment_line("queued place=3") + comment_line("keep-alive") + lines[1] + comment_line("keep-alive")

    events = list(SSEDecoder().iter_bytes(iter([raw, b"data: [DONE]\n\n"])))

    assert [json.loads(event.data)["object"] for event in events[:-1]] == ["chat.completion.chunk"] * 2
    assert [event.id for event in events] == [f"{ID}:0", f"{ID}:2", f"{ID}:2"]
    assert events[-1].data == "[DONE]"


def test_an_event_id_names_its_request_and_a_cursor() -> None:
    assert chat.last_event(f"{ID}:17") == (ID, 17)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", NotFound), ("17", NotFound), (ID, NotFound), ("x:1", NotFound), (ID.upper() + ":1", NotFound),
        (f" {ID}:1", NotFound), (f"{ID}:", BadRequest), (f"{ID}:x", BadRequest), (f"{ID}:-1", BadRequest),
        (f"{ID}:1\n", BadRequest), (f"{ID}:" + "1" * 11, BadRequest), (f"{ID}:²", BadRequest),
    ],
)  # fmt: skip
def test_another_event_id_is_refused(text: str, error: type[ForebayError]) -> None:
    with pytest.raises(error):
        chat.last_event(text)


def test_a_cursor_beyond_the_end_is_refused() -> None:
    for good in ((0, 0, False), (4, 4, False), (6, 4, True)):
        chat.check_cursor(*good)
    for bad in ((5, 4, False), (7, 4, True)):
        with pytest.raises(BadRequest):
            chat.check_cursor(*bad)


# What is put down of a request


def test_a_view_is_read_as_it_was_written() -> None:
    caller = Caller(org_id="o", project_id="p", key_id="k")
    for draft in (chat.parse(body(stream=True, stream_options={"include_usage": True})), responses.parse(ASKED)):
        shown = view_of(draft, caller)
        assert decode(encode(shown)) == shown
        assert (shown.model, shown.stream, shown.include_usage) == (draft.model, draft.stream, draft.include_usage)


ASKED = {
    "model": "m",
    "input": "a secret",
    "instructions": "another secret",
    "metadata": {"a": "b"},
    "stream": True,
    "store": False,
}


def test_no_prompt_is_put_down() -> None:
    caller = Caller(org_id="o", project_id="p", key_id="k")
    raw = encode(view_of(responses.parse(ASKED), caller)) + encode(
        view_of(chat.parse(body(messages=[{"role": "user", "content": "a secret"}])), caller)
    )

    assert b"secret" not in raw and b"metadata" in raw
