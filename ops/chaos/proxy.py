"""A proxy between clients and the store that knows where in an exchange it is, and breaks the one it is told to.

    async with Proxy(socket="/run/valkey.sock") as proxy:
        proxy.plan(Fault(how="drop_reply", what="claim", nth=2))
        store = AsyncStore.connect(proxy.url)

It reads just enough of the protocol to tell requests apart: each is an array of strings, and an EVALSHA is known by its
script's name once `names` says which hash that is. Replies are not read: a client that waits for each reply before it
asks again has at most one on its way, and a pipeline is one exchange.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

How = Literal["drop_request", "drop_reply", "stall", "blackhole"]


@dataclass
class Fault:
    """What to do to the n-th exchange of a kind."""

    how: How
    what: str  #: a script's name, or a command
    nth: int = 1
    stall_s: float = 0.2
    done: bool = False


@dataclass(eq=False)
class _Pair:
    """One client, and its connection to the store."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    upstream: asyncio.StreamWriter
    unread: bytes = b""
    how: How | None = None
    stall_s: float = 0.0
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def reset(self) -> None:
        """End both sides at once, the client's with an RST."""
        for writer in (self.writer, self.upstream):
            sock = writer.get_extra_info("socket")
            if sock is not None and sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


class Proxy:
    """Listens on the loopback, and passes on to a store's Unix socket, or to a host and port."""

    def __init__(self, *, path: str = "", host: str = "127.0.0.1", port: int = 0) -> None:
        self.path, self.host, self.port = path, host, port
        self.names: dict[str, str] = {}  #: hash of a script -> its name
        self.faults: list[Fault] = []
        self.seen: Counter[str] = Counter()  #: exchanges, by what they are
        self.down = False
        self._pairs: set[_Pair] = set()

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.reset_all()
        await asyncio.sleep(0)  # let the connections' own tasks see that they are gone

    def plan(self, *faults: Fault) -> None:
        """Forget what was seen and planned, and plan these."""
        self.faults = list(faults)
        self.seen.clear()

    def reset_all(self) -> None:
        """Cut every connection."""
        for pair in list(self._pairs):
            pair.reset()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if self.down:
                raise ConnectionRefusedError
            opened = (
                asyncio.open_unix_connection(self.path) if self.path else asyncio.open_connection(self.host, self.port)
            )
            replies, upstream = await opened
        except OSError:
            writer.transport.abort()
            return
        pair = _Pair(reader, writer, upstream)
        self._pairs.add(pair)
        pair.tasks = [asyncio.create_task(self._requests(pair)), asyncio.create_task(self._replies(pair, replies))]
        try:
            await asyncio.wait(pair.tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._pairs.discard(pair)
            pair.reset()
            for task in pair.tasks:
                task.cancel()
            await asyncio.gather(*pair.tasks, return_exceptions=True)

    async def _requests(self, pair: _Pair) -> None:
        while data := await pair.reader.read(1 << 20):
            pair.unread += data
            length, kinds = self._read(pair.unread)
            chunk, pair.unread = pair.unread[:length], pair.unread[length:]
            fault = self._fault(kinds)
            if fault is not None:
                if fault.how == "drop_request":
                    return
                pair.how, pair.stall_s = fault.how, fault.stall_s
            pair.upstream.write(chunk)
            await pair.upstream.drain()

    async def _replies(self, pair: _Pair, replies: asyncio.StreamReader) -> None:
        while data := await replies.read(1 << 20):
            how, pair.how = pair.how, None
            if how == "drop_reply":
                return
            if how == "blackhole":  # nothing more is heard, and nobody says why
                await asyncio.Event().wait()
            if how == "stall":
                await asyncio.sleep(pair.stall_s)
            pair.writer.write(data)
            await pair.writer.drain()

    def _fault(self, kinds: Iterable[str]) -> Fault | None:
        found = None
        for kind in kinds:
            self.seen[kind] += 1
            for fault in self.faults:
                if not fault.done and fault.what == kind and fault.nth == self.seen[kind]:
                    fault.done, found = True, fault
        return found

    def _read(self, data: bytes) -> tuple[int, list[str]]:
        """How many bytes of whole requests there are, and what they are."""
        end, kinds = 0, []
        for length, words in requests(data):
            end += length
            kinds.append(self._kind(words))
        return end, kinds

    def _kind(self, words: list[bytes]) -> str:
        name = words[0].decode(errors="replace").upper()
        if name == "EVALSHA" and len(words) > 1:
            return self.names.get(words[1].decode(), name)
        return name


def requests(data: bytes) -> Iterator[tuple[int, list[bytes]]]:
    """The whole requests at the front of what was sent: how long each is, and its words."""
    at = 0
    while (found := _request(data, at)) is not None:
        end, words = found
        yield end - at, words
        at = end


def _request(data: bytes, at: int) -> tuple[int, list[bytes]] | None:
    line_end = data.find(b"\r\n", at)
    if line_end < 0:
        return None
    if data[at : at + 1] != b"*":  # as a person would type it
        return line_end + 2, data[at:line_end].split() or [b""]
    count, at = int(data[at + 1 : line_end]), line_end + 2
    words = []
    for _ in range(count):
        line_end = data.find(b"\r\n", at)
        if line_end < 0:
            return None
        start = line_end + 2
        end = start + int(data[at + 1 : line_end])
        if len(data) < end + 2:
            return None
        words.append(data[start:end])
        at = end + 2
    return at, words
