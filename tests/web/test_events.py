"""Answers of Responses as events: thoughts, text and calls, one numbering for all gateways, shapes as specified."""

from __future__ import annotations

import json
from importlib import resources
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from core.errors import BadRequest, WorkerLost
from core.stream.frames import Logprob, Run, joined
from core.values import Ending, Outcome, Usage
from web.dialects import responses
from web.dialects.events import ResponsesAnswer, cut_at, last_number
from web.dialects.framing import ResponsesFraming

ID = "01939c1e-6f00-7abc-8def-0123456789ab"
CODE = ID.replace("-", "")
STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
DRAFT = responses.parse({"model": "m", "input": "hi"})
Event = dict[str, Any]

ANSWER = [
    Run("reasoning", "hm"),
    Run("text", "Let me look."),
    Run("call:0", "f"),
    Run("arguments:0", '{"a":1}'),
    Run("call:1", "g"),
    Run("arguments:1", "{}"),
    Run("text", "Done"),
    Run("stop", "END"),
]


def answering(after: int = -1) -> ResponsesAnswer:
    return ResponsesAnswer(ID, DRAFT, 1000, after)


def ending(outcome: Outcome = Outcome.COMPLETED) -> Ending:
    usage = Usage(input_tokens=7, cached_tokens=4, output_tokens=9, reasoning_tokens=2)
    return Ending(id=ID, attempt=1, outcome=outcome, usage=usage, ended_ms=2_500_000)


def streamed(answer: ResponsesAnswer, pieces: list[Run], outcome: Outcome = Outcome.COMPLETED) -> list[Event]:
    events = answer.created() + answer.in_progress()
    for piece in pieces:
        events += answer.text(piece.text, piece.kind, piece.logprobs)
    return events + answer.ending(ending(outcome))


