"""What operators have stopped: organisations and keys that may begin nothing, and whose running requests end.

| key                | type   | ttl  | writer             | reader                 | holds                           |
|--------------------|--------|------|--------------------|------------------------|---------------------------------|
| {org:<id>}:stopped | HASH   | none | stop, clear, clock | reserve, progress, a   | org, key:<id> -> why;           |
|                    |        |      |                    | gateway's look         | mark: which change was the last |
| {stopped}:told     | STRING | none | clock              | clock, every second    | this store was told everything  |

Promise   once `stop` has returned, no reserve of the organisation, or the key, succeeds; its workers learn it with
          their next progress, its gateways with their next look (a second). Repeats change nothing.
Dies      the command, between Postgres and here: the clock says it again within a minute. Redis: the clock sees within
          a second that `told` is gone, and brings all of it back (tasks/stops.py). Who read Postgres before a
          suspension, or its end, does not undo it: `seen`, then Postgres, then `project`. A revoked key is never taken
          away. Cluster: one tag, {org:<id>}; a node alone that lost its keys is noticed within the minute.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from core.redis import Call, command, scripts, tag

_SCRIPTS = scripts(Path(__file__).with_name("lua"), shared=(), verbs=("stopped_set", "stopped_project"))

_TOLD = tag("stopped") + "told"
#: The field of the organisation itself, and why it is stopped.
ORG, SUSPENDED = "org", "suspended"
#: Why a key is stopped.
REVOKED = "revoked"


def field_of(key_id: str) -> str:
    """The field of a key."""
    return f"key:{key_id}"


def stop(org_id: str, field: str, why: str) -> Call[bool]:
    """Stop an organisation (ORG, SUSPENDED) or a key (`field_of`, REVOKED). The caller has told Postgres before.

    Raises:
      ValueError: no reason is given.
    """
    if not why:
        raise ValueError("what is stopped is stopped for a reason")
    return _set(org_id, field, why)


def clear(org_id: str, field: str = ORG) -> Call[bool]:
    """Let an organisation go on. The caller has told Postgres before.

    Raises:
      ValueError: it is a key's field; a revoked key stays revoked.
    """
    if field != ORG:
        raise ValueError(f"{field} stays stopped: only an organisation can go on")
    return _set(org_id, field, "")


def stopped(org_id: str, key_ids: Sequence[str]) -> Call[dict[str, str]]:
    """Which of the organisation (ORG) and these keys (`field_of`) are stopped, and why."""
    fields = (ORG, *map(field_of, key_ids))
    return command("HMGET", _key(org_id), *fields, reply=lambda raw: _told(fields, raw))


def seen(org_id: str) -> Call[str]:
    """The mark of the last change, which a projection reads before it reads Postgres."""
    return command("HGET", _key(org_id), "mark", reply=lambda raw: raw.decode() if raw else "")


def project(org_id: str, flags: Mapping[str, str], mark: str) -> Call[bool]:
    """What Postgres says is stopped, `mark` seen before it was asked. False: something was changed between; only keys
    were added."""
    keys = chain.from_iterable((field, why) for field, why in flags.items() if field != ORG)
    args = (mark, flags.get(ORG, ""), *keys)
    return Call(script=_SCRIPTS["stopped_project"], keys=(_key(org_id),), args=args, reply=bool)


def remember() -> Call[bool]:
    """This store was told everything that is stopped."""
    return command("SET", _TOLD, 1, reply=bool)


def remembers() -> Call[bool]:
    """Whether it was; False: it may have lost it since."""
    return command("EXISTS", _TOLD, reply=bool)


def _set(org_id: str, field: str, why: str) -> Call[bool]:
    args = (field, why, secrets.token_hex(8))
    return Call(script=_SCRIPTS["stopped_set"], keys=(_key(org_id),), args=args, reply=bool)


def _told(fields: Sequence[str], raw: Sequence[Any]) -> dict[str, str]:
    return {field: why.decode() for field, why in zip(fields, raw, strict=True) if why is not None}


def _key(org_id: str) -> str:
    return f"{tag('org:' + org_id)}stopped"
