"""A throw-away platform for benches: `forebay up` on the scripted engine, in a temporary folder, on a free port.

What is measured is what people run: the Procfile's processes, embedded Valkey and Postgres. It is a process of its
own; when the bench is killed, it sees its standard input close and ends itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

#: How long the platform may take to be ready, and to be gone, seconds.
READY_S = 60.0
GONE_S = 30.0
#: Nothing runs any more when it is told to stop, seconds.
DRAIN_S = 1.0
_ROOT = Path(__file__).resolve().parents[2]


_SCRIPTED = """
[models.scripted]
tokenizer = "{tokenizer}"
context_tokens = {context_tokens}
max_output_tokens = {output_tokens}
slots = {slots}
workers = {{ min = {workers}, max = {workers} }}
[models.scripted.step]
base_ms = {step_ms}
sequence_ms = 0.0
prefill_ms = 0.0
"""


def scripted(
    *, slots: int, step_ms: float, context_tokens: int, output_tokens: int, workers: int, tokenizer: str = "bytes"
) -> str:
    """A catalogue of one model on the scripted engine, whose steps all take the same time."""
    return _SCRIPTED.format(
        slots=slots,
        step_ms=step_ms,
        context_tokens=context_tokens,
        output_tokens=output_tokens,
        workers=workers,
        tokenizer=tokenizer,
    )


class BenchFailed(Exception):
    """No figures: something did not run as it must."""


class Ready(msgspec.Struct, frozen=True):
    """The part of ready.json that benches use."""

    url: str
    api_key: str
    model: str
    redis_url: str
    database_url: str
    pids: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """Processor time used so far, user and system, seconds; and by which processes."""

    gateway_s: float
    worker_s: float
    store_s: float
    pids: frozenset[int]

    @property
    def total_s(self) -> float:
        return self.gateway_s + self.worker_s + self.store_s

    def since(self, before: Cpu) -> Cpu:
        """What was used in between.

        Raises:
          BenchFailed: a process was started anew, so that its time is not known.
        """
        if self.pids != before.pids:
            raise BenchFailed("A process of the platform died while it was measured.")
        return Cpu(
            gateway_s=self.gateway_s - before.gateway_s,
            worker_s=self.worker_s - before.worker_s,
            store_s=self.store_s - before.store_s,
            pids=self.pids,
        )


@dataclass(frozen=True)
class Platform:
    """A running platform."""

    ready: Ready
    data: Path

    def cpu(self) -> Cpu:
        gateway, worker, store = self.gateway(), self.worker(), [psutil.Process(self.ready.pids["valkey"])]
        return Cpu(
            gateway_s=_cpu_s(gateway),
            worker_s=_cpu_s(worker),
            store_s=_cpu_s(store),
            pids=frozenset(process.pid for process in [*gateway, *worker, *store]),
        )

    def gateway_rss_bytes(self) -> int:
        return sum(int(process.memory_info().rss) for process in self.gateway())

    def gateway(self) -> list[psutil.Process]:
        """gunicorn's arbiter and its workers."""
        leader = psutil.Process(self.ready.pids["web"])
        return [leader, *leader.children(recursive=True)]

    def worker(self) -> list[psutil.Process]:
        """The engine workers, without the agent that watches over them."""
        found: list[psutil.Process] = psutil.Process(self.ready.pids["worker"]).children(recursive=True)
        return found


def _cpu_s(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(float(time_.user) + float(time_.system) for time_ in times)


@contextmanager
def running(catalog: str, environ: Mapping[str, str] | None = None) -> Iterator[Platform]:
    """Run a platform that serves `catalog` (TOML); afterwards nothing of it is left.

    Raises:
      BenchFailed: it did not start; with the last words of its log.
    """
    with tempfile.TemporaryDirectory(prefix="fb-bench-", ignore_cleanup_errors=True) as folder:
        data = Path(folder)
        (data / "catalog.toml").write_text(catalog)
        with (data / "up.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "ops.bench.platform"],
                env=_environment(data, environ or {}),
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C is the bench's, which then stops the platform gently
            )
        try:
            yield Platform(_wait_ready(process, data), data)
        finally:
            _stop(process)


def _environment(data: Path, more: Mapping[str, str]) -> dict[str, str]:
    """Ours, without what would make it another platform than the one that is measured."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("FOREBAY_", "REDIS_URL", "DATABASE_URL"))}
    return {
        **ours,
        "FOREBAY_DATA": str(data),
        "FOREBAY_CATALOG": str(data / "catalog.toml"),
        "FOREBAY_ENGINE": "scripted",
        "FOREBAY_PORT": "0",
        "FOREBAY_DRAIN_S": str(DRAIN_S),
        "FOREBAY_KEY_SOCKETS": "100000",
        **more,
    }


def _wait_ready(process: subprocess.Popen[bytes], data: Path) -> Ready:
    deadline = time.monotonic() + READY_S
    while not (data / "ready.json").exists():
        if process.poll() is not None or time.monotonic() > deadline:
            raise BenchFailed(f"The platform did not start:\n{(data / 'up.log').read_text()[-2000:]}")
        time.sleep(0.05)
    return msgspec.json.decode((data / "ready.json").read_bytes(), type=Ready)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(GONE_S)
    except subprocess.TimeoutExpired:
        process.kill()  # its own processes see their leash go, and end
        process.wait()
    finally:
        if process.stdin is not None:
            process.stdin.close()


def main() -> None:
    from core.supervise import follow_parent
    from ops.cli import cli

    follow_parent(GONE_S)
    cli(["up"])


if __name__ == "__main__":
    main()
