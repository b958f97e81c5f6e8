"""The SDK over a whole platform: what chat completions, completions and embeddings promise, streamed and not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import requests

from tests import platform as platforms
from tests.platform import Platform, until

#: A model that thinks and calls tools, one that does neither, and one that makes vectors.
CATALOG = """
[models.scripted]
tokenizer = "bytes"
context_tokens = 4096
max_output_tokens = 64
slots = 32
engine = { tool_parser = "scripted", reasoning_parser = "scripted" }
step = { base_ms = 4.0, sequence_ms = 0.0, prefill_ms = 0.0 }

[models.plain]
tokenizer = "bytes"
context_tokens = 256
max_output_tokens = 64
slots = 4
step = { base_ms = 4.0, sequence_ms = 0.0, prefill_ms = 0.0 }

[models.vectors]
tokenizer = "bytes"
kind = "embedding"
context_tokens = 512
slots = 8
step = { base_ms = 1.0, sequence_ms = 0.0, prefill_ms = 0.0 }
"""

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
TIME: Any = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
HELLO: Any = [{"role": "user", "content": "hello"}]
BOTH: Any = [{"role": "user", "content": "get_weather and get_time please"}]


@pytest.fixture(scope="module")
def _three() -> Iterator[Platform]:
    yield from platforms.alone(catalog=CATALOG, gateways=1)


@pytest.fixture
def three(_three: Platform) -> Iterator[Platform]:
    yield _three
    _three.quiet()


def streamed(client: openai.OpenAI, **fields: Any) -> Any:
    """What the SDK's own accumulator makes of the stream."""
    with client.chat.completions.stream(**{"model": "scripted", "messages": HELLO, "temperature": 0, **fields}) as got:
        for _ in got:
            pass
        return got.current_completion_snapshot  # `get_final_completion` takes an answer that was cut for an error


def plain(value: Any) -> Any:
    """A message as JSON, without what is empty or the accumulator's own."""
    own = ("parsed", "parsed_arguments", "index", "refusal", "annotations")
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items() if each not in (None, "") and name not in own}
    return [plain(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 3},
        {"max_tokens": 5},
        {"logprobs": True, "top_logprobs": 3},
        {"n": 2, "logprobs": True},
        {"stop": ["a"]},
        {"tools": [WEATHER, TIME], "messages": BOTH},
        {"tools": [WEATHER, TIME], "messages": BOTH, "parallel_tool_calls": False, "n": 2},
        {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        {"tools": [WEATHER], "tool_choice": "required", "reasoning_effort": "none"},
        {"response_format": {"type": "json_object"}},
        {"reasoning_effort": "none"},
        {"service_tier": "flex"},
        {"logit_bias": {"97": 1}, "min_tokens": 2},
    ],
    ids=str,
)
def test_a_stream_comes_to_what_a_whole_answer_says(three: Platform, fields: dict[str, Any]) -> None:
    """Greedy answers are the same each time; ids of calls are of their request, and so are left out."""
    client = three.client()
    extra = {"extra_body": {"min_tokens": fields.pop("min_tokens")}} if "min_tokens" in fields else {}
    asked = {"model": "scripted", "messages": HELLO, "temperature": 0, **fields, **extra}

    whole = client.chat.completions.create(**asked)
    got = streamed(client, stream_options={"include_usage": True}, **asked)

    def told(answer: Any) -> Any:
        choices = plain(answer.to_dict()["choices"])
        for choice in choices:
            for call in choice["message"].get("tool_calls", []):
                assert call.pop("id").startswith("call_")
        return choices

    assert told(got) == told(whole)
    assert got.usage is not None and whole.usage is not None
    assert got.usage.to_dict() == whole.usage.to_dict()
    assert whole.service_tier == got.service_tier == fields.get("service_tier", "default")


def test_parallel_calls_are_told_apart_and_answered(three: Platform) -> None:
    """Two calls in one turn, their results in the next."""
    client = three.client()
    first = client.chat.completions.create(model="scripted", messages=BOTH, tools=[WEATHER, TIME])
    message = first.choices[0].message

    assert first.choices[0].finish_reason == "tool_calls"
    assert message.content is None and message.tool_calls is not None
    assert [call.function.name for call in message.tool_calls] == ["get_weather", "get_time"]  # type: ignore[union-attr]
    assert len({call.id for call in message.tool_calls}) == 2
    results: Any = [{"role": "tool", "tool_call_id": call.id, "content": "42"} for call in message.tool_calls]
    turns = [*BOTH, message.to_dict(), *results]
    second = client.chat.completions.create(model="scripted", messages=turns, tools=[WEATHER, TIME])
    assert second.choices[0].message.content


