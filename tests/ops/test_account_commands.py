"""The commands about keys, limits, organisations and the audit log: what they change, at once, and what they leave in
the log."""

from __future__ import annotations

import importlib
import json
import pwd
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import pytest

from core import responses
from core.accounts import keys
from core.limits import stopped
from core.postgres import DatabaseAway, Engine, connect, text, transaction
from core.redis import Store
from ops import cli
from ops import connect as connected
from ops.commands import audit, key, limits, org, project
from tests.ops.conftest import PEPPER, data, forebay

MODEL = "smollm2-135m-instruct"
Environ = dict[str, str | None]


@pytest.fixture
def engine(environ: Environ) -> Iterator[Engine]:
    ready = json.loads((Path(str(environ["FOREBAY_DATA"])) / "ready.json").read_text())
    engine = connect(ready["database_url"])
    yield engine
    engine.dispose()


def acme(environ: Environ) -> Any:
    """An organisation and its key."""
    data(environ, org.command, "create", "acme")
    return data(environ, key.command, "create", "laptop", "--org", "acme")


def record(store: Store, key_id: str) -> keys.KeyRecord:
    found = store.run(keys.read(key_id))
    assert found is not None
    return found


# --- keys


def test_a_key_is_made_with_what_binds_it_and_shown_so(environ: Environ, store: Store) -> None:
    data(environ, org.command, "create", "acme")
    bound = ("--scope", "generate", "--model", MODEL, "--network", "10.0.0.0/8", "--network", "192.0.2.1")

    made = data(environ, key.command, "create", "k", "--org", "acme", *bound, "--expires-at", "2999-01-01")

    shown = data(environ, key.command, "show", made["id"])
    assert (shown["scopes"], shown["models"]) == (["generate"], [MODEL])
    assert shown["networks"] == ["10.0.0.0/8", "192.0.2.1/32"]
    assert datetime.fromisoformat(shown["expires_at"]) == datetime(2999, 1, 1, tzinfo=UTC)
    known = record(store, made["id"])
    assert (list(known.scopes), list(known.models), list(known.networks)) == (
        shown["scopes"], shown["models"], shown["networks"],
    )  # fmt: skip
    told = forebay(environ, key.command, "show", made["id"]).output
    assert "10.0.0.0/8, 192.0.2.1/32" in told and made["key"] not in told


def test_a_rotation_shows_the_new_secret_and_gateways_know_both(environ: Environ, store: Store) -> None:
    made = acme(environ)

    rotated = data(environ, key.command, "rotate", made["id"], "--overlap", "2h")

    assert rotated["id"] == made["id"] and rotated["key"] != made["key"] and rotated["secrets"] == 2
    until = datetime.fromisoformat(rotated["old_until"])
    assert timedelta(hours=1, minutes=59) < until - datetime.now(UTC) <= timedelta(hours=2)
    known, late_ms = record(store, made["id"]), int(until.timestamp() * 1000) + 1
    for plain, now_ms, good in (
        (made["key"], None, True), (rotated["key"], None, True), (made["key"], late_ms, False),
        (rotated["key"], late_ms, True),
    ):  # fmt: skip
        assert keys.matches(keys.parse(plain), known, PEPPER.encode(), now_ms=now_ms) == good
    listed = forebay(environ, key.command, "list").output
    assert rotated["key"] not in listed and f"…{rotated['key'][-4:]}" in listed


def test_a_revoked_key_is_stopped_where_admission_looks(environ: Environ, store: Store) -> None:
    made = acme(environ)
    assert store.run(stopped.stopped(made["org_id"], [made["id"]])) == {}

    data(environ, key.command, "revoke", made["id"], "--reason", "leaked")

    assert store.run(stopped.stopped(made["org_id"], [made["id"]])) == {f"key:{made['id']}": "revoked"}
    assert record(store, made["id"]).revoked
    refused = forebay(environ, key.command, "rotate", made["id"])
    assert refused.exit_code == 1 and "revoked" in refused.output


