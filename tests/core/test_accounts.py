"""Keys: their form, their rows, and what gateways are told about them."""

from __future__ import annotations

import string
from dataclasses import replace as replaced
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from core.accounts import keys, tenants
from core.accounts.keys import BadKey, KeyRecord, KeyRefused, Peppers
from core.postgres import DatabaseAway, Engine, connect, transaction
from core.redis import Store
from core.settings import Settings
from tests.conftest import Database

PEPPER = b"a pepper for tests only"
BASE62 = string.digits + string.ascii_letters
kinds = st.sampled_from(["live", "test", "admin"])
ids = st.text(BASE62, min_size=keys.ID_LENGTH, max_size=keys.ID_LENGTH)


@pytest.fixture
def engine(database: Database) -> Engine:
    return database.engine()


def make(engine: Engine, **asked: object) -> tuple[str, keys.KeyRow]:
    """An organisation with one key."""
    with transaction(engine) as connection:
        organisation = tenants.create_organisation(connection, "acme")
        project = tenants.find_project(connection, org_id=organisation.id, wanted="default")
        names = {"org_id": organisation.id, "project_id": project.id, "name": "laptop", "pepper": PEPPER}
        return keys.create_key(connection, **{**names, **asked})  # type: ignore[arg-type]


@given(kinds, ids)
def test_every_key_comes_back_as_it_was_made(kind: keys.Kind, key_id: str) -> None:
    plain = keys.mint(kind, key_id)

    parsed = keys.parse(plain)

    assert (parsed.kind, parsed.key_id, parsed.text) == (kind, key_id, plain)


@given(kinds, ids, st.data())
def test_a_key_with_one_wrong_character_is_refused_before_anything_is_asked(
    kind: keys.Kind, key_id: str, data: st.DataObject
) -> None:
    """`parse` is given nothing but the text, so it can ask nobody."""
    plain = keys.mint(kind, key_id)
    at = data.draw(st.integers(0, len(plain) - 1))
    wrong = data.draw(st.one_of(st.sampled_from(BASE62), st.characters()).filter(lambda c: c != plain[at]))

    with pytest.raises(BadKey):
        keys.parse(plain[:at] + wrong + plain[at + 1 :])


@given(st.text())
def test_what_is_no_key_is_refused_and_never_breaks(text: str) -> None:
    with pytest.raises(BadKey):
        keys.parse(text)


@pytest.mark.parametrize("form", ["{}\n", " {}", "{}a", "Bearer {}"])
def test_a_key_is_exact(form: str) -> None:
    plain = keys.mint("live", "a" * 12)

    for wrong in (form.format(plain), plain[:-1], plain.upper()):
        with pytest.raises(BadKey):
            keys.parse(wrong)


def test_two_peppers_are_two_locks() -> None:
    plain = keys.mint("live", "a" * 12)
    parsed = keys.parse(plain)
    record = KeyRecord(key_id="a" * 12, org_id="o", project_id="p", secret_hmac=keys.hashed(plain, PEPPER))

    assert keys.matches(parsed, record, PEPPER)
    assert not keys.matches(parsed, record, b"another pepper of ours")
    assert not keys.matches(replaced(parsed, text=keys.mint("live", "a" * 12)), record, PEPPER)


def test_a_secret_is_in_no_repr() -> None:
    """What is never in a repr does not reach a log by accident."""
    plain = keys.mint("live", "a" * 12)
    record = KeyRecord(key_id="a" * 12, org_id="o", project_id="p", secret_hmac=b"\x01" * 32)

    assert plain[-38:] not in repr(keys.parse(plain))
    assert "x01" not in repr(record)


def test_the_pepper_comes_from_the_environment_or_the_data_folder(tmp_path: Path) -> None:
    settings = Settings(data=tmp_path)

    with pytest.raises(keys.PepperMissing):
        keys.pepper(settings)

    settings.secrets.mkdir()
    (settings.secrets / "pepper").write_text("from the data folder\n")
    assert keys.pepper(settings) == Peppers.only(b"from the data folder")
    assert keys.pepper(Settings(data=tmp_path, pepper="from the environment")) == Peppers.only(b"from the environment")
    with pytest.raises(keys.PepperMissing, match="too short"):
        keys.pepper(Settings(data=tmp_path, pepper="short"))


def test_a_key_is_found_by_its_id_and_matches_only_its_own_text(engine: Engine) -> None:
    plain, row = make(engine, requests_per_minute=60, concurrent_requests=4)

    record = keys.find(engine, keys.parse(plain).key_id)

    assert record is not None
    assert keys.matches(keys.parse(plain), record, PEPPER)
    assert (record.org_id, record.requests_per_minute, record.concurrent_requests) == (row.org_id, 60, 4)
    assert record.usable(now_ms=0)
    assert keys.find(engine, "b" * 12) is None


