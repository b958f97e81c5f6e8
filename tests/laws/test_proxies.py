"""Behind a load balancer: its time-outs for the first byte and for silence, and what reaches the wire, byte by byte.

The proxy's 30 s and 55 s are a tenth here, and so are the gateway's keep-alives (tests/laws/conftest.py).
"""

from __future__ import annotations

import json
import re
import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
import requests

from tests.laws.test_disconnects import HELLO, Client, asking, crowd, ended_in, new_row
from tests.platform import MODEL, Platform, until

FIRST_BYTE_S, IDLE_S = 3.0, 5.5
#: The keep-alive of the platform, and what its watch may add, which looks once a second.
KEEPALIVE_S, WATCH_S = 1.5, 2.4


class Proxy:
    """A balancer that waits so long for the first byte of an answer, and so long for each next one."""

    def __init__(self, port: int, *, first_byte_s: float = FIRST_BYTE_S, idle_s: float = IDLE_S) -> None:
        self.upstream, self.first_byte_s, self.idle_s = port, first_byte_s, idle_s
        self.cut: list[str] = []  #: why connections were cut
        self.longest_s = 0.0  #: silence that was seen of an answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.1)
        self.port: int = self._listener.getsockname()[1]
        self._closed = False
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with self._listener:
            while not self._closed:
                try:
                    client, _ = self._listener.accept()
                except TimeoutError:
                    continue
                self._threads.append(threading.Thread(target=self._serve, args=(client,)))
                self._threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self.upstream)) as upstream:
            within_s, since_s = self.first_byte_s, time.monotonic()
            while True:
                left_s = max(0.0, since_s + within_s - time.monotonic())
                ready, _, _ = select.select([client, upstream], [], [], left_s)
                if not ready:
                    first = within_s == self.first_byte_s
                    self.cut.append("first byte" if first else "idle")
                    if first:
                        client.sendall(
                            b"HTTP/1.1 504 Gateway Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
                        )
                    return
                for side in ready:
                    try:
                        data = side.recv(65536)
                        (upstream if side is client else client).sendall(data)
                    except OSError:
                        return
                    if not data:
                        return
                    if side is upstream:
                        self.longest_s = max(self.longest_s, time.monotonic() - since_s)
                        within_s = self.idle_s
                    since_s = time.monotonic()

    def close(self) -> None:
        self._closed = True
        for thread in self._threads:
            thread.join()


@pytest.fixture
def proxy(slow: Platform) -> Iterator[Proxy]:
    proxy = Proxy(slow.ports[0])
    yield proxy
    proxy.close()


def post(proxy: Proxy, platform: Platform, path: str, body: Any, **headers: str) -> requests.Response:
    told = {"Authorization": f"Bearer {platform.key}", "Connection": "close"}
    told |= {name.replace("_", "-"): value for name, value in headers.items()}
    return requests.post(f"http://127.0.0.1:{proxy.port}{path}", json=body, headers=told, timeout=60)


def text_of(answer: requests.Response) -> str:
    chunks = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith(b"data: {")]
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])


def test_streams_that_wait_longer_than_a_proxy_does_are_kept(slow: Platform, proxy: Proxy) -> None:
    """Eight seconds in the queue, for each API that streams."""
    bodies = {
        "/v1/chat/completions": asking(tokens=20),
        "/v1/completions": {"model": MODEL, "prompt": "hello", "max_tokens": 20, "stream": True},
        "/v1/responses": {"model": MODEL, "input": "hello", "max_output_tokens": 20, "stream": True},
        "/v1/messages": asking(tokens=20),
    }
    with ThreadPoolExecutor(4) as pool:
        with crowd(slow):
            asked = [pool.submit(post, proxy, slow, path, body) for path, body in bodies.items()]
            until(lambda: sum(row.state == "waiting" for row in slow.rows().values()) == 4, "all to wait")
            until_s = time.monotonic() + 8
            until(lambda: time.monotonic() > until_s or any(one.done() for one in asked), "the time to pass")
            assert not any(one.done() for one in asked), [one.result().text for one in asked if one.done()]
        answers = [one.result(30) for one in asked]

    assert [answer.status_code for answer in answers] == [200] * 4 and proxy.cut == []
    for answer, last in zip(answers, ("[DONE]", "[DONE]", "response.incomplete", "message_stop"), strict=True):
        assert last in answer.text
    assert proxy.longest_s < KEEPALIVE_S + WATCH_S
    print(f"the longest silence was {proxy.longest_s:.1f} s")


def test_an_answer_that_is_not_streamed_outlasts_the_proxy_if_it_begins_early(slow: Platform, proxy: Proxy) -> None:
    """Six seconds of work. Without the header the proxy gives up, and so does the platform."""
    body = asking(tokens=150, stream=False)

    early = post(proxy, slow, "/v1/chat/completions", body, X_Forebay_Early="1")
    assert early.status_code == 200 and early.json()["usage"]["completion_tokens"] == 150
    assert early.content.startswith(b" ") and proxy.cut == []

    with new_row(slow) as found:
        late = post(proxy, slow, "/v1/chat/completions", body)
    assert late.status_code == 504 and proxy.cut == ["first byte"]
    ended_in(slow, found[0], time.monotonic())


