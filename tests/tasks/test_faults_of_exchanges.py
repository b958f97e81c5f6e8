"""An exchange with the store may break on either side of either way. Whichever does, the ledger holds."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import dramatiq
import pytest
import redis
from structlog.testing import capture_logs

from core.redis import AWAY, AsyncStore, Call, Store
from core.values import Outcome, Usage
from ops import stores
from ops.chaos import checker, faults
from ops.chaos.proxy import Fault, Proxy, requests
from tasks.broker import QueueBroker
from tasks.queue import _SCRIPTS, Claim, Queue, Task
from tasks.runner import IDLE_S, Runner

#: Time enough for an exchange on a busy machine; what takes longer counts as lost.
EXCHANGE_S = 0.15
LEASE_MS = 60_000


@pytest.fixture
def side(valkey_url: str, valkey: redis.Redis) -> Iterator[Store]:
    """The store, past the proxy, with every script in it."""
    store = Store.connect(valkey_url)
    for script in _SCRIPTS.values():
        store.client.script_load(store.loaded.source(script))
    yield store
    store.close()


def proxied(url: str, side: Store) -> Proxy:
    proxy = Proxy(path=url.removeprefix("unix://").partition("?")[0])
    proxy.names = {side.loaded.sha(script): name for name, script in _SCRIPTS.items()}
    return proxy


class Life:
    """Two gateways and two workers, each of whom asks again until it is told."""

    def __init__(self, store: AsyncStore) -> None:
        self.store, self.queue, self.tries = store, Queue("m"), Counter[str]()

    async def say(self, call: Call[Any]) -> Any:
        while True:
            try:
                self.tries[call.script.name if call.script else ""] += 1
                return await self.store.run(call)
            except AWAY:
                continue

    async def put(self, name: str) -> None:
        task = Task(id=name, message=b"m", owner="key", gateway="g1", facts=b"f", body=b"b", view=b"v")
        assert (await self.say(self.queue.enqueue(task))).status in ("accepted", "known")

    async def claim(self, worker: str, nonce: str, want: int = 1) -> list[Claim]:
        return list((await self.say(self.queue.claim(worker, want, lease_ms=LEASE_MS, nonce=nonce))).claims)

    async def finish(self, worker: str, claim: Claim, outcome: Outcome, *, dead: bool = False) -> None:
        assert await self.say(self.queue.finish(worker, claim, outcome, Usage(output_tokens=2), dead=dead))

    async def run(self) -> None:
        """Every verb once or more; each of them may be broken."""
        for name in "abcd":
            await self.put(name)
        a, b = await self.claim("w1", "one", 2)
        assert (a.id, b.id) == ("a", "b")
        assert await self.say(self.queue.deliver("w1", [a, b])) == [True, True]
        assert (await self.say(self.queue.attach("a", "key", "g2"))).state == "running"
        assert await self.say(self.queue.cancel("b")) == "running"
        differ = (await self.say(self.queue.beat("w1", [a, b], lease_ms=LEASE_MS))).claims
        assert differ and differ["b"].cancelled and differ["a"].gateway == "g2"
        watched = await self.say(self.queue.watch("g2", ["a", "b", "c", "d"]))
        assert [seen.state for seen in watched.seen] == ["running", "elsewhere", "elsewhere", "elsewhere"]
        await self.finish("w1", a, Outcome.COMPLETED)
        await self.finish("w1", b, Outcome.CANCELLED)
        [c] = await self.claim("w1", "two")
        await self.say(self.queue.hand_back("w1", [c]))
        [c] = await self.claim("w2", "three")
        assert (c.id, c.attempt) == ("c", 2)
        await self.finish("w2", c, Outcome.FAILED, dead=True)
        assert await self.say(self.queue.cancel("d")) in ("cancelled", "ended")
        await self.say(self.queue.part("w1"))
        assert (await self.say(self.queue.tick("w2"))).dead == 1


@pytest.mark.timeout(120)
def test_any_broken_exchange_is_made_again_and_changes_nothing(valkey_url: str, side: Store) -> None:
    """Every verb, every time it is used, each way to break it."""

    async def live(fault: Fault | None) -> Counter[str]:
        side.client.flushdb()
        async with proxied(valkey_url, side) as proxy:
            proxy.plan(*[fault] if fault else [])
            store = AsyncStore.connect(proxy.url, timeout_s=EXCHANGE_S)
            await Life(store).run()
            await store.close()
            assert fault is None or fault.done, fault
            return Counter({kind: count for kind, count in proxy.seen.items() if kind in _SCRIPTS})

    async def every() -> int:
        broken = 0
        for fault in faults.every(await live(None), stall_s=2 * EXCHANGE_S):
            await live(fault)
            ledger = checker.check(side, Queue("m"), "abcd")
            assert ledger.faults == [], fault
            assert ledger.outcomes == {"completed": 1, "cancelled": 2, "failed": 1}, fault
            broken += 1
        return broken

    assert asyncio.run(every()) >= 4 * 18


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_runner_ends_every_task_once_whatever_breaks(valkey_url: str, side: Store, seed: int) -> None:
    """Connections are cut, requests and replies are lost, replies come too late, all at random."""
    queue, tasks = Queue("m"), [f"t{n}" for n in range(150)]

    async def work(proxy: Proxy) -> None:
        store = AsyncStore.connect(proxy.url, timeout_s=EXCHANGE_S)
        blocking = AsyncStore.connect(proxy.url, timeout_s=IDLE_S + 1)
        broker, runs = QueueBroker(side), Counter[str]()

        async def step(name: str) -> None:
            runs[name] += 1
            await asyncio.sleep(0.02)

        actor = dramatiq.Actor(step, broker=broker, actor_name="step", queue_name="m", priority=0, options={})
        runner = Runner(
            broker, store, blocking, queue, worker="w", lease_ms=3_000, beat_ms=200,
            room=lambda: 8 - len(runner.held),
        )  # fmt: skip
        running = asyncio.create_task(runner.run())
        breaking = asyncio.create_task(faults.at_random(proxy, seed, every_s=0.04, stall_s=2 * EXCHANGE_S))
        for name in tasks:
            message = actor.message_with_options(args=(name,)).encode()
            side.run(queue.enqueue(Task(id=name, message=message, facts=b"f")))
        await ended(lambda: side.client.xlen(queue.prefix + "usage") >= len(tasks))
        breaking.cancel()
        proxy.plan()
        await runner.drain(5)
        await running
        await store.close()
        await blocking.close()
        assert set(runs) == set(tasks)

    async def ended(true: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not true():
                await asyncio.sleep(0.05)

    async def run() -> None:
        async with proxied(valkey_url, side) as proxy:
            await work(proxy)

    with capture_logs():
        asyncio.run(run())
    ledger = checker.check(side, queue, tasks)
    assert ledger.faults == []
    assert ledger.outcomes == {"completed": len(tasks)}


class Survivor:
    """A gateway and a worker in one, which go on when their store is back."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.queue, self.away, self.told = folder, Queue("m"), 0, set[str]()
        self.server = stores.start_valkey(folder)
        self.store = Store.connect(self.server.url)

    def say(self, call: Call[Any]) -> Any:
        while True:
            try:
                return self.store.run(call)
            except AWAY:
                self.away += 1
                stores.start_valkey(self.folder)

    def put(self, name: str) -> None:
        self.say(self.queue.enqueue(Task(id=name, message=b"m", facts=b"f", gateway="g")))

    def put_back(self, names: list[str]) -> None:
        """What the store does not know any more, and nobody was told the end of."""
        for name in names:
            if self.say(self.queue.watch("g", [name])).seen[0].state == "unknown" and name not in self.told:
                self.put(name)

    def work(self, nonce: str, leave: int) -> None:
        claims = self.say(self.queue.claim("w", 8, lease_ms=LEASE_MS, nonce=nonce)).claims
        self.finish(claims[: len(claims) - leave])

    def finish(self, claims: Iterable[Claim]) -> None:
        for claim in claims:
            assert self.say(self.queue.finish("w", claim, Outcome.COMPLETED, Usage()))
            self.told.add(claim.id)


