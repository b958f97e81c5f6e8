"""Balances, figures and leases: what Redis may spend is what Postgres knows, to the unit, whatever dies on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pytest
import uuid6
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from billing import events, hours, leases, rating
from billing.credits import (
    Credit,
    CreditRefused,
    balance,
    count_up,
    drop_lease,
    enter,
    expired,
    figures,
    grant,
    hold,
    lease,
    listed,
    tell,
)
from billing.rating import Price
from core import usage
from core.accounts import tenants
from core.limits import balances, counters
from core.limits.balances import Account, sum_up, units_down, units_up
from core.limits.counters import Need, Refused, Report, Reserved, Terms, Unleased
from core.limits.scopes import Limit
from core.postgres import DatabaseAway, Engine, IntegrityError, text, transaction
from core.redis import Store
from core.values import Outcome, Usage
from tests.billing.conftest import MODEL, Ledger, Log
from tests.conftest import Clock, Database

ORG = "org"
#: Now, on the day on which the test runs: entries take their time from the store.
DAY = timedelta(days=1)


@dataclass
class Bank:
    """One organisation, its stores, and its requests in all the steps that they go through."""

    store: Store
    clock: Clock
    engine: Engine
    log: Log
    ledger: Ledger
    price: Price
    org_id: str
    limits: list[Limit]
    dead: list[str] = field(default_factory=list)

    @property
    def key(self) -> str:
        return f"key:{self.log.facts.key_id}"

    @property
    def scopes(self) -> list[str]:
        return [limit.scope for limit in self.limits]

    @property
    def terms(self) -> Terms:
        per_mtok = (self.price.input_per_mtok, self.price.cached_input_per_mtok, self.price.output_per_mtok)
        return Terms(prices=tuple(sum_up(one) for one in per_mtok))  # type: ignore[arg-type]

    def reserve(self, tokens: tuple[int, int] = (10, 10), name: str = "") -> tuple[str, Any]:
        """Ask for a request; what leases it needs are opened."""
        request_id = name or str(uuid6.uuid7())
        need = Need(input_tokens=tokens[0], output_tokens=tokens[1], least_output_tokens=tokens[1])
        facts = self.log.facts
        call = counters.reserve(self.org_id, request_id, facts.key_id, MODEL, self.limits, need, self.terms)
        while isinstance(answer := self.store.run(call), Unleased):
            self.lease(answer.scope)
        return request_id, answer

    def lease(self, scope: str) -> None:
        lease(self.engine, self.store, self.org_id, scope)

    def report(self, request_id: str, used_in: int, used_out: int) -> counters.Leash:
        report = Report(
            request_id=request_id,
            key_id=self.log.facts.key_id,
            scopes=tuple(self.scopes),
            usage=Usage(input_tokens=used_in, output_tokens=used_out),
            hold_tokens=10,
            money_tokens=10,
        )
        return self.store.run(counters.progress(self.org_id, [report]))[0]

    def finish(self, request_id: str, used_in: int, used_out: int, outcome: str = "completed") -> None:
        """Its worker enters its ending."""
        self.log.enter(request_id, outcome=outcome, tokens=(used_in, 0, used_out, 0))

    def settle(self, request_id: str, used_in: int, used_out: int, *, billed: bool = True) -> bool:
        """Its gateway does."""
        tokens = Usage(input_tokens=used_in, output_tokens=used_out)
        return self.store.run(counters.settle(self.org_id, request_id, self.scopes, tokens, billed=billed))

    def ingest(self, **how: Any) -> None:
        told: dict[str, Any] = {"settle": self.charge, "done": lambda found: leases.forget(self.store, found), **how}
        while events.ingest(self.store, self.engine, [MODEL], "c1", **told):
            pass

    def charge(self, found: Sequence[events.Ingested]) -> None:
        leases.charge(self.store, found)

    def run(self, used_in: int = 10, used_out: int = 5, outcome: str = "completed") -> str:
        """One request, from its admission to its ending in the log."""
        request_id, answer = self.reserve((used_in, used_out))
        assert isinstance(answer, Reserved), answer
        self.finish(request_id, used_in, used_out, outcome)
        self.settle(request_id, used_in, used_out, billed=outcome in rating.BILLED)
        return request_id

    def account(self, scope: str = ORG) -> Account:
        found = self.store.run(balances.account(self.org_id, scope))
        assert found is not None
        return found

    def grant(self, amount: str, expires_at: datetime | None = None) -> Credit:
        with transaction(self.engine) as connection:
            made = grant(connection, self.org_id, Decimal(amount), reason="paid", expires_at=expires_at)
        tell(self.engine, self.store, self.org_id)
        return made

    def figures(self, scope: str = ORG, now: datetime | None = None) -> balances.Figures:
        with transaction(self.engine) as connection:
            return figures(connection, self.org_id, scope, now or datetime.now(UTC))

    def balance(self) -> Any:
        with transaction(self.engine) as connection:
            return balance(connection, self.org_id, datetime.now(UTC))

    def agree(self) -> None:
        """Quiet: what Redis has as spent is the sum of the ledger, to the unit, and nothing is held."""
        for scope in self.scopes:
            if self.store.run(balances.opened(self.org_id, scope)) is None:
                continue
            known, account = self.figures(scope), self.account(scope)
            assert (account.held, account.day_spent, account.month_spent) == (0, known.day_spent, known.month_spent)
            assert account.spent == known.spent
        assert all(self.watch().drift(self.org_id, scope) is None for scope in self.scopes)

    def watch(self) -> leases.Leases:
        return leases.Leases(self.engine, self.store, self.store, [MODEL])


@pytest.fixture
def bank(store: Store, clock: Clock, engine: Engine, ledger: Ledger) -> Bank:
    """A prepaid organisation whose key has a budget too. A token of input costs 10,000 units, one of output 20,000."""
    return new_bank(store, clock, engine, ledger)


def new_bank(store: Store, clock: Clock, engine: Engine, ledger: Ledger) -> Bank:
    clock.set(time.time_ns() // 1_000_000)
    with transaction(engine) as connection:
        organisation = tenants.create_organisation(connection, f"acme {uuid6.uuid7()}")
        [project] = tenants.projects(connection, organisation.id)
        tenants.set_plan(connection, organisation.id, "prepaid")
        prices = connection.execute(text("SELECT id FROM prices")).scalars().all()
    price = ledger.price(input_per_mtok="1", cached_input_per_mtok="0.5", output_per_mtok="2")
    assert not prices
    log = Log(store)
    log.facts = msgspec.structs.replace(
        log.facts, org_id=organisation.id, project_id=project.id, price_id=price.id, scopes=(f"key:{'k' * 12}", ORG)
    )
    limits = [Limit(scope=f"key:{'k' * 12}", money_per_month=Decimal(100)), Limit(scope=ORG, prepaid=True)]
    return Bank(store, clock, engine, log, ledger, price, organisation.id, limits)


# --- the ledger


def test_a_balance_is_grants_and_entries_less_what_was_used(bank: Bank) -> None:
    bank.grant("5")
    with transaction(bank.engine) as connection:
        enter(connection, bank.org_id, Decimal("-0.5"), reason="paid twice")
    bank.run(1_000_000, 100_000)
    bank.ingest()

    found = bank.balance()
    assert (found.granted, found.spent, found.left) == (Decimal("4.5"), Decimal("1.2"), Decimal("3.3"))
    assert found.shown()["left"] == "3.3"


@pytest.mark.parametrize("amount", ["0", "-1", "NaN", "Infinity", "0.00000000001", "1000000001"])
def test_an_amount_that_cannot_be_kept_exactly_is_refused(bank: Bank, amount: str) -> None:
    with pytest.raises(CreditRefused), transaction(bank.engine) as connection:
        grant(connection, bank.org_id, Decimal(amount), reason="x")
    assert bank.ledger.count("credit_grants") == 0


def test_a_grant_that_is_expired_already_and_a_stranger_are_refused(bank: Bank) -> None:
    for org_id, expires_at in ((bank.org_id, datetime.now(UTC) - DAY), (str(uuid6.uuid7()), None)):
        with pytest.raises(CreditRefused), transaction(bank.engine) as connection:
            grant(connection, org_id, Decimal(1), reason="x", expires_at=expires_at)


@pytest.mark.parametrize("change", ["UPDATE {} SET amount = 100", "DELETE FROM {}", "TRUNCATE {}"])
def test_credits_are_never_changed(bank: Bank, change: str) -> None:
    bank.grant("1")
    with transaction(bank.engine) as connection:
        enter(connection, bank.org_id, Decimal(1), reason="x")

    for table in ("credit_grants", "credit_entries"):
        with pytest.raises(IntegrityError, match="append-only"):
            bank.ledger.execute(change.format(table))
    assert bank.balance().granted == 2


# --- expiry


T0 = datetime(2026, 5, 1, tzinfo=UTC)


def credit(amount: str, day: int, expires: int | None = None) -> Credit:
    return Credit(
        id=str(day),
        kind="grant" if Decimal(amount) > 0 else "entry",
        amount=Decimal(amount),
        reason="",
        expires_at=None if expires is None else T0 + expires * DAY,
        created_at=T0 + day * DAY,
    )


@pytest.mark.parametrize(
    ("found", "spends", "lost"),
    [
        ([credit("10", 0, 5)], {}, "10"),
        ([credit("10", 0, 5)], {1: "4"}, "6"),
        ([credit("10", 0, 5)], {5: "4"}, "10"),  # what enters at its last moment is too late
        ([credit("10", 0, 5), credit("10", 0)], {1: "4"}, "6"),  # what expires is spent first
        ([credit("10", 0, 8), credit("10", 1, 5)], {2: "12"}, "8"),  # and of two the one that does so first
        ([credit("10", 0, 8), credit("10", 3, 5)], {2: "12", 4: "1"}, "7"),  # but not before it is there
        ([credit("10", 0, 20)], {1: "4"}, "0"),  # not yet
        ([credit("10", 0, 5), credit("-3", 2)], {}, "7"),  # an entry below 0 is spent
        ([credit("10", 0, 5), credit("3", 2)], {}, "10"),  # one above 0 never expires
    ],
)
def test_a_grant_loses_what_was_not_spent_of_it(found: list[Credit], spends: dict[int, str], lost: str) -> None:
    told = {T0 + day * DAY: Decimal(amount) for day, amount in spends.items()}
    assert expired(found, told, T0 + 10 * DAY) == Decimal(lost)


_events = st.lists(
    st.one_of(
        st.tuples(st.just("grant"), st.integers(0, 20), st.integers(1, 50), st.none() | st.integers(1, 15)),
        st.tuples(st.just("entry"), st.integers(0, 20), st.integers(-30, 30).filter(bool), st.none()),
        st.tuples(st.just("spend"), st.integers(0, 20), st.integers(1, 40), st.none()),
    ),
    max_size=12,
)


@given(_events)
def test_money_that_expires_is_money_that_was_there(story: list[tuple[str, int, int, int | None]]) -> None:
    """A model that spends unit by unit; and nothing is lost that was spent, whatever the story."""
    found = [
        credit(str(amount), day, None if lasts is None else day + lasts)
        for what, day, amount, lasts in story
        if what != "spend"
    ]
    spends: dict[datetime, Decimal] = {}
    for what, day, amount, _ in story:
        if what == "spend":
            spends[T0 + day * DAY] = spends.get(T0 + day * DAY, Decimal(0)) + amount

    assert expired(found, spends, T0 + 18 * DAY) == unit_by_unit(found, spends, T0 + 18 * DAY)


def unit_by_unit(found: list[Credit], spends: dict[datetime, Decimal], now: datetime) -> int:
    coins: list[tuple[datetime, int]] = []
    lost = owed = 0
    for day in range(60):
        moment = T0 + day * DAY
        if moment > now:
            return lost
        lost += sum(1 for coin in coins if coin[0] <= moment)
        coins = [coin for coin in coins if coin[0] > moment]
        for order, one in enumerate(found):
            if one.created_at == moment:
                owed += max(0, -int(one.amount))
                coins += [(one.expires_at or datetime.max.replace(tzinfo=UTC), order)] * max(0, int(one.amount))
        owed += int(spends.get(moment, 0))
        coins.sort()
        coins, owed = coins[owed:], max(0, owed - len(coins))
    raise AssertionError


def test_an_expiry_takes_hold_in_redis_with_the_next_look(bank: Bank) -> None:
    """Of two grants one expires, with 1.5 of it spent before."""
    soon = datetime.now(UTC) + timedelta(seconds=1.2)
    bank.grant("2", expires_at=soon)
    bank.grant("3")
    bank.run(1_500_000, 0)
    bank.ingest()
    watch = bank.watch()
    watch.reconcile()
    assert bank.account().granted == units_down(Decimal(5))

    while datetime.now(UTC) <= soon:
        time.sleep(0.05)
    watch.reconcile()

    assert bank.account().granted == units_down(Decimal("4.5"))
    assert bank.balance().left == Decimal(3)
    bank.agree()


# --- figures


def test_figures_are_the_sum_of_what_is_paid_for_in_each_scope(bank: Bank) -> None:
    bank.grant("5")
    other = msgspec.structs.replace(bank.log.facts, key_id="o" * 12, project_id=str(uuid6.uuid7()))
    for outcome in Outcome:
        bank.log.enter(outcome=outcome.value, tokens=(100, 40, 10, 0))
    Log(bank.store, other).enter(tokens=(7, 0, 0, 0))
    bank.ingest()

    per_request = 60 * 10_000 + 40 * 5_000 + 10 * 20_000
    ours = per_request * len(rating.BILLED)
    assert bank.figures(bank.key).month_spent == bank.figures(bank.key).day_spent == ours
    assert bank.figures(f"project:{bank.log.facts.project_id}").spent == ours
    assert bank.figures().spent == bank.figures(f"model:{MODEL}").spent == ours + 70_000
    assert bank.figures("model:another").spent == bank.figures("key:another").spent == 0


def test_figures_are_the_same_before_an_hour_is_rolled_up_and_after(bank: Bank) -> None:
    """And where moments divide it: the balance begins in the middle of an hour, after some of its usage."""
    bank.log.enter(tokens=(1, 0, 0, 0))
    time.sleep(0.01)
    bank.grant("5")
    bank.log.enter(tokens=(10, 0, 0, 0))
    bank.ingest()
    before = [bank.figures(), bank.figures(bank.key)]

    hours.roll_dirty(bank.engine)

    assert [bank.figures(), bank.figures(bank.key)] == before
    assert [one.spent for one in before] == [100_000, 110_000]


def test_days_and_months_begin_at_midnight_utc(bank: Bank) -> None:
    """Endings of either side of both; entry ids carry their time."""
    first = datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    now = first + timedelta(days=3, hours=1)
    at = [first - timedelta(milliseconds=1), first, first + timedelta(days=3, milliseconds=-1), first + 3 * DAY]
    with transaction(bank.engine) as connection:
        events.ensure_partitions(connection, first - DAY)
    for n, moment in enumerate(at):
        ms = int(moment.timestamp() * 1000)
        born = str(uuid6.UUID(int=(ms << 80) | (7 << 76) | (2 << 62) | n))
        bank.log.enter(born, tokens=(10**n, 0, 0, 0), entry_id=f"{ms}-0")
    bank.ingest()
    assert bank.ledger.count("usage_quarantine") == 0

    found = bank.figures(bank.key, now)
    assert (found.day_spent, found.month_spent) == (1000 * 10_000, 1110 * 10_000)
    assert found.day == (first + 3 * DAY - datetime(1970, 1, 1, tzinfo=UTC)).days
    assert found.month == first.year * 12 + first.month - 1


def test_what_costs_less_than_a_unit_is_not_lost(bank: Bank) -> None:
    """A thousand requests of a token each, at 0.00007 a million (0.7 units): control-layer#227, langfuse#1041. Redis
    rounds each request up, Postgres none; neither is below the truth, and the difference is no drift."""
    bank.price = bank.ledger.price(input_per_mtok="0.00007", cached_input_per_mtok="0", output_per_mtok="0")
    bank.log.facts = msgspec.structs.replace(bank.log.facts, price_id=bank.price.id)
    bank.grant("1")
    for _ in range(1000):
        bank.log.enter(tokens=(1, 0, 0, 0))
    bank.lease(ORG)
    bank.ingest()

    assert bank.balance().spent == Decimal("0.00000007")
    assert bank.figures().spent == 700
    assert bank.account().spent == 1000
    assert bank.watch().drift(bank.org_id, ORG) is None


# --- each request is charged once


def test_usage_is_in_the_figures_or_charged_here_or_charged_late(bank: Bank) -> None:
    """One request of each kind: ingested before the lease, run under it, ingested after it and not seen by it."""
    bank.grant("5")
    bank.log.enter(tokens=(1, 0, 0, 0))
    bank.ingest()
    bank.log.enter(tokens=(10, 0, 0, 0))
    bank.run(100, 0)
    assert bank.account().spent == 101 * 10_000

    bank.ingest()

    assert bank.account().spent == 111 * 10_000
    bank.agree()


def test_an_unlimited_scope_that_gets_a_budget_counts_what_ran_without_it(bank: Bank) -> None:
    """Admitted when only its key was limited; the project's budget comes while it runs."""
    bank.grant("5")
    request_id, _ = bank.reserve((10, 10))
    project = f"project:{bank.log.facts.project_id}"
    bank.lease(project)
    bank.finish(request_id, 10, 10)
    bank.settle(request_id, 10, 10)
    bank.ingest()

    assert bank.account(project).spent == 300_000
    bank.agree()


