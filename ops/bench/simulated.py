"""An engine in virtual time: continuous batching, chunked prefill and a prefix cache as vLLM has them, without a model.

What is kept of vLLM: blocks are found by the chain of all before them and at least the last token is computed; a block
can be found from the step that computes it on; free blocks without a hash are used first, then those with one, least
recently used first, and of one request the deepest first; decodes go before prefills, which share what the step's
budget leaves, first come, first served. What is not: a request takes all its blocks when it is scheduled, so that
nothing is ever preempted. A step takes base + a per decoding sequence + k per thousand tokens of KV cache read
+ p per token prefilled.

Held against vLLM with a timed step on 200 prompts of 40 conversations, in a cache of 11,632 tokens that evicts: within
1 % of the tokens vLLM finds one after another, within 2 % eight at once.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from workers.engine import EngineStats


@dataclass(frozen=True, kw_only=True)
class Profile:
    """A model on a GPU. The default: 8B in bfloat16 on an H100."""

    base_ms: float = 7.0
    sequence_ms: float = 0.03
    kv_ktoken_ms: float = 0.045
    prefill_ms: float = 0.035
    kv_tokens: int = 420_000
    slots: int = 64
    batched_tokens: int = 8192


@dataclass(eq=False, kw_only=True)
class Job:
    """A request on its way through an engine."""

    n: int
    arrived_ms: float
    input_tokens: int
    output_tokens: int
    hashes: Sequence[Hashable]  #: of its whole blocks
    cached_tokens: int = 0
    prefilled: int = 0  #: tokens of the prompt that are there, cached ones included
    first_ms: float = 0.0  #: when its first token was there
    engine: int = -1
    _own: list[Hashable] = field(default_factory=list)  #: blocks that it holds under their hash
    _blank: int = 0  #: and without one

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens


class BlockCache:
    """The engine's KV blocks. A block is in use, or free and known by its hash, or blank."""

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._blank = blocks
        self._uses: dict[Hashable, int] = {}
        self._idle: OrderedDict[Hashable, None] = OrderedDict()  #: next to be evicted first

    @property
    def free_tokens(self) -> int:
        return (self._blank + len(self._idle)) * self.block_tokens

    def found(self, job: Job) -> int:
        """How many of its first blocks are here."""
        most = (job.input_tokens - 1) // self.block_tokens
        found = 0
        for key in job.hashes[:most]:
            if key not in self._uses and key not in self._idle:
                break
            found += 1
        return found

    def take(self, job: Job) -> bool:
        """Give the job what is here, and blank blocks for the rest. False: there are not enough."""
        hits = job.hashes[: self.found(job)]
        fresh = -(-job.tokens // self.block_tokens) - len(hits)
        idle_hits = [key for key in hits if key in self._idle]
        if fresh > self._blank + len(self._idle) - len(idle_hits):
            return False
        for key in idle_hits:
            del self._idle[key]
        for key in hits:
            self._uses[key] = self._uses.get(key, 0) + 1
        evicted = max(0, fresh - self._blank)
        for _ in range(evicted):
            self._idle.popitem(last=False)
        self._blank += evicted - fresh
        job._own, job._blank = list(hits), fresh
        job.prefilled = job.cached_tokens = len(hits) * self.block_tokens
        return True

    def fill(self, job: Job) -> None:
        """What the job has computed can be found from now on; of a block that is there twice, one copy."""
        own = len(job._own)
        for key in job.hashes[own : job.prefilled // self.block_tokens]:
            mine, copy = key, (job.n, len(job._own))
            if key in self._idle:
                del self._idle[key]
                self._idle[copy] = None
                self._idle.move_to_end(copy, last=False)
            elif key in self._uses:
                mine = copy
            job._own.append(mine)
            job._blank -= 1
            self._uses[mine] = 1

    def give_back(self, job: Job) -> None:
        """The job is done. Whole blocks of its output have hashes too, which nobody will ask for."""
        output: list[Hashable] = [(job.n, n) for n in range(len(job.hashes), job.tokens // self.block_tokens)]
        self._blank += job._blank - len(output)
        for key in reversed(output):
            self._idle[key] = None
        for key in reversed(job._own):
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._uses[key]
                self._idle[key] = None


class SimulatedEngine:
    """One engine. `begin` says how long the next step takes, `end` what came of it."""

    def __init__(self, number: int, profile: Profile, block_tokens: int) -> None:
        self.number, self.profile = number, profile
        self.cache = BlockCache(profile.kv_tokens // block_tokens, block_tokens)
        self.waiting: deque[Job] = deque()
        self.computed_tokens = 0
        self.busy_ms = 0.0
        self.stepping = False
        self.jobs: set[Job] = set()  #: all that it has
        self._prefilling: deque[Job] = deque()
        self._decoding: list[tuple[int, int, Job]] = []  #: heap of (last step, n, job)
        self._kv_tokens = 0  #: read by each decode step
        self._step = 0

    def submit(self, job: Job) -> None:
        job.engine = self.number
        self.jobs.add(job)
        self.waiting.append(job)

    def stats(self) -> EngineStats:
        used, waiting = 1 - self.cache.free_tokens / self.profile.kv_tokens, len(self.waiting)
        return EngineStats(running=len(self.jobs) - waiting, waiting=waiting, kv_used=max(0.0, used))

    def begin(self) -> float:
        """Schedule a step; 0.0 when there is nothing to do."""
        decodes, profile = len(self._decoding), self.profile
        left = profile.batched_tokens - decodes
        for job in self._prefilling:
            left -= self._prefill(job, left)
        while left > 0 and self.waiting and decodes + len(self._prefilling) < profile.slots:
            if not self.cache.take(self.waiting[0]):
                break
            job = self.waiting.popleft()
            self._prefilling.append(job)
            left -= self._prefill(job, left)
        if not decodes and not self._prefilling:
            return 0.0
        prefilled = profile.batched_tokens - decodes - left
        took_ms = (
            profile.base_ms + profile.sequence_ms * decodes + profile.kv_ktoken_ms * self._kv_tokens / 1000
            + profile.prefill_ms * prefilled
        )  # fmt: skip
        self.computed_tokens += prefilled + decodes
        self.busy_ms += took_ms
        self.stepping = True
        return took_ms

    def _prefill(self, job: Job, left: int) -> int:
        tokens = min(left, job.input_tokens - job.prefilled)
        job.prefilled += tokens
        self.cache.fill(job)
        return tokens

    def end(self, now_ms: float) -> list[Job]:
        """The step is over. Returns the jobs that ended with it."""
        self.stepping = False
        self._step += 1
        self._kv_tokens += len(self._decoding)
        while self._prefilling and self._prefilling[0].prefilled == self._prefilling[0].input_tokens:
            job = self._prefilling.popleft()
            job.first_ms = now_ms
            self._kv_tokens += job.input_tokens + 1
            heapq.heappush(self._decoding, (self._step + job.output_tokens - 1, job.n, job))
        ended = []
        while self._decoding and self._decoding[0][0] <= self._step:
            ended.append(heapq.heappop(self._decoding)[2])
        for job in ended:
            self._kv_tokens -= job.tokens
            self.cache.give_back(job)
            self.jobs.remove(job)
        return ended
