"""`forebay key`: API keys. A key is shown in full once, when it is made."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, cast

import click
import msgspec

from ops import show
from ops.connect import database, environment, store

if TYPE_CHECKING:
    from core.accounts.keys import KeyRecord, KeyRow, Kind
    from core.settings import Settings


@click.group("key")
def command() -> None:
    """API keys."""


@command.command("create")
@click.argument("name")
@click.option("--org", required=True, help="The organisation, by id or name.")
@click.option("--project", default="default", show_default=True, help="Its project, by id or name.")
@click.option("--kind", type=click.Choice(["live", "test", "admin"]), default="live", show_default=True)
@click.option("--requests-per-minute", type=click.IntRange(0), help="None: no limit.")
@click.option("--concurrent-requests", type=click.IntRange(0), help="None: no limit.")
@show.as_json
def create(
    name: str,
    org: str,
    project: str,
    kind: str,
    requests_per_minute: int | None,
    concurrent_requests: int | None,
    as_json: bool,
) -> None:
    """Create a key called NAME and show it, this once."""
    from core.accounts import keys, tenants
    from core.postgres import transaction

    settings = environment()
    refusals = show.refusals(keys.KeyRefused, keys.PepperMissing, tenants.TenantError)
    with database(settings) as engine, refusals:
        pepper = keys.pepper(settings)
        with transaction(engine) as connection:
            org_id = tenants.find_organisation(connection, org).id
            plain, row = keys.create_key(
                connection,
                org_id=org_id,
                project_id=tenants.find_project(connection, org_id=org_id, wanted=project).id,
                name=name,
                pepper=pepper,
                kind=cast("Kind", kind),
                requests_per_minute=requests_per_minute,
                concurrent_requests=concurrent_requests,
            )
        record = keys.find(engine, row.id)
    show.one({"key": plain, **_shown(row)}, as_json, f"{plain}\nKeep it now: it cannot be shown again.")
    if record is not None:
        _announce(settings, record)


@command.command("list")
@click.option("--org", help="Only this organisation's, by id or name.")
@show.as_json
def list_(org: str | None, as_json: bool) -> None:
    """List keys."""
    from core.accounts import keys, tenants
    from core.postgres import transaction

    with database(environment()) as engine, show.refusals(tenants.TenantError), transaction(engine) as connection:
        org_id = tenants.find_organisation(connection, org).id if org else None
        rows = [_shown(row) for row in keys.keys(connection, org_id)]
    columns = ("id", "name", "shown", "requests_per_minute", "concurrent_requests", "created_at", "revoked_at")
    show.many(rows, as_json, columns)


@command.command("revoke")
@click.argument("key_id")
@click.option("--reason", default="", help="Kept with the key.")
@show.as_json
def revoke(key_id: str, reason: str, as_json: bool) -> None:
    """Revoke the key with the id KEY_ID, at once and for good."""
    from core.accounts import keys
    from core.postgres import transaction

    settings = environment()
    with database(settings) as engine, show.refusals(keys.KeyRefused), transaction(engine) as connection:
        record = keys.revoke(connection, key_id, now=datetime.now(UTC), reason=reason)
    with store(settings) as redis:  # when this fails the clock does it later, and the exit code says so
        redis.run(keys.project(record))
    show.one({"id": key_id, "revoked": True}, as_json, f"Revoked {key_id}.")


def _announce(settings: Settings, record: KeyRecord) -> None:
    """Let gateways know a new key at once. Without Redis they ask Postgres for it, so that is no failure."""
    from core.accounts import keys

    try:
        with store(settings) as redis:
            redis.run(keys.project(record))
    except click.ClickException as e:
        click.echo(f"Warning: {e.message}. The key works; its first request asks Postgres.", err=True)


def _shown(row: KeyRow) -> dict[str, Any]:
    return {**msgspec.structs.asdict(row), "shown": row.shown}
