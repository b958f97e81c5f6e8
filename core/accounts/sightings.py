"""When keys were last used and from where, and their secrets hashed anew with the newest pepper: off a request's path.

A gateway marks what it saw (`seen`: a look into a dict), and writes its marks down every WRITE_S, each key at most once
in NEWS_S. Tables: api_keys (last_used_at, last_used_from) and key_secrets (keys.py has both).

Promise   a request waits for none of it. A secret that was shown under an older pepper has the newest one's HMAC within
          NEWS_S, and its record within a minute more, when the clock projects it.
Dies      Postgres: the marks of that time are lost, and made again by the next use. The gateway: the same.
"""

from __future__ import annotations

import hmac
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from core.accounts import keys
from core.accounts.keys import KeyRecord, ParsedKey, Peppers
from core.postgres import Connection, DatabaseAway, Engine, text, transaction
from core.telemetry import logs, metrics

log = logs.get(__name__)

#: How often marks are written down, and how soon a key is marked again, seconds.
WRITE_S, NEWS_S = 5.0, 60.0
#: Keys that one gateway has marks of, in NEWS_S. More than that are not marked.
MARKS_MAX = 20_000


@dataclass(frozen=True)
class Rehash:
    """A secret's HMAC with an older pepper, and with the newest."""

    old: bytes
    new: bytes
    version: int


@dataclass(frozen=True)
class Mark:
    """A key was used."""

    key_id: str
    at: datetime
    address: str
    rehash: Rehash | None


class Sightings:
    """The marks of one gateway process."""

    def __init__(self, database: Engine, pepper: Peppers | bytes) -> None:
        self.database, self.peppers = database, keys.peppers(pepper)
        self._marked_s: dict[str, float] = {}  #: key -> when it was, by the process's own clock
        self._marks: list[Mark] = []
        self._closed = False

    def seen(self, parsed: ParsedKey, record: KeyRecord, address: str) -> None:
        """This key was let in, from an address (or "")."""
        now_s, known = time.monotonic(), self._marked_s
        if now_s - known.get(record.key_id, -NEWS_S) < NEWS_S or len(known) >= MARKS_MAX:
            return
        known[record.key_id] = now_s
        self._marks.append(Mark(record.key_id, datetime.now(UTC), address, self._rehash(parsed, record)))

    def _rehash(self, parsed: ParsedKey, record: KeyRecord) -> Rehash | None:
        """None: the newest pepper's HMAC is there already."""
        newest = self.peppers.newest
        for secret in record.secrets:
            pepper = self.peppers.secrets.get(secret.pepper_version)
            if pepper and hmac.compare_digest(secret.hmac, keys.hashed(parsed.text, pepper)):
                fresh = keys.hashed(parsed.text, self.peppers.current)
                return Rehash(secret.hmac, fresh, newest) if secret.pepper_version != newest else None
        return None

    def write(self) -> int:
        """Write the marks down: how many there were. Those that a database that is away does not take are lost.

        Raises:
          DatabaseAway: so they are.
        """
        marks, self._marks = self._marks, []
        old_s = time.monotonic() - NEWS_S
        self._marked_s = {key_id: at_s for key_id, at_s in list(self._marked_s.items()) if at_s > old_s}
        if marks:
            with transaction(self.database) as connection:
                _write(
                    connection, sorted(marks, key=lambda mark: mark.key_id)
                )  # one order, or two would wait in a ring
        return len(marks)

    # --- the loop

    def start(self) -> None:
        threading.Thread(target=self._forever, name="sightings", daemon=True).start()

    def stop(self) -> None:
        self._closed = True

    def _forever(self) -> None:
        while not self._closed:
            time.sleep(WRITE_S)
            try:
                self.write()
            except DatabaseAway as e:
                log.warning("sightings_lost", error=str(e))
            except Exception:  # a fault of ours; without this loop nobody would know which keys are in use
                log.exception("loop_failed", loop="sightings")
                metrics.loops_failed.labels("sightings").inc()


def _write(connection: Connection, marks: list[Mark]) -> None:
    values = {
        "ids": [mark.key_id for mark in marks],
        "at": [mark.at for mark in marks],
        "addresses": [mark.address or None for mark in marks],
        "news_s": NEWS_S,
    }
    for mark in marks:
        if again := mark.rehash:
            told = {"id": mark.key_id, "old": again.old, "new": again.new, "version": again.version}
            for query in _REHASH:
                connection.execute(text(query), told)
    connection.execute(text(_USED), values)


#: Who holds a row is writing the same of another gateway, or ends the key: it is passed over.
_USED = """WITH marks AS (
    SELECT id, at, CAST(address AS inet) AS address
    FROM unnest(CAST(:ids AS text[]), CAST(:at AS timestamptz[]), CAST(:addresses AS text[])) AS m (id, at, address)),
  free AS (
    SELECT k.id, m.at, m.address FROM api_keys AS k JOIN marks AS m ON m.id = k.id
    WHERE k.last_used_at IS NULL OR k.last_used_at <= m.at - make_interval(secs => :news_s)
    FOR UPDATE OF k SKIP LOCKED)
  UPDATE api_keys AS k SET last_used_at = free.at, last_used_from = free.address FROM free WHERE k.id = free.id"""
#: The copy in api_keys is what the release before reads; it is first, as in rotate and revoke.
_REHASH = (
    "UPDATE api_keys SET secret_hmac = :new, pepper_version = :version WHERE id = :id AND secret_hmac = :old",
    """UPDATE key_secrets SET secret_hmac = :new, pepper_version = :version
      WHERE secret_hmac = :old AND key_id = :id AND (expires_at IS NULL OR expires_at > now())""",
)
