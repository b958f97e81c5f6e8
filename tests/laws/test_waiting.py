"""Waiting with nobody there: a model that keeps no worker, a request for it, and what its client sees."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from core import fleet, postgres
from tests import platform as platforms
from tests.platform import CATALOG, MODEL, Platform, kill, until
from workers.scripted import scripted_tokens

SLOTS, ASKED = 4, 12
#: Shorter than a worker takes to start.
TIMEOUT_S = 0.5


@pytest.fixture(scope="module")
def empty() -> Iterator[Platform]:
    """A platform whose model keeps no worker, and may have one."""
    catalog = CATALOG.replace("min = 2, max = 2", "min = 0, max = 1").replace("slots = 32", f"slots = {SLOTS}")
    assert catalog.count("min = 0") == catalog.count(f"slots = {SLOTS}") == 1
    yield from platforms.alone(catalog=catalog, gateways=1)


def ask(platform: Platform, seed: int) -> list[dict[str, Any]]:
    """Every event of a streamed response, as they came."""
    body = {"model": MODEL, "input": "hello", "stream": True, "seed": seed, "max_output_tokens": 40}
    headers = {"Authorization": f"Bearer {platform.key}"}
    url = f"{platform.url}/v1/responses"
    with requests.post(url, json={**body, "timeout": TIMEOUT_S}, headers=headers, stream=True, timeout=60) as answer:
        assert answer.status_code == 200, answer.text
        return [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith(b"data: {")]


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


def grown(platform: Platform) -> list[tuple[int, int]]:
    """The scaler's decisions to have more workers: from, to."""
    engine = postgres.connect(platform.database_url)
    try:
        with postgres.transaction(engine) as connection:
            sql = "SELECT current, desired FROM scale_decisions WHERE action = 'grow' ORDER BY decided_at"
            return [(row.current, row.desired) for row in connection.execute(postgres.text(sql))]
    finally:
        engine.dispose()


def test_requests_that_find_nobody_wait_visibly_wake_one_worker_and_are_all_answered(empty: Platform) -> None:
    """Three times what the worker holds come at once, each with a deadline before it can be there: the deadline
    begins with the worker, the scaler decides once, and the worker takes at no time more than it has slots."""
    assert (empty.store.run(fleet.workers(MODEL)), grown(empty)) == ([], [])
    running = []

    with ThreadPoolExecutor(ASKED) as pool:
        began_s = time.monotonic()
        answers = [pool.submit(ask, empty, seed) for seed in range(ASKED)]
        while not all(answer.done() for answer in answers):
            running.append(len(empty.claims()))
            time.sleep(0.02)
        took_s = time.monotonic() - began_s

    assert took_s > TIMEOUT_S, "or the deadline has shown nothing"
    for seed, answer in enumerate(answers):
        events = answer.result()
        assert text_of(events) == bytes(scripted_tokens(seed, 40)).decode(), events[-1]
        queued = [event["queue"] for event in events if event["type"] == "response.queued"]
        assert [one["worker"]["state"] for one in queued if one["worker"]], "it says what it waits for"
        assert all(one["place"] >= 1 for one in queued)
    assert grown(empty) == [(0, 1)]
    assert 0 < max(running) <= SLOTS
    empty.quiet()
    assert until(lambda: empty.store.run(fleet.wanted()) == {}, "the asking to be answered")
    assert {row.attempt for row in empty.rows().values()} == {1}


def test_a_request_that_comes_while_the_only_worker_is_dead_waits_for_the_next(empty: Platform) -> None:
    [worker] = until(empty.workers, "the worker")
    kill(worker.pid)
    until(lambda: not empty.store.run(fleet.workers(MODEL)), "its death to be known")

    events = ask(empty, 99)

    assert text_of(events) == bytes(scripted_tokens(99, 40)).decode(), events[-1]
    empty.quiet()
