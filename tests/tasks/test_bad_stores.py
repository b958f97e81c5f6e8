"""The store restarts, hangs, turns read-only, is full, forgets scripts. Workers go on, and each task runs once."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import dramatiq
import psutil
import pytest
import redis
import redis.asyncio
from redis.backoff import NoBackoff
from structlog.testing import capture_logs

from core.redis import AWAY, AsyncStore, Store
from ops import stores
from ops.chaos import checker
from ops.chaos.proxy import Fault, How, Proxy
from tasks import runner as runners
from tasks.broker import QueueBroker
from tasks.queue import _SCRIPTS, Queue, Task
from tasks.runner import IDLE_S, Runner
from tests.conftest import on_loop

LEASE_MS = 800
BEAT_MS = 200


@pytest.fixture(scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("bad")
    yield folder
    stores.start_valkey(folder).stop()


class Site:
    """A store of its own, workers on it, and an actor that counts how often each task ran."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.queue = folder, Queue("q")
        self.server = stores.start_valkey(folder)
        self.side = Store.connect(self.server.url)
        self.side.client.flushall()
        self.broker = QueueBroker(self.side)
        self.ran: Counter[str] = Counter()
        self.began_s: dict[str, float] = {}
        self.runners: list[Runner] = []
        self.sent: list[str] = []

        async def work(name: str, last_s: float) -> None:
            self.ran[name] += 1
            self.began_s[name] = time.monotonic()
            await asyncio.sleep(last_s)

        fn: Any = work
        self.actor: Any = dramatiq.Actor(
            fn, broker=self.broker, actor_name="work", queue_name="q", priority=0, options={}
        )

    @asynccontextmanager
    async def workers(
        self,
        count: int = 1,
        *,
        url: str = "",
        room: int = 16,
        store: AsyncStore | None = None,
        lease_ms: int = LEASE_MS,
    ) -> AsyncIterator[list[Runner]]:
        opened, running = [], []
        self.runners = []
        for n in range(count):
            told = store or AsyncStore.connect(url or self.server.url)
            blocking = AsyncStore.connect(url or self.server.url, timeout_s=runners.IDLE_S + 0.5)
            self.runners.append(self._runner(f"w{n}", told, blocking, room, lease_ms))
            opened += [told, blocking]
            running.append(asyncio.create_task(self.runners[-1].run()))
        try:
            yield self.runners
        finally:
            await asyncio.gather(*[one.drain(1) for one in self.runners])
            await asyncio.gather(*running)
            await asyncio.gather(*[one.close() for one in opened])

    def _runner(self, name: str, told: AsyncStore, blocking: AsyncStore, room: int, lease_ms: int) -> Runner:
        one = Runner(
            self.broker, told, blocking, self.queue, worker=name, lease_ms=lease_ms, beat_ms=BEAT_MS,
            room=lambda: room - len(one.held),
        )  # fmt: skip
        return one

    def put(self, name: str, last_s: float = 0.02, **more: Any) -> None:
        self.sent.append(name)
        message = self.actor.message_with_options(args=(name, last_s)).encode()
        self.side.run(self.queue.enqueue(Task(id=name, message=message, facts=b"f", **more)))

    async def running(self, count: int) -> None:
        await self.until(lambda: sum(len(one.held) for one in self.runners) >= count)

    async def until(self, true: Callable[[], Any]) -> None:
        """Wait for something outside this loop. `on_loop` bounds it."""
        while not true():
            await asyncio.sleep(0.005)

    async def ended(self) -> None:
        await self.until(lambda: self.side.client.xlen(self.queue.prefix + "usage") >= len(self.sent))

    def are_ended_once(self) -> None:
        """Each ran once, ended once, and nothing of any is left."""
        assert self.ran == Counter(self.sent)
        ledger = checker.check(self.side, self.queue, self.sent)
        assert (ledger.faults, ledger.outcomes) == ([], {"completed": len(self.sent)})


@pytest.fixture
def site(_folder: Path) -> Iterator[Site]:
    site = Site(_folder)
    with capture_logs():
        yield site
    site.side.close()


# --- delays


@on_loop
async def test_delayed_tasks_run_once_though_the_store_is_down_when_they_are_due(site: Site) -> None:
    """Fifty, some due before, most during, some after; two workers that race for them."""
    async with site.workers(2, lease_ms=3000):
        for n in range(50):
            site.put(f"d{n}", delay_ms=600 + 40 * n)
        await site.until(lambda: site.ran)
        site.server.stop()
        await asyncio.sleep(1.2)
        site.server = stores.start_valkey(site.folder)
        await site.ended()

    site.are_ended_once()


