"""`forebay migrate`: the release step."""

from __future__ import annotations

import click

from ops.connect import environment, urls


@click.command()
def command() -> None:
    """Bring the schema of DATABASE_URL up to date. Safe to run twice, and from two machines at once."""
    from core import postgres

    url = urls(environment()).database_url
    if not url:
        raise click.ClickException("DATABASE_URL is not set")
    try:
        postgres.migrate(url)
    except postgres.DatabaseAway as e:
        raise click.ClickException(f"Postgres is away: {e}") from e
