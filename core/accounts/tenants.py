"""Organisations and their projects.

| table         | writer                | reader               | holds                                           |
|---------------|-----------------------|----------------------|-------------------------------------------------|
| organisations | ops (forebay org)     | ops, billing, keys   | who pays, and how: name, status, currency,      |
|               |                       |                      | plan, weight, retention                         |
| projects      | ops (forebay project) | ops                  | what an organisation sorts its keys into        |

Rows are never deleted: usage names them. Nothing on a request's path reads these tables: keys' records carry what it
needs (keys.py), and who is suspended is also in Redis (core/limits/stopped.py), where a suspension holds at once.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

import msgspec
import uuid6

from core.postgres import Connection, IntegrityError, lock, text

#: No organisation may ask for its responses to be kept longer than so many days.
RETENTION_DAYS_MAX = 3650
#: The project that each new organisation starts with.
FIRST_PROJECT = "default"


#: How an organisation pays: what it used, afterwards; from a balance, which binds; or not at all, and then it is not
#: served while its limits cannot be reached.
Plan = Literal["postpaid", "prepaid", "free"]


class TenantError(Exception):
    """There is no such organisation or project, or its name is taken or not valid."""


class Organisation(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    status: str  #: "active", "suspended" or "closed"
    currency: str
    plan: str  #: "postpaid", "prepaid" or "free"
    weight: float  #: its share of a model that others want too: twice the weight, twice the tokens
    retention_days: int  #: how long its stored responses are kept; 0: nothing is stored
    stopped_reason: str | None
    stopped_at: datetime | None
    created_at: datetime


class Project(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    org_id: str
    name: str
    created_at: datetime


_ORGANISATION = """id::text AS id, name, status, currency, plan, weight, retention_days, stopped_reason, stopped_at,
  created_at"""
_PROJECT = "id::text AS id, org_id::text AS org_id, name, created_at"


def create_organisation(connection: Connection, name: str) -> Organisation:
    """A new organisation with its first project. Whether its name is its alone is for `claim_name` to say."""
    row = _insert(
        connection,
        f"INSERT INTO organisations (id, name) VALUES (:id, :name) RETURNING {_ORGANISATION}",
        {"id": str(uuid6.uuid7()), "name": name},
    )
    organisation = Organisation(**row)
    create_project(connection, org_id=organisation.id, name=FIRST_PROJECT)
    return organisation


def claim_name(connection: Connection, name: str) -> None:
    """See that no organisation is called so, nor will be before this transaction ends by who asks here too: a name that
    several have names none of them.

    Raises:
      TenantError: it is taken, as a name or as an id.
    """
    lock(connection, f"organisation {name}")
    query = text("SELECT id::text FROM organisations WHERE name = :name OR id::text = :name ORDER BY created_at")
    if taken := connection.execute(query, {"name": name}).scalars().first():
        raise TenantError(f"an organisation is called {name!r} already: use its id, {taken}, or another name")


def create_project(connection: Connection, *, org_id: str, name: str) -> Project:
    row = _insert(
        connection,
        f"INSERT INTO projects (id, org_id, name) VALUES (:id, :org_id, :name) RETURNING {_PROJECT}",
        {"id": str(uuid6.uuid7()), "org_id": org_id, "name": name},
    )
    return Project(**row)


def organisations(connection: Connection) -> list[Organisation]:
    """All of them, oldest first."""
    rows = connection.execute(text(f"SELECT {_ORGANISATION} FROM organisations ORDER BY created_at, id")).mappings()
    return [Organisation(**row) for row in rows]


def projects(connection: Connection, org_id: str) -> list[Project]:
    """An organisation's, oldest first."""
    query = text(f"SELECT {_PROJECT} FROM projects WHERE org_id = CAST(:org_id AS uuid) ORDER BY created_at, id")
    return [Project(**row) for row in connection.execute(query, {"org_id": org_id}).mappings()]


