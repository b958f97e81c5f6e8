"""Items of a Responses conversation: read, kept with ids, put into turns, and gone on from."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import BadRequest
from core.stream.frames import Run
from core.values import Ending, Outcome
from web.dialects import responses
from web.dialects.draft import Call, Draft, Message
from web.dialects.events import ResponsesAnswer
from web.dialects.items import _FOREIGN, messages_of

ID = "01939c1e-6f00-7abc-8def-0123456789ab"
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a":1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "42"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
USER = {"role": "user", "content": "hi"}


def parsed(*items: Any, **fields: Any) -> Draft:
    return responses.parse({"model": "m", "input": list(items), **fields})


def refusal(*items: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        parsed(*items)
    return caught.value


def output_of(*runs: Run) -> list[dict[str, Any]]:
    """What a response of ours had as output."""
    answer = ResponsesAnswer(ID, parsed(USER), 1000)
    ending = Ending(id=ID, attempt=1, outcome=Outcome.COMPLETED)
    output: list[dict[str, Any]] = answer.whole(runs, ending)["output"]
    return output


# Turns


def test_what_the_model_thought_said_and_called_is_one_turn() -> None:
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "Let me look."}]}

    draft = parsed(USER, THOUGHT, said, CALL, {**CALL, "call_id": "c2", "name": "g"}, RESULT)

    calls = (Call("c1", "f", '{"a":1}'), Call("c2", "g", '{"a":1}'))
    assert draft.messages == (
        Message("user", "hi"),
        Message("assistant", "Let me look.", calls=calls, reasoning="hm"),
        Message("tool", "42", call_id="c1", name="f"),
    )


def test_two_messages_of_the_assistant_are_two_turns() -> None:
    one, two = ({"role": "assistant", "phase": "commentary", "content": text} for text in ("a", "b"))

    assert parsed(one, two).messages == (Message("assistant", "a"), Message("assistant", "b"))


def test_text_after_calls_stays_with_them_since_their_results_follow() -> None:
    draft = parsed(CALL, {"role": "assistant", "content": "wait"}, RESULT)

    assert [message.role for message in draft.messages] == ["assistant", "tool"]


def test_a_thought_that_led_to_nothing_is_a_turn_of_its_own() -> None:
    """Some templates want the turns to alternate."""
    assert parsed(USER, THOUGHT, USER).messages[1] == Message("assistant", "", reasoning="hm")


def test_a_thought_is_read_in_short_if_it_is_not_there_in_full() -> None:
    short = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "encrypted_content": "x"}
    closed = {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "x"}

    assert parsed(short, {"role": "assistant", "content": "a"}).messages == (Message("assistant", "a", reasoning="s"),)
    assert parsed(USER, closed).messages == (Message("user", "hi"),)


def test_roles_and_parts_of_all_forms_are_text() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]
    refused = {
        "role": "assistant",
        "content": [{"type": "refusal", "refusal": "no"}],
        "id": "msg_1",
        "status": "completed",
    }

    draft = parsed(
        {"role": "developer", "content": parts}, {"type": "message", "role": "system", "content": "c"}, refused
    )

    assert draft.messages == (Message("system", "a\nb"), Message("system", "c"), Message("assistant", "no"))


def test_a_result_may_have_parts() -> None:
    parts = [{"type": "input_text", "text": "4"}, {"type": "input_text", "text": "2"}]

    assert parsed(CALL, {**RESULT, "output": parts}).messages[-1].content == "4\n2"


def test_a_call_of_free_text_is_a_call_with_one_argument() -> None:
    call = {"type": "custom_tool_call", "call_id": "c1", "name": "sh", "input": 'ls "a"'}

    draft = parsed(call, {"type": "custom_tool_call_output", "call_id": "c1", "output": "x"})

    assert draft.messages == (
        Message("assistant", "", calls=(Call("c1", "sh", '{"input":"ls \\"a\\""}'),)),
        Message("tool", "x", call_id="c1", name="sh"),
    )


@pytest.mark.parametrize("kind", sorted(_FOREIGN))
def test_what_tools_of_others_left_behind_is_passed_over(kind: str) -> None:
    draft = parsed(USER, {"type": kind, "id": "x", "whatever": [1]})

    assert draft.messages == (Message("user", "hi"),)
    assert len(draft.items) == 1


@pytest.mark.parametrize(
    ("item", "param"),
    [
        (5, "input[1]"),
        ({}, "input[1].role"),
        ({"type": 5}, "input[1]"),
        ({"type": "telepathy"}, "input[1]"),
        ({"type": "compaction", "encrypted_content": "x"}, "input[1]"),
        ({"role": "boss", "content": ""}, "input[1].role"),
        ({"role": "user"}, "input[1].content"),
        ({"role": "user", "content": 5}, "input[1].content"),
        ({"role": "user", "content": [5]}, "input[1].content[0]"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[1].content[0].text"),
        ({"role": "user", "content": [{"type": "input_text", "text": "\ud800"}]}, "input[1].content[0].text"),
        ({"role": "user", "content": ["a", {"type": "input_image", "image_url": "x"}]}, "input[1].content[1]"),
        ({"role": "user", "content": [{"type": "input_file"}]}, "input[1].content[0]"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "input[1].content[0]"),
        ({"type": "function_call", "name": "f", "arguments": ""}, "input[1].call_id"),
        ({"type": "function_call", "call_id": "c", "name": "f", "arguments": {}}, "input[1].arguments"),
        ({"type": "function_call_output", "call_id": "c"}, "input[1].output"),
        ({"type": "function_call_output", "call_id": "c", "output": None}, "input[1].output"),
        ({"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}, "input[1].output[0]"),
        ({"type": "reasoning", "content": "\0"}, "input[1].content[0].text"),
        ({"type": "item_reference"}, "input[1].id"),
        ({"type": "message", "role": "user", "content": "", "id": 5}, "input[1].id"),
    ],
)
def test_a_bad_item_is_refused_by_its_path(item: object, param: str) -> None:
    error = refusal(USER, item)

    assert (error.status, error.param) == (400, param)
    assert param in error.message and "_" not in error.message.replace(param, "").replace("input_", "")


def test_what_cannot_be_read_is_refused_with_its_name() -> None:
    assert "'input_image'" in refusal({"role": "user", "content": [{"type": "input_image"}]}).message
    assert "'compaction'" in refusal(USER, {"type": "compaction"}).message


# What is kept


def test_items_are_kept_as_they_are_listed() -> None:
    draft = parsed(USER, {**THOUGHT, "id": "rs_1"}, {**CALL, "id": "fc_1", "status": "completed"}, RESULT)

    user, thought, call, result = draft.items
    assert user == {
        "type": "message",
        "id": user["id"],
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_text", "text": "hi"}],
    }
    assert thought == {**THOUGHT, "id": "rs_1", "status": "completed"}
    assert call == {**CALL, "id": "fc_1", "status": "completed"}
    assert result == {**RESULT, "id": result["id"], "status": "completed"}
    assert user["id"].startswith("msg_") and result["id"].startswith("fco_")


def test_ids_are_the_same_everywhere_and_differ_from_turn_to_turn() -> None:
    same = [parsed(USER, USER).items for _ in range(2)]
    later = parsed(USER, USER, previous_response_id="resp_1").items

    assert same[0] == same[1]
    assert len({item["id"] for item in [*same[0], *later]}) == 4


def test_a_string_is_kept_as_the_message_that_it_is() -> None:
    assert responses.parse({"model": "m", "input": "hi"}).items == parsed(USER).items


# Going on


def test_a_conversation_goes_on_before_the_new_input_and_instructions_are_not_inherited() -> None:
    before = parsed(USER, instructions="Be brief.").items + output_of(
        Run("reasoning", "hm"), Run("text", "Look."), Run("call:0", "f"), Run("arguments:0", "{}")
    )
    call = before[-1]["call_id"]
    draft = parsed({**RESULT, "call_id": call}, instructions="Be kind.", previous_response_id="resp_1")

    whole = responses.continued(draft, before)

    assert whole.messages == (
        Message("system", "Be kind."),
        Message("user", "hi"),
        Message("assistant", "Look.", calls=(Call(call, "f", "{}"),), reasoning="hm"),
        Message("tool", "42", call_id=call, name="f"),
    )
    assert whole.items == draft.items, "only its own are kept with it"
    assert responses.continued(parsed(USER, previous_response_id="resp_1"), before).messages[0] == Message("user", "hi")


def test_what_goes_on_from_nothing_with_nothing_is_refused() -> None:
    draft = responses.parse({"model": "m", "previous_response_id": "resp_1"})

    with pytest.raises(BadRequest, match="no message"):
        responses.continued(draft, [])


def test_a_named_item_of_the_conversation_is_there_already() -> None:
    before = [*parsed(USER).items, *output_of(Run("text", "Hello"))]
    draft = parsed({"type": "item_reference", "id": before[-1]["id"]}, USER, previous_response_id="resp_1")

    whole = responses.continued(draft, before)

    assert [message.content for message in whole.messages] == ["hi", "Hello", "hi"]
    assert [item["role"] for item in whole.items] == ["user"]


def test_an_item_of_another_response_is_put_where_it_is_named() -> None:
    """The AI SDK sends back what it knows to be stored by name, with no previous_response_id."""
    [hello] = output_of(Run("text", "Hello"))
    draft = parsed(USER, {"id": hello["id"]}, USER)

    assert draft.refers == ("resp_" + ID.replace("-", ""),)
    whole = responses.continued(draft, [], named=[hello])

    assert [message.content for message in whole.messages] == ["hi", "Hello", "hi"]
    assert whole.refers == () and whole.items[1] == hello


def test_a_named_item_that_is_not_there_is_refused() -> None:
    [hello] = output_of(Run("text", "Hello"))
    draft = parsed(USER, {"type": "item_reference", "id": hello["id"]})

    for asked in (lambda: responses.continued(draft, []), lambda: parsed({"type": "item_reference", "id": "msg_x"})):
        with pytest.raises(BadRequest) as caught:
            asked()
        assert (caught.value.error_code, caught.value.param) == ("item_not_found", "input")


runs = st.lists(
    st.tuples(st.sampled_from(["text", "reasoning", "call"]), st.text(st.characters(codec="utf-8"), min_size=1)),
    max_size=5,
)


@given(runs)
def test_any_output_of_ours_is_taken_back(pieces: list[tuple[str, str]]) -> None:
    """By name or in full, it makes the same turns, and every call keeps its id."""
    output = output_of(*(Run(f"{what}:{n}" if what == "call" else what, text) for n, (what, text) in enumerate(pieces)))
    if any("\0" in text for _, text in pieces):
        return

    draft = parsed(*output, USER)

    assert draft.messages[:-1] == messages_of(output)
    calls = [call.id for message in draft.messages for call in message.calls]
    assert calls == [item["call_id"] for item in output if item["type"] == "function_call"]
    assert [item["id"] for item in draft.items[:-1]] == [item["id"] for item in output]