@on_loop
async def test_a_delayed_task_starts_when_it_is_due_though_nothing_else_happens(site: Site) -> None:
    """No traffic, no wake-up: the worker that waits knows how long."""
    async with site.workers():
        await asyncio.sleep(0.1)
        put_s = time.monotonic()
        site.put("late", delay_ms=300)
        await site.ended()

    assert 0.29 < site.began_s["late"] - put_s < 0.3 + IDLE_S / 2


# --- away


@on_loop
async def test_a_store_that_hangs_longer_than_a_blocking_wait_is_waited_on_again(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three times as long as the wait and its time-out; the worker then hears of work as before."""
    monkeypatch.setattr(runners, "IDLE_S", 0.3)
    server = psutil.Process(site.server.pid)
    async with site.workers():
        await asyncio.sleep(0.2)
        server.suspend()
        await asyncio.sleep(2.4)
        server.resume()
        site.put("after")
        await site.ended()

    site.are_ended_once()


async def outage(site: Site, begin: Callable[[], Any], end: Callable[[], Any]) -> None:
    """Twelve tasks run on two workers when the store refuses to write, for two leases. Four more are refused."""
    async with site.workers(2):
        for n in range(12):
            site.put(f"t{n}", last_s=0.5)
        await site.running(12)
        begin()
        for n in range(4):
            with pytest.raises(AWAY):
                site.side.run(site.queue.enqueue(Task(id=f"refused{n}", message=b"m", facts=b"f")))
        await asyncio.sleep(2 * LEASE_MS / 1000)
        end()
        await site.ended()

    site.are_ended_once()
    assert {site.side.run(site.queue.peek(name)).attempt for name in site.sent} == {1}


@on_loop
async def test_a_store_that_turns_read_only_and_back_has_lost_nothing_and_runs_nothing_again(site: Site) -> None:
    """As after a failover, while clients are still connected to who was the primary."""
    client = site.side.client
    await outage(site, lambda: client.replicaof("127.0.0.1", "1"), lambda: client.replicaof("NO", "ONE"))


@on_loop
async def test_a_store_that_is_full_refuses_what_is_new_and_loses_nothing(site: Site) -> None:
    """(What runs may end: an ending makes room first.)"""
    client = site.side.client
    await outage(site, lambda: client.config_set("maxmemory", 1), lambda: client.config_set("maxmemory", 0))


@on_loop
async def test_a_store_that_forgets_its_scripts_is_told_them_again(site: Site) -> None:
    async with site.workers(2):
        for n in range(200):
            site.put(f"t{n}", last_s=0.005)
            if n % 10 == 0:
                site.side.client.script_flush()
                await asyncio.sleep(0.01)
        await site.ended()

    site.are_ended_once()


@on_loop
async def test_subscriptions_that_are_cut_are_made_anew(site: Site) -> None:
    """Ten times; then a cancel arrives at once, as on the first day."""
    channel = site.queue.worker_channel("w0")
    async with site.workers():
        for _ in range(10):
            await site.until(lambda: site.side.client.pubsub_numsub(channel)[0][1] == 1)
            site.side.client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            await site.until(lambda: site.side.client.pubsub_numsub(channel)[0][1] == 0)
        await site.until(lambda: site.side.client.pubsub_numsub(channel)[0][1] == 1)
        site.put("long", last_s=60)
        await site.running(1)
        site.side.run(site.queue.cancel("long"))
        await site.ended()

    assert site.side.run(site.queue.peek("long")).ending.outcome == "cancelled"  # type: ignore[union-attr]


# --- connections


@on_loop
async def test_few_connections_serve_many_tasks(site: Site) -> None:
    """512 in flight on a pool of two: nothing fails for want of a connection, and nothing runs twice."""
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        site.server.url,
        max_connections=2,
        timeout=0.8,
        socket_timeout=0.8,
        retry=redis.asyncio.retry.Retry(NoBackoff(), 0),
    )
    few = AsyncStore(redis.asyncio.Redis(connection_pool=pool))
    for n in range(1024):
        site.put(f"t{n}", last_s=0.1)
    with capture_logs() as said:
        async with site.workers(store=few, room=512, lease_ms=10_000) as [worker]:
            await site.until(lambda: len(worker.held) == 512)
            await site.ended()

    site.are_ended_once()
    assert not [one for one in said if one["event"] in ("store_away", "loop_failed")]


@on_loop
async def test_connections_cut_again_and_again_leave_a_worker_that_works(site: Site) -> None:
    """All of them, twenty times: what is alive after that also claims."""
    path = site.server.url.removeprefix("unix://").partition("?")[0]
    async with Proxy(path=path) as proxy, site.workers(url=proxy.url):
        for n in range(20):
            site.put(f"t{n}")
            await asyncio.sleep(0.05)
            proxy.reset_all()
        await site.ended()
        site.put("after")
        put_s = time.monotonic()
        await site.ended()

    site.are_ended_once()
    assert site.began_s["after"] - put_s < IDLE_S


@pytest.mark.parametrize("how", ["stall", "drop_reply", "blackhole"])
@on_loop
async def test_what_is_claimed_while_the_worker_is_told_to_end_is_not_lost(site: Site, how: How) -> None:
    """The reply of the claim is on its way when the drain begins, and comes after it, or not at all."""
    async with Proxy(path=site.server.url.removeprefix("unix://").partition("?")[0]) as proxy:
        proxy.names = {site.side.loaded.sha(script): name for name, script in _SCRIPTS.items()}
        async with site.workers(url=proxy.url) as [worker]:
            await asyncio.sleep(0.1)
            proxy.plan(Fault(how=how, what="claim", nth=1, stall_s=0.3))
            site.put("t", last_s=0.1)
            await site.until(lambda: proxy.faults[0].done)
            await worker.drain(1)
    async with site.workers():
        await site.ended()

    site.are_ended_once()


@on_loop
async def test_four_workers_share_out_a_thousand_tasks_and_none_runs_twice(site: Site) -> None:
    """Though the store cuts everybody's connections, and all claim again what they may have been given already."""
    for n in range(1000):
        site.put(f"t{n}", last_s=0.01)
    async with site.workers(4):
        while sum(site.ran.values()) < 1000:
            site.side.client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            await asyncio.sleep(0.1)
        await site.ended()

    site.are_ended_once()


# --- leases


@on_loop
async def test_a_task_of_ten_leases_runs_once(site: Site) -> None:
    async with site.workers(2, lease_ms=600):
        site.put("long", last_s=6)
        await site.ended()

    site.are_ended_once()


@on_loop
async def test_a_loop_that_is_blocked_longer_than_its_lease_ends_nothing_more(site: Site) -> None:
    """Whoever blocks the loop keeps the beat from it too; another worker has the tasks when it goes on."""
    async with site.workers() as [worker]:
        site.put("a", last_s=0.3)
        await site.running(1)
        [claim] = [held.claim for held in worker.held.values()]
        until_s = time.monotonic() + 2.5 * LEASE_MS / 1000
        other: list[Any] = []
        while time.monotonic() < until_s:  # this is what blocks: nothing is awaited
            call = site.queue.claim("other", 1, lease_ms=60_000, nonce="n")
            other = other or list(site.side.run(call).claims)
            time.sleep(0.02)
        assert [(one.id, one.attempt) for one in other] == [("a", claim.attempt + 1)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(worker.vouched(), 0)
        await site.until(lambda: not worker.held)

    assert site.side.run(site.queue.peek("a")).state == "running"
    assert site.side.client.xlen(site.queue.prefix + "usage") == 0


@on_loop
async def test_a_dead_worker_with_thousands_of_claims_is_buried_in_small_pieces(site: Site) -> None:
    """No single exchange may hold the store up: each takes back a bounded number."""
    run, queue, client = site.side.run, site.queue, site.side.client
    tasks = [Task(id=f"t{n}", message=b"m", facts=b"f") for n in range(5000)]
    for at in range(0, 5000, 500):
        site.side.run_all([queue.enqueue(task) for task in tasks[at : at + 500]])
    run(queue.claim("dead", 5000, lease_ms=1, nonce="n"))
    assert client.zcard(queue.prefix + "claims") == 5000
    client.config_resetstat()
    looks = 0
    while not run(queue.tick("dead")).buried:
        looks += 1

    depth, used = run(queue.tick()), client.info("commandstats")["cmdstat_evalsha"]
    assert (sum(depth.waiting), depth.running) == (5000, 0)
    assert looks >= 4
    print(f"5,000 claims taken back in {looks + 1} looks of {used['usec_per_call'] / 1000:.1f} ms")