def find_organisation(connection: Connection, wanted: str) -> Organisation:
    """By id, or by a name that only one has.

    Raises:
      TenantError: there is none, or there are several.
    """
    query = text(f"SELECT {_ORGANISATION} FROM organisations WHERE id::text = :wanted OR name = :wanted")
    found = connection.execute(query, {"wanted": wanted}).mappings().all()
    if len(found) != 1:
        raise TenantError(f"{len(found) or 'no'} organisations are called {wanted!r}; `forebay org list` shows ids")
    return Organisation(**found[0])


def find_project(connection: Connection, *, org_id: str, wanted: str) -> Project:
    """By id or by name, inside one organisation.

    Raises:
      TenantError: there is none.
    """
    for project in projects(connection, org_id):
        if wanted in (project.id, project.name):
            return project
    raise TenantError(f"the organisation has no project {wanted!r}")


def set_weight(connection: Connection, org_id: str, weight: float) -> Organisation:
    """Give an organisation another share. Its keys' records carry it to the gateways at their next projection.

    Raises:
      TenantError: the weight is not above 0 and at most 1000.
    """
    if not 0 < weight <= 1000:
        raise TenantError(f"a weight is above 0 and at most 1000, and this is {weight:g}")
    return _change(connection, org_id, "weight = :weight", weight=weight)


def set_retention(connection: Connection, org_id: str, days: int) -> Organisation:
    """Keep an organisation's responses for so many days, or none at all. Holds at once, whatever gateways know of it.

    Raises:
      TenantError: the days are not 0 to RETENTION_DAYS_MAX.
    """
    if not 0 <= days <= RETENTION_DAYS_MAX:
        raise TenantError(f"responses are kept for 0 to {RETENTION_DAYS_MAX} days, and this is {days}")
    return _change(connection, org_id, "retention_days = :days", days=days)


def set_plan(connection: Connection, org_id: str, plan: Plan) -> Organisation:
    """Let an organisation pay in another way. Its keys' records carry it to the gateways."""
    return _change(connection, org_id, "plan = :plan", plan=plan)


def suspend(connection: Connection, org_id: str, *, reason: str, now: datetime) -> Organisation:
    """Serve an organisation no more, until it is resumed. Once this is committed the caller says so in Redis
    (core/limits/stopped.py), where it holds at once. Suspended again, the first reason and time stay.

    Raises:
      TenantError: it is closed.
    """
    changes = """status = 'suspended', stopped_reason = coalesce(stopped_reason, :reason),
      stopped_at = coalesce(stopped_at, :now)"""
    return _change(connection, org_id, changes, reason=reason, now=now)


def resume(connection: Connection, org_id: str) -> Organisation:
    """Serve an organisation again.

    Raises:
      TenantError: it is closed.
    """
    return _change(connection, org_id, "status = 'active', stopped_reason = NULL, stopped_at = NULL")


def _change(connection: Connection, org_id: str, changes: str, **values: Any) -> Organisation:
    query = text(f"""UPDATE organisations SET {changes}
      WHERE id = CAST(:id AS uuid) AND status <> 'closed' RETURNING {_ORGANISATION}""")
    row = connection.execute(query, {"id": org_id, **values}).mappings().one_or_none()
    if row is None:
        raise TenantError("there is no such organisation, or it is closed")
    return Organisation(**row)


def _insert(connection: Connection, sql: str, values: dict[str, Any]) -> dict[str, Any]:
    try:
        with connection.begin_nested():
            return dict(connection.execute(text(sql), values).mappings().one())
    except IntegrityError as e:
        raise TenantError(f"{values['name']!r}: {_fault(e)}") from e


def _fault(e: IntegrityError) -> str:
    faults = {"23505": "the name is taken", "23514": "a name has 1 to 200 characters"}
    return faults.get(getattr(e.orig, "pgcode", ""), "there is no such organisation")
