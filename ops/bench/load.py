"""The client of the benches: real connections with little of their own cost, in a process of its own.

`python -m ops.bench.load` reads a Load from standard input and writes what it saw, a Seen, to standard output. Each
connection keeps one chat stream open at a time, over keep-alive. Nothing is parsed as JSON: the scripted engine's
texts are plain letters, one a token, so that a token is a letter of a `content`.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

import msgspec

from ops.bench.platform import BenchFailed, Platform

#: How long a run may take beyond the time that its tokens need, seconds.
PATIENCE_S = 60.0
#: How long an answer to a handshake may take, seconds.
HANDSHAKE_S = 10.0
PROMPT = "Tell me a story."
#: How often the client looks whether it is late itself, seconds.
LAG_S = 0.01
_CONTENT = re.compile(rb'"content":"([^"]*)"')
_LAST_CHUNK = b"0\r\n\r\n"


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the client is to do."""

    url: str
    key: str
    model: str
    connections: int  #: streams open at once
    tokens: int  #: per request
    requests: int = 1  #: per connection, one after the other
    seconds: float = 0.0  #: go on with further requests for so long
    over_s: float = 0.0  #: in which the connections are opened; 0: at once
    steady: bool = False  #: time between tokens only while all connections stream
    timeout_s: float = PATIENCE_S


class Seen(msgspec.Struct, kw_only=True):
    """What the client saw."""

    requests: int = 0
    tokens: int = 0
    events: int = 0  #: that carried text; fewer than tokens where the gateway merged some
    streams: int = 0  #: that streamed at once, at most
    seconds: float = 0.0
    itl_ms_p50: float = 0.0  #: between two tokens of a stream; 0 within one event
    itl_ms_p99: float = 0.0
    itl_ms_max: float = 0.0
    ttft_ms_p50: float = 0.0
    ttft_ms_p99: float = 0.0
    lag_ms_p99: float = 0.0  #: how late the client itself was: a timer of its own, every LAG_S
    fault: str = ""  #: the first one; nothing is measured then


def drive(
    platform: Platform,
    *,
    connections: int,
    tokens: int,
    requests: int = 1,
    seconds: float = 0.0,
    over_s: float = 0.0,
    steady: bool = False,
    token_s: float = 0.1,
) -> Seen:
    """Run a load to its end against a platform, in another process. `token_s`: how long a token may take at most.

    Raises:
      BenchFailed: a request was refused, broke, or gave another number of tokens than it was to.
    """
    ready = platform.ready
    load = Load(
        url=ready.url, key=ready.api_key, model=ready.model, connections=connections, tokens=tokens,
        requests=requests, seconds=seconds, over_s=over_s, steady=steady,
        timeout_s=PATIENCE_S + seconds + over_s + tokens * requests * token_s,
    )  # fmt: skip
    return run(load)


