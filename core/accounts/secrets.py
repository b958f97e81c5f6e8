"""Client secrets: a minute's leave to open one socket, for browsers, which can send no header and must see no key.

    ek_…    43 characters of base64url: 256 random bits

| key                     | type   | ttl          | writer                       | reader             | holds         |
|-------------------------|--------|--------------|------------------------------|--------------------|---------------|
| {secret:<hash>}:grant   | STRING | as asked for | web, POST /v1/client_secrets | web, a handshake,  | a Grant:      |
|                         |        |              |                              | which deletes it   | whose key     |
| {org:<id>}:minted:<key> | ZSET   | WINDOW_MS    | the same, before it          | `count`            | hash -> when, |
|                         |        |              |                              |                    | ms            |

Promise   a secret opens one socket: who reads it takes it away. It is stored nowhere, only its SHA-256. It is worth no
          more than its key is at that moment: a revoked key's secrets open nothing. A key is given MINTED_MAX
          in any WINDOW_MS, over all gateways, so that what waits to be used is bounded.
Dies      Redis: nobody is let in, and no secret is given out (503); what it forgets has to be asked for again.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from pathlib import Path
from typing import Any

import msgspec

from core.redis import Call, command, scripts, tag

#: How long a secret may be used, seconds, if its maker does not say; and what they may say.
SECRET_S, SECRET_MIN_S, SECRET_MAX_S = 60, 10, 600

#: How many one key is given in the window, and its length, ms.
MINTED_MAX, WINDOW_MS = 1_000, 60_000

PREFIX = "ek_"
_SCRIPTS = scripts(Path(__file__).with_name("lua"), shared=(), verbs=("mint",))
_FORM = re.compile(r"ek_[A-Za-z0-9_-]{43}")


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """What a secret stands for."""

    key_id: str
    model: str = ""  #: the only one that its socket may use; empty: those of the key


def mint() -> str:
    """A new secret."""
    return PREFIX + secrets.token_urlsafe(32)


def is_secret(text: str) -> bool:
    """Whether it may be a secret of ours."""
    return _FORM.fullmatch(text) is not None


def count(org_id: str, key_id: str, secret: str) -> Call[int]:
    """A secret is about to be given to a key. 0: it may be; else one may be in so many ms."""
    key = f"{tag('org:' + org_id)}minted:{key_id}"
    return Call(script=_SCRIPTS["mint"], keys=(key,), args=(_hash(secret), MINTED_MAX, WINDOW_MS), reply=int)


def give(secret: str, grant: Grant, ttl_s: int) -> Call[bool]:
    """Let a secret be used once."""
    return command("SET", _key(secret), msgspec.msgpack.encode(grant), "EX", ttl_s, reply=bool)


def take(secret: str) -> Call[Grant | None]:
    """What a secret stands for. It is used up by that. None: it was, or is too old, or never was."""
    return command("GETDEL", _key(secret), reply=_decoded)


def _decoded(raw: Any) -> Grant | None:
    return None if raw is None else msgspec.msgpack.decode(raw, type=Grant)


def _key(secret: str) -> str:
    return tag("secret:" + _hash(secret)) + "grant"


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
