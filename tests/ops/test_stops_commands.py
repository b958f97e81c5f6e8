"""`forebay model pause | resume` and `forebay shed`: what they change, what they say, and what they leave behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from core.accounts import audit
from core.postgres import connect, migrate, transaction
from core.redis import Store
from core.values import Class
from ops.commands import model, shed
from ops.connect import WRITTEN_DOWN
from tasks.queue import Queue, Stops, Task

FIELDS = 'tokenizer = "bytes"\ncontext_tokens = 4096\nmax_output_tokens = 256\nslots = 32\n'
CATALOG = "".join(f"[models.{name}]\n{FIELDS}" for name in ("one", "two"))
Environ = dict[str, str | None]


@pytest.fixture
def live(valkey_url: str, valkey: Any) -> Iterator[Store]:
    """A store on its own clock: the command does not know the tests'."""
    store = Store.connect(valkey_url)
    yield store
    store.close()


@pytest.fixture
def environ(tmp_path: Path, live: Store, valkey_url: str, empty_database: str) -> Environ:
    migrate(empty_database)
    path = tmp_path / "catalog.toml"
    path.write_text(CATALOG)
    return {
        "FOREBAY_CATALOG": str(path), "FOREBAY_DATA": str(tmp_path), "REDIS_URL": valkey_url,
        "DATABASE_URL": empty_database,
    }  # fmt: skip


def run(environ: Environ, noun: click.Command, *words: str) -> Result:
    return CliRunner().invoke(noun, words, env=environ)


def data(environ: Environ, noun: click.Command, *words: str) -> Any:
    """What a command prints as JSON when it ends well."""
    done = run(environ, noun, *words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def stopped(store: Store, name: str) -> Stops:
    return store.run(Queue(name).tick()).stops


def audited(environ: Environ) -> list[tuple[str, str]]:
    engine = connect(environ["DATABASE_URL"] or "")
    with transaction(engine) as connection:
        told = [(entry.action, entry.subject) for entry in audit.entries(connection)]
    engine.dispose()
    return told


def test_a_model_is_paused_and_goes_on(environ: Environ, live: Store) -> None:
    """The queue knows when the command has returned, and a repeat changes nothing."""
    assert data(environ, model.command, "pause", "one", "--reason", "it says the same to everybody") == {
        "model": "one", "paused": True, "changed": True,
    }  # fmt: skip
    assert stopped(live, "one") == Stops(paused=True) and stopped(live, "two") == Stops()
    assert not data(environ, model.command, "pause", "one", "--reason", "again")["changed"]
    [stop] = data(environ, shed.command)
    assert (stop["kind"], stop["name"], stop["reason"]) == ("model", "one", "it says the same to everybody")
    assert "it says the same" in run(environ, shed.command).stdout

    assert "goes on" in run(environ, model.command, "resume", "one").stdout
    assert stopped(live, "one") == Stops()
    assert "as before" in run(environ, model.command, "resume", "one").stdout
    assert audited(environ) == [("model.pause", "model:one"), ("model.resume", "model:one")]


def test_a_class_is_shed_of_every_model_and_what_waits_of_it_has_ended(environ: Environ, live: Store) -> None:
    """More than one exchange ends at once."""
    for n in range(300):
        live.run(Queue("two").enqueue(Task(id=f"a{n}", message=b"m", cls=Class.BULK)))
    assert data(environ, shed.command, "bulk")["changed"]
    for name in ("one", "two"):
        assert stopped(live, name) == Stops(shed=frozenset({Class.BULK}))
    assert live.run(Queue("two").tick()).waiting == (0, 0, 0, 0)
    assert not data(environ, shed.command, "bulk")["changed"]

    assert data(environ, shed.command, "--clear", "bulk") == {
        "class": "bulk", "model": None, "shed": False, "changed": True,
    }  # fmt: skip
    assert stopped(live, "two") == Stops() and data(environ, shed.command) == []
    assert audited(environ) == [("class.shed", "class:bulk"), ("class.clear", "class:bulk")]


def test_a_class_is_shed_of_one_model(environ: Environ, live: Store) -> None:
    assert "Default is shed by one." in run(environ, shed.command, "default", "--model", "one").stdout
    assert stopped(live, "one").shed and not stopped(live, "two").shed
    data(environ, shed.command, "default", "--model", "one", "--clear")
    assert not stopped(live, "one").shed


def test_what_is_shed_of_every_model_is_not_served_by_one(environ: Environ, live: Store) -> None:
    data(environ, shed.command, "bulk")
    data(environ, shed.command, "bulk", "--model", "one")
    refused = run(environ, shed.command, "bulk", "--clear", "--model", "one")
    assert refused.exit_code == 1 and "shed of every model" in refused.output
    assert stopped(live, "one").shed and len(data(environ, shed.command)) == 2, "nothing was changed"
    data(environ, shed.command, "bulk", "--clear")
    assert data(environ, shed.command) == [] and not stopped(live, "one").shed


@pytest.mark.parametrize("words", [("pause", "three"), ("pause",), ("resume",)])
def test_a_model_that_the_catalogue_lacks_cannot_be_paused(environ: Environ, words: tuple[str, ...]) -> None:
    done = run(environ, model.command, *words)
    assert done.exit_code in (1, 2) and audited(environ) == []


def test_a_class_that_there_is_not_cannot_be_shed(environ: Environ) -> None:
    assert run(environ, shed.command, "batch").exit_code == 2
    assert run(environ, shed.command, "bulk", "--model", "three").exit_code == 1
    assert audited(environ) == []


def test_a_model_that_the_catalogue_no_longer_has_can_go_on(environ: Environ) -> None:
    data(environ, model.command, "pause", "one")
    Path(environ["FOREBAY_CATALOG"] or "").write_text(f"[models.two]\n{FIELDS}")
    assert data(environ, model.command, "resume", "one")["changed"]


def test_a_model_that_is_mistyped_is_not_said_to_go_on(environ: Environ) -> None:
    data(environ, model.command, "pause", "one")

    done = run(environ, model.command, "resume", "on")

    assert done.exit_code == 1 and "the catalogue has no model 'on'" in done.output
    assert [stop["name"] for stop in data(environ, shed.command)] == ["one"]


@pytest.mark.parametrize("words", [("--clear",), ("--model", "one"), ("--reason", "load")])
def test_no_class_is_not_all_of_them(environ: Environ, words: tuple[str, ...]) -> None:
    """`forebay shed` lists; who says more means a class."""
    done = run(environ, shed.command, *words)

    assert done.exit_code == 2 and "name a CLASS" in done.output


def test_with_redis_away_it_is_written_down_and_the_exit_code_says_that_the_queues_do_not_know(
    environ: Environ,
) -> None:
    done = run({**environ, "REDIS_URL": "redis://127.0.0.1:1/0"}, model.command, "pause", "one")  # type: ignore[arg-type]
    assert done.exit_code == 1 and "Redis is away" in done.output and WRITTEN_DOWN in done.output
    assert [stop["name"] for stop in data(environ, shed.command)] == ["one"]
