"""`forebay credit`: money that organisations have paid ahead."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

import click

from ops import show
from ops.connect import actor, database, environment, limits_store

if TYPE_CHECKING:
    from billing.credits import Credit
    from core.postgres import Connection, Engine
    from core.settings import Settings

#: A negative amount is no option.
SIGNED = {"ignore_unknown_options": True}
_TIME = click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S"])


class Amount(click.ParamType[Any]):
    """Money, exactly as it is told: no float ever comes between."""

    name = "amount"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Decimal:
        try:
            return Decimal(value)
        except InvalidOperation:
            self.fail(f"{value!r} is no amount", param, ctx)


@click.group("credit")
def command() -> None:
    """Prepaid balances: grants, corrections, and what is left.

    They bind organisations whose plan is prepaid (`forebay org plan`).
    """


@command.command("grant", context_settings=SIGNED)
@click.argument("org")
@click.argument("amount", type=Amount())
@click.option("--expires", type=_TIME, help="What is not spent by then is lost; UTC.")
@click.option("--reason", default="", help="Such as the payment's number.")
@show.as_json
def grant(org: str, amount: Decimal, expires: datetime | None, reason: str, as_json: bool) -> None:
    """Give the organisation ORG (an id or a name) an AMOUNT to spend, in its currency, at once."""
    from billing import credits as ledger

    expires_at = expires.replace(tzinfo=UTC) if expires else None

    def change(connection: Connection, org_id: str) -> Credit:
        return ledger.grant(connection, org_id, amount, reason=reason, expires_at=expires_at)

    made = _booked(org, change)
    show.one(made.shown(), as_json, f"Granted {made.shown()['amount']} to {org}: {made.id}")


@command.command("entry", context_settings=SIGNED)
@click.argument("org")
@click.argument("amount", type=Amount())
@click.option("--reason", required=True, help="Why the balance is corrected.")
@show.as_json
def entry(org: str, amount: Decimal, reason: str, as_json: bool) -> None:
    """Correct the balance of the organisation ORG (an id or a name) by a signed AMOUNT, at once."""
    from billing import credits as ledger

    made = _booked(org, lambda connection, org_id: ledger.enter(connection, org_id, amount, reason=reason))
    show.one(made.shown(), as_json, f"Entered {made.shown()['amount']} for {org}: {made.id}")


@command.command("balance")
@click.argument("org")
@show.as_json
def balance(org: str, as_json: bool) -> None:
    """Show what the organisation ORG (an id or a name) was granted, has spent, and has left.

    What runs now, or ended in the last second, is not in it yet.
    """
    from billing import credits as ledger
    from core.accounts import tenants
    from core.postgres import transaction

    with database(environment()) as engine, show.refusals(tenants.TenantError), transaction(engine) as connection:
        org_id = tenants.find_organisation(connection, org).id
        found = ledger.balance(connection, org_id, datetime.now(UTC))
    show.details(found.shown(), as_json)


@command.command("list")
@click.argument("org")
@show.as_json
def list_(org: str, as_json: bool) -> None:
    """List the grants and entries of the organisation ORG (an id or a name), oldest first."""
    from billing import credits as ledger
    from core.accounts import tenants
    from core.postgres import transaction

    with database(environment()) as engine, show.refusals(tenants.TenantError), transaction(engine) as connection:
        found = ledger.listed(connection, tenants.find_organisation(connection, org).id)
    columns = ("created_at", "kind", "amount", "expires_at", "reason", "id")
    show.many([one.shown() for one in found], as_json, columns)


def _booked(org: str, change: Callable[[Connection, str], Credit]) -> Credit:
    """Book it, write it down, and let it hold at once."""
    from billing.credits import CreditRefused
    from core.accounts import audit, tenants
    from core.postgres import transaction

    settings = environment()
    with database(settings) as engine, show.refusals(CreditRefused, tenants.TenantError):
        with transaction(engine) as connection:
            organisation = tenants.find_organisation(connection, org)
            made = change(connection, organisation.id)
            audit.write(
                connection,
                actor=actor(),
                action=f"credit.{made.kind}",
                subject=f"org:{organisation.id}",
                org_id=organisation.id,
                amount=made.amount,
                currency=organisation.currency,
                reason=made.reason,
                expires_at=made.expires_at,
            )
        _tell(settings, engine, organisation.id, made)
    return made


def _tell(settings: Settings, engine: Engine, org_id: str, made: Credit) -> None:
    from billing.credits import tell

    try:
        with limits_store(settings) as store:
            tell(engine, store, org_id)
    except click.ClickException as e:
        raise click.ClickException(
            f"{e.message}. The {made.kind} is booked ({made.id}), so do not repeat it: it holds within a minute of "
            "Redis being back."
        ) from None
