"""Different schemas of an organisation in a minute, against the plainest model there is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.limits import schemas
from core.limits.schemas import MINUTE_MS, PER_MINUTE, digest, note
from core.redis import Store, tag
from core.values import Sampling, Tools
from tests.conftest import Clock

STORES = ("single", "cluster")
KEY = tag("org:o") + "schemas"


def send(store: Store, name: str, org_id: str = "o") -> int:
    return store.run(note(org_id, digest(asked({"json": {"title": name}}), None)))


def asked(grammar: dict[str, Any]) -> Sampling:
    return Sampling(max_tokens=1, grammar=grammar)


def test_so_many_different_ones_go_on_and_the_next_waits_for_the_oldest(store: Store, clock: Clock) -> None:
    """At the time it is told it fits, and 2 ms earlier it does not."""
    for n in range(PER_MINUTE):
        assert send(store, f"s{n}") == 0
        clock.advance(10)

    wait_ms = send(store, "one more")

    assert wait_ms == MINUTE_MS - PER_MINUTE * 10
    clock.advance(wait_ms - 2)
    assert send(store, "one more") == 2
    clock.advance(2)
    assert send(store, "one more") == 0
    assert send(store, "yet one more") == 10


def test_one_that_was_sent_within_the_minute_goes_on_for_nothing(store: Store, clock: Clock) -> None:
    """As long as it is sent again it counts as one, and is the youngest."""
    for n in range(PER_MINUTE):
        send(store, f"s{n}")
    for _ in range(5):
        clock.advance(MINUTE_MS - 1)
        assert all(send(store, f"s{n}") == 0 for n in range(PER_MINUTE))
        assert send(store, "another") == MINUTE_MS


def test_a_refusal_changes_nothing(store: Store, clock: Clock) -> None:
    for n in range(PER_MINUTE):
        send(store, f"s{n}")
    before = store.client.zrange(KEY, 0, -1, withscores=True), store.client.pttl(KEY)

    clock.advance(MINUTE_MS - 1)
    assert send(store, "another") == 1

    assert store.client.zrange(KEY, 0, -1, withscores=True) == before[0]
    assert store.client.pttl(KEY) <= before[1]


def test_organisations_do_not_share_it(store: Store) -> None:
    for n in range(PER_MINUTE):
        send(store, f"s{n}")

    assert send(store, "another") > 0 == send(store, "another", org_id="p")


def test_what_is_kept_is_hashes_and_goes_after_a_minute(store: Store) -> None:
    send(store, "secret")

    assert 0 < store.client.pttl(KEY) <= MINUTE_MS
    assert all(len(member) == 32 for member in store.client.zrange(KEY, 0, -1))


def test_the_same_schema_is_one_however_its_keys_are_ordered() -> None:
    assert digest(asked({"json": {"a": 1, "b": 2}}), None) == digest(asked({"json": {"b": 2, "a": 1}}), None)
    assert digest(asked({"json": {"a": 1}}), None) != digest(asked({"json": {"a": 2}}), None)


@pytest.mark.parametrize(
    ("choice", "strict", "parallel", "counts"),
    [
        ("auto", False, True, False),
        ("auto", True, True, True),
        ("auto", False, False, True),
        ("required", False, True, True),
        ("=f", False, True, True),
        ("none", True, True, False),
    ],
)
def test_functions_count_where_a_grammar_is_made_of_them(
    choice: str, strict: bool, parallel: bool, counts: bool
) -> None:
    function = {"name": "f", "strict": True} if strict else {"name": "f"}

    assert bool(digest(asked({}), Tools(functions=(function,), choice=choice, parallel=parallel))) == counts


def test_what_every_organisation_has_counts_for_none() -> None:
    assert digest(asked({}), None) == digest(asked({"json_object": True}), None) == ""


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(schemas, "PER_MINUTE", 3)
    return 3


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sent=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40_000)), max_size=25))
def test_in_no_minute_do_more_go_on_than_may(store: Store, clock: Clock, few: int, sent: list[tuple[int, int]]) -> None:
    """Whatever is sent when; and none is refused that would have fitted."""
    store.client.delete(KEY)
    gone: dict[int, int] = {}  #: that went on: when it was sent last
    for name, later_ms in sent:
        clock.advance(later_ms)
        young = {each for each, at in gone.items() if at > clock.now_ms - MINUTE_MS}
        fits = name in young or len(young) < few
        assert (send(store, str(name)) == 0) == fits
        if fits:
            gone[name] = clock.now_ms
