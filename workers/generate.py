"""One request on the engine: its body, its pieces, its ending; and the publisher that all requests of a worker share.

Tokens leave in frames: what one engine step gave goes out as one entry of the worker's log and one publish per
gateway, so that commands per step do not grow with the batch. A gateway that missed a publish reads the log, so a step
is done with once the store took it; while the store is away, steps wait here.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import msgspec

from core import prefix
from core.redis import AWAY, AsyncStore, Call, RedisError
from core.stream.frames import Delta, Frame, Output, cut_of, decode, encode
from core.stream.log import cut_log, log_step, logged, publish, save, saved
from core.telemetry import logs
from core.values import ANSWERED, Outcome, Request, Usage
from tasks.runner import Finished, Held, Runner
from workers.engine import Engine, EngineDead, EngineRefused, Piece
from workers.headroom import Turnover
from workers.resume import Plan, Seam, plan

log = logs.get(__name__)

_OUTCOMES = {"stop": Outcome.COMPLETED, "length": Outcome.LENGTH}
#: Pause between tries while the store is away, or the lease is not vouched for, seconds.
_PAUSE_S = 0.05
#: Most that waits for a store that is away, bytes of frames. At this bound generation stops.
BUFFER_BYTES = 64 * 2**20
#: Most that one exchange carries: steps, and bytes of frames. A single step is never too much.
SEND_STEPS, SEND_BYTES = 64, 2**20
#: Output is saved every so many beats,
SAVE_BEATS = 5
#: and when the log has grown by so much since the last time, bytes: whoever takes over reads it at once.
LOG_BYTES = 4 * 2**20
#: Most attempts that one `deliver` is told of.
DELIVER_MAX = 64
#: Lengths of answers that wait to be told; the oldest go.
LEARNED_MAX = 1024
#: How long what was read of another worker's log is kept for those claimed in the same moment, seconds.
TRAIL_S = 2.0


@dataclass(eq=False)
class _Stream:
    """What is not saved yet of one attempt's output, and how far it is with ending."""

    held: Held
    offset: int
    at: int
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    begun: bool = False  #: it has put something
    last: bool = False  #: what is saved next ends the request
    goal: int = 0  #: the last step that has something of it
    away: asyncio.Future[None] | None = None  #: it puts nothing more; done when all of it is sent and saved

    @property
    def key(self) -> tuple[str, int]:
        return self.held.claim.id, self.held.claim.attempt

    def add(self, delta: Delta) -> None:
        self.tokens += delta.tokens
        self.text += delta.text
        self.finish = delta.finish

    def unsaved(self) -> Delta:
        return Delta(*self.key, self.offset, tuple(self.tokens), self.text, self.at, finish=self.finish)

    def forget(self, delta: Delta) -> None:
        """It is saved."""
        del self.tokens[: len(delta.tokens)]
        self.text = self.text[len(delta.text) :]
        self.offset, self.at = self.offset + len(delta.tokens), self.at + len(delta.text)


@dataclass(eq=False)
class _Step:
    """One engine step's frames, by gateway; those of gateway "" are only logged."""

    frames: dict[str, bytes]
    sealed_s: float
    size_bytes: int = 0

    def __post_init__(self) -> None:
        self.size_bytes = sum(map(len, self.frames.values()))

    def without(self, key: tuple[str, int]) -> None:
        kept: dict[str, bytes] = {}
        for gateway, raw in self.frames.items():
            frame = decode(raw)
            if deltas := tuple(delta for delta in frame.deltas if (delta.id, delta.attempt) != key):
                kept[gateway] = encode(Frame(worker=frame.worker, deltas=deltas))
        self.frames = kept
        self.__post_init__()


