"""The catalogue: what ships is valid, and a fault names its file and model."""

from __future__ import annotations

from pathlib import Path

import pytest

from core import catalog
from core.catalog import PACE_MAX, BadCatalog, Catalog, Model, StepProfile

ONE = '[models."m"]\ncontext_tokens = 2048\n'


def loaded(folder: Path, text: str) -> Catalog:
    path = folder / "models.toml"
    path.write_text(text)
    return catalog.load(path)


def test_the_catalogue_that_ships_serves_the_local_model() -> None:
    """Its weights are where the set-up puts them, and its canary has an answer."""
    model = catalog.load()["smollm2-135m-instruct"]

    assert model.name == "smollm2-135m-instruct"
    assert model.weights_folder(Path("/data")) == Path("/data/models/smollm2-135m-instruct")
    assert model.canary.answer == "The capital of France is Paris."


def test_a_model_needs_only_its_context(tmp_path: Path) -> None:
    found = loaded(tmp_path, ONE)

    assert list(found) == ["m"]
    assert found["m"] == Model(name="m", context_tokens=2048)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("not toml", "models.toml"),
        ('[models."m"]\n', "context_tokens"),
        (ONE + "slotz = 1\n", "slotz"),
        (ONE + "slots = 'many'\n", "slots"),
        ('[models."{m}"]\ncontext_tokens = 9\n', "is not a model name"),
        (ONE + "workers = { min = 2, max = 1 }\n", "min <= max"),
        (ONE + "max_output_tokens = 2048\n", "smaller than context_tokens"),
        (ONE + "slots = 0\n", "m: slots must be at least 1"),
        (ONE + "slots = 4\nreserved_slots = 4\n", "reserved_slots must be fewer than slots"),
        (ONE + "engine = { dtype = 'int3' }\n", "int3"),
        (ONE + "engine = { kv_cache_mib = -1 }\n", "kv_cache_mib"),
        (ONE + "engine = { block_tokens = 24 }\n", "power of two"),
        (ONE + "engine = { block_tokens = 32, batched_tokens = 16 }\n", "batched_tokens must be at least"),
        (ONE + "engine = { long_prefill_tokens = -1 }\n", "long_prefill_tokens"),
        (ONE + "engine = { watermark = 0.5 }\n", "watermark must be a share"),
        (ONE + "engine = { scheduler = 'lifo' }\n", "lifo"),
        (ONE + "engine = { prefix_hash = 'sha256' }\n", "gateways compute the hashes too"),
        (ONE + "engine = { adapters = 2 }\n", "adapters must be 0"),
        (ONE + "kind = 'video'\n", "video"),
        (ONE + "kind = 'embedding'\nengine = { tool_parser = 'hermes' }\n", "does not answer"),
        (ONE + "chat_template = 'none.jinja'\n", "there is no such file"),
        (ONE + "step = { base_ms = -1 }\n", "step times"),
        (ONE + "slo = { ttft_ms = { system = 0 } }\n", "above 0"),
        (ONE + "slo = { ttft_ms = { interactive = 6000 } }\n", "shorter for a less urgent class"),
        (ONE + "slo = { ttft_ms = { urgent = 1 } }\n", "urgent"),
    ],
)
def test_a_fault_is_named(tmp_path: Path, text: str, fault: str) -> None:
    """A braced name would be a Redis hash tag; an unknown field is a typing error."""
    with pytest.raises(BadCatalog, match=fault) as caught:
        loaded(tmp_path, text)

    assert "models.toml" in str(caught.value)


def test_a_catalogue_that_is_not_there_is_named() -> None:
    with pytest.raises(BadCatalog, match=r"nowhere\.toml"):
        catalog.load(Path("/nowhere.toml"))


def test_a_cut_keeps_what_it_names_and_refuses_what_is_not_there(tmp_path: Path) -> None:
    found = loaded(tmp_path, ONE + ONE.replace('"m"', '"n"'))

    assert list(found.only("")) == ["m", "n"]
    assert list(found.only(" n ,")) == ["n"]
    with pytest.raises(BadCatalog, match="FOREBAY_MODELS names x"):
        found.only("m,x")


def test_tokenizer_files_are_the_weights_own_unless_said_otherwise() -> None:
    model = Model(context_tokens=10, weights="local:m")

    assert model.tokenizer_folder(Path("/d")) == Path("/d/models/m")
    assert Model(context_tokens=10, tokenizer="/t").tokenizer_folder(Path("/d")) == Path("/t")
    assert Model(context_tokens=10, tokenizer="bytes").tokenizer_folder(Path("/d")) is None


def test_a_sixteenth_of_the_slots_is_reserved_unless_said_otherwise() -> None:
    def reserve(slots: int, **more: int) -> int:
        return Model(context_tokens=10, slots=slots, **more).reserve

    assert [reserve(slots) for slots in (1, 7, 8, 16, 64, 256)] == [0, 0, 1, 1, 4, 16]
    assert (reserve(16, reserved_slots=0), reserve(16, reserved_slots=5)) == (0, 5)


def test_objectives_are_named_by_class(tmp_path: Path) -> None:
    found = loaded(tmp_path, ONE + "slo = { ttft_ms = { interactive = 2000, bulk = 90000 } }\n")

    assert found["m"].slo.ttft_s == (0.5, 2, 5, 90)


def test_a_chat_template_lies_beside_its_catalogue(tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text("{{ messages }}")

    found = loaded(tmp_path, ONE + "chat_template = 'own.jinja'\nengine = { tool_parser = 'hermes' }\n")["m"]

    assert found.chat_template == str(tmp_path / "own.jinja")
    assert found.calls and not Model(context_tokens=9).calls


def test_an_embedding_model_needs_no_room_for_an_answer(tmp_path: Path) -> None:
    assert loaded(tmp_path, '[models."m"]\ncontext_tokens = 512\nkind = "embedding"\n')["m"].kind == "embedding"


@pytest.mark.parametrize("weight", [-0.1, 1.1])
def test_a_weight_of_cached_input_is_a_share(weight: float) -> None:
    assert list(Model(context_tokens=4096, cached_weight=weight).faults()) == ["cached_weight must be from 0 to 1"]


@pytest.mark.parametrize(("base_ms", "pace"), [(13.0, 76.69), (39.96, 25.0), (0.0, PACE_MAX), (0.001, PACE_MAX)])
def test_the_fastest_answer_is_one_that_is_alone(base_ms: float, pace: float) -> None:
    step = StepProfile(base_ms=base_ms, sequence_ms=0.04 if base_ms > 1 else 0.0)
    assert Model(context_tokens=4096, step=step).pace == pytest.approx(pace, rel=1e-4)
