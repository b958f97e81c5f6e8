"""What operators have stopped, as reserve, workers and gateways read it."""

from __future__ import annotations

import pytest
import redis

from core.limits import stopped
from core.limits.stopped import ORG, REVOKED, SUSPENDED, field_of
from core.redis import Store

ORGANISATION = "0190-acme"


def look(store: Store, *keys: str) -> dict[str, str]:
    return store.run(stopped.stopped(ORGANISATION, keys))


def suspend(store: Store) -> None:
    store.run(stopped.stop(ORGANISATION, ORG, SUSPENDED))


def test_nothing_is_stopped_at_first(store: Store) -> None:
    assert look(store, "k1", "k2") == {}


def test_what_is_stopped_is_told_by_field_and_nothing_else_is(store: Store) -> None:
    """One HMGET: the organisation's field and those of the keys asked about."""
    store.run(stopped.stop(ORGANISATION, field_of("k1"), REVOKED))
    assert look(store, "k1", "k2") == {"key:k1": "revoked"}
    assert look(store, "k2") == {}
    suspend(store)
    assert look(store, "k1", "k2") == {"org": "suspended", "key:k1": "revoked"}


def test_a_repeat_changes_nothing_and_an_organisation_can_go_on(store: Store) -> None:
    suspend(store)
    suspend(store)
    assert look(store) == {"org": "suspended"}
    store.run(stopped.clear(ORGANISATION))
    store.run(stopped.clear(ORGANISATION, ORG))
    assert look(store) == {}


def test_a_key_stays_stopped_and_a_stop_has_a_reason() -> None:
    with pytest.raises(ValueError, match="only an organisation can go on"):
        stopped.clear(ORGANISATION, field_of("k1"))
    with pytest.raises(ValueError, match="for a reason"):
        stopped.stop(ORGANISATION, ORG, "")


def test_a_projection_brings_back_what_a_lost_store_forgot(store: Store) -> None:
    mark = store.run(stopped.seen(ORGANISATION))
    assert store.run(stopped.project(ORGANISATION, {ORG: SUSPENDED, field_of("k1"): REVOKED}, mark))
    assert look(store, "k1") == {"org": "suspended", "key:k1": "revoked"}


def test_a_projection_that_read_before_a_suspension_does_not_end_it(store: Store) -> None:
    """The law of order: mark, then Postgres, then `project`. Between the last two somebody suspends."""
    mark = store.run(stopped.seen(ORGANISATION))
    suspend(store)
    assert not store.run(stopped.project(ORGANISATION, {}, mark))
    assert look(store) == {"org": "suspended"}


def test_a_projection_that_read_before_the_end_of_a_suspension_does_not_bring_it_back(store: Store) -> None:
    suspend(store)
    mark = store.run(stopped.seen(ORGANISATION))
    store.run(stopped.clear(ORGANISATION))
    assert not store.run(stopped.project(ORGANISATION, {ORG: SUSPENDED, field_of("k1"): REVOKED}, mark))
    assert look(store, "k1") == {"key:k1": "revoked"}, "but the key that it knows of is stopped"


def test_a_projection_ends_a_suspension_that_postgres_no_longer_has(store: Store) -> None:
    """The command committed the end and died before it told the store."""
    suspend(store)
    mark = store.run(stopped.seen(ORGANISATION))
    assert store.run(stopped.project(ORGANISATION, {}, mark))
    assert look(store) == {}


def test_a_projection_never_takes_a_revoked_key_away(store: Store) -> None:
    store.run(stopped.stop(ORGANISATION, field_of("k1"), REVOKED))
    assert store.run(stopped.project(ORGANISATION, {}, store.run(stopped.seen(ORGANISATION))))
    assert look(store, "k1") == {"key:k1": "revoked"}


def test_changes_that_come_to_the_same_are_changes_still(store: Store) -> None:
    """A projection read Postgres between the end of a suspension and the next."""
    suspend(store)
    mark = store.run(stopped.seen(ORGANISATION))
    store.run(stopped.clear(ORGANISATION))
    suspend(store)
    assert not store.run(stopped.project(ORGANISATION, {}, mark))
    assert look(store) == {"org": "suspended"}


def test_a_mark_from_before_a_flush_counts_no_more(store: Store, valkey: redis.Redis) -> None:
    """The clock had read the mark, Redis lost everything, somebody suspended."""
    suspend(store)
    store.run(stopped.clear(ORGANISATION))
    mark = store.run(stopped.seen(ORGANISATION))
    valkey.flushall()
    suspend(store)
    assert not store.run(stopped.project(ORGANISATION, {}, mark))
    assert look(store) == {"org": "suspended"}
