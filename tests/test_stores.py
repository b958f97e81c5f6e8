"""The embedded stores answer."""

from __future__ import annotations

import psycopg2
import redis

from core.redis import Store, command


def test_the_embedded_valkey_keeps_every_write_in_its_log(valkey: redis.Redis) -> None:
    """Accepted work is as durable as the store, so the store appends every write to disk."""
    store = Store(valkey)

    assert store.run(command("SET", "a", "1", reply=bool))
    assert valkey.config_get("appendonly") == {b"appendonly": b"yes"} or valkey.config_get("appendonly") == {
        "appendonly": "yes"
    }
    assert valkey.config_get("maxmemory-policy").popitem()[1] in ("noeviction", b"noeviction")


def test_a_new_database_is_empty_and_ours(empty_database: str) -> None:
    """Each test that needs Postgres gets a real, empty database."""
    connection = psycopg2.connect(empty_database.replace("+psycopg2", ""))

    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'")
        assert cursor.fetchone() == (0,)
    connection.close()
