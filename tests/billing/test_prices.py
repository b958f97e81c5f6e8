"""The price book: one price at a time, and no writer undoes a newer one."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from billing import prices
from billing.prices import PriceRefused
from core.postgres import Engine, IntegrityError, transaction
from core.redis import Store

NOON = datetime(2026, 11, 29, 12, tzinfo=UTC)


def current(engine: Engine, now: datetime) -> list[str]:
    with transaction(engine) as connection:
        return [str(price.input_per_mtok.normalize()) for price in prices.current(connection, now)]


def test_a_new_price_ends_the_one_before_it(engine: Engine, ledger: Any) -> None:
    ledger.price(at=NOON, input_per_mtok="1")
    ledger.price(at=NOON + timedelta(hours=1), input_per_mtok="2")

    assert current(engine, NOON - timedelta(seconds=1)) == []
    assert current(engine, NOON + timedelta(minutes=59)) == ["1"]
    assert current(engine, NOON + timedelta(hours=1)) == ["2"]


def test_a_price_set_ahead_ends_the_one_that_is_set_later(engine: Engine, ledger: Any) -> None:
    ledger.price(at=NOON + timedelta(days=1), input_per_mtok="2")
    ledger.price(at=NOON, input_per_mtok="1")

    assert current(engine, NOON + timedelta(hours=23)) == ["1"]
    assert current(engine, NOON + timedelta(hours=24)) == ["2"]


def test_two_prices_at_one_time_are_refused(ledger: Any) -> None:
    """By the table itself, whoever writes it."""
    ledger.price(at=NOON)

    with pytest.raises(PriceRefused):
        ledger.price(at=NOON)
    with pytest.raises(IntegrityError, match="exclusion"):
        ledger.execute(
            """INSERT INTO prices (model, tier, currency, effective, input_per_mtok, cached_input_per_mtok,
            output_per_mtok) VALUES ('tiny', 'standard', 'EUR', tstzrange('2027-01-01', NULL), 1, 1, 1)"""
        )


@pytest.mark.parametrize("wrong", ["-1", "NaN", "Infinity", "0.00000000001", "10000000000"])
def test_a_price_that_the_book_cannot_hold_is_refused(ledger: Any, wrong: str) -> None:
    with pytest.raises(PriceRefused):
        ledger.price(at=NOON, output_per_mtok=wrong)

    assert ledger.count("prices") == 0


def test_cached_input_never_costs_more_than_input(ledger: Any) -> None:
    with pytest.raises(PriceRefused):
        ledger.price(at=NOON, input_per_mtok="1", cached_input_per_mtok="2")


def test_admission_pins_a_price_without_postgres(store: Store, ledger: Any) -> None:
    price = ledger.price(at=NOON)

    assert store.run(prices.read("tiny")) is None
    assert store.run(prices.project([price])) == 1

    pinned = store.run(prices.read("tiny"))
    assert pinned == price
    assert pinned is not None and pinned.input_per_mtok == Decimal("0.15")
    assert store.run(prices.read("tiny", "batch")) is None


def test_a_slow_writer_cannot_undo_a_price_change(store: Store, ledger: Any) -> None:
    """The clock read Postgres before the change and writes after it."""
    before, after = ledger.price(at=NOON), ledger.price(at=NOON + timedelta(minutes=1), input_per_mtok="9")
    store.run(prices.project([after]))

    assert store.run(prices.project([before])) == 0

    assert store.run(prices.read("tiny")) == after