def test_several_answers_are_each_their_own_and_end_on_their_own(three: Platform) -> None:
    answer = three.client().chat.completions.create(model="scripted", messages=HELLO, n=4, max_tokens=20)

    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({str(plain(choice.message.to_dict())) for choice in answer.choices}) == 4
    assert answer.usage is not None and answer.usage.completion_tokens <= 80
    row = three.usage_of(request_id(answer.id))
    assert row["output_tokens"] == answer.usage.completion_tokens


def request_id(answer_id: str) -> str:
    code = answer_id.rpartition("-")[2]
    return f"{code[:8]}-{code[8:12]}-{code[12:16]}-{code[16:20]}-{code[20:]}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "plain", "tools": [WEATHER]}, "tools"),
        ({"model": "plain", "n": 5}, "n"),
        ({"model": "vectors"}, "model"),
        ({"stop_token_ids": [256]}, "stop_token_ids"),
        ({"logit_bias": {"256": 1}}, "logit_bias"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
    ids=str,
)
def test_what_a_model_cannot_do_is_refused_before_it_is_queued(
    three: Platform, fields: dict[str, Any], param: str
) -> None:
    answer = three.post("/v1/chat/completions", {"model": "scripted", "messages": HELLO, **fields})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_model_without_tools_goes_on_with_a_conversation_that_had_them(three: Platform) -> None:
    answer = three.post(
        "/v1/chat/completions", {"model": "plain", "messages": HELLO, "tools": [WEATHER], "tool_choice": "none"}
    )

    assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "n": 2}),
        ("/v1/chat/completions", {"messages": BOTH, "tools": [WEATHER, TIME]}),
        ("/v1/completions", {"prompt": ["ab", "cd"], "max_tokens": 40}),
    ],
    ids=["answers", "calls", "completions"],
)
def test_a_stream_is_gone_on_with_after_any_event(three: Platform, path: str, asked: dict[str, Any]) -> None:
    """The same events with the same ids, of whatever kind they are."""
    body = {"model": "scripted", "stream": True, "stream_options": {"include_usage": True}, **asked}
    events = [event for event in read(three.post(path, body, stream=True)) if event["id"]]

    for had in range(0, len(events), max(1, len(events) // 5)):
        headers = {"Authorization": f"Bearer {three.key}", "Last-Event-ID": events[had]["id"]}
        again = read(requests.post(three.url + path, json=body, headers=headers, timeout=20, stream=True))
        assert text([*events[: had + 1], *again]) == text(events)
        ids = [event["id"] for event in (*events[: had + 1], *again) if event["id"]]
        assert ids[-1] == events[-1]["id"] and len(set(ids)) == len(ids)


def read(answer: requests.Response) -> list[dict[str, Any]]:
    """The events of a stream, with their ids, without the last, which says that it is over."""
    assert answer.status_code == 200, answer.text
    blocks = [block.splitlines() for block in answer.content.decode().split("\n\n") if "data: {" in block]
    lines = [{line.partition(": ")[0]: line.partition(": ")[2] for line in block} for block in blocks]
    return [{"id": each.get("id", ""), "data": json.loads(each["data"])} for each in lines]


def text(events: list[dict[str, Any]]) -> dict[Any, str]:
    """All that a stream says of each choice, and of each call, one after the other."""
    said: dict[Any, str] = {}
    for event in events:
        for choice in event["data"]["choices"]:
            delta = choice.get("delta", choice)
            parts = {name: delta.get(name) or "" for name in ("content", "reasoning_content", "text")}
            parts["end"] = choice["finish_reason"] or ""
            for call in delta.get("tool_calls", []):
                parts[f"call {call['index']}"] = call.get("id", "") + "".join(call["function"].values())
            for name, value in parts.items():
                said[choice["index"], name] = said.get((choice["index"], name), "") + value
    return said


# Completions


def test_completions_go_on_from_prompts_of_every_form(three: Platform) -> None:
    client = three.client()
    for prompt in ("ab", [97, 98], ["ab", "cd"], [[97, 98], [99, 100]]):
        answer = client.completions.create(model="scripted", prompt=prompt, temperature=0, n=2)  # type: ignore[arg-type]
        width = 2 * (len(prompt) if not isinstance(prompt[0], int | str) or prompt == ["ab", "cd"] else 1)
        assert [choice.index for choice in answer.choices] == list(range(width))
        assert all(choice.text and choice.finish_reason == "length" for choice in answer.choices)
        assert answer.usage is not None and answer.usage.completion_tokens == 16 * width
        assert answer.usage.prompt_tokens == 2 * (width // 2)


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_of_completions_comes_to_what_a_whole_answer_says(three: Platform, echo: bool) -> None:
    client = three.client()
    asked: Any = {"model": "scripted", "prompt": ["ab", "cd"], "temperature": 0, "echo": echo}
    if not echo:
        asked["logprobs"] = 2
    whole = client.completions.create(**asked)
    texts: dict[int, str] = {}
    tokens: dict[int, list[str]] = {}
    usages = []
    for chunk in client.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usages += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.logprobs:
                tokens.setdefault(choice.index, []).extend(choice.logprobs.tokens or [])

    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert usages == [whole.usage]
    if not echo:
        told = {choice.index: choice.logprobs.tokens for choice in whole.choices if choice.logprobs}
        assert tokens == told and all(len(each or []) == 16 for each in told.values())
    else:
        assert [choice.text[:2] for choice in whole.choices] == ["ab", "cd"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [[-1]]}, "prompt"),
        ({"prompt": [256]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": "a" * 5000}, "prompt"),
        ({"model": "vectors"}, "model"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_prompt_that_the_model_cannot_take_is_refused(three: Platform, fields: dict[str, Any], param: str) -> None:
    answer = three.post("/v1/completions", {"model": "scripted", "prompt": "a", **fields})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


# Embeddings


def test_vectors_are_the_same_however_they_are_sent(three: Platform) -> None:
    """The SDK asks for base64 unless told otherwise."""
    client = three.client()
    packed = client.embeddings.create(model="vectors", input=["one", "two", "one"])
    spelled = client.embeddings.create(model="vectors", input=["one", "two", "one"], encoding_format="float")
    alone = client.embeddings.create(model="vectors", input=[111, 110, 101])

    assert [each.index for each in packed.data] == [0, 1, 2]
    for one, other in zip(packed.data, spelled.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding)
    assert packed.data[0].embedding == packed.data[2].embedding == alone.data[0].embedding
    assert packed.data[0].embedding != packed.data[1].embedding
    assert (packed.usage.prompt_tokens, packed.usage.total_tokens) == (9, 9)


def test_many_inputs_are_one_request(three: Platform) -> None:
    answer = three.post("/v1/embeddings", {"model": "vectors", "input": [f"text {n}" for n in range(300)]})

    assert [each["index"] for each in answer.json()["data"]] == list(range(300))
    until(lambda: [row for row in three.usage_rows() if row["model"] == "vectors"], "the usage")


def test_vectors_that_are_asked_for_again_with_their_key_are_shown_again(three: Platform) -> None:
    """One answer, made and billed once."""

    def ask() -> requests.Response:
        return requests.post(
            f"http://127.0.0.1:{three.ports[0]}/v1/embeddings",
            json={"model": "vectors", "input": ["one", "two"]},
            headers={"Authorization": f"Bearer {three.key}", "Idempotency-Key": "two vectors"},
            timeout=30,
        )

    answers = [ask(), ask(), ask()]

    assert [answer.status_code for answer in answers] == [200, 200, 200], answers[1].text
    assert answers[0].json() == answers[1].json() == answers[2].json()
    assert len({answer.headers["x-request-id"] for answer in answers}) == 1
    assert three.usage_of(answers[0].headers["x-request-id"])["input_tokens"] == 6


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": "a" * 513}, "input"),
        ({"input": ["a", "b" * 513]}, "input"),
        ({"input": ""}, "input"),
        ({"input": [[256]]}, "input"),
        ({"input": ["a" * 500] * 9}, "input"),
        ({"dimensions": 4}, "dimensions"),
        ({"model": "scripted"}, "model"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_input_that_the_model_cannot_take_is_refused(three: Platform, fields: dict[str, Any], param: str) -> None:
    answer = three.post("/v1/embeddings", {"model": "vectors", "input": "a", **fields})

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_an_input_may_fill_the_context(three: Platform) -> None:
    assert three.post("/v1/embeddings", {"model": "vectors", "input": "a" * 512}).status_code == 200
