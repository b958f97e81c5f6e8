"""`forebay org`: organisations and their projects."""

from __future__ import annotations

import click

from ops import show
from ops.connect import database, environment

#: How long it may take to go through an organisation's stored responses, milliseconds.
RETENTION_MS = 600_000


@click.group("org")
def command() -> None:
    """Organisations and their projects."""


@command.command("create")
@click.argument("name")
@show.as_json
def create(name: str, as_json: bool) -> None:
    """Create an organisation with a first project."""
    from core.accounts import tenants
    from core.postgres import transaction

    with database(environment()) as engine, show.refusals(tenants.TenantError), transaction(engine) as connection:
        organisation = tenants.create_organisation(connection, name)
    show.one(organisation, as_json, f"Created organisation {organisation.name}: {organisation.id}")


@command.command("list")
@show.as_json
def list_(as_json: bool) -> None:
    """List organisations."""
    from core.accounts import tenants
    from core.postgres import transaction

    with database(environment()) as engine, transaction(engine) as connection:
        found = tenants.organisations(connection)
    show.many(found, as_json, ("id", "name", "status", "currency", "weight", "retention_days", "created_at"))


@command.command("project")
@click.argument("org")
@click.argument("name")
@show.as_json
def project(org: str, name: str, as_json: bool) -> None:
    """Add a project NAME to the organisation ORG (an id or a name)."""
    from core.accounts import tenants
    from core.postgres import transaction

    with database(environment()) as engine, show.refusals(tenants.TenantError), transaction(engine) as connection:
        organisation = tenants.find_organisation(connection, org)
        made = tenants.create_project(connection, org_id=organisation.id, name=name)
    show.one(made, as_json, f"Created project {made.name} of {organisation.name}: {made.id}")


@command.command("projects")
@click.argument("org")
@show.as_json
def projects(org: str, as_json: bool) -> None:
    """List the projects of the organisation ORG (an id or a name)."""
    from core.accounts import tenants
    from core.postgres import transaction

    with database(environment()) as engine, show.refusals(tenants.TenantError), transaction(engine) as connection:
        organisation = tenants.find_organisation(connection, org)
        found = tenants.projects(connection, organisation.id)
    show.many(found, as_json, ("id", "name", "created_at"))


@command.command("weight")
@click.argument("org")
@click.argument("weight", type=float)
@show.as_json
def weight(org: str, weight: float, as_json: bool) -> None:
    """Give the organisation ORG a WEIGHT: where several want a model, one of weight 2 gets twice what 1 gets.

    Gateways learn it within a minute.
    """
    from core.accounts import tenants
    from core.postgres import transaction

    with database(environment()) as engine, show.refusals(tenants.TenantError), transaction(engine) as connection:
        found = tenants.find_organisation(connection, org)
        changed = tenants.set_weight(connection, found.id, weight)
    show.one(changed, as_json, f"{changed.name} has weight {changed.weight:g}.")


@command.command("retention")
@click.argument("org")
@click.argument("days", type=int)
@show.as_json
def retention(org: str, days: int, as_json: bool) -> None:
    """Keep the stored responses of the organisation ORG for DAYS, those that it has too; 0: store none, ever.

    Nothing is kept longer from this moment on. A number of days that is larger than before concerns new ones only.
    """
    from core import responses
    from core.accounts import tenants
    from core.postgres import transaction

    with database(environment()) as engine, show.refusals(tenants.TenantError):
        with transaction(engine) as connection:
            found = tenants.find_organisation(connection, org)
            changed = tenants.set_retention(connection, found.id, days)
        with transaction(engine) as connection:
            responses.outwait(connection)  # what began before may still be written for longer
        with transaction(engine, statement_ms=RETENTION_MS) as connection:
            responses.shorten(connection, found.id, days)
    said = f"keeps its responses for {days} days" if days else "stores no responses"
    show.one(changed, as_json, f"{changed.name} {said}.")
