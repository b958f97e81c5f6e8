"""Responses mode over WebSocket: lanes, bounds, who may open a socket, and how each ends."""

from __future__ import annotations

import json
import signal
import socket as sockets
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from core import postgres
from core.accounts import keys
from tests.laws.test_keys import new_key
from tests.platform import MODEL, Platform, Row, handshake, kill, soon, until

Event = dict[str, Any]
TERMINAL = ("response.completed", "response.incomplete", "response.failed", "error")
#: More than any test waits for.
LONG = 4000


class Wire:
    """One socket, and what came over it."""

    def __init__(self, ws: ClientConnection) -> None:
        self.ws, self.got = ws, list[Event]()

    def send(self, kind: str, **fields: Any) -> None:
        self.ws.send(json.dumps({"type": f"response.{kind}", **fields}))

    def create(self, lane: str | None = None, tokens: int = 3, **fields: Any) -> None:
        named = {} if lane is None else {"stream_id": lane}
        body = {"model": MODEL, "input": "hello", "max_output_tokens": tokens, "store": False}
        self.send("create", **named, **(body | fields))

    def next(self, timeout_s: float = 15) -> Event:
        event: Event = json.loads(self.ws.recv(timeout=timeout_s))
        self.got.append(event)
        return event

    def until(self, *kinds: str, lane: str | None = None) -> Event:
        while (event := self.next())["type"] not in kinds or (lane and event.get("stream_id") != lane):
            pass
        return event

    def ended(self, count: int) -> list[Event]:
        """Read until so many responses have ended, and return their last events."""
        last: list[Event] = []
        while len(last) < count:
            last.append(self.until(*TERMINAL))
        return last

    def closed(self) -> tuple[int, list[Event]]:
        """The code of the close, and the frames before it."""
        with pytest.raises(ConnectionClosed) as caught:
            while True:
                self.next()
        assert caught.value.rcvd is not None
        return caught.value.rcvd.code, self.got


@contextmanager
def wire(platform: Platform, gateway: int = 0, *, key: str = "", **options: Any) -> Iterator[Wire]:
    url = f"ws://127.0.0.1:{platform.ports[gateway]}/v1/responses"
    options.setdefault("additional_headers", {"Authorization": f"Bearer {key or platform.key}"})
    with connect(url, max_size=None, close_timeout=2, compression=None, **options) as ws:
        yield Wire(ws)


def in_state(platform: Platform, *states: str) -> dict[str, Row]:
    return {name: row for name, row in platform.rows().items() if row.state in states}


# Lanes


def test_lanes_are_answered_side_by_side_and_each_in_its_order(platform: Platform) -> None:
    """Events of a named lane say its name, those of the default lane say none."""
    lanes = ["a", "b.c-d_1", None]
    with wire(platform) as one:
        for turn in range(3):
            for lane in lanes:
                one.create(lane, tokens=20, metadata={"turn": str(turn)})
        one.ended(9)

    for lane in lanes:
        mine = [event for event in one.got if event.get("stream_id") == lane]
        assert all(("stream_id" in event) == (lane is not None) for event in mine)
        told = [event["response"] for event in mine if "response" in event]
        order = list(dict.fromkeys(response["id"] for response in told))
        turns = [next(r["metadata"]["turn"] for r in told if r["id"] == one_id) for one_id in order]
        assert turns == ["0", "1", "2"]
        begun = [event["response"]["id"] for event in mine if event["type"] in ("response.created", *TERMINAL)]
        assert begun == [one_id for one_id in order for _ in range(2)], "one begins when the one before has ended"
    first_ends = next(n for n, event in enumerate(one.got) if event["type"] in TERMINAL)
    assert {event.get("stream_id") for event in one.got[:first_ends]} == set(lanes)


