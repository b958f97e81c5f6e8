"""Responses: bodies, events that the SDK understands, one numbering for all gateways, and WebSocket frames."""

from __future__ import annotations

import contextlib
import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.responses_server_event import ResponsesServerEvent
from pydantic import TypeAdapter

from core.errors import BadRequest, Draining, ForebayError, LimitReached, WorkerLost
from core.outlook import Starting
from core.stream.frames import Run
from core.values import Caller, Class, Ending, Outcome, Tools, Usage, WorkerState
from web.dialects import responses
from web.dialects.commands import (
    Cancel,
    Create,
    Refused,
    Resume,
    Steer,
    error_frame,
    parse_event,
    steer_failed,
)
from web.dialects.draft import Message
from web.dialects.events import ResponsesAnswer
from web.dialects.framing import ResponsesFraming
from web.dialects.view import decode, encode, view_of

ID = "01939c1e-6f00-7abc-8def-0123456789ab"
STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SERVER_EVENT: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)

#: Every key of the specification's ResponseResource, all of them required (Open Responses, 2026-04-24).
# fmt: off
RESOURCE_KEYS = {
    "id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id",
    "instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p",
    "presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "usage",
    "max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata", "safety_identifier",
    "prompt_cache_key"
}
# fmt: on

#: What Codex 0.171 sends, cut short.
CODEX = {
    "model": "m",
    "instructions": "Be brief.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    ],
    "tools": [{"type": "function", "name": "shell"}, {"type": "namespace", "name": "x"}, {"type": "web_search"}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "session",
    "client_metadata": {"a": "b"},
}


F: dict[str, Any] = {"type": "function", "name": "f", "description": "d"}
G: dict[str, Any] = {"type": "function", "name": "g", "parameters": {"a": 1}}
ALLOWED: dict[str, Any] = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "input": "hi", **fields}


def refusal(asked: object) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        responses.parse(asked)
    return caught.value


def answering(after: int = -1, **fields: Any) -> ResponsesAnswer:
    return ResponsesAnswer(ID, responses.parse(body(**fields)), 1000, after)


def ending(tokens: int, outcome: Outcome = Outcome.COMPLETED, **fields: Any) -> Ending:
    usage = Usage(input_tokens=7, cached_tokens=4, output_tokens=tokens)
    return Ending(id=ID, attempt=1, outcome=outcome, usage=usage, ended_ms=2_500_000, **fields)


def streamed(answer: ResponsesAnswer, deltas: list[str], end: Ending) -> list[dict[str, Any]]:
    """A whole stream."""
    events = answer.created() + answer.queued(2, 1500) + answer.queued(1, None) + answer.in_progress()
    for text in deltas:
        events += answer.text(text)
    return events + answer.ending(end)


def whole(answer: ResponsesAnswer, text: str, end: Ending) -> dict[str, Any]:
    return answer.whole([Run("text", text)] if text else [], end)


