"""One connection and what looks after all of them: age, revoked keys, seats; and what may be in a handshake."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import simple_websocket

from core.accounts import keys, sockets
from core.accounts.keys import KeyRecord
from core.accounts.secrets import Grant, give, is_secret, mint, take
from core.errors import BadRequest, ForebayError, LimitReached, NotAllowed, StoreDown, Unauthenticated, Unavailable
from core.limits.scopes import Limit
from core.redis import Store
from tests.conftest import Clock
from web.auth import Gate, check_origin, check_unexposed, secret_of
from web.transports.sockets import AGE_GRACE_S, AGE_S, Socket, Sockets

STORES = ("single", "cluster")


def record(key_id: str = "k1", **fields: Any) -> KeyRecord:
    return KeyRecord(**{"key_id": key_id, "org_id": "o", "project_id": "p", "secret_hmac": b"", **fields})


class Wire:
    """A WebSocket without a network."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self.sent: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.codes: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.tended_s: list[float] = []

    def receive(self) -> str:
        frame = self.inbox.get()
        if frame is None:
            raise simple_websocket.ConnectionClosed(1000)
        return frame

    def send(self, frame: str) -> None:
        self.sent.put(json.loads(frame))

    def close(self, code: int, why: str) -> None:
        self.codes.put(code)

    def tend(self, now_s: float) -> None:
        self.tended_s.append(now_s)


def socket_of(wire: Wire, caller: KeyRecord | None = None, seat: str = "") -> Socket:
    return Socket(
        wire, SimpleNamespace(store=None, subscriber=SimpleNamespace(queues={})), caller or record(), seat=seat
    )  # type: ignore[arg-type]


# Age


def test_an_old_connection_is_told_and_asked_to_connect_again() -> None:
    """OpenAI's own words, which clients look for. The code is one after which they do connect again."""
    wire = Wire()
    socket = socket_of(wire)
    now_s = time.monotonic()

    socket.tend(now_s + AGE_S - 1)
    assert wire.sent.empty() and wire.codes.empty() and wire.tended_s == [now_s + AGE_S - 1]
    socket.tend(now_s + AGE_S + 1)
    socket.tend(now_s + AGE_S + 2)
    assert wire.codes.get(timeout=5) == 1001 and wire.codes.empty()
    assert wire.sent.get(timeout=5) == {
        "type": "error",
        "status": 400,
        "error": {
            "type": "invalid_request_error",
            "code": "websocket_connection_limit_reached",
            "message": "Responses websocket connection limit reached (60 minutes). "
            "Create a new websocket connection to continue.",
            "param": None,
        },
    }


def test_an_old_connection_finishes_its_answer_first_and_takes_no_more() -> None:
    wire = Wire()
    socket = socket_of(wire)
    now_s = time.monotonic()
    socket._lanes.ask("a", None)  # type: ignore[arg-type]

    socket.tend(now_s + AGE_S + 1)
    socket._obey('{"type": "response.create", "model": "m", "input": "x", "stream_id": "b"}')
    refused = wire.sent.get(timeout=5)
    assert (refused["error"]["code"], refused["stream_id"]) == ("websocket_connection_limit_reached", "b")
    assert wire.codes.empty()
    socket.tend(now_s + AGE_S + AGE_GRACE_S + 1)
    assert wire.codes.get(timeout=5) == 1001


def test_a_fault_of_ours_closes_the_connection_and_no_http_answer_is_written_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wire = Wire()
    socket = socket_of(wire)
    monkeypatch.setattr(socket, "_obey", lambda frame: 1 / 0)
    wire.inbox.put("{}")

    socket.serve()
    assert wire.codes.get(timeout=5) == 1011


# Keys


def test_sockets_of_a_key_that_is_not_good_any_more_are_closed(store: Store) -> None:
    here = Sockets(store)
    wires = {name: Wire() for name in ("good", "revoked", "expired", "suspended", "unknown")}
    for name, wire in wires.items():
        here._open.add(socket_of(wire, record(name)))
    store.run_all(
        [
            keys.project(record("good", weight=7.0)),
            keys.project(record("revoked", revoked=True)),
            keys.project(record("expired", expires_ms=1)),
            keys.project(record("suspended", suspended=True)),
        ]
    )
    here.look(time.monotonic())

    codes = {"revoked": "key_revoked", "expired": "invalid_api_key", "suspended": "organisation_suspended"}
    for name, code in codes.items():
        assert wires[name].sent.get(timeout=5)["error"]["code"] == code
        assert wires[name].codes.get(timeout=5) == 1008
    assert all(wire.codes.empty() for wire in wires.values())
    [good] = [socket for socket in here if socket.caller.key_id == "good"]
    assert good.caller.weight == 7.0, "it is what it is now"


def test_seats_are_counted_over_all_gateways_and_given_back(store: Store) -> None:
    one, two = Sockets(store, key_sockets=2), Sockets(store, key_sockets=2)
    seats = [one.sit(record()), two.sit(record())]
    with pytest.raises(LimitReached) as refused:
        one.sit(record())
    assert refused.value.retry_after_ms and refused.value.headers == {"x-limit-scope": "key"}
    assert one.sit(record("another"))

    one.discard(socket_of(Wire(), seat=seats[0]))
    assert two.sit(record())


