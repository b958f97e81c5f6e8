"""How many sockets a key has open, over all gateways.

| key                | type | ttl           | writer                    | reader | holds                             |
|--------------------|------|---------------|---------------------------|--------|-----------------------------------|
| {key:<id>}:sockets | ZSET | SEAT_MS after | web: `sit` at a handshake | `sit`  | socket -> until when it counts,   |
|                    |      | the last      | and `leave`, `stay` every |        | ms, unless its gateway says again |
|                    |      | `stay`        | STAY_S                    |        | that it is open                   |

Promise   no more than its bound are open at once, of those whose gateways live.
Dies      a gateway: its sockets count for SEAT_MS more. Redis: no handshake (503); when it has forgotten the key, the
          open ones count again within STAY_S.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from core.redis import Call, command, scripts, tag

#: How long a socket counts that its gateway does not speak of, ms.
SEAT_MS = 30_000
#: How often a gateway speaks of its sockets, seconds.
STAY_S = 10.0

_SCRIPTS = scripts(Path(__file__).with_name("lua"), shared=(), verbs=("sit", "stay"))


def sit(key_id: str, socket_id: str, most: int) -> Call[bool]:
    """Count a socket that is to be opened. False: the key has `most` already."""
    return Call(script=_SCRIPTS["sit"], keys=(_key(key_id),), args=(socket_id, most, SEAT_MS), reply=bool)


def stay(key_id: str, socket_ids: Sequence[str]) -> Call[int]:
    """These are open still."""
    return Call(script=_SCRIPTS["stay"], keys=(_key(key_id),), args=(SEAT_MS, *socket_ids), reply=int)


def leave(key_id: str, socket_id: str) -> Call[int]:
    """This one is closed."""
    return command("ZREM", _key(key_id), socket_id, reply=int)


def _key(key_id: str) -> str:
    return tag(f"key:{key_id}") + "sockets"
