"""vLLM in process: AsyncLLM behind the Engine protocol, with the real model or with a timed fake step.

Facts of vLLM 0.32 that shape this file:
- Starting blocks for seconds to minutes and shutting down blocks too: both run in a thread.
- A cancelled request can leak inside vLLM, so every run that did not finish is aborted by its own id.
- `finish_reason="abort"` also means "the engine is shutting down": whoever aborted nothing must not take it for an end.
- An engine process that hangs looks healthy from outside: only a round trip into it tells.
- It makes grammars with one library, whichever the first request was given to: we name it, or what a model can do
  would depend on who came first.
vLLM is imported when the engine starts, never with this module.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from core.catalog import Model
from core.stream.frames import Logprob
from core.values import Request
from workers.engine import EngineDead, EngineFacts, EngineHung, EngineRefused, EngineStats, Piece, Reader
from workers.scripted import script_seed
from workers.vllm.parsers import TAIL_TOKENS, Parsers

_EXECUTORS = "workers.vllm.executors"

#: Set before vLLM is imported, whatever the operator's environment says.
_ENVIRONMENT = {
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # we have threads, and on a GPU a context: neither survives a fork
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",  # weights come from a folder; a hub that is looked for costs seconds, and leaks names
    "VLLM_MAX_N_SEQUENCES": "1",
}

#: Set unless the operator has.
_ENVIRONMENT_DEFAULTS = {
    "VLLM_ENGINE_READY_TIMEOUT_S": "3600",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Binding threads pays on a machine of one's own with many cores; on a small, shared one the gateway, the stores
    # and the tests run on the same cores, and a bound thread waits behind them.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

#: vLLM's finish reasons in ours.
_FINISH = {"stop": "stop", "length": "length", "abort": "abort", "repetition": "stop"}

#: The CPU's attention kernel takes multiples of this many tokens as a block, and nothing else.
_CPU_BLOCK_TOKENS = 32

#: What makes grammars: the only library that vLLM's grammars for tools are written for.
_GRAMMAR_BACKEND = "xgrammar"

#: The least logarithm told, as in vLLM's server: JSON has no minus infinity.
_LEAST_LOGPROB = -9999.0

#: KV cache of a timed engine whose model names none, MiB.
_TIMED_KV_MIB = 1024


class VllmEngine:
    """The Engine protocol over AsyncLLM; `timed` replaces the model step by a script that takes the profile's time."""

    def __init__(
        self, model: Model, data: Path, timed: bool = False, *, ping_s: float = 10.0, drain_s: float = 30.0
    ) -> None:
        self._model = model
        self._folder = model.weights_folder(data)
        self._timed = timed
        self._ping_s = ping_s  #: a longer silence of the engine process is its death
        self._drain_s = drain_s  #: how long vLLM lets requests run on if the process group is told to end
        self._engine: Any = None
        self._parsers: Parsers | None = None  #: None: all output is text
        self._ids = count(1)
        self._run_ids: dict[str, list[str]] = {}
        self._told: list[Callable[[], None]] = []
        self._stats = EngineStats(running=0, waiting=0, kv_used=0.0)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm")

    async def start(self) -> EngineFacts:
        self._loop = asyncio.get_running_loop()
        await self._loop.run_in_executor(self._thread, self._load)
        cache = self._engine.vllm_config.cache_config
        return EngineFacts(
            slots=self._model.slots,
            context_tokens=self._model.context_tokens,
            kv_tokens=max(0, (cache.num_gpu_blocks or 0) - 1) * cache.block_size,  # one block is vLLM's own
        )

    def on_step(self, told: Callable[[], None]) -> None:
        self._told.append(told)

    async def generate(self, request: Request, cut: int = 0) -> AsyncGenerator[Piece]:
        """The request's pieces. The last `cut` prompt tokens are output that was delivered before."""
        engine = self._alive()
        self._must_be("chat", request)
        finished = False
        with self._run(request.id) as run_id:
            try:
                with _errors_as_ours():
                    params, thinking = self._params(request, cut)
                    outputs = engine.generate(
                        self._prompt(request.prompt_token_ids, request),
                        params,
                        run_id,
                        priority=int(request.cls),
                        **thinking,
                    )
                    async with aclosing(outputs):  # leaving the loop alone would not abort
                        async for output in outputs:
                            piece = self._piece(output, request)
                            finished = piece.finish is not None
                            yield piece
            finally:
                if not finished and not engine.errored:
                    await engine.abort(run_id)

    async def embed(self, request: Request, prompt: Sequence[int]) -> tuple[float, ...]:
        engine = self._alive()
        self._must_be("embedding", request)
        from vllm.pooling_params import PoolingParams

        vector: tuple[float, ...] = ()
        with self._run(request.id) as run_id:
            try:
                with _errors_as_ours():
                    outputs = engine.encode(
                        self._prompt(prompt, request), PoolingParams(task="embed"), run_id, priority=int(request.cls)
                    )
                    async with aclosing(outputs):
                        async for output in outputs:
                            vector = tuple(output.outputs.data.tolist())
            finally:
                if not vector and not engine.errored:
                    await engine.abort(run_id)
        if not vector:  # vLLM ends what was aborted with an empty one
            self._alive()
            raise EngineRefused("the engine broke off this request")
        return vector

    def reader(self, request: Request) -> Reader | None:
        self._alive()
        if self._parsers is not None:
            return self._parsers.reader(request)
        if request.tools and request.tools.choice != "none" and not self._model.calls:
            raise EngineRefused("this model calls no tools")
        self._shape(request)
        return None

    def _must_be(self, kind: str, request: Request) -> None:
        if self._model.kind != kind or (kind == "embedding" and self._timed):
            does = "makes vectors, and no text" if self._model.kind == "embedding" else "makes no vectors"
            raise EngineRefused(f"{request.model} {does}")

    @contextmanager
    def _run(self, request_id: str) -> Iterator[str]:
        """An id of its own: vLLM aborts by id, every request of that id at once, and a second attempt must not end
        with the first."""
        run_id = f"{request_id}#{next(self._ids)}"
        self._run_ids.setdefault(request_id, []).append(run_id)
        try:
            yield run_id
        finally:
            self._forget(request_id, run_id)

    async def abort(self, request_id: str) -> None:
        run_ids = self._run_ids.get(request_id)
        if run_ids and self._engine is not None and not self._engine.errored:
            await self._engine.abort(list(run_ids))
            # The last piece of an abort comes outside any step, and perhaps no step follows.
            self._loop.call_soon(self._tell)

    async def prompt_ids(self, text: str) -> list[int]:
        tokenizer = self._alive().get_tokenizer()
        turn = [{"role": "user", "content": text}]
        template = Path(self._model.chat_template).read_text() if self._model.chat_template else None
        rendered = tokenizer.apply_chat_template(
            turn, tokenize=False, add_generation_prompt=True, chat_template=template
        )
        ids: list[int] = tokenizer.encode(rendered, add_special_tokens=False)
        return ids

    def text_of(self, ids: Sequence[int], prompt_ids: Sequence[int] = ()) -> str:
        tail = list(prompt_ids[-TAIL_TOKENS:])
        before, text = self._decoded(tail), self._decoded([*tail, *ids])
        return text[len(before) :] if text.startswith(before) else self._decoded(ids)

    def _decoded(self, ids: Sequence[int]) -> str:
        tokenizer = self._alive().get_tokenizer()
        # Not the tokenizer's own `decode`, which may tidy up spaces; a stream does not.
        plain = getattr(tokenizer, "_tokenizer", tokenizer)
        text: str = plain.decode(list(ids), skip_special_tokens=True)
        return text

    async def ping(self) -> None:
        try:
            with _errors_as_ours():
                await asyncio.wait_for(self._alive().is_sleeping(), self._ping_s)
        except TimeoutError:
            raise EngineHung(f"the engine process did not answer within {self._ping_s} s") from None

    def stats(self) -> EngineStats:
        return self._stats

    async def stop(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            if not engine.errored:
                await engine.abort([run_id for run_ids in self._run_ids.values() for run_id in run_ids])
            if engine.output_handler is not None:  # it would take the end that we ask for here for a crash, and log it
                engine.output_handler.cancel()
            await self._loop.run_in_executor(self._thread, engine.shutdown, self._drain_s)
            await asyncio.sleep(0)  # vLLM closes its sockets on the loop's next turn, but not their context
            engine.engine_core.resources.ctx.destroy(linger=0)
        self._thread.shutdown(wait=False)

    def _load(self) -> None:
        # Kept here and not returned: a result lives on in its thread, and vLLM complains if it dies with the process.
        os.environ.update(_ENVIRONMENT)
        os.environ.pop("PYTHONHASHSEED", None)  # vLLM would seed its block hashes with it; gateways compute them too
        for name, value in _ENVIRONMENT_DEFAULTS.items():
            os.environ.setdefault(name, value)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        args = AsyncEngineArgs(**self._arguments(on_cpu=current_platform.is_cpu()))
        try:
            self._engine = AsyncLLM.from_engine_args(
                args, usage_context=UsageContext.OPENAI_API_SERVER, stat_loggers=[_step_logger(self._recorded)]
            )
        except RuntimeError as e:
            raise EngineDead(f"vLLM did not start: {e}") from e
        if self._model.kind == "chat" and not self._timed:
            self._parsers = self._parsers_of(self._engine)

    def _parsers_of(self, engine: Any) -> Parsers:
        try:
            return Parsers(self._model, engine.get_tokenizer(), engine.model_config)
        except TypeError as e:
            engine.shutdown()
            raise EngineDead(f"the catalogue's parsers are not for this model: {e}") from e

    def _arguments(self, *, on_cpu: bool) -> dict[str, Any]:
        """Every size by name: AsyncLLM's own defaults are smaller than the server's, and differ between GPUs."""
        model, knobs = self._model, self._model.engine
        unit = _CPU_BLOCK_TOKENS if on_cpu and not self._timed else 1
        kv_cache_mib = knobs.kv_cache_mib or (_TIMED_KV_MIB if self._timed else 0)
        return {
            "model": str(self._folder),
            "served_model_name": model.name or None,
            "dtype": knobs.dtype,
            "max_model_len": model.context_tokens,
            "max_num_seqs": model.slots,
            "max_num_batched_tokens": max(knobs.batched_tokens, model.slots),
            "block_size": -(-knobs.block_tokens // unit) * unit,
            "kv_cache_memory_bytes": kv_cache_mib * 2**20 or None,
            "enforce_eager": on_cpu or self._timed or knobs.eager,
            "enable_chunked_prefill": True,
            "long_prefill_token_threshold": knobs.long_prefill_tokens,
            "watermark": knobs.watermark,
            "enable_prefix_caching": True,
            "prefix_caching_hash_algo": knobs.prefix_hash,
            "scheduling_policy": knobs.scheduler,
            "enable_lora": knobs.adapters > 0,
            "shutdown_timeout": int(self._drain_s),
            "enable_log_requests": False,  # prompts never reach logs
            "disable_log_stats": True,
            "generation_config": "vllm",  # sampling is what the request says, not what the model's folder does
            "distributed_executor_backend": f"{_EXECUTORS}.{self._executor(on_cpu)}",
            "additional_config": {"step": msgspec.structs.asdict(model.step)},
            "structured_outputs_config": {"backend": _GRAMMAR_BACKEND},
        } | self._arguments_of_kind()

    def _arguments_of_kind(self) -> dict[str, Any]:
        if self._timed:
            return {"async_scheduling": False}
        if self._model.kind == "chat":
            return {"reasoning_parser": self._model.engine.reasoning_parser}  # a grammar begins after the thinking
        whole_prompt = max(self._model.engine.batched_tokens, self._model.context_tokens, self._model.slots)
        return {
            "runner": "pooling",
            "convert": "embed",  # a model that answers gives its last hidden state; one that is made for it stays as is
            "max_num_batched_tokens": whole_prompt,
            # Of what attends both ways neither is possible, and vLLM knows.
            "enable_chunked_prefill": None,
            "enable_prefix_caching": None,
        }

    def _executor(self, on_cpu: bool) -> str:
        if self._timed:
            return "TimedExecutor"
        return "GuardedMultiproc" if on_cpu else "GuardedUniproc"

    def _alive(self) -> Any:
        if self._engine is None or self._engine.errored:
            raise EngineDead("the engine process is gone")
        return self._engine

    def _prompt(self, ids: Sequence[int], request: Request) -> Any:
        from vllm.inputs.engine import tokens_input

        return tokens_input(list(ids), cache_salt=request.cache_salt or None)

    def _params(self, request: Request, cut: int) -> tuple[Any, dict[str, Any]]:
        """Sampling parameters, and what else `generate` is told."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        asked = request.sampling
        # The timed step knows a request only by its parameters.
        script = {"script_seed": script_seed(request, cut), "script_cut": cut} if self._timed else None
        params: dict[str, Any] = {
            "max_tokens": asked.max_tokens,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_k": asked.top_k,
            "min_p": asked.min_p,
            "seed": asked.seed,
            "stop": list(asked.stop),
            "stop_token_ids": list(asked.stop_token_ids),
            "presence_penalty": asked.presence_penalty,
            "frequency_penalty": asked.frequency_penalty,
            "repetition_penalty": asked.repetition_penalty,
            "ignore_eos": asked.ignore_eos,
            "min_tokens": min(asked.min_tokens, asked.max_tokens),
            "logit_bias": {token: max(-100.0, min(100.0, bias)) for token, bias in asked.logit_bias.items()} or None,
            "logprobs": asked.logprobs,
            "extra_args": script,
            "output_kind": RequestOutputKind.DELTA,
        }
        shape, thinking = self._shape(request)
        return SamplingParams(**params | shape), thinking

    def _shape(self, request: Request) -> tuple[dict[str, Any], dict[str, Any]]:
        """What tools and grammar ask."""
        if self._parsers is not None:
            return self._parsers.asked_of_engine(request)
        # The timed step's tokens come from a script, which is no sentence of any grammar: vLLM would break such a
        # request off in the middle. It is refused before it begins.
        if request.sampling.grammar or (request.tools and request.tools.forced):
            raise EngineRefused("the timed engine cannot follow a grammar, or be made to call")
        return {}, {}

    def _piece(self, output: Any, request: Request) -> Piece:
        completion = output.outputs[0]
        reason = completion.finish_reason
        if reason is not None and reason not in _FINISH:
            raise EngineRefused(f"the engine broke off this request ({reason})")
        return Piece(
            tokens=tuple(completion.token_ids),
            text=completion.text,
            finish=_FINISH[reason] if reason is not None else None,
            cached_tokens=output.num_cached_tokens or 0,
            logprobs=self._logprobs(completion, request.sampling.logprobs),
            stop=completion.stop_reason if isinstance(completion.stop_reason, str) else "",
        )

    def _logprobs(self, completion: Any, alternatives: int | None) -> tuple[Logprob, ...]:
        """Of the tokens of one piece, each with its likeliest alternatives: the sampled one is among those only if it
        is one of them."""
        if alternatives is None:
            return ()
        # A step's may come without any where vLLM had none to tell; it stays with its token all the same.
        told = [*(completion.logprobs or ()), *[{}] * len(completion.token_ids)]
        return tuple(
            self._logprob(token, of_token or {}, alternatives)
            for token, of_token in zip(completion.token_ids, told, strict=False)
        )

    def _logprob(self, token: int, told: dict[int, Any], alternatives: int) -> Logprob:
        best = sorted((value.rank or 0, other) for other, value in told.items() if (value.rank or 0) <= alternatives)
        top = tuple((self._spelled(other, told[other]), _logprob_told(told[other])) for _, other in best)
        own = told.get(token)
        return Logprob(self._spelled(token, own), _logprob_told(own), top[:alternatives])

    def _spelled(self, token: int, told: Any) -> str:
        if told is not None and told.decoded_token is not None:
            return str(told.decoded_token)
        return str(self._alive().get_tokenizer().decode([token]))

    def _forget(self, request_id: str, run_id: str) -> None:
        run_ids = self._run_ids[request_id]
        run_ids.remove(run_id)
        if not run_ids:
            del self._run_ids[request_id]

    def _recorded(self, scheduler_stats: Any) -> None:
        """vLLM has put every request's output of a step into its queue, and woken the reader."""
        if scheduler_stats is not None:
            self._stats = EngineStats(
                running=scheduler_stats.num_running_reqs,
                waiting=scheduler_stats.num_waiting_reqs,
                kv_used=scheduler_stats.kv_cache_usage,
            )
        # The readers are queued on the loop before this call, so each of them has its piece first.
        self._loop.call_soon(self._tell)

    def _tell(self) -> None:
        for told in self._told:
            told()


def _logprob_told(told: Any) -> float:
    return max(_LEAST_LOGPROB, float(told.logprob)) if told is not None else _LEAST_LOGPROB  # and so is NaN


@contextmanager
def _errors_as_ours() -> Iterator[None]:
    from vllm.exceptions import GracefulHTTPError, VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    try:
        yield
    except EngineDeadError as e:
        raise EngineDead("the engine process is gone") from e
    except (VLLMClientError, GracefulHTTPError) as e:
        # The first argument only: the rest may quote the request.
        raise EngineRefused(str(e.args[0]) if e.args else str(e)) from e
    except EngineGenerateError as e:
        raise EngineRefused("the engine could not run this request") from e


def _step_logger(recorded: Callable[[Any], None]) -> Any:
    """A vLLM stat logger, which is called once a step, on the loop, after the step's outputs were queued."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class StepLogger(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            """There is one engine, and nothing to prepare."""

        def record(self, scheduler_stats: Any, *_args: Any, **_kwargs: Any) -> None:
            recorded(scheduler_stats)

        def log_engine_initialized(self) -> None:
            """We say so ourselves."""

    return StepLogger
