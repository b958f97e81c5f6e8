"""Sockets are counted in all their scopes or in none; attempts that failed, for a minute."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from core.accounts import failures, sockets
from core.accounts.failures import FAILURES_MAX, WINDOW_MS, fail, forgive
from core.accounts.sockets import SEAT_MS, leave, sit, stay
from core.redis import Store, tag
from tests.conftest import Clock

STORES = ("single", "cluster")

SCOPES = ("key:k", "project:p", "org")


def bounds(key: int | None = None, project: int | None = None, org: int | None = None) -> dict[str, int | None]:
    return dict(zip(SCOPES, (key, project, org), strict=True))


def counted(store: Store, org_id: str = "o") -> dict[str, int]:
    return {scope: store.client.zcard(f"{tag('org:' + org_id)}sockets:{scope}") for scope in SCOPES}


# --- sockets


@pytest.mark.parametrize("scope", SCOPES)
def test_the_scope_that_is_full_is_named_and_nothing_is_counted(store: Store, scope: str) -> None:
    most = {**bounds(9, 9, 9), scope: 2}
    assert [store.run(sit("o", f"s{n}", most)) for n in range(3)] == [None, None, scope]
    assert counted(store) == dict.fromkeys(SCOPES, 2), "a refusal is counted nowhere"
    assert store.run(sit("another", "s2", most)) is None


def test_the_narrowest_of_those_that_are_full_is_named(store: Store) -> None:
    store.run(sit("o", "s", bounds(1, 1, 1)))
    assert store.run(sit("o", "t", bounds(1, 1, 1))) == "key:k"
    assert store.run(sit("o", "t", bounds(None, 1, 1))) == "project:p"


def test_none_at_all_is_a_bound_too(store: Store) -> None:
    assert store.run(sit("o", "s", bounds(org=0))) == "org" and counted(store) == dict.fromkeys(SCOPES, 0)


def test_a_limit_that_is_set_later_counts_what_is_open(store: Store) -> None:
    for n in range(3):
        assert store.run(sit("o", f"s{n}", bounds())) is None
    assert store.run(sit("o", "s", bounds(org=3))) == "org"


def test_the_same_socket_counts_once(store: Store) -> None:
    assert store.run(sit("o", "s", bounds(1, 1, 1))) is store.run(sit("o", "s", bounds(1, 1, 1))) is None
    assert counted(store) == dict.fromkeys(SCOPES, 1)


def test_one_that_leaves_makes_room_in_every_scope(store: Store) -> None:
    store.run(sit("o", "s", bounds(1, 1, 1)))
    assert store.run(leave("o", SCOPES, "s")) == 3 and store.run(leave("o", SCOPES, "s")) == 0
    assert store.run(sit("o", "t", bounds(1, 1, 1))) is None


def test_whom_nobody_speaks_of_counts_no_more_and_others_stay(store: Store, clock: Clock) -> None:
    for name in ("kept", "lost"):
        store.run(sit("o", name, bounds()))
    clock.advance(SEAT_MS - 1)
    assert store.run(stay("o", {"key:k": ["kept"], "org": ["kept", "late"]})) == 3
    clock.advance(1)

    assert store.run(sit("o", "t", bounds(key=1))) == "key:k"
    assert store.run(sit("o", "t", bounds(project=0))) == "project:p"
    assert store.run(sit("o", "t", bounds(key=2, project=1))) is None, "of its project nobody has spoken"
    assert counted(store) == {"key:k": 2, "project:p": 1, "org": 3}


def test_any_number_of_handshakes_at_once_open_as_many_as_they_may(store: Store) -> None:
    with ThreadPoolExecutor(16) as pool:
        told = list(pool.map(lambda n: store.run(sit("o", f"s{n}", bounds(7, 9, 5))), range(64)))

    assert told.count(None) == 5 and set(told) == {None, "org"}
    assert counted(store) == dict.fromkeys(SCOPES, 5)


# --- failures


def test_in_any_minute_so_many_attempts_fail_and_the_wait_is_honest(store: Store, clock: Clock) -> None:
    """Counted are those whose reply is 0. The times they had are looked at afterwards, over every window."""
    counted_at: list[int] = []
    for step in range(400):
        clock.advance((step * 7919) % 5_000)
        wait_ms = store.run(fail("a", f"{step}"))
        if wait_ms == 0:
            counted_at.append(clock.now_ms)
            continue
        clock.advance(wait_ms - 1)
        assert store.run(fail("a", f"{step} early")) == 1, "and being refused has put nothing off"
        clock.advance(1)
        assert store.run(fail("a", f"{step} again")) == 0, "when it was told to come"
        counted_at.append(clock.now_ms)

    windows = [sum(at < other <= at + WINDOW_MS - 1 for other in counted_at) + 1 for at in counted_at]
    assert max(windows) == FAILURES_MAX


def test_addresses_are_counted_apart_and_keep_a_bounded_list(store: Store) -> None:
    names = [failures.name(address, b"a pepper of tests") for address in ("203.0.113.1", "203.0.113.2")]
    assert len(set(names)) == 2 and names[0] != failures.name("203.0.113.1", b"another pepper")
    for n in range(FAILURES_MAX + 10):
        store.run(fail(names[0], f"{n}"))

    assert store.run(fail(names[0], "one more")) > 0 and store.run(fail(names[1], "first")) == 0
    key = tag(f"failures:{names[0]}") + "times"
    assert store.client.llen(key) == FAILURES_MAX and 0 < store.client.pttl(key) <= WINDOW_MS


def test_an_attempt_counts_once_and_is_struck_out_alone(store: Store, clock: Clock) -> None:
    """Replies may be lost, so that a gateway says it again; others came in the same moment, before it and after it."""
    for attempt in ("before", "good", "good", "after"):
        assert store.run(fail("a", attempt)) == 0
    assert [store.run(forgive("a", "good")) for _ in range(2)] == [True, False]
    assert not store.run(forgive("a", "never counted"))

    key = tag("failures:a") + "times"
    assert [one.split()[1] for one in store.client.lrange(key, 0, -1)] == [b"before", b"after"]


def test_seats_outlast_the_looks_of_their_gateway() -> None:
    assert sockets.STAY_S * 1000 * 2 < SEAT_MS, "two may be missed"