def types(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


# Bodies


def test_a_string_is_one_user_message() -> None:
    assert responses.parse(body()).messages == (Message("user", "hi"),)


def test_instructions_come_first_and_developers_are_the_system() -> None:
    draft = responses.parse(CODEX)

    assert draft.messages == (Message("system", "Be brief."), Message("system", "rules"), Message("user", "hi"))
    assert draft.stream


def test_a_conversation_may_be_sent_back_as_it_was_received() -> None:
    """Easy messages without id and status, our own output items, and reasoning, in one list (litellm#40378)."""
    output = whole(answering(), "Hello", ending(1))["output"]

    draft = responses.parse(
        body(
            input=[
                {"role": "user", "content": "hi"},
                {"type": "reasoning", "id": "rs_1", "summary": [], "content": None},
                *output,
                {"role": "user", "content": [{"type": "input_text", "text": ""}, {"type": "text", "text": "again"}]},
            ]
        )
    )

    assert draft.messages == (Message("user", "hi"), Message("assistant", "Hello"), Message("user", "\nagain"))
    assert [item["id"] for item in draft.items[1:3]] == ["rs_1", output[0]["id"]]


def test_null_is_unset_for_every_optional_field() -> None:
    optional = set(responses.ResponsesBody.model_fields) - {"model", "input"} | set(responses._UNSERVED)

    assert responses.parse(body(**dict.fromkeys(optional))) == responses.parse(body())


def test_the_tier_decides_the_class_and_is_echoed_as_it_was_used() -> None:
    assert responses.parse(body(service_tier="flex")).cls is Class.BULK
    assert responses.parse(body(service_tier="flex")).echo["service_tier"] == "flex"
    assert responses.parse(body(service_tier="auto")).echo["service_tier"] == "default"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"input": None}, "input"),
        ({"reasoning": {"effort": "x" * 513}}, "reasoning.effort"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "boss", "content": "hi"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": "hi"}, {"type": "function_call_output"}]}, "input[1].call_id"),
        ({"input": [{"type": {"a": 1}}]}, "input[0]"),
        ({"instructions": 5}, "instructions"),
        ({"instructions": "\ud800"}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": "5"}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"background": True, "store": False}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"conversation": "c"}, "conversation"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"text": "x"}, "text"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "name": "g"}, "tools": [{"type": "function", "name": "f"}]},
            "tool_choice",
        ),
        ({"tool_choice": "required", "tools": [{"type": "web_search"}]}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "g"}]}}, "tool_choice"),
        ({"tools": {}}, "tools"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": 5}]}, "tools[0].parameters"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": "message.output_text.logprobs"}, "include"),
        ({"store": "yes"}, "store"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"reasoning": {"effort": 1}}, "reasoning.effort"),
        ({"truncation": "maybe"}, "truncation"),
    ],
)
def test_a_bad_field_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    error = refusal(body(**fields))

    assert (error.status, error.param) == (400, param)
    assert param in error.message and "_Item" not in error.message


@pytest.mark.parametrize(
    ("choice", "means", "names", "echo"),
    [
        (None, "auto", ["f", "g"], "auto"),
        ("none", "none", ["f", "g"], "none"),
        ("required", "required", ["f", "g"], "required"),
        ({"type": "function", "name": "g"}, "=g", ["f", "g"], {"type": "function", "name": "g"}),
        ({**ALLOWED, "tools": [*ALLOWED["tools"], {"type": "mcp"}]}, "required", ["g"], ALLOWED),
    ],
)
def test_the_model_is_given_functions_and_told_how_to_choose(
    choice: object, means: str, names: list[str], echo: object
) -> None:
    draft = responses.parse(body(tools=[F, {"type": "web_search"}, G], tool_choice=choice, parallel_tool_calls=False))

    assert draft.tools is not None
    assert (draft.tools.choice, draft.tools.parallel) == (means, False)
    assert [function["name"] for function in draft.tools.functions] == names
    assert draft.echo["tool_choice"] == echo


def test_functions_are_echoed_with_every_key_and_tools_of_others_are_left_out() -> None:
    draft = responses.parse(body(tools=[F, {"type": "namespace", "name": "x"}, G]))

    assert draft.echo["tools"] == [
        {"type": "function", "name": "f", "description": "d", "parameters": None, "strict": None},
        {"type": "function", "name": "g", "description": None, "parameters": {"a": 1}, "strict": None},
    ]
    assert draft.tools == Tools(functions=({"name": "f", "description": "d"}, {"name": "g", "parameters": {"a": 1}}))


@pytest.mark.parametrize("choice", ["auto", {"type": "allowed_tools", "tools": [{"type": "web_search"}]}])
def test_no_function_is_no_tools(choice: object) -> None:
    assert responses.parse(body(tools=[{"type": "web_search"}], tool_choice=choice)).tools is None


