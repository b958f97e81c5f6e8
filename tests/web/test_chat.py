"""Chat completions: what a body may ask for, and what an answer looks like to the SDK."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from core.errors import BadRequest, ForebayError, GatewayLost, NotFound, WorkerLost
from core.outlook import Starting
from core.values import ANSWERED, Caller, Class, Ending, Outcome, Sampling, Usage, WorkerState
from web.dialects import chat, responses
from web.dialects.chat import ChatAnswer
from web.dialects.draft import Message
from web.dialects.framing import ChatFraming, KeepAlive, Numbered
from web.dialects.view import decode, encode, view_of
from web.transports.http import comment_line, identified_lines

ID = "01939c1e-6f00-7abc-8def-0123456789ab"
USAGE = Usage(input_tokens=7, cached_tokens=4, output_tokens=3)


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}


def refusal(asked: object) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        chat.parse(asked)
    return caught.value


def ending(outcome: Outcome = Outcome.COMPLETED, **fields: Any) -> Ending:
    return Ending(id=ID, attempt=1, outcome=outcome, usage=USAGE, **fields)


def streamed(answer: ChatAnswer, deltas: list[str], outcome: Outcome = Outcome.COMPLETED) -> list[dict[str, Any]]:
    chunks = answer.opening()
    for delta in deltas:
        chunks += answer.text(delta)
    return chunks + answer.ending(ending(outcome))


def test_a_bare_body_asks_for_the_engines_defaults() -> None:
    """What is not said is what `Sampling` says, so no default stands in two places with two values."""
    draft = chat.parse(body())

    assert draft.messages == (Message("user", "hi"),)
    assert draft.max_tokens is None
    assert not draft.stream
    assert draft.sampling == Sampling(max_tokens=0)


def test_null_is_unset_for_every_optional_field() -> None:
    """Typed clients send every field they know, most of them null (vllm#19862)."""
    optional = set(chat._ChatBody.model_fields) - {"model", "messages"} | set(chat._UNSERVED) | {"guided_json"}

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
    )
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


def test_the_newer_name_of_the_token_limit_wins() -> None:
    assert chat.parse(body(max_tokens=5)).max_tokens == 5
    assert chat.parse(body(max_completion_tokens=6)).max_tokens == 6
    assert chat.parse(body(max_tokens=5, max_completion_tokens=6)).max_tokens == 6


@pytest.mark.parametrize(
    ("tier", "cls"),
    [
        ("priority", Class.INTERACTIVE),
        ("flex", Class.BULK),
        ("auto", Class.DEFAULT),
        ("default", Class.DEFAULT),
        ("scale", Class.DEFAULT),
        (None, Class.DEFAULT),
    ],
)
def test_the_tier_decides_the_class(tier: str | None, cls: Class) -> None:
    assert chat.parse(body(service_tier=tier)).cls is cls


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
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]}, "messages[0].tool_calls"),
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
        ({"n": 2}, "n"),
        ({"n": 0}, "n"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"logprobs": True}, "logprobs"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"guided_json": {}}, "guided_json"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
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
        {"unheard_of": {"a": [1]}, "priority": 1, "prompt_cache_key": "k", "reasoning_effort": "high"},
    ],
)
def test_fields_that_ask_for_nothing_or_are_unknown_change_nothing(fields: dict[str, Any]) -> None:
    assert chat.parse(body(**fields)) == chat.parse(body())


@pytest.mark.parametrize("asked", [None, [], "x", 5, True])
def test_a_body_must_be_an_object(asked: object) -> None:
    assert "JSON object" in refusal(asked).message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(), max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    st.dictionaries(
        st.sampled_from([*chat._ChatBody.model_fields, *chat._UNSERVED, "guided_regex"]), json_values, max_size=4
    )
)
def test_any_body_is_a_draft_or_a_bad_request_in_plain_unicode(fields: dict[str, Any]) -> None:
    """Nothing that JSON can spell may end as a 500, and no refusal may carry what cannot be sent back."""
    try:
        chat.parse(body() | fields)
    except BadRequest as e:
        f"{e.message}{e.param}".encode()


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize(("outcome", "reason"), [(Outcome.COMPLETED, "stop"), (Outcome.LENGTH, "length")])
def test_the_sdks_own_accumulator_gets_what_a_whole_answer_says(
    include_usage: bool, outcome: Outcome, reason: str
) -> None:
    """A stream and a whole answer are two ways to say the same thing."""
    chunks = streamed(ChatAnswer(ID, "m", 1000, include_usage), ["Hel", "", "lo ✓"], outcome)
    whole = ChatAnswer(ID, "m", 1000, include_usage).whole("Hello ✓", ending(outcome))

    state = ChatCompletionStreamState()
    for chunk in chunks:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk, strict=True))
    got, told = state.current_completion_snapshot, ChatCompletion.model_validate(whole, strict=True)

    assert (
        (got.id, got.created, got.model)
        == (told.id, told.created, told.model)
        == ("chatcmpl-" + ID.replace("-", ""), 1000, "m")
    )
    assert got.choices[0].message.content == told.choices[0].message.content == "Hello ✓"
    assert got.choices[0].message.role == "assistant"
    assert got.choices[0].finish_reason == told.choices[0].finish_reason == reason
    assert told.usage is not None and told.usage.total_tokens == 10
    assert got.usage == (told.usage if include_usage else None)


