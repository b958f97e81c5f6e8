"""Where hosts come from. A provider lists them, launches more and lets them go; the policy knows none of it."""

from __future__ import annotations

from typing import Protocol

from core.fleet import Host


class Provider(Protocol):
    """The seam that EC2 will fill."""

    def hosts(self) -> list[Host]:
        """The hosts that can run workers now."""

    def launch(self, count: int, reason: str) -> int:
        """Ask for more hosts. Returns how many are on their way."""

    def release(self, host: str) -> None:
        """Let a host go once it is empty."""