def test_what_its_gateway_settled_otherwise_becomes_what_was_billed(bank: Bank) -> None:
    """The gateway saw fewer tokens than its worker counted, or thought that nobody pays; new-api#6911."""
    bank.grant("5")
    for used, billed in ((3, True), (8, False), (10, True)):
        request_id, _ = bank.reserve((10, 20))
        bank.settle(request_id, 10, used, billed=billed)
        bank.finish(request_id, 10, 8, "cancelled")

    bank.ingest()

    assert bank.account().spent == 3 * 260_000
    bank.agree()


def test_what_the_ledger_refuses_is_paid_for_by_nobody(bank: Bank) -> None:
    bank.grant("5")
    request_id, _ = bank.reserve()
    bank.settle(request_id, 10, 5)
    bank.log.enter(request_id, tokens=(10, 11, 5, 0))

    bank.ingest()

    assert (bank.ledger.count("usage_quarantine"), bank.account().spent) == (1, 0)
    bank.agree()


def test_of_two_endings_that_say_otherwise_the_one_in_the_ledger_is_charged(bank: Bank) -> None:
    """The first one's consumer dies before it can charge; the second one's must not charge its own."""
    bank.grant("5")
    bank.lease(ORG)
    request_id = str(uuid6.uuid7())
    bank.finish(request_id, 10, 5)
    with pytest.raises(KeyboardInterrupt):
        bank.ingest(settle=die)
    bank.finish(request_id, 10, 7)

    bank.ingest()

    assert (bank.ledger.count("usage_conflicts"), bank.account().spent) == (1, 200_000)


