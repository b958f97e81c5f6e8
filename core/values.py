"""Frozen values that cross a process: what a request is, what a worker sends, how a request ends.

They travel as msgpack maps with named fields. A reader ignores fields it does not know and fills those it misses
with the defaults below, so two releases can run side by side; a field is added with a default, never renamed.
"""

from __future__ import annotations

from decimal import Decimal
from enum import IntEnum, StrEnum
from typing import Any

import msgspec


class Class(IntEnum):
    """Queue priority, most urgent first. Strict: a lower number always goes first."""

    SYSTEM = 0  #: the platform's own probes
    INTERACTIVE = 1  #: a person is waiting
    DEFAULT = 2  #: an ordinary API call
    BULK = 3  #: nobody is waiting: batches, background work


class Outcome(StrEnum):
    """How a request ended. Exactly one per accepted request."""

    COMPLETED = "completed"  #: the model stopped by itself, or at a stop string
    LENGTH = "length"  #: max_tokens or the context was reached
    CANCELLED = "cancelled"  #: the caller went away or asked us to stop
    EXPIRED = "expired"  #: its deadline passed while it waited
    STOPPED = "stopped"  #: its money was used up: a budget's or a balance's
    SHED = "shed"  #: an operator shed its class while it waited
    REFUSED = "refused"  #: the engine cannot do what it asks for, such as keep to a schema; the caller's to mend
    FAILED = "failed"  #: the engine broke on it
    WORKER_LOST = "worker_lost"  #: its worker died after part of a sample was delivered that cannot be gone on with
    GATEWAY_LOST = "gateway_lost"  #: its gateway died, and nobody came for its stream in time


#: Outcomes that the caller gets an answer for; everything else is shown as an error or an abort.
ANSWERED = frozenset({Outcome.COMPLETED, Outcome.LENGTH})
#: Outcomes that the caller gets all of the output of, to the last token that was counted.
DELIVERED = ANSWERED | {Outcome.STOPPED}


class WorkerState(StrEnum):
    """The only states of a worker, in order."""

    LAUNCHING = "launching"  #: asked for, not yet a process
    BOOTING = "booting"  #: a process, importing
    FETCHING = "fetching"  #: weights on their way to local disk
    LOADING = "loading"  #: weights into the engine
    WARMING = "warming"  #: the canary is running
    READY = "ready"  #: claims
    DRAINING = "draining"  #: claims nothing new, ends what it has
    GONE = "gone"  #: no more


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Who stands behind a request."""

    org_id: str
    project_id: str
    key_id: str


class Limit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one scope may use. None: no limit."""

    scope: str  #: "key:<id>", "project:<id>", "org" or "model:<name>" (core/limits/scopes.py)
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  #: input and output together
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    connections: int | None = None  #: WebSockets (core/accounts/sockets.py)
    money_per_day: Decimal | None = None  #: in the organisation's currency, by UTC days
    money_per_month: Decimal | None = None
    prepaid: bool = False  #: a balance binds it; of an organisation alone

    @property
    def limited(self) -> bool:
        """Something but connections is."""
        return any(limit is not None for limit in self.rates) or self.pays

    @property
    def rates(self) -> tuple[int | None, ...]:
        """As the scripts take them."""
        return (
            self.requests_per_minute,
            self.tokens_per_minute,
            self.input_tokens_per_minute,
            self.output_tokens_per_minute,
            self.concurrent_requests,
        )

    @property
    def pays(self) -> bool:
        """Money binds it, so its account must be known before anything is admitted."""
        return self.money_per_day is not None or self.money_per_month is not None or self.prepaid