def types(events: list[Event]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def numbers(events: list[Event]) -> list[int]:
    return [event["sequence_number"] for event in events]


def test_each_item_is_told_from_its_beginning_to_its_end() -> None:
    events = streamed(answering(), ANSWER)

    spoken = ["output_item.added", "content_part.added"]
    ended = ["content_part.done", "output_item.done"]
    called = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    text = [*spoken, "output_text.delta", "output_text.done", *ended]
    thought = [*spoken, "reasoning_text.delta", "reasoning_text.done", *ended]
    assert types(events) == ["created", "in_progress", *thought, *text, *called, *called, *text, "completed"]
    added, done = ([e["item"] for e in events if e["type"].endswith(what)] for what in ("item.added", "item.done"))
    assert done == events[-1]["response"]["output"]
    assert [(item["id"], item["status"]) for item in added] == [(item["id"], "in_progress") for item in done]
    assert [item["id"] for item in done] == [
        f"{prefix}_{CODE}_{n}" for n, prefix in enumerate(["rs", "msg", "fc", "fc", "msg"])
    ]
    assert done[0]["content"] == [{"type": "reasoning_text", "text": "hm"}] and done[0]["summary"] == []
    assert [(item["name"], item["arguments"]) for item in done[2:4]] == [("f", '{"a":1}'), ("g", "{}")]
    assert [item["name"] for item in added[2:4]] == ["f", "g"] and added[2]["arguments"] == ""
    assert len({item["call_id"] for item in done[2:4]}) == 2
    assert done[4]["content"][0]["text"] == "Done", "what stopped it is not part of it"


def test_numbers_are_those_of_the_table() -> None:
    """Character c of run r has 103 + 6r + c; an item begins with the two numbers before its first and ends with three
    after its last; of a plain answer all is as it was when an answer could be nothing else."""
    plain = numbers(streamed(answering(), [Run("text", "Hello")]))
    called = streamed(answering(), [Run("reasoning", "hm"), Run("call:0", "f"), Run("arguments:0", "{}")])

    assert plain == [0, 100, 101, 102, 108, 109, 110, 111, 112]
    thought = [101, 102, 105, 106, 107, 108]
    # Runs 1 and 2: the name ends at character 3, the arguments at 5.
    call = [103 + 6 + 3 + 1, 103 + 12 + 5, 103 + 12 + 5 + 2, 103 + 12 + 5 + 3]
    assert numbers(called) == [0, 100, *thought, *call, 103 + 12 + 5 + 4]


def test_a_call_without_arguments_is_whole_too() -> None:
    events = streamed(answering(), [Run("call:0", "f"), Run("call:1", "g")])

    one = ["output_item.added", "function_call_arguments.done", "output_item.done"]
    assert types(events) == ["created", "in_progress", *one, *one, "completed"]
    assert [(item["name"], item["arguments"]) for item in events[-1]["response"]["output"]] == [("f", ""), ("g", "")]


def test_what_is_not_known_is_passed_over_and_ends_no_item() -> None:
    runs = [Run("text", "a"), Run("video", "~~"), Run("text", "b"), Run("arguments:7", "{}"), Run("x/y:z", "?")]

    events = streamed(answering(), runs[:4])

    assert "".join(event.get("delta", "") for event in events) == "ab"
    assert len(events[-1]["response"]["output"]) == 1
    assert events[-1]["sequence_number"] == 103 + 6 * 3 + 6 + 4


@pytest.mark.parametrize(
    ("outcome", "status", "item"),
    [
        (Outcome.LENGTH, "incomplete", "incomplete"),
        (Outcome.CANCELLED, "cancelled", "incomplete"),
        (Outcome.FAILED, "failed", "incomplete"),
    ],
)
@pytest.mark.parametrize("cut", range(1, len(ANSWER) - 1))
def test_what_ends_early_leaves_its_last_item_incomplete(outcome: Outcome, status: str, item: str, cut: int) -> None:
    events = streamed(answering(), ANSWER[:cut], outcome)

    response = events[-1]["response"]
    assert response["status"] == status
    assert [each["status"] for each in response["output"][:-1]] == ["completed"] * (len(response["output"]) - 1)
    assert response["output"][-1]["status"] == item
    if outcome is not Outcome.FAILED:
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == response["output"]
    Response.model_validate(response, strict=True)


def test_a_gateways_own_failure_shows_what_was_told() -> None:
    answer = answering()
    told = [event for run in ANSWER[:4] for event in answer.text(run.text, run.kind)]

    [failed] = answer.failure(WorkerLost())

    assert failed["sequence_number"] == told[-1]["sequence_number"]
    assert [item["status"] for item in failed["response"]["output"]] == ["completed", "completed", "incomplete"]


def test_thought_is_counted() -> None:
    usage = streamed(answering(), ANSWER)[-1]["response"]["usage"]

    assert usage["output_tokens_details"] == {"reasoning_tokens": 2}


def logprobs_of(text: str) -> tuple[Logprob, ...]:
    """One token for every two characters."""
    return tuple(
        Logprob(text[at : at + 2], -0.5, ((text[at : at + 2], -0.5), ("é", -2.0))) for at in range(0, len(text), 2)
    )


def test_log_probabilities_are_those_of_the_text_alone() -> None:
    runs = [Run("reasoning", "hmhm", logprobs_of("hmhm")), Run("text", "Hello", logprobs_of("Hello"))]

    events = streamed(answering(), runs)

    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    told = [one for event in deltas for one in event["logprobs"]]
    assert [one["token"] for one in told] == ["He", "ll", "o"]
    assert told[0]["top_logprobs"][1] == {"token": "é", "logprob": -2.0, "bytes": [195, 169]}
    part = events[-1]["response"]["output"][1]["content"][0]
    done = next(event for event in events if event["type"] == "response.output_text.done")
    assert part["logprobs"] == done["logprobs"] == told
    for event in events:
        STREAM_EVENT.validate_python(event, strict=True)


def test_log_probabilities_that_no_text_follows_are_in_the_whole() -> None:
    answer = answering()
    answer.text("Hi", "text", logprobs_of("Hi"))

    assert answer.text("", "text", (Logprob("<end>", -1.0),)) == []
    part = answer.ending(ending())[-1]["response"]["output"][0]["content"][0]
    assert [one["token"] for one in part["logprobs"]] == ["Hi", "<end>"]


def test_no_probability_is_not_a_number() -> None:
    """JSON has no infinity, which is what vLLM says of a token that cannot be."""
    [*_, delta] = answering().text("a", "text", (Logprob("a", float("-inf")),))

    assert json.loads(json.dumps(delta, allow_nan=False))["logprobs"][0]["logprob"] < -1000


# Any answer, in any pieces

words = st.text(st.characters(codec="utf-8"), min_size=1, max_size=6)


@st.composite
def answers(draw: st.DrawFn) -> list[Run]:
    """The runs of an answer that a worker may give, and some of kinds that are not known here."""
    runs: list[Run] = []
    calls = 0
    for what in draw(st.lists(st.sampled_from(["text", "reasoning", "call", "video", "stop"]), max_size=6)):
        text = draw(words)
        if what != "call":
            runs.append(Run(what, text, logprobs_of(text) if draw(st.booleans()) else ()))
            continue
        runs.append(Run(f"call:{calls}", text))
        if arguments := draw(st.text(max_size=6)):
            runs.append(Run(f"arguments:{calls}", arguments))
        calls += 1
    return joined(runs)


def cut(runs: list[Run], edges: set[int]) -> list[Run]:
    """The pieces of runs that are cut at these characters of the whole."""
    begins = [0, *accumulate(len(run.text) for run in runs)]
    return [
        piece
        for run, begin in zip(runs, begins, strict=False)
        for piece in cut_at(
            run, {0, len(run.text)} | {edge - begin for edge in edges if 0 < edge - begin < len(run.text)}
        )
    ]


def place_of(runs: list[Run], number: int) -> int:
    """The character of the whole up to which a client has seen that has everything up to a number."""
    begin = 0
    for r, run in enumerate(runs):
        seen = number - 103 - 6 * r
        if seen < begin + len(run.text):
            return max(seen, begin)
        begin += len(run.text)
    return begin


edges = st.sets(st.integers(1, 40), max_size=12)
cursors = st.integers(-1, 190)


@given(answers(), edges, st.sampled_from(Outcome))
def test_numbers_rise_whatever_the_answer_is_cut_in(runs: list[Run], here: set[int], outcome: Outcome) -> None:
    events = streamed(answering(), cut(runs, here), outcome)

    assert all(a < b for a, b in pairwise(numbers(events)))
    assert events[-1]["sequence_number"] == last_number(runs, True)
    others = [event for event in events if "delta" not in event]
    assert others == [event for event in streamed(answering(), runs, outcome) if "delta" not in event]


@given(answers(), edges, edges, cursors, st.sampled_from(Outcome))
def test_who_comes_back_is_told_exactly_what_has_a_higher_number(
    runs: list[Run], here: set[int], there: set[int], after: int, outcome: Outcome
) -> None:
    """Any cut of the answer on either gateway, and any cursor: the second tells what the first would have gone on with,
    if it had cut where the client left."""
    whole = streamed(answering(), cut(runs, there | {place_of(runs, after)}), outcome)

    again = streamed(answering(after), cut(runs, there), outcome)

    assert again == [event for event in whole if event["sequence_number"] > after]


@given(answers(), edges, edges, st.integers(0, 60))
def test_the_sdk_follows_a_stream_over_a_broken_connection(
    runs: list[Run], here: set[int], there: set[int], events_had: int
) -> None:
    """Wherever it breaks, one state sees one stream, and ends with the whole answer."""
    first = streamed(answering(), cut(runs, here))
    had = first[: min(events_had, len(first) - 2) + 1]

    state = ResponseStreamState(text_format=omit, input_tools=omit)
    for event in had + streamed(answering(had[-1]["sequence_number"]), cut(runs, there)):
        state.handle_event(STREAM_EVENT.validate_python(event, strict=True))

    told = state._completed_response
    assert told is not None
    assert [item.to_dict()["id"] for item in told.output] == [item["id"] for item in first[-1]["response"]["output"]]
    assert told.output_text == "".join(run.text for run in runs if run.kind == "text")


@given(answers(), edges, edges)
def test_a_client_that_leaves_out_by_number_what_it_has_gets_the_rest(
    runs: list[Run], here: set[int], there: set[int]
) -> None:
    """The SDK's helper asks for the whole stream. Wherever its first one was cut, the second one is cut there too."""
    first = streamed(answering(), cut(runs, here))
    delivered = sum(len(run.text) for run in runs)
    framing = ResponsesFraming(ID, DRAFT, delivered=delivered)
    again = [event for piece in cut(runs, there) for event in framing.text(piece)] + framing.ending(ending())

    for had in first[2:]:
        fresh = [event for event in again if event["sequence_number"] > had["sequence_number"]]
        rest = [event for event in first if event["sequence_number"] > had["sequence_number"]]
        assert deltas_of(fresh) == deltas_of(rest)


def test_who_asks_for_the_whole_stream_again_is_told_of_tokens_without_characters_too() -> None:
    """Cut as finely as the client may have had it, and stored with all that its first reader was told."""
    said = [("text", "ab"), ("text", ""), ("stop", "END")]
    runs = [Run(kind, text, (Logprob(f"t{n}", -1.0),)) for n, (kind, text) in enumerate(said)]
    framing = ResponsesFraming(ID, DRAFT, delivered=sum(len(run.text) for run in runs))

    last = [event for run in runs for event in framing.text(run)] + framing.ending(ending())

    assert last[-1]["response"]["output"] == answering().so_far(runs, False, ending())["output"]


def deltas_of(events: list[Event]) -> list[tuple[str, str]]:
    """What deltas come to, of each item."""
    texts: dict[str, str] = {}
    for event in events:
        if "delta" in event:
            texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
    return list(texts.items())


@given(answers(), edges, st.sampled_from(Outcome))
def test_a_response_that_is_asked_for_later_is_what_its_stream_ended_with(
    runs: list[Run], here: set[int], outcome: Outcome
) -> None:
    answer = answering()
    last = streamed(answer, cut(runs, here), outcome)[-1]["response"]

    assert answer.final == last
    assert answering().so_far(runs, False, ending(outcome)) == last


@given(answers(), edges)
def test_a_cursor_is_good_if_something_has_that_number(runs: list[Run], here: set[int]) -> None:
    """Also while the answer is under way: whatever was told of it by then."""
    answer = answering()
    told = answer.created() + answer.in_progress()
    for done, piece in enumerate(cut(runs, here), 1):
        told += answer.text(piece.text, piece.kind, piece.logprobs)
        responses.check_cursor(told[-1]["sequence_number"], cut(runs, here)[:done], False)
    told += answer.ending(ending())

    responses.check_cursor(told[-1]["sequence_number"], runs, True)
    with pytest.raises(BadRequest):
        responses.check_cursor(told[-1]["sequence_number"] + 1, runs, True)


# The specification's own schemas


@pytest.fixture(scope="module")
def schemas() -> Any:
    pytest.importorskip("llm_comply")
    raw = resources.files("llm_comply.specs").joinpath("openresponses.json").read_bytes()
    return json.loads(raw)


#: What OpenAI and its clients call an event, and Open Responses calls by another name.
RENAMED = {
    "response.reasoning_text.delta": "response.reasoning.delta",
    "response.reasoning_text.done": "response.reasoning.done",
}


def schema_of(event_type: str, spec: Any) -> str:
    for name, schema in spec["components"]["schemas"].items():
        if event_type in schema.get("properties", {}).get("type", {}).get("enum", []):
            return str(name)
    raise AssertionError(f"the specification has no {event_type}")


@pytest.mark.parametrize("outcome", Outcome)
@pytest.mark.parametrize("runs", [[], ANSWER[:1], ANSWER])
def test_every_event_and_object_is_what_the_specification_says(schemas: Any, runs: list[Run], outcome: Outcome) -> None:
    import jsonschema

    draft = responses.parse(
        {
            "model": "m",
            "input": "hi",
            "instructions": "Be brief.",
            "reasoning": {"effort": "low"},
            "tools": [{"type": "function", "name": "f"}, {"type": "web_search"}],
            "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "f"}]},
            "text": {"format": {"type": "json_object"}},
            "max_output_tokens": 99,
        }
    )
    pieces = [*runs[:1], *(Run(run.kind, run.text, logprobs_of(run.text)) for run in runs[1:])]
    answer = ResponsesAnswer(ID, draft, 1000)
    events = answer.queued(3) + streamed(answer, pieces, outcome)

    for event in events:
        named = {**event, "type": RENAMED.get(event["type"], event["type"])}
        schema = {
            "$ref": f"#/components/schemas/{schema_of(named['type'], schemas)}",
            "components": schemas["components"],
        }
        jsonschema.Draft202012Validator(schema).validate(named)
        for field in {"response", "item", "part"} & event.keys():
            json.dumps(event[field])
