"""`forebay model`: the catalogue's models and their prices."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import Any

import click

from ops import show
from ops.connect import database, environment, store

TIERS = ("standard", "priority", "flex", "batch")


class Money(click.ParamType[Decimal]):
    """An exact amount, such as 0.15."""

    name = "amount"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Decimal:
        try:
            return Decimal(value)
        except InvalidOperation:
            self.fail(f"{value!r} is not a number", param, ctx)


@click.group("model")
def command() -> None:
    """Models and their prices."""


@command.command("list")
@show.as_json
def list_(as_json: bool) -> None:
    """List the catalogue's models with the prices in force."""
    from billing import prices
    from core import catalog
    from core.postgres import transaction

    settings = environment()
    with show.refusals(catalog.BadCatalog):
        models = catalog.load(settings.catalog).only(settings.models)
    with database(settings) as engine, transaction(engine) as connection:
        current = prices.current(connection, datetime.now(UTC))
    book = {price.model: _shown(price) for price in current if price.tier == "standard"}
    rows = [
        {"model": name, "context_tokens": model.context_tokens, **book.get(name, _shown(None))}
        for name, model in models.items()
    ]
    show.many(rows, as_json, tuple(rows[0]) if rows else ())


@command.command("price")
@click.argument("model")
@click.option("--input", "input_per_mtok", type=Money(), required=True, help="Per million input tokens.")
@click.option("--output", "output_per_mtok", type=Money(), required=True, help="Per million output tokens.")
@click.option("--cached-input", "cached_input_per_mtok", type=Money(), help="Per million cached ones; none: as input.")
@click.option("--tier", type=click.Choice(TIERS), default="standard", show_default=True)
@click.option("--currency", default="USD", show_default=True)
@show.as_json
def price(
    model: str,
    input_per_mtok: Decimal,
    output_per_mtok: Decimal,
    cached_input_per_mtok: Decimal | None,
    tier: str,
    currency: str,
    as_json: bool,
) -> None:
    """Price MODEL from now on. Requests already admitted keep the price they were admitted at."""
    from billing import prices
    from core import catalog
    from core.postgres import transaction

    settings = environment()
    with show.refusals(catalog.BadCatalog):
        if model not in catalog.load(settings.catalog):
            raise click.ClickException(f"the catalogue has no model {model!r}; `forebay model list` shows them")
    with database(settings) as engine, show.refusals(prices.PriceRefused), transaction(engine) as connection:
        made = prices.set_price(
            connection,
            model,
            tier,
            input_per_mtok=input_per_mtok,
            output_per_mtok=output_per_mtok,
            cached_input_per_mtok=cached_input_per_mtok,
            currency=currency,
            effective_from=datetime.now(UTC),
        )
    with store(settings) as redis:  # when this fails the clock does it later, and the exit code says so
        redis.run(prices.project([made]))
    show.one({"model": model, "tier": tier, **_shown(made)}, as_json, f"Priced {model} ({tier}): price {made.id}.")


def _shown(price: Any) -> dict[str, Any]:
    """A price's columns; the money as strings, so that no reader makes a float of it."""
    from billing.rating import plain

    columns = ("input_per_mtok", "cached_input_per_mtok", "output_per_mtok")
    if price is None:
        return {"price_id": None, "currency": None, **dict.fromkeys(columns)}
    return {"price_id": price.id, "currency": price.currency, **{name: plain(getattr(price, name)) for name in columns}}