def test_an_answer_shows_the_tools_that_the_model_was_given() -> None:
    """Of a model that cannot call, admission leaves out the tools that it need not use."""
    draft = responses.parse(body(tools=[F]))
    without = msgspec.structs.replace(draft, tools=None)

    assert ResponsesAnswer(ID, draft, 1000).created()[0]["response"]["tools"] == draft.echo["tools"] != []
    assert ResponsesAnswer(ID, without, 1000).created()[0]["response"]["tools"] == []


def test_an_answer_says_whether_it_is_stored_as_it_was_decided() -> None:
    draft = responses.parse(body())
    not_kept = msgspec.structs.replace(draft, store=False)

    assert draft.store, "as at OpenAI"
    assert ResponsesAnswer(ID, draft, 1000).created()[0]["response"]["store"] is True
    assert ResponsesAnswer(ID, not_kept, 1000).created()[0]["response"]["store"] is False


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


@pytest.mark.parametrize(
    ("format_", "grammar", "echo"),
    [
        (None, {}, {"type": "text"}),
        ({"type": "text"}, {}, {"type": "text"}),
        ({"type": "json_object"}, {"json_object": True}, {"type": "json_object"}),
        (
            {"type": "json_schema", "name": "n", "schema": SCHEMA},
            {"json": SCHEMA},
            {"type": "json_schema", "name": "n", "description": None, "schema": SCHEMA, "strict": False},
        ),
    ],
)
def test_a_format_is_a_grammar(format_: object, grammar: object, echo: object) -> None:
    draft = responses.parse(body(text={"format": format_, "verbosity": "low"}))

    assert draft.sampling.grammar == grammar
    assert draft.echo["text"] == {"format": echo}


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({}, None),
        ({"top_logprobs": 0}, None),
        ({"include": ["reasoning.encrypted_content"]}, None),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"top_logprobs": 3}, 3),
        ({"top_logprobs": 3, "include": ["message.output_text.logprobs"]}, 3),
    ],
)
def test_log_probabilities_are_asked_for_in_two_ways(fields: dict[str, Any], asked: int | None) -> None:
    assert responses.parse(body(**fields)).sampling.logprobs == asked


def test_effort_none_is_no_thinking() -> None:
    for effort, reasons in ((None, True), ("low", True), ("none", False)):
        draft = responses.parse(body(reasoning={"effort": effort}))
        assert draft.reasons is reasons
        assert draft.echo["reasoning"] == {"effort": effort, "summary": None}
    assert draft.template == {"reasoning_effort": "none", "enable_thinking": False}


def test_what_decides_where_and_how_it_runs_is_in_the_draft() -> None:
    fields = {"prompt_cache_key": "k", "max_output_tokens": 9, "truncation": "auto"}
    draft = responses.parse(body(background=True, previous_response_id="resp_1", **fields))

    assert (draft.affinity, draft.background, draft.previous, draft.max_tokens) == ("k", True, "resp_1", 9)
    assert draft.echo["truncation"] == "auto" and draft.echo["previous_response_id"] == "resp_1"


def test_what_goes_on_may_add_nothing() -> None:
    assert responses.parse({"model": "m", "previous_response_id": "resp_1"}).messages == ()


def test_the_sdk_reads_what_an_answer_repeats() -> None:
    """As its own types say, which are stricter than it is."""
    format_ = {"type": "json_schema", "name": "n", "schema": SCHEMA}
    asked = body(
        tools=[F, G], text={"format": format_}, reasoning={"effort": "high"}, metadata={"a": "b"}, top_logprobs=2
    )

    for choice in ("auto", "none", "required", {"type": "function", "name": "f"}, ALLOWED):
        draft = responses.parse({**asked, "tool_choice": choice})
        shown = Response.model_validate(whole(ResponsesAnswer(ID, draft, 1000), "Hi", ending(1)), strict=True)
        assert [tool.to_dict()["name"] for tool in shown.tools] == ["f", "g"]
        assert shown.text is not None and shown.text.format is not None
        assert shown.text.format.to_dict()["schema"] == SCHEMA


