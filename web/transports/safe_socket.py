"""WebSocket servers that send whole frames.

simple-websocket 1.1 calls `send` once and ignores a partial write, so under gevent a slow reader gets torn frames
(miguelgrinberg/simple-websocket#45); its reader thread and its handler may also write at the same time. Here every
write is whole, one at a time, and within SEND_S: a reader that takes nothing for so long is dropped.
"""

from __future__ import annotations

import threading
from typing import Any

import gevent
import simple_websocket

#: How long a client may take to read one frame, seconds.
SEND_S = 30.0


class WholeSocket:
    """A socket whose `send` sends everything, or raises."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock
        self._lock = threading.RLock()

    def send(self, data: bytes) -> int:
        with self._lock, gevent.Timeout(SEND_S, ConnectionError("the client does not read")):
            self._sock.sendall(data)
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


class Server(simple_websocket.Server):  # type: ignore[misc]
    """A WebSocket over a WholeSocket, without compression: text deltas gain nothing, each socket would cost 75 kB,
    and a small frame could inflate to a large one."""

    def __init__(self, environ: dict[str, Any], **options: Any) -> None:
        plain = {name: value for name, value in environ.items() if name != "HTTP_SEC_WEBSOCKET_EXTENSIONS"}
        plain["gunicorn.socket"] = WholeSocket(environ["gunicorn.socket"])
        super().__init__(plain, **options)
