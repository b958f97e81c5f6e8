"""The one gate: who is calling. For every transport, before anything else is looked at."""

from __future__ import annotations

import time

from core.accounts import keys
from core.accounts.keys import BadKey, KeyRecord, ParsedKey
from core.errors import AccountsDown, NotAllowed, StoreDown, Unauthenticated
from core.postgres import DatabaseAway, Engine
from core.redis import AWAY, Store
from core.telemetry import logs

log = logs.get(__name__)


class Gate:
    """Known keys are read from Redis; a key that Redis does not know is asked for in Postgres, once."""

    def __init__(self, store: Store, database: Engine, pepper: bytes) -> None:
        self.store, self.database, self.pepper = store, database, pepper

    def authenticate(self, authorization: str, *, admin: bool = False) -> KeyRecord:
        """The key behind a request.

        Raises:
          Unauthenticated: none, not ours, revoked or expired: the same answer for all.
          NotAllowed: an admin key that would generate, or a generating key that would administer.
          StoreDown, AccountsDown: it cannot be judged now.
        """
        parsed = _parsed(_bearer(authorization))
        record = self._record(parsed.key_id)
        # An unknown key is compared too, so that it takes as long as a wrong secret.
        known = keys.matches(parsed, record or _NOBODY, self.pepper)
        if record is None or not known or not record.usable(time.time_ns() // 1_000_000):
            raise Unauthenticated
        if (record.kind == "admin") != admin:
            raise NotAllowed("Admin keys cannot generate, and only they can administer.")
        return record

    def _record(self, key_id: str) -> KeyRecord | None:
        try:
            record = self.store.run(keys.read(key_id))
        except AWAY:
            raise StoreDown from None
        return record or self._ask(key_id)

    def _ask(self, key_id: str) -> KeyRecord | None:
        try:
            record = keys.find(self.database, key_id)
        except DatabaseAway:
            raise AccountsDown from None
        if record is not None:
            try:
                self.store.run(keys.project(record))
            except AWAY:
                log.warning("key_not_projected", key_id=key_id)
        return record


_NOBODY = KeyRecord(key_id="", org_id="", project_id="", secret_hmac=b"\0" * 32)


def _parsed(token: str) -> ParsedKey:
    try:
        return keys.parse(token)
    except BadKey:
        raise Unauthenticated from None  # in the same words as any other key that is not good


def _bearer(authorization: str) -> str:
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise Unauthenticated
    return token.strip()
