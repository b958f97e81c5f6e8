"""The door to Redis or Valkey: Calls, the scripts they run, and clients by use.

A `Call` is one exchange that has not happened yet. Contracts build Calls; `Store` (threads, gevent) and
`AsyncStore` (asyncio) run the same ones, one by one or many in a pipeline, so that nothing is written twice.

Every Lua script starts with the clock: `now_ms()` is the store's own time, and the only time any script knows.

A URL that begins `redis+cluster://` (with TLS: `rediss+cluster://`) is a cluster's: one or more of its nodes, separated
by commas; the others are learned from those. Each Call has its keys in one slot (`tag`), and a pipeline goes to each
node for itself. Channels are the classic ones, which a cluster carries to every node.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import redis
import redis.asyncio
import redis.asyncio.cluster
import redis.cluster
from redis.backoff import ConstantBackoff, NoBackoff
from redis.exceptions import (
    AskError,
    ClusterDownError,
    ClusterError,
    MasterDownError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    SlotNotCoveredError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

__all__ = [
    "AWAY",
    "AsyncStore",
    "Call",
    "NOW_MS",
    "RedisConnectionError",
    "RedisError",
    "RedisTimeoutError",
    "Script",
    "Store",
    "VERSION",
    "command",
    "scripts",
    "tag",
]

T = TypeVar("T")

#: Version of every key's layout. It is part of each key, so that two layouts never meet in one key.
VERSION = "f1"

#: The store's clock, in front of every script. Tests put one in its place that takes the time from the call.
CLOCK = """local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end
"""

#: How long one exchange may take before the store counts as away, seconds. Blocking commands add their own wait.
EXCHANGE_S = 0.8
CONNECT_S = 0.4
#: How long a new subscription may take, seconds. Waiting for messages is bounded by the waits themselves.
LISTEN_S = 5.0
#: Connections per process. Waiting for one is bounded by EXCHANGE_S.
CONNECTIONS = 64


def tag(name: str) -> str:
    """The prefix of every key of one model or organisation: a Redis Cluster keeps them in one slot."""
    return f"{VERSION}:{{{name}}}:"


@dataclass(frozen=True)
class Script:
    """A Lua script without its clock."""

    name: str
    body: str


def scripts(folder: Path, *, shared: Sequence[str], verbs: Sequence[str], last: str = "") -> dict[str, Script]:
    """Each verb's script: the shared files in front, in order, then the verb's own. `last`: Lua that runs after it,
    whichever way it returns."""
    common = "".join((folder / f"{name}.lua").read_text() for name in shared)
    around = ("local function verb()\n", f"end\nlocal reply = verb()\n{last}\nreturn reply\n") if last else ("", "")
    return {verb: Script(verb, common + (folder / f"{verb}.lua").read_text().join(around)) for verb in verbs}


@dataclass(frozen=True, kw_only=True)
class Call(Generic[T]):
    """One exchange with the store: a script with its keys, or a plain command."""

    reply: Callable[[Any], T]  #: raw reply -> our value
    script: Script | None = None
    keys: tuple[str, ...] = ()
    args: tuple[Any, ...] = ()

    def words(self, sha: str) -> tuple[Any, ...]:
        if self.script is None:
            return self.args
        return ("EVALSHA", sha, len(self.keys), *self.keys, *self.args)


def command(*words: Any, reply: Callable[[Any], T]) -> Call[T]:
    """A plain command as a Call."""
    return Call(args=words, reply=reply)


def _time_ms(raw: Sequence[int]) -> int:
    return int(raw[0]) * 1000 + int(raw[1]) // 1000


#: The store's time, ms since the epoch.
NOW_MS = command("TIME", reply=_time_ms)


@dataclass
class _Loaded:
    """The sources of the scripts with this store's clock in front, by hash."""

    clock: str = CLOCK
    #: by identity, since hashing a body each time would cost more than the exchange; the script is held, or another
    #: might get its place in memory.
    shas: dict[int, tuple[Script, str]] = field(default_factory=dict)

    def source(self, script: Script) -> str:
        return self.clock + script.body

    def sha(self, script: Script | None) -> str:
        if script is None:
            return ""
        known = self.shas.get(id(script))
        if known is None:
            sha = hashlib.sha1(self.source(script).encode(), usedforsecurity=False).hexdigest()
            known = self.shas[id(script)] = (script, sha)
        return known[1]


