"""The audit log: what operators changed, in a chain that shows if anybody changes the log.

| table     | writer                             | reader              | holds                                      |
|-----------|------------------------------------|---------------------|--------------------------------------------|
| audit_log | ops: each command that changes     | ops (forebay audit) | who did what to what, and when; prev_hash, |
|           | something, in the same transaction |                     | hash = SHA-256(prev_hash + canonical JSON) |

Promise   what is committed is in the log, and what is in the log is committed. Rows are never changed (a trigger), and
          who gets round that breaks the chain, which `verify` finds. One at a time appends, so the chain never forks
          and `n` is the order of the commits. A row's detail has named fields only, of plain values, and what looks
          like a secret is cut out of them: no key, client secret, HMAC or pepper is ever in it.
Dies      Postgres: nothing is changed, so nothing is missing here. A log cut off at its end is still a chain: keep the
          hash that `verify` tells elsewhere, and ask for it (`contains`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import msgspec

from core.errors import without_secrets
from core.postgres import Connection, lock, text

#: What the first row follows.
BEGINNING = bytes(32)
#: Rows that `verify` reads at a time.
PAGE = 1_000
#: A value is cut to so many characters.
VALUE_MAX = 500

#: The only fields that a detail may have. None of them is ever given a secret; a new one is added here, by name.
FIELDS = frozenset({
    "name", "kind", "project", "scopes", "models", "networks", "expires_at", "overlap_s", "reason", "weight",
    "retention_days", "plan", "status", "scope", "requests_per_minute", "tokens_per_minute", "input_tokens_per_minute",
    "output_tokens_per_minute", "concurrent_requests", "connections", "money_per_day", "money_per_month", "amount",
    "currency", "model", "class", "tier", "price_id", "input_per_mtok", "cached_input_per_mtok", "output_per_mtok",
    "effective_from", "last4", "ended",
})  # fmt: skip

Value = str | int | float | Decimal | datetime | None


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One row."""

    n: int
    at: datetime
    actor: str
    action: str
    subject: str
    org_id: str | None
    detail: dict[str, Any]
    prev_hash: bytes
    hash: bytes


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What there is of the log, and whether it is whole."""

    rows: int  #: that are linked, from the first on
    head: str  #: hash of the last of them, in hex
    broken_at: int | None = None  #: n of the first row that does not follow from the one before
    found: bool = True  #: the hash that was asked for is among them


def write(
    connection: Connection,
    *,
    actor: str,
    action: str,
    subject: str,
    org_id: str | None = None,
    **detail: Value | list[str] | tuple[str, ...],
) -> None:
    """Write down what this transaction does, last of all: nobody else appends until it has ended.

    `action` is noun.verb, as of the command ("key.rotate"); `subject` what it was done to ("key:ID"); an empty field of
    the detail is left out.

    Raises:
      ValueError: a field that is not one of FIELDS.
    """
    if unknown := set(detail) - FIELDS:
        raise ValueError(
            f"the audit log has no field {', '.join(sorted(unknown))}; name it in FIELDS if it is no secret"
        )
    row = {
        "actor": _plain(actor), "action": action, "subject": _plain(subject), "org_id": org_id,
        "detail": {name: _plain(value) for name, value in sorted(detail.items()) if value not in (None, "", [], ())},
    }  # fmt: skip
    lock(connection, "audit_log")
    prev_hash, at = connection.execute(text(_HEAD)).one()
    prev = bytes(prev_hash) if prev_hash else BEGINNING
    values = {
        **row,
        "at": at,
        "detail": json.dumps(row["detail"]),
        "prev": prev,
        "hash": _hash(prev, {**row, "at": at}),
    }
    connection.execute(text(_APPEND), values)


_HEAD = "SELECT (SELECT hash FROM audit_log ORDER BY n DESC LIMIT 1), clock_timestamp()"
_APPEND = """INSERT INTO audit_log (at, actor, action, subject, org_id, detail, prev_hash, hash)
  VALUES (:at, :actor, :action, :subject, CAST(:org_id AS uuid), CAST(:detail AS jsonb), :prev, :hash)"""
_ENTRIES = """SELECT n, at, actor, action, subject, org_id::text AS org_id, detail, prev_hash, hash FROM audit_log"""


def _plain(value: Any) -> Any:
    """A value as JSON keeps it exactly. A name or a reason may have been pasted, and a key with it: that is cut out."""
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, datetime):
        return value.astimezone(UTC).isoformat()
    told = f"{value:f}" if isinstance(value, Decimal) else f"{value:g}" if isinstance(value, float) else str(value)
    return without_secrets(told)[:VALUE_MAX]


def _hash(prev: bytes, row: Mapping[str, Any]) -> bytes:
    """The link: canonical JSON is sorted by name, without spaces, in UTF-8."""
    told = {name: row[name] for name in ("actor", "action", "subject", "org_id", "detail")}
    told["at"] = row["at"].astimezone(UTC).isoformat(timespec="microseconds")
    body = json.dumps(told, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(prev + body.encode()).digest()


def entries(connection: Connection, *, org_id: str | None = None, limit: int = 100) -> list[Entry]:
    """The newest, of one organisation or all, oldest first."""
    query = text(f"""SELECT * FROM ({_ENTRIES}
      WHERE CAST(:org_id AS uuid) IS NULL OR org_id = CAST(:org_id AS uuid) ORDER BY n DESC LIMIT :limit) AS newest
      ORDER BY n""")
    rows = connection.execute(query, {"org_id": org_id, "limit": limit}).mappings()
    return [_entry(dict(row)) for row in rows]


def verify(connection: Connection, *, contains: str = "") -> Verdict:
    """Follow the chain from its first row. `contains`: a hash that was the last one once, in hex."""
    head, rows, found = BEGINNING, 0, contains in ("", BEGINNING.hex())
    for entry in _all(connection):
        if entry.prev_hash != head or entry.hash != _hash(head, msgspec.structs.asdict(entry)):
            return Verdict(rows=rows, head=head.hex(), broken_at=entry.n, found=found)
        head, rows = entry.hash, rows + 1
        found = found or head.hex() == contains
    return Verdict(rows=rows, head=head.hex(), found=found)


def _all(connection: Connection) -> Iterator[Entry]:
    query, after = text(f"{_ENTRIES} WHERE n > :after ORDER BY n LIMIT {PAGE}"), 0
    while page := connection.execute(query, {"after": after}).mappings().all():
        yield from (_entry(dict(row)) for row in page)
        after = page[-1]["n"]


def _entry(row: dict[str, Any]) -> Entry:
    return Entry(**{**row, "prev_hash": bytes(row["prev_hash"]), "hash": bytes(row["hash"])})