@pytest.mark.parametrize("store", [True, False])
def test_no_part_of_a_prompt_is_put_down_that_is_not_to_be_stored(store: bool) -> None:
    format_ = {"type": "json_schema", "name": "n", "schema": SCHEMA}
    draft = responses.parse(body(instructions="secret", tools=[F], text={"format": format_}, store=store))
    view = decode(encode(view_of(draft, Caller(org_id="o", project_id="p", key_id="k"))))

    shown = ResponsesAnswer(ID, view, 1000).created()[0]["response"]
    assert set(shown) == RESOURCE_KEYS and shown["store"] is store
    assert (view.items is not None) is store
    if store:
        assert shown == ResponsesAnswer(ID, draft, 1000).created()[0]["response"]
    else:
        assert (shown["instructions"], shown["tools"], shown["text"]["format"]["schema"]) == (None, [], {})


names = st.sampled_from(sorted(set(responses.ResponsesBody.model_fields) | set(responses._UNSERVED)))
words = st.sampled_from(
    ["message", "function_call", "function", "user", "assistant", "auto", "required", "json_schema", "input_text"]
)
keys = st.sampled_from(["type", "role", "content", "name", "call_id", "output", "arguments", "id", "format", "tools"])
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | words
values = st.recursive(
    plain, lambda v: st.lists(v, max_size=3) | st.dictionaries(keys | st.text(max_size=3), v, max_size=4), max_leaves=9
)


@given(st.dictionaries(names, values, max_size=6), st.booleans())
def test_any_body_is_a_draft_or_a_bad_request(fields: dict[str, Any], plausible: bool) -> None:
    error = None
    try:
        draft = responses.parse(body(**fields) if plausible else fields)
    except BadRequest as e:
        error = e

    if error is None:
        assert draft.messages or draft.previous or draft.refers
    else:
        assert error.status == 400 and "<" not in (error.param or "")
        error.message.encode()


@given(values)
def test_any_json_is_a_draft_or_a_bad_request(value: object) -> None:
    with contextlib.suppress(BadRequest):
        responses.parse(value)


@given(names, values)
def test_any_frame_is_a_command(name: str, value: object) -> None:
    frame = json.dumps({"type": "response.create", **body(), name: value})

    assert isinstance(parse_event(frame), Create | Refused)


# Events


@pytest.mark.parametrize(
    ("outcome", "status", "last"),
    [
        (Outcome.COMPLETED, "completed", "completed"),
        (Outcome.LENGTH, "incomplete", "incomplete"),
        (Outcome.CANCELLED, "cancelled", "incomplete"),
        (Outcome.FAILED, "failed", "failed"),
        (Outcome.WORKER_LOST, "failed", "failed"),
        (Outcome.GATEWAY_LOST, "failed", "failed"),
    ],
)
def test_the_sdk_follows_a_stream_to_its_end(outcome: Outcome, status: str, last: str) -> None:
    """Its types take each event strictly, and its accumulator ends with the text that was sent."""
    events = streamed(answering(), ["Hel", "", "lo"], ending(4, outcome))

    state = ResponseStreamState(text_format=omit, input_tools=omit)
    for event in events:
        json.dumps(event)
        SERVER_EVENT.validate_python({**event, "stream_id": "a"}, strict=True)
        state.handle_event(STREAM_EVENT.validate_python(event, strict=True))

    closing = ["output_text.done", "content_part.done", "output_item.done"] if last != "failed" else []
    opening = ["created", "queued", "queued", "in_progress", "output_item.added", "content_part.added"]
    assert types(events) == [*opening, "output_text.delta", "output_text.delta", *closing, last]
    final = Response.model_validate(events[-1]["response"], strict=True)
    assert (final.id, final.status, final.output_text) == ("resp_" + ID.replace("-", ""), status, "Hello")
    if status == "completed":
        assert state._completed_response is not None and state._completed_response.output_text == "Hello"


