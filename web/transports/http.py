"""HTTP: bodies in, JSON and server-sent events out, and a watch for clients that go away."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, NoReturn, Protocol

import gevent
import orjson
from flask import Response, current_app, g, jsonify, request
from gevent import monkey
from gunicorn.http.errors import NoMoreData, ParseException

from core.errors import BadFraming, ForebayError, RequestFailed, TooSlow, WrongForm
from core.outlook import Starting
from core.stream.frames import Run
from core.telemetry import logs
from core.values import Ending
from web.admission import Admission
from web.dialects import messages
from web.dialects.nesting import decoded
from web.stream import KEEPALIVE_S, Broken, Ended, Idle, Rest, Running, Stream, Text, Waiting
from web.transports.edge import Client
from web.transports.idempotency import fingerprint

log = logs.get(__name__)

#: Largest body, bytes. A prompt of 100,000 tokens is well below.
BODY_MAX = 4 * 2**20
#: How soon a client's going away is seen, seconds.
GONE_S = 0.25

#: How long the upload of a body may take, seconds.
UPLOAD_S = 60.0
#: The header by which a client asks for a status and a first byte at once, though it does not stream.
EARLY = "X-Forebay-Early"
#: How often such an answer shows that it lives, as a part of what a stream does: the shortest time-outs are its.
EARLY_PART = 2 / 3
#: The header with which a client says that a request is the one it sent before, if it is.
ONCE = "Idempotency-Key"

SSE_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def body() -> object:
    """The request's JSON body.

    Raises:
      BadRequest: it is not JSON, nested too deeply, broke off, or took too long. (One that is too large is refused by
        Flask: MAX_CONTENT_LENGTH.)
    """
    if request.content_encoding not in (None, "", "identity") or request.mimetype.startswith("multipart/"):
        raise WrongForm
    raw = _uploaded()
    if (key := request.headers.get(ONCE)) is not None:
        g.once = (key, fingerprint(request.path, raw))
    return decoded(raw)


def _uploaded() -> bytes:
    """The bytes of the body. Outside of gunicorn nothing bounds their time."""
    try:
        with gevent.Timeout(_upload_s() if "gunicorn.socket" in request.environ else None, TooSlow):
            raw = request.get_data(cache=False)
    except (NoMoreData, ParseException) as e:
        raise BadFraming(f"The body is not well-formed: {e}.") from None
    if len(raw) < (request.content_length or 0):
        raise BadFraming("The body is shorter than its Content-Length.")
    return raw


def _upload_s() -> float:
    within_s: float = current_app.extensions["forebay"].upload_s
    return within_s


class Framing(Protocol):
    """How one dialect says the events of a stream. `web/dialects` fills it."""

    def began(self) -> list[Any]: ...
    def waiting(self, place: int, estimate_ms: int | None, worker: Starting | None) -> list[Any]: ...
    def idle(self) -> list[Any]: ...
    def running(self) -> list[Any]: ...
    def text(self, piece: Text) -> Iterable[Any]: ...
    def ending(self, ending: Ending) -> list[Any]: ...
    def failure(self, error: ForebayError) -> list[Any]: ...


def events(stream: Stream, framing: Framing) -> Iterator[Any]:
    """Everything a stream says, in its dialect."""
    yield from framing.began()
    while True:
        event = stream.next()
        match event:
            case Text():
                yield from framing.text(event)
            case Idle():
                yield from framing.idle()
            case Rest():
                event.do()
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


def whole(stream: Stream) -> tuple[list[Run], Ending]:
    """Wait for the end of a request that is not streamed.

    Raises:
      ForebayError: it broke.
    """
    while True:
        match event := stream.next():
            case Ended():
                return stream.runs, event.ending
            case Broken():
                raise event.error
            case _:
                continue


def answer_whole(
    admission: Admission,
    stream: Stream,
    framed: Callable[[list[Run], Ending], Any],
    watch: DisconnectWatch,
    *,
    keepalive_s: float = KEEPALIVE_S,
) -> Response:
    """Answer with JSON when the request has ended; or with a status at once, if the client asks for it (EARLY)."""
    if request.headers.get(EARLY, "0").lower() not in ("0", "false"):
        chunks = _early(stream, framed, request.path, keepalive_s * EARLY_PART)
        return _open_ended(admission, stream, chunks, watch, "application/json")
    try:
        with watch.over(stream, admission):
            runs, ending = whole(stream)
        return jsonify(framed(runs, ending))
    finally:
        admission.release(stream)


def _early(stream: Stream, framed: Callable[[list[Run], Ending], Any], path: str, every_s: float) -> Iterator[bytes]:
    """White space, which JSON may begin with, until the answer is there. Its status has gone out by then, so that of a
    failure is in the body."""
    yield b" "
    due_s = time.monotonic() + every_s
    while True:
        match event := stream.next(max(due_s - time.monotonic(), 0.0)):
            case Ended():
                try:
                    yield orjson.dumps(framed(stream.runs, event.ending))
                except ForebayError as error:
                    yield _failed(error, path, stream.request.id)
                return
            case Broken():
                yield _failed(event.error, path, stream.request.id)
                return
        if time.monotonic() >= due_s:
            yield b" "
            due_s = time.monotonic() + every_s


def _failed(error: ForebayError, path: str, request_id: str) -> bytes:
    status, body = error_answer(error, path, request_id)
    failed: bytes = orjson.dumps({**body, "status": status})
    return failed


def retry_headers(error: ForebayError) -> dict[str, str]:
    """Whether to retry, and when."""
    told = {"x-should-retry": "true" if error.retry else "false"}
    if error.retry_after_ms is not None:
        told["retry-after-ms"] = str(error.retry_after_ms)
        told["retry-after"] = str(-(-error.retry_after_ms // 1000))
    return told


def is_anthropic(path: str) -> bool:
    """The path of Anthropic's API, which has headers and errors of its own."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def error_answer(error: ForebayError, path: str, request_id: str) -> tuple[int, dict[str, Any]]:
    """An error's status and body, in the words of the API that lives at a path."""
    status, body = error.status, {"error": error.envelope()}
    if is_anthropic(path):
        status, body = messages.error_body(error, request_id)
    return status, {**error.partial, **body}


