"""Streams that are gone on with: by which gateway, by whom, from where, and for how long."""

from __future__ import annotations

import json
import queue
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis
import simple_websocket
from flask import Flask
from flask.testing import FlaskClient
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from core import catalog
from core.accounts.keys import KeyRecord
from core.errors import Unauthenticated
from core.redis import Store, tag
from core.stream.frames import Delta, Frame, encode
from core.stream.log import log_step, publish, save
from core.values import Outcome, Request, Usage
from tasks.queue import Claim, Queue
from web.admission import Admission
from web.app import Gateway, create
from web.render import ByteRenderer
from web.subscriber import Subscriber
from web.transports.sockets import Socket

MODEL = "m"
TOML = '[models.m]\ntokenizer = "bytes"\ncontext_tokens = 4096\nmax_output_tokens = 256\n'
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": True}
ASKED = {"model": MODEL, "input": "hello", "stream": True, "instructions": "a secret"}
STREAM_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
PATIENCE_S = 10.0
NO_HEADERS: Mapping[str, str] = {}


def until(ready: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := ready()):
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.01)
    return found


class Door:
    """A gate that knows two keys of one organisation, each of a project of its own."""

    def authenticate(self, authorization: str, **_: Any) -> KeyRecord:
        key_id = authorization.removeprefix("Bearer ")
        if key_id not in ("mine", "other"):
            raise Unauthenticated
        project_id = "p" if key_id == "mine" else "q"
        return KeyRecord(key_id=key_id, org_id="o", project_id=project_id, secret_hmac=b"")


def gateway(name: str, store: Store, redis_url: str, models: catalog.Catalog) -> Gateway:
    subscriber = Subscriber(store, redis_url, models, name)
    admission = Admission(models, store, subscriber, {MODEL: ByteRenderer()}, salt=b"s")
    return Gateway(catalog=models, store=store, gate=Door(), admission=admission, subscriber=subscriber)  # type: ignore[arg-type]


class Worker:
    """Speaks for a worker: each character is a token."""

    def __init__(self, store: Store) -> None:
        self.store, self.queue = store, Queue(MODEL)
        self.texts: dict[str, str] = {}
        self.deltas: dict[str, list[Delta]] = {}

    def claim(self) -> Claim:
        claims = self.store.run(self.queue.claim("w", 8, lease_ms=10**9, nonce=uuid.uuid4().hex)).claims
        self.store.run(self.queue.deliver("w", claims))
        return claims[0]

    def request(self, claim: Claim) -> Request:
        raw = self.store.run(self.queue.body(claim.id))
        assert raw is not None
        return msgspec.msgpack.decode(raw, type=Request)

    def say(self, claim: Claim, text: str, gateway: str = "g1", kind: str = "text") -> None:
        """One step: into the log, then to its gateway."""
        before = self.texts.get(claim.id, "")
        delta = Delta(claim.id, claim.attempt, len(before), tuple(map(ord, text)), text, len(before), kind)
        self.deltas.setdefault(claim.id, []).append(delta)
        self.texts[claim.id] = before + text
        frame = encode(Frame(worker="w", deltas=(delta,)))
        self.store.run(log_step(MODEL, "w", [frame]))
        self.store.run(publish(MODEL, gateway, frame))

    def finish(self, claim: Claim, outcome: Outcome = Outcome.COMPLETED) -> None:
        text = self.texts.get(claim.id, "")
        nothing = Delta(claim.id, claim.attempt, 0, (), "", 0)
        self.store.run_all(save(MODEL, *self.deltas.get(claim.id, [nothing]), ended=True))
        usage = Usage(input_tokens=3, output_tokens=len(text))
        assert self.store.run(self.queue.finish("w", claim, outcome, usage))


class Row(msgspec.Struct):
    """What is looked at of a request's row."""

    state: str
    gateway: str = ""
    cancelled: str = ""


