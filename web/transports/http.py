"""HTTP: bodies in, JSON and server-sent events out, and a watch for clients that go away."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any, Protocol

import msgspec
import orjson
from flask import Response, request
from gevent import monkey

from core.accounts.keys import KeyRecord
from core.errors import BadRequest, ForebayError, NotFound, RequestFailed
from core.outlook import Starting
from core.telemetry import logs
from core.values import Ending
from web.admission import Admission, Kept
from web.dialects import responses
from web.dialects.framing import ResponsesFraming
from web.stream import Again, Broken, Ended, Idle, Running, Stream, Text, Waiting

log = logs.get(__name__)

#: Largest body, bytes. A prompt of 100,000 tokens is well below.
BODY_MAX = 4 * 2**20
#: How soon a client's going away is seen, seconds.
GONE_S = 0.25

SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def body() -> object:
    """The request's JSON body.

    Raises:
      BadRequest: it is not JSON. (One that is too large is refused by Flask: MAX_CONTENT_LENGTH.)
    """
    raw = request.get_data(cache=False)
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise BadRequest(f"The body is not valid JSON: {e}.", code="invalid_json") from None


class Framing(Protocol):
    """How one dialect says the events of a stream. `web/dialects` fills it."""

    def began(self) -> list[Any]: ...
    def waiting(self, place: int, estimate_ms: int | None, worker: Starting | None) -> list[Any]: ...
    def idle(self) -> list[Any]: ...
    def running(self) -> list[Any]: ...
    def text(self, text: str) -> Iterable[Any]: ...
    def ending(self, ending: Ending) -> list[Any]: ...
    def failure(self, error: ForebayError) -> list[Any]: ...


def events(stream: Stream, framing: Framing) -> Iterator[Any]:
    """Everything a stream says, in its dialect."""
    yield from framing.began()
    while True:
        event = stream.next()
        match event:
            case Text():
                yield from framing.text(event.text)
            case Idle():
                yield from framing.idle()
            case Waiting():
                yield from framing.waiting(event.place, event.estimate_ms, event.worker)
            case Running():
                yield from framing.running()
            case Ended():
                yield from framing.ending(event.ending)
                return
            case Broken():
                yield from framing.failure(event.error)
                return


def resumed(admission: Admission, caller: KeyRecord, response_id: str, after: int) -> tuple[Stream, ResponsesFraming]:
    """The stream of a response, brought here for a client that has everything up to a cursor.

    Raises:
      NotFound, Gone: there is no such response for this caller.
      BadRequest: the cursor lies beyond its end, or it is not streamed.
    """
    kept = recalled(admission, caller, response_id)
    if not kept.view.stream:
        raise BadRequest("Only a response that was created with stream=true can be streamed.", param="stream")
    responses.check_cursor(after, len(kept.text), kept.seen.state == "ended")
    framing = ResponsesFraming(kept.request.id, kept.view, after=after, delivered=len(kept.text))
    return admission.attach(kept), framing


def recalled(admission: Admission, caller: KeyRecord, response_id: str) -> Kept:
    """What is kept of a response.

    Raises:
      NotFound, Gone: there is no such response for this caller.
    """
    request_id = responses.request_id_of(response_id)
    if request_id is None:
        raise NotFound("There is no such response, or this key has not made it.")
    return admission.recall(caller, request_id, "responses")


def whole(stream: Stream) -> tuple[str, Ending]:
    """Wait for the end of a request that is not streamed.

    Raises:
      ForebayError: it broke.
    """
    texts: list[str] = []
    while True:
        match event := stream.next():
            case Text():
                texts.append(event.text)
            case Again():
                texts.clear()
            case Ended():
                return "".join(texts), event.ending
            case Broken():
                raise event.error
            case _:
                continue


def sse(admission: Admission, stream: Stream, chunks: Iterator[bytes], watch: DisconnectWatch) -> Response:
    """Stream `chunks`, and let go of the request when they, or the client, end."""
    let_go = ExitStack()
    let_go.callback(admission.release, stream)
    let_go.enter_context(watch.over(stream, admission))
    response = Response(chunks, mimetype="text/event-stream", headers=SSE_HEADERS)
    # Not a `finally` in a generator: one that its server closes before the first chunk never runs.
    response.call_on_close(let_go.close)
    return response


def data_line(value: Any) -> bytes:
    line: bytes = b"data: " + orjson.dumps(value) + b"\n\n"
    return line


def event_lines(event: dict[str, Any]) -> bytes:
    name: str = event["type"]
    return b"event: " + name.encode() + b"\n" + data_line(event)


def identified_lines(value: Any, of: bytes, cursor: int) -> bytes:
    """An event with an id, which a client that comes back sends as `Last-Event-ID`: whose stream it is, and where."""
    return b"id: %b:%d\ndata: %b\n\n" % (of, cursor, orjson.dumps(value))


def comment_line(text: str) -> bytes:
    """A comment, without an empty line after it: one that follows an id ends an event for OpenAI's SDK, though
    nothing is in it, and it fails on that."""
    return b": " + text.encode() + b"\n"


class DisconnectWatch:
    """Sees clients go away while nothing is written to them. One poll over all their sockets, for the whole process."""

    def __init__(self) -> None:
        # gevent's own poll would wait on its hub, one watcher a socket; the real one answers for all in one call.
        self._poll = monkey.get_original("select", "poll")()
        self._open: dict[int, tuple[Stream, Admission]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def over(self, stream: Stream, admission: Admission) -> _Watched:
        """While this is entered, the client of the current request is watched."""
        return _Watched(self, _client_fd(), stream, admission)

    def add(self, fd: int, stream: Stream, admission: Admission) -> None:
        with self._lock:
            self._open[fd] = (stream, admission)
            self._poll.register(fd, select.POLLRDHUP)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="disconnect-watch", daemon=True)
                self._thread.start()

    def remove(self, fd: int) -> None:
        with self._lock:
            if self._open.pop(fd, None) is not None:
                self._poll.unregister(fd)

    def _run(self) -> None:
        while True:
            time.sleep(GONE_S)
            self.look()

    def look(self) -> None:
        """Let go of every stream whose client has gone."""
        with self._lock:
            gone = [self._open[fd] for fd, _ in self._poll.poll(0) if fd in self._open]
        for stream, admission in gone:
            if not stream.over:
                log.info("client_gone", request_id=stream.request.id)
                stream.break_off(RequestFailed("The client went away.", code="client_gone"))
                admission.subscriber.close(stream)


class _Watched:
    def __init__(self, watch: DisconnectWatch, fd: int | None, stream: Stream, admission: Admission) -> None:
        self.watch, self.fd, self.stream, self.admission = watch, fd, stream, admission

    def __enter__(self) -> None:
        if self.fd is not None:
            self.watch.add(self.fd, self.stream, self.admission)

    def __exit__(self, *_: object) -> None:
        if self.fd is not None:
            self.watch.remove(self.fd)


def _client_fd() -> int | None:
    """The client's socket; None under a server that does not show it."""
    sock = request.environ.get("gunicorn.socket")
    return None if sock is None else int(sock.fileno())
