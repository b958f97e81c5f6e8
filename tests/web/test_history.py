"""Stored responses at a gateway: kept before the end is told, gone on from, shown, deleted; and background work."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from core import catalog
from core import responses as table
from core.accounts import tenants
from core.accounts.keys import KeyRecord
from core.errors import Unauthenticated
from core.postgres import DatabaseAway, text, transaction
from core.redis import Store, tag
from core.values import Class, Outcome
from tasks.queue import Claim
from tests.conftest import Database
from tests.web.test_coming_back import MODEL, TOML, Place, Reader, error_of, resp, text_of, until
from web import background, history
from web.admission import Admission
from web.app import Gateway
from web.render import ByteRenderer
from web.subscriber import Subscriber

SECRET = "a-marker-that-is-in-no-table"


class Doors:
    """A gate that knows two keys of one project, and one of another."""

    def __init__(self, org_id: str) -> None:
        self.org_id, self.projects, self.retention_days = org_id, [str(uuid.uuid4()), str(uuid.uuid4())], 30

    def authenticate(self, authorization: str, **_: Any) -> KeyRecord:
        project = {"mine": 0, "new": 0, "other": 1}.get(key_id := authorization.removeprefix("Bearer "))
        if project is None:
            raise Unauthenticated
        return KeyRecord(
            key_id=key_id, org_id=self.org_id, project_id=self.projects[project], secret_hmac=b"",
            retention_days=self.retention_days,
        )  # fmt: skip


class Office(Place):
    """Two gateways on one store and one database."""

    def __init__(self, store: Store, redis_url: str, models: catalog.Catalog, database: Database) -> None:
        self.database, self.engine = database, database.engine()
        with transaction(self.engine) as connection:
            self.org_id = tenants.create_organisation(connection, "acme").id
        self.doors = Doors(self.org_id)
        self.models, self.redis_url = models, redis_url
        super().__init__(store, redis_url, models)

    def made(self, name: str) -> Gateway:
        subscriber = Subscriber(self.store, self.redis_url, self.models, name)
        admission = Admission(self.models, self.store, subscriber, {MODEL: ByteRenderer()}, salt=b"s")
        return Gateway(
            catalog=self.models, store=self.store, gate=self.doors, admission=admission, subscriber=subscriber,  # type: ignore[arg-type]
            database=self.database.engine(),
        )  # fmt: skip

    # --- what clients do

    def streamed(self, said: str = "Hello", **body: Any) -> tuple[str, list[dict[str, Any]]]:
        """A response, streamed to its end."""
        reader = Reader(self.ask("/v1/responses", {"model": MODEL, "input": "hi", "stream": True, **body}))
        claim = self.worker.claim()
        self.worker.say(claim, said)
        self.worker.finish(claim)
        events = list(reader)
        return events[-1]["response"]["id"], events

    def whole(self, said: str = "Hello", **body: Any) -> dict[str, Any]:
        """A response that is answered whole."""
        answers: list[Any] = []
        asking = threading.Thread(
            target=lambda: answers.append(self.ask("/v1/responses", {"model": MODEL, "input": "hi", **body}))
        )
        asking.start()
        claim = until(self.claimed, "the request")
        self.worker.say(claim, said)
        self.worker.finish(claim)
        asking.join(10)
        assert answers[0].status_code == 200, answers[0].get_json()
        return dict(answers[0].get_json())

    def claimed(self) -> Claim | None:
        try:
            return self.worker.claim()
        except IndexError:
            return None

    def prompt_of(self, claim: Claim) -> str:
        return bytes(self.worker.request(claim).prompt_token_ids).decode()

    def forget(self) -> None:
        """Fifteen minutes pass: the queue remembers nothing."""
        self.store.client.flushall()

    def delete(self, response_id: str, number: int = 2, key: str = "mine") -> Any:
        headers = {"Authorization": f"Bearer {key}"}
        return self.client(number).delete(f"/v1/responses/{response_id}", headers=headers)

    def post(self, path: str, body: Any = None, number: int = 2) -> Any:
        return self.client(number).post(path, json=body or {}, headers={"Authorization": "Bearer mine"})

    def show(self, response_id: str, **more: Any) -> Any:
        return self.get(f"/v1/responses/{response_id}", **more)

    def execute(self, sql: str) -> None:
        with transaction(self.engine) as connection:
            connection.execute(text(sql))

    def everything(self) -> str:
        """All that is in the database, as text."""
        with transaction(self.engine) as connection:
            names = connection.execute(text("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")).scalars()
            return "".join(
                str(row) for name in names.all() for row in connection.execute(text(f"SELECT t::text FROM {name} AS t"))
            )


@pytest.fixture
def office(
    store: Store, valkey_url: str, tmp_path: Path, database: Database, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Office]:
    path = tmp_path / "catalog.toml"
    path.write_text(TOML)
    models = catalog.load(path)
    holder: list[Office] = []

    def made(name: str, *_: Any) -> Gateway:
        return holder[0].made(name)

    monkeypatch.setattr("tests.web.test_coming_back.gateway", made)
    office = Office.__new__(Office)
    holder.append(office)
    office.__init__(store, valkey_url, models, database)  # type: ignore[misc]
    yield office
    for one in office.gateways:
        one.subscriber.streams.clear()
        one.subscriber.stop()


# --- kept before the end


def test_a_response_is_stored_when_its_client_has_the_end(office: Office) -> None:
    """Exactly as the client was given it, whichever way."""
    streamed, events = office.streamed(instructions="be brief", metadata={"a": "b"})
    whole = office.whole(instructions="be brief")
    office.forget()

    assert office.show(streamed).get_json() == events[-1]["response"]
    assert office.show(whole["id"]).get_json() == whole
    assert (whole["store"], whole["instructions"]) == (True, "be brief")


@pytest.mark.parametrize("wish", [True, None])
def test_the_next_turn_finds_it_at_another_gateway(office: Office, wish: bool | None) -> None:
    first, _ = office.streamed("Hello", input="my name is Ann", store=wish, instructions="be brief")
    second, events = office.streamed("Ann", input="my name?", previous_response_id=first)

    asked = {"model": MODEL, "input": "sure?", "previous_response_id": second, "stream": True}
    reader = Reader(office.ask("/v1/responses", asked, 2))
    claim = office.worker.claim()
    prompt = office.prompt_of(claim)
    reader.close()

    assert [prompt.find(word) for word in ("my name is Ann", "Hello", "my name?", "sure?")] == sorted(
        prompt.find(word) for word in ("my name is Ann", "Hello", "my name?", "sure?")
    ) and prompt.find("my name is Ann") >= 0
    assert "be brief" not in prompt, "instructions are not inherited"
    assert events[-1]["response"]["previous_response_id"] == first


def test_what_is_not_to_be_stored_is_not(office: Office) -> None:
    response_id, events = office.streamed(SECRET, input=SECRET + "?", store=False)

    assert events[-1]["response"]["store"] is False and SECRET not in office.everything()
    asked = {"model": MODEL, "input": "x", "previous_response_id": response_id}
    refused = office.post("/v1/responses", asked)
    assert refused.status_code == 400
    assert refused.get_json()["error"] == {
        "message": f"Previous response with id '{response_id}' not found.", "type": "invalid_request_error",
        "param": "previous_response_id", "code": "previous_response_not_found",
    }  # fmt: skip


def test_nothing_of_an_organisation_that_keeps_nothing_is_written(office: Office) -> None:
    """Not even when its gateway was told long ago that it keeps some."""
    with transaction(office.engine) as connection:
        tenants.set_retention(connection, office.org_id, 0)

    stale, events = office.streamed(SECRET, input=SECRET)
    assert events[-1]["response"]["store"] is False
    refused = office.post("/v1/responses", {"model": MODEL, "input": SECRET, "background": True})
    assert refused.status_code == 400 and refused.get_json()["error"]["param"] == "background"
    office.doors.retention_days = 0
    _, events = office.streamed(SECRET, input=SECRET, metadata={"m": SECRET}, instructions=SECRET)
    assert {event["response"]["store"] for event in events if "response" in event} == {False}
    refused = office.post("/v1/responses", {"model": MODEL, "input": SECRET, "background": True})
    assert refused.status_code == 400
    for previous in (stale, events[-1]["response"]["id"]):
        refused = office.post("/v1/responses", {"model": MODEL, "input": "x", "previous_response_id": previous})
        assert error_of(refused) == (400, "previous_response_not_found")

    assert SECRET not in office.everything()


def test_with_postgres_away_the_answer_is_given_and_says_it_is_not_stored(office: Office) -> None:
    from core.telemetry import metrics

    before = metrics.responses_unkept._value.get()
    office.database.go_away()
    try:
        streamed, events = office.streamed()
        whole = office.whole()
        refused = office.post("/v1/responses", {"model": MODEL, "input": "x", "background": True})
        gone_on = office.post("/v1/responses", {"model": MODEL, "input": "x", "previous_response_id": streamed})
        shown = office.show(streamed)
    finally:
        office.database.come_back()

    assert events[0]["response"]["store"] is True and events[-1]["response"]["store"] is False
    assert events[-1]["type"] == "response.completed" and text_of(events) == "Hello" and whole["store"] is False
    assert error_of(refused) == error_of(gone_on) == (503, "history_unavailable")
    assert shown.status_code == 200, "it is shown from the queue"
    assert metrics.responses_unkept._value.get() == before + 2
    assert office.claimed() is None, "nothing was accepted"


def test_whoever_sees_the_end_stores_it(office: Office, valkey: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first gateway dies in the middle; the client goes on at another one, and has the next turn there."""
    monkeypatch.setattr(history, "FEW_BYTES", 100)
    first = Reader(office.ask("/v1/responses", {"model": MODEL, "input": "x" * 200, "stream": True}))
    claim = office.worker.claim()
    office.worker.say(claim, "Hel")
    first.until(106)
    again = Reader(office.get(f"{resp(claim.id)}?stream=true&starting_after=106"))
    assert list(first)[-1]["type"] == "response.failed", "and stores nothing"
    assert office.everything().count("Hel") == 0
    office.worker.say(claim, "lo", "g2")
    office.worker.finish(claim)
    events = list(again)

    assert events[-1]["response"]["store"] is True
    assert b"xxxx" not in valkey.get(f"{tag(MODEL)}view:{claim.id}"), "long items do not stay in memory"
    items = office.get(f"{resp(claim.id)}/input_items").get_json()["data"]
    assert items[0]["content"][0]["text"] == "x" * 200
    office.forget()
    assert office.show(events[-1]["response"]["id"]).get_json() == events[-1]["response"]


