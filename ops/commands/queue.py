"""`forebay queue`: what waits and runs, and the dead letters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from ops import show
from ops.connect import environment, store

if TYPE_CHECKING:
    from core.redis import Store
    from tasks.queue import Letter, Queue, Stops

CLASSES = ("system", "interactive", "default", "bulk")
#: Dead letters that are read in one exchange.
PAGE = 200

model_option = click.option("--model", help="Only this model's; else of every model in the catalogue.")


@click.group("queue")
def command() -> None:
    """What waits and runs, and dead letters."""


@command.command("list")
@model_option
@show.as_json
def list_(model: str | None, as_json: bool) -> None:
    """Show every model's queue: what waits by class, what runs, how long the oldest has waited, what is stopped."""
    with _queues(model) as (store, queues):
        rows = [_depth(store, queue) for queue in queues]
    columns = ("model", *CLASSES, "waiting_tokens", "oldest_s", "running", "dead", "workers", "stopped")
    show.many(rows, as_json, columns)


@command.group("dead")
def dead() -> None:
    """Requests that were given up, and are kept for a week."""


@dead.command("list")
@model_option
@click.option("--limit", default=50, show_default=True, type=click.IntRange(1), help="At most so many of each model.")
@show.as_json
def list_dead(model: str | None, limit: int, as_json: bool) -> None:
    """List dead letters, newest first."""
    with _queues(model) as (store, queues):
        rows = [_shown(queue, letter) for queue in queues for letter in _letters(store, queue, limit)]
    show.many(
        rows, as_json, ("id", "model", "dead_at", "reason", "attempt", "losses", "class", "tenant", "input_tokens")
    )


@dead.command("show")
@click.argument("request_id", metavar="ID")
@model_option
@show.as_json
def show_dead(request_id: str, model: str | None, as_json: bool) -> None:
    """Show one dead letter."""
    with _queues(model) as (store, queues):
        queue, letter = _find(store, queues, request_id)
    row = _shown(queue, letter)
    show.one(row, as_json, "\n".join(f"{name.replace('_', ' ')}: {value}" for name, value in row.items()))


@dead.command("retry")
@click.argument("request_id", metavar="[ID]", required=False)
@click.option("--all", "every", is_flag=True, help="All dead letters of the model.")
@model_option
@show.as_json
def retry(request_id: str | None, every: bool, model: str | None, as_json: bool) -> None:
    """Let a dead letter run again. Its answer can be fetched by its owner; nobody pays for it."""
    with _chosen(request_id, every, model) as (store, chosen):
        done = {name: store.run(queue.retry_dead(name)) for queue, name in chosen}
    _tell(done, "retried", as_json)


@dead.command("purge")
@click.argument("request_id", metavar="[ID]", required=False)
@click.option("--all", "every", is_flag=True, help="All dead letters of the model.")
@model_option
@show.as_json
def purge(request_id: str | None, every: bool, model: str | None, as_json: bool) -> None:
    """Forget a dead letter, and what was asked in it."""
    with _chosen(request_id, every, model) as (store, chosen):
        done = {name: "purged" if store.run(queue.purge_dead(name)) else "unknown" for queue, name in chosen}
    _tell(done, "purged", as_json)


@contextmanager
def _queues(model: str | None) -> Iterator[tuple[Store, list[Queue]]]:
    """The queues asked for; a model that the catalogue lacks is a problem, not an empty list."""
    from core import catalog
    from tasks.queue import Queue

    settings = environment()
    with show.refusals(catalog.BadCatalog):
        models = catalog.load(settings.catalog).only(settings.models)
    if model and model not in models:
        raise click.ClickException(f"the catalogue has no model {model!r}; `forebay model list` shows them")
    with store(settings) as found:
        yield found, [Queue(name) for name in models if not model or name == model]


@contextmanager
def _chosen(request_id: str | None, every: bool, model: str | None) -> Iterator[tuple[Store, list[tuple[Queue, str]]]]:
    """The letters that a command is for: one, or all of one model."""
    if bool(request_id) == every:
        raise click.UsageError("name an ID, or say --all")
    if every and not model:
        raise click.UsageError("--all needs --model")
    with _queues(model) as (store, queues):
        if request_id:
            yield store, [(_find(store, queues, request_id)[0], request_id)]
        else:
            yield store, [(queue, letter.id) for queue in queues for letter in _letters(store, queue, None)]


def _letters(store: Store, queue: Queue, limit: int | None) -> list[Letter]:
    letters: list[Letter] = []
    while limit is None or len(letters) < limit:
        count = PAGE if limit is None else min(PAGE, limit - len(letters))
        _, page = store.run(queue.dead_letters(len(letters), count))
        letters += page
        if len(page) < count:
            break
    return letters


def _find(store: Store, queues: list[Queue], request_id: str) -> tuple[Queue, Letter]:
    for queue in queues:
        if letter := store.run(queue.dead_letter(request_id)):
            return queue, letter
    raise click.ClickException(f"no dead letter {request_id}")


def _tell(done: dict[str, str], well: str, as_json: bool) -> None:
    """What became of each; exit code 1 when one could not be helped."""
    counts = {word: list(done.values()).count(word) for word in (well, *sorted(set(done.values()) - {well}))}
    sentence = ", ".join(f"{count} {word}" for word, count in counts.items())
    show.one(done, as_json, sentence[:1].upper() + sentence[1:] + ".")
    if set(done.values()) - {well}:
        raise SystemExit(1)


def _depth(store: Store, queue: Queue) -> dict[str, Any]:
    depth = store.run(queue.tick())
    return {
        "model": queue.model,
        **dict(zip(CLASSES, depth.waiting, strict=True)),
        "waiting_tokens": depth.waiting_tokens,
        "oldest_s": round(depth.oldest_wait_ms / 1000, 1),
        "running": depth.running,
        "dead": depth.dead,
        "workers": depth.workers,
        "stopped": _stopped(depth.stops),
    }


def _stopped(stops: Stops) -> str:
    """What operators have stopped, in a few words; `forebay shed` says why."""
    shed = [CLASSES[cls] for cls in sorted(stops.shed)]
    return ", ".join((["paused"] if stops.paused else []) + [f"{name} shed" for name in shed])


def _shown(queue: Queue, letter: Letter) -> dict[str, Any]:
    return {
        "id": letter.id,
        "model": queue.model,
        "dead_at": datetime.fromtimestamp(letter.dead_ms / 1000, UTC),
        "reason": letter.reason,
        "attempt": letter.attempt,
        "losses": letter.losses,
        "class": CLASSES[letter.cls],
        "tenant": letter.tenant,
        "input_tokens": letter.input_tokens,
    }
