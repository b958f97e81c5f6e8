"""API keys: their form, their rows in Postgres, and the records in Redis that they are served from.

    fb_live_ID_SECRETCHECKSUM    12, 32 and 6 characters of base62; kinds live, test and admin

| key or table      | type   | ttl | writer                            | reader       | holds                 |
|-------------------|--------|-----|-----------------------------------|--------------|-----------------------|
| api_keys          | table  | -   | ops (forebay key); last used:     | find, keys   | what a key may do,    |
|                   |        |     | sightings.py                      |              | and until when        |
| key_secrets       | table  | -   | create_key, rotate, revoke;       | find, keys   | HMACs: one, and those |
|                   |        |     | sightings.py, to the newest       |              | that a rotation has   |
|                   |        |     | pepper                            |              | not ended yet         |
| {key:<id>}:record | HASH   | 7 d | ops, at once; the scaler's clock, | web/auth, on | record: a KeyRecord,  |
|                   |        |     | every minute, all keys; a gateway | each request | revoked: 0, 1, read:  |
|                   |        |     | that had to ask Postgres          |              | when Postgres was, µs |

Promise   a secret is shown once and stored nowhere: only HMAC-SHA-256(pepper, key). Limits and spend belong to the
          key's id, which a rotation keeps. A key that is revoked stays revoked in Redis whoever writes next; its record
          stays, so "revoked" is told from "never seen". A record is not replaced by one that was read before it.
Dies      Postgres: known keys are served from their records for up to RECORD_S; a key never seen cannot be judged.
          Redis: nobody is let in (503). The clock: what a command could not tell gateways reaches them a minute late at
          most when it is back; revocations do not wait for it (core/limits/stopped.py).
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
import string
import time
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import msgspec

from core.accounts import quotas
from core.errors import Unauthenticated
from core.postgres import Connection, Engine, IntegrityError, text, transaction
from core.redis import Call, Store, command, scripts, tag
from core.settings import Settings
from core.values import Limit

Kind = Literal["live", "test", "admin"]

#: What a key of each kind may do, unless it is told less. Who administers cannot generate, and the other way round.
SCOPES: Mapping[str, tuple[str, ...]] = {
    "live": ("generate", "models.read", "usage.read"),
    "test": ("generate", "models.read", "usage.read"),
    "admin": ("admin",),
}
#: How long a record outlives its last projection, seconds: the longest that Postgres may be away.
RECORD_S = 7 * 86_400
#: Records that one exchange with Redis carries.
RECORDS = 500
#: A pepper shorter than this is a mistake, characters.
PEPPER_MIN = 16
#: How long a key's former secret may go on after a rotation.
OVERLAP_MAX = timedelta(hours=72)
#: Secrets of one key that may be good at once.
SECRETS_MAX = 4
#: Characters of a key's name.
NAME_MAX = 200
#: Models, and networks, that one key may be bound to.
NAMES_MAX = 100

ID_LENGTH = 12
SECRET_LENGTH = 32
CHECKSUM_LENGTH = 6

_BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase
_DIGIT = "[0-9A-Za-z]"
_FORM = re.compile(rf"fb_(live|test|admin)_({_DIGIT}{{{ID_LENGTH}}})_{_DIGIT}{{{SECRET_LENGTH + CHECKSUM_LENGTH}}}")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_VERSION = re.compile(r"(\d{1,4}):(.*)")
_SCRIPTS = scripts(Path(__file__).with_name("lua"), shared=(), verbs=("project",))


class BadKey(Unauthenticated):
    """This is not an API key of ours: it was mistyped or cut. Send it as `Authorization: Bearer fb_…`."""


class KeyRefused(Exception):
    """A key cannot be made as asked for, or there is no such key."""


class PepperMissing(Exception):
    """There is no pepper. Set FOREBAY_PEPPER, or let `forebay up` make one in the data folder."""


@dataclass(frozen=True)
class Peppers:
    """The secrets that keys are hashed with, by their versions: the newest, and those it has yet to replace."""

    newest: int
    secrets: Mapping[int, bytes] = field(repr=False)

    @classmethod
    def only(cls, secret: bytes) -> Peppers:
        """One pepper, the first."""
        return cls(1, {1: secret})

    @property
    def current(self) -> bytes:
        """The newest one itself."""
        return self.secrets[self.newest]


@dataclass(frozen=True)
class ParsedKey:
    """A key that is well-formed; whether it is anybody's is not known yet."""

    kind: str
    key_id: str
    text: str = field(repr=False)


