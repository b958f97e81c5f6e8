"""`forebay project`: what an organisation sorts its keys into."""

from __future__ import annotations

import click

from ops import show
from ops.connect import database, environment, write_down


@click.group("project")
def command() -> None:
    """Projects of an organisation."""


@command.command("create")
@click.argument("name")
@click.option("--org", required=True, help="The organisation, by id or name.")
@show.as_json
def create(name: str, org: str, as_json: bool) -> None:
    """Add a project NAME to an organisation."""
    from core.accounts import tenants
    from core.postgres import transaction

    with database(environment()) as engine, show.refusals(tenants.TenantError), transaction(engine) as connection:
        organisation = tenants.find_organisation(connection, org)
        made = tenants.create_project(connection, org_id=organisation.id, name=name)
        write_down(connection, "project.create", f"project:{made.id}", organisation.id, name=made.name)
    show.one(made, as_json, f"Created project {made.name} of {organisation.name}: {made.id}")


@command.command("list")
@click.option("--org", required=True, help="The organisation, by id or name.")
@show.as_json
def list_(org: str, as_json: bool) -> None:
    """List an organisation's projects."""
    from core.accounts import tenants
    from core.postgres import transaction

    with database(environment()) as engine, show.refusals(tenants.TenantError), transaction(engine) as connection:
        found = tenants.projects(connection, tenants.find_organisation(connection, org).id)
    show.many(found, as_json, ("id", "name", "created_at"))
