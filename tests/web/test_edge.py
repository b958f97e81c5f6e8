"""The HTTP edge: errors of every status in JSON, the headers of every answer, early answers, what a key has used."""

from __future__ import annotations

import json
import socket
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gevent.socket
import hypothesis.strategies as st
import pytest
import werkzeug.exceptions as faults
from flask import Flask
from gunicorn.workers.ggevent import GeventWorker
from hypothesis import HealthCheck, example, given, settings

from core import catalog, errors
from core.accounts.keys import KeyRecord
from core.errors import ForebayError, Unauthenticated
from core.limits import headers
from core.limits.counters import Need, reserve
from core.redis import Store
from core.values import Limit, Outcome
from tests.web.test_coming_back import ASKED, CHAT, MODEL, TOML, Place
from web.transports import edge

PLAIN = {**CHAT, "stream": False}
LIMITS = [Limit(scope="key:limited", requests_per_minute=3, concurrent_requests=9)]
NOTHING = Need(input_tokens=0, output_tokens=0, least_output_tokens=0)
POSTS = [
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    "/v1/embeddings", "/v1/responses/input_tokens", "/tokenize", "/detokenize",
    "/v1/tokenize", "/v1/detokenize",
]  # fmt: skip


class Door:
    """Two keys: one of them is limited."""

    def authenticate(self, authorization: str, **_: Any) -> KeyRecord:
        key_id = authorization.removeprefix("Bearer ")
        if key_id not in ("mine", "limited"):
            raise Unauthenticated
        most = (3, 9) if key_id == "limited" else (None, None)
        return KeyRecord(
            key_id=key_id, org_id="o", project_id="p", secret_hmac=b"",
            requests_per_minute=most[0], concurrent_requests=most[1], expires_ms=1_800_000_000_000,
        )  # fmt: skip


@pytest.fixture
def place(store: Store, valkey_url: str, tmp_path: Path) -> Iterator[Place]:
    path = tmp_path / "catalog.toml"
    path.write_text(TOML)
    place = Place(store, valkey_url, catalog.load(path))
    for one in place.gateways:
        one.gate = Door()  # type: ignore[assignment]
        one.keepalive_s = 0.3
    yield place
    for one in place.gateways:
        one.subscriber.streams.clear()
        one.subscriber.stop()


def check_error(answer: Any, status: int, code: str | None = None) -> dict[str, Any]:
    """Four keys, JSON, and the headers that every answer has."""
    assert answer.status_code == status, answer.get_data()
    assert answer.mimetype == "application/json"
    error: dict[str, Any] = answer.get_json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and isinstance(error["message"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    assert code is None or error["code"] == code
    assert uuid.UUID(answer.headers["x-request-id"]).version == 7
    assert int(answer.headers["openai-processing-ms"]) >= 0
    assert answer.headers["x-should-retry"] in ("true", "false")
    return error


# --- errors


def test_what_is_not_there_and_what_it_does_not_answer_to(place: Place) -> None:
    check_error(place.get("/nowhere"), 404, "not_found")
    check_error(place.get("/v1/responses/resp_0/nowhere"), 404, "not_found")
    wrong = place.get("/v1/embeddings")
    check_error(wrong, 405, "method_not_allowed")
    assert "POST" in wrong.headers["Allow"]


def test_a_body_that_is_none(place: Place) -> None:
    post = place.client(1).post
    mine = {"Authorization": "Bearer mine"}

    check_error(post("/v1/chat/completions", headers=mine), 400, "invalid_json")
    check_error(post("/v1/chat/completions", data=b"{", headers=mine), 400, "invalid_json")
    check_error(post("/v1/chat/completions", data=b"[" * 10_000, headers=mine), 400, "invalid_json")
    check_error(post("/v1/chat/completions", data=b"\xff", headers=mine), 400, "invalid_json")
    packed = {**mine, "Content-Encoding": "gzip"}
    check_error(post("/v1/chat/completions", data=b"\x1f\x8b", headers=packed), 415, "unsupported_media_type")
    check_error(post("/v1/chat/completions", data={"file": "x"}, headers=mine, content_type="multipart/form-data"), 415)
    large = post("/v1/chat/completions", data=b" " * (4 * 2**20 + 1), headers=mine)
    check_error(large, 413, "request_too_large")
    assert large.headers["Connection"] == "close"
    short = post("/v1/chat/completions", data=b"{}", headers=mine, environ_overrides={"CONTENT_LENGTH": "10"})
    check_error(short, 400, "bad_framing")


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        (faults.BadRequest("a reason"), 400, "invalid_value"),
        (faults.RequestTimeout(), 408, "request_timeout"),
        (faults.LengthRequired(), 411, "length_required"),
        (faults.RequestURITooLarge(), 414, "uri_too_long"),
        (faults.UnsupportedMediaType(), 415, "unsupported_media_type"),
        (faults.RequestHeaderFieldsTooLarge(), 431, "headers_too_large"),
        (faults.Conflict("at once"), 400, "invalid_value"),
        (faults.InternalServerError(), 500, None),
        (faults.BadGateway(), 500, None),
        (RuntimeError("a secret"), 500, None),
    ],
    ids=lambda one: getattr(one, "name", str(one)),
)
def test_every_fault_has_our_envelope(
    place: Place, monkeypatch: pytest.MonkeyPatch, fault: Exception, status: int, code: str | None
) -> None:
    def broken() -> Any:
        raise fault

    monkeypatch.setitem(place.apps[0].view_functions, "models.models", broken)

    error = check_error(place.get("/v1/models", number=1), status, code)

    assert "secret" not in error["message"]