class Secret(msgspec.Struct, frozen=True, kw_only=True):
    """One of a key's secrets, as it is stored. Its repr is safe to log."""

    hmac: bytes
    pepper_version: int = 1
    expires_ms: int | None = None  #: None: until it is rotated

    def __repr__(self) -> str:
        return f"Secret(pepper={self.pepper_version}, expires_ms={self.expires_ms})"


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway must know about a key. Its repr is safe to log."""

    key_id: str
    org_id: str
    project_id: str
    kind: str = "live"
    secret_hmac: bytes  #: of its newest secret
    pepper_version: int = 1
    older: tuple[Secret, ...] = ()  #: those that a rotation has not ended yet, newest first
    scopes: tuple[str, ...] = ()  #: what it may do; filled from its kind where an older release wrote the record
    models: tuple[str, ...] = ()  #: the only ones that it may use; none: all
    networks: tuple[str, ...] = ()  #: the only ones that it may come from, "10.0.0.0/8"; none: anywhere
    limits: tuple[Limit, ...] = ()  #: of the key, its project, its organisation, and of its organisation's models
    plan: str = "postpaid"  #: its organisation's: "postpaid", "prepaid" or "free"
    suspended: bool = False  #: its organisation is
    requests_per_minute: int | None = None  #: its own limits once more, for gateways of the release before
    concurrent_requests: int | None = None
    weight: float = 1.0  #: its organisation's, which the queue is fair by
    retention_days: int = 30  #: its organisation's: how long stored responses are kept; 0: nothing is stored
    revoked: bool = False
    expires_ms: int | None = None
    read_us: int = 0  #: when Postgres was read, by its own clock

    def __post_init__(self) -> None:
        """What a record of the release before has no fields for."""
        if not self.scopes:
            msgspec.structs.force_setattr(self, "scopes", SCOPES.get(self.kind, ()))
        own = Limit(
            scope=f"key:{self.key_id}",
            requests_per_minute=self.requests_per_minute,
            concurrent_requests=self.concurrent_requests,
        )
        if not self.limits and own.limited:
            msgspec.structs.force_setattr(self, "limits", (own,))

    @property
    def secrets(self) -> tuple[Secret, ...]:
        """All of its secrets, newest first."""
        return (Secret(hmac=self.secret_hmac, pepper_version=self.pepper_version), *self.older)

    def usable(self, now_ms: int) -> bool:
        """Neither revoked nor expired. Whether its organisation is suspended is another matter."""
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
    scopes: list[str]
    models: list[str]  #: none: all
    networks: list[str]  #: none: anywhere
    requests_per_minute: int | None
    concurrent_requests: int | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None
    last_used_from: str | None
    secrets: int  #: that are good now
    pepper_version: int | None  #: the oldest that they need

    @property
    def shown(self) -> str:
        """The key as it may be shown after its creation."""
        return f"fb_{self.kind}_{self.id}_…{self.last4}"


def parse(text: str) -> ParsedKey:
    """Take a key apart. Its checksum refuses typing errors and guesses before anything is asked.

    Raises:
      BadKey: it cannot be one of ours.
    """
    found = _FORM.fullmatch(text)
    if found is None or checksum(text[:-CHECKSUM_LENGTH]) != text[-CHECKSUM_LENGTH:]:
        raise BadKey
    return ParsedKey(kind=found[1], key_id=found[2], text=text)


def matches(parsed: ParsedKey, record: KeyRecord | None, pepper: Peppers | bytes, *, now_ms: int | None = None) -> bool:
    """Whether it is the very key, by a secret that is good now, ms since the epoch.

    The work is the same for every record, and for none: it says nothing about where a secret differs, how many there
    are, or whether there is such a key.
    """
    now_ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    shown = {version: hashed(parsed.text, secret) for version, secret in peppers(pepper).secrets.items()}
    known = (record.secrets if record else ())[:SECRETS_MAX]
    found = 0
    for secret in (*known, *[_NONE] * (SECRETS_MAX - len(known))):
        same = hmac.compare_digest(secret.hmac, shown.get(secret.pepper_version, _NEVER))
        found += same & (secret.expires_ms is None or now_ms < secret.expires_ms)
    return found > 0


#: Compared in the place of a secret that there is not, and of one whose pepper we do not have.
_NONE, _NEVER = Secret(hmac=b"\0" * 32), secrets.token_bytes(32)


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


def pepper(settings: Settings) -> Peppers:
    """The secrets that keys are hashed with: one, or "2:SECRET,1:SECRET", the newest first.

    Raises:
      PepperMissing: neither the environment nor the data folder has any worth the name.
    """
    found = settings.pepper
    if not found:
        try:
            found = (settings.secrets / "pepper").read_text().strip()
        except OSError as e:
            raise PepperMissing(f"{PepperMissing.__doc__} ({e})") from None
    return _peppers(found)


def _peppers(told: str) -> Peppers:
    """What is told, without ever saying it again."""
    parts = [part.strip() for part in told.split(",")] if _VERSION.match(told) else [f"1:{told}"]
    forms = [_VERSION.fullmatch(part) for part in parts]
    pairs = [(int(form[1]), form[2].encode()) for form in forms if form]
    versions = [version for version, _ in pairs]
    if len(pairs) < len(parts) or versions != sorted(set(versions), reverse=True) or versions[-1] < 1:
        raise PepperMissing("the pepper is one secret, or VERSION:SECRET,… with the newest version first")
    if min(len(secret) for _, secret in pairs) < PEPPER_MIN:
        raise PepperMissing(f"the pepper is too short: it needs {PEPPER_MIN} characters")
    return Peppers(versions[0], dict(pairs))


def peppers(pepper: Peppers | bytes) -> Peppers:
    """A single secret is the first version."""
    return pepper if isinstance(pepper, Peppers) else Peppers.only(pepper)


_GOOD = "s.key_id = k.id AND (s.expires_at IS NULL OR s.expires_at > now())"
_ROWS = f"""SELECT k.id, k.org_id::text AS org_id, k.project_id::text AS project_id, k.name, k.kind, k.scopes, k.models,
    k.networks::text[] AS networks, l.requests_per_minute, l.concurrent_requests, k.created_at, k.expires_at,
    k.revoked_at, k.last_used_at, host(k.last_used_from) AS last_used_from,
    (SELECT last4 FROM key_secrets AS s WHERE s.key_id = k.id
      ORDER BY s.expires_at IS NOT NULL, s.created_at DESC LIMIT 1) AS last4,
    (SELECT count(*) FROM key_secrets AS s WHERE {_GOOD}) AS secrets,
    (SELECT min(pepper_version) FROM key_secrets AS s WHERE {_GOOD}) AS pepper_version
  FROM api_keys AS k LEFT JOIN limits AS l ON l.org_id = k.org_id AND l.scope = 'key:' || k.id"""
_RECORDS = f"""SELECT k.id AS key_id, k.org_id::text AS org_id, k.project_id::text AS project_id, k.kind, k.scopes,
    k.models, k.networks::text[] AS networks, k.revoked_at IS NOT NULL AS revoked,
    (extract(epoch FROM k.expires_at) * 1000)::bigint AS expires_ms,
    o.plan, o.status <> 'active' AS suspended, o.weight, o.retention_days,
    (extract(epoch FROM statement_timestamp()) * 1000000)::bigint AS read_us,
    (SELECT json_agg(json_build_object('hmac', encode(s.secret_hmac, 'base64'), 'pepper_version', s.pepper_version,
        'expires_ms', (extract(epoch FROM s.expires_at) * 1000)::bigint)
        ORDER BY s.expires_at IS NOT NULL, s.created_at DESC)::text
      FROM key_secrets AS s WHERE {_GOOD}) AS secrets,
    (SELECT json_agg({quotas.LIMIT_JSON} ORDER BY scope)::text FROM (
      SELECT * FROM limits WHERE org_id = k.org_id AND scope IN ('key:' || k.id, 'project:' || k.project_id)
      UNION ALL SELECT * FROM limits WHERE org_id = k.org_id AND key_id IS NULL AND project_id IS NULL) AS l) AS limits
  FROM api_keys AS k JOIN organisations AS o ON o.id = k.org_id"""


def create_key(
    connection: Connection,
    *,
    org_id: str,
    project_id: str,
    name: str,
    pepper: Peppers | bytes,
    kind: Kind = "live",
    scopes: Collection[str] = (),
    models: Collection[str] = (),
    networks: Collection[str] = (),
    requests_per_minute: int | None = None,
    concurrent_requests: int | None = None,
    expires_at: datetime | None = None,
) -> tuple[str, KeyRow]:
    """A new key: its plain text, which nobody will see again, and its row. No scopes: those of its kind; no models:
    all; no networks: from anywhere. Its other limits are set in quotas.py.

    Raises:
      KeyRefused: the project is not the organisation's, or a value is not valid.
    """
    if not 1 <= len(name) <= NAME_MAX:
        raise KeyRefused(f"{name!r}: a name has 1 to {NAME_MAX} characters")
    key_id, plenty = _random(ID_LENGTH), peppers(pepper)
    plain = mint(kind, key_id)
    values = {
        "id": key_id, "org_id": org_id, "project_id": project_id, "name": name, "kind": kind, "last4": plain[-4:],
        "hmac": hashed(plain, plenty.current), "version": plenty.newest, "expires_at": expires_at,
        "scopes": _scopes(kind, scopes), "models": _models(models), "networks": _networks(networks),
    }  # fmt: skip
    own = {"requests_per_minute": requests_per_minute, "concurrent_requests": concurrent_requests}
    try:
        with connection.begin_nested():
            connection.execute(text(_INSERT_KEY), values)
            if asked := {name: value for name, value in own.items() if value is not None}:
                quotas.set_limits(connection, org_id, f"key:{key_id}", asked)
    except quotas.LimitRefused as e:
        raise KeyRefused(str(e)) from None
    except IntegrityError as e:
        raise KeyRefused(str(e.orig).partition("\n")[0]) from e
    return plain, show(connection, key_id)


#: The trigger `keep_secret` copies the secret to key_secrets, as it does for a release before that knows no such table.
_INSERT_KEY = """INSERT INTO api_keys (id, org_id, project_id, name, kind, last4, secret_hmac, pepper_version, scopes,
    models, networks, expires_at)
  VALUES (:id, :org_id, :project_id, :name, :kind, :last4, :hmac, :version, CAST(:scopes AS text[]),
    CAST(:models AS text[]), CAST(:networks AS cidr[]), :expires_at)"""


def _scopes(kind: str, wanted: Collection[str]) -> list[str]:
    """In one order.

    Raises:
      KeyRefused: a key of this kind may not do that.
    """
    may = SCOPES[kind]
    if foreign := sorted(set(wanted) - set(may)):
        raise KeyRefused(f"{kind} keys may be for {', '.join(may)}, and not for {', '.join(foreign)}")
    return [scope for scope in may if scope in wanted or not wanted]


def _models(names: Collection[str]) -> list[str]:
    """
    Raises:
      KeyRefused: what no model can be called, or too many.
    """
    if wrong := [name for name in names if not _MODEL.fullmatch(name)]:
        raise KeyRefused(f"{wrong[0]!r} is not a model's name")
    return _few(names)


def _networks(told: Collection[str]) -> list[str]:
    """As CIDR writes them; an address is a network of one.

    Raises:
      KeyRefused: one of them is none, or there are too many.
    """
    try:
        found = [ipaddress.ip_network(one) for one in told]
    except ValueError as e:
        raise KeyRefused(f"{e}; a network is written 10.0.0.0/8 or 2001:db8::/32") from None
    if any(isinstance(one, ipaddress.IPv6Network) and one.network_address.ipv4_mapped for one in found):
        raise KeyRefused("an IPv4 network is written as one, not inside IPv6")
    return _few([str(one) for one in found])


def _few(names: Collection[str]) -> list[str]:
    found = list(dict.fromkeys(names))
    if len(found) > NAMES_MAX:
        raise KeyRefused(f"a key is bound to {NAMES_MAX} of them at most, and these are {len(found)}")
    return found


def rotate(
    connection: Connection, key_id: str, *, pepper: Peppers | bytes, overlap: timedelta
) -> tuple[str, KeyRow, datetime]:
    """Give a key a new secret: its plain text, the key's row, and until when what was good before is so: `overlap` from
    now, by Postgres' clock, which also judges it. A secret that an earlier rotation ends sooner keeps to that. The
    caller projects the record once this is committed.

    Raises:
      KeyRefused: there is no such key, it is over, or has too many secrets; or the overlap is not 0 to OVERLAP_MAX.
    """
    if not timedelta() <= overlap <= OVERLAP_MAX:
        raise KeyRefused(f"an overlap is 0 to {OVERLAP_MAX / timedelta(hours=1):g} hours")
    kind = _rotatable(connection, key_id)
    if overlap:
        _one_more(connection, key_id)
    plain, plenty = mint(kind, key_id), peppers(pepper)
    values = {
        "id": key_id, "overlap": overlap, "last4": plain[-4:], "version": plenty.newest,
        "hmac": hashed(plain, plenty.current),
    }  # fmt: skip
    for query in _ROTATE:
        connection.execute(text(query), values)
    until = connection.execute(text("SELECT now() + CAST(:overlap AS interval)"), values).scalar_one()
    return plain, show(connection, key_id), until


#: The copy in api_keys is what the release before reads.
_ROTATE = (
    """UPDATE key_secrets SET expires_at = least(expires_at, now() + CAST(:overlap AS interval))
      WHERE key_id = :id""",
    """INSERT INTO key_secrets (secret_hmac, key_id, pepper_version, last4)
      VALUES (:hmac, :id, :version, :last4)""",
    "UPDATE api_keys SET secret_hmac = :hmac, pepper_version = :version, last4 = :last4 WHERE id = :id",
)


def _one_more(connection: Connection, key_id: str) -> None:
    """
    Raises:
      KeyRefused: as many secrets are good as may be; a shorter overlap would end none of them before this one begins.
    """
    query = text(f"""SELECT count(*) AS good, min(s.expires_at) AS first_end
      FROM key_secrets AS s, api_keys AS k WHERE k.id = :id AND {_GOOD}""")
    row = connection.execute(query, {"id": key_id}).mappings().one()
    if row["good"] >= SECRETS_MAX:
        raise KeyRefused(
            f"{SECRETS_MAX} secrets of this key are good already: wait until the first of them ends, at "
            f"{row['first_end']:%Y-%m-%d %H:%M:%S} UTC, or end them all at once with `--overlap 0h`"
        )


def _rotatable(connection: Connection, key_id: str) -> Kind:
    """The key's kind; nobody else changes the key before this transaction ends.

    Raises:
      KeyRefused: there is no such key, or it is over.
    """
    query = text(
        "SELECT kind, revoked_at IS NOT NULL OR expires_at <= now() AS over FROM api_keys WHERE id = :id FOR UPDATE"
    )
    row = connection.execute(query, {"id": key_id}).mappings().one_or_none()
    if row is None:
        raise _unknown(key_id)
    if row["over"]:
        raise KeyRefused(f"the key {key_id} is revoked or has expired, and stays so: create another")
    kind: Kind = row["kind"]
    return kind


def _unknown(key_id: str) -> KeyRefused:
    return KeyRefused(f"there is no key {key_id!r}; `forebay key list` shows their ids")


def mint(kind: Kind, key_id: str) -> str:
    """A key's plain text, with a new secret."""
    body = f"fb_{kind}_{key_id}_{_random(SECRET_LENGTH)}"
    return body + checksum(body)


