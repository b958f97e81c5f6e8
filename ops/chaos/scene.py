"""A platform in the middle of a crowd, what happens to it, and the ledger at the end.

The faults are real: processes are killed and stopped by signals. Which, when and to whom, a seed says; how the
platform's processes interleave with them, nobody does, so a seed brings back the plan and not the run.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

from core import fleet, postgres
from core.redis import AWAY, Store, command, tag
from core.values import Outcome
from ops.chaos import checker
from ops.chaos.checker import Ledger, Tokens
from ops.chaos.crowd import LOST, Crowd
from tasks.queue import Queue

#: How long a pause is beside the lease that must run out in it, seconds.
PAST_LEASE_S = 1.0
STORE_AWAY_S = 3.0
#: A slow gateway hears nothing for so long, seconds: shorter than its lease.
GATEWAY_PAUSE_S = 2.0
#: Between two faults, seconds.
BETWEEN_S = (0.5, 1.5)
#: How long the platform may take to be itself again, seconds.
RECOVERY_S = 60.0

#: In which column of the ledger an outcome counts.
COLUMNS: dict[str, str] = {
    Outcome.COMPLETED: "finished", Outcome.LENGTH: "finished", Outcome.CANCELLED: "cancelled",
    Outcome.EXPIRED: "expired", Outcome.REFUSED: "dead", Outcome.FAILED: "dead",
    Outcome.WORKER_LOST: "lost", Outcome.GATEWAY_LOST: "lost",
}  # fmt: skip


class ChaosFailed(Exception):
    """There is no ledger: the platform did not become itself again."""


@dataclass(frozen=True, kw_only=True)
class Ground:
    """A running platform on the scripted engine, as far as chaos must know it."""

    redis_url: str
    database_url: str
    gateways: Sequence[tuple[str, int]]
    leaders: Callable[[], Sequence[int]]  #: of the gateways' process groups
    key: str
    model: str
    lease_s: float
    tally: Path  #: where its engines write down whose tokens they make
    workers: int = 2


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a run came to."""

    seed: int
    seconds: float
    happened: dict[str, int]  #: faults, by kind
    sent: int
    finished: int
    cancelled: int
    expired: int
    dead: int
    lost: int
    returns: int  #: how often clients came back to a stream
    attempts: dict[int, int]  #: requests by the number of their last attempt
    refused: dict[str, int]  #: tries that were not accepted
    relayed_tokens: int
    billed_tokens: int
    emitted_tokens: int
    faults: list[str]  #: what does not hold; none: the ledger does

    def told(self) -> str:
        """For people."""
        refused = ", ".join(f"{count} x {what}" for what, count in self.refused.items()) or "none"
        attempts = ", ".join(f"{count} at attempt {number}" for number, count in self.attempts.items())
        lines = [
            f"Seed {self.seed}: {sum(self.happened.values())} faults in {self.seconds:.0f} s",
            f"sent {self.sent} = finished {self.finished} + cancelled {self.cancelled} + expired {self.expired}"
            f" + dead {self.dead} + lost {self.lost}",
            f"ended: {attempts}; clients came back {self.returns} times; tries refused: {refused}",
            f"tokens: relayed {self.relayed_tokens}, billed {self.billed_tokens}, emitted {self.emitted_tokens}",
            *(f"WRONG  {fault}" for fault in self.faults),
            "The ledger does not hold." if self.faults else "The ledger holds.",
        ]
        return "\n".join(lines)


