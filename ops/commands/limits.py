"""`forebay limits`: what keys, projects and organisations may use."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ops import show
from ops.connect import after_commit, check_models, database, environment, tell_gateways, write_down

if TYPE_CHECKING:
    from core.postgres import Connection
    from core.values import Limit

T = TypeVar("T")

#: What takes a limit away.
NONE = "none"
#: The table is wide; of most scopes most columns are empty.
COLUMNS = ("scope", "requests_per_minute", "tokens_per_minute", "input_tokens_per_minute", "output_tokens_per_minute",
           "concurrent_requests", "connections", "money_per_day", "money_per_month")  # fmt: skip


class Count(click.ParamType[Any]):
    """A whole number, or "none"."""

    name = "number|none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == NONE:
            return NONE
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a whole number nor {NONE!r}", param, ctx)


class Money(click.ParamType[Any]):
    """An exact amount such as 12.50, or "none"."""

    name = "amount|none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Decimal | str:
        try:
            return NONE if value == NONE else Decimal(value)
        except InvalidOperation:
            self.fail(f"{value!r} is neither an amount nor {NONE!r}", param, ctx)


@click.group("limits")
def command() -> None:
    """Limits of a SCOPE: org, key:ID, project:NAME, or model:NAME (the organisation at that model)."""


_ORG = click.option("--org", required=True, help="The organisation, by id or name.")


@command.command("set")
@click.argument("scope")
@_ORG
@click.option("--requests-per-minute", type=Count())
@click.option("--tokens-per-minute", type=Count(), help="Input and output together.")
@click.option("--input-tokens-per-minute", type=Count())
@click.option("--output-tokens-per-minute", type=Count())
@click.option("--concurrent-requests", type=Count(), help="Requests open at once.")
@click.option("--connections", type=Count(), help="WebSockets open at once.")
@click.option("--money-per-day", type=Money(), help="In the organisation's currency, by UTC days.")
@click.option("--money-per-month", type=Money(), help="By UTC months.")
@show.as_json
def set_(scope: str, org: str, as_json: bool, **told: Any) -> None:
    """Set limits of SCOPE, at once. What is not named stays as it is; "none" takes a limit away."""
    from core.accounts import quotas

    changes = {name: None if value == NONE else value for name, value in told.items() if value is not None}
    if scope.startswith("model:"):
        check_models(environment(), [scope.removeprefix("model:")])

    def change(connection: Connection, org_id: str, found: str) -> Limit:
        return quotas.set_limits(connection, org_id, found, changes)

    limit = _changed(
        org, scope, "set", change, **{name: NONE if value is None else value for name, value in changes.items()}
    )
    said = ", ".join(f"{name} {value}" for name, value in quotas.shown(limit).items() if value is not None)
    show.one({"scope": limit.scope, **quotas.shown(limit)}, as_json, f"{limit.scope}: {said or 'no limits'}")


@command.command("show")
@click.argument("scope", required=False)
@_ORG
@show.as_json
def show_(scope: str | None, org: str, as_json: bool) -> None:
    """Show an organisation's limits, or those of one SCOPE."""
    from core.accounts import quotas, tenants
    from core.postgres import transaction

    refusals = show.refusals(quotas.LimitRefused, tenants.TenantError)
    with database(environment()) as engine, refusals, transaction(engine) as connection:
        org_id = tenants.find_organisation(connection, org).id
        wanted = quotas.scope_of(connection, org_id, scope) if scope else None
        found = [limit for limit in quotas.limits(connection, org_id) if wanted in (None, limit.scope)]
        names = {f"project:{project.id}": project.name for project in tenants.projects(connection, org_id)}
    rows = [{"scope": limit.scope, "name": names.get(limit.scope), **quotas.shown(limit)} for limit in found]
    show.many(rows, as_json, (COLUMNS[0], "name", *COLUMNS[1:]))


@command.command("clear")
@click.argument("scope")
@_ORG
@show.as_json
def clear(scope: str, org: str, as_json: bool) -> None:
    """Take all limits of SCOPE away, at once. What was used is still counted."""
    from core.accounts import quotas

    def change(connection: Connection, org_id: str, found: str) -> str:
        if not quotas.clear(connection, org_id, found):
            raise quotas.LimitRefused(f"{scope} has no limits")
        return found

    cleared = _changed(org, scope, "clear", change)
    show.one({"scope": cleared, "cleared": True}, as_json, f"{cleared} has no limits.")


def _changed(org: str, scope: str, verb: str, change: Callable[[Connection, str, str], T], **detail: Any) -> T:
    """Change limits of a scope, write it down, and tell the gateways."""
    from core.accounts import quotas, tenants
    from core.postgres import transaction

    settings = environment()
    with database(settings) as engine, show.refusals(quotas.LimitRefused, tenants.TenantError):
        with transaction(engine) as connection:
            org_id = tenants.find_organisation(connection, org).id
            found = quotas.scope_of(connection, org_id, scope)
            changed = change(connection, org_id, found)
            subject = f"org:{org_id}" if found == quotas.ORGANISATION else found
            write_down(connection, f"limits.{verb}", subject, org_id, scope=found, **detail)
        after_commit(lambda: tell_gateways(settings, engine, org_id))
    return changed