def test_every_response_object_has_every_key_of_the_specification() -> None:
    events = streamed(answering(), ["Hi"], ending(1)) + answering().failure(WorkerLost())
    shown = [event["response"] for event in events if "response" in event] + [whole(answering(), "Hi", ending(1))]

    assert all(set(response) == RESOURCE_KEYS for response in shown)
    assert len(RESOURCE_KEYS) == 31


def test_ids_and_times_come_from_the_request_alone() -> None:
    """Two gateways that answer for the same request say the same."""
    one, other = (streamed(answering(), ["a", "b"], ending(2)) for _ in range(2))

    assert one == other


@given(st.lists(st.text(max_size=3), max_size=30), st.sampled_from(Outcome))
def test_numbers_rise_and_depend_on_the_text_alone(pieces: list[str], outcome: Outcome) -> None:
    """However it comes in pieces, a text that ends at character c has number 103 + c, and the end comes after it."""
    events = streamed(answering(), pieces, ending(len(pieces), outcome))

    numbers = [event["sequence_number"] for event in events]
    text, said = "".join(pieces), ""
    assert all(a < b for a, b in pairwise(numbers))
    assert numbers[-1] == 103 + len(text) + 4
    for event in events:
        if event["type"] == "response.output_text.delta":
            said += event["delta"]
            assert event["sequence_number"] == 103 + len(said)
    assert said == text


texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=24)


def cut(text: str, edges: set[int]) -> list[str]:
    return [text[a:b] for a, b in pairwise(sorted({0, len(text)} | {edge for edge in edges if edge < len(text)}))]


splits = st.sets(st.integers(1, 23))


@given(texts, splits, splits, st.integers(-1, 140), st.sampled_from(Outcome))
def test_what_a_client_that_comes_back_is_told_is_what_it_missed(
    text: str, here: set[int], there: set[int], after: int, outcome: Outcome
) -> None:
    """Any cursor, however either gateway cut the text: what it has and what it is told make one stream."""
    first = streamed(answering(), cut(text, here), ending(9, outcome))
    again = [
        event
        for event in streamed(answering(after), cut(text, there), ending(9, outcome))
        if event["type"] != "response.queued"
    ]

    had = [event for event in first if event["sequence_number"] <= after]
    missed = [event for event in first if event["sequence_number"] > after]
    seen = text[: max(0, after - 103)]
    assert all(event["sequence_number"] > after for event in again)
    assert seen + text_of(again) == text
    if text_of(had) == seen:  # a cursor that this client can have
        assert others(again) == others(missed)
    if again:
        assert again[-1] == first[-1]


def others(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All but text and place, which may come in other pieces."""
    return [e for e in events if e["type"] not in ("response.output_text.delta", "response.queued")]


@given(texts, splits, st.integers(0, 24))
def test_a_stream_of_two_halves_is_followed_by_the_sdk(text: str, edges: set[int], seen: int) -> None:
    """It keeps one state over the broken connection, and ends with the text that was sent."""
    pieces = cut(text, edges)
    first = streamed(answering(), pieces, ending(9))
    broken_at = 103 + min(seen, len(text))
    had = [event for event in first if event["sequence_number"] <= broken_at]
    after = had[-1]["sequence_number"]

    state = ResponseStreamState(text_format=omit, input_tools=omit)
    for event in had + streamed(answering(after), [text], ending(9)):
        state.handle_event(STREAM_EVENT.validate_python(event, strict=True))

    assert state._completed_response is not None and state._completed_response.output_text == text


@given(texts, splits, splits, st.integers(0, 24))
def test_a_client_that_leaves_out_by_number_what_it_has_gets_the_rest(
    text: str, here: set[int], there: set[int], seen: int
) -> None:
    """The SDK's helper asks for the whole stream. Wherever its first one was cut, the second one is cut there too."""
    seen = min(seen, len(text))
    framing = ResponsesFraming(ID, responses.parse(body()), delivered=seen)

    again = [event for piece in cut(text, there) for event in framing.text(Run("text", piece))]

    assert text[:seen] + text_of([event for event in again if event["sequence_number"] > 103 + seen]) == text
    assert text_of(again) == text


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event.get("delta", "") for event in events)


