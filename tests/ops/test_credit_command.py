"""`forebay credit`: what is booked, what holds at once, and what is left in the log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from billing.credits import lease
from core.limits import balances
from core.limits.balances import money
from core.postgres import connect
from core.redis import Store
from ops.commands import audit, credit, org
from tests.ops.conftest import data, forebay

Environ = dict[str, str | None]


def acme(environ: Environ) -> str:
    made = data(environ, org.command, "create", "acme")
    return str(made["id"])


def test_what_is_granted_and_corrected_is_what_is_left(environ: Environ) -> None:
    acme(environ)
    data(environ, credit.command, "grant", "acme", "12.5", "--reason", "invoice 7")
    data(environ, credit.command, "entry", "acme", "-0.1", "--reason", "paid twice")

    told = data(environ, credit.command, "balance", "acme")

    assert told == {"granted": "12.4", "expired": "0", "spent": "0", "left": "12.4", "currency": "USD"}
    rows = data(environ, credit.command, "list", "acme")
    assert [(row["kind"], row["amount"], row["reason"]) for row in rows] == [
        ("grant", "12.5", "invoice 7"),
        ("entry", "-0.1", "paid twice"),
    ]
    assert "12.4" in forebay(environ, credit.command, "balance", "acme").output


def test_a_grant_holds_at_once_where_requests_are_admitted(environ: Environ, store: Store) -> None:
    """A lease is open, as that of any organisation that has had a request."""
    org_id = acme(environ)
    data(environ, credit.command, "grant", "acme", "1")
    engine = connect(json.loads((Path(str(environ["FOREBAY_DATA"])) / "ready.json").read_text())["database_url"])
    lease(engine, store, org_id, "org")
    engine.dispose()

    data(environ, credit.command, "grant", "acme", "5000002.25")
    data(environ, credit.command, "entry", "acme", "-0.25", "--reason", "x")

    found = store.run(balances.account(org_id, "org"))
    assert found is not None and money(found.granted) == 5_000_003


def test_what_is_booked_is_in_the_log(environ: Environ) -> None:
    acme(environ)
    data(environ, credit.command, "grant", "acme", "12.5", "--expires", "2999-01-01", "--reason", "invoice 7")
    data(environ, credit.command, "entry", "acme", "+1", "--reason", "a gift")

    rows: list[Any] = [row for row in data(environ, audit.command, "list") if row["action"].startswith("credit.")]

    assert [(row["action"], row["detail"]["amount"], row["detail"]["reason"]) for row in rows] == [
        ("credit.grant", "12.5000000000", "invoice 7"),
        ("credit.entry", "1.0000000000", "a gift"),
    ]
    assert rows[0]["detail"]["expires_at"].startswith("2999-01-01")


def test_what_cannot_be_booked_is_refused_and_not_in_the_log(environ: Environ) -> None:
    acme(environ)
    for words in (
        ("grant", "acme", "0"),
        ("grant", "acme", "-1"),
        ("grant", "acme", "1", "--expires", "2001-01-01"),
        ("grant", "nobody", "1"),
        ("entry", "acme", "0", "--reason", "x"),
        ("entry", "acme", "0.00000000001", "--reason", "x"),
    ):
        assert forebay(environ, credit.command, *words).exit_code == 1, words
    assert forebay(environ, credit.command, "grant", "acme", "much").exit_code == 2
    assert forebay(environ, credit.command, "entry", "acme", "1").exit_code == 2, "a correction has a reason"
    assert data(environ, credit.command, "list", "acme") == []


def test_a_grant_that_redis_cannot_be_told_of_is_booked_and_says_so(environ: Environ) -> None:
    """So that nobody books it twice; the clock tells Redis when it is back."""
    acme(environ)
    gone = {**environ, "FOREBAY_LIMITS_URL": "redis://127.0.0.1:1/0"}

    done = forebay(gone, credit.command, "grant", "acme", "5")

    assert done.exit_code == 1 and "booked" in done.output and "do not repeat" in done.output
    assert data(environ, credit.command, "balance", "acme")["left"] == "5"
