"""Anthropic's Messages: what a body may ask for, and what an answer adds up to in Anthropic's own SDK."""

from __future__ import annotations

import contextlib
import json
from itertools import pairwise
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message as Answered
from hypothesis import given
from hypothesis import strategies as st

from core.errors import (
    BadRequest,
    BodyTooLarge,
    ForebayError,
    LimitReached,
    NotAllowed,
    NotFound,
    Unauthenticated,
    Unavailable,
    WorkerLost,
)
from core.outlook import Starting
from core.stream.frames import Run, joined
from core.values import ANSWERED, Ending, Outcome, Sampling, Tools, Usage, WorkerState
from web.dialects import messages
from web.dialects.draft import Call, Draft, Message
from web.dialects.framing import MessagesFraming
from web.dialects.messages import MessagesAnswer, error_body

ID = "01939c1e-6f00-7abc-8def-0123456789ab"
HEX = ID.replace("-", "")
USAGE = Usage(input_tokens=7, cached_tokens=4, output_tokens=3)
DIRECT = {"type": "direct"}
TOOL = {"name": "weather", "description": "Of a city.", "input_schema": {"type": "object", "properties": {}}}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], **fields}


def refusal(asked: object) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        messages.parse(asked)
    return caught.value


def ending(outcome: Outcome = Outcome.COMPLETED, **fields: Any) -> Ending:
    return Ending(id=ID, attempt=1, outcome=outcome, usage=USAGE, **fields)


def said(*turns: dict[str, Any], **fields: Any) -> tuple[Message, ...]:
    return messages.parse_count(body(messages=list(turns), **fields)).messages


# --- bodies


def test_a_bare_body_asks_for_the_engines_defaults() -> None:
    draft = messages.parse(body())

    assert draft.messages == (Message("user", "hi"),)
    assert (draft.dialect, draft.max_tokens, draft.stream, draft.tools, draft.reasons) == (
        "messages",
        9,
        False,
        None,
        True,
    )
    assert draft.sampling == Sampling(max_tokens=0)


def test_null_is_unset_for_every_optional_field() -> None:
    optional = set(messages.MessagesBody.model_fields) - {"model", "messages", "max_tokens"} | set(messages._UNSERVED)

    assert messages.parse(body(**dict.fromkeys(optional))) == messages.parse(body())


def test_every_knob_reaches_the_engine() -> None:
    draft = messages.parse(
        body(
            temperature=0,
            top_p=0.5,
            top_k=5,
            stop_sequences=["END", "\n\n"],
            stream=True,
            metadata={"user_id": "someone"},
            service_tier="standard_only",
            output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
            betas=["unknown fields are passed over"],
        )
    )

    assert draft.sampling == Sampling(
        max_tokens=0, temperature=0.0, top_p=0.5, top_k=5, stop=("END", "\n\n"), grammar={"json": {"type": "object"}}
    )
    assert (draft.stream, draft.affinity, draft.template) == (True, "someone", {"reasoning_effort": "low"})


@pytest.mark.parametrize(
    ("thinking", "reasons", "told"),
    [
        ({"type": "enabled", "budget_tokens": 1024}, True, {"enable_thinking": True}),
        ({"type": "disabled"}, False, {"enable_thinking": False}),
        ({"type": "adaptive"}, True, {}),
        (None, True, {}),
    ],
)
def test_thinking_may_be_asked_for_or_switched_off(thinking: Any, reasons: bool, told: dict[str, Any]) -> None:
    draft = messages.parse(body(thinking=thinking, max_tokens=2000))

    assert (draft.reasons, draft.template) == (reasons, told)


@pytest.mark.parametrize(
    ("system", "text"),
    [
        ("Be brief.", "Be brief."),
        (
            [
                {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "brief."},
            ],
            "Be brief.",
        ),
        ([{"type": "text", "text": "x-anthropic-billing-header: cch=1f"}, {"type": "text", "text": "Be."}], "Be."),
    ],
)
def test_a_system_prompt_comes_first(system: Any, text: str) -> None:
    """Without the line that agents put before it, a new one each time: no two prompts would share a prefix."""
    assert said({"role": "user", "content": "hi"}, system=system) == (Message("system", text), Message("user", "hi"))


def test_a_conversation_with_tools_becomes_turns_of_the_template() -> None:
    turns = said(
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Brno", "n": 2**70}},
                {"type": "tool_use", "id": "t2", "name": "weather", "input": None},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "sunny"},
                {"type": "text", "text": "and?"},
                {
                    "type": "tool_result",
                    "tool_use_id": "t2",
                    "is_error": True,
                    "content": [{"type": "text", "text": "no"}],
                },
                {"type": "tool_result", "tool_use_id": "t3"},
            ],
        },
    )

    call = Call("t1", "weather", json.dumps({"city": "Brno", "n": 2**70}))
    assert turns == (
        Message("user", "a\nb"),
        Message("assistant", "I look.", calls=(call, Call("t2", "weather", "{}")), reasoning="hm"),
        Message("tool", "sunny", call_id="t1"),
        Message("tool", "Error: no", call_id="t2"),
        Message("tool", "", call_id="t3"),
        Message("user", "and?"),
    )


