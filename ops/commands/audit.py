"""`forebay audit`: who changed what, and whether the log of it is whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ops import show
from ops.connect import database, environment

if TYPE_CHECKING:
    from core.accounts.audit import Entry

#: How long reading the whole log may take, milliseconds.
VERIFY_MS = 600_000


@click.group("audit")
def command() -> None:
    """What operators changed: a log that nobody can change unseen."""


@command.command("list")
@click.option("--org", help="Only what concerns this organisation, by id or name.")
@click.option("--limit", type=click.IntRange(1, 100_000), default=100, show_default=True, help="The newest so many.")
@show.as_json
def list_(org: str | None, limit: int, as_json: bool) -> None:
    """List the newest entries, oldest first."""
    from core.accounts import audit, tenants
    from core.postgres import transaction

    with database(environment()) as engine, show.refusals(tenants.TenantError), transaction(engine) as connection:
        org_id = tenants.find_organisation(connection, org).id if org else None
        rows = [_shown(entry, as_json) for entry in audit.entries(connection, org_id=org_id, limit=limit)]
    show.many(rows, as_json, ("n", "at", "actor", "action", "subject", "detail"))


@command.command("verify")
@click.option("--contains", default="", metavar="HASH", help="A head that was noted earlier must be in the log.")
@show.as_json
def verify(contains: str, as_json: bool) -> None:
    """Follow the chain from its first entry; exit code 1 when it is broken, or lacks the HASH.

    Note the head that this tells where this database's owner cannot write: it is what shows a log cut short.
    """
    from core.accounts import audit
    from core.postgres import transaction

    with database(environment()) as engine, transaction(engine, statement_ms=VERIFY_MS) as connection:
        found = audit.verify(connection, contains=contains.lower())
    if found.broken_at is not None:
        sentence = f"BROKEN at entry {found.broken_at}: it does not follow from the {found.rows} before it."
    elif not found.found:
        sentence = (
            f"{found.rows} entries, linked, and {contains} is not among their hashes: the log was cut or replaced."
        )
    else:
        sentence = f"{found.rows} entries, linked. Head: {found.head}"
    show.one(found, as_json, sentence)
    if found.broken_at is not None or not found.found:
        raise SystemExit(1)


def _shown(entry: Entry, as_json: bool) -> dict[str, Any]:
    detail = entry.detail if as_json else ", ".join(f"{name}={value}" for name, value in entry.detail.items())
    return {
        "n": entry.n, "at": entry.at, "actor": entry.actor, "action": entry.action, "subject": entry.subject,
        "org_id": entry.org_id, "detail": detail, "hash": entry.hash.hex(),
    }  # fmt: skip
