"""A whole platform of real processes on the scripted engine, as `forebay up` would run it, under the tests' hand."""

from __future__ import annotations

import base64
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import requests
from openai import OpenAI

from billing import prices
from billing.credits import figures
from core import fleet, postgres
from core.accounts import keys, tenants
from core.limits import balances
from core.redis import Store, tag
from core.supervise import Death, Process, Supervisor
from core.values import Ending
from ops import stores
from tasks.queue import Queue

T = TypeVar("T")

MODEL = "scripted"
PEPPER = "a pepper for tests only"

#: One model with two workers, fast enough for a suite and slow enough that faults find it busy.
CATALOG = """
[models.scripted]
tokenizer = "bytes"
context_tokens = 4096
max_output_tokens = 256
slots = 32
workers = { min = 2, max = 2 }
[models.scripted.step]
base_ms = 4.0
sequence_ms = 0.0
prefill_ms = 0.0
"""


def until(ready: Callable[[], T], what: str, timeout_s: float = 20.0) -> T:
    """Wait for something to be true, and return it."""
    deadline = time.monotonic() + timeout_s
    while not (found := ready()):
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.02)
    return found


def soon(ready: Callable[[], object], what: str, within_s: float = 1.0) -> None:
    """Wait for what is promised within a second of a machine that runs: a look in which it stalled counts as one."""
    spent_s, look_s = 0.0, 0.05
    while not ready():
        assert spent_s < within_s, f"waited {within_s} s for {what}"
        began_s = time.monotonic()
        time.sleep(0.02)
        spent_s += min(time.monotonic() - began_s, look_s)


class Row(msgspec.Struct):
    """What tests look at of a request's row in the queue."""

    state: str
    attempt: int
    ending: Ending | None = None


