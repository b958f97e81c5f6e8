"""Clients of the limiter for a race: threads that reserve, report, settle, repeat themselves and give up, at random.

    python -m ops.bench.limits_clients URL T0_MS SPEED SEED THREADS UNTIL_MS FILE

The store's clock runs SPEED times as fast from T0_MS on. What is generated is written to FILE before it is reported, a
line each, so that a process may be killed at any moment and it is known what it made.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from core.limits.counters import Need, Report, Reserved, progress, reserve, settle
from core.redis import Call, Store
from core.values import Limit, Usage

ORG = "race"
KEYS = 3
#: Tight: a handful of requests fills each.
LIMITS = {
    **{f"key:{n}": Limit(scope=f"key:{n}", tokens_per_minute=5_000, concurrent_requests=12) for n in range(KEYS)},
    "org": Limit(scope="org", tokens_per_minute=9_000, requests_per_minute=400, concurrent_requests=24),
    "model:m": Limit(scope="model:m", tokens_per_minute=8_000, output_tokens_per_minute=6_000),
}
#: How long one that was refused waits, and one that generates between two reports, seconds.
PAUSE_S = 0.004
#: How often the clock ticks that several processes share, of its own time.
TICK_MS = 100


#: Takes the time from the call.
TOLD_CLOCK = "local told_ms = tonumber(table.remove(ARGV))\nlocal function now_ms() return told_ms end\n"
#: The same for several who tell it. As a store's own it never goes back, though one of them was stopped on its way.
SHARED_CLOCK = """
local told_ms = math.max(tonumber(table.remove(ARGV)), tonumber(redis.call('GET', 'told_ms') or '0'))
redis.call('SET', 'told_ms', string.format('%.0f', told_ms))
local function now_ms() return told_ms end
"""

T = TypeVar("T")


@dataclass
class Told:
    """A store that is told the time."""

    store: Store
    now_ms: int

    def run(self, call: Call[T]) -> T:
        return self.store.run(replace(call, args=(*call.args, str(self.now_ms))))


def hammer(url: str, who: str) -> None:
    """Ask for a hundred tokens as often as the clock ticks, whoever's turn it is; print what was admitted."""
    told, admitted = Told(Store.connect(url, clock=SHARED_CLOCK), 0), 0
    limits = [Limit(scope="key:k", tokens_per_minute=10_000)]
    need = Need(input_tokens=40, output_tokens=60, least_output_tokens=60)
    while (tick := told.store.client.incr("tick")) * TICK_MS < 3 * 60_000:
        told.now_ms, name = 10**12 + tick * TICK_MS, f"{who}-{tick}"
        if isinstance(told.run(reserve(ORG, name, "k", "m", limits, need)), Reserved):
            told.run(settle(ORG, name, ["key:k"], Usage(input_tokens=40, output_tokens=60), billed=True))
            admitted += 100
    print(admitted)


def fast_clock(t0_ms: int, speed: int) -> str:
    """The store's clock, so many times as fast."""
    return (
        "local function now_ms()\n  local t = redis.call('TIME')\n"
        f"  return {t0_ms} + math.floor((t[1] * 1000 + t[2] / 1000 - {t0_ms}) * {speed})\nend\n"
    )


@dataclass(frozen=True)
class Line:
    """What one request had come to, and when, ms of the store's clock."""

    at_ms: int
    request_id: str
    scopes: tuple[str, ...]
    tokens: int  #: of input and output, so far
    output: int
    debt: int = 0  #: that its report was told of since


def read(path: Path) -> list[Line]:
    found = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            at_ms, request_id, scopes, tokens, output, debt = line.split()
            found.append(Line(int(at_ms), request_id, tuple(scopes.split(",")), int(tokens), int(output), int(debt)))
    return found


@dataclass
class Clients:
    store: Store
    t0_ms: int
    speed: int
    until_ms: int  #: of this machine's clock
    file: int

    def now_ms(self) -> int:
        return int(self.t0_ms + (time.time() * 1000 - self.t0_ms) * self.speed)

    def write(self, name: str, scopes: tuple[str, ...], tokens: tuple[int, int], debt: int = 0) -> None:
        line = f"{self.now_ms()} {name} {','.join(scopes)} {sum(tokens)} {tokens[1]} {debt}\n"
        os.write(self.file, line.encode())  # one call, to the end of the file: never half a line of two threads

    def run(self, seed: int) -> None:
        rng = random.Random(seed)
        for n in itertools.count():
            if time.time() * 1000 >= self.until_ms:
                return
            if not self.request(rng, f"{os.getpid()}-{seed}-{n}"):
                time.sleep(PAUSE_S * rng.random())

    def request(self, rng: random.Random, name: str) -> bool:
        key = rng.randrange(KEYS)
        scopes = (f"key:{key}", "org", "model:m")
        input_tokens, output_tokens = rng.randrange(20, 200), rng.randrange(1, 600)
        held = output_tokens if rng.random() < 0.8 else output_tokens // 2  # some go beyond what they hold
        need = Need(input_tokens=input_tokens, output_tokens=held, least_output_tokens=held)
        call = reserve(ORG, name, str(key), "m", [LIMITS[scope] for scope in scopes], need)
        got = [self.store.run(call) for _ in range(rng.choice((1, 1, 2)))][-1]
        if not isinstance(got, Reserved):
            return False
        made = self.generate(rng, name, scopes, input_tokens, output_tokens)
        if rng.random() < 0.1:
            return True  # nobody ever hears of it again: the sweep settles it
        usage = Usage(input_tokens=input_tokens if made else 0, output_tokens=made)
        for _ in range(rng.choice((1, 1, 2))):
            self.store.run(settle(ORG, name, scopes, usage, billed=True))
        return True

    def generate(self, rng: random.Random, name: str, scopes: tuple[str, ...], input_tokens: int, most: int) -> int:
        made = 0
        for _ in range(rng.randrange(4)):
            time.sleep(PAUSE_S * rng.random())
            made = rng.randrange(made, most + 1)
            self.write(name, scopes, (input_tokens, made))
            usage = Usage(input_tokens=input_tokens, output_tokens=made)
            report = Report(
                request_id=name,
                key_id=scopes[0][4:],
                scopes=scopes,
                usage=usage,
                hold_tokens=most - made,
                money_tokens=0,
            )
            [leash] = self.store.run(progress(ORG, [report] * rng.choice((1, 1, 2))))[:1]
            if leash.debt_tokens:
                self.write(name, scopes, (input_tokens, made), leash.debt_tokens)
        return made


def main(url: str, t0_ms: str, speed: str, seed: str, threads: str, until_ms: str, file: str) -> None:
    store = Store.connect(url, clock=fast_clock(int(t0_ms), int(speed)))
    to = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    clients = Clients(store, int(t0_ms), int(speed), int(until_ms), to)
    running = [threading.Thread(target=clients.run, args=(int(seed) * 1000 + n,)) for n in range(int(threads))]
    for one in running:
        one.start()
    for one in running:
        one.join()


if __name__ == "__main__":
    main(*sys.argv[1:])