def test_a_websocket_that_is_none(place: Place) -> None:
    upgrade = {"Upgrade": "websocket", "Connection": "Upgrade", "Sec-WebSocket-Version": "8"}
    refused = place.client(1).get("/v1/responses", headers={"Authorization": "Bearer mine", **upgrade})

    check_error(refused, 426, "upgrade_required")
    assert refused.headers["Sec-WebSocket-Version"] == "13"


def test_anthropics_paths_speak_as_anthropic_does(place: Place) -> None:
    refused = place.ask("/v1/messages", {"model": MODEL})

    body = refused.get_json()
    assert refused.status_code == 400 and body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error" and set(body["error"]) == {"type", "message"}
    assert body["request_id"] == refused.headers["request-id"] == refused.headers["x-request-id"]
    assert place.client(1).post("/v1/messages", json={}).get_json()["error"]["type"] == "authentication_error"


def test_head_and_options_are_answered_without_a_body(place: Place) -> None:
    client, mine = place.client(1), {"Authorization": "Bearer mine"}

    head = client.head("/v1/models", headers=mine)
    assert head.status_code == 200 and head.get_data() == b"" and head.headers["x-request-id"]
    assert client.head("/v1/chat/completions", headers=mine).status_code == 405
    options = client.options("/v1/chat/completions")
    assert options.status_code == 200 and "POST" in options.headers["Allow"]


def test_a_gateway_that_drains_sends_clients_elsewhere(place: Place) -> None:
    place.gateways[0].admission.draining = True

    refused = place.ask("/v1/chat/completions", CHAT)

    check_error(refused, 503, "draining")
    assert (refused.headers["retry-after"], refused.headers["x-should-retry"]) == ("1", "true")
    assert refused.headers["Connection"] == "close"


def test_gunicorns_own_refusals_are_json() -> None:
    """It refuses before Flask sees anything. (Over a real socket: tests/laws/test_proxies.py.)"""
    for error in (errors.BadFraming(), errors.HeadersTooLarge(), errors.AddressTooLong(), ForebayError()):
        head, _, body = edge.answer(error).partition(b"\r\n\r\n")
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
        assert head.startswith(b"HTTP/1.1 %d " % error.status) and b"x-request-id: " in head
        assert f"Content-Length: {len(body)}".encode() in head