class Place:
    """Two gateways on one store."""

    def __init__(self, store: Store, redis_url: str, models: catalog.Catalog) -> None:
        self.store, self.worker = store, Worker(store)
        self.gateways = [gateway(f"g{n}", store, redis_url, models) for n in (1, 2)]
        self.apps: list[Flask] = [create(one) for one in self.gateways]
        for one in self.gateways:
            one.subscriber.start()
        for one in self.gateways:
            assert one.subscriber.listening.wait(PATIENCE_S)

    def client(self, number: int) -> FlaskClient:
        return self.apps[number - 1].test_client()

    def ask(self, path: str, body: Any, number: int = 1, headers: Mapping[str, str] = NO_HEADERS) -> Any:
        return self.client(number).post(path, json=body, headers={"Authorization": "Bearer mine", **headers})

    def get(self, path: str, number: int = 2, key: str = "mine", headers: Mapping[str, str] = NO_HEADERS) -> Any:
        return self.client(number).get(path, headers={"Authorization": f"Bearer {key}", **headers})

    def row(self, request_id: str) -> Row:
        return msgspec.msgpack.decode(self.store.client.hget(tag(MODEL) + "rows", request_id), type=Row)

    def costs(self) -> tuple[Any, ...]:
        """What an admission would have changed."""
        client = self.store.client
        holds = sorted(client.scan_iter("f1:{org:o}:*"))
        return client.hlen(tag(MODEL) + "rows"), holds, client.zcard(tag("org:o") + "open")


@pytest.fixture
def place(store: Store, valkey_url: str, tmp_path: Path) -> Iterator[Place]:
    path = tmp_path / "catalog.toml"
    path.write_text(TOML)
    place = Place(store, valkey_url, catalog.load(path))
    yield place
    for one in place.gateways:
        one.subscriber.streams.clear()  # its watch may look once more, and would put them on the next test's queue
        one.subscriber.stop()


class Reader:
    """A client that reads a stream event by event."""

    def __init__(self, answer: Any) -> None:
        assert answer.status_code == 200, answer.get_data()
        self.answer, self.raw = answer, b""
        self._blocks = iter(answer.response)
        self.request_id: str = answer.headers["x-request-id"]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for block in self._blocks:
            self.raw += block
            said = [line for line in block.split(b"\n") if line.startswith(b"data: {")]
            for line in said:
                yield json.loads(line[6:])

    def until(self, number: int) -> list[dict[str, Any]]:
        """All events up to the one with a number."""
        events = []
        for event in self:
            events.append(event)
            if event["sequence_number"] >= number:
                break
        return events

    def ids(self) -> list[str]:
        return [line[4:].decode() for line in self.raw.split(b"\n") if line.startswith(b"id: ")]

    def close(self) -> None:
        self.answer.close()


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event.get("delta", "") for event in events)