# --- who sees it


def test_any_key_of_the_project_sees_it_and_nobody_else(office: Office) -> None:
    response_id, _ = office.streamed()
    never = resp(str(uuid.UUID(int=uuid.UUID(response_id[5:]).int ^ 1))).rpartition("/")[2]

    for fresh in (True, False):
        assert office.show(response_id, key="new").status_code == 200
        answers = [
            office.show(response_id, key="other"), office.show(never), office.delete(response_id, key="other"),
            office.get(f"/v1/responses/{response_id}/input_items", key="other"), office.delete(never),
            office.post(f"/v1/responses/{never}/cancel"), office.show("resp_x"), office.delete("x"),
        ]  # fmt: skip
        assert {answer.status_code for answer in answers} == {404}
        assert len({json.dumps(answer.get_json()) for answer in answers}) == 1, "in the same words"
        if fresh:
            office.forget()
    refused = office.client(1).post(
        "/v1/responses", json={"model": MODEL, "input": "x", "previous_response_id": response_id},
        headers={"Authorization": "Bearer other"},
    )  # fmt: skip
    assert error_of(refused) == (400, "previous_response_not_found")


# --- deleting


def test_a_deleted_response_is_gone_at_once_everywhere(office: Office) -> None:
    first, _ = office.streamed()
    second, _ = office.streamed(previous_response_id=first)

    deleted = office.delete(first)

    assert deleted.get_json() == {"id": first, "object": "response", "deleted": True}
    assert office.show(first).status_code == office.show(first, number=1).status_code == 404
    assert office.get(f"/v1/responses/{first}?stream=true").status_code == 404
    assert office.delete(first).status_code == 404
    for previous in (first, second):
        asked = {"model": MODEL, "input": "x", "previous_response_id": previous}
        assert error_of(office.post("/v1/responses", asked)) == (400, "previous_response_not_found")
    assert office.show(second).status_code == 200


