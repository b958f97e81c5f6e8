"""An echo of our own WebSocket class under our own server's configuration, for the Autobahn cases. For tests only."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

from core.settings import Settings
from web.serve import GatewayServer

#: The largest message that the cases send, bytes; ours is less, and has a test of its own.
MESSAGE_BYTES_MAX = 32 * 2**20


class EchoServer(GatewayServer):
    """The gateway's server with another application in it."""

    def load(self) -> Any:
        import flask_sock
        from flask import Flask

        from web.transports import safe_socket

        app = Flask("echo")
        app.config["SOCK_SERVER_OPTIONS"] = {"message_bytes_max": MESSAGE_BYTES_MAX}
        # What the drain looks at.
        app.extensions["forebay"] = SimpleNamespace(
            admission=SimpleNamespace(), subscriber=SimpleNamespace(), sockets=set()
        )
        flask_sock.Server = safe_socket.Server
        flask_sock.Sock(app).route("/")(_echo)
        return app


def _echo(ws: Any) -> None:
    while True:
        ws.send(ws.receive())


if __name__ == "__main__":
    EchoServer(Settings(port=int(sys.argv[1]), drain_s=1)).run()
