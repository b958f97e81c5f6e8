"""A client goes on with its stream: at another gateway, after a death, over every transport. Real clients, signals."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import openai
import psutil
import pytest
import requests
from openai.types.responses import ResponseStreamEvent

from core import postgres
from core.accounts import keys, tenants
from tests.laws.test_faults import answers, ended_within, text_of
from tests.platform import MODEL, PEPPER, Platform, until

#: About two seconds on the scripted engine.
LONG = 400


def ask(platform: Platform, seed: int, tokens: int = LONG, gateway: int = 0, **options: Any) -> Any:
    return platform.client(gateway).responses.create(
        model=MODEL, input="hello", max_output_tokens=tokens, extra_body={"seed": seed}, stream=True, **options
    )


def text(events: list[ResponseStreamEvent]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def read_some(stream: Any, deltas: int = 20) -> list[Any]:
    """The beginning of a stream, to the so-and-so-manieth piece of text."""
    events: list[Any] = []
    for event in stream:
        events.append(event)
        if sum(one.type == "response.output_text.delta" for one in events) == deltas:
            return events
    raise AssertionError("it ended first")


def kill_gateway(platform: Platform, number: int) -> None:
    """The whole of it: gunicorn's own process would else leave its worker to end in order."""
    arbiter = psutil.Process(platform.pid(f"web{number}"))
    for process in [*arbiter.children(recursive=True), arbiter]:
        process.kill()


def request_id_of(response_id: str) -> str:
    return str(uuid.UUID(response_id.removeprefix("resp_")))


def test_a_stream_goes_on_at_the_second_gateway_when_the_first_is_killed(platform: Platform) -> None:
    """The client's own cursor, its own SDK: nothing repeated, nothing missing, one bill."""
    broken = ask(platform, 21)
    had = read_some(broken)
    response_id, after = had[0].response.id, had[-1].sequence_number
    kill_gateway(platform, 0)
    start = time.monotonic()

    stream = platform.client(1).responses.retrieve(response_id, stream=True, starting_after=after)
    first = next(iter(stream))
    pause_s = time.monotonic() - start
    got = [first, *stream]

    assert text(had) + text(got) == text_of(21, LONG)
    assert all(event.sequence_number > after for event in got)
    assert got[-1].type == "response.incomplete" and got[-1].response.output_text == text_of(21, LONG)
    row = platform.usage_of(request_id_of(response_id))
    assert (row["outcome"], row["output_tokens"], row["attempt"]) == ("length", LONG, 1)
    print(f"the first event from the second gateway came {pause_s * 1000:.0f} ms after the kill")
    until(lambda: answers(platform), "the gateway to be started again", 30)


def test_the_sdks_own_helper_shows_a_stream_that_began_elsewhere(platform: Platform) -> None:
    first = ask(platform, 22)  # kept open: its client is still there
    had = read_some(first)

    with platform.client(1).responses.stream(
        response_id=had[0].response.id, starting_after=had[-1].sequence_number
    ) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]

    first.close()  # it has moved, so this ends nothing
    assert text(had) + "".join(pieces) == text_of(22, LONG)


