"""The gate: who is let in, who is not told why, and what an absence of either store changes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from structlog.testing import capture_logs

from core.accounts import keys, tenants
from core.accounts.keys import KeyRecord
from core.errors import AccountsDown, ForebayError, NotAllowed, StoreDown, Unauthenticated
from core.postgres import Engine, text, transaction
from core.redis import Call
from tests.conftest import Database, TimedStore
from web.auth import Gate

PEPPER = b"a pepper for tests only"


class Watched(TimedStore):
    """A store that can be taken away, and that counts what it was asked."""

    away: Exception | None = None
    asked = 0

    def run(self, call: Call[Any]) -> Any:
        self.asked += 1
        if self.away is not None:
            raise self.away
        return super().run(call)


@dataclass
class Accounts:
    """A gate, one organisation, and its keys in Postgres."""

    gate: Gate
    store: Watched
    engine: Engine
    database: Database
    org_id: str
    project_id: str

    def key(self, **asked: Any) -> str:
        with transaction(self.engine) as connection:
            names = {"org_id": self.org_id, "project_id": self.project_id, "name": "laptop", "pepper": PEPPER}
            plain, _ = keys.create_key(connection, **{**names, **asked})  # type: ignore[arg-type]
        return plain

    def known(self, **asked: Any) -> str:
        """A key that gateways have seen."""
        plain = self.key(**asked)
        self.enter(plain, admin=asked.get("kind") == "admin")
        return plain

    def revoke(self, plain: str) -> None:
        with transaction(self.engine) as connection:
            record = keys.revoke(connection, keys.parse(plain).key_id, now=datetime.now(UTC))
        self.store.run(keys.project(record))

    def enter(self, plain: str, *, admin: bool = False) -> KeyRecord:
        return self.gate.authenticate(f"Bearer {plain}", admin=admin)

    def refusal(self, plain: str, *, admin: bool = False) -> ForebayError:
        with pytest.raises(ForebayError) as caught:
            self.enter(plain, admin=admin)
        return caught.value


@pytest.fixture
def accounts(database: Database, store: TimedStore) -> Accounts:
    engine = database.engine()
    with transaction(engine) as connection:
        organisation = tenants.create_organisation(connection, "acme")
        [project] = tenants.projects(connection, organisation.id)
    watched = Watched(store.client, store.time)
    return Accounts(Gate(watched, engine, PEPPER), watched, engine, database, organisation.id, project.id)


def other_secret(plain: str) -> str:
    """A well-formed key with the same id and another secret."""
    return keys.mint("live", keys.parse(plain).key_id)


def test_a_key_is_its_caller(accounts: Accounts) -> None:
    plain = accounts.key(requests_per_minute=7)

    record = accounts.enter(plain)

    assert (record.org_id, record.project_id) == (accounts.org_id, accounts.project_id)
    assert (record.key_id, record.requests_per_minute) == (keys.parse(plain).key_id, 7)


def test_postgres_is_asked_once_for_a_key_and_then_never_again(accounts: Accounts) -> None:
    plain = accounts.known()
    with transaction(accounts.engine) as connection:
        connection.execute(text("ALTER TABLE api_keys RENAME TO gone"))

    assert accounts.enter(plain).key_id == keys.parse(plain).key_id


@pytest.mark.parametrize("seen", [True, False], ids=["known to gateways", "never seen"])
def test_revoked_expired_unknown_and_wrong_are_the_same_answer(accounts: Accounts, seen: bool) -> None:
    """Whoever tries keys learns nothing of which one came close."""
    now = datetime.now(UTC)
    make = accounts.known if seen else accounts.key
    revoked, right = make(), make()
    accounts.revoke(revoked)
    expired = accounts.key(expires_at=now - timedelta(seconds=1))
    if seen:
        accounts.store.run(keys.project(keys.find(accounts.engine, keys.parse(expired).key_id)))  # type: ignore[arg-type]
    unknown = keys.mint("live", "A" * keys.ID_LENGTH)

    refusals = [accounts.refusal(plain) for plain in (revoked, expired, unknown, other_secret(right))]

    assert {type(refusal) for refusal in refusals} == {Unauthenticated}
    assert [refusal.status for refusal in refusals] == [401] * 4
    assert len({repr(refusal.envelope()) for refusal in refusals}) == 1
    assert accounts.enter(right)


def test_a_key_works_until_the_moment_it_expires(accounts: Accounts) -> None:
    assert accounts.enter(accounts.key(expires_at=datetime.now(UTC) + timedelta(minutes=1)))


def test_a_revoked_key_stays_out_though_a_gateway_had_just_read_it(accounts: Accounts) -> None:
    """A slow gateway that asked Postgres before the revocation writes its old record after it."""
    plain = accounts.key()
    before = keys.find(accounts.engine, keys.parse(plain).key_id)
    assert before is not None
    accounts.revoke(plain)
    accounts.store.run(keys.project(before))

    assert type(accounts.refusal(plain)) is Unauthenticated


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Basic dXNlcjpwYXNz",
        "Bearer fb_live_short",
        "Bearer sk-abcdef",
        "Bearer fb_live_\0",
        "é",
    ],
)
def test_what_is_no_key_of_ours_is_refused_before_anything_is_asked(accounts: Accounts, header: str) -> None:
    accounts.database.go_away()
    accounts.store.away = RedisConnectionError("away")

    with pytest.raises(Unauthenticated) as caught:
        accounts.gate.authenticate(header)

    assert (caught.value.status, caught.value.error_code) == (401, "invalid_api_key")
    assert accounts.store.asked == 0


def test_a_mistyped_key_is_refused_before_anything_is_asked(accounts: Accounts) -> None:
    plain = accounts.known()
    asked = accounts.store.asked

    for at in range(len(plain)):
        mistyped = plain[:at] + ("x" if plain[at] != "x" else "y") + plain[at + 1 :]
        assert accounts.refusal(mistyped).status == 401

    assert accounts.store.asked == asked


def test_admin_keys_administer_and_others_generate(accounts: Accounts) -> None:
    admin, live = accounts.known(kind="admin"), accounts.known(kind="live")

    assert accounts.enter(admin, admin=True).kind == "admin"
    assert accounts.enter(live).kind == "live"
    assert accounts.enter(accounts.known(kind="test")).kind == "test"
    for refusal in (accounts.refusal(admin), accounts.refusal(live, admin=True)):
        assert (type(refusal), refusal.status) == (NotAllowed, 403)


def test_a_key_cannot_be_made_an_admins_by_writing_so(accounts: Accounts) -> None:
    """The kind is part of what is hashed, and the record's own kind is what counts."""
    plain = accounts.known()
    body = plain.replace("fb_live_", "fb_admin_")[: -keys.CHECKSUM_LENGTH]

    assert accounts.refusal(body + keys.checksum(body), admin=True).status == 401


