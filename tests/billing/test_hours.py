"""Roll-up: the same totals however often, by however many, and to the last digit those of the events."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from billing import events, hours, prices, rating, reports
from billing.reports import By
from core.postgres import Engine, transaction
from core.redis import Store
from core.values import Outcome, Usage

NOW = datetime.now(UTC)
HOUR = NOW.replace(minute=0, second=0, microsecond=0)


def at(hour: int, number: int) -> str:
    """An entry id in the hour that many from now; ids must grow."""
    return f"{int((HOUR + timedelta(hours=hour)).timestamp() * 1000) + 3_599_000}-{number}"


@pytest.fixture
def mixed(log: Any, ledger: Any, ingest: Callable[[], int]) -> None:
    """Endings of every outcome, at three prices, of three keys, in three hours."""
    chance = random.Random(7)
    prices = [ledger.price(at=NOW + timedelta(days=day), output_per_mtok=f"0.{day}234567891") for day in (1, 2)]
    logs = [log, *map(log.at_price, prices)]
    for number in range(120):
        one = chance.choice(logs)
        one.facts = msgspec.structs.replace(one.facts, key_id=chance.choice("abc") * 12)
        tokens = chance.randrange(5, 5000), chance.randrange(5), chance.randrange(5, 900), chance.randrange(5)
        one.enter(outcome=chance.choice(list(Outcome)), tokens=tokens, entry_id=at(number // 40, number + 1))
    ingest()


def test_the_hours_say_what_the_events_say_to_the_last_digit(mixed: None, ledger: Any, engine: Engine) -> None:
    assert hours.roll_dirty(engine) == 3

    tokens, money = [0, 0, 0], Decimal(0)
    for outcome, *counts, price_id in ledger.rows(
        "SELECT outcome, input_tokens, cached_tokens, output_tokens, price_id FROM usage_events"
    ):
        usage = Usage(input_tokens=counts[0], cached_tokens=counts[1], output_tokens=counts[2])
        paid = rating.billed(Outcome(outcome), usage)
        counted = (paid.input_tokens, paid.cached_tokens, paid.output_tokens)
        tokens = [a + b for a, b in zip(tokens, counted, strict=True)]
        money += rating.amount(paid, price(engine, price_id)) if price_id else 0
    [totals] = ledger.rows(
        "SELECT sum(requests), sum(input_tokens), sum(cached_tokens), sum(output_tokens), sum(amount) FROM usage_hourly"
    )
    assert totals == (120, *tokens, money)
    assert money > 0


def price(engine: Engine, price_id: int) -> rating.Price:
    with transaction(engine) as connection:
        return prices.by_id(connection, [price_id])[price_id]


def test_rolling_up_again_gives_the_same_rows(mixed: None, ledger: Any, engine: Engine) -> None:
    hours.roll_dirty(engine)
    before = ledger.hourly()

    assert hours.roll_dirty(engine) == 0
    for hour in range(3):
        hours.roll(engine, HOUR + timedelta(hours=hour))

    assert ledger.hourly() == before != []


def test_two_that_roll_up_at_once_give_the_same_rows(mixed: None, ledger: Any, engine: Engine) -> None:
    hours.roll_dirty(engine)
    before = ledger.hourly()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: hours.roll(engine, HOUR + timedelta(hours=n % 3)), range(24)))

    assert ledger.hourly() == before


def test_rolling_up_while_usage_comes_in_misses_nothing(log: Any, ledger: Any, store: Store, engine: Engine) -> None:
    """Whatever is committed while an hour is rolled leaves it dirty."""
    for _ in range(300):
        log.enter()

    with ThreadPoolExecutor(3) as pool:
        rolls = [pool.submit(hours.roll_dirty, engine) for _ in range(2)]
        pool.submit(lambda: [step(store, engine) for _ in range(30)]).result()
        [roll.result() for roll in rolls]
    while hours.roll_dirty(engine):
        pass

    assert ledger.rows("SELECT sum(requests) FROM usage_hourly") == [(300,)]


def step(store: Store, engine: Engine) -> None:
    events.ingest(store, engine, ["tiny"], "c1")
    hours.roll_dirty(engine)


def test_a_price_change_inside_an_hour_gives_two_rows(
    log: Any, ledger: Any, engine: Engine, ingest: Callable[[], int]
) -> None:
    """Never an average: each request costs what was in force when it was admitted."""
    before = ledger.price(output_per_mtok="1")
    log.at_price(before).enter(tokens=(0, 0, 1_000_000, 0))
    after = ledger.price(output_per_mtok="2")
    log.at_price(after).enter(tokens=(0, 0, 1_000_000, 0))

    ingest()
    hours.roll_dirty(engine)

    rows = ledger.rows("SELECT price_id, amount FROM usage_hourly ORDER BY price_id")
    assert rows == [(before.id, Decimal(1)), (after.id, Decimal(2))]


def test_late_usage_of_an_hour_is_added_to_it(log: Any, ledger: Any, engine: Engine, ingest: Callable[[], int]) -> None:
    log.enter()
    ingest()
    hours.roll_dirty(engine)

    log.enter()
    ingest()
    assert hours.roll_dirty(engine) == 1

    assert ledger.rows("SELECT requests, input_tokens FROM usage_hourly") == [(2, 20)]


def test_a_sealed_hour_is_left_alone(log: Any, ledger: Any, engine: Engine, ingest: Callable[[], int]) -> None:
    log.enter(entry_id=at(0, 1))
    ingest()
    ledger.execute("UPDATE usage_hours SET state = 'sealed'")

    assert hours.roll_dirty(engine) == 0
    hours.roll(engine, HOUR)

    assert ledger.hourly() == []


@pytest.mark.parametrize("by", list(By))
def test_every_report_adds_up_to_the_same(mixed: None, ledger: Any, engine: Engine, by: By) -> None:
    hours.roll_dirty(engine)
    [expected] = ledger.rows("SELECT sum(requests), sum(output_tokens), sum(amount) FROM usage_hourly")

    with transaction(engine) as connection:
        rows = reports.usage(connection, by=by)

    assert (sum(r.requests for r in rows), sum(r.output_tokens for r in rows), sum(r.amount for r in rows)) == expected
    assert [row.group for row in rows] == sorted({row.group for row in rows})


def test_a_report_is_bounded_by_hours_and_organisation(mixed: None, log: Any, engine: Engine) -> None:
    hours.roll_dirty(engine)

    with transaction(engine) as connection:
        start, end = HOUR + timedelta(hours=1), HOUR + timedelta(hours=2)
        [second] = reports.usage(connection, by=By.HOUR, org_id=log.facts.org_id, since=start, until=end)
        nobody = reports.usage(connection, by=By.HOUR, org_id="018f0000-0000-7000-8000-000000000000")

    assert second.group == f"{HOUR + timedelta(hours=1):%Y-%m-%dT%H:00Z}"
    assert second.requests == 40
    assert nobody == []


def test_money_in_json_is_a_string(mixed: None, engine: Engine) -> None:
    hours.roll_dirty(engine)

    with transaction(engine) as connection:
        [row] = reports.usage(connection, by=By.MODEL)

    shown = row.shown(By.MODEL)
    assert shown["model"] == "tiny" and Decimal(shown["amount"]) == row.amount
    assert isinstance(shown["amount"], str)


def test_usage_that_comes_in_while_its_hour_is_rolled_leaves_it_dirty(
    log: Any, ledger: Any, engine: Engine, ingest: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is committed after the totals were read and before they are written."""
    read = hours._totals

    def interrupted(*arguments: Any) -> Any:
        totals = read(*arguments)
        log.enter(entry_id=at(0, 2))
        ingest()
        return totals

    log.enter(entry_id=at(0, 1))
    ingest()
    with monkeypatch.context() as patch:
        patch.setattr(hours, "_totals", interrupted)
        hours.roll_dirty(engine)
    assert ledger.rows("SELECT requests FROM usage_hourly") == [(1,)]

    assert hours.roll_dirty(engine) == 1
    assert ledger.rows("SELECT requests FROM usage_hourly") == [(2,)]
