"""Clients that are written for Node.js: openai-node, Vercel's AI SDK, Codex."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.conformance.conftest import CLIENTS, Node
from tests.platform import MODEL, Platform


@pytest.mark.parametrize("script", ["openai.mjs", "ai_sdk.mjs"])
def test_a_client_for_node_gets_what_it_expects(node: Node, script: str) -> None:
    assert node(script).splitlines()[-1] == "ok"


CODEX = """
model = "{model}"
model_provider = "forebay"
[model_providers.forebay]
name = "Forebay"
base_url = "{url}/v1"
env_key = "FOREBAY_KEY"
wire_api = "responses"
supports_websockets = {sockets}
request_max_retries = 0
stream_max_retries = 0
"""


@pytest.mark.parametrize("sockets", ["true", "false"])
def test_codex_gets_an_answer(platform: Platform, tmp_path: Path, sockets: str) -> None:
    """Over a WebSocket, which it opens with a warm-up, and over server-sent events."""
    (tmp_path / "config.toml").write_text(CODEX.format(model=MODEL, url=platform.url, sockets=sockets))
    env = {**os.environ, "CODEX_HOME": str(tmp_path), "HOME": str(tmp_path), "FOREBAY_KEY": platform.key}
    before = len(platform.rows())
    done = subprocess.run(
        [str(CLIENTS / "node_modules" / ".bin" / "codex"), "exec", "--skip-git-repo-check", "--json", "Say hi."],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"agent_message"' in done.stdout and '"turn.completed"' in done.stdout, done.stdout
    assert len(platform.rows()) == before + 1  # and no second try
