"""The whole platform on a cluster of two, with workers whose own clock is a minute ahead."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ops import stores
from tests import platform as platforms
from tests.laws.test_faults import stream_text
from tests.laws.test_hand_over import are_billed_once, are_whole, streams
from tests.platform import Platform, kill, until

#: Put before anything else that a worker imports.
AHEAD = """
import os, sys, time
if "workers.main" in sys.orig_argv:
    open(os.path.join(os.path.dirname(__file__), str(os.getpid())), "w").close()
    def shifted(tell, by):
        return lambda: tell() + by
    time.time, time.time_ns = shifted(time.time, 61.0), shifted(time.time_ns, 61 * 10**9)
"""


@pytest.fixture(scope="module")
def clustered() -> Iterator[Platform]:
    with tempfile.TemporaryDirectory(prefix="fb-", ignore_cleanup_errors=True) as folder:
        data = Path(folder)
        (data / "ahead").mkdir()
        (data / "ahead" / "sitecustomize.py").write_text(AHEAD)
        cluster, database = stores.start_cluster(data), stores.start_postgres(data)
        try:
            ahead = {"PYTHONPATH": str(data / "ahead")}
            yield from platforms.start(data, cluster.url, database.url, environ=ahead)
        finally:
            cluster.stop()
            database.stop()


def test_on_a_cluster_streams_are_whole_and_billed_once_through_a_workers_death(clustered: Platform) -> None:
    until(lambda: len(clustered.workers()) == 2, "two workers", 60)
    with ThreadPoolExecutor(6) as pool:
        told = streams(pool, clustered, 6, tokens=200)
        kill(_victim(clustered))
        done = [one.result(60) for one in told]

    assert are_whole(done, 200)
    assert are_billed_once(clustered, done, 200)


def _victim(platform: Platform) -> int:
    """The process of a worker that runs something."""
    worker = until(platform.busy, "a busy worker")[0].worker
    return int(worker.rpartition(":")[2])


def test_on_a_cluster_a_stream_is_the_engines_text(clustered: Platform) -> None:
    until(lambda: len(clustered.workers()) == 2, "two workers", 60)
    done = stream_text(clustered, 1, max_tokens=50)

    assert are_whole([done], 50)
    clustered.quiet()


def test_the_workers_of_these_laws_live_a_minute_ahead(clustered: Platform) -> None:
    until(lambda: len(clustered.workers()) == 2, "two workers", 60)
    pids = {row.worker.rpartition(":")[2] for row in clustered.workers()}

    assert pids <= {path.name for path in (clustered.data / "ahead").iterdir()}
