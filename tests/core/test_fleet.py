"""Who is in the fleet, and what each host is to run, on a store whose clock the test holds."""

from __future__ import annotations

import msgspec
import redis

from core import fleet
from core.fleet import FORGET_MS, Host, Worker
from core.redis import Store, tag
from core.values import WorkerState
from tests.conftest import Clock


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

    assert valkey.keys("f1:*") == []


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
