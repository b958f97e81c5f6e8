"""What operators have stopped: models, classes, organisations and keys.

| table         | writer                            | reader         | holds                                          |
|---------------|-----------------------------------|----------------|------------------------------------------------|
| stops         | ops (forebay model, forebay shed) | tasks/stops.py | a row for each model that is paused, and for   |
|               |                                   |                | each class that is shed, of a model or of all  |
| organisations | core/accounts/tenants.py          | the same       | status: whether it is suspended                |
| api_keys      | core/accounts/keys.py             | the same       | revoked_at                                     |

These are the truth: the queues and the limiter are told of it, and told again (tasks/stops.py). A row of `stops` is a
stop in force; who stopped what, and for how long, stays in the audit log.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Literal

import msgspec

from core.postgres import Connection, text
from core.values import Class

Kind = Literal["model", "class"]
#: The model of a class that is shed of every model.
EVERY = ""


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    kind: Kind
    name: str  #: the model's, or the class's in small letters
    model: str = EVERY  #: of a class: only this model's; EVERY: all models'
    reason: str = ""
    since: datetime
    by_whom: str


def begin(connection: Connection, kind: Kind, name: str, model: str = EVERY, *, by_whom: str, reason: str = "") -> bool:
    """Stop it from now on. False: it was stopped already, and that stays as it is."""
    query = text("""INSERT INTO stops (kind, name, model, reason, by_whom) VALUES (:kind, :name, :model, :reason, :by)
      ON CONFLICT DO NOTHING""")
    values = {"kind": kind, "name": name, "model": model, "reason": reason, "by": by_whom}
    return connection.execute(query, values).rowcount == 1


def end(connection: Connection, kind: Kind, name: str, model: str | None = None) -> list[Stop]:
    """Let it go on: a class of one model, where it was shed of every model (EVERY), or however it was shed (None).
    Returns what was in force."""
    query = text("""DELETE FROM stops WHERE kind = :kind AND name = :name
      AND (CAST(:model AS text) IS NULL OR model = :model) RETURNING *""")
    rows = connection.execute(query, {"kind": kind, "name": name, "model": model}).mappings()
    return [Stop(**row) for row in rows]


def in_force(connection: Connection) -> list[Stop]:
    """All of them, oldest first."""
    rows = connection.execute(text("SELECT * FROM stops ORDER BY since, kind, name, model")).mappings()
    return [Stop(**row) for row in rows]


def organisations(connection: Connection) -> list[str]:
    """Every organisation's id."""
    return list(connection.execute(text("SELECT id::text FROM organisations")).scalars())


def suspended(connection: Connection) -> list[str]:
    """The organisations that are, or are closed."""
    return list(connection.execute(text("SELECT id::text FROM organisations WHERE status <> 'active'")).scalars())


def revoked(connection: Connection) -> list[tuple[str, str]]:
    """The keys that are, each with its organisation in front."""
    rows = connection.execute(text("SELECT org_id::text, id FROM api_keys WHERE revoked_at IS NOT NULL"))
    return [(org_id, key_id) for org_id, key_id in rows]


def paused(stops: Sequence[Stop], model: str) -> bool:
    return any(stop.kind == "model" and stop.name == model for stop in stops)


def shed(stops: Sequence[Stop], model: str) -> frozenset[Class]:
    """The classes that a model does not serve."""
    return frozenset(
        Class[stop.name.upper()] for stop in stops if stop.kind == "class" and stop.model in (EVERY, model)
    )
