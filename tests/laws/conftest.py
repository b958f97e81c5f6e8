"""One platform for all laws on the scripted engine: two gateways, two workers, real stores of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ops import stores
from tests import platform as platforms
from tests.platform import Platform


@pytest.fixture(scope="session")
def _platform() -> Iterator[Platform]:
    with tempfile.TemporaryDirectory(prefix="fb-", ignore_cleanup_errors=True) as folder:
        data = Path(folder)
        valkey, database = stores.start_valkey(data), stores.start_postgres(data)
        try:
            yield from platforms.start(data, valkey.url, database.url)
        finally:
            stores.start_valkey(data).stop()  # the one that runs now: a law may have killed the first
            database.stop()


@pytest.fixture
def platform(_platform: Platform) -> Iterator[Platform]:
    """The platform, with both its workers ready; afterwards nothing may be left in it."""
    platforms.until(lambda: len(_platform.workers()) == 2, "two workers")
    yield _platform
    _platform.quiet()
