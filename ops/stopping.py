"""What `forebay model pause`, `forebay model resume` and `forebay shed` share: Postgres and the audit log in one
transaction, then the queues. Queues that cannot be told now are told by the clock, within a second of being there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from ops.connect import after_commit, database, environment, store, write_down

if TYPE_CHECKING:
    from core.accounts.stops import Stop
    from core.postgres import Connection, Engine
    from core.settings import Settings


def change(models: Collection[str], action: str, subject: str, do: Callable[[Connection], bool], **detail: str) -> bool:
    """Change what is stopped of these models. False: it was so already; the queues are told all the same.

    Raises:
      ClickException: it was not changed; or it was, and the queues do not know yet.
    """
    from core.postgres import transaction

    settings = environment()
    with database(settings) as engine:
        with transaction(engine) as connection:
            changed = do(connection)
            if changed:
                write_down(connection, action, subject, **detail)
        after_commit(lambda: _tell(settings, engine, models))
    return changed


def _tell(settings: Settings, engine: Engine, models: Collection[str]) -> None:
    from tasks.stops import project

    with store(settings) as redis:
        while models:
            models = project(redis, engine, models)


def in_force() -> list[Stop]:
    """What is stopped, oldest first."""
    from core.accounts import stops
    from core.postgres import transaction

    with database(environment()) as engine, transaction(engine) as connection:
        return stops.in_force(connection)


def catalogue() -> list[str]:
    """Every model of it.

    Raises:
      ClickException: it cannot be read.
    """
    from core import catalog
    from ops import show

    with show.refusals(catalog.BadCatalog):
        return list(catalog.load(environment().catalog))
