"""The one way in: every transport calls `admit`, and whatever it refuses costs nothing.

check the model -> render and tokenize -> pin the price, route -> reserve (web/limiter.py) -> open the stream -> enqueue

And the way back: `recall` finds what is kept of a request, and `attach` brings its stream to this gateway.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from uuid import UUID

import msgspec
import uuid6

from billing import prices
from billing.rating import BILLED, Price
from core import fleet, outlook
from core.accounts.keys import KeyRecord
from core.catalog import Catalog, Model
from core.errors import (
    BadRequest,
    ClassShed,
    ContextTooLong,
    Draining,
    ForebayError,
    Gone,
    LimitReached,
    ModelPaused,
    MoneyDown,
    NotFound,
    StoreDown,
    TokensReached,
    Unavailable,
    UnknownModel,
)
from core.lengths import Lengths, lengths
from core.limits import pace, schemas, scopes
from core.limits.counters import Need, Terms
from core.limits.scopes import Left
from core.prefix import chain, checkpoints, depths, holders
from core.redis import AWAY, Call, Store
from core.stream.frames import Run
from core.stream.log import OUTPUT_MS
from core.telemetry import logs, metrics
from core.values import Caller, Limit, Request, Sampling, Tools, Usage, WorkerState
from tasks.queue import Accepted, Bounds, Seen, generation
from web import bounds, limiter
from web.auth import may_use
from web.dialects import view
from web.dialects.draft import Dialect, Draft, Tier
from web.dialects.view import View, view_of
from web.limiter import Limiter
from web.refusals import Asked
from web.render import Renderer
from web.router import Route, by_name, prefer
from web.stream import Stream
from web.subscriber import Subscriber

log = logs.get(__name__)

#: How often the workers are looked at: who is there, and the size of their KV cache, seconds.
LOOK_S = 5.0
#: How long a stream is kept open here at most for readers elsewhere, when its own has gone, ms.
SHARED_MS = 600_000
#: What the queue says when an operator has stopped something -> what its callers are told.
STOPS: Mapping[str, type[ForebayError]] = {"paused": ModelPaused, "shed": ClassShed}
#: Where a client names no limit, as much of its output is held at first as so many of such answers do not exceed.
USUAL = 0.95
#: Hashing fewer tokens than this takes less than a millisecond, and is done on the spot.
FEW_TOKENS = 4096


@dataclass(frozen=True)
class Admitted:
    """An accepted request: its open stream, and what is left of the limits that bind it."""

    stream: Stream
    left: tuple[Left, ...]
    place: int
    replayed: bool = False  #: it was accepted before, and is shown again (web/transports/idempotency.py)


@dataclass(frozen=True)
class _Fleet:
    """A model's workers, as they were a moment ago."""

    looked_s: float
    kv_tokens: int  #: cache of the largest; 0: nobody has said
    ready: frozenset[str]  #: who claims


@dataclass(frozen=True)
class Prepared:
    """All but accepted."""

    request: Request
    shown: bytes  #: how to show it
    left: tuple[Left, ...]  #: of the limits that bind it: it is reserved


@dataclass(frozen=True)
class _Made:
    """A request, and how its tokens count."""

    request: Request
    need: Need
    terms: Terms


@dataclass(frozen=True)
class Kept:
    """What is kept of a request: enough to show its stream again."""

    request: Request  #: without its prompt
    view: View
    seen: Seen
    runs: list[Run]  #: delivered so far

    @property
    def chars(self) -> int:
        return sum(len(run.text) for run in self.runs)