def test_sixteen_responses_run_and_further_ones_wait(platform: Platform) -> None:
    with wire(platform) as one:
        for lane in range(18):
            one.create(f"lane{lane}", tokens=LONG)
        made = [one.until("response.created") for _ in range(16)]
        assert len(in_state(platform, "running", "waiting")) == 16
        assert {event["stream_id"] for event in made} == {f"lane{lane}" for lane in range(16)}
        one.send("cancel", response_id=made[3]["response"]["id"])
        assert one.until("response.created")["stream_id"] == "lane16"
        one.until("response.output_text.delta", lane="lane16")
        one.ws.close()
    until(lambda: not in_state(platform, "running", "waiting"), "the rest to be cancelled", 3)


def test_a_thirty_third_lane_is_refused_and_known_ones_go_on(platform: Platform) -> None:
    with wire(platform) as one:
        for lane in range(32):
            one.create(f"lane{lane}", tokens=1)
        one.ended(32)
        one.create("lane32")
        refused = one.next()
        one.create("lane31", tokens=1)
        one.create(tokens=1)
        assert [last["type"] for last in one.ended(2)] == ["response.incomplete"] * 2

    assert (refused["type"], refused["status"], refused["stream_id"]) == ("error", 400, "lane32")
    assert refused["error"]["type"] == "invalid_request_error"
    assert (refused["error"]["code"], refused["error"]["param"]) == ("websocket_stream_limit_reached", "stream_id")


def test_a_client_that_floods_is_told_and_sent_away_with_1008(platform: Platform) -> None:
    with wire(platform) as one:
        for _ in range(80):
            one.create(tokens=LONG)
        code, frames = one.closed()

    assert code == 1008 and [f["error"]["code"] for f in frames if f["type"] == "error"] == [
        "too_many_pending_responses"
    ]
    until(lambda: not in_state(platform, "running", "waiting"), "its responses to be cancelled", 3)


def test_request_errors_name_their_lane_and_leave_the_others_alone(platform: Platform) -> None:
    with wire(platform) as one:
        one.create("good", tokens=30)
        one.create("bad", model="nothing")
        one.send("create", stream_id="bad", model=MODEL)
        one.send("create", stream_id="not a lane!", model=MODEL, input="x")
        one.send("create", stream_id="", model=MODEL, input="x")
        one.send("steer", previous_response_id="resp_1", input="left")
        last = one.until("response.incomplete")

    errors = [(e.get("stream_id"), e["error"]["code"]) for e in one.got if e["type"] == "error"]
    known = [("bad", "missing_required_parameter"), ("bad", "model_not_found"), (None, "invalid_stream_id")]
    assert sorted(errors, key=str) == sorted([*known, known[-1]], key=str)
    [steered] = [e for e in one.got if e["type"] == "response.steer.failed"]
    assert steered["error"]["code"] == "steering_not_supported"
    assert last["stream_id"] == "good" and last["response"]["usage"]["output_tokens"] == 30


# Ends


@pytest.mark.parametrize("how", [sockets.SHUT_WR, sockets.SHUT_RDWR])
def test_closing_a_socket_cancels_everything_on_it_within_a_second(platform: Platform, how: int) -> None:
    """Running, waiting in the queue, and waiting on the connection."""
    with ExitStack() as stack:
        one = stack.enter_context(wire(platform))
        for lane in range(20):
            one.create(f"lane{lane}", tokens=LONG)
            one.create(f"lane{lane}", tokens=LONG)
        begun: set[str] = set()
        while len(begun) < 16:
            begun.add(one.until("response.output_text.delta")["stream_id"])
        one.ws.socket.shutdown(how)
        start_s = time.monotonic()
        soon(lambda: not in_state(platform, "running", "waiting"), "everything to be cancelled")
        time.sleep(max(0.0, 1.5 - (time.monotonic() - start_s)))
        assert not in_state(platform, "running", "waiting"), "nothing that waited on the connection begins"


