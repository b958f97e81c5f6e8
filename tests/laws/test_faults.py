"""Bad days: clients that leave, workers and stores that die. Real signals, real processes."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import openai
import psutil
import pytest
import requests

from core.values import Ending
from ops import stores
from tests.platform import MODEL, Platform, Row, kill, until
from workers.scripted import scripted_tokens

HELLO = [{"role": "user", "content": "hello"}]
#: About four seconds on the scripted engine.
LONG = 900


def text_of(seed: int, n: int) -> str:
    return bytes(scripted_tokens(seed, n)).decode()


def running(platform: Platform) -> dict[str, Row]:
    return {name: row for name, row in platform.rows().items() if row.state == "running"}


def ended_within(platform: Platform, request_id: str, limit_s: float) -> Ending:
    """The ending of a request, which must come within the limit."""
    start = time.monotonic()
    until(lambda: platform.rows()[request_id].state == "ended", f"the end of {request_id}", limit_s)
    assert time.monotonic() - start < limit_s
    ending = platform.rows()[request_id].ending
    assert ending is not None
    return ending


# --- clients that leave


@contextmanager
def raw_stream(platform: Platform, **body: Any) -> Iterator[requests.Response]:
    with platform.post(
        "/v1/chat/completions", {"model": MODEL, "messages": HELLO, "max_tokens": 4000, **body}, stream=True
    ) as answer:
        yield answer


def test_closing_a_stream_cancels_its_generation_within_a_second(platform: Platform) -> None:
    with raw_stream(platform, stream=True) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if b'"content":"' in line and b'"content":""' not in line)
        request_id = answer.headers["x-request-id"]

    ending = ended_within(platform, request_id, 1.5)
    row = platform.usage_of(request_id)
    assert ending.outcome == row["outcome"] == "cancelled"
    assert 0 < row["output_tokens"] < 1000, "what was generated until the abort took effect is billed"


def test_leaving_a_request_that_is_not_streamed_cancels_it(platform: Platform) -> None:
    impatient = platform.client(timeout=1.0)

    with pytest.raises(openai.APITimeoutError):
        impatient.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=4000)  # type: ignore[call-overload]

    until(lambda: not running(platform), "the generation to stop", 1.5)


def test_closing_a_socket_cancels_what_it_asked_for(platform: Platform) -> None:
    """The client's own close waits for events that it has not read, ten seconds if it is let; the server does not."""
    options: Any = {"close_timeout": 1}
    connection = platform.client().responses.connect(websocket_connection_options=options).enter()
    connection.response.create(model=MODEL, input="hello", max_output_tokens=4000)
    next(event for event in connection if event.type == "response.output_text.delta")
    assert running(platform)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(connection.close)
        until(lambda: not running(platform), "the generation to stop", 1.5)


def test_response_cancel_ends_the_response_and_leaves_the_socket_open(platform: Platform) -> None:
    with platform.client().responses.connect() as connection:
        connection.response.create(model=MODEL, input="hello", max_output_tokens=4000)
        events = iter(connection)
        created = next(events)
        next(event for event in events if event.type == "response.output_text.delta")
        connection.send({"type": "response.cancel", "response_id": created.response.id})  # type: ignore[arg-type, union-attr]
        last = next(event for event in events if event.type == "response.incomplete")

        assert last.response.status == "cancelled"
        connection.response.create(model=MODEL, input="again", max_output_tokens=5)
        assert next(event for event in events if event.type == "response.incomplete").response.usage.output_tokens == 5


def test_leaving_while_queued_spends_no_engine_work(platform: Platform) -> None:
    """64 requests fill both workers; one more waits, and its client leaves."""
    with ThreadPoolExecutor(64) as pool, raw_streams(platform, pool, 64):
        until(lambda: len(running(platform)) == 64, "all slots to be taken")
        with raw_stream(platform, stream=True) as answer:
            request_id = answer.headers["x-request-id"]
            assert platform.rows()[request_id].state == "waiting"
        ending = ended_within(platform, request_id, 1.5)

    assert (ending.outcome, ending.attempt) == ("cancelled", 0)
    assert platform.usage_of(request_id)["output_tokens"] == 0


