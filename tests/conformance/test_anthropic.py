"""Anthropic's own SDK against us."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
import requests

from tests.conformance.conftest import THINKER
from tests.platform import Platform

TOOL: Any = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
#: The SDK knows no temperature any more.
GREEDY = {"temperature": 0}
ASKED: Any = [{"role": "user", "content": "What is the weather in Brno?"}]


@pytest.fixture
def client(platform: Platform) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=platform.url, api_key=platform.key, max_retries=0) as client:
        yield client


@pytest.mark.parametrize("model", ["scripted", THINKER])
def test_an_answer_and_its_stream(client: anthropic.Anthropic, model: str) -> None:
    asked: Any = {
        "model": model,
        "max_tokens": 24,
        "messages": [{"role": "user", "content": "hi"}],
        "extra_body": GREEDY,
    }

    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        texts = "".join(stream.text_stream)
        streamed = stream.get_final_message()

    assert [block.to_dict() for block in streamed.content] == [block.to_dict() for block in whole.content]
    assert whole.content[-1].type == "text" and whole.content[-1].text == texts
    assert [block.type for block in whole.content] == ["thinking", "text"][model == "scripted" :]
    assert (whole.role, whole.model, whole.stop_reason) == ("assistant", model, streamed.stop_reason)
    assert whole.id.startswith("msg_") and whole.id != streamed.id
    read = [(each.usage.cache_read_input_tokens or 0) + each.usage.input_tokens for each in (whole, streamed)]
    assert read[0] == read[1] and 0 < whole.usage.output_tokens == streamed.usage.output_tokens


def test_an_answer_that_is_cut_short_says_so(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model="scripted", max_tokens=2, messages=ASKED)

    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 2)


def test_thinking_can_be_switched_off(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(model=THINKER, max_tokens=8, messages=ASKED, thinking={"type": "disabled"})

    assert [block.type for block in answer.content] == ["text"]


def test_a_call_and_what_comes_of_it(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model=THINKER, max_tokens=200, messages=ASKED, tools=[TOOL]) as stream:
        called = stream.get_final_message()
    use = called.content[-1]
    assert use.type == "tool_use" and use.id.startswith("toolu_")
    assert (use.name, set(use.input), called.stop_reason) == ("weather", {"city"}, "tool_use")

    turns: Any = [
        *ASKED,
        {"role": "assistant", "content": [block.to_dict() for block in called.content]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "Sunny."}]},
    ]
    answer = client.messages.create(model=THINKER, max_tokens=30, messages=turns, tools=[TOOL])

    assert answer.content[-1].type == "text"


def test_a_call_can_be_forced_or_forbidden(client: anthropic.Anthropic) -> None:
    asked: Any = {
        "model": "scripted",
        "max_tokens": 100,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [TOOL],
    }

    forced = client.messages.create(**asked, tool_choice={"type": "tool", "name": "weather"})
    forbidden = client.messages.create(**asked, tool_choice={"type": "none"})

    assert [block.type for block in forced.content] == ["tool_use"]
    assert [block.type for block in forbidden.content] == ["text"]


def test_a_stop_sequence_is_told(client: anthropic.Anthropic) -> None:
    asked: Any = {"model": "scripted", "max_tokens": 40, "messages": ASKED, "extra_body": GREEDY}
    [block] = client.messages.create(**asked).content
    assert block.type == "text"
    stop = block.text[10:13]

    answer = client.messages.create(**asked, stop_sequences=["never in it", stop])

    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    [cut] = answer.content
    assert cut.type == "text" and cut.text == block.text[: block.text.index(stop)]


@pytest.mark.parametrize(
    "extra",
    [{}, {"system": "Be brief.", "tools": [TOOL]}, {"tools": [TOOL], "tool_choice": {"type": "none"}}],
    ids=["bare", "tools", "forbidden"],
)
def test_tokens_are_counted_as_the_generation_counts_them(client: anthropic.Anthropic, extra: dict[str, Any]) -> None:
    asked: Any = {"model": "scripted", "messages": [*ASKED, *ASKED], **extra}

    counted = client.messages.count_tokens(**asked)
    usage = client.messages.create(**asked, max_tokens=3).usage

    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_models_in_anthropics_shape(client: anthropic.Anthropic) -> None:
    page = client.models.list(limit=2)

    assert len(page.data) == 2 and page.has_more
    names = [model.id for model in client.models.list(limit=2)]
    assert names == ["scripted", THINKER, "vectors"]
    one = client.models.retrieve(THINKER)
    assert (one.type, one.id, one.created_at.year) == ("model", THINKER, 1970)


def test_errors_are_the_sdks_own(client: anthropic.Anthropic, platform: Platform) -> None:
    asked: Any = {"model": "scripted", "max_tokens": 3, "messages": ASKED}

    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**{**asked, "model": "none"})
    with pytest.raises(anthropic.BadRequestError) as wrong:
        client.messages.create(**{**asked, "messages": []})
    with pytest.raises(anthropic.AuthenticationError) as unknown:
        client.with_options(api_key="fb_wrong").messages.create(**asked)
    with pytest.raises(anthropic.BadRequestError) as streamed, client.messages.stream(**asked, tools=[TOOL, TOOL]):
        pass

    for caught, kind in (
        (missing, "not_found_error"),
        (wrong, "invalid_request_error"),
        (unknown, "authentication_error"),
        (streamed, "invalid_request_error"),
    ):
        told: Any = caught.value.body
        assert (told["type"], told["error"]["type"]) == ("error", kind)
        assert caught.value.request_id == told["request_id"]
    gone = requests.get(f"{platform.url}/v1/messages/nothing", timeout=9)
    assert gone.json()["error"]["type"] == "not_found_error" and gone.headers["request-id"]


def test_either_header_carries_the_key(platform: Platform) -> None:
    with anthropic.Anthropic(base_url=platform.url, auth_token=platform.key, max_retries=0) as client:
        assert client.messages.create(model="scripted", max_tokens=2, messages=ASKED).content
    listed = requests.get(f"{platform.url}/v1/models", headers={"x-api-key": platform.key}, timeout=9)

    assert listed.json()["object"] == "list"
