"""`forebay web | host | scaler`: become one of the Procfile's processes."""

from __future__ import annotations

import os
import sys

import click


@click.command(help="Run a gateway. FOREBAY_PORT and FOREBAY_BIND say where.")
def web() -> None:
    _become("web.serve")


@click.command(help="Run this host's agent, which runs the workers that are assigned to it.")
def host() -> None:
    _become("workers.host")


@click.command(help="Run the clock: fleet and billing jobs.")
def scaler() -> None:
    _become("scaler.clock")


def _become(module: str) -> None:
    """Replace this process, so that signals and exit codes are the module's own."""
    os.execv(sys.executable, [sys.executable, "-m", module])