@dataclass
class Platform:
    """The processes, and what tests look at."""

    data: Path
    redis_url: str
    database_url: str
    ports: tuple[int, ...]
    supervisor: Supervisor
    key: str = ""
    org_id: str = ""
    key_id: str = ""
    deaths: list[Death] = field(default_factory=list)
    open: list[Any] = field(default_factory=list)  #: clients and stores, to be closed at the end

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports[0]}"

    def client(self, gateway: int = 0, **options: Any) -> OpenAI:
        """A client of a gateway; closed with the platform."""
        base_url = f"http://127.0.0.1:{self.ports[gateway]}/v1"
        client = OpenAI(base_url=base_url, api_key=self.key, **{"max_retries": 0, **options})
        self.open.append(client)
        return client

    def post(self, path: str, body: Any = None, *, key: str | None = None, **options: Any) -> requests.Response:
        headers = {"Authorization": f"Bearer {self.key if key is None else key}"}
        return requests.post(self.url + path, json=body, headers=headers, timeout=20, **options)

    # --- the stores

    @cached_property
    def store(self) -> Store:
        store = Store.connect(self.redis_url)
        self.open.append(store)
        return store

    def usage_rows(self) -> list[dict[str, Any]]:
        engine = postgres.connect(self.database_url)
        try:
            with postgres.transaction(engine) as connection:
                rows = connection.execute(postgres.text("SELECT * FROM usage_events ORDER BY event_id")).mappings()
                return [dict(row) for row in rows]
        finally:
            engine.dispose()

    def usage_of(self, request_id: str) -> dict[str, Any]:
        """The one usage row of a request, once it is there."""
        rows = until(
            lambda: [r for r in self.usage_rows() if str(r["event_id"]) == request_id], f"usage of {request_id}"
        )
        assert len(rows) == 1
        return rows[0]

    def quiet(self) -> None:
        """Wait until nothing waits, runs or is held, and every ending is in Postgres."""
        store = self.store

        def nothing() -> bool:
            depth = store.run(Queue(MODEL).tick())
            left = store.client.xlen(tag(MODEL) + "usage")
            open_holds = store.client.zcard(tag(f"org:{self.org_id}") + "open")
            return not any(depth.waiting) and depth.running == 0 and left == 0 and open_holds == 0

        until(nothing, "the platform to be quiet", 30)

    def holds(self, org_id: str = "") -> list[str]:
        """Requests of an organisation whose holds are open."""
        found = self.store.client.zrange(tag(f"org:{org_id or self.org_id}") + "open", 0, -1)
        return [one.decode() for one in found]

    def money_agrees(self, org_id: str = "") -> bool:
        """Whether every lease of an organisation has spent, to the unit, what the ledger says, and holds nothing; once
        all is quiet it must."""
        engine, org_id = postgres.connect(self.database_url), org_id or self.org_id
        try:
            for scope in self.store.run(balances.leases(org_id)):
                account = self.store.run(balances.account(org_id, scope))
                with postgres.transaction(engine) as connection:
                    known = figures(connection, org_id, scope, datetime.now(UTC))
                if account is not None and (account.spent, account.held) != (known.spent, 0):
                    return False
            return True
        finally:
            engine.dispose()

    def rows(self) -> dict[str, Row]:
        """Every request's row in the queue."""
        found = self.store.client.hgetall(tag(MODEL) + "rows")
        return {name.decode(): msgspec.msgpack.decode(row, type=Row) for name, row in found.items()}

    def forgive(self) -> None:
        """Forget who failed to show a key: a test is not to pay for the one before it."""
        for name in self.store.client.scan_iter(tag("failures:*") + "times"):
            self.store.client.delete(name)

    # --- the processes

    def answers(self) -> bool:
        """Every gateway does."""
        try:
            return all(requests.get(f"http://127.0.0.1:{port}/health", timeout=2).ok for port in self.ports)
        except (requests.ConnectionError, requests.Timeout):
            return False

    def workers(self) -> list[fleet.Worker]:
        return [row for row in self.store.run(fleet.workers(MODEL)) if row.state == "ready"]

    def busy(self) -> list[fleet.Worker]:
        """Workers that have claims now; what they say of themselves is up to a second old."""
        having = {worker for worker, _ in self.claims()}
        return [row for row in self.workers() if row.worker in having]

    def claims(self) -> list[tuple[str, str]]:
        """Who runs what: worker, request."""
        found = self.store.client.zrange(tag(MODEL) + "claims", 0, -1)
        return [(worker, request_id) for worker, _, request_id in (claim.decode().rpartition("|") for claim in found)]

    def worker_running(self, request_id: str) -> psutil.Process:
        """The process that runs a request."""
        worker = next(worker for worker, claimed in self.claims() if claimed == request_id)
        return psutil.Process(int(worker.rpartition(":")[2]))

    def pid(self, name: str) -> int:
        return self.supervisor.pids()[name]


def free_ports(count: int) -> tuple[int, ...]:
    sockets = [socket.socket() for _ in range(count)]
    for sock in sockets:
        sock.bind(("127.0.0.1", 0))
    ports = tuple(int(sock.getsockname()[1]) for sock in sockets)
    for sock in sockets:
        sock.close()
    return ports


