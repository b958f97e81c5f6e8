"""A client that goes away costs nothing from then on, wherever its request is. Raw sockets on real gateways."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

from tests.platform import MODEL, Platform, until

#: How soon what nobody waits for is ended, seconds.
SOON_S = 1.0
HELLO = [{"role": "user", "content": "hello"}]
LONG_PROMPT = [{"role": "user", "content": "x" * 3000}]  # three seconds until its first token


class Client:
    """One connection, by hand."""

    def __init__(self, platform: Platform, gateway: int = 0, *, buffer: int = 0) -> None:
        self.platform = platform
        self.sock = socket.socket()
        if buffer:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self.sock.settimeout(20)
        self.sock.connect(("127.0.0.1", platform.ports[gateway]))
        self.got = b""

    def send(self, body: Any, path: str = "/v1/chat/completions", *, part: float = 1.0, **headers: str) -> None:
        raw = json.dumps(body).encode()
        head = {
            "Host": "localhost", "Authorization": f"Bearer {self.platform.key}", "Content-Type": "application/json",
            "Content-Length": str(len(raw)), **{name.replace("_", "-"): value for name, value in headers.items()},
        }  # fmt: skip
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items()), "", ""]
        self.sock.sendall("\r\n".join(lines).encode() + raw[: int(len(raw) * part)])

    def read(self, until: bytes) -> bytes:
        """Everything up to the first place where this is said."""
        while until not in self.got:
            more = self.sock.recv(65536)
            assert more, self.got
            self.got += more
        return self.got

    def request_id(self) -> str:
        found = re.search(rb"x-request-id: (\S+)", self.read(b"\r\n\r\n"))
        assert found is not None
        return found[1].decode()

    def close(self, *, reset: bool = False) -> None:
        if reset:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.sock.close()


def asking(messages: Any = HELLO, *, tokens: int = 500, stream: bool = True) -> dict[str, Any]:
    return {"model": MODEL, "messages": messages, "max_tokens": tokens, "stream": stream}


@contextmanager
def new_row(platform: Platform) -> Iterator[list[str]]:
    """The id of the request that is made inside, for clients that are told it too late."""
    before, found = set(platform.rows()), [""]
    yield found
    [found[0]] = until(lambda: set(platform.rows()) - before, "the request")


def ended_in(platform: Platform, request_id: str, start_s: float, within_s: float = SOON_S) -> float:
    until(lambda: platform.rows()[request_id].state == "ended", "the end", 10)
    took_s = time.monotonic() - start_s
    ending = platform.rows()[request_id].ending
    assert ending is not None and ending.outcome == "cancelled"
    assert request_id not in {claimed for _, claimed in platform.claims()}
    assert took_s < within_s
    return took_s


@contextmanager
def crowd(platform: Platform) -> Iterator[None]:
    """Both places of the worker are taken."""
    clients = [Client(platform, gateway=1) for _ in range(2)]
    for client in clients:
        client.send(asking())
        client.read(b'"content":')
    yield
    for client in clients:
        client.close()
    until(lambda: not platform.claims(), "the places to be free")


@pytest.mark.parametrize("reset", [False, True], ids=["end", "reset"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("stage", ["queue", "prefill", "running"])
def test_a_disconnect_cancels_within_a_second(slow: Platform, stage: str, stream: bool, reset: bool) -> None:
    with crowd(slow) if stage == "queue" else nullcontext():
        with new_row(slow) as found:
            client = Client(slow)
            client.send(asking(LONG_PROMPT if stage == "prefill" else HELLO, stream=stream))
        [request_id] = found
        state = "waiting" if stage == "queue" else "running"
        until(lambda: slow.rows()[request_id].state == state, state)
        if stage == "running" and stream:
            client.read(b'"content":')
        start_s = time.monotonic()
        client.close(reset=reset)

        took_s = ended_in(slow, request_id, start_s)

        print(f"{stage}: cancelled {took_s * 1000:.0f} ms after the client had gone")


def test_an_early_answer_is_cancelled_too(slow: Platform) -> None:
    client = Client(slow)
    client.send(asking(stream=False), X_Forebay_Early="1")
    request_id = client.request_id()
    until(lambda: slow.rows()[request_id].state == "running", "it to run")
    start_s = time.monotonic()
    client.close()

    ended_in(slow, request_id, start_s)


@pytest.mark.parametrize("bytes_read", [1, 200, 800, 1500, 3000])
def test_a_disconnect_at_any_byte_cancels(slow: Platform, bytes_read: int) -> None:
    """In the headers, in the middle of an event, between two."""
    client = Client(slow)
    with new_row(slow) as found:
        client.send(asking())
        got = 0
        while got < bytes_read:
            got += len(client.sock.recv(bytes_read - got))
    start_s = time.monotonic()
    client.close()

    ended_in(slow, found[0], start_s)


def costs(platform: Platform) -> tuple[int, int]:
    return len(platform.rows()), int(platform.store.client.zcard(f"f1:{{org:{platform.org_id}}}:open"))


@pytest.mark.parametrize("part", [0.0, 0.5, 0.99])
def test_a_disconnect_during_the_upload_costs_nothing(slow: Platform, part: float) -> None:
    """Also where what has come would be a body by itself: it is shorter than was said."""
    before = costs(slow)
    for _ in range(3):
        client = Client(slow)
        client.send(asking(), part=part)
        client.close()
    client = Client(slow)
    client.sock.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\nContent-Length: 9000\r\n\r\n%b"
        % (slow.key.encode(), json.dumps(asking()).encode())
    )
    client.sock.shutdown(socket.SHUT_WR)

    assert b"bad_framing" in client.read(b"\r\n\r\n{") and b" 400 " in client.got
    client.close()
    assert slow.post("/v1/chat/completions", asking(tokens=1, stream=False)).status_code == 200  # the gateway is well
    assert costs(slow)[0] == before[0] + 1


def test_an_upload_that_takes_too_long_is_told_so(slow: Platform) -> None:
    """Byte by byte, it would hold its connection for ever."""
    before = costs(slow)
    client = Client(slow)
    client.send(asking(), part=0.5)
    start_s = time.monotonic()
    client.sock.settimeout(0.2)
    while b"\r\n\r\n{" not in client.got:
        try:
            client.got += client.sock.recv(65536)
        except TimeoutError:
            client.sock.sendall(b" ")
        assert time.monotonic() - start_s < 10
    client.sock.settimeout(5)

    assert b" 408 " in client.got and b'"code":"request_timeout"' in client.read(b"request_timeout")
    assert b"Connection: close" in client.got and time.monotonic() - start_s < 4
    client.close()
    assert costs(slow) == before


def test_a_reader_that_stalls_is_let_go_of_and_slows_nobody_else(slow: Platform) -> None:
    """It takes nothing for two seconds, though its connection stays open."""
    stalled = Client(slow, buffer=1024)
    stalled.send(asking(tokens=1000))
    request_id = stalled.request_id()
    other = Client(slow)
    other.send(asking(tokens=100))
    start_s = time.monotonic()

    other.read(b"[DONE]")
    others_s = time.monotonic() - start_s
    until(lambda: slow.rows()[request_id].state == "ended", "the stalled one's end", 15)

    ending = slow.rows()[request_id].ending
    assert ending is not None and ending.outcome == "cancelled"
    assert ending.usage.output_tokens < 500 and others_s < 8
    print(f"let go of after {time.monotonic() - start_s:.1f} s; the other took {others_s:.1f} s for 4 s of tokens")
    stalled.close()
    other.close()


def test_a_client_that_is_stopped_is_let_go_of(slow: Platform) -> None:
    """SIGSTOP: its kernel still answers, and takes what its buffer holds."""
    import signal
    import subprocess
    import sys

    code = (
        "import socket, sys\ns = socket.socket()\ns.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)\n"
        "s.connect(('127.0.0.1', int(sys.argv[1])))\ns.sendall(sys.stdin.buffer.read())\n"
        "while b := s.recv(1000): print(len(b), flush=True)\n"
    )
    raw = json.dumps(asking(tokens=1000)).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {slow.key}\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n"
    )
    with new_row(slow) as found:
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(slow.ports[0])], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(head.encode() + raw)
        process.stdin.close()
        process.stdout.readline()
    os.kill(process.pid, signal.SIGSTOP)

    until(lambda: slow.rows()[found[0]].state == "ended", "its end", 20)

    ending = slow.rows()[found[0]].ending
    assert ending is not None and ending.outcome == "cancelled"
    process.kill()
    process.wait()
    process.stdout.close()