def die(found: Sequence[events.Ingested]) -> None:
    raise KeyboardInterrupt


def test_a_consumer_that_dies_before_or_after_it_charged_charges_once(bank: Bank) -> None:
    """And a lease that was opened in between has it in its figures: it must not be charged to it again."""
    bank.grant("5")
    bank.lease(bank.key)
    bank.log.enter(tokens=(10, 0, 5, 0))

    def charges_and_dies(found: Sequence[events.Ingested]) -> None:
        bank.charge(found)
        raise KeyboardInterrupt

    for last in (die, charges_and_dies, charges_and_dies):
        with pytest.raises(KeyboardInterrupt):
            bank.ingest(settle=last)
        bank.lease(ORG)
    bank.ingest()

    assert bank.account(bank.key).spent == bank.account(ORG).spent == 200_000
    bank.agree()


def test_two_consumers_of_one_entry_charge_once(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage.claim_stale, "__kwdefaults__", {"stale_ms": 0})
    bank.grant("5")
    bank.lease(ORG)
    for _ in range(20):
        bank.log.enter(tokens=(10, 0, 5, 0))

    def slow(found: Sequence[events.Ingested]) -> None:
        time.sleep(0.05)
        bank.charge(found)

    def consume(name: str) -> int:
        return events.ingest(bank.store, bank.engine, [MODEL], name, settle=slow)

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(consume, "abcd")) >= 20
    bank.ingest()

    assert bank.account().spent == 20 * 200_000
    bank.agree()