# --- the wire


def chunks_of(client: Client) -> Iterator[tuple[float, bytes]]:
    """The chunks of HTTP's own framing, and when each came."""
    head, _, rest = client.read(b"\r\n\r\n").partition(b"\r\n\r\n")
    assert b"Transfer-Encoding: chunked" in head
    while True:
        while b"\r\n" not in rest:
            rest += client.sock.recv(65536)
        size, _, rest = rest.partition(b"\r\n")
        while len(rest) < int(size, 16) + 2:
            rest += client.sock.recv(65536)
        chunk, rest = rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        if not chunk:
            return
        yield time.monotonic(), chunk


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_each_event_leaves_by_itself_as_soon_as_it_is_there(slow: Platform, path: str) -> None:
    """Tokens are 40 ms apart, and so are their events: nothing on the way gathers them."""
    body = {"stream_options": {"include_usage": True}} if "chat" in path else {}
    body |= {"model": MODEL, "messages": HELLO, "input": "hello", "stream": True}
    client = Client(slow)
    client.send({**body, "max_tokens" if "chat" in path else "max_output_tokens": 50}, path)
    start_s = time.monotonic()
    got = list(chunks_of(client))
    client.close()

    events = [chunk for _, chunk in got if not chunk.startswith(b":")]
    assert all(event.count(b"\n\n") == 1 and event.endswith(b"\n\n") for event in events)
    first_s = got[0][0] - start_s
    deltas = [at for at, chunk in got if b'"content":"' in chunk or b"output_text.delta" in chunk]
    gaps = [after - before for before, after in pairwise(deltas)]
    assert first_s < 1 and len(deltas) > 30
    assert sorted(gaps)[len(gaps) // 2] == pytest.approx(0.04, abs=0.02)
    head = client.got.partition(b"\r\n\r\n")[0].lower()
    for said in (
        b"content-type: text/event-stream; charset=utf-8",
        b"cache-control: no-cache",
        b"x-accel-buffering: no",
    ):
        assert said in head
    assert b"content-encoding" not in head and b"content-length" not in head
    if "chat" in path:
        used = [json.loads(event.partition(b"data: ")[2]) for event in events if b'"usage":{' in event]
        assert [one["choices"] for one in used] == [[]], "usage once, in a chunk of its own"
    print(f"first byte after {first_s * 1000:.0f} ms; median gap {sorted(gaps)[len(gaps) // 2] * 1000:.1f} ms")


def test_usage_comes_only_if_it_is_asked_for(slow: Platform) -> None:
    answer = slow.post("/v1/chat/completions", asking(tokens=3))

    assert '"usage":{' not in answer.text and answer.text.endswith("data: [DONE]\n\n")


def raw(platform: Platform, request: bytes) -> tuple[int, bytes, dict[str, Any]]:
    """Status, head and body of what comes back for some bytes."""
    client = Client(platform)
    client.sock.sendall(request)
    got = b""
    while more := client.sock.recv(65536):
        got += more
    client.close()
    head, _, body = got.partition(b"\r\n\r\n")
    status = re.match(rb"HTTP/1.1 (\d+) ", head)
    assert status is not None, got
    return int(status[1]), head, json.loads(body)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"NONSENSE\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"GET /" + b"x" * 10_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"x" * 20_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 200 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    ],
    ids=["line", "version", "long line", "long header", "many headers", "header", "two lengths", "length and chunks"],
)
def test_what_is_not_http_is_told_so_in_json(slow: Platform, request_bytes: bytes, status: int) -> None:
    said, head, body = raw(slow, request_bytes)

    assert said == status
    assert (
        set(body["error"]) == {"message", "type", "param", "code"} and body["error"]["type"] == "invalid_request_error"
    )
    for header in (
        b"content-type: application/json",
        b"x-request-id: ",
        b"connection: close",
        b"x-should-retry: false",
    ):
        assert header in head.lower()


def test_a_body_whose_chunks_are_broken_is_told_so_in_json(slow: Platform) -> None:
    said, head, body = raw(
        slow,
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %b\r\n"
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" % slow.key.encode(),
    )

    assert (said, body["error"]["code"]) == (400, "bad_framing") and b"connection: close" in head.lower()


def test_a_body_that_is_too_large_is_told_so_though_it_is_still_being_sent(slow: Platform) -> None:
    answer = requests.post(
        f"{slow.url}/v1/chat/completions",
        data=b" " * 2**23,
        headers={"Authorization": f"Bearer {slow.key}"},
        timeout=10,
    )

    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


def test_a_connection_is_used_again_after_an_error(slow: Platform) -> None:
    with requests.Session() as session:
        session.headers["Authorization"] = f"Bearer {slow.key}"
        statuses = [
            session.post(f"{slow.url}/v1/chat/completions", data=data, timeout=10).status_code
            for data in (b"{", json.dumps(asking(tokens=1, stream=False)).encode(), b"[]")
        ]
        statuses.append(session.get(f"{slow.url}/nowhere", timeout=10).status_code)

    assert statuses == [400, 200, 400, 404]
