"""The suites of llm-comply: Open Responses, OpenAI's chat completions, Anthropic's messages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.conftest import THINKER
from tests.platform import MODEL, Platform

#: What is not asked, and why.
EXCLUDED = {
    "image-input": "no model of the catalogue sees images; they are refused with a 400 that names the part",
    "chat-image-input": "the same",
    "anth-image-input": "the same",
    "compact-response": "compaction needs a model that summarises; the suite calls it advisory",
    "compact-missing-model": "the same endpoint",
}

#: What is asked of a model that thinks.
THINKING = {"reasoning-summary", "chat-reasoning-summary", "anth-thinking-display"}


def comply(platform: Platform, suite: str, model: str, tests: list[str], *words: str) -> dict[str, Any]:
    program = Path(sys.prefix) / "bin" / "llm-comply"
    command = [str(program), "run", "--format", suite, "-u", f"{platform.url}/v1", "-k", platform.key, "-m", model]
    done = subprocess.run(
        [*command, "--json", "-f", ",".join(tests), *words], capture_output=True, text=True, timeout=100
    )
    assert done.stdout, done.stderr
    told: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    return told


def listed(suite: str) -> list[str]:
    """The ids of a suite's tests."""
    program = Path(sys.prefix) / "bin" / "llm-comply"
    done = subprocess.run(
        [str(program), "run", "--list", "--format", suite], capture_output=True, text=True, check=True
    )
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("  ") and line[2:3].strip()]
    return [words[0] for words in lines]


SUITES = [("open-responses", (), 9), ("openai-chat", (), 7), ("anthropic", ("-H", "anthropic-version:2023-06-01"), 7)]


@pytest.mark.parametrize(("suite", "words", "least"), SUITES)
def test_every_test_that_the_model_can_do_passes(
    platform: Platform, suite: str, words: tuple[str, ...], least: int
) -> None:
    tests = [test for test in listed(suite) if test not in EXCLUDED.keys() | THINKING]
    assert len(tests) >= least
    _passes(comply(platform, suite, MODEL, tests, *words), tests)


@pytest.mark.parametrize(("suite", "words", "least"), SUITES)
def test_a_model_that_thinks_shows_it(platform: Platform, suite: str, words: tuple[str, ...], least: int) -> None:
    tests = [test for test in listed(suite) if test in THINKING]
    assert len(tests) == 1
    _passes(comply(platform, suite, THINKER, tests, *words), tests)


def _passes(told: dict[str, Any], tests: list[str]) -> None:
    assert [result for result in told["results"] if result["status"] != "passed"] == []
    assert len(told["results"]) == len(tests)
