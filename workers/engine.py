"""What a worker asks of an engine. Three fillings: `vllm`, `timed` (both in workers/vllm) and `scripted`.

An engine is started once and lives as long as its process. When it dies or is found hung, the process exits and
its agent starts another: nothing is rebuilt in place.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from core.stream.frames import Logprob
from core.values import Request


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine step gave one request. The last piece of a request has `finish` set, and may be empty."""

    tokens: tuple[int, ...] = ()
    text: str = ""
    finish: str | None = None  #: "stop", "length"; "abort" when the engine was told to, or is shutting down
    cached_tokens: int = 0  #: of the prompt, served from the prefix cache; known from the first piece on
    logprobs: tuple[Logprob, ...] = ()  #: of these tokens, if they were asked for
    stop: str = ""  #: the stop string that it ended at


class Reader(Protocol):
    """Reads one request's output as what its model means by it: answer, reasoning, calls. Fed from the output's first
    token on, every piece once. What it gives does not depend on how the output was cut into pieces, but for when."""

    @property
    def reasoning_tokens(self) -> int:
        """Of those fed so far."""

    def feed(self, text: str, tokens: Sequence[int], *, finished: bool) -> list[tuple[str, str]]:
        """The runs that are now known: kinds of core/stream/frames.py without a choice's number, and their characters.
        The name of a call comes whole. The text of tokens that were delivered before may leave special tokens out."""


class EngineDead(Exception):
    """The engine process is gone. Every request in it is lost; the worker process must exit."""


class EngineHung(EngineDead):
    """The engine process is there and does not answer. As good as dead."""


class EngineRefused(Exception):
    """The engine refuses this one request (a bad parameter, too long). The engine itself is well."""


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What a started engine can hold."""

    slots: int  #: sequences at once
    context_tokens: int
    kv_tokens: int  #: tokens of KV cache in all; 0: unknown


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """The engine's own counts after its last step."""

    running: int
    waiting: int
    kv_used: float  #: 0..1


class Engine(Protocol):
    """One model on one set of GPUs, batching continuously."""

    async def start(self) -> EngineFacts:
        """Load everything. Takes seconds to minutes and must not block the loop."""

    def on_step(self, told: Callable[[], None]) -> None:
        """Call `told` on the loop after each step, once every request's piece of that step was handed out."""

    def generate(self, request: Request, cut: int = 0) -> AsyncGenerator[Piece, None]:
        """The request's pieces. Closing the generator aborts the request. The last `cut` prompt tokens are output
        that was delivered before. Raises EngineRefused, EngineDead."""

    async def abort(self, request_id: str) -> None:
        """Stop a request: its iterator ends with `finish="abort"` within one step. Unknown ids are ignored."""

    def reader(self, request: Request) -> Reader | None:
        """What reads the request's output; None: it is all text. The request's prompt ends where its output begins,
        whatever was delivered. Raises EngineRefused: it asks for what this model cannot do."""

    async def embed(self, request: Request, prompt: Sequence[int]) -> tuple[float, ...]:
        """The vector of one prompt, of a request with `task="embed"`. Cancelled: aborted. Raises EngineRefused (the
        model makes none), EngineDead."""

    async def prompt_ids(self, text: str) -> list[int]:
        """Token ids of a conversation with one user turn, by the model's own template: what the canary asks."""

    def text_of(self, ids: Sequence[int], prompt_ids: Sequence[int] = ()) -> str:
        """Text of output ids as the stream of a request with this prompt has it, special tokens skipped. A character
        that is not whole at the end is U+FFFD."""

    async def ping(self) -> None:
        """Return when the engine itself answers (not just its front). Raises EngineDead; EngineHung: no answer."""

    def stats(self) -> EngineStats: ...

    async def stop(self) -> None:
        """End the engine and every process of it."""
