"""Simon Willison's `llm`, as its users set a platform of their own up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.platform import MODEL, Platform

MODELS = """
- model_id: forebay
  model_name: {model}
  api_base: "{url}/v1"
  api_key_name: forebay
  supports_tools: true
  supports_schema: true
"""


def llm(platform: Platform, folder: Path, *words: str) -> str:
    (folder / "extra-openai-models.yaml").write_text(MODELS.format(model=MODEL, url=platform.url))
    (folder / "keys.json").write_text(json.dumps({"forebay": platform.key}))
    done = subprocess.run(
        [str(Path(sys.prefix) / "bin" / "llm"), *words],
        env={**os.environ, "LLM_USER_PATH": str(folder)}, capture_output=True, text=True, timeout=60,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_streams_and_waits_for_the_same_answer(platform: Platform, tmp_path: Path) -> None:
    asked = ("-m", "forebay", "-o", "temperature", "0", "-o", "max_tokens", "20", "Tell me something.")
    streamed = llm(platform, tmp_path, *asked)
    assert len(streamed.strip()) > 5
    assert llm(platform, tmp_path, "--no-stream", *asked) == streamed


def test_it_gets_what_its_schema_says(platform: Platform, tmp_path: Path) -> None:
    said = llm(platform, tmp_path, "-m", "forebay", "--schema", "name, age int", "Invent somebody.")
    assert set(json.loads(said)) == {"name", "age"}
