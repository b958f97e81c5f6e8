"""The engine without a model: pure Python, asyncio only. For tests, and for loads no CPU model could carry.

Token k of a request is a function of (seed, k) and of nothing else, so whoever knows the request knows every token of
its stream, across hand-overs and restarts. Where it is to think, to call a function or to keep to a grammar, that comes
first (workers/markup.py), and is a function of the request as well; it ends with a call, and where its grammar does.
Batching is real: requests share steps, wait for slots, and end by
themselves; only the time of a step is made up, from the catalogue's profile.
"""

from __future__ import annotations

import asyncio
import codecs
import math
import os
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path

from core.catalog import Model
from core.stream.frames import Logprob
from core.values import Request
from workers import markup
from workers.engine import EngineDead, EngineFacts, EngineRefused, EngineStats, Piece, Reader
from workers.resume import StopMatcher

#: The letters of a script, as token ids: the byte tokenizer reads them as they are. They end at "n" because the byte
#: tokens of SmolLM2's vocabulary are printable only up to id 110, and its timed engine is to give clean text too.
_ALPHABET = b"abcdefghijklmn  "

#: A random byte's letter.
_LETTER = _ALPHABET * (256 // len(_ALPHABET))

#: Tokens that one hash gives.
_BLOCK = 64

#: Tokens that a model which thinks first thinks.
REASONING_TOKENS = 12

#: Numbers in a vector.
DIMENSIONS = 16

#: Seeds fit a signed 64-bit integer, which is all that every carrier takes.
_SEED_MASK = 2**63 - 1


def scripted_token(seed: int, k: int) -> int:
    """The token at output index `k`."""
    return _block(seed, k // _BLOCK)[k % _BLOCK]


def scripted_tokens(seed: int, n: int, start: int = 0) -> list[int]:
    """The `n` tokens from output index `start` on."""
    return [scripted_token(seed, k) for k in range(start, start + n)]


def script_seed(request: Request, cut: int = 0) -> int:
    """What the request's script depends on: its own seed, else its id; greedy: its prompt, as a real model would.

    Of a resumed request the last `cut` prompt tokens are output delivered before; they change nothing.
    """
    if request.sampling.seed is not None:
        return request.sampling.seed & _SEED_MASK
    if not request.sampling.greedy:
        return _hash(f"{request.id}/{request.choice}".encode() if request.choice else request.id.encode())
    return _hash(array("q", request.prompt_token_ids[: len(request.prompt_token_ids) - cut]).tobytes())


def _hash(source: bytes) -> int:
    return int.from_bytes(blake2b(source, digest_size=8).digest(), "big") & _SEED_MASK


@lru_cache(maxsize=4096)
def _block(seed: int, index: int) -> bytes:
    noise = blake2b(seed.to_bytes(8, "big") + index.to_bytes(8, "big"), digest_size=_BLOCK).digest()
    return noise.translate(_LETTER)


def scripted_head(model: Model, request: Request, cut: int = 0) -> tuple[bytes, bool]:
    """What a request's output begins with, before the letters of its script, and whether it ends with that.

    Raises:
      EngineRefused: it asks for a grammar that is not scripted, or for no grammar at all.
    """
    head = ""
    if model.engine.reasoning_parser and request.reasons:
        thought = bytes(scripted_tokens(script_seed(request, cut) ^ 1, REASONING_TOKENS)).decode("ascii")
        head = f"{markup.THINK}{thought}{markup.ANSWER}"
    if not (request.tools or request.sampling.grammar):
        return head.encode(), False
    prompt = request.prompt_token_ids[: len(request.prompt_token_ids) - cut]
    try:
        bound = markup.calls(request.tools, _read(prompt)) or markup.bound(request.sampling.grammar)
    except (TypeError, ValueError, AttributeError, LookupError) as e:
        raise EngineRefused(f"this schema is none: {e}") from None
    if bound is None and request.sampling.grammar:
        raise EngineRefused("the scripted engine knows no regular expressions and grammars, only JSON and choices")
    return (head + (bound or "")).encode(), bound is not None


def _read(prompt: Sequence[int]) -> str:
    """A prompt of bytes; of another tokenizer's, nothing."""
    return bytes(prompt).decode("utf-8", "replace") if max(prompt, default=0) < 256 else ""


def scripted_vector(prompt: Sequence[int]) -> tuple[float, ...]:
    """A vector of unit length, the prompt's own."""
    noise = blake2b(array("q", prompt).tobytes(), digest_size=2 * DIMENSIONS).digest()
    numbers = [int.from_bytes(noise[at : at + 2], "big") / 2**15 - 1 for at in range(0, len(noise), 2)]
    length = math.hypot(*numbers)
    return tuple(number / length for number in numbers)


def scripted_logprob(seed: int, k: int, token: int, top: int) -> Logprob:
    """What a token says of itself, and what else it could have been: each a third as likely as the one before."""
    logprob = -0.7 - _hash(seed.to_bytes(8, "big") + k.to_bytes(8, "big")) % 100 / 100
    others = [letter for letter in range(ord("a"), ord("z") + 1) if letter != token][: max(0, top - 1)]
    likely = [token, *others][:top]
    return Logprob(_spelled(token), logprob, tuple((_spelled(one), logprob - 1.1 * n) for n, one in enumerate(likely)))


def _spelled(token: int) -> str:
    return bytes([token]).decode("utf-8", "replace")


#: The commonest piece, one token in the middle of a stream, made once for each letter.
_ONE_TOKEN = {token: Piece(tokens=(token,), text=chr(token)) for token in _ALPHABET}


class _Run:
    """One request inside the engine."""

    def __init__(
        self,
        request: Request,
        cut: int,
        max_tokens: int,
        head: tuple[bytes, bool] = (b"", False),
        answer_tokens: int = 0,
    ) -> None:
        sampling = request.sampling
        self.id = request.id
        self.prompt_tokens = len(request.prompt_token_ids)
        self.seed = script_seed(request, cut)
        self.head, self.ends_with_head = head
        self.head_tokens = len(self.head)
        self.start = self.offset = cut
        self.end = cut + max_tokens
        #: Where it stops by itself.
        self.stops_at = self.head_tokens + answer_tokens if answer_tokens and not sampling.ignore_eos else 0
        self.stops = StopMatcher(sampling.stop) if any(sampling.stop) else None
        self.stop_tokens, self.min_tokens, self.logprobs = (
            sampling.stop_token_ids,
            sampling.min_tokens,
            sampling.logprobs,
        )
        #: Each token is a letter, and is handed out as it is.
        self.plain = not (self.head or self.stops or self.stop_tokens or self.logprobs is not None)
        self.tokens: list[int] = []
        self.text = ""  #: to be handed out, where it is more than the tokens' letters
        self.told: list[Logprob] = []
        self.letters = codecs.getincrementaldecoder("utf-8")("ignore")
        self.finish: str | None = None
        self.waiter: asyncio.Future[None] | None = None

    @property
    def kv_tokens(self) -> int:
        return self.prompt_tokens + self.offset - self.start

    def advance(self) -> None:
        """Take part in one step."""
        if self.plain:
            self.tokens.append(_block(self.seed, self.offset // _BLOCK)[self.offset % _BLOCK])
            self.offset += 1
        else:
            self._advance()
        if self.finish is None and self.offset == self.stops_at:
            self.finish = "stop"
        if self.finish is None and self.offset >= self.end:
            self.finish = "length"
        self.wake()

    def _advance(self) -> None:
        beyond = self.offset - self.head_tokens
        if beyond >= 0 and self.ends_with_head:
            self.finish = "stop"
            return
        token = scripted_token(self.seed, beyond) if beyond >= 0 else self.head[self.offset]
        self.offset += 1
        self.tokens.append(token)
        if self.logprobs is not None:
            self.told.append(scripted_logprob(self.seed, self.offset, token, self.logprobs))
        self._read(token)
        if self.finish is None and beyond == -1 and self.ends_with_head:
            self.finish = "stop"

    def _read(self, token: int) -> None:
        """What ends it ends it only beyond `min_tokens`."""
        may_stop = self.offset > self.min_tokens
        if may_stop and token in self.stop_tokens:
            self.finish = "stop"
            return
        text = self.letters.decode(bytes([token]))
        if self.stops is not None and may_stop:
            text = self.stops.add(text)
            if self.stops.found:
                self.finish = "stop"
        self.text += text

    def end_as(self, finish: str) -> None:
        if self.finish is None:
            self.finish = finish
            self.wake()

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def wait(self) -> None:
        self.waiter = asyncio.get_running_loop().create_future()
        await self.waiter
        self.waiter = None

    def take(self) -> Piece | None:
        """What the request got since the last look; steps merge if its reader is slow."""
        tokens = self.tokens
        if self.finish is None:
            if not tokens:
                return None
            if len(tokens) == 1 and self.plain:
                return _ONE_TOKEN[tokens.pop()]
        self.tokens, told, self.told = [], self.told, []
        stop = self.stops.stop if self.stops and self.finish == "stop" else ""
        return Piece(
            tokens=tuple(tokens), text=self._take_text(tokens), finish=self.finish, logprobs=tuple(told), stop=stop
        )

    def _take_text(self, tokens: list[int]) -> str:
        if self.plain:
            return bytes(tokens).decode("ascii")
        text, self.text = self.text, ""
        return text + self.stops.rest() if self.finish is not None and self.stops is not None else text


class ScriptedEngine:
    """The Engine protocol over made-up tokens. One task steps while anything runs."""

    def __init__(self, model: Model, tally: Path | None = None) -> None:
        """`tally`: a folder; a file there gets the ids of each step's requests, before anybody has its tokens."""
        self._model = model
        self._tally = (tally / str(os.getpid())).open("ab", buffering=0) if tally else None
        self._running: dict[_Run, None] = {}
        self._waiting: deque[_Run] = deque()
        self._told: list[Callable[[], None]] = []
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._due_s = 0.0

    async def start(self) -> EngineFacts:
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._step_forever(), name="scripted-engine")
        return EngineFacts(
            slots=self._model.slots, context_tokens=self._model.context_tokens, kv_tokens=self._kv_tokens
        )

    def on_step(self, told: Callable[[], None]) -> None:
        self._told.append(told)

    async def generate(self, request: Request, cut: int = 0) -> AsyncGenerator[Piece]:
        """The request's pieces. The last `cut` prompt tokens are output that was delivered before."""
        run = self._enter(request, cut)
        try:
            while True:
                piece = run.take()
                if piece is None:
                    await run.wait()
                    continue
                yield piece
                if piece.finish is not None:
                    return
        finally:
            self._leave(run)

    async def abort(self, request_id: str) -> None:
        for run in [*self._running, *self._waiting]:
            if run.id == request_id:
                self._end(run, "abort")

    def reader(self, request: Request) -> Reader | None:
        knobs, tools = self._model.engine, request.tools
        calls = tools is not None and tools.choice != "none"
        if calls and not self._model.calls:
            raise EngineRefused("this model calls no tools")
        return markup.MarkReader() if calls or (knobs.reasoning_parser and request.reasons) else None

    async def embed(self, request: Request, prompt: Sequence[int]) -> tuple[float, ...]:
        if self._model.kind != "embedding":
            raise EngineRefused("this model makes no vectors")
        self._refuse_too_long(prompt, 0)
        step = self._model.step
        await asyncio.sleep((step.base_ms + step.prefill_ms * len(prompt)) / 1000)
        await self.ping()
        self._loop.call_soon(self._tell)
        return scripted_vector(prompt)

    async def prompt_ids(self, text: str) -> list[int]:
        return list(f"user: {text}\nassistant: ".encode())

    def text_of(self, ids: Sequence[int], prompt_ids: Sequence[int] = ()) -> str:
        return bytes(ids).decode("utf-8", "replace")

    async def ping(self) -> None:
        if self._task is None or self._task.done():
            raise EngineDead("the scripted engine is not running")

    def stats(self) -> EngineStats:
        used = sum(run.kv_tokens for run in self._running)
        return EngineStats(running=len(self._running), waiting=len(self._waiting), kv_used=used / self._kv_tokens)

    async def stop(self) -> None:
        for run in [*self._running, *self._waiting]:
            self._end(run, "abort")
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    @property
    def _kv_tokens(self) -> int:
        return self._model.slots * self._model.context_tokens

    def _enter(self, request: Request, cut: int) -> _Run:
        if self._task is None or self._task.done():
            raise EngineDead("the scripted engine is not running")
        max_tokens = self._refuse_too_long(request.prompt_token_ids, request.sampling.max_tokens)
        head = scripted_head(self._model, request, cut)
        run = _Run(request, cut, max_tokens, head, self._model.step.answer_tokens)
        self._waiting.append(run)
        self._work.set()
        return run

    def _refuse_too_long(self, prompt: Sequence[int], max_tokens: int) -> int:
        """How much of `max_tokens` there is room for."""
        room = self._model.context_tokens - len(prompt)
        least = 1 if self._model.kind == "chat" else 0
        if not prompt or room < least or max_tokens < least:
            raise EngineRefused(
                f"a prompt of {len(prompt)} tokens and max_tokens {max_tokens} "
                f"do not fit a context of {self._model.context_tokens}"
            )
        return min(max_tokens, room)

    def _end(self, run: _Run, finish: str) -> None:
        run.end_as(finish)
        self._leave(run)
        self._loop.call_soon(self._tell)

    def _leave(self, run: _Run) -> None:
        self._running.pop(run, None)
        if run in self._waiting:
            self._waiting.remove(run)

    async def _step_forever(self) -> None:
        while True:
            if not self._running and not self._waiting:
                self._work.clear()
                await self._work.wait()
                self._due_s = self._loop.time()
            await self._step()

    async def _step(self) -> None:
        await self._pass_time(self._admit())
        if self._tally is not None:
            self._tally.write("".join(f"{run.id}\n" for run in self._running).encode())
        for run in list(self._running):
            run.advance()
            if run.finish is not None:
                del self._running[run]
        # The readers woken above are queued on the loop before this call, so each of them has its piece first.
        self._loop.call_soon(self._tell)

    def _admit(self) -> int:
        """Fill the free slots; say how many prompt tokens came in."""
        prompt_tokens = 0
        while self._waiting and len(self._running) < self._model.slots:
            run = self._waiting.popleft()
            self._running[run] = None
            prompt_tokens += run.prompt_tokens
        return prompt_tokens

    async def _pass_time(self, prompt_tokens: int) -> None:
        step = self._model.step
        step_ms = step.base_ms + step.sequence_ms * len(self._running) + step.prefill_ms * prompt_tokens
        # Counted from the last step's due time, so that a timer's lateness does not add up; a stall is forgiven.
        now_s = self._loop.time()
        self._due_s = max(self._due_s + step_ms / 1000, now_s)
        await asyncio.sleep(self._due_s - now_s)

    def _tell(self) -> None:
        for told in self._told:
            told()
