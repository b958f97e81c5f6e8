"""The models: what each is called, where its weights lie, how its engine runs. TOML; no prices.

[models."NAME"]
weights           "local:FOLDER" (under $FOREBAY_DATA/models), a path, or "" for the scripted engine alone
tokenizer         a folder with tokenizer.json and its chat template; empty: the weights' own; "bytes": no files
kind              "chat": it answers; "embedding": it makes vectors of texts, and nothing else
chat_template     a jinja file, absolute or beside the catalogue; empty: the tokenizer's own
context_tokens    prompt and output together
max_output_tokens what a request gets that names no limit
slots             sequences an engine runs at once
reserved_slots    slots that what cannot be preempted leaves free; -1: a sixteenth of them, at least 1 of 8
workers           {min, max} engines
bounds            waiting, waiting_tokens, tenant_waiting, tenant_tokens: past them a request is refused
cached_weight     how much a token of input that was cached counts against limits, 0 (not at all) to 1 (as any other)
canary            {prompt, answer}: what turns a warming worker into a ready one, greedy
slo.ttft_ms       {system, interactive, default, bulk}: from claim to first token; bounds the prompts an engine takes in
step              base_ms, sequence_ms, prefill_ms: the timed and scripted engines' step; prefill_ms is also what a
                  worker goes by until it has measured; answer_tokens: the scripted engine stops by itself after
                  so many tokens of text (0: never, as checkers expect). base_ms and sequence_ms are also how fast
                  one answer can be at most, which limits hold for: too low a time costs a key room, too high a one
                  makes debt

[models."NAME".engine]   each is told to vLLM by name, whatever its own default
dtype               "auto": the weights' own; "bfloat16", "float16", "float32"
kv_cache_mib        KV cache; 0: what the GPU has left
block_tokens        tokens in a block of it
batched_tokens      most tokens in one step: prompts are cut into steps of it
long_prefill_tokens most of one prompt in a step while others run, so that short ones go beside it; 0: no bound
watermark           share of the KV cache that vLLM keeps free when it admits while something runs
scheduler           "priority", the class first; "fcfs"
prefix_hash         "sha256_cbor", the only one: gateways compute it too, and vLLM's others hash Python's own pickles
adapters            LoRA adapters in a batch; 0: off, and nothing else yet
eager               no compiled graphs; always so on a CPU
tool_parser         vLLM's name of what reads calls out of an answer, "hermes" for one; empty: the model calls no
                    tools. On the timed and scripted engines any name will do: their calls are scripted
reasoning_parser    vLLM's name of what tells thinking from the answer, "qwen3" for one; empty: nothing does
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec

#: Names may look like a hub's ("org/name"), never like a Redis hash tag.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")

#: No engine makes an answer faster, tokens a second.
PACE_MAX = 10_000.0


class BadCatalog(Exception):
    """The catalogue is not valid."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    min: int = 1
    max: int = 1


class QueueBounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What may wait for the model, and of one organisation."""

    waiting: int = 100_000
    waiting_tokens: int = 200_000_000
    tenant_waiting: int = 20_000
    tenant_tokens: int = 50_000_000

    def faults(self) -> Iterator[str]:
        if min(msgspec.structs.astuple(self)) < 1:
            yield "bounds must be at least 1"


class Canary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: str = "What is the capital of France?"
    answer: str = ""  #: empty: any answer will do


class EngineKnobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    kv_cache_mib: int = 0  #: 0: what the GPU has left
    block_tokens: int = 16
    batched_tokens: int = 2048
    long_prefill_tokens: int = 0
    watermark: float = 0.01
    scheduler: Literal["priority", "fcfs"] = "priority"
    prefix_hash: str = "sha256_cbor"
    adapters: int = 0
    eager: bool = False  #: always on for the CPU, whose compiled mode answers nonsense without AVX-512
    tool_parser: str = ""  #: empty: no tools
    reasoning_parser: str = ""  #: empty: all of an answer is the answer

    def faults(self) -> Iterator[str]:
        if self.kv_cache_mib < 0:
            yield "kv_cache_mib must not be negative"
        if self.block_tokens < 1 or self.block_tokens & (self.block_tokens - 1):
            yield "block_tokens must be a power of two"
        if self.batched_tokens < self.block_tokens:
            yield "batched_tokens must be at least block_tokens"
        if self.long_prefill_tokens < 0:
            yield "long_prefill_tokens must not be negative"
        if not 0 <= self.watermark < 0.5:
            yield "watermark must be a share, from 0 to below 0.5"
        if self.prefix_hash != "sha256_cbor":
            yield (
                f"prefix_hash is {self.prefix_hash!r}, and must be 'sha256_cbor': gateways compute the hashes too, "
                "which they cannot where vLLM hashes Python's own pickles"
            )
        if self.adapters != 0:
            yield "adapters must be 0: LoRA adapters are not served yet"


class StepProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    base_ms: float = 13.0
    sequence_ms: float = 0.04
    prefill_ms: float = 0.1
    answer_tokens: int = 0

    def faults(self) -> Iterator[str]:
        if min(self.base_ms, self.sequence_ms, self.prefill_ms) < 0:
            yield "step times must not be negative"
        if self.answer_tokens < 0:
            yield "step.answer_tokens must not be negative"


class ClassTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One time for each class, ms."""

    system: float = 500
    interactive: float = 1_000
    default: float = 5_000
    bulk: float = 60_000


