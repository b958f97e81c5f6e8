"""The processes' logs on this machine, and what in them people must see at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

#: A log that has grown past this is put aside at the next start, bytes.
LOG_BYTES = 64 * 1024 * 1024
#: How much of a dead process's log is shown, lines.
LAST_WORDS = 8


class Logs:
    """The processes' logs: `<name>.log` in one folder, and what in them people must see."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[str, int] = {}  #: up to where each log was read, bytes

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def open(self, name: str) -> Path:
        """The log of a process. A large one of earlier lives is put aside, and replaces the one before it."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self.path(name)
        if path.exists() and path.stat().st_size > LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))
        self._read[name] = path.stat().st_size if path.exists() else 0
        return path

    def errors(self) -> Iterator[tuple[str, str]]:
        """The errors logged since the last look, one line each."""
        for name, position in self._read.items():
            path = self.path(name)
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(position)
                new = file.read(LOG_BYTES)
            whole = new[: new.rfind(b"\n") + 1]  # a line half written is read whole next time
            self._read[name] = position + len(whole)
            yield from ((name, said) for line in whole.splitlines() if (said := error_in(line)))

    def last_words(self, name: str) -> str:
        path = self.path(name)
        lines = path.read_bytes()[-8192:].decode(errors="replace").splitlines() if path.exists() else []
        return "\n".join(f"  {line}" for line in lines[-LAST_WORDS:])


def error_in(line: bytes) -> str | None:
    """What an error's log line says to people; None for every other line."""
    if b'"error"' not in line and b'"critical"' not in line:
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or record.get("level") not in ("error", "critical"):
        return None
    reason = str(record.get("exception") or record.get("error") or "").strip().rpartition("\n")[2]
    return f"{record.get('event', 'error')}{': ' + reason if reason else ''}"
