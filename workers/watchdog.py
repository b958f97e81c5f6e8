"""Reasons for a worker to stop, seen from inside: its engine is dead, hangs, or starts nothing.

vLLM's own health check says "well" of an engine process that hangs, so nothing short of a round trip into it tells:

    dead    the engine process is gone: a ping fails at once (a request in it notices sooner)
    hung    requests run, no step was made for `hung_s`, and a ping is not answered
    hung    idle, and two pings in a row are not answered
    stuck   the engine answers, and starts nothing of what it was given for STUCK_S

A busy engine answers between two steps only, so on the CPU, where a long prefill is one slow step, silence alone
proves nothing; `hung_after_s` says how long is too long. What was found is final: the worker hands everything back and
its process ends, for its agent to start another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from core.catalog import Model
from core.telemetry import logs
from workers.engine import Engine, EngineDead, EngineHung

log = logs.get(__name__)

#: How often the engine is looked at, seconds.
LOOK_S = 0.5
#: How often an idle engine is pinged, seconds.
IDLE_PING_S = 5.0
#: An engine that starts nothing of what waits in it, and runs nothing, is stuck after so long, seconds.
STUCK_S = 30.0
#: Least time without a step before a busy engine is suspected, seconds: on a GPU, and on the CPU, whose one step may
#: be a prefill of thousands of tokens on cores that it shares.
HUNG_GPU_S, HUNG_CPU_S = 10.0, 60.0
#: And at least so many of the longest steps that the catalogue's profile knows.
HUNG_STEPS = 20


def hung_after_s(model: Model, *, on_cpu: bool) -> float:
    """How long a busy engine may make no step before it is pinged."""
    profile = model.step
    longest_ms = profile.base_ms + profile.sequence_ms * model.slots
    longest_ms += profile.prefill_ms * max(model.engine.batched_tokens, model.slots)
    return max(HUNG_CPU_S if on_cpu else HUNG_GPU_S, HUNG_STEPS * longest_ms / 1000)


class Watchdog:
    """Watches one engine. `sick` is set once, and `reason` says why."""

    def __init__(
        self, engine: Engine, busy: Callable[[], int], *, hung_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`busy`: how many requests are in the engine."""
        self.engine, self.busy, self.hung_s, self.clock = engine, busy, hung_s, clock
        self.sick = asyncio.Event()
        self.reason = ""
        self._moved_s = self._started_s = self._looked_s = self._pinged_s = clock()
        self._signs = 0  #: steps made and pings answered
        self._started_signs = self._pinged_signs = self._silences = 0

    def stepped(self) -> None:
        """The engine has made a step."""
        self._signs += 1
        self._moved_s = self.clock()

    def found(self, reason: str) -> None:
        """The worker must stop."""
        if not self.sick.is_set():
            log.error("engine_sick", reason=reason)
            self.reason = reason
            self.sick.set()

    async def look(self) -> None:
        """Look once. Call it every LOOK_S."""
        now_s = self.clock()
        if now_s - self._looked_s > max(4 * LOOK_S, self.hung_s / 2):
            self._begin_anew(now_s)  # it was we who slept
        self._looked_s = now_s
        if not self.busy():
            self._begin_anew(now_s)
            if now_s - self._pinged_s >= IDLE_PING_S:
                await self._ping(silences=2)
        elif now_s - self._moved_s >= self.hung_s:
            await self._ping(silences=1)
        elif self._starts_nothing(now_s):
            self.found(f"the engine has started nothing for {STUCK_S:.0f} s")
        self._looked_s = self.clock()  # a ping may take its time

    def _begin_anew(self, now_s: float) -> None:
        self._moved_s = self._started_s = now_s
        self._started_signs = self._signs

    def _starts_nothing(self, now_s: float) -> bool:
        """As its last counts say; they are old while a long step runs, so it must have given signs of life since."""
        stats = self.engine.stats()
        if stats.running or not stats.waiting:
            self._started_s, self._started_signs = now_s, self._signs
        return now_s - self._started_s >= STUCK_S and self._signs - self._started_signs >= 2

    async def _ping(self, silences: int) -> None:
        """Ask the engine process itself; so many silences in a row are enough. A step is an answer too."""
        if self._signs != self._pinged_signs:
            self._silences = 0  # it has stepped since the last one
        signs = self._pinged_signs = self._signs
        try:
            await self.engine.ping()
        except EngineHung as e:
            self._silences = 0 if self._signs != signs else self._silences + 1
            if self._silences >= silences:
                self.found(str(e))
        except EngineDead as e:
            self.found(str(e))
        else:
            self._silences = 0
            self._signs += 1
            self._pinged_signs = self._signs
            self._moved_s = self.clock()  # it lives: the next suspicion begins anew
        self._pinged_s = self.clock()
