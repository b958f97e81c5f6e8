"""The server's end of one WebSocket, on gevent: whole frames, within bounds, and a goodbye that arrives.

It stands where simple-websocket's does under flask-sock, whose `send` ignores a partial write, so that a slow reader
gets torn frames (miguelgrinberg/simple-websocket#45), and which keeps two greenlets and a selector for each socket.
Here whoever calls `receive` reads; nothing is read ahead of what is handled, beyond one reading's worth.

Slow readers   A frame is written by whoever sends it, one at a time. While the client reads nothing its senders wait,
               and a stream's texts are merged meanwhile (web/stream.py), so what is held for one client is a frame for
               each lane and OUTBOX_BYTES in the kernel. After SEND_S without a byte taken the client is dropped.
Goodbyes       After our close frame what still comes is read and thrown away until the client's own, or CLOSE_S: a
               socket that is closed over unread bytes resets, and the client might never see the code.
Compression    is not offered: text deltas gain nothing, each socket would cost 75 kB, and a small frame could inflate
               to a large one.
"""

from __future__ import annotations

import base64
import binascii
import io
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import gevent
from gevent.lock import BoundedSemaphore
from simple_websocket import ConnectionClosed
from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Ping, TextMessage
from wsproto.utilities import LocalProtocolError, generate_accept_token

from core.telemetry import logs

log = logs.get(__name__)

#: How long a client may take nothing of what is sent to it, seconds, if the settings do not say.
SEND_S = 30.0
#: What the kernel may hold for one client. (It takes twice that, and its own bound if that is less.)
OUTBOX_BYTES = 2**18
#: How long a client may take to say goodbye, seconds.
CLOSE_S = 2.0
#: A client is pinged this often; one that was silent for two more of them is sent away, seconds.
PING_S = 25.0

#: Where the environment of a handshake may say what id its answer has.
REQUEST_ID = "forebay.request_id"

NORMAL, GOING_AWAY, ABNORMAL = 1000, 1001, 1006
POLICY, TOO_BIG, INTERNAL, RESTART, TRY_LATER = 1008, 1009, 1011, 1012, 1013

_TEXT, _BINARY = 0x81, 0x82  #: first byte of a whole message in one frame


