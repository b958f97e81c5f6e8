"""The gateways that `forebay bench stream` is compared with: LiteLLM's proxy and vLLM's router.

Each is installed, once, into an environment of its own under $FOREBAY_DATA/peers, and runs in front of an engine that
streams at the pace of ours (`ops/bench/upstream.py`). It gets our load from our client, and its processor time is read
as our gateway's is. One that cannot be installed or does not start is left out, and the bench says so.

What they do for a request is less than what ours does: neither keeps an account of limits or money here, LiteLLM has
no database, and vLLM's router checks no key. Where a peer does not keep up with the pace it takes several tokens at
once, so that a token costs it less than with few streams.

`python -m ops.bench.peers PROGRAM …` runs a foreign program that ends when the bench does, however that ends.
"""

from __future__ import annotations

import http.client
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

from core.supervise import follow_parent
from ops import prepare
from ops.bench import load
from ops.bench.platform import BenchFailed
from ops.bench.report import Say
from ops.up import free_port

HOST = "127.0.0.1"
MODEL = "m"
#: How long a peer may take to be installed, to answer first, and to be gone, seconds.
INSTALL_S, READY_S, GONE_S = 900.0, 120.0, 10.0
#: A silent wait says that it is still there, seconds.
SAY_S = 10.0
LOOK_S = 0.1
#: What a peer may need for a token and for a request on a slow machine, seconds: how long a load is waited for.
TOKEN_S, REQUEST_S = 0.004, 0.2


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The load that our own gateway gets."""

    streams: int
    tokens: int  #: per stream
    seconds: float  #: go on with new streams for so long; 0: each stream once
    step_ms: float
    short_at_once: int  #: requests of one token
    short_in_a_row: int


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a peer is told."""

    bin: Path  #: where its programs are
    folder: Path  #: for files of its own
    port: int
    upstream: str  #: the engine's URL, without a path
    key: str


@dataclass(frozen=True, kw_only=True)
class Peer:
    name: str
    requirement: str  #: as pip takes it
    argv: Callable[[Place], Sequence[str]]
    env: Mapping[str, str] = field(default_factory=dict)


def _litellm(place: Place) -> Sequence[str]:
    """One worker of the server that it recommends, nothing called back, no database, a master key."""
    params = {"model": f"openai/{MODEL}", "api_base": f"{place.upstream}/v1", "api_key": "none"}
    config = {
        "model_list": [{"model_name": MODEL, "litellm_params": params}],
        "litellm_settings": {
            "callbacks": [], "num_retries": 0, "request_timeout": 600, "set_verbose": False, "json_logs": True,
        },
        "general_settings": {"master_key": place.key},
    }  # fmt: skip
    file = place.folder / "config.yaml"
    file.write_bytes(msgspec.json.encode(config))  # JSON is YAML
    return (
        str(place.bin / "litellm"), "--config", str(file), "--host", HOST, "--port", str(place.port),
        "--num_workers", "1",
    )  # fmt: skip


def _vllm_router(place: Place) -> Sequence[str]:
    """Its own policy, which is cache-aware. It checks no key."""
    return (
        str(place.bin / "vllm-router"), "--worker-urls", place.upstream, "--host", HOST, "--port", str(place.port),
        "--prometheus-port", str(free_port(HOST, 0)), "--log-level", "warning",
    )  # fmt: skip


