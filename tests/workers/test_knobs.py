"""The engine is told every size of the catalogue by name: nothing is left to vLLM's defaults, which differ by GPU."""

from __future__ import annotations

from pathlib import Path

import core.catalog
from core.catalog import EngineKnobs, Model
from workers.vllm.engine import VllmEngine


def arguments(model: Model, *, on_cpu: bool = False, timed: bool = False) -> dict[str, object]:
    return VllmEngine(model, Path("/data"), timed)._arguments(on_cpu=on_cpu)


def test_what_the_catalogue_says_reaches_vllm_by_name() -> None:
    knobs = EngineKnobs(
        dtype="float16",
        kv_cache_mib=100,
        block_tokens=64,
        batched_tokens=4096,
        long_prefill_tokens=1024,
        watermark=0.03,
        scheduler="fcfs",
        eager=True,
    )

    told = arguments(Model(name="m", weights="/w", context_tokens=9000, slots=7, engine=knobs))

    assert (
        told
        | {
            "model": "/w",
            "dtype": "float16",
            "max_model_len": 9000,
            "max_num_seqs": 7,
            "max_num_batched_tokens": 4096,
            "block_size": 64,
            "kv_cache_memory_bytes": 100 * 2**20,
            "long_prefill_token_threshold": 1024,
            "watermark": 0.03,
            "scheduling_policy": "fcfs",
            "prefix_caching_hash_algo": "sha256_cbor",
            "enable_prefix_caching": True,
            "enable_chunked_prefill": True,
            "enable_lora": False,
            "enforce_eager": True,
        }
        == told
    )


def test_no_knob_of_the_catalogue_is_forgotten() -> None:
    """Each, changed alone, changes what the engine is told; but for the tool parser, which the engine does not run."""
    plain = arguments(Model(context_tokens=9000))
    other = {
        "dtype": "float16",
        "kv_cache_mib": 7,
        "block_tokens": 64,
        "batched_tokens": 512,
        "long_prefill_tokens": 9,
        "watermark": 0.2,
        "scheduler": "fcfs",
        "prefix_hash": "another",
        "adapters": 3,
        "eager": True,
        "reasoning_parser": "qwen3",
        "tool_parser": "hermes",
    }
    assert set(other) == set(EngineKnobs.__struct_fields__)

    for name, value in other.items():
        changed = Model(context_tokens=9000, engine=EngineKnobs(**{name: value}))  # type: ignore[arg-type]
        assert (arguments(changed) != plain) is (name != "tool_parser"), name


def test_the_local_model_says_them_all() -> None:
    told = core.catalog.load()["smollm2-135m-instruct"].engine

    assert (told.scheduler, told.prefix_hash, told.adapters, told.watermark) == ("priority", "sha256_cbor", 0, 0.01)


def test_an_embedding_model_is_started_as_one() -> None:
    """Its prompts are not cut into steps, so a step takes a whole one."""
    model = Model(context_tokens=9000, kind="embedding")

    told = arguments(model)

    assert (told["runner"], told["convert"], told["max_num_batched_tokens"]) == ("pooling", "embed", 9000)
    assert "runner" not in arguments(model, timed=True) and "runner" not in arguments(Model(context_tokens=9000))