@dataclass
class Scene:
    """One run."""

    ground: Ground
    seed: int
    say: Callable[[str], None]
    happened: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        ground = self.ground
        self.chance = random.Random(self.seed)
        self.store, self.queue = Store.connect(ground.redis_url), Queue(ground.model)
        self.crowd = Crowd(ground.gateways, ground.key, ground.model, self.seed)
        self.before = set(self._rows())
        self.began_s = time.monotonic()

    @property
    def plan(self) -> dict[str, Callable[[], None]]:
        return {
            "kill a worker": self.kill_worker,
            "pause a worker past its lease": self.pause_worker,
            "kill a gateway": self.kill_gateway,
            "pause a gateway": self.pause_gateway,
            "stop the store": self.stop_store,
            "cut every subscription": self.cut_subscriptions,
            "forget every script": self.forget_scripts,
        }

    def play(self, clients: int, seconds: float) -> Verdict:
        """Every fault once, in an order of the seed's, and so on until the time is over; then the ledger.

        Raises:
          ChaosFailed: it did not come to that.
        """
        self.crowd.open(clients)
        while not self.happened or time.monotonic() - self.began_s < seconds:
            for name, fault in self.chance.sample(sorted(self.plan.items()), len(self.plan)):
                self._until(self._calm, "all workers to be busy")
                time.sleep(self.chance.uniform(*BETWEEN_S))
                self.happened[name] += 1
                self.say(f"{time.monotonic() - self.began_s:6.1f} s  {name}")
                fault()
                if time.monotonic() - self.began_s >= seconds and len(self.happened) == len(self.plan):
                    break
        return self.settle()

    # --- faults

    def kill_worker(self) -> None:
        psutil.Process(self._victim().pid).kill()

    def pause_worker(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self._pause([psutil.Process(self._victim().pid)], self.ground.lease_s + PAST_LEASE_S)

    def kill_gateway(self) -> None:
        """The whole of it: gunicorn's own process would else leave its worker to end in order."""
        for process in self._gateway():
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def pause_gateway(self) -> None:
        self._pause(self._gateway(), GATEWAY_PAUSE_S)

    def stop_store(self) -> None:
        self._pause([psutil.Process(int(self.store.client.info("server")["process_id"]))], STORE_AWAY_S)

    def cut_subscriptions(self) -> None:
        self.store.client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")

    def forget_scripts(self) -> None:
        self.store.client.script_flush()

    def _pause(self, processes: Sequence[psutil.Process], seconds: float) -> None:
        for process in processes:
            process.send_signal(signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            for process in processes:
                process.send_signal(signal.SIGCONT)

    def _victim(self) -> fleet.Worker:
        return self.chance.choice(sorted(self._ready(), key=lambda row: row.worker))

    def _gateway(self) -> list[psutil.Process]:
        """One that has been started again, if it was killed before."""
        self._until(self._leaders, "a gateway")
        leader = self.chance.choice(self._leaders())
        return [*leader.children(recursive=True), leader]

    def _leaders(self) -> list[psutil.Process]:
        return [psutil.Process(pid) for pid in sorted(self.ground.leaders()) if psutil.pid_exists(pid)]

    # --- what is looked at

    def _ready(self) -> list[fleet.Worker]:
        return [row for row in self.store.run(fleet.workers(self.ground.model)) if row.state == "ready"]

    def _calm(self) -> bool:
        """Everybody is there and has something to lose."""
        rows = self._ready()
        claims = self.store.client.zrange(tag(self.ground.model) + "claims", 0, -1)
        busy = {claim.decode().rpartition("|")[0] for claim in claims}
        return len(rows) == self.ground.workers and all(row.worker in busy for row in rows)

    def _until(self, true: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + RECOVERY_S
        while True:
            with suppress(*AWAY):
                if true():
                    return
            if time.monotonic() > deadline:
                raise ChaosFailed(f"waited {RECOVERY_S:.0f} s for {what}")
            time.sleep(0.05)

    def _rows(self) -> list[str]:
        return [name.decode() for name in self.store.client.hkeys(self.queue.prefix + "rows")]

    # --- the ledger

    def settle(self) -> Verdict:
        """Let everybody come to the end, and compare what was counted where."""
        if not self.crowd.finish(RECOVERY_S):
            raise ChaosFailed("some clients were never told an ending")
        self._until(self._quiet, "nothing to be open any more")
        ids = set(self._rows()) - self.before
        usage = [row for row in self._usage() if row["id"] in ids]
        tokens = self._tokens(ids, usage)
        entries = Counter(row["id"] for row in usage)
        ledger = checker.check(self.store, self.queue, ids, tokens, entries)
        self._leases(ledger)
        self._holds(ledger, {row["org_id"] for row in usage})
        self._clients(ledger, ids)
        self._endings(ledger)
        self._bills(ledger, usage)
        return self._verdict(ledger, ids, tokens)

    def _quiet(self) -> bool:
        depth = self.store.run(self.queue.tick())
        left = self.store.client.xlen(self.queue.prefix + "usage")
        return not any(depth.waiting) and depth.running == 0 and left == 0 and depth.workers == self.ground.workers

    def _usage(self) -> list[Mapping[str, Any]]:
        engine = postgres.connect(self.ground.database_url)
        try:
            with postgres.transaction(engine) as connection:
                words = "SELECT event_id::text AS id, org_id::text, outcome, output_tokens FROM usage_events"
                return [dict(row) for row in connection.execute(postgres.text(words)).mappings()]
        finally:
            engine.dispose()

    def _tokens(self, ids: set[str], usage: Sequence[Mapping[str, Any]]) -> dict[str, Tokens]:
        emitted = Counter(line for file in self.ground.tally.iterdir() for line in file.read_text().splitlines())
        billed = {row["id"]: int(row["output_tokens"]) for row in usage}
        shown = {visit.request_id: visit for visit in self.crowd.visits}
        return {
            name: Tokens(
                emitted=emitted[name],
                billed=billed.get(name, 0),
                relayed=len(shown[name].text) if name in shown else 0,
                left=name not in shown or shown[name].left,
            )
            for name in ids
        }

    def _leases(self, ledger: Ledger) -> None:
        """Of nobody but the workers that are there."""
        leases = {name.decode() for name in self.store.client.zrange(self.queue.prefix + "leases", 0, -1)}
        ledger.fault(leases != {row.worker for row in self._ready()}, f"leases of {sorted(leases)}")

    def _holds(self, ledger: Ledger, org_ids: set[str]) -> None:
        """No organisation is held to what it has ended."""
        for prefix in (tag("org:" + org_id) for org_id in org_ids):
            self._until_zero(ledger, f"{prefix} open holds", command("ZCARD", prefix + "open", reply=int))
            for key in self.store.client.scan_iter(prefix + "used:*"):
                running = command("HGET", key, "running", reply=lambda raw: int(raw or 0))
                self._until_zero(ledger, f"{key.decode()} running", running)

    def _until_zero(self, ledger: Ledger, what: str, call: Any) -> None:
        with suppress(ChaosFailed):
            self._until(lambda: self.store.run(call) == 0, what)
        left = self.store.run(call)
        ledger.fault(left != 0, f"{what}: {left}")

    def _clients(self, ledger: Ledger, ids: set[str]) -> None:
        """Every one was told one ending, and shown nothing but the engine's text; nobody else's request was run."""
        ledger.faults += list(self.crowd.faults())
        told = {visit.request_id for visit in self.crowd.visits if visit.request_id}
        ledger.fault(bool(told - ids), f"accepted and unknown: {sorted(told - ids)}")
        stray = len(ids - told)
        ledger.fault(stray > self.crowd.unsure(), f"{stray} requests of nobody, {self.crowd.unsure()} tries in doubt")

    def _endings(self, ledger: Ledger) -> None:
        """What a client was told is what the queue says."""
        for visit in self.crowd.visits:
            if visit.left or not visit.request_id:
                continue
            ending = self.store.run(self.queue.peek(visit.request_id)).ending
            outcomes = [Outcome.WORKER_LOST if end in LOST else end for end in visit.ends]
            said = f"{visit.request_id} was told {visit.ends} and ended {ending}"
            ledger.fault(ending is None or outcomes != [ending.outcome], said)

    def _bills(self, ledger: Ledger, usage: Sequence[Mapping[str, Any]]) -> None:
        for row in usage:
            ending = self.store.run(self.queue.peek(row["id"])).ending
            said = (row["outcome"], row["output_tokens"])
            kept = (ending.outcome, ending.usage.output_tokens) if ending else None
            ledger.fault(said != kept, f"{row['id']} ended {kept} and is billed {said}")

    def _verdict(self, ledger: Ledger, ids: set[str], tokens: Mapping[str, Tokens]) -> Verdict:
        columns = Counter[str]()
        for name, count in ledger.outcomes.items():
            columns[COLUMNS.get(name, "open")] += count
        ended = columns.total() - columns["open"]
        ledger.fault(ended != len(ids), f"{len(ids)} sent, {ended} ended")
        attempts = Counter(self.store.run(self.queue.peek(name)).attempt for name in ids)
        self.store.close()
        return Verdict(
            seed=self.seed,
            seconds=round(time.monotonic() - self.began_s, 1),
            happened=dict(self.happened),
            sent=len(ids),
            **{name: columns[name] for name in ("finished", "cancelled", "expired", "dead", "lost")},
            returns=sum(visit.returns for visit in self.crowd.visits),
            attempts=dict(sorted(attempts.items())),
            refused=dict(self.crowd.refusals()),
            relayed_tokens=sum(one.relayed for one in tokens.values()),
            billed_tokens=sum(one.billed for one in tokens.values()),
            emitted_tokens=sum(one.emitted for one in tokens.values()),
            faults=ledger.faults,
        )