@pytest.mark.timeout(60)
def test_a_store_that_is_killed_under_load_and_comes_back_has_ended_everything_once(tmp_path: Path) -> None:
    """What its log did not keep, the gateway that waits for it puts back; a worker goes on with what it has."""
    one, sent = Survivor(tmp_path), [f"t{n}" for n in range(300)]
    try:
        for n, name in enumerate(sent):
            one.put(name)
            if n % 4 == 0:
                one.work(f"n{n}", leave=1)  # so that something runs when the store dies
            if n == 150:
                os.kill(one.server.pid, signal.SIGKILL)
        one.put_back(sent)
        held = one.say(one.queue.beat("w", [], lease_ms=LEASE_MS)).claims
        assert len(held) > 10 and one.away > 0
        one.finish(held.values())
        for n in range(50):
            one.work(f"last{n}", leave=0)
        ledger = checker.check(one.store, one.queue, sent)
        assert ledger.faults == []
        assert ledger.outcomes == {"completed": len(sent)}
    finally:
        one.store.close()
        stores.start_valkey(tmp_path).stop()


# --- the instruments themselves


def test_requests_are_told_apart_wherever_the_bytes_are_cut() -> None:
    sent = b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n*3\r\n$7\r\nEVALSHA\r\n$2\r\n\r\n\r\n$0\r\n\r\nPING\r\n"
    whole = list(requests(sent))
    assert [words for _, words in whole] == [[b"GET", b"a"], [b"EVALSHA", b"\r\n", b""], [b"PING"]]
    for cut in range(len(sent)):
        first = list(requests(sent[:cut]))
        assert first == whole[: len(first)]
        rest = sent[sum(length for length, _ in first) :]
        assert first + list(requests(rest)) == whole