def test_a_keys_own_bound_goes_before_the_usual_one_and_wider_scopes_bind_too(store: Store) -> None:
    here = Sockets(store, key_sockets=1)
    limits = (Limit(scope="key:k1", connections=2), Limit(scope="project:p", connections=3), Limit(scope="org"))

    def refused(key_id: str) -> tuple[str, str]:
        with pytest.raises(LimitReached) as caught:
            here.sit(record(key_id, limits=limits))
        return caught.value.headers["x-limit-scope"], caught.value.message.partition(" WebSockets")[0]

    for _ in range(2):
        here.sit(record("k1", limits=limits))
    assert refused("k1") == ("key", "This key may have 2")
    here.sit(record("k2", limits=limits))
    assert refused("k2") == ("key", "This key may have 1")
    assert refused("k3") == ("project", "This project may have 3")


def test_a_dead_gateways_seats_are_free_after_their_time_and_a_living_ones_stay(store: Store, clock: Clock) -> None:
    living, dead = Sockets(store, key_sockets=2), Sockets(store, key_sockets=2)
    living._open.add(socket_of(Wire(), seat=living.sit(record())))
    dead.sit(record())
    clock.advance(sockets.SEAT_MS - 1)
    living._stayed_s -= sockets.STAY_S
    living.look(time.monotonic())
    with pytest.raises(LimitReached):
        living.sit(record())

    clock.advance(2)
    assert dead.sit(record())
    with pytest.raises(LimitReached):
        living.sit(record())


def test_a_store_that_has_forgotten_the_seats_is_told_again(store: Store) -> None:
    here = Sockets(store, key_sockets=1)
    here._open.add(socket_of(Wire(), seat=here.sit(record())))
    for name in store.client.scan_iter("*"):
        store.client.delete(name)
    here._stayed_s -= sockets.STAY_S
    here.look(time.monotonic())

    with pytest.raises(LimitReached):
        here.sit(record())


def test_a_process_holds_so_many_sockets_and_says_so_before_the_upgrade(store: Store) -> None:
    here = Sockets(store, most=1)
    here._open.add(socket_of(Wire()))
    with pytest.raises(Unavailable):
        here.sit(record())


def test_without_the_store_nobody_opens_a_socket(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(call: Any) -> None:
        raise OSError("away")

    monkeypatch.setattr(store, "run", away)
    with pytest.raises(StoreDown):
        Sockets(store).sit(record())


# Client secrets


def test_a_secret_is_used_up_by_its_first_use_and_by_time(store: Store) -> None:
    secret, other = mint(), mint()
    assert is_secret(secret) and secret != other and not is_secret("ek_short") and not is_secret(secret + "\n")
    store.run(give(secret, Grant(key_id="k1", model="m"), 60))

    [name] = store.client.scan_iter("*")
    assert 55 <= store.client.ttl(name) <= 60 and secret.encode() not in name + (store.client.get(name) or b"")
    assert store.run(take(other)) is None
    assert store.run(take(secret)) == Grant(key_id="k1", model="m")
    assert store.run(take(secret)) is None


def test_a_secret_is_worth_what_its_key_is_worth(store: Store) -> None:
    gate = Gate(store, None, b"pepper")  # type: ignore[arg-type]
    store.run_all([keys.project(record("good")), keys.project(record("bad", revoked=True))])
    good, bad = mint(), mint()
    store.run_all([give(good, Grant(key_id="good"), 60), give(bad, Grant(key_id="bad"), 60)])

    assert gate.redeem(good)[0].key_id == "good"
    for secret in (good, bad, mint(), "nonsense"):
        with pytest.raises(Unauthenticated):
            gate.redeem(secret)


# Handshakes


def refusal(work: Callable[[], Any]) -> ForebayError:
    with pytest.raises(ForebayError) as caught:
        work()
    return caught.value


def test_the_secret_is_found_among_the_subprotocols() -> None:
    assert secret_of(["realtime", "openai-insecure-api-key.ek_1", "x"]) == "ek_1"
    assert secret_of(["forebay.secret.ek_2", "forebay"]) == "ek_2"
    assert secret_of([]) is secret_of(["realtime"]) is None
    assert isinstance(refusal(lambda: secret_of(["forebay.secret.ek_2", "chat"])), BadRequest)


@pytest.mark.parametrize("shown", ["api_key=fb_live_x", "k=fb%5Flive%5Fx", "openai-insecure-api-key.fb_test_y"])
def test_a_long_lived_key_where_others_see_it_is_refused(shown: str) -> None:
    check_unexposed(["stream=true", "realtime", "openai-insecure-api-key.ek_1"])
    fault = refusal(lambda: check_unexposed(["realtime", shown]))
    assert (fault.status, fault.error_code) == (401, "key_exposed") and "fb_" not in fault.message


@pytest.mark.parametrize(
    ("origin", "allowed", "passes"),
    [
        (None, (), True),
        ("https://api.example", (), True),
        ("https://API.example", (), True),
        ("https://api.example:8443", (), False),
        ("https://app.example", (), False),
        ("https://app.example", ("https://app.example",), True),
        ("http://app.example", ("https://app.example",), False),
        ("https://api.example.evil", (), False),
        ("null", (), False),
        ("", (), False),
        ("null", ("*",), True),
    ],
)
def test_a_page_is_ours_or_named(origin: str | None, allowed: tuple[str, ...], passes: bool) -> None:
    def check() -> None:
        check_origin(origin, "api.example", allowed)

    if passes:
        check()
    else:
        assert isinstance(refusal(check), NotAllowed)
