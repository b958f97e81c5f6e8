"""What a watchdog calls sick, on a clock of the test's; and a real engine process that is stopped, and one killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

import pytest

from core.catalog import EngineKnobs, Model, StepProfile
from core.values import Request
from tests.conftest import on_loop
from workers.engine import EngineDead, EngineFacts, EngineHung, EngineStats, Piece
from workers.watchdog import HUNG_CPU_S, HUNG_GPU_S, IDLE_PING_S, LOOK_S, STUCK_S, Watchdog, hung_after_s

HUNG_S = 10.0


class Patient:
    """An engine that is as well as the test says."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.running = self.waiting = 0
        self.ails: Exception | None = None
        self.pings = 0
        self.meanwhile: Callable[[], None] = lambda: None  #: what happens while a ping is under way
        self.watchdog = Watchdog(self, lambda: self.running + self.waiting, hung_s=HUNG_S, clock=lambda: self.now_s)

    async def ping(self) -> None:
        self.pings += 1
        self.meanwhile()
        if self.ails is not None:
            raise self.ails

    def stats(self) -> EngineStats:
        return EngineStats(running=self.running, waiting=self.waiting, kv_used=0.0)

    async def pass_time(self, seconds: float, *, stepping: bool = False) -> str:
        """Let time pass under the watchdog's eye; returns what it found."""
        for _ in range(round(seconds / LOOK_S)):
            self.now_s += LOOK_S
            if stepping:
                self.watchdog.stepped()
            await self.watchdog.look()
        return self.watchdog.reason

    # The rest of the protocol, which no watchdog asks for.
    async def start(self) -> EngineFacts:
        raise AssertionError("a watchdog asks for no such thing")

    def on_step(self, told: Callable[[], None]) -> None:
        raise AssertionError("a watchdog asks for no such thing")

    def generate(self, request: Request, cut: int = 0) -> AsyncGenerator[Piece]:
        raise AssertionError("a watchdog asks for no such thing")

    async def abort(self, request_id: str) -> None:
        raise AssertionError("a watchdog asks for no such thing")

    async def prompt_ids(self, text: str) -> list[int]:
        raise AssertionError("a watchdog asks for no such thing")

    def text_of(self, ids: Sequence[int], prompt_ids: Sequence[int] = ()) -> str:
        raise AssertionError("a watchdog asks for no such thing")

    async def stop(self) -> None:
        raise AssertionError("a watchdog asks for no such thing")


@on_loop
async def test_an_engine_that_steps_is_well_and_is_not_even_pinged() -> None:
    patient = Patient()
    patient.running = 3

    assert await patient.pass_time(100, stepping=True) == ""
    assert patient.pings == 0


@on_loop
async def test_a_busy_engine_without_a_step_that_does_not_answer_is_hung() -> None:
    patient = Patient()
    patient.running = 3
    await patient.pass_time(30, stepping=True)
    patient.ails = EngineHung("no answer")

    assert await patient.pass_time(HUNG_S - LOOK_S) == "", "not yet"
    assert await patient.pass_time(2 * LOOK_S) == "no answer"
    assert patient.watchdog.sick.is_set()


@on_loop
async def test_a_busy_engine_without_a_step_that_answers_is_left_alone() -> None:
    """What runs may wait for something outside of the engine."""
    patient = Patient()
    patient.running = 3

    assert await patient.pass_time(10 * HUNG_S) == ""
    assert patient.pings == pytest.approx(10, abs=1), "one for each suspicion"


@on_loop
async def test_a_slow_step_that_ends_while_the_ping_waits_is_an_answer() -> None:
    patient = Patient()
    patient.running, patient.ails = 3, EngineHung("no answer")
    patient.meanwhile = patient.watchdog.stepped

    assert await patient.pass_time(5 * HUNG_S) == ""
    assert patient.pings > 0


@on_loop
async def test_an_idle_engine_may_miss_one_ping_and_not_two() -> None:
    patient = Patient()
    patient.ails = EngineHung("no answer")
    await patient.pass_time(IDLE_PING_S)
    patient.ails = None
    await patient.pass_time(2 * IDLE_PING_S)
    assert (patient.watchdog.reason, patient.pings) == ("", 3)

    patient.ails = EngineHung("no answer")
    assert await patient.pass_time(IDLE_PING_S) == ""
    assert await patient.pass_time(IDLE_PING_S) == "no answer"


@on_loop
async def test_silences_with_work_between_them_are_not_in_a_row() -> None:
    """Each ping met a long step of a request that had just come."""
    patient = Patient()
    patient.ails = EngineHung("no answer")
    for _ in range(4):
        await patient.pass_time(IDLE_PING_S)
        patient.running = 1
        await patient.pass_time(2, stepping=True)
        patient.running = 0

    assert (patient.watchdog.reason, patient.pings) == ("", 4)


@pytest.mark.parametrize("running", [0, 2])
def test_an_engine_that_is_gone_is_dead_at_the_first_ping(running: int) -> None:
    async def live() -> str:
        patient = Patient()
        patient.running, patient.ails = running, EngineDead("gone")
        return await patient.pass_time(HUNG_S if running else IDLE_PING_S)

    assert asyncio.run(live()) == "gone"


@on_loop
async def test_an_engine_that_answers_and_starts_nothing_is_stuck() -> None:
    """vLLM's scheduler may stop admitting: it steps and answers, requests wait, and none runs."""
    patient = Patient()
    patient.waiting = 2

    assert await patient.pass_time(STUCK_S - LOOK_S, stepping=True) == ""
    assert "started nothing" in await patient.pass_time(2 * LOOK_S, stepping=True)


@on_loop
async def test_counts_from_before_a_long_step_prove_nothing() -> None:
    """A prefill of a minute: the last counts still say that its request waits, and the engine cannot answer."""
    patient = Patient()
    patient.watchdog.hung_s = HUNG_CPU_S
    patient.waiting = 1

    assert await patient.pass_time(HUNG_CPU_S - 1) == ""


@on_loop
async def test_waiting_behind_what_runs_is_not_being_stuck() -> None:
    patient = Patient()
    patient.waiting, patient.running = 2, 1

    assert await patient.pass_time(3 * STUCK_S, stepping=True) == ""


@on_loop
async def test_a_worker_that_was_suspended_itself_suspects_nobody() -> None:
    """Its own clock jumped: the engine may have stepped, and nobody was there to see it."""
    patient = Patient()
    patient.running, patient.ails = 3, EngineHung("no answer")
    await patient.pass_time(2)

    patient.now_s += 3600

    assert await patient.pass_time(HUNG_S - 1) == ""
    assert await patient.pass_time(2) == "no answer", "but it looks on"


@on_loop
async def test_the_first_reason_is_the_one_that_is_told() -> None:
    patient = Patient()
    patient.watchdog.found("first")
    patient.watchdog.found("second")

    assert patient.watchdog.reason == "first"


def test_how_long_is_too_long_follows_from_the_longest_step() -> None:
    """Five minutes for a model whose full prefill batch takes 15 s a step; never less than the floors."""
    slow = Model(
        context_tokens=100, engine=EngineKnobs(batched_tokens=1000), step=StepProfile(base_ms=1000, prefill_ms=14)
    )
    quick = Model(context_tokens=100)

    assert hung_after_s(slow, on_cpu=False) == pytest.approx(300, rel=0.02)
    assert hung_after_s(quick, on_cpu=False) == HUNG_GPU_S
    assert hung_after_s(quick, on_cpu=True) == HUNG_CPU_S
