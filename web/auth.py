"""The one gate: who is calling. For every transport, before anything else is looked at."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Sequence
from urllib.parse import unquote, urlsplit

from core.accounts import keys, secrets
from core.accounts.keys import BadKey, KeyRecord, ParsedKey
from core.accounts.secrets import Grant
from core.errors import AccountsDown, BadRequest, NotAllowed, StoreDown, Unauthenticated
from core.postgres import DatabaseAway, Engine
from core.redis import AWAY, Store
from core.telemetry import logs

log = logs.get(__name__)

#: The subprotocols that a socket may be answered with. A page offers one of them beside its secret, which is never
#: chosen: browsers want one that was offered. "realtime" is what OpenAI's own clients offer.
SUBPROTOCOLS = ("responses", "realtime", "forebay")
#: Before a client secret among the subprotocols: ours, and what OpenAI's own clients write.
_BEFORE_SECRETS = ("forebay.secret.", "openai-insecure-api-key.")
_EXPOSED = re.compile(r"fb_(live|test|admin)_")


def credential(authorization: str, api_key: str) -> str:
    """What a request shows of its key. Anthropic's clients send it in a header of their own, `x-api-key`."""
    return authorization or (f"Bearer {api_key}" if api_key else "")


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

    def redeem(self, secret: str) -> tuple[KeyRecord, Grant]:
        """The key behind a client secret, which is used up by this.

        Raises:
          Unauthenticated: it is none, was used before, is too old, or its key is not good any more.
          StoreDown, AccountsDown: it cannot be judged now.
        """
        try:
            grant = self.store.run(secrets.take(secret)) if secrets.is_secret(secret) else None
        except AWAY:
            raise StoreDown from None
        record = self._record(grant.key_id) if grant else None
        if grant is None or record is None or not record.usable(time.time_ns() // 1_000_000):
            raise Unauthenticated("The client secret is not valid: it opens one socket, within its time. Mint another.")
        return record, grant

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


def secret_of(protocols: Sequence[str]) -> str | None:
    """The client secret among the subprotocols that a page offers.

    Raises:
      BadRequest: nothing beside it can be chosen.
    """
    found = [name.removeprefix(before) for before in _BEFORE_SECRETS for name in protocols if name.startswith(before)]
    if not found:
        return None
    if not any(name in SUBPROTOCOLS for name in protocols):
        raise BadRequest(f"Offer one of the subprotocols {', '.join(SUBPROTOCOLS)} beside the secret.")
    return found[0]


def check_unexposed(shown: Sequence[str]) -> None:
    """Addresses and subprotocols are logged on their way, and a page's are anybody's: no key may be in them.

    Raises:
      Unauthenticated: one is.
    """
    if any(_EXPOSED.search(unquote(text)) for text in shown):
        raise Unauthenticated(
            "A long-lived API key must not be in an address or a subprotocol, where others see it: revoke this one. "
            "A page opens a socket with a client secret; POST /v1/client_secrets mints one.",
            code="key_exposed",
        )


def check_origin(origin: str | None, host: str, allowed: Collection[str]) -> None:
    """A browser says which page opens a socket. That of our own host may, and those that are named; others say nothing.

    Raises:
      NotAllowed: another page.
    """
    if origin is None or "*" in allowed or origin.lower() in allowed:
        return
    if urlsplit(origin).netloc.lower() != host.lower():
        raise NotAllowed("Pages of this origin may not open WebSockets here.", code="origin_not_allowed")
