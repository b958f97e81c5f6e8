"""The clock's jobs on real stores: who leads, what is written, and what an absence of either store changes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pytest
import redis
import uuid6
from structlog.testing import capture_logs

from billing import prices
from billing.credits import lease
from core import fleet, usage
from core.accounts import keys, tenants
from core.catalog import Bounds, Catalog, Model
from core.limits import balances, counters
from core.limits.counters import SWEEP_MS, Need, Report
from core.limits.scopes import of_key
from core.postgres import DatabaseAway, Engine, text, transaction
from core.redis import AWAY, Store
from core.settings import Settings
from core.telemetry import metrics
from core.values import Caller, Limit, Outcome, Request, Sampling, Usage, WorkerState
from scaler.clock import Clock, schedule
from scaler.providers.local import LocalProvider
from tasks.queue import Queue, generation
from tests.conftest import Clock as StoreClock
from tests.conftest import Database, TimedStore

MODEL = "m"
MODELS = Catalog({MODEL: Model(name=MODEL, context_tokens=100, slots=4, workers=Bounds(min=1, max=3))})
PEPPER = b"a pepper for tests only"
KEY = "k" * 12


@pytest.fixture
def engine(database: Database) -> Engine:
    return database.engine()


def new_clock(store: Store, database: Database, consumer: str = "c1") -> Clock:
    clock = Clock(Settings(data="unused"), MODELS, store, database.engine(), LocalProvider(store))
    clock.consumer = consumer
    return clock


@pytest.fixture
def ours(store: Store, database: Database) -> Clock:
    return new_clock(store, database)


def announce(store: Store, host: str = "h1", room: int = 4) -> None:
    store.run(fleet.announce_host(fleet.Host(host=host, room=room)))


def assigned(store: Store, host: str = "h1") -> dict[str, int] | None:
    return store.run(fleet.assignment(host))


def rows(engine: Engine, sql: str) -> list[tuple[Any, ...]]:
    with transaction(engine) as connection:
        return [tuple(row) for row in connection.execute(text(sql))]


def decisions(engine: Engine) -> list[tuple[Any, ...]]:
    return rows(engine, "SELECT model, desired, action FROM scale_decisions ORDER BY decided_at, id")


@dataclass
class Tenant:
    """An organisation with one key, and requests of its own."""

    store: Store
    org_id: str
    project_id: str

    def request(self) -> Request:
        return Request(
            id=str(uuid6.uuid7()),
            model=MODEL,
            caller=Caller(org_id=self.org_id, project_id=self.project_id, key_id=KEY),
            gateway="",
            prompt_token_ids=[1, 2, 3],
            sampling=Sampling(max_tokens=5),
        )

    def reserve(self, request: Request) -> None:
        need = Need(input_tokens=3, output_tokens=5, least_output_tokens=5)
        limits = [Limit(scope=of_key(KEY), concurrent_requests=4)]
        self.store.run(counters.reserve(self.org_id, request.id, KEY, MODEL, limits, need))

    def enqueue(self, request: Request) -> None:
        self.store.run(Queue(MODEL).enqueue(generation(request)))

    def end(self, request: Request) -> None:
        queue = Queue(MODEL)
        self.enqueue(request)
        [claim] = self.store.run(queue.claim("w1", 1, lease_ms=3000, nonce=request.id)).claims
        assert self.store.run(queue.finish("w1", claim, Outcome.LENGTH, Usage(input_tokens=3, output_tokens=5)))

    def used(self) -> tuple[int, int, int]:
        """Requests and tokens in the window, and requests open."""
        [used] = self.store.run(counters.used(self.org_id, [Limit(scope=of_key(KEY))]))
        return used.requests, used.input_tokens + used.output_tokens, used.open

    def open(self) -> list[str]:
        """Its holds."""
        return self.store.run(counters.open_before(self.org_id, 10**15))


@pytest.fixture
def tenant(store: Store, engine: Engine) -> Tenant:
    with transaction(engine) as connection:
        organisation = tenants.create_organisation(connection, "acme")
        [project] = tenants.projects(connection, organisation.id)
    return Tenant(store, organisation.id, project.id)


# --- the fleet


def test_a_tick_writes_an_assignment_and_one_decision(ours: Clock, store: Store, engine: Engine) -> None:
    announce(store)

    ours.tick()

    assert assigned(store) == {MODEL: 1}
    assert decisions(engine) == [(MODEL, 1, "hold")]


class Recording(TimedStore):
    """Keeps the plain commands that it ran."""

    def __init__(self, client: redis.Redis, clock: StoreClock) -> None:
        super().__init__(client, clock)
        self.commands: list[str] = []

    def run(self, call: Any) -> Any:
        if call.script is None:
            self.commands.append(call.args[0])
        return super().run(call)


def test_a_second_tick_that_finds_the_same_writes_nothing(
    store: Store, clock: StoreClock, database: Database, engine: Engine
) -> None:
    recording = Recording(store.client, clock)
    ours = new_clock(recording, database)
    announce(store)
    ours.tick()
    assert "HSET" in recording.commands
    recording.commands.clear()

    ours.tick()

    assert "HSET" not in recording.commands
    assert assigned(store) == {MODEL: 1}
    assert len(decisions(engine)) == 1


def test_a_backlog_grows_the_fleet_and_the_decision_says_from_what(
    ours: Clock, store: Store, engine: Engine, tenant: Tenant
) -> None:
    announce(store)
    ours.tick()
    for _ in range(9):
        tenant.enqueue(tenant.request())

    ours.tick()

    assert assigned(store) == {MODEL: 3}
    assert rows(engine, "SELECT desired, action, inputs->>'waiting' FROM scale_decisions ORDER BY id")[1:] == [
        (3, "grow", "9")
    ]


def test_a_wanted_model_keeps_its_worker_until_it_is_there_and_no_longer_is_wanted_then(
    store: Store, database: Database, engine: Engine
) -> None:
    """One look is enough, nothing need wait any more, and the asking ends with the first sign of a worker."""
    models = Catalog({MODEL: msgspec.structs.replace(MODELS[MODEL], workers=Bounds(min=0, max=3))})
    ours = Clock(Settings(data="unused"), models, store, database.engine(), LocalProvider(store))
    announce(store)
    ours.tick()
    assert assigned(store) in (None, {})

    assert [store.run(fleet.want(MODEL, now_ms)) for now_ms in (5, 6)] == [True, False]
    ours.tick()
    ours.tick()
    assert (assigned(store), store.run(fleet.wanted())) == ({MODEL: 1}, {MODEL: 5})

    row = fleet.Worker(worker="w", host="h1", model=MODEL, state=WorkerState.BOOTING)
    store.run(fleet.announce_worker(row))
    ours.tick()
    assert (assigned(store), store.run(fleet.wanted())) == ({MODEL: 1}, {})
    assert decisions(engine) == [(MODEL, 0, "hold"), (MODEL, 1, "grow")]


def test_a_worker_that_is_leaving_answers_no_asking(ours: Clock, store: Store) -> None:
    row = fleet.Worker(worker="w", host="h1", model=MODEL, state=WorkerState.DRAINING)
    store.run(fleet.announce_worker(row))
    store.run(fleet.want(MODEL, 5))

    ours.tick()

    assert store.run(fleet.wanted()) == {MODEL: 5}


def test_of_two_clocks_one_leads_and_the_other_follows_when_it_is_gone(
    store: Store, database: Database, engine: Engine
) -> None:
    first, second = new_clock(store, database), new_clock(store, database, "c2")
    announce(store)
    first.tick()
    store.run(fleet.unassign("h1"))

    second.tick()
    assert assigned(store) is None, "it does not lead"

    database.cut()
    second.tick()
    assert assigned(store) == {MODEL: 1}
    assert len(decisions(engine)) == 2, "each leader's first"


def test_a_leader_that_lost_its_lock_without_knowing_assigns_nothing(
    ours: Clock, store: Store, database: Database
) -> None:
    """Also when it has nothing to write down: somebody else may lead by now."""
    announce(store)
    ours.tick()
    database.cut()
    announce(store, "h2", room=8)
    store.run(fleet.unassign("h1"))

    with pytest.raises(DatabaseAway):
        ours.tick()

    assert (assigned(store), assigned(store, "h2")) == (None, None)
    ours.tick()
    assert assigned(store, "h2") == {MODEL: 1}, "it leads again"


def test_a_new_leader_keeps_what_its_predecessor_assigned(store: Store, database: Database) -> None:
    second = new_clock(store, database)
    announce(store)
    store.run(fleet.assign("h1", {MODEL: 3}))

    second.tick()

    assert assigned(store) == {MODEL: 3}


def test_with_postgres_away_the_fleet_holds_and_the_job_says_so(
    ours: Clock, store: Store, database: Database, tenant: Tenant
) -> None:
    announce(store)
    ours.tick()
    database.go_away()
    for _ in range(9):
        tenant.enqueue(tenant.request())

    with capture_logs() as said:
        ours.guarded("tick", ours.tick)

    assert [(one["event"], one["job"], one["log_level"]) for one in said] == [("database_away", "tick", "error")]
    assert assigned(store) == {MODEL: 1}
    database.come_back()
    ours.guarded("tick", ours.tick)
    assert assigned(store) == {MODEL: 3}


class LosesAssign(TimedStore):
    """The store goes away just as an assignment is written, once."""

    lost = 0

    def run(self, call: Any) -> Any:
        if call.args[:1] == ("HSET",) and not self.lost:
            self.lost = 1
            raise AWAY[0]("away")
        return super().run(call)


def test_an_assignment_that_was_lost_is_made_at_the_next_tick_and_decided_once(
    store: Store, clock: StoreClock, database: Database, engine: Engine
) -> None:
    flaky = LosesAssign(store.client, clock)
    ours = new_clock(flaky, database)
    announce(store)

    ours.guarded("tick", ours.tick)
    assert assigned(store) is None
    ours.guarded("tick", ours.tick)

    assert assigned(store) == {MODEL: 1}
    assert len(decisions(engine)) == 1


def test_a_host_that_drains_is_given_nothing(ours: Clock, store: Store) -> None:
    store.run(fleet.announce_host(fleet.Host(host="h1", room=4, draining=True)))

    ours.tick()

    assert assigned(store) is None


# --- the money


def test_a_settle_that_was_lost_is_made_by_ingest(ours: Clock, store: Store, engine: Engine, tenant: Tenant) -> None:
    """The gateway settles what it relays; of a gateway that died the ending itself settles."""
    request = tenant.request()
    tenant.reserve(request)
    tenant.end(request)
    assert tenant.open() == [request.id]

    ours.ingest()

    assert tenant.open() == []
    assert rows(engine, "SELECT event_id::text, output_tokens FROM usage_events") == [(request.id, 5)]
    assert store.run(usage.length(MODEL)) == 0


def test_money_that_two_looks_find_different_is_told_and_left_as_it_is(
    ours: Clock, store: Store, engine: Engine, tenant: Tenant
) -> None:
    """An ending is charged by ingest; then somebody changes what Redis has."""
    with transaction(engine) as connection:
        price = prices.set_price(
            connection, MODEL, input_per_mtok=Decimal(1), output_per_mtok=Decimal(2), effective_from=datetime.now(UTC)
        )
        tenants.set_plan(connection, tenant.org_id, "prepaid")
    lease(engine, store, tenant.org_id, "org")
    tenant.end(msgspec.structs.replace(tenant.request(), price_id=price.id))
    ours.ingest()
    charged = store.run(balances.account(tenant.org_id, "org"))
    assert charged is not None and charged.spent == (3 * 1 + 5 * 2) * 10_000

    store.client.hincrby(balances.key(tenant.org_id, "org"), "spent", 9)
    with capture_logs() as seen:
        ours.leases()
        assert (seen, metrics.money_drift_units._value.get()) == ([], 0)
        ours.leases()

    [told] = seen
    assert (told["event"], told["log_level"], told["units"]) == ("money_drifted", "error", 9)
    assert (told["org_id"], told["scope"], metrics.money_drift_units._value.get()) == (tenant.org_id, "org", 9)
    left = store.run(balances.account(tenant.org_id, "org"))
    assert left is not None and left.spent == charged.spent + 9


def test_with_postgres_away_usage_waits_in_its_stream(
    ours: Clock, store: Store, database: Database, tenant: Tenant, engine: Engine
) -> None:
    request = tenant.request()
    tenant.end(request)
    database.go_away()

    with capture_logs() as said:
        ours.guarded("ingest", ours.ingest)

    assert [one["event"] for one in said] == ["database_away"]
    assert store.run(usage.length(MODEL)) == 1
    database.come_back()
    ours.ingest()
    assert store.run(usage.length(MODEL)) == 0
    assert rows(engine, "SELECT count(*) FROM usage_events") == [(1,)]


def test_a_hold_that_was_never_enqueued_is_freed_after_its_time(
    ours: Clock, store: Store, clock: StoreClock, tenant: Tenant, valkey: redis.Redis
) -> None:
    request = tenant.request()
    clock.set(now_ms(valkey) - SWEEP_MS + 5000)
    tenant.reserve(request)
    ours.sweep()
    assert tenant.open() == [request.id], "it may just be on its way to the queue"

    clock.advance(-5000)
    older = tenant.request()
    tenant.reserve(older)
    ours.sweep()

    assert tenant.open() == [request.id]


def test_a_hold_whose_request_lives_is_never_swept(
    ours: Clock, store: Store, tenant: Tenant, clock: StoreClock
) -> None:
    """Waiting or running: the clock stands at 1970, so every hold here is old."""
    waiting, running, lost = (tenant.request() for _ in range(3))
    for request in (waiting, running, lost):
        tenant.reserve(request)
    tenant.enqueue(running)
    assert store.run(Queue(MODEL).claim("w1", 1, lease_ms=3000, nonce="n")).claims
    tenant.enqueue(waiting)

    ours.sweep()

    assert set(tenant.open()) == {waiting.id, running.id}


def test_what_was_swept_counts_as_no_request_and_no_tokens(ours: Clock, store: Store, tenant: Tenant) -> None:
    tenant.reserve(tenant.request())

    ours.sweep()

    assert tenant.used() == (0, 0, 0)


def test_what_was_swept_and_comes_after_all_is_held_like_any_other(ours: Clock, store: Store, tenant: Tenant) -> None:
    """Its gateway had only stopped for a while, or its client asks again under its Idempotency-Key."""
    request = tenant.request()
    tenant.reserve(request)
    ours.sweep()

    tenant.reserve(request)

    assert tenant.used() == (1, 0, 1) and tenant.open() == [request.id]


def test_a_hold_whose_request_has_ended_is_settled_with_what_it_used(ours: Clock, store: Store, tenant: Tenant) -> None:
    """Its gateway died, and its usage waits for Postgres: nobody else settles it now."""
    request = tenant.request()
    tenant.reserve(request)
    tenant.end(request)

    ours.sweep()

    assert tenant.open() == []
    assert tenant.used() == (1, 8, 0)


def test_a_hold_that_was_taken_up_is_swept_by_whatever_model_it_runs_on(
    ours: Clock, store: Store, tenant: Tenant
) -> None:
    """The store of limits lost its data: what a report takes up again does not say its model."""
    running, over = tenant.request(), tenant.request()
    tenant.enqueue(running)
    for request in (running, over):
        report = Report(
            request_id=request.id, key_id=KEY, scopes=(of_key(KEY),), usage=Usage(), hold_tokens=0, money_tokens=0
        )
        store.run(counters.progress(tenant.org_id, [report]))

    ours.sweep()

    assert tenant.open() == [running.id]


def now_ms(valkey: redis.Redis) -> int:
    seconds, us = valkey.time()
    return int(seconds) * 1000 + int(us) // 1000


def test_project_puts_keys_and_prices_where_gateways_read_them(
    ours: Clock, store: Store, engine: Engine, tenant: Tenant
) -> None:
    with transaction(engine) as connection:
        names = {"org_id": tenant.org_id, "project_id": tenant.project_id, "name": "laptop", "pepper": PEPPER}
        _, row = keys.create_key(connection, **names)  # type: ignore[arg-type]
        price = prices.set_price(
            connection, MODEL, input_per_mtok=Decimal(1), output_per_mtok=Decimal(2), effective_from=datetime.now(UTC)
        )

    ours.project()

    record = store.run(keys.read(row.id))
    assert record is not None and record.org_id == tenant.org_id
    assert store.run(prices.read(MODEL)) == price


def test_every_job_may_run_twice_at_once(store: Store, database: Database, engine: Engine, tenant: Tenant) -> None:
    """Two clocks, each job in both at the same moment: everything is counted once."""
    clocks = [new_clock(store, database), new_clock(store, database, "c2")]
    announce(store)
    requests = [tenant.request() for _ in range(20)]
    for request in requests:
        tenant.reserve(request)
        tenant.end(request)
    tenant.reserve(tenant.request())

    with capture_logs() as said, ThreadPoolExecutor(12) as pool:
        for _ in range(2):
            runs = [
                pool.submit(clock.guarded, name, job) for clock in clocks for name, (job, _) in clock.jobs().items()
            ]
            for one in runs:
                one.result()
    clocks[0].roll_up()

    faults = [one for one in said if one["log_level"] in ("error", "critical")]
    assert faults == []
    assert rows(engine, "SELECT count(*) FROM usage_events") == [(20,)]
    assert rows(engine, "SELECT sum(output_tokens) FROM usage_hourly") == [(100,)]
    assert rows(engine, "SELECT count(*) FROM usage_conflicts") == [(0,)]
    assert len(decisions(engine)) == 1
    assert tenant.open() == []


def test_expired_responses_are_purged_batch_by_batch_and_others_stay(
    ours: Clock, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from core import responses

    with transaction(engine) as connection:
        org_id = tenants.create_organisation(connection, "acme").id
        for _ in range(3 * responses.PURGE_ROWS // 2):
            row = responses.Stored(
                id=str(uuid6.uuid7()), org_id=org_id, project_id=org_id, key_id=KEY, model=MODEL, status="completed",
                response="{}",
            )  # fmt: skip
            assert responses.keep(connection, row, "[]")
        connection.execute(
            text("UPDATE responses SET expires_at = now() WHERE id <> CAST(:id AS uuid)"), {"id": row.id}
        )

    monkeypatch.setattr("scaler.clock.PURGE_BATCHES", 1)
    ours.purge()
    assert rows(engine, "SELECT count(*) FROM responses") == [(responses.PURGE_ROWS // 2,)], "a run has a bound"
    ours.purge()

    assert rows(engine, "SELECT id::text FROM responses") == [(row.id,)]


def test_a_job_that_breaks_is_logged_and_ends_only_its_own_run(ours: Clock) -> None:
    def breaks() -> None:
        raise ZeroDivisionError

    with capture_logs() as said:
        ours.guarded("odd", breaks)

    assert [(one["event"], one["job"]) for one in said] == [("job_failed", "odd")]


def test_every_job_has_its_place_in_the_schedule_and_none_runs_beside_itself(ours: Clock) -> None:
    scheduler = schedule(ours)

    jobs = {job.id: job for job in scheduler.get_jobs()}

    assert set(jobs) == set(ours.jobs())
    assert all(job.max_instances == 1 and job.coalesce for job in jobs.values())
