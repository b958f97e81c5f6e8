"""Limits over two gateways: what is admitted, what it is charged, what is told, and that nothing is held for ever.

The counters themselves have their laws in tests/core/test_limits.py; here all of it runs: gateways, workers, the clock.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import requests
from openai import OpenAI

from core import postgres
from core.accounts import keys, quotas
from core.limits import counters
from core.limits.counters import Need, Used
from core.limits.scopes import of_key
from core.values import Limit, Usage
from tests.conftest import Clock, TimedStore
from tests.laws.test_keys import ask, new_key
from tests.laws.test_sockets import wire
from tests.platform import MODEL, Platform, kill, until
from web.admission import new_id

LONG = 3000


@dataclass
class Key:
    """A key with limits of its own, and what it has used of them."""

    platform: Platform
    text: str
    id: str
    limit: Limit
    reading: list[Any] = field(default_factory=list)  #: requests closes a stream whose reader nobody keeps

    @property
    def used(self) -> Used:
        [used] = self.platform.store.run(counters.used(self.platform.org_id, [self.limit]))
        return used

    def rows(self) -> list[dict[str, Any]]:
        return [row for row in self.platform.usage_rows() if row["key_id"] == self.id]

    def quiet(self) -> None:
        """Nothing of it is open, and all that it used is in Postgres."""
        until(lambda: self.used.open == 0, "its requests to be settled", 30)
        self.platform.quiet()

    def post(self, path: str, body: Any, gateway: int = 0, **options: Any) -> requests.Response:
        url = f"http://127.0.0.1:{self.platform.ports[gateway]}{path}"
        headers = {"Authorization": f"Bearer {self.text}"}
        return requests.post(url, json=body, headers=headers, **{"timeout": 20, **options})

    def stream(self, tokens: int, gateway: int = 0) -> requests.Response:
        """A stream that has begun."""
        answer = ask_streamed(self, tokens, gateway)
        assert answer.status_code == 200, answer.text
        lines = answer.iter_lines()
        self.reading.append(lines)
        while b'"content":"' not in next(lines):
            pass
        return answer


def ask_streamed(key: Key, tokens: int, gateway: int) -> requests.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": tokens, "stream": True}
    return key.post("/v1/chat/completions", body, gateway, stream=True)


def limited(platform: Platform, **limits: int) -> Key:
    text, key_id = new_key(platform)
    engine = postgres.connect(platform.database_url)
    with postgres.transaction(engine) as connection:
        limit = quotas.set_limits(connection, platform.org_id, of_key(key_id), limits)
    keys.project_all(engine, platform.store, platform.org_id)
    engine.dispose()
    return Key(platform, text, key_id, limit)


def charged(row: dict[str, Any]) -> int:
    """What a usage row counts against limits: cached input weighs nothing here."""
    return int(row["input_tokens"] - row["cached_tokens"] + row["output_tokens"])


# --- what is admitted


def test_sixty_four_at_once_never_get_more_tokens_than_the_limit(platform: Platform) -> None:
    """All within a minute: used and held, by the store while it runs, and by the usage rows afterwards."""
    key = limited(platform, tokens_per_minute=1500)
    most: list[int] = []

    def one(n: int) -> int:
        body = {"max_tokens": random.Random(n).randint(1, 40), "stream": n % 2 == 0}
        status = ask(platform, key.text, n % 2, **body).status_code
        used = key.used
        most.append(used.input_tokens + used.output_tokens + used.held_tokens)
        return status

    began_s = time.monotonic()
    with ThreadPoolExecutor(64) as pool:
        statuses = list(pool.map(one, range(256)))
    assert time.monotonic() - began_s < 60, "or more would be right"
    key.quiet()

    assert set(statuses) == {200, 429}
    assert max(most) <= 1500
    rows = key.rows()
    assert len(rows) == statuses.count(200)
    assert 1500 * 0.9 < sum(map(charged, rows)) <= 1500
    assert key.used.requests == len(rows), "a refusal is no request"


def test_streams_are_counted_like_any_other(platform: Platform) -> None:
    """Streams alone until the limit; the next is refused."""
    key = limited(platform, tokens_per_minute=300)
    statuses = []
    while len(statuses) < 50 and 429 not in statuses:
        answer = ask_streamed(key, 20, len(statuses) % 2)
        statuses.append(answer.status_code)
        answer.content  # noqa: B018  (read to its end)
    key.quiet()

    assert statuses[-1] == 429 and len(statuses) > 2
    assert sum(map(charged, key.rows())) <= 300


def test_what_never_fits_is_refused_at_once_and_never_runs(platform: Platform) -> None:
    key = limited(platform, tokens_per_minute=500)

    answer = ask(platform, key.text, max_tokens=3000)

    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "request_exceeds_limit")
    assert answer.json()["error"]["param"] == "max_tokens" and "500" in answer.json()["error"]["message"]
    assert key.rows() == [] and key.used.requests == 0


def test_four_at_once_are_four_over_all_gateways_and_refusals_cost_no_request(platform: Platform) -> None:
    key = limited(platform, concurrent_requests=4, requests_per_minute=10)
    streams = [key.stream(LONG, n % 2) for n in range(4)]

    refused = [ask(platform, key.text, n % 2) for n in range(10)]

    assert {answer.status_code for answer in refused} == {429}
    assert {answer.headers["x-ratelimit-remaining-requests"] for answer in refused} == {"6"}
    assert {answer.headers["x-limit-scope"] for answer in refused} == {"key"}
    assert all("guess" in answer.json()["error"]["message"] for answer in refused)
    for stream in streams:
        stream.close()
    until(lambda: key.used.open == 0, "their places")
    assert ask(platform, key.text).status_code == 200


def test_a_stream_holds_tokens_while_it_runs_and_none_afterwards(platform: Platform) -> None:
    key = limited(platform, tokens_per_minute=100_000)
    stream = key.stream(LONG)

    used = key.used
    assert used.open == 1 and 0 < used.held_tokens <= 100_000

    stream.close()
    key.quiet()
    [row] = key.rows()
    assert (key.used.held_tokens, key.used.output_tokens) == (0, row["output_tokens"])


# --- what it is charged


def chat(key: Key, text: str, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 5, "stream": stream}
    done(key.post("/v1/chat/completions", {"model": MODEL, **body}))


def completion(key: Key, text: str, stream: bool) -> None:
    said = {"model": MODEL, "messages": [{"role": "user", "content": text}]}
    tokens = key.post("/v1/tokenize", said).json()["tokens"]
    done(key.post("/v1/completions", {"model": MODEL, "prompt": tokens, "max_tokens": 5, "stream": stream}))


def response(key: Key, text: str, stream: bool) -> None:
    done(key.post("/v1/responses", {"model": MODEL, "input": text, "max_output_tokens": 5, "stream": stream}))


def message(key: Key, text: str, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 5, "stream": stream}
    done(key.post("/v1/messages", {"model": MODEL, **body}))


def socket(key: Key, text: str, stream: bool) -> None:
    with wire(key.platform, key=key.text) as ws:
        ws.create(tokens=5, input=text)
        ws.until("response.completed", "response.incomplete")


def done(answer: requests.Response) -> None:
    assert answer.status_code == 200, answer.text
    answer.content  # noqa: B018  (read to its end)


def test_the_same_prompt_is_charged_the_same_on_every_endpoint(platform: Platform) -> None:
    """Streamed or not: as many tokens of input, and against the limit exactly what the usage row says."""
    ways: list[Callable[[Key, str, bool], None]] = [chat, completion, response, message, socket]
    prompts = set()
    for way in ways:
        for stream in (False, True):
            key = limited(platform, tokens_per_minute=100_000)
            way(key, "hello there", stream)
            key.quiet()
            [row] = key.rows()
            prompts.add(row["input_tokens"])
            used = key.used
            assert (used.requests, used.input_tokens + used.output_tokens) == (1, charged(row)), way.__name__
    assert len(prompts) == 1


# --- what is told


def test_retry_after_is_true_to_the_moment(platform: Platform) -> None:
    """Three requests of a minute ago: the first to leave the window is told, and at that moment it is so."""
    key = limited(platform, requests_per_minute=3)
    seconds, micros = platform.store.client.time()
    clock = Clock()
    clock.set(seconds * 1000 + micros // 1000 - 58_500)
    then = TimedStore(platform.store.client, clock)
    need = Need(input_tokens=1, output_tokens=0, least_output_tokens=0)
    for _ in range(3):
        request_id = new_id()
        then.run(counters.reserve(platform.org_id, request_id, key.id, MODEL, [key.limit], need))
        then.run(counters.settle(platform.org_id, request_id, [of_key(key.id)], Usage(input_tokens=1), billed=True))

    refused = ask(platform, key.text)
    due_s = time.monotonic() + int(refused.headers["retry-after-ms"]) / 1000
    assert refused.status_code == 429 and 0 < due_s - time.monotonic() < 2.1
    assert int(refused.headers["retry-after"]) == -(-int(refused.headers["retry-after-ms"]) // 1000)
    time.sleep(max(0.0, due_s - 0.1 - time.monotonic()))
    early = ask(platform, key.text)
    early_s = time.monotonic()
    time.sleep(max(0.0, due_s + 0.002 - time.monotonic()))

    assert ask(platform, key.text).status_code == 200
    if early_s < due_s:  # a machine that stalled may have come too late to be early
        assert early.status_code == 429


def test_openais_client_reads_the_headers_and_takes_the_event_on_a_socket(platform: Platform) -> None:
    key = limited(platform, requests_per_minute=50, tokens_per_minute=100_000)
    client = OpenAI(base_url=f"{platform.url}/v1", api_key=key.text, max_retries=0)

    said: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    raw = client.chat.completions.with_raw_response.create(**said)
    with client.responses.connect() as connection:
        connection.response.create(model=MODEL, input="hello", max_output_tokens=3)
        kinds = []
        for event in connection:
            kinds.append(event.type)
            if event.type in ("response.completed", "response.incomplete"):
                break
    client.close()

    assert raw.headers["x-ratelimit-limit-requests"] == "50"
    assert int(raw.headers["x-ratelimit-remaining-tokens"]) < 100_000
    assert kinds[:2] == ["rate_limits.updated", "response.created"]


# --- what ends


def test_nothing_is_held_after_a_hundred_requests_that_ended_anyhow(platform: Platform) -> None:
    """Clients that leave at any moment, time out, cancel, send nonsense, or read to the end."""
    key = limited(platform, tokens_per_minute=10**7, concurrent_requests=200)

    def one(n: int) -> None:
        dice = random.Random(n)
        match n % 6:
            case 0:
                ask(platform, key.text, n % 2, max_tokens=dice.randint(1, 50))
            case 1:  # leaves in the middle
                with suppress(requests.ConnectionError):
                    answer = ask_streamed(key, LONG, n % 2)
                    time.sleep(dice.random() / 2)
                    answer.close()
            case 2:  # times out
                with suppress(requests.Timeout, requests.ConnectionError):
                    long = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": LONG}
                    key.post("/v1/chat/completions", long, n % 2, timeout=dice.uniform(0.05, 0.5))
            case 3:
                assert ask(platform, key.text, n % 2, temperature="hot").status_code == 400
            case 4:
                with wire(platform, key=key.text) as ws:
                    ws.create(tokens=LONG)
                    started = ws.until("response.in_progress", "error")
                    if n % 4:
                        ws.send("cancel", response_id=started["response"]["id"])
                        ws.until("response.incomplete", "response.failed", "response.completed", "error")
            case 5:  # too large for any context
                assert ask(platform, key.text, n % 2, max_tokens=10**6).status_code == 400

    with ThreadPoolExecutor(20) as pool:
        list(pool.map(one, range(102)))

    key.quiet()
    assert (key.used.open, key.used.held_tokens) == (0, 0)
    assert key.used.requests == len(key.rows())


def test_places_are_free_again_when_a_gateway_was_killed(platform: Platform) -> None:
    """Five streams end with it, without a word from it: the queue's endings settle them."""
    key = limited(platform, concurrent_requests=5, tokens_per_minute=10**6)
    streams = [key.stream(LONG, 1) for _ in range(5)]
    assert key.used.open == 5

    kill(platform.pid("web1"), signal.SIGKILL)

    for stream in streams:
        stream.close()
    until(lambda: key.used.open == 0, "the places of a gateway that died", 40)
    key.quiet()
    assert key.used.held_tokens == 0
    until(lambda: _up(platform, 1), "the gateway to be back", 40)


def _up(platform: Platform, gateway: int) -> bool:
    with suppress(requests.ConnectionError, requests.Timeout):
        return requests.get(f"http://127.0.0.1:{platform.ports[gateway]}/ready", timeout=2).ok
    return False