def _random(length: int) -> str:
    return "".join(secrets.choice(_BASE62) for _ in range(length))


def revoke(connection: Connection, key_id: str, *, now: datetime, reason: str = "") -> KeyRecord:
    """End a key and all its secrets for good; the first time counts. The caller projects the record once this is
    committed.

    Raises:
      KeyRefused: there is no such key.
    """
    values = {"id": key_id, "now": now, "reason": reason}
    query = text("""UPDATE api_keys SET revoked_at = coalesce(revoked_at, :now),
      revoked_reason = coalesce(revoked_reason, :reason) WHERE id = :id""")
    if not connection.execute(query, values).rowcount:
        raise _unknown(key_id)
    connection.execute(text("UPDATE key_secrets SET expires_at = least(expires_at, now()) WHERE key_id = :id"), values)
    return _records(connection, "WHERE k.id = :wanted", key_id)[0]


def keys(connection: Connection, org_id: str | None = None) -> list[KeyRow]:
    """An organisation's keys or everybody's, oldest first."""
    query = text(f"""{_ROWS}
      WHERE CAST(:org_id AS uuid) IS NULL OR k.org_id = CAST(:org_id AS uuid) ORDER BY k.created_at, k.id""")
    return [KeyRow(**row) for row in connection.execute(query, {"org_id": org_id}).mappings()]