def test_a_hold_is_remembered_until_its_entry_cannot_come_again(bank: Bank) -> None:
    """A repeat after more than an hour of darkness is told from a stranger; afterwards it takes no place for long."""
    bank.grant("5")
    request_id = bank.run()
    hold_key = counters.hold_key(bank.org_id, request_id)
    with pytest.raises(KeyboardInterrupt):
        bank.ingest(settle=lambda found: (bank.charge(found), die(found)))
    assert bank.store.client.ttl(hold_key) > counters.MONEY_REMEMBER_S - 60

    bank.ingest()

    assert 0 < bank.store.client.ttl(hold_key) <= counters.REMEMBER_S
    bank.agree()


# --- leases


def test_killed_and_reseeded_twice_from_two_processes_is_the_sum_of_the_ledger(bank: Bank, database: Database) -> None:
    """litellm #36926, #28247, #30460, #27639, #30002, #40050: a counter that is seeded again must not double."""
    bank.grant("5")
    for _ in range(3):
        bank.run()
    bank.ingest()
    engines = [database.engine(), database.engine()]

    for _ in range(2):
        bank.store.client.flushall()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda engine: lease(engine, bank.store, bank.org_id, ORG), engines * 2))
        assert bank.account().spent == 3 * 200_000

    bank.ingest()
    bank.agree()


