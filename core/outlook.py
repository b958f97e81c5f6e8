"""How long a wait will be. Pure: what was seen and `now` in, milliseconds out.

A queue moves at the pace at which its workers start requests. That is seen in the counter of started requests, which
`watch` brings once a second (tasks/queue.py), and only while something waits: the starts of an empty queue are merely
its arrivals. A queue with no worker moves when one is there: until then its wait is what the worker still has to do.
"""

from __future__ import annotations

import math

import msgspec

from core.values import WorkerState

#: How fast the pace forgets, ms: long enough for a queue that starts a request every few seconds.
MEMORY_MS = 60_000
#: A pace that nothing has confirmed for so long is not known any more, ms.
STALE_MS = 600_000
#: What is left of starts long ago, below which they say nothing.
STARTS_LEAST = 1e-6
#: Longest estimate that is told; beyond it nobody knows, ms.
ESTIMATE_MAX_MS = 3_600_000
#: Bounds of Retry-After, ms: a client that comes sooner is a burden, one that is sent away for longer is lost.
RETRY_MIN_MS, RETRY_MAX_MS = 1_000, 600_000
#: Retry-After of a full queue whose pace is not known, ms.
RETRY_UNKNOWN_MS = 5_000
#: How long a worker usually is in each state before it is ready, ms. (To be learned with the scaler's lead times.)
LEAD_MS = {
    WorkerState.LAUNCHING: 5_000,
    WorkerState.BOOTING: 5_000,
    WorkerState.FETCHING: 30_000,
    WorkerState.LOADING: 45_000,
    WorkerState.WARMING: 5_000,
}
#: States that a worker may skip: they count for a worker that is in them, not for one on its way there.
_SKIPPED = frozenset({WorkerState.FETCHING})


class Starting(msgspec.Struct, frozen=True, kw_only=True):
    """The worker that a queue without a ready one waits for: the one nearest to being ready."""

    state: WorkerState
    detail: str = ""  #: what it is doing, for people
    since_ms: int = 0  #: how long it has been in that state

    @property
    def left_ms(self) -> int:
        """Until it is ready, as far as one can tell; a step that takes longer than usual may end any moment."""
        order = list(LEAD_MS)
        later = [state for state in order[order.index(self.state) + 1 :] if state not in _SKIPPED]
        here_ms = max(LEAD_MS[self.state] - self.since_ms, 0)
        return max(here_ms + sum(LEAD_MS[state] for state in later), 1_000)


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """At what rate a queue starts requests: the weighted starts over the weighted time in which something waited."""

    starts: float = 0.0
    ms: float = 0.0
    started: int = -1  #: the counter when last looked at; -1: never
    waiting: int = 0
    looked_ms: int = 0
    known_ms: int = 0  #: when it was last confirmed

    def look(self, started: int, waiting: int, workers: int, now_ms: int) -> Pace:
        """Look again: requests ever started, those that wait, workers alive. Call it about once a second."""
        before, past_ms = self, now_ms - self.looked_ms
        if workers == 0 or started < self.started or self._stale(now_ms):
            before = Pace()  # nobody to move it, another store, or too long ago
        looked = msgspec.structs.replace(before, started=started, waiting=waiting, looked_ms=now_ms)
        if before.started < 0 or past_ms <= 0 or not before.waiting:
            return looked
        keep = math.exp(-past_ms / MEMORY_MS)
        starts, ms = before.starts * keep + (started - before.started), before.ms * keep + past_ms
        return msgspec.structs.replace(looked, starts=starts, ms=ms, known_ms=now_ms)

    def _stale(self, now_ms: int) -> bool:
        return self.known_ms > 0 and now_ms - self.known_ms > STALE_MS

    @property
    def per_s(self) -> float | None:
        """Requests started a second; None: not known."""
        return self.starts * 1000 / self.ms if self.starts > STARTS_LEAST else None


def estimate_ms(place: int, pace: Pace, starting: Starting | None = None) -> int | None:
    """How long a request at this place (1: next) will wait; None: no telling.

    `starting`: the worker that is awaited, when no other is ready.
    """
    moving_ms = _moving_ms(place, pace)
    if starting is not None:
        return min(starting.left_ms + (moving_ms or 0), ESTIMATE_MAX_MS)
    return None if moving_ms is None else min(moving_ms, ESTIMATE_MAX_MS)


def retry_after_ms(over: int, pace: Pace, starting: Starting | None = None) -> int:
    """When a request that found the queue full should come again: when the `over` requests above its bound have been
    started, of which itself is the last."""
    found_ms = estimate_ms(max(over, 1), pace, starting)
    return min(max(RETRY_UNKNOWN_MS if found_ms is None else found_ms, RETRY_MIN_MS), RETRY_MAX_MS)


def over(waiting: int, tokens: int, *, waiting_max: int, tokens_max: int, input_tokens: int) -> int:
    """How many requests must be started before one more fits its bounds: of requests, and of tokens, at the mean size
    of those that wait."""
    too_many = waiting + 1 - waiting_max
    too_much = tokens + input_tokens - tokens_max
    mean_tokens = max(tokens / waiting, 1.0) if waiting else 1.0
    return max(too_many, min(math.ceil(too_much / mean_tokens), waiting), 1)


def _moving_ms(requests: int, pace: Pace) -> int | None:
    return None if pace.per_s is None else math.ceil(min(requests * 1000 / pace.per_s, ESTIMATE_MAX_MS))
