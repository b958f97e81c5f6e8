"""The WebSocket loop of Responses mode: commands in, events out, one request after the other on a connection.

The handler reads; a second greenlet, alive only while there is work, answers. So a closed socket or a
`response.cancel` is seen at once, whatever is being generated.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec
import orjson
import simple_websocket

from core.accounts.keys import KeyRecord
from core.errors import BadRequest, ForebayError, RequestFailed
from core.telemetry import logs
from web.admission import Admission, new_id
from web.dialects import responses
from web.dialects.framing import Comment, ResponsesFraming, created_s
from web.dialects.responses import Cancel, Create, Refused, ResponsesAnswer, Resume, Steer
from web.stream import Stream
from web.transports.http import events, resumed

log = logs.get(__name__)

#: Creates that may wait on one connection. One more is refused.
PENDING_MAX = 16
GOING_AWAY = 1001
TRY_LATER = 1013


class Socket:
    """One connection."""

    def __init__(
        self, ws: simple_websocket.Server, admission: Admission, caller: KeyRecord, linger_ms: int = 0
    ) -> None:
        self.ws, self.admission, self.caller, self.linger_ms = ws, admission, caller, linger_ms
        self._pending: deque[Create | Resume] = deque()
        self._lock = threading.Lock()
        self._answering = False
        self._running: Stream | None = None
        self._closed = False

    @property
    def idle(self) -> bool:
        return not self._answering

    def serve(self) -> None:
        """Read until the client is gone; then let go of what it asked for."""
        try:
            while True:
                self._obey(self.ws.receive())
        except simple_websocket.ConnectionClosed:
            log.debug("socket_closed")
        finally:
            self._leave()

    def close(self, code: int, why: str) -> None:
        """Say goodbye. The reader sees the close and lets go."""
        try:
            self.ws.close(code, why)
        except (simple_websocket.ConnectionClosed, OSError):
            log.debug("socket_closed_first")

    # --- reading

    def _obey(self, frame: Any) -> None:
        if not isinstance(frame, str):
            self._send(responses.error_frame(BadRequest("Send text frames with JSON in them.", code="invalid_json")))
            return
        match command := responses.parse_event(frame):
            case Create() | Resume():
                self._line_up(command)
            case Cancel():
                self._cancel(command)
            case Steer():
                self._send(responses.steer_failed(command))
            case Refused():
                self._send(responses.error_frame(command.error, command.stream_id))

    def _line_up(self, asked: Create | Resume) -> None:
        with self._lock:
            if len(self._pending) >= PENDING_MAX:
                full = BadRequest("Too many responses wait on this connection.", code="websocket_stream_limit_reached")
                self._send(responses.error_frame(full, asked.stream_id))
                return
            self._pending.append(asked)
            if not self._answering:
                self._answering = True
                threading.Thread(target=self._answer_all, name="socket-answers", daemon=True).start()

    def _cancel(self, cancel: Cancel) -> None:
        running = self._running
        if running is None or cancel.response_id != "resp_" + running.request.id.replace("-", ""):
            unknown = BadRequest("No such response is running here.", param="response_id", code="response_not_found")
            self._send(responses.error_frame(unknown, cancel.stream_id))
            return
        self.admission.subscriber.cancel(running.request.id, running.request.model)  # its ending tells the rest

    def _leave(self) -> None:
        self._closed = True
        with self._lock:
            self._pending.clear()
        if (running := self._running) is not None:
            running.break_off(RequestFailed("The client went away.", code="client_gone"))
            self.admission.subscriber.close(running)

    # --- answering

    def _answer_all(self) -> None:
        while True:
            with self._lock:
                if self._closed or not self._pending:
                    self._answering = False
                    return
                asked = self._pending.popleft()
            try:
                self._answer(asked)
            except ForebayError as refused:
                self._send_quietly(responses.error_frame(refused, asked.stream_id))
            except (simple_websocket.ConnectionClosed, OSError):
                log.debug("answer_unheard")
            except Exception:  # the outermost edge of this greenlet: the connection must learn of it
                log.exception("answer_failed")
                self._send_quietly(responses.error_frame(ForebayError(), asked.stream_id))

    def _answer(self, asked: Create | Resume) -> None:
        if isinstance(asked, Resume):
            stream, framing = resumed(self.admission, self.caller, asked.response_id, asked.starting_after)
            self._show(stream, events(stream, framing), asked.stream_id)
        elif asked.generate:
            draft = msgspec.structs.replace(asked.draft, linger_ms=self.linger_ms)
            admitted = self.admission.admit(self.caller, draft, "websocket")
            framing = ResponsesFraming(admitted.stream.request.id, draft)
            self._show(admitted.stream, events(admitted.stream, framing), asked.stream_id)
        else:
            self._warm(asked)

    def _show(self, stream: Stream, said: Iterator[Any], stream_id: str | None) -> None:
        self._running = stream
        try:
            if self._closed:
                return
            for event in said:
                if not isinstance(event, Comment):  # sockets are kept by their pings
                    self._send(event, stream_id)
        finally:
            self._running = None
            self.admission.release(stream)

    def _warm(self, create: Create) -> None:
        """`generate: false`: a response without output, which clients send first to open the way."""
        request_id = new_id()
        for event in ResponsesAnswer(request_id, create.draft, created_s(request_id)).warmed():
            self._send(event, create.stream_id)

    def _send(self, event: dict[str, Any], stream_id: str | None = None) -> None:
        named = event if stream_id is None else {**event, "stream_id": stream_id}
        self.ws.send(orjson.dumps(named).decode())

    def _send_quietly(self, event: dict[str, Any]) -> None:
        try:
            self._send(event)
        except (simple_websocket.ConnectionClosed, OSError):
            log.debug("answer_unheard")
