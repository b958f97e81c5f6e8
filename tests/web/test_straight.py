"""Texts that go to a client straight, past its reader: nothing is lost, repeated or out of order by it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import gevent
import gevent.socket
import orjson
import pytest
from flask import Flask
from gunicorn import util

from core.stream.frames import Delta
from core.values import Ending, Outcome, Usage
from tests.platform import until
from tests.web.answers import ID, chunk_of, run
from tests.web.test_subscriber import opened, taken
from web.dialects import chat
from web.dialects.framing import ChatFraming, CompletionsFraming
from web.routes.generation import _chat_line
from web.stream import Rest, Running, Text
from web.transports import edge
from web.transports.http import Lines

BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ANSWER = "It is 'so' \u2014 \"quoted\", \\ and \u00e4.\n" * 300


def deltas(text: str) -> list[Delta]:
    """One token a character."""
    return [Delta("r", 1, i, (i,), each, i) for i, each in enumerate(text)]


def test_a_text_is_told_straight_only_while_its_reader_waits() -> None:
    stream, told = opened(), list[str]()
    first, second, third = deltas("abc")
    stream.straight = lambda text: told.append(text.text)
    stream.take(first)
    assert (told, taken(stream)) == ([], [Running(), Text("a", 1)])

    with ThreadPoolExecutor(1) as reader:
        event = reader.submit(stream.next)
        until(lambda: stream._waited, "the reader to wait")
        stream.take(second)
        assert (told, event.done()) == (["b"], False)
        stream.straight = lambda text: Rest(partial(told.append, text.text))
        stream.take(third)
        rest = event.result(timeout=5)

    assert isinstance(rest, Rest)
    rest.do()
    assert (told, stream.text) == (["b", "c"], "abc")


def test_a_client_that_reads_late_gets_every_text_in_order() -> None:
    """What the kernel did not take is the reader's to send, and what came meanwhile follows it."""
    stream, (ours, theirs), got = opened(), gevent.socket.socketpair(), bytearray()
    client = edge.Client(ours)
    environ = {"gunicorn.socket": client, "SERVER_PROTOCOL": "HTTP/1.1"}
    with ours, theirs, Flask(__name__).test_request_context(environ_overrides=environ):
        lines = Lines(stream, ChatFraming(ID, chat.parse(BODY)), partial(_chat_line, ID.encode()))
        served = iter(lines)
        util.write_chunk(client, next(served))
        stream.straight, stream._waited = lines._straight, True
        for delta in deltas(ANSWER):
            stream.take(delta)
        assert not stream._events.empty()  # the kernel was full
        usage = Usage(output_tokens=len(ANSWER))
        stream.end(Ending(id="r", attempt=1, outcome=Outcome.COMPLETED, usage=usage))

        def serve() -> None:
            for part in served:
                util.write_chunk(client, part)
            client.shutdown(1)

        serving = gevent.spawn(serve)
        while data := theirs.recv(1 << 16):
            got += data
        serving.get(timeout=5)

    chunks = [json.loads(line[6:])["choices"][0] for line in bytes(got).splitlines() if line.startswith(b"data: {")]
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == ANSWER
    assert chunks[-1]["finish_reason"] == "stop"


def test_a_client_that_is_gone_ends_its_own_stream_only() -> None:
    """Whoever brings a text is told nothing of it; the reader is."""
    stream, (ours, theirs) = opened(), gevent.socket.socketpair()
    environ = {"gunicorn.socket": edge.Client(ours), "SERVER_PROTOCOL": "HTTP/1.1"}
    first, second = deltas("ab")
    stream.take(first)
    taken(stream)
    with ours, Flask(__name__).test_request_context(environ_overrides=environ):
        lines = Lines(stream, ChatFraming(ID, chat.parse(BODY)), partial(_chat_line, b""))
        stream.straight, stream._waited = lines._straight, True
        theirs.close()
        stream.take(second)
        [rest] = taken(stream)

    assert isinstance(rest, Rest)
    with pytest.raises(OSError):
        rest.do()


@pytest.mark.parametrize("made", [ChatFraming, CompletionsFraming])
@pytest.mark.parametrize("usage", [False, True])
def test_a_spliced_chunk_is_what_its_dialect_says(
    made: type[ChatFraming] | type[CompletionsFraming], usage: bool
) -> None:
    shown = chat.parse(BODY | {"stream": True, "stream_options": {"include_usage": usage}})
    for text in ("a", '"\\\n', "\u00e4\U0001f600", "\ue000text\ue000"):
        [spliced] = made(ID, shown).text(run("text", text))
        whole = made(ID, shown).answer.piece(run("text", text))
        assert isinstance(spliced.chunk, bytes)
        assert spliced.chunk == orjson.dumps(whole)
        assert chunk_of(spliced) == whole
