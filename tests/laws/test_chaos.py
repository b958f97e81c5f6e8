"""Everything at once: clients of every kind, and workers, gateways and the store that are killed and stopped."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from ops import stores
from ops.chaos.scene import Ground, Scene
from tests import platform as platforms
from tests.platform import MODEL, Platform

SEED = 1


@pytest.fixture
def stormy() -> Iterator[Platform]:
    """A platform of its own, whose engines write down whose tokens they make."""
    with tempfile.TemporaryDirectory(prefix="fb-", ignore_cleanup_errors=True) as folder:
        data = Path(folder)
        (data / "tally").mkdir()
        valkey, database = stores.start_valkey(data), stores.start_postgres(data)
        try:
            yield from platforms.start(data, valkey.url, database.url, environ={"FOREBAY_TALLY": str(data / "tally")})
        finally:
            valkey.stop()
            database.stop()


def test_through_a_storm_every_request_ends_once_and_is_billed_for_what_it_got(stormy: Platform) -> None:
    """Each fault once. The seed says in which order, and who is hit; the ledger must hold in any."""
    ground = Ground(
        redis_url=stormy.redis_url,
        database_url=stormy.database_url,
        gateways=[("127.0.0.1", port) for port in stormy.ports],
        leaders=lambda: [pid for name, pid in stormy.supervisor.pids().items() if name.startswith("web")],
        key=stormy.key,
        model=MODEL,
        lease_s=2.0,
        tally=stormy.data / "tally",
    )

    verdict = Scene(ground, SEED, say=print).play(clients=25, seconds=0)

    print(msgspec.json.encode(verdict).decode())
    assert verdict.faults == []
    assert verdict.finished > 50 and verdict.cancelled > 0
    assert set(verdict.happened.values()) == {1} and len(verdict.happened) == 7
    assert verdict.sent == verdict.finished + verdict.cancelled + verdict.expired + verdict.dead + verdict.lost
    assert verdict.relayed_tokens <= verdict.emitted_tokens and verdict.billed_tokens <= verdict.emitted_tokens