class Slo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ttft_ms: ClassTimes = ClassTimes()

    @property
    def ttft_s(self) -> tuple[float, float, float, float]:
        """By class, the most urgent first."""
        times = self.ttft_ms
        return times.system / 1000, times.interactive / 1000, times.default / 1000, times.bulk / 1000

    def faults(self) -> Iterator[str]:
        if min(self.ttft_s) <= 0:
            yield "slo.ttft_ms must be above 0 for each class"
        elif list(self.ttft_s) != sorted(self.ttft_s):
            yield "slo.ttft_ms must not be shorter for a less urgent class"


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    weights: str = ""
    tokenizer: str = ""
    kind: Literal["chat", "embedding"] = "chat"
    chat_template: str = ""  #: `load` makes it absolute
    context_tokens: int
    max_output_tokens: int = 1024
    slots: int = 16
    reserved_slots: int = -1  #: -1: a sixteenth
    workers: Bounds = Bounds()
    bounds: QueueBounds = QueueBounds()
    cached_weight: float = 0.0
    canary: Canary = Canary()
    engine: EngineKnobs = EngineKnobs()
    step: StepProfile = StepProfile()
    slo: Slo = Slo()
    name: str = ""  #: filled from the table's key

    @property
    def reserve(self) -> int:
        """Slots that what cannot be preempted leaves free, so that something urgent can start."""
        if self.reserved_slots >= 0:
            return self.reserved_slots
        return max(round(self.slots / 16), 1 if self.slots >= 8 else 0)

    @property
    def pace(self) -> float:
        """Tokens a second of its fastest answer, one that is alone."""
        step_ms = self.step.base_ms + self.step.sequence_ms
        return min(1000 / step_ms, PACE_MAX) if step_ms > 0 else PACE_MAX

    @property
    def calls(self) -> bool:
        """It can call tools."""
        return bool(self.engine.tool_parser)

    def faults(self) -> Iterator[str]:
        """What is wrong with it, in the words of its file."""
        if not 0 <= self.workers.min <= self.workers.max:
            yield "workers must have 0 <= min <= max"
        if self.kind == "chat" and not 0 < self.max_output_tokens < self.context_tokens:
            yield "max_output_tokens must be smaller than context_tokens"
        if not 0 <= self.cached_weight <= 1:
            yield "cached_weight must be from 0 to 1"
        if self.slots < 1:
            yield "slots must be at least 1"
        elif not -1 <= self.reserved_slots < self.slots:
            yield "reserved_slots must be fewer than slots (-1: a sixteenth of them)"
        if self.kind == "embedding" and (self.chat_template or self.engine.tool_parser or self.engine.reasoning_parser):
            yield "an embedding model does not answer: no chat_template, tool_parser or reasoning_parser"
        for part in (self.bounds, self.engine, self.step, self.slo):
            yield from part.faults()

    def weights_folder(self, data: Path) -> Path:
        """Where the weights lie on this machine."""
        if self.weights.startswith("local:"):
            return data / "models" / self.weights.removeprefix("local:")
        return Path(self.weights)

    def tokenizer_folder(self, data: Path) -> Path | None:
        """Where the tokenizer files lie; None for the byte tokenizer, which needs none."""
        if self.tokenizer == "bytes":
            return None
        return Path(self.tokenizer) if self.tokenizer else self.weights_folder(data)


class Catalog(Mapping[str, Model]):
    """The models by name."""

    def __init__(self, models: Mapping[str, Model]) -> None:
        self._models = dict(models)

    def __getitem__(self, name: str) -> Model:
        return self._models[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def only(self, names: str) -> Catalog:
        """The catalogue cut down to a comma-separated list; all of it for an empty one."""
        wanted = [name.strip() for name in names.split(",") if name.strip()]
        unknown = [name for name in wanted if name not in self._models]
        if unknown:
            raise BadCatalog(f"FOREBAY_MODELS names {', '.join(unknown)}, which the catalogue does not have")
        return Catalog({name: self._models[name] for name in wanted}) if wanted else self


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    models: dict[str, Model]


def load(path: Path | None = None) -> Catalog:
    """Read a catalogue; without a path, the one that ships with Forebay.

    Raises:
      BadCatalog: naming the file and the fault.
    """
    path = path or Path(__file__).with_name("catalog.toml")
    try:
        file = msgspec.toml.decode(path.read_bytes(), type=_File)
    except (OSError, msgspec.DecodeError) as e:
        raise BadCatalog(f"{path}: {e}") from None
    for name, model in file.models.items():
        if not _NAME.fullmatch(name):
            raise BadCatalog(f"{path}: {name!r} is not a model name (letters, digits and . _ : / -)")
        for fault in model.faults():
            raise BadCatalog(f"{path}: {name}: {fault}")
    return Catalog({name: _placed(model, name, path) for name, model in file.models.items()})


def _placed(model: Model, name: str, path: Path) -> Model:
    """The model by its name, its files by where they lie."""
    template = str((path.parent / model.chat_template).resolve()) if model.chat_template else ""
    if template and not Path(template).is_file():
        raise BadCatalog(f"{path}: {name}: chat_template is {model.chat_template!r}, and there is no such file")
    return msgspec.structs.replace(model, name=name, chat_template=template)
