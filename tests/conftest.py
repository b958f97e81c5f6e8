"""The real stores, once a session. Each test finds Valkey empty; Postgres tests take a database of their own."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg2
import pytest
import redis

from core.redis import Store
from ops import stores

#: Reads the time from a key, so that no test of leases or windows sleeps.
TEST_CLOCK = "local function now_ms() return tonumber(redis.call('GET', 'clock') or '0') end\n"


@pytest.fixture(scope="session")
def data() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fb-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def valkey_url(data: Path) -> Iterator[str]:
    server = stores.start_valkey(data)
    yield server.url
    server.stop()


@pytest.fixture
def valkey(valkey_url: str) -> Iterator[redis.Redis]:
    """An empty Valkey."""
    client = redis.Redis.from_url(valkey_url)
    client.flushall()
    yield client
    client.close()


class Clock:
    """The store's clock under a test's hand, in milliseconds."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.set(1_000_000)

    def set(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self.client.set("clock", now_ms)

    def advance(self, by_ms: int) -> None:
        self.set(self.now_ms + by_ms)


@pytest.fixture
def clock(valkey: redis.Redis) -> Clock:
    return Clock(valkey)


@pytest.fixture
def store(valkey: redis.Redis, clock: Clock) -> Store:
    """A store whose scripts read the time that `clock` says."""
    return Store(valkey, clock=TEST_CLOCK)


@pytest.fixture(scope="session")
def _postgres(data: Path) -> Iterator[str]:
    server = stores.start_postgres(data)
    yield server.url
    server.stop()


_databases = itertools.count(1)


@pytest.fixture
def empty_database(_postgres: str) -> str:
    """The URL of a new, empty database."""
    name = f"test_{next(_databases)}"
    host = _postgres.split("host=", 1)[1]
    connection = psycopg2.connect(host=host, user="forebay", dbname="postgres")
    connection.autocommit = True
    connection.cursor().execute(f"CREATE DATABASE {name}")
    connection.close()
    return _postgres.replace("/forebay?", f"/{name}?")
