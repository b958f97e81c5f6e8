"""What the engine can start now, and whom to preempt for something more urgent. Pure: the clock is an argument.

A claim must never bring more than the engine starts at once: what waits inside vLLM can no longer go to another worker,
and vLLM's own order knows neither tenants nor preemption. Three things run out:

slots     counted by the runner; some are kept from what cannot be preempted.
KV cache  what is free, less what those in hand are still expected to come to. Two estimates, each too low, of which the
          larger is taken: the engine's own count of used blocks (knows of shared prefixes, not of what was claimed a
          moment ago), and the sum over the requests in hand (the other way round).
prefill   a new prompt waits for those before it. The backlog flows off at the rate of prefill, which is measured
          whenever a step's worth of it or more was waiting, so that nothing else bounded the step. At most a step's
          worth may wait, and no more than the class's TTFT objective leaves time for; when less than half a step's
          worth waits, one more prompt may come, however long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from core.catalog import Model
from core.values import Class
from workers.engine import EngineFacts, EngineStats

#: Output that a request is expected to make still when it has outgrown what was expected.
OVERRUN_TOKENS = 64
#: A request is preempted at most this often.
PREEMPTIONS_MAX = 3
#: Weight of the newest measurement of the rate of prefill.
NEWEST = 0.3
#: How fast a measured turnover forgets, seconds.
TURNOVER_S = 120.0
#: No bound; fits what packs the room.
BOUNDLESS = 2**40


class InHand(msgspec.Struct, frozen=True, kw_only=True):
    """A request that this worker has, as far as it is known: from its claim on, more once its body is read."""

    id: str
    cls: int = Class.DEFAULT
    attempt: int = 1
    order: int = 0  #: of those in hand, the one begun last has the highest
    input_tokens: int = 0
    cached_tokens: int = 0  #: of the input; known with its first token
    output_tokens: int = 0  #: so far, delivered by earlier attempts included
    expected_tokens: int = 0  #: output it will probably come to
    prefilled: bool = False  #: this attempt has made a token
    width: int = 1  #: runs on the engine
    most_tokens: int | None = None  #: output that it may come to; None: its body is not read yet
    resumable: bool = False  #: another attempt can go on from any token

    @property
    def kv_tokens(self) -> int:
        """What it holds, or is about to."""
        return self.input_tokens + self.output_tokens

    @property
    def coming_tokens(self) -> int:
        """Output that it is still expected to make."""
        made, limit = self.output_tokens, self.expected_tokens if self.most_tokens is None else self.most_tokens
        if made >= limit:
            return 0
        return min(limit, max(self.expected_tokens, made + self.width * OVERRUN_TOKENS)) - made


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What does not change while an engine lives."""

    slots: int
    context_tokens: int
    kv_tokens: int  #: 0: unknown
    spare_tokens: int  #: KV cache that vLLM keeps free while anything runs
    step_tokens: int  #: most that one step takes
    reserve: int
    ttft_s: tuple[float, float, float, float]

    @classmethod
    def of(cls, facts: EngineFacts, model: Model) -> Shape:
        return cls(
            slots=facts.slots,
            context_tokens=facts.context_tokens,
            kv_tokens=facts.kv_tokens,
            spare_tokens=int(facts.kv_tokens * model.engine.watermark),
            step_tokens=model.engine.batched_tokens,
            reserve=model.reserve,
            ttft_s=model.slo.ttft_s,
        )


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """Prompts that wait for their first token, and how fast that goes."""

    tokens_per_s: float
    waiting: Mapping[str, int] = field(default_factory=dict)  #: request -> its prompt
    backlog_tokens: float = 0.0  #: of them, still to be computed
    at_s: float = 0.0  #: when that was so
    full_s: float = 0.0  #: time in which a step's worth was waiting, and what was done in it
    full_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Headroom:
    """What the engine can start now, in the words of the queue's Room."""

    kv_tokens: int
    context_tokens: int
    total_kv_tokens: int
    prefill_tokens: tuple[int, int, int, int]
    idle: bool
    reserve: int


def unmeasured(model: Model) -> Prefill:
    """The catalogue's rate, until there is a better one."""
    return Prefill(tokens_per_s=1000 / model.step.prefill_ms if model.step.prefill_ms > 0 else BOUNDLESS)


def advance(prefill: Prefill, now_s: float, waiting: Mapping[str, int], done_tokens: int, step_tokens: int) -> Prefill:
    """A later look: who waits for a first token now, and how much was computed for those who have got it."""
    since_s = max(0.0, now_s - prefill.at_s)
    new = sum(tokens for id_, tokens in waiting.items() if id_ not in prefill.waiting)
    backlog = max(0.0, prefill.backlog_tokens - prefill.tokens_per_s * since_s) + new
    full_s, full_tokens = prefill.full_s, prefill.full_tokens
    if sum(prefill.waiting.values()) >= step_tokens:
        full_s, full_tokens = full_s + since_s, full_tokens + done_tokens
    rate = prefill.tokens_per_s
    if full_tokens >= step_tokens and full_s > 0:
        rate += (NEWEST if rate < BOUNDLESS else 1) * (full_tokens / full_s - rate)
        full_s, full_tokens = 0.0, 0
    gone = sum(tokens for id_, tokens in prefill.waiting.items() if id_ not in waiting)
    if not waiting or 2 * done_tokens < gone:  # prompts that were cached, or given up, say nothing of the rate
        full_s, full_tokens = 0.0, 0
    return Prefill(
        tokens_per_s=rate,
        waiting=dict(waiting),
        backlog_tokens=_bounded(backlog, waiting),
        at_s=now_s,
        full_s=full_s,
        full_tokens=full_tokens,
    )