def test_turns_of_one_role_in_a_row_are_one() -> None:
    """Many templates refuse two, and Anthropic does not."""
    one, two = {"role": "user", "content": "one"}, {"role": "user", "content": [{"type": "text", "text": "two"}]}

    assert said(one, two) == (Message("user", "one\ntwo"),)


@pytest.mark.parametrize(
    ("choice", "ours", "parallel"),
    [
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "tool", "name": "weather"}, "=weather", True),
        ({"type": "none"}, "none", True),
    ],
)
def test_tools_and_the_choice_among_them(choice: dict[str, Any], ours: str, parallel: bool) -> None:
    draft = messages.parse(body(tools=[{**TOOL, "type": "custom", "cache_control": None}], tool_choice=choice))

    function = {"name": "weather", "description": "Of a city.", "parameters": TOOL["input_schema"]}
    assert draft.tools == Tools(functions=(function,), choice=ours, parallel=parallel)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 1.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": "END"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0.content.0.text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages.0.content.0.tool_use_id"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The"}]}, "messages"),
        ({"system": [{"type": "image"}]}, "system.0"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
        ({"tools": [{"name": "a"}]}, "tools.0"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "thinking"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"),
    ],
)
def test_a_fault_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    refused = refusal(body(**fields))

    assert refused.param == param
    assert refused.status == 400


@given(
    fields=st.dictionaries(
        st.sampled_from([*messages.MessagesBody.model_fields, "x"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["type", "role", "content", "text", "input", "name", "id"]), inner, max_size=4
                )
            ),
            max_leaves=8,
        ),
        max_size=5,
    )
)
def test_whatever_comes_is_read_or_refused(fields: dict[str, Any]) -> None:
    for parse in (messages.parse, messages.parse_count):
        with contextlib.suppress(BadRequest):
            assert isinstance(parse(body(**fields)), Draft)


def test_what_is_nested_too_deeply_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"a": deep}
    use = {"type": "tool_use", "id": "t", "name": "n", "input": deep}

    with pytest.raises(BadRequest, match=r"nested"):
        messages.parse_count(body(messages=[{"role": "assistant", "content": [use]}]))


# --- answers


def events(runs: list[Run], last: Ending) -> list[dict[str, Any]]:
    answer = MessagesAnswer(ID, "m", 7)
    return [*answer.began(), *(event for run in runs for event in answer.piece(run)), *answer.ending(last)]


def added_up(said: list[dict[str, Any]]) -> dict[str, Any]:
    """What the SDK makes of a stream."""
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in said:
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)  # type: ignore[arg-type]
    found: dict[str, Any] = snapshot.to_dict()
    return found


def whole(runs: list[Run], last: Ending) -> dict[str, Any]:
    return MessagesAnswer(ID, "m", 7).whole(runs, last)


