"""SIGTERM to a gateway: it takes nothing new, finishes what it can, and leaves the rest to another."""

from __future__ import annotations

import json
import signal
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import requests

from tests.laws.test_disconnects import HELLO, Client, asking
from tests.laws.test_faults import answers, text_of
from tests.platform import MODEL, Platform, kill, until

#: How long these gateways drain, and what the rest of their end may take.
DRAIN_S, MORE_S = 2.0, 8.0
#: Seven seconds of work.
LONG = 180


@contextmanager
def draining(platform: Platform) -> Iterator[None]:
    """The first gateway has been told to end; afterwards it has ended as it should, and another is in its place."""
    pid, start_s = platform.pid("web0"), time.monotonic()

    def ended() -> tuple[int, float]:
        deaths = until(lambda: [one for one in platform.deaths if one.pid == pid], "its end")
        return deaths[0].status, time.monotonic() - start_s

    with ThreadPoolExecutor(1) as pool:
        kill(pid, signal.SIGTERM)
        end = pool.submit(ended)
        yield
        status, took_s = end.result(30)
    assert status == 0 and took_s < DRAIN_S + MORE_S
    print(f"it had ended {took_s:.1f} s after SIGTERM")
    until(lambda: answers(platform), "the gateway to be started again", 30)


class Stream:
    """A stream of Responses, which may break off."""

    def __init__(self, platform: Platform, *, number: int = 0, **options: Any) -> None:
        url = f"http://127.0.0.1:{platform.ports[number]}/v1/responses"
        headers = {"Authorization": f"Bearer {platform.key}"}
        if resumed := options.pop("resumed", None):
            response_id, after = resumed
            url += f"/{response_id}?stream=true&starting_after={after}"
            self.answer = requests.get(url, headers=headers, stream=True, timeout=30)
        else:
            body = {"model": MODEL, "input": "hello", "stream": True, **options}
            self.answer = requests.post(url, json=body, headers=headers, stream=True, timeout=30)
        assert self.answer.status_code == 200, self.answer.text
        self.events: list[dict[str, Any]] = []

    def read(self) -> None:
        """To its end, whatever that is."""
        try:
            for line in self.answer.iter_lines():
                if line.startswith(b"data: {"):
                    self.events.append(json.loads(line[6:]))
        except requests.RequestException:
            pass
        self.answer.close()

    @property
    def text(self) -> str:
        return "".join(one["delta"] for one in self.events if one["type"] == "response.output_text.delta")

    @property
    def last(self) -> str:
        return str(self.events[-1]["type"])


def test_a_stream_longer_than_the_drain_goes_on_at_another_gateway(slow: Platform) -> None:
    """Its client is cut, and comes back with its cursor: nothing repeated, nothing missing, one bill."""
    first = Stream(slow, max_output_tokens=LONG, seed=31)
    with draining(slow):
        first.read()
        created = first.events[0]["response"]["id"]
        assert first.last == "response.output_text.delta", "cut, and not told that it failed"
        after = first.events[-1]["sequence_number"]
        second = Stream(slow, number=1, resumed=(created, after))
        second.read()

    assert 0 < len(first.text) < LONG
    assert first.text + second.text == text_of(31, LONG) and second.last == "response.incomplete"
    assert all(event["sequence_number"] > after for event in second.events)
    row = slow.usage_of(str(uuid.UUID(created.removeprefix("resp_"))))
    assert (row["outcome"], row["output_tokens"], row["attempt"]) == ("length", LONG, 1)


def test_what_fits_the_drain_is_finished_and_nothing_new_is_taken(slow: Platform) -> None:
    """Also on connections that are open: an idle one is told where to go by its next answer."""
    kept = Client(slow)
    kept.send(asking(tokens=1, stream=False))
    kept.read(b'"finish_reason"')
    stream = Stream(slow, max_output_tokens=40, seed=32)
    with ThreadPoolExecutor(1) as pool, draining(slow):
        reading = pool.submit(stream.read)
        time.sleep(0.3)  # it looks ten times a second whether it is to end
        kept.got = b""
        kept.send(asking(tokens=1, stream=False))
        head, _, body = kept.read(b"\r\n\r\n{").partition(b"\r\n\r\n")
        reading.result(10)
        kept.close()

    assert b" 503 " in head and b"connection: close" in head.lower() and b"retry-after: 1" in head.lower()
    assert b"draining" in kept.got or b"draining" in body
    assert stream.text == text_of(32, 40) and stream.last == "response.incomplete"


def test_an_answer_that_is_not_streamed_is_shown_by_another_gateway_to_who_sends_its_key_again(slow: Platform) -> None:
    def ask(number: int) -> requests.Response:
        return requests.post(
            f"http://127.0.0.1:{slow.ports[number]}/v1/chat/completions",
            json={"model": MODEL, "messages": HELLO, "max_tokens": LONG, "seed": 33},
            headers={"Authorization": f"Bearer {slow.key}", "Idempotency-Key": "one answer"},
            timeout=30,
        )

    before = set(slow.rows())
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, 0)
        [request_id] = until(lambda: set(slow.rows()) - before, "the request")
        with draining(slow):
            with pytest.raises(requests.ConnectionError):
                first.result(10)
            second = ask(1)

    assert second.json()["choices"][0]["message"]["content"] == text_of(33, LONG)
    assert second.headers["idempotent-replayed"] == "true" and second.headers["x-request-id"] == request_id
    assert set(slow.rows()) - before == {request_id}
    assert slow.usage_of(request_id)["output_tokens"] == LONG