def test_the_plain_text_is_stored_nowhere(engine: Engine) -> None:
    plain, row = make(engine)

    with transaction(engine) as connection:
        stored = repr(keys.keys(connection)) + repr(keys.all_records(engine))

    assert plain.rpartition("_")[2] not in stored
    assert row.shown.endswith(plain[-4:])


def test_a_key_cannot_name_another_tenants_project(engine: Engine) -> None:
    _, theirs = make(engine)

    with pytest.raises(KeyRefused), transaction(engine) as connection:
        ours = tenants.create_organisation(connection, "ours")
        keys.create_key(connection, org_id=ours.id, project_id=theirs.project_id, name="x", pepper=PEPPER)


def test_a_project_name_is_taken_once_per_organisation(engine: Engine) -> None:
    with pytest.raises(tenants.TenantError, match="taken"), transaction(engine) as connection:
        organisation = tenants.create_organisation(connection, "acme")
        tenants.create_project(connection, org_id=organisation.id, name="default")


def test_a_revoked_key_is_over_and_its_first_end_counts(engine: Engine) -> None:
    _, row = make(engine)
    first = datetime(2026, 11, 1, tzinfo=UTC)

    with transaction(engine) as connection:
        keys.revoke(connection, row.id, now=first)
        record = keys.revoke(connection, row.id, now=first + timedelta(days=1))
        [shown] = keys.keys(connection)

    assert not record.usable(now_ms=0)
    assert shown.revoked_at == first
    with pytest.raises(KeyRefused), transaction(engine) as connection:
        keys.revoke(connection, "b" * 12, now=first)


def test_a_key_expires(engine: Engine) -> None:
    _, row = make(engine, expires_at=datetime(2026, 12, 1, tzinfo=UTC))

    record = keys.find(engine, row.id)

    assert record is not None
    assert record.usable(now_ms=1_796_083_199_999)
    assert not record.usable(now_ms=1_796_083_200_000)


def test_a_known_key_is_served_while_postgres_is_away(engine: Engine, store: Store, valkey: redis.Redis) -> None:
    """The record holds all that a gateway needs; it outlives its projection by days."""
    _, row = make(engine)
    [record] = keys.all_records(engine)

    assert store.run(keys.read(row.id)) is None
    store.run(keys.project(record))

    assert store.run(keys.read(row.id)) == record
    assert 6 * 86_400 < valkey.ttl(f"f1:{{key:{row.id}}}:record") <= 7 * 86_400


def test_an_organisations_retention_reaches_the_records_of_its_keys(engine: Engine) -> None:
    _, row = make(engine)
    [before] = keys.all_records(engine)
    with transaction(engine) as connection:
        tenants.set_retention(connection, row.org_id, 0)

    found = keys.find(engine, row.id)

    assert found is not None and (before.retention_days, found.retention_days) == (30, 0)
    old = msgspec.msgpack.decode(
        msgspec.msgpack.encode({"key_id": "k", "org_id": "o", "project_id": "p", "secret_hmac": b""}), type=KeyRecord
    )
    assert old.retention_days == 30, "a record of the release before"


def test_an_organisations_weight_reaches_the_records_of_its_keys(engine: Engine) -> None:
    _, row = make(engine)
    first = keys.find(engine, row.id)
    with transaction(engine) as connection:
        tenants.set_weight(connection, row.org_id, 2.5)
    [record] = keys.all_records(engine)

    assert first is not None and (first.weight, record.weight) == (1, 2.5)
    for wrong in (0, -1, 1001, float("nan")):
        with transaction(engine) as connection, pytest.raises(tenants.TenantError):
            tenants.set_weight(connection, row.org_id, wrong)


def test_a_slow_writer_cannot_bring_a_revoked_key_back(store: Store) -> None:
    """The clock read Postgres before the revocation and writes after it."""
    before = KeyRecord(key_id="a" * 12, org_id="o", project_id="p", secret_hmac=b"\x01" * 32)
    store.run(keys.project(msgspec.structs.replace(before, revoked=True)))

    assert not store.run(keys.project(before))

    kept = store.run(keys.read("a" * 12))
    assert kept is not None and kept.revoked


def test_a_limit_that_changed_reaches_the_record(store: Store) -> None:
    before = KeyRecord(key_id="a" * 12, org_id="o", project_id="p", secret_hmac=b"\x01" * 32, requests_per_minute=1)
    after = msgspec.structs.replace(before, requests_per_minute=2)

    assert store.run(keys.project(before)) and store.run(keys.project(after))

    assert store.run(keys.read("a" * 12)) == after


def test_a_database_that_is_not_there_is_one_exception() -> None:
    engine = connect("postgres://nobody@127.0.0.1:1/nowhere")

    with pytest.raises(DatabaseAway):
        keys.find(engine, "a" * 12)
