"""The environment is read strictly, and all its faults are told at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.settings import BadSettings, Settings, read, variable


def test_an_empty_environment_is_a_laptop() -> None:
    settings = read({})

    assert settings == Settings()
    assert (settings.port, settings.engine, settings.data) == (8000, "vllm", Path(".forebay"))


def test_every_fault_is_told_at_once_by_its_variables_name() -> None:
    """One start, one list: nobody corrects a variable to learn of the next."""
    with pytest.raises(BadSettings) as caught:
        read({"FOREBAY_PORT": "many", "FOREBAY_ENGINE": "steam", "FOREBAY_PROT": "80", "PATH": "/bin"})

    faults = str(caught.value).splitlines()
    assert sorted(fault.partition(":")[0] for fault in faults) == ["FOREBAY_ENGINE", "FOREBAY_PORT", "FOREBAY_PROT"]


def test_the_stores_are_named_as_everywhere() -> None:
    """REDIS_URL and DATABASE_URL have no prefix; with it they are unknown."""
    assert read({"REDIS_URL": "redis://x", "DATABASE_URL": "postgresql://y"}).redis_url == "redis://x"
    with pytest.raises(BadSettings, match="FOREBAY_REDIS_URL: no such setting"):
        read({"FOREBAY_REDIS_URL": "redis://x"})


def test_set_to_nothing_is_not_set() -> None:
    """A Compose file or unit may pass empty variables."""
    assert read({"FOREBAY_PORT": "", "FOREBAY_CATALOG": ""}) == Settings()


@pytest.mark.parametrize("said", ["10.0.0.0/8", "10.0.0.0/8, 2001:db8::/32,", "127.0.0.1"])
def test_proxies_are_networks(said: str) -> None:
    assert read({"FOREBAY_PROXIES": said}).proxies == said


@pytest.mark.parametrize("said", ["10.0.0.1/8", "proxy.internal", "10.0.0.0/8 10.1.0.0/16", "*"])
def test_a_proxy_that_is_no_network_stops_the_start(said: str) -> None:
    """One that is mistyped would be believed, or not, by chance."""
    with pytest.raises(BadSettings, match=r"^FOREBAY_PROXIES: "):
        read({"FOREBAY_PROXIES": said})


def test_settings_do_not_change_after_they_were_read() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().port = 1  # type: ignore[misc]


@given(st.sampled_from(sorted(Settings.model_fields)))
def test_every_field_has_a_variable_that_reads_back(name: str) -> None:
    """What one process passes on, the next one understands: a default's text reads as the default."""
    value = getattr(Settings(), name)

    assert read({variable(name): "" if value is None else str(value)}) == Settings()


@given(st.integers(min_value=0, max_value=120_000), st.sampled_from(["vllm", "timed", "scripted"]))
def test_a_lease_outlives_two_missed_beats(lease_ms: int, engine: str) -> None:
    settings = read({"FOREBAY_LEASE_MS": str(lease_ms), "FOREBAY_ENGINE": engine})

    for on_cpu in (False, True):
        lease, beat = settings.lease(on_cpu=on_cpu)
        assert beat * 3 <= lease
        assert lease == lease_ms or lease_ms == 0