@contextmanager
def raw_streams(platform: Platform, pool: ThreadPoolExecutor, count: int) -> Iterator[None]:
    """So many streams, open until the block ends."""
    done = threading.Event()

    def hold(n: int) -> None:
        with raw_stream(platform, stream=True) as answer:
            for _ in answer.iter_lines():
                if done.is_set():
                    return

    held = [pool.submit(hold, n) for n in range(count)]
    try:
        yield
    finally:
        done.set()
        for one in held:
            one.result()


# --- deadlines


def test_a_request_that_its_client_has_given_up_on_is_ended_unrun(platform: Platform) -> None:
    """SDKs say when they give up. What still waits then costs no engine work, and is not billed."""
    with ThreadPoolExecutor(65) as pool, raw_streams(platform, pool, 64):
        until(lambda: len(running(platform)) == 64, "all slots to be taken")
        headers = {"Authorization": f"Bearer {platform.key}", "x-stainless-read-timeout": "1"}
        body = {"model": MODEL, "messages": HELLO, "max_tokens": 5}
        answer = requests.post(f"{platform.url}/v1/chat/completions", json=body, headers=headers, timeout=10)

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "expired")
    [row] = [row for row in platform.rows().values() if row.ending and row.ending.outcome == "expired"]
    assert row.attempt == 0


# --- workers that die


def stream_text(platform: Platform, n: int, **body: Any) -> tuple[str, str, str]:
    """(request id, text, how it ended) of one streamed chat."""
    with raw_stream(platform, **{"stream": True, "max_tokens": LONG, **body}) as answer:
        text, ends = "", []
        for line in answer.iter_lines():
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                ends.append(chunk["error"]["code"])
            elif chunk["choices"]:
                text += chunk["choices"][0]["delta"].get("content") or ""
                ends += [reason] if (reason := chunk["choices"][0]["finish_reason"]) else []
        assert len(ends) == 1, "exactly one terminal event"
        return answer.headers["x-request-id"], text, ends[0]


def test_a_worker_killed_under_load_ends_every_request_once(platform: Platform) -> None:
    """Greedy streams go on without a gap or a repeat; sampled ones that had begun end as worker_lost; one row each."""
    start = time.monotonic()
    with ThreadPoolExecutor(40) as pool:
        greedy = [
            pool.submit(stream_text, platform, n, temperature=0, messages=[{"role": "user", "content": f"g{n}"}])
            for n in range(20)
        ]
        sampled = [pool.submit(stream_text, platform, n, seed=n) for n in range(20)]
        until(lambda: platform.busy() and len(running(platform)) > 20, "all to run")
        time.sleep(0.5)  # so that tokens have been delivered
        victim = platform.busy()[0]
        kill(victim.pid)
        results = [one.result() for one in greedy + sampled]

    ends = Counter(end for _, _, end in results)
    assert sum(ends.values()) == 40 and set(ends) <= {"length", "worker_lost"}
    assert all(end == "length" for _, _, end in results[:20]), "greedy requests are run again"
    for n, (_, text, _) in enumerate(results[:20]):
        assert text == greedy_text(f"g{n}", LONG)
    for n, (_, text, end) in enumerate(results[20:]):
        assert text_of(n, LONG).startswith(text)
        assert (text == text_of(n, LONG)) == (end == "length")
    assert ends["worker_lost"] > 0, "the victim had sampled streams"
    platform.quiet()
    usage = platform.usage_rows()
    times = Counter(str(row["event_id"]) for row in usage)
    assert [times[request_id] for request_id, _, _ in results] == [1] * 40, "one row each"
    rows = {str(row["event_id"]): row for row in usage}
    mine = [rows[request_id] for request_id, _, _ in results]
    assert {row["outcome"] for row in mine} == {"length", "worker_lost"}
    assert all(row["output_tokens"] == (LONG if row["outcome"] == "length" else 0) for row in mine)
    assert any(row["attempt"] == 2 for row in mine[:20])
    attempts = Counter(row["attempt"] for row in mine)
    print(f"kill -9 under load: {dict(ends)}, attempts {dict(attempts)}, {time.monotonic() - start:.1f} s")