@pytest.mark.parametrize("after", [0, 3, 98, 99])
def test_a_client_that_comes_back_while_it_waits_is_told_its_place(after: int) -> None:
    answer = answering(after)

    events = answer.created() + answer.queued(5) + answer.queued(4) + answer.in_progress()

    assert types(events) == ["queued", "queued", "in_progress"]
    assert [event["sequence_number"] for event in events[:2]] == [min(after + 1, 99), min(after + 2, 99)]


def test_a_place_in_the_queue_is_told_whenever_it_changes() -> None:
    """The numbers for it are used up one day, and then the last one serves: a place is news, not history."""
    answer = answering()
    answer.created()

    events = [event for place in range(200) for event in answer.queued(place, 1500)]

    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(1, 100)) + [99] * 101
    assert events[3]["queue"] == {"place": 3, "estimate_ms": 1500, "worker": None}
    assert events[3]["response"]["status"] == "queued"


def test_a_worker_that_is_being_started_is_told() -> None:
    starting = Starting(state=WorkerState.LOADING, detail="weights 40 %")

    [event] = answering().queued(1, 9000, starting)

    assert event["queue"] == {"place": 1, "estimate_ms": 9000, "worker": {"state": "loading", "detail": "weights 40 %"}}
    SERVER_EVENT.validate_python(event, strict=True)


def test_nothing_is_said_twice() -> None:
    answer = answering()

    assert types(answer.in_progress()) == ["in_progress"]
    assert types(answer.text("a")) == ["output_item.added", "content_part.added", "output_text.delta"]
    assert types(answer.text("b")) == ["output_text.delta"]
    assert answer.in_progress() == answer.queued(1, None) == answer.text("") == []


def test_an_empty_answer_still_has_its_item() -> None:
    events = answering().ending(ending(0))

    assert types(events)[:3] == ["in_progress", "output_item.added", "content_part.added"]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""


@pytest.mark.parametrize(
    ("outcome", "last"), [(Outcome.EXPIRED, "failed"), (Outcome.FAILED, "failed"), (Outcome.CANCELLED, "incomplete")]
)
def test_what_ends_while_it_waits_has_no_output(outcome: Outcome, last: str) -> None:
    answer = answering()
    events = answer.created() + answer.queued(1, None) + answer.ending(ending(0, outcome))

    assert types(events) == ["created", "queued", last]
    assert events[-1]["response"]["output"] == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (WorkerLost(), "server_error"),
        (Draining(), "server_error"),
        (LimitReached(), "rate_limit_exceeded"),
        (BadRequest(), "invalid_prompt"),
    ],
)
def test_a_gateways_own_failure_ends_the_stream_with_what_was_sent(error: ForebayError, code: str) -> None:
    answer = answering()
    events = answer.created() + answer.text("Hel") + answer.failure(error)

    final = Response.model_validate(events[-1]["response"], strict=True)
    assert final.error is not None and (final.error.code, final.error.message) == (code, error.message)
    assert (final.status, final.output_text) == ("failed", "Hel")
    assert events[-1]["sequence_number"] == 106, "whoever comes back after it misses nothing"


def test_a_warm_up_completes_without_output() -> None:
    """Codex sends one first on every connection, and reads it as any other response."""
    events = answering().warmed()

    state = ResponseStreamState(text_format=omit, input_tools=omit)
    for event in events:
        state.handle_event(STREAM_EVENT.validate_python(event, strict=True))

    assert types(events) == ["created", "in_progress", "completed"]
    assert state._completed_response is not None and state._completed_response.output == []
    assert set(events[-1]["response"]) == RESOURCE_KEYS


