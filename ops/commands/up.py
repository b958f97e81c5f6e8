"""`forebay up`: the whole platform on this machine."""

from __future__ import annotations

import os

import click

from ops.connect import environment


@click.command()
def command() -> None:
    """Start the whole platform on this machine; Ctrl-C drains and stops it.

    Valkey and Postgres are started too when REDIS_URL or DATABASE_URL is not set. Everything lies in FOREBAY_DATA
    (default: .forebay). FOREBAY_PORT=0 takes a free port.
    """
    from ops import up

    try:
        up.up(environment(), os.environ)
    except up.NotUp as e:
        raise click.ClickException(str(e)) from e
