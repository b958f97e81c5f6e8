"""API keys: their form, their rows in Postgres, and the records in Redis that they are served from.

    fb_live_ID_SECRETCHECKSUM    12, 32 and 6 characters of base62; kinds live, test and admin

| key or table      | type   | ttl | writer                            | reader       | holds         |
|-------------------|--------|-----|-----------------------------------|--------------|---------------|
| api_keys          | table  | -   | ops (forebay key)                 | find, keys   | HMACs, limits |
| {key:<id>}:record | HASH   | 7 d | ops, at once; the scaler's clock, | web/auth, on | record: a     |
|                   |        |     | every minute, all keys; a gateway | each request | KeyRecord,    |
|                   |        |     | that had to ask Postgres          |              | revoked: 0, 1 |

Promise   the secret is shown once and stored nowhere: only HMAC-SHA-256(pepper, key). A key that is revoked stays
          revoked in Redis whoever writes next; its record stays, so "revoked" is told from "never seen".
Dies      Postgres: known keys are served from their records for up to RECORD_S; a key never seen cannot be judged.
          Redis: nobody is let in (503). The clock: new limits reach gateways a minute late at
          most when it is back; revocations do not wait for it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import string
import zlib
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from core.errors import Unauthenticated
from core.postgres import Connection, Engine, IntegrityError, text, transaction
from core.redis import Call, command, scripts, tag
from core.settings import Settings

Kind = Literal["live", "test", "admin"]

#: How long a record outlives its last projection, seconds: the longest that Postgres may be away.
RECORD_S = 7 * 86_400
#: Which pepper new keys are hashed with.
PEPPER_VERSION = 1
#: A pepper shorter than this is a mistake, characters.
PEPPER_MIN = 16

ID_LENGTH = 12
SECRET_LENGTH = 32
CHECKSUM_LENGTH = 6

_BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
_DIGIT = "[0-9A-Za-z]"
_FORM = re.compile(rf"fb_(live|test|admin)_({_DIGIT}{{{ID_LENGTH}}})_{_DIGIT}{{{SECRET_LENGTH + CHECKSUM_LENGTH}}}")
_SCRIPTS = scripts(Path(__file__).with_name("lua"), shared=(), verbs=("project",))


class BadKey(Unauthenticated):
    """This is not an API key of ours: it was mistyped or cut. Send it as `Authorization: Bearer fb_…`."""


class KeyRefused(Exception):
    """A key cannot be made as asked for, or there is no such key."""


class PepperMissing(Exception):
    """There is no pepper. Set FOREBAY_PEPPER, or let `forebay up` make one in the data folder."""


@dataclass(frozen=True)
class ParsedKey:
    """A key that is well-formed; whether it is anybody's is not known yet."""

    kind: str
    key_id: str
    text: str = field(repr=False)


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway must know about a key. Its repr is safe to log."""

    key_id: str
    org_id: str
    project_id: str
    kind: str = "live"
    secret_hmac: bytes
    pepper_version: int = PEPPER_VERSION
    requests_per_minute: int | None = None  #: None: no limit
    concurrent_requests: int | None = None
    weight: float = 1.0  #: its organisation's, which the queue is fair by
    retention_days: int = 30  #: its organisation's: how long stored responses are kept; 0: nothing is stored
    revoked: bool = False
    expires_ms: int | None = None

    def usable(self, now_ms: int) -> bool:
        return not self.revoked and (self.expires_ms is None or now_ms < self.expires_ms)

    def __repr__(self) -> str:
        return f"KeyRecord({self.key_id}, org={self.org_id}, revoked={self.revoked})"


class KeyRow(msgspec.Struct, frozen=True, kw_only=True):
    """A key as people see it."""

    id: str
    org_id: str
    project_id: str
    name: str
    kind: str
    last4: str
    requests_per_minute: int | None
    concurrent_requests: int | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None

    @property
    def shown(self) -> str:
        """The key as it may be shown after its creation."""
        return f"fb_{self.kind}_{self.id}_…{self.last4}"


class _Hashed(Protocol):
    @property
    def secret_hmac(self) -> bytes: ...


def parse(text: str) -> ParsedKey:
    """Take a key apart. Its checksum refuses typing errors and guesses before anything is asked.

    Raises:
      BadKey: it cannot be one of ours.
    """
    found = _FORM.fullmatch(text)
    if found is None or checksum(text[:-CHECKSUM_LENGTH]) != text[-CHECKSUM_LENGTH:]:
        raise BadKey
    return ParsedKey(kind=found[1], key_id=found[2], text=text)


def matches(parsed: ParsedKey, row: _Hashed, pepper: bytes) -> bool:
    """Whether it is the very key, in a time that says nothing about where it differs."""
    return hmac.compare_digest(row.secret_hmac, hashed(parsed.text, pepper))


def checksum(body: str) -> str:
    """CRC-32 in six base62 digits: any change within four neighbouring characters changes it."""
    left, digits = zlib.crc32(body.encode()), ""
    for _ in range(CHECKSUM_LENGTH):
        left, digit = divmod(left, len(_BASE62))
        digits = _BASE62[digit] + digits
    return digits


def hashed(text: str, pepper: bytes) -> bytes:
    """A slow hash would add nothing at 190 random bits, and let anybody burn our CPU."""
    return hmac.digest(pepper, text.encode(), hashlib.sha256)


def pepper(settings: Settings) -> bytes:
    """The secret that keys are hashed with.

    Raises:
      PepperMissing: neither the environment nor the data folder has one worth the name.
    """
    found = settings.pepper
    if not found:
        try:
            found = (settings.secrets / "pepper").read_text().strip()
        except OSError as e:
            raise PepperMissing(f"{PepperMissing.__doc__} ({e})") from None
    if len(found) < PEPPER_MIN:
        raise PepperMissing(f"the pepper is too short: it needs {PEPPER_MIN} characters")
    return found.encode()


_ROW = """k.id, k.org_id::text AS org_id, k.project_id::text AS project_id, k.name, k.kind, k.last4,
  k.requests_per_minute, k.concurrent_requests, k.created_at, k.expires_at, k.revoked_at"""
_RECORD = """k.id AS key_id, k.org_id::text AS org_id, k.project_id::text AS project_id, k.kind, k.secret_hmac,
  k.pepper_version, k.requests_per_minute, k.concurrent_requests, k.revoked_at IS NOT NULL AS revoked,
  (SELECT weight FROM organisations AS o WHERE o.id = k.org_id) AS weight,
  (SELECT retention_days FROM organisations AS o WHERE o.id = k.org_id) AS retention_days,
  (extract(epoch FROM k.expires_at) * 1000)::bigint AS expires_ms"""


def create_key(
    connection: Connection,
    *,
    org_id: str,
    project_id: str,
    name: str,
    pepper: bytes,
    kind: Kind = "live",
    requests_per_minute: int | None = None,
    concurrent_requests: int | None = None,
    expires_at: datetime | None = None,
) -> tuple[str, KeyRow]:
    """A new key: its plain text, which nobody will see again, and its row.

    Raises:
      KeyRefused: the project is not the organisation's, or a value is not valid.
    """
    key_id = _random(ID_LENGTH)
    plain = mint(kind, key_id)
    values = {
        "id": key_id, "org_id": org_id, "project_id": project_id, "name": name, "kind": kind, "last4": plain[-4:],
        "hmac": hashed(plain, pepper), "version": PEPPER_VERSION, "rpm": requests_per_minute,
        "concurrent": concurrent_requests, "expires_at": expires_at,
    }  # fmt: skip
    query = text(f"""INSERT INTO api_keys AS k (id, org_id, project_id, name, kind, last4, secret_hmac, pepper_version,
        requests_per_minute, concurrent_requests, expires_at)
      VALUES (:id, :org_id, :project_id, :name, :kind, :last4, :hmac, :version, :rpm, :concurrent, :expires_at)
      RETURNING {_ROW}""")
    try:
        with connection.begin_nested():
            row = connection.execute(query, values).mappings().one()
    except IntegrityError as e:
        raise KeyRefused(str(e.orig).partition("\n")[0]) from e
    return plain, KeyRow(**row)


def mint(kind: Kind, key_id: str) -> str:
    """A key's plain text, with a new secret."""
    body = f"fb_{kind}_{key_id}_{_random(SECRET_LENGTH)}"
    return body + checksum(body)


