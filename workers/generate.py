"""One request on the engine: its body, its pieces, its ending; and the publisher that all requests of a worker share.

Tokens leave in frames: what one engine step gave goes out as one publish per gateway, so that commands per step do
not grow with the batch.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import NoReturn

import msgspec

from core.redis import AWAY, AsyncStore
from core.stream.frames import Delta, Frame, decode, encode
from core.stream.log import Outlet, publish
from core.telemetry import logs
from core.values import Outcome, Request, Usage
from tasks.queue import Claim
from tasks.runner import Finished, Held, Runner
from workers.engine import Engine, EngineDead, EngineRefused, Piece

log = logs.get(__name__)

_OUTCOMES = {"stop": Outcome.COMPLETED, "length": Outcome.LENGTH}
#: Pause between tries to reach a gateway that does not listen, or a store that is away, seconds.
_PAUSE_S = 0.05


class Publisher:
    """Sends each step's deltas, in order, and keeps what nobody has received yet."""

    def __init__(self, store: AsyncStore, runner: Runner, model: str, *, buffer_s: float) -> None:
        self.store, self.runner, self.model, self.buffer_s = store, runner, model, buffer_s
        self.outlets: dict[str, Outlet] = {}
        self.first: list[tuple[str, Claim]] = []  #: (gateway, attempt) whose first delta is on its way
        self._stepped = asyncio.Event()
        self._moved = asyncio.Condition()

    def put(self, gateway: str, claim: Claim, delta: Delta) -> None:
        """Part of this step. It leaves when the step is over."""
        if delta.offset == 0:
            self.first.append((gateway, claim))
        outlet = self.outlets.setdefault(gateway, Outlet())
        outlet.requests.add(claim.id)
        outlet.deltas.append(delta)

    def step(self) -> None:
        """The engine's step is over."""
        self._stepped.set()

    async def sent(self, gateway: str) -> None:
        """Return when all that was put for this gateway so far has been received, or given up."""
        outlet = self.outlets.get(gateway)
        if outlet is None:
            return
        goal = outlet.sealed + bool(outlet.deltas)
        self.step()
        async with self._moved:
            await self._moved.wait_for(lambda: outlet.sent >= goal or self.outlets.get(gateway) is not outlet)

    async def run(self) -> None:
        """The publishing loop."""
        while True:
            await self._stepped.wait()
            self._stepped.clear()
            await self.flush()

    async def flush(self) -> None:
        """Seal what was put, and send what is sealed. Comes again by itself while something is left."""
        now_s = time.monotonic()
        for outlet in self.outlets.values():
            outlet.seal(self.runner.worker, now_s)
        try:
            async with asyncio.timeout(_PAUSE_S):  # not wait_for, which before 3.12 may swallow a cancellation
                await self.runner.vouched()
            await self._announce()
            pause_s = await self._publish()
        except (*AWAY, TimeoutError):
            pause_s = _PAUSE_S
        self._give_up(time.monotonic())
        async with self._moved:
            self._moved.notify_all()
        if pause_s is not None:
            await asyncio.sleep(pause_s)
            self.step()

    async def _announce(self) -> None:
        """Mark attempts that begin to be delivered, before they are: a sampled answer is not sampled anew then."""
        while self.first:
            first = self.first[:64]
            ours = await self.store.run(self.runner.queue.deliver(self.runner.worker, [claim for _, claim in first]))
            del self.first[: len(first)]
            for (gateway, claim), kept in zip(first, ours, strict=True):
                if not kept:
                    self.runner.let_go(claim.id, "fenced")
                    self._take_back(gateway, claim.id)

    def _take_back(self, gateway: str, request_id: str) -> None:
        """Somebody else has the request, and may sample it anew: nothing of ours may reach its client."""
        outlet = self.outlets.get(gateway)
        if outlet is None:
            return
        outlet.deltas = [delta for delta in outlet.deltas if delta.id != request_id]
        for i, (sealed_s, raw) in enumerate(outlet.frames):
            frame = decode(raw)
            kept = encode(Frame(worker=frame.worker, deltas=tuple(d for d in frame.deltas if d.id != request_id)))
            outlet.frames[i] = (sealed_s, kept)
            outlet.size_bytes -= len(raw) - len(kept)

    async def _publish(self) -> float | None:
        """One publish per gateway, its oldest frame. Returns when to come again, if something is left."""
        waiting = {gateway: outlet for gateway, outlet in self.outlets.items() if outlet.frames}
        if not waiting:
            return None
        heads = [publish(self.model, gateway, outlet.frames[0][1]) for gateway, outlet in waiting.items()]
        heard = await self.store.run_all(heads)
        for outlet in (outlet for outlet, arrived in zip(waiting.values(), heard, strict=True) if arrived):
            outlet.received()
        if not any(outlet.frames for outlet in waiting.values()):
            return None
        return 0.0 if any(heard) else _PAUSE_S

    def _give_up(self, now_s: float) -> None:
        """A gateway that has not listened for `buffer_s` is gone, and so is whoever waited there."""
        for gateway in [g for g, outlet in self.outlets.items() if outlet.overdue(now_s, self.buffer_s)]:
            outlet = self.outlets.pop(gateway)
            log.warning("gateway_gone", gateway=gateway, frames=len(outlet.frames), requests=len(outlet.requests))
            for request_id in list(outlet.requests):
                self.runner.let_go(request_id, "cancelled")

        for gateway in [g for g, outlet in self.outlets.items() if outlet.is_done]:
            del self.outlets[gateway]

    def close(self, gateway: str, request_id: str) -> None:
        """The request puts nothing more. An outlet with nothing in it and nobody behind it is forgotten."""
        outlet = self.outlets.get(gateway)
        if outlet is None:
            return
        outlet.requests.discard(request_id)
        if outlet.is_done:
            del self.outlets[gateway]


