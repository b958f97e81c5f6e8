"""Hosts that are simply there: machines whose agents somebody else starts, such as the one under `forebay up`."""

from __future__ import annotations

from core import fleet
from core.fleet import Host
from core.redis import Store


class LocalProvider:
    """Whoever announces itself is a host. None can be launched, and none is let go."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def hosts(self) -> list[Host]:
        return [host for host in self.store.run(fleet.hosts()) if not host.draining]

    def launch(self, count: int, reason: str) -> int:
        return 0

    def release(self, host: str) -> None:
        return
