"""The real stores, once a session. Each test finds Valkey empty; Postgres tests take a database of their own."""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import signal
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import hypothesis
import psycopg2
import pytest
import redis

from core.postgres import Engine, connect, migrate
from core.redis import Call, Store
from ops import stores

T = TypeVar("T")

# A shared machine may stall any example; how long one takes is no law of ours.
hypothesis.settings.register_profile("forebay", deadline=None)
hypothesis.settings.load_profile("forebay")

#: Takes the time from the call, so that no test of leases or windows sleeps. It is the last argument, and no script
#: sees it there: a key would lie in a slot of its own, where a cluster's script must not look.
TEST_CLOCK = "local told_ms = tonumber(table.remove(ARGV))\nlocal function now_ms() return told_ms end\n"


#: Files that take half a minute and more: where two run at a time they begin first, so that none is the last alone.
LONG = ("test_engines.py", "test_sick_engine.py", "test_up.py", "test_bench.py", "test_chaos.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: item.path.name not in LONG)


@pytest.fixture(scope="session")
def data() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fb-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A module that says STORES = ("single", "cluster") runs on both, so that nothing works by luck of a slot."""
    if "kind" in metafunc.fixturenames and hasattr(metafunc.module, "STORES"):
        metafunc.parametrize("kind", metafunc.module.STORES)


@pytest.fixture
def kind() -> str:
    """Which kind of store a test runs on."""
    return "single"


@pytest.fixture(scope="session")
def _single(data: Path) -> Iterator[str]:
    server = stores.start_valkey(data)
    yield server.url
    server.stop()


@pytest.fixture(scope="session")
def _cluster(data: Path) -> Iterator[str]:
    cluster = stores.start_cluster(data)
    yield cluster.url
    cluster.stop()


@pytest.fixture
def valkey_url(kind: str, request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue("_" + kind)
    return url


@pytest.fixture
def valkey(valkey_url: str) -> Iterator[redis.Redis]:
    """An empty Valkey."""
    store = Store.connect(valkey_url)
    store.client.flushall()
    yield store.client
    store.close()


class Clock:
    """The store's clock under a test's hand, in milliseconds."""

    def __init__(self) -> None:
        self.now_ms = 1_000_000

    def set(self, now_ms: int) -> None:
        self.now_ms = now_ms

    def advance(self, by_ms: int) -> None:
        self.now_ms += by_ms


class TimedStore(Store):
    """A store whose scripts are told the time."""

    def __init__(self, client: redis.Redis, clock: Clock) -> None:
        super().__init__(client, clock=TEST_CLOCK)
        self.time = clock

    def run(self, call: Call[T]) -> T:
        return super().run(self._timed(call))

    def run_all(self, calls: Sequence[Call[Any]]) -> list[Any]:
        return super().run_all([self._timed(call) for call in calls])

    def _timed(self, call: Call[T]) -> Call[T]:
        already = call.args[-1:] and isinstance(call.args[-1], _Told)
        return call if call.script is None or already else replace(call, args=(*call.args, _Told(self.time.now_ms)))


class _Told(str):
    """The time that a call was told. One that `run_all` runs again has it already."""


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(valkey: redis.Redis, clock: Clock) -> Store:
    """A store whose scripts are told the time that `clock` says."""
    return TimedStore(valkey, clock)


@pytest.fixture(scope="session")
def _postgres(data: Path) -> Iterator[str]:
    server = stores.start_postgres(data)
    yield server.url
    os.kill(server.pid, signal.SIGQUIT)  # at once: nobody wants to keep what hundreds of tests wrote


@pytest.fixture(scope="session")
def admin(_postgres: str) -> Iterator[Any]:
    """A connection that makes databases, outside of all of them."""
    connection = psycopg2.connect(host=_postgres.split("host=", 1)[1], user="forebay", dbname="postgres")
    connection.autocommit = True
    yield connection
    connection.close()


_databases = itertools.count(1)


def _new_database(url: str, admin: Any, template: str = "template1") -> str:
    name = f"test_{next(_databases)}"
    admin.cursor().execute(f"CREATE DATABASE {name} TEMPLATE {template}")
    return url.replace("/forebay?", f"/{name}?")


@pytest.fixture
def empty_database(_postgres: str, admin: Any) -> str:
    """The URL of a new, empty database."""
    return _new_database(_postgres, admin)


@pytest.fixture(scope="session")
def _migrated(_postgres: str, admin: Any) -> str:
    url = _new_database(_postgres, admin)
    migrate(url)
    return url.partition("?")[0].rpartition("/")[2]


@dataclass
class Database:
    """One migrated database, and ways to take it away. A superuser is shut out too."""

    url: str
    admin: Any
    engines: list[Engine] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.url.partition("?")[0].rpartition("/")[2]

    def engine(self) -> Engine:
        self.engines.append(connect(self.url))
        return self.engines[-1]

    def execute(self, sql: str) -> None:
        self.admin.cursor().execute(sql)

    def cut(self) -> None:
        """Every connection is lost, and with it every lock."""
        self.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{self.name}'")

    def go_away(self) -> None:
        self.execute(f"ALTER DATABASE {self.name} ALLOW_CONNECTIONS false")
        self.cut()

    def come_back(self) -> None:
        self.execute(f"ALTER DATABASE {self.name} ALLOW_CONNECTIONS true")


@pytest.fixture
def database(_postgres: str, admin: Any, _migrated: str) -> Iterator[Database]:
    """A new database with our schema: a copy, which costs a tenth of a migration."""
    database = Database(_new_database(_postgres, admin, _migrated), admin)
    yield database
    for engine in database.engines:
        engine.dispose()


#: How long an async test may take. Only a failing one takes so long.
PATIENCE_S = 15.0


def on_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test on a loop of its own."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(asyncio.wait_for(test(**fixtures), PATIENCE_S))  # type: ignore[arg-type]

    return run
