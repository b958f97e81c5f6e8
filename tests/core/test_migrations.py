"""A migration carries over what there is."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config

from billing import events
from core.accounts import keys, quotas, tenants
from core.postgres import Engine, connect, migrate, text, transaction
from core.values import Limit

PEPPER = b"a pepper for tests only"


def migrate_to(engine: Engine, revision: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parents[2] / "migrations"))
    config.set_main_option("path_separator", "os")
    config.attributes["engine"] = engine
    command.upgrade(config, revision)


class Before:
    """A database as the release before left it, and what that release does."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.org_id, self.project_id = str(uuid.uuid4()), str(uuid.uuid4())
        migrate_to(engine, "pre_0003")
        self.run("INSERT INTO organisations (id, name, weight) VALUES (:o, 'acme', 2)")
        self.run("INSERT INTO projects (id, org_id, name) VALUES (:p, :o, 'default')")

    def run(self, sql: str, **values: object) -> None:
        with transaction(self.engine) as connection:
            connection.execute(text(sql), {"o": self.org_id, "p": self.project_id, **values})

    def key(self, key_id: str, *, kind: str = "live", rpm: int | None = None, concurrent: int | None = None) -> str:
        plain = keys.mint(kind, key_id)  # type: ignore[arg-type]
        self.run(
            """INSERT INTO api_keys (id, org_id, project_id, name, kind, last4, secret_hmac, pepper_version,
                requests_per_minute, concurrent_requests)
              VALUES (:id, :o, :p, 'k', :kind, :last4, :hmac, 1, :rpm, :concurrent)""",
            id=key_id, kind=kind, last4=plain[-4:], hmac=keys.hashed(plain, PEPPER), rpm=rpm, concurrent=concurrent,
        )  # fmt: skip
        return plain

    def use(self, month: datetime, outcome: str) -> None:
        event_id = uuid.UUID(int=int(month.timestamp() * 1000) << 80 | 7 << 76 | 2 << 62 | 1)
        self.run(
            """INSERT INTO usage_events (event_id, admitted_at, entered_at, org_id, project_id, key_id, model, tier,
                input_tokens, cached_tokens, output_tokens, reasoning_tokens, outcome, attempt, worker, payload_sha256)
              VALUES (:id, uuid7_time(:id), uuid7_time(:id), :o, :p, 'k', 'm', 'standard', 1, 0, 1, 0, :outcome, 1, 'w',
                decode(repeat('00', 32), 'hex'))""".replace(":id", "CAST(:id AS uuid)"),
            id=str(event_id), outcome=outcome,
        )  # fmt: skip


@pytest.fixture
def before(empty_database: str) -> Before:
    return Before(connect(empty_database))


def test_keys_and_their_limits_outlive_the_move_to_tables_of_their_own(before: Before, empty_database: str) -> None:
    plain = {
        "a" * 12: before.key("a" * 12, rpm=60, concurrent=4),
        "b" * 12: before.key("b" * 12, kind="admin"),
        "c" * 12: before.key("c" * 12, rpm=0),
    }
    before.run("UPDATE api_keys SET revoked_at = now() WHERE id = 'cccccccccccc'")

    migrate(empty_database)

    records = {record.key_id: record for record in keys.all_records(before.engine)}
    assert set(records) == set(plain)
    for key_id, record in records.items():
        assert keys.matches(keys.parse(plain[key_id]), record, PEPPER)
        assert (record.weight, record.plan, record.suspended) == (2, "postpaid", False)
    assert records["a" * 12].limits == (Limit(scope="key:" + "a" * 12, requests_per_minute=60, concurrent_requests=4),)
    assert records["b" * 12].limits == () and records["b" * 12].scopes == ("admin",)
    assert records["c" * 12].limits[0].requests_per_minute == 0 and records["c" * 12].revoked
    before.engine.dispose()