@pytest.mark.parametrize("outcome", Outcome)
def test_a_response_that_is_asked_for_later_is_what_its_stream_ended_with(outcome: Outcome) -> None:
    """An error too: what was delivered, and then why there is no more."""
    last = streamed(answering(), ["Hel", "lo"], ending(2, outcome))[-1]["response"]

    assert answering().so_far([Run("text", "Hello")], False, ending(2, outcome)) == last


def test_a_response_that_has_not_ended_is_shown_as_far_as_it_is() -> None:
    assert answering().so_far([], True, None)["status"] == "queued"
    shown = answering().so_far([Run("text", "Hel")], False, None)
    assert (shown["status"], Response.model_validate(shown, strict=True).output_text) == ("in_progress", "Hel")


@pytest.mark.parametrize(("given", "after"), [(None, -1), ("0", 0), ("107", 107), (107, 107)])
def test_a_cursor_is_a_number(given: object, after: int) -> None:
    assert responses.cursor(given) == after


@pytest.mark.parametrize("given", ["", "x", "-1", "1.5", "٣", "²", "1" * 11, 1.5, -1, True, [1], {}])
def test_anything_else_is_no_cursor(given: object) -> None:
    with pytest.raises(BadRequest) as caught:
        responses.cursor(given)
    assert (caught.value.status, caught.value.param) == (400, "starting_after")


def test_a_cursor_beyond_the_end_is_refused() -> None:
    four, none = [Run("text", "four")], list[Run]()
    for good in ((0, none, False), (102, none, False), (107, four, False), (111, four, True), (107, none, True)):
        responses.check_cursor(*good)
    for bad in ((103 + 5, four, False), (103 + 9, four, True), (103 + 1, none, False)):
        with pytest.raises(BadRequest):
            responses.check_cursor(*bad)


@given(st.text())
def test_no_text_is_an_id_but_one_of_ours(text: str) -> None:
    assert responses.request_id_of(text) is None
    assert responses.request_id_of(answering().id) == ID
    assert responses.request_id_of(answering().id + "\n") is None


def test_a_whole_answer_is_what_the_stream_ends_with() -> None:
    for outcome in (Outcome.COMPLETED, Outcome.LENGTH):
        last = streamed(answering(), ["Hello"], ending(1, outcome))[-1]["response"]
        assert whole(answering(), "Hello", ending(1, outcome)) == last


def test_a_whole_answer_that_failed_is_an_error() -> None:
    with pytest.raises(WorkerLost, match="gone"):
        whole(answering(), "Hel", ending(1, Outcome.WORKER_LOST, message="gone"))


def test_a_cut_answer_says_why_and_what_it_used() -> None:
    last = streamed(answering(), ["Hello"], ending(1, Outcome.LENGTH))[-1]["response"]

    assert last["incomplete_details"] == {"reason": "max_output_tokens"}
    assert last["output"][0]["status"] == "incomplete"
    assert last["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 1,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 8,
    }


# WebSocket frames


def test_a_create_carries_its_draft_without_what_belongs_to_the_socket() -> None:
    event = parse_event(json.dumps({"type": "response.create", "stream_id": "a", "generate": False, **CODEX}))

    assert event == Create(draft=responses.parse(CODEX), stream_id="a", generate=False)


@pytest.mark.parametrize(
    "said", [{}, {"stream": None}, {"stream": False}, {"stream": "x"}, {"background": True, "store": False}]
)
def test_a_socket_streams_whatever_the_body_says(said: dict[str, Any]) -> None:
    event = parse_event(json.dumps({"type": "response.create", **body(**said)}))

    assert isinstance(event, Create)
    assert event.draft.stream and event.generate and event.stream_id is None
    assert not event.draft.background


def test_a_cancel_names_its_response() -> None:
    assert parse_event('{"type":"response.cancel","response_id":"resp_1"}') == Cancel(response_id="resp_1")


def test_a_resume_names_its_response_and_its_cursor() -> None:
    whole, rest = (
        '{"type":"response.resume","response_id":"resp_1"}',
        '{"type":"response.resume","response_id":"resp_1","starting_after":7,"stream_id":"a"}',
    )

    assert parse_event(whole) == Resume(response_id="resp_1")
    assert parse_event(rest) == Resume(response_id="resp_1", starting_after=7, stream_id="a")


