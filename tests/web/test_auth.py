"""The gate: who is let in, who is not told why, and what an absence of either store changes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from structlog.testing import capture_logs

from core.accounts import failures, keys, secrets, tenants
from core.accounts.keys import KeyRecord
from core.accounts.secrets import Grant
from core.errors import AccountsDown, ForebayError, NotAllowed, StoreDown, Unauthenticated
from core.postgres import Engine, text, transaction
from core.redis import Call
from tests.conftest import Database, TimedStore
from web.app import POLICIES, BadPolicies, check_policies
from web.auth import Gate, Policy, may_use, networks, peer

PEPPER = b"a pepper for tests only"


#: Where the one comes from who tries; and the network of those who only use their keys.
HERE, THERE = "203.0.113.9", "198.51.100.7"


class Watched(TimedStore):
    """A store that can be taken away, and that writes down what it was asked."""

    away: Exception | None = None
    scripts_away: tuple[str, ...] = ()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.calls: list[str] = []

    @property
    def asked(self) -> int:
        return len(self.calls)

    def run(self, call: Call[Any]) -> Any:
        self.calls.append(call.script.name if call.script else str(call.args[0]))
        if self.away is not None or self.calls[-1] in self.scripts_away:
            raise self.away or RedisConnectionError("away")
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
    seen: list[tuple[str, str]] = field(default_factory=list)

    def key(self, **asked: Any) -> str:
        with transaction(self.engine) as connection:
            names = {"org_id": self.org_id, "project_id": self.project_id, "name": "laptop", "pepper": PEPPER}
            plain, _ = keys.create_key(connection, **{**names, **asked})  # type: ignore[arg-type]
        return plain

    def known(self, **asked: Any) -> str:
        """A key that gateways have seen."""
        plain = self.key(**asked)
        self.project(plain)
        return plain

    def project(self, plain: str) -> None:
        record = keys.find(self.engine, keys.parse(plain).key_id)
        assert record is not None
        self.store.run(keys.project(record))

    def rotate(self, plain: str, overlap: timedelta) -> str:
        """A new secret of a key. Gateways have been told."""
        with transaction(self.engine) as connection:
            rotated, *_ = keys.rotate(connection, keys.parse(plain).key_id, pepper=PEPPER, overlap=overlap)
        self.project(plain)
        return rotated

    def suspend(self) -> None:
        self.execute("UPDATE organisations SET status = 'suspended'")
        keys.project_all(self.engine, self.store, self.org_id)

    def execute(self, sql: str) -> None:
        with transaction(self.engine) as connection:
            connection.execute(text(sql))

    def revoke(self, plain: str) -> None:
        with transaction(self.engine) as connection:
            record = keys.revoke(connection, keys.parse(plain).key_id, now=datetime.now(UTC))
        self.store.run(keys.project(record))

    def enter(self, plain: str, policy: Policy = Policy.GENERATE, address: str = HERE) -> KeyRecord:
        return self.gate.authenticate(f"Bearer {plain}", policy=policy, address=address)

    def refusal(self, plain: str, policy: Policy = Policy.GENERATE, address: str = HERE) -> ForebayError:
        with pytest.raises(ForebayError) as caught:
            self.enter(plain, policy, address)
        return caught.value

    def gone(self) -> dict[str, str]:
        """A key of each kind of those that are no good, but well-formed."""
        now = datetime.now(UTC)
        revoked, right, rotated = self.known(), self.known(), self.known()
        self.revoke(revoked)
        expired = self.known(expires_at=now - timedelta(seconds=1))
        self.rotate(rotated, timedelta(minutes=1))
        self.execute("UPDATE key_secrets SET expires_at = now() WHERE expires_at IS NOT NULL")
        self.project(rotated)
        unknown = keys.mint("live", "A" * keys.ID_LENGTH)
        return {
            "unknown": unknown, "revoked": revoked, "expired": expired, "another secret": other_secret(right),
            "a secret whose overlap is over": rotated,
        }  # fmt: skip


@pytest.fixture
def accounts(database: Database, store: TimedStore) -> Accounts:
    seen: list[tuple[str, str]] = []
    engine = database.engine()
    with transaction(engine) as connection:
        organisation = tenants.create_organisation(connection, "acme")
        [project] = tenants.projects(connection, organisation.id)
    watched = Watched(store.client, store.time)
    gate = Gate(watched, engine, PEPPER, seen=lambda parsed, record, address: seen.append((record.key_id, address)))
    return Accounts(gate, watched, engine, database, organisation.id, project.id, seen)


def other_secret(plain: str) -> str:
    """A well-formed key with the same id and another secret."""
    return keys.mint("live", keys.parse(plain).key_id)


def test_a_key_is_its_caller(accounts: Accounts) -> None:
    plain = accounts.key(requests_per_minute=7)

    record = accounts.enter(plain)

    assert (record.org_id, record.project_id) == (accounts.org_id, accounts.project_id)
    assert (record.key_id, [limit.requests_per_minute for limit in record.limits]) == (keys.parse(plain).key_id, [7])
    assert accounts.seen == [(record.key_id, HERE)]


def test_postgres_is_asked_once_for_a_key_and_then_never_again(accounts: Accounts) -> None:
    plain = accounts.key()
    accounts.enter(plain)
    accounts.execute("ALTER TABLE api_keys RENAME TO gone")
    accounts.store.calls.clear()

    assert accounts.enter(plain).key_id == keys.parse(plain).key_id
    assert accounts.store.calls == ["HGET"], "a good key costs one exchange"


# --- keys that are no good


@pytest.mark.parametrize("seen", [True, False], ids=["known to gateways", "never seen"])
def test_keys_that_are_no_good_get_the_same_answer(accounts: Accounts, seen: bool) -> None:
    """Whoever tries keys learns nothing of which one came close."""
    gone, right = accounts.gone(), accounts.known()
    if not seen:
        accounts.store.client.flushall()

    refusals = [accounts.refusal(plain) for plain in gone.values()]

    assert {type(refusal) for refusal in refusals} == {Unauthenticated}
    assert [(refusal.status, refusal.headers, refusal.retry_after_ms) for refusal in refusals] == [(401, {}, None)] * 5
    assert len({repr(refusal.envelope()) for refusal in refusals}) == 1
    assert accounts.enter(right) and len(accounts.seen) == 1, "only good keys are seen"


def test_keys_that_are_no_good_take_the_same_path(accounts: Accounts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same exchanges with the store, the same questions to Postgres and as many HMACs of what was shown, in one
    order: there is nothing that a clock could tell apart. Nor is there when too many have failed."""
    gone, steps = accounts.gone(), watched_steps(accounts, monkeypatch)

    def path(plain: str) -> str:
        steps.clear()
        accounts.refusal(plain)
        return " ".join(steps)

    def paths() -> dict[str, str]:
        return {name: path(plain) for name, plain in gone.items()}

    assert paths() == dict.fromkeys(gone, "HGET hmac fail postgres hmac")
    fail_too_often(accounts)
    assert paths() == dict.fromkeys(gone, "HGET hmac fail"), "Postgres is not asked any more"


