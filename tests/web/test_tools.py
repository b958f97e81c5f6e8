"""Tools in chat completions: what may be asked for, and how calls are told."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from core.catalog import EngineKnobs, Model
from core.errors import BadRequest
from core.stream.frames import Run
from core.values import Outcome, Tools
from tests.web.answers import ID, chunk_of, cut, edges, ending, run
from web import bounds
from web.dialects import chat
from web.dialects.draft import Draft
from web.dialects.framing import ChatFraming, Numbered
from web.dialects.tools import call_id

WEATHER = {"name": "weather", "description": "Of a place", "parameters": {"type": "object"}, "strict": True}
TIME = {"name": "time"}


def tool(function: Any) -> dict[str, Any]:
    return {"type": "function", "function": function}


def body(**fields: Any) -> dict[str, Any]:
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [tool(WEATHER), tool(TIME)]}
    return {**asked, **fields}


def refusal(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        chat.parse(body(**fields))
    return caught.value


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


@pytest.mark.parametrize(
    ("fields", "tools"),
    [
        ({}, Tools(functions=(WEATHER, TIME))),
        ({"tool_choice": None, "parallel_tool_calls": None}, Tools(functions=(WEATHER, TIME))),
        ({"tool_choice": "auto"}, Tools(functions=(WEATHER, TIME))),
        ({"tool_choice": "none"}, Tools(functions=(WEATHER, TIME), choice="none")),
        ({"tool_choice": "required"}, Tools(functions=(WEATHER, TIME), choice="required")),
        ({"tool_choice": named("time")}, Tools(functions=(WEATHER, TIME), choice="=time")),
        ({"tool_choice": allowed("auto", "time")}, Tools(functions=(TIME,))),
        ({"tool_choice": allowed("required", "time", "weather")}, Tools(functions=(WEATHER, TIME), choice="required")),
        ({"parallel_tool_calls": False}, Tools(functions=(WEATHER, TIME), parallel=False)),
        ({"tools": []}, None),
        ({"tools": None}, None),
        ({"tools": [], "tool_choice": "none"}, None),
    ],
)
def test_tools_and_the_choice_among_them(fields: dict[str, Any], tools: Tools | None) -> None:
    assert chat.parse(body(**fields)).tools == tools


def test_what_is_null_of_a_function_is_not_said() -> None:
    asked = tool({"name": "f", "description": None, "parameters": None, "strict": None})

    assert chat.parse(body(tools=[asked])).tools == Tools(functions=({"name": "f"},))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [tool(WEATHER), tool({})]}, "tools[1].function.name"),
        ({"tools": [tool({"name": ""})]}, "tools[0].function.name"),
        ({"tools": [tool({"name": "a b"})]}, "tools[0].function.name"),
        ({"tools": [tool({"name": "a\n"})]}, "tools[0].function.name"),
        ({"tools": [tool({"name": "ä"})]}, "tools[0].function.name"),
        ({"tools": [tool({"name": "a" * 65})]}, "tools[0].function.name"),
        ({"tools": [tool({"name": "f", "description": 5})]}, "tools[0].function.description"),
        ({"tools": [tool({"name": "f", "description": "\ud800"})]}, "tools[0].function.description"),
        ({"tools": [tool({"name": "f", "parameters": []})]}, "tools[0].function.parameters"),
        ({"tools": [tool({"name": "f", "parameters": "{}"})]}, "tools[0].function.parameters"),
        ({"tools": [tool({"name": "f", "parameters": {"a": "x" * 70_000}})]}, "tools[0].function.parameters"),
        ({"tools": [tool({"name": "f", "parameters": {"a": 2**64}})]}, "tools[0].function.parameters"),
        ({"tools": [tool({"name": "f", "parameters": {"\ud800": 1}})]}, "tools[0].function.parameters"),
        ({"tools": [tool({"name": "f", "strict": "yes"})]}, "tools[0].function.strict"),
        ({"tools": [tool({"name": f"f{n}"}) for n in range(129)]}, "tools"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tool_choice": {}}, "tool_choice.type"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": ["a"]}}, "tool_choice.type"),
        ({"tool_choice": named("unknown")}, "tool_choice"),
        ({"tool_choice": allowed("auto", "unknown")}, "tool_choice"),
        ({"tool_choice": allowed("none", "time")}, "tool_choice.allowed_tools.mode"),
        ({"tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": None, "tool_choice": named("time")}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)
def test_a_fault_in_tools_is_refused_by_its_place(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)

    assert (error.status, error.param) == (400, param)
    assert "pydantic" not in error.message and "_ToolChoice" not in error.message
    error.message.encode()


def test_an_answer_that_must_be_a_call_has_no_other_form() -> None:
    """`response_format` is of the content, and there is none; with `auto` there may be."""
    form = {"response_format": {"type": "json_object"}}

    assert chat.parse(body(tool_choice="required", **form)).sampling.grammar == {}
    assert chat.parse(body(tool_choice=named("time"), **form)).sampling.grammar == {}
    assert chat.parse(body(**form)).sampling.grammar == {"json_object": True}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "function", "name", "parameters", "allowed_tools", "tools", "mode"]), inner
        )
    ),
    max_leaves=8,
)


@given(
    json_values | st.lists(json_values.map(tool)), json_values | json_values.map(lambda one: named("f") | {"x": one})
)
def test_any_tools_are_taken_or_a_bad_request(tools: Any, choice: Any) -> None:
    try:
        chat.parse(body(tools=tools, tool_choice=choice))
    except BadRequest as e:
        f"{e.message}{e.param}".encode()


# Which models call tools

PLAIN = Model(name="m", context_tokens=4096)
CALLING = Model(name="m", context_tokens=4096, engine=EngineKnobs(tool_parser="hermes"))


def test_a_model_that_calls_no_tools_is_not_given_any() -> None:
    with pytest.raises(BadRequest) as caught:
        bounds.tools_for(PLAIN, chat.parse(body()))

    assert (caught.value.param, caught.value.error_code) == ("tools", "unsupported_parameter")
    assert bounds.tools_for(PLAIN, chat.parse(body(tool_choice="none"))) is None
    assert bounds.tools_for(PLAIN, chat.parse(body(tools=[]))) is None


def test_responses_leave_tools_alone_that_may_be_left() -> None:
    """Codex sends its tools with every request."""
    tools = Tools(functions=(TIME,))

    assert bounds.tools_for(PLAIN, Draft(dialect="responses", model="m", tools=tools)) is None
    with pytest.raises(BadRequest):
        forced = Tools(functions=(TIME,), choice="required")
        bounds.tools_for(PLAIN, Draft(dialect="responses", model="m", tools=forced))


def test_a_model_that_calls_tools_is_given_them_even_where_it_must_not_call() -> None:
    """As in vLLM: the conversation before may have calls, which the template explains by its tools."""
    draft = chat.parse(body(tool_choice="none"))

    assert bounds.tools_for(CALLING, draft) == draft.tools


# How calls are told

CALLS = [
    run("text", "One moment."),
    run("call:0", "weather"),
    run("arguments:0", '{"place": "Brno"}'),
    run("call:1", "time"),
    run("arguments:1", "{}"),
]


def chunks_of(fields: dict[str, Any], runs: list[Run], outcome: Outcome = Outcome.COMPLETED) -> list[dict[str, Any]]:
    framing = ChatFraming(ID, chat.parse(body(**fields)))
    chunks = [one for one in framing.began() if isinstance(one, Numbered)]
    for piece in runs:
        chunks += framing.text(piece)
    return [chunk_of(one) for one in chunks + framing.ending(ending(outcome))]


@given(edges)
def test_a_call_says_who_it_is_once_and_then_only_arguments(at: set[int]) -> None:
    """SDKs append an id or a name that comes again, and fail on a type that is null; parallel calls have places of
    their own (litellm#37792)."""
    chunks = chunks_of({}, cut(CALLS, at))
    deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]

    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    for index, (name, arguments) in enumerate([("weather", '{"place": "Brno"}'), ("time", "{}")]):
        first, *rest = [call for call in deltas if call["index"] == index]
        assert first == {
            "index": index,
            "id": call_id(ID, 0, index),
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }
        assert all(call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"} for call in rest)
        assert "".join(call["function"]["arguments"] for call in rest) == arguments
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"][0]["finish_reason"]] == [
        "tool_calls"
    ]


