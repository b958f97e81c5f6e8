"""`forebay up` itself, with the real model on the real engine: from the first token to the last process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import requests
from openai import OpenAI

from tests.platform import until

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
MODEL = "smollm2-135m-instruct"
#: The engine's start on two busy cores.
START_S = 240


@dataclass
class Up:
    """A running `forebay up`."""

    process: psutil.Popen
    data: Path
    seen: list[psutil.Process] = field(default_factory=list)  #: engine processes ever found

    @property
    def ready(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.data / "ready.json").read_text())
        return found

    def client(self) -> OpenAI:
        return OpenAI(base_url=self.ready["url"] + "/v1", api_key=self.ready["api_key"], max_retries=0)

    def ours(self) -> list[psutil.Process]:
        """Every living process of this platform, however it was started."""
        mark = f"FOREBAY_DATA={self.data}"
        named = [p for p in psutil.process_iter() if p.pid != os.getpid() and _alive(p) and mark in _environ(p)]
        return named + [p for p in self.seen if _alive(p)]

    def workers(self) -> list[psutil.Process]:
        return [p for p in self.ours() if "workers.main" in p.cmdline()]

    def engines(self) -> list[psutil.Process]:
        """The workers' engine processes, found by descent."""
        found = [child for worker in self.workers() for child in worker.children(recursive=True)]
        self.seen += found
        return found

    def is_ready(self) -> bool:
        try:
            return requests.get(self.ready["url"] + "/ready", timeout=5).status_code == 200
        except (requests.ConnectionError, requests.Timeout):
            return False


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _environ(process: psutil.Process) -> list[str]:
    try:
        return [f"{name}={value}" for name, value in process.environ().items()]
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []


def models() -> Path:
    """The prepared model; `make setup` prepares it."""
    folder = Path(os.environ.get("FOREBAY_DATA", ".forebay")).resolve() / "models"
    assert (folder / MODEL / "model.safetensors").exists(), f"{folder} has no model: run `make setup`"
    return folder


@pytest.fixture(scope="module")
def up() -> Iterator[Up]:
    with tempfile.TemporaryDirectory(prefix="fb-", ignore_cleanup_errors=True) as folder:
        data = Path(folder)
        (data / "models").symlink_to(models())
        environ = {name: value for name, value in os.environ.items() if not name.startswith("FOREBAY_")}
        environ |= {"FOREBAY_DATA": folder, "FOREBAY_PORT": "0", "FOREBAY_DRAIN_S": "10"}
        environ |= {"REDIS_URL": "", "DATABASE_URL": ""}
        with (data / "up.log").open("wb") as log:
            process = psutil.Popen([sys.executable, "-m", "ops.cli", "up"], env=environ, stdout=log, stderr=log)
        found = Up(process, data)
        try:
            until(lambda: (data / "ready.json").exists() or process.poll() is not None, "ready.json", START_S)
            assert process.poll() is None, (data / "up.log").read_text()
            yield found
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(60)
            left = found.ours()
            assert left == [], "nothing is left behind"


pytestmark = pytest.mark.timeout(400)


def test_the_same_answer_comes_through_every_transport(up: Up) -> None:
    turn: Any = [{"role": "user", "content": QUESTION}]
    with up.client() as client:
        whole = client.chat.completions.create(model=MODEL, messages=turn, temperature=0)
        chunks = list(client.chat.completions.create(model=MODEL, messages=turn, temperature=0, stream=True))
        with client.responses.connect() as connection:
            connection.response.create(model=MODEL, input=QUESTION, temperature=0)
            last = next(event for event in connection if event.type in ("response.completed", "response.failed"))

    assert whole.choices[0].message.content == ANSWER
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert last.type == "response.completed" and last.response.output_text == ANSWER
    assert last.response.usage is not None and last.response.usage.output_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]


def test_usage_shows_tokens_and_money(up: Up) -> None:
    def report() -> list[dict[str, Any]]:
        environ = {**os.environ, "FOREBAY_DATA": str(up.data), "REDIS_URL": "", "DATABASE_URL": ""}
        words = [sys.executable, "-m", "ops.cli", "usage", "--json"]
        done = subprocess.run(words, env=environ, capture_output=True, text=True, timeout=60, check=True)
        found = json.loads(done.stdout)
        rows: list[dict[str, Any]] = found if isinstance(found, list) else found["usage"]
        return [row for row in rows if row["requests"] >= 3]

    [row] = until(report, "three requests in the hourly totals", 30)
    assert row["output_tokens"] > 0 and float(row["amount"]) > 0


def test_leaving_a_stream_stops_the_engine(up: Up) -> None:
    """A long generation on real vLLM ends within a second or so of its client's leaving."""
    body = {"model": MODEL, "stream": True, "max_tokens": 1500, "messages": [{"role": "user", "content": "Count."}]}
    headers = {"Authorization": f"Bearer {up.ready['api_key']}"}
    body["ignore_eos"] = True
    with requests.post(
        up.ready["url"] + "/v1/chat/completions", json=body, headers=headers, stream=True, timeout=60
    ) as answer:
        lines = answer.iter_lines()  # kept: requests closes the connection with the iterator
        next(line for line in lines if b"content" in line)
        until(lambda: _running(up) == 1, "the engine to be busy", 30)

    until(lambda: _running(up) == 0, "the engine to be free", 3)


def _running(up: Up) -> int:
    import redis

    from core.redis import Store
    from tasks.queue import Queue

    client = redis.Redis.from_url(up.ready["redis_url"])
    try:
        return Store(client).run(Queue(MODEL).tick()).running
    finally:
        client.close()


def test_a_killed_worker_leaves_no_engine_and_another_takes_over(up: Up) -> None:
    [worker] = up.workers()
    engines = up.engines()
    assert engines, "the engine is a process of its own"

    worker.kill()

    until(lambda: not any(map(_alive, engines)), "its engine to be gone", 5)
    until(lambda: len(up.workers()) == 1 and up.is_ready(), "another worker to be ready", START_S)
    with up.client() as client:
        turn: Any = [{"role": "user", "content": QUESTION}]
        assert (
            client.chat.completions.create(model=MODEL, messages=turn, temperature=0).choices[0].message.content
            == ANSWER
        )


def test_ctrl_c_drains_and_leaves_no_process(up: Up) -> None:
    assert len(up.ready["pids"]) >= 6 and up.engines()

    start = time.monotonic()
    up.process.send_signal(signal.SIGINT)

    assert up.process.wait(60) == 0
    assert up.ours() == []
    assert not (up.data / "ready.json").exists()
    print(f"stopped in {time.monotonic() - start:.1f} s")
