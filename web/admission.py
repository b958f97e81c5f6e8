"""The one way in: every transport calls `admit`, and whatever it refuses costs nothing.

check the model -> render and tokenize -> pin the price -> reserve -> open the stream -> enqueue
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import uuid6

from billing import prices
from core.accounts.keys import KeyRecord
from core.catalog import Catalog, Model
from core.errors import BadRequest, ContextTooLong, Draining, LimitReached, StoreDown, Unavailable, UnknownModel
from core.limits import counters, scopes
from core.limits.counters import Refused, Reserved
from core.redis import AWAY, Store
from core.telemetry import logs, metrics
from core.values import Caller, Request
from tasks.queue import Accepted, generation
from web.dialects.draft import Draft
from web.render import Renderer
from web.subscriber import Stream, Subscriber

log = logs.get(__name__)

#: What a client is told to wait when the queue is full, ms. (A computed one comes with the queue's outlook.)
FULL_RETRY_MS = 5_000


@dataclass(frozen=True)
class Admitted:
    """An accepted request: its open stream, and what its key may still do."""

    stream: Stream
    reserved: Reserved
    place: int


class Admission:
    """Makes a draft an accepted request."""

    def __init__(
        self, catalog: Catalog, store: Store, subscriber: Subscriber, renderers: Mapping[str, Renderer], *, salt: bytes
    ) -> None:
        self.catalog, self.store, self.subscriber, self.renderers = catalog, store, subscriber, renderers
        self.salt = salt
        self.draining = False

    def admit(self, caller: KeyRecord, draft: Draft, transport: str) -> Admitted:
        """Accept a draft, or refuse it before anything is queued.

        Raises:
          ForebayError: with the status and code that the caller is shown.
        """
        if self.draining:
            raise Draining
        model = self._model(draft.model)
        prompt = self.renderers[model.name].render(draft.messages)
        max_tokens = _room(model, len(prompt), draft.max_tokens)
        try:
            request = self._request(caller, draft, prompt, max_tokens)
            reserved = self._reserve(caller, request)
        except AWAY:
            raise StoreDown from None
        admitted = self._enqueue(caller, request, reserved)
        metrics.requests_admitted.labels(model.name, transport).inc()
        log.info("request_admitted", request_id=request.id, model=model.name, key_id=caller.key_id, transport=transport)
        return admitted

    def release(self, stream: Stream) -> None:
        """The reader is done with the stream. A request that goes on is cancelled; an ended one is settled.

        A settle that is lost here is made again by the usage consumer (billing/events.py).
        """
        self.subscriber.close(stream)
        if stream.ending is None:
            return
        metrics.requests_ended.labels(stream.request.model, stream.ending.outcome).inc()
        usage = stream.ending.usage
        self._settle(stream.request, usage.input_tokens + usage.output_tokens)

    def _model(self, name: str) -> Model:
        try:
            return self.catalog[name]
        except KeyError:
            raise UnknownModel(
                f"The model `{name}` does not exist, or this key may not use it.", param="model"
            ) from None

    def _request(self, caller: KeyRecord, draft: Draft, prompt: list[int], max_tokens: int) -> Request:
        price = self.store.run(prices.read(draft.model))
        return Request(
            id=new_id(),
            model=draft.model,
            caller=Caller(org_id=caller.org_id, project_id=caller.project_id, key_id=caller.key_id),
            gateway=self.subscriber.gateway,
            prompt_token_ids=prompt,
            sampling=msgspec.structs.replace(draft.sampling, max_tokens=max_tokens),
            cls=draft.cls,
            stream=draft.stream,
            patience_ms=int((draft.timeout_s or 0) * 1000),
            price_id=price.id if price else 0,
            cache_salt=hmac.digest(self.salt, caller.org_id.encode(), hashlib.sha256).hex()[:32],
            admitted_ms=time.time_ns() // 1_000_000,
        )

    def _reserve(self, caller: KeyRecord, request: Request) -> Reserved:
        limits = scopes.of_key(caller.key_id, caller.requests_per_minute, caller.concurrent_requests)
        answer = self.store.run(counters.reserve(caller.org_id, request.id, request.model, limits))
        if isinstance(answer, Refused):
            raise _limit_reached(answer)
        return answer

    def _enqueue(self, caller: KeyRecord, request: Request, reserved: Reserved) -> Admitted:
        stream = self.subscriber.open(request)
        try:
            accepted: Accepted = self.store.run(self.subscriber.queues[request.model].enqueue(generation(request)))
        except AWAY:
            # It may have been accepted and only the reply lost: then it is cancelled as soon as the store is back.
            self.subscriber.close(stream)
            raise StoreDown from None
        if accepted.status == "full":
            self.subscriber.close(stream)
            self._settle(request, 0)
            raise Unavailable("Too many requests wait for this model.", retry_after_ms=FULL_RETRY_MS)
        stream.accepted = True
        return Admitted(stream, reserved, accepted.place)

    def _settle(self, request: Request, used_tokens: int) -> None:
        call = counters.settle(request.caller.org_id, request.id, [f"key:{request.caller.key_id}"], used_tokens)
        try:
            self.store.run(call)
        except AWAY:
            log.warning("settle_lost", request_id=request.id)


def new_id() -> str:
    """A request's id: its time comes first, and is the time it was accepted at."""
    return str(uuid6.uuid7())


def _room(model: Model, prompt_tokens: int, asked: int | None) -> int:
    """How many tokens may be generated: what was asked for, within the context."""
    room = model.context_tokens - prompt_tokens
    if room < 1:
        raise ContextTooLong(
            f"This model's context is {model.context_tokens} tokens, and the prompt has {prompt_tokens}. Shorten it.",
            param="messages",
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


def _limit_reached(refused: Refused) -> LimitReached:
    limit = refused.limit
    if refused.reason == "concurrency":
        message = f"This key may have {limit.concurrent_requests} requests open at once. Retry when one has ended."
        return LimitReached(message, retry_after_ms=1000)
    message = f"This key may make {limit.requests_per_minute} requests per minute."
    return LimitReached(message, retry_after_ms=refused.retry_after_ms)
