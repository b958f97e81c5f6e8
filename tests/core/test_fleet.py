"""Who is in the fleet, and what each host is to run, on a store whose clock the test holds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import redis

from core import fleet
from core.fleet import FORGET_MS, Host, Worker
from core.outlook import Starting
from core.redis import Store, tag
from core.values import WorkerState
from tests.conftest import Clock

STORES = ("single", "cluster")


def worker(name: str, *, model: str = "m", state: WorkerState = WorkerState.READY, running: int = 0) -> Worker:
    return Worker(worker=name, host="h", model=model, state=state, slots=8, running=running)


def names(store: Store, model: str = "m") -> list[str]:
    return [row.worker for row in store.run(fleet.workers(model))]


def test_a_row_says_what_was_announced_and_how_long_ago(store: Store, clock: Clock) -> None:
    store.run(fleet.announce_worker(worker("w1", running=3)))
    store.run(fleet.announce_host(Host(host="h", room=2, draining=True, workers={"m": 1})))
    clock.advance(700)

    [row] = store.run(fleet.workers("m"))
    [host] = store.run(fleet.hosts())

    assert (row.worker, row.state, row.running, row.seen_ms) == ("w1", WorkerState.READY, 3, 700)
    assert (host.room, host.draining, host.workers, host.seen_ms) == (2, True, {"m": 1}, 700)


def test_who_is_silent_for_too_long_is_forgotten_on_the_stores_clock(store: Store, clock: Clock) -> None:
    """Nobody's own clock counts: rows carry no time, the store adds it."""
    store.run(fleet.announce_worker(worker("silent")))
    store.run(fleet.announce_host(Host(host="silent")))
    clock.advance(1)
    store.run(fleet.announce_worker(worker("later")))
    store.run(fleet.announce_host(Host(host="later")))

    clock.advance(FORGET_MS - 2)
    assert names(store) == ["silent", "later"]
    clock.advance(1)

    assert names(store) == ["later"]
    assert [host.host for host in store.run(fleet.hosts())] == ["later"]


def test_every_announcement_renews_and_replaces_the_row(store: Store, clock: Clock) -> None:
    for state in (WorkerState.LOADING, WorkerState.WARMING, WorkerState.READY):
        store.run(fleet.announce_worker(worker("w1", state=state)))
        clock.advance(FORGET_MS - 1)

    [row] = store.run(fleet.workers("m"))

    assert (row.state, row.seen_ms) == (WorkerState.READY, FORGET_MS - 1)


def test_a_worker_that_somebody_saw_go_is_gone_at_once(store: Store) -> None:
    store.run(fleet.announce_worker(worker("w1")))
    store.run(fleet.announce_worker(worker("w2")))

    assert [store.run(fleet.remove_worker("m", "w1")) for _ in range(2)] == [1, 0]

    assert names(store) == ["w2"]


def test_nothing_is_left_of_who_went_or_was_forgotten(store: Store, clock: Clock, valkey: redis.Redis) -> None:
    for name in ("w1", "w2"):
        store.run(fleet.announce_worker(worker(name)))
    store.run(fleet.announce_host(Host(host="h")))
    store.run(fleet.remove_worker("m", "w1"))

    clock.advance(FORGET_MS)
    assert names(store) == [] == store.run(fleet.hosts())

    assert list(valkey.scan_iter("f1:*")) == []


def test_models_know_nothing_of_each_others_workers(store: Store) -> None:
    store.run(fleet.announce_worker(worker("w1", model="a")))
    store.run(fleet.announce_worker(worker("w2", model="b")))

    assert (names(store, "a"), names(store, "b")) == (["w1"], ["w2"])


def test_no_assignment_is_not_an_empty_one(store: Store) -> None:
    """None: no scaler has said anything, the host decides. Empty: a scaler wants nothing here."""
    assert store.run(fleet.assignment("h")) is None

    store.run(fleet.assign("h", {}))
    assert store.run(fleet.assignment("h")) == {}

    store.run(fleet.assign("h", {"m": 2}))
    assert store.run(fleet.assignment("h")) == {"m": 2}

    store.run(fleet.unassign("h"))
    assert store.run(fleet.assignment("h")) is None


def test_a_row_of_a_newer_release_is_read_and_one_of_an_older_filled_up(store: Store, clock: Clock) -> None:
    key = tag("m") + "workers"
    newer = {"worker": "new", "host": "h", "model": "m", "state": "ready", "mood": "fine"}
    older = {"worker": "old", "host": "h", "model": "m", "state": "loading"}
    for row in (newer, older):
        store.client.hset(key, row["worker"], msgspec.msgpack.encode(row))
        store.client.zadd(key + "_seen", {row["worker"]: clock.now_ms})

    rows = {row.worker: row for row in store.run(fleet.workers("m"))}

    assert rows["new"].state == WorkerState.READY
    assert (rows["old"].slots, rows["old"].running) == (0, 0)


# --- nobody there


def test_a_model_is_wanted_once_however_many_ask_until_somebody_comes(store: Store) -> None:
    assert [store.run(fleet.want("m", now_ms)) for now_ms in (7, 8, 9)] == [True, False, False]
    store.run(fleet.want("n", 8))
    assert store.run(fleet.wanted()) == {"m": 7, "n": 8}

    store.run(fleet.met("m"))

    assert store.run(fleet.wanted()) == {"n": 8}
    assert store.run(fleet.want("m", 10)) is True


def row(state: WorkerState, since_ms: int = 0, **more: Any) -> Worker:
    return Worker(worker=f"{state}{since_ms}", host="h", model="m", state=state, since_ms=since_ms, **more)


@pytest.mark.parametrize(
    ("rows", "state", "since_ms"),
    [
        ([], "launching", 0),
        ([row(WorkerState.DRAINING, 5)], "launching", 0),
        ([row(WorkerState.BOOTING, 5)], "booting", 5),
        ([row(WorkerState.LOADING, 5), row(WorkerState.WARMING, 2), row(WorkerState.BOOTING)], "warming", 2),
        ([row(WorkerState.LOADING, 5), row(WorkerState.LOADING, 50, seen_ms=3)], "loading", 53),
    ],
)
def test_the_worker_that_is_awaited_is_the_one_nearest_to_being_ready(
    rows: list[Worker], state: str, since_ms: int
) -> None:
    found = fleet.starting(rows)

    assert isinstance(found, Starting)
    assert (found.state, found.since_ms) == (state, since_ms)


def test_nobody_is_awaited_where_somebody_is_ready() -> None:
    assert fleet.starting([row(WorkerState.LOADING), row(WorkerState.READY)]) is None


def test_the_largest_cache_and_the_longest_context_may_be_different_workers() -> None:
    sizes = [row(WorkerState.READY, 1, kv_tokens=9, context_tokens=4), row(WorkerState.READY, 2, context_tokens=8)]

    assert fleet.largest(sizes) == (9, 8)
    assert fleet.largest([]) == (0, 0)
