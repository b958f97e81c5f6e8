"""How keys live: what they are bound to, how they change their secrets, how peppers change under them, how they end."""

from __future__ import annotations

import hmac
import threading
import time
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from core.accounts import keys, quotas, tenants
from core.accounts.keys import KeyRecord, KeyRefused, Peppers, Secret
from core.accounts.sightings import NEWS_S, Sightings
from core.postgres import DatabaseAway, Engine, text, transaction
from core.redis import Store
from core.settings import Settings
from core.values import Limit
from tests.conftest import Database

FIRST, SECOND = b"the first pepper of ours", b"the second pepper of ours"
BOTH = Peppers(2, {2: SECOND, 1: FIRST})
HOUR = timedelta(hours=1)
NOW = datetime.now(UTC).replace(microsecond=0)


@pytest.fixture
def engine(database: Database) -> Engine:
    return database.engine()


def tenant(engine: Engine, name: str = "acme") -> tuple[str, str]:
    """An organisation and its first project."""
    with transaction(engine) as connection:
        organisation = tenants.create_organisation(connection, name)
        project = tenants.find_project(connection, org_id=organisation.id, wanted="default")
    return organisation.id, project.id


def make(engine: Engine, **asked: Any) -> tuple[str, keys.KeyRow]:
    if "org_id" not in asked:
        asked["org_id"], asked["project_id"] = tenant(engine)
    with transaction(engine) as connection:
        return keys.create_key(connection, **{"name": "laptop", "pepper": FIRST, **asked})


def rotate(engine: Engine, key_id: str, overlap: timedelta) -> str:
    return rotated(engine, key_id, overlap)[0]


def rotated(engine: Engine, key_id: str, overlap: timedelta) -> tuple[str, datetime]:
    """The new secret, and when what was good before ends."""
    with transaction(engine) as connection:
        plain, _, until = keys.rotate(connection, key_id, pepper=FIRST, overlap=overlap)
    return plain, until


def good(engine: Engine, plain: str, pepper: Peppers | bytes = FIRST, at: datetime = NOW) -> bool:
    """Whether a gateway that asks Postgres now, and looks at its clock at `at`, lets it in."""
    record, now_ms = keys.find(engine, keys.parse(plain).key_id), int(at.timestamp() * 1000)
    return keys.matches(keys.parse(plain), record, pepper, now_ms=now_ms) and bool(record and record.usable(now_ms))


# --- what a key is bound to


def test_a_key_carries_what_it_may_do_and_from_where_to_the_gateways(engine: Engine) -> None:
    _, row = make(
        engine, scopes=["usage.read", "generate"], models=["tiny", "org/large"], networks=["10.0.0.0/8", "2001:db8::1"]
    )

    record = keys.find(engine, row.id)

    assert record is not None
    assert record.scopes == ("generate", "usage.read")
    assert record.models == ("tiny", "org/large")
    assert record.networks == ("10.0.0.0/8", "2001:db8::1/128")


@pytest.mark.parametrize("kind", ["live", "test", "admin"])
def test_no_key_both_generates_and_administers(engine: Engine, kind: keys.Kind) -> None:
    """Whatever is asked for, in the code and in the database."""
    _, row = make(engine, kind=kind)
    record = keys.find(engine, row.id)
    foreign = "generate" if kind == "admin" else "admin"

    assert record is not None and (("admin" in record.scopes) != ("generate" in record.scopes))
    with pytest.raises(KeyRefused, match=foreign):
        make(engine, org_id=row.org_id, project_id=row.project_id, kind=kind, scopes=[foreign])
    with pytest.raises(Exception, match="api_keys_scopes_check"), transaction(engine) as connection:
        connection.execute(text("UPDATE api_keys SET scopes = '{admin,generate}'"))


@pytest.mark.parametrize(
    "asked",
    [
        {"networks": ["10.0.0.1/8"]}, {"networks": ["example.org"]}, {"networks": ["10.0.0.0/33"]}, {"networks": [""]},
        {"networks": ["::ffff:10.0.0.0/104"]}, {"networks": [f"10.0.{n}.0/24" for n in range(keys.NAMES_MAX + 1)]},
        {"models": ["two words"]}, {"models": [""]}, {"scopes": ["everything"]}, {"name": ""},
        {"requests_per_minute": -1},
    ],
)  # fmt: skip
def test_a_key_is_bound_to_nothing_that_makes_no_sense(engine: Engine, asked: dict[str, Any]) -> None:
    with pytest.raises(KeyRefused):
        make(engine, **asked)

    with transaction(engine) as connection:
        assert keys.keys(connection) == []