def test_an_answer_of_calls_only_has_no_content() -> None:
    whole = ChatFraming(ID, chat.parse(body())).whole(CALLS[1:3], ending())

    ChatCompletion.model_validate(whole, strict=True)
    assert whole["choices"][0]["message"] == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [
            {
                "id": call_id(ID, 0, 0),
                "type": "function",
                "function": {"name": "weather", "arguments": '{"place": "Brno"}'},
            }
        ],
    }
    assert whole["choices"][0]["finish_reason"] == "tool_calls"


def test_a_call_with_text_before_it_has_both() -> None:
    message = ChatFraming(ID, chat.parse(body())).whole(CALLS, ending())["choices"][0]["message"]

    assert message["content"] == "One moment."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "time"]


@pytest.mark.parametrize(
    ("choice", "outcome", "reason"),
    [
        ("auto", Outcome.COMPLETED, "tool_calls"),
        ("required", Outcome.COMPLETED, "tool_calls"),
        (named("weather"), Outcome.COMPLETED, "stop"),
        ("auto", Outcome.LENGTH, "length"),
        (named("weather"), Outcome.LENGTH, "length"),
    ],
)
def test_why_an_answer_with_calls_ended(choice: Any, outcome: Outcome, reason: str) -> None:
    """Of one function that had to be called, OpenAI says "stop"; a call cut by max_tokens is no error (vllm#37937)."""
    runs = [run("call:0", "weather"), run("arguments:0", '{"pla')]
    fields = {"tool_choice": choice}

    assert chunks_of(fields, runs, outcome)[-1]["choices"][0]["finish_reason"] == reason
    whole = ChatFraming(ID, chat.parse(body(**fields))).whole(runs, ending(outcome))
    assert whole["choices"][0]["finish_reason"] == reason
    assert whole["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"pla'


def test_ids_of_calls_are_their_own_and_short_enough() -> None:
    ids = {call_id(ID, choice, call) for choice in range(16) for call in range(256)}

    assert len(ids) == 16 * 256
    assert all(len(one) <= 40 and one.startswith("call_") for one in ids)


def test_each_of_several_answers_has_calls_of_its_own() -> None:
    runs = [
        run("1/call:0", "time"),
        run("0/text", "No."),
        run("1/arguments:0", "{}"),
        run("1/end", "stop"),
        run("0/end", "stop"),
    ]
    whole = ChatFraming(ID, chat.parse(body(n=2))).whole(runs, ending())
    first, second = whole["choices"]

    assert (first["message"]["content"], first["finish_reason"]) == ("No.", "stop")
    assert (second["message"]["tool_calls"][0]["id"], second["finish_reason"]) == (call_id(ID, 1, 0), "tool_calls")
