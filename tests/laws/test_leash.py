"""Money ends an answer at the token that it pays for, and who is stopped is stopped; on real gateways and workers."""

from __future__ import annotations

import json
import time
from decimal import Decimal
from typing import Any

import pytest
import requests
from websockets.sync.client import connect

from core import postgres
from core.accounts import keys, quotas, tenants
from core.limits import stopped
from core.values import Outcome
from tests.laws.test_faults import HELLO, ended_within, running, text_of
from tests.laws.test_resume import kill_gateway
from tests.platform import MODEL, PEPPER, Platform, kill, until

#: What a million tokens cost on the tests' platform: see tests/platform.py.
INPUT, OUTPUT = 1, 2
#: Answers are paid for up to here, and no further.
PAID = 37
ASKED = {"model": MODEL, "messages": HELLO, "max_tokens": 250, "seed": 41}


def budgeted(platform: Platform, tokens: int, path: str = "/v1/chat/completions", **asked: Any) -> str:
    """A new key with a day's budget for a prompt and so many tokens of answer."""
    free, _ = made(platform)
    answer = ask(platform, free, path, **asked)
    usage = answer.json()["usage"]
    prompt = usage["prompt_tokens"] if "prompt_tokens" in usage else usage["input_tokens"]
    plain, _ = made(platform, money_per_day=Decimal(prompt * INPUT + tokens * OUTPUT) / 10**6)
    return plain


def made(platform: Platform, **limits: Decimal) -> tuple[str, str]:
    """A new key under limits: its text and its id."""
    engine = postgres.connect(platform.database_url)
    with postgres.transaction(engine) as connection:
        project = tenants.projects(connection, platform.org_id)[0]
        plain, row = keys.create_key(
            connection, org_id=platform.org_id, project_id=project.id, name="k", pepper=PEPPER.encode()
        )
        if limits:
            quotas.set_limits(connection, platform.org_id, f"key:{row.id}", limits)
    engine.dispose()
    return plain, row.id


def ask(
    platform: Platform, key: str, path: str = "/v1/chat/completions", gateway: int = 0, **asked: Any
) -> requests.Response:
    url = f"http://127.0.0.1:{platform.ports[gateway]}{path}"
    headers = {"Authorization": f"Bearer {key}"}
    return requests.post(url, json=asked, headers=headers, timeout=30, stream=bool(asked.get("stream")))


def events_of(answer: requests.Response) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith(b"data: {")]


def billed(platform: Platform, request_id: str, tokens: int = PAID) -> None:
    """One usage row, of so many tokens, that money ended."""
    row = platform.usage_of(request_id)
    assert (row["outcome"], row["output_tokens"]) == (Outcome.STOPPED, tokens)


def test_a_stream_ends_at_the_token_its_budget_pays_for(platform: Platform) -> None:
    key = budgeted(platform, PAID, **ASKED)

    with ask(platform, key, **ASKED, stream=True) as answer:
        *chunks, last = events_of(answer)

    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == text_of(41, PAID)
    assert {chunk["choices"][0]["finish_reason"] for chunk in chunks} == {None}
    assert last["error"]["type"] == last["error"]["code"] == "insufficient_quota"
    assert "its money is used up" in last["error"]["message"]
    billed(platform, answer.headers["x-request-id"])
    refused = ask(platform, key, **ASKED)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "insufficient_quota")
    assert refused.headers["x-should-retry"] == "false"


def test_an_answer_in_one_piece_comes_as_far_as_it_is_paid_for(platform: Platform) -> None:
    answer = ask(platform, budgeted(platform, PAID, **ASKED), **ASKED)

    body = answer.json()
    assert answer.status_code == 429 and answer.headers["x-should-retry"] == "false"
    assert body["error"]["code"] == "insufficient_quota"
    [choice] = body["choices"]
    assert choice["message"]["content"] == text_of(41, PAID) and choice["finish_reason"] is None
    assert body["usage"]["completion_tokens"] == PAID
    billed(platform, answer.headers["x-request-id"])