# --- rotation


def test_a_rotated_key_is_good_by_both_secrets_until_the_overlap_ends(engine: Engine) -> None:
    old, row = make(engine)
    new, until = rotated(engine, row.id, 24 * HOUR)

    for at in (NOW, until - timedelta(milliseconds=1)):
        assert good(engine, old, at=at) and good(engine, new, at=at)
    over = until + timedelta(milliseconds=1)
    assert not good(engine, old, at=over) and good(engine, new, at=over)


def test_a_rotation_keeps_the_keys_id_its_limits_and_its_place(engine: Engine) -> None:
    """Spend is counted by the key's id, so it stays too."""
    old, row = make(engine, requests_per_minute=7, models=["tiny"])
    before = keys.find(engine, row.id)

    new = rotate(engine, row.id, HOUR)

    after = keys.find(engine, row.id)
    assert before is not None and after is not None
    assert keys.parse(new).key_id == keys.parse(old).key_id and new != old
    for name in ("org_id", "project_id", "limits", "models", "scopes", "kind"):
        assert getattr(after, name) == getattr(before, name)


def test_a_rotation_without_overlap_ends_the_old_secret_at_once(engine: Engine) -> None:
    old, row = make(engine)

    new = rotate(engine, row.id, timedelta())

    assert not good(engine, old) and good(engine, new)


def test_an_earlier_end_is_never_put_off_by_another_rotation(engine: Engine) -> None:
    first, row = make(engine)
    second = rotate(engine, row.id, HOUR)
    third = rotate(engine, row.id, 72 * HOUR)

    late = NOW + 2 * HOUR
    assert [good(engine, plain, at=late) for plain in (first, second, third)] == [False, True, True]


def test_so_many_secrets_are_good_at_once_and_no_more(engine: Engine) -> None:
    """Gateways compare with SECRETS_MAX, so one beyond them would be good in Postgres and nowhere else."""
    plain, row = make(engine)
    second, first_end = rotated(engine, row.id, HOUR)
    every = [plain, second, *(rotate(engine, row.id, 2 * HOUR) for _ in range(keys.SECRETS_MAX - 2))]
    assert all(good(engine, one) for one in every)

    with pytest.raises(KeyRefused, match="0h") as refused:
        rotate(engine, row.id, HOUR / 2)
    assert f"{first_end:%Y-%m-%d %H:%M:%S} UTC" in str(refused.value), "when there is room again"

    assert all(good(engine, one) for one in every), "a refused rotation changes nothing"
    last = rotate(engine, row.id, timedelta())
    assert good(engine, last) and not any(good(engine, one) for one in every)


@pytest.mark.parametrize("overlap", [timedelta(seconds=-1), keys.OVERLAP_MAX + timedelta(seconds=1)])
def test_an_overlap_is_bounded(engine: Engine, overlap: timedelta) -> None:
    _, row = make(engine)

    with pytest.raises(KeyRefused, match="72 hours"):
        rotate(engine, row.id, overlap)


def test_a_key_that_is_over_stays_so_whatever_is_done_to_it(engine: Engine, store: Store) -> None:
    """Revoked or expired: no rotation, no second revocation and no late writer brings it back."""
    plain, row = make(engine)
    second = rotate(engine, row.id, 72 * HOUR)
    before = keys.find(engine, row.id)
    with transaction(engine) as connection:
        record = keys.revoke(connection, row.id, now=NOW)
    store.run(keys.project(record))

    with pytest.raises(KeyRefused, match="revoked"):
        rotate(engine, row.id, HOUR)
    with transaction(engine) as connection:
        keys.revoke(connection, row.id, now=NOW + HOUR)
    assert before is not None and not store.run(keys.project(before))

    kept = store.run(keys.read(row.id))
    assert kept is not None and kept.revoked
    assert not good(engine, plain) and not good(engine, second)
    with transaction(engine) as connection:
        assert keys.show(connection, row.id).secrets == 0
    _, expired = make(engine, org_id=row.org_id, project_id=row.project_id, expires_at=NOW)
    with pytest.raises(KeyRefused, match="expired"):
        rotate(engine, expired.id, HOUR)


