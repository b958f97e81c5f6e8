"""gunicorn's worker, with our own manners: what it refuses before Flask sees it is told in JSON too.

Imported before gevent has patched anything, so it imports nothing that opens a socket.
"""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import gevent
import uuid6
from gunicorn import util
from gunicorn.http import errors as faults
from gunicorn.workers.ggevent import GeventWorker

from core.errors import AddressTooLong, BadFraming, ForebayError, HeadersTooLarge

#: Where the environ has what closes the connection after the answer.
CLOSE = "forebay.close"


#: How long a connection that we close is still read from, seconds.
LINGER_S = 2.0


class Client:
    """A client's socket that sends at the first try what fits, which a token always does.

    gevent's own `sendall` asks the kernel for the size of its buffer each time: one more system call for every token.
    """

    def __init__(self, sock: Any) -> None:
        self._sock, self._send = sock, sock._sock.send

    def send_now(self, data: bytes, flags: int = 0) -> int:
        """Send what fits, without waiting: how many bytes that was."""
        try:
            sent: int = self._send(data, flags)
        except BlockingIOError:
            return 0
        return sent

    def sendall(self, data: bytes, flags: int = 0) -> None:
        sent = self.send_now(data, flags)
        if sent < len(data):
            self._sock.sendall(memoryview(data)[sent:], flags)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


class Worker(GeventWorker):  # type: ignore[misc]
    """A gevent worker that speaks JSON, and lets go of clients that read no more."""

    stalled_s: float
    told_to_end = False

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Go on to listen while what runs comes to its end, so that whoever comes is told to go elsewhere: gunicorn
        would stop within a second. Who drains (web/serve.py) ends the process."""
        self.told_to_end = True

    def handle(self, listener: Any, client: Any, addr: Any) -> None:
        if client.family in (socket.AF_INET, socket.AF_INET6):
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # each event leaves by itself
            # The kernel ends a connection whose peer is gone, or has taken nothing for so long; the watch sees it.
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self.stalled_s * 1000))
        super().handle(listener, Client(client), addr)

    def handle_request(self, listener_name: Any, req: Any, sock: Any, addr: Any) -> Any:
        try:
            return super().handle_request(listener_name, req, sock, addr)
        except StopIteration:  # this connection is used no more
            if not any(name == "UPGRADE" for name, _ in req.headers):
                linger(sock)
            raise
        except TimeoutError as e:  # gunicorn would log all of its trace
            raise ConnectionResetError(errno.ECONNRESET, "the client took nothing") from e

    def handle_error(self, req: Any, client: Any, addr: Any, exc: BaseException) -> None:
        """Of a request that is not HTTP as we know it, and so has not reached the application."""
        if not isinstance(exc, Exception):
            return  # a greenlet that is told to end
        error = told(exc)
        if error.status >= 500:
            self.log.error("Error handling a request: %r", exc)
        try:
            util.write_nonblock(client, answer(error))
        except OSError:
            self.log.debug("Failed to send error message.")
        linger(client)


def linger(client: Any) -> None:
    """Read on for a moment what the client still sends: closed with something unread, a connection is reset, and the
    client loses the answer that it has not read yet."""
    try:
        client.shutdown(socket.SHUT_WR)
        with gevent.Timeout(LINGER_S, False):
            while client.recv(65536):
                pass
    except OSError:
        return  # it has closed first


def worker(stalled_s: float) -> type[Worker]:
    """The class that gunicorn makes its workers of. `stalled_s`: how long a client may take nothing."""
    return type("Worker", (Worker,), {"stalled_s": stalled_s})


def told(exc: Exception) -> ForebayError:
    """What the client is told of a fault that gunicorn found."""
    match exc:
        case faults.LimitRequestHeaders():
            return HeadersTooLarge()
        case faults.LimitRequestLine():
            return AddressTooLong()
        case faults.ParseException() | faults.ConfigurationProblem():
            return BadFraming(f"The request is not well-formed HTTP ({type(exc).__name__}).")
        case _:
            return ForebayError()


def answer(error: ForebayError) -> bytes:
    """A whole HTTP response, for a connection that ends with it."""
    body = json.dumps({"error": error.envelope()}).encode()
    headers = {
        "Connection": "close",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "x-request-id": str(uuid6.uuid7()),
        "x-should-retry": "true" if error.retry else "false",
    }
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def closable(application: Callable[..., Any]) -> Callable[..., Any]:
    """Let the application close its connection: gunicorn takes no `Connection` header from it."""

    def called(environ: dict[str, Any], start_response: Any) -> Any:
        close = getattr(getattr(start_response, "__self__", None), "force_close", None)
        if close is not None:
            environ[CLOSE] = close
        return application(environ, start_response)

    return called
