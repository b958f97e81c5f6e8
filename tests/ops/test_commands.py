"""The commands about accounts and money: what they print, how they end, and what they leave behind."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import pytest
import uuid6

from billing import events, prices
from core import usage
from core.accounts import keys, tenants
from core.postgres import connect, transaction
from core.redis import Store, command
from core.settings import Settings
from core.usage import Facts
from ops.commands import key, model, org, project
from ops.commands import usage as usage_command
from ops.connect import Urls, urls
from tests.ops.conftest import PEPPER, data, forebay

MODEL = "smollm2-135m-instruct"


def make_key(environ: dict[str, str | None]) -> Any:
    data(environ, org.command, "create", "acme")
    return data(environ, key.command, "create", "laptop", "--org", "acme", "--requests-per-minute", "60")


def test_an_organisation_has_a_project_to_put_keys_into(environ: dict[str, str | None]) -> None:
    made = data(environ, org.command, "create", "acme")
    data(environ, project.command, "create", "search", "--org", "acme")

    assert [one["id"] for one in data(environ, org.command, "list")] == [made["id"]]
    names = [one["name"] for one in data(environ, project.command, "list", "--org", made["id"])]
    assert names == ["default", "search"]


def test_an_organisation_may_have_a_larger_share(environ: dict[str, str | None]) -> None:
    data(environ, org.command, "create", "acme")

    assert data(environ, org.command, "weight", "acme", "2")["weight"] == 2
    assert [one["weight"] for one in data(environ, org.command, "list")] == [2]
    refused = forebay(environ, org.command, "weight", "acme", "0")
    assert refused.exit_code == 1 and "above 0" in refused.output


def test_an_organisation_may_have_its_responses_kept_shorter_or_not_at_all(environ: dict[str, str | None]) -> None:
    made = data(environ, org.command, "create", "acme")

    assert made["retention_days"] == 30
    for days in (7, 0):
        assert data(environ, org.command, "retention", "acme", str(days))["retention_days"] == days
    assert [one["retention_days"] for one in data(environ, org.command, "list")] == [0]
    wrong = forebay(environ, org.command, "retention", "acme", "4000")
    assert wrong.exit_code == 1 and "3650" in wrong.output
    assert "stores no responses" in forebay(environ, org.command, "retention", "acme", "0").output


def test_a_key_is_shown_in_full_only_once(environ: dict[str, str | None]) -> None:
    made = make_key(environ)

    listed = forebay(environ, key.command, "list", "--json").output + forebay(environ, key.command, "list").output

    assert keys.parse(made["key"]).key_id == made["id"]
    assert made["key"] not in listed and made["id"] in listed


def test_a_new_key_is_served_at_once_and_a_revoked_one_no_more(environ: dict[str, str | None], store: Store) -> None:
    made = make_key(environ)

    record = store.run(keys.read(made["id"]))
    assert record is not None and record.usable(0) and record.requests_per_minute == 60
    assert keys.matches(keys.parse(made["key"]), record, PEPPER.encode())

    data(environ, key.command, "revoke", made["id"])
    record = store.run(keys.read(made["id"]))
    assert record is not None and record.revoked


def test_a_key_without_redis_is_made_and_says_so(environ: dict[str, str | None]) -> None:
    data(environ, org.command, "create", "acme")

    away = {**environ, "REDIS_URL": "redis://127.0.0.1:1"}
    done = forebay(away, key.command, "create", "laptop", "--org", "acme")

    assert done.exit_code == 0
    assert done.stdout.startswith("fb_live_") and "Warning" in done.stderr


def test_a_revocation_that_gateways_do_not_know_of_is_a_failure(environ: dict[str, str | None]) -> None:
    made = make_key(environ)

    done = forebay({**environ, "REDIS_URL": "redis://127.0.0.1:1"}, key.command, "revoke", made["id"])

    assert done.exit_code == 1 and "Redis is away" in done.output
    [listed] = data(environ, key.command, "list")
    assert listed["revoked_at"] is not None


def test_a_price_is_pinned_at_once(environ: dict[str, str | None], store: Store) -> None:
    priced = data(environ, model.command, "price", MODEL, "--input", "0.15", "--output", "0.60")

    pinned = store.run(prices.read(MODEL))
    assert pinned is not None and pinned.id == priced["price_id"]
    [listed] = data(environ, model.command, "list")
    assert (listed["model"], listed["input_per_mtok"], listed["cached_input_per_mtok"], listed["output_per_mtok"]) == (
        MODEL, "0.15", "0.15", "0.6",
    )  # fmt: skip


def test_usage_shows_tokens_and_exact_money(environ: dict[str, str | None], store: Store) -> None:
    """It rolls up what came in since the clock last did, so nobody has to wait to see it."""
    made = make_key(environ)
    priced = data(environ, model.command, "price", MODEL, "--input", "0.1", "--output", "0.3")
    facts = {"org_id": made["org_id"], "project_id": made["project_id"], "key_id": made["id"], "model": MODEL}
    enter(store, Facts(**facts, price_id=priced["price_id"]))
    engine = connect(str(urls(Settings(data=Path(environ["FOREBAY_DATA"] or ""))).database_url))
    events.ingest(store, engine, [MODEL], "c1")
    engine.dispose()

    [row] = data(environ, usage_command.command, "--org", "acme", "--by", "key")

    assert row == {
        "key": made["id"], "currency": "USD", "requests": 1, "input_tokens": 10, "cached_tokens": 4,
        "output_tokens": 7, "reasoning_tokens": 0, "amount": "0.0000031",
    }  # fmt: skip
    tomorrow = f"{datetime.now(UTC).year + 1}-01-01"
    assert data(environ, usage_command.command, "--since", tomorrow) == []
    assert "0.0000031" in forebay(environ, usage_command.command, "--by", "model").output


def enter(store: Store, facts: Facts) -> None:
    import msgspec

    said = {
        "id": str(uuid6.uuid7()), "attempt": 1, "outcome": "completed", "worker": "w", "input": 10, "cached": 4,
        "output": 7, "reasoning": 0, "facts": msgspec.msgpack.encode(facts),
    }  # fmt: skip
    words = [word for pair in said.items() for word in pair]
    store.run(command("XADD", usage.stream(MODEL), "*", *words, reply=bool))


@pytest.mark.parametrize(
    ("noun", "words", "code"),
    [
        (org.command, ["create", ""], 1),
        (org.command, ["create"], 2),
        (project.command, ["create", "x", "--org", "nobody"], 1),
        (key.command, ["create", "x", "--org", "nobody"], 1),
        (key.command, ["create", "x", "--org", "nobody", "--requests-per-minute", "-1"], 2),
        (key.command, ["revoke", "nobody"], 1),
        (model.command, ["price", "nothing", "--input", "1", "--output", "1"], 1),
        (model.command, ["price", MODEL, "--input", "-1", "--output", "1"], 1),
        (model.command, ["price", MODEL, "--input", "cheap", "--output", "1"], 2),
        (model.command, ["price", MODEL, "--input", "1", "--output", "1", "--currency", "dollars"], 1),
        (usage_command.command, ["--org", "nobody"], 1),
        (usage_command.command, ["--by", "mood"], 2),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    environ: dict[str, str | None], noun: click.Command, words: list[str], code: int
) -> None:
    done = forebay(environ, noun, *words)

    assert done.exit_code == code
    assert "Error: " in done.output and "Traceback" not in done.output


def test_a_name_that_two_organisations_have_is_not_guessed(environ: dict[str, str | None]) -> None:
    """The release before let a name be taken twice."""
    engine = connect(urls(Settings(data=Path(str(environ["FOREBAY_DATA"])))).database_url)
    with transaction(engine) as connection:
        for _ in range(2):
            tenants.create_organisation(connection, "acme")
    engine.dispose()

    done = forebay(environ, key.command, "create", "x", "--org", "acme")

    assert done.exit_code == 1 and "2 organisations" in done.output


@pytest.mark.parametrize("database_url", ["", "postgresql://nobody@127.0.0.1:1/nowhere"])
def test_without_a_database_a_command_says_what_to_do(tmp_path: Path, database_url: str) -> None:
    done = forebay({"FOREBAY_DATA": str(tmp_path), "DATABASE_URL": database_url}, org.command, "list")

    assert done.exit_code == 1
    assert "DATABASE_URL is not set" in done.output or "Postgres is away" in done.output


def test_a_bad_environment_is_a_usage_error(environ: dict[str, str | None]) -> None:
    done = forebay({**environ, "FOREBAY_PORT": "99999999"}, org.command, "list")

    assert done.exit_code == 2 and "FOREBAY_PORT" in done.output


def test_the_environment_goes_before_what_is_running(tmp_path: Path) -> None:
    (tmp_path / "ready.json").write_text('{"redis_url": "redis://ready", "database_url": "postgresql://ready"}')

    found = urls(Settings(data=tmp_path, redis_url="redis://told"))

    assert found == Urls(redis_url="redis://told", database_url="postgresql://ready")
    assert urls(Settings(data=tmp_path / "nothing")) == Urls(redis_url="", database_url="")