def test_a_key_that_there_is_not_cannot_be_changed(engine: Engine) -> None:
    with pytest.raises(KeyRefused, match="no key"):
        rotate(engine, "b" * 12, HOUR)
    with pytest.raises(KeyRefused, match="no key"), transaction(engine) as connection:
        keys.show(connection, "b" * 12)


def test_a_comparison_does_the_same_work_for_every_key_and_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in HMACs and comparisons, of which there are as many whatever the record has."""
    plain = keys.mint("live", "a" * 12)
    secret = Secret(hmac=keys.hashed(plain, FIRST))
    one = KeyRecord(key_id="a" * 12, org_id="o", project_id="p", secret_hmac=secret.hmac)
    full = msgspec.structs.replace(one, older=(secret,) * (keys.SECRETS_MAX - 1), revoked=True)
    strange = msgspec.structs.replace(one, pepper_version=9)
    work: list[str] = []
    digest, compare = hmac.digest, hmac.compare_digest
    monkeypatch.setattr(hmac, "digest", lambda *args: work.append("hmac") or digest(*args))
    monkeypatch.setattr(hmac, "compare_digest", lambda *args: work.append("compare") or compare(*args))

    done = []
    for record in (None, one, full, strange):
        work.clear()
        found = keys.matches(keys.parse(plain), record, BOTH)
        done.append((found, work.count("hmac"), work.count("compare")))

    same = (2, keys.SECRETS_MAX)
    assert done == [(False, *same), (True, *same), (True, *same), (False, *same)]


# --- peppers


def test_peppers_are_told_with_their_versions(tmp_path: Any) -> None:
    told = f"2:{SECOND.decode()}, 1:{FIRST.decode()}"

    assert keys.pepper(Settings(data=tmp_path, pepper=told)) == BOTH
    assert keys.pepper(Settings(data=tmp_path, pepper=FIRST.decode())) == Peppers.only(FIRST)
    assert FIRST.decode() not in repr(BOTH)


@pytest.mark.parametrize(
    "told",
    [
        "1:{0},2:{1}", "2:{1},2:{0}", "2:{1},{0}", "2:short", "0:{0}", "2:{1},", "2:{1},1:short",
    ],
)  # fmt: skip
def test_a_pepper_that_may_be_a_mistake_is_none_and_is_not_repeated(tmp_path: Any, told: str) -> None:
    text = told.format(FIRST.decode(), SECOND.decode())

    with pytest.raises(keys.PepperMissing) as refused:
        keys.pepper(Settings(data=tmp_path, pepper=text))

    assert FIRST.decode() not in str(refused.value) and SECOND.decode() not in str(refused.value)


def test_a_used_key_gets_the_newest_pepper_and_outlives_the_old_one(engine: Engine) -> None:
    used, row = make(engine)
    unused, idle = make(engine, org_id=row.org_id, project_id=row.project_id)
    sightings = Sightings(engine, BOTH)
    record = keys.find(engine, row.id)
    assert record is not None and good(engine, used, BOTH) and good(engine, unused, BOTH)

    sightings.seen(keys.parse(used), record, "")
    sightings.write()

    newest = Peppers(2, {2: SECOND})
    assert good(engine, used, newest) and good(engine, used, BOTH)
    assert not good(engine, unused, newest) and good(engine, unused, BOTH)
    with transaction(engine) as connection:
        assert {one.id: one.pepper_version for one in keys.keys(connection)} == {row.id: 2, idle.id: 1}


def test_a_secret_in_its_overlap_is_hashed_anew_as_itself(engine: Engine) -> None:
    old, row = make(engine)
    new = rotate(engine, row.id, HOUR)
    sightings = Sightings(engine, BOTH)
    record = keys.find(engine, row.id)
    assert record is not None

    sightings.seen(keys.parse(old), record, "")
    sightings.write()

    newest = Peppers(2, {2: SECOND})
    assert good(engine, old, newest) and not good(engine, new, newest) and good(engine, new, BOTH)
    assert not good(engine, old, newest, at=NOW + 2 * HOUR)


def test_hashing_anew_and_a_rotation_wait_for_each_other_and_not_both(engine: Engine) -> None:
    """A gateway writes while an operator's rotation has the key: in another order each would wait for the other."""
    plain, row = make(engine)
    sightings, record = Sightings(engine, BOTH), keys.find(engine, row.id)
    assert record is not None
    sightings.seen(keys.parse(plain), record, "")

    with transaction(engine) as connection:
        connection.execute(text("SELECT FROM api_keys FOR UPDATE"))
        gateway = threading.Thread(target=sightings.write)
        gateway.start()
        while not waiting(engine):
            time.sleep(0.01)
        new, *_ = keys.rotate(connection, row.id, pepper=BOTH, overlap=HOUR)
    gateway.join()

    newest = Peppers(2, {2: SECOND})
    assert good(engine, plain, newest) and good(engine, new, newest)


