"""`Idempotency-Key`: what is sent again is shown again. On the routes of two gateways, with a real queue behind."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from core import catalog
from core.limits import idempotency
from core.redis import Store, tag
from core.values import Outcome
from tasks.queue import Claim
from tests.conftest import Clock
from tests.web.test_coming_back import ASKED, CHAT, MODEL, TOML, Place, Reader, error_of, text_of, until
from web.transports import idempotency as flow

KEY = {"Idempotency-Key": "order 66"}
PLAIN = {**CHAT, "stream": False}


@pytest.fixture
def place(store: Store, valkey_url: str, tmp_path: Path) -> Iterator[Place]:
    path = tmp_path / "catalog.toml"
    path.write_text(TOML)
    place = Place(store, valkey_url, catalog.load(path))
    yield place
    for one in place.gateways:
        one.subscriber.streams.clear()
        one.subscriber.stop()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def rows(place: Place) -> int:
    return int(place.store.client.hlen(tag(MODEL) + "rows"))


def claim(place: Place) -> Claim:
    until(lambda: rows(place) > 0, "the request")
    return place.worker.claim()


def ask(place: Place, pool: ThreadPoolExecutor, number: int = 1, body: Any = PLAIN) -> Future[Any]:
    """Ask for an answer that is not streamed, and is waited for in a thread."""
    return pool.submit(place.ask, "/v1/chat/completions", body, number, KEY)


def readers(place: Place) -> int:
    entry = idempotency.name("o", "mine", KEY["Idempotency-Key"]).entry
    return max(0, int(place.store.client.hlen(entry)) - 3)


@pytest.mark.parametrize("number", [1, 2], ids=["same gateway", "another gateway"])
def test_what_is_sent_again_while_it_runs_is_the_same_answer(
    place: Place, pool: ThreadPoolExecutor, number: int
) -> None:
    """Both clients stay, and both get all of it."""
    first = ask(place, pool)
    work = claim(place)
    place.worker.say(work, "Hel")
    second = ask(place, pool, number)
    until(lambda: readers(place) == 2, "the second")
    place.worker.say(work, "lo", f"g{number}")
    place.worker.finish(work)

    answers = [first.result(10), second.result(10)]

    assert [answer.status_code for answer in answers] == [200, 200], answers[0].get_data()
    assert [answer.get_json()["choices"][0]["message"]["content"] for answer in answers] == ["Hello", "Hello"]
    assert len({json.dumps(answer.get_json()) for answer in answers}) == 1
    assert [answer.headers.get("idempotent-replayed") for answer in answers] == [None, "true"]
    assert {answer.headers["x-request-id"] for answer in answers} == {work.id}
    assert rows(place) == 1 and place.store.client.zcard(tag("org:o") + "open") == 0


@pytest.mark.parametrize("number", [1, 2], ids=["same gateway", "another gateway"])
def test_a_stream_that_is_sent_again_is_shown_from_its_beginning_to_both(
    place: Place, pool: ThreadPoolExecutor, number: int
) -> None:
    first = Reader(place.ask("/v1/responses", ASKED, headers=KEY))
    work = claim(place)
    place.worker.say(work, "Hel")
    had = first.until(106)
    second = Reader(place.ask("/v1/responses", ASKED, number, headers=KEY))
    rest = pool.submit(lambda: list(first))
    place.worker.say(work, "lo ", f"g{number}")
    place.worker.say(work, "there", f"g{number}")
    place.worker.finish(work)

    assert text_of(list(second)) == "Hello there"
    assert text_of(had + rest.result(10)) == "Hello there"
    assert second.answer.headers["idempotent-replayed"] == "true" and second.request_id == first.request_id
    first.close()
    second.close()
    assert rows(place) == 1 and place.row(work.id).cancelled == ""


def test_an_ended_answer_is_shown_again(place: Place, pool: ThreadPoolExecutor) -> None:
    first = ask(place, pool)
    work = claim(place)
    place.worker.say(work, "Hello")
    place.worker.finish(work)
    answer = first.result(10)

    again = [ask(place, pool, number).result(10) for number in (1, 2) for _ in range(idempotency.READERS_MAX)]

    assert {json.dumps(one.get_json()) for one in again} == {json.dumps(answer.get_json())}
    assert {one.headers["idempotent-replayed"] for one in again} == {"true"} and rows(place) == 1


def test_a_message_that_is_shown_again_says_as_much_of_its_input(place: Place) -> None:
    body = {"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}], "stream": True}
    first = Reader(place.ask("/v1/messages", body, headers=KEY))
    work = claim(place)
    place.worker.say(work, "Hello")
    place.worker.finish(work)
    told = list(first)

    again = list(Reader(place.ask("/v1/messages", body, 2, headers=KEY)))

    assert told[0]["type"] == "message_start" and told[0]["message"]["usage"]["input_tokens"] > 0
    assert again[0] == told[0]


def test_a_key_whose_response_was_deleted_stands_for_a_new_one(place: Place) -> None:
    """Not for one that can be shown no more, which its client would be kept waiting for."""
    first = Reader(place.ask("/v1/responses", ASKED, headers=KEY))
    work = claim(place)
    place.worker.say(work, "Hello")
    place.worker.finish(work)
    response_id = list(first)[-1]["response"]["id"]
    assert place.client(2).delete(f"/v1/responses/{response_id}", headers={"Authorization": "Bearer mine"}).json

    again = Reader(place.ask("/v1/responses", ASKED, 2, headers=KEY))

    assert again.request_id != work.id and rows(place) == 2
    again.close()


@pytest.mark.parametrize("leaver", [0, 1], ids=["the first leaves", "the second leaves"])
def test_one_reader_that_leaves_takes_nothing_from_another(place: Place, pool: ThreadPoolExecutor, leaver: int) -> None:
    streams = [Reader(place.ask("/v1/responses", ASKED, headers=KEY))]
    work = claim(place)
    streams.append(Reader(place.ask("/v1/responses", ASKED, 2, headers=KEY)))
    streams[0].until(0)
    streams[1].until(0)
    until(lambda: place.gateways[0].subscriber.followed, "the first to follow")
    streams.pop(leaver).close()
    place.worker.say(work, "Hello", "g2")
    place.worker.finish(work)

    assert text_of(list(streams[0])) == "Hello"
    assert place.row(work.id).cancelled == ""
    streams[0].close()


@pytest.mark.parametrize("number", [1, 2], ids=["same gateway", "another gateway"])
@pytest.mark.parametrize("leaver", ["first", "second"])
def test_who_comes_back_by_name_counts_as_a_reader_of_the_key(place: Place, number: int, leaver: str) -> None:
    """A client whose connection broke goes on by its response's name before its gateway has seen that it broke."""
    first = Reader(place.ask("/v1/responses", ASKED, headers=KEY))
    work = claim(place)
    place.worker.say(work, "Hel")
    first.until(106)
    second = Reader(place.get(f"/v1/responses/resp_{work.id.replace('-', '')}?stream=true", number))
    second.until(106)

    leaves, stays = (first, second) if leaver == "first" else (second, first)
    leaves.close()
    time.sleep(0.1)

    assert place.row(work.id).cancelled == ""
    place.worker.say(work, "lo", f"g{number}")
    place.worker.finish(work)
    assert list(stays)[-1]["response"]["output"][0]["content"][0]["text"] == "Hello"
    stays.close()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_last_reader_that_leaves_cancels_it(place: Place, order: tuple[int, int]) -> None:
    streams = [Reader(place.ask("/v1/responses", ASKED, headers=KEY))]
    work = claim(place)
    streams.append(Reader(place.ask("/v1/responses", ASKED, 2, headers=KEY)))
    streams[0].until(0)
    streams[1].until(0)
    until(lambda: place.gateways[0].subscriber.followed, "the first to follow")

    streams[order[0]].close()
    assert place.row(work.id).cancelled == ""
    streams[order[1]].close()

    until(lambda: place.row(work.id).cancelled == "cancelled", "the cancel")


