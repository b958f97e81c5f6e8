"""One subscriber per gateway process: frames come in, open streams get their text.

`pump` reads the channels of every model; `watch` asks the queue, once a second, after every open request. Pub/sub
may lose anything: a missing delta is seen by its offset, a missing ending by `watch`.

A stream follows one attempt. An older attempt's deltas are fenced. A newer attempt may only be one that runs the
request again from the start: what was delivered is compared token by token and not sent twice, and a difference
ends the stream with an error, never with a splice of two samples.
"""

from __future__ import annotations

import queue
import threading
import time
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from core.errors import ForebayError, RequestFailed
from core.redis import AWAY, RedisConnectionError, RedisError, Store, listener
from core.stream.frames import Delta, Frame, decode, encode
from core.stream.log import gateway_channel, publish
from core.telemetry import logs, metrics
from core.values import Ending, Request
from tasks.queue import WATCH_MAX, Queue, Seen, generation

log = logs.get(__name__)

#: How often the queue is asked after open requests, seconds.
WATCH_S = 1.0
#: A stream that has nothing to say says so this often, so that proxies (60 s is usual) keep it, seconds.
KEEPALIVE_S = 15.0
#: A gateway that has not watched for this long is gone, ms.
LEASE_MS = 5_000
#: A subscription on which not even this gateway's own echo is heard for so long is dead, seconds. A connection that
#: was cut without a word says nothing by itself.
DEAF_S = 5.0
#: Pause before the channels are subscribed to again, seconds.
PAUSE_S = 0.1
#: Requests to cancel once the store is back. Past it the oldest is forgotten: it runs to its end and is billed as such.
ABANDONED_MAX = 10_000


class Text(msgspec.Struct, frozen=True, gc=False):
    """More of the answer. There is one for every token, so it is the cheapest of the events."""

    text: str
    offset: int  #: tokens of the output up to and with this text


@dataclass(frozen=True)
class Again:
    """The request runs again from the start, and nothing of it has reached the client: forget what came so far."""


@dataclass(frozen=True)
class Waiting:
    """It waits, and so many go first. 1: next."""

    place: int


@dataclass(frozen=True)
class Running:
    """A worker has it."""


@dataclass(frozen=True)
class Idle:
    """Nothing was said for KEEPALIVE_S."""


@dataclass(frozen=True)
class Ended:
    """Its ending. Nothing comes after it."""

    ending: Ending


@dataclass(frozen=True)
class Broken:
    """The stream cannot go on here. Nothing comes after it."""

    error: ForebayError


_ECHO = encode(Frame())

Event = Text | Again | Waiting | Running | Idle | Ended | Broken