@given(st.lists(st.text(max_size=4), max_size=6), st.booleans(), st.sampled_from([Outcome.COMPLETED, Outcome.LENGTH]))
def test_a_stream_is_one_role_then_text_then_one_reason(deltas: list[str], usage: bool, outcome: Outcome) -> None:
    """Every chunk carries id, time, model and `finish_reason`, which only the last one fills (vllm#19650)."""
    chunks = streamed(ChatAnswer(ID, "m", 1000, usage), deltas, outcome)
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]

    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"]["content"] for choice in choices[1:-1]) == "".join(deltas)
    assert choices[-1]["delta"] == {}
    assert [choice["finish_reason"] is None for choice in choices] == [True] * (len(choices) - 1) + [False]
    assert all("usage" in chunk for chunk in chunks) is usage is any("usage" in chunk for chunk in chunks)
    assert sum(chunk.get("usage") is not None for chunk in chunks) == (1 if usage else 0)
    assert (chunks[-1]["choices"] == []) is usage


def test_an_answer_without_text_still_begins_with_its_role() -> None:
    chunks = ChatAnswer(ID, "m", 1000, False).ending(ending())

    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"role": "assistant", "content": ""}, {}]


def test_usage_names_what_was_cached() -> None:
    assert ChatAnswer(ID, "m", 1000, True).ending(ending())[-1]["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 3,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


@pytest.mark.parametrize("outcome", sorted(set(Outcome) - ANSWERED))
def test_a_failure_is_an_error_object_and_never_a_finish_reason(outcome: Outcome) -> None:
    """A stream that just stops is recorded by clients as an empty success (litellm#39748)."""
    answer = ChatAnswer(ID, "m", 1000, True)
    chunks = answer.text("Hel") + answer.ending(ending(outcome, message="why"))

    assert set(chunks[-1]) == {"error"}
    assert set(chunks[-1]["error"]) == {"message", "type", "param", "code"}
    assert chunks[-1]["error"]["message"] == "why"
    with pytest.raises(ForebayError, match="why"):
        answer.whole("Hel", ending(outcome, message="why"))


@pytest.mark.parametrize(("outcome", "error"), [(Outcome.WORKER_LOST, WorkerLost), (Outcome.GATEWAY_LOST, GatewayLost)])
def test_what_was_lost_is_told_as_such(outcome: Outcome, error: type[ForebayError]) -> None:
    with pytest.raises(error):
        ChatAnswer(ID, "m", 1000, False).whole("", ending(outcome))


# Streams that are gone on with


def said(framing: ChatFraming, pieces: list[str], outcome: Outcome) -> list[Numbered]:
    """A whole stream, with its cursors."""
    chunks = [one for one in framing.began() if isinstance(one, Numbered)]
    for piece in pieces:
        chunks += framing.text(piece)
    return chunks + framing.ending(ending(outcome))


def content(chunks: list[Numbered]) -> str:
    deltas = [one.chunk["choices"][0]["delta"] for one in chunks if one.chunk.get("choices")]
    return "".join(delta.get("content", "") for delta in deltas)


def cut(text: str, edges: set[int]) -> list[str]:
    return [text[a:b] for a, b in pairwise(sorted({0, len(text)} | {edge for edge in edges if edge < len(text)}))]


splits = st.sets(st.integers(1, 23))


@given(st.text(min_size=1, max_size=24), splits, splits, st.data(), st.booleans(), st.sampled_from(Outcome))
def test_what_a_client_that_comes_back_is_told_is_what_it_missed(
    text: str, here: set[int], there: set[int], data: st.DataObject, usage: bool, outcome: Outcome
) -> None:
    """After any event, however either gateway cut the text: both parts make one stream."""
    shown = chat.parse(body(stream_options={"include_usage": usage}))
    first = said(ChatFraming(ID, shown), cut(text, here), outcome)
    had = data.draw(st.integers(1, len(first)))
    after = first[had - 1].cursor
    assert after is not None

    again = said(ChatFraming(ID, shown, after=after), cut(text, there), outcome)

    cursors = [one.cursor for one in first]
    assert all(a < b for a, b in pairwise(cursors))  # type: ignore[operator]
    assert content(first[:had]) + content(again) == text
    assert all(one.cursor is not None and one.cursor > after for one in again)
    assert not any(delta_of(one).get("role") for one in again), "SDKs append it wherever it comes again"
    ends = [one for one in first[had:] if not delta_of(one).get("content")]
    assert [one for one in again if not delta_of(one).get("content")] == ends


def delta_of(one: Numbered) -> dict[str, Any]:
    choices = one.chunk.get("choices")
    delta: dict[str, Any] = choices[0]["delta"] if choices else {}
    return delta


def test_a_gateways_own_failure_has_no_number() -> None:
    """The stream may be whole elsewhere, so a client comes back for what follows the text it has."""
    framing = ChatFraming(ID, chat.parse(body()))

    assert [one.cursor for one in said(framing, ["Hel"], Outcome.COMPLETED)] == [0, 3, 4]
    assert [one.cursor for one in framing.failure(GatewayLost())] == [None]


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
        ChatCompletionChunk.model_validate(one.chunk, strict=True)
        assert (one.chunk["choices"][0]["delta"], one.chunk["choices"][0]["finish_reason"], one.cursor) == (
            {},
            None,
            None,
        )


def test_the_sdk_reads_ids_and_comments() -> None:
    """It takes every empty line after the first id as an event, so that a comment must not end with one."""
    framing = ChatFraming(ID, chat.parse(body()))
    numbered = said(framing, ["Hi"], Outcome.COMPLETED)[:2]
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


ASKED = {"model": "m", "input": "a secret", "instructions": "another secret", "metadata": {"a": "b"}, "stream": True}


def test_no_prompt_is_put_down() -> None:
    caller = Caller(org_id="o", project_id="p", key_id="k")
    raw = encode(view_of(responses.parse(ASKED), caller)) + encode(
        view_of(chat.parse(body(messages=[{"role": "user", "content": "a secret"}])), caller)
    )

    assert b"secret" not in raw and b"metadata" in raw