def start(
    data: Path,
    redis_url: str,
    database_url: str,
    *,
    catalog: str = CATALOG,
    gateways: int = 2,
    environ: Mapping[str, str] | None = None,
) -> Iterator[Platform]:
    """Run a platform: gateways, a host agent with its workers, the scaler's clock."""
    import threading

    postgres.migrate(database_url)
    path = data / "catalog.toml"
    path.write_text(catalog)
    ports = free_ports(gateways)
    platform = Platform(data, redis_url, database_url, ports, Supervisor(drain_s=5))
    platform.supervisor.died = platform.deaths.append
    base = {
        **{name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")},
        "REDIS_URL": redis_url,
        "DATABASE_URL": database_url,
        "FOREBAY_DATA": str(data),
        "FOREBAY_CATALOG": str(path),
        "FOREBAY_ENGINE": "scripted",
        "FOREBAY_PEPPER": PEPPER,
        "FOREBAY_SALT": "a salt for tests only",
        "FOREBAY_LEASE_MS": "2000",
        "FOREBAY_DRAIN_S": "5",
        "FOREBAY_LOST_S": "3",
        "FOREBAY_TICK_MS": "300",
        "FOREBAY_SUPERVISED": "1",
        "FOREBAY_PROXIES": "127.0.0.0/8",  # a test may come from wherever it says: failures are counted by address
        **(environ or {}),
    }
    _first_key(platform)
    for number, port in enumerate(ports):
        _keep(platform, f"web{number}", "web.serve", {**base, "FOREBAY_PORT": str(port)})
    _keep(platform, "host", "workers.host", base)
    _keep(platform, "scaler", "scaler.clock", base)
    tending = threading.Thread(target=platform.supervisor.run, daemon=True)
    tending.start()
    try:
        for port in ports:
            until(lambda port=port: _ready(port), f"the gateway on {port}", 60)
        yield platform
    finally:
        platform.supervisor.ending = True
        tending.join(30)
        for one in platform.open:
            one.close()


def alone(**options: Any) -> Iterator[Platform]:
    """The same, on stores of its own."""
    with tempfile.TemporaryDirectory(prefix="fb-", ignore_cleanup_errors=True) as folder:
        data = Path(folder)
        valkey, database = stores.start_valkey(data), stores.start_postgres(data)
        try:
            yield from start(data, valkey.url, database.url, **options)
        finally:
            stores.start_valkey(data).stop()  # the one that runs now: a law may have killed the first
            database.stop()


def handshake(platform: Platform, path: str = "/v1/responses", **changed: str | None) -> tuple[int, str]:
    """A WebSocket handshake by hand, with these headers; returns the status and all that was said."""
    headers: dict[str, str | None] = {
        "Host": f"127.0.0.1:{platform.ports[0]}",
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": base64.b64encode(os.urandom(16)).decode(),
        "Sec-WebSocket-Version": "13",
        "Authorization": f"Bearer {platform.key}",
        **{name.replace("_", "-"): value for name, value in changed.items()},
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items() if value is not None)
    with socket.create_connection(("127.0.0.1", platform.ports[0]), timeout=10) as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\n{lines}\r\n".encode())
        raw = b""
        while b"\r\n\r\n" not in raw or (b" 101 " not in raw[:20] and not raw.endswith(b"}\n")):
            more = sock.recv(65536)
            if not more:
                break
            raw += more
    return int(raw.split()[1]), raw.decode()


def _ready(port: int) -> bool:
    try:
        return requests.get(f"http://127.0.0.1:{port}/ready", timeout=2).status_code == 200
    except (requests.ConnectionError, requests.Timeout):
        return False


def _keep(platform: Platform, name: str, module: str, env: dict[str, str]) -> None:
    (platform.data / "logs").mkdir(exist_ok=True)
    log = platform.data / "logs" / f"{name}.log"
    platform.supervisor.keep(Process(name=name, argv=(sys.executable, "-m", module), env=env, log=log))


def _first_key(platform: Platform) -> None:
    engine = postgres.connect(platform.database_url)
    with postgres.transaction(engine) as connection:
        organisation = tenants.create_organisation(connection, "acme")
        project = tenants.create_project(connection, org_id=organisation.id, name="web")
        plain, row = keys.create_key(
            connection, org_id=organisation.id, project_id=project.id, name="test", pepper=PEPPER.encode()
        )
        price = prices.set_price(
            connection, MODEL, input_per_mtok=Decimal(1), output_per_mtok=Decimal(2), effective_from=datetime.now(UTC)
        )
    platform.store.run(prices.project([price]))
    platform.key, platform.key_id, platform.org_id = plain, row.id, organisation.id
    engine.dispose()


def kill(pid: int, how: signal.Signals = signal.SIGKILL) -> None:
    os.kill(pid, how)


def commands_environ(platform: Platform) -> dict[str, str]:
    """What tells the `forebay` command of the platform."""
    return {
        "REDIS_URL": platform.redis_url,
        "DATABASE_URL": platform.database_url,
        "FOREBAY_DATA": str(platform.data),
        "FOREBAY_CATALOG": str(platform.data / "catalog.toml"),
    }


def command(platform: Platform, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the `forebay` command against the platform."""
    env = {**os.environ, **commands_environ(platform)}
    return subprocess.run(
        [sys.executable, "-m", "ops.cli", *words], env=env, capture_output=True, text=True, timeout=60
    )
