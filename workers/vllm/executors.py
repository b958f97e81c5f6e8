"""What runs inside vLLM's own processes: the guard against orphans, and the timed model step.

vLLM's engine process outlives a killed worker and keeps the GPU, and an engine's own workers outlive a killed engine.
So each of them watches its parent, and ends itself when that is gone.

Only engine processes and those that start them import this module.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from core.catalog import StepProfile
from workers.scripted import scripted_token

#: Seconds between two looks at the parent.
GUARD_POLL_S = 0.2


@cache
def guard() -> None:
    """End this process by SIGKILL once its parent is gone, even if that was before this call."""
    # A thread, not PR_SET_PDEATHSIG, which fires when the *thread* that started us ends.
    threading.Thread(target=_end_with_parent, daemon=True, name="parent-guard").start()


def _end_with_parent() -> None:
    while (parent := multiprocessing.parent_process()) is None:  # not known before the arguments are unpickled
        time.sleep(GUARD_POLL_S)
    while os.getppid() == parent.pid:
        time.sleep(GUARD_POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)


# An engine process imports this module as it unpickles its arguments, long before it makes an executor. A guard that
# came only with the executor would leave an engine whose parent dies while it starts waiting for it for ever.
if multiprocessing.current_process().name.startswith("EngineCore"):
    guard()


class GuardedWorker:
    """Mixed into vLLM's worker class, whatever the platform's is: watches the engine process from the start."""

    def __new__(cls, *_args: object, **_kwargs: object) -> GuardedWorker:
        guard()
        if current_platform.is_cpu():
            _without_amx_attention()
        return super().__new__(cls)


def _without_amx_attention() -> None:
    """On CPUs with AMX, vLLM 0.32 picks an attention kernel for bfloat16 that answers nonsense (SmolLM2: "L'Étoile,
    la Marseillaise"); its plain vector kernel is right, and as fast here. The canary tells when this is needed no more.
    """
    from vllm.v1.attention.backends import cpu_attn

    choose = cpu_attn._get_attn_isa

    def chosen(*args: Any, **kwargs: Any) -> Any:
        isa = choose(*args, **kwargs)
        return "vec" if isa == "amx" else isa

    cpu_attn._get_attn_isa = chosen


class GuardedMultiproc(MultiprocExecutor):  # type: ignore[misc]  # vLLM is untyped here
    """Every CPU engine, and GPU engines that span several GPUs: a worker process for each rank."""

    def _init_executor(self) -> None:
        guard()
        self.parallel_config.worker_extension_cls = f"{__name__}.{GuardedWorker.__name__}"
        super()._init_executor()


class GuardedUniproc(UniProcExecutor):  # type: ignore[misc]
    """A GPU engine on one GPU: the model runs in the engine process itself."""

    def _init_executor(self) -> None:
        guard()
        super()._init_executor()


@dataclass
class _Script:
    """Where a request stands in its script."""

    seed: int
    cut: int
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int = 0

    def completes(self, scheduled_tokens: int) -> bool:
        """Whether this step computes the last known token, so that it yields a new one."""
        return self.computed_tokens + scheduled_tokens >= self.prompt_tokens + self.output_tokens

    def token(self) -> int:
        return scripted_token(self.seed, self.cut + self.output_tokens)


class TimedExecutor(Executor):  # type: ignore[misc]
    """vLLM's scheduler, KV manager and prefix cache are real; the model step sleeps and reads from a script."""

    supports_pp = False

    def _init_executor(self) -> None:
        guard()
        self._step = StepProfile(**self.vllm_config.additional_config["step"])
        self._scripts: dict[str, _Script] = {}

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        self._follow(scheduler_output)
        output = self._run_step(scheduler_output.num_scheduled_tokens)
        if not non_block:
            return output
        future: Future[Any] = Future()
        future.set_result(output)
        return future

    def _follow(self, scheduler_output: Any) -> None:
        """Take over what the scheduler says about each request."""
        for request_id in scheduler_output.finished_req_ids:
            self._scripts.pop(request_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            extra = new.sampling_params.extra_args
            self._scripts[new.req_id] = _Script(
                seed=extra["script_seed"],
                cut=extra["script_cut"],
                prompt_tokens=new.prompt_len,
                computed_tokens=new.num_computed_tokens,
                # After a preemption, some schedulers send a request as new, its output among the prefill.
                output_tokens=len(new.prefill_token_ids or ()) - new.prompt_len if new.prefill_token_ids else 0,
            )
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, computed, output in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            script = self._scripts[request_id]
            script.computed_tokens, script.output_tokens = computed, output

    def _run_step(self, scheduled_tokens: dict[str, int]) -> Any:
        if not scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        prompt_tokens, sampled = 0, []
        for request_id, n in scheduled_tokens.items():
            script = self._scripts[request_id]
            prompt_tokens += max(0, min(n, script.prompt_tokens - script.computed_tokens))
            sampled.append([script.token()] if script.completes(n) else [])
        self._pass_time(len(scheduled_tokens), prompt_tokens)
        ids = list(scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids, req_id_to_index={name: at for at, name in enumerate(ids)}, sampled_token_ids=sampled
        )

    def _pass_time(self, sequences: int, prompt_tokens: int) -> None:
        step = self._step
        time.sleep((step.base_ms + step.sequence_ms * sequences + step.prefill_ms * prompt_tokens) / 1000)

    def sample_tokens(self, _grammar_output: Any, non_block: bool = False) -> Any:
        raise AssertionError("execute_model has sampled already")

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        model, parallel = self.model_config, self.parallel_config
        spec = FullAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=model.get_num_kv_heads(parallel),
            head_size=model.get_head_size(),
            dtype=torch.bfloat16,
        )
        return [{f"model.layers.{i}.self_attn.attn": spec for i in range(model.get_num_layers(parallel))}]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [["LBNHC", "LBHNC"]]

    def set_kv_cache_layout(self, layout_name: str) -> None:
        """There is no cache to lay out."""

    def determine_available_memory(self) -> list[int]:
        return [self.cache_config.kv_cache_memory_bytes]

    def initialize_from_config(self, kv_cache_configs: Any) -> None:
        """There is no cache to allocate: only its bookkeeping is real."""

    def compile_or_warm_up_model(self) -> None:
        """There is no model."""

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def supports_draft_weight_updates(self) -> bool:
        return False

    def collective_rpc(self, method: Any, *_args: Any, **_kwargs: Any) -> Any:
        """There are no workers to call; what vLLM asks of them as a matter of routine is done."""
        return [None]

    def check_health(self) -> None:
        """Healthy as long as its process is."""

    def shutdown(self) -> None:
        """There is nothing to free."""