def test_a_lease_waits_for_an_ingest_that_is_under_way(bank: Bank) -> None:
    """So its figures have all of it, or none."""
    bank.grant("5")
    with ThreadPoolExecutor(1) as pool:
        with transaction(bank.engine) as connection:
            count_up(connection, [bank.org_id])
            opening = pool.submit(bank.lease, ORG)
            time.sleep(0.2)
            assert not opening.done()
        opening.result(timeout=5)
    assert bank.store.run(balances.opened(bank.org_id, ORG)) is not None


def test_figures_whose_lock_was_lost_open_no_lease(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the figures and Redis the connection breaks, and usage is ingested and charged where no lease was yet."""
    bank.grant("5")
    bank.log.enter(tokens=(10, 0, 5, 0))
    opened = balances.open_lease
    late: list[int] = []

    def slow(org_id: str, scope: str, found: balances.Figures) -> Any:
        if not late:
            late.append(found.lease)
            with ThreadPoolExecutor(1) as pool:
                pool.submit(bank.charge, ingested_without_lock(bank)).result()
        return opened(org_id, scope, found)

    monkeypatch.setattr(balances, "open_lease", slow)
    with pytest.raises(DatabaseAway):
        bank.lease(ORG)
    assert bank.store.run(balances.leases(bank.org_id)) == []
    bank.lease(ORG)
    bank.ingest()

    [number] = late
    assert bank.store.run(balances.opened(bank.org_id, ORG))[0] > number  # type: ignore[index]
    assert bank.account().spent == 200_000
    bank.agree()


def ingested_without_lock(bank: Bank) -> list[events.Ingested]:
    """The whole ingest, as if the mark's lock had been lost with its connection: it is cut from outside."""
    found: list[events.Ingested] = []
    bank.ledger.engine.dispose()
    with transaction(bank.ledger.engine) as connection:
        connection.execute(
            text("""SELECT pg_terminate_backend(pid) FROM pg_stat_activity
          WHERE datname = current_database() AND pid <> pg_backend_pid()""")
        )
    events.ingest(bank.store, bank.ledger.engine, [MODEL], "c1", settle=found.extend)
    return found


def test_where_postgres_has_gone_back_leases_are_opened_all_the_same(bank: Bank) -> None:
    """A failover that lost ingests: Redis knows of a later one than Postgres has."""
    bank.grant("5")
    bank.store.run(counters.late(bank.org_id, "lost", [ORG], 50, 0))

    bank.lease(ORG)

    with transaction(bank.engine) as connection:
        assert hold(connection, bank.org_id) == 50
    bank.run()
    bank.ingest()
    bank.agree()


def test_a_lease_that_was_dropped_comes_back_with_another_number(bank: Bank) -> None:
    """What ran under the first is not in the figures of the second, and charged to it once, when it is ingested."""
    bank.grant("5")
    done = bank.run()
    running, _ = bank.reserve()
    number = bank.store.run(balances.opened(bank.org_id, ORG))[0]  # type: ignore[index]
    assert not drop_lease(bank.engine, bank.store, bank.org_id, ORG, number), "money of it is held"

    assert drop_lease(bank.engine, bank.store, bank.org_id, ORG, number, held=True)
    bank.lease(ORG)
    bank.report(running, 10, 4)
    bank.settle(running, 10, 4)
    bank.finish(running, 10, 4)
    assert not drop_lease(bank.engine, bank.store, bank.org_id, ORG, number, held=True), "it is another one"
    assert bank.account().spent == 0

    bank.ingest()

    assert done and bank.account().spent == 200_000 + 180_000
    bank.agree()


def test_whoever_wants_a_lease_that_is_being_opened_waits_for_that(bank: Bank, database: Database) -> None:
    """A herd takes one connection, and learns together that the database is away."""
    bank.grant("5")
    database.go_away()
    began_s = time.monotonic()
    with ThreadPoolExecutor(30) as pool:
        told = [pool.submit(bank.lease, ORG) for _ in range(30)]
        assert all(isinstance(one.exception(), DatabaseAway) for one in told)
    database.come_back()

    assert time.monotonic() - began_s < 5
    bank.lease(ORG)
    assert bank.account().granted == units_down(Decimal(5))


def test_with_postgres_away_leases_go_on_and_no_new_one_is_opened(bank: Bank, database: Database) -> None:
    bank.grant("5")
    bank.reserve()
    database.go_away()

    assert isinstance(bank.reserve()[1], Reserved)
    with pytest.raises(DatabaseAway):
        bank.lease("project:another")
    database.come_back()


def test_a_balance_begins_with_its_first_grant(bank: Bank) -> None:
    """What was used before it, and invoiced, is not paid twice; whoever had a budget before has another lease then."""
    bank.limits = [bank.limits[0], Limit(scope=ORG, money_per_month=Decimal(5))]
    bank.run(1_000_000, 0)
    bank.ingest()
    assert bank.account().spent == units_up(Decimal(1))

    bank.grant("2")
    bank.limits = [bank.limits[0], Limit(scope=ORG, prepaid=True)]
    bank.run(500_000, 0)

    assert bank.account().spent == units_up(Decimal("0.5"))
    bank.ingest()
    bank.agree()
    assert bank.balance().left == Decimal("1.5")


def test_a_grant_holds_at_once_and_what_is_used_up_is_refused_at_once(bank: Bank) -> None:
    """one-api#204: a key whose money is gone ran on for five minutes."""
    bank.grant("0.00003")
    bank.run(10, 10)
    refused = bank.reserve((1, 1))[1]
    assert isinstance(refused, Refused) and refused.reason == "balance"

    bank.grant("0.00001")
    assert isinstance(bank.reserve((1, 1))[1], Reserved)


def test_twenty_at_once_on_a_balance_for_one_are_one(bank: Bank) -> None:
    """sub2api#2011, DEEIX-Chat#471, octopus#234; litellm#26672: checked, and then spent by all."""
    bank.grant("0.00003")
    with ThreadPoolExecutor(20) as pool:
        answers = [answer for _, answer in pool.map(lambda _: bank.reserve((10, 10)), range(20))]

    assert sorted(type(answer).__name__ for answer in answers) == ["Refused"] * 19 + ["Reserved"]


# --- currencies that have many for a dollar


def test_an_organisation_that_was_granted_and_has_spent_millions_has_what_is_left(bank: Bank) -> None:
    """Five million rupiah in one lease, and again in one that is opened later: at 1,200,000 a million tokens of input,
    which is more than Lua counts exactly. What is left is spent to the token, and no token more."""
    bank.price = bank.ledger.price(input_per_mtok="1200000", cached_input_per_mtok="0", output_per_mtok="1200000")
    bank.log.facts = msgspec.structs.replace(bank.log.facts, price_id=bank.price.id)
    bank.limits = [Limit(scope=bank.key), Limit(scope=ORG, prepaid=True)]
    bank.grant("5000000")
    for _ in range(8):
        bank.run(500_000, 0)
        bank.ingest()
        bank.agree()
    bank.run(166_666, 0)
    assert bank.watch().reconcile() == [] and bank.account().spent == sum_up(Decimal("4999999.2"))

    for amount in ("3000000.4", "3000001.2"):
        refused = bank.reserve((1, 0))[1]
        assert isinstance(refused, Refused) and refused.reason == "balance"
        bank.grant(amount)
        request_id, answer = bank.reserve((0, 700_000))
        assert isinstance(answer, Reserved) and answer.allowance_tokens == 700_000
        bank.finish(request_id, 0, 700_000)
        bank.settle(request_id, 0, 700_000)
        for _ in range(3):
            bank.run(600_000, 0)
        bank.run(1, 0)
        bank.ingest()
        bank.agree()
        assert bank.balance().left == 0
        bank.store.client.flushall()


# --- the clock's look


def test_a_drift_is_told_when_it_is_seen_twice_and_never_put_right(bank: Bank) -> None:
    bank.grant("5")
    bank.run()
    bank.ingest()
    watch = bank.watch()
    assert watch.reconcile() == []

    bank.store.client.hincrby(balances.key(bank.org_id, ORG), "spent", -7)

    assert watch.reconcile() == []
    [found] = watch.reconcile()
    assert (found.scope, found.units, found.redis, found.postgres) == (ORG, -7, 199_993, 200_000)
    assert bank.account().spent == 199_993


def test_what_runs_or_waits_is_no_drift(bank: Bank) -> None:
    """Charged and running; ended and not ingested; ingested and not charged."""
    bank.grant("5")
    running, _ = bank.reserve()
    bank.report(running, 10, 3)
    bank.run()
    assert bank.watch().drift(bank.org_id, ORG) is None
    bank.log.enter(tokens=(10, 0, 5, 0))
    with pytest.raises(KeyboardInterrupt):
        bank.ingest(settle=die)

    assert bank.watch().drift(bank.org_id, ORG) is None

    bank.ingest()
    bank.settle(running, 10, 3)
    bank.finish(running, 10, 3)
    bank.ingest()
    bank.agree()


def test_leases_that_nothing_needs_are_closed(bank: Bank) -> None:
    """The key's budget is no row in Postgres; the organisation's plan is."""
    bank.grant("5")
    bank.run()
    assert bank.store.run(balances.leases(bank.org_id)) == sorted([bank.key, ORG])

    bank.watch().reconcile()

    assert bank.store.run(balances.leases(bank.org_id)) == [ORG]
    bank.run()
    bank.ingest()
    bank.agree()


# --- any order of anything


@dataclass
class Running:
    """A request of the model's."""

    used_in: int
    used_out: int
    outcome: str
    reported: int = 0


_steps = st.lists(
    st.one_of(
        st.tuples(st.just("reserve"), st.integers(0, 20), st.integers(1, 20), st.sampled_from(list(Outcome))),
        st.tuples(st.sampled_from(["report", "settle", "finish", "settle wrong", "finish again"]), st.integers(0, 7)),
        st.tuples(st.sampled_from(["ingest", "ingest, die", "ingest, charge, die", "roll up", "flush", "reconcile"])),
        st.tuples(st.sampled_from(["drop", "lease"]), st.sampled_from(["key", ORG])),
        st.tuples(st.sampled_from(["grant", "entry"]), st.integers(1, 9)),
    ),
    min_size=5,
    max_size=40,
)


@pytest.fixture
def banks(store: Store, clock: Clock, engine: Engine, ledger: Ledger) -> Callable[[], Bank]:
    made: list[Bank] = []

    def another() -> Bank:
        """A new organisation in the same stores, at the same price."""
        store.client.flushall()
        if not made:
            made.append(new_bank(store, clock, engine, ledger))
            return made[0]
        with transaction(engine) as connection:
            organisation = tenants.create_organisation(connection, f"acme {uuid6.uuid7()}")
            tenants.set_plan(connection, organisation.id, "prepaid")
        log = Log(store, msgspec.structs.replace(made[0].log.facts, org_id=organisation.id))
        return Bank(store, clock, engine, log, ledger, made[0].price, organisation.id, made[0].limits)

    return another


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=_steps, millions=st.sampled_from([0, 5]))
def test_whatever_happens_in_whatever_order_redis_has_spent_what_the_ledger_says(
    banks: Callable[[], Bank], steps: list[tuple[Any, ...]], millions: int
) -> None:
    """Steps of requests, gateways, workers, consumers and operators, each of which may die half-way, come twice or not
    at all. At the end all that runs ends and all that waits is ingested: spent is the sum of the ledger, to the
    unit; also where millions were granted and spent before."""
    bank = banks()
    bank.grant(f"{millions}000001")
    if millions:
        bank.log.enter(tokens=(millions * 10**12, 0, 0, 0))
        bank.ingest()
    Play(bank).all(steps)