class Lines:
    """A stream as server-sent events.

    Once its headers have gone out, whoever brings a text (the pump, mostly) sends it to the client straight, as a
    chunk of the body, unless something else is to go first or the kernel does not take it.
    """

    def __init__(self, stream: Stream, framing: Framing, line: Callable[[Any], bytes], last: bytes = b"") -> None:
        """`line`: the bytes of what the framing says. `last`: what comes after all of it."""
        self._stream, self._framing, self._line, self._last = stream, framing, line, last
        self._client = _chunked_client()

    def __iter__(self) -> Iterator[bytes]:
        for said in events(self._stream, self._framing):
            yield self._line(said)
            if self._client is not None:
                self._stream.straight = self._straight
        if self._last:
            yield self._last

    def _straight(self, text: Text) -> Rest | None:
        assert self._client is not None
        try:
            data = b"".join(map(self._line, self._framing.text(text)))
            if not data:
                return None
            chunk = b"%X\r\n%b\r\n" % (len(data), data)
            sent = self._client.send_now(chunk)
        except OSError as e:
            return Rest(partial(_raise, e))
        except Exception as e:  # a fault of ours: it ends this stream, and not the pump
            log.exception("straight_failed", request_id=self._stream.request.id)
            return Rest(partial(_raise, e))
        return None if sent == len(chunk) else Rest(partial(self._client.sendall, chunk[sent:]))


def _raise(error: Exception) -> NoReturn:
    raise error


def _chunked_client() -> Client | None:
    """The client's socket, if the body is sent to it in chunks; they may then go there without the server's help."""
    sock, chunked = request.environ.get("gunicorn.socket"), request.environ.get("SERVER_PROTOCOL") == "HTTP/1.1"
    return sock if chunked and request.method != "HEAD" and isinstance(sock, Client) else None


def sse(admission: Admission, stream: Stream, chunks: Iterable[bytes], watch: DisconnectWatch) -> Response:
    """Stream `chunks`, and let go of the request when they, or the client, end."""
    return _open_ended(admission, stream, chunks, watch, "text/event-stream")


def _open_ended(
    admission: Admission, stream: Stream, chunks: Iterable[bytes], watch: DisconnectWatch, mimetype: str
) -> Response:
    let_go = ExitStack()
    let_go.callback(admission.release, stream)
    let_go.enter_context(watch.over(stream, admission))
    # Straight to the server: werkzeug would look at each chunk twice.
    return Response(_Body(chunks, let_go.close), mimetype=mimetype, headers=SSE_HEADERS, direct_passthrough=True)


class _Body:
    """What a server iterates, and closes. Not a `finally` in the generator: one that its server closes before the first
    chunk never runs."""

    def __init__(self, chunks: Iterable[bytes], close: Callable[[], None]) -> None:
        self._chunks, self._close = chunks, close

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._chunks)

    def close(self) -> None:
        self._close()


def data_line(value: Any) -> bytes:
    return b"data: %b\n\n" % _json(value)


def _json(value: Any) -> bytes:
    return value if type(value) is bytes else orjson.dumps(value)


def event_lines(event: dict[str, Any]) -> bytes:
    name: str = event["type"]
    return b"event: " + name.encode() + b"\n" + data_line(event)


def identified_lines(value: Any, of: bytes, cursor: int) -> bytes:
    """An event with an id, which a client that comes back sends as `Last-Event-ID`: whose stream it is, and where."""
    return b"id: %b:%d\ndata: %b\n\n" % (of, cursor, _json(value))


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
                admission.leave(stream)


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