def _bounded(backlog: float, waiting: Mapping[str, int]) -> float:
    """At most all that waits; and one prompt goes after the other, so all but one is surely still to do."""
    total = sum(waiting.values())
    return min(max(backlog, total - max(waiting.values(), default=0)), total)


def headroom(shape: Shape, stats: EngineStats, in_hand: Iterable[InHand], prefill: Prefill) -> Headroom:
    """What can be started beside what is in hand."""
    known = shape.kv_tokens > 0
    return Headroom(
        kv_tokens=free_kv_tokens(shape, stats, in_hand) if known else -1,
        context_tokens=shape.context_tokens,
        total_kv_tokens=shape.kv_tokens if known else -1,
        prefill_tokens=_prefill_tokens(shape, prefill),
        idle=prefill.backlog_tokens < shape.step_tokens / 2,
        reserve=shape.reserve,
    )


def free_kv_tokens(shape: Shape, stats: EngineStats, in_hand: Iterable[InHand]) -> int:
    """KV cache that nobody in hand will need. All of it when there is nobody: then vLLM keeps nothing free either."""
    free = int(shape.kv_tokens * (1 - min(1.0, stats.kv_used)))
    coming = unseen = prefilled = 0
    for one in in_hand:
        coming += one.coming_tokens
        if one.prefilled:
            prefilled += one.kv_tokens
        else:
            unseen += one.kv_tokens
    if coming + unseen + prefilled == 0:
        return free
    by_engine = free - unseen
    by_sum = shape.kv_tokens - unseen - prefilled
    return max(0, min(free, max(by_engine, by_sum) - coming) - shape.spare_tokens)


def _prefill_tokens(shape: Shape, prefill: Prefill) -> tuple[int, int, int, int]:
    system, interactive, default, bulk = (
        max(0, int(min(shape.step_tokens, prefill.tokens_per_s * ttft_s) - prefill.backlog_tokens))
        for ttft_s in shape.ttft_s
    )
    return system, interactive, default, bulk


def again_s(shape: Shape, prefill: Prefill) -> float:
    """When there is room for one more prompt, as far as it is prompts that leave none; 0: it is not."""
    return max(0.0, prefill.backlog_tokens - shape.step_tokens / 2) / prefill.tokens_per_s


def worth_waiting(shape: Shape, prefill: Prefill, cls: int) -> bool:
    """Whether the prompts under way are done so soon that the class's objective holds without preempting anybody."""
    return 0 < again_s(shape, prefill) < shape.ttft_s[cls] / 4


def victims(in_hand: Iterable[InHand], cls: int) -> list[InHand]:
    """Whom to preempt for a request of this class, best first.

    Only who is strictly less urgent, and loses nothing by it: nothing of it was made, or it goes on where it was. Of
    these the least urgent, then whoever has made least, then whoever began last. Who has often been is spared.
    """
    may = (
        one
        for one in in_hand
        if one.cls > cls and one.attempt <= PREEMPTIONS_MAX and (one.resumable or one.output_tokens == 0)
    )
    return sorted(may, key=lambda one: (-one.cls, one.output_tokens, -one.order))


def without(victim: InHand, shape: Shape, stats: EngineStats, in_hand: Iterable[InHand], prefill: Prefill) -> Headroom:
    """What could be started if this one was gone. Its cached input may be others' too, so it is not counted on."""
    freed = victim.kv_tokens - victim.cached_tokens if victim.prefilled else 0
    used = max(0.0, stats.kv_used - freed / shape.kv_tokens) if shape.kv_tokens else stats.kv_used
    waiting = {id_: tokens for id_, tokens in prefill.waiting.items() if id_ != victim.id}
    backlog = prefill.backlog_tokens - prefill.waiting.get(victim.id, 0)
    return headroom(
        shape,
        replace(stats, kv_used=used),
        [one for one in in_hand if one.id != victim.id],
        replace(prefill, waiting=waiting, backlog_tokens=_bounded(backlog, waiting)),
    )


class Turnover(msgspec.Struct, frozen=True, kw_only=True):
    """How fast an engine fills its KV cache anew: tokens computed, fading over TURNOVER_S."""

    tokens: float = 0.0
    looked_s: float = 0.0

    def after(self, computed_tokens: int, now_s: float) -> Turnover:
        """A request has ended, that so many tokens were computed for."""
        return Turnover(tokens=self._faded(now_s) + computed_tokens, looked_s=now_s)

    def residency_s(self, kv_tokens: int, now_s: float) -> float:
        """How long what is computed now will be held; infinite while nothing replaces it."""
        per_s = self._faded(now_s) / TURNOVER_S
        return kv_tokens / per_s if per_s > 0 else math.inf

    def _faded(self, now_s: float) -> float:
        return self.tokens * math.exp((self.looked_s - now_s) / TURNOVER_S)