class Server:
    """One connection after its handshake."""

    mode = "gunicorn"  #: flask-sock asks: whose socket it is

    def __init__(
        self,
        environ: dict[str, Any],
        *,
        subprotocols: Sequence[str] = (),
        receive_bytes: int = 65_536,
        message_bytes_max: int = 4 * 2**20,
        send_s: float = SEND_S,
    ) -> None:
        """Answer the handshake. The first of `subprotocols` that the client offers is chosen. `send_s`: how long the
        client may take nothing."""
        self._sock = environ["gunicorn.socket"]
        self._receive_bytes, self._message_bytes_max, self._send_s = receive_bytes, message_bytes_max, send_s
        self._parser = Connection(ConnectionType.SERVER)
        self._events: Iterator[Any] = iter(())  #: read and not looked at yet
        self._parts: io.StringIO | io.BytesIO | None = None  #: of a message in several frames
        self._size_bytes = 0  #: of the message that is being read
        self._writing = BoundedSemaphore(1)
        self._goodbye: bytes | None = None  #: a close frame that waits for the frame before it
        self._timer: Any = None
        self.closing = False  #: one side has said goodbye, or is gone
        self.close_code, self.close_reason = ABNORMAL, ""
        self._heard_s = time.monotonic()
        self._pinged_s, self._ping_due_s, self._unanswered = float("-inf"), self._heard_s + PING_S, 0
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, OUTBOX_BYTES)
        try:
            self._write(_accepted(environ, subprotocols))
        except ConnectionClosed:
            log.debug("handshake_unheard")  # `receive` tells it

    # --- reading

    def receive(self) -> str | bytes:
        """The next message. What follows it in the same bytes is looked at after it was handled.

        Raises:
          ConnectionClosed: by either side.
        """
        while True:
            for event in self._events:
                if (message := self._handle(event)) is not None:
                    return message
            self._read()

    def _read(self) -> None:
        try:
            data = self._sock.recv(self._receive_bytes)
        except OSError:
            data = b""
        self._heard_s = time.monotonic()
        if not data or self._parser.state in (ConnectionState.CLOSED, ConnectionState.REMOTE_CLOSING):
            self._end()
        self._parser.receive_data(data)
        self._events = self._parser.events()

    def _handle(self, event: Any) -> str | bytes | None:
        """What a frame means. A message, if it is the last of one."""
        match event:
            case CloseConnection():
                self._part(event)
            case _ if self.closing:
                pass
            case TextMessage() | BytesMessage():
                return self._take(event)
            case Ping():
                self._write(self._parser.send(event.response()))
        return None

    def _take(self, event: TextMessage | BytesMessage) -> str | bytes | None:
        """A message, or a part of one."""
        data: Any = event.data
        self._size_bytes += len(data) if isinstance(data, bytes | bytearray) or data.isascii() else len(data.encode())
        if self._size_bytes > self._message_bytes_max:
            self.close(TOO_BIG, f"a message has at most {self._message_bytes_max} bytes")
            return None
        if self._parts is None and event.message_finished:
            message = data
        else:
            self._parts = self._parts or (io.StringIO() if isinstance(data, str) else io.BytesIO())
            self._parts.write(data)
            if not event.message_finished:
                return None
            message = self._parts.getvalue()
        self._parts, self._size_bytes = None, 0
        return message if isinstance(message, str) else bytes(message)

    def _part(self, event: CloseConnection) -> None:
        """The client's goodbye, or a fault in what it sent, which wsproto tells in the same words."""
        if self._parser.state is ConnectionState.OPEN:
            self.close(event.code, event.reason or "")
            return
        if not self.closing:
            self.close_code, self.close_reason, self.closing = event.code, event.reason or "", True
            if self._writing.acquire(blocking=False):  # else it says goodbye in the middle of a frame
                self._goodbye = self._parser.send(event.response())
                self._release()
        self._end()

    def _end(self) -> NoReturn:
        self.closing = True
        if self._timer is not None:
            self._timer.kill(block=False)
        raise ConnectionClosed(self.close_code, self.close_reason)

    # --- writing

    def send(self, data: str | bytes) -> None:
        """One message, whole. Waits while the client reads nothing.

        Raises:
          ConnectionClosed: it cannot be sent.
        """
        payload, kind = (data.encode(), _TEXT) if isinstance(data, str) else (data, _BINARY)
        self._write(_frame(kind, payload))

    def close(self, code: int = NORMAL, reason: str = "") -> None:
        """Say goodbye, after the frame that is being sent. Never waits: a client that does not take it is dropped."""
        if self.closing:
            return
        self.closing, self.close_code, self.close_reason = True, code, reason
        try:
            self._goodbye = self._parser.send(CloseConnection(code, reason))
        except LocalProtocolError:
            log.debug("closed_already")
        self._timer = gevent.spawn_later(CLOSE_S, self.drop)
        if self._writing.acquire(blocking=False):
            self._release()

    def drop(self, *, reset: bool = False) -> None:
        """Let go of the connection. Whoever reads or writes learns of it. With `reset`, what the kernel still holds
        for the client is forgotten."""
        self.closing = True
        try:
            if reset:
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            log.debug("dropped_already")

    def tend(self, now_s: float) -> None:
        """Ping, or send away who does not answer. Called now and then; never waits."""
        if self.closing or now_s < self._ping_due_s:
            return
        self._unanswered = 0 if self._heard_s >= self._pinged_s else self._unanswered + 1
        self._pinged_s, self._ping_due_s = now_s, now_s + PING_S
        if self._unanswered >= 2:
            self.close(TRY_LATER, "pings were not answered")
        elif self._writing.acquire(blocking=False):  # else something is on its way, and its sender waits for it
            try:
                self._say_last(self._parser.send(Ping()))
            except (LocalProtocolError, OSError):
                log.debug("ping_unsent")
            finally:
                self._release()

    def _write(self, data: bytes) -> None:
        self._writing.acquire()
        try:
            if self.closing:
                raise ConnectionClosed(self.close_code, self.close_reason)
            self._push(memoryview(data))
        finally:
            self._release()

    def _release(self) -> None:
        """Let the next one write: first a goodbye that waits."""
        goodbye, self._goodbye = self._goodbye, None
        if goodbye is not None:
            try:
                self._say_last(goodbye)
            except OSError:
                self.drop()
        self._writing.release()

    def _push(self, left: memoryview) -> None:
        while left:
            try:
                sent = self._sock.send(left, 0, 0.0)
            except BlockingIOError:
                sent = self._wait_and_send(left)
            except OSError as e:
                self._lose(e)
            left = left[sent:]

    def _wait_and_send(self, left: memoryview) -> int:
        waits = gevent.Timeout(self._send_s)
        with waits:
            try:
                sent: int = self._sock.send(left)
                return sent
            except OSError as e:
                self._lose(e)
            except gevent.Timeout as timeout:
                if timeout is not waits:
                    raise
        log.info("client_stuck", left_bytes=len(left))
        self.close_code, self.close_reason = TRY_LATER, "the client does not read"
        self.drop(reset=True)
        raise ConnectionClosed(self.close_code, self.close_reason)

    def _lose(self, error: OSError) -> NoReturn:
        """The connection is gone."""
        self.drop()
        raise ConnectionClosed(self.close_code, self.close_reason) from error

    def _say_last(self, frame: bytes) -> None:
        """A control frame, at once or not at all: half of one would be no frame."""
        if self._sock.send(frame, 0, 0.0) != len(frame):
            self.drop()


def is_key(key: str) -> bool:
    """Whether a `Sec-WebSocket-Key` is one."""
    try:
        return len(base64.b64decode(key, validate=True)) == 16
    except (binascii.Error, ValueError):
        return False


def offered(environ: dict[str, Any]) -> list[str]:
    """The subprotocols that a client offers, in its order."""
    names = str(environ.get("HTTP_SEC_WEBSOCKET_PROTOCOL", "")).split(",")
    return [name.strip() for name in names if name.strip()]


def _accepted(environ: dict[str, Any], subprotocols: Sequence[str]) -> bytes:
    token = generate_accept_token(str(environ["HTTP_SEC_WEBSOCKET_KEY"]).encode()).decode()
    chosen = next((name for name in offered(environ) if name in subprotocols), None)
    more = f"Sec-WebSocket-Protocol: {chosen}\r\n" if chosen else ""
    more += f"x-request-id: {environ[REQUEST_ID]}\r\n" if REQUEST_ID in environ else ""
    upgrade = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    return f"{upgrade}Sec-WebSocket-Accept: {token}\r\n{more}\r\n".encode()


def _frame(kind: int, payload: bytes) -> bytes:
    """A message in one frame. wsproto's own way takes five times as long, and there is one for every token."""
    size = len(payload)
    if size < 126:
        return bytes((kind, size)) + payload
    if size < 65_536:
        return struct.pack("!BBH", kind, 126, size) + payload
    return struct.pack("!BBQ", kind, 127, size) + payload
