"""The door to Postgres: bounded, translated, cooperative, and migrated by one release at a time."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from core.postgres import DatabaseAway, connect, lead, lock, migrate, text, transaction


def test_two_releases_at_once_migrate_once(empty_database: str) -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(migrate, [empty_database] * 3))

    with transaction(connect(empty_database)) as connection:
        assert connection.execute(text("SELECT count(*) FROM alembic_version")).scalar_one() == 1


def test_a_statement_that_takes_too_long_is_a_database_that_is_away(empty_database: str) -> None:
    engine = connect(empty_database)

    with pytest.raises(DatabaseAway, match="timeout"), transaction(engine, statement_ms=50) as connection:
        connection.execute(text("SELECT pg_sleep(5)"))

    with transaction(engine) as connection:
        assert connection.execute(text("SHOW statement_timeout")).scalar_one() == "5s"
        assert connection.execute(text("SHOW timezone")).scalar_one() == "UTC"
    engine.dispose()


def test_a_connection_that_died_while_idle_costs_nobody_a_request(empty_database: str) -> None:
    engine, other = connect(empty_database), connect(empty_database)
    with transaction(engine) as connection:
        pid = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
    with transaction(other) as connection:
        connection.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})

    with transaction(engine) as connection:
        assert connection.execute(text("SELECT 1")).scalar_one() == 1
    engine.dispose()
    other.dispose()


def test_a_server_that_never_answers_is_away_within_its_bound() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        engine = connect(f"postgresql://nobody@127.0.0.1:{silent.getsockname()[1]}/nowhere")

        start = time.monotonic()
        with pytest.raises(DatabaseAway), transaction(engine):
            pass

    assert time.monotonic() - start < 4


def test_one_leads_until_its_connection_closes(empty_database: str) -> None:
    engine = connect(empty_database)
    with engine.connect() as first, engine.connect() as second:
        assert lead(first, "clock")
        assert not lead(second, "clock")
        assert lead(second, "another clock")

        first.invalidate()
        deadline = time.monotonic() + 5
        while not lead(second, "clock"):
            assert time.monotonic() < deadline
    engine.dispose()


def test_a_lock_is_held_to_the_end_of_the_transaction(empty_database: str) -> None:
    engine = connect(empty_database)
    order: list[str] = []

    def second() -> None:
        with transaction(engine) as connection:
            lock(connection, "hour")
            order.append("second")

    with ThreadPoolExecutor(1) as pool:
        with transaction(engine) as connection:
            lock(connection, "hour")
            waiting = pool.submit(second)
            connection.execute(text("SELECT pg_sleep(0.1)"))
            order.append("first")
        waiting.result()
    engine.dispose()

    assert order == ["first", "second"]


UNDER_GEVENT = """
from gevent import monkey; monkey.patch_all()
import socket, sys, time
import gevent
from core.postgres import DatabaseAway, connect, cooperate, text, transaction

cooperate()
ticks = 0
def tick():
    global ticks
    while True:
        gevent.sleep(0.005)
        ticks += 1
gevent.spawn(tick)

with transaction(connect(sys.argv[1])) as connection:
    ticks = 0
    connection.execute(text("SELECT pg_sleep(0.5)"))
assert ticks > 20, ticks

with transaction(connect(sys.argv[1]), statement_ms=50) as connection:
    try:
        connection.execute(text("SELECT pg_sleep(5)"))
        raise SystemExit("no time-out")
    except Exception as e:
        assert "timeout" in str(e), e
    connection.rollback()

silent = socket.create_server(("127.0.0.1", 0))
start, ticks = time.monotonic(), 0
try:
    with transaction(connect(f"postgresql://nobody@127.0.0.1:{silent.getsockname()[1]}/nowhere")):
        raise SystemExit("connected to nobody")
except DatabaseAway as e:
    assert time.monotonic() - start < 4 and ticks > 50, (e, ticks)
print("ok")
"""


def test_under_gevent_a_query_stops_nobody_else(empty_database: str) -> None:
    """In a process of its own: gevent patches before anything else is imported."""
    words = [sys.executable, "-c", UNDER_GEVENT, empty_database]

    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)

    assert (done.stdout, done.returncode) == ("ok\n", 0), done.stderr