class Publisher:
    """Logs and publishes each step, in order, and saves what was delivered.

    What the store has not taken waits here, `buffer_s` and BUFFER_BYTES at most: then generation stops, and what
    waits goes out, and what ran goes back to the queue, when the store is there again.
    """

    def __init__(
        self,
        store: AsyncStore,
        runner: Runner,
        model: str,
        *,
        buffer_s: float,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self.store, self.runner, self.model = store, runner, model
        self.buffer_s, self.buffer_bytes = buffer_s, buffer_bytes
        self.waiting_bytes = 0  #: frames that the store has not taken
        self._pending: list[tuple[Held, Delta]] = []  #: of the step that is under way
        self._steps: deque[_Step] = deque()
        self._sealed = self._sent = 0  #: steps, ever
        self._streams: dict[tuple[str, int], _Stream] = {}
        self._first: list[_Stream] = []  #: whose first delta is on its way
        self._save_due = False
        self._entry = b""  #: the last in the log
        self._cut = b""  #: where the log was cut last
        self._logged_bytes = 0  #: since the last save of all
        self._stepped = asyncio.Event()

    # --- what requests and the engine call

    def open(self, held: Held, offset: int = 0, at: int = 0) -> None:
        """An attempt begins; what lies before is saved."""
        stream = _Stream(held, offset, at)
        self._streams[stream.key] = stream

    def put(self, held: Held, delta: Delta) -> None:
        """Part of this step. It leaves when the step is over."""
        stream = self._streams[delta.id, delta.attempt]
        if not stream.begun:
            stream.begun = True
            self._first.append(stream)
        stream.add(delta)
        stream.goal = self._sealed + 1
        self._pending.append((held, delta))

    def step(self) -> None:
        """The engine's step is over."""
        if self._pending:
            self._seal()
            self._bound()
        self._stepped.set()

    async def close(self, held: Held) -> None:
        """Return when all that the request put is sent and saved; it has come to its end."""
        await self._put_away(held, last=True)

    async def put_away(self, held: list[Held]) -> None:
        """The same for requests that another worker goes on with."""
        await asyncio.gather(*[self._put_away(one, last=False) for one in held])

    def forget(self, held: Held) -> None:
        """Somebody else has the request, or it is over: nothing of it that waits here may leave."""
        stream = self._streams.pop((held.claim.id, held.claim.attempt), None)
        if stream is None:
            return
        self._pending = [(one, delta) for one, delta in self._pending if one is not held]
        self._first = [one for one in self._first if one is not stream]
        for step in self._steps:
            step.without(stream.key)
        self.waiting_bytes = sum(step.size_bytes for step in self._steps)
        self._done(stream)
        self._stepped.set()

    # --- loops

    async def run(self) -> None:
        """The publishing loop."""
        while True:
            await self._stepped.wait()
            self._stepped.clear()
            if not await self.flush():
                await asyncio.sleep(_PAUSE_S)
                self._stepped.set()

    async def saves(self) -> None:
        """The saving loop: it says when; the publishing loop does it, so that one loop writes."""
        while True:
            await asyncio.sleep(SAVE_BEATS * self.runner.beat_ms / 1000)
            self._save_due = True
            self._stepped.set()

    async def flush(self) -> bool:
        """Send what is sealed, save what is to be. False: the store is away, or the lease is in doubt."""
        if not (self._steps or self._save_due or any(stream.away for stream in self._streams.values())):
            return True
        try:
            async with asyncio.timeout(_PAUSE_S):  # not wait_for, which before 3.12 may swallow a cancellation
                await self.runner.vouched()
            self._forget_fenced()
            await self._announce()
            await self._exchange()
        except TimeoutError:
            return False
        except (*AWAY, RedisError) as e:
            log.warning("step_not_taken", error=repr(e), steps=len(self._steps))
            return False
        if self._steps:
            self._stepped.set()
        return True

    # --- steps

    def _seal(self) -> None:
        by_gateway: dict[str, list[Delta]] = defaultdict(list)
        for held, delta in self._pending:
            by_gateway[held.claim.gateway].append(delta)
        self._pending = []
        worker = self.runner.worker
        frames = {gateway: encode(Frame(worker=worker, deltas=tuple(deltas))) for gateway, deltas in by_gateway.items()}
        step = _Step(frames, time.monotonic())
        self._steps.append(step)
        self._sealed += 1
        self.waiting_bytes += step.size_bytes

    def _bound(self) -> None:
        """Too much waits, or for too long: nothing more may come to it."""
        waited_s = time.monotonic() - self._steps[0].sealed_s
        if self.waiting_bytes < self.buffer_bytes and waited_s < self.buffer_s:
            return
        stopped = self.runner.stop_all("its worker could not reach the store")
        if stopped:
            log.error("buffer_full", requests=stopped, bytes=self.waiting_bytes, waited_s=round(waited_s, 1))

    def _forget_fenced(self) -> None:
        for stream in [stream for stream in self._streams.values() if stream.held.let_go == "fenced"]:
            self.forget(stream.held)

    async def _announce(self) -> None:
        """Mark attempts that begin to be delivered, before they are: a sampled answer is not sampled anew then."""
        while self._first:
            first = self._first[:DELIVER_MAX]
            claims = [stream.held.claim for stream in first]
            ours = await self.store.run(self.runner.queue.deliver(self.runner.worker, claims))
            self._first = [stream for stream in self._first if stream not in first]
            for stream, kept in zip(first, ours, strict=True):
                if not kept:
                    self._fence(stream.held)

    def _fence(self, held: Held) -> None:
        if self.runner.held.get(held.claim.id) is held:  # and not a later attempt of ours
            self.runner.let_go(held.claim.id, "fenced")
        self.forget(held)

    async def _exchange(self) -> None:
        """One round trip: log and publish steps, oldest first, then save."""
        steps = self._next_steps()
        sent = self._sent + len(steps)
        all_due = self._save_due or self._logged_bytes >= LOG_BYTES
        ending = [stream for stream in self._streams.values() if stream.away is not None and stream.goal <= sent]
        due = self._streams.values() if all_due else ending
        saving = [(stream, stream.unsaved(), stream.last and stream in ending) for stream in due]
        calls = [call for step in steps for call in self._calls(step)]
        if calls and not self._logged_bytes:
            calls += cut_log(self.model, self.runner.worker, b"0-0")  # a new log has a TTL from its first entry on
        for _, delta, last in saving:
            if delta.tokens or delta.text or delta.finish or last:
                calls += save(self.model, delta, ended=last)
        entry = self._entry
        for reply in await self.store.run_all(calls):
            if isinstance(reply, bytes):
                self._entry = reply
        self._taken(steps)
        for stream, delta, _ in saving:
            stream.forget(delta)
        for stream in ending:
            self._done(stream)
        if all_due:
            await self._cut_log(entry)

    def _next_steps(self) -> list[_Step]:
        steps: list[_Step] = []
        room_bytes = SEND_BYTES
        for step in self._steps:
            room_bytes -= step.size_bytes
            if steps and (room_bytes < 0 or len(steps) >= SEND_STEPS):
                break
            steps.append(step)
        return steps

    def _calls(self, step: _Step) -> list[Call[Any]]:
        if not step.frames:  # all of it was taken out
            return []
        publishes = [publish(self.model, gateway, raw) for gateway, raw in step.frames.items() if gateway]
        return [log_step(self.model, self.runner.worker, list(step.frames.values())), *publishes]

    def _taken(self, steps: list[_Step]) -> None:
        self._sent += len(steps)
        for step in steps:
            self._steps.popleft()
            self._logged_bytes += step.size_bytes
            self.waiting_bytes -= step.size_bytes

    async def _cut_log(self, entry: bytes) -> None:
        """All that was logged up to this entry is saved."""
        self._save_due, self._logged_bytes = False, 0
        if entry and entry != self._cut:
            await self.store.run_all(cut_log(self.model, self.runner.worker, entry))
            self._cut = entry

    # --- endings

    async def _put_away(self, held: Held, *, last: bool) -> None:
        stream = self._streams.get((held.claim.id, held.claim.attempt))
        if stream is None:
            return
        loop = asyncio.get_running_loop()
        if stream.away is None:
            stream.away = loop.create_future()
            loop.call_soon(self.step)  # after the other endings of this step
        stream.last = last
        await asyncio.shield(stream.away)

    def _done(self, stream: _Stream) -> None:
        self._streams.pop(stream.key, None)
        if stream.away is not None and not stream.away.done():
            stream.away.set_result(None)


class Generator:
    """The actor `generate`."""

    def __init__(self, engine: Engine, runner: Runner, publisher: Publisher, *, kv_tokens: int = 0) -> None:
        """`kv_tokens`: the engine's cache in all; 0: unknown."""
        self.engine, self.runner, self.publisher = engine, runner, publisher
        self.kv_tokens, self.turnover = kv_tokens, Turnover()
        self.store, self.model = publisher.store, publisher.model
        self.learned: deque[tuple[str, int]] = deque(maxlen=LEARNED_MAX)  #: (key, output tokens) of answers, to be told
        self.dead = asyncio.Event()  #: the engine is gone; the process must end
        self._running: dict[tuple[str, int], tuple[Request, Held]] = {}
        self._trails: dict[str, tuple[float, asyncio.Task[dict[str, list[Delta]]]]] = {}
        self._aside: set[asyncio.Task[None]] = set()

    def progress(self) -> list[tuple[Request, Usage]]:
        """What each running request has used so far."""
        return [(request, held.usage) for request, held in self._running.values() if not held.ended]

    async def generate(self, request_id: str) -> Finished:
        """Run one request from its body to its ending."""
        held = self.runner.held[request_id]
        claimed_s = time.monotonic()
        body = await self.runner.insist(lambda: self.store.run(self.runner.queue.body(request_id)))
        if body is None:
            return Finished(outcome=Outcome.FAILED, message="its body is gone")
        request = msgspec.msgpack.decode(body, type=Request)
        held.usage = Usage(input_tokens=len(request.prompt_token_ids))
        key = held.claim.id, held.claim.attempt
        self._running[key] = request, held
        self._hold_prefix(request)
        try:
            return await self._run(request, held, claimed_s)
        except asyncio.CancelledError:
            if held.let_go == "cancelled":
                await self.publisher.close(held)
            elif held.let_go != "handed back":
                self.publisher.forget(held)
            raise
        except Exception:  # the runner tells of it; what was made until then goes before that, and nothing stays here
            held.ended = True
            await self.publisher.close(held)
            raise
        finally:
            del self._running[key]
            used = held.usage
            computed_tokens = used.input_tokens - used.cached_tokens + used.output_tokens
            self.turnover = self.turnover.after(computed_tokens, time.monotonic())

    async def _run(self, request: Request, held: Held, claimed_s: float) -> Finished:
        begun = Plan()
        if held.claim.attempt > 1:
            begun = await self._take_over(request, held, claimed_s)
        self.publisher.open(held, begun.cut, begun.at)
        try:
            finish = await self._stream(request, held, begun)
        except EngineDead:
            return await self._die()
        except EngineRefused as e:
            finished = Finished(outcome=Outcome.FAILED, message=str(e))
        else:
            if finish not in _OUTCOMES:  # we asked for no abort: the engine is shutting down
                log.error("engine_aborted", finish=finish)
                return await self._die()
            finished = Finished(outcome=_OUTCOMES[finish], usage=held.usage)
        held.ended = True
        if finished.outcome in ANSWERED:
            self.learned.append((request.caller.key_id, held.usage.output_tokens))
        await self.publisher.close(held)
        return finished

    async def _die(self) -> NoReturn:
        """Wait for the drain, which hands this request back with all the others."""
        self.dead.set()
        while True:
            await asyncio.sleep(3600)

    async def _stream(self, request: Request, held: Held, begun: Plan) -> str:
        """Put the pieces; how it finished."""
        course = _Course(request, held, begun, self.publisher)
        if begun.finish:
            course.put(Piece(text=begun.held, finish=begun.finish))
            return begun.finish
        seam = Seam(begun, request, partial(self.engine.text_of, prompt_ids=request.prompt_token_ids))
        async with aclosing(self.engine.generate(begun.request(request), begun.cut)) as pieces:
            async for piece in pieces:
                joined = seam.join(piece)
                course.put(joined)
                if joined.finish is not None:
                    return joined.finish
        return "abort"

    # --- taking over

    async def _take_over(self, request: Request, held: Held, claimed_s: float) -> Plan:
        """Find what earlier attempts delivered, and where to go on. From here on nothing of theirs is saved."""
        # The log first: what is cut from it in between has been saved.
        trail = await self._trail(held.claim.trail, claimed_s) if held.claim.trail else {}
        output = Output(request.id)
        output.add(await self.runner.insist(lambda: self.store.run(saved(self.model, request.id))))
        saved_tokens, saved_chars = len(output.tokens), output.chars
        output.add(trail.get(request.id, ()))
        begun = plan(request, output, partial(self.engine.text_of, prompt_ids=request.prompt_token_ids))
        marker = begun.marker(output, held.claim.attempt, saved_tokens, saved_chars)
        await self.runner.insist(lambda: self.store.run_all(save(self.model, marker)))
        held.cut = begun.cut
        held.usage = msgspec.structs.replace(held.usage, output_tokens=begun.cut)
        log.info("taken_over", cut=begun.cut, delivered=len(output.tokens), finish=begun.finish)
        return begun

    async def _trail(self, worker: str, claimed_s: float) -> dict[str, list[Delta]]:
        """What a worker's log has, by request, read after the claim. Those claimed together share one reading."""
        begun_s, reading = self._trails.get(worker, (float("-inf"), None))
        if reading is None or begun_s < claimed_s:
            reading = asyncio.create_task(self._read_trail(worker))
            self._trails[worker] = time.monotonic(), reading
            asyncio.get_running_loop().call_later(TRAIL_S, self._forget_trail, worker, reading)
        return await asyncio.shield(reading)  # one that is cancelled must not take it from the others

    async def _read_trail(self, worker: str) -> dict[str, list[Delta]]:
        by_request: dict[str, list[Delta]] = defaultdict(list)
        for frame in await self.runner.insist(lambda: self.store.run(logged(self.model, worker))):
            for delta in frame.deltas:
                by_request[delta.id].append(delta)
        return by_request

    def _forget_trail(self, worker: str, reading: asyncio.Task[Any]) -> None:
        if self._trails.get(worker, (0.0, None))[1] is reading:
            del self._trails[worker]

    # --- beside it

    def _hold_prefix(self, request: Request) -> None:
        """Say that this worker holds the request's prefix now. Nothing waits for it, and losing it costs little."""
        if request.prefix:
            task = asyncio.create_task(self._say_prefix(request))
            self._aside.add(task)
            task.add_done_callback(self._aside.discard)

    async def _say_prefix(self, request: Request) -> None:
        try:
            hold_ms = self._hold_ms()
            await self.store.run(prefix.hold(self.model, self.runner.worker, request.prefix, hold_ms=hold_ms))
        except (*AWAY, RedisError) as e:
            log.warning("prefix_not_held", error=repr(e))

    def _hold_ms(self) -> int:
        """How long what is computed now stays in the cache, within bounds; the least where that is not known."""
        if not self.kv_tokens:
            return prefix.HOLD_MS
        residency_ms = self.turnover.residency_s(self.kv_tokens, time.monotonic()) * 1000
        return int(min(max(residency_ms, prefix.HOLD_MS), prefix.HOLD_MAX_MS))


class _Course:
    """One attempt's way through its output: where it is, and what it has used."""

    def __init__(self, request: Request, held: Held, begun: Plan, publisher: Publisher) -> None:
        self.held, self.publisher = held, publisher
        self.id, self.attempt = request.id, held.claim.attempt
        self.offset, self.at = begun.cut, begun.at
        self.cut = cut_of(begun.tokens) if self.attempt > 1 else ""  #: until the first delta
        self.input_tokens = len(request.prompt_token_ids)

    def put(self, piece: Piece) -> None:
        finish = piece.finish if piece.finish in _OUTCOMES else ""
        if piece.tokens or piece.text or finish:
            tokens, text = piece.tokens, piece.text
            delta = Delta(self.id, self.attempt, self.offset, tokens, text, self.at, cut=self.cut, finish=finish or "")
            self.publisher.put(self.held, delta)
            self.cut = ""
        self.offset += len(piece.tokens)
        self.at += len(piece.text)
        self.held.usage = Usage(
            input_tokens=self.input_tokens,
            cached_tokens=min(max(self.held.usage.cached_tokens, piece.cached_tokens), self.input_tokens),
            output_tokens=self.offset,
        )