def test_a_response_that_is_deleted_while_it_runs_ends_and_is_not_stored(office: Office) -> None:
    reader = Reader(office.ask("/v1/responses", {"model": MODEL, "input": SECRET, "stream": True}))
    claim = office.worker.claim()
    office.worker.say(claim, "Hel")
    reader.until(106)

    assert office.delete(resp(claim.id).rpartition("/")[2]).status_code == 200
    assert office.row(claim.id).cancelled == "cancelled"
    office.worker.finish(claim, Outcome.CANCELLED)
    last = list(reader)[-1]["response"]

    assert (last["status"], last["store"]) == ("cancelled", False)
    assert SECRET not in office.everything() and office.show(last["id"]).status_code == 404


# --- showing


def test_a_stored_stream_is_told_again_when_the_queue_has_forgotten_it(office: Office) -> None:
    response_id, events = office.streamed("Hello")
    office.forget()

    again = list(Reader(office.get(f"/v1/responses/{response_id}?stream=true")))
    tail = list(Reader(office.get(f"/v1/responses/{response_id}?stream=true&starting_after=106")))

    told = [event for event in events if event["type"] != "response.queued"]
    assert again[-1] == told[-1] and [event["type"] for event in again] == [event["type"] for event in told]
    assert text_of(again) == "Hello" and text_of(tail) == "lo" and tail[-1] == told[-1]
    beyond = office.get(f"/v1/responses/{response_id}?stream=true&starting_after=5000")
    assert error_of(beyond) == (400, "invalid_value")


