"""The gateway process: gunicorn with gevent workers, one subscriber each, and a drain.

gunicorn patches the standard library in each worker before the application is imported, so nothing that opens a
socket is imported at the top of this file.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from gunicorn.app.base import BaseApplication

from core.settings import BadSettings, Settings, read

if TYPE_CHECKING:
    from flask import Flask

    from web.app import Gateway
    from web.dialects.draft import Message
    from web.render import Renderer

#: Connections that one process holds at once.
CONNECTIONS = 10_000
#: Characters of a prompt that are tokenized on the hub; longer ones go to a thread and leave streams alone.
SHORT_PROMPT = 2_000


class GatewayServer(BaseApplication):  # type: ignore[misc]
    """gunicorn, configured in code."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        super().__init__()

    def load_config(self) -> None:
        from web.transports.edge import worker

        settings = self.settings
        options = {
            "bind": f"{settings.bind}:{settings.port}",
            "worker_class": worker(settings.stalled_s),
            "workers": settings.web_processes,
            "worker_connections": CONNECTIONS,
            "graceful_timeout": int(settings.drain_s) + 5,
            "timeout": 60,
            "keepalive": 75,  # longer than a load balancer's idle time-out of 60 s
            "control_socket_disable": True,  # it lies under HOME, and a second instance would take it over
            "post_fork": _post_fork,
            "post_worker_init": _post_worker_init,
            "pre_request": _count_in,
            "post_request": _count_out,
            "accesslog": None,
            "proc_name": "forebay-web",
        }
        for name, value in options.items():
            self.cfg.set(name, value)

    def load(self) -> Flask:
        from web.app import create
        from web.transports.edge import closable

        gateway = build(self.settings)
        gateway.subscriber.start()
        gateway.backlog.start()
        gateway.stopping.start()
        if gateway.sightings is not None:
            gateway.sightings.start()
        app = create(gateway)
        app.wsgi_app = closable(app.wsgi_app)  # type: ignore[method-assign]
        return app


def build(settings: Settings) -> Gateway:
    """Wire a gateway's parts from the settings. Opens no connection."""
    from billing.credits import lease
    from core import catalog, postgres
    from core.accounts import keys
    from core.accounts.sightings import Sightings
    from core.redis import Store
    from tasks.queue import GATEWAY_LEASE_MS
    from web.admission import Admission, queue_bounds
    from web.app import Gateway
    from web.auth import Gate, networks
    from web.history import STATEMENT_MS
    from web.limiter import LIMITS_S, Limiter
    from web.render import for_model
    from web.subscriber import Subscriber

    models = catalog.load(settings.catalog).only(settings.models)
    store = Store.connect(settings.redis_url)
    limits = Store.connect(settings.limits_url, exchange_s=LIMITS_S) if settings.limits_url else store
    gateway_id = f"{socket.gethostname()[:24]}-{os.getpid()}-{secrets.token_hex(4)}"
    bounds = {name: queue_bounds(model) for name, model in models.items()}
    home_ms = GATEWAY_LEASE_MS + int(settings.lost_s * 1000)
    subscriber = Subscriber(
        store,
        settings.redis_url,
        models,
        gateway_id,
        bounds=bounds,
        home_ms=home_ms,
        keepalive_s=settings.keepalive_s,
    )
    accounts, pepper = postgres.connect(settings.database_url), keys.pepper(settings)
    sightings = Sightings(accounts, pepper)
    limiter = Limiter(
        limits,
        lease=partial(lease, accounts, limits),
        apart=limits is not store,
        gateways=lambda: max(store.run_all([queue.gateways() for queue in subscriber.queues.values()])),
    )
    renderers = {name: OffHub(for_model(model, settings.data)) for name, model in models.items()}
    return Gateway(
        catalog=models,
        store=store,
        gate=Gate(store, accounts, pepper, seen=sightings.seen),
        sightings=sightings,
        admission=Admission(
            models, store, subscriber, renderers, salt=salt(settings), off_hub=off_hub, limiter=limiter
        ),
        subscriber=subscriber,
        keepalive_s=settings.keepalive_s,
        upload_s=settings.upload_s,
        chat_keepalive=settings.chat_keepalive,
        chat_ids=settings.chat_ids,
        origins=frozenset(one.strip().rstrip("/").lower() for one in settings.origins.split(",") if one.strip()),
        key_sockets=settings.key_sockets,
        proxies=networks(settings.proxies),
        stalled_s=settings.stalled_s,
        database=postgres.connect(settings.database_url, statement_ms=STATEMENT_MS),
    )


