"""Operators stop harm at once: whatever `forebay` has stopped is stopped at both gateways when the command returns, or
a second after, and goes on afterwards as if nothing had been."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import requests

from core.redis import tag
from tests.laws.test_gate import Callers
from tests.platform import MODEL, Platform, command, soon, until

HELLO = [{"role": "user", "content": "hello"}]
FLEX = {"service_tier": "flex"}
#: How often the clock looks, and a second for it to do so.
CLOCK_S = 2.0
#: Tokens of an answer that holds a place for eight seconds: longer than a few commands take to start here.
BUSY = 200


def ask(
    platform: Platform, gateway: int = 0, path: str = "/v1/chat/completions", *, key: str = "", **body: Any
) -> requests.Response:
    url = f"http://127.0.0.1:{platform.ports[gateway]}{path}"
    headers = {"Authorization": f"Bearer {key or platform.key}"}
    length = {} if path == "/v1/responses" else {"max_tokens": 3}
    return requests.post(url, json={"model": MODEL, **length, **body}, headers=headers, timeout=40)


def chat(platform: Platform, gateway: int = 0, **body: Any) -> requests.Response:
    return ask(platform, gateway, messages=HELLO, **body)


def forebay(platform: Platform, *words: str) -> None:
    done = command(platform, *words)
    assert done.returncode == 0, done.stderr


def refusals(platform: Platform, **body: Any) -> list[tuple[int, str]]:
    """What a new request is told at each gateway."""
    answers = [chat(platform, gateway, **body) for gateway in (0, 1)]
    assert all(int(answer.headers.get("retry-after", 1)) > 0 for answer in answers)
    return [(answer.status_code, answer.json().get("error", {}).get("code", "")) for answer in answers]


def waiting(platform: Platform) -> int:
    return [row.state for row in platform.rows().values()].count("waiting")


@contextmanager
def stopped(platform: Platform, stop: tuple[str, ...], go_on: tuple[str, ...]) -> Iterator[None]:
    """While something is stopped; whatever happens it goes on afterwards."""
    forebay(platform, *stop)
    try:
        yield
    finally:
        forebay(platform, *go_on)


PAUSE, RESUME = ("model", "pause", MODEL, "--reason", "a test"), ("model", "resume", MODEL)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def busy(platform: Platform, pool: ThreadPoolExecutor, *bodies: dict[str, Any]) -> list[Future[requests.Response]]:
    """Fill the worker's places for some seconds, one at each gateway."""
    running = [pool.submit(chat, platform, gateway, max_tokens=BUSY, **body) for gateway, body in enumerate(bodies)]
    until(lambda: len(platform.claims()) == len(bodies), "its places to be taken")
    return running


def test_a_paused_model_refuses_keeps_what_waits_and_ends_what_runs(slow: Platform, pool: ThreadPoolExecutor) -> None:
    """Two run, two wait, one of each at each gateway; then a pause, twice, and a resume."""
    running = busy(slow, pool, {}, {})
    waits = [pool.submit(chat, slow, gateway) for gateway in (0, 1)]
    until(lambda: waiting(slow) == 2, "two to wait")

    with stopped(slow, PAUSE, RESUME):
        assert refusals(slow) == [(503, "model_paused")] * 2
        forebay(slow, *PAUSE)
        for one in running:
            answer = one.result()
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == BUSY
        until(lambda: slow.claims() == [], "nothing to run")
        time.sleep(0.5)  # any of a worker's looks for more would have been meanwhile
        assert slow.claims() == [] and waiting(slow) == 2 and not any(one.done() for one in waits)

    assert [one.result().status_code for one in waits] == [200, 200]
    assert refusals(slow) == [(200, "")] * 2


def test_a_class_that_is_shed_is_refused_and_what_waits_of_it_ends_within_a_second(
    slow: Platform, pool: ThreadPoolExecutor
) -> None:
    """In each API's own form. One of the class runs, and goes on; another class is served."""
    running = busy(slow, pool, {}, FLEX)
    before = set(slow.rows())
    completion = pool.submit(chat, slow, 0)
    message = pool.submit(ask, slow, 1, "/v1/messages", messages=HELLO)
    until(lambda: waiting(slow) == 2, "two to wait")
    other = pool.submit(chat, slow, 1, **FLEX)
    until(lambda: waiting(slow) == 3, "one of another class to wait")

    with stopped(slow, ("shed", "default"), ("shed", "--clear", "default")):
        soon(lambda: completion.done() and message.done(), "what waited to end")
        assert refusals(slow) == [(503, "class_shed")] * 2
        forebay(slow, "shed", "default")
        told = completion.result()
        assert (told.status_code, told.json()["error"]["code"]) == (503, "class_shed")
        told = message.result()
        assert (told.status_code, told.json()["error"]["type"]) == (529, "overloaded_error")
        assert [one.result().status_code for one in running] == [200, 200]
        assert other.result().status_code == 200

    assert refusals(slow) == [(200, "")] * 2
    outcomes = {name: row.ending.outcome for name, row in slow.rows().items() if name not in before and row.ending}
    ended = [name for name, outcome in outcomes.items() if outcome == "shed"]
    assert len(ended) == 2
    for name in ended:
        row = slow.usage_of(name)
        assert (row["outcome"], row["input_tokens"], row["output_tokens"]) == ("shed", 0, 0), "it is not billed"


