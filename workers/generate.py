"""One request on the engine: its body, its pieces, its ending; and the publisher that all requests of a worker share.

A request for several answers, or for vectors of several prompts, is as many runs on the engine, under one claim: each
run's characters are marked with its number, and they share one count of tokens and characters in the order they came.

Tokens leave in frames: what one engine step gave goes out as one entry of the worker's log and one publish per
gateway, so that commands per step do not grow with the batch. A gateway that missed a publish reads the log, so a step
is done with once the store took it; while the store is away, steps wait here.
"""

from __future__ import annotations

import asyncio
import base64
import struct
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import msgspec

from core import prefix
from core.redis import AWAY, AsyncStore, Call, RedisError
from core.stream.frames import Delta, Frame, Logprob, Output, cut_of, decode, encode
from core.stream.log import cut_log, log_step, logged, publish, save, saved
from core.telemetry import logs
from core.values import Outcome, Request, Usage
from tasks.runner import Finished, Held, Runner
from workers.engine import Engine, EngineDead, EngineRefused, Piece, Reader
from workers.headroom import Turnover
from workers.leash import Lead, Leash, MoneySpent, Purse, ending_of
from workers.resume import DecodeAfter, Delivered, Differs, Parts, Plan, Seam, plan, spelled

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
#: Pieces of an output that was delivered before, read again at a time.
READ_PIECES = 64

_ANEW = Plan()
_NOTHING = Piece()