@pytest.mark.parametrize("turn", range(4))
def test_closing_a_socket_cancels_what_is_just_beginning(platform: Platform, turn: int) -> None:
    """While workers claim it and fetch its bodies."""
    with wire(platform) as one:
        for lane in range(16):
            one.create(f"lane{lane}", tokens=LONG)
        begun: set[str] = set()
        while len(begun) < 16:
            begun.add(one.until("response.created")["stream_id"])
        time.sleep(0.004 * turn)
    soon(lambda: not in_state(platform, "running", "waiting"), "everything to be cancelled")


def test_a_cancelled_response_says_what_it_used_and_others_go_on(platform: Platform) -> None:
    with wire(platform) as one:
        one.create("a", tokens=LONG)
        one.create("b", tokens=200)
        made = one.until("response.created", lane="a")
        one.until("response.output_text.delta", lane="a")
        one.send("cancel", response_id=made["response"]["id"], stream_id="b")
        last = one.until(*TERMINAL, lane="a")
        one.send("cancel", response_id=made["response"]["id"], stream_id="a")
        unknown = one.until("error")
        other = one.until(*TERMINAL, lane="b")

    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "cancelled")
    assert 0 < last["response"]["usage"]["output_tokens"] < LONG
    assert (unknown["error"]["code"], unknown["stream_id"]) == ("response_not_found", "a")
    assert other["response"]["usage"]["output_tokens"] == 200


def test_a_revoked_keys_sockets_are_closed_with_1008_within_seconds(platform: Platform) -> None:
    key, key_id = new_key(platform)
    with wire(platform, 0, key=key) as one, wire(platform, 1, key=key) as other, wire(platform) as stranger:
        one.create(tokens=LONG)
        one.until("response.output_text.delta")
        start_s = time.monotonic()
        engine = postgres.connect(platform.database_url)
        with postgres.transaction(engine) as connection:
            record = keys.revoke(connection, key_id, now=datetime.now(UTC))
        engine.dispose()
        platform.store.run(keys.project(record))
        assert one.closed()[0] == other.closed()[0] == 1008
        assert time.monotonic() - start_s < 3
        until(lambda: not in_state(platform, "running", "waiting"), "what it asked for to be cancelled", 1.5)
        stranger.create()
        assert stranger.until(*TERMINAL)["type"] == "response.incomplete"


def test_a_client_that_stops_reading_is_let_go_of_and_slows_nobody_else(slow: Platform) -> None:
    with wire(slow) as good, stalled(slow) as request_id:
        good.create(tokens=100)
        times: list[float] = []
        while good.next()["type"] not in TERMINAL:
            times.append(time.monotonic())
        gaps = sorted(later - sooner for sooner, later in pairwise(times))
        until(lambda: slow.rows()[request_id].state == "ended", "the stalled one's end", 20)
        ending = slow.rows()[request_id].ending

    assert ending is not None and ending.outcome == "cancelled" and ending.usage.output_tokens < 700
    assert gaps[-2] < 0.5, "it is told 25 tokens a second"
    print(f"longest gap {gaps[-1] * 1000:.0f} ms; the stalled one had {ending.usage.output_tokens} tokens")


@contextmanager
def stalled(platform: Platform) -> Iterator[str]:
    """A client that asks for a long answer and never reads it."""
    raw = sockets.socket()
    raw.setsockopt(sockets.SOL_SOCKET, sockets.SO_RCVBUF, 1024)
    raw.connect(("127.0.0.1", platform.ports[0]))
    before = set(platform.rows())
    with connect(
        f"ws://127.0.0.1:{platform.ports[0]}/v1/responses",
        sock=raw, additional_headers={"Authorization": f"Bearer {platform.key}"},
        max_queue=1, ping_interval=None, close_timeout=0.1,
    ) as ws:  # fmt: skip
        ws.send(json.dumps({"type": "response.create", "model": MODEL, "input": "hello", "max_output_tokens": 1000}))
        yield until(lambda: sorted(set(platform.rows()) - before), "its row")[0]


