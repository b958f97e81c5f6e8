"""What every bench answers with: one object for programs (DESIGN § 6), a table for people."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from ops import show

#: Tells people what is being measured; on standard error, since standard output is the result's.
Say = Callable[[str], None]


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where it was measured, and how busy that was before it began."""

    cpu: str
    cores: int
    python: str
    load_1m: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    bench: str
    figures: dict[str, Any]
    peers: dict[str, dict[str, Any]]
    machine: Machine
    seconds: float


#: What a bench found: our figures, and each peer's under the same names.
Found = tuple[dict[str, Any], dict[str, dict[str, Any]]]


def measure(bench: str, figures: Callable[[Say], Found]) -> Report:
    """Run a bench."""
    machine, start_s = this_machine(), time.monotonic()
    ours, peers = figures(lambda text: click.echo(text, err=True))
    seconds = round(time.monotonic() - start_s, 1)
    return Report(bench=bench, figures=ours, peers=peers, machine=machine, seconds=seconds)


def this_machine() -> Machine:
    return Machine(
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        python=platform.python_version(),
        load_1m=round(os.getloadavg()[0], 2),
    )


def _cpu_name() -> str:
    """The processor's name; its kind alone where the kernel does not tell."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.machine()


def publish(report: Report, file: str | None) -> None:
    """Write the object to `file` (`-`: standard output); without one, show a table."""
    if file is None:
        rows = [
            {"figure": name, "value": value} | {peer: theirs.get(name, "") for peer, theirs in report.peers.items()}
            for name, value in report.figures.items()
        ]
        show.many(rows, False, ("figure", "value", *report.peers))
        return
    text = msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n"
    with click.open_file(file, "w") as out:
        out.write(text)
