"""`forebay usage`: tokens and money."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from ops import show
from ops.connect import database, environment

_TIME = click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S"])


@click.command("usage")
@click.option("--org", help="Only this organisation's, by id or name.")
@click.option("--since", type=_TIME, help="From this hour on, UTC.")
@click.option("--by", type=click.Choice(["hour", "day", "model", "key", "org"]), default="day", show_default=True)
@show.as_json
def command(org: str | None, since: datetime | None, by: str, as_json: bool) -> None:
    """Show the tokens that are paid for, and what they cost."""
    from billing import hours, reports
    from core.accounts import tenants
    from core.postgres import transaction

    with database(environment()) as engine, show.refusals(tenants.TenantError):
        hours.roll_dirty(engine)  # the clock does so once a minute; whoever asks should not have to wait
        with transaction(engine) as connection:
            org_id = tenants.find_organisation(connection, org).id if org else None
            start = since.replace(tzinfo=UTC) if since else None
            rows = reports.usage(connection, by=reports.By(by), org_id=org_id, since=start)
    columns = ("requests", "input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens", "amount", "currency")
    show.many([row.shown(reports.By(by)) for row in rows], as_json, (by, *columns))
