"""`forebay bench prefix`: how much of what was computed before is found again, and at what cost to balance.

The Mooncake traces (a chat service's and a synthetic one's; prompts of 12,000 tokens, as the ids of their blocks) on a
fleet of simulated engines (ops/bench/simulated.py) in virtual time. Everything in front of the engines is ours and
real: block hashes of real token ids, the index of prefixes and the queue's scripts on a Valkey of their own, whose
clock is the simulation's, the router's decisions. A worker claims as the runner does (tasks/runner.py): when it is
woken, when something ended, when it was told to; each exchange takes EXCHANGE_MS. Beside it the same engines without a
queue, each request sent on as it arrives: to the next engine, or to the one with the fewest tokens to compute.

    cached share of clairvoyant   prompt tokens found in a cache, over those that would be found if the same engines
                                  had one cache in common, as large as all of theirs: wherever a request is placed, it
                                  finds what any of them has computed, and nothing is kept twice. No placement does
                                  better, but for the luck of what least-recently-used evicts
    imbalance                     tokens computed by the busiest engine, over the mean
    ttft ms                       from arrival to the first token

Arrivals are the trace's, in time so scaled that the fleet works at `load` of what it can do under least_loaded; its
three-second ticks are spread out. Of the two traces' figures the worse one is shown; `traces` has both.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import tempfile
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from core import settings
from core.catalog import EngineKnobs, Model, StepProfile
from core.prefix import HOLD_MS, chain, checkpoints, depths, hold, holders
from core.redis import Call, Store, command
from core.values import Outcome, Usage
from ops import stores
from ops.bench.load import quantile
from ops.bench.platform import BenchFailed
from ops.bench.report import Found, Say
from ops.bench.simulated import BlockCache, Job, Profile, SimulatedEngine
from tasks.queue import SCAN, STEAL_MS, Claim, Queue, Room, Task
from tasks.runner import AGAIN_S, CLAIM_MAX, IDLE_S, PASSED_S
from web.router import prefer
from workers import headroom
from workers.engine import EngineFacts

TRACES = ("conversation", "synthetic")
#: The traces' blocks; and the engine's, of which hashes are made.
TRACE_BLOCK_TOKENS = 512
BLOCK_TOKENS = 16
#: One exchange with the store, virtual ms.
EXCHANGE_MS = 1.0
#: More than any prompt of the traces.
CONTEXT_TOKENS = 200_000
#: Nobody's lease runs out, ms.
LEASE_MS = 10**9
MODEL = "bench"
#: The time that scripts see is the simulation's.
CLOCK = "local function now_ms() return tonumber(redis.call('GET', 'clock') or '0') end\n"
BEGIN_MS = 1_000_000
#: 8B in bfloat16.
H100 = Profile()


@dataclass(frozen=True, kw_only=True)
class Options:
    requests: int = 3000  #: of each trace, from its beginning
    workers: int = 8
    load: float = 0.7
    scan: int = SCAN
    steal_ms: int = STEAL_MS
    hold_ms: int = HOLD_MS
    profile: Profile = H100


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A line of a trace."""

    at_ms: float
    input_tokens: int
    output_tokens: int
    hashes: tuple[int, ...]  #: of its whole blocks


def figures(options: Options, say: Say) -> Found:
    """Our figures, and those of round_robin and least_loaded."""
    found = {name: _of_trace(name, options, say) for name in TRACES}
    worst = {
        who: _worst([by_name[who] for by_name in found.values()]) | {"traces": {n: f[who] for n, f in found.items()}}
        for who in ("forebay", "round_robin", "least_loaded")
    }
    return worst.pop("forebay"), worst


def _worst(figures: Sequence[dict[str, float]]) -> dict[str, Any]:
    least = min(one["cached_share_of_clairvoyant"] for one in figures)
    rest = ("imbalance", "ttft_ms_p50", "ttft_ms_p99")
    return {"cached_share_of_clairvoyant": least} | {name: max(one[name] for one in figures) for name in rest}


def _of_trace(name: str, options: Options, say: Say) -> dict[str, dict[str, float]]:
    prompts = read(name, options.requests)
    say(f"{name}: {len(prompts)} requests, hashing their prompts")
    marks = [_marks(prompt) for prompt in prompts]
    full = _saturated(prompts, options)
    prompts = _at_load(prompts, full / options.load)
    say(f"{name}: over {prompts[-1].at_ms / 1000:.0f} s, beside fleets without a queue")
    fleets: dict[str, Fleet] = {"round_robin": RoundRobin(options), "least_loaded": LeastLoaded(options)}
    best = sum(job.cached_tokens for job in Clairvoyant(options).run(prompts))
    with tempfile.TemporaryDirectory(prefix="fb-", ignore_cleanup_errors=True) as folder:
        server = stores.start_valkey(Path(folder))
        store = Store(redis.Redis.from_url(server.url), clock=CLOCK)  # which waits as long as it takes
        try:
            fleets["forebay"] = Queued(options, store, marks)
            return {who: _figures(fleet.run(prompts), fleet, best) for who, fleet in fleets.items()}
        finally:
            store.close()
            server.stop()


