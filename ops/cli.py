"""`forebay`: the control room's command line. Each command's file is imported only when that command is used.

Exit codes: 0 all is well, 1 a problem was found, 2 the command or the environment was not understood.
"""

from __future__ import annotations

import importlib
import sys

import click

#: Command -> where it lies, and what the overview says of it without importing it.
COMMANDS = {
    "up": ("ops.commands.up:command", "Start the whole platform on this machine."),
    "doctor": ("ops.commands.doctor:command", "Check this machine, and say what to fix."),
    "migrate": ("ops.commands.migrate:command", "Bring the database's schema up to date."),
    "web": ("ops.commands.processes:web", "Run a gateway."),
    "host": ("ops.commands.processes:host", "Run this host's agent, which runs the GPU workers."),
    "scaler": ("ops.commands.processes:scaler", "Run the clock: fleet and billing jobs."),
    "org": ("ops.commands.org:command", "Organisations: how they pay, their share, whether they are served."),
    "project": ("ops.commands.project:command", "Projects of an organisation."),
    "key": ("ops.commands.key:command", "API keys."),
    "limits": ("ops.commands.limits:command", "What keys, projects and organisations may use."),
    "credit": ("ops.commands.credit:command", "Money that organisations have paid ahead."),
    "audit": ("ops.commands.audit:command", "Who changed what."),
    "model": ("ops.commands.model:command", "Models and their prices; pause and resume."),
    "shed": ("ops.commands.shed:command", "Classes of requests that are not served for the moment."),
    "queue": ("ops.commands.queue:command", "What waits and runs, and dead letters."),
    "usage": ("ops.commands.usage:command", "Tokens and money, by hour."),
    "bench": ("ops.commands.bench:command", "Measure this build."),
    "chaos": ("ops.commands.chaos:command", "Break a platform on purpose, and check its ledger."),
}


class LazyGroup(click.Group):
    """A group that knows its commands' names, and imports a command when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The overview, from the table above: click would import every command for its first line."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, said) for name, (_, said) in COMMANDS.items()])


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="forebay")
def cli() -> None:
    """Forebay: an LLM serving platform."""


def main() -> None:
    try:
        "".join(sys.argv).encode()
    except UnicodeEncodeError:  # as bytes that are no text become surrogates, which no store takes
        click.echo("Error: an argument is not UTF-8; nothing was done", err=True)
        raise SystemExit(2) from None
    cli()


if __name__ == "__main__":
    main()
