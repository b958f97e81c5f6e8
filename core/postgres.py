"""The door to Postgres: engines, transactions, advisory locks, migrations. Nothing else imports SQLAlchemy.

A database that cannot be reached, or does not answer in time, is one exception: `DatabaseAway`. It may be raised
after a COMMIT that did arrive, so whatever runs in a transaction must be safe to run again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

if TYPE_CHECKING:
    from alembic.config import Config

__all__ = [
    "Connection", "DBAPIError", "DataError", "DatabaseAway", "Engine", "IntegrityError", "Leadership", "connect",
    "cooperate", "lead", "lock", "migrate", "text", "transaction",
]  # fmt: skip

#: Connections per process, and how many more in a rush. Waiting for one is bounded by CONNECT_S.
POOL = 4
RUSH = 4
CONNECT_S = 2
#: How long one statement may take before the database counts as away, milliseconds. A job that needs longer says so.
STATEMENT_MS = 5_000
#: How long a gateway waits for a server that fell silent, and so does not keep to STATEMENT_MS either, seconds.
SILENT_S = STATEMENT_MS / 1000 + 1
#: How long a release waits for another one's migration, milliseconds.
MIGRATE_MS = 600_000

_MIGRATIONS = Path(__file__).resolve().parent.parent / "migrations"


class DatabaseAway(Exception):
    """Postgres cannot be reached, or did not answer in time. Try again."""


def connect(url: str, *, statement_ms: int = STATEMENT_MS) -> Engine:
    """An engine with a bounded pool. Nothing is opened yet, so this never fails on a database that is away."""
    return create_engine(
        _dialect(url),
        pool_size=POOL,
        max_overflow=RUSH,
        pool_timeout=CONNECT_S,
        pool_pre_ping=True,  # a connection that died while idle costs a ping, not a failed request
        hide_parameters=True,  # a failed statement must not log key hashes
        connect_args={
            "connect_timeout": CONNECT_S,
            "tcp_user_timeout": statement_ms + 1_000,  # a network that swallows packets is noticed too
            "options": f"-c statement_timeout={statement_ms} -c timezone=UTC",
            "application_name": "forebay",
        },
    )


@contextmanager
def transaction(engine: Engine, *, statement_ms: int | None = None) -> Iterator[Connection]:
    """Commit what the block did, or nothing of it; `statement_ms` replaces the engine's bound.

    Raises:
      DatabaseAway: nothing is known to be committed.
    """
    with _away(), engine.begin() as connection:
        if statement_ms is not None:
            connection.execute(text("SELECT set_config('statement_timeout', :ms, true)"), {"ms": str(statement_ms)})
        yield connection


def lock(connection: Connection, name: str) -> None:
    """Wait for the lock of that name and hold it to the end of the transaction."""
    connection.execute(text("SELECT pg_advisory_xact_lock(hashtextextended(:name, 0))"), {"name": name})


def lead(connection: Connection, name: str) -> bool:
    """Try to become the one leader of that name. It stays ours until this connection closes or breaks."""
    held = connection.execute(text("SELECT pg_try_advisory_lock(hashtextextended(:name, 0))"), {"name": name})
    return bool(held.scalar_one())


class Leadership:
    """One leader of a name, and the connection that makes it one: what a leader writes, it writes on that connection,
    so that a lost lock is a failed write."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine, self._name = engine, name
        self._connection: Connection | None = None

    def hold(self) -> bool:
        """Whether we lead; takes the lead if nobody has it.

        Raises:
          DatabaseAway: and whoever led does not any more.
        """
        if self._connection is None:
            with _away():
                connection = self._engine.connect()
                with connection.begin():
                    held = lead(connection, self._name)
            if not held:
                connection.close()
                return False
            self._connection = connection
        return True

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """A transaction as the leader. Call `hold` first.

        Raises:
          DatabaseAway: nothing is known to be committed, and the lead is lost.
        """
        assert self._connection is not None, "hold() first"
        try:
            with _away(), self._connection.begin():
                self._connection.execute(text("SELECT 1"))  # a block without writes must not miss that the lock is gone
                yield self._connection
        except DatabaseAway:
            self._connection.invalidate()
            self._connection.close()
            self._connection = None
            raise


def migrate(url: str) -> None:
    """Bring the schema up to date. Two releases at once take turns; the second finds nothing to do."""
    from alembic import command

    engine = connect(url, statement_ms=MIGRATE_MS)
    try:
        # AUTOCOMMIT: an open transaction here would hold up a CREATE INDEX CONCURRENTLY there.
        with _away(), engine.connect().execution_options(isolation_level="AUTOCOMMIT") as guard:
            guard.execute(text("SELECT pg_advisory_lock(hashtextextended('migrate', 0))"))
            command.upgrade(_alembic(engine), "head")
    finally:
        engine.dispose()  # and the lock goes with its connection


def cooperate() -> None:
    """Under gevent: let other greenlets run while psycopg2 waits. Call once in each forked worker, after patching.

    Without this the whole hub stands still for the length of each query.
    """
    import psycopg2.extensions

    psycopg2.extensions.set_wait_callback(_wait)


def _wait(connection: Any) -> None:
    """psycopg2's wait, on the hub. libpq's own connect time-out is not in force here, so the bounds are ours."""
    import psycopg2
    from gevent.socket import wait_read, wait_write
    from psycopg2.extensions import POLL_OK, POLL_READ, STATUS_BEGIN, STATUS_READY

    connected = connection.status in (STATUS_READY, STATUS_BEGIN)
    late = psycopg2.OperationalError("the database did not answer in time")
    limit_s = SILENT_S if connected else CONNECT_S
    while (state := connection.poll()) != POLL_OK:
        wait = wait_read if state == POLL_READ else wait_write
        wait(connection.fileno(), timeout=limit_s, timeout_exc=late)


def _dialect(url: str) -> str:
    """Managed databases hand out `postgres://`, which SQLAlchemy does not know."""
    scheme, separator, rest = url.partition("://")
    return f"postgresql+psycopg2{separator}{rest}" if scheme in ("postgres", "postgresql") else url


@contextmanager
def _away() -> Iterator[None]:
    try:
        yield
    except (OperationalError, InterfaceError, PoolTimeout) as e:
        raise DatabaseAway(_reason(e)) from e
    except DBAPIError as e:
        if not e.connection_invalidated:
            raise
        raise DatabaseAway(_reason(e)) from e


def _reason(e: Exception) -> str:
    return str(getattr(e, "orig", None) or e).strip().partition("\n")[0]


def _alembic(engine: Engine) -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["engine"] = engine
    return config