def waiting(engine: Engine) -> bool:
    """Somebody waits for a lock."""
    with transaction(engine) as connection:
        asked = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        return bool(connection.execute(text(asked)).scalar_one())


# --- last used


def last_used(engine: Engine, key_id: str) -> tuple[datetime | None, str | None]:
    with transaction(engine) as connection:
        row = keys.show(connection, key_id)
    return row.last_used_at, row.last_used_from


def test_when_and_from_where_a_key_was_used_is_written_once_a_minute(engine: Engine) -> None:
    """Two gateways see it at the same time; the second finds that it is known."""
    plain, row = make(engine)
    record, parsed = keys.find(engine, row.id), keys.parse(plain)
    gateways = Sightings(engine, FIRST), Sightings(engine, FIRST)
    assert record is not None

    for address, gateway in zip(("192.0.2.7", "2001:db8::7"), gateways, strict=True):
        for _ in range(3):
            gateway.seen(parsed, record, address)
        assert gateway.write() == 1 and gateway.write() == 0

    at, address_kept = last_used(engine, row.id)
    assert at is not None and timedelta() <= datetime.now(UTC) - at < timedelta(seconds=30)
    assert address_kept == "192.0.2.7"
    with transaction(engine) as connection:
        connection.execute(
            text("UPDATE api_keys SET last_used_at = last_used_at - make_interval(secs => :s)"), {"s": NEWS_S + 1}
        )
    other = Sightings(engine, FIRST)
    other.seen(parsed, record, "2001:db8::7")
    other.write()
    assert last_used(engine, row.id)[1] == "2001:db8::7"


def test_a_database_that_is_away_loses_marks_and_nothing_else(database: Database) -> None:
    engine = database.engine()
    plain, row = make(engine)
    record = keys.find(engine, row.id)
    sightings = Sightings(engine, FIRST)
    assert record is not None

    database.go_away()
    sightings.seen(keys.parse(plain), record, "192.0.2.7")
    with pytest.raises(DatabaseAway):
        sightings.write()
    database.execute(f"ALTER DATABASE {database.name} ALLOW_CONNECTIONS true")

    assert sightings.write() == 0
    assert last_used(engine, row.id) == (None, None)


def test_writing_marks_waits_for_nobody(database: Database) -> None:
    """Somebody holds the key's row; its mark is passed over, the other key's is not."""
    engine = database.engine()
    plain, row = make(engine)
    other, second = make(engine, org_id=row.org_id, project_id=row.project_id)
    sightings = Sightings(database.engine(), FIRST)
    for one in (plain, other):
        record = keys.find(engine, keys.parse(one).key_id)
        assert record is not None
        sightings.seen(keys.parse(one), record, "192.0.2.7")

    with transaction(engine) as connection:
        connection.execute(text("SELECT 1 FROM api_keys WHERE id = :id FOR UPDATE"), {"id": row.id})
        sightings.write()

    assert last_used(engine, row.id) == (None, None) and last_used(engine, second.id)[1] == "192.0.2.7"


# --- records


def test_a_record_of_the_release_before_still_tells_its_limits_and_what_it_may(engine: Engine) -> None:
    """As that release wrote it: a map without any of the new fields."""
    for kind, scopes in keys.SCOPES.items():
        old = {
            "key_id": "k",
            "org_id": "o",
            "project_id": "p",
            "secret_hmac": b"h",
            "kind": kind,
            "requests_per_minute": 3,
        }

        record = msgspec.msgpack.decode(msgspec.msgpack.encode(old), type=KeyRecord)

        assert record.limits == (Limit(scope="key:k", requests_per_minute=3),)
        assert (record.scopes, record.plan, record.suspended, record.older) == (scopes, "postpaid", False, ())


