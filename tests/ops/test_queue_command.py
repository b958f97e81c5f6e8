"""`forebay queue`: what it prints, how it ends, and what it does to dead letters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from core.redis import Store
from core.values import Class, Outcome, Usage
from ops.commands import queue as noun
from tasks.queue import Queue, Stops, Task

STORES = ("single", "cluster")
FIELDS = 'tokenizer = "bytes"\ncontext_tokens = 4096\nmax_output_tokens = 256\nslots = 32\n'
CATALOG = "".join(f"[models.{name}]\n{FIELDS}" for name in ("one", "two"))


@pytest.fixture
def live(valkey_url: str, valkey: Any) -> Store:
    """A store on its own clock: the command does not know the tests'."""
    return Store.connect(valkey_url)


@pytest.fixture
def environ(tmp_path: Path, live: Store, valkey_url: str) -> dict[str, str | None]:
    path = tmp_path / "catalog.toml"
    path.write_text(CATALOG)
    return {"FOREBAY_CATALOG": str(path), "FOREBAY_DATA": str(tmp_path), "REDIS_URL": valkey_url}


def run(environ: dict[str, str | None], *words: str) -> Result:
    return CliRunner().invoke(noun.command, words, env=environ)


def data(environ: dict[str, str | None], *words: str, code: int = 0) -> Any:
    done = run(environ, *words, "--json")
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def put(store: Store, model: str, name: str, **more: Any) -> None:
    task = Task(id=name, message=b"m", tenant="t", input_tokens=5, body=b"b", **more)
    assert store.run(Queue(model).enqueue(task)).status == "accepted"


def bury(store: Store, model: str, name: str) -> None:
    """Make a dead letter."""
    put(store, model, name)
    queue = Queue(model)
    [claim] = store.run(queue.claim("w", 1, lease_ms=60_000, nonce=name)).claims
    assert store.run(queue.finish("w", claim, Outcome.FAILED, Usage(), "cannot be read", dead=True))


def test_list_shows_every_models_queue(environ: dict[str, str | None], live: Store) -> None:
    bury(live, "one", "d")
    put(live, "one", "a", cls=Class.BULK)
    put(live, "one", "b", cls=Class.INTERACTIVE)

    one, two = data(environ, "list")

    assert {**one, "oldest_s": 0} == {
        "model": "one", "system": 0, "interactive": 1, "default": 0, "bulk": 1, "waiting_tokens": 10, "oldest_s": 0,
        "running": 0, "dead": 1, "workers": 1, "stopped": "",
    }  # fmt: skip
    assert (two["model"], two["bulk"], two["workers"]) == ("two", 0, 0)
    assert [row["model"] for row in data(environ, "list", "--model", "two")] == ["two"]
    assert "interactive" in run(environ, "list").stdout


def test_list_says_what_operators_have_stopped(environ: dict[str, str | None], live: Store) -> None:
    queue = Queue("one")
    live.run(queue.halt(Stops(paused=True, shed=frozenset({Class.DEFAULT, Class.BULK})), live.run(queue.mark())))
    assert [row["stopped"] for row in data(environ, "list")] == ["paused, default shed, bulk shed", ""]
    assert "bulk shed" in run(environ, "list").stdout


def test_dead_letters_are_listed_newest_first_and_shown_one_by_one(environ: dict[str, str | None], live: Store) -> None:
    for model, name in (("one", "a"), ("one", "b"), ("two", "c")):
        bury(live, model, name)

    assert {row["id"] for row in data(environ, "dead", "list")} == {"a", "b", "c"}
    assert len(data(environ, "dead", "list", "--model", "one", "--limit", "1")) == 1
    letter = data(environ, "dead", "show", "c")
    assert (letter["model"], letter["reason"], letter["class"], letter["attempt"]) == (
        "two",
        "cannot be read",
        "default",
        1,
    )
    assert "cannot be read" in run(environ, "dead", "show", "c").stdout
    assert "cannot be read" in run(environ, "dead", "list").stdout


def test_a_dead_letter_runs_again_when_it_is_retried(environ: dict[str, str | None], live: Store) -> None:
    bury(live, "one", "a")
    bury(live, "one", "b")

    assert run(environ, "dead", "retry", "a").output == "1 retried.\n"
    assert [claim.id for claim in live.run(Queue("one").claim("w", 9, lease_ms=60_000, nonce="x")).claims] == ["a"]
    assert data(environ, "dead", "retry", "--all", "--model", "one") == {"b": "retried"}
    assert data(environ, "dead", "list") == []


def test_what_cannot_be_retried_is_said_and_is_a_problem(environ: dict[str, str | None], live: Store) -> None:
    bury(live, "one", "a")
    live.client.delete("f1:{one}:body:a")

    assert data(environ, "dead", "retry", "a", code=1) == {"a": "gone"}
    assert run(environ, "dead", "retry", "--all", "--model", "one").output == "0 retried, 1 gone.\n"


def test_purge_forgets_the_letter_and_what_was_asked(environ: dict[str, str | None], live: Store) -> None:
    bury(live, "two", "a")
    bury(live, "two", "b")

    assert data(environ, "dead", "purge", "a") == {"a": "purged"}
    assert live.client.exists("f1:{two}:body:a") == 0
    assert data(environ, "dead", "purge", "--all", "--model", "two") == {"b": "purged"}
    assert data(environ, "dead", "list") == []


@pytest.mark.parametrize(("words", "code", "said"), [
    (("list", "--model", "three"), 1, "no model 'three'"),
    (("dead", "show", "nobody"), 1, "no dead letter nobody"),
    (("dead", "retry", "nobody"), 1, "no dead letter nobody"),
    (("dead", "retry"), 2, "name an ID, or say --all"),
    (("dead", "purge", "x", "--all"), 2, "name an ID, or say --all"),
    (("dead", "purge", "--all"), 2, "--all needs --model"),
])  # fmt: skip
def test_what_is_not_there_or_not_meant_is_refused_with_a_sentence(
    environ: dict[str, str | None], words: tuple[str, ...], code: int, said: str
) -> None:
    done = run(environ, *words)

    assert (done.exit_code, said in done.output) == (code, True), done.output


def test_a_store_that_is_away_is_a_sentence(environ: dict[str, str | None], tmp_path: Path, kind: str) -> None:
    scheme = "redis" if kind == "single" else "redis+cluster"

    done = run({**environ, "REDIS_URL": f"{scheme}://127.0.0.1:1"}, "list")

    assert done.exit_code == 1 and "Redis is away" in done.output