def run(load: Load) -> Seen:
    """The same, against whatever the load names.

    Raises:
      BenchFailed: as `drive`.
    """
    argv = [sys.executable, "-m", "ops.bench.load"]
    done = subprocess.run(argv, input=msgspec.json.encode(load), stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise BenchFailed(f"The client ended with {done.returncode}.")
    seen = msgspec.json.decode(done.stdout, type=Seen)
    if seen.fault:
        raise BenchFailed(seen.fault)
    return seen


class _Run:
    """One load as it is done."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.seen = Seen()
        self.itl_ms = array("d")
        self.ttft_ms = array("d")
        self.lag_ms = array("d")
        self.streaming = 0
        self.left = load.connections
        self.start_s = time.perf_counter()
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def timely(self) -> bool:
        return time.perf_counter() - self.start_s < self.load.seconds

    @property
    def timed(self) -> bool:
        """The time between tokens counts."""
        return not self.load.steady or self.streaming == self.load.connections

    async def watch_itself(self) -> None:
        while True:
            due_s = time.perf_counter() + LAG_S
            await asyncio.sleep(LAG_S)
            if self.timed:
                self.lag_ms.append((time.perf_counter() - due_s) * 1000)

    def streams(self, change: int) -> None:
        self.streaming += change
        self.seen.streams = max(self.seen.streams, self.streaming)

    def leave(self) -> None:
        self.left -= 1
        if not self.left and not self.over.done():
            self.over.set_result(None)

    def fail(self, fault: str) -> None:
        self.seen.fault = self.seen.fault or fault
        if not self.over.done():
            self.over.set_result(None)


class _Client(asyncio.Protocol):
    """One connection."""

    def __init__(self, run: _Run, request: bytes) -> None:
        self.run, self.request = run, request
        self.made = 0
        self.finished = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._ask()

    def _ask(self) -> None:
        self.made += 1
        self.tokens, self.rest, self.done, self.head = 0, b"", False, True
        self.last_s = time.perf_counter()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        data = self.rest + data
        if self.head and not self._take_head(data):
            return
        whole = data.rfind(b"\n\n") + 2
        if whole > 1:
            self._take(data[:whole], now_s)
            data = data[whole:]
        self.rest = data
        if self.done and data.endswith(_LAST_CHUNK):
            self._end()

    def _take_head(self, data: bytes) -> bool:
        """Whether an answer has begun; one that is not a stream is a fault."""
        self.rest = data
        if b"\r\n\r\n" not in data:
            return False
        if not data.startswith(b"HTTP/1.1 200 "):
            self.run.fail(f"A request was refused: {data[:500].decode(errors='replace')}")
            return False
        self.head = False
        return True

    def _take(self, data: bytes, now_s: float) -> None:
        """Whole events."""
        texts = [text for text in _CONTENT.findall(data) if text]
        if texts:
            self._count(len(texts), sum(map(len, texts)), now_s)
        if b'data: {"error"' in data:
            self.run.fail(f"A stream broke: {data[:500].decode(errors='replace')}")
        self.done = self.done or data.endswith(b"data: [DONE]\n\n")

    def _count(self, events: int, tokens: int, now_s: float) -> None:
        run = self.run
        gap_ms = (now_s - self.last_s) * 1000
        self.last_s = now_s
        if not self.tokens:
            run.ttft_ms.append(gap_ms)
            run.streams(+1)
        elif run.timed:
            run.itl_ms.append(gap_ms)
        if run.timed:
            run.itl_ms.extend([0.0] * (tokens - 1))
        self.tokens += tokens
        run.seen.tokens += tokens
        run.seen.events += events

    def _end(self) -> None:
        run = self.run
        run.streams(-1)
        run.seen.requests += 1
        if self.tokens != run.load.tokens:
            run.fail(f"A stream gave {self.tokens} tokens instead of {run.load.tokens}.")
        elif self.made < run.load.requests or run.timely:
            self._ask()
        else:
            self.finished = True
            run.leave()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.finished:
            self.run.fail(f"A connection was lost: {exc}")


async def _load(load: Load) -> Seen:
    run = _Run(load)
    host, port = _address(load.url)
    request = _request(load, f"{host}:{port}")
    loop = asyncio.get_running_loop()
    itself = loop.create_task(run.watch_itself())
    try:
        async with asyncio.timeout(load.timeout_s):

            async def connect(after_s: float) -> tuple[asyncio.Transport, _Client]:
                await asyncio.sleep(after_s)
                return await loop.create_connection(lambda: _Client(run, request), host, port)

            each_s = load.over_s / load.connections
            connections = await asyncio.gather(*(connect(i * each_s) for i in range(load.connections)))
            await run.over
    except (OSError, TimeoutError) as e:
        run.fail(f"The gateway did not answer in time: {e!r}")
        return run.seen
    itself.cancel()
    run.seen.seconds = time.perf_counter() - run.start_s
    run.seen.itl_ms_max, run.seen.lag_ms_p99 = max(run.itl_ms, default=0.0), quantile(run.lag_ms, 0.99)
    run.seen.itl_ms_p50, run.seen.itl_ms_p99 = quantile(run.itl_ms, 0.5), quantile(run.itl_ms, 0.99)
    run.seen.ttft_ms_p50, run.seen.ttft_ms_p99 = quantile(run.ttft_ms, 0.5), quantile(run.ttft_ms, 0.99)
    for transport, client in connections:
        client.finished = True
        transport.close()
    return run.seen


def _address(url: str) -> tuple[str, int]:
    where = urlsplit(url)
    return where.hostname or "127.0.0.1", where.port or 80


def _request(load: Load, host: str) -> bytes:
    messages = [{"role": "user", "content": PROMPT}]
    body = msgspec.json.encode(
        {"model": load.model, "stream": True, "max_tokens": load.tokens, "messages": messages},
    )
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {load.key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def quantile(values: array[float], share: float) -> float:
    """The value that `share` of them do not exceed; 0 for none."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)] if values else 0.0


@contextmanager
def idle_sockets(platform: Platform, count: int) -> Iterator[None]:
    """Hold so many WebSockets open, and say nothing on them.

    Raises:
      BenchFailed: the gateway did not accept one.
    """
    host, port = _address(platform.ready.url)
    with ExitStack() as stack:
        for _ in range(count):
            sock = stack.enter_context(socket.create_connection((host, port), HANDSHAKE_S))
            sock.sendall(_handshake(f"{host}:{port}", platform.ready.api_key))
            answer = sock.recv(4096)
            if not answer.startswith(b"HTTP/1.1 101 "):
                raise BenchFailed(f"A WebSocket was refused: {answer[:500].decode(errors='replace')}")
        yield


def _handshake(host: str, key: str) -> bytes:
    nonce = base64.b64encode(os.urandom(16)).decode()
    return (
        f"GET /v1/responses HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\nUpgrade: websocket\r\n"
        f"Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {nonce}\r\n\r\n"
    ).encode()


def main() -> None:
    load = msgspec.json.decode(sys.stdin.buffer.read(), type=Load)
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(_load(load))))


if __name__ == "__main__":
    main()
