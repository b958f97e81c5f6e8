"""The server's end of a WebSocket: whole frames whoever reads how slowly, within bounds, and goodbyes that arrive."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gevent
import pytest
from gevent import socket
from hypothesis import given, settings
from hypothesis import strategies as st
from simple_websocket import ConnectionClosed
from wsproto.connection import Connection, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Ping, TextMessage

from web.transports import safe_socket
from web.transports.safe_socket import PING_S, Server, is_key, offered

KEY = base64.b64encode(b"0123456789abcdef").decode()


class Client:
    """The other end, by hand."""

    def __init__(self, sock: Any) -> None:
        self.sock, self.parser = sock, Connection(ConnectionType.CLIENT)
        self.sock.settimeout(10)
        self.head = b""
        self._events: Iterator[Any] = iter(())

    def shake(self) -> None:
        while b"\r\n\r\n" not in self.head:
            self.head += self.sock.recv(1)

    def say(self, *events: Any) -> None:
        self.sock.sendall(b"".join(self.parser.send(event) for event in events))

    def next(self) -> Any:
        while True:
            for event in self._events:
                return event
            data = self.sock.recv(65_536)
            if not data:
                return None
            self.parser.receive_data(data)
            self._events = self.parser.events()

    def message(self) -> str:
        parts = [self.next()]
        while not parts[-1].message_finished:
            parts.append(self.next())
        return "".join(part.data for part in parts)


Ends = tuple[Server, Client]


@contextmanager
def open_pair(protocols: str = "", **options: Any) -> Iterator[Ends]:
    ours, theirs = socket.socketpair()
    environ = {"gunicorn.socket": ours, "HTTP_SEC_WEBSOCKET_KEY": KEY, "HTTP_SEC_WEBSOCKET_PROTOCOL": protocols}
    environ["HTTP_SEC_WEBSOCKET_EXTENSIONS"] = "permessage-deflate; client_max_window_bits"
    server, client = Server(environ, **options), Client(theirs)
    client.shake()
    try:
        yield server, client
    finally:
        server.drop()
        ours.close()
        theirs.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    with open_pair() as pair:
        yield pair


def closed(work: Callable[[], Any]) -> ConnectionClosed:
    with gevent.Timeout(10), pytest.raises(ConnectionClosed) as caught:
        work()
    return caught.value


# The handshake


def test_the_answer_refuses_compression_and_never_says_a_secret() -> None:
    secret = "openai-insecure-api-key.ek_secret"
    with open_pair(f"{secret}, realtime", subprotocols=("responses", "realtime")) as (_, client):
        head = client.head.decode().lower()
    assert head.startswith("http/1.1 101 ") and "sec-websocket-accept: " in head
    assert "sec-websocket-protocol: realtime\r\n" in head
    assert "extensions" not in head and "secret" not in head


def test_a_key_is_16_bytes_in_base64() -> None:
    assert is_key(KEY)
    assert not any(is_key(key) for key in ("", "x", KEY[:-4], KEY + "AAAA", "ä" * 24, KEY[:-1] + "!"))
    assert offered({"HTTP_SEC_WEBSOCKET_PROTOCOL": " a,b ,, c"}) == ["a", "b", "c"]


# Reading


@settings(max_examples=50)
@given(st.lists(st.text(), min_size=1, max_size=5), st.lists(st.integers(1, 40), max_size=40))
def test_a_message_in_any_pieces_is_the_message(parts: list[str], cuts: list[int]) -> None:
    """In any fragments, which come in any packets, with pings between them."""
    with open_pair() as (server, client), gevent.Timeout(10):
        frames = b"".join(
            client.parser.send(TextMessage(data=part, message_finished=last)) + client.parser.send(Ping(payload=b"p"))
            for part, last in zip(parts, [False] * (len(parts) - 1) + [True], strict=True)
        )
        sender = gevent.spawn(_dribble, client, frames, cuts)
        assert server.receive() == "".join(parts)
        sender.get()
        client.sock.close()
        closed(server.receive)


def _dribble(client: Client, data: bytes, cuts: list[int]) -> None:
    for cut in cuts:
        client.sock.sendall(data[:cut])
        data = data[cut:]
        gevent.sleep(0)
    client.sock.sendall(data)


@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize("letter", ["x", "ž"])
def test_a_message_that_is_too_large_closes_with_1009_whatever_follows(pieces: int, letter: str) -> None:
    """Its bytes count, not its characters. The close frame arrives although the client is sending all the while."""
    fits = 1000 // len(letter.encode())
    text = letter * (fits // pieces + 1)
    with open_pair(message_bytes_max=1000) as (server, client):
        client.say(TextMessage(data=letter * fits))
        assert server.receive()
        reader = gevent.spawn(closed, server.receive)
        client.say(*[TextMessage(data=text, message_finished=piece == pieces - 1) for piece in range(pieces)])
        client.say(*[TextMessage(data="more") for _ in range(10_000)])
        goodbye = client.next()
        assert isinstance(goodbye, CloseConnection) and goodbye.code == 1009
        client.say(goodbye.response())
        assert reader.get(timeout=1).reason == 1009


def test_what_came_before_a_fault_is_handled_first(ends: Ends) -> None:
    server, client = ends
    client.say(TextMessage(data="first"))
    client.sock.sendall(b"\xff\xff\xff\xff\xff\xff")  # no frame at all

    assert server.receive() == "first"
    server.send("answer")
    assert client.message() == "answer"
    gevent.spawn(closed, server.receive)
    assert client.next().code == 1002


def test_nothing_is_read_ahead_of_what_is_handled(ends: Ends) -> None:
    """A client that floods fills its own buffers, not ours."""
    server, client = ends
    frame = client.parser.send(TextMessage(data="x" * 1000))
    client.sock.settimeout(0.2)
    sent = 0
    with pytest.raises(OSError):
        while True:
            sent += client.sock.send(frame * 100)
            gevent.sleep(0)
            if sent % 7 == 0:
                server.receive()
    assert sent < 10 * 2**20


# Writing


def test_frames_are_whole_for_a_client_that_reads_late(ends: Ends) -> None:
    """simple-websocket tears them (miguelgrinberg/simple-websocket#45), also where pings come between."""
    server, client = ends
    texts = [f"{number:06d}" + "x" * size for number, size in enumerate([1_000_000, 5, 3000, 70_000, 126, 125, 0] * 4)]
    writers = [gevent.spawn(server.send, text) for text in texts]
    gevent.sleep(0.05)
    server.tend(time.monotonic() + PING_S)

    with gevent.Timeout(10):
        assert sorted(client.message() for _ in texts) == texts
        gevent.joinall(writers, raise_error=True)


def test_a_client_that_reads_nothing_is_dropped_in_time() -> None:
    """Its senders and its reader all learn of it."""
    with open_pair(send_s=0.3) as (server, _), gevent.Timeout(5):
        began_s = time.monotonic()
        reader = gevent.spawn(closed, server.receive)
        writers = [gevent.spawn(closed, lambda: server.send("x" * 5_000_000)) for _ in range(3)]
        reasons = {one.get().reason for one in [reader, *writers]}
    assert reasons == {1013} and 0.3 <= time.monotonic() - began_s < 1.5


def test_a_client_that_reads_slowly_is_not_dropped() -> None:
    """The limit is on taking nothing, not on a frame."""
    with open_pair(send_s=0.6) as (server, client), gevent.Timeout(20):
        began_s, taken = time.monotonic(), 0
        writer = gevent.spawn(server.send, "x" * 3_000_000)
        while taken < 3_000_000:
            gevent.sleep(0.02)
            taken += len(client.sock.recv(50_000))
        writer.get()
        assert not server.closing and time.monotonic() - began_s > 0.6


# Goodbyes


def test_a_goodbye_comes_after_the_frame_that_is_under_way(ends: Ends) -> None:
    server, client = ends
    writer = gevent.spawn(server.send, "x" * 5_000_000)
    gevent.sleep(0.05)
    late = gevent.spawn(closed, lambda: server.send("never"))
    server.close(1001, "this gateway is shutting down")

    assert client.message() == "x" * 5_000_000
    goodbye = client.next()
    assert (goodbye.code, goodbye.reason) == (1001, "this gateway is shutting down")
    writer.get(timeout=1)
    assert late.get(timeout=1).reason == 1001


def test_after_a_goodbye_what_still_comes_is_thrown_away_until_the_clients_own(ends: Ends) -> None:
    server, client = ends
    reader = gevent.spawn(closed, server.receive)
    server.close(1008, "no more")
    client.say(TextMessage(data="x" * 100_000), Ping())
    goodbye = client.next()
    assert goodbye.code == 1008 and not reader.ready()
    client.say(goodbye.response())

    assert reader.get(timeout=1).reason == 1008


def test_a_client_that_says_no_goodbye_is_dropped(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_socket, "CLOSE_S", 0.2)
    server, _ = ends
    reader = gevent.spawn(closed, server.receive)
    server.close(1001)
    server.close(1008)  # the first counts

    assert reader.get(timeout=1).reason == 1001


def test_a_clients_goodbye_is_answered(ends: Ends) -> None:
    server, client = ends
    client.say(CloseConnection(code=1000, reason="bye"))

    assert closed(server.receive).reason == 1000
    assert client.next().code == 1000
    assert closed(lambda: server.send("too late")).reason == 1000


def test_two_pings_without_an_answer_end_a_connection_and_anything_heard_counts(ends: Ends) -> None:
    server, client = ends
    now_s = time.monotonic()
    for _ in range(2):  # answered, by something else than a pong
        now_s += PING_S
        server.tend(now_s)
        assert isinstance(client.next(), Ping)
        server._heard_s = now_s
    for ping in range(2):
        now_s += PING_S
        server.tend(now_s)
        assert isinstance(client.next(), Ping), ping
        server.tend(now_s + PING_S / 2)
    server.tend(now_s + PING_S)

    goodbye = client.next()
    assert isinstance(goodbye, CloseConnection) and goodbye.code == 1013


def test_binary_messages_are_binary(ends: Ends) -> None:
    server, client = ends
    client.say(BytesMessage(data=b"\x00\x01"))
    received = server.receive()
    server.send(received)

    assert received == b"\x00\x01" and client.next().data == b"\x00\x01"