class Stream:
    """One open request. The pump puts, one reader takes; what the reader has not taken yet is merged."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.accepted = False  #: the queue has it; until then `watch` does not ask
        self.attempt = 0
        self.tokens = array("I")  #: delivered so far
        self.over = False  #: nothing more is put
        self.ending: Ending | None = None
        self._position = 0  #: in this attempt's output: tokens
        self._chars = 0  #: and characters
        self._sent_chars = 0
        self._place = 0
        self._opened_s = self._spoke_s = time.monotonic()
        self._count = metrics.stream_tokens.labels(request.model).inc
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._late: Ending | None = None
        self._next: Event | None = None  #: read on too far, while texts were merged
        self._said = (0, 0)  #: position and place when the watch last looked

    @property
    def ended(self) -> bool:
        """The queue has ended it, so there is nothing to cancel."""
        return self.ending is not None

    # --- the pump's side

    def take(self, delta: Delta) -> None:
        """A delta of this request."""
        if self.over or delta.attempt < self.attempt:
            metrics.stream_fenced.inc()
            return
        if delta.attempt > self.attempt:
            self._take_over(delta.attempt)
        if (delta.offset, delta.at) != (self._position, self._chars):
            if delta.offset > self._position or delta.at > self._chars:
                self._gap()
            else:
                metrics.stream_fenced.inc()
            return
        if not self._same(delta):
            self.break_off(RequestFailed("Its worker died, and another gave a different answer. Please retry."))
            return
        self._relay(delta)

    def _take_over(self, attempt: int) -> None:
        self.attempt, self._position, self._chars = attempt, 0, 0
        if not self.request.stream:
            self.tokens = array("I")
            self._sent_chars = 0
            self._events.put(Again())
        self._events.put(Running())

    def _same(self, delta: Delta) -> bool:
        """What a second attempt repeats must be what the first one delivered."""
        known = len(self.tokens) - self._position
        return known <= 0 or array("I", delta.tokens[:known]) == self.tokens[self._position :][: len(delta.tokens)]

    def _relay(self, delta: Delta) -> None:
        fresh = delta.tokens[max(0, len(self.tokens) - self._position) :]
        if fresh and not self.tokens:
            metrics.request_ttft_seconds.labels(self.request.model).observe(time.monotonic() - self._opened_s)
        self.tokens.extend(fresh)
        self._position += len(delta.tokens)
        text = delta.text[max(0, self._sent_chars - self._chars) :]
        self._chars += len(delta.text)
        if text:
            self._sent_chars += len(text)
            self._events.put(Text(text, self._position))
        self._count(len(fresh))

    def _gap(self) -> None:
        metrics.stream_gaps.inc()
        log.error("stream_gap", request_id=self.request.id, attempt=self.attempt)
        self.break_off(RequestFailed("A part of the answer was lost on its way. Please retry."))

    def end(self, ending: Ending, *, surely: bool = True) -> None:
        """Its ending came. Not surely: seen by `watch`, while deltas may still be on their way for one more look."""
        if self.over:
            return
        if ending.attempt > self.attempt:  # nothing of that attempt came, and what came before is not its answer
            self._take_over(ending.attempt)
        missing = ending.usage.output_tokens > len(self.tokens) and ending.outcome in ("completed", "length")
        if missing and not surely and self._late is None:
            self._late = ending
        elif missing:
            self._gap()
        else:
            self.ending = ending
            self._close(Ended(ending))

    def break_off(self, error: ForebayError) -> None:
        self._close(Broken(error))

    def waits(self, place: int) -> None:
        if place != self._place and not self.over:
            self._place = place
            self._events.put(Waiting(place))

    def keep_alive(self, now_s: float) -> None:
        """Say Idle after KEEPALIVE_S of silence. Called by the watch: a time-out of the reader's own would cost a
        timer for every token."""
        if not self._events.empty() or self._said != (self._position, self._place):
            self._said, self._spoke_s = (self._position, self._place), now_s
        elif now_s - self._spoke_s >= KEEPALIVE_S:
            self._spoke_s = now_s
            self._events.put(Idle())

    def _close(self, last: Ended | Broken) -> None:
        if not self.over:
            self.over = True
            self._events.put(last)

    # --- the reader's side

    def next(self, timeout_s: float | None = None) -> Event | None:
        """The next event; texts that wait are one. None: nothing came in time."""
        event, self._next = self._next, None
        if event is None:
            try:
                event = self._events.get(timeout=timeout_s)
            except queue.Empty:
                return None
        if not isinstance(event, Text) or self._events.empty():
            return event
        texts = [event.text]
        while not self._events.empty():
            after = self._events.get()
            if not isinstance(after, Text):
                self._next = after
                break
            texts.append(after.text)
            event = after
        return Text("".join(texts), event.offset)


class Subscriber:
    """The open streams of one gateway process."""

    def __init__(self, store: Store, redis_url: str, models: Iterable[str], gateway: str) -> None:
        self.store, self.redis_url, self.gateway = store, redis_url, gateway
        self.queues: Mapping[str, Queue] = {model: Queue(model) for model in models}
        self.streams: dict[str, Stream] = {}
        self.listening = threading.Event()
        self._abandoned: dict[str, str] = {}  #: request -> model
        self._closed = False
        self._heard_s = self._echoed_s = time.monotonic()

    # --- streams

    def open(self, request: Request) -> Stream:
        """Before the request is enqueued, so that no frame comes too early."""
        stream = self.streams[request.id] = Stream(request)
        metrics.stream_open.set(len(self.streams))
        return stream

    def close(self, stream: Stream) -> None:
        """Nobody reads it any more. A request that has not ended is cancelled."""
        if self.streams.pop(stream.request.id, None) is None:
            return
        metrics.stream_open.set(len(self.streams))
        if not stream.ended:
            self.cancel(stream.request.id, stream.request.model)

    def cancel(self, request_id: str, model: str) -> None:
        """Cancel now, or as soon as the store is back."""
        try:
            self.store.run(self.queues[model].cancel(request_id))
        except AWAY:
            while len(self._abandoned) >= ABANDONED_MAX:
                self._abandoned.pop(next(iter(self._abandoned)))
            self._abandoned[request_id] = model

    # --- the pump

    def start(self) -> None:
        """Start both loops as threads (greenlets, under gevent)."""
        for loop in (self.pump, self._watch_forever):
            threading.Thread(target=loop, name=loop.__name__, daemon=True).start()

    def stop(self) -> None:
        self._closed = True

    def pump(self) -> None:
        """Read the channels, and subscribe again whenever the connection is lost."""
        while not self._closed:
            client = listener(self.redis_url)
            try:
                self._read(client)
            except (*AWAY, RedisError) as e:
                log.warning("subscription_lost", error=repr(e))
            finally:
                self.listening.clear()
                client.close()
            time.sleep(PAUSE_S)

    def _read(self, client: Any) -> None:
        pubsub = client.pubsub(ignore_subscribe_messages=False)
        channels = [gateway_channel(model, self.gateway) for model in self.queues]
        pubsub.subscribe(*channels)
        subscribed = 0
        self._heard_s = time.monotonic()
        while not self._closed:
            message = pubsub.get_message(timeout=1.0)
            if message is None:
                self._check_hearing()
                continue
            self._heard_s = time.monotonic()
            if message["type"] == "subscribe":
                subscribed += 1
                if subscribed == len(channels):
                    self.listening.set()
            elif message["type"] == "message":
                self.receive(message["data"])

    def _check_hearing(self) -> None:
        """The watch sends an echo each second. If it could long after the last that was heard, we are deaf."""
        if self._echoed_s - self._heard_s > DEAF_S:
            raise RedisConnectionError("the subscription is deaf")

    def receive(self, raw: bytes) -> None:
        """Hand a frame's deltas and endings to their streams."""
        try:
            frame = decode(raw)
        except msgspec.DecodeError:
            log.exception("frame_unreadable", size_bytes=len(raw))
            return
        for delta in frame.deltas:
            stream = self.streams.get(delta.id)
            if stream is not None:
                stream.take(delta)
        for ending in frame.endings:
            stream = self.streams.get(ending.id)
            if stream is not None:
                stream.end(ending)

    # --- the watch

    def _watch_forever(self) -> None:
        while not self._closed:
            time.sleep(WATCH_S)
            now_s = time.monotonic()
            for stream in list(self.streams.values()):
                stream.keep_alive(now_s)
            try:
                self.watch()
            except (*AWAY, RedisError) as e:
                log.warning("watch_failed", error=repr(e))

    def watch(self) -> None:
        """Ask after every open request, cancel what could not be cancelled before, and send an echo to ourselves."""
        self.store.run(publish(next(iter(self.queues)), self.gateway, _ECHO))
        self._echoed_s = time.monotonic()
        for model, queue_ in self.queues.items():
            ids = [s.request.id for s in list(self.streams.values()) if s.accepted and s.request.model == model]
            for start in range(0, len(ids), WATCH_MAX):
                some = ids[start : start + WATCH_MAX]
                seen = self.store.run(queue_.watch(self.gateway, some, lease_ms=LEASE_MS))
                for request_id, state in zip(some, seen, strict=True):
                    self._saw(request_id, state)
        for request_id, model in list(self._abandoned.items()):
            self.store.run(self.queues[model].cancel(request_id))
            del self._abandoned[request_id]

    def _saw(self, request_id: str, seen: Seen) -> None:
        stream = self.streams.get(request_id)
        if stream is None or stream.over:
            return
        if seen.state == "unknown":
            self._enqueue_again(stream)
        elif seen.state == "waiting":
            stream.waits(seen.place)
        elif seen.ending is not None:
            stream.end(seen.ending, surely=False)

    def _enqueue_again(self, stream: Stream) -> None:
        """The store lost it. While its client waits the gateway still has it: the same id goes on, or ends as lost."""
        log.warning("request_forgotten", request_id=stream.request.id, delivered_tokens=len(stream.tokens))
        task = generation(stream.request)
        call = self.queues[stream.request.model].enqueue(
            task, attempt=stream.attempt, delivered_tokens=len(stream.tokens)
        )
        self.store.run(call)
