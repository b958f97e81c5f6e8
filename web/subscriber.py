"""One subscriber per gateway process: frames come in, open streams (web/stream.py) get their text.

`pump` reads the channels of every model; `watch` asks the queue, once a second, after every open request; `fill` reads
what streams miss. Pub/sub may lose anything: a missing delta is seen by its offset, a missing ending by `watch`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import msgspec

from core import fleet
from core.errors import ForebayError, RequestFailed
from core.outlook import Pace, Starting, estimate_ms, retry_after_ms
from core.redis import AWAY, Call, RedisConnectionError, RedisError, RedisTimeoutError, Store, listener
from core.stream.frames import Delta, Frame, decode, encode
from core.stream.log import Output, gateway_channel, logged, publish, save, saved
from core.telemetry import logs, metrics
from core.values import Request
from tasks.queue import GATEWAY_LEASE_MS, LOST_MS, WATCH_MAX, Bounds, Queue, Seen, Watched, generation
from web.stream import KEEPALIVE_S, Stream

log = logs.get(__name__)

#: How often the queue is asked after open requests, seconds.
WATCH_S = 1.0
#: A subscription on which not even this gateway's own echo is heard for so long is dead, seconds. A connection that
#: was cut without a word says nothing by itself.
DEAF_S = 5.0
#: Deltas that are told in a row. To tell one is to send it, about 20 µs; then it is everybody else's turn.
TURN_DELTAS = 128
#: How long a message is waited for before that is looked at, seconds.
HEAR_S = 1.0
#: Pause before the channels are subscribed to again, seconds.
PAUSE_S = 0.1
#: Requests to cancel once the store is back. Past it the oldest is forgotten: it runs to its end and is billed as such.
ABANDONED_MAX = 10_000
#: Streams that go on without a reader, for it to come back. Past it the oldest of who has most is cancelled.
LINGERING_MAX = 1_000
#: A lingering stream that a client comes back to is kept at least so long: longer than the store is asked, seconds.
HOLD_ON_S = 5.0
#: Pauses between the tries to fill a gap, seconds: what was logged is there at the first. Only tries that the store
#: answered count. After the last the stream ends with an error.
FILL_PAUSES_S = (0.25, 1.0)
#: Streams that are filled in one exchange.
FILL_MAX = 256

#: How often a stream that is open elsewhere too is read from what is saved and logged, seconds.
FOLLOW_S = 0.25
#: Pause after each reading of a model's logs for clients that look, seconds. One takes up to 20 ms from all streams,
#: and a client may look as often as it likes; those who come meanwhile share the next.
REST_S = 0.1

_ECHO = encode(Frame())


class Subscriber:
    """The open streams of one gateway process."""

    def __init__(
        self,
        store: Store,
        redis_url: str,
        models: Iterable[str],
        gateway: str,
        *,
        bounds: Mapping[str, Bounds] | None = None,
        home_ms: int = GATEWAY_LEASE_MS + LOST_MS,
        keepalive_s: float = KEEPALIVE_S,
    ) -> None:
        """`bounds`: model -> what may wait for it, where that is not the queue's own default. `home_ms`: a gateway that
        has been silent for so long is given up, with what is open there. `keepalive_s`: how long a stream
        may have nothing to say before it says that."""
        self.keepalive_s = keepalive_s
        self.store, self.redis_url, self.gateway = store, redis_url, gateway
        told = bounds or {}
        self.queues: Mapping[str, Queue] = {
            model: Queue(model, told.get(model, Bounds()), home_ms=home_ms) for model in models
        }
        self.streams: dict[str, Stream] = {}
        self.followed: set[Stream] = set()  #: read here, open elsewhere, or at another reader here
        self._sharing: list[str] = []
        self.listening = threading.Event()
        self.watched: dict[str, Watched] = {}  #: model -> what its queue last said
        self.paces: dict[str, Pace] = {model: Pace() for model in self.queues}
        self.starting: dict[str, Starting | None] = {}  #: model -> the worker that is awaited, if none is ready
        self.filler = Filler(store, self.queues)
        self.account: Callable[[Stream], None] = lambda stream: None  #: for one that ended without a reader
        self._lingering: dict[Stream, float] = {}  #: -> until when, seconds
        self._abandoned: dict[str, tuple[str, str]] = {}  #: request -> model, who says so ('': whoever asks may)
        self.leaving = False  #: this gateway is about to end: what is open here is left to another
        self._closed = False
        self._heard_s = self._echoed_s = time.monotonic()

    # --- streams

    def open(self, request: Request) -> Stream:
        """Before the request is enqueued, so that no frame comes too early."""
        return self._register(Stream(request, self.filler.ask))

    def attach(self, request: Request, view: bytes = b"") -> Stream | None:
        """Bring the stream of an accepted request here, from wherever it is; it is told from its beginning.

        `request` may lack its prompt. None: nobody knows it, or not of this key.

        Raises:
          AWAY: the store is.
        """
        self._hold_on(self.streams.get(request.id))
        seen = self.store.run(self.queues[request.model].attach(request.id, request.caller.key_id, self.gateway))
        if seen.state == "unknown":
            return None
        if (before := self.streams.get(request.id)) is not None:
            self._pass_on(before, lingering=self._lingering.pop(before, None) is not None)
        # What came before this is in the log, from which it is filled; an ending the watch will find.
        stream = self._register(Stream(request, self.filler.ask, attached=True))
        stream.view = view
        stream.accepted = True
        stream.fence(seen.attempt)
        self._saw(stream, seen)
        self.filler.ask(stream)
        return stream

    def close(self, stream: Stream, *, linger_ms: int = 0) -> None:
        """Nobody reads it any more. A request that has not ended is cancelled, or goes on for its reader to return, or
        for others (`linger_ms`)."""
        self.followed.discard(stream)
        if self.streams.get(stream.request.id) is not stream or stream in self._lingering:
            return
        over = stream.ended or stream.moved or stream.failed
        linger_ms = max(linger_ms, stream.request.linger_ms)
        if linger_ms and stream.accepted and not over:
            self._linger(stream, linger_ms)
        else:
            self._drop(stream)

    def cancel(self, request_id: str, model: str, *, anywhere: bool = False) -> None:
        """Cancel now, or as soon as the store is back. `anywhere`: also if its stream is open elsewhere."""
        gateway = "" if anywhere else self.gateway
        try:
            self.store.run(self.queues[model].cancel(request_id, gateway))
        except (*AWAY, RedisError):
            while len(self._abandoned) >= ABANDONED_MAX:
                self._abandoned.pop(next(iter(self._abandoned)))
            self._abandoned[request_id] = model, gateway

    def cut_off(self, stream: Stream, error: ForebayError) -> None:
        """It may not go on: its reader is told, and it is cancelled, wherever it is open."""
        stream.break_off(error)
        self._end_lingering(stream)
        self.cancel(stream.request.id, stream.request.model, anywhere=True)

    def estimate_ms(self, model: str, place: int) -> int | None:
        """How long a request at this place will wait; None: no telling."""
        return estimate_ms(place, self.paces[model], self.starting.get(model))

    def retry_after_ms(self, model: str, over: int) -> int:
        """When to come again, if so many requests must be started first."""
        return retry_after_ms(over, self.paces[model], self.starting.get(model))

    def _register(self, stream: Stream) -> Stream:
        self.streams[stream.request.id] = stream
        metrics.stream_open.set(len(self.streams))
        return stream

    def _hold_on(self, before: Stream | None) -> None:
        """Its client is back: let it not be cancelled while the store is asked."""
        if before in self._lingering:
            self._lingering[before] = max(self._lingering[before], time.monotonic() + HOLD_ON_S)

    def _drop(self, stream: Stream) -> None:
        del self.streams[stream.request.id]
        metrics.stream_open.set(len(self.streams))
        if not stream.ended and not stream.moved and not self.leaving:
            self.cancel(stream.request.id, stream.request.model)

    @contextmanager
    def sharing(self, request_id: str) -> Iterator[None]:
        """Of one that several may read: while its stream is opened here, until its `leave` is set."""
        self._sharing.append(request_id)
        try:
            yield
        finally:
            self._sharing.remove(request_id)

    def _pass_on(self, stream: Stream, *, lingering: bool = False) -> None:
        """It is open elsewhere now. A reader who shares it reads on from what is saved; another is told to go."""
        shared = stream.leave is not None or stream.request.id in self._sharing
        if not shared or lingering:
            stream.move()
            return
        if self.streams.get(stream.request.id) is stream:
            del self.streams[stream.request.id]
        self.followed.add(stream)

    def _linger(self, stream: Stream, linger_ms: int) -> None:
        if len(self._lingering) >= LINGERING_MAX:
            self._end_lingering(self._crowded())
        stream.linger()
        self._lingering[stream] = time.monotonic() + linger_ms / 1000

    def _end_lingering(self, stream: Stream) -> None:
        if self._lingering.pop(stream, None) is not None and self.streams.get(stream.request.id) is stream:
            self._drop(stream)
            self.account(stream)

    def _crowded(self) -> Stream:
        """The oldest of the organisation that has most: nobody's streams are ended for another's."""
        counts = Counter(stream.request.caller.org_id for stream in self._lingering)
        [(most, _)] = counts.most_common(1)
        return next(stream for stream in self._lingering if stream.request.caller.org_id == most)

    # --- the loops

    def start(self) -> None:
        """Start the loops as threads (greenlets, under gevent)."""
        for loop in (self.pump, self._watch_forever, self._fill_forever, self._follow_forever):
            threading.Thread(target=self._supervise, args=(loop,), name=loop.__name__, daemon=True).start()

    def stop(self) -> None:
        self._closed = True

    def _supervise(self, loop: Callable[[], None]) -> None:
        while not self._closed:
            try:
                loop()
            except Exception:  # a fault of ours; a gateway without this loop would be worse than one that tries again
                log.exception("loop_failed", loop=loop.__name__)
                metrics.loops_failed.labels(loop.__name__).inc()
                time.sleep(PAUSE_S)

    def _fill_forever(self) -> None:
        while not self._closed:
            self.filler.wait(WATCH_S)
            self.filler.fill()

    # --- streams that are open elsewhere

    def _follow_forever(self) -> None:
        while not self._closed:
            time.sleep(FOLLOW_S)
            try:
                self.follow()
            except (*AWAY, RedisError) as e:
                log.warning("follow_failed", error=repr(e))

    def follow(self) -> None:
        """Tell the readers of streams that are open elsewhere what there is."""
        self.followed -= {stream for stream in list(self.followed) if stream.over}
        for model in self.queues:
            streams = [stream for stream in list(self.followed) if stream.request.model == model]
            for start in range(0, len(streams), FILL_MAX):
                self._follow(model, streams[start : start + FILL_MAX])

    def _follow(self, model: str, streams: Sequence[Stream]) -> None:
        ids = [stream.request.id for stream in streams]
        # The state first: of what has ended the output is whole then.
        seen: list[Seen] = self.store.run_all([self.queues[model].peek(one) for one in ids])
        for stream, one, output in zip(streams, seen, self.filler.found(model, ids), strict=True):
            if one.state == "unknown":
                stream.fail(RequestFailed("The queue lost this request. Please retry."))
                continue
            stream.fence(one.attempt)
            _filled(stream, output)
            if one.ending is not None:
                stream.end(one.ending)
            time.sleep(0)  # the pump's turn

    # --- the pump

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
            message = _message(pubsub)
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
            time.sleep(0)  # neither reading nor sending waits while there is more: everybody else's turn

    def _check_hearing(self) -> None:
        """The watch sends an echo each second. If it could long after the last that was heard, we are deaf."""
        if self._echoed_s - self._heard_s > DEAF_S:
            raise RedisConnectionError("the subscription is deaf")

    def receive(self, raw: bytes) -> None:
        """Hand a frame's deltas, takeovers and endings to their streams."""
        try:
            frame = decode(raw)
        except msgspec.DecodeError:
            log.exception("frame_unreadable", size_bytes=len(raw))
            return
        for n, delta in enumerate(frame.deltas, 1):
            stream = self.streams.get(delta.id)
            if stream is not None:
                stream.take(delta)
            if n % TURN_DELTAS == 0:
                time.sleep(0)
        for takeover in frame.takeovers:
            stream = self.streams.get(takeover.id)
            if stream is not None:
                stream.fence(takeover.attempt)
        for ending in frame.endings:
            stream = self.streams.get(ending.id)
            if stream is not None:
                stream.end(ending)

    # --- the watch

    def _watch_forever(self) -> None:
        while not self._closed:
            time.sleep(WATCH_S)
            now_s = time.monotonic()
            for stream in [*self.streams.values(), *self.followed]:
                stream.keep_alive(now_s, self.keepalive_s)
            self.end_lingerers(now_s)
            self.watch()

    def end_lingerers(self, now_s: float) -> None:
        """Let go of streams that nobody came back for, and of those that ended or moved meanwhile."""
        for stream, until_s in list(self._lingering.items()):
            if stream.over or now_s >= until_s:
                self._end_lingering(stream)

    def watch(self) -> None:
        """Renew this gateway's lease at every queue, ask after every open request, cancel what could not be cancelled
        before, and send an echo to ourselves. Each model for itself: the node of one may be away."""
        failed: Exception | None = None
        looks: list[Callable[[], None]] = [partial(self._watch_model, model) for model in self.queues]
        for look in (self._echo, *looks, self._cancel_abandoned):
            try:
                look()
            except (*AWAY, RedisError) as e:
                failed = e
        if failed is not None:
            log.warning("watch_failed", error=repr(failed))

    def _echo(self) -> None:
        self.store.run(publish(next(iter(self.queues)), self.gateway, _ECHO))
        self._echoed_s = time.monotonic()

    def _cancel_abandoned(self) -> None:
        for request_id, (model, gateway) in list(self._abandoned.items()):
            self.store.run(self.queues[model].cancel(request_id, gateway))
            self._abandoned.pop(request_id, None)

    def _watch_model(self, model: str) -> None:
        streams = [s for s in list(self.streams.values()) if s.accepted and s.request.model == model]
        for start in range(0, max(len(streams), 1), WATCH_MAX):
            some = streams[start : start + WATCH_MAX]
            watched = self.store.run(self.queues[model].watch(self.gateway, [s.request.id for s in some]))
            if start == 0:
                self._look(model, watched)
            for stream, seen in zip(some, watched.seen, strict=True):
                self._saw(stream, seen)

    def _look(self, model: str, watched: Watched) -> None:
        """How the queue moves, and who is awaited when it does not."""
        now_ms = time.monotonic_ns() // 1_000_000
        self.watched[model] = watched
        self.paces[model] = self.paces[model].look(watched.started, watched.waiting, watched.workers, now_ms)
        self.starting[model] = None
        if watched.waiting and not watched.workers:
            rows: list[fleet.Worker] = self.store.run(fleet.workers(model))
            self.starting[model] = fleet.starting(rows)

    def _saw(self, stream: Stream, seen: Seen) -> None:
        if stream.over or self.streams.get(stream.request.id) is not stream:
            return
        match seen.state:
            case "unknown":
                self._enqueue_again(stream)
            case "elsewhere":
                self._pass_on(stream)
            case "waiting":
                model = stream.request.model
                stream.waits(seen.place, self.estimate_ms(model, seen.place), self.starting.get(model))
            case "ended":
                assert seen.ending is not None
                stream.end(seen.ending)

    def _enqueue_again(self, stream: Stream) -> None:
        """The store lost it. While its client waits the gateway still has it: the same id goes on from what was
        relayed, or ends as lost."""
        request = stream.request
        log.warning("request_forgotten", request_id=request.id, delivered_tokens=len(stream.tokens))
        if stream.attached:
            stream.fail(RequestFailed("The queue lost this request. Please retry."))
            return
        shown = bool(stream.tokens)
        if shown and not stream.put_back:
            stream.fence(stream.attempt + 1)  # its worker does not know yet that it lost it
            self.store.run_all(save(request.model, *stream.delivered()))
            stream.put_back = True
        task = generation(request, stream.view)
        call = self.queues[request.model].enqueue(task, attempt=stream.attempt, shown=shown, again=True)
        again = self.store.run(call)
        stream.put_back = again.status == "full"


