"""`forebay org`: organisations: who they are, how they pay, what share they have, and whether they are served."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

import click
import msgspec

from ops import show
from ops.connect import after_commit, database, environment, limits_store, tell_gateways, write_down

if TYPE_CHECKING:
    from core.accounts.tenants import Organisation, Plan
    from core.postgres import Connection, Engine
    from core.settings import Settings

#: How long it may take to go through an organisation's stored responses, milliseconds.
RETENTION_MS = 600_000


@click.group("org")
def command() -> None:
    """Organisations."""


@command.command("create")
@click.argument("name")
@show.as_json
def create(name: str, as_json: bool) -> None:
    """Create an organisation with a first project."""
    from core.accounts import tenants
    from core.postgres import transaction

    with database(environment()) as engine, show.refusals(tenants.TenantError), transaction(engine) as connection:
        tenants.claim_name(connection, name)
        made = tenants.create_organisation(connection, name)
        write_down(connection, "org.create", f"org:{made.id}", made.id, name=made.name)
    show.one(made, as_json, f"Created organisation {made.name}: {made.id}")


@command.command("list")
@show.as_json
def list_(as_json: bool) -> None:
    """List organisations."""
    from core.accounts import tenants
    from core.postgres import transaction

    with database(environment()) as engine, transaction(engine) as connection:
        found = tenants.organisations(connection)
    show.many(found, as_json, ("id", "name", "status", "plan", "currency", "weight", "retention_days", "created_at"))


@command.command("show")
@click.argument("org")
@show.as_json
def show_(org: str, as_json: bool) -> None:
    """Show the organisation ORG (an id or a name), with its projects and limits."""
    from core.accounts import quotas, tenants
    from core.postgres import transaction

    with database(environment()) as engine, show.refusals(tenants.TenantError), transaction(engine) as connection:
        found = tenants.find_organisation(connection, org)
        projects = tenants.projects(connection, found.id)
        limits = quotas.limits(connection, found.id)
    told = {
        "projects": {project.name: project.id for project in projects},
        "limits": {
            limit.scope: {name: value for name, value in quotas.shown(limit).items() if value is not None}
            for limit in limits
        },
    }
    show.details({**msgspec.structs.asdict(found), **told}, as_json)


@command.command("weight")
@click.argument("org")
@click.argument("weight", type=float)
@show.as_json
def weight(org: str, weight: float, as_json: bool) -> None:
    """Give the organisation ORG a WEIGHT: where several want a model, one of weight 2 gets twice what 1 gets."""
    from core.accounts import tenants

    def change(connection: Connection, org_id: str) -> Organisation:
        return tenants.set_weight(connection, org_id, weight)

    changed = _changed(org, "weight", change, weight=weight)
    show.one(changed, as_json, f"{changed.name} has weight {changed.weight:g}.")


@command.command("plan")
@click.argument("org")
@click.argument("plan", type=click.Choice(["postpaid", "prepaid", "free"]))
@show.as_json
def plan(org: str, plan: str, as_json: bool) -> None:
    """Let the organisation ORG pay afterwards (postpaid), from a balance that binds it (prepaid), or not (free).

    While limits cannot be reached, only who is postpaid is served.
    """
    from core.accounts import tenants

    def change(connection: Connection, org_id: str) -> Organisation:
        return tenants.set_plan(connection, org_id, cast("Plan", plan))

    changed = _changed(org, "plan", change, plan=plan)
    show.one(changed, as_json, f"{changed.name} is {changed.plan}.")


@command.command("suspend")
@click.argument("org")
@click.option("--reason", default="", help="Kept with the organisation.")
@show.as_json
def suspend(org: str, reason: str, as_json: bool) -> None:
    """Serve the organisation ORG no more: new requests are refused at once, running ones end within a second."""
    from core.accounts import tenants
    from core.limits import stopped

    def change(connection: Connection, org_id: str) -> Organisation:
        return tenants.suspend(connection, org_id, reason=reason, now=datetime.now(UTC))

    def stop(settings: Settings, org_id: str) -> None:
        with limits_store(settings) as redis:
            redis.run(stopped.stop(org_id, stopped.ORG, stopped.SUSPENDED))

    changed = _changed(org, "suspend", change, stop, reason=reason)
    show.one(changed, as_json, f"Suspended {changed.name}.")


@command.command("resume")
@click.argument("org")
@show.as_json
def resume(org: str, as_json: bool) -> None:
    """Serve the organisation ORG again."""
    from core.accounts import tenants
    from core.limits import stopped

    def clear(settings: Settings, org_id: str) -> None:
        with limits_store(settings) as redis:
            redis.run(stopped.clear(org_id, stopped.ORG))

    changed = _changed(org, "resume", tenants.resume, clear)
    show.one(changed, as_json, f"{changed.name} is served again.")


@command.command("retention")
@click.argument("org")
@click.argument("days", type=int)
@show.as_json
def retention(org: str, days: int, as_json: bool) -> None:
    """Keep the stored responses of the organisation ORG for DAYS, those that it has too; 0: store none, ever.

    Nothing is kept longer from this moment on. A number of days that is larger than before concerns new ones only.
    """
    from core.accounts import tenants

    settings = environment()
    with database(settings) as engine, show.refusals(tenants.TenantError):
        changed = _write(
            engine,
            org,
            "retention",
            lambda connection, org_id: tenants.set_retention(connection, org_id, days),
            retention_days=days,
        )
        _shorten(engine, changed.id, days)
        after_commit(lambda: tell_gateways(settings, engine, changed.id))
    said = f"keeps its responses for {days} days" if days else "stores no responses"
    show.one(changed, as_json, f"{changed.name} {said}.")


def _shorten(engine: Engine, org_id: str, days: int) -> None:
    """Let what is stored keep to the number that was set.

    Raises:
      ClickException: Postgres went away meanwhile, and what to do.
    """
    from core import responses
    from core.postgres import DatabaseAway, transaction

    try:
        with transaction(engine) as connection:
            responses.outwait(connection)  # what began before may still be written for longer
        with transaction(engine, statement_ms=RETENTION_MS) as connection:
            responses.shorten(connection, org_id, days)
    except DatabaseAway as e:
        told = "The number of days is set, and new responses keep to it; older ones may not yet: repeat this command."
        raise click.ClickException(f"Postgres is away: {str(e).rstrip('.')}. {told}") from None


def _changed(
    org: str,
    verb: str,
    change: Callable[[Connection, str], Organisation],
    also: Callable[[Settings, str], None] = lambda settings, org_id: None,
    **detail: Any,
) -> Organisation:
    """Change an organisation, write it down, do what else makes it hold at once, and tell the gateways."""
    from core.accounts import tenants

    settings = environment()
    with database(settings) as engine, show.refusals(tenants.TenantError):
        changed = _write(engine, org, verb, change, **detail)
        after_commit(lambda: also(settings, changed.id), lambda: tell_gateways(settings, engine, changed.id))
    return changed


def _write(
    engine: Engine, org: str, verb: str, change: Callable[[Connection, str], Organisation], **detail: Any
) -> Organisation:
    from core.accounts import tenants
    from core.postgres import transaction

    with transaction(engine) as connection:
        org_id = tenants.find_organisation(connection, org).id
        changed = change(connection, org_id)
        write_down(connection, f"org.{verb}", f"org:{org_id}", org_id, **detail)
    return changed
