"""`Idempotency-Key` on real gateways: one request for one key, whatever happens between them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests

from tests.laws.test_disconnects import HELLO
from tests.laws.test_faults import text_of
from tests.platform import MODEL, Platform, until


def test_equal_requests_with_one_key_generate_once_on_two_gateways(slow: Platform) -> None:
    """At the same moment, over real connections, streamed and shown to all from the beginning."""
    before = set(slow.rows())

    def ask(n: int) -> tuple[str, str]:
        answer = requests.post(
            f"http://127.0.0.1:{slow.ports[n % 2]}/v1/chat/completions",
            json={"model": MODEL, "messages": HELLO, "max_tokens": 40, "seed": 34, "stream": True},
            headers={"Authorization": f"Bearer {slow.key}", "Idempotency-Key": "one stream"},
            timeout=30,
        )
        assert answer.status_code == 200, answer.text
        chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith(b"data: {")]
        text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
        return text, answer.headers["x-request-id"]

    with ThreadPoolExecutor(6) as pool:
        got = list(pool.map(ask, range(6)))

    assert {text for text, _ in got} == {text_of(34, 40)}
    assert {request_id for _, request_id in got} == set(slow.rows()) - before
    assert len(set(slow.rows()) - before) == 1


def test_background_work_with_one_key_is_one_object(slow: Platform) -> None:
    """At the same moment, while it runs, and after its end; at both gateways."""
    before = set(slow.rows())

    def ask(n: int, **more: Any) -> requests.Response:
        body = {"model": MODEL, "input": "hello", "max_output_tokens": 20, "background": True, "store": True, **more}
        headers = {"Authorization": f"Bearer {slow.key}", "Idempotency-Key": "one job"}
        url = f"http://127.0.0.1:{slow.ports[n % 2]}/v1/responses"
        return requests.post(url, json=body, headers=headers, timeout=30)

    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(ask, range(4)))
    [response_id] = {one.json()["id"] for one in got}
    [request_id] = until(lambda: set(slow.rows()) - before, "the request")
    until(lambda: slow.rows()[request_id].state == "ended", "its end")
    late = until(lambda: (one := ask(1)).json()["status"] == "incomplete" and one, "its end to be shown")

    assert {one.status_code for one in got} == {200} and late.json()["id"] == response_id
    assert [one.headers.get("idempotent-replayed") for one in got].count(None) == 1
    assert late.headers["idempotent-replayed"] == "true" and len(set(slow.rows()) - before) == 1
    assert ask(0, input="else").status_code == 422