@dataclass(eq=False)
class Reading:
    """Of the output of several requests, for whoever asks before it begins."""

    ids: list[str] = field(default_factory=list)
    outputs: dict[str, Output] = field(default_factory=dict)
    failed: Exception | None = None


@dataclass
class Gap:
    """A stream that misses a part."""

    due_s: float = 0.0  #: when it is tried next
    tries: int = 0


class Filler:
    """Reads what streams miss from saved output and logs. One loop for the process, so that a gap stalls no other
    stream; streams that miss something of the same worker share one reading of its log."""

    def __init__(self, store: Store, queues: Mapping[str, Queue]) -> None:
        self.store, self.queues = store, queues
        self.gaps: dict[Stream, Gap] = {}  #: at most one for every open stream
        self._readings: dict[str, Reading] = {}  #: model -> the next one
        self._joining = threading.Lock()
        self._rests_until_s = dict.fromkeys(queues, 0.0)
        self._turns = {model: threading.Lock() for model in queues}  #: one reading of a model at a time
        self._asked: queue.SimpleQueue[Stream] = queue.SimpleQueue()

    def ask(self, stream: Stream) -> None:
        """Fill this stream, soon. Never blocks."""
        self._asked.put(stream)

    def wait(self, timeout_s: float) -> None:
        """Until there is something to fill, or time is up."""
        due_s = min((gap.due_s for gap in self.gaps.values()), default=float("inf"))
        try:
            asked = self._asked.get(timeout=max(0.0, min(timeout_s, due_s - time.monotonic())))
        except queue.Empty:
            return
        self.gaps[asked] = Gap()

    def fill(self) -> None:
        """Try what is due, once."""
        while not self._asked.empty():
            self.gaps[self._asked.get()] = Gap()
        now_s = time.monotonic()
        for model in self.queues:
            due = [s for s, gap in self.gaps.items() if s.request.model == model and gap.due_s <= now_s]
            for start in range(0, len(due), FILL_MAX):
                self._fill(model, due[start : start + FILL_MAX])

    def _fill(self, model: str, streams: Sequence[Stream]) -> None:
        ids = [stream.request.id for stream in streams]
        try:
            outputs = self.found(model, ids)
        except AWAY as e:
            log.warning("fill_failed", error=repr(e))
            for stream in streams:
                self.gaps[stream].due_s = time.monotonic() + PAUSE_S
            return
        except Exception:  # whatever it is, these streams must end; it must not end the loop
            log.exception("fill_failed")
            outputs = map(Output, ids)
        for stream, output in zip(streams, outputs, strict=True):
            self._hand(stream, output)
            time.sleep(0)  # the pump's turn

    def _hand(self, stream: Stream, output: Output) -> None:
        gap = self.gaps.pop(stream)
        if _filled(stream, output):
            metrics.stream_filled.inc()
        elif gap.tries < len(FILL_PAUSES_S):
            due_s = time.monotonic() + FILL_PAUSES_S[gap.tries]
            self.gaps[stream] = Gap(due_s, gap.tries + 1)
        else:
            log.error("stream_gap_stays", request_id=stream.request.id, tokens=len(stream.tokens))
            stream.give_up()

    def read(self, model: str, request_id: str) -> Output:
        """A request's output as it is now. Those who ask while others are served share the next reading: a log is that
        of a whole batch, and when a gateway has died, all its clients ask at once.

        Raises:
          AWAY: the store is.
        """
        with self._joining:
            reading = self._readings.get(model)
            if reading is None or len(reading.ids) >= FILL_MAX:
                reading = self._readings[model] = Reading()
            reading.ids.append(request_id)
        with self._turns[model]:
            if reading.failed is not None:
                raise reading.failed
            if not reading.outputs:
                time.sleep(max(0.0, self._rests_until_s[model] - time.monotonic()))
                self._read(model, reading)
        return reading.outputs[request_id]

    def _read(self, model: str, reading: Reading) -> None:
        with self._joining:
            if self._readings.get(model) is reading:
                del self._readings[model]
        try:
            for output in self.found(model, reading.ids):
                reading.outputs[output.request_id] = output
                time.sleep(0)  # the pump's turn
        except Exception as e:
            reading.failed = e
            raise
        finally:
            self._rests_until_s[model] = time.monotonic() + REST_S

    def found(self, model: str, ids: Sequence[str]) -> Iterator[Output]:
        """The output of each request, read now and put together one by one. Logs are read before what is saved:
        whatever is cut from a log between the two has been saved."""
        trails = self.store.run_all([self.queues[model].logs_of(request_id) for request_id in ids])
        workers = list(dict.fromkeys(chain.from_iterable(trails)))
        calls: list[Call[Any]] = [logged(model, worker) for worker in workers]
        replies = self.store.run_all(calls + [saved(model, request_id) for request_id in ids])
        wanted = set(ids)
        steps = {worker: _by_request(frames, wanted) for worker, frames in zip(workers, replies, strict=False)}
        parts = zip(ids, replies[len(workers) :], trails, strict=True)
        return (_output(one, kept, [steps[worker].get(one, []) for worker in trail]) for one, kept, trail in parts)


def _message(pubsub: Any) -> Any:
    """The next message; None: none came for a second. redis-py's own way polls twice for each, and there is one for
    every step of every worker."""
    try:
        raw = pubsub.connection.read_response(disconnect_on_error=False, push_request=True, timeout=HEAR_S)
    except RedisTimeoutError:
        return None
    return pubsub.handle_message(raw)


def _filled(stream: Stream, output: Output) -> bool:
    try:
        return stream.fill(output)
    except Exception:  # a fault of ours in one stream must not end the loop of all
        log.exception("fill_failed", request_id=stream.request.id)
        return False


def _by_request(frames: Iterable[Frame], wanted: set[str]) -> dict[str, list[Delta]]:
    """A log's deltas of these requests: it holds those of a whole batch."""
    found: dict[str, list[Delta]] = {}
    for frame in frames:
        for delta in frame.deltas:
            if delta.id in wanted:
                found.setdefault(delta.id, []).append(delta)
    return found


def _output(request_id: str, kept: Iterable[Delta], logs_of_it: Iterable[list[Delta]]) -> Output:
    output = Output(request_id)
    output.add(kept)
    for deltas in logs_of_it:
        output.add(deltas)
    return output
