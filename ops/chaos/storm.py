"""A storm over a platform of its own: what `forebay chaos` runs."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from ops.bench.platform import Platform, Ready, running, scripted
from ops.chaos.scene import Ground, Scene, Verdict

MODEL = "scripted"
LEASE_S = 3.0
#: Seconds after a gateway's death in which its streams may be come back for: more than it takes to start it again.
LOST_S = 10.0


def storm(clients: int, seconds: float, seed: int, say: Callable[[str], None]) -> Verdict:
    """Run it.

    Raises:
      BenchFailed, ChaosFailed: the platform did not start, or did not become itself again.
    """
    say("Starting a platform of its own")
    slots = max(clients * 2 // 5, 1)  # fewer than clients: something always waits
    catalog = scripted(slots=slots, step_ms=10.0, context_tokens=4096, output_tokens=512, workers=2)
    with tempfile.TemporaryDirectory(prefix="fb-tally-") as tally:
        environ = {"FOREBAY_LEASE_MS": f"{LEASE_S * 1000:.0f}", "FOREBAY_LOST_S": str(LOST_S), "FOREBAY_TALLY": tally}
        with running(catalog, environ) as platform:
            return Scene(_ground(platform, Path(tally)), seed, say).play(clients, seconds)


def _ground(platform: Platform, tally: Path) -> Ground:
    host, _, port = platform.ready.url.rpartition("/")[2].partition(":")
    return Ground(
        redis_url=platform.ready.redis_url,
        database_url=platform.ready.database_url,
        gateways=[(host, int(port))],
        leaders=lambda: [pid for name, pid in _now(platform).pids.items() if name == "web"],
        key=platform.ready.api_key,
        model=MODEL,
        lease_s=LEASE_S,
        tally=tally,
    )


def _now(platform: Platform) -> Ready:
    """As it is: a process that was killed has been started again under another number."""
    return msgspec.json.decode((platform.data / "ready.json").read_bytes(), type=Ready)
