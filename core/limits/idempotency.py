"""Keys that clients name their requests by, so that one sent again is not made again.

| key                               | type | ttl  | writer                | reader   | holds                        |
|-----------------------------------|------|------|-----------------------|----------|------------------------------|
| {org:<id>}once:<API key>:<hash>   | HASH | 24 h | begin, join, leave,   | the same | id, body, begun; r:<reader>  |
|                                   |      |      | free                  |          |                              |

The hash is of the client's `Idempotency-Key`, `body` that of the path and the bytes it came with. `id` is the request
that it stands for, decided before it is admitted. Readers are the connections that it is shown to: while another reads
on, one that leaves does not cancel it.

Promise   one request for one key, as long as the queue knows the request (15 minutes after its end): its row, not this
          entry, says whether it was accepted, and whoever finds an entry without a row may enqueue the same id.
          A request that ended without an answer, or is forgotten, is replaced (`instead_of`), by one of those who ask.
Dies      gateway before enqueue: the next who asks enqueues the same id. Gateway with a reader: it is counted on, so
          the request may run to its end unread. Redis: no admission (503). Cluster: one tag, {org:<id>}.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from core.redis import Call, scripts, tag

_SCRIPTS = scripts(Path(__file__).with_name("lua"), shared=(), verbs=("once_begin", "once_read", "once_free"))

#: How long a key is remembered, ms: as long as a body, so that what still waits is known.
REMEMBER_MS = 24 * 3600 * 1000
#: Connections that may read one answer at once.
READERS_MAX = 16
#: A request younger than this that the queue does not know was never enqueued; an older one may be forgotten, ms. Less
#: than the queue remembers an ended one for.
FRESH_MS = 600_000


@dataclass(frozen=True, kw_only=True)
class Name:
    """Whose key it is, and its hash."""

    org_id: str
    key_id: str
    once: str

    @property
    def entry(self) -> str:
        return f"{tag('org:' + self.org_id)}once:{self.key_id}:{self.once}"


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Whom a key stands for."""

    mine: bool
    request_id: str
    same: bool  #: path and body are those it was taken with
    age_ms: int


def name(org_id: str, key_id: str, key: str) -> Name:
    return Name(org_id=org_id, key_id=key_id, once=hashlib.sha256(key.encode()).hexdigest()[:32])


def begin(named: Name, request_id: str, reader: str, body: str, *, instead_of: str = "") -> Call[Taken]:
    """Take the key for a request, unless it stands for another, and not for `instead_of`."""
    args = (request_id, reader, body, instead_of, REMEMBER_MS)
    return Call(script=_SCRIPTS["once_begin"], keys=(named.entry,), args=args, reply=_taken)


def join(named: Name, request_id: str, reader: str) -> Call[int]:
    """One more reads it: how many others do. -1: it stands for another request now; -2: READERS_MAX do."""
    return _read(named, request_id, reader, "join")


def leave(named: Name, request_id: str, reader: str) -> Call[int]:
    """One reads it no more: how many others do. -1: it stands for another request now."""
    return _read(named, request_id, reader, "leave")


def free(named: Name, request_id: str) -> Call[bool]:
    """The request was refused."""
    return Call(script=_SCRIPTS["once_free"], keys=(named.entry,), args=(request_id,), reply=bool)


def _read(named: Name, request_id: str, reader: str, verb: str) -> Call[int]:
    args = (request_id, reader, verb, READERS_MAX)
    return Call(script=_SCRIPTS["once_read"], keys=(named.entry,), args=args, reply=int)


def _taken(raw: list[bytes | int]) -> Taken:
    mine, request_id, same, age_ms = raw
    told = request_id.decode() if isinstance(request_id, bytes) else str(request_id)
    return Taken(mine=mine == 1, request_id=told, same=same == 1, age_ms=int(age_ms))