def test_another_body_under_the_same_key_is_refused(place: Place) -> None:
    reader = Reader(place.ask("/v1/responses", ASKED, headers=KEY))

    for refused in (
        place.ask("/v1/responses", {**ASKED, "input": "else"}, headers=KEY),
        place.ask("/v1/chat/completions", CHAT, 2, headers=KEY),
    ):
        assert error_of(refused) == (422, "idempotency_key_reused")
        assert refused.get_json()["error"]["type"] == "invalid_request_error"
        assert refused.headers["x-should-retry"] == "false"
    assert rows(place) == 1
    reader.close()


def test_another_api_key_has_keys_of_its_own(place: Place) -> None:
    mine = Reader(place.ask("/v1/responses", ASKED, headers=KEY))
    other = Reader(place.ask("/v1/responses", ASKED, headers={**KEY, "Authorization": "Bearer other"}))

    assert mine.request_id != other.request_id and rows(place) == 2
    mine.close()
    other.close()


@pytest.mark.parametrize("key", ["", "x" * 256, "a\tb", "clé"])
def test_a_key_that_is_none_is_refused(place: Place, key: str) -> None:
    refused = place.ask("/v1/responses", ASKED, headers={"Idempotency-Key": key.encode("latin1").decode("latin1")})

    assert error_of(refused) == (400, "invalid_value")
    assert refused.get_json()["error"]["param"] == "Idempotency-Key" and rows(place) == 0


def test_a_refused_request_frees_its_key(place: Place) -> None:
    """It was refused with the model's bound of context, and may be sent again with another body."""
    long = {**ASKED, "input": "x" * 5000}
    assert place.ask("/v1/responses", long, headers=KEY).status_code == 400
    assert place.ask("/v1/responses", {**ASKED, "model": "none"}, headers=KEY).status_code == 404

    reader = Reader(place.ask("/v1/responses", ASKED, headers=KEY))

    assert reader.answer.headers.get("idempotent-replayed") is None
    reader.close()


