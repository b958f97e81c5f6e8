"""A migrated database for each test, and endings to put into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec
import pytest
import uuid6

from billing import events, prices
from billing.rating import Price
from core import usage
from core.postgres import Engine, text, transaction
from core.redis import Store, command
from core.usage import Facts
from tests.conftest import Database

MODEL = "tiny"


@pytest.fixture
def engine(database: Database) -> Engine:
    return database.engine()


@dataclass
class Log:
    """The usage log of one model, and what a test wants entered."""

    store: Store
    facts: Facts = field(
        default_factory=lambda: Facts(
            org_id=str(uuid6.uuid7()), project_id=str(uuid6.uuid7()), key_id="k" * 12, model=MODEL
        )
    )

    def enter(
        self,
        request_id: str | None = None,
        *,
        outcome: str = "completed",
        tokens: tuple[int, int, int, int] = (10, 4, 7, 0),
        entry_id: str = "*",
        **other: object,
    ) -> str:
        """Enter an ending as `finish` does; returns the request's id."""
        request_id = request_id or str(uuid6.uuid7())
        said: dict[str, object] = {
            "id": request_id,
            "attempt": 1,
            "outcome": outcome,
            "worker": "w1",
            **dict(zip(("input", "cached", "output", "reasoning"), tokens, strict=True)),
            "facts": msgspec.msgpack.encode(self.facts),
            **other,
        }
        words = [word for pair in said.items() for word in pair]
        self.store.run(command("XADD", usage.stream(MODEL), entry_id, *words, reply=bool))
        return request_id

    def at_price(self, price: Price) -> Log:
        return Log(self.store, msgspec.structs.replace(self.facts, price_id=price.id))

    def length(self) -> int:
        return self.store.run(usage.length(MODEL))


@pytest.fixture
def log(store: Store) -> Log:
    return Log(store)


@pytest.fixture
def ingest(store: Store, engine: Engine) -> Callable[[], int]:
    """Ingest until nothing is left."""

    def all_of_it() -> int:
        taken = 0
        while step := events.ingest(store, engine, [MODEL], "c1"):
            taken += step
        return taken

    return all_of_it


@dataclass
class Ledger:
    """What Postgres has."""

    engine: Engine

    def price(self, *, at: datetime | None = None, **per_mtok: str) -> Price:
        """Set the model's price, from now on unless told otherwise."""
        amounts = {"input_per_mtok": "0.15", "cached_input_per_mtok": "0.075", "output_per_mtok": "0.6", **per_mtok}
        decimals = {name: Decimal(amount) for name, amount in amounts.items()}
        with transaction(self.engine) as connection:
            return prices.set_price(connection, MODEL, effective_from=at or datetime.now(UTC), **decimals)

    def rows(self, sql: str, **values: object) -> list[tuple[Any, ...]]:
        with transaction(self.engine) as connection:
            return [tuple(row) for row in connection.execute(text(sql), values)]

    def execute(self, sql: str, **values: object) -> None:
        with transaction(self.engine) as connection:
            connection.execute(text(sql), values)

    def count(self, table: str) -> int:
        return int(self.rows(f"SELECT count(*) FROM {table}")[0][0])

    def hourly(self) -> list[tuple[Any, ...]]:
        return self.rows("SELECT * FROM usage_hourly ORDER BY hour, org_id, key_id, model, tier, price_id")


@pytest.fixture
def ledger(engine: Engine) -> Ledger:
    return Ledger(engine)