def test_a_response_that_has_ended_is_shown_for_a_while(platform: Platform) -> None:
    events = list(ask(platform, 23, 50))
    client = platform.client(1)
    response_id, middle = events[0].response.id, events[len(events) // 2].sequence_number

    again = list(client.responses.retrieve(response_id, stream=True))
    tail = list(client.responses.retrieve(response_id, stream=True, starting_after=middle))

    assert text(again) == text_of(23, 50)
    assert text([event for event in events if event.sequence_number <= middle]) + text(tail) == text_of(23, 50)
    assert client.responses.retrieve(response_id).output_text == text_of(23, 50)
    assert again[-1] == events[-1]


def test_another_projects_stream_does_not_exist(platform: Platform) -> None:
    other = second_key(platform)
    events = list(ask(platform, 24, 20))
    response_id = events[0].response.id
    mine, theirs = platform.client(1), platform.client(1).with_options(api_key=other)

    for client, name in ((theirs, response_id), (mine, "resp_" + uuid.uuid4().hex), (mine, "nonsense")):
        with pytest.raises(openai.NotFoundError) as caught:
            client.responses.retrieve(name)
        assert caught.value.code == "not_found"
    with pytest.raises(openai.NotFoundError):
        theirs.responses.retrieve(response_id, stream=True, starting_after=3)
    with pytest.raises(openai.BadRequestError):
        mine.responses.retrieve(response_id, stream=True, starting_after=10**6)


def second_key(platform: Platform) -> str:
    """Of the same organisation, but another project."""
    engine = postgres.connect(platform.database_url)
    try:
        with postgres.transaction(engine) as connection:
            [first] = [row for row in keys.keys(connection) if row.id == platform.key_id]
            project = tenants.create_project(connection, org_id=first.org_id, name="other")
            plain, _ = keys.create_key(
                connection, org_id=first.org_id, project_id=project.id, name="other", pepper=PEPPER.encode()
            )
    finally:
        engine.dispose()
    return plain


# --- chat


@contextmanager
def chat(
    platform: Platform, gateway: int, seed: int, headers: Mapping[str, str], tokens: int = LONG
) -> Iterator[requests.Response]:
    url = f"http://127.0.0.1:{platform.ports[gateway]}/v1/chat/completions"
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": tokens, "seed": seed}
    sent = {"Authorization": f"Bearer {platform.key}", **headers}
    with requests.post(url, json={**body, "stream": True}, headers=sent, stream=True, timeout=20) as answer:
        assert answer.status_code == 200, answer.text
        yield answer


def read_chat(answer: requests.Response, pieces: int = 10**9) -> tuple[str, str]:
    """The text so far, and the id of the last event."""
    got, last = "", ""
    lines = answer.kept_lines = answer.iter_lines()  # type: ignore[attr-defined]  # requests closes the connection with it
    for line in lines:
        if line.startswith(b"id: "):
            last = line[4:].decode()
        elif line.startswith(b"data: {"):
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            got += chunk["choices"][0]["delta"].get("content") or ""
            pieces -= 1
            if not pieces:
                break
    return got, last


def test_a_chat_stream_goes_on_after_its_last_event_and_is_one_request(platform: Platform) -> None:
    before = len(platform.rows())
    with chat(platform, 0, 25, {}) as first:
        had, last = read_chat(first, 30)
        kill_gateway(platform, 0)
        with chat(platform, 1, 25, {"Last-Event-ID": last}) as again:
            got, end = read_chat(again)

    assert had + got == text_of(25, LONG)
    assert end.rpartition(":")[0] == last.rpartition(":")[0]
    assert len(platform.rows()) == before + 1
    assert platform.usage_of(last.rpartition(":")[0])["output_tokens"] == LONG
    until(lambda: answers(platform), "the gateway to be started again", 30)


def test_the_sdk_reads_a_chat_stream_that_waits(platform: Platform) -> None:
    """Comments between events that have ids: more streams than there are slots, each read by the SDK to its end."""
    from concurrent.futures import ThreadPoolExecutor

    def read(n: int) -> str:
        chunks = platform.client().chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=100, seed=n, stream=True
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with ThreadPoolExecutor(80) as pool:
        assert list(pool.map(read, range(80))) == [text_of(n, 100) for n in range(80)]


# --- WebSocket


def test_a_socket_goes_on_with_a_response_that_began_over_http(platform: Platform) -> None:
    first = ask(platform, 26)
    had = read_some(first)
    response_id, after = had[0].response.id, had[-1].sequence_number

    with platform.client(1).responses.connect() as connection:
        connection.send({"type": "response.resume", "response_id": response_id, "starting_after": after})  # type: ignore[arg-type]
        got = []
        for event in connection:
            got.append(event)
            if event.type in ("response.completed", "response.incomplete", "response.failed", "error"):
                break
        connection.send({"type": "response.resume", "response_id": "resp_nothing"})  # type: ignore[arg-type]
        refused = json.loads(connection.recv_bytes())

    first.close()
    assert text(had) + text(got) == text_of(26, LONG)  # type: ignore[arg-type]
    assert got[-1].response.output_text == text_of(26, LONG)  # type: ignore[union-attr]
    assert (refused["type"], refused["status"]) == ("error", 404)


# --- leaving


def test_a_client_that_lingers_may_leave_and_come_back(platform: Platform) -> None:
    """Nobody reads for a while; the request goes on, and nothing of it is lost."""
    with chat(platform, 0, 27, {"X-Forebay-Linger": "20"}) as first:
        had, last = read_chat(first, 30)
    time.sleep(0.6)  # it would have been cancelled within a quarter of a second
    request_id = last.rpartition(":")[0]
    assert platform.rows()[request_id].state == "running"

    with chat(platform, 1, 27, {"Last-Event-ID": last}) as again:
        got, _ = read_chat(again)

    assert had + got == text_of(27, LONG)


def test_a_client_that_does_not_come_back_in_time_is_let_go(platform: Platform) -> None:
    with chat(platform, 0, 28, {"X-Forebay-Linger": "1"}, 4000) as first:
        _, last = read_chat(first, 10)

    ending = ended_within(platform, last.rpartition(":")[0], 4.0)

    assert ending.outcome == "cancelled"


def test_what_nobody_comes_back_for_ends_as_gateway_lost_and_says_so(platform: Platform) -> None:
    """Billed for no more than was generated; whoever asks later is shown what was delivered, and the error."""
    broken = ask(platform, 29, 4000)
    had = read_some(broken)
    kill_gateway(platform, 0)

    ending = ended_within(platform, request_id_of(had[0].response.id), 20.0)
    shown = platform.client(1).responses.retrieve(had[0].response.id)

    assert ending.outcome == "gateway_lost" and ending.usage.output_tokens < 4000
    assert platform.usage_of(request_id_of(had[0].response.id))["outcome"] == "gateway_lost"
    assert shown.status == "failed" and shown.error is not None and "gateway" in shown.error.message
    assert shown.output_text.startswith(text(had)) and text_of(29, 4000).startswith(shown.output_text)
    until(lambda: answers(platform), "the gateway to be started again", 30)
