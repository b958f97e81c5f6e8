"""Stored responses: what a customer comes back to and goes on from, and the backlog of background work.

| table     | ttl            | writer                           | reader            | holds                            |
|-----------|----------------|----------------------------------|-------------------|----------------------------------|
| responses | retention_days | web: `keep`, before its client   | web: `find`,      | a response: whose it is, its     |
|           | of its organi- | has the end; `keep` with a body, | `items`, `chain`, | input items, the object that its |
|           | sation; a      | before background work is        | `due`, `body`     | client was given; while it is in |
|           | deleted one    | accepted; `delete`, `due`.       |                   | the backlog, what the queue is   |
|           | TOMBSTONE_DAYS | The scaler's clock: `purge`      |                   | given (`body`)                   |

`items`, `response` and `body` are the customer's own words. They are never logged, and nothing else of a prompt or an
answer is in Postgres. An organisation that keeps nothing (retention_days 0) has no row: the insert itself looks.

Promise   a row of the backlog ends once: what is kept of an ended one is not changed any more, but to be deleted. A
          deleted row stays a while without its contents, so that a response that ends later is not kept again. Whoever
          has a key of the project sees the row; everybody else is told that there is none.
Dies      Postgres: answers go out, and say that they are not stored; nothing is gone on from, and no background work is
          accepted (503). The gateway: what it accepted in the background is in the queue or found by another's `due`;
          what it was streaming, another gateway keeps when the stream goes on there. The queue: the backlog is fed to
          it again from here. The clock: expired rows are not seen, and go when it is back.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from core.postgres import Connection, text

#: How long a deleted row is remembered without its contents: longer than any request may run.
TOMBSTONE_DAYS = 2
#: Turns that a conversation may have.
TURNS_MAX = 200
#: What is read of a conversation at most, bytes of JSON: a gateway has all of it in memory.
CONVERSATION_BYTES_MAX = 64 * 2**20
#: Rows that one `purge` deletes.
PURGE_ROWS = 500
#: Of the backlog: not ended.
OPEN = frozenset({"queued", "in_progress"})


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """A row without its items."""

    id: str
    org_id: str
    project_id: str
    key_id: str
    model: str
    status: str
    previous_id: str | None = None
    streamed: bool = False
    background: bool = False
    response: str  #: JSON: the object that its client was given

    @property
    def ended(self) -> bool:
        return self.status not in OPEN


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One response of a conversation."""

    id: str
    previous_id: str | None
    status: str
    items: str  #: JSON
    response: str  #: JSON
    whole_bytes: int  #: of all turns that were read with it; beyond CONVERSATION_BYTES_MAX they come without contents


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """Background work that has not ended, as far as its row says."""

    id: str
    model: str


_STORED = """id::text AS id, org_id::text AS org_id, project_id::text AS project_id, key_id, model, status,
  previous_id::text AS previous_id, streamed, background, response::text AS response"""
_SEEN = "project_id = CAST(:project_id AS uuid) AND status <> 'deleted' AND expires_at > now()"


def keep(connection: Connection, row: Stored, items: str, body: bytes | None = None) -> bool:
    """Write a response down; one of the backlog that has ended gets its end. False: nothing of it may be kept, since
    its organisation keeps nothing or it was deleted."""
    values = {**msgspec.structs.asdict(row), "items": items, "body": body}
    if connection.execute(_KEEP, values).first() is not None:
        return True
    return bool(connection.execute(_KEPT, {"id": row.id}).scalar_one_or_none())


# The organisation's row says how long: what a gateway knows of it may be a minute old.
_KEEP = text("""
INSERT INTO responses AS r (id, org_id, project_id, key_id, model, status, previous_id, streamed, background, items,
  response, body, expires_at)
SELECT CAST(:id AS uuid), o.id, CAST(:project_id AS uuid), :key_id, :model, :status, CAST(:previous_id AS uuid),
  :streamed, :background, CAST(:items AS json), CAST(:response AS json), :body,
  now() + make_interval(days => o.retention_days)
FROM organisations AS o WHERE o.id = CAST(:org_id AS uuid) AND o.retention_days > 0
ON CONFLICT (id) DO UPDATE SET status = excluded.status, response = excluded.response, body = NULL
  WHERE r.status IN ('queued', 'in_progress') AND excluded.status NOT IN ('queued', 'in_progress')
RETURNING id
""")
_KEPT = text("SELECT status <> 'deleted' FROM responses WHERE id = CAST(:id AS uuid)")


def find(connection: Connection, project_id: str, response_id: str) -> Stored | None:
    """A project's response, unless it is deleted or expired."""
    query = text(f"SELECT {_STORED} FROM responses WHERE id = CAST(:id AS uuid) AND {_SEEN}")
    row = connection.execute(query, {"id": response_id, "project_id": project_id}).mappings().one_or_none()
    return None if row is None else Stored(**row)


def items(connection: Connection, project_id: str, response_id: str) -> str | None:
    """The input items of a project's response, JSON."""
    query = text(f"SELECT items::text FROM responses WHERE id = CAST(:id AS uuid) AND {_SEEN}")
    found: str | None = connection.execute(query, {"id": response_id, "project_id": project_id}).scalar_one_or_none()
    return found