def error_of(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.get_json()["error"]["code"]


def resp(request_id: str) -> str:
    return "/v1/responses/resp_" + request_id.replace("-", "")


def test_another_gateway_goes_on_where_the_first_one_died(place: Place) -> None:
    """Nothing twice, nothing missing, and the SDK sees one stream."""
    first = Reader(place.ask("/v1/responses", ASKED))
    claim = place.worker.claim()
    place.worker.say(claim, "Hel")
    had = first.until(106)
    assert text_of(had) == "Hel"

    again = Reader(place.get(f"{resp(claim.id)}?stream=true&starting_after=106"))
    place.worker.say(claim, "lo ", "g2")
    place.worker.say(claim, "✓", "g2")
    place.worker.finish(claim)
    got = list(again)

    assert text_of(got) == "lo ✓" and again.request_id == claim.id
    assert all(event["sequence_number"] > 106 for event in got)
    assert got[-1]["response"]["output"][0]["content"][0]["text"] == "Hello ✓"
    state = ResponseStreamState(text_format=omit, input_tools=omit)
    for event in had + got:
        state.handle_event(STREAM_EVENT.validate_python(event, strict=True))
    assert state._completed_response is not None and state._completed_response.output_text == "Hello ✓"


def test_thoughts_and_calls_go_on_at_another_gateway(place: Place) -> None:
    """In the middle of an argument: no item, id or name comes twice, and the SDK sees one stream."""
    pieces = [("reasoning", "hm"), ("text", "Look."), ("call:0", "f"), ("arguments:0", '{"a"'), ("arguments:0", ":1}")]
    first = Reader(place.ask("/v1/responses", ASKED))
    claim = place.worker.claim()
    for kind, text in pieces[:4]:
        place.worker.say(claim, text, kind=kind)
    had = first.until(103 + 6 * 3 + 12)

    after = had[-1]["sequence_number"]
    again = Reader(place.get(f"{resp(claim.id)}?stream=true&starting_after={after}"))
    for kind, text in (*pieces[4:], ("call:1", "g"), ("text", "Done")):
        place.worker.say(claim, text, "g2", kind)
    place.worker.finish(claim)
    got = list(again)
    whole = list(Reader(place.get(f"{resp(claim.id)}?stream=true", number=1)))

    assert had[-1]["delta"] == '{"a"' and got[0]["delta"] == ":1}"
    state = ResponseStreamState(text_format=omit, input_tools=omit)
    for event in had + got:
        state.handle_event(STREAM_EVENT.validate_python(event, strict=True))
    shown = got[-1]["response"]["output"]
    assert [item["type"] for item in shown] == ["reasoning", "message", "function_call", "function_call", "message"]
    assert shown[2]["arguments"] == '{"a":1}'
    assert place.get(resp(claim.id)).get_json()["output"] == whole[-1]["response"]["output"] == shown
    assert [e for e in got if "delta" not in e] == [
        e for e in whole if e["sequence_number"] > after and "delta" not in e
    ]


def test_the_reader_that_a_stream_was_taken_from_is_told(place: Place) -> None:
    """It goes on at another connection, and its first reader's leaving does not end it."""
    first = Reader(place.ask("/v1/responses", ASKED))
    claim = place.worker.claim()
    place.worker.say(claim, "Hel")
    first.until(106)

    again = Reader(place.get(f"{resp(claim.id)}?stream=true", number=1))
    [last] = list(first)
    first.close()
    place.worker.say(claim, "lo")
    place.worker.finish(claim)

    assert (last["type"], last["sequence_number"]) == ("response.failed", 106)
    assert text_of(list(again)) == "Hello"


def test_an_ended_stream_is_shown_again_and_again(place: Place) -> None:
    Reader(place.ask("/v1/responses", ASKED))
    claim = place.worker.claim()
    place.worker.say(claim, "Hello")
    place.worker.finish(claim)

    whole, tail, nothing = (
        list(Reader(place.get(f"{resp(claim.id)}?stream=true{after}", number=number)))
        for number, after in ((2, ""), (1, "&starting_after=106"), (2, "&starting_after=112"))
    )

    assert [event["type"] for event in whole][:1] == ["response.created"]
    assert text_of(whole) == "Hello"
    assert [event for event in tail if "delta" not in event] == [
        event for event in whole if event["sequence_number"] > 106 and "delta" not in event
    ]
    assert text_of(tail) == "lo" and nothing == []


def test_nobody_else_may_see_it(place: Place) -> None:
    """A key of another project is told what it would be told of an id that never was."""
    with open_stream(place, "/v1/responses", ASKED) as claim:
        never = str(uuid.UUID(int=uuid.UUID(claim.id).int ^ 1))
        answers = [
            place.get(resp(request_id) + query, key=key)
            for request_id, key in ((claim.id, "other"), (never, "mine"))
            for query in ("", "?stream=true", "?stream=true&starting_after=3")
        ]
        chats = [
            place.get("/v1/chat/completions", key=key, headers={"Last-Event-ID": f"{one}:0"})
            for one, key in ((claim.id, "other"), (claim.id, "mine"), (never, "mine"))
        ]

        assert {error_of(answer) for answer in answers + chats} == {(404, "not_found")}
        assert len({json.dumps(answer.get_json()) for answer in answers + chats}) == 1
        assert place.row(claim.id).gateway == "g1", "looking moves no stream"


def test_an_expired_stream_says_so(place: Place, valkey: redis.Redis) -> None:
    old = str(uuid.UUID(int=(int((time.time() - 16 * 60) * 1000) << 80) | (uuid.UUID(int_id()).int & (2**80 - 1))))

    assert error_of(place.get(resp(old))) == (404, "not_found"), "if it is not stored, it is as if it had never been"
    for answer in (
        place.get(resp(old) + "?stream=true"),
        place.ask("/v1/chat/completions", CHAT, headers={"Last-Event-ID": f"{old}:4"}),
    ):
        assert error_of(answer) == (410, "stream_expired")
        assert answer.headers["x-should-retry"] == "false"


def int_id() -> str:
    from web.admission import new_id

    return new_id()


@pytest.mark.parametrize("name", ["resp_x", "resp_", "x", "resp_" + "0" * 31, "resp_" + "G" * 32, "%20", "resp_%00"])
def test_what_is_no_id_is_not_found(place: Place, name: str) -> None:
    assert error_of(place.get(f"/v1/responses/{name}")) == (404, "not_found")
    assert error_of(place.get(f"/v1/responses/{name}?stream=true")) == (404, "not_found")


def test_a_bad_cursor_is_refused_and_costs_nothing(place: Place) -> None:
    with open_stream(place, "/v1/responses", ASKED, "Hello") as claim:
        before = place.costs()
        bad = [
            place.get(f"{resp(claim.id)}?stream={stream}&starting_after={after}")
            for stream, after in (
                ("true", "x"), ("true", "-1"), ("true", ""), ("true", "1e3"), ("true", "109"), ("true", "99999999999"),
                ("false", "x"), ("maybe", "1"),
            )
        ]  # fmt: skip

        assert {error_of(answer) for answer in bad} == {(400, "invalid_value")}
        assert {answer.get_json()["error"]["param"] for answer in bad} == {"starting_after", "stream"}
        assert place.costs() == before
        assert place.row(claim.id).gateway == "g1" and place.row(claim.id).cancelled == ""


@contextmanager
def open_stream(
    place: Place, path: str, body: Any, text: str = "", headers: Mapping[str, str] = NO_HEADERS
) -> Iterator[Claim]:
    """A stream that is open on the first gateway, with some text delivered."""
    reader = Reader(place.ask(path, body, headers=headers))
    claim = place.worker.claim()
    if text:
        place.worker.say(claim, text)
    yield claim
    reader.close()


def test_a_chat_stream_goes_on_after_its_last_event(place: Place) -> None:
    """The client repeats its request with the id of the last event it saw; nothing is admitted a second time."""
    asked = {**CHAT, "stream_options": {"include_usage": True}}
    first = Reader(place.ask("/v1/chat/completions", asked))
    claim = place.worker.claim()
    place.worker.say(claim, "Hel")
    chunks = iter(first)
    next(chunks), next(chunks)
    before = place.costs()
    assert first.ids() == [f"{claim.id}:0", f"{claim.id}:3"]

    again = Reader(place.ask("/v1/chat/completions", asked, 2, headers={"Last-Event-ID": first.ids()[-1]}))
    place.worker.say(claim, "lo", "g2")
    place.worker.finish(claim)
    got = list(again)

    assert [chunk["choices"][0]["delta"] for chunk in got[:-1]] == [{"content": "lo"}, {}]
    assert got[-1]["usage"]["completion_tokens"] == 5
    assert {chunk["id"] for chunk in got} == {"chatcmpl-" + claim.id.replace("-", "")}
    assert again.ids() == [f"{claim.id}:{n}" for n in (5, 6, 7)]
    assert again.raw.endswith(b"data: [DONE]\n\n")
    assert place.costs()[0] == before[0], "no second row"


def test_a_browser_goes_on_with_a_get(place: Place) -> None:
    with open_stream(place, "/v1/chat/completions", CHAT, "Hello") as claim:
        place.worker.finish(claim)
        again = list(Reader(place.get("/v1/chat/completions", headers={"Last-Event-ID": f"{claim.id}:2"})))

    assert again[0]["choices"][0]["delta"] == {"content": "llo"}
    refused = place.get("/v1/chat/completions")
    assert error_of(refused) == (405, "method_not_allowed") and "POST" in refused.headers["allow"]


@pytest.mark.parametrize("cursor", ["x", "", "-1", "9", "1.0"])
def test_a_bad_event_id_is_refused_and_costs_nothing(place: Place, cursor: str) -> None:
    with open_stream(place, "/v1/chat/completions", CHAT, "Hello") as claim:
        before = place.costs()
        answer = place.ask("/v1/chat/completions", CHAT, 2, headers={"Last-Event-ID": f"{claim.id}:{cursor}"})

        assert (*error_of(answer), answer.get_json()["error"]["param"]) == (400, "invalid_value", "Last-Event-ID")
        assert place.costs() == before and place.row(claim.id).gateway == "g1"


def test_a_response_can_be_looked_at_while_it_runs_and_when_it_has_ended(place: Place) -> None:
    reader = Reader(place.ask("/v1/responses", ASKED))
    request_id = reader.request_id
    waits, elsewhere = (place.get(resp(request_id), number=n).get_json() for n in (1, 2))
    claim = place.worker.claim()
    place.worker.say(claim, "Hel")
    runs = place.get(resp(request_id)).get_json()
    place.worker.say(claim, "lo")
    place.worker.finish(claim)
    done = place.get(resp(request_id)).get_json()
    reader.close()

    assert (waits["status"], waits["output"]) == ("queued", [])
    assert elsewhere["status"] == "queued", "wherever its stream is open"
    assert runs["status"] == "in_progress"
    assert Response.model_validate(runs).output_text == "Hel"
    assert (done["status"], Response.model_validate(done).output_text) == ("completed", "Hello")
    assert done["usage"]["output_tokens"] == 5
    assert done["instructions"] is None, "it is a part of the prompt, which is not kept"


def test_what_lost_its_gateway_is_shown_with_what_was_delivered_and_the_error(place: Place) -> None:
    with open_stream(place, "/v1/responses", ASKED, "Hel") as claim:
        place.worker.finish(claim, Outcome.GATEWAY_LOST)
        events = list(Reader(place.get(f"{resp(claim.id)}?stream=true&starting_after=104")))
        shown = place.get(resp(claim.id)).get_json()

    assert [event["type"] for event in events] == ["response.output_text.delta", "response.failed"]
    assert shown == events[-1]["response"]
    assert (shown["status"], shown["error"]["code"]) == ("failed", "server_error")
    assert "gateway" in shown["error"]["message"] and shown["output"][0]["content"][0]["text"] == "Hel"


def test_an_answer_that_was_not_streamed_has_no_stream(place: Place) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(place.ask, "/v1/responses", {**ASKED, "stream": False})
        until(lambda: place.store.client.hlen(tag(MODEL) + "rows"), "it to be queued")
        claim = place.worker.claim()
        place.worker.say(claim, "Hello")
        refused = place.get(f"{resp(claim.id)}?stream=true")
        running = place.get(resp(claim.id)).get_json()
        place.worker.finish(claim)
        answer = asked.result()

    assert (refused.status_code, refused.get_json()["error"]["param"]) == (400, "stream")
    assert running["status"] == "in_progress"
    assert answer.get_json()["output"] == place.get(resp(claim.id)).get_json()["output"]


# Going away


def test_a_client_that_leaves_cancels_at_once(place: Place) -> None:
    with open_stream(place, "/v1/responses", ASKED, "Hel") as claim:
        assert place.row(claim.id).cancelled == ""
    assert place.row(claim.id).cancelled == "cancelled"


def test_a_client_that_leaves_what_it_came_back_to_cancels_too(place: Place) -> None:
    with open_stream(place, "/v1/responses", ASKED, "Hel") as claim:
        again = Reader(place.get(f"{resp(claim.id)}?stream=true&starting_after=105"))
        again.until(106)
        again.close()
        assert place.row(claim.id).cancelled == "cancelled"


def test_a_client_that_leaves_where_it_was_before_ends_nothing(place: Place) -> None:
    """A gateway sees a broken connection before it learns that its client went on elsewhere."""
    with open_stream(place, "/v1/responses", ASKED, "Hel") as claim:
        again = Reader(place.get(f"{resp(claim.id)}?stream=true&starting_after=106"))
    place.worker.say(claim, "lo", "g2")
    place.worker.finish(claim)

    assert text_of(list(again)) == "lo"


def test_a_client_that_said_so_may_leave_and_come_back(place: Place) -> None:
    with open_stream(place, "/v1/responses", ASKED, "Hel", headers={"X-Forebay-Linger": "60"}) as claim:
        assert place.worker.request(claim).linger_ms == 60_000
    assert place.row(claim.id).cancelled == ""

    again = Reader(place.get(f"{resp(claim.id)}?stream=true&starting_after=105", number=1))
    place.worker.say(claim, "lo")
    place.worker.finish(claim)

    assert text_of(list(again)) == "llo"


def test_what_ends_while_its_client_is_away_is_settled_all_the_same(place: Place) -> None:
    with open_stream(place, "/v1/responses", ASKED, "Hel", headers={"X-Forebay-Linger": "60"}) as claim:
        pass
    is_open = tag("org:o") + "open"
    assert place.store.client.zcard(is_open) == 1
    place.worker.finish(claim)

    until(lambda: place.store.client.zcard(is_open) == 0, "the hold to be given back")


def test_a_head_takes_no_stream_from_its_reader(place: Place) -> None:
    """It would have nothing to show it in, and its end would cancel the request."""
    with open_stream(place, "/v1/responses", ASKED, "Hel") as claim:
        looked = place.client(2).head(f"{resp(claim.id)}?stream=true", headers={"Authorization": "Bearer mine"})
        assert (looked.status_code, looked.content_type) == (200, "application/json")
        assert place.row(claim.id).gateway == "g1" and place.row(claim.id).cancelled == ""
    with open_stream(place, "/v1/chat/completions", CHAT, "Hel") as claim:
        headers = {"Authorization": "Bearer mine", "Last-Event-ID": f"{claim.id}:3"}
        assert place.client(2).head("/v1/chat/completions", headers=headers).status_code == 405
        assert place.row(claim.id).gateway == "g1" and place.row(claim.id).cancelled == ""


@pytest.mark.parametrize("seconds", ["x", "-1", "301", "1e9", "nan", ""])
def test_a_bad_linger_is_refused_and_costs_nothing(place: Place, seconds: str) -> None:
    before = place.costs()

    for path, body in (("/v1/responses", ASKED), ("/v1/chat/completions", CHAT)):
        answer = place.ask(path, body, headers={"X-Forebay-Linger": seconds})
        assert (answer.status_code, answer.get_json()["error"]["param"]) == (400, "X-Forebay-Linger")
    assert place.costs() == before


# WebSocket


class Wire:
    """A WebSocket without a network."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.sent: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def receive(self) -> str:
        frame = self.inbox.get()
        if frame is None:
            raise simple_websocket.ConnectionClosed(1000)
        return frame

    def send(self, frame: str) -> None:
        self.sent.put(json.loads(frame))

    def ask(self, **event: Any) -> None:
        self.inbox.put(json.dumps(event))

    def next(self) -> dict[str, Any]:
        return self.sent.get(timeout=PATIENCE_S)

    def until(self, *kinds: str) -> list[dict[str, Any]]:
        events = [self.next()]
        while events[-1]["type"] not in kinds:
            events.append(self.next())
        return events


@contextmanager
def socket_on(place: Place, number: int, key: str = "mine") -> Iterator[Wire]:
    import threading

    wire = Wire()
    caller = Door().authenticate(key)
    socket = Socket(wire, place.gateways[number - 1].admission, caller)
    thread = threading.Thread(target=socket.serve, daemon=True)
    thread.start()
    try:
        yield wire
    finally:
        wire.inbox.put(None)
        thread.join(PATIENCE_S)


def test_a_socket_goes_on_with_a_response_of_another_gateway(place: Place) -> None:
    with open_stream(place, "/v1/responses", ASKED, "Hel") as claim, socket_on(place, 2) as wire:
        response_id = resp(claim.id).rpartition("/")[2]
        wire.ask(type="response.resume", response_id=response_id, starting_after=105, stream_id="a")
        first = wire.next()
        place.worker.say(claim, "lo", "g2")
        place.worker.finish(claim)
        events = [first, *wire.until("response.completed")]

    assert text_of(events) == "llo"
    assert all(event["stream_id"] == "a" and event["sequence_number"] > 105 for event in events)
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Hello"


def test_a_socket_refuses_what_it_cannot_go_on_with_and_stays_open(place: Place) -> None:
    with open_stream(place, "/v1/responses", ASKED, "Hel") as claim, socket_on(place, 2, "other") as wire:
        for response_id in (resp(claim.id).rpartition("/")[2], "resp_" + int_id().replace("-", ""), "nonsense"):
            wire.ask(type="response.resume", response_id=response_id, starting_after=3)
            frame = wire.next()
            assert (frame["type"], frame["status"], frame["error"]["code"]) == ("error", 404, "not_found")
        assert place.row(claim.id).cancelled == ""


# Waiting


def test_the_wait_is_shown_on_every_transport(place: Place) -> None:
    """`queued` with the place; on chat a comment, which no client takes for an event."""
    Reader(place.ask("/v1/responses", ASKED))
    second = Reader(place.ask("/v1/responses", ASKED))
    with socket_on(place, 1) as wire:
        wire.ask(**{**ASKED, "type": "response.create"})
        over_socket = wire.until("response.queued")[-1]
    chat = place.ask("/v1/chat/completions", CHAT)
    role, comment = (next(chat.response) for _ in range(2))

    told = second.until(1)[-1]["queue"]
    assert set(told) == {"place", "estimate_ms", "worker"} and told["place"] == 2
    assert told["worker"]["state"] == "launching", "nobody is there to run it, and somebody was asked for"
    assert over_socket["queue"]["place"] == 3
    assert role.startswith(b"id: ") and comment.startswith(b": queued place=3 "), "the socket's own has left"
    assert comment.endswith(b" worker=launching\n")


def test_an_operator_may_leave_the_ids_out(place: Place) -> None:
    """For clients that take every line of an event for data, such as vLLM's own benchmark."""
    place.gateways[0].chat_ids = False
    chat = place.ask("/v1/chat/completions", CHAT)

    assert next(chat.response).startswith(b"data: {")
    chat.close()


@pytest.mark.parametrize(("how", "said"), [("chunk", b"data: {"), ("off", b"id: ")])
def test_an_operator_chooses_how_chat_streams_wait(place: Place, how: str, said: bytes) -> None:
    place.gateways[0].chat_keepalive = how  # type: ignore[assignment]
    chat = place.ask("/v1/chat/completions", CHAT)
    next(chat.response)
    claim = place.worker.claim()
    place.worker.say(claim, "Hi")

    assert next(chat.response).startswith(said)
    chat.close()
