"""Where a command finds the stores: the environment, or the embedded ones of a running `forebay up`."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click
import msgspec

from core import postgres, settings
from core.redis import RedisError, Store
from core.settings import Settings

#: Said where a store is away that was to be told of a change: to who reads only "away" nothing would seem changed.
WRITTEN_DOWN = "The change itself is made: it holds within a minute of all stores being there, if a scaler runs."


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


def actor() -> str:
    """Who runs this command, for the audit log: the operating system's name of the user, whatever the environment
    says."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # in a container users may have no name
        return f"uid {os.getuid()}"


def write_down(
    connection: postgres.Connection, action: str, subject: str, org_id: str | None = None, **detail: Any
) -> None:
    """Put into the audit log what this transaction does, and who runs this command; last of all."""
    from core.accounts import audit

    audit.write(connection, actor=actor(), action=action, subject=subject, org_id=org_id, **detail)


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
    with _connected(urls(settings).redis_url, settings) as found:
        yield found


@contextmanager
def limits_store(settings: Settings) -> Iterator[Store]:
    """The store that limits and stops are in; when it is away, one sentence and exit code 1."""
    with _connected(settings.limits_url or urls(settings).redis_url, settings) as found:
        yield found


@contextmanager
def _connected(url: str, settings: Settings) -> Iterator[Store]:
    if not url:
        raise click.ClickException(_nowhere("REDIS_URL", settings))
    found = Store.connect(url)
    try:
        yield found
    except (RedisError, OSError) as e:
        raise click.ClickException(f"Redis is away: {e}") from None
    finally:
        found.close()


def tell_gateways(settings: Settings, engine: postgres.Engine, org_id: str) -> None:
    """Let what was changed of an organisation hold at once; a step for `after_commit`."""
    from core.accounts import keys

    with store(settings) as redis:
        keys.project_all(engine, redis, org_id)


def after_commit(*steps: Callable[[], None]) -> None:
    """What makes a change hold at once that Postgres has: each of these, even where one before it fails.

    Raises:
      ClickException: what failed first, and that the change is made: the clock tells of it (scaler/clock.py).
    """
    faults = []
    for step in steps:
        try:
            step()
        except click.ClickException as e:
            faults.append(e.message)
        except postgres.DatabaseAway as e:
            faults.append(f"Postgres is away: {e}")
    if faults:
        raise click.ClickException(f"{faults[0].rstrip('.')}. {WRITTEN_DOWN}")


def check_models(settings: Settings, names: Collection[str]) -> None:
    """
    Raises:
      ClickException: the catalogue lacks one of them, or cannot be read.
    """
    from core import catalog

    if not names:
        return
    try:
        known = catalog.load(settings.catalog)
    except catalog.BadCatalog as e:
        raise click.ClickException(str(e)) from None
    if unknown := [name for name in names if name not in known]:
        raise click.ClickException(f"the catalogue has no model {unknown[0]!r}; `forebay model list` shows them")


def _nowhere(variable: str, settings: Settings) -> str:
    return f"{variable} is not set, and no `forebay up` is running in {settings.data}"