def chain(connection: Connection, project_id: str, response_id: str) -> list[Turn]:
    """A response and all that it went on from, oldest first; at most TURNS_MAX + 1 of them.

    A part that is deleted or expired ends it early: the oldest then still names one before it.
    """
    values = {
        "id": response_id, "project_id": project_id, "most": TURNS_MAX + 1, "most_bytes": CONVERSATION_BYTES_MAX,
    }  # fmt: skip
    return [Turn(**row) for row in connection.execute(_CHAIN, values).mappings()]


_SIZE = """SELECT coalesce(sum(octet_length(items::text) + octet_length(response::text)), 0)::bigint AS whole_bytes
  FROM turns JOIN responses USING (id)"""
_TURN = """r.id::text AS id, r.previous_id::text AS previous_id, r.status, whole_bytes,
  CASE WHEN whole_bytes <= :most_bytes THEN r.items::text ELSE '' END AS items,
  CASE WHEN whole_bytes <= :most_bytes THEN r.response::text ELSE '' END AS response"""
_CHAIN = text(f"""
WITH RECURSIVE turns AS (
  SELECT id, previous_id, 1 AS back FROM responses WHERE id = CAST(:id AS uuid) AND {_SEEN}
  UNION ALL
  SELECT r.id, r.previous_id, back + 1 FROM turns JOIN responses AS r ON r.id = turns.previous_id
  WHERE back < :most AND r.project_id = CAST(:project_id AS uuid) AND r.status <> 'deleted' AND r.expires_at > now()
), size AS ({_SIZE})
SELECT {_TURN} FROM turns JOIN responses AS r USING (id) CROSS JOIN size ORDER BY back DESC
""")


def turns(connection: Connection, project_id: str, response_ids: Sequence[str]) -> list[Turn]:
    """Those of these responses that are the project's."""
    values = {"ids": list(response_ids), "project_id": project_id, "most_bytes": CONVERSATION_BYTES_MAX}
    return [Turn(**row) for row in connection.execute(_TURNS, values).mappings()]


_TURNS = text(f"""
WITH turns AS (SELECT id FROM responses WHERE id = ANY(CAST(:ids AS uuid[])) AND {_SEEN}), size AS ({_SIZE})
SELECT {_TURN} FROM turns JOIN responses AS r USING (id) CROSS JOIN size
""")


def delete(connection: Connection, row: Stored) -> None:
    """Remove what a response says, at once, also of one that is not written yet: then it never will be."""
    values = {**msgspec.structs.asdict(row), "days": TOMBSTONE_DAYS}
    connection.execute(_DELETE, values)


_DELETE = text("""
INSERT INTO responses (id, org_id, project_id, key_id, model, status, streamed, background, expires_at)
VALUES (CAST(:id AS uuid), CAST(:org_id AS uuid), CAST(:project_id AS uuid), :key_id, :model, 'deleted', :streamed,
  :background, now() + make_interval(days => :days))
ON CONFLICT (id) DO UPDATE SET status = 'deleted', items = NULL, response = NULL, body = NULL, previous_id = NULL,
  expires_at = excluded.expires_at
""")


# --- the backlog


def withdraw(connection: Connection, response_id: str) -> None:
    """Background work that the queue had no room for is not accepted after all."""
    connection.execute(text("DELETE FROM responses WHERE id = CAST(:id AS uuid)"), {"id": response_id})


def due(connection: Connection, *, rest_s: float, limit: int) -> list[Waiting]:
    """Background work that has not ended, and that nobody has looked at for `rest_s`. Each row is given to one caller;
    the next gets it after as long again."""
    rows = connection.execute(_DUE, {"rest_s": rest_s, "limit": limit}).mappings()
    return [Waiting(**row) for row in rows]


_DUE = text("""
UPDATE responses SET looked_at = now() WHERE id IN (
  SELECT id FROM responses
  WHERE status IN ('queued', 'in_progress') AND looked_at < now() - make_interval(secs => :rest_s)
  ORDER BY looked_at LIMIT :limit FOR UPDATE SKIP LOCKED)
RETURNING id::text AS id, model
""")


def body(connection: Connection, response_id: str) -> bytes | None:
    """What the queue is given of background work. None: it has ended."""
    query = text("SELECT body FROM responses WHERE id = CAST(:id AS uuid) AND status IN ('queued', 'in_progress')")
    found = connection.execute(query, {"id": response_id}).scalar_one_or_none()
    return None if found is None else bytes(found)


# --- retention


def outwait(connection: Connection) -> None:
    """Wait until every write that is under way has ended. In a transaction of its own, which is over at once."""
    connection.execute(text("LOCK TABLE responses IN SHARE ROW EXCLUSIVE MODE"))


def shorten(connection: Connection, org_id: str, days: int) -> int:
    """An organisation keeps its responses for fewer days from now on, those that it has, too. How many that changes."""
    query = text("""UPDATE responses SET expires_at = created_at + make_interval(days => :days)
      WHERE org_id = CAST(:org_id AS uuid) AND status <> 'deleted'
        AND expires_at > created_at + make_interval(days => :days)""")
    return int(connection.execute(query, {"org_id": org_id, "days": days}).rowcount)


def purge(connection: Connection, limit: int = PURGE_ROWS) -> int:
    """Delete rows that have expired, the oldest first. How many; fewer than `limit`: none is left."""
    return int(connection.execute(_PURGE, {"limit": limit}).rowcount)


_PURGE = text("""
DELETE FROM responses WHERE id IN (
  SELECT id FROM responses WHERE expires_at <= now() ORDER BY expires_at LIMIT :limit FOR UPDATE SKIP LOCKED)
""")
