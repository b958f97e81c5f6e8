"""One platform for all laws on the scripted engine: two gateways, two workers, real stores of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import platform as platforms
from tests.platform import Platform


@pytest.fixture(scope="session")
def _platform() -> Iterator[Platform]:
    yield from platforms.alone()


#: One worker with two places, at 25 tokens a second; a prompt is read at 1,000: there is time to look at each stage.
SLOW = """
[models.scripted]
tokenizer = "bytes"
context_tokens = 8192
max_output_tokens = 1024
slots = 2
workers = { min = 1, max = 1 }
[models.scripted.step]
base_ms = 40.0
sequence_ms = 0.0
prefill_ms = 1.0
"""
#: The edge's times, scaled down: a proxy's 30 s and 55 s are 3 s and 5.5 s here.
SOON = {
    "FOREBAY_KEEPALIVE_S": "1.5",
    "FOREBAY_UPLOAD_S": "2",
    "FOREBAY_STALLED_S": "2",
    "FOREBAY_DRAIN_S": "2",
    "FOREBAY_LOST_S": "20",
}


@pytest.fixture(scope="session")
def _slow() -> Iterator[Platform]:
    yield from platforms.alone(catalog=SLOW, environ=SOON)


@pytest.fixture
def slow(_slow: Platform) -> Iterator[Platform]:
    """A platform that is slow enough to be looked at on the way, and whose edge has short times."""
    platforms.until(lambda: len(_slow.workers()) == 1, "its worker")
    yield _slow
    _slow.quiet()
    platforms.until(_slow.money_agrees, "Redis and Postgres to agree about money", 5)


@pytest.fixture
def platform(_platform: Platform) -> Iterator[Platform]:
    """The platform, with both its gateways and workers ready; afterwards nothing may be left in it."""
    platforms.until(lambda: len(_platform.workers()) == 2, "two workers")
    platforms.until(_platform.answers, "both gateways")  # the test before may have killed one
    _platform.forgive()
    yield _platform
    _platform.quiet()
    platforms.until(_platform.money_agrees, "Redis and Postgres to agree about money", 5)