def test_an_operators_clock_that_is_ahead_keeps_no_secret_alive(
    environ: Environ, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Postgres' clock alone says when a secret is over, and whether one more may be good."""

    class Ahead(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + timedelta(days=1)

    made = acme(environ)
    monkeypatch.setattr("ops.commands.key.datetime", Ahead)

    for _ in range(keys.SECRETS_MAX + 1):
        rotated = data(environ, key.command, "rotate", made["id"], "--overlap", "0h")

    known = record(store, made["id"])
    assert not keys.matches(keys.parse(made["key"]), known, PEPPER.encode())
    assert keys.matches(keys.parse(rotated["key"]), known, PEPPER.encode()) and rotated["secrets"] == 1
    assert datetime.fromisoformat(rotated["old_until"]) <= datetime.now(UTC)


# --- limits


def test_a_limit_is_at_the_gateways_when_its_command_returns(environ: Environ, store: Store) -> None:
    made = acme(environ)

    data(
        environ,
        limits.command,
        "set",
        "org",
        "--org",
        "acme",
        "--tokens-per-minute",
        "1000",
        "--money-per-day",
        "12.50",
    )
    data(environ, limits.command, "set", f"key:{made['id']}", "--org", "acme", "--connections", "3")
    data(environ, limits.command, "set", f"model:{MODEL}", "--org", "acme", "--concurrent-requests", "0")
    in_project = data(environ, limits.command, "set", "project:default", "--org", "acme", "--requests-per-minute", "9")

    known = {limit.scope: limit for limit in record(store, made["id"]).limits}
    assert set(known) == {"org", f"key:{made['id']}", f"model:{MODEL}", in_project["scope"]}
    assert (known["org"].tokens_per_minute, str(known["org"].money_per_day)) == (1000, "12.5")
    data(environ, limits.command, "set", "org", "--org", "acme", "--tokens-per-minute", "none")
    data(environ, limits.command, "clear", "project:default", "--org", "acme")
    known = {limit.scope: limit for limit in record(store, made["id"]).limits}
    assert known["org"].tokens_per_minute is None and in_project["scope"] not in known


def test_limits_are_shown_as_they_are(environ: Environ) -> None:
    acme(environ)
    assert data(environ, limits.command, "show", "--org", "acme") == []
    data(environ, limits.command, "set", "project:default", "--org", "acme", "--money-per-month", "0.10")
    data(environ, limits.command, "set", "org", "--org", "acme", "--requests-per-minute", "0")

    rows = data(environ, limits.command, "show", "--org", "acme")

    told = [(row["name"], row["requests_per_minute"], row["money_per_month"]) for row in rows]
    assert told == [(None, 0, None), ("default", None, "0.1")]
    assert [row["scope"] for row in data(environ, limits.command, "show", "org", "--org", "acme")] == ["org"]
    assert "default" in forebay(environ, limits.command, "show", "--org", "acme").output
    whole = data(environ, org.command, "show", "acme")
    assert whole["limits"]["org"] == {"requests_per_minute": 0} and list(whole["projects"]) == ["default"]


# --- organisations


def test_a_name_that_is_taken_makes_no_second_organisation(environ: Environ) -> None:
    """From then on the name would be ambiguous for every command."""
    first = data(environ, org.command, "create", "acme")

    for taken in ("acme", first["id"]):
        done = forebay(environ, org.command, "create", taken)
        assert done.exit_code == 1 and first["id"] in done.output and "another name" in done.output

    assert [one["id"] for one in data(environ, org.command, "list")] == [first["id"]]
    assert [one["action"] for one in data(environ, audit.command, "list")] == ["org.create"]


@pytest.mark.parametrize("step", ["outwait", "shorten"])
def test_a_retention_that_stops_half_way_says_that_it_is_set_and_to_repeat_it(
    environ: Environ, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    acme(environ)

    def away(*_: Any) -> None:
        raise DatabaseAway("it went")

    with monkeypatch.context() as broken:
        broken.setattr(responses, step, away)
        done = forebay(environ, org.command, "retention", "acme", "7")

    assert done.exit_code == 1 and "it went" in done.output
    assert "is set" in done.output and "repeat this command" in done.output
    assert data(environ, org.command, "show", "acme")["retention_days"] == 7
    assert data(environ, org.command, "retention", "acme", "7")["retention_days"] == 7


def test_a_suspended_organisation_is_stopped_where_admission_looks_until_it_is_resumed(
    environ: Environ, store: Store
) -> None:
    made = acme(environ)

    suspended = data(environ, org.command, "suspend", "acme", "--reason", "unpaid")

    assert (suspended["status"], suspended["stopped_reason"]) == ("suspended", "unpaid")
    assert store.run(stopped.stopped(made["org_id"], [])) == {"org": "suspended"}
    assert record(store, made["id"]).suspended
    assert data(environ, org.command, "resume", "acme")["status"] == "active"
    assert store.run(stopped.stopped(made["org_id"], [])) == {}
    assert not record(store, made["id"]).suspended


def test_what_an_organisation_is_reaches_its_keys_records_at_once(environ: Environ, store: Store) -> None:
    made = acme(environ)

    data(environ, org.command, "plan", "acme", "prepaid")
    data(environ, org.command, "weight", "acme", "2")
    data(environ, org.command, "retention", "acme", "0")

    known = record(store, made["id"])
    assert (known.plan, known.weight, known.retention_days) == ("prepaid", 2, 0)


def test_a_stop_without_redis_is_written_down_and_says_that_it_does_not_hold_yet(environ: Environ) -> None:
    acme(environ)

    done = forebay({**environ, "REDIS_URL": "redis://127.0.0.1:1"}, org.command, "suspend", "acme")

    assert done.exit_code == 1 and "Redis is away" in done.output and connected.WRITTEN_DOWN in done.output
    assert data(environ, org.command, "show", "acme")["status"] == "suspended"


def test_a_stop_reaches_what_it_can(environ: Environ, store: Store) -> None:
    """The store of limits is away, the other is not: gateways are told all the same."""
    made = acme(environ)

    done = forebay({**environ, "FOREBAY_LIMITS_URL": "redis://127.0.0.1:1"}, key.command, "revoke", made["id"])

    assert done.exit_code == 1 and "Redis is away" in done.output
    assert record(store, made["id"]).revoked


def test_a_secret_is_shown_even_if_postgres_goes_away_once_it_is_made(
    environ: Environ, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rotation that nobody saw the secret of, with the old one ended, would shut a caller out."""
    made = acme(environ)

    def away(engine: Engine, key_id: str) -> None:
        raise DatabaseAway("it went")

    monkeypatch.setattr(keys, "find", away)
    created = forebay(environ, key.command, "create", "other", "--org", "acme")
    rotated = forebay(environ, key.command, "rotate", made["id"], "--overlap", "0s")

    for done, code in ((created, 0), (rotated, 1)):
        assert keys.parse(done.stdout.splitlines()[0]) and done.exit_code == code
        assert "Postgres is away: it went" in done.output and connected.WRITTEN_DOWN in done.output


# --- the log

#: Commands that change nothing in Postgres. Whatever is neither here nor below fails the test that asks.
READING = {
    "org list", "org show", "project list", "key list", "key show", "limits show", "audit list", "audit verify",
    "model list", "credit balance", "credit list",
}  # fmt: skip
#: Commands that change something, in an order in which each can, and the action that each writes.
CHANGING = {
    "org create": "org.create", "project create": "project.create", "key create": "key.create",
    "key rotate": "key.rotate", "limits set": "limits.set", "limits clear": "limits.clear", "org plan": "org.plan",
    "org weight": "org.weight", "org retention": "org.retention", "org suspend": "org.suspend",
    "org resume": "org.resume", "credit grant": "credit.grant", "credit entry": "credit.entry",
    "model price": "price.set", "model pause": "model.pause",
    "model resume": "model.resume", "shed": "class.shed", "shed --clear": "class.clear", "key revoke": "key.revoke",
}  # fmt: skip


def words(name: str, key_id: str) -> list[str]:
    """How each command of CHANGING is called."""
    return {
        "org create": ["second"],
        "project create": ["search", "--org", "acme"],
        "key create": ["k", "--org", "acme", "--network", "10.0.0.0/8"],
        "key rotate": [key_id, "--overlap", "1h"],
        "key revoke": [key_id, "--reason", "leaked"],
        "limits set": ["org", "--org", "acme", "--money-per-day", "1.5", "--tokens-per-minute", "none"],
        "limits clear": ["org", "--org", "acme"],
        "org plan": ["acme", "free"],
        "org weight": ["acme", "2"],
        "org retention": ["acme", "7"],
        "org suspend": ["acme", "--reason", "unpaid"],
        "org resume": ["acme"],
        "credit grant": ["acme", "10", "--reason", "payment 7"],
        "credit entry": ["acme", "-1.5", "--reason", "goodwill"],
        "model price": [MODEL, "--input", "0.15", "--output", "0.6"],
        "model pause": [MODEL, "--reason", "broken"],
        "model resume": [MODEL],
        "shed": ["bulk", "--reason", "full"],
        "shed --clear": ["bulk"],
    }[name]


def command(noun: str) -> click.Command:
    module, _, attribute = cli.COMMANDS[noun][0].partition(":")
    found = getattr(importlib.import_module(module), attribute)
    assert isinstance(found, click.Command)
    return found


def test_every_command_about_accounts_is_known_to_change_something_or_nothing() -> None:
    named = READING | set(CHANGING)
    groups = {noun: command(noun) for noun in {name.split()[0] for name in named}}

    known = {f"{noun} {verb}" for noun, one in groups.items() if isinstance(one, click.Group) for verb in one.commands}

    assert known == named - {"shed", "shed --clear"}


def test_every_change_is_in_the_log_once_and_no_secret_ever(environ: Environ, engine: Engine) -> None:
    """Every secret that a command shows, every HMAC in Postgres and the pepper are looked for in the whole log."""
    made = acme(environ)
    shown = [made["key"]]
    before = len(data(environ, audit.command, "list"))

    for name, action in CHANGING.items():
        noun, *verb = name.split()
        done = data(environ, command(noun), *verb, *words(name, made["id"]))
        shown += [done["key"]] if "key" in done else []
        log = data(environ, audit.command, "list")
        assert (len(log), log[-1]["action"]) == (before + 1, action), name
        assert log[-1]["actor"] == connected.actor()
        before += 1
    for name in READING:
        noun, verb = name.split()
        by_id = [made["id"]] if name == "key show" else []
        arguments = by_id + (["acme"] if name in ("org show", "credit balance", "credit list") else [])
        needs_org = ["--org", "acme"] if name in ("project list", "limits show") else []
        assert forebay(environ, command(noun), verb, *arguments, *needs_org).exit_code == 0
    assert len(data(environ, audit.command, "list")) == before

    with transaction(engine) as connection:
        log_text = connection.execute(text("SELECT string_agg(audit_log::text, ' ') FROM audit_log")).scalar_one()
        hashes = connection.execute(text("SELECT secret_hmac FROM key_secrets")).scalars().all()
    assert len(shown) == 3 and len(hashes) == 3
    for secret in [plain.rpartition("_")[2] for plain in shown] + [PEPPER] + [bytes(one).hex() for one in hashes]:
        assert secret not in log_text
    assert data(environ, audit.command, "verify")["rows"] == before


def test_what_is_refused_is_not_in_the_log(environ: Environ) -> None:
    acme(environ)
    before = data(environ, audit.command, "list")

    for noun, asked in (
        (org.command, ["weight", "acme", "0"]),
        (project.command, ["create", "default", "--org", "acme"]),
        (key.command, ["rotate", "nobody"]),
        (key.command, ["create", "x", "--org", "acme", "--network", "nowhere"]),
        (limits.command, ["set", "org", "--org", "acme", "--tokens-per-minute", "-5"]),
        (limits.command, ["clear", "org", "--org", "acme"]),
    ):
        assert forebay(environ, noun, *asked).exit_code == 1

    assert data(environ, audit.command, "list") == before


def test_the_actor_is_who_the_operating_system_says(environ: Environ, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment may say what it likes; a container's user may have no name."""
    monkeypatch.setenv("LOGNAME", "somebody")
    monkeypatch.setenv("USER", "somebody")
    data(environ, org.command, "create", "acme")

    def nameless(uid: int) -> Any:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nameless)
    data(environ, org.command, "create", "second")

    first, second = data(environ, audit.command, "list")
    assert first["actor"] != "somebody" and second["actor"].startswith("uid ")


def test_a_log_that_was_tampered_with_is_a_failure(environ: Environ, engine: Engine) -> None:
    acme(environ)
    whole = data(environ, audit.command, "verify")
    assert data(environ, audit.command, "verify", "--contains", whole["head"])["found"]
    assert f"Head: {whole['head']}" in forebay(environ, audit.command, "verify").output
    assert forebay(environ, audit.command, "verify", "--contains", "ab" * 32).exit_code == 1

    with transaction(engine) as connection:
        connection.execute(text("ALTER TABLE audit_log DISABLE TRIGGER ALL"))
        connection.execute(text("UPDATE audit_log SET actor = 'nobody' WHERE n = 1"))

    done = forebay(environ, audit.command, "verify")
    assert done.exit_code == 1 and "BROKEN at entry 1" in done.output


def test_a_log_is_read_by_organisation(environ: Environ) -> None:
    acme(environ)
    data(environ, org.command, "create", "other")

    assert [one["action"] for one in data(environ, audit.command, "list", "--org", "acme")] == [
        "org.create",
        "key.create",
    ]
    assert [one["subject"][:4] for one in data(environ, audit.command, "list", "--limit", "1")] == ["org:"]
    assert "kind=live" in forebay(environ, audit.command, "list", "--org", "acme").output


@pytest.mark.parametrize(
    ("noun", "asked", "code"),
    [
        (org.command, ["plan", "acme", "stolen"], 2),
        (org.command, ["suspend", "nobody"], 1),
        (org.command, ["show", "nobody"], 1),
        (project.command, ["create", "", "--org", "acme"], 1),
        (project.command, ["list", "--org", "nobody"], 1),
        (key.command, ["create", "", "--org", "acme"], 1),
        (key.command, ["create", "x", "--org", "acme", "--model", "nothing"], 1),
        (key.command, ["create", "x", "--org", "acme", "--kind", "admin", "--scope", "generate"], 1),
        (key.command, ["create", "x", "--org", "acme", "--expires-at", "2020-01-01"], 1),
        (key.command, ["create", "x", "--org", "acme", "--expires-at", "soon"], 2),
        (key.command, ["rotate", "nobody", "--overlap", "73h"], 1),
        (key.command, ["rotate", "nobody", "--overlap", "a while"], 2),
        (key.command, ["show", "nobody"], 1),
        (limits.command, ["set", "org", "--org", "acme"], 1),
        (limits.command, ["set", "planet", "--org", "acme", "--connections", "1"], 1),
        (limits.command, ["set", "model:nothing", "--org", "acme", "--tokens-per-minute", "1"], 1),
        (limits.command, ["set", f"model:{MODEL}", "--org", "acme", "--connections", "1"], 1),
        (limits.command, ["set", "org", "--org", "acme", "--money-per-day", "-1"], 1),
        (limits.command, ["set", "org", "--org", "acme", "--money-per-day", "NaN"], 1),
        (limits.command, ["set", "org", "--org", "acme", "--money-per-day", "much"], 2),
        (limits.command, ["set", "org", "--org", "acme", "--tokens-per-minute", "1.5"], 2),
        (limits.command, ["show", "key:nobody", "--org", "acme"], 1),
        (audit.command, ["list", "--org", "nobody"], 1),
        (audit.command, ["list", "--limit", "0"], 2),
    ],
)
def test_what_cannot_be_done_is_one_sentence(
    environ: Environ, noun: click.Command, asked: list[str], code: int
) -> None:
    data(environ, org.command, "create", "acme")

    done = forebay(environ, noun, *asked)

    assert done.exit_code == code, done.output
    assert "Error: " in done.output and not {"Traceback", "constraint"} & set(done.output.split())