def test_a_response_over_a_socket_fails_with_what_is_paid_for(platform: Platform) -> None:
    asked = {"model": MODEL, "input": "hello", "max_output_tokens": 250, "seed": 41, "store": False}
    key = budgeted(platform, PAID, "/v1/responses", **asked)

    url = f"ws://127.0.0.1:{platform.ports[0]}/v1/responses"
    with connect(url, additional_headers={"Authorization": f"Bearer {key}"}) as socket:
        socket.send(json.dumps({"type": "response.create", **asked}))
        got: list[dict[str, Any]] = [json.loads(socket.recv(timeout=15))]
        while got[-1]["type"] not in ("response.completed", "response.incomplete", "response.failed", "error"):
            got.append(json.loads(socket.recv(timeout=15)))

    said = "".join(event["delta"] for event in got if event["type"] == "response.output_text.delta")
    response = got[-1]["response"]
    assert got[-1]["type"] == "response.failed" and said == text_of(41, PAID)
    assert response["error"]["code"] == "insufficient_quota" and response["status"] == "failed"
    assert response["usage"]["output_tokens"] == PAID
    assert response["output"][0]["content"][0]["text"] == said and response["output"][0]["status"] == "incomplete"


def test_a_message_says_that_it_is_about_money(platform: Platform) -> None:
    asked = {"model": MODEL, "messages": HELLO, "max_tokens": 250}
    key = budgeted(platform, PAID, "/v1/messages", **asked)
    with ask(platform, key, "/v1/messages", **asked, stream=True) as answer:
        *events, last = events_of(answer)
    whole = ask(platform, budgeted(platform, PAID, "/v1/messages", **asked), "/v1/messages", **asked)

    deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert len("".join(deltas)) == PAID and last["error"]["type"] == "billing_error"
    assert "message_stop" not in {event["type"] for event in events}
    assert whole.status_code == 429 and whole.json()["error"]["type"] == "billing_error"
    message = whole.json()["message"]
    assert len(message["content"][0]["text"]) == PAID and message["stop_reason"] is None


@pytest.mark.parametrize("paid", [150])
def test_a_killed_worker_does_not_make_more_of_the_money(platform: Platform, paid: int) -> None:
    """The next one goes on with the same hold, and ends at the same token; what was made twice is paid once."""
    asked = {**ASKED, "temperature": 0}
    asked.pop("seed")
    whole = ask(platform, made(platform)[0], **asked).json()["choices"][0]["message"]["content"]
    key = budgeted(platform, paid, **asked)

    with ask(platform, key, **asked, stream=True) as answer:
        request_id = answer.headers["x-request-id"]
        lines = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith(b"data: {"))
        chunks = [next(lines) for _ in range(20)]
        kill(platform.worker_running(request_id).pid)
        *more, last = lines

    said = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in [*chunks, *more])
    assert said == whole[:paid] and last["error"]["code"] == "insufficient_quota"
    billed(platform, request_id, paid)
    assert platform.rows()[request_id].attempt == 2


def test_a_revoked_key_is_ended_by_its_worker_where_its_gateway_is_gone(platform: Platform) -> None:
    key, key_id = made(platform)
    with ask(platform, key, **{**ASKED, "max_tokens": 4000}, stream=True) as answer:
        request_id = answer.headers["x-request-id"]
        until(lambda: request_id in running(platform), "it to run")
        kill_gateway(platform, 0)
        platform.store.run(stopped.stop(platform.org_id, stopped.field_of(key_id), stopped.REVOKED))
        began_s = time.monotonic()
        ending = ended_within(platform, request_id, 2.5)

    assert (ending.outcome, ending.message) == (Outcome.CANCELLED, "its key was revoked")
    assert time.monotonic() - began_s < 2.5
    row = platform.usage_of(request_id)
    assert row["output_tokens"] == ending.usage.output_tokens > 0 and row["outcome"] == Outcome.CANCELLED