def show(connection: Connection, key_id: str) -> KeyRow:
    """One key.

    Raises:
      KeyRefused: there is no such key.
    """
    row = connection.execute(text(f"{_ROWS} WHERE k.id = :id"), {"id": key_id}).mappings().one_or_none()
    if row is None:
        raise _unknown(key_id)
    return KeyRow(**row)


def find(engine: Engine, key_id: str) -> KeyRecord | None:
    """A key's record, from Postgres.

    Raises:
      DatabaseAway: so the key cannot be judged.
    """
    with transaction(engine) as connection:
        found = _records(connection, "WHERE k.id = :wanted", key_id)
    return found[0] if found else None


def all_records(engine: Engine, org_id: str | None = None) -> list[KeyRecord]:
    """The record of each key of an organisation, or of everybody's; the revoked ones too."""
    with transaction(engine) as connection:
        if org_id is None:
            return _records(connection)
        return _records(connection, "WHERE k.org_id = CAST(:wanted AS uuid)", org_id)


def project_all(engine: Engine, store: Store, org_id: str | None = None) -> int:
    """Put all records of an organisation, or everybody's, where gateways look first: how many there are. Call it when
    limits, plan, status, weight or retention have changed, and that is committed."""
    records = all_records(engine, org_id)
    for start in range(0, len(records), RECORDS):
        store.run_all([project(record) for record in records[start : start + RECORDS]])
    return len(records)


