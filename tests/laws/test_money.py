"""Money binds, on real gateways and workers: what a budget or a balance covers is served, and nothing beyond it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import psutil
import pytest
import requests
import uuid6

from billing import rating
from billing.credits import balance, enter, grant, tell
from core import postgres
from core.accounts import keys, quotas, tenants
from core.limits import balances
from ops import stores
from tests.laws.test_disconnects import HELLO
from tests.platform import MODEL, PEPPER, Platform, kill, until

#: What a million tokens cost on the tests' platform (tests/platform.py), and how long an answer is.
INPUT, OUTPUT, ANSWER = 1, 2, 5


@dataclass
class Payer:
    """An organisation of its own."""

    platform: Platform
    engine: postgres.Engine
    org_id: str
    project_id: str

    def key(self, project_id: str = "", kind: Any = "live", **limits: Decimal) -> str:
        """A new key, under budgets of its own."""
        with postgres.transaction(self.engine) as connection:
            plain, row = keys.create_key(
                connection,
                org_id=self.org_id,
                project_id=project_id or self.project_id,
                name="k",
                pepper=PEPPER.encode(),
                kind=kind,
            )
        if limits:
            self.limit(f"key:{row.id}", **limits)
        keys.project_all(self.engine, self.platform.store, self.org_id)
        return plain

    def project(self) -> str:
        with postgres.transaction(self.engine) as connection:
            return tenants.create_project(connection, org_id=self.org_id, name=str(uuid6.uuid7())).id

    def limit(self, scope: str, **limits: Decimal) -> None:
        with postgres.transaction(self.engine) as connection:
            quotas.set_limits(connection, self.org_id, scope, limits)
        self.tell()

    def prepay(self, amount: Decimal) -> None:
        """As `forebay credit grant` does, of an organisation that pays ahead."""
        with postgres.transaction(self.engine) as connection:
            tenants.set_plan(connection, self.org_id, "prepaid")
            grant(connection, self.org_id, amount, reason="paid")
        tell(self.engine, self.platform.store, self.org_id)
        self.tell()

    def tell(self) -> None:
        keys.project_all(self.engine, self.platform.store, self.org_id)

    def calls(self, calls: int) -> Decimal:
        """What so many calls cost. The prompt's length is asked of one that nothing binds."""
        prompt = ask(self.platform, self.platform.key).json()["usage"]["prompt_tokens"]
        return calls * Decimal(prompt * INPUT + ANSWER * OUTPUT) / 10**6

    def spent(self) -> Decimal:
        """What the ledger says, once it has everything."""
        self.quiet()
        query = postgres.text("""SELECT outcome, input_tokens - cached_tokens AS uncached, cached_tokens, output_tokens
          FROM usage_events WHERE org_id = CAST(:org_id AS uuid)""")
        with postgres.transaction(self.engine) as connection:
            rows = connection.execute(query, {"org_id": self.org_id}).all()
        paid = [row for row in rows if row.outcome in rating.BILLED]
        tokens = sum((row.uncached + row.cached_tokens) * INPUT + row.output_tokens * OUTPUT for row in paid)
        return Decimal(tokens) / 10**6

    def quiet(self) -> None:
        """Nothing runs, all is ingested: then Redis and Postgres agree to the unit."""
        self.platform.quiet()
        until(lambda: not self.platform.holds(self.org_id), "its holds to be settled")
        until(lambda: self.platform.money_agrees(self.org_id), "Redis and Postgres to agree about money", 5)


@pytest.fixture
def payer(platform: Platform) -> Iterator[Payer]:
    engine = postgres.connect(platform.database_url)
    with postgres.transaction(engine) as connection:
        organisation = tenants.create_organisation(connection, f"payer {uuid6.uuid7()}")
        [project] = tenants.projects(connection, organisation.id)
    found = Payer(platform, engine, organisation.id, project.id)
    yield found
    found.quiet()
    engine.dispose()


def ask(platform: Platform, key: str, gateway: int = 0, **more: Any) -> requests.Response:
    url = f"http://127.0.0.1:{platform.ports[gateway]}/v1/chat/completions"
    body = {"model": MODEL, "messages": HELLO, "max_tokens": ANSWER, **more}
    return requests.post(url, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=30)


