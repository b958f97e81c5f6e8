"""`forebay bench limits`: what a call of the limiter costs, how much gets past it, and how much of a limit is used.

All on a Valkey of its own and with the scripts as they are; where minutes pass, the clock that they are told runs fast.

    us_per_call          server time per call (INFO commandstats, the least of several rounds: whoever else is busy only
                         adds), mean of reserve, progress and settle, for so many scopes with a full window of 121 bins;
                         us_by_verb: of each, of one of a hundred reports in one call, and of `refused`: all scopes are
                         full, and half of their bins are looked through for when they are not
    calls_per_s          what the store did in the race, clients and all on this machine
    over_admitted_tokens the race: 64 threads in four processes, three keys, an organisation and a model, all tight; now
                         and then a process is killed. Tokens of the worst 60 seconds beyond limit and stated debt, by
                         the times at which they were made; `race` has what requests and holds were left, too
    mint_tokens          a hold of a minute ago is settled late: tokens that get into a window beyond its limit
    utilisation          tokens processed of those allowed, when more always wait: the least of four mixes, of short
                         answers and long ones, with and without a length that their clients name; utilisation_by_mix:
                         of each, with spoken_for: what is held as well, and debt_tokens
    streams_cut_by_rate  of all those streams
    gateways_1_vs_4      tokens admitted in three minutes by one process, and by four
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections import Counter as Tally
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import redis

from core.limits import pace
from core.limits.counters import (
    REPORT_MAX,
    Need,
    Refused,
    Report,
    Reserved,
    hold_key,
    open_before,
    progress,
    reserve,
    settle,
    used,
)
from core.redis import Call, Store
from core.values import Limit, Usage
from ops import prepare, stores
from ops.bench.limits_clients import LIMITS, ORG, TOLD_CLOCK, Line, Told, fast_clock, read
from ops.bench.report import Found, Say

WINDOW_MS, BIN_MS = 60_000, 500
SCOPES = (1, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Options:
    rounds: int = 12  #: of each measurement of a script; the least counts
    race_s: float = 20.0
    kills: int = 12  #: of client processes
    minutes: int = 8  #: simulated, of each mix
    seed: int = 1


def figures(options: Options, say: Say) -> Found:
    """Our figures. Peers: none that can be driven without a gateway of theirs; what they mint ours does not."""
    with tempfile.TemporaryDirectory(prefix="fb-", ignore_cleanup_errors=True) as folder:
        server = stores.start_valkey(Path(folder))
        store = Store.connect(server.url)
        try:
            found = _measured(server.url, store, Path(folder), options, say)
        finally:
            store.close()
            server.stop()
    return found, {}


def _measured(url: str, store: Store, folder: Path, options: Options, say: Say) -> dict[str, Any]:
    say("What a call costs the store, with a full window")
    by_verb = {str(n): _us_by_verb(store, n, options.rounds) for n in SCOPES}
    say("A race of 64 threads, with kills")
    raced = race(url, folder, seconds=options.race_s, kills=options.kills, seed=options.seed)
    say("One gateway, and four")
    totals = {str(n): _admitted(url, n) for n in (1, 4)}
    told = Told(Store.connect(url, clock=TOLD_CLOCK), 10**12)
    mint_tokens = _minted(told)
    mixes = {}
    for name, mix in MIXES.items():
        say(f"{options.minutes} minutes of streams: {name}")
        mixes[name] = Simulation(told, mix, options.minutes, random.Random(options.seed)).run()
    told.store.close()
    return {
        "us_per_call": {n: round((us["reserve"] + us["progress"] + us["settle"]) / 3, 1) for n, us in by_verb.items()},
        "us_by_verb": by_verb,
        "calls_per_s": raced.calls_per_s,
        "over_admitted_tokens": raced.over_tokens,
        "race": raced.figures(),
        "mint_tokens": mint_tokens,
        "utilisation": min(mix["utilisation"] for mix in mixes.values()),
        "utilisation_by_mix": mixes,
        "streams_cut_by_rate": sum(mix["cut"] for mix in mixes.values()),
        "gateways_1_vs_4": totals,
    }


# --- what a call costs


def _us_by_verb(store: Store, scopes: int, rounds: int) -> dict[str, float]:
    store.client.flushall()
    names = ("key:k", "project:p", "org", *(f"model:{n}" for n in range(5)))[:scopes]
    limits = [Limit(scope=name, requests_per_minute=10**6, tokens_per_minute=10**9) for name in names]
    _fill(store, limits)
    found: dict[str, list[float]] = {}
    for n in range(rounds):
        for verb, calls, parts in _calls(str(n), limits):
            found.setdefault(verb, []).append(_server_us(store, calls) / parts)
    return {verb: round(min(us), 1) for verb, us in found.items()}


def _fill(store: Store, limits: Sequence[Limit]) -> None:
    """Something in every bin of the minute that ends now."""
    told = Told(Store(store.client, clock=TOLD_CLOCK), 0)
    scopes, end_ms = [one.scope for one in limits], int(time.time() * 1000)
    for ago_ms in range(WINDOW_MS + BIN_MS, 0, -BIN_MS):
        told.now_ms = end_ms - ago_ms
        told.run(reserve(ORG, f"fill-{ago_ms}", "k", "m", limits, _need(100, 50)))
        told.run(settle(ORG, f"fill-{ago_ms}", scopes, Usage(input_tokens=100, output_tokens=50), billed=True))


def _need(input_tokens: int, output_tokens: int) -> Need:
    return Need(input_tokens=input_tokens, output_tokens=output_tokens, least_output_tokens=output_tokens)


def _calls(part: str, limits: Sequence[Limit]) -> Iterator[tuple[str, list[Call[Any]], int]]:
    """Of each verb a hundred calls, and how many requests each call is of."""
    scopes, names = tuple(one.scope for one in limits), [f"{part}-{n}" for n in range(REPORT_MAX)]
    full = [Limit(scope=scope, tokens_per_minute=9_000) for scope in scopes]
    reports = [
        Report(
            request_id=name,
            key_id="k",
            scopes=scopes,
            usage=Usage(input_tokens=100, output_tokens=30),
            hold_tokens=170,
            money_tokens=0,
        )
        for name in names
    ]
    usage = Usage(input_tokens=100, output_tokens=60)
    yield "reserve", [reserve(ORG, name, "k", "m", limits, _need(100, 200)) for name in names], 1
    yield "progress", [progress(ORG, [one]) for one in reports], 1
    yield "progress_of_100", [progress(ORG, reports)], len(reports)
    yield "settle", [settle(ORG, name, scopes, usage, billed=True) for name in names], 1
    yield "refused", [reserve(ORG, f"{name}-no", "k", "m", full, _need(100, 200)) for name in names[:20]], 1


def _server_us(store: Store, calls: Sequence[Call[Any]]) -> float:
    """Server time per call."""
    store.run(calls[0])  # every verb may be repeated; so its script is known
    store.client.config_resetstat()
    for call in calls:
        store.run(call)
    told = store.client.info("commandstats")["cmdstat_evalsha"]
    return float(told["usec"]) / int(told["calls"])


# --- the race


@dataclass
class Race:
    calls_per_s: int
    over_tokens: int  #: beyond limit and stated debt, in the worst 60 seconds
    worst: dict[str, tuple[int, int]]  #: scope -> tokens of its worst 60 seconds, and its limit
    debt_tokens: int
    requests: int
    kills: int
    left_open: int
    left_held: int

    def figures(self) -> dict[str, Any]:
        return {
            "requests": self.requests,
            "kills": self.kills,
            "debt_tokens": self.debt_tokens,
            "worst_window": {scope: f"{tokens} of {most}" for scope, (tokens, most) in self.worst.items()},
            "left_open": self.left_open,
            "left_held": self.left_held,
        }


def race(
    url: str,
    folder: Path,
    *,
    seconds: float,
    kills: int,
    seed: int,
    processes: int = 4,
    threads: int = 16,
    speed: int = 30,
) -> Race:
    """Let clients race, and kill their processes at random; then sweep, and look."""
    t0_ms = int(time.time() * 1000)
    store = Store.connect(url, clock=fast_clock(t0_ms, speed))
    store.client.flushall()
    store.client.config_resetstat()
    clients = _Processes(url, folder, t0_ms, speed, threads, t0_ms + int(seconds * 1000), random.Random(seed))
    try:
        clients.start(processes)
        for n in range(kills):
            time.sleep(max(0.0, t0_ms / 1000 + seconds * (n + 1) / (kills + 1) - time.time()))
            clients.kill_one()
        clients.wait()
        calls = int(store.client.info("commandstats")["cmdstat_evalsha"]["calls"])
        lines = clients.lines()
        _sweep(store, lines)
        return _judged(store, _with_debt(store, lines), int(calls / (time.time() - t0_ms / 1000)), kills)
    finally:
        clients.stop()
        store.close()


@dataclass
class _Processes:
    url: str
    folder: Path
    t0_ms: int
    speed: int
    threads: int
    until_ms: int
    rng: random.Random
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)

    def start(self, count: int) -> None:
        for _ in range(count):
            self.files.append(self.folder / f"race-{self.t0_ms}-{len(self.files)}")
            words = (self.url, self.t0_ms, self.speed, len(self.files), self.threads, self.until_ms, self.files[-1])
            argv = [sys.executable, "-m", "ops.bench.limits_clients", *map(str, words)]
            self.running.append(subprocess.Popen(argv, cwd=prepare.ROOT))

    def kill_one(self) -> None:
        victim = self.running.pop(self.rng.randrange(len(self.running)))
        victim.kill()
        victim.wait()
        self.start(1)

    def wait(self) -> None:
        for one in self.running:
            one.wait()

    def stop(self) -> None:
        for one in self.running:
            if one.poll() is None:
                one.kill()
                one.wait()

    def lines(self) -> list[Line]:
        found = [line for path in self.files if path.exists() for line in read(path)]
        return sorted(found, key=lambda line: line.at_ms)


def _sweep(store: Store, lines: Sequence[Line]) -> None:
    """Settle what nobody settled, at what it had made: as the queue, which knows, would."""
    last = {line.request_id: line for line in lines}
    scopes = {name: line.scopes for name, line in last.items()}
    for name in store.run(open_before(ORG, 2**53)):
        line = last.get(name)
        usage = Usage(output_tokens=line.output, input_tokens=line.tokens - line.output) if line else Usage()
        its = scopes.get(name) or tuple(
            store.client.hget(f"f1:{{org:{ORG}}}:hold:{name}", "scopes").decode().split(",")
        )
        store.run(settle(ORG, name, its, usage, billed=False))


def _with_debt(store: Store, lines: Sequence[Line]) -> list[Line]:
    """The debt that a hold states and its client did not live to write down goes with the last that it wrote."""
    untold = Tally({line.request_id: 0 for line in lines})
    for name in untold:
        untold[name] = int(store.client.hget(hold_key(ORG, name), "debt") or 0)
    for line in lines:
        untold[line.request_id] -= line.debt
    last = {line.request_id: n for n, line in enumerate(lines)}
    return [
        replace(line, debt=line.debt + untold[line.request_id]) if last[line.request_id] == n else line
        for n, line in enumerate(lines)
    ]


def _judged(store: Store, lines: Sequence[Line], calls_per_s: int, kills: int) -> Race:
    worst, over_tokens = {}, 0
    for scope, limit in LIMITS.items():
        most = limit.tokens_per_minute or 0
        tokens, beyond = _worst_window([line for line in lines if scope in line.scopes], most)
        worst[scope], over_tokens = (tokens, most), max(over_tokens, beyond)
    left = store.run(used(ORG, list(LIMITS.values())))
    return Race(
        calls_per_s=calls_per_s,
        over_tokens=over_tokens,
        worst=worst,
        debt_tokens=sum(line.debt for line in lines),
        requests=len({line.request_id for line in lines}),
        kills=kills,
        left_open=sum(one.open for one in left) + len(store.run(open_before(ORG, 2**53))),
        left_held=sum(one.held_tokens for one in left),
    )


def _worst_window(lines: Sequence[Line], most: int) -> tuple[int, int]:
    """Most tokens of any 60 seconds by the times at which they were made, and the most beyond limit and debt."""
    so_far, window = Tally[str](), deque[tuple[int, int, int]]()
    tokens = debt = worst = beyond = 0
    for line in lines:
        more = max(0, line.tokens - so_far[line.request_id])
        so_far[line.request_id] += more
        window.append((line.at_ms, more, line.debt))
        tokens, debt = tokens + more, debt + line.debt
        while window[0][0] <= line.at_ms - WINDOW_MS:
            _, gone, gone_debt = window.popleft()
            tokens, debt = tokens - gone, debt - gone_debt
        worst, beyond = max(worst, tokens), max(beyond, tokens - debt - most)
    return worst, beyond


# --- what is minted, and by how many


def _minted(told: Told) -> int:
    """A hold of 9,000 of 10,000; a minute later others ask for as many, before and after it is settled at 100."""
    told.store.client.flushall()
    limits, admitted = [Limit(scope="key:k", tokens_per_minute=10_000)], 0
    told.run(reserve(ORG, "first", "k", "m", limits, _need(0, 9_000)))
    told.now_ms += WINDOW_MS + BIN_MS
    for n in range(6):
        if n == 3:
            told.run(settle(ORG, "first", ["key:k"], Usage(output_tokens=100), billed=True))
            admitted += 100
        name = f"next-{n}"
        if isinstance(told.run(reserve(ORG, name, "k", "m", limits, _need(0, 9_000))), Reserved):
            told.run(settle(ORG, name, ["key:k"], Usage(output_tokens=9_000), billed=True))
            admitted += 9_000
    return max(0, admitted - 10_000)


def _admitted(url: str, processes: int) -> int:
    """Tokens that so many clients get in three minutes of their common clock, of 10,000 a minute."""
    client = redis.Redis.from_url(url)
    client.flushall()
    client.close()
    argv = [sys.executable, "-c", "import sys; from ops.bench.limits_clients import hammer; hammer(*sys.argv[1:])", url]
    running = [
        subprocess.Popen([*argv, str(n)], cwd=prepare.ROOT, stdout=subprocess.PIPE, text=True) for n in range(processes)
    ]
    return sum(int(one.communicate()[0]) for one in running)


# --- how much of a limit is used


@dataclass(frozen=True, kw_only=True)
class Mix:
    """What is asked for. All of it gets its turn; what a seed draws is the same each time."""

    output: tuple[int, int]  #: tokens of an answer, from and to
    pace: tuple[int, int] = (30, 90)  #: tokens a second
    input: tuple[int, int] = (20, 400)
    unnamed: float = 0.0  #: of them so many name no limit, and hold what such answers usually come to


MIXES = {
    "short": Mix(output=(20, 400)),
    "unnamed": Mix(output=(20, 400), unnamed=1.0),
    "mixed": Mix(output=(20, 3_000), unnamed=0.3),
    "long": Mix(output=(3_000, 9_000)),
}
#: The fastest answer's pace, and the limit: a hundred of its answers at once.
FASTEST, TPM = 90.0, 300_000
STEP_MS, REPORT_MS = 250, 1_000
#: How many wait and ask again, so that some of them is small enough for what is free.
WAITING = 6


@dataclass
class Stream:
    name: str
    mix_output: int  #: what it comes to
    most: int  #: what it may
    input: int
    pace: float
    usual: int  #: what such answers come to, if its client named no limit; else 0
    began_ms: int = 0
    made: int = 0
    reported: int = 0
    reported_ms: int = 0

    def report(self, now_ms: int) -> Report:
        age_s, since_s = (now_ms - self.began_ms) / 1000, (now_ms - self.reported_ms) / 1000
        its_pace = pace.measured(FASTEST, age_s, self.made, since_s, self.made - self.reported)
        hold = pace.likely(its_pace, self.most - self.made, max(self.usual - self.made, 1) if self.usual else 0)
        self.reported, self.reported_ms = self.made, now_ms
        usage = Usage(input_tokens=self.input, output_tokens=self.made)
        return Report(
            request_id=self.name,
            key_id="k",
            scopes=("key:k",),
            usage=usage,
            hold_tokens=hold,
            money_tokens=0,
            pace=its_pace,
        )


@dataclass
class Simulation:
    """Streams as workers run them: tokens come at a pace, a report a second, and somebody always waits."""

    told: Told
    mix: Mix
    minutes: int
    rng: random.Random
    waiting: list[Stream] = field(default_factory=list)
    running: list[Stream] = field(default_factory=list)
    ended: int = 0
    cut: int = 0
    debt: int = 0
    n: int = 0

    def run(self) -> dict[str, Any]:
        self.told.store.client.flushall()
        limit = Limit(scope="key:k", tokens_per_minute=TPM)
        begin_ms, shares, spoken_for = self.told.now_ms, list[float](), list[float]()
        while self.told.now_ms < begin_ms + (self.minutes + 2) * WINDOW_MS:
            self.told.now_ms += STEP_MS
            self._generate()
            self._admit(limit)
            if self.told.now_ms >= begin_ms + 2 * WINDOW_MS and self.told.now_ms % REPORT_MS == 0:
                [one] = self.told.run(used(ORG, [limit]))
                tokens = one.input_tokens + one.output_tokens
                shares.append(tokens * WINDOW_MS / (WINDOW_MS + BIN_MS / 2) / TPM)
                spoken_for.append((tokens + one.held_tokens) / TPM)
        return {
            "utilisation": round(sum(shares) / len(shares), 3),
            "spoken_for": round(sum(spoken_for) / len(spoken_for), 3),
            "streams": self.ended,
            "cut": self.cut,
            "debt_tokens": self.debt,
        }

    def _generate(self) -> None:
        now_ms, due = self.told.now_ms, list[Stream]()
        for one in list(self.running):
            one.made = min(one.mix_output, int(one.pace * (now_ms - one.began_ms) / 1000))
            if one.made == one.mix_output:
                self._end(one)
            elif now_ms - one.reported_ms >= REPORT_MS:
                due.append(one)
        for at in range(0, len(due), REPORT_MAX):
            part = due[at : at + REPORT_MAX]
            for leash in self.told.run(progress(ORG, [one.report(now_ms) for one in part])):
                self.debt += leash.debt_tokens
                self.cut += not leash.open or leash.allowance_tokens is not None

    def _end(self, one: Stream) -> None:
        usage = Usage(input_tokens=one.input, output_tokens=one.made)
        self.told.run(settle(ORG, one.name, ["key:k"], usage, billed=True))
        self.running.remove(one)
        self.ended += 1

    def _admit(self, limit: Limit) -> None:
        """Whoever fits goes; those who do not ask again at the next step."""
        while True:
            while len(self.waiting) < WAITING:
                self.waiting.append(self._stream())
            gone = [one for one in self.waiting if self._begin(one, limit)]
            self.waiting = [one for one in self.waiting if one not in gone]
            if not gone:
                return

    def _stream(self) -> Stream:
        self.n += 1
        output = self.rng.randint(*self.mix.output)
        unnamed = self.rng.random() < self.mix.unnamed
        most = self.mix.output[1] if unnamed else output
        return Stream(
            name=f"s{self.n}",
            mix_output=output,
            most=most,
            input=self.rng.randint(*self.mix.input),
            pace=self.rng.uniform(*self.mix.pace),
            usual=int(self.mix.output[0] + 0.95 * (self.mix.output[1] - self.mix.output[0])) if unnamed else 0,
        )

    def _begin(self, one: Stream, limit: Limit) -> bool:
        likely = pace.likely(FASTEST, one.most, one.usual)
        least = 1 if one.usual else pace.in_window(FASTEST, likely)
        need = Need(input_tokens=one.input, output_tokens=likely, least_output_tokens=least, pace=FASTEST)
        if isinstance(self.told.run(reserve(ORG, one.name, "k", "m", [limit], need)), Refused):
            return False
        one.began_ms = one.reported_ms = self.told.now_ms
        self.running.append(one)
        return True