class Store:
    """Runs Calls on a synchronous client. Every script of ours may be repeated, so one lost connection is retried."""

    def __init__(self, client: redis.Redis | _Cluster, *, clock: str = CLOCK) -> None:
        self.client: Any = client
        self.loaded = _Loaded(clock)

    @classmethod
    def connect(cls, url: str, *, clock: str = CLOCK, exchange_s: float = EXCHANGE_S) -> Store:
        """`exchange_s`: how long an exchange may take, and a connection be tried for; waiting for one that is in use
        comes on top."""
        if "+cluster://" in url:
            return cls(_Cluster(url, exchange_s), clock=clock)
        retry = Retry(ConstantBackoff(0.05), 1, supported_errors=(RedisConnectionError,))
        pool = redis.BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=EXCHANGE_S,
            socket_timeout=exchange_s,
            socket_connect_timeout=min(exchange_s, CONNECT_S),
            retry=retry,
            driver_info=None,  # redis-py would look its own version up on the disk for each connection
        )
        pool.connection_class = _QUICK.get(pool.connection_class, pool.connection_class)
        return cls(redis.Redis(connection_pool=pool), clock=clock)

    def run(self, call: Call[T]) -> T:
        with _told_plainly():
            try:
                raw = self.client.execute_command(*call.words(self.loaded.sha(call.script)))
            except NoScriptError:
                assert call.script is not None
                raw = self.client.eval(self.loaded.source(call.script), len(call.keys), *call.keys, *call.args)
        return call.reply(raw)

    def run_all(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Run Calls in one round trip; the first error is raised. Not atomic, and in order only for plain commands: a
        script that the store does not know yet runs after the others."""
        with _told_plainly():
            pipe = self.client.pipeline(transaction=False)
            for call in calls:
                pipe.execute_command(*call.words(self.loaded.sha(call.script)))
            replies = pipe.execute(raise_on_error=False)
        return [
            self.run(call) if isinstance(raw, NoScriptError) else call.reply(_raised(raw))
            for call, raw in zip(calls, replies, strict=True)
        ]

    def close(self) -> None:
        self.client.close()
        if isinstance(self.client, redis.Redis):
            self.client.connection_pool.disconnect()


class _Quick(redis.connection.AbstractConnection):
    """A connection that is looked at without a poll when it is taken from the pool. gevent's costs more than the
    exchange itself."""

    def can_read(self, timeout: float = 0) -> bool:
        under = getattr(self._sock, "_sock", None)  # gevent's: a socket that never waits
        if under is not None and not timeout:
            try:
                under.recv(1, socket.MSG_PEEK)
            except BlockingIOError:
                return False  # it is open, and nothing came
        return bool(super().can_read(timeout))


class _QuickTcp(_Quick, redis.Connection):
    pass


class _QuickUnix(_Quick, redis.UnixDomainSocketConnection):
    pass


_QUICK: dict[Any, Any] = {redis.Connection: _QuickTcp, redis.UnixDomainSocketConnection: _QuickUnix}


class AsyncStore:
    """Runs the same Calls on an asyncio client."""

    def __init__(self, client: redis.asyncio.Redis | _AsyncCluster, *, clock: str = CLOCK) -> None:
        self.client: Any = client
        self.loaded = _Loaded(clock)

    @classmethod
    def connect(cls, url: str, *, clock: str = CLOCK, timeout_s: float = EXCHANGE_S) -> AsyncStore:
        if "+cluster://" in url:
            return cls(_async_cluster(url, timeout_s), clock=clock)
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url,
            max_connections=16,
            timeout=timeout_s,
            socket_timeout=timeout_s,
            socket_connect_timeout=CONNECT_S,
            retry=redis.asyncio.retry.Retry(NoBackoff(), 0),
        )
        return cls(redis.asyncio.Redis(connection_pool=pool), clock=clock)

    async def run(self, call: Call[T]) -> T:
        with _told_plainly(), _cancellable():
            try:
                raw = await self.client.execute_command(*call.words(self.loaded.sha(call.script)))
            except NoScriptError:
                assert call.script is not None
                raw = await self.client.eval(self.loaded.source(call.script), len(call.keys), *call.keys, *call.args)
        return call.reply(raw)

    async def run_all(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """As Store.run_all."""
        with _told_plainly(), _cancellable():
            pipe = self.client.pipeline(transaction=False)
            for call in calls:
                pipe.execute_command(*call.words(self.loaded.sha(call.script)))
            replies = await pipe.execute(raise_on_error=False)
        return [
            await self.run(call) if isinstance(raw, NoScriptError) else call.reply(_raised(raw))
            for call, raw in zip(calls, replies, strict=True)
        ]

    def pubsub(self) -> Any:
        """A subscription. On a cluster at one node, any: every node hears what is published at any."""
        client = _one_node(self.client) if isinstance(self.client, _AsyncCluster) else self.client
        return client.pubsub(ignore_subscribe_messages=True)

    async def close(self) -> None:
        await self.client.aclose()
        if isinstance(self.client, redis.asyncio.Redis):
            await self.client.connection_pool.disconnect()


# --- clusters


class _SyncCluster(redis.cluster.RedisCluster):
    """A lost connection is retried once, as on one node; a time-out is not."""

    ERRORS_ALLOW_RETRY: Any = (RedisConnectionError, ClusterDownError, SlotNotCoveredError)


class _AsyncCluster(redis.asyncio.cluster.RedisCluster):
    """Nothing is retried but what moved."""

    ERRORS_ALLOW_RETRY: Any = ()
    told: tuple[list[tuple[str, int]], dict[str, Any]]  #: the nodes that its URL named, and what else it said


class _Cluster:
    """A synchronous cluster client, made when it is first needed: making it asks the nodes, and they may be away."""

    def __init__(self, url: str, exchange_s: float = EXCHANGE_S) -> None:
        self._url, self._exchange_s, self._lock = url, exchange_s, threading.Lock()
        self._made: _SyncCluster | None = None
        self._tried_s = float("-inf")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made or self._make_once(), name)

    def _make_once(self) -> _SyncCluster:
        """Whoever waits for another's try shares what comes of it: a thousand tries in a row would take minutes."""
        began_s = time.monotonic()
        with self._lock:
            if self._made is None:
                if self._tried_s > began_s:
                    raise RedisConnectionError("no node of the cluster answers")
                try:
                    self._made = self._make()
                finally:
                    self._tried_s = time.monotonic()
            return self._made

    def _make(self) -> _SyncCluster:
        nodes, options = _nodes(self._url)
        return _SyncCluster(
            startup_nodes=[redis.cluster.ClusterNode(host, port) for host, port in nodes],
            retry=Retry(ConstantBackoff(0.05), 1),
            socket_timeout=self._exchange_s,
            socket_connect_timeout=min(self._exchange_s, CONNECT_S),
            require_full_coverage=False,  # the models of a node that is away are away, and no other
            max_connections=CONNECTIONS,
            **options,
        )

    def close(self) -> None:
        if self._made is not None:
            self._made.close()


def _async_cluster(url: str, timeout_s: float) -> _AsyncCluster:
    nodes, options = _nodes(url)
    client = _AsyncCluster(
        startup_nodes=[redis.asyncio.cluster.ClusterNode(host, port) for host, port in nodes],
        retry=redis.asyncio.retry.Retry(NoBackoff(), 0),
        socket_timeout=timeout_s,
        socket_connect_timeout=CONNECT_S,
        require_full_coverage=False,
        max_connections=CONNECTIONS,
        **options,
    )
    client.told = nodes, options
    return client


def _one_node(client: _AsyncCluster) -> redis.asyncio.Redis:
    """A client of one of its nodes, for one subscription: redis-py's own, of a cluster, begins only after a command."""
    nodes, options = client.told
    host, port = random.choice([(node.host, node.port) for node in client.get_primaries()] or nodes)
    retry = redis.asyncio.retry.Retry(NoBackoff(), 0)
    return redis.asyncio.Redis(
        host=host, port=int(port), socket_connect_timeout=CONNECT_S, socket_timeout=LISTEN_S, retry=retry, **options
    )


def _nodes(url: str) -> tuple[list[tuple[str, int]], dict[str, Any]]:
    """The nodes that a cluster's URL names, and what else it says."""
    scheme, _, rest = url.replace("+cluster", "").partition("://")
    named, slash, more = rest.partition("/")
    who, at, hosts = named.rpartition("@")
    options = [redis.connection.parse_url(f"{scheme}://{who}{at}{host}{slash}{more}") for host in hosts.split(",")]
    nodes = [(one.pop("host", "localhost"), one.pop("port", 6379)) for one in options]
    secure = options[0].pop("connection_class", None) is not None
    return nodes, {**options[0], **({"ssl": True} if secure else {})}


#: How errors begin by which a store says that it cannot write, or answer, for now.
_UNABLE = ("NOREPLICAS", "MISCONF", "BUSY ")


@contextmanager
def _cancellable() -> Iterator[None]:
    """redis-py sends with `asyncio.wait_for`, which before Python 3.12 may swallow a cancellation: the exchange ends as
    if nothing had been asked of its task (python/cpython#86296)."""
    task = asyncio.current_task()
    asked = task.cancelling() if task else 0
    try:
        yield
    finally:
        if task and task.cancelling() > asked:
            raise asyncio.CancelledError


@contextmanager
def _told_plainly() -> Iterator[None]:
    """A cluster none of whose nodes answers is a store that is away, and so is one that cannot do what it is asked for
    now: it has lost its replicas, its disk, or runs somebody's script. redis-py has no errors of its own for these."""
    try:
        yield
    except RedisClusterException as e:
        if isinstance(e, SlotNotCoveredError) or "cannot be connected" in str(e):
            raise RedisConnectionError(str(e)) from e
        raise
    except ResponseError as e:
        if str(e).startswith(_UNABLE):
            raise RedisConnectionError(str(e)) from e
        raise


def listener(url: str) -> redis.Redis:
    """A synchronous client for one subscription: no silent retry, and a server that says nothing at all is away.

    Of a cluster it is one node, any: every node hears what is published at any.
    """
    # RESP2: of what is pushed in RESP3 redis-py writes a description for its log, heard or not.
    told: dict[str, Any] = {
        "socket_connect_timeout": CONNECT_S,
        "socket_timeout": LISTEN_S,
        "retry": Retry(NoBackoff(), 0),
        "driver_info": None,
        "protocol": 2,
    }
    if "+cluster://" in url:
        nodes, options = _nodes(url)
        host, port = random.choice(nodes)
        return redis.Redis(host=host, port=port, **(told | options))
    return redis.Redis.from_url(url, **told)


def _raised(raw: Any) -> Any:
    if isinstance(raw, Exception):
        with _told_plainly():
            raise raw
    return raw


#: What "the store is away" looks like, as opposed to a refused command. A store that cannot write is away too: it has
#: failed over, is full, or has lost its primary.
AWAY = (
    RedisConnectionError,
    RedisTimeoutError,
    ReadOnlyError,
    OutOfMemoryError,
    MasterDownError,
    ClusterDownError,
    ClusterError,
    TryAgainError,
    AskError,  # and MovedError: a slot that moves on and on
    OSError,
)