def watched_steps(accounts: Accounts, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """All that the gate does from now on."""
    steps: list[str] = accounts.store.calls
    for name, step in (("find", "postgres"), ("hashed", "hmac")):
        monkeypatch.setattr(keys, name, _noted(getattr(keys, name), step, steps))
    return steps


def _noted(does: Callable[..., Any], step: str, steps: list[str]) -> Callable[..., Any]:
    def noted(*args: Any) -> Any:
        steps.append(step)
        return does(*args)

    return noted


def fail_too_often(accounts: Accounts) -> None:
    while accounts.refusal(keys.mint("live", "A" * keys.ID_LENGTH)).status == 401:
        pass


def test_a_key_is_good_as_soon_as_it_was_rotated_though_gateways_have_its_old_record(accounts: Accounts) -> None:
    """Postgres is asked before a key is called wrong: what a command could not tell Redis is found there."""
    plain = accounts.known()
    with transaction(accounts.engine) as connection:
        key_id = keys.parse(plain).key_id
        rotated, *_ = keys.rotate(connection, key_id, pepper=PEPPER, overlap=timedelta(hours=1))

    assert accounts.enter(rotated).key_id == accounts.enter(plain).key_id == key_id


@pytest.mark.parametrize("away", [(), ("project",)], ids=["", "while its record cannot be written"])
def test_what_redis_knows_to_be_revoked_stays_so_whatever_postgres_says(
    accounts: Accounts, away: tuple[str, ...]
) -> None:
    """A backup that was restored knows nothing of the revocations since."""
    plain = accounts.known()
    accounts.revoke(plain)
    accounts.execute("UPDATE api_keys SET revoked_at = NULL, revoked_reason = NULL")
    accounts.execute("UPDATE key_secrets SET expires_at = NULL")
    accounts.store.scripts_away = away

    assert type(accounts.refusal(plain)) is Unauthenticated


# --- attempts that failed


def test_the_twenty_first_attempt_of_a_minute_is_told_to_wait_and_good_keys_are_let_in(accounts: Accounts) -> None:
    """When it may come again is true: at that moment it is judged, and 2 ms earlier it is not."""
    good, clock = accounts.known(), accounts.store.time
    for n in range(20):
        assert accounts.refusal(other_secret(good)).status == 401
        clock.advance(n)

    refused = accounts.refusal(keys.mint("live", "A" * keys.ID_LENGTH))
    assert (refused.status, refused.error_code, refused.retry) == (429, "too_many_failures", False)
    assert accounts.refusal(other_secret(good), address=THERE).status == 401, "others have their own count"
    assert accounts.enter(good), "whoever has a key that is known as good is not in doubt"

    assert refused.retry_after_ms is not None
    clock.advance(refused.retry_after_ms - 2)
    again = accounts.refusal(other_secret(good))
    assert (again.status, again.retry_after_ms) == (429, 2), "what is refused puts nothing off"
    clock.advance(2)
    assert accounts.refusal(other_secret(good)).status == 401


def test_postgres_is_asked_of_no_more_keys_than_may_fail_however_many_come_at_once(
    accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random keys, well-formed: each would be a question."""
    good, steps = accounts.known(), watched_steps(accounts, monkeypatch)
    mints = [keys.mint("live", f"{n:0{keys.ID_LENGTH}}") for n in range(100)] + [other_secret(good)] * 100

    with ThreadPoolExecutor(16) as pool:
        told = [refusal.status for refusal in pool.map(accounts.refusal, mints)]

    assert (told.count(401), told.count(429), steps.count("postgres")) == (20, 180, 20)
    steps.clear()
    assert accounts.enter(good) and steps == ["HGET", "hmac"], "a good key that Redis knows is not even counted"


def test_a_good_key_that_redis_does_not_know_counts_as_no_failure(accounts: Accounts) -> None:
    """It does while Postgres is asked; also of one that nobody can judge."""
    assert all(accounts.enter(accounts.key()) for _ in range(25))
    never_seen = accounts.key()
    accounts.database.go_away()
    assert {accounts.refusal(never_seen).status for _ in range(25)} == {503}
    accounts.database.come_back()

    assert accounts.store.client.keys("*failures*") == []
    assert accounts.enter(never_seen)


def test_where_too_many_have_failed_a_good_key_waits_until_redis_knows_it(accounts: Accounts) -> None:
    """Commands tell Redis at once, and the clock does so each minute."""
    fail_too_often(accounts)
    plain = accounts.key()
    assert accounts.refusal(plain).error_code == "too_many_failures"
    assert accounts.enter(plain, address=THERE) and accounts.enter(plain)

    with transaction(accounts.engine) as connection:
        key_id = keys.parse(plain).key_id
        rotated, *_ = keys.rotate(connection, key_id, pepper=PEPPER, overlap=timedelta(hours=1))
    assert accounts.refusal(rotated).status == 429 and accounts.enter(plain)
    keys.project_all(accounts.engine, accounts.store)
    assert accounts.enter(rotated)


def test_an_address_is_written_nowhere_and_forgotten_in_a_minute(accounts: Accounts) -> None:
    accounts.refusal(keys.mint("live", "A" * keys.ID_LENGTH))

    [key] = accounts.store.client.keys("*failures*")
    assert HERE.encode() not in key and 0 < accounts.store.client.pttl(key) <= failures.WINDOW_MS
    assert accounts.store.client.llen(key) == 1


def test_an_ipv6_network_is_one_address(accounts: Accounts) -> None:
    """Whoever has one has 2**64 addresses of it."""
    unknown = keys.mint("live", "A" * keys.ID_LENGTH)
    told = [accounts.refusal(unknown, address=f"2001:db8:0:1::{n:x}").status for n in range(1, 22)]

    assert told == [401] * 20 + [429]
    assert accounts.refusal(unknown, address="2001:db8:0:2::1").status == 401


def test_without_the_count_nobody_bad_is_let_in_and_nobody_good_kept_out(accounts: Accounts) -> None:
    good = accounts.known()
    accounts.store.scripts_away = ("fail",)

    with capture_logs() as said:
        assert accounts.refusal(other_secret(good)).status == 401
    assert [one["event"] for one in said] == ["failure_not_counted"]
    assert accounts.enter(good)


def test_a_key_works_until_the_moment_it_expires(accounts: Accounts) -> None:
    assert accounts.enter(accounts.key(expires_at=datetime.now(UTC) + timedelta(minutes=1)))


def test_a_revoked_key_stays_out_though_a_gateway_had_just_read_it(
    accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow gateway asks Postgres before the revocation, and writes its old record after it."""
    plain, found = accounts.key(), keys.find

    def revoked_meanwhile(engine: Engine, key_id: str) -> KeyRecord | None:
        before = found(engine, key_id)
        monkeypatch.setattr(keys, "find", found)
        accounts.revoke(plain)
        return before

    monkeypatch.setattr(keys, "find", revoked_meanwhile)
    assert type(accounts.refusal(plain)) is Unauthenticated
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


# --- what a good key may do


def test_admin_keys_administer_and_others_generate(accounts: Accounts) -> None:
    admin, live = accounts.known(kind="admin"), accounts.known(kind="live")

    assert accounts.enter(admin, Policy.ADMIN).kind == "admin"
    assert accounts.enter(live).kind == "live"
    assert accounts.enter(accounts.known(kind="test")).kind == "test"
    others = [policy for policy in Policy if policy not in (Policy.PUBLIC, Policy.ADMIN)]
    for refusal in [accounts.refusal(live, Policy.ADMIN), *(accounts.refusal(admin, policy) for policy in others)]:
        assert (type(refusal), refusal.status, refusal.error_code) == (NotAllowed, 403, "not_allowed")


def test_a_key_cannot_be_made_an_admins_by_writing_so(accounts: Accounts) -> None:
    """The kind is part of what is hashed, and the record's own kind is what counts."""
    plain = accounts.known()
    body = plain.replace("fb_live_", "fb_admin_")[: -keys.CHECKSUM_LENGTH]

    assert accounts.refusal(body + keys.checksum(body), Policy.ADMIN).status == 401


def test_a_key_may_do_what_its_scopes_say_and_is_told_what_it_lacks(accounts: Accounts) -> None:
    counting = accounts.known(scopes=["usage.read"])

    assert accounts.enter(counting, Policy.USAGE)
    for policy, scope in {Policy.GENERATE: "generate", Policy.SOCKET: "generate", Policy.MODELS: "models.read"}.items():
        refusal = accounts.refusal(counting, policy)
        assert (refusal.status, refusal.error_code, f"`{scope}`" in refusal.message) == (403, "missing_scope", True)


def test_a_suspended_organisations_keys_are_told_so_and_nobody_elses(accounts: Accounts) -> None:
    plain = accounts.known()
    accounts.suspend()

    refusal = accounts.refusal(plain)
    assert (refusal.status, refusal.type, refusal.error_code) == (403, "permission_error", "organisation_suspended")
    assert not refusal.retry
    assert accounts.refusal(other_secret(plain)).status == 401, "who has no good key of theirs is told nothing"


def test_a_key_that_is_bound_to_networks_comes_from_there(accounts: Accounts) -> None:
    plain = accounts.known(networks=["198.51.100.0/24", "2001:db8::/32"])

    assert accounts.enter(plain, address=THERE) and accounts.enter(plain, address="2001:db8::5")
    assert accounts.enter(plain, address="::ffff:198.51.100.7"), "the same, as a socket of both protocols says it"
    for address in (HERE, "2001:db9::5", ""):
        refusal = accounts.refusal(plain, address=address)
        assert (refusal.status, refusal.error_code) == (403, "address_not_allowed")


def test_a_key_may_use_the_models_it_names_or_all(accounts: Accounts) -> None:
    bound, free = accounts.enter(accounts.key(models=["small"])), accounts.enter(accounts.key())

    assert may_use(bound, "small") and not may_use(bound, "large")
    assert may_use(free, "small") and may_use(free, "large")


# --- client secrets


def give(accounts: Accounts, plain: str) -> str:
    secret = secrets.mint()
    accounts.store.run(secrets.give(secret, Grant(key_id=keys.parse(plain).key_id), 60))
    return secret


def refused(accounts: Accounts, secret: str) -> ForebayError:
    with pytest.raises(ForebayError) as caught:
        accounts.gate.redeem(secret, address=HERE)
    return caught.value


def test_a_client_secret_opens_what_its_key_may_wherever_its_page_is(accounts: Accounts) -> None:
    """A page is not where the key's servers are: the networks of the key bound who mints."""
    plain = accounts.known(networks=["198.51.100.0/24"])

    assert accounts.gate.redeem(give(accounts, plain), address=HERE)[0].key_id == keys.parse(plain).key_id


def test_a_client_secret_is_worth_no_more_than_its_key(accounts: Accounts) -> None:
    counting, revoked, expired = accounts.known(scopes=["usage.read"]), accounts.known(), accounts.known()
    lost, admin = accounts.key(), accounts.known(kind="admin")
    accounts.revoke(revoked)
    accounts.execute(f"UPDATE api_keys SET expires_at = now() WHERE id = '{keys.parse(expired).key_id}'")
    accounts.project(expired)

    for plain in (revoked, expired):
        assert (refused(accounts, give(accounts, plain)).status) == 401
    codes = [refused(accounts, give(accounts, plain)).error_code for plain in (counting, admin)]
    assert codes == ["missing_scope", "not_allowed"]
    assert accounts.gate.redeem(give(accounts, lost))[0], "its record is looked for in Postgres too"
    accounts.suspend()
    assert refused(accounts, give(accounts, lost)).error_code == "organisation_suspended"


def test_client_secrets_that_are_no_good_count_as_failures_and_no_secrets_at_all_cost_nothing(
    accounts: Accounts,
) -> None:
    for _ in range(20):
        assert refused(accounts, secrets.mint()).status == 401
    assert refused(accounts, secrets.mint()).error_code == "too_many_failures"

    asked = accounts.store.asked
    assert refused(accounts, "ek_short").status == 401 and accounts.store.asked == asked


# --- addresses

PROXIES = networks("10.0.0.0/8, 2001:db8:f::/48")


@pytest.mark.parametrize(
    ("remote", "forwarded", "told"),
    [
        (HERE, "", HERE),
        (HERE, THERE, HERE),
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", HERE, HERE),
        ("10.0.0.1", f"{THERE}, {HERE}", HERE),
        ("10.0.0.1", f"{THERE}, {HERE}, 10.9.9.9", HERE),
        ("10.0.0.1", f"10.0.0.7, {HERE}:4711", HERE),
        ("10.0.0.1", "10.0.0.7, 10.0.0.8", "10.0.0.7"),
        ("10.0.0.1", f"{HERE}, unknown", "10.0.0.1"),
        ("2001:db8:f::1", "[2001:db8:1::2]:443", "2001:db8:1::2"),
        ("::ffff:10.0.0.1", HERE, HERE),
        ("", HERE, ""),
    ],
)
def test_only_proxies_of_ours_are_believed_and_only_about_whom_they_saw(remote: str, forwarded: str, told: str) -> None:
    """Whatever a client writes itself stands to the left of what the nearest proxy adds."""
    assert peer(remote, forwarded, PROXIES) == told


def test_without_a_proxy_that_is_named_nobody_is_believed() -> None:
    assert peer("10.0.0.1", HERE, ()) == "10.0.0.1"


# --- policies


def test_an_application_with_a_route_without_a_policy_does_not_start() -> None:
    with pytest.raises(BadPolicies) as caught:
        check_policies([*POLICIES, "new.route"])
    assert "Routes without a policy: new.route; policies of no route: none." in str(caught.value)
    with pytest.raises(BadPolicies) as caught:
        check_policies(endpoint for endpoint in POLICIES if endpoint != "account.key")
    assert "Routes without a policy: none; policies of no route: account.key." in str(caught.value)
    check_policies(POLICIES)


# --- stores that are away


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


def test_a_key_is_let_in_though_its_record_could_not_be_kept(accounts: Accounts) -> None:
    """The store goes away between the two exchanges of a first sight."""
    plain = accounts.key()
    accounts.store.scripts_away = ("project",)

    with capture_logs() as said:
        assert accounts.enter(plain)

    assert [one["event"] for one in said] == ["key_not_projected"]
    assert plain not in repr(said)