PEERS = (
    Peer(
        name="litellm",
        requirement="litellm[proxy]==1.108.7",
        argv=_litellm,
        # The prices of models come with it; without being told so, it fetches them at every start.
        env={"LITELLM_MODE": "PRODUCTION", "LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
    Peer(name="vllm_router", requirement="vllm-router==0.1.17", argv=_vllm_router),
)


def figures(
    shape: Shape, say: Say, *, peers: Sequence[Peer] = PEERS, data: Path | None = None
) -> dict[str, dict[str, Any]]:
    """Every peer's figures, under the names of ours; none for a peer that did not run."""
    found = {}
    for peer in peers:
        try:
            found[peer.name] = _figures(peer, shape, (data or prepare.data_folder()) / "peers" / peer.name, say)
        except BenchFailed as e:
            say(f"{peer.name} is left out: {e}")
    return found


def _figures(peer: Peer, shape: Shape, home: Path, say: Say) -> dict[str, float]:
    _install(peer, home, say)
    say(f"Starting {peer.requirement}")
    with _running(peer, home, shape.step_ms) as served:
        say("Warming up")
        served.drive(connections=shape.short_at_once, tokens=20, requests=2)
        us_per_token = _us_per_token(served, shape, say)
        ms_per_request = _ms_per_request(served, shape, us_per_token, say)
    return {
        "gateway_cpu_us_per_token": round(us_per_token, 2),
        "gateway_cpu_ms_per_request": round(ms_per_request, 2),
    }


def _us_per_token(served: _Served, shape: Shape, say: Say) -> float:
    say(f"{shape.streams} streams of {shape.tokens} tokens")
    seen, used_s = served.drive(connections=shape.streams, tokens=shape.tokens, seconds=shape.seconds)
    if seen.streams < shape.streams:
        say(f"  only {seen.streams} streamed at once")
    say(f"  {seen.tokens} tokens in {seen.events} events and {seen.seconds:.1f} s; gateway {used_s:.2f} s")
    return used_s / seen.tokens * 1e6


def _ms_per_request(served: _Served, shape: Shape, us_per_token: float, say: Say) -> float:
    say(f"{shape.short_at_once * shape.short_in_a_row} requests of one token, {shape.short_at_once} at once")
    seen, used_s = served.drive(connections=shape.short_at_once, tokens=1, requests=shape.short_in_a_row)
    say(f"  {used_s:.2f} s of the gateway; first token after {seen.ttft_ms_p50:.0f} ms (p50)")
    return used_s / seen.requests * 1e3 - us_per_token / 1e3


@dataclass(frozen=True, kw_only=True)
class _Served:
    """A peer that runs."""

    process: psutil.Process  #: ours, which watches over it
    url: str
    key: str

    def drive(
        self, *, connections: int, tokens: int, requests: int = 1, seconds: float = 0.0
    ) -> tuple[load.Seen, float]:
        """What the client saw of a load, and the processor time that the peer used meanwhile, seconds."""
        work_s = connections * requests * (tokens * TOKEN_S + REQUEST_S)
        asked = load.Load(
            url=self.url, key=self.key, model=MODEL, connections=connections, tokens=tokens, requests=requests,
            seconds=seconds, timeout_s=load.PATIENCE_S + seconds + tokens * requests * 0.1 + work_s,
        )  # fmt: skip
        before_s = self.cpu_s()
        seen = load.run(asked)
        return seen, self.cpu_s() - before_s

    def cpu_s(self) -> float:
        """Used so far by the peer's processes, and by those that they had and that have ended."""
        times = [process.cpu_times() for process in self.process.children(recursive=True)]
        return sum(float(t.user + t.system + t.children_user + t.children_system) for t in times)


@contextmanager
def _running(peer: Peer, home: Path, step_ms: float) -> Iterator[_Served]:
    """Run a peer and an engine behind it; afterwards nothing of them is left.

    Raises:
      BenchFailed: one did not start; with the last words of its log.
    """
    key = f"sk-{secrets.token_hex(16)}"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fb-peer-", ignore_cleanup_errors=True)))
        upstream, port = free_port(HOST, 0), free_port(HOST, 0)
        argv = [sys.executable, "-m", "ops.bench.upstream", str(upstream), str(step_ms)]
        _started(argv, {}, upstream, key, folder / "upstream.log", stack)
        place = Place(bin=home / "bin", folder=folder, port=port, upstream=f"http://{HOST}:{upstream}", key=key)
        argv = [sys.executable, "-m", "ops.bench.peers", *peer.argv(place)]
        process = _started(argv, peer.env, port, key, folder / "peer.log", stack)
        yield _Served(process=psutil.Process(process.pid), url=f"http://{HOST}:{port}", key=key)


def _started(
    argv: Sequence[str], env: Mapping[str, str], port: int, key: str, log: Path, stack: ExitStack
) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            argv,
            env={**_environment(), **env},
            cwd=prepare.ROOT,
            stdin=subprocess.PIPE,  # its leash
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    stack.callback(_stop, process)
    deadline_mono = time.monotonic() + READY_S
    while not answers(port, key):
        if process.poll() is not None or time.monotonic() > deadline_mono:
            raise BenchFailed(f"it did not start:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(LOOK_S)
    return process


def _environment() -> dict[str, str]:
    """Ours, without what would make a peer another one: our database, somebody's settings."""
    others = ("FOREBAY_", "DATABASE_URL", "REDIS_", "LITELLM_", "OPENAI_")
    return {name: value for name, value in os.environ.items() if not name.startswith(others)}


def answers(port: int, key: str) -> bool:
    """Whether an OpenAI server is there, and takes the key."""
    connection = http.client.HTTPConnection(HOST, port, timeout=2.0)
    try:
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Gently, then the whole group."""
    process.terminate()
    try:
        process.wait(GONE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _install(peer: Peer, home: Path, say: Say) -> None:
    """Once; an environment without its stamp is the rest of a failed attempt, or of another release.

    Raises:
      BenchFailed: with pip's last words.
    """
    stamp = home / "forebay.stamp"
    if stamp.exists() and stamp.read_text() == peer.requirement:
        return
    say(f"Installing {peer.requirement} into {home}; this takes a minute or two")
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    pip = [str(home / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    _step([sys.executable, "-m", "venv", str(home)], home, say)
    _step([*pip, "install", "--progress-bar", "off", peer.requirement], home, say)
    stamp.write_text(peer.requirement)


def _step(argv: Sequence[str], home: Path, say: Say) -> None:
    log, start_mono = home / "install.log", time.monotonic()
    with log.open("ab") as out:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        while (status := _waited(process)) is None:
            passed_s = time.monotonic() - start_mono
            if passed_s > INSTALL_S:
                raise BenchFailed(f"its installation took more than {INSTALL_S:.0f} s")
            say(f"  {passed_s:4.0f} s  {_last_line(log)}")
    finally:
        process.kill()  # does nothing to one that has ended
    if status:
        raise BenchFailed(f"it was not installed ({status}):\n{log.read_text(errors='replace')[-1000:]}")


def _waited(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(SAY_S)
    except subprocess.TimeoutExpired:
        return None


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip()[:100] for line in reversed(lines) if line.strip()), "")


def main(argv: Sequence[str]) -> int:
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda number, frame: child.terminate())
    follow_parent(GONE_S)
    return child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