@dataclass(eq=False)
class _Stream:
    """What is not saved yet of one attempt's output, and how far it is with ending."""

    held: Held
    unsaved: Parts
    finish: str = ""
    begun: bool = False  #: it has put something
    last: bool = False  #: what is saved next ends the request
    goal: int = 0  #: the last step that has something of it
    away: asyncio.Future[None] | None = None  #: it puts nothing more; done when all of it is sent and saved

    @property
    def key(self) -> tuple[str, int]:
        return self.held.claim.id, self.held.claim.attempt


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
        stream = _Stream(held, Parts(held.claim.id, held.claim.attempt, offset, at))
        self._streams[stream.key] = stream

    def put(self, held: Held, delta: Delta) -> None:
        """Part of this step. It leaves when the step is over."""
        stream = self._streams.get((delta.id, delta.attempt))
        if stream is None:  # forgotten this moment: one of several answers has not stopped yet
            return
        if not stream.begun:
            stream.begun = True
            self._first.append(stream)
        stream.unsaved.add(delta.kind, delta.tokens, delta.text, delta.logprobs)
        stream.finish = delta.finish
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
        saving = [(one, one.unsaved.deltas(one.finish), one.last and one in ending) for one in due]
        calls = [call for step in steps for call in self._calls(step)]
        if calls and not self._logged_bytes:
            calls += cut_log(self.model, self.runner.worker, b"0-0")  # a new log has a TTL from its first entry on
        for stream, deltas, last in saving:
            if stream.unsaved.parts or stream.finish or last:
                calls += save(self.model, *deltas, ended=last)
        entry = self._entry
        for reply in await self.store.run_all(calls):
            if isinstance(reply, bytes):
                self._entry = reply
        self._taken(steps)
        for stream, deltas, _ in saving:
            stream.unsaved.forget(deltas)
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

    def __init__(
        self, engine: Engine, runner: Runner, publisher: Publisher, leash: Leash, *, kv_tokens: int = 0
    ) -> None:
        """`kv_tokens`: the engine's cache in all; 0: unknown."""
        self.engine, self.runner, self.publisher, self.leash = engine, runner, publisher, leash
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
        held.usage = Usage(input_tokens=request.input_tokens)
        key = held.claim.id, held.claim.attempt
        self._running[key] = request, held
        lead = self.leash.follow(request, held)
        self._hold_prefix(request)
        try:
            return await self._run(request, held, claimed_s, lead)
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
            self.leash.leave(lead)
            used = held.usage
            computed_tokens = used.input_tokens - used.cached_tokens + used.output_tokens
            self.turnover = self.turnover.after(computed_tokens, time.monotonic())

    async def _run(self, request: Request, held: Held, claimed_s: float, lead: Lead) -> Finished:
        begun = Plan()
        try:
            if held.claim.attempt > 1:
                begun = await self._take_over(request, held, claimed_s)
            self.publisher.open(held, begun.cut, begun.at)
            course = _Course(request, held, begun, self.publisher, lead)
            finish = await self._stream(request, course, begun)
        except EngineDead:
            return await self._die()
        except MoneySpent:
            usage = held.usage if held.usage.output_tokens else Usage()  # else the engine was not asked for anything
            finished = Finished(outcome=Outcome.STOPPED, usage=usage, message=ending_of(lead))
        except EngineRefused as e:
            usage = held.usage if held.usage.output_tokens else Usage()  # broken off in the middle it counts, unpaid
            finished = Finished(outcome=Outcome.REFUSED, usage=usage, message=str(e))
        except Differs:
            log.error("read_differently", cut=begun.cut)
            finished = Finished(
                outcome=Outcome.WORKER_LOST, message="its worker died, and another reads it differently"
            )
        else:
            finished = Finished(outcome=_OUTCOMES[finish], usage=held.usage)
            self.learned += [(request.caller.key_id, tokens) for tokens in course.lengths]
        held.ended = True
        await self.publisher.close(held)
        return finished

    async def _die(self) -> NoReturn:
        """Wait for the drain, which hands this request back with all the others."""
        self.dead.set()
        while True:
            await asyncio.sleep(3600)

    async def _stream(self, request: Request, course: _Course, begun: Plan) -> str:
        """Put all of its answers, or vectors; how it finished."""
        if request.task == "generate" and request.width == 1:
            return await self._answer(request, course, begun)
        if begun.finish:
            course.put((), [], finish=begun.finish)
            return begun.finish
        run = self._vector if request.task == "embed" else self._answer
        try:
            async with asyncio.TaskGroup() as group:
                for child in children(request):
                    group.create_task(run(child, course))
        except ExceptionGroup as e:  # one is enough to end it: the others were aborted
            gravest = _gravest(e)
            if isinstance(gravest, MoneySpent):
                course.stop()
            raise gravest from None
        return course.finish

    async def _answer(self, request: Request, course: _Course, begun: Plan = _ANEW) -> str:
        """Put one answer; how it finished."""
        answer = _Answer(request, course, self.engine.reader(request))
        decode = partial(self.engine.text_of, prompt_ids=request.prompt_token_ids)
        seam = Seam(begun, request, decode, reads=answer.reader is not None)
        if course.lead.bound:
            answer.purse = Purse(self.leash, course.lead, decode, None if answer.reader else begun)
        if answer.reader is not None and begun.tokens:
            await answer.read_again(begun, seam, lambda before, ids: self.engine.text_of(ids, prompt_ids=before))
        elif begun.finish:
            answer.put(Piece(text=begun.held, finish=begun.finish, stop=begun.stop))
        if begun.finish:
            return begun.finish
        if answer.purse is not None and not await self.leash.covers(course.lead, course.offset + 1):
            answer.stop()
            raise MoneySpent
        async with aclosing(self.engine.generate(begun.request(request), begun.cut)) as pieces:
            async for piece in pieces:
                joined = seam.join(piece)
                if answer.purse is not None:
                    await answer.pay(joined)
                answer.put(joined)
                if joined.finish in _OUTCOMES:
                    return joined.finish
        log.error("engine_aborted")  # we asked for no abort: it is shutting down
        raise EngineDead("the engine aborted a request")

    async def _vector(self, request: Request, course: _Course) -> None:
        vector = await self.engine.embed(request, request.prompt_token_ids)
        text = base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
        course.put((), [(course.kind(request, "embedding"), text)], finish=course.ended("stop"))
        asyncio.get_running_loop().call_soon(self.publisher.step)  # no step of the engine need follow

    # --- taking over

    async def _take_over(self, request: Request, held: Held, claimed_s: float) -> Plan:
        """Find what earlier attempts delivered, and where to go on. From here on nothing of theirs is saved."""
        # The log first: what is cut from it in between has been saved.
        trail = await self._trail(held.claim.trail, claimed_s) if held.claim.trail else {}
        output = Output(request.id)
        output.add(await self.runner.insist(lambda: self.store.run(saved(self.model, request.id))))
        saved_tokens, saved_chars = len(output.tokens), output.chars
        output.add(trail.get(request.id, ()))
        reads = request.width == 1 and request.task == "generate" and self.engine.reader(request) is not None
        decode = partial(self.engine.text_of, prompt_ids=request.prompt_token_ids)
        begun = plan(request, output, decode, reads=reads)
        marker = begun.marker(output, held.claim.attempt, saved_tokens, saved_chars)
        await self.runner.insist(lambda: self.store.run_all(save(self.model, *marker)))
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