def broken(side: Store, breaks: Callable[[Store, Queue], Any]) -> list[str]:
    """What the checker says after one request has been run and something has been falsified."""
    queue = Queue("m")
    side.run(queue.enqueue(Task(id="a", message=b"m", facts=b"f")))
    [claim] = side.run(queue.claim("w", 1, lease_ms=LEASE_MS, nonce="x")).claims
    side.run(queue.finish("w", claim, Outcome.COMPLETED, Usage()))
    breaks(side, queue)
    return checker.check(side, queue, ["a"]).faults


@pytest.mark.parametrize(("breaks", "said"), [
    (lambda s, q: None, ""),
    (lambda s, q: s.run(q.enqueue(Task(id="b", message=b"m"))), "1 left in waiting"),
    (lambda s, q: s.client.zadd(q.prefix + "claims", {"w|x": 0}), "1 left in claims"),
    (lambda s, q: s.client.hset(q.prefix + "sums", "w", 7), "a sum of no claims is not zero"),
    (lambda s, q: s.client.hincrby(q.prefix + "counters", "waiting2", 1), "waiting2 is 1"),
    (lambda s, q: s.client.delete(q.prefix + "usage"), "never ended: ['a']"),
    (lambda s, q: s.client.xadd(q.prefix + "usage", {"id": "a"}), "ended twice: ['a']"),
    (lambda s, q: s.client.xadd(q.prefix + "usage", {"id": "z"}), "never sent: ['z']"),
    (lambda s, q: s.client.delete(q.prefix + "rows"), "a is unknown"),
])  # fmt: skip
def test_the_checker_finds_what_is_wrong(side: Store, breaks: Any, said: str) -> None:
    found = broken(side, breaks)

    assert said in found if said else found == []


@pytest.mark.parametrize(("emitted", "billed", "relayed", "outcome", "fine"), [
    (9, 9, 9, Outcome.COMPLETED, True),
    (9, 8, 9, Outcome.COMPLETED, False),
    (9, 9, 8, Outcome.LENGTH, False),
    (12, 9, 5, Outcome.CANCELLED, True),
    (12, 0, 5, Outcome.CANCELLED, True),
    (12, 4, 5, Outcome.CANCELLED, False),
    (9, 10, 9, Outcome.CANCELLED, False),
    (9, 9, 10, Outcome.CANCELLED, False),
    (9, 1, 0, Outcome.EXPIRED, False),
])  # fmt: skip
def test_tokens_are_relayed_billed_and_emitted_in_that_order(
    side: Store, emitted: int, billed: int, relayed: int, outcome: Outcome, fine: bool
) -> None:
    queue = Queue("m")
    side.run(queue.enqueue(Task(id="a", message=b"m", facts=b"f")))
    [claim] = side.run(queue.claim("w", 1, lease_ms=LEASE_MS, nonce="x")).claims
    side.run(queue.finish("w", claim, outcome, Usage(output_tokens=billed)))

    tokens = {"a": checker.Tokens(emitted=emitted, billed=billed, relayed=relayed)}

    assert (checker.check(side, queue, ["a"], tokens).faults == []) is fine