class Play:
    """Plays steps on a bank."""

    def __init__(self, bank: Bank) -> None:
        self.bank = bank
        self.requests: dict[str, Running] = {}
        self.ended: dict[str, Running] = {}  #: in the log, or beyond

    def all(self, steps: list[tuple[Any, ...]]) -> None:
        for what, *how in steps:
            getattr(self, what.partition(",")[0].replace(" ", "_"))(*how, *what.split(", ")[1:])
        for request_id in list(self.requests):
            self._end(request_id)
        self.bank.ingest()
        self.bank.agree()

    def reserve(self, used_in: int, used_out: int, outcome: Outcome) -> None:
        request_id, answer = self.bank.reserve((used_in, used_out))
        if isinstance(answer, Reserved):
            self.requests[request_id] = Running(used_in, used_out, outcome.value)

    def report(self, n: int) -> None:
        for request_id, one in self._nth(n):
            one.reported = min(one.used_out, one.reported + 3)
            self.bank.report(request_id, one.used_in, one.reported)

    def settle(self, n: int) -> None:
        for request_id, one in self._nth(n):
            self.bank.settle(request_id, one.used_in, one.used_out, billed=one.outcome in rating.BILLED)

    def settle_wrong(self, n: int) -> None:
        for request_id, one in self._nth(n):
            self.bank.settle(request_id, one.used_in, one.reported, billed=one.outcome not in rating.BILLED)

    def finish(self, n: int) -> None:
        for request_id, _ in self._nth(n):
            self._end(request_id)

    def finish_again(self, n: int) -> None:
        for request_id, one in list(self.ended.items())[n : n + 1]:
            self.bank.finish(request_id, one.used_in, one.used_out, one.outcome)

    def ingest(self, *until: str) -> None:
        def settle(found: Sequence[events.Ingested]) -> None:
            if "charge" in until or "die" not in until:
                self.bank.charge(found)
            if "die" in until:
                raise KeyboardInterrupt

        try:
            self.bank.ingest(settle=settle)
        except KeyboardInterrupt:
            return

    def roll_up(self) -> None:
        hours.roll_dirty(self.bank.engine)

    def flush(self) -> None:
        """The store of limits loses all it has; the log of usage, which workers would fill again, is another's."""
        keys = list(self.bank.store.client.scan_iter(f"*{self.bank.org_id}*"))
        if keys:
            self.bank.store.client.delete(*keys)

    def reconcile(self) -> None:
        assert self.bank.watch().reconcile() == []

    def drop(self, which: str) -> None:
        scope = ORG if which == ORG else self.bank.key
        if opened := self.bank.store.run(balances.opened(self.bank.org_id, scope)):
            drop_lease(self.bank.engine, self.bank.store, self.bank.org_id, scope, opened[0], held=True)

    def lease(self, which: str) -> None:
        self.bank.lease(ORG if which == ORG else self.bank.key)

    def grant(self, amount: int) -> None:
        self.bank.grant(str(amount))

    def entry(self, amount: int) -> None:
        with transaction(self.bank.engine) as connection:
            enter(connection, self.bank.org_id, Decimal(-amount) / 100, reason="x")
        tell(self.bank.engine, self.bank.store, self.bank.org_id)

    def _nth(self, n: int) -> list[tuple[str, Running]]:
        return list(self.requests.items())[n : n + 1]

    def _end(self, request_id: str) -> None:
        one = self.ended[request_id] = self.requests.pop(request_id)
        self.bank.finish(request_id, one.used_in, one.used_out, one.outcome)


