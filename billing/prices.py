"""The price book, and the current prices where admission pins them.

| key or table     | type  | ttl  | writer                          | reader          | holds                 |
|------------------|-------|------|---------------------------------|-----------------|-----------------------|
| prices           | table | -    | set_price (forebay model price) | billing, ops    | every price there was |
| {prices}:current | HASH  | none | ops, at once; the scaler's      | web/admission,  | model|tier: Price,    |
|                  |       |      | clock, every minute             | on each request | msgpack; '': there    |
|                  |       |      |                                 |                 | are all of them       |

Promise   a model and tier has one price at a time (an exclusion constraint). A row never changes but for its end, and
          an event names its row, so a request costs what was in force when it was admitted.
Dies      Postgres: admission pins what Redis has. Redis: nothing is admitted. Its data: the clock brings it back within
          a second; until then nothing that money binds is admitted without a price. The clock: a price that was set
          ahead takes effect late, when it is back.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

from billing.rating import PRICE_DECIMALS, PRICE_LIMIT, Price
from core.postgres import Connection, DataError, IntegrityError, lock, text
from core.redis import Call, command, scripts, tag

#: The hash of current prices.
_CURRENT = tag("prices") + "current"
_SCRIPTS = scripts(Path(__file__).with_name("lua"), shared=(), verbs=("project",))

_PRICE = """id, model, tier, currency, (extract(epoch FROM lower(effective)) * 1000)::bigint AS since_ms,
  input_per_mtok, cached_input_per_mtok, output_per_mtok"""


class PriceRefused(Exception):
    """A price cannot be set as asked for."""


def set_price(
    connection: Connection,
    model: str,
    tier: str = "standard",
    *,
    input_per_mtok: Decimal,
    output_per_mtok: Decimal,
    cached_input_per_mtok: Decimal | None = None,
    currency: str = "USD",
    effective_from: datetime,
) -> Price:
    """Price a model from a moment on: the row in force ends there; a row set further ahead stays and ends this one.

    Without a price of its own, cached input costs what input costs.

    Raises:
      PriceRefused: negative, finer than the book keeps, or a row begins at that very moment.
    """
    cached = input_per_mtok if cached_input_per_mtok is None else cached_input_per_mtok
    if fault := _fault(input_per_mtok, cached, output_per_mtok):
        raise PriceRefused(fault)
    values: dict[str, Any] = {
        "model": model, "tier": tier, "currency": currency, "since": effective_from,
        "input": input_per_mtok, "cached": cached, "output": output_per_mtok,
    }  # fmt: skip
    lock(connection, f"price {model} {tier}")
    try:
        with connection.begin_nested():
            connection.execute(_CLOSE, values)
            row = connection.execute(_INSERT, values).mappings().one()
    except (IntegrityError, DataError) as e:
        raise PriceRefused(str(e.orig).partition("\n")[0]) from e
    return Price(**row)


_CLOSE = text("""UPDATE prices SET effective = tstzrange(lower(effective), :since)
  WHERE model = :model AND tier = :tier AND effective @> CAST(:since AS timestamptz)""")
_INSERT = text(f"""INSERT INTO prices (model, tier, currency, effective,
    input_per_mtok, cached_input_per_mtok, output_per_mtok)
  SELECT :model, :tier, :currency, tstzrange(:since, min(lower(effective))), :input, :cached, :output
  FROM prices WHERE model = :model AND tier = :tier AND lower(effective) > :since
  RETURNING {_PRICE}""")


def _fault(*prices: Decimal) -> str | None:
    for price in prices:
        if not price.is_finite() or not 0 <= price < PRICE_LIMIT:
            return f"a price is a number from 0 to {PRICE_LIMIT}"
        if price != round(price, PRICE_DECIMALS):
            return f"a price has at most {PRICE_DECIMALS} decimals"
    return None


def current(connection: Connection, now: datetime) -> list[Price]:
    """The prices in force."""
    query = text(f"SELECT {_PRICE} FROM prices WHERE effective @> CAST(:now AS timestamptz) ORDER BY model, tier")
    return [Price(**row) for row in connection.execute(query, {"now": now}).mappings()]


def by_id(connection: Connection, ids: Iterable[int]) -> dict[int, Price]:
    """The rows that events name, in force or not."""
    query = text(f"SELECT {_PRICE} FROM prices WHERE id = ANY(:ids)")
    return {row["id"]: Price(**row) for row in connection.execute(query, {"ids": list(ids)}).mappings()}


def project(prices: Iterable[Price]) -> Call[int]:
    """Put current prices where admission looks. A newer one that is there stays."""
    args = [part for price in prices for part in (_field(price.model, price.tier), _encoded(price), price.since_ms)]
    return Call(script=_SCRIPTS["project"], keys=(_CURRENT,), args=tuple(args), reply=int)


def read(model: str, tier: str = "standard") -> Call[Price | None]:
    """The price to pin; None: the model has none, and its requests cost nothing."""
    return command("HGET", _CURRENT, _field(model, tier), reply=_decoded)


def known() -> Call[bool]:
    """Whether the store has been told of prices. Where it has not, that a model has none says nothing."""
    return command("HEXISTS", _CURRENT, "", reply=bool)


def _field(model: str, tier: str) -> str:
    return f"{model}|{tier}"


def _encoded(price: Price) -> bytes:
    return msgspec.msgpack.encode(price)


def _decoded(raw: bytes | None) -> Price | None:
    return None if raw is None else msgspec.msgpack.decode(raw, type=Price)