def _figures(jobs: Sequence[Job], fleet: Fleet, best: int) -> dict[str, float]:
    waits_ms = array("d", [job.first_ms - job.arrived_ms for job in jobs])
    computed = [engine.computed_tokens for engine in fleet.engines]
    cached = sum(job.cached_tokens for job in jobs)
    return {
        "cached_share_of_clairvoyant": round(cached / best, 3),
        "imbalance": round(max(computed) * len(computed) / sum(computed), 3),
        "ttft_ms_p50": round(quantile(waits_ms, 0.5), 1),
        "ttft_ms_p99": round(quantile(waits_ms, 0.99), 1),
        "cached_share": round(cached / sum(job.input_tokens for job in jobs), 3),
    }


# --- the trace


def read(name: str, requests: int) -> list[Prompt]:
    """The first lines of a trace.

    Raises:
      BenchFailed: it is not there.
    """
    path = settings.read(os.environ).traces / f"mooncake_{name}.jsonl"
    try:
        with path.open() as lines:
            rows = [json.loads(line) for line in itertools.islice(lines, requests)]
    except OSError as e:
        raise BenchFailed(f"{path}: {e.strerror}. FOREBAY_TRACES names the folder of the traces.") from None
    return [
        Prompt(
            at_ms=float(row["timestamp"]), input_tokens=row["input_length"], output_tokens=max(1, row["output_length"]),
            hashes=tuple(row["hash_ids"][: row["input_length"] // TRACE_BLOCK_TOKENS]),
        )
        for row in rows
    ]  # fmt: skip


def _marks(prompt: Prompt) -> tuple[bytes, ...]:
    """The checkpoints of token ids that are equal where the trace's blocks are."""
    tokens = [block for block in prompt.hashes for _ in range(TRACE_BLOCK_TOKENS)]
    return checkpoints(chain(tokens, BLOCK_TOKENS, "salt"))


def _at_load(prompts: Sequence[Prompt], span_ms: float) -> list[Prompt]:
    """The same in `span_ms`, those of one tick spread over the time to the next."""
    ticks = [(at_ms, list(group)) for at_ms, group in itertools.groupby(prompts, lambda prompt: prompt.at_ms)]
    ends = [at_ms for at_ms, _ in ticks[1:]] + [ticks[-1][0] + 3000]
    scale, spread = span_ms / ends[-1], []
    for (begin, group), end in zip(ticks, ends, strict=True):
        step = (end - begin) / len(group)
        for n, prompt in enumerate(group):
            at_ms = (begin + n * step) * scale
            spread.append(Prompt(**(vars(prompt) | {"at_ms": at_ms})))
    return spread


def _saturated(prompts: Sequence[Prompt], options: Options) -> float:
    """How long the fleet is busy with all of it, ms."""
    fleet = LeastLoaded(options)
    fleet.run([Prompt(**(vars(prompt) | {"at_ms": 0.0})) for prompt in prompts])
    return sum(engine.busy_ms for engine in fleet.engines) / len(fleet.engines)


def _job(n: int, prompt: Prompt) -> Job:
    return Job(
        n=n, arrived_ms=prompt.at_ms, input_tokens=prompt.input_tokens, output_tokens=prompt.output_tokens,
        hashes=prompt.hashes,
    )  # fmt: skip


# --- fleets


class Fleet:
    """Engines in virtual time. Who gets a request is what the kinds differ in."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.engines = [SimulatedEngine(n, options.profile, TRACE_BLOCK_TOKENS) for n in range(options.workers)]
        self.now_ms = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def run(self, prompts: Sequence[Prompt]) -> list[Job]:
        """All of it, from the first arrival to the last token."""
        jobs = [_job(n, prompt) for n, prompt in enumerate(prompts)]
        for job in jobs:
            self.at(job.arrived_ms, lambda job=job: self.arrive(job))  # type: ignore[misc]
        while self._events:
            self.now_ms, _, act = heapq.heappop(self._events)
            act()
        if unfinished := sum(not job.first_ms for job in jobs):
            raise BenchFailed(f"{unfinished} requests were never run.")
        return jobs

    def at(self, at_ms: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_ms, next(self._order), act))

    def arrive(self, job: Job) -> None:
        """A request has come."""
        raise AssertionError("each kind of fleet says who gets it")

    def ended(self, engine: SimulatedEngine, jobs: Sequence[Job]) -> None:
        """The engine is done with these."""

    def stepped(self, engine: SimulatedEngine) -> None:
        """A step is over."""

    def submit(self, engine: SimulatedEngine, job: Job) -> None:
        engine.submit(job)
        if not engine.stepping:
            self._step(engine)

    def _step(self, engine: SimulatedEngine) -> None:
        took_ms = engine.begin()
        if took_ms:
            self.at(self.now_ms + took_ms, lambda: self._stepped(engine))

    def _stepped(self, engine: SimulatedEngine) -> None:
        ended = engine.end(self.now_ms)
        if ended:
            self.ended(engine, ended)
        self.stepped(engine)
        self._step(engine)


class RoundRobin(Fleet):
    def arrive(self, job: Job) -> None:
        self.submit(self.engines[job.n % len(self.engines)], job)


class LeastLoaded(Fleet):
    """To the engine with the fewest tokens in hand, of prompts and of answers to come."""

    def arrive(self, job: Job) -> None:
        def load(engine: SimulatedEngine) -> int:
            return sum(each.tokens for each in engine.jobs)

        self.submit(min(self.engines, key=load), job)


class Clairvoyant(LeastLoaded):
    """Every engine finds what any of them has computed."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        one = BlockCache(options.workers * options.profile.kv_tokens // TRACE_BLOCK_TOKENS, TRACE_BLOCK_TOKENS)
        for engine in self.engines:
            engine.cache = one


@dataclass(eq=False)
class Worker:
    """What a worker's runner knows."""

    engine: SimulatedEngine
    name: str
    shape: headroom.Shape
    prefill: headroom.Prefill
    claims: dict[int, Claim] = field(default_factory=dict)  #: by job
    waits: str = ""  #: "marker": blocked on its wake keys, "change": until something ended; "": an exchange is on
    timer: int = 0  #: the latest wait; older timers are void


def _worker(engine: SimulatedEngine) -> Worker:
    profile = engine.profile
    model = Model(
        context_tokens=CONTEXT_TOKENS, slots=profile.slots, step=StepProfile(prefill_ms=profile.prefill_ms),
        engine=EngineKnobs(batched_tokens=profile.batched_tokens),
    )  # fmt: skip
    facts = EngineFacts(slots=profile.slots, context_tokens=CONTEXT_TOKENS, kv_tokens=profile.kv_tokens)
    return Worker(
        engine, f"w{engine.number}", shape=headroom.Shape.of(facts, model), prefill=headroom.unmeasured(model)
    )


def _in_hand(job: Job) -> headroom.InHand:
    output_tokens = job.output_tokens // 2 if job.first_ms else 0  # half way, on average
    return headroom.InHand(
        id=str(job.n), input_tokens=job.input_tokens, cached_tokens=job.cached_tokens, output_tokens=output_tokens,
        expected_tokens=job.output_tokens, prefilled=job.first_ms > 0,
    )  # fmt: skip


class Queued(Fleet):
    """Ours: gateways and workers that meet in the queue."""

    def __init__(self, options: Options, store: Store, marks: Sequence[Sequence[bytes]]) -> None:
        super().__init__(options)
        self.store, self.marks = store, marks
        store.client.flushall()
        self.queue = Queue(MODEL)
        self.workers = {f"w{engine.number}": _worker(engine) for engine in self.engines}
        self.jobs: dict[str, Job] = {}
        self.markers: set[str] = set()  #: wake keys that hold one
        self.blocked: list[Worker] = []  #: on their wake keys, longest first
        self.unended = 0
        self._nonces = itertools.count()

    def run(self, prompts: Sequence[Prompt]) -> list[Job]:
        self.unended = len(prompts)
        for worker in self.workers.values():
            self.at(0.0, lambda worker=worker: self._claim(worker))  # type: ignore[misc]
        return super().run(prompts)

    def _run(self, *calls: Call[Any]) -> list[Any]:
        """At the simulation's time."""
        clock = command("SET", "clock", BEGIN_MS + int(self.now_ms), reply=bool)
        return self.store.run_all([clock, *calls])[1:]

    # --- the gateway

    def arrive(self, job: Job) -> None:
        marks, blocks = self.marks[job.n], job.input_tokens // BLOCK_TOKENS
        [held] = self._run(holders(MODEL, marks))
        at = depths(len(job.hashes) * TRACE_BLOCK_TOKENS // BLOCK_TOKENS)
        route = prefer(blocks, at, held, self.workers, block_ms=BLOCK_TOKENS * self.options.profile.prefill_ms)
        name = f"r{job.n}"
        self.jobs[name] = job
        task = Task(
            id=name, message=b"m", input_tokens=job.input_tokens, need_tokens=job.tokens, most_tokens=job.tokens,
            preferred=route.preferred, steal_ms=route.steal_ms,
        )  # fmt: skip
        self._run(self.queue.enqueue(task))
        self._wake(route.preferred)

    def _wake(self, preferred: Sequence[str] = ()) -> None:
        """Hand the markers that a script left to whoever is blocked on them, as the store would."""
        keys = [self.queue.wake_key, *map(self.queue.wake_key_of, preferred)]
        popped = self._run(*(command("ZPOPMIN", key, reply=bool) for key in keys))
        self.markers |= {key for key, there in zip(keys, popped, strict=True) if there}
        for worker in list(self.blocked):
            if self._woken(worker):
                self.blocked.remove(worker)
                self._claim_soon(worker)

    def _woken(self, worker: Worker) -> bool:
        for key in (self.queue.wake_key_of(worker.name), self.queue.wake_key):
            if key in self.markers:
                self.markers.remove(key)
                return True
        return False

    # --- the worker

    def _claim_soon(self, worker: Worker) -> None:
        worker.waits = ""
        worker.timer += 1
        self.at(self.now_ms + EXCHANGE_MS, lambda: self._claim(worker))

    def _claim(self, worker: Worker) -> None:
        engine = worker.engine
        want = min(self.options.profile.slots - len(engine.jobs), CLAIM_MAX)
        if want <= 0:
            return self._wait(worker, "change", IDLE_S * 1000)
        call = self.queue.claim(
            worker.name, want, lease_ms=LEASE_MS, nonce=f"n{next(self._nonces)}", room=self._room(worker)
        )
        [claimed] = self._run(call)
        for claim in claimed.claims:
            self._begin(worker, claim)
        if claimed.claims:
            self._wake()
        if claimed.passed:
            again_s = headroom.again_s(worker.shape, worker.prefill)
            self._wait(worker, "change", min(max(again_s, AGAIN_S), PASSED_S) * 1000)
        elif claimed.claims or self._woken(worker):
            self._claim_soon(worker)
        else:
            self._wait(worker, "marker", min(claimed.due_ms, IDLE_S * 1000) if claimed.due_ms >= 0 else IDLE_S * 1000)
        return None

    def _room(self, worker: Worker) -> Room:
        in_hand = self._look(worker)
        free = headroom.headroom(worker.shape, worker.engine.stats(), in_hand, worker.prefill)
        return Room(**vars(free), steal_ms=self.options.steal_ms, scan=self.options.scan)

    def _look(self, worker: Worker) -> list[headroom.InHand]:
        """As workers/main.py does: what is known of the prompts in hand is brought up to now."""
        jobs, before = worker.engine.jobs, worker.prefill.waiting
        waiting = {str(job.n): job.input_tokens for job in jobs if not job.first_ms}
        done = sum(job.input_tokens - job.cached_tokens for job in jobs if job.first_ms and str(job.n) in before)
        worker.prefill = headroom.advance(worker.prefill, self.now_ms / 1000, waiting, done, worker.shape.step_tokens)
        return [_in_hand(job) for job in jobs]

    def stepped(self, engine: SimulatedEngine) -> None:
        """First tokens make room for other prompts."""
        worker = self.workers[f"w{engine.number}"]
        begun = {str(job.n) for job in engine.jobs if not job.first_ms}
        if worker.prefill.waiting.keys() - begun:
            self._look(worker)
            if worker.waits == "change":
                self._claim_soon(worker)

    def _begin(self, worker: Worker, claim: Claim) -> None:
        job = self.jobs.pop(claim.id)
        worker.claims[job.n] = claim
        self._run(hold(MODEL, worker.name, self.marks[job.n], hold_ms=self.options.hold_ms))
        self.submit(worker.engine, job)

    def _wait(self, worker: Worker, what: str, most_ms: float) -> None:
        if not self.unended:
            return
        worker.waits = what
        worker.timer += 1
        if what == "marker":
            self.blocked.append(worker)
        timer = worker.timer
        self.at(self.now_ms + max(most_ms, 1.0), lambda: self._waited(worker, timer))

    def _waited(self, worker: Worker, timer: int) -> None:
        if worker.timer != timer:
            return
        if worker in self.blocked:
            self.blocked.remove(worker)
        self._claim(worker)

    def ended(self, engine: SimulatedEngine, jobs: Sequence[Job]) -> None:
        worker = self.workers[f"w{engine.number}"]
        self.unended -= len(jobs)
        for job in jobs:
            usage = Usage(input_tokens=job.input_tokens, output_tokens=job.output_tokens)
            self._run(self.queue.finish(worker.name, worker.claims.pop(job.n), Outcome.COMPLETED, usage))
        if worker.waits == "change":
            self._claim_soon(worker)