# Who may open one


def secret(platform: Platform, **asked: Any) -> dict[str, Any]:
    answer = platform.post("/v1/client_secrets", asked)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_a_handshake_with_a_fault_is_told_in_json(platform: Platform) -> None:
    status, said = handshake(platform, Sec_WebSocket_Version="8")
    assert status == 426 and "sec-websocket-version: 13" in said.lower() and '"upgrade_required"' in said
    for key in (None, "short", "!" * 24):
        status, said = handshake(platform, Sec_WebSocket_Key=key)
        assert status == 400 and '"error":' in said and "x-request-id" in said.lower()
    status, said = handshake(platform, Sec_WebSocket_Extensions="permessage-deflate; client_max_window_bits")
    assert status == 101 and "extensions" not in said.lower() and "x-request-id" in said.lower()


def test_a_client_secret_opens_one_socket_and_is_never_said(platform: Platform) -> None:
    for before, with_ in (("openai-insecure-api-key.", "realtime"), ("forebay.secret.", "responses")):
        made = secret(platform)
        assert made["value"].startswith("ek_") and 55 <= made["expires_at"] - time.time() <= 61
        offer = f"{with_}, {before}{made['value']}"
        status, said = handshake(platform, Authorization=None, Sec_WebSocket_Protocol=offer)
        assert status == 101 and f"sec-websocket-protocol: {with_}\r\n" in said.lower() and made["value"] not in said
        status, said = handshake(platform, Authorization=None, Sec_WebSocket_Protocol=offer)
        assert status == 401 and made["value"] not in said
    made = secret(platform)
    with wire(
        platform, 1, additional_headers={}, subprotocols=["realtime", f"openai-insecure-api-key.{made['value']}"]
    ) as one:
        one.create()
        assert one.until(*TERMINAL)["type"] == "response.incomplete"
    assert not any(made["value"].encode() in value for value in dump(platform)), "only its hash is stored"


def dump(platform: Platform) -> list[bytes]:
    """Everything in the store, as far as it is told in bytes."""
    return [name + (platform.store.client.dump(name) or b"") for name in platform.store.client.scan_iter("*")]


def test_a_client_secret_may_be_for_one_model_and_for_less_time(platform: Platform) -> None:
    made = secret(platform, expires_after={"anchor": "created_at", "seconds": 10}, session={"model": MODEL})
    assert made["session"]["model"] == MODEL and made["expires_at"] - time.time() <= 11
    protocols = ["forebay", f"forebay.secret.{made['value']}"]
    with wire(platform, additional_headers={}, subprotocols=protocols) as one:
        one.create(model="another")
        assert one.next()["error"]["code"] == "not_allowed"
        one.create()
        assert one.until(*TERMINAL)["type"] == "response.incomplete"

    for bad in ({"expires_after": {"seconds": 5}}, {"expires_after": {"seconds": 601}}, {"session": {"model": 3}}, []):
        assert platform.post("/v1/client_secrets", bad).status_code == 400
    assert platform.post("/v1/client_secrets", {"session": {"model": "nothing"}}).status_code == 404
    assert platform.post("/v1/client_secrets", {}, key="ek_nothing").status_code == 401


def test_a_secret_alone_and_a_wrong_one_are_refused(platform: Platform) -> None:
    made = secret(platform)["value"]
    assert handshake(platform, Authorization=None, Sec_WebSocket_Protocol=f"forebay.secret.{made}")[0] == 400
    assert handshake(platform, Authorization=None, Sec_WebSocket_Protocol="realtime, forebay.secret.ek_x")[0] == 401
    assert handshake(platform, Authorization=None, Cookie=f"session={made}; api_key={platform.key}")[0] == 401