def children(request: Request) -> Iterator[Request]:
    """The runs of a request for several answers, each for one: run k is prompt k // n, answer k % n."""
    sampling = request.sampling
    for choice in range(request.width):
        prompt, again = divmod(choice, request.n)
        prompts = (request.prompt_token_ids, *request.more_prompts)
        seeded = (
            msgspec.structs.replace(sampling, seed=sampling.seed + again) if sampling.seed is not None else sampling
        )
        yield msgspec.structs.replace(
            request, prompt_token_ids=prompts[prompt], n=1, more_prompts=(), choice=choice, sampling=seeded
        )


def _gravest(errors: ExceptionGroup[Exception]) -> Exception:
    return next((e for e in errors.exceptions if isinstance(e, EngineDead)), errors.exceptions[0])


class _Course:
    """One attempt's way through its output: where it is, what it has used, how many of its answers are not ended."""

    def __init__(self, request: Request, held: Held, begun: Plan, publisher: Publisher, lead: Lead) -> None:
        self.held, self.publisher, self.lead = held, publisher, lead
        self.id, self.attempt = request.id, held.claim.attempt
        self.n, self.many = request.n, request.width > 1
        self.offset, self.at = begun.cut, begun.at
        self.cut = cut_of(begun.tokens) if self.attempt > 1 else ""  #: until the first delta
        self.last_kind = "text"  #: tokens without a character go with what was before them
        self.running = request.width
        self.finish = "stop"  #: of all: "length", if any ended so
        self.lengths: list[int] = []  #: tokens of each answer that has ended
        self.input_tokens = request.input_tokens
        self.cached_tokens = self.reasoning_tokens = 0
        self._cached: dict[int, int] = {}
        self._prompts = request.width // request.n
        self.answers: list[_Answer] = []

    def kind(self, request: Request, what: str) -> str:
        return f"{request.choice}/{what}" if self.many else what

    def put(
        self,
        tokens: tuple[int, ...],
        runs: Sequence[tuple[str, str]],
        *,
        logprobs: tuple[Logprob, ...] = (),
        finish: str = "",
    ) -> None:
        """What one step gave one answer. The tokens go with the first of its runs."""
        if not runs and (tokens or finish):
            runs = ((self.last_kind, ""),)
        last = len(runs) - 1
        for n, (kind, text) in enumerate(runs):
            self.put_run(kind, tokens, text, logprobs, finish if n == last else "")
            tokens, logprobs = (), ()

    def put_run(
        self, kind: str, tokens: tuple[int, ...], text: str, logprobs: tuple[Logprob, ...], finish: str = ""
    ) -> None:
        delta = Delta(self.id, self.attempt, self.offset, tokens, text, self.at, kind, self.cut, finish, logprobs)
        self.publisher.put(self.held, delta)
        self.last_kind, self.cut = kind, ""
        self.offset += len(tokens)
        self.at += len(text)
        self.held.usage = Usage(
            input_tokens=self.input_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.offset,
            reasoning_tokens=self.reasoning_tokens,
        )

    def ended(self, finish: str) -> str:
        """One of its answers has. How all of it did, if that was the last."""
        self.running -= 1
        if finish == "length":
            self.finish = finish
        return "" if self.running else self.finish

    def cache(self, choice: int, tokens: int) -> None:
        """So much of an answer's prompt was cached. A prompt of several answers is one prompt, computed once."""
        self._cached[choice] = tokens
        of_prompt: dict[int, int] = {}
        for answer, cached in self._cached.items():
            of_prompt[answer // self.n] = min(cached, of_prompt.get(answer // self.n, cached))
        self.cached_tokens = min(sum(of_prompt.values()), self.input_tokens)
        self.lead.begin(counted=len(of_prompt) == self._prompts)

    def stop(self) -> None:
        """Money ended one of its answers, and with it all of them."""
        for answer in self.answers:
            answer.stop()


class _Answer:
    """One run of the engine, as what is put of it."""

    def __init__(self, request: Request, course: _Course, reader: Reader | None) -> None:
        self.request, self.course, self.reader = request, course, reader
        self.text = course.kind(request, "text")
        self.prefix = course.kind(request, "")
        #: Of several answers, what each token says of itself must come with text of its own.
        self.holds = course.many and request.sampling.logprobs is not None
        self.tokens: tuple[int, ...] = ()  #: held back
        self.logprobs: tuple[Logprob, ...] = ()
        self.made_tokens = 0
        self.cached_tokens = -1
        self.plain = reader is None and not course.many
        self.delivered: Delivered | None = None
        self.owed: list[tuple[str, str]] = []  #: read again, and not delivered
        self.purse: Purse | None = None  #: where money bounds it
        self.ended = False
        course.answers.append(self)

    def put(self, piece: Piece) -> None:
        """More of it."""
        course = self.course
        if self.plain and piece.text and piece.finish is None and piece.cached_tokens == self.cached_tokens:
            course.put_run("text", piece.tokens, piece.text, piece.logprobs)  # nearly all pieces are like this
            return
        self.made_tokens += len(piece.tokens)
        if piece.cached_tokens > self.cached_tokens:
            self.cached_tokens = piece.cached_tokens
            course.cache(self.request.choice, piece.cached_tokens)
        finish = piece.finish if piece.finish in _OUTCOMES else ""
        runs = self._read(piece, bool(finish))
        if finish:
            self.ended = True
            course.lengths.append(self.made_tokens if course.many else course.offset + len(piece.tokens))
            if course.many:
                runs.append((self.prefix + "end", finish))
            finish = course.ended(finish)
        if self.holds:
            piece = self._with_held(piece, bool(runs))
        course.put(piece.tokens, runs, logprobs=piece.logprobs, finish=finish or "")

    async def pay(self, piece: Piece) -> None:
        """Go on to put the piece, if money covers it; what it covers of it is put.

        Raises:
          MoneySpent: it does not.
        """
        purse, course = self.purse, self.course
        assert purse is not None
        # Asked again where the other answers went on meanwhile: what was covered may have been theirs.
        while (tokens := course.offset + len(self.tokens) + len(piece.tokens)) > course.lead.allowance:
            if not await purse.covers(tokens):
                self.stop(piece)
                raise MoneySpent
        purse.spend(piece)

    def stop(self, piece: Piece = _NOTHING) -> None:
        """Money ends it inside this piece. What was held back of what it covers is put as well."""
        if self.ended or self.purse is None:
            return
        self.ended = True
        course = self.course
        room = max(0, course.lead.allowance - course.offset)
        tokens, logprobs = (self.tokens + piece.tokens)[:room], (self.logprobs + piece.logprobs)[:room]
        keep = len(tokens) - len(self.tokens)
        last = Piece(tokens=piece.tokens[: max(0, keep)], text=self.purse.said(piece, keep))
        course.put(tokens, self._read(last, finished=True), logprobs=logprobs)
        if course.cut:  # whoever follows an older attempt is to follow this one, which has nothing to add
            course.put_run(course.last_kind, (), "", ())

    async def read_again(self, begun: Plan, seam: Seam, decode: DecodeAfter) -> None:
        """Go through what was delivered with a reader that has not seen it, and find out what is owed."""
        self.delivered = None if begun.told else Delivered(begun.runs)
        owed: list[tuple[str, str]] = []
        for n, piece in enumerate(spelled(begun, self.request.prompt_token_ids, decode)):
            joined = seam.join(piece)
            owed += self._read(joined, joined.finish is not None)
            if self.purse is not None:
                self.purse.spend(joined)
            if n % READ_PIECES == 0:
                await asyncio.sleep(0)  # others have a step to send
        if begun.finish:
            self.course.lengths.append(begun.cut)
            self.course.put((), [] if begun.told else owed, finish=begun.finish)
        else:
            self.owed = owed

    def _read(self, piece: Piece, finished: bool) -> list[tuple[str, str]]:
        """What the piece says, beyond what was delivered."""
        if self.reader is None:
            runs = [(self.text, piece.text)] if piece.text else []
        else:
            known = self.reader.reasoning_tokens
            runs = self.reader.feed(piece.text, piece.tokens, finished=finished)
            self.course.reasoning_tokens += self.reader.reasoning_tokens - known
            if self.prefix:
                runs = [(self.prefix + kind, text) for kind, text in runs]
        if piece.stop and finished:
            runs.append((self.prefix + "stop", piece.stop))
        if self.delivered is not None:
            runs = self.delivered.beyond(runs)
        if self.owed:
            runs, self.owed = self.owed + runs, []
        return runs

    def _with_held(self, piece: Piece, put: bool) -> Piece:
        tokens, logprobs = self.tokens + piece.tokens, self.logprobs + piece.logprobs
        self.tokens, self.logprobs = ((), ()) if put else (tokens, logprobs)
        return msgspec.structs.replace(piece, tokens=tokens if put else (), logprobs=logprobs if put else ())