def test_both_releases_work_on_the_new_schema(before: Before, empty_database: str) -> None:
    """While a release replaces the other, or after it was taken back."""
    migrate(empty_database)
    plain = before.key("a" * 12, rpm=60, concurrent=0)
    before.key("b" * 12, kind="admin")

    record = keys.find(before.engine, "a" * 12)
    assert record is not None and keys.matches(keys.parse(plain), record, PEPPER), "made by the release before"
    assert record.limits == (Limit(scope="key:" + "a" * 12, requests_per_minute=60, concurrent_requests=0),)
    admin = keys.find(before.engine, "b" * 12)
    assert admin is not None and (admin.scopes, admin.limits) == (("admin",), ())
    with transaction(before.engine) as connection:
        _, row = keys.create_key(
            connection, org_id=before.org_id, project_id=before.project_id, name="k", pepper=PEPPER
        )
        read = connection.execute(
            text("SELECT secret_hmac, pepper_version FROM api_keys WHERE id = :id"), {"id": row.id}
        )
        hmac, version = read.one()
    record = keys.find(before.engine, row.id)
    assert record is not None and (bytes(hmac), version) == (record.secret_hmac, 1), "as the release before reads it"
    before.engine.dispose()


def test_what_was_used_is_not_read_again_while_everybody_waits(before: Before, empty_database: str) -> None:
    """Usage of years keeps to the narrower check of before: the new one is for new rows, in new partitions too."""
    now = datetime.now(UTC)
    with transaction(before.engine) as connection:
        events.ensure_partitions(connection, now)

    migrate(empty_database)

    with transaction(before.engine) as connection:
        events.ensure_partitions(connection, now + timedelta(days=400))
        query = "SELECT convalidated FROM pg_constraint WHERE conname = 'usage_events_outcome_check'"
        scanned = connection.execute(text(f"{query} AND conrelid = 'usage_events'::regclass")).scalars().all()
        there = connection.execute(text(f"{query} AND conrelid = 'usage_events_{now:%Y%m}'::regclass")).scalars().all()
    assert scanned == [False] and there == [False]
    for month in (now, now + timedelta(days=400)):
        with pytest.raises(Exception, match="usage_events_outcome_check"):
            before.use(month, "eaten")
        before.use(month, "stopped")
    before.engine.dispose()


def test_the_new_tables_hold_what_they_promise(before: Before, empty_database: str) -> None:
    """Money and the log are only ever added to; ways to end that are new are known."""
    migrate(empty_database)
    before.run("INSERT INTO credit_grants (id, org_id, amount, currency, reason) VALUES (:o, :o, 1, 'USD', 'r')")
    before.run("INSERT INTO credit_entries (id, org_id, amount, reason) VALUES (:o, :o, -1, 'r')")

    for table in ("credit_grants", "credit_entries"):
        for sql in (f"UPDATE {table} SET reason = 'x'", f"DELETE FROM {table}", f"TRUNCATE {table}"):
            with pytest.raises(Exception, match="append-only"):
                before.run(sql)
    for wrong in (
        "INSERT INTO credit_grants (id, org_id, amount, currency, reason) VALUES (:p, :o, 0, 'USD', 'r')",
        "INSERT INTO credit_entries (id, org_id, amount, reason) VALUES (:p, :o, 0, 'r')",
        "INSERT INTO stops (kind, name, model, by_whom) VALUES ('model', 'tiny', 'tiny', 'root')",
        "INSERT INTO stops (kind, name, by_whom) VALUES ('planet', 'tiny', 'root')",
        "UPDATE organisations SET plan = 'stolen'",
    ):
        with pytest.raises(Exception, match="check constraint"):
            before.run(wrong)
    with transaction(before.engine) as connection:
        assert tenants.organisations(connection)[0].plan == "postpaid"
        limit = quotas.set_limits(connection, before.org_id, "org", {"money_per_month": Decimal("0.0000000001")})
    assert limit.money_per_month == Decimal("0.0000000001")
    before.engine.dispose()