def test_a_revoked_keys_secrets_open_nothing(platform: Platform) -> None:
    key, key_id = new_key(platform)
    made = platform.post("/v1/client_secrets", {}, key=key).json()["value"]
    engine = postgres.connect(platform.database_url)
    with postgres.transaction(engine) as connection:
        record = keys.revoke(connection, key_id, now=datetime.now(UTC))
    engine.dispose()
    platform.store.run(keys.project(record))

    assert handshake(platform, Authorization=None, Sec_WebSocket_Protocol=f"realtime, forebay.secret.{made}")[0] == 401


def test_a_long_lived_key_in_an_address_or_a_subprotocol_is_refused_and_not_logged(platform: Platform) -> None:
    key = platform.key
    faults = [
        handshake(platform, f"/v1/responses?api_key={key}", Authorization=None),
        handshake(platform, f"/v1/responses?api_key={key}"),
        handshake(platform, f"/v1/responses?x={key.replace('_', '%5f')}"),
        handshake(platform, Authorization=None, Sec_WebSocket_Protocol=f"realtime, openai-insecure-api-key.{key}"),
    ]
    for status, said in faults:
        assert status == 401 and '"key_exposed"' in said and key not in said
    assert not any(key in log.read_text() for log in (platform.data / "logs").iterdir())


def test_a_page_must_be_ours_or_named(platform: Platform) -> None:
    port = platform.ports[0]
    for origin in ("https://evil.example", "null", f"http://127.0.0.1:{port}.evil.example", "http://127.0.0.1:1"):
        status, said = handshake(platform, Origin=origin)
        assert status == 403 and '"origin_not_allowed"' in said
    for origin in (None, f"http://127.0.0.1:{port}", f"https://127.0.0.1:{port}"):
        assert handshake(platform, Origin=origin)[0] == 101


def test_a_key_has_its_number_of_sockets_over_all_gateways(platform: Platform) -> None:
    key, _ = new_key(platform)
    with ExitStack() as stack, ThreadPoolExecutor(20) as pool:
        opened = list(pool.map(lambda n: stack.enter_context(wire(platform, n % 2, key=key)), range(100)))
        for gateway in range(2):
            with pytest.raises(InvalidStatus) as caught, wire(platform, gateway, key=key):
                pass
            response = caught.value.response
            assert response.status_code == 429 and response.headers["retry-after"]
            assert json.loads(response.body)["error"]["code"] == "rate_limit_exceeded"
        with wire(platform):
            opened[0].ws.close()
        until(lambda: _opens(platform, key), "its seat to be free", 3)


def _opens(platform: Platform, key: str) -> bool:
    try:
        with wire(platform, key=key):
            return True
    except InvalidStatus:
        return False


# Drain


def test_a_drain_that_takes_too_long_closes_with_1012_and_the_answer_goes_on_elsewhere(slow: Platform) -> None:
    """An idle socket is told at once, with 1001; one in the middle of its answer when time is up."""
    with wire(slow) as busy, wire(slow) as idle:
        busy.create(tokens=250)
        made = busy.until("response.created")["response"]["id"]
        busy.until("response.output_text.delta")
        kill(slow.pid("web0"), signal.SIGTERM)
        assert idle.closed()[0] == 1001
        time.sleep(1.2)  # it listens until it has ended
        with pytest.raises(InvalidStatus) as refused, wire(slow):
            pass
        assert refused.value.response.status_code == 503
        code, frames = busy.closed()
        assert code == 1012
    with wire(slow, 1) as again:
        again.send("resume", response_id=made, starting_after=frames[-1]["sequence_number"])
        last = again.until(*TERMINAL)

    assert last["type"] == "response.incomplete" and last["response"]["usage"]["output_tokens"] == 250
    deltas = [event["delta"] for event in [*frames, *again.got] if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) == last["response"]["output"][0]["content"][0]["text"]
    until(lambda: shakes(slow), "the gateway to be started again", 30)


def shakes(platform: Platform) -> bool:
    try:
        return handshake(platform)[0] == 101
    except OSError:
        return False
