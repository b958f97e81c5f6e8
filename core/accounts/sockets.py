"""How many sockets a key, a project and an organisation have open, over all gateways.

| key                        | type | ttl           | writer               | reader | holds                            |
|----------------------------|------|---------------|----------------------|--------|----------------------------------|
| {org:<id>}:sockets:<scope> | ZSET | SEAT_MS after | web: `sit` at a      | `sit`  | socket -> until when it counts,  |
|                            |      | the last      | handshake, `leave`,  |        | ms, unless its gateway says      |
|                            |      | `stay`        | `stay` every STAY_S  |        | again that it is open            |

Promise   no more than its bound are open at once in any scope, of those whose gateways live: one call counts a socket
          in all its scopes, or in none. Each is counted everywhere, so a limit that is set later counts what is open.
Dies      a gateway: its sockets count for SEAT_MS more. Redis: no handshake (503); when it has forgotten a scope, the
          open ones count again within STAY_S. Cluster: one tag, {org:<id>}.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from core.redis import Call, scripts, tag

#: How long a socket counts that its gateway does not speak of, ms.
SEAT_MS = 30_000
#: How often a gateway speaks of its sockets, seconds.
STAY_S = 10.0

_SCRIPTS = scripts(Path(__file__).with_name("lua"), shared=(), verbs=("sit", "stay", "leave"))


def sit(org_id: str, socket_id: str, most: Mapping[str, int | None]) -> Call[str | None]:
    """Count a socket that is to be opened. `most`: scope -> how many it may have, narrowest first; None: any number.

    The reply is the scope that has as many as it may; None: it is counted.
    """
    scopes, bounds = tuple(most), [-1 if one is None else one for one in most.values()]
    return _call("sit", org_id, scopes, socket_id, SEAT_MS, *bounds, reply=lambda at: scopes[at - 1] if at else None)


def stay(org_id: str, open_in: Mapping[str, Sequence[str]]) -> Call[int]:
    """These are open still: scope -> sockets."""
    told = chain.from_iterable((len(sockets), *sockets) for sockets in open_in.values())
    return _call("stay", org_id, tuple(open_in), SEAT_MS, *told, reply=int)


def leave(org_id: str, scopes: Sequence[str], socket_id: str) -> Call[int]:
    """This one is closed."""
    return _call("leave", org_id, scopes, socket_id, reply=int)


def _call(verb: str, org_id: str, scopes: Sequence[str], *args: Any, reply: Any) -> Call[Any]:
    keys = tuple(f"{tag('org:' + org_id)}sockets:{scope}" for scope in scopes)
    return Call(script=_SCRIPTS[verb], keys=keys, args=args, reply=reply)