def salt(settings: Settings) -> bytes:
    """The secret that cache salts are derived from."""
    return (settings.salt or (settings.secrets / "salt").read_text().strip()).encode()


class OffHub:
    """A renderer that does long work in gevent's thread pool, so that it stops no stream."""

    def __init__(self, renderer: Renderer) -> None:
        self.renderer = renderer
        self.vocabulary = renderer.vocabulary

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), template: Mapping[str, Any] = {}
    ) -> list[int]:
        from web.render import is_long

        long = is_long(SHORT_PROMPT, messages, tools, template)
        ids: list[int] = _done(long, self.renderer.render, messages, tools, template)
        return ids

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        ids: list[int] = _done(len(text) > SHORT_PROMPT, self.renderer.encode, text, special=special)
        return ids

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        text: str = _done(len(token_ids) > SHORT_PROMPT, self.renderer.decode, token_ids, special=special)
        return text

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        pieces: list[str] = _done(len(token_ids) > SHORT_PROMPT, self.renderer.pieces, token_ids)
        return pieces


def _done(long: bool, work: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Work on the spot, or off the hub where there is much of it."""
    return off_hub(partial(work, **options), *args) if long else work(*args, **options)


def off_hub(work: Callable[..., Any], *args: Any) -> Any:
    """In gevent's thread pool: it holds the GIL there too, but lets go of it every few milliseconds."""
    import gevent

    return gevent.get_hub().threadpool.apply(work, args)


def _post_fork(server: Any, worker: Any) -> None:
    from core import postgres

    postgres.cooperate()


def _post_worker_init(worker: Any) -> None:
    """Begin the drain as soon as we are told to: gunicorn would let sockets hang until its time-out, then cut them."""

    def drain_when_told() -> None:
        while worker.alive and not worker.told_to_end:
            time.sleep(0.1)
        drain(worker.wsgi.extensions["forebay"], worker.cfg.graceful_timeout - 5, lambda: worker.active)
        # Only idle keep-alive connections are left, for which gunicorn would wait until its time-out.
        os.kill(os.getpid(), signal.SIGQUIT)

    worker.active = 0
    threading.Thread(target=drain_when_told, name="drain", daemon=True).start()


def _count_in(worker: Any, request: Any) -> None:
    worker.active += 1


def _count_out(worker: Any, request: Any, environ: Any, response: Any) -> None:
    worker.active -= 1


def drain(gateway: Gateway, limit_s: float, active: Callable[[], int]) -> None:
    """Take nothing new; say goodbye to idle sockets at once, to others when their answer is out or time is up.

    Returns when no request is active, or when time is up. What is still open then is not cancelled: it goes on, and its
    client may come back for it at another gateway for a while.
    """
    from web.transports.safe_socket import GOING_AWAY, RESTART

    gateway.admission.draining = True
    deadline = time.monotonic() + limit_s
    while active() and time.monotonic() < deadline:
        for sock in [sock for sock in list(gateway.sockets) if sock.idle]:
            sock.close(GOING_AWAY, "this gateway is shutting down")
        time.sleep(0.1)
    gateway.subscriber.leaving = True
    for sock in list(gateway.sockets):
        sock.close(GOING_AWAY if sock.idle else RESTART, "this gateway is shutting down")


def main() -> None:
    from core.telemetry import logs

    try:
        settings = read(os.environ)
    except BadSettings as e:
        sys.exit(str(e))
    logs.set_up("web", settings.log_level)
    if settings.supervised:
        from core.supervise import follow_parent

        follow_parent()
    GatewayServer(settings).run()


if __name__ == "__main__":
    main()