def test_text_is_one_block_with_its_usage() -> None:
    said = events([Run("text", "Hel"), Run("text", "lo")], ending())

    assert [event["type"] for event in said] == [
        *("message_start", "content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    assert said[0]["message"]["usage"]["input_tokens"] == 7
    assert said[-2]["delta"]["stop_reason"] == "end_turn"
    usage = said[-2]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (3, 4, 3)
    assert added_up(said)["content"][0]["text"] == "Hello"


def test_thoughts_text_and_calls_are_blocks_with_growing_index() -> None:
    runs = [
        Run("reasoning", "hm"),
        Run("text", "I look."),
        Run("call:0", "weather"),
        Run("arguments:0", '{"city":'),
        Run("arguments:0", ' "Brno"}'),
        Run("call:1", "time"),
    ]

    said = events(runs, ending())

    starts = [(event["index"], event["content_block"]) for event in said if event["type"] == "content_block_start"]
    assert starts == [
        (0, {"type": "thinking", "thinking": "", "signature": ""}),
        (1, {"type": "text", "text": "", "citations": None}),
        (2, {"type": "tool_use", "id": f"toolu_{HEX}00", "name": "weather", "input": {}, "caller": DIRECT}),
        (3, {"type": "tool_use", "id": f"toolu_{HEX}01", "name": "time", "input": {}, "caller": DIRECT}),
    ]
    assert [event["index"] for event in said if event["type"] == "content_block_stop"] == [0, 1, 2, 3]
    answer = whole(runs, ending())
    assert [block["input"] for block in answer["content"][2:]] == [{"city": "Brno"}, {}]
    assert answer["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("runs", "outcome", "reason", "stop"),
    [
        ([Run("text", "x")], Outcome.COMPLETED, "end_turn", None),
        ([Run("text", "x")], Outcome.LENGTH, "max_tokens", None),
        ([Run("text", "x"), Run("stop", "EN"), Run("stop", "D")], Outcome.COMPLETED, "stop_sequence", "END"),
        ([Run("call:0", "f"), Run("arguments:0", "{}")], Outcome.COMPLETED, "tool_use", None),
        ([Run("call:0", "f"), Run("arguments:0", "{}")], Outcome.LENGTH, "max_tokens", None),
        ([Run("call:0", "f"), Run("arguments:0", "{}"), Run("stop", "S")], Outcome.COMPLETED, "tool_use", None),
        ([Run("call:0", "f"), Run("arguments:0", '{"a'), Run("stop", "S")], Outcome.COMPLETED, "stop_sequence", "S"),
        ([], Outcome.COMPLETED, "end_turn", None),
    ],
)
def test_why_it_ended(runs: list[Run], outcome: Outcome, reason: str, stop: str | None) -> None:
    answer = whole(runs, ending(outcome))

    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, stop)
    assert (added_up(events(runs, ending(outcome)))["stop_reason"]) == reason


JSON = st.dictionaries(st.text(max_size=4), st.text(max_size=6) | st.integers() | st.lists(st.booleans()), max_size=3)


@st.composite
def answers(draw: st.DrawFn) -> list[Run]:
    """Thoughts, text and calls in some order, the last perhaps cut short."""
    runs, call = [], 0
    for what in draw(st.lists(st.sampled_from(["reasoning", "text", "call"]), max_size=5)):
        if what != "call":
            runs.append(Run(what, draw(st.text(min_size=1, max_size=8))))
            continue
        runs.append(Run(f"call:{call}", draw(st.text("abc_", min_size=1, max_size=4))))
        if draw(st.booleans()):
            arguments = json.dumps(draw(JSON), ensure_ascii=draw(st.booleans()))
            runs.append(Run(f"arguments:{call}", arguments))
        call += 1
    if runs and runs[-1].kind.startswith("arguments"):
        runs[-1] = Run(runs[-1].kind, runs[-1].text[: draw(st.integers(1, len(runs[-1].text)))])
    return runs + [Run("stop", "END")] * draw(st.booleans())


@given(runs=answers(), outcome=st.sampled_from(sorted(ANSWERED)), cuts=st.data())
def test_however_it_is_cut_a_stream_adds_up_to_the_whole_answer(
    runs: list[Run], outcome: Outcome, cuts: st.DataObject
) -> None:
    pieces = []
    for run in runs:
        at = sorted(cuts.draw(st.sets(st.integers(0, len(run.text)), max_size=4)) | {0, len(run.text)})
        pieces += [Run(run.kind, run.text[begin:end]) for begin, end in pairwise(at)]

    answer = whole(joined(runs), ending(outcome))
    stream = events(pieces, ending(outcome))

    assert Answered.model_validate(answer).to_dict() == answer
    assert added_up(stream) == answer
    assert [e for e in stream if e["type"] != "content_block_delta"] == [
        e for e in events(joined(runs), ending(outcome)) if e["type"] != "content_block_delta"
    ]


def test_arguments_that_are_no_json_are_handed_on_as_what_they_are() -> None:
    answer = whole([Run("call:0", "f"), Run("arguments:0", "{city: Brno}")], ending())

    assert answer["content"][0]["input"] == {"INVALID_JSON": "{city: Brno}"}


def test_kinds_that_are_not_known_are_passed_over() -> None:
    assert whole([Run("smell", "x"), Run("text", "y")], ending())["content"][0]["text"] == "y"


@pytest.mark.parametrize("outcome", sorted(set(Outcome) - ANSWERED))
def test_an_ending_without_an_answer_is_an_error(outcome: Outcome) -> None:
    [*_, last] = events([Run("text", "x")], ending(outcome))

    assert last["type"] == "error"
    with pytest.raises(ForebayError):
        whole([], ending(outcome))


def test_a_wait_is_pings_which_clients_pass_over() -> None:
    framing = MessagesFraming(ID, messages.parse(body()), 7)

    [waiting] = framing.waiting(3, 1500, Starting(state=WorkerState.LOADING, detail="40 %"))
    assert waiting["type"] == "ping"
    assert waiting["queue"] == {"place": 3, "estimate_ms": 1500, "worker": {"state": "loading", "detail": "40 %"}}
    assert framing.idle() == [{"type": "ping"}]
    assert framing.running() == []


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (BadRequest("x"), 400, "invalid_request_error"),
        (Unauthenticated(), 401, "authentication_error"),
        (NotAllowed(), 403, "permission_error"),
        (NotFound(), 404, "not_found_error"),
        (BodyTooLarge(), 413, "request_too_large"),
        (LimitReached(), 429, "rate_limit_error"),
        (ForebayError(), 500, "api_error"),
        (WorkerLost(), 500, "api_error"),
        (Unavailable(), 529, "overloaded_error"),
    ],
)
def test_errors_have_anthropics_own_names(error: ForebayError, status: int, kind: str) -> None:
    found, told = error_body(error, ID)

    assert found == status
    assert told == {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": ID}