def _records(connection: Connection, where: str = "", wanted: str = "") -> list[KeyRecord]:
    rows = connection.execute(text(f"{_RECORDS} {where}"), {"wanted": wanted} if where else {}).mappings()
    return [_record(dict(row)) for row in rows]


def _record(row: dict[str, Any]) -> KeyRecord:
    found = msgspec.json.decode(row.pop("secrets") or "[]", type=tuple[Secret, ...])
    newest = found[0] if found else _NONE  # all of a revoked key's have ended
    limits = msgspec.json.decode(row.pop("limits") or "[]", type=tuple[Limit, ...])
    own = next((limit for limit in limits if limit.scope == f"key:{row['key_id']}"), Limit(scope=""))
    row |= {name: tuple(row[name]) for name in ("scopes", "models", "networks")}
    return KeyRecord(
        **row,
        secret_hmac=newest.hmac,
        pepper_version=newest.pepper_version,
        older=found[1:],
        limits=limits,
        requests_per_minute=own.requests_per_minute,
        concurrent_requests=own.concurrent_requests,
    )


def project(record: KeyRecord) -> Call[bool]:
    """Put a record where gateways look first, unless one that was read later is there. False: a revoked one is, and
    stays."""
    args = (msgspec.msgpack.encode(record), int(record.revoked), RECORD_S, record.read_us)
    return Call(script=_SCRIPTS["project"], keys=(_key(record.key_id),), args=args, reply=bool)


def read(key_id: str) -> Call[KeyRecord | None]:
    """A key's record, or None when no gateway has seen it for RECORD_S."""
    return command("HGET", _key(key_id), "record", reply=_decoded)


def _decoded(raw: bytes | None) -> KeyRecord | None:
    return None if raw is None else msgspec.msgpack.decode(raw, type=KeyRecord)


def _key(key_id: str) -> str:
    return tag(f"key:{key_id}") + "record"
