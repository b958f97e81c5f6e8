"""`forebay chaos`: break a platform on purpose, and see whether its ledger holds."""

from __future__ import annotations

import click

from ops import show


@click.command()
@click.option("--seconds", type=click.FloatRange(0), default=60.0, show_default=True, help="0: each fault once.")
@click.option("--clients", type=click.IntRange(5, 1000), default=25, show_default=True, help="At once, of five kinds.")
@click.option("--seed", type=int, default=1, show_default=True, help="Which faults, when, and to whom.")
@show.as_json
def command(seconds: float, clients: int, seed: int, as_json: bool) -> None:
    """Kill and stop workers, gateways and the store under a crowd of clients, and check the ledger.

    Runs a platform of its own on the scripted engine, in a temporary folder; needs neither a model nor a store. What
    happens goes to standard error as it does. Exit code 1: something was lost, repeated, left over or billed wrongly.
    """
    from ops.bench.platform import BenchFailed
    from ops.chaos.scene import ChaosFailed
    from ops.chaos.storm import storm

    with show.refusals(BenchFailed, ChaosFailed):
        verdict = storm(clients, seconds, seed, lambda text: click.echo(text, err=True))
    show.one(verdict, as_json, verdict.told())
    if verdict.faults:
        raise SystemExit(1)