def greedy_text(content: str, n: int) -> str:
    from core.values import Caller, Request, Sampling
    from web.dialects.draft import Message
    from web.render import ByteRenderer
    from workers.scripted import script_seed

    request = Request(
        id="x", model=MODEL, caller=Caller(org_id="", project_id="", key_id=""), gateway="",
        prompt_token_ids=ByteRenderer().render([Message("user", content)]),
        sampling=Sampling(max_tokens=n, temperature=0),
    )  # fmt: skip
    return text_of(script_seed(request), n)


def test_a_killed_workers_whole_answer_is_made_again(platform: Platform) -> None:
    """Nothing of a request that is not streamed has reached its client, so even a sampled one is run again."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(
            platform.client().chat.completions.create,
            model=MODEL,
            messages=HELLO,
            max_tokens=LONG,
            seed=5,  # type: ignore[arg-type]
        )
        request_id = next(iter(until(lambda: running(platform), "it to run")))
        time.sleep(0.3)
        platform.worker_running(request_id).kill()
        answer = asked.result()

    assert answer.choices[0].message.content == text_of(5, LONG)  # type: ignore[union-attr]


def test_a_worker_told_to_end_finishes_what_it_has(platform: Platform) -> None:
    with ThreadPoolExecutor(20) as pool:
        asked = [pool.submit(stream_text, platform, n, seed=n) for n in range(20)]
        until(lambda: platform.busy() and len(running(platform)) == 20, "all to run")
        victim = platform.busy()[0]
        kill(victim.pid, signal.SIGTERM)
        results = [one.result() for one in asked]

    assert [(text, end) for _, text, end in results] == [(text_of(n, LONG), "length") for n in range(20)]
    until(lambda: not psutil.pid_exists(victim.pid) or psutil.Process(victim.pid).status() == "zombie", "it to be gone")


def test_a_paused_worker_that_comes_back_publishes_nothing_more(platform: Platform) -> None:
    """SIGSTOP past its lease: others run its requests; when it goes on it is fenced, and nobody sees double."""
    with ThreadPoolExecutor(10) as pool:
        asked = [
            pool.submit(stream_text, platform, n, temperature=0, messages=[{"role": "user", "content": f"z{n}"}])
            for n in range(10)
        ]
        until(lambda: len(running(platform)) == 10, "all to run")
        time.sleep(0.3)
        zombie = psutil.Process(platform.busy()[0].pid)
        zombie.suspend()
        time.sleep(3.5)
        zombie.resume()
        results = [one.result() for one in asked]

    assert [(text, end) for _, text, end in results] == [(greedy_text(f"z{n}", LONG), "length") for n in range(10)]


# --- stores that die


def test_a_store_away_for_a_while_stops_no_stream(platform: Platform) -> None:
    """Killed and started again from its log: workers buffer, gateways listen again, nothing is missing or double."""
    with ThreadPoolExecutor(10) as pool:
        asked = [pool.submit(stream_text, platform, n, seed=n) for n in range(10)]
        until(lambda: len(running(platform)) == 10, "all to run")
        time.sleep(1.3)  # everysec: what was accepted is on disk
        kill(int(platform.store.client.info("server")["process_id"]))
        refused_at = time.monotonic()
        refused = platform.post("/v1/chat/completions", {"model": MODEL, "messages": HELLO})
        took_s = time.monotonic() - refused_at
        time.sleep(2)  # longer than a silence that is known for an outage, which this lease is too short for
        stores.start_valkey(platform.data)
        results = [one.result() for one in asked]

    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
    assert took_s < 1.0
    assert [(text, end) for _, text, end in results] == [(text_of(n, LONG), "length") for n in range(10)]


def test_a_store_that_hangs_is_a_503_within_a_second(platform: Platform) -> None:
    server = psutil.Process(int(platform.store.client.info("server")["process_id"]))
    server.suspend()
    try:
        start = time.monotonic()
        answer = platform.post("/v1/chat/completions", {"model": MODEL, "messages": HELLO})
        took_s = time.monotonic() - start
    finally:
        server.resume()

    assert answer.status_code == 503 and answer.headers["x-should-retry"] == "true"
    print(f"503 from a hanging store after {took_s:.2f} s")
    assert took_s < 1.5
    until(
        lambda: platform.post("/v1/chat/completions", {"model": MODEL, "messages": HELLO}).status_code == 200,
        "recovery",
    )


def test_a_full_store_is_a_503_and_no_stream_misses_anything(platform: Platform) -> None:
    """At its memory's bound it refuses to write. What runs goes on into its worker's buffer, and past the lease."""
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 5}
    with ThreadPoolExecutor(10) as pool:
        asked = [pool.submit(stream_text, platform, n, seed=n, max_tokens=1000) for n in range(10)]
        until(lambda: len(running(platform)) == 10, "all to run")
        platform.store.client.config_set("maxmemory", 1)
        try:
            refused = platform.post("/v1/chat/completions", body)
            time.sleep(2.5)
        finally:
            platform.store.client.config_set("maxmemory", 0)
        results = [one.result() for one in asked]

    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
    assert [(text, end) for _, text, end in results] == [(text_of(n, 1000), "length") for n in range(10)]
    assert {platform.rows()[request_id].attempt for request_id, _, _ in results} == {1}
    until(lambda: platform.post("/v1/chat/completions", body).status_code == 200, "recovery")


def test_postgres_away_stops_nobody_and_loses_nothing(platform: Platform) -> None:
    postmaster = int((platform.data / "postgres" / "cluster" / "postmaster.pid").read_text().split()[0])
    before = len(platform.usage_rows())
    kill(postmaster, signal.SIGINT)  # fast shutdown
    until(lambda: not psutil.pid_exists(postmaster), "Postgres to stop")
    try:
        answers = [
            platform.post("/v1/chat/completions", {"model": MODEL, "messages": HELLO, "max_tokens": 5})
            for _ in range(10)
        ]
        never_seen = platform.post("/v1/chat/completions", {"model": MODEL, "messages": HELLO}, key=_unknown())
    finally:
        stores.start_postgres(platform.data)

    assert [answer.status_code for answer in answers] == [200] * 10
    assert (never_seen.status_code, never_seen.json()["error"]["code"]) == (503, "accounts_unavailable")
    until(lambda: len(platform.usage_rows()) == before + 10, "the usage to arrive", 30)


def _unknown() -> str:
    from core.accounts import keys

    return keys.mint("live", "B" * keys.ID_LENGTH)


# --- gateways that end


def test_a_gateway_told_to_end_lets_streams_finish_and_says_goodbye(platform: Platform) -> None:
    """Idle sockets get 1001 at once, so that clients connect elsewhere; answers under way go on."""
    import websockets.sync.client
    from websockets.exceptions import ConnectionClosed

    url = f"ws://127.0.0.1:{platform.ports[0]}/v1/responses"
    with (
        websockets.sync.client.connect(url, additional_headers={"Authorization": f"Bearer {platform.key}"}) as idle,
        ThreadPoolExecutor(1) as pool,
    ):
        asked = pool.submit(stream_text, platform, 0, seed=1)
        until(lambda: running(platform), "it to run")
        kill(platform.pid("web0"), signal.SIGTERM)
        with pytest.raises(ConnectionClosed) as closed:
            idle.recv(timeout=5)
        result = asked.result()

    assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001
    assert result[1:] == (text_of(1, LONG), "length")
    until(lambda: answers(platform), "the gateway to be started again", 30)


def answers(platform: Platform) -> bool:
    try:
        return requests.get(platform.url + "/ready", timeout=2).status_code == 200
    except (requests.ConnectionError, requests.Timeout):
        return False
