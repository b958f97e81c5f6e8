"""Threads of several processes race for tight limits, and are killed: nothing gets past, and nothing stays behind.

The long form is `forebay bench limits`.
"""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import redis

from core.limits.counters import Need, Report, Reserved, open_before, progress, reserve, settle, used
from core.redis import Store
from core.values import Limit, Usage
from ops.bench.limits import race
from ops.bench.limits_clients import LIMITS

THREADS = 64


def test_a_race_with_kills_never_gets_past_a_limit_and_leaves_nothing(
    valkey: redis.Redis, valkey_url: str, tmp_path: Path
) -> None:
    """What each request had made is written down before it is reported, by the clock that the store has too. Windows of
    60 seconds pass in two: its clock runs fast."""
    raced = race(valkey_url, tmp_path, seconds=4.0, kills=3, seed=random.randrange(10**6))

    assert raced.over_tokens == 0, raced
    assert raced.kills == 3 and raced.requests > 20, "they did race"
    assert raced.worst["model:m"][0] > 0.5 * (LIMITS["model:m"].tokens_per_minute or 0), "for a limit that was tight"
    assert (raced.left_open, raced.left_held) == (0, 0)


def test_a_crowd_at_once_is_admitted_as_far_as_the_limit_goes(valkey: redis.Redis, valkey_url: str) -> None:
    """Of 64 that ask for a hundred at the same moment, under 1,000, ten go."""
    store, limit = Store.connect(valkey_url), Limit(scope="org", tokens_per_minute=1_000)
    need = Need(input_tokens=40, output_tokens=60, least_output_tokens=60)
    gate, admitted = threading.Barrier(THREADS), list[str]()

    def ask(name: str) -> None:
        gate.wait()
        for _ in range(3):
            if isinstance(store.run(reserve("o", name, "k", "m", [limit], need)), Reserved):
                admitted.append(name)

    def run_all() -> None:
        asking = [threading.Thread(target=ask, args=(f"r{n}",)) for n in range(THREADS)]
        for one in asking:
            one.start()
        for one in asking:
            one.join()

    run_all()

    assert len(set(admitted)) == 10 and len(admitted) == 30, "who repeats itself has the same hold"
    assert set(store.run(open_before("o", 2**53))) == set(admitted)
    store.close()


def test_many_hands_on_one_request_charge_it_once(valkey: redis.Redis, valkey_url: str) -> None:
    """Reports and endings of the same requests from all threads at once, in any order."""
    store, limits = Store.connect(valkey_url), [Limit(scope="key:k"), Limit(scope="org", tokens_per_minute=10_000)]
    scopes, names = ("key:k", "org"), [f"r{n}" for n in range(12)]
    need = Need(input_tokens=10, output_tokens=100, least_output_tokens=100)
    for name in names:
        assert isinstance(store.run(reserve("o", name, "k", "m", limits, need)), Reserved)
    settled = list[str]()

    def meddle(seed: int) -> None:
        rng = random.Random(seed)
        for name in rng.sample(names, len(names)):
            usage = Usage(input_tokens=10, output_tokens=rng.randint(1, 50))
            report = Report(
                request_id=name, key_id="k", scopes=scopes, usage=usage, hold_tokens=rng.randint(0, 90), money_tokens=0
            )
            store.run(progress("o", [report]))
            if rng.random() < 0.3 and store.run(
                settle("o", name, scopes, Usage(input_tokens=10, output_tokens=50), billed=True)
            ):
                settled.append(name)

    began_s = time.monotonic()
    meddling = [threading.Thread(target=meddle, args=(seed,)) for seed in range(THREADS)]
    for one in meddling:
        one.start()
    for one in meddling:
        one.join()

    assert time.monotonic() - began_s < 50, "or what came first has left the window"
    assert sorted(settled) == sorted(names)
    for found in store.run(used("o", limits)):
        assert (found.input_tokens, found.output_tokens, found.held_tokens, found.open) == (120, 600, 0, 0)
    store.close()