def test_a_stream_that_waits_is_told_why_it_ends(slow: Platform, pool: ThreadPoolExecutor) -> None:
    """Its status left before it was known."""
    busy(slow, pool, {}, {})
    stream = pool.submit(chat, slow, 1, stream=True, **FLEX)
    until(lambda: waiting(slow) == 1, "it to wait")
    with stopped(slow, ("shed", "bulk", "--model", MODEL), ("shed", "bulk", "--model", MODEL, "--clear")):
        soon(stream.done, "it to end")
    assert stream.result().status_code == 503 or '"code":"class_shed"' in stream.result().text.replace(" ", "")


def test_background_work_that_was_accepted_outlasts_both(slow: Platform, pool: ThreadPoolExecutor) -> None:
    """It is of class bulk. It is held, not ended, and runs when it may; new work is refused like all else."""
    running = busy(slow, pool, {}, {})

    def background() -> requests.Response:
        return ask(slow, 1, "/v1/responses", input="hello", background=True, max_output_tokens=3)

    made = background()
    assert made.status_code == 200, made.text
    headers = {"Authorization": f"Bearer {slow.key}"}

    def status() -> str:
        url = f"{slow.url}/v1/responses/{made.json()['id']}"
        return str(requests.get(url, headers=headers, timeout=10).json()["status"])

    with stopped(slow, ("shed", "bulk"), ("shed", "--clear", "bulk")):
        refused = background()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "class_shed")
        with stopped(slow, PAUSE, RESUME):
            refused = background()
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_paused")
        assert [one.result().status_code for one in running] == [200, 200]
        time.sleep(0.5)
        assert status() == "queued"
    until(lambda: status() == "incomplete", "it to run, and to make as much as it was asked to")


def test_a_store_that_has_forgotten_is_told_again_within_a_second_or_two(slow: Platform) -> None:
    """The stops alone are taken out of it, as a FLUSHALL would with all the rest."""
    with stopped(slow, PAUSE, RESUME):
        slow.store.client.hdel(tag(MODEL) + "counters", "stops")
        soon(lambda: refusals(slow) == [(503, "model_paused")] * 2, "the clock to say it again", CLOCK_S)


def test_what_waits_of_a_suspended_organisation_never_runs(slow: Platform, pool: ThreadPoolExecutor) -> None:
    """Somebody waits at a gateway for one, and nobody for another, which is background work: that one is claimed when
    there is a place, and its worker ends it at its start."""
    made = Callers(slow)
    org_id = made.organisation("harmful")
    key, _ = made.key(org_id)
    running = busy(slow, pool, {}, {})
    before = set(slow.rows())
    waits = pool.submit(chat, slow, 1, key=key, max_tokens=200)
    until(lambda: waiting(slow) == 1, "one to wait")
    queued = ask(slow, 0, "/v1/responses", key=key, input="hello", background=True, max_output_tokens=1000)
    assert queued.status_code == 200, queued.text

    with stopped(slow, ("org", "suspend", "harmful"), ("org", "resume", "harmful")):
        soon(waits.done, "what waited to end", 2.0)
        assert waits.result().status_code == 403
        assert [chat(slow, n, key=key).status_code for n in (0, 1)] == [403, 403]
        assert [one.result().status_code for one in running] == [200, 200], "others are served"
        theirs = {name: row for name, row in slow.rows().items() if name not in before}
        assert len(theirs) == 2
        until(lambda: all(slow.rows()[name].state == "ended" for name in theirs), "theirs to end", 5)

    ends = [ending for name in theirs if (ending := slow.rows()[name].ending)]
    assert all(one.outcome not in ("completed", "length") and one.usage.output_tokens < 50 for one in ends), ends
    until(lambda: slow.store.client.zcard(tag(f"org:{org_id}") + "open") == 0, "their holds to be free")
    assert chat(slow, 0, key=key).status_code == 200
