"""`forebay shed`: classes of requests that are not served for the moment."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ops import show, stopping
from ops.commands.queue import CLASSES
from ops.connect import actor, check_models, environment

if TYPE_CHECKING:
    from core.postgres import Connection


@click.command("shed")
@click.argument("name", metavar="[CLASS]", required=False, type=click.Choice(CLASSES))
@click.option("--model", help="Only this model's; else of every model, also of those to come.")
@click.option("--reason", default="", help="Shown beside it.")
@click.option("--clear", is_flag=True, help="Serve CLASS again.")
@show.as_json
def command(name: str | None, model: str | None, reason: str, clear: bool, as_json: bool) -> None:
    """Refuse new requests of CLASS and end those that wait; what runs goes on. Background work that was accepted waits.

    Without CLASS: what is stopped now, paused models too.
    """
    if name is None:
        if clear or model or reason:
            raise click.UsageError(f"name a CLASS: {', '.join(CLASSES)}")
        show.many(stopping.in_force(), as_json, ("kind", "name", "model", "since", "by_whom", "reason"))
        return
    changed = _clear(name, model) if clear else _shed(name, model, reason)
    told = {"class": name, "model": model, "shed": not clear, "changed": changed}
    words = [name.capitalize(), "is served again" if clear else "is shed", *([f"by {model}"] if model else [])]
    show.one(told, as_json, " ".join(words) + ("." if changed else ", as before."))


def _shed(name: str, model: str | None, reason: str) -> bool:
    from core.accounts import stops

    def do(connection: Connection) -> bool:
        return stops.begin(connection, "class", name, model or stops.EVERY, by_whom=actor(), reason=reason)

    check_models(environment(), [model] if model else [])
    return stopping.change(_models(model), "class.shed", f"class:{name}", do, model=model or "", reason=reason)


def _clear(name: str, model: str | None) -> bool:
    from core.accounts import stops

    def do(connection: Connection) -> bool:
        ended = stops.end(connection, "class", name, model)
        if model and any(cls.name.lower() == name for cls in stops.shed(stops.in_force(connection), model)):
            raise click.ClickException(f"{name} is shed of every model; `forebay shed --clear {name}` serves it again")
        return bool(ended)

    return stopping.change(_models(model), "class.clear", f"class:{name}", do, model=model or "")


def _models(model: str | None) -> list[str]:
    return [model] if model else stopping.catalogue()
