"""Where a command finds the stores: the environment, or the embedded ones of a running `forebay up`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import click
import msgspec

from core import postgres, settings
from core.redis import RedisError, Store
from core.settings import Settings


@dataclass(frozen=True)
class Urls:
    redis_url: str
    database_url: str


class _Ready(msgspec.Struct):
    """The part of ready.json that says where the stores are."""

    redis_url: str = ""
    database_url: str = ""


def urls(settings: Settings) -> Urls:
    """The stores' URLs; empty where neither the environment nor `ready.json` names one."""
    ready = _Ready()
    if not (settings.redis_url and settings.database_url):
        ready = _read(settings)
    return Urls(settings.redis_url or ready.redis_url, settings.database_url or ready.database_url)


def _read(settings: Settings) -> _Ready:
    try:
        return msgspec.json.decode((settings.data / "ready.json").read_bytes(), type=_Ready)
    except (OSError, msgspec.DecodeError):
        return _Ready()


def environment() -> Settings:
    """The settings of this command; a bad environment is a usage error."""
    try:
        return settings.read(os.environ)
    except settings.BadSettings as e:
        raise click.UsageError(str(e)) from None


@contextmanager
def database(settings: Settings) -> Iterator[postgres.Engine]:
    """An engine; every way in which Postgres is away becomes one sentence and exit code 1."""
    url = urls(settings).database_url
    if not url:
        raise click.ClickException(_nowhere("DATABASE_URL", settings))
    engine = postgres.connect(url)
    try:
        yield engine
    except postgres.DatabaseAway as e:
        raise click.ClickException(f"Postgres is away: {e}") from None
    finally:
        engine.dispose()


@contextmanager
def store(settings: Settings) -> Iterator[Store]:
    """A store; when Redis is away, one sentence and exit code 1."""
    url = urls(settings).redis_url
    if not url:
        raise click.ClickException(_nowhere("REDIS_URL", settings))
    found = Store.connect(url)
    try:
        yield found
    except (RedisError, OSError) as e:
        raise click.ClickException(f"Redis is away: {e}") from None
    finally:
        found.close()


def _nowhere(variable: str, settings: Settings) -> str:
    return f"{variable} is not set, and no `forebay up` is running in {settings.data}"
