"""Limits as they are set: whose they are, what they may be, and what a change leaves alone."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from core.accounts import keys, quotas, tenants
from core.accounts.quotas import LimitRefused
from core.postgres import Connection, Engine, text, transaction
from core.values import Limit
from tests.conftest import Database


@pytest.fixture
def engine(database: Database) -> Engine:
    return database.engine()


def tenant(connection: Connection, name: str) -> tuple[str, str, str]:
    """An organisation, its project and its key."""
    organisation = tenants.create_organisation(connection, name)
    [project] = tenants.projects(connection, organisation.id)
    _, row = keys.create_key(
        connection, org_id=organisation.id, project_id=project.id, name="k", pepper=b"a pepper for tests only"
    )
    return organisation.id, project.id, row.id


def test_a_change_leaves_the_other_limits_of_the_scope_alone(engine: Engine) -> None:
    with transaction(engine) as connection:
        org_id, _, _ = tenant(connection, "acme")
        quotas.set_limits(connection, org_id, "org", {"requests_per_minute": 60, "money_per_day": Decimal("1.50")})
        after = quotas.set_limits(connection, org_id, "org", {"requests_per_minute": None, "tokens_per_minute": 0})

        assert after == Limit(scope="org", tokens_per_minute=0, money_per_day=Decimal("1.5"))
        assert quotas.limits(connection, org_id) == [after]
        assert quotas.shown(after)["money_per_day"] == "1.5"
        assert quotas.clear(connection, org_id, "org") and not quotas.clear(connection, org_id, "org")
        assert quotas.limits(connection, org_id) == []


def test_a_scope_is_named_as_people_do(engine: Engine) -> None:
    with transaction(engine) as connection:
        org_id, project_id, key_id = tenant(connection, "acme")

        found = [
            quotas.scope_of(connection, org_id, told)
            for told in ("org", f"key:{key_id}", "project:default", f"project:{project_id}", "model:tiny")
        ]

    assert found == ["org", f"key:{key_id}", f"project:{project_id}", f"project:{project_id}", "model:tiny"]


def test_nobody_limits_what_is_another_tenants(engine: Engine) -> None:
    """By name it is not found; and the database refuses it to whoever does not ask by name."""
    with transaction(engine) as connection:
        ours, _, _ = tenant(connection, "acme")
        _, project_id, key_id = tenant(connection, "other")

        for theirs in (f"key:{key_id}", f"project:{project_id}"):
            with pytest.raises(LimitRefused):
                quotas.scope_of(connection, ours, theirs)
            with pytest.raises(LimitRefused):
                quotas.set_limits(connection, ours, theirs, {"tokens_per_minute": 1})
        assert quotas.limits(connection, ours) == []


@pytest.mark.parametrize(
    "scope", ["", "everything", "key:", "project:", "model:", "key:x:y", "region:eu", "org:1", "Org"]
)
def test_what_is_no_scope_is_refused(engine: Engine, scope: str) -> None:
    with transaction(engine) as connection:
        org_id, _, _ = tenant(connection, "acme")

        with pytest.raises(LimitRefused):
            quotas.scope_of(connection, org_id, scope)
        with pytest.raises(LimitRefused):
            quotas.set_limits(connection, org_id, scope, {"tokens_per_minute": 1})


@pytest.mark.parametrize(
    ("scope", "changes"),
    [
        ("org", {}),
        ("org", {"requests_per_minute": -1}),
        ("org", {"requests_per_minute": 10**9 + 1}),
        ("org", {"tokens_per_minute": 10**12 + 1}),
        ("org", {"concurrent_requests": Decimal("1.5")}),
        ("org", {"money_per_day": Decimal("-0.01")}),
        ("org", {"money_per_day": Decimal("NaN")}),
        ("org", {"money_per_month": Decimal("Infinity")}),
        ("org", {"money_per_month": Decimal(900_001)}),
        ("org", {"money_per_month": Decimal("0.00000000001")}),
        ("org", {"happiness": 1}),
        ("org", {"scope": 1}),
        ("model:tiny", {"connections": 1}),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused_and_changes_nothing(
    engine: Engine, scope: str, changes: dict[str, Any]
) -> None:
    with transaction(engine) as connection:
        org_id, _, _ = tenant(connection, "acme")

        with pytest.raises(LimitRefused):
            quotas.set_limits(connection, org_id, scope, changes)
        assert connection.execute(text("SELECT count(*) FROM limits")).scalar_one() == 0


def test_a_budget_beyond_what_is_exact_is_refused_with_what_there_is_instead(engine: Engine) -> None:
    with transaction(engine) as connection:
        org_id, _, _ = tenant(connection, "acme")
        with pytest.raises(LimitRefused, match=r"from 0 to 900,000, whatever the .* currency.* prepaid balance"):
            quotas.set_limits(connection, org_id, "org", {"money_per_month": Decimal(5_000_000)})


def test_limits_reach_from_nothing_to_the_highest_there_is(engine: Engine) -> None:
    with transaction(engine) as connection:
        org_id, _, _ = tenant(connection, "acme")
        for value in (
            dict.fromkeys(quotas.COUNTS, 0),
            dict(quotas.COUNTS),
            dict.fromkeys(quotas.MONEY, quotas.MONEY_MAX),
        ):
            limit = quotas.set_limits(connection, org_id, "org", value)
            assert {name: getattr(limit, name) for name in value} == value