def ask_many(platform: Platform, key: str, calls: int) -> list[str]:
    """Ask at once at both gateways; what came of each."""
    with ThreadPoolExecutor(calls) as pool:
        return sorted(map(result, pool.map(lambda n: ask(platform, key, n % 2), range(calls))))


def ask_in_turn(platform: Platform, key: str, calls: int) -> list[str]:
    """One after another, once the one before it is settled."""
    return [result(ask(platform, key, n % 2)) for n in range(calls)]


def result(answer: requests.Response) -> str:
    return "ok" if answer.status_code == 200 else str(answer.json()["error"]["code"])


SPENT = "insufficient_quota"


def test_two_gateways_on_a_budget_for_ten_calls_serve_ten_of_twenty(payer: Payer) -> None:
    """maximhq/bifrost#3547: a counter at each of N gateways serves N budgets."""
    key = payer.key(money_per_month=payer.calls(10))

    assert ask_many(payer.platform, key, 20) == [SPENT] * 10 + ["ok"] * 10
    assert payer.spent() == payer.calls(10)


def test_a_balance_for_one_serves_one_of_twenty_at_once(payer: Payer) -> None:
    """sub2api#2011, DEEIX-Chat#471, octopus#234: -200, since all had looked before one had paid. litellm#26672."""
    payer.prepay(payer.calls(1))
    key = payer.key()

    assert ask_many(payer.platform, key, 20) == [SPENT] * 19 + ["ok"]
    assert payer.spent() == payer.calls(1)
    with postgres.transaction(payer.engine) as connection:
        assert balance(connection, payer.org_id, datetime.now(UTC)).left == 0
    payer.prepay(payer.calls(2))
    assert ask_many(payer.platform, key, 4) == [SPENT] * 2 + ["ok"] * 2, "and what is paid then is served at once"


def test_a_correction_holds_at_once(payer: Payer) -> None:
    """one-api#204: a cached quota lets a spent key run for minutes."""
    payer.prepay(payer.calls(5))
    key = payer.key()
    assert ask_in_turn(payer.platform, key, 1) == ["ok"]

    with postgres.transaction(payer.engine) as connection:
        enter(connection, payer.org_id, -payer.calls(4), reason="paid back")
    tell(payer.engine, payer.platform.store, payer.org_id)

    assert ask_in_turn(payer.platform, key, 1) == [SPENT]


def test_of_several_budgets_the_tightest_binds_and_each_counts_what_is_below_it(payer: Payer) -> None:
    payer.limit("org", money_per_month=payer.calls(5))
    payer.limit(f"project:{payer.project_id}", money_per_day=payer.calls(3))
    narrow, wide = payer.key(money_per_month=payer.calls(2)), payer.key()
    elsewhere = payer.key(payer.project())

    assert ask_in_turn(payer.platform, narrow, 3) == ["ok", "ok", SPENT]
    assert ask_in_turn(payer.platform, wide, 2) == ["ok", SPENT]
    assert ask_in_turn(payer.platform, elsewhere, 3) == ["ok", "ok", SPENT]
    assert payer.spent() == payer.calls(5)


def test_a_budget_partly_spent_is_partly_spent_after_a_store_lost_everything(payer: Payer) -> None:
    """FLUSHALL in mid-month, as sudden as it comes. Keys, prices and leases come back from Postgres."""
    platform = payer.platform
    key = payer.key(money_per_month=payer.calls(10))
    assert ask_many(platform, key, 6) == ["ok"] * 6
    payer.quiet()

    platform.store.client.flushall()
    served = list(served_of(platform, key, 12))

    assert served.count("ok") == 4 and served[-1] == SPENT
    assert set(served) <= {"ok", SPENT, "money_unavailable", "store_unavailable", "overloaded"}
    assert payer.spent() == payer.calls(10)


def served_of(platform: Platform, key: str, calls: int) -> Iterator[str]:
    """Ask until so many had an answer about money; a platform that finds itself again may say that it cannot, yet."""
    deadline = time.monotonic() + 60
    while calls and time.monotonic() < deadline:
        told = result(ask(platform, key, calls % 2))
        calls -= told in ("ok", SPENT)
        yield told