def _random(length: int) -> str:
    return "".join(secrets.choice(_BASE62) for _ in range(length))


def revoke(connection: Connection, key_id: str, *, now: datetime, reason: str = "") -> KeyRecord:
    """End a key for good; the first time counts. The caller projects the record once this is committed.

    Raises:
      KeyRefused: there is no such key.
    """
    query = text(f"""UPDATE api_keys AS k SET revoked_at = coalesce(revoked_at, :now),
        revoked_reason = coalesce(revoked_reason, :reason)
      WHERE id = :id RETURNING {_RECORD}""")
    row = connection.execute(query, {"id": key_id, "now": now, "reason": reason}).mappings().one_or_none()
    if row is None:
        raise KeyRefused(f"there is no key {key_id!r}; `forebay key list` shows them")
    return _record(dict(row))


def keys(connection: Connection, org_id: str | None = None) -> list[KeyRow]:
    """An organisation's keys or everybody's, oldest first."""
    query = text(f"""SELECT {_ROW} FROM api_keys AS k
      WHERE CAST(:org_id AS uuid) IS NULL OR k.org_id = CAST(:org_id AS uuid) ORDER BY k.created_at, k.id""")
    return [KeyRow(**row) for row in connection.execute(query, {"org_id": org_id}).mappings()]


def find(engine: Engine, key_id: str) -> KeyRecord | None:
    """A key's record, from Postgres.

    Raises:
      DatabaseAway: so the key cannot be judged.
    """
    with transaction(engine) as connection:
        query = text(f"SELECT {_RECORD} FROM api_keys AS k WHERE k.id = :id")
        row = connection.execute(query, {"id": key_id}).mappings().one_or_none()
    return None if row is None else _record(dict(row))


def all_records(engine: Engine) -> list[KeyRecord]:
    """Every key's record, the revoked ones too, for the clock to project."""
    with transaction(engine) as connection:
        rows = connection.execute(text(f"SELECT {_RECORD} FROM api_keys AS k")).mappings().all()
    return [_record(dict(row)) for row in rows]


def _record(row: dict[str, Any]) -> KeyRecord:
    return KeyRecord(**{**row, "secret_hmac": bytes(row["secret_hmac"])})


def project(record: KeyRecord) -> Call[bool]:
    """Put a record where gateways look first. False: a revoked one is there, and stays."""
    args = (msgspec.msgpack.encode(record), int(record.revoked), RECORD_S)
    return Call(script=_SCRIPTS["project"], keys=(_key(record.key_id),), args=args, reply=bool)


def read(key_id: str) -> Call[KeyRecord | None]:
    """A key's record, or None when no gateway has seen it for RECORD_S."""
    return command("HGET", _key(key_id), "record", reply=_decoded)


def _decoded(raw: bytes | None) -> KeyRecord | None:
    return None if raw is None else msgspec.msgpack.decode(raw, type=KeyRecord)


def _key(key_id: str) -> str:
    return tag(f"key:{key_id}") + "record"
