"""`forebay model`: the catalogue's models and their prices, and whether they are paused."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

import click

from ops import show, stopping
from ops.connect import actor, after_commit, check_models, database, environment, store, write_down

if TYPE_CHECKING:
    from billing.rating import Price
    from core.postgres import Connection
    from core.settings import Settings

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
    """Models, their prices, and whether they are paused."""


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
    from core.postgres import transaction

    settings = environment()
    check_models(settings, [model])
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
        write_down(connection, "price.set", f"model:{model}", tier=tier, **_shown(made))
    after_commit(lambda: _project(settings, made))
    show.one({"model": model, "tier": tier, **_shown(made)}, as_json, f"Priced {model} ({tier}): price {made.id}.")


def _project(settings: Settings, made: Price) -> None:
    from billing import prices

    with store(settings) as redis:
        redis.run(prices.project([made]))


@command.command("pause")
@click.argument("model")
@click.option("--reason", default="", help="Shown by `forebay shed`.")
@show.as_json
def pause(model: str, reason: str, as_json: bool) -> None:
    """Start nothing more of MODEL: new requests are refused, what waits stays, what runs goes on."""
    from core.accounts import stops

    def do(connection: Connection) -> bool:
        return stops.begin(connection, "model", model, by_whom=actor(), reason=reason)

    check_models(environment(), [model])
    changed = stopping.change([model], "model.pause", f"model:{model}", do, reason=reason)
    _tell(model, True, changed, as_json)


@command.command("resume")
@click.argument("model")
@show.as_json
def resume(model: str, as_json: bool) -> None:
    """Go on with MODEL where it was paused."""
    from core.accounts import stops

    def do(connection: Connection) -> bool:
        return bool(stops.end(connection, "model", model))

    changed = stopping.change([model], "model.resume", f"model:{model}", do)
    if not changed:  # one that was paused may have left the catalogue; one that was not is perhaps another's name
        check_models(environment(), [model])
    _tell(model, False, changed, as_json)


def _tell(model: str, paused: bool, changed: bool, as_json: bool) -> None:
    sentence = f"{model} {'is paused' if paused else 'goes on'}{'' if changed else ', as before'}."
    show.one({"model": model, "paused": paused, "changed": changed}, as_json, sentence)


def _shown(price: Any) -> dict[str, Any]:
    """A price's columns; the money as strings, so that no reader makes a float of it."""
    from billing.rating import plain

    columns = ("input_per_mtok", "cached_input_per_mtok", "output_per_mtok")
    if price is None:
        return {"price_id": None, "currency": None, **dict.fromkeys(columns)}
    return {"price_id": price.id, "currency": price.currency, **{name: plain(getattr(price, name)) for name in columns}}