@pytest.mark.parametrize("outcome", [Outcome.CANCELLED, Outcome.FAILED])
def test_what_ended_without_an_answer_is_made_anew(place: Place, pool: ThreadPoolExecutor, outcome: Outcome) -> None:
    first = ask(place, pool)
    work = claim(place)
    place.worker.finish(work, outcome)
    first.result(10)

    second = ask(place, pool, 2)
    until(lambda: rows(place) == 2, "another request")
    other = place.worker.claim()
    place.worker.say(other, "Hello", "g2")
    place.worker.finish(other)

    answer = second.result(10)
    assert answer.get_json()["choices"][0]["message"]["content"] == "Hello"
    assert answer.headers["x-request-id"] == other.id != work.id


def test_what_is_being_cancelled_is_awaited_and_made_anew(place: Place, pool: ThreadPoolExecutor) -> None:
    """The client went away, and is back before the worker has stopped."""
    first = Reader(place.ask("/v1/responses", ASKED, headers=KEY))
    work = claim(place)
    first.close()
    until(lambda: place.row(work.id).cancelled, "the cancel")

    second = pool.submit(place.ask, "/v1/responses", ASKED, 2, KEY)
    place.worker.finish(work, Outcome.CANCELLED)
    reader = Reader(second.result(10))

    assert reader.request_id != work.id and rows(place) == 2
    reader.close()


def test_equal_requests_at_the_same_moment_on_two_gateways_generate_once(
    place: Place, pool: ThreadPoolExecutor
) -> None:
    barrier = threading.Barrier(6)

    def at_once(number: int) -> Any:
        barrier.wait(10)
        return place.ask("/v1/chat/completions", PLAIN, number, KEY)

    asked = [pool.submit(at_once, 1 + n % 2) for n in range(6)]
    work = claim(place)
    until(lambda: readers(place) == 6, "all six")
    place.worker.say(work, "Hello")
    place.worker.finish(work)
    answers = [one.result(15) for one in asked]

    assert [answer.get_json() for answer in answers if answer.status_code != 200] == []
    assert {answer.get_json()["choices"][0]["message"]["content"] for answer in answers} == {"Hello"}
    assert {answer.headers["x-request-id"] for answer in answers} == {work.id} and rows(place) == 1
    assert sum(answer.headers.get("idempotent-replayed") is None for answer in answers) == 1


def test_a_gateway_that_died_between_the_key_and_the_queue_is_stood_in_for_with_the_same_id(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that, were it not dead but slow, there would still be one request."""
    monkeypatch.setattr(flow, "ADOPT_MS", 0)
    named = idempotency.name("o", "mine", KEY["Idempotency-Key"])
    body = json.dumps(ASKED).encode()
    dead = str(uuid.uuid4())
    place.store.run(idempotency.begin(named, dead, "r", flow.fingerprint("/v1/responses", body)))

    answer = place.client(1).post(
        "/v1/responses",
        data=body,
        headers={"Authorization": "Bearer mine", "Content-Type": "application/json", **KEY},
    )

    reader = Reader(answer)
    assert reader.request_id == dead
    reader.close()


def test_a_key_whose_answer_is_forgotten_stands_for_a_new_one(store: Store, clock: Clock, place: Place) -> None:
    named = idempotency.name("o", "mine", KEY["Idempotency-Key"])
    body = json.dumps(ASKED).encode()
    old = str(uuid.uuid4())
    place.store.run(idempotency.begin(named, old, "r", flow.fingerprint("/v1/responses", body)))
    clock.advance(idempotency.FRESH_MS)

    answer = place.client(1).post(
        "/v1/responses",
        data=body,
        headers={"Authorization": "Bearer mine", "Content-Type": "application/json", **KEY},
    )

    reader = Reader(answer)
    assert reader.request_id != old
    reader.close()


# --- the contract


def test_an_entry_is_taken_once_and_says_whose_it_is(store: Store, clock: Clock) -> None:
    named = idempotency.name("o", "k", "a key")
    mine = store.run(idempotency.begin(named, "one", "r1", "body"))
    clock.advance(70)

    assert mine.mine and store.run(idempotency.begin(named, "one", "r1", "body")).mine, "a repeat"
    assert store.run(idempotency.begin(named, "two", "r2", "body")) == idempotency.Taken(
        mine=False, request_id="one", same=True, age_ms=70
    )
    assert not store.run(idempotency.begin(named, "two", "r2", "other")).same
    assert not store.run(idempotency.free(named, "two")) and store.run(idempotency.free(named, "one"))
    assert store.run(idempotency.begin(named, "two", "r2", "body")).mine
    assert store.run(idempotency.begin(named, "three", "r3", "body", instead_of="two")).mine


def test_readers_are_counted_by_name(store: Store) -> None:
    named = idempotency.name("o", "k", "a key")
    store.run(idempotency.begin(named, "one", "r0", "body"))

    joined = [store.run(idempotency.join(named, "one", f"r{n}")) for n in range(1, idempotency.READERS_MAX + 1)]
    assert joined == [*range(1, idempotency.READERS_MAX), -2]
    assert [store.run(idempotency.leave(named, "one", "r1")) for _ in range(2)] == [idempotency.READERS_MAX - 1] * 2
    assert store.run(idempotency.join(named, "another", "r1")) == -1 == store.run(idempotency.leave(named, "x", "r1"))
