"""The queue's scripts against a plain model of what they promise: any history, on a real Valkey."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis.strategies as st
import msgspec
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

from core.values import Outcome, Usage
from tasks.queue import DUE_MS, Bounds, Claim, Claimed, Close, Queue, Room, Stops, Task, checksum
from tests.conftest import Clock, TimedStore

STORES = ("single", "cluster")

LEASE_MS = 3_000
HOME_MS = 5_000
HELD_MS = 900_000
KEPT_MS = 24 * 3_600_000
SHED_MS = 30_000
STEP_MS = 900  #: shorter than the silence after which the store counts as having been away
#: What a row has in fields that it lacks.
UNSET = {"worker": "", "gateway": "", "cancelled": "", "shown": False, "trail": "", "losses": 0, "held": False}
WORKERS = ("w1", "w2", "w3")
GATEWAYS = ("g1", "g2")
TENANTS = ("a", "b")
BOUNDS = Bounds(waiting=9, tokens=2_000, tenant_waiting=6, tenant_tokens=1_200)

rooms = st.builds(
    Room,
    kv_tokens=st.sampled_from([-1, 100, 300]),
    total_kv_tokens=st.sampled_from([-1, 300]),
    reserve=st.integers(0, 1),
    below=st.sampled_from([9, 9, 9, 2]),
    steal_ms=st.sampled_from([0, 1_000]),
)

ENQUEUE = {
    "cls": st.integers(0, 3),
    "tenant": st.sampled_from(TENANTS),
    "rerunnable": st.booleans(),
    "size": st.integers(0, 500),
    "need": st.integers(0, 200),
    "preferred": st.lists(st.sampled_from(WORKERS), max_size=2, unique=True).map(tuple),
    "patience_ms": st.sampled_from([0, 1_500]),
    "gateway": st.sampled_from(["", *GATEWAYS]),
    "forgotten": st.sampled_from([(0, False), (0, False), (0, False), (2, False), (2, True)]),
    "again": st.sampled_from([False, False, True]),
    "background": st.sampled_from([False, False, False, True]),
}
HALT = {
    "paused": st.sampled_from([False, False, True]),
    "shed": st.sampled_from([frozenset[int]()] * 3 + [frozenset({3}), frozenset({2, 3}), frozenset({0, 1})]),
}
CLAIM = {"worker": st.sampled_from(WORKERS), "want": st.integers(1, 4), "room": rooms}
#: What may follow what, as often as it stands here.
ACTIONS = (
    *["enqueue"] * 4,
    *["claim"] * 4,
    *["deliver"] * 3,
    "finish",
    "cancel",
    "back",
    "die",
    "attach",
    "retry",
    "wait",
    "halt",
)


@dataclass
class Row:
    """What the model knows of a request."""

    cls: int
    tenant: str
    arrival: int
    rerunnable: bool
    size: int
    need: int
    preferred: tuple[str, ...]
    patience_ms: int
    gateway: str
    entered_ms: int
    due_ms: int
    state: str = "waiting"
    attempt: int = 0
    worker: str = ""
    cancelled: str = ""
    shown: bool = False
    delivered: bool = False
    trail: str = ""
    losses: int = 0
    held: bool = False
    at_home: bool = False  #: its gateway is counted on to ask after it
    deadline_ms: int = 0
    counted: bool = True  #: its ending makes a usage entry
    background: bool = False
    put_off_ms: int = 0  #: its class was shed, so it counts as overdue only from then on

    @property
    def line(self) -> tuple[int, str]:
        return self.cls, self.tenant

    @property
    def late_ms(self) -> int:
        return max(self.due_ms, self.put_off_ms)

    @property
    def held_ms(self) -> int:
        return KEPT_MS if self.background else HELD_MS


@dataclass
class Model:
    now_ms: int = 0
    rows: dict[str, Row] = field(default_factory=dict)
    endings: list[tuple[str, str]] = field(default_factory=list)
    letters: dict[str, Row] = field(default_factory=dict)
    leases: dict[str, int] = field(default_factory=dict)
    homes: dict[str, int] = field(default_factory=dict)  #: gateway -> when it is given up
    rooms: dict[str, int] = field(default_factory=dict)
    paused: bool = False
    shed: frozenset[int] = frozenset()

    def of(self, state: str) -> dict[str, Row]:
        return {name: row for name, row in self.rows.items() if row.state == state}

    def claimable(self) -> dict[str, Row]:
        waiting = {} if self.paused else self.of("waiting")
        return {name: row for name, row in waiting.items() if row.cls not in self.shed}

    def sheds(self, row: Row) -> bool:
        return row.cls in self.shed and not row.background

    def held(self, worker: str) -> list[Claim]:
        return [self.claim_of(name) for name, row in self.of("running").items() if row.worker == worker]

    def claim_of(self, name: str) -> Claim:
        row = self.rows[name]
        return Claim(id=name, attempt=row.attempt, gateway=row.gateway, cancelled=bool(row.cancelled))

    def full(self, tenant: str, size: int) -> str:
        waiting = list(self.of("waiting").values())
        theirs = [row for row in waiting if row.tenant == tenant]
        whose = [("model", waiting, BOUNDS.waiting, BOUNDS.tokens)]
        whose += [("tenant", theirs, BOUNDS.tenant_waiting, BOUNDS.tenant_tokens)]
        for name, rows, most, tokens in whose:
            if len(rows) >= most or (rows and sum(row.size for row in rows) + size > tokens):
                return name
        return ""

    def wait_anew(self, row: Row) -> None:
        row.deadline_ms = self.now_ms + row.patience_ms if row.patience_ms else 0

    def alive(self, worker: str) -> None:
        self.leases[worker] = self.now_ms + LEASE_MS
        for row in self.of("waiting").values():
            if row.held:
                row.held = False
                self.wait_anew(row)

    def end(self, name: str, outcome: str) -> None:
        row = self.rows[name]
        row.state, row.held, row.at_home = "ended", False, False
        if row.counted:
            self.endings.append((name, outcome))

    def back(self, name: str, *, lost: bool) -> None:
        """Its worker no longer has it."""
        row = self.rows[name]
        row.losses += lost and (not row.delivered or row.attempt >= 10)
        if row.cancelled:
            self.end(name, row.cancelled)
        elif row.shown and not row.rerunnable:
            self.end(name, "worker_lost")
        elif row.losses >= 3:
            self.letters[name] = replace(row)
            self.end(name, "failed")
        elif self.sheds(row):
            self.end(name, "shed")
        else:
            row.trail = row.worker if row.delivered else row.trail
            row.state, row.worker, row.delivered = "waiting", "", False
            self.wait_anew(row)

    def bury(self, worker: str, *, lost: bool) -> None:
        self.leases.pop(worker, None)
        self.rooms.pop(worker, None)
        for claim in self.held(worker):
            self.back(claim.id, lost=lost)

    def orphan(self, gateway: str) -> None:
        del self.homes[gateway]
        for name, row in self.rows.items():
            if row.gateway == gateway and row.at_home:
                row.at_home = False
                if row.background:
                    row.gateway = ""
                elif row.state == "running":
                    row.cancelled = row.cancelled or "gateway_lost"
                else:
                    self.end(name, "gateway_lost")

    def pass_time(self, now_ms: int) -> None:
        self.now_ms = now_ms
        for name, row in self.of("waiting").items():
            if 0 < row.deadline_ms <= now_ms and (self.leases or row.held):
                self.end(name, "expired")
            elif 0 < row.deadline_ms <= now_ms:
                row.held, row.deadline_ms = True, now_ms + row.held_ms
        for worker in [worker for worker, until_ms in self.leases.items() if until_ms <= now_ms]:
            self.bury(worker, lost=True)
        for gateway in [gateway for gateway, until_ms in self.homes.items() if until_ms <= now_ms]:
            self.orphan(gateway)

    # --- who may have what

    def free(self, row: Row, worker: str, steal_ms: int) -> bool:
        """Whether this worker may have it, or it waits for the one that holds its prefix."""
        if not row.preferred or worker in row.preferred or row.entered_ms + steal_ms <= self.now_ms:
            return True
        return not any(self.rooms.get(other, 0) and not self.crowded(other) for other in row.preferred)

    def crowded(self, worker: str) -> bool:
        """Much more runs there than elsewhere."""
        running = [row.worker for row in self.rows.values() if row.state == "running"]
        return running.count(worker) > 1.5 * len(running) / max(1, len(self.leases)) + 4

    def overdue(self) -> set[str]:
        """The one that is overdue longest; several if equally."""
        late = {name: row.late_ms for name, row in self.claimable().items() if row.late_ms <= self.now_ms}
        return {name for name, due_ms in late.items() if due_ms == min(late.values())}


def fits(row: Row, slots: int, kv: int, room: Room) -> bool:
    return (kv < 0 or row.need <= kv) and (row.rerunnable or row.cls < 2 or slots > room.reserve)


class Histories(RuleBasedStateMachine):
    """Every rule does the same to both, and compares what is said."""

    client: redis.Redis

    @initialize()
    def begin(self) -> None:
        self.client.flushall()
        self.clock = Clock()
        self.store = TimedStore(self.client, self.clock)
        self.queue = Queue("m", BOUNDS, home_ms=HOME_MS)
        self.model = Model(self.clock.now_ms)
        self.count = 0

    def names(self, state: str) -> list[str]:
        return sorted(self.model.of(state))

    def one(self, data: Any, names: Iterable[str]) -> str:
        name: str = data.draw(st.sampled_from(sorted(names)))
        return name

    @rule(data=st.data(), actions=st.lists(st.sampled_from(ACTIONS), min_size=20, max_size=40))
    def a_busy_moment(self, data: Any, actions: list[str]) -> None:
        """One thing after another: left to choose among many rules, a history seldom gets far with any request."""
        for action in actions:
            if action == "enqueue":
                self.enqueue(**data.draw(st.fixed_dictionaries(ENQUEUE)))
            elif action == "claim":
                self.claim(**data.draw(st.fixed_dictionaries(CLAIM)))
            elif action == "wait":
                self.wait(data.draw(st.integers(1, 7)), data.draw(st.sampled_from([*WORKERS, *GATEWAYS, "none"])))
            elif action == "die":
                self.die(data.draw(st.sampled_from(WORKERS)))
            elif action in ("deliver", "finish", "back") and self.model.of("running"):
                self._of_what_runs(action, data)
            elif action in ("cancel", "attach") and self.model.rows:
                self.cancel(data) if action == "cancel" else self.attach(
                    data, data.draw(st.sampled_from(GATEWAYS)), "key"
                )
            elif action == "retry" and self.model.letters:
                self.retry(data)
            elif action == "halt":
                self.halt(**data.draw(st.fixed_dictionaries(HALT)))

    def _of_what_runs(self, action: str, data: Any) -> None:
        if action == "deliver":
            self.deliver(data)
        elif action == "back":
            self.hand_back(data, data.draw(st.booleans()))
        else:
            outcome = data.draw(st.sampled_from([Outcome.COMPLETED, Outcome.CANCELLED]))
            self.finish_all(data, outcome, data.draw(st.booleans()))

    # --- the way in

    def enqueue(
        self, cls: int, tenant: str, gateway: str, forgotten: tuple[int, bool], again: bool, **more: Any
    ) -> None:
        self.count += 1
        name, model, now_ms = f"r{self.count}", self.model, self.model.now_ms
        due_ms = now_ms + list(DUE_MS.values())[cls]
        row = Row(cls, tenant, self.count, gateway=gateway, entered_ms=now_ms, due_ms=due_ms, **more)
        row.attempt, row.shown = forgotten
        full, waiting = model.full(tenant, row.size), len(model.of("waiting"))
        call = self.queue.enqueue(self._task(name, row), attempt=row.attempt, shown=row.shown, again=again)
        said = self.store.run(call)
        if not again and (model.paused or cls in model.shed):
            assert said.status == ("paused" if model.paused else "shed")
            return
        assert (said.status, said.whose) == (("full", full) if full else ("accepted", ""))
        if full:
            assert said.waiting <= waiting
            return
        model.rows[name] = row
        if gateway:
            row.at_home = True
            model.homes[gateway] = max(model.homes.get(gateway, 0), now_ms + HOME_MS)
        if model.sheds(row) or (row.shown and not row.rerunnable):
            model.end(name, "shed" if model.sheds(row) else "worker_lost")
            return
        assert said.alive == bool(model.leases)
        model.wait_anew(row)
        if not model.leases:
            row.held, row.deadline_ms = True, now_ms + row.held_ms

    def _task(self, name: str, row: Row) -> Task:
        return Task(
            id=name, message=b"m", cls=row.cls, tenant=row.tenant, owner="key", gateway=row.gateway,
            rerunnable=row.rerunnable, input_tokens=row.size, need_tokens=row.need, preferred=row.preferred,
            patience_ms=row.patience_ms, facts=b"f", body=b"b", view=b"v", background=row.background,
        )  # fmt: skip

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data())
    def enqueue_again(self, data: Any) -> None:
        """A repeat changes nothing, whatever has become of the request."""
        name = self.one(data, self.model.rows)
        known = self.store.run(self.queue.enqueue(Task(id=name, message=b"other")))
        assert (known.status, known.state) == ("known", self.model.rows[name].state)

    # --- claims

    def claim(self, worker: str, want: int, room: Room) -> None:
        self.count += 1
        saved = (self.client.hget(self.queue.prefix + "saving", worker) or b"").decode()
        call = self.queue.claim(worker, want, lease_ms=LEASE_MS, nonce=str(self.count), room=room)
        claimed = self.store.run(call)
        assert self.store.run(call).claims == claimed.claims, "the same nonce is told the same"
        self.model.alive(worker)
        for name, due_ms in self.zset("due").items():
            row = self.model.rows[name]
            if due_ms > row.late_ms:
                assert row.cls in self.model.shed and due_ms == self.model.now_ms + SHED_MS
                row.put_off_ms = int(due_ms)
        if saved and self.model.rows[saved].cls in self.model.shed:
            saved = ""
        slots, kv = want, room.kv_tokens
        for claim in claimed.claims:
            row = self.model.rows[claim.id]
            self._may_take(worker, claim.id, slots, kv, room, saved)
            assert (claim.attempt, claim.gateway, claim.trail) == (row.attempt + 1, row.gateway, row.trail)
            row.state, row.worker, row.attempt, row.held = "running", worker, row.attempt + 1, False
            saved = "" if claim.id == saved else saved
            slots, kv = slots - 1, max(0, kv - row.need) if kv >= 0 else -1
        self._nothing_left_that_it_could_take(worker, claimed, slots, kv, room)
        saves = self.client.hexists(self.queue.prefix + "saving", worker)
        busy = claimed.passed_class < 9
        saves = saves and not self.model.paused  # nothing was looked at
        self.model.rooms[worker] = 0 if room.below < 9 or saves else -slots if busy else slots

    def _may_take(self, worker: str, name: str, slots: int, kv: int, room: Room, saved: str) -> None:
        row, waiting = self.model.rows[name], self.model.claimable()
        assert name in waiting and slots > 0 and row.cls < room.below
        assert fits(row, slots, kv, room)
        if name == saved or name in self.model.overdue():
            return
        assert not saved or row.cls < waiting[saved].cls, "it saves for another"
        assert self.model.free(row, worker, room.steal_ms)
        for other in waiting.values():
            could = fits(other, slots, kv, room) and self.model.free(other, worker, room.steal_ms)
            if other.line == row.line and (other.arrival < row.arrival or worker in other.preferred):
                sooner = (worker not in other.preferred, other.arrival) < (worker not in row.preferred, row.arrival)
                assert not (sooner and could), "the first of its line that it could have"
            elif other.cls < row.cls and other is self._head(other.line):
                assert not could, "classes are strict"

    def _head(self, line: tuple[int, str]) -> Row:
        return min((row for row in self.model.claimable().values() if row.line == line), key=lambda r: r.arrival)

    def _nothing_left_that_it_could_take(self, worker: str, claimed: Claimed, slots: int, kv: int, room: Room) -> None:
        waiting = self.model.claimable().values()
        assert claimed.passed_class == 9 or claimed.passed_class in {row.cls for row in waiting}
        if slots == 0 or self.client.hexists(self.queue.prefix + "saving", worker):
            return
        for head in (self._head(line) for line in {row.line for row in waiting}):
            assert head.cls >= room.below or not (
                fits(head, slots, kv, room) and self.model.free(head, worker, room.steal_ms)
            )

    def deliver(self, data: Any) -> None:
        name = self.one(data, self.names("running"))
        row = self.model.rows[name]
        assert self.store.run(self.queue.deliver("stranger", [self.model.claim_of(name)])) == [False]
        assert self.store.run(self.queue.deliver(row.worker, [self.model.claim_of(name)])) == [True]
        if not row.delivered:
            row.delivered, row.shown, row.trail = True, True, ""
        assert self.store.run(self.queue.logs_of(name)) == [one for one in (row.trail, row.worker) if one]

    @rule(worker=st.sampled_from(WORKERS), tokens=st.integers(0, 300))
    def beat(self, worker: str, tokens: int) -> None:
        """Both sides agree on the claims, always."""
        held = self.model.held(worker)
        served = [(claim, tokens) for claim in held]
        beaten = self.store.run(self.queue.beat(worker, held, lease_ms=LEASE_MS, served=served))
        self.model.alive(worker)
        assert beaten.claims is None
        assert beaten.urgent == min((row.cls for row in self.model.claimable().values()), default=9)

    # --- the ways out

    def finish_all(self, data: Any, outcome: Outcome, dead: bool) -> None:
        """Several endings in one exchange; each by itself, also those of another worker and repeats."""
        worker = self.model.rows[self.one(data, self.names("running"))].worker
        names = data.draw(st.lists(st.sampled_from(self.names("running")), min_size=1, max_size=3, unique=True))
        dead = dead and outcome == Outcome.COMPLETED
        used = Usage(output_tokens=7)
        closes = [Close(claim=self.model.claim_of(name), outcome=outcome, usage=used, dead=dead) for name in names]
        ours = [self.model.rows[name].worker == worker for name in names]
        call = self.queue.finish_all(worker, closes)
        assert self.store.run(call) == ours
        assert self.store.run(call) == ours, "a repeat is told the same"
        for name in (name for name, mine in zip(names, ours, strict=True) if mine):
            row = self.model.rows[name]
            if dead:
                self.model.letters[name] = replace(row)
            self.model.end(name, row.cancelled or "cancelled" if outcome == Outcome.CANCELLED else "completed")

    def cancel(self, data: Any) -> None:
        name = self.one(data, self.model.rows)
        row = self.model.rows[name]
        said = self.store.run(self.queue.cancel(name))
        assert said == {"waiting": "cancelled", "running": "running", "ended": "ended"}[row.state]
        if row.state == "waiting":
            self.model.end(name, "cancelled")
        elif row.state == "running":
            row.cancelled = row.cancelled or "cancelled"

    def hand_back(self, data: Any, died: bool) -> None:
        worker = self.model.rows[self.one(data, self.names("running"))].worker
        back = [claim for claim in self.model.held(worker) if data.draw(st.booleans())]
        call = self.queue.hand_back(worker, back, died=died)
        assert self.store.run(self.queue.hand_back("stranger", back, died=died)) == 0
        assert self.store.run(call) == len(back)
        assert self.store.run(call) == 0, "what was given back is not the worker's to give"
        for claim in back:
            self.model.back(claim.id, lost=died)

    def die(self, worker: str) -> None:
        assert self.store.run(self.queue.tick(worker)).buried
        self.model.bury(worker, lost=True)

    @rule(worker=st.sampled_from(WORKERS))
    def part(self, worker: str) -> None:
        self.store.run(self.queue.part(worker))
        self.model.bury(worker, lost=False)

    # --- gateways

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data(), gateway=st.sampled_from(GATEWAYS))
    def watch(self, data: Any, gateway: str) -> None:
        names = sorted(self.model.rows)
        watched = self.store.run(self.queue.watch(gateway, names))
        self.model.homes[gateway] = self.model.now_ms + HOME_MS
        waiting = self.model.of("waiting").values()
        assert (watched.waiting, watched.waiting_tokens) == (len(waiting), sum(row.size for row in waiting))
        assert watched.workers == len(self.model.leases)
        for name, seen in zip(names, watched.seen, strict=True):
            row = self.model.rows[name]
            elsewhere = row.state != "ended" and row.gateway not in ("", gateway)
            assert seen.state == ("elsewhere" if elsewhere else row.state)
            assert not seen.ending or seen.ending.attempt == row.attempt

    def attach(self, data: Any, gateway: str, owner: str) -> None:
        name = self.one(data, self.model.rows)
        row = self.model.rows[name]
        seen = self.store.run(self.queue.attach(name, owner, gateway))
        assert seen.state == (row.state if owner == "key" else "unknown")
        if owner == "thief" or row.state == "ended":
            return
        self.model.homes[gateway] = max(self.model.homes.get(gateway, 0), self.model.now_ms + HOME_MS)
        if row.gateway != gateway:
            row.gateway, row.at_home = gateway, True

    # --- dead letters

    def retry(self, data: Any) -> None:
        name, model = self.one(data, self.model.letters), self.model
        letter = model.letters[name]
        if model.sheds(letter):
            assert self.store.run(self.queue.retry_dead(name)) == "shed"
            return
        del model.letters[name]
        assert self.store.run(self.queue.retry_dead(name)) == "retried"
        assert self.store.run(self.queue.retry_dead(name)) == "unknown"
        self.count += 1
        due_ms = model.now_ms + letter.due_ms - letter.entered_ms
        model.rows[name] = replace(
            letter, state="waiting", arrival=self.count, gateway="", preferred=(), entered_ms=model.now_ms,
            due_ms=due_ms, cancelled="", shown=False, delivered=False, trail="", losses=0, worker="", held=False,
            at_home=False, deadline_ms=0, counted=False, put_off_ms=0,
        )  # fmt: skip

    @precondition(lambda self: self.model.letters)
    @rule(data=st.data())
    def purge(self, data: Any) -> None:
        name = self.one(data, self.model.letters)
        del self.model.letters[name]
        assert self.store.run(self.queue.purge_dead(name))
        assert not self.store.run(self.queue.purge_dead(name))

    # --- operators

    def halt(self, paused: bool, shed: frozenset[int]) -> None:
        """What waits of a class that is shed ends, and nothing else; a mark from before changes nothing."""
        model, mark, stops = self.model, self.store.run(self.queue.mark()), Stops(paused=paused, shed=shed)
        halted = self.store.run(self.queue.halt(stops, mark))
        assert halted.done and not halted.left
        changed = (paused, shed) != (model.paused, model.shed)
        assert (self.store.run(self.queue.mark()) != mark) == changed
        if changed:
            was = Stops(paused=model.paused, shed=model.shed)
            assert not self.store.run(self.queue.halt(was, mark)).done, "somebody who read before that comes too late"
        model.paused, model.shed = paused, shed
        for name, row in model.of("waiting").items():
            if model.sheds(row):
                model.end(name, "shed")

    # --- time

    @rule(steps=st.integers(1, 6), silent=st.sampled_from([*WORKERS, *GATEWAYS, "none", "none"]))
    def wait(self, steps: int, silent: str) -> None:
        """Time passes, and all but one are heard of."""
        for _ in range(steps):
            self.clock.advance(STEP_MS)
            for _ in GATEWAYS:  # one is given up at a time
                self.store.run(self.queue.tick())
            self.model.pass_time(self.clock.now_ms)
            for worker in set(self.model.leases) - {silent}:
                self.beat(worker, 0)
            for gateway in set(self.model.homes) - {silent}:
                self.store.run(self.queue.watch(gateway, []))
                self.model.homes[gateway] = self.model.now_ms + HOME_MS

    # --- what is true at any time

    @invariant()
    def nothing_is_lost_and_nothing_twice(self) -> None:
        entries = [(e[b"id"].decode(), e[b"outcome"].decode()) for _, e in self.client.xrange(self.key("usage"))]
        assert sorted(entries) == sorted(self.model.endings)
        waiting, running = self.model.of("waiting"), self.model.of("running")
        depth = self.store.run(self.queue.tick())
        assert depth.waiting == tuple(sum(row.cls == c for row in waiting.values()) for c in range(4))
        assert depth.waiting_tokens == sum(row.size for row in waiting.values())
        assert (depth.running, depth.dead, depth.workers) == (
            len(running), len(self.model.letters), len(self.model.leases),
        )  # fmt: skip
        assert depth.stops == Stops(paused=self.model.paused, shed=self.model.shed)

    @invariant()
    def every_row_is_as_it_should_be(self) -> None:
        rows = {name.decode(): msgspec.msgpack.decode(raw) for name, raw in self.hash("rows").items()}
        assert set(rows) == set(self.model.rows)
        for name, row in self.model.rows.items():
            found = rows[name]
            assert (found["state"], found["attempt"]) == (row.state, row.attempt)
            if row.state != "ended":
                told = (row.worker, row.gateway, row.cancelled, row.shown, row.trail, row.losses, row.held)
                assert tuple(found.get(key, default) for key, default in UNSET.items()) == told
        saving = {worker.decode(): name.decode() for worker, name in self.hash("saving").items()}
        assert {row["saver"]: name for name, row in rows.items() if row.get("saver")} == saving
        assert set(saving) <= set(self.model.leases) and set(saving.values()) <= set(self.model.of("waiting"))

    @invariant()
    def every_index_agrees_with_the_rows(self) -> None:
        waiting, running = self.model.of("waiting"), self.model.of("running")
        assert {entry.rpartition("|")[2] for entry in self.zset("waiting")} == set(waiting)
        assert self.zset("due") == {name: row.late_ms for name, row in waiting.items()}
        late = {name: row.deadline_ms for name, row in waiting.items() if row.deadline_ms}
        assert self.zset("deadlines") == late
        assert set(self.zset("held")) == {name for name, row in waiting.items() if row.held}
        assert set(self.zset("claims")) == {f"{row.worker}|{name}" for name, row in running.items()}
        homes = {f"{row.gateway}|{name}" for name, row in self.model.rows.items() if row.at_home}
        assert set(self.zset("homes")) == homes
        assert self.zset("leases") == self.model.leases
        assert self.zset("gateways") == self.model.homes
        assert set(self.zset("dead")) == {name.decode() for name in self.hash("letters")} == set(self.model.letters)
        assert {name.decode() for name in self.hash("tasks")} == {*waiting, *running}

    @invariant()
    def every_sum_agrees_with_the_rows(self) -> None:
        waiting = list(self.model.of("waiting").values())
        depths = {name.decode(): int(depth) for name, depth in self.hash("depths").items()}
        theirs = {tenant: [row.size for row in waiting if row.tenant == tenant] for tenant in TENANTS}
        counts = {tenant: len(sizes) for tenant, sizes in theirs.items() if sizes}
        assert depths == counts | {tenant + "|tokens": sum(sizes) for tenant, sizes in theirs.items() if sizes}
        preferred = int(self.hash("counters").get(b"waiting_preferred", 0))
        assert preferred == sum(bool(row.preferred) for row in waiting)
        assert {worker.decode(): int(free) for worker, free in self.hash("rooms").items()} == self.model.rooms
        assert set(self.model.rooms) <= set(self.model.leases)
        for worker in WORKERS:
            assert (self.client.hget(self.key("sums"), worker) or b"0").decode() == checksum(self.model.held(worker))
        lines = {f"{row.cls}|{row.tenant}" for row in waiting}
        service = {tenant.decode(): int(tokens) for tenant, tokens in self.hash("service").items()}
        places = {line: int(line[0]) * 2**46 + service.get(line[2:], 0) for line in lines}
        assert self.zset("tenants") == places

    def key(self, name: str) -> str:
        return self.queue.prefix + name

    def hash(self, name: str) -> dict[bytes, bytes]:
        found: dict[bytes, bytes] = self.client.hgetall(self.key(name))
        return found

    def zset(self, name: str) -> dict[str, float]:
        return {member.decode(): score for member, score in self.client.zrange(self.key(name), 0, -1, withscores=True)}


@pytest.mark.timeout(200)
def test_any_history_keeps_what_the_queue_promises(valkey: redis.Redis) -> None:
    """Every accepted request ends once, in the order promised, and every index agrees with every other."""
    Histories.client = valkey
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run_state_machine_as_test(
        Histories,
        settings=settings(max_examples=120, stateful_step_count=6, deadline=None, suppress_health_check=checks),
    )
