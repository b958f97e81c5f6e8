"""The clock: APScheduler runs the fleet's tick and the money's jobs.

Every job is one bounded step that may be repeated and may run in two processes at once: the database guards the
money, and one advisory lock, held on the connection that decisions are written on, makes one leader of the fleet.

    tick        every tick_ms   look at queues and fleet, decide, write assignments (leader only)
    ingest      1 s             usage log -> Postgres; lost settles made again, and leases of money told
    roll_up     5 s             hours that got entries -> hourly totals, re-rolled whole
    project     60 s            keys, prices and what is stopped into Redis, where it is read
    stops       1 s             what operators stopped into the queues; all of it into a limiter that lost it
    partitions  1 h             months of usage_events made ahead
    sweep       10 s            holds of what was never enqueued, or has ended and was not settled
    leases      60 s            leases of money, against the ledger
    purge       60 s            stored responses that have expired
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from types import FrameType

import msgspec
from apscheduler.executors.pool import ThreadPoolExecutor
from apscheduler.schedulers.blocking import BlockingScheduler

from billing import events, hours, leases, prices
from billing.rating import BILLED
from core import catalog, fleet, postgres, responses, usage
from core.accounts import keys, tenants
from core.catalog import Catalog
from core.limits import counters, stopped
from core.postgres import DatabaseAway, Engine, Leadership, transaction
from core.redis import AWAY, NOW_MS, RedisError, Store
from core.settings import BadSettings, Settings, read
from core.telemetry import logs, metrics
from core.values import Usage
from scaler import decisions, signals
from scaler.policy import Decision, Memory, ModelSnapshot, Plan, plan
from scaler.providers import Provider
from scaler.providers.local import LocalProvider
from tasks import stops
from tasks.queue import Queue

log = logs.get(__name__)

LEADER = "fleet"
#: Batches of expired responses that one run deletes.
PURGE_BATCHES = 100


class Clock:
    """The jobs. Each is a step that tests call."""

    def __init__(
        self,
        settings: Settings,
        models: Catalog,
        store: Store,
        database: Engine,
        provider: Provider,
        limits: Store | None = None,
    ) -> None:
        """`limits`: the store of core/limits, where it is another (FOREBAY_LIMITS_URL)."""
        self.settings, self.models, self.provider = settings, models, provider
        self.store, self.database, self.limits = store, database, limits or store
        self.memory = Memory()
        self.consumer = f"clock-{socket.gethostname()}-{os.getpid()}"
        self.leadership = Leadership(database, LEADER)
        self.accounts = leases.Leases(database, self.limits, store, models)

    # --- the fleet

    def tick(self) -> None:
        """Look, decide, write down, assign. With Postgres away nothing can be written down: the fleet holds."""
        snapshots, hosts = signals.look(self.store, self.models, self.provider)
        found = plan(snapshots, hosts, self.memory, time.time_ns() // 1_000_000)
        changed = [decision for decision in found.decisions if self._is_news(decision)]
        if not self._write_down(changed, {snapshot.model: snapshot for snapshot in snapshots}):
            self.memory = Memory()  # whoever leads decides; what we remember grows old
            return
        self.memory = found.memory
        for decision in changed:
            log.info("scale_decided", model=decision.model, desired=decision.desired, reason=decision.reason)
        self._assign(found, {host.host: host.assigned for host in hosts})

    def _is_news(self, decision: Decision) -> bool:
        return self.memory.desired.get(decision.model) != decision.desired

    def _write_down(self, changed: Sequence[Decision], inputs: dict[str, ModelSnapshot]) -> bool:
        """On the connection that holds the lock: a leader that lost its lock has also lost its voice."""
        if not self.leadership.hold():
            return False
        with self.leadership.transaction() as connection:
            decisions.record(connection, changed, inputs, datetime.now(UTC))
        return True

    def _assign(self, found: Plan, before: dict[str, dict[str, int]]) -> None:
        for host, counts in found.assignments.items():
            if before.get(host) != counts:
                log.info("host_assigned", host=host, workers=counts)
                self.store.run(fleet.assign(host, counts))
        known = self.store.run(fleet.assigned())
        for host in set(known) - set(found.assignments):
            log.warning("host_gone", host=host)
            self.store.run(fleet.unassign(host))

    # --- the money

    def ingest(self) -> None:
        settle, done = partial(leases.charge, self.limits), partial(leases.forget, self.limits)
        while taken := events.ingest(self.store, self.database, self.models, self.consumer, settle=settle, done=done):
            metrics.usage_ingested.inc(taken)
        for model in self.models:
            metrics.usage_waiting.labels(model).set(self.store.run(usage.length(model)))

    def leases(self) -> None:
        """What Redis and Postgres have of money must be the same. Where it is not, somebody must look."""
        found = self.accounts.reconcile()
        metrics.money_drift_units.set(max((abs(drift.units) for drift in found), default=0))
        for drift in found:
            log.error("money_drifted", **msgspec.structs.asdict(drift))

    def roll_up(self) -> None:
        if rolled := hours.roll_dirty(self.database):
            log.info("hours_rolled_up", hours=rolled)

    def project(self) -> None:
        records = keys.all_records(self.database)
        for start in range(0, len(records), 500):
            self.store.run_all([keys.project(record) for record in records[start : start + 500]])
        self._project_prices()
        stops.project_accounts(self.limits, self.database)
        stops.project(self.store, self.database, self.models)

    def _project_prices(self) -> None:
        with transaction(self.database) as connection:
            current = prices.current(connection, datetime.now(UTC))
        self.store.run(prices.project(current))

    def stops(self) -> None:
        """What operators have stopped holds a second after a store lost it, or a command died half-way."""
        stops.project(self.store, self.database, self.models)
        if not self.limits.run(stopped.remembers()):
            log.info("stops_told")
            stops.project_accounts(self.limits, self.database)
        if not self.store.run(prices.known()):
            log.info("prices_told")
            self._project_prices()

    def partitions(self) -> None:
        with transaction(self.database) as connection:
            events.ensure_partitions(connection, datetime.now(UTC))

    def sweep(self) -> None:
        """Free what is held and does not run: it was never enqueued, or nobody settled it."""
        with transaction(self.database) as connection:
            organisations = [organisation.id for organisation in tenants.organisations(connection)]
        before_ms = self.limits.run(NOW_MS) - counters.SWEEP_MS
        for org_id in organisations:
            kept = 0
            while ids := self.limits.run(counters.open_before(org_id, before_ms, skip=kept)):
                kept += sum(not self._sweep(org_id, request_id) for request_id in ids)

    def _sweep(self, org_id: str, request_id: str) -> bool:
        """Whether it is open no more. What the queue knows and has not ended keeps its hold, however old it is."""
        held = self.limits.run(counters.held_for(org_id, request_id))
        if held is None:
            self.limits.run(counters.forget(org_id, request_id))
            return True
        models = [held.model] if held.model else list(self.models)  # one that was taken up does not say
        seen = self.store.run_all([Queue(model).peek(request_id) for model in models])
        known = next((one for one in seen if one.state != "unknown"), None)
        if known is None:
            log.warning("hold_swept", request_id=request_id)
            swept = counters.settle(org_id, request_id, held.scopes, Usage(), billed=False, forgo=True)
            self.limits.run(swept)
            self.limits.run(counters.unknown(org_id, request_id))
        elif known.ending is not None:
            log.warning("settle_made_again", request_id=request_id)
            billed = known.ending.outcome in BILLED
            self.limits.run(counters.settle(org_id, request_id, held.scopes, known.ending.usage, billed=billed))
        return known is None or known.ending is not None

    # --- what is kept for customers

    def purge(self) -> None:
        """Delete expired responses, a batch in each transaction; what is left after so many waits for the next run."""
        purged = 0
        for _ in range(PURGE_BATCHES):
            with transaction(self.database) as connection:
                batch = responses.purge(connection)
            purged += batch
            if batch < responses.PURGE_ROWS:
                break
        if purged:
            log.info("responses_purged", responses=purged)

    # --- the schedule

    def jobs(self) -> dict[str, tuple[Callable[[], None], float]]:
        """Every job and its period, seconds."""
        return {
            "tick": (self.tick, self.settings.tick_ms / 1000),
            "ingest": (self.ingest, 1.0),
            "roll_up": (self.roll_up, 5.0),
            "project": (self.project, 60.0),
            "stops": (self.stops, 1.0),
            "partitions": (self.partitions, 3600.0),
            "sweep": (self.sweep, 10.0),
            "leases": (self.leases, 60.0),
            "purge": (self.purge, 60.0),
        }

    def guarded(self, name: str, job: Callable[[], None]) -> None:
        """One run of a job. A dependency that is away is said, and the next run finds what this one left."""
        try:
            job()
        except DatabaseAway as e:
            log.error("database_away", job=name, error=str(e))
        except (*AWAY, RedisError) as e:
            log.error("store_away", job=name, error=repr(e))
        except Exception:  # the outermost edge of a job: the next run comes by itself, and somebody must look
            log.exception("job_failed", job=name)


def schedule(clock: Clock) -> BlockingScheduler:
    """A scheduler with every job, the first run of each at once; late runs are made up by one."""
    scheduler = BlockingScheduler(executors={"default": ThreadPoolExecutor(8)}, timezone=UTC)
    for name, (job, period_s) in clock.jobs().items():
        scheduler.add_job(
            clock.guarded,
            "interval",
            args=(name, job),
            seconds=period_s,
            id=name,
            coalesce=True,
            max_instances=1,
            misfire_grace_time=None,
            next_run_time=datetime.now(UTC),
        )
    return scheduler


def main() -> None:
    try:
        settings = read(os.environ)
        models = catalog.load(settings.catalog).only(settings.models)
    except (BadSettings, catalog.BadCatalog) as e:
        sys.exit(str(e))
    logs.set_up("scaler", settings.log_level)
    logging.getLogger("apscheduler").setLevel(logging.WARNING)  # it tells of every run of every job
    if settings.supervised:
        from core.supervise import follow_parent

        follow_parent()
    store = Store.connect(settings.redis_url)
    limits = Store.connect(settings.limits_url) if settings.limits_url else store
    clock = Clock(settings, models, store, postgres.connect(settings.database_url), LocalProvider(store), limits)
    scheduler = schedule(clock)

    def end(number: int, frame: FrameType | None) -> None:
        scheduler.shutdown(wait=True)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    scheduler.start()


if __name__ == "__main__":
    main()