def test_steering_is_answered_with_the_event_that_says_it_is_not_supported() -> None:
    steer = parse_event('{"type":"response.steer","previous_response_id":"resp_1","input":"left"}')

    assert steer == Steer(previous_response_id="resp_1", input="left")
    told = SERVER_EVENT.validate_python(steer_failed(steer), strict=True)
    assert (told.type, told.error.code) == ("response.steer.failed", "steering_not_supported")
    assert told.steer.input == "left"


@pytest.mark.parametrize(
    ("text", "code", "param", "stream_id"),
    [
        ("", "invalid_json", None, None),
        ("{", "invalid_json", None, None),
        ("[" * 100_000, "invalid_json", None, None),
        ("[]", "invalid_json", None, None),
        ('"\\ud800"', "invalid_json", None, None),
        ("{}", "missing_required_parameter", "type", None),
        ('{"type":"response.create","stream_id":"a"}', "missing_required_parameter", "model", "a"),
        ('{"type":"response.create","stream_id":""}', "invalid_stream_id", "stream_id", None),
        ('{"type":"response.create","stream_id":"a b"}', "invalid_stream_id", "stream_id", None),
        ('{"type":"response.create","stream_id":"a\\n"}', "invalid_stream_id", "stream_id", None),
        ('{"type":"response.create","stream_id":5}', "invalid_stream_id", "stream_id", None),
        (f'{{"type":"response.create","stream_id":"{"a" * 257}"}}', "invalid_stream_id", "stream_id", None),
        ('{"type":"response.create","generate":1}', "invalid_value", "generate", None),
        ('{"type":"response.resume","stream_id":"a"}', "invalid_value", "response_id", "a"),
        ('{"type":"response.resume","response_id":"r","starting_after":"x"}', "invalid_value", "starting_after", None),
        ('{"type":"response.cancel","stream_id":"a"}', "invalid_value", "response_id", "a"),
        ('{"type":"response.steer"}', "invalid_value", "previous_response_id", None),
        ('{"type":"session.update","stream_id":"a"}', "unknown_event", "type", "a"),
        ('{"type":5}', "unknown_event", "type", None),
    ],
)
def test_a_bad_frame_is_refused_on_its_lane(text: str, code: str, param: str | None, stream_id: str | None) -> None:
    """The socket stays open, and a named lane hears of its own error."""
    refused = parse_event(text)

    assert isinstance(refused, Refused)
    assert (refused.error.error_code, refused.error.param, refused.stream_id) == (code, param, stream_id)


@given(st.text())
def test_any_text_is_a_command(text: str) -> None:
    assert isinstance(parse_event(text), Refused)


def test_an_error_frame_is_the_one_that_the_guide_shows() -> None:
    refused = BadRequest(
        "Previous response with id 'resp_abc' not found.",
        param="previous_response_id",
        code="previous_response_not_found",
    )

    frame = error_frame(refused, "main")
    assert frame == {
        "type": "error",
        "status": 400,
        "stream_id": "main",
        "error": {
            "type": "invalid_request_error",
            "code": "previous_response_not_found",
            "message": "Previous response with id 'resp_abc' not found.",
            "param": "previous_response_id",
        },
    }
    assert SERVER_EVENT.validate_python(frame, strict=True).stream_id == "main"


def test_an_error_frame_of_the_default_lane_names_none() -> None:
    assert "stream_id" not in error_frame(WorkerLost())


def test_an_error_frame_always_has_a_code_and_says_when_to_come_back() -> None:
    """The specification requires a string; a socket has no headers of its own."""
    assert error_frame(ForebayError())["error"]["code"] == "server_error"
    assert error_frame(LimitReached(retry_after_ms=1200))["error"]["headers"] == {
        "retry-after-ms": "1200",
        "retry-after": "2",
    }
