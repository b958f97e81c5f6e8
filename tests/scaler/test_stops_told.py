"""What operators have stopped, as the clock tells it: after a store was lost, and after a command died half-way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

import pytest
import redis

from core.accounts import keys, stops, tenants
from core.catalog import Bounds, Catalog, Model
from core.limits import stopped
from core.postgres import Engine, text, transaction
from core.redis import Store
from core.settings import Settings
from core.values import Class
from scaler.clock import Clock
from scaler.providers.local import LocalProvider
from tasks.queue import Queue, Stops
from tests.conftest import Database

MODEL = "m"
MODELS = Catalog({MODEL: Model(name=MODEL, context_tokens=100, slots=4, workers=Bounds(min=1, max=3))})
PEPPER = b"a pepper for tests only"


@dataclass(frozen=True)
class Tenant:
    org_id: str
    project_id: str


@pytest.fixture
def engine(database: Database) -> Engine:
    return database.engine()


@pytest.fixture
def ours(store: Store, database: Database) -> Clock:
    return Clock(Settings(data="unused"), MODELS, store, database.engine(), LocalProvider(store))


@pytest.fixture
def tenant(engine: Engine) -> Tenant:
    with transaction(engine) as connection:
        organisation = tenants.create_organisation(connection, "acme")
        [project] = tenants.projects(connection, organisation.id)
    return Tenant(organisation.id, project.id)


@pytest.fixture
def apart(valkey: redis.Redis) -> Iterator[Store]:
    """A store of its own for limits."""
    options = {**valkey.connection_pool.connection_kwargs, "db": 1}
    client = redis.Redis(connection_pool=redis.ConnectionPool(valkey.connection_pool.connection_class, **options))
    yield Store(client)
    client.close()


def revoke_one(engine: Engine, tenant: Tenant) -> str:
    with transaction(engine) as connection:
        names = {"org_id": tenant.org_id, "project_id": tenant.project_id, "name": "laptop", "pepper": PEPPER}
        _, row = keys.create_key(connection, **names)  # type: ignore[arg-type]
        keys.revoke(connection, row.id, now=datetime.now(UTC))
    return row.id


def set_status(engine: Engine, tenant: Tenant, status: str) -> None:
    with transaction(engine) as connection:
        values = {"id": tenant.org_id, "status": status}
        connection.execute(text("UPDATE organisations SET status = :status WHERE id = CAST(:id AS uuid)"), values)


def begin_stops(engine: Engine) -> None:
    with transaction(engine) as connection:
        stops.begin(connection, "model", MODEL, by_whom="ada")
        stops.begin(connection, "class", "bulk", by_whom="ada")


HALTED = Stops(paused=True, shed=frozenset({Class.BULK}))


@pytest.mark.parametrize("job", ["project", "stops"])
def test_after_a_flush_one_run_brings_back_all_that_is_stopped(
    ours: Clock, store: Store, engine: Engine, tenant: Tenant, valkey: redis.Redis, job: str
) -> None:
    """Each minute, and by the second's job as soon as it sees that the store has forgotten."""
    key_id = revoke_one(engine, tenant)
    set_status(engine, tenant, "suspended")
    begin_stops(engine)
    ours.project()
    valkey.flushall()

    ours.jobs()[job][0]()

    flags = {stopped.ORG: stopped.SUSPENDED, stopped.field_of(key_id): stopped.REVOKED}
    assert store.run(stopped.stopped(tenant.org_id, [key_id])) == flags
    assert store.run(Queue(MODEL).tick()).stops == HALTED


def test_what_a_command_wrote_down_and_did_not_tell_is_told_within_a_second(
    ours: Clock, store: Store, engine: Engine
) -> None:
    ours.stops()
    begin_stops(engine)
    ours.stops()
    assert store.run(Queue(MODEL).tick()).stops == HALTED


def test_the_second_job_asks_for_every_account_only_after_a_store_was_lost(
    ours: Clock, engine: Engine, tenant: Tenant, store: Store
) -> None:
    ours.stops()
    set_status(engine, tenant, "suspended")
    ours.stops()
    assert store.run(stopped.stopped(tenant.org_id, [])) == {}, "a command tells, and the minute's job"
    ours.project()
    assert store.run(stopped.stopped(tenant.org_id, [])) == {stopped.ORG: stopped.SUSPENDED}
    set_status(engine, tenant, "active")
    ours.project()
    assert store.run(stopped.stopped(tenant.org_id, [])) == {}


def test_limits_in_a_store_of_their_own_are_told_there(
    store: Store, database: Database, engine: Engine, tenant: Tenant, apart: Store
) -> None:
    clock = Clock(Settings(data="unused"), MODELS, store, database.engine(), LocalProvider(store), apart)
    set_status(engine, tenant, "suspended")
    clock.stops()
    assert apart.run(stopped.stopped(tenant.org_id, [])) == {stopped.ORG: stopped.SUSPENDED}
    assert store.run(stopped.stopped(tenant.org_id, [])) == {}