# --- what it costs


def test_figures_of_many_events_take_well_below_a_statements_time(bank: Bank) -> None:
    """Not one hour of them is rolled up: the worst that a lease may find. Here a tenth of a million, which takes less
    than a tenth of a second on an idle machine."""
    bank.log.enter()
    bank.ingest()
    bank.ledger.execute(
        """INSERT INTO usage_events (event_id, admitted_at, entered_at, org_id, project_id, key_id, model, tier,
            price_id, input_tokens, cached_tokens, output_tokens, reasoning_tokens, outcome, attempt, worker,
            payload_sha256, ingest)
          SELECT id, uuid7_time(id), entered_at, org_id, project_id, key_id, model, tier, price_id, input_tokens,
            cached_tokens, output_tokens, reasoning_tokens, outcome, attempt, worker, payload_sha256, ingest
          FROM (SELECT overlay(event_id::text placing lpad(to_hex(n), 12, '0') from 25)::uuid AS id, event.*
            FROM usage_events AS event, generate_series(1, 100000) AS n) AS made"""
    )
    bank.ledger.execute("ANALYZE usage_events")

    began_s = time.perf_counter()
    found = bank.figures()
    took_s = time.perf_counter() - began_s

    assert found.month_spent == units_up(Decimal(100_001 * (6 * 1 + 4 * Decimal("0.5") + 7 * 2)) / 10**6)
    assert took_s < 1


def test_listed_tells_credits_in_their_order(bank: Bank) -> None:
    bank.grant("1")
    with transaction(bank.engine) as connection:
        enter(connection, bank.org_id, Decimal(2), reason="x")
        assert [one.shown()["amount"] for one in listed(connection, bank.org_id)] == ["1", "2"]
