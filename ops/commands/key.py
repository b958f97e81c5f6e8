"""`forebay key`: API keys. A key's secret is shown in full once, when it is made."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

import click
import msgspec

from ops import show
from ops.connect import after_commit, check_models, database, environment, limits_store, store, write_down

if TYPE_CHECKING:
    from core.accounts.keys import KeyRecord, KeyRow, Kind
    from core.postgres import Engine
    from core.settings import Settings

_TIME = click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S"])


class Span(click.ParamType[timedelta]):
    """A length of time, such as 24h."""

    name = "time"

    _units = {"s": timedelta(seconds=1), "m": timedelta(minutes=1), "h": timedelta(hours=1)}  # noqa: RUF012

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        if isinstance(value, timedelta):
            return value
        found = re.fullmatch(r"(\d{1,6})([smh])", value)
        if found is None:
            self.fail(f"{value!r} is not a time; write 24h, 30m or 0s", param, ctx)
        return int(found[1]) * self._units[found[2]]


@click.group("key")
def command() -> None:
    """API keys."""


@command.command("create")
@click.argument("name")
@click.option("--org", required=True, help="The organisation, by id or name.")
@click.option("--project", default="default", show_default=True, help="Its project, by id or name.")
@click.option("--kind", type=click.Choice(["live", "test", "admin"]), default="live", show_default=True)
@click.option("--scope", "scopes", multiple=True, help="What it may do, repeatable. None: all that its kind may.")
@click.option("--model", "models", multiple=True, help="A model that it may use, repeatable. None: all.")
@click.option("--network", "networks", multiple=True, help="Where it may come from (CIDR), repeatable. None: anywhere.")
@click.option("--expires-at", type=_TIME, help="UTC. None: never.")
@click.option("--requests-per-minute", type=click.IntRange(0), help="None: no limit. For others: forebay limits.")
@click.option("--concurrent-requests", type=click.IntRange(0), help="None: no limit.")
@show.as_json
def create(
    name: str,
    org: str,
    project: str,
    kind: str,
    scopes: tuple[str, ...],
    models: tuple[str, ...],
    networks: tuple[str, ...],
    expires_at: datetime | None,
    requests_per_minute: int | None,
    concurrent_requests: int | None,
    as_json: bool,
) -> None:
    """Create a key called NAME and show it, this once."""
    from core.accounts import keys, tenants
    from core.postgres import transaction

    settings = environment()
    check_models(settings, models)
    asked: dict[str, Any] = {
        "name": name,
        "kind": cast("Kind", kind),
        "scopes": scopes,
        "models": models,
        "networks": networks,
        "expires_at": _later(expires_at),
        "requests_per_minute": requests_per_minute,
        "concurrent_requests": concurrent_requests,
    }
    refusals = show.refusals(keys.KeyRefused, keys.PepperMissing, tenants.TenantError)
    with database(settings) as engine, refusals:
        pepper = keys.pepper(settings)
        with transaction(engine) as connection:
            org_id = tenants.find_organisation(connection, org).id
            found = tenants.find_project(connection, org_id=org_id, wanted=project)
            plain, row = keys.create_key(connection, org_id=org_id, project_id=found.id, pepper=pepper, **asked)
            detail = {**asked, "scopes": row.scopes, "project": found.name, "last4": row.last4}
            write_down(connection, "key.create", f"key:{row.id}", org_id, **detail)
        show.one({"key": plain, **_shown(row)}, as_json, f"{plain}\nKeep it now: it cannot be shown again.")
        _announce(settings, engine, row.id)


def _later(expires_at: datetime | None) -> datetime | None:
    """In UTC, and not over already."""
    if expires_at is None:
        return None
    moment = expires_at.replace(tzinfo=UTC)
    if moment <= datetime.now(UTC):
        raise click.ClickException(f"a key cannot expire in the past, and that is {moment:%Y-%m-%d %H:%M} UTC")
    return moment


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
    columns = ("id", "name", "shown", "created_at", "expires_at", "last_used_at", "pepper_version", "revoked_at")
    show.many(rows, as_json, columns)


@command.command("show")
@click.argument("key_id")
@show.as_json
def show_(key_id: str, as_json: bool) -> None:
    """Show the key with the id KEY_ID: what it may do, from where, until when, and when it was last used."""
    from core.accounts import keys
    from core.postgres import transaction

    with database(environment()) as engine, show.refusals(keys.KeyRefused), transaction(engine) as connection:
        row = keys.show(connection, key_id)
    show.details(_shown(row), as_json)


@command.command("rotate")
@click.argument("key_id")
@click.option("--overlap", type=Span(), default="24h", show_default=True, help="How long the old one is good; to 72h.")
@show.as_json
def rotate(key_id: str, overlap: timedelta, as_json: bool) -> None:
    """Give the key KEY_ID a new secret and show it, this once. Its id, limits and spend stay."""
    from core.accounts import keys
    from core.postgres import transaction

    settings = environment()
    with database(settings) as engine, show.refusals(keys.KeyRefused, keys.PepperMissing):
        pepper = keys.pepper(settings)
        with transaction(engine) as connection:
            plain, row, until = keys.rotate(connection, key_id, pepper=pepper, overlap=overlap)
            detail = {"overlap_s": int(overlap.total_seconds()), "last4": row.last4}
            write_down(connection, "key.rotate", f"key:{key_id}", row.org_id, **detail)
        said = f"What was good before is so until {until:%Y-%m-%d %H:%M} UTC."
        sentence = f"{plain}\nKeep it now: it cannot be shown again. {said}"
        show.one({"key": plain, "old_until": until, **_shown(row)}, as_json, sentence)
        after_commit(lambda: _project(settings, engine, key_id))


@command.command("revoke")
@click.argument("key_id")
@click.option("--reason", default="", help="Kept with the key.")
@show.as_json
def revoke(key_id: str, reason: str, as_json: bool) -> None:
    """Revoke the key with the id KEY_ID, at once and for good: what runs of it ends within a second."""
    from core.accounts import keys
    from core.postgres import transaction

    settings = environment()
    with database(settings) as engine, show.refusals(keys.KeyRefused):
        with transaction(engine) as connection:
            record = keys.revoke(connection, key_id, now=datetime.now(UTC), reason=reason)
            write_down(connection, "key.revoke", f"key:{key_id}", record.org_id, reason=reason)
        after_commit(lambda: _stop(settings, record), lambda: _project(settings, engine, key_id))
    show.one({"id": key_id, "revoked": True}, as_json, f"Revoked {key_id}.")


def _stop(settings: Settings, record: KeyRecord) -> None:
    from core.limits import stopped

    with limits_store(settings) as redis:
        redis.run(stopped.stop(record.org_id, stopped.field_of(record.key_id), stopped.REVOKED))


def _project(settings: Settings, engine: Engine, key_id: str) -> None:
    """Read once it is committed: what others read before that may not come after it."""
    from core.accounts import keys

    record = keys.find(engine, key_id)
    if record is not None:
        with store(settings) as redis:
            redis.run(keys.project(record))


def _announce(settings: Settings, engine: Engine, key_id: str) -> None:
    """Let gateways know a new key at once. Without Redis they ask Postgres for it, so that is no failure."""
    try:
        after_commit(lambda: _project(settings, engine, key_id))
    except click.ClickException as e:
        click.echo(f"Warning: {e.message} Until then its first request asks Postgres.", err=True)


def _shown(row: KeyRow) -> dict[str, Any]:
    return {**msgspec.structs.asdict(row), "shown": row.shown}