def test_who_has_the_end_of_an_answer_that_a_stop_string_ended_is_told_nothing_more(office: Office) -> None:
    """The numbers of a live stream count the stop string, of which nothing is stored."""
    reader = Reader(office.ask("/v1/responses", {"model": MODEL, "input": "hi", "stream": True, "stop": ["END"]}))
    claim = office.worker.claim()
    office.worker.say(claim, "Hello")
    office.worker.say(claim, "END", kind="stop")
    office.worker.finish(claim)
    last = list(reader)[-1]
    path = f"/v1/responses/{last['response']['id']}?stream=true&starting_after={last['sequence_number']}"
    assert list(Reader(office.get(path))) == []

    office.forget()

    assert list(Reader(office.get(path))) == []


def test_a_response_that_was_not_streamed_is_not_streamed_later(office: Office) -> None:
    whole = office.whole()
    for _ in range(2):
        assert error_of(office.get(f"/v1/responses/{whole['id']}?stream=true")) == (400, "invalid_value")
        office.forget()


def test_input_items_are_listed_page_by_page(office: Office) -> None:
    given = [{"role": "user", "content": f"item {n}"} for n in range(5)]
    response_id, _ = office.streamed(input=given)
    path = f"/v1/responses/{response_id}/input_items"

    def listed(query: str) -> tuple[list[str], bool, str]:
        found = office.get(path + query).get_json()
        assert found["object"] == "list" and found["first_id"] == found["data"][0]["id"]
        return [item["content"][0]["text"] for item in found["data"]], found["has_more"], found["last_id"]

    assert listed("") == ([f"item {n}" for n in range(4, -1, -1)], False, office.get(path).get_json()["last_id"])
    texts, more, last = listed("?limit=2&order=asc")
    assert (texts, more) == (["item 0", "item 1"], True)
    assert listed(f"?limit=3&order=asc&after={last}")[:2] == (["item 2", "item 3", "item 4"], False)
    for wrong in ("?limit=0", "?limit=101", "?limit=x", "?order=up", "?after=nobody"):
        assert error_of(office.get(path + wrong)) == (400, "invalid_value")
    office.forget()
    assert listed("?limit=1")[0] == ["item 4"]


