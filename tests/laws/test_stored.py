"""Stored responses and background work on the whole platform, with the real `openai` client, while things die."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlparse

import openai
import psutil
import psycopg2
import pytest

from core.postgres import connect, text, transaction
from core.redis import tag
from tests.laws.test_life import text_of
from tests.platform import MODEL, Platform, kill, until

SAID = "what-a-customer-said"


def request_id_of(response_id: str) -> str:
    import uuid

    return str(uuid.UUID(response_id.removeprefix("resp_")))


def begin(platform: Platform, gateway: int = 0, *, seed: int = 5, tokens: int = 200, **more: Any) -> Any:
    return platform.client(gateway).responses.create(
        model=MODEL, input="hello", max_output_tokens=tokens, background=True, extra_body={"seed": seed}, **more
    )


def ended(platform: Platform, response_id: str, gateway: int = 1) -> Any:
    def look() -> Any:
        found = platform.client(gateway).responses.retrieve(response_id)
        return None if found.status in ("queued", "in_progress") else found

    return until(look, "the response to end", 40)


def stored_status(platform: Platform, response_id: str) -> str | None:
    engine = connect(platform.database_url)
    try:
        with transaction(engine) as connection:
            query = text("SELECT status FROM responses WHERE id = CAST(:id AS uuid)")
            found: str | None = connection.execute(query, {"id": request_id_of(response_id)}).scalar_one_or_none()
            return found
    finally:
        engine.dispose()


def test_a_conversation_goes_on_at_any_gateway(platform: Platform) -> None:
    first = platform.client(0).responses.create(model=MODEL, input="one", max_output_tokens=20, instructions="be brief")
    second = platform.client(1).responses.create(
        model=MODEL, input="two", max_output_tokens=20, previous_response_id=first.id
    )
    counted = platform.client(0).responses.input_tokens.count(model=MODEL, input="two", previous_response_id=first.id)

    alone = platform.client(0).responses.create(model=MODEL, input="two", max_output_tokens=20)
    assert second.usage is not None and alone.usage is not None
    assert second.usage.input_tokens == counted.input_tokens > alone.usage.input_tokens
    assert platform.client(1).responses.retrieve(second.id).model_dump() == second.model_dump()
    assert [item.type for item in platform.client(0).responses.input_items.list(second.id)] == ["message"]
    platform.client(0).responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        platform.client(1).responses.retrieve(first.id)


@pytest.mark.parametrize("victim", ["gateway", "worker"])
def test_background_work_outlives_who_accepted_it_and_who_ran_it(platform: Platform, victim: str) -> None:
    """kill -9: its result is there all the same, whole, and is paid for once."""
    queued = begin(platform)
    assert (queued.status, queued.background) == ("queued", True)
    request_id = request_id_of(queued.id)
    if victim == "gateway":
        kill(platform.pid("web0"))
    else:
        until(lambda: any(one == request_id for _, one in platform.claims()), "it to run")
        kill(platform.worker_running(request_id).pid)

    found = ended(platform, queued.id)

    assert found.status == "incomplete" and found.output_text == text_of(5, 200)
    until(lambda: stored_status(platform, queued.id) == "incomplete", "it to be written down", 20)
    assert platform.usage_of(request_id)["output_tokens"] == 200
    until(lambda: len(platform.workers()) == 2, "both workers")
    until(lambda: _answers(platform), "the first gateway")


def _answers(platform: Platform) -> bool:
    try:
        return bool(platform.client(0).models.list().data)
    except openai.APIConnectionError:
        return False


def test_background_work_that_the_queue_lost_is_fed_to_it_again(platform: Platform) -> None:
    queued = begin(platform, seed=6)
    client = platform.store.client
    keys = [tag(MODEL) + name for name in ("rows", "tasks", "waiting", "tenants", "depths", "due", "claims", "sums")]
    client.delete(*keys, *client.scan_iter(tag(MODEL) + "view:*"), *client.scan_iter(tag(MODEL) + "output:*"))

    found = ended(platform, queued.id)

    assert found.output_text == text_of(6, 200)
    assert platform.usage_of(request_id_of(queued.id))["output_tokens"] == 200


def test_a_reader_of_background_work_may_go(platform: Platform) -> None:
    """Past the time in which the stream of any other request would be given up."""
    stream = begin(platform, seed=7, tokens=250, stream=True)
    first = next(iter(stream))
    stream.close()

    found = ended(platform, first.response.id)

    assert found.status == "incomplete" and found.output_text == text_of(7, 250)
    again = list(platform.client(1).responses.retrieve(first.response.id, stream=True))
    assert again[-1].response.output_text == text_of(7, 250)  # type: ignore[union-attr]


def test_who_waits_for_a_response_that_is_cancelled_gets_what_was_made(platform: Platform) -> None:
    """Not an error, which SDKs would take for a reason to ask again."""
    before = set(platform.rows())
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            platform.client(0).responses.create, model=MODEL, input="hello", max_output_tokens=2000, temperature=0
        )
        [request_id] = until(lambda: set(platform.rows()) - before, "it to be queued")
        until(lambda: platform.rows()[request_id].state == "running", "it to run")
        response_id = "resp_" + request_id.replace("-", "")
        time.sleep(0.3)  # some of it is made
        platform.client(1).responses.cancel(response_id)
        found = waiting.result(5)

    assert (found.id, found.status) == (response_id, "cancelled")
    assert found.usage is not None and 0 < found.usage.output_tokens == len(found.output_text) < 2000
    assert platform.usage_of(request_id)["outcome"] == "cancelled"


def test_background_work_is_cancelled(platform: Platform) -> None:
    queued = begin(platform, tokens=250)
    cancelled = platform.client(1).responses.cancel(queued.id)
    assert cancelled.status == "cancelled"
    assert platform.client(0).responses.cancel(queued.id).status == "cancelled"
    until(lambda: stored_status(platform, queued.id) == "cancelled", "it to be written down")

    done = begin(platform, tokens=5)
    found = ended(platform, done.id)
    assert platform.client(0).responses.cancel(done.id).model_dump() == found.model_dump(), "too late"


@contextmanager
def stuck_table(platform: Platform) -> Iterator[None]:
    """Whoever asks the table waits."""
    url = platform.database_url
    connection = psycopg2.connect(host=url.split("host=", 1)[1], user="forebay", dbname="forebay")
    try:
        connection.cursor().execute("LOCK TABLE responses IN ACCESS EXCLUSIVE MODE")
        yield
    finally:
        connection.close()


@contextmanager
def silent_server(platform: Platform) -> Iterator[None]:
    """Postgres takes what it is sent, and does nothing."""
    folder = parse_qs(urlparse(platform.database_url).query)["host"][0]
    server = next(
        one for one in psutil.process_iter(["name", "cmdline"])
        if one.info["name"] == "postgres" and one.ppid() and folder in " ".join(one.info["cmdline"] or [])
    )  # fmt: skip
    stopped = [server, *server.children()]
    for one in stopped:
        one.suspend()
    try:
        yield
    finally:
        for one in stopped:
            one.resume()


@pytest.mark.parametrize("how", [stuck_table, silent_server])
def test_a_slow_database_holds_up_no_stream(platform: Platform, how: Any) -> None:
    """Answers that end meanwhile go out within two seconds and say that they are not stored; others flow on."""
    gaps: list[float] = []

    def watch() -> None:
        last = 0.0
        asked: dict[str, Any] = {"model": MODEL, "input": "x", "max_output_tokens": 250, "store": False}
        for _ in platform.client().responses.create(stream=True, **asked):
            gaps.append(time.monotonic() - last if last else 0.0)
            last = time.monotonic()

    with how(platform):
        streams = [threading.Thread(target=watch) for _ in range(4)]
        for one in streams:
            one.start()
        began = time.monotonic()
        done = platform.client().responses.create(model=MODEL, input=SAID, max_output_tokens=5)
        took_s = time.monotonic() - began
        with pytest.raises(openai.APIStatusError) as refused:
            begin(platform)
        for one in streams:
            one.join(20)

    assert done.store is False and took_s < 2.5  # type: ignore[attr-defined]
    assert refused.value.status_code == 503
    assert len(gaps) > 100 and max(gaps) < 0.9, f"the longest silence of a stream was {max(gaps):.2f} s"
    kept = platform.client().responses.create(model=MODEL, input="x", max_output_tokens=5)
    assert kept.store is True, "the next one is stored again"  # type: ignore[attr-defined]
    written = "".join(path.read_text() for path in (platform.data / "logs").iterdir())
    assert "response_unkept" in written and SAID not in written, "what customers say is in no log"
