"""A queue under test, and short words for what is done to it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import redis

from core.redis import Store
from core.values import Ending, Outcome, Usage
from tasks.queue import Accepted, Beaten, Bounds, Claim, Claimed, Order, Queue, Room, Seen, Task, order
from tests.conftest import Clock

LEASE_MS = 3000


@dataclass
class Bench:
    """One queue, with its clock in the test's hand."""

    store: Store
    clock: Clock
    valkey: redis.Redis
    queue: Queue = field(default_factory=lambda: Queue("m"))
    nonces: Any = field(default_factory=itertools.count)
    said: list[tuple[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.listening = self.valkey.pubsub(ignore_subscribe_messages=True)
        self.listening.psubscribe(self.queue.prefix + "*")
        self.listening.get_message(timeout=1)

    def bound(self, **bounds: int) -> None:
        self.queue = Queue(self.queue.model, Bounds(**bounds))

    def put(self, name: str, *, attempt: int = 0, shown: bool = False, **more: Any) -> Accepted:
        return self.store.run(self.queue.enqueue(self.task(name, **more), attempt=attempt, shown=shown))

    def task(self, name: str, **more: Any) -> Task:
        return Task(id=name, **{"tenant": "t", "input_tokens": 3, "facts": b"f", "message": name.encode(), **more})

    def look(self, worker: str = "w1", want: int = 1, **room: Any) -> Claimed:
        """Claim, and see the whole reply."""
        nonce = str(next(self.nonces))
        return self.store.run(self.queue.claim(worker, want, lease_ms=LEASE_MS, nonce=nonce, room=Room(**room)))

    def claim(self, worker: str = "w1", want: int = 1, **room: Any) -> list[str]:
        return [claim.id for claim in self.look(worker, want, **room).claims]

    def take(self, worker: str = "w1", **room: Any) -> Claim:
        [claim] = self.look(worker, **room).claims
        return claim

    def beat(self, worker: str = "w1", claims: list[Claim] | None = None) -> Beaten:
        return self.store.run(self.queue.beat(worker, claims or [], lease_ms=LEASE_MS))

    def finish(self, claim: Claim, worker: str = "w1", outcome: Outcome = Outcome.COMPLETED, **more: Any) -> bool:
        return self.store.run(self.queue.finish(worker, claim, outcome, Usage(), **more))

    def die(self, worker: str = "w1") -> None:
        self.store.run(self.queue.tick(worker))

    def seen(self, name: str, gateway: str = "g") -> Seen:
        return self.store.run(self.queue.watch(gateway, [name])).seen[0]

    def ending(self, name: str) -> Ending:
        ending = self.store.run(self.queue.watch("looker", [name])).seen[0].ending
        assert ending is not None
        return ending

    def attach(self, name: str, gateway: str, owner: str = "") -> Seen:
        return self.store.run(self.queue.attach(name, owner, gateway))

    def wait(self, ms: int, step_ms: int = 1000) -> None:
        """Let time pass while somebody is heard, so that the store does not count as having been away."""
        for _ in range(ms // step_ms):
            self.clock.advance(step_ms)
            self.store.run(self.queue.tick())

    def row(self, name: str) -> dict[str, Any]:
        return dict(msgspec.msgpack.decode(self.valkey.hget(self.queue.prefix + "rows", name)))

    def key(self, name: str) -> str:
        return self.queue.prefix + name

    def heard(self, channel: str) -> list[bytes]:
        """What was published on a channel since the test last asked."""
        while (message := self.listening.get_message(timeout=0.05)) is not None:
            self.said.append((message["channel"].decode(), message["data"]))
        found = [data for name, data in self.said if name == self.queue.prefix + channel]
        self.said = [one for one in self.said if one[0] != self.queue.prefix + channel]
        return found

    def orders(self, worker: str) -> list[Order]:
        return [order(raw) for raw in self.heard("worker:" + worker)]

    def outcomes(self) -> list[tuple[str, str]]:
        return [(e[b"id"].decode(), e[b"outcome"].decode()) for _, e in self.valkey.xrange(self.key("usage"))]


@pytest.fixture
def bench(store: Store, clock: Clock, valkey: redis.Redis) -> Bench:
    return Bench(store, clock, valkey)
