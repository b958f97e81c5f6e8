"""One request's whole life over each transport, with the real `openai` client."""

from __future__ import annotations

import uuid

import pytest

from billing.rating import BILLED
from tests.platform import MODEL, Platform, until
from workers.scripted import scripted_tokens

HELLO = [{"role": "user", "content": "hello"}]


def text_of(seed: int, n: int) -> str:
    return bytes(scripted_tokens(seed, n)).decode()


@pytest.mark.parametrize("gateway", [0, 1])
def test_a_chat_completion_is_the_engines_text(platform: Platform, gateway: int) -> None:
    done = platform.client(gateway).chat.completions.create(model=MODEL, messages=HELLO, max_tokens=20, seed=7)  # type: ignore[call-overload]

    assert done.choices[0].message.content == text_of(7, 20)
    assert done.choices[0].finish_reason == "length"
    assert (done.usage.completion_tokens, done.usage.prompt_tokens) == (20, len("user: hello\nassistant: "))


def test_a_streamed_chat_is_the_same_text_in_pieces(platform: Platform) -> None:
    chunks = list(
        platform.client().chat.completions.create(  # type: ignore[call-overload]
            model=MODEL, messages=HELLO, max_tokens=50, seed=8, stream=True, stream_options={"include_usage": True}
        )
    )

    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert "".join(pieces) == text_of(8, 50)
    assert len(pieces) > 5, "it comes as it is made, not at the end"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 50


def test_responses_over_websocket(platform: Platform) -> None:
    with platform.client().responses.connect() as connection:
        for seed in (9, 10):
            create = {"type": "response.create", "model": MODEL, "input": "hello", "max_output_tokens": 30}
            connection.send({**create, "seed": seed})  # type: ignore[arg-type]
            events = []
            for event in connection:
                events.append(event)
                if event.type in ("response.completed", "response.incomplete", "response.failed", "error"):
                    break

            kinds = [event.type for event in events]
            assert kinds[0] == "response.created" and kinds[-1] == "response.incomplete"
            assert "response.in_progress" in kinds
            assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == text_of(seed, 30)
            assert events[-1].response.output_text == text_of(seed, 30)
            assert events[-1].response.usage.output_tokens == 30
            numbers = [event.sequence_number for event in events]
            assert numbers == sorted(set(numbers))


def test_responses_over_http_and_sse(platform: Platform) -> None:
    done = platform.client().responses.create(model=MODEL, input="hello", max_output_tokens=10, extra_body={"seed": 3})
    events = list(
        platform.client().responses.create(
            model=MODEL, input="hello", max_output_tokens=10, extra_body={"seed": 3}, stream=True
        )
    )

    assert done.output_text == text_of(3, 10) == events[-1].response.output_text  # type: ignore[union-attr]


def test_one_request_makes_one_usage_row_with_its_price(platform: Platform) -> None:
    raw = platform.client().chat.completions.with_raw_response.create(model=MODEL, messages=HELLO, max_tokens=12)  # type: ignore[arg-type]
    request_id = raw.headers["x-request-id"]

    row = platform.usage_of(request_id)

    assert (row["outcome"], row["output_tokens"], row["attempt"]) == ("length", 12, 1)
    assert str(row["org_id"]) == platform.org_id and row["price_id"] > 0
    assert uuid.UUID(request_id).version == 7


def test_a_place_in_the_queue_is_shown_while_a_response_waits(platform: Platform) -> None:
    """More requests than there are slots: the rest wait, and are told so."""
    from concurrent.futures import ThreadPoolExecutor

    def ask(n: int) -> list[str]:
        return [
            event.type
            for event in platform.client().responses.create(
                model=MODEL, input=f"hello {n}", max_output_tokens=100, stream=True
            )
        ]

    with ThreadPoolExecutor(80) as pool:
        kinds = list(pool.map(ask, range(80)))

    assert all(kind[0] == "response.created" and kind[-1] == "response.incomplete" for kind in kinds)
    assert any(kind.count("response.queued") > 0 for kind in kinds)


def test_models_are_listed(platform: Platform) -> None:
    assert [model.id for model in platform.client().models.list()] == [MODEL]
    assert platform.client().models.retrieve(MODEL).id == MODEL


def test_usage_is_rolled_up_by_the_hour(platform: Platform) -> None:
    import json

    from tests.platform import command

    platform.client().chat.completions.create(model=MODEL, messages=HELLO, max_tokens=10)  # type: ignore[call-overload]
    platform.quiet()
    rows = platform.usage_rows()
    expected = sum(row["output_tokens"] for row in rows if row["outcome"] in BILLED)

    def report() -> bool:
        done = command(platform, "usage", "--json")
        assert done.returncode == 0, done.stderr
        lines = json.loads(done.stdout)
        lines = lines if isinstance(lines, list) else lines["usage"]
        return sum(line["output_tokens"] for line in lines) == expected

    until(report, "the roll-up", 20)
