"""The models: what each is called, where its weights lie, how its engine runs. TOML; no prices.

[models."NAME"]
weights           "local:FOLDER" (under $FOREBAY_DATA/models), a path, or "" for the scripted engine alone
tokenizer         a folder with tokenizer.json and its chat template; empty: the weights' own; "bytes": no files
context_tokens    prompt and output together
max_output_tokens what a request gets that names no limit
slots             sequences an engine runs at once
workers           {min, max} engines
canary            {prompt, answer}: what turns a warming worker into a ready one, greedy
engine            dtype, kv_cache_mib, block_tokens, batched_tokens, eager
step              base_ms, sequence_ms, prefill_ms: the timed and scripted engines' step
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

#: Names may look like a hub's ("org/name"), never like a Redis hash tag.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


class BadCatalog(Exception):
    """The catalogue is not valid."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    min: int = 1
    max: int = 1


class Canary(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: str = "What is the capital of France?"
    answer: str = ""  #: empty: any answer will do


class EngineKnobs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    dtype: str = "auto"
    kv_cache_mib: int = 0  #: 0: what the GPU has left
    block_tokens: int = 16
    batched_tokens: int = 2048
    eager: bool = False  #: always on for the CPU, whose compiled mode answers nonsense without AVX-512


class StepProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    base_ms: float = 13.0
    sequence_ms: float = 0.04
    prefill_ms: float = 0.1


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    weights: str = ""
    tokenizer: str = ""
    context_tokens: int
    max_output_tokens: int = 1024
    slots: int = 16
    workers: Bounds = Bounds()
    canary: Canary = Canary()
    engine: EngineKnobs = EngineKnobs()
    step: StepProfile = StepProfile()
    name: str = ""  #: filled from the table's key

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
        if not 0 <= model.workers.min <= model.workers.max:
            raise BadCatalog(f"{path}: {name}: workers must have 0 <= min <= max")
        if not 0 < model.max_output_tokens < model.context_tokens:
            raise BadCatalog(f"{path}: {name}: max_output_tokens must be smaller than context_tokens")
    return Catalog({name: msgspec.structs.replace(model, name=name) for name, model in file.models.items()})
