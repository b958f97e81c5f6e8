"""How often keys that are no good came from an address, over all gateways.

| key                     | type | ttl       | writer                    | reader | holds                              |
|-------------------------|------|-----------|---------------------------|--------|------------------------------------|
| {failures:<hash>}:times | LIST | WINDOW_MS | web/auth, on an attempt   | `fail` | when each was counted, ms, and its |
|                         |      |           | with a key that Redis     |        | name; at most FAILURES_MAX         |
|                         |      |           | does not know as good     |        |                                    |

Promise   an address learns of at most FAILURES_MAX keys in any WINDOW_MS that they are no good, and Postgres is asked
          of no more for it: each is counted before, and struck out again where it was found good. What is refused
          beyond them counts for nothing, so the time that `fail` names is when the next may be tried. Attempts with
          keys that Redis knows as good are not looked at. The address itself is written nowhere: its name is a keyed
          hash.
Dies      Redis: whoever fails is refused all the same, uncounted; what it forgets begins anew. A gateway, between the
          two: a good key has counted as a failure.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from core.redis import Call, scripts, tag

#: Attempts from one address that may fail in the window, and its length, ms.
FAILURES_MAX, WINDOW_MS = 20, 60_000

_SCRIPTS = scripts(Path(__file__).with_name("lua"), shared=(), verbs=("fail", "forgive"))


def name(network: str, pepper: bytes) -> str:
    """What an address, or the network that it stands for, is counted under."""
    return hmac.digest(pepper, b"address " + network.encode(), hashlib.sha256).hex()[:32]


def fail(name: str, attempt: str) -> Call[int]:
    """Count an attempt, which has a name of its own, as failed. 0: it is; else too many are, and this many ms later one
    would be."""
    return Call(script=_SCRIPTS["fail"], keys=(_key(name),), args=(FAILURES_MAX, WINDOW_MS, attempt), reply=int)


def forgive(name: str, attempt: str) -> Call[bool]:
    """It did not fail. False: it is not counted, or no longer."""
    return Call(script=_SCRIPTS["forgive"], keys=(_key(name),), args=(attempt,), reply=bool)


def _key(name: str) -> str:
    return tag(f"failures:{name}") + "times"