class Generator:
    """The actor `generate`."""

    def __init__(self, engine: Engine, runner: Runner, publisher: Publisher) -> None:
        self.engine, self.runner, self.publisher = engine, runner, publisher
        self.dead = asyncio.Event()  #: the engine is gone; the process must end
        self._running: dict[str, tuple[Request, Held]] = {}

    def progress(self) -> list[tuple[Request, Usage]]:
        """What each running request has used so far."""
        return [(request, held.usage) for request, held in self._running.values()]

    async def generate(self, request_id: str) -> Finished:
        """Run one request from its body to its ending."""
        held = self.runner.held[request_id]
        body = await self.runner.insist(lambda: self.runner.store.run(self.runner.queue.body(request_id)))
        if body is None:
            return Finished(outcome=Outcome.FAILED, message="its body is gone")
        request = msgspec.msgpack.decode(body, type=Request)
        held.usage = Usage(input_tokens=len(request.prompt_token_ids))
        self._running[request_id] = (request, held)
        try:
            finish = await self._stream(request, held)
            await self.publisher.sent(request.gateway)
        except EngineRefused as e:
            return Finished(outcome=Outcome.FAILED, message=str(e))
        except EngineDead:
            self.dead.set()
            return await self._handed_back()
        finally:
            del self._running[request_id]
            self.publisher.close(request.gateway, request.id)
        return self._ending(finish, held.usage)

    async def _handed_back(self) -> NoReturn:
        """Wait for the drain, which hands this request back with all the others."""
        while True:
            await asyncio.sleep(3600)

    async def _stream(self, request: Request, held: Held) -> str:
        offset = at = 0
        async with aclosing(self.engine.generate(request)) as pieces:
            async for piece in pieces:
                if piece.tokens or piece.text:
                    self._put(request, held.claim, piece, offset, at)
                offset += len(piece.tokens)
                at += len(piece.text)
                held.usage = Usage(
                    input_tokens=len(request.prompt_token_ids),
                    cached_tokens=max(held.usage.cached_tokens, piece.cached_tokens),
                    output_tokens=offset,
                )
                if piece.finish is not None:
                    return piece.finish
        return "abort"

    def _put(self, request: Request, claim: Claim, piece: Piece, offset: int, at: int) -> None:
        if request.gateway:
            delta = Delta(request.id, claim.attempt, offset, piece.tokens, piece.text, at)
            self.publisher.put(request.gateway, claim, delta)

    def _ending(self, finish: str, usage: Usage) -> Finished:
        outcome = _OUTCOMES.get(finish)
        if outcome is None:
            return Finished(outcome=Outcome.FAILED, usage=usage, message=f"the engine ended it: {finish}")
        return Finished(outcome=outcome, usage=usage)
