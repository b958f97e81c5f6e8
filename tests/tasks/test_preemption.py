"""A full worker makes room for what is urgent: one handed back for each, once the urgent one is surely its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import redis
from structlog.testing import capture_logs

from core.values import Class
from tasks.queue import Queue, Room
from tasks.runner import Runner, Victim
from tests.conftest import on_loop
from tests.tasks.test_runner import Bench as Base


class Unheard(Queue):
    """A queue whose calls for room reach nobody."""

    urgent_channel = property(lambda self: "nowhere", lambda self, name: None)


class Bench(Base):
    """Of the least urgent in hand the one begun last goes first. `free`: the KV cache that there is beside them."""

    free: int = -1
    runner: Runner

    def full(self, room: int, **more: Any) -> Bench:
        self.make(room=room, **more)
        self.wait = self.waiter()
        self.runner.victims = self.victims
        self.runner.headroom = lambda: Room(kv_tokens=self.free, total_kv_tokens=1000)
        return self

    def victims(self, cls: int) -> Sequence[Victim]:
        held = [one for one in self.runner.held.values() if one.claim.cls > cls and not one.let_go]
        held.reverse()
        return [
            Victim(id=one.claim.id, cls=one.claim.cls, room=Room())
            for one in sorted(held, key=lambda one: -one.claim.cls)
        ]

    def bring(self, name: str, cls: int = Class.BULK, **more: Any) -> str:
        message = self.wait.message_with_options(args=(name,))
        self.put(message.message_id, message.encode(), cls=cls, **more)
        return message.message_id

    async def busy(self, count: int) -> list[str]:
        """Bulk in every slot."""
        ids = [self.bring(f"bulk{n}") for n in range(count)]
        await self.marked(f"bulk{count - 1} began")
        return ids

    @property
    def stopped(self) -> list[str]:
        return [mark for mark in self.marks if mark.endswith("stopped")]


@pytest.fixture
def bench(valkey_url: str, valkey: redis.Redis) -> Iterator[Bench]:
    bench = Bench(valkey_url)
    with capture_logs():
        yield bench
    bench.side.close()


@on_loop
async def test_the_urgent_one_starts_in_the_place_of_one_that_goes_back_to_the_queue(bench: Bench) -> None:
    """At once: neither a beat nor an ending is near. It is handed back without a loss, and comes back as attempt 2."""
    async with bench.full(room=2):
        _, last = await bench.busy(2)
        urgent = bench.bring("urgent", Class.INTERACTIVE)
        await bench.marked("urgent began")
        await bench.marked("bulk1 stopped")
        await bench.until(lambda: bench.state(last) == "waiting")
        assert bench.stopped == ["bulk1 stopped"]

        bench.side.run(bench.queue.cancel(urgent))
        await bench.until(lambda: bench.marks.count("bulk1 began") == 2)
        assert bench.runner.held[last].claim.attempt == 2


@on_loop
async def test_one_is_handed_back_for_each_and_no_more(bench: Bench) -> None:
    async with bench.full(room=4):
        await bench.busy(4)
        bench.bring("first", Class.INTERACTIVE)
        bench.bring("second", Class.SYSTEM)
        for name in ("first", "second"):
            await bench.marked(f"{name} began")
        await bench.until(lambda: len(bench.runner.held) == 4 and len(bench.stopped) == 2)
        await asyncio.sleep(0.05)

    assert bench.stopped[:2] == ["bulk3 stopped", "bulk2 stopped"]
    assert sum(mark.startswith(("bulk0 stopped", "bulk1 stopped")) for mark in bench.stopped) == 2, "by the drain"


@on_loop
async def test_nobody_is_handed_back_for_what_another_worker_has_taken(bench: Bench) -> None:
    """All workers hear the call; the first that claims has it."""
    async with bench.full(room=2):
        await bench.busy(2)
        bench.runner.stir(Class.INTERACTIVE)
        await bench.until(lambda: bench.runner._urgent > Class.BULK)
        await asyncio.sleep(0.05)

        assert bench.stopped == [] and len(bench.runner.held) == 2


@pytest.mark.parametrize("cls", [Class.DEFAULT, Class.BULK])
@on_loop
async def test_what_nobody_waits_for_in_person_preempts_nobody(bench: Bench, cls: Class) -> None:
    async with bench.full(room=1):
        await bench.busy(1)
        waiting = bench.bring("patient", cls)
        bench.runner.stir(cls)
        await asyncio.sleep(0.05)

        assert (bench.stopped, bench.state(waiting)) == ([], "waiting")


@on_loop
async def test_a_call_that_was_not_heard_is_learned_from_the_next_beat(bench: Bench) -> None:
    async with bench.full(room=1, queue=Unheard("q"), beat_ms=10):
        await bench.busy(1)
        bench.bring("urgent", Class.INTERACTIVE)
        await bench.marked("urgent began")


@on_loop
async def test_a_worker_that_drains_preempts_nobody(bench: Bench) -> None:
    async with bench.full(room=1):
        await bench.busy(1)
        draining = asyncio.create_task(bench.runner.drain(0.2))
        await asyncio.sleep(0)
        urgent = bench.bring("urgent", Class.INTERACTIVE)
        await asyncio.sleep(0.1)
        assert (bench.stopped, bench.state(urgent)) == ([], "waiting")
        await draining


@on_loop
async def test_room_is_made_also_where_slots_are_free_and_kv_is_not(bench: Bench) -> None:
    """It is found when the urgent one is passed over for its size."""
    async with bench.full(room=4):
        await bench.busy(1)
        bench.free = 50
        small = bench.bring("small", Class.DEFAULT, need_tokens=10)
        bench.bring("large", Class.INTERACTIVE, need_tokens=500)
        await bench.marked("large began")
        await bench.marked("bulk0 stopped")

        assert bench.state(small) == "running", "and what fits is not held up by it"


@on_loop
async def test_an_urgent_request_that_fits_in_nobodys_place_preempts_nobody(bench: Bench) -> None:
    async with bench.full(room=4):
        await bench.busy(1)
        bench.free = 50
        bench.runner.victims = lambda cls: [
            Victim(id=one.claim.id, cls=one.claim.cls, room=Room(kv_tokens=100)) for one in bench.runner.held.values()
        ]
        large = bench.bring("large", Class.INTERACTIVE, need_tokens=500)
        await asyncio.sleep(0.1)

        assert (bench.stopped, bench.state(large)) == ([], "waiting")