def test_a_record_carries_all_limits_that_may_bind_its_key_and_no_others(engine: Engine) -> None:
    org_id, project_id = tenant(engine)
    _, row = make(engine, org_id=org_id, project_id=project_id, requests_per_minute=60)
    _, sibling = make(engine, org_id=org_id, project_id=project_id, requests_per_minute=1)
    stranger_id, strangers = tenant(engine, "other")
    make(engine, org_id=stranger_id, project_id=strangers)
    day = Decimal("12345.0000000001")
    with transaction(engine) as connection:
        second = tenants.create_project(connection, org_id=org_id, name="second")
        for scope, changes in {
            "org": {"money_per_day": day, "connections": 5},
            f"project:{project_id}": {"tokens_per_minute": 10**12},
            f"project:{second.id}": {"tokens_per_minute": 1},
            "model:tiny": {"concurrent_requests": 0},
        }.items():
            quotas.set_limits(connection, org_id, scope, changes)
        quotas.set_limits(connection, stranger_id, "org", {"tokens_per_minute": 2})

    records = {record.key_id: record for record in keys.all_records(engine, org_id)}

    assert set(records) == {row.id, sibling.id}
    assert set(records[row.id].limits) == {
        Limit(scope=f"key:{row.id}", requests_per_minute=60),
        Limit(scope=f"project:{project_id}", tokens_per_minute=10**12),
        Limit(scope="org", money_per_day=day, connections=5),
        Limit(scope="model:tiny", concurrent_requests=0),
    }
    assert records[row.id] == msgspec.msgpack.decode(msgspec.msgpack.encode(records[row.id]), type=KeyRecord)


def test_plan_and_suspension_reach_all_records_of_the_organisation_at_once(engine: Engine, store: Store) -> None:
    _, row = make(engine)
    stranger_id, strangers = tenant(engine, "other")
    _, other = make(engine, org_id=stranger_id, project_id=strangers)
    with transaction(engine) as connection:
        tenants.set_plan(connection, row.org_id, "prepaid")
        tenants.suspend(connection, row.org_id, reason="unpaid", now=NOW)

    assert keys.project_all(engine, store, row.org_id) == 1

    record = store.run(keys.read(row.id))
    assert record is not None and (record.plan, record.suspended, record.usable(0)) == ("prepaid", True, True)
    assert store.run(keys.read(other.id)) is None
    with transaction(engine) as connection:
        tenants.resume(connection, row.org_id)
    assert keys.project_all(engine, store) == 2
    record = store.run(keys.read(row.id))
    assert record is not None and not record.suspended


def test_a_suspension_keeps_its_first_reason_until_it_is_over(engine: Engine) -> None:
    org_id, _ = tenant(engine)
    with transaction(engine) as connection:
        tenants.suspend(connection, org_id, reason="unpaid", now=NOW)
        again = tenants.suspend(connection, org_id, reason="still", now=NOW + HOUR)
        assert (again.status, again.stopped_reason, again.stopped_at) == ("suspended", "unpaid", NOW)
        after = tenants.resume(connection, org_id)
        assert (after.status, after.stopped_reason, after.stopped_at) == ("active", None, None)
        connection.execute(text("UPDATE organisations SET status = 'closed'"))
        with pytest.raises(tenants.TenantError, match="closed"):
            tenants.resume(connection, org_id)


def test_a_writer_that_read_before_a_change_does_not_undo_it(engine: Engine, store: Store) -> None:
    """The clock read Postgres, was slow, and writes after the command that set a limit."""
    _, row = make(engine, requests_per_minute=60)
    slow = keys.find(engine, row.id)
    with transaction(engine) as connection:
        quotas.set_limits(connection, row.org_id, f"key:{row.id}", {"requests_per_minute": 1})
    keys.project_all(engine, store, row.org_id)

    assert slow is not None and store.run(keys.project(slow)), "what is there is no revoked one"

    record = store.run(keys.read(row.id))
    assert record is not None and record.limits[0].requests_per_minute == 1
    ahead = msgspec.structs.replace(record, read_us=record.read_us + 3_600_000_000)
    store.run_all([keys.project(ahead), keys.project(record)])
    assert store.run(keys.read(row.id)) == record, "a clock that was put back by an hour does not block"