def test_with_postgres_away_known_leases_go_on_and_others_are_not_admitted(payer: Payer) -> None:
    """litellm#26672: a budget that cannot be looked up is not a budget that is not there."""
    platform = payer.platform
    known, unknown = payer.key(money_per_month=payer.calls(3)), payer.key(money_per_month=payer.calls(3))
    free = payer.key()
    assert ask_in_turn(platform, known, 1) == ["ok"]
    for gateway in range(2):
        assert result(ask(platform, free, gateway)) == "ok"

    with postgres_away(platform):
        assert ask_in_turn(platform, known, 3) == ["ok", "ok", SPENT]
        refused = ask(platform, unknown)
        assert (refused.status_code, result(refused)) == (503, "money_unavailable")
        assert int(refused.headers["retry-after"]) > 0
        assert ask_in_turn(platform, free, 2) == ["ok", "ok"]

    until(lambda: result(ask(platform, unknown)) != "money_unavailable", "Postgres to be back")
    assert payer.spent() == payer.calls(3 + 4 + 1)


@contextmanager
def postgres_away(platform: Platform) -> Iterator[None]:
    postmaster = int((platform.data / "postgres" / "cluster" / "postmaster.pid").read_text().split()[0])
    kill(postmaster, signal.SIGINT)
    until(lambda: not psutil.pid_exists(postmaster), "Postgres to stop")
    try:
        yield
    finally:
        stores.start_postgres(platform.data)


def test_what_its_worker_lost_costs_nothing_in_either_place(payer: Payer) -> None:
    """A seeded answer, part of which was delivered, cannot be gone on with: nobody pays for it."""
    key = payer.key(money_per_month=payer.calls(2000))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, payer.platform, key, max_tokens=3000, seed=7, stream=True)
        [request_id] = until(lambda: payer.platform.holds(payer.org_id), "a hold")
        # Of the prompt alone nothing would be lost with its worker: it is run again.
        one = payer.calls(1) * balances.UNITS
        until(lambda: spent_in_redis(payer) > one, "it to be charged for some of its answer")
        payer.platform.worker_running(request_id).send_signal(signal.SIGKILL)
        assert "worker_lost" in asked.result().text

    assert payer.spent() == 0
    assert payer.platform.usage_of(request_id)["outcome"] == "worker_lost"
    assert spent_in_redis(payer) == 0


def spent_in_redis(payer: Payer) -> int:
    store = payer.platform.store
    found = (store.run(balances.account(payer.org_id, scope)) for scope in store.run(balances.leases(payer.org_id)))
    return sum(account.spent for account in found if account is not None)


def test_whoever_leaves_pays_for_what_was_generated_until_then(payer: Payer) -> None:
    """The gateway settles what it saw, the worker's count is billed, and both stores have that in the end."""
    key = payer.key(money_per_month=payer.calls(100))
    url = f"{payer.platform.url}/v1/chat/completions"
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 250, "stream": True}
    with requests.post(url, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=30, stream=True) as answer:
        for line in answer.iter_lines():
            if b'"content":"' in line:
                break

    row = payer.platform.usage_of(answer.headers["x-request-id"])
    assert (row["outcome"], 0 < row["output_tokens"] < 250) == ("cancelled", True)
    assert payer.spent() == Decimal(row["input_tokens"] * INPUT + row["output_tokens"] * OUTPUT) / 10**6
    assert spent_in_redis(payer) == payer.spent() * balances.UNITS


def test_a_new_secret_has_what_the_old_one_left(payer: Payer) -> None:
    """LiteLLM #31079: a rotation gave the whole budget again."""
    old = payer.key(money_per_month=payer.calls(2))
    assert ask_in_turn(payer.platform, old, 1) == ["ok"]
    key_id = old.split("_")[2]
    with postgres.transaction(payer.engine) as connection:
        new, *_ = keys.rotate(connection, key_id, pepper=PEPPER.encode(), overlap=timedelta(hours=1))
    payer.tell()

    assert ask_in_turn(payer.platform, new, 2) == ["ok", SPENT]
    assert ask_in_turn(payer.platform, old, 1) == [SPENT]


def test_no_kind_of_key_goes_round_the_budget(payer: Payer) -> None:
    """buttercup#550: a master key spent 4.77 of a cap of 1. Ours cannot generate; a test key is metered like any."""
    payer.limit("org", money_per_month=payer.calls(1))

    assert result(ask(payer.platform, payer.key(kind="admin"))) not in ("ok", SPENT)
    assert ask_in_turn(payer.platform, payer.key(kind="test"), 2) == ["ok", SPENT]
    assert payer.spent() == payer.calls(1)
