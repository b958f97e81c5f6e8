"""What a request is told that finds its queue full, or nobody there: on the routes, with a real queue behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.exceptions import ResponseError
from structlog.testing import capture_logs

from core import catalog, fleet
from core.accounts.keys import KeyRecord
from core.catalog import QueueBounds
from core.outlook import RETRY_UNKNOWN_MS, Pace, Starting
from core.redis import Call, Store, tag
from core.values import Class, WorkerState
from tasks.queue import Bounds, Queue, Stops, Task
from web.admission import Admission, queue_bounds
from web.app import Gateway, create
from web.render import ByteRenderer
from web.subscriber import Subscriber

TOML = """
[models.m]
tokenizer = "bytes"
context_tokens = 4096
max_output_tokens = 256
bounds = { waiting = 4, waiting_tokens = 1000, tenant_waiting = 3, tenant_tokens = 600 }
"""
CHAT = {"model": "m", "messages": [{"role": "user", "content": "x" * 100}], "stream": True}


class Door:
    """A gate that everybody of organisation "o" passes."""

    def authenticate(self, authorization: str, **_: Any) -> KeyRecord:
        return KeyRecord(key_id="k", org_id="o", project_id="p", secret_hmac=b"")


class Place:
    """One gateway, and its queue seen from the side."""

    def __init__(self, store: Store, redis_url: str, models: catalog.Catalog) -> None:
        bounds = {name: queue_bounds(model) for name, model in models.items()}
        self.store, self.queue = store, Queue("m")
        self.subscriber = Subscriber(store, redis_url, models, "g", bounds=bounds)
        admission = Admission(models, store, self.subscriber, {"m": ByteRenderer()}, salt=b"s")
        parts = Gateway(catalog=models, store=store, gate=Door(), admission=admission, subscriber=self.subscriber)  # type: ignore[arg-type]
        self.client = create(parts).test_client()

    def fill(self, tenant: str, *input_tokens: int) -> None:
        for n, tokens in enumerate(input_tokens):
            task = Task(id=f"{tenant}{n}", message=b"", tenant=tenant, input_tokens=tokens)
            assert self.store.run(self.queue.enqueue(task)).status == "accepted"

    def ask(self) -> Any:
        return self.client.post("/v1/chat/completions", json=CHAT)


@pytest.fixture
def place(store: Store, valkey_url: str, tmp_path: Path) -> Place:
    path = tmp_path / "catalog.toml"
    path.write_text(TOML)
    return Place(store, valkey_url, catalog.load(path))


@pytest.mark.parametrize(
    ("waiting", "status", "error_type", "code", "says"),
    [
        ([("a", 10, 10), ("b", 10, 10)], 503, "server_error", "overloaded", "4 requests wait for this model, and at"),
        ([("a", 500), ("b", 450)], 503, "server_error", "overloaded", "950 input tokens wait for this model, and at"),
        ([("o", 10, 10, 10)], 429, "requests", "rate_limit_exceeded", "3 requests wait for this model from your org"),
        ([("o", 550)], 429, "tokens", "rate_limit_exceeded", "550 input tokens wait for this model from your org"),
    ],
    ids=["model, requests", "model, tokens", "organisation, requests", "organisation, tokens"],
)
def test_a_full_queue_says_which_bound_was_reached_and_when_to_come_again(
    place: Place, waiting: list[tuple[Any, ...]], status: int, error_type: str, code: str, says: str
) -> None:
    """One start in two seconds, one request above the bound: two seconds. Nothing stays held or open."""
    for tenant, *tokens in waiting:
        place.fill(tenant, *tokens)
    place.subscriber.paces["m"] = Pace(starts=0.5, ms=1000.0)

    refused = place.ask()

    assert (refused.status_code, refused.headers["retry-after"]) == (status, "2")
    assert refused.headers["x-should-retry"] == "true"
    error = refused.json["error"]
    assert (error["type"], error["code"]) == (error_type, code)
    assert error["message"].startswith(says)
    assert place.store.client.zcard(tag("org:o") + "open") == 0
    assert place.subscriber.streams == {}
    assert place.store.client.hlen(tag("m") + "rows") == sum(len(tokens) for _, *tokens in waiting)


def test_a_request_that_cannot_be_enqueued_for_whatever_reason_leaves_no_stream_open(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = place.store.run

    def busy(call: Call[Any]) -> Any:
        if place.queue.keys[0] in call.keys:
            raise ResponseError("BUSY a script runs")
        return run(call)

    with monkeypatch.context() as patch, capture_logs():
        patch.setattr(place.store, "run", busy)
        refused = place.ask()

    assert (refused.status_code, refused.json["error"]["type"]) == (500, "server_error")
    assert place.subscriber.streams == {}


def test_a_full_queue_of_unknown_pace_says_a_few_seconds(place: Place) -> None:
    place.fill("a", 10, 10, 10, 10)

    assert place.ask().headers["retry-after-ms"] == str(RETRY_UNKNOWN_MS)


def test_a_full_queue_that_waits_for_a_worker_says_when_it_will_be_there(place: Place) -> None:
    starting = Starting(state=WorkerState.LOADING)
    place.fill("a", 10, 10, 10, 10)
    place.subscriber.starting["m"] = starting

    assert place.ask().headers["retry-after-ms"] == str(starting.left_ms)


def test_what_finds_no_worker_is_accepted_and_asks_for_one_once(place: Place) -> None:
    answers = [place.ask()]
    [(model, since_ms)] = place.store.run(fleet.wanted()).items()
    answers += [place.ask() for _ in range(2)]

    assert [answer.status_code for answer in answers] == [200] * 3
    assert place.subscriber.starting["m"] == fleet.starting([]), "and says so at once"
    assert model == "m"
    assert place.store.run(fleet.wanted()) == {"m": since_ms}
    for answer in answers:
        answer.close()


def test_what_finds_a_worker_asks_for_none(place: Place) -> None:
    place.store.run(place.queue.beat("w", [], lease_ms=10_000))

    answer = place.ask()

    assert (answer.status_code, place.store.run(fleet.wanted())) == (200, {})
    answer.close()


def test_the_catalogues_bounds_are_the_queues_own_unless_it_says_otherwise() -> None:
    model = catalog.Model(context_tokens=100)

    assert queue_bounds(model) == Bounds()
    assert len(msgspec.structs.fields(QueueBounds)) == 4


@pytest.mark.parametrize(
    ("stops", "code"),
    [(Stops(paused=True), "model_paused"), (Stops(shed=frozenset({Class.DEFAULT})), "class_shed")],
)
@pytest.mark.parametrize(
    ("path", "status"), [("/v1/chat/completions", 503), ("/v1/responses", 503), ("/v1/messages", 529)]
)
def test_what_an_operator_has_stopped_is_refused_in_each_apis_own_form_and_holds_nothing(
    place: Place, valkey: Any, stops: Stops, code: str, path: str, status: int
) -> None:
    """The hold was open before the queue was asked."""
    place.store.run(place.queue.halt(stops, place.store.run(place.queue.mark())))
    bodies = {
        "/v1/responses": {"model": "m", "input": "x", "stream": True},
        "/v1/messages": {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
    }
    told = place.client.post(path, json=bodies.get(path, CHAT))
    assert (told.status_code, told.headers["x-should-retry"]) == (status, "true")
    assert told.headers["retry-after"] == "10"
    if path == "/v1/messages":
        assert told.json["error"]["type"] == "overloaded_error"
    else:
        assert (told.json["error"]["code"], told.json["error"]["type"]) == (code, "server_error")
    assert valkey.zcard(tag("org:o") + "open") == 0 and place.store.run(place.queue.tick()).waiting == (0, 0, 0, 0)