class Admission:
    """Makes a draft an accepted request."""

    def __init__(
        self,
        catalog: Catalog,
        store: Store,
        subscriber: Subscriber,
        renderers: Mapping[str, Renderer],
        *,
        salt: bytes,
        off_hub: Callable[..., list[bytes]] = lambda work, *args: work(*args),
        limiter: Limiter | None = None,
    ) -> None:
        """`off_hub` calls a function with arguments where it stops no stream. `limiter`: none is one over the same
        store."""
        self.catalog, self.store, self.subscriber, self.renderers = catalog, store, subscriber, renderers
        self.limiter = limiter or Limiter(store)
        self.salt, self.off_hub = salt, off_hub
        self.draining = False
        subscriber.account = self._account
        self._fleets: dict[str, _Fleet] = {}  #: model -> its workers, as they were last looked at

    def admit(
        self, caller: KeyRecord, draft: Draft, transport: str, *, request_id: str | None = None, once: str = ""
    ) -> Admitted:
        """Accept a draft, or refuse it before anything is queued. `request_id`: decided beforehand; once accepted, it
        is accepted no second time. `once`: as in View.

        Raises:
          ForebayError: with the status and code that the caller is shown.
        """
        prepared = self.prepare(caller, draft, request_id, once)
        admitted = self._enqueue(prepared)
        self.note(caller, prepared.request, transport)
        return admitted

    def note(self, caller: KeyRecord, request: Request, transport: str) -> None:
        """It is accepted."""
        metrics.requests_admitted.labels(request.model, transport).inc()
        log.info(
            "request_admitted", request_id=request.id, model=request.model, key_id=caller.key_id, transport=transport
        )

    def prepare(self, caller: KeyRecord, draft: Draft, request_id: str | None = None, once: str = "") -> Prepared:
        """Everything but the queue. What is prepared has a hold: it is enqueued, or forgone. Raises as `admit`."""
        if self.draining:
            raise Draining
        made = Caller(org_id=caller.org_id, project_id=caller.project_id, key_id=caller.key_id)
        shown = msgspec.structs.replace(view_of(draft, made), once=once)
        model = self._model(caller, draft.model)
        bounds.check(model, draft)
        tools = bounds.tools_for(model, draft)
        prompts = self._prompts(draft, tools)
        max_tokens = self._max_tokens(model, draft, max(map(len, prompts)))
        try:
            ready = self._made(caller, draft, prompts, tools, max_tokens, request_id or new_id())
            self._note_schema(ready.request)
            request, left = self._reserve(caller, draft, ready)
        except AWAY:
            raise StoreDown from None
        return Prepared(request, view.encode(shown), left)

    def prompts(self, caller: KeyRecord, draft: Draft) -> list[list[int]]:
        """The token ids of what a draft asks, as it would be admitted with. Accepts nothing; raises as `admit`."""
        model = self._model(caller, draft.model)
        bounds.check(model, draft)
        return self._prompts(draft, bounds.tools_for(model, draft))

    def forgo(self, request: Request) -> None:
        """It was prepared, and is not accepted after all: it counts as no request."""
        self.limiter.settle(request, Usage(), billed=False, forgo=True)

    def release(self, stream: Stream) -> None:
        """The reader is done with the stream. A request that goes on is cancelled; an ended one is settled."""
        self.leave(stream)
        self._account(stream)

    def leave(self, stream: Stream) -> None:
        """The reader is gone. What others read too goes on for them."""
        if self.subscriber.leaving:
            return
        others = stream.leave is not None and stream.leave()
        followed = stream in self.subscriber.followed
        self.subscriber.close(stream, linger_ms=SHARED_MS if others else 0)
        if followed and not others and not stream.ended and not stream.request.background:
            self.subscriber.cancel(stream.request.id, stream.request.model, anywhere=True)

    def _account(self, stream: Stream) -> None:
        """Settle what has ended, once. One that is lost is made again by the usage consumer (billing/events.py)."""
        if stream.ending is None or stream.settled:
            return
        stream.settled = True
        ending = stream.ending
        metrics.requests_ended.labels(stream.request.model, ending.outcome).inc()
        if stream.attached:
            self.limiter.settle_attached(stream.request, ending)
        else:
            self.limiter.settle(stream.request, ending.usage, billed=ending.outcome in BILLED)

    def recall(self, caller: KeyRecord, request_id: str, dialect: Dialect) -> Kept:
        """What is kept of a request that this key has made; of a response, any key of the project that made it.

        Raises:
          NotFound: there is none, or it is another key's, which looks the same.
          Gone: there may have been one, too long ago.
        """
        try:
            found = self._view(request_id)
            if found is None or found.dialect != dialect or not _theirs(found, caller):
                raise _absent(request_id)
            seen = self.store.run(self.subscriber.queues[found.model].peek(request_id))
            output = self.subscriber.filler.read(found.model, request_id)
        except AWAY:
            raise StoreDown from None
        if seen.state == "unknown":
            raise _absent(request_id)
        return Kept(self._stub(request_id, found), found, seen, output.runs)

    def attach(self, kept: Kept) -> Stream:
        """Bring a stream here; it is told from its beginning.

        Raises:
          Draining: this gateway is about to end.
          Gone: it was forgotten meanwhile.
        """
        if self.draining:
            raise Draining
        try:
            stream = self.subscriber.attach(kept.request, view.encode(kept.view))
        except AWAY:
            raise StoreDown from None
        if stream is None:
            raise Gone
        stream.settled = kept.seen.state == "ended"
        log.info("stream_attached", request_id=kept.request.id, state=kept.seen.state)
        return stream

    def _view(self, request_id: str) -> View | None:
        """A request's id does not tell its model, so each model is asked."""
        calls = [queue.view(request_id) for queue in self.subscriber.queues.values()]
        found = [raw for raw in self.store.run_all(calls) if raw]
        return view.decode(found[0]) if found else None

    def _stub(self, request_id: str, found: View) -> Request:
        return Request(
            id=request_id,
            model=found.model,
            caller=found.caller,
            gateway=self.subscriber.gateway,
            prompt_token_ids=[],
            sampling=Sampling(max_tokens=0),
            stream=found.stream,
            linger_ms=found.linger_ms,
            task="embed" if found.dialect == "embeddings" else "generate",
            n=found.width,  # however many prompts they were of
            background=found.background,
        )

    def _prompts(self, draft: Draft, tools: Tools | None) -> list[list[int]]:
        """The token ids of all that is asked; the first is the one that routing goes by."""
        renderer = self.renderers[draft.model]
        if draft.prompts:
            prompts = [renderer.encode(one) if isinstance(one, str) else list(one) for one in draft.prompts]
        else:
            told = draft.template if draft.reasons else {"enable_thinking": False, **draft.template}
            functions = [{"type": "function", "function": function} for function in tools.functions] if tools else []
            prompts = [renderer.render(draft.messages, functions, told)]
        bounds.check_tokens(draft, prompts, renderer.vocabulary)
        return prompts

    def _max_tokens(self, model: Model, draft: Draft, prompt_tokens: int) -> int:
        """How many tokens an answer may have, within the context."""
        if draft.dialect == "embeddings":
            # It has none, and its input may fill the context.
            _room(model, prompt_tokens - 1, None, bounds.prompt_field(draft))
            return 0
        return _room(model, prompt_tokens, draft.max_tokens, bounds.prompt_field(draft))

    def _model(self, caller: KeyRecord, name: str) -> Model:
        model = self.catalog.get(name)
        if model is None or not may_use(caller, name):
            raise UnknownModel(f"The model `{name}` does not exist, or this key may not use it.", param="model")
        return model

    def _made(
        self,
        caller: KeyRecord,
        draft: Draft,
        prompts: list[list[int]],
        tools: Tools | None,
        max_tokens: int,
        request_id: str,
    ) -> _Made:
        prompt, *more = prompts
        cache_salt = _cache_salt(self.salt, caller.org_id)
        hashes = self._hashes(self.catalog[draft.model], prompt, cache_salt)
        model, prefix = self.catalog[draft.model], checkpoints(hashes)
        price, learned, kv_tokens, held = self._known(draft.model, caller.key_id, prefix, draft.tier)
        if price is None and _money_binds(caller):
            price = self._surely_priced(draft.model, draft.tier)
        name = cache_salt + draft.affinity if draft.affinity else ""
        route = self._route(self.catalog[draft.model], len(hashes), held, name)
        embeds = draft.dialect == "embeddings"
        input_tokens = sum(map(len, prompts))
        if embeds:
            _check_held(kv_tokens, input_tokens)
        else:
            max_tokens = _held_by(kv_tokens, input_tokens, max_tokens, draft.max_tokens, draft.width)
        sampling = msgspec.structs.replace(draft.sampling, max_tokens=max_tokens)
        _check_least(sampling)
        request = Request(
            id=request_id,
            model=draft.model,
            caller=Caller(org_id=caller.org_id, project_id=caller.project_id, key_id=caller.key_id),
            gateway=self.subscriber.gateway,
            prompt_token_ids=prompt,
            sampling=sampling,
            task="embed" if embeds else "generate",
            n=draft.n,
            more_prompts=tuple(more),
            tools=tools,
            reasons=draft.reasons,
            tier=price.tier if price else "standard",
            cls=draft.cls,
            weight=caller.weight,
            stream=draft.stream,
            expected_tokens=learned.expected(max_tokens),
            usual_tokens=0 if draft.max_tokens is not None else learned.quantile(USUAL),
            linger_ms=draft.linger_ms,
            patience_ms=int((draft.timeout_s or 0) * 1000),
            price_id=price.id if price else 0,
            cache_salt=cache_salt,
            prefix=prefix,
            preferred=route.preferred,
            steal_ms=route.steal_ms,
            admitted_ms=time.time_ns() // 1_000_000,
        )
        need = _need(request, learned, model.pace, asked=draft.max_tokens is not None)
        return _Made(request, need, limiter.terms(price, model.cached_weight))

    def _hashes(self, model: Model, prompt: list[int], cache_salt: str) -> list[bytes]:
        """Of the prompt's whole blocks."""
        if len(prompt) < FEW_TOKENS:
            return chain(prompt, model.engine.block_tokens, cache_salt)
        return self.off_hub(chain, prompt, model.engine.block_tokens, cache_salt)

    def _route(self, model: Model, blocks: int, held: list[list[str]], name: str) -> Route:
        block_ms, ready = model.engine.block_tokens * model.step.prefill_ms, self._fleets[model.name].ready
        route = prefer(blocks, depths(blocks), held, ready, block_ms=block_ms)
        return by_name(route, name, ready, block_ms=block_ms) if name else route

    def _known(
        self, model: str, key_id: str, prefix: Collection[bytes] = (), tier: Tier = "default"
    ) -> tuple[Price | None, Lengths, int, list[list[str]]]:
        """The price, the lengths of such answers, the most KV cache that any worker has (0: nobody has said), and who
        holds the prefix.

        One exchange; the workers are looked at with it now and then, since their sizes hardly change.
        """
        calls: list[Call[Any]] = [prices.read(model), lengths(model, key_id), holders(model, tuple(prefix))]
        if tier != "default":
            calls.append(prices.read(model, tier))
        known = self._fleets.get(model)
        if look := known is None or time.monotonic() - known.looked_s > LOOK_S:
            calls.append(fleet.workers(model))
        price, learned, held, *rows = self.store.run_all(calls)
        if tier != "default":
            price = rows.pop(0) or price  # a tier without a price of its own costs what any does
        if look:
            ready = frozenset(row.worker for row in rows[0] if row.state == WorkerState.READY)
            self._fleets[model] = _Fleet(time.monotonic(), fleet.largest(rows[0])[0], ready)
        return price, learned, self._fleets[model].kv_tokens, held

    def _surely_priced(self, model: str, tier: Tier) -> Price | None:
        """The price of what money binds, which is not to run free because the store lost its prices. They may be coming
        back at this moment, so whether they are there is asked before what they are."""
        known, price, of_tier = self.store.run_all([prices.known(), prices.read(model), prices.read(model, tier)])
        found: Price | None = of_tier or price
        if not known:
            raise MoneyDown
        return found

    def limits(self, caller: KeyRecord, model: str) -> tuple[Limit, ...]:
        """What binds this caller at a model; without one, what binds it at all."""
        return scopes.binding(
            caller.limits,
            key_id=caller.key_id,
            project_id=caller.project_id,
            model=model,
            prepaid=caller.plan == "prepaid",
        )

    def _reserve(self, caller: KeyRecord, draft: Draft, made: _Made) -> tuple[Request, tuple[Left, ...]]:
        """The request with the limits that it is held under, and what they have left."""
        limits = self.limits(caller, draft.model)
        request = made.request
        if len(limits) > 1:
            request = msgspec.structs.replace(request, scopes=tuple(limit.scope for limit in limits))
        asked = Asked(draft.model, made.need, bounds.prompt_field(draft), draft.dialect == "messages")
        reserved = self.limiter.reserve(request, limits, asked, made.terms, plan=caller.plan)
        if reserved.allowance_tokens is not None:
            request = msgspec.structs.replace(request, allowance_tokens=reserved.allowance_tokens)
        return request, reserved.left

    def _note_schema(self, request: Request) -> None:
        """Each new schema takes a place in the engine's cache, and time of all that it runs."""
        digest = schemas.digest(request.sampling, request.tools)
        wait_ms = self.store.run(schemas.note(request.caller.org_id, digest)) if digest else 0
        if wait_ms:
            raise LimitReached(
                f"Your organisation may send {schemas.PER_MINUTE} different JSON schemas per minute. Send the same "
                "ones again, with what differs in the prompt; or retry after the time given in `retry-after`.",
                retry_after_ms=wait_ms,
            )

    def _enqueue(self, prepared: Prepared) -> Admitted:
        request = prepared.request
        stream = self.subscriber.open(request)
        stream.view = prepared.shown
        task = generation(request, prepared.shown)
        try:
            accepted: Accepted = self.store.run(self.subscriber.queues[request.model].enqueue(task))
        except BaseException as e:
            # It may have been accepted and only the reply lost: then it is cancelled as soon as the store is back.
            self.subscriber.close(stream)
            if isinstance(e, AWAY):
                self.limiter.doubt(request)
                raise StoreDown from None
            raise
        if accepted.refused:
            self.subscriber.close(stream)
            self.forgo(request)
            raise self.full(request, accepted)
        if accepted.status == "accepted" and not accepted.alive:
            self.want(request.model)
        stream.accepted = True
        waits_ms = self.subscriber.estimate_ms(request.model, accepted.place)
        stream.waits(accepted.place, waits_ms, self.subscriber.starting.get(request.model))
        return Admitted(stream, prepared.left, accepted.place)

    def full(self, request: Request, accepted: Accepted) -> ForebayError:
        """What a request is told that an operator has stopped, or that finds a bound of its queue reached, and when
        there is room for it."""
        if accepted.status in STOPS:
            return STOPS[accepted.status]()
        bounds, theirs = self.subscriber.queues[request.model].bounds, accepted.whose == "tenant"
        most = bounds.tenant_waiting if theirs else bounds.waiting
        most_tokens = bounds.tenant_tokens if theirs else bounds.tokens
        above = outlook.over(
            accepted.waiting,
            accepted.waiting_tokens,
            waiting_max=most,
            tokens_max=most_tokens,
            input_tokens=request.input_tokens,
        )
        after_ms = self.subscriber.retry_after_ms(request.model, above)
        by_tokens = accepted.waiting < most
        waits = f"{accepted.waiting_tokens} input tokens wait" if by_tokens else f"{accepted.waiting} requests wait"
        bound = f"at most {most_tokens if by_tokens else most} may. Retry after the time given in `retry-after`"
        if not theirs:
            return Unavailable(f"{waits} for this model, and {bound}.", retry_after_ms=after_ms)
        error = TokensReached if by_tokens else LimitReached
        return error(f"{waits} for this model from your organisation, and {bound}.", retry_after_ms=after_ms)

    def want(self, model: str) -> None:
        """Ask the scaler for a worker: one wake-up, however many requests ask. It sees what waits in any case."""
        if self.subscriber.starting.get(model) is None:
            self.subscriber.starting[model] = fleet.starting([])  # the watch soon knows better
        try:
            if self.store.run(fleet.want(model, time.time_ns() // 1_000_000)):
                log.info("worker_wanted", model=model)
        except AWAY:
            log.warning("want_lost", model=model)


@lru_cache(maxsize=4096)
def _cache_salt(salt: bytes, org_id: str) -> str:
    return hmac.digest(salt, org_id.encode(), hashlib.sha256).hex()[:32]


def new_id() -> str:
    """A request's id: its time comes first, and is the time it was accepted at."""
    return str(uuid6.uuid7())


def _theirs(found: View, caller: KeyRecord) -> bool:
    """Responses outlast their keys, and so are the project's: a new key goes on with what the old one began."""
    made = found.caller
    if found.dialect == "responses":
        return (made.org_id, made.project_id) == (caller.org_id, caller.project_id)
    return made.key_id == caller.key_id


def _absent(request_id: str) -> ForebayError:
    """What an id is told that nothing is kept of for this caller. It depends on the id alone, so that nobody learns
    whether it is another's."""
    age_ms = time.time_ns() // 1_000_000 - (UUID(request_id).int >> 80)
    return Gone() if age_ms > OUTPUT_MS else NotFound("There is no such response, or it is another project's.")


def queue_bounds(model: Model) -> Bounds:
    """What may wait for a model, in the queue's words."""
    told = model.bounds
    return Bounds(
        waiting=told.waiting,
        tokens=told.waiting_tokens,
        tenant_waiting=told.tenant_waiting,
        tenant_tokens=told.tenant_tokens,
    )


def _money_binds(caller: KeyRecord) -> bool:
    return caller.plan == "prepaid" or any(limit.pays for limit in caller.limits)


def _room(model: Model, prompt_tokens: int, asked: int | None, param: str = "messages") -> int:
    """How many tokens may be generated: what was asked for, within the context."""
    room = model.context_tokens - prompt_tokens
    if room < 1:
        raise ContextTooLong(
            f"This model's context is {model.context_tokens} tokens, and the prompt has {prompt_tokens}. Shorten it.",
            param=param,
        )
    if asked is None:
        return min(room, model.max_output_tokens)
    if asked > model.context_tokens:
        raise BadRequest(
            f"max_tokens is {asked}, and this model's context is {model.context_tokens} tokens.",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return min(room, asked)


def _held_by(kv_tokens: int, prompt_tokens: int, max_tokens: int, asked: int | None, width: int = 1) -> int:
    """The same within the KV cache of the largest worker, where one is known: what none can hold would never start."""
    if not kv_tokens or prompt_tokens + width * max_tokens <= kv_tokens:
        return max_tokens
    if asked is None and prompt_tokens + width <= kv_tokens:
        return (kv_tokens - prompt_tokens) // width
    each = f"{max_tokens}" if width == 1 else f"{width} times {max_tokens}"
    raise ContextTooLong(
        f"The prompt has {prompt_tokens} tokens and max_tokens is {each}: {prompt_tokens + width * max_tokens} "
        f"together. The largest worker of this model can hold {kv_tokens}.",
        param="messages" if prompt_tokens >= kv_tokens else "max_tokens",
    )


def _check_held(kv_tokens: int, input_tokens: int) -> None:
    """All inputs of one request go to one worker, which takes them only if it can hold them."""
    if kv_tokens and input_tokens > kv_tokens:
        raise ContextTooLong(
            f"The inputs have {input_tokens} tokens together, and the largest worker of this model can hold "
            f"{kv_tokens}. Send fewer in a request.",
            param="input",
        )


def _check_least(sampling: Sampling) -> None:
    if sampling.min_tokens > sampling.max_tokens:
        raise BadRequest(
            f"Invalid 'min_tokens': it is {sampling.min_tokens}, and at most {sampling.max_tokens} can be made.",
            param="min_tokens",
        )


def _need(request: Request, learned: Lengths, model_pace: float, *, asked: bool) -> Need:
    """What it holds at first: its prompt, and its answers as they can come. Where the client named no limit, what such
    answers come to will do, and less where there is less."""
    most = request.sampling.max_tokens
    usual = 0 if asked else learned.quantile(USUAL)
    need = Need(
        input_tokens=request.input_tokens,
        output_tokens=request.width * pace.likely(model_pace, most, usual),
        least_output_tokens=0,
        pace=request.width * model_pace,
    )
    return replace(need, least_output_tokens=need.window_tokens if asked else min(1, need.output_tokens))