def test_input_tokens_are_what_the_request_would_be_charged(office: Office) -> None:
    first, _ = office.streamed("Hello")
    asked = {"model": MODEL, "input": "and?", "previous_response_id": first}

    counted = office.post("/v1/responses/input_tokens", asked).get_json()

    Reader(office.ask("/v1/responses", {**asked, "stream": True}))
    assert counted == {
        "object": "response.input_tokens",
        "input_tokens": len(office.worker.request(office.worker.claim()).prompt_token_ids),
    }


# --- cancelling


def test_a_response_is_cancelled_by_its_id_wherever_it_is(office: Office) -> None:
    """Waiting, it ends at once; running, when its worker has stopped; and again it is shown as it ended."""
    reader = Reader(office.ask("/v1/responses", {"model": MODEL, "input": "x", "stream": True}))
    response_id = resp(reader.request_id).rpartition("/")[2]

    answers = [office.post(f"/v1/responses/{response_id}/cancel") for _ in range(2)]
    events = list(reader)

    assert {answer.status_code for answer in answers} == {200}
    assert {answer.get_json()["status"] for answer in answers} == {"cancelled"}
    assert events[-1]["response"]["status"] == "cancelled"


def test_what_has_ended_is_shown_as_it_ended(office: Office) -> None:
    response_id, events = office.streamed()
    for _ in range(2):
        answer = office.post(f"/v1/responses/{response_id}/cancel")
        assert (answer.status_code, answer.get_json()) == (200, events[-1]["response"])
        office.forget()


# --- background


def in_background(office: Office, **body: Any) -> dict[str, Any]:
    answer = office.ask("/v1/responses", {"model": MODEL, "input": "hi", "background": True, **body})
    assert answer.status_code == 200, answer.get_json()
    return dict(answer.get_json())


def test_background_work_is_answered_at_once_and_fetched_later(office: Office) -> None:
    queued = in_background(office, metadata={"a": "b"})
    assert (queued["status"], queued["background"], queued["store"]) == ("queued", True, True)
    assert office.show(queued["id"]).get_json() == queued

    claim = office.worker.claim()
    request = office.worker.request(claim)
    assert (request.cls, request.gateway, request.patience_ms) == (Class.BULK, "", 0)
    assert office.show(queued["id"]).get_json()["status"] == "in_progress"
    office.worker.say(claim, "Hello", "")
    office.worker.finish(claim)
    assert office.show(queued["id"]).get_json()["status"] == "completed", "also before it is written down"
    backlog = office.gateways[0].backlog
    backlog.look(list(backlog._known.items()))
    office.forget()

    ended = office.show(queued["id"]).get_json()
    assert ended["status"] == "completed" and ended["output"][0]["content"][0]["text"] == "Hello"
    assert {name: ended[name] for name in queued if name not in history._FACTS} == {
        name: queued[name] for name in queued if name not in history._FACTS
    }
    _, events = office.streamed(previous_response_id=queued["id"])
    assert events[-1]["response"]["status"] == "completed"


def test_background_work_of_a_tier_that_is_paid_more_is_not_last(office: Office) -> None:
    in_background(office, service_tier="priority")

    assert office.worker.request(office.worker.claim()).cls == Class.DEFAULT


