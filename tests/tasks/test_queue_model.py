"""The queue's scripts against a plain model of what they promise: any history, on a real Valkey."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from core.redis import Store
from core.values import Outcome, Usage
from tasks.queue import DUE_MS, Claim, Queue, Task, checksum
from tests.conftest import TEST_CLOCK, Clock

LEASE_MS = 3_000
WORKERS = ("w1", "w2", "w3")
TENANTS = ("a", "b")


@dataclass
class Row:
    """What the model knows of a request."""

    cls: int
    tenant: str
    arrival: int
    rerunnable: bool
    state: str = "waiting"
    attempt: int = 0
    worker: str = ""
    cancelled: bool = False
    delivered: bool = False
    losses: int = 0


@dataclass
class Model:
    rows: dict[str, Row] = field(default_factory=dict)
    endings: list[tuple[str, str]] = field(default_factory=list)

    def of(self, state: str) -> dict[str, Row]:
        return {name: row for name, row in self.rows.items() if row.state == state}

    def held(self, worker: str) -> list[Claim]:
        return [
            Claim(id=name, attempt=row.attempt, message=b"", cancelled=row.cancelled)
            for name, row in self.of("running").items()
            if row.worker == worker
        ]

    def end(self, name: str, outcome: str) -> None:
        self.rows[name].state = "ended"
        self.endings.append((name, outcome))

    def back(self, name: str) -> None:
        """Its worker no longer has it."""
        row = self.rows[name]
        if row.cancelled:
            self.end(name, "cancelled")
        elif row.delivered and not row.rerunnable:
            self.end(name, "worker_lost")
        elif row.losses >= 3:
            self.end(name, "failed")
        else:
            row.state, row.worker, row.delivered = "waiting", "", False


class Histories(RuleBasedStateMachine):
    """Every rule does the same to both, and compares what is said."""

    client: redis.Redis

    @initialize()
    def begin(self) -> None:
        self.client.flushall()
        self.clock = Clock(self.client)
        self.store = Store(self.client, clock=TEST_CLOCK)
        self.queue = Queue("m")
        self.model = Model()
        self.count = 0

    def names(self, state: str) -> list[str]:
        return sorted(self.model.of(state))

    @rule(cls=st.integers(0, 3), tenant=st.sampled_from(TENANTS), rerunnable=st.booleans(), size=st.integers(0, 500))
    def enqueue(self, cls: int, tenant: str, rerunnable: bool, size: int) -> None:
        self.count += 1
        name = f"r{self.count}"
        task = Task(
            id=name,
            message=b"m",
            cls=cls,
            tenant=tenant,
            rerunnable=rerunnable,
            input_tokens=size,
            facts=b"f",
            body=b"b",
        )
        assert self.store.run(self.queue.enqueue(task)).status == "accepted"
        self.model.rows[name] = Row(cls, tenant, self.count, rerunnable)

    @rule(data=st.data())
    def enqueue_again(self, data: Any) -> None:
        """A repeat changes nothing, whatever has become of the request."""
        if self.model.rows:
            name = data.draw(st.sampled_from(sorted(self.model.rows)))
            known = self.store.run(self.queue.enqueue(Task(id=name, message=b"other")))
            assert (known.status, known.state) == ("known", self.model.rows[name].state)

    @rule(worker=st.sampled_from(WORKERS), want=st.integers(1, 4))
    def claim(self, worker: str, want: int) -> None:
        self.count += 1
        call = self.queue.claim(worker, want, lease_ms=LEASE_MS, nonce=str(self.count))
        taken = self.store.run(call).claims
        assert self.store.run(call).claims == taken, "the same nonce is told the same"
        assert len(taken) == min(want, len(self.model.of("waiting")))
        for claim in taken:
            self._take(worker, claim)

    def _take(self, worker: str, claim: Claim) -> None:
        row = self.model.rows[claim.id]
        waiting = self.model.of("waiting").values()
        # Nothing is overdue here, so classes are strict; in its class a tenant keeps its order.
        assert row.cls == min(other.cls for other in waiting)
        mine = [other.arrival for other in waiting if (other.cls, other.tenant) == (row.cls, row.tenant)]
        assert row.arrival == min(mine)
        row.state, row.worker, row.attempt = "running", worker, row.attempt + 1
        assert claim.attempt == row.attempt

    @precondition(lambda self: self.model.of("running"))
    @rule(data=st.data(), output=st.integers(0, 300))
    def finish(self, data: Any, output: int) -> None:
        name = data.draw(st.sampled_from(self.names("running")))
        row = self.model.rows[name]
        [claim] = [claim for claim in self.model.held(row.worker) if claim.id == name]
        call = self.queue.finish(row.worker, claim, Outcome.COMPLETED, Usage(output_tokens=output))
        assert not self.store.run(self.queue.finish("stranger", claim, Outcome.FAILED, Usage()))
        assert self.store.run(call)
        assert self.store.run(call)
        self.model.end(name, "completed")

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        name = data.draw(st.sampled_from(sorted(self.model.rows)))
        row = self.model.rows[name]
        said = self.store.run(self.queue.cancel(name))
        assert said == {"waiting": "cancelled", "running": "running", "ended": "ended"}[row.state]
        if row.state == "waiting":
            self.model.end(name, "cancelled")
        elif row.state == "running":
            row.cancelled = True

    @precondition(lambda self: self.model.of("running"))
    @rule(data=st.data())
    def deliver(self, data: Any) -> None:
        name = data.draw(st.sampled_from(self.names("running")))
        row = self.model.rows[name]
        claims = [claim for claim in self.model.held(row.worker) if claim.id == name]
        assert self.store.run(self.queue.deliver(row.worker, claims)) == [True]
        row.delivered = True

    @rule(worker=st.sampled_from(WORKERS), tokens=st.integers(0, 300))
    def beat(self, worker: str, tokens: int) -> None:
        """Both sides agree on the claims, always."""
        held = self.model.held(worker)
        served = [(claim, tokens) for claim in held]
        assert self.store.run(self.queue.beat(worker, held, lease_ms=LEASE_MS, served=served)).claims is None

    @rule(worker=st.sampled_from(WORKERS))
    def die(self, worker: str) -> None:
        held = [claim.id for claim in self.model.held(worker)]
        assert self.store.run(self.queue.tick(worker)).buried
        for name in held:
            self.model.rows[name].losses += 1
            self.model.back(name)

    @rule(worker=st.sampled_from(WORKERS))
    def hand_back(self, worker: str) -> None:
        held = self.model.held(worker)
        assert self.store.run(self.queue.hand_back(worker, held)) == len(held)
        for claim in held:
            self.model.back(claim.id)

    @rule(ms=st.integers(1, 900))
    def wait(self, ms: int) -> None:
        """Never so long that a lease runs out unheard: that is `die`."""
        if self.clock.now_ms + ms < 1_000_000 + min(DUE_MS.values()):
            self.clock.advance(ms)

    @invariant()
    def nothing_is_lost_and_nothing_twice(self) -> None:
        key = self.queue.prefix
        entries = [(e[b"id"].decode(), e[b"outcome"].decode()) for _, e in self.client.xrange(key + "usage")]
        assert sorted(entries) == sorted(self.model.endings)
        waiting, running = self.model.of("waiting"), self.model.of("running")
        depth = self.store.run(self.queue.tick())
        assert depth.waiting == tuple(sum(row.cls == c for row in waiting.values()) for c in range(4))
        assert depth.running == len(running) == self.client.zcard(key + "claims")
        assert self.client.zcard(key + "waiting") == len(waiting) == self.client.zcard(key + "due")
        lines = {f"{row.cls}|{row.tenant}" for row in waiting.values()}
        assert {line.decode() for line in self.client.zrange(key + "tenants", 0, -1)} == lines
        assert self.client.hlen(key + "tasks") == len(waiting) + len(running)
        for worker in WORKERS:
            assert (self.client.hget(key + "sums", worker) or b"0").decode() == checksum(self.model.held(worker))
        for line in lines:
            cls, tenant = line.split("|")
            service = int(self.client.hget(key + "service", tenant) or 0)
            assert self.client.zscore(key + "tenants", line) == int(cls) * 2**46 + service


@pytest.mark.timeout(200)
def test_any_history_keeps_what_the_queue_promises(valkey: redis.Redis) -> None:
    """Every accepted request ends once, in the order promised, and every index agrees with every other."""
    Histories.client = valkey
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        Histories,
        settings=settings(max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=checks),
    )
