"""Limits in a store of their own, which dies while the queue goes on: who is served, and that it all adds up again."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from core.limits import counters
from core.limits.counters import Used
from core.redis import Store
from ops import stores
from tasks.queue import Queue
from tests import platform as platforms
from tests.laws.test_keys import ask
from tests.laws.test_limits import Key, ask_streamed, limited
from tests.platform import MODEL, Platform, kill, until


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fb-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)
        stores.start_valkey(Path(folder)).stop()


@pytest.fixture(scope="module")
def apart(folder: Path) -> Iterator[Platform]:
    url = stores.start_valkey(folder).url
    yield from platforms.alone(environ={"FOREBAY_LIMITS_URL": url})


def used(folder: Path, key: Key) -> Used:
    store = Store.connect(stores.start_valkey(folder).url)
    [found] = store.run(counters.used(key.platform.org_id, [key.limit]))
    store.close()
    return found


def begun(key: Key) -> tuple[requests.Response, Iterator[bytes]]:
    """A stream whose first text has come, and its lines from there on."""
    answer = ask_streamed(key, 4000, 0)
    assert answer.status_code == 200, answer.text
    lines: Iterator[bytes] = answer.iter_lines(chunk_size=1)
    while b'"content":"' not in next(lines):
        pass
    return answer, lines


def test_with_limits_away_streams_go_on_and_a_share_is_served(apart: Platform, folder: Path) -> None:
    """Two gateways, ten at once: each serves two by itself. What it serves is counted again when the store is back."""
    until(lambda: len(apart.workers()) == 2, "two workers")
    until(lambda: apart.store.run(Queue(MODEL).gateways()) == 2, "both gateways to be seen")
    key = limited(apart, concurrent_requests=10, tokens_per_minute=10**6)
    free = limited(apart, connections=5)
    before, lines = begun(key)
    assert used(folder, key).open == 1

    kill(stores.start_valkey(folder).pid)
    streams = [begun(key) for _ in range(2)]
    refused = [ask(apart, key.text) for _ in range(3)]

    assert {(one.status_code, one.json()["error"]["code"]) for one in refused} == {(503, "limits_unavailable")}
    assert all(int(one.headers["retry-after-ms"]) > 0 for one in refused)
    assert {ask(apart, free.text, n % 2).status_code for n in range(6)} == {200}, "what is not limited stays so"
    assert next(lines) is not None and next(streams[0][1]) is not None, "nothing that runs was cut"

    stores.start_valkey(folder)
    assert ask(apart, key.text).status_code == 200, "the very next request"
    until(lambda: used(folder, key).open == 3, "what runs to be taken up, once")
    for stream in (before, *(stream for stream, _ in streams)):
        stream.close()
    until(lambda: used(folder, key).open == 0, "all to be settled")
    assert used(folder, key).held_tokens == 0
