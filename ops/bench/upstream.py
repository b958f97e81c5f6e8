"""The engine behind the peers of `forebay bench stream`: a server of OpenAI chat streams, one letter a token.

`python -m ops.bench.upstream PORT STEP_MS`. All streams step together, as a batch does and as the scripted engine
behind our own gateway does; each step is due a fixed time after the last one was. It costs as little as it can: the
processors are for the gateway that is measured. A gateway that does not keep up finds what it has not taken yet in
its socket, and in our memory: at most what its streams were asked for.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import string
import sys
import time

import msgspec

from core.supervise import follow_parent

_LENGTH = re.compile(rb"^content-length:\s*(\d+)", re.IGNORECASE | re.MULTILINE)
_JSON = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_HEAD = '{"id":"chatcmpl-0123456789abcdef","object":"chat.completion.chunk","created":1795982987,"model":"m"'
#: What is asked before a request is sent here: health, models, and what kind of server it is.
_ABOUT = b'{"object":"list","data":[{"id":"m","object":"model","created":1,"owned_by":"bench"}],"status":"ok"}'

#: A prompt's tokens. vLLM's router asks its engine for those of every request, and waits a second for the answer.
_RENDERED = b'{"request_id":"chatcmpl-0123456789abcdef","token_ids":[%s],"sampling_params":{},"model":"m"}' % (
    b",".join(b"%d" % token for token in range(100, 116))
)
_RENDER = re.compile(rb"POST \S+/render ")


class Asked(msgspec.Struct, frozen=True):
    """The part of a request that this server obeys."""

    class Options(msgspec.Struct, frozen=True):
        include_usage: bool = False

    max_tokens: int = 0
    max_completion_tokens: int = 0
    stream_options: Options | None = None

    @property
    def tokens(self) -> int:
        return self.max_tokens or self.max_completion_tokens or 16


def _event(rest: str) -> bytes:
    return _chunk(f"data: {_HEAD},{rest}}}\n\n".encode())


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _choice(delta: str, finish: str = "null") -> bytes:
    return _event(f'"choices":[{{"index":0,"delta":{{{delta}}},"logprobs":null,"finish_reason":{finish}}}]')


_FIRST = _choice('"role":"assistant","content":""')
#: Not the same letter again and again: some gateways take that for a model that has lost its way.
_LETTERS = [_choice(f'"content":"{letter}"') for letter in string.ascii_lowercase]
_LAST = _choice("", '"stop"')
_END = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class _Stream:
    """One answer. A step writes one token of it."""

    def __init__(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        self.asked, self.writer = asked, writer
        self.left = asked.tokens
        self.letters = itertools.cycle(_LETTERS)
        self.over = asyncio.get_running_loop().create_future()
        writer.write(_STREAM + _FIRST)

    def step(self) -> bool:
        """Whether there is more to come; not for a client that is gone."""
        self.left -= 1
        if self.left and not self.writer.is_closing():
            self.writer.write(next(self.letters))
            return True
        self.writer.write(next(self.letters) + _LAST + self._usage() + _END)
        self.over.set_result(None)
        return False

    def _usage(self) -> bytes:
        options, tokens = self.asked.stream_options, self.asked.tokens
        if options is None or not options.include_usage:
            return b""
        usage = f'"prompt_tokens":16,"completion_tokens":{tokens},"total_tokens":{16 + tokens}'
        return _event(f'"choices":[],"usage":{{{usage}}}')


class _Server:
    """Everything that streams now."""

    def __init__(self) -> None:
        self.streams: list[_Stream] = []

    async def run(self, step_s: float) -> None:
        due_s = time.monotonic()
        while True:
            due_s += step_s
            await asyncio.sleep(due_s - time.monotonic())
            self.streams = [stream for stream in self.streams if stream.step()]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: request after request, until the client closes it."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = _LENGTH.search(head)
                body = await reader.readexactly(int(length[1])) if length else b""
                await self._answer(head, body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has gone, as it may at any time
        finally:
            writer.close()

    async def _answer(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        about = _RENDERED if _RENDER.match(head) else b"" if head.startswith(b"POST ") else _ABOUT
        if about:
            writer.write(_JSON % (len(about), about))
            return
        stream = _Stream(msgspec.json.decode(body, type=Asked), writer)
        self.streams.append(stream)
        await stream.over


async def _main(port: int, step_ms: float) -> None:
    server = _Server()
    async with await asyncio.start_server(server.serve, "127.0.0.1", port, backlog=4096):
        await server.run(step_ms / 1000)


if __name__ == "__main__":
    follow_parent()
    asyncio.run(_main(int(sys.argv[1]), float(sys.argv[2])))