class Tools(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The functions that a model may call."""

    functions: tuple[dict[str, Any], ...]  #: {name, description?, parameters?, strict?}
    choice: str = "auto"  #: "auto", "none", "required", or "=NAME": this one
    parallel: bool = True  #: more than one call in an answer

    @property
    def forced(self) -> bool:
        """The answer is a call, and a grammar sees to it."""
        return self.choice == "required" or self.choice.startswith("=")

    @property
    def bound(self) -> bool:
        """The answer keeps to a grammar that the engine makes of the functions."""
        strict = any(function.get("strict") for function in self.functions)
        return self.forced or (self.choice != "none" and (strict or not self.parallel))

    @property
    def named(self) -> str:
        """The one function that must be called, if one is named."""
        return self.choice[1:] if self.choice.startswith("=") else ""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the engine is asked for, in vLLM's own terms. `max_tokens` is always set by admission."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  #: 0: off
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None  #: alternatives told of each token; None: not even its own is told
    grammar: dict[str, Any] = {}  #: one of {json: schema}, {json_object: true}, {regex}, {choice: [...]}, {grammar}

    @property
    def greedy(self) -> bool:
        """The same prompt gives the same text again, so a second run may be compared with what was delivered."""
        return self.temperature == 0

    @property
    def resumable(self) -> bool:
        """Going on from the tokens so far, as part of the prompt, gives what going on unbroken could have given.

        Not so for a seed, the random numbers of which start anew; for penalties and the least length, which count
        output only; and for a grammar, which an engine cannot begin in the middle.
        """
        penalised = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1
        bound = self.grammar or self.min_tokens
        return not (penalised or bound) and (self.greedy or self.seed is None)


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An accepted request, as admission writes it and the worker reads it."""

    id: str  #: UUIDv7: request, ending, receipt and billing id
    model: str
    caller: Caller
    gateway: str  #: the gateway process its stream is open on
    prompt_token_ids: list[int]
    sampling: Sampling
    cls: int = Class.DEFAULT
    stream: bool = True  #: False: nothing reaches the client before the end
    expected_tokens: int = 0  #: output that such requests usually come to; 0: not known, max_tokens
    preferred: tuple[str, ...] = ()  #: workers that hold its prefix, best first
    steal_ms: int = 0  #: how long it waits for one of them before another worker may have it
    prefix: tuple[bytes, ...] = ()  #: hashes of its prefix, at the checkpoints of core/prefix.py
    linger_ms: int = 0  #: how long it may go on after its client went away, for the client to come back
    weight: float = 1.0  #: its organisation's share of the model
    patience_ms: int = 0  #: how long it may wait in the queue before nobody wants the answer; 0: as long as it takes
    price_id: int = 0  #: the price row pinned at admission
    tier: str = "standard"  #: what is paid
    cache_salt: str = ""  #: HMAC of the organisation: no prefix is shared between organisations
    admitted_ms: int = 0
    task: str = "generate"  #: or "embed": vectors of the prompts, and no tokens
    n: int = 1  #: answers to each prompt
    more_prompts: tuple[list[int], ...] = ()  #: beyond the first, of one request
    tools: Tools | None = None
    reasons: bool = True  #: the model may think first, if it can
    choice: int = 0  #: of a worker's own: which of the answers a run is
    background: bool = False  #: nobody need wait for it: no reader's going ends it
    scopes: tuple[str, ...] = ()  #: whose limits bind it (core/limits); empty: its key's alone
    usual_tokens: int = 0  #: what such answers come to, where the client named no limit; 0: it did, or nobody knows
    allowance_tokens: int | None = None  #: output that its money covered at admission; None: money does not bind it

    @property
    def width(self) -> int:
        """Runs that it takes: answers to each prompt, of each."""
        return self.n * (1 + len(self.more_prompts))

    @property
    def input_tokens(self) -> int:
        return len(self.prompt_token_ids) + sum(map(len, self.more_prompts))

    @property
    def resumable(self) -> bool:
        """Another worker may go on from what was delivered."""
        plain = self.task == "generate" and self.width == 1 and not (self.tools and self.tools.bound)
        return plain and self.sampling.resumable

    @property
    def rerunnable(self) -> bool:
        """May be claimed again after tokens were published.

        Another worker goes on from there; or nothing reaches the client before the end; or greedy decoding makes the
        same tokens again, which its gateway compares.
        """
        return self.resumable or not self.stream or (self.sampling.greedy and self.width == 1)


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens counted at the engine, from token ids."""

    input_tokens: int = 0
    cached_tokens: int = 0  #: of the input, served from the prefix cache
    output_tokens: int = 0
    reasoning_tokens: int = 0  #: of the output


#: The message of an ending whose caller was stopped (core/limits/stopped.py): why, and what its worker writes.
CALLER_STOPPED = {"revoked": "its key was revoked", "suspended": "its organisation was suspended"}


class Ending(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The terminal record of a request, as `finish` wrote it."""

    id: str
    attempt: int  #: 0: it never ran
    outcome: str  #: an Outcome
    usage: Usage = Usage()
    message: str = ""  #: for people, when it did not end well
    ended_ms: int = 0