def test_what_the_queue_does_not_know_is_fed_to_it_again_under_the_same_id(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gateway died between the commit and the queue, or the store lost it; another gateway finds it."""
    queued = in_background(office)
    office.forget()
    assert office.show(queued["id"]).get_json() == queued
    monkeypatch.setattr(background, "REST_S", -1.0)

    office.gateways[1].backlog.sweep()
    office.gateways[0].backlog.sweep()

    claim = office.worker.claim()
    assert resp(claim.id).endswith(queued["id"]) and office.claimed() is None
    office.worker.say(claim, "Hello", "")
    office.worker.finish(claim)
    office.gateways[1].backlog.sweep()
    office.forget()
    assert office.show(queued["id"]).get_json()["status"] == "completed"
    office.gateways[1].backlog.sweep()
    assert office.claimed() is None, "what has ended is not run again"


@pytest.mark.parametrize("gone", ["cancelled", "deleted"])
def test_what_is_given_up_while_it_is_fed_to_the_queue_is_not_run(office: Office, gone: str) -> None:
    """Whoever gives it up finds nothing in the queue, and the gateway that feeds it has read it already."""
    queued = in_background(office)
    office.forget()
    backlog = office.gateways[0].backlog
    read, given_up = backlog._body, []

    def body(request_id: str) -> Any:
        found = read(request_id)
        if not given_up:
            given_up.append(request_id)
            cancelled = gone == "cancelled"
            answer = office.post(f"/v1/responses/{queued['id']}/cancel") if cancelled else office.delete(queued["id"])
            assert answer.status_code == 200
        return found

    backlog._body = body  # type: ignore[method-assign]
    backlog.look(list(backlog._known.items()))

    assert given_up and office.claimed() is None


def test_background_work_that_cannot_be_read_keeps_no_other_from_its_end(office: Office) -> None:
    work = []
    for _ in range(2):
        queued = in_background(office)
        claim = office.worker.claim()
        office.worker.say(claim, "Hello", "")
        office.worker.finish(claim)
        work.append((claim.id, queued["id"]))
    (broken, _), (_, second) = work
    office.store.client.set(f"{tag(MODEL)}view:{broken}", b"no view")
    backlog = office.gateways[0].backlog

    backlog.look(list(backlog._known.items()))
    office.forget()

    assert office.show(second).get_json()["status"] == "completed"


def test_background_work_that_was_refused_with_postgres_away_is_not_run_though_it_was_committed(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply to its COMMIT was lost, and another gateway has fed it to the queue since."""
    monkeypatch.setattr(background, "REST_S", -1.0)
    mine = office.gateways[0]
    write = mine.history.write

    def lost(*args: Any) -> bool:
        write(*args)
        raise DatabaseAway("its reply was lost")

    monkeypatch.setattr(mine.history, "write", lost)
    refused = office.ask("/v1/responses", {"model": MODEL, "input": "hi", "background": True})
    assert error_of(refused) == (503, "history_unavailable")
    office.gateways[1].backlog.sweep()
    assert office.store.client.hlen(tag(MODEL) + "rows") == 1, "it was fed"

    mine.backlog._withdraw()

    assert office.claimed() is None and mine.backlog._doubtful == {}
    with transaction(office.engine) as connection:
        assert connection.execute(text("SELECT count(*) FROM responses")).scalar_one() == 0


def test_background_work_that_the_queue_does_not_have_yet_tells_its_name_to_who_would_read_it(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is accepted: an error instead of an answer would have it made, and billed, a second time."""
    for one in office.gateways:
        monkeypatch.setattr(one.backlog, "_put", lambda *_: None)  # the store went away that moment

    asked = {"model": MODEL, "input": "hi", "background": True, "stream": True}
    events = list(Reader(office.ask("/v1/responses", asked)))

    assert [event["type"] for event in events] == ["response.created", "response.failed"]
    [backlog] = [one.backlog for one in office.gateways if one.backlog._known]
    backlog.look(list(backlog._known.items()))
    claim = office.worker.claim()
    office.worker.say(claim, "Hello", "")
    office.worker.finish(claim)
    assert office.show(events[0]["response"]["id"]).get_json()["status"] == "completed"


def test_a_reader_of_background_work_may_go_and_come_back(office: Office) -> None:
    reader = Reader(office.ask("/v1/responses", {"model": MODEL, "input": "hi", "background": True, "stream": True}))
    claim = office.worker.claim()
    office.worker.say(claim, "Hel")
    reader.until(106)

    reader.close()

    until(lambda: office.row(claim.id).gateway == "", "the reader to be gone")
    assert office.row(claim.id).cancelled == ""
    again = Reader(office.get(f"{resp(claim.id)}?stream=true&starting_after=106"))
    office.worker.say(claim, "lo", "g2")
    office.worker.finish(claim)
    events = list(again)
    assert text_of(events) == "lo" and events[-1]["response"]["store"] is True
    office.forget()
    assert office.show(events[-1]["response"]["id"]).get_json() == events[-1]["response"]


@pytest.mark.parametrize("where", ["queued", "running", "lost"])
def test_background_work_is_cancelled_wherever_it_is(office: Office, where: str) -> None:
    queued = in_background(office)
    answers: list[Any] = []
    cancelling = threading.Thread(
        target=lambda: answers.append(office.post(f"/v1/responses/{queued['id']}/cancel").get_json())
    )
    if where == "lost":
        office.forget()
    if where == "running":
        claim = office.worker.claim()
        cancelling.start()
        until(lambda: office.row(claim.id).cancelled, "its worker to be told")
        office.worker.finish(claim, Outcome.CANCELLED)
    else:
        cancelling.start()
    cancelling.join(10)
    office.forget()

    assert answers[0]["status"] == "cancelled"
    assert office.show(queued["id"]).get_json()["status"] == "cancelled"
    background.REST_S, before = -1.0, background.REST_S
    office.gateways[1].backlog.sweep()
    background.REST_S = before
    assert office.claimed() is None


def test_a_full_queue_accepts_no_background_work(office: Office) -> None:
    for one in office.gateways:
        one.subscriber.queues[MODEL].bounds = one_place()
    in_background(office)

    refused = office.ask("/v1/responses", {"model": MODEL, "input": "hi", "background": True})

    assert refused.status_code in (429, 503)
    with transaction(office.engine) as connection:
        assert connection.execute(text("SELECT count(*) FROM responses")).scalar_one() == 1
    holds = office.store.client.zcard(tag(f"org:{office.org_id}") + "open")
    assert holds == 1, "the refused one holds nothing"


def one_place() -> Any:
    from tasks.queue import Bounds

    return Bounds(waiting=1)


def test_an_unfinished_response_is_not_gone_on_from(office: Office) -> None:
    queued = in_background(office)

    refused = office.post("/v1/responses", {"model": MODEL, "input": "x", "previous_response_id": queued["id"]})

    assert error_of(refused) == (400, "previous_response_open")


def test_a_conversation_has_a_bound(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "TURNS_MAX", 2)
    monkeypatch.setattr("core.responses.TURNS_MAX", 2)
    previous, _ = office.streamed()
    for _ in range(2):
        previous, _ = office.streamed(previous_response_id=previous)

    refused = office.post("/v1/responses", {"model": MODEL, "input": "x", "previous_response_id": previous})

    assert error_of(refused) == (400, "conversation_too_long")


def test_a_conversation_that_is_too_large_for_a_gateways_memory_is_refused(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of its contents leave Postgres. What a template leaves out, such as old thoughts, bounds no context."""
    first, _ = office.streamed("a line", input="thought " * 400)
    second, events = office.streamed("another", previous_response_id=first)
    item_id = events[-1]["response"]["output"][0]["id"]
    for module in (table, history):
        monkeypatch.setattr(module, "CONVERSATION_BYTES_MAX", 3_000)
    with transaction(office.engine) as connection:
        turns = table.chain(connection, office.doors.projects[0], str(uuid.UUID(second.removeprefix("resp_"))))
    assert {turn.items + turn.response for turn in turns} == {""} and turns[0].whole_bytes > 3_000

    refused = office.post("/v1/responses", {"model": MODEL, "input": "x", "previous_response_id": second})
    assert error_of(refused) == (400, "conversation_too_long")
    monkeypatch.setattr(table, "CONVERSATION_BYTES_MAX", 10)
    monkeypatch.setattr(history, "CONVERSATION_BYTES_MAX", 10)
    named = [{"type": "item_reference", "id": item_id}]
    assert error_of(office.post("/v1/responses", {"model": MODEL, "input": named})) == (400, "invalid_value")


def test_items_of_stored_responses_are_named_by_id(office: Office) -> None:
    _, events = office.streamed("a line to be named", input="first")
    item_id = events[-1]["response"]["output"][0]["id"]

    asked = {"model": MODEL, "input": [{"type": "item_reference", "id": item_id}, {"role": "user", "content": "more"}]}
    Reader(office.ask("/v1/responses", {**asked, "stream": True}, 2))

    assert "a line to be named" in office.prompt_of(office.worker.claim())
