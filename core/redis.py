"""The door to Redis or Valkey: Calls, the scripts they run, and clients by use.

A `Call` is one exchange that has not happened yet. Contracts build Calls; `Store` (threads, gevent) and
`AsyncStore` (asyncio) run the same ones, one by one or many in a pipeline, so that nothing is written twice.

Every Lua script starts with the clock: `now_ms()` is the store's own time, and the only time any script knows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import redis
import redis.asyncio
from redis.backoff import ConstantBackoff, NoBackoff
from redis.exceptions import (
    ClusterDownError,
    MasterDownError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
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

#: The store's clock, in front of every script. Tests put one in its place that reads a key.
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


def scripts(folder: Path, *, shared: Sequence[str], verbs: Sequence[str]) -> dict[str, Script]:
    """Each verb's script: the shared files in front, in order, then the verb's own."""
    common = "".join((folder / f"{name}.lua").read_text() for name in shared)
    return {verb: Script(verb, common + (folder / f"{verb}.lua").read_text()) for verb in verbs}


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

    def __init__(self, client: redis.Redis, *, clock: str = CLOCK) -> None:
        self.client = client
        self.loaded = _Loaded(clock)

    @classmethod
    def connect(cls, url: str, *, clock: str = CLOCK) -> Store:
        retry = Retry(ConstantBackoff(0.05), 1, supported_errors=(RedisConnectionError,))
        pool = redis.BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=EXCHANGE_S,
            socket_timeout=EXCHANGE_S,
            socket_connect_timeout=CONNECT_S,
            retry=retry,
        )
        return cls(redis.Redis(connection_pool=pool), clock=clock)

    def run(self, call: Call[T]) -> T:
        try:
            raw = self.client.execute_command(*call.words(self.loaded.sha(call.script)))
        except NoScriptError:
            assert call.script is not None
            raw = self.client.eval(self.loaded.source(call.script), len(call.keys), *call.keys, *call.args)
        return call.reply(raw)

    def run_all(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Run Calls in one round trip; the first error is raised. Not atomic, and in order only for plain commands: a
        script that the store does not know yet runs after the others."""
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
        self.client.connection_pool.disconnect()


class AsyncStore:
    """Runs the same Calls on an asyncio client."""

    def __init__(self, client: redis.asyncio.Redis, *, clock: str = CLOCK) -> None:
        self.client = client
        self.loaded = _Loaded(clock)

    @classmethod
    def connect(cls, url: str, *, clock: str = CLOCK, timeout_s: float = EXCHANGE_S) -> AsyncStore:
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
        try:
            raw = await self.client.execute_command(*call.words(self.loaded.sha(call.script)))
        except NoScriptError:
            assert call.script is not None
            raw = await self.client.eval(self.loaded.source(call.script), len(call.keys), *call.keys, *call.args)
        return call.reply(raw)

    async def run_all(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """As Store.run_all."""
        pipe = self.client.pipeline(transaction=False)
        for call in calls:
            pipe.execute_command(*call.words(self.loaded.sha(call.script)))
        replies = await pipe.execute(raise_on_error=False)
        return [
            await self.run(call) if isinstance(raw, NoScriptError) else call.reply(_raised(raw))
            for call, raw in zip(calls, replies, strict=True)
        ]

    async def close(self) -> None:
        await self.client.aclose()
        await self.client.connection_pool.disconnect()


def listener(url: str) -> redis.Redis:
    """A synchronous client for one subscription: no silent retry, and a server that says nothing at all is away."""
    retry = Retry(NoBackoff(), 0)
    return redis.Redis.from_url(url, socket_connect_timeout=CONNECT_S, socket_timeout=LISTEN_S, retry=retry)


def _raised(raw: Any) -> Any:
    if isinstance(raw, Exception):
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
    OSError,
)