def test_each_connection_sends_at_once_and_ends_when_nothing_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the very socket that answers go out by."""
    handled: list[socket.socket] = []
    monkeypatch.setattr(GeventWorker, "handle", lambda self, listener, client, addr: handled.append(client))
    made = edge.worker(3.0)
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()):
        accepted, addr = listener.accept()
        with gevent.socket.socket(fileno=accepted.detach()) as client:
            made.handle(made.__new__(made), listener, client, addr)

            assert handled[0].fileno() == client.fileno()
            assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
            assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 3000


def test_what_the_kernel_does_not_take_at_once_follows() -> None:
    """A client that reads late gets every byte, in order."""
    ours, theirs = gevent.socket.socketpair()
    said = bytes(range(256)) * 40_000
    with ours, theirs:
        writing = gevent.spawn(edge.Client(ours).sendall, said)
        read = bytearray()
        while len(read) < len(said):
            gevent.sleep(0)
            read += theirs.recv(1 << 16)
        writing.get(timeout=5)

    assert bytes(read) == said


# --- headers


def test_a_clients_own_id_is_logged_and_ours_stays_ours(place: Place) -> None:
    from structlog.testing import capture_logs

    with capture_logs() as logged:
        answer = place.get("/v1/models", headers={"X-Client-Request-Id": "theirs", "X-Request-Id": "forged"})

    assert uuid.UUID(answer.headers["x-request-id"])
    [named] = [one for one in logged if one["event"] == "request_named"]
    assert (named["client_request_id"], named["request_id"]) == ("theirs", answer.headers["x-request-id"])


def test_what_a_limit_has_left_is_on_every_generating_answer(place: Place) -> None:
    limited = {"Authorization": "Bearer limited"}
    answers = [place.ask("/v1/responses", ASKED, headers=limited)]
    answers[0].close()
    for _ in range(2):
        place.store.run(reserve("o", str(uuid.uuid4()), "limited", MODEL, LIMITS, NOTHING))
    refused = place.ask("/v1/responses", ASKED, headers=limited)

    assert answers[0].headers["x-ratelimit-limit-requests"] == "3"
    assert answers[0].headers["x-ratelimit-remaining-requests"] == "2"
    assert answers[0].headers["x-ratelimit-reset-requests"] == "1m0.5s"
    check_error(refused, 429, "rate_limit_exceeded")
    assert refused.headers["retry-after"] and refused.headers["retry-after-ms"]
    assert [refused.headers[f"x-ratelimit-{what}-requests"] for what in ("limit", "remaining")] == ["3", "0"]


@pytest.mark.parametrize(
    ("ms", "said"),
    [(0, "0ms"), (76, "76ms"), (1000, "1s"), (1500, "1.5s"), (1001, "1.001s"), (61_000, "1m1s"), (360_000, "6m0s"),
     (3_600_000, "1h0m0s"), (-5, "0ms")],
)  # fmt: skip
def test_durations_are_written_as_go_does(ms: int, said: str) -> None:
    assert headers.duration(ms) == said


# --- early answers


def early(place: Place, path: str, body: Any) -> Iterator[bytes]:
    answer = place.ask(path, body, headers={"X-Forebay-Early": "1"})
    assert (answer.status_code, answer.mimetype) == (200, "application/json")
    assert answer.headers["X-Accel-Buffering"] == "no"
    return iter(answer.response)


def test_an_early_answer_is_white_space_until_the_answer_is_there(place: Place) -> None:
    chunks = early(place, "/v1/chat/completions", PLAIN)
    assert [next(chunks) for _ in range(3)] == [b" "] * 3, "at once, and while it waits"
    work = place.worker.claim()
    place.worker.say(work, "Hello")
    place.worker.finish(work)
    [last] = [chunk for chunk in chunks if chunk.strip()]

    assert json.loads(last)["choices"][0]["message"]["content"] == "Hello"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_an_early_answer_that_fails_says_its_status_in_its_body(place: Place, path: str) -> None:
    chunks = early(place, path, {**PLAIN, "max_tokens": 10})
    next(chunks)
    place.worker.finish(place.worker.claim(), Outcome.FAILED)

    failed = json.loads(b"".join(chunks))
    assert failed["status"] == 500 and failed["error"]["message"]


# --- what a key may do


def test_a_key_sees_what_it_may_do_and_has_used(place: Place) -> None:
    for n in range(2):
        place.store.run(reserve("o", f"r{n}", "limited", MODEL, LIMITS, NOTHING))

    told = place.get("/v1/key", key="limited").get_json()

    assert (told["object"], told["id"], told["kind"]) == ("key", "limited", "live")
    assert (told["project"], told["organization"], told["models"]) == ("p", "o", [MODEL])
    assert told["limits"] == {"requests_per_minute": 3, "concurrent_requests": 9}
    assert told["used"] == {
        "requests_last_minute": 2, "tokens_last_minute": 0, "open_requests": 2, "reset_ms": 60_500,
    }  # fmt: skip
    assert told["expires_at"] == "2027-01-15T08:00:00+00:00"
    assert place.get("/v1/key", key="nobody").status_code == 401


# --- any body


@pytest.fixture
def answering(place: Place) -> Iterator[Flask]:
    """A gateway whose requests all end at once, without an answer."""
    ending = threading.Event()

    def work() -> None:
        while not ending.is_set():
            claims = place.store.run(place.worker.queue.claim("w", 8, lease_ms=10**9, nonce=uuid.uuid4().hex)).claims
            place.store.run(place.worker.queue.deliver("w", claims))
            for claim in claims:
                place.worker.finish(claim)
            ending.wait(0.01)

    worker = threading.Thread(target=work)
    worker.start()
    yield place.apps[0]
    ending.set()
    worker.join()


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON = st.recursive(
    SCALARS | st.sampled_from([MODEL, "user", "text", "auto", "function", "json_schema", "message", "tool"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = [
    "messages", "prompt", "input", "instructions", "max_output_tokens", "max_completion_tokens",
    "temperature", "stop", "stop_sequences", "tools", "tool_choice", "response_format", "text", "n", "logprobs",
    "top_logprobs", "logit_bias", "stream", "stream_options", "seed", "metadata", "reasoning", "thinking", "system",
    "previous_response_id", "encoding_format", "dimensions", "echo", "suffix", "best_of", "user", "service_tier",
    "include", "tokens", "truncation", "store", "background", "conversation", "parallel_tool_calls",
]  # fmt: skip
TURN = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "tool", "system"]) | JSON, "content": JSON})
BODIES = st.fixed_dictionaries(
    {"model": st.just(MODEL) | JSON, "max_tokens": st.just(5) | JSON},
    optional={
        **dict.fromkeys(FIELDS, JSON),
        "messages": st.just(CHAT["messages"]) | st.lists(TURN, max_size=3) | JSON,
        "input": st.just("hello") | st.lists(TURN, max_size=3) | JSON,
        "prompt": st.just("hello") | JSON,
    },
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@example(body={"model": MODEL, "max_tokens": 5, "messages": CHAT["messages"], "input": "hello", "prompt": "hello"})
@given(body=BODIES | JSON)
@pytest.mark.parametrize("path", POSTS)
def test_no_body_is_a_fault_of_ours(answering: Flask, path: str, body: Any) -> None:
    raw = json.dumps(body).encode()
    answer = answering.test_client().post(
        path, data=raw, headers={"Authorization": "Bearer mine", "Content-Type": "application/json"}
    )

    said = answer.get_data()
    assert answer.status_code < 500, said
    if answer.mimetype == "text/event-stream":
        assert b"server_error" not in said
    else:
        assert isinstance(json.loads(said), dict)


def test_the_paths_that_take_any_body_are_all_there_are(place: Place) -> None:
    posts = {str(rule) for rule in place.apps[0].url_map.iter_rules() if "POST" in (rule.methods or ())}
    without_body = {"/v1/responses/<response_id>/cancel", "/v1/client_secrets"}
    assert posts - without_body == set(POSTS)