def test_with_postgres_away_known_keys_are_served_and_others_cannot_be_judged(accounts: Accounts) -> None:
    known, never_seen = accounts.known(), accounts.key()
    accounts.database.go_away()

    assert accounts.enter(known)
    assert accounts.refusal(other_secret(known)).status == 401
    for plain in (never_seen, keys.mint("live", "A" * keys.ID_LENGTH)):
        refusal = accounts.refusal(plain)
        assert (type(refusal), refusal.status, refusal.retry) == (AccountsDown, 503, True)

    accounts.database.come_back()
    assert accounts.enter(never_seen)


def test_a_revocation_holds_while_postgres_is_away(accounts: Accounts) -> None:
    plain = accounts.known()
    accounts.revoke(plain)
    accounts.database.go_away()

    assert accounts.refusal(plain).status == 401


@pytest.mark.parametrize("away", [RedisConnectionError("refused"), RedisTimeoutError("silent")], ids=["gone", "silent"])
def test_with_the_store_away_nobody_is_let_in_and_nobody_is_called_wrong(accounts: Accounts, away: Exception) -> None:
    plain = accounts.known()
    accounts.store.away = away

    for key in (plain, other_secret(plain), keys.mint("live", "A" * keys.ID_LENGTH)):
        refusal = accounts.refusal(key)
        assert (type(refusal), refusal.status, refusal.retry) == (StoreDown, 503, True)


class LosesProject(Watched):
    """The store goes away between the two exchanges of a first sight."""

    def run(self, call: Call[Any]) -> Any:
        if call.script is not None and call.script.name == "project":
            raise RedisConnectionError("away")
        return super().run(call)


def test_a_key_is_let_in_though_its_record_could_not_be_kept(accounts: Accounts) -> None:
    plain = accounts.key()
    accounts.gate.store = LosesProject(accounts.store.client, accounts.store.time)

    with capture_logs() as said:
        assert accounts.enter(plain)

    assert [one["event"] for one in said] == ["key_not_projected"]
    assert plain not in repr(said)
