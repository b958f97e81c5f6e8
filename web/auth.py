"""The one gate: who is calling. For every transport, before anything else is looked at."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import StrEnum
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from secrets import token_hex
from urllib.parse import unquote, urlsplit

from core.accounts import failures, keys, secrets
from core.accounts.keys import BadKey, KeyRecord, ParsedKey, Peppers
from core.accounts.secrets import Grant
from core.errors import (
    AccountsDown,
    BadRequest,
    NotAllowed,
    OrganisationSuspended,
    StoreDown,
    TooManyFailures,
    Unauthenticated,
)
from core.postgres import DatabaseAway, Engine
from core.redis import AWAY, Store
from core.telemetry import logs

log = logs.get(__name__)

Network = IPv4Network | IPv6Network

#: The subprotocols that a socket may be answered with. A page offers one of them beside its secret, which is never
#: chosen: browsers want one that was offered. "realtime" is what OpenAI's own clients offer.
SUBPROTOCOLS = ("responses", "realtime", "forebay")
#: Before a client secret among the subprotocols: ours, and what OpenAI's own clients write.
_BEFORE_SECRETS = ("forebay.secret.", "openai-insecure-api-key.")
_EXPOSED = re.compile(r"fb_(live|test|admin)_")


def credential(authorization: str, api_key: str) -> str:
    """What a request shows of its key. Anthropic's clients send it in a header of their own, `x-api-key`."""
    return authorization or (f"Bearer {api_key}" if api_key else "")


class Policy(StrEnum):
    """Who may call an endpoint. Each has one, in the table of web/app.py."""

    PUBLIC = "public"  #: everybody, without a key
    GENERATE = "generate"
    MODELS = "models.read"
    USAGE = "usage.read"
    ADMIN = "admin"
    SOCKET = "socket"  #: as GENERATE, at a handshake: by a key, or by a client secret

    @property
    def scope(self) -> str:
        """What a key must have been given for it."""
        return Policy.GENERATE.value if self is Policy.SOCKET else self.value


class Gate:
    """Known keys are read from Redis: one exchange, one HMAC. Postgres is asked before a key is called wrong, whatever
    is wrong with it, so that all that are wrong take one path: two looks, two HMACs, and a count of failures between.
    Past the bound of its address all of them take another one, which ends at the count: Postgres is not asked."""

    def __init__(
        self,
        store: Store,
        database: Engine,
        pepper: Peppers | bytes,
        *,
        seen: Callable[[ParsedKey, KeyRecord, str], None] = lambda parsed, record, address: None,
    ) -> None:
        """`seen` is told of each key that is let in, and from where."""
        self.store, self.database, self.pepper, self.seen = store, database, keys.peppers(pepper), seen

    def authenticate(self, authorization: str, *, policy: Policy = Policy.GENERATE, address: str = "") -> KeyRecord:
        """The key behind a request from an address.

        Raises:
          Unauthenticated: none, not ours, revoked or expired: the same answer for all.
          TooManyFailures: too many that were no good came from its address, and Redis does not know this one as good.
          OrganisationSuspended, NotAllowed: the key is good, but not for this.
          StoreDown, AccountsDown: it cannot be judged now.
        """
        parsed = _parsed(_bearer(authorization))
        known = self._read(parsed.key_id)
        record = self._vouched(known, parsed) or self._judged(known, parsed, address)
        check_address(record, address)
        check_allowed(record, policy)
        self.seen(parsed, record, address)
        return record

    def redeem(self, secret: str, *, address: str = "") -> tuple[KeyRecord, Grant]:
        """The key behind a client secret, which is used up by this. Its page may be anywhere: the key's networks bound
        where secrets are minted.

        Raises:
          Unauthenticated: it is none, was used before, is too old, or its key is not good any more.
          TooManyFailures: the same, where too many came from its address.
          OrganisationSuspended, NotAllowed: its key may not generate.
          StoreDown, AccountsDown: it cannot be judged now.
        """
        if not secrets.is_secret(secret):
            raise Unauthenticated(_BAD_SECRET)
        try:
            grant = self.store.run(secrets.take(secret))
        except AWAY:
            raise StoreDown from None
        record = self._record(grant.key_id) if grant else None
        if grant is None or record is None or not record.usable(_now_ms()):
            self._count(address)
            raise Unauthenticated(_BAD_SECRET)
        check_allowed(record, Policy.SOCKET)
        return record, grant

    def _judged(self, known: KeyRecord | None, parsed: ParsedKey, address: str) -> KeyRecord:
        """A key that Redis does not know as good. It counts as a failure before Postgres is asked, and no longer once
        that finds it good or is away: so Postgres is asked of no more keys than may fail, however many come at once.
        """
        attempt = self._count(address)
        try:
            found = self._good(known, parsed)
        except AccountsDown:
            self._forgive(address, attempt)
            raise
        if found is None:
            raise Unauthenticated
        self._forgive(address, attempt)
        return found

    def _good(self, known: KeyRecord | None, parsed: ParsedKey) -> KeyRecord | None:
        """The record of the very key, if it may be used. Each step is taken for every key that is no good."""
        fresh = self._vouched(self._find(parsed.key_id, known), parsed)
        if fresh is None or (known is not None and known.revoked):
            return None
        if self._keep(fresh):
            return fresh
        # What is there was read later, and may be of a key that was revoked meanwhile.
        return self._vouched(self._read(parsed.key_id), parsed)

    def _vouched(self, record: KeyRecord | None, parsed: ParsedKey) -> KeyRecord | None:
        """The record, if the key is the very one and good. One that there is not is compared too, so that it takes as
        long as a wrong secret."""
        matches = keys.matches(parsed, record, self.pepper)
        return record if matches and record is not None and record.usable(_now_ms()) else None

    def _count(self, address: str) -> str:
        """Count an attempt as failed: its name. Nobody is let in, or kept out, for want of a count.

        Raises:
          TooManyFailures: as many as may have failed.
        """
        attempt = token_hex(8)
        try:
            after_ms = self.store.run(failures.fail(self._address(address), attempt))
        except AWAY:
            log.warning("failure_not_counted")
            return attempt
        if after_ms:
            raise TooManyFailures(retry_after_ms=after_ms)
        return attempt

    def _forgive(self, address: str, attempt: str) -> None:
        """It did not fail after all."""
        try:
            self.store.run(failures.forgive(self._address(address), attempt))
        except AWAY:
            log.warning("failure_not_forgiven")

    def _address(self, address: str) -> str:
        return failures.name(_counted(address), self.pepper.current)

    def _record(self, key_id: str) -> KeyRecord | None:
        """A key's record, wherever it is."""
        if (record := self._read(key_id)) is not None:
            return record
        fresh = self._find(key_id, None)
        return fresh if fresh is None or self._keep(fresh) else self._read(key_id)

    def _read(self, key_id: str) -> KeyRecord | None:
        try:
            return self.store.run(keys.read(key_id))
        except AWAY:
            raise StoreDown from None

    def _find(self, key_id: str, known: KeyRecord | None) -> KeyRecord | None:
        """What Postgres knows. Without it what is known stands, and of what is not known nobody can tell."""
        try:
            return keys.find(self.database, key_id)
        except DatabaseAway:
            if known is None:
                raise AccountsDown from None
            return None

    def _keep(self, record: KeyRecord) -> bool:
        """Put a record where gateways look first. False: one that was read later is there."""
        try:
            return self.store.run(keys.project(record))
        except AWAY:
            log.warning("key_not_projected", key_id=record.key_id)
            return True


_BAD_SECRET = "The client secret is not valid: it opens one socket, within its time. Mint another."


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def check_allowed(record: KeyRecord, policy: Policy) -> None:
    """A good key may not do everything.

    Raises:
      OrganisationSuspended: nothing, at present.
      NotAllowed: an admin key that would generate, a generating key that would administer, or one without the scope.
    """
    if record.suspended:
        raise OrganisationSuspended
    if (record.kind == "admin") != (policy is Policy.ADMIN):
        raise NotAllowed("Admin keys cannot generate, and only they can administer.")
    if policy.scope not in record.scopes:
        raise NotAllowed(f"This API key lacks the scope `{policy.scope}`.", code="missing_scope")


def may_use(record: KeyRecord, model: str) -> bool:
    """Whether a key may use a model. One that it may not is to it as one that does not exist. Pure."""
    return not record.models or model in record.models


# --- addresses


def check_address(record: KeyRecord, address: str) -> None:
    """A key may be bound to networks.

    Raises:
      NotAllowed: it comes from elsewhere, or nobody can tell from where.
    """
    if record.networks and not _within(_address(address), [_network(one) for one in record.networks]):
        raise NotAllowed("This API key may not be used from this address.", code="address_not_allowed")


def peer(remote: str, forwarded: str, proxies: Sequence[Network]) -> str:
    """Where a request comes from: the peer of its connection; if that is a proxy of ours, who that says it was, and so
    on. What others say in `X-Forwarded-For` counts for nothing. Empty: nobody can tell.

    `remote`: the peer. `forwarded`: all of X-Forwarded-For, the nearest last.
    """
    address, hops = _address(remote), forwarded.split(",")
    while hops and _within(address, proxies):
        if (before := _address(hops.pop())) is None:
            break
        address = before
    return "" if address is None else str(address)


def networks(text: str) -> tuple[Network, ...]:
    """The networks of a list with commas.

    Raises:
      ValueError: one is none.
    """
    return tuple(_network(one.strip()) for one in text.split(",") if one.strip())


def _counted(address: str) -> str:
    """What failures are counted by: an IPv6 network of one customer has more addresses than there are keys."""
    found = _address(address)
    return str(ip_network((found, 64), strict=False)) if isinstance(found, IPv6Address) else address


def _address(text: str) -> IPv4Address | IPv6Address | None:
    """Proxies may write a port after it."""
    if found := _WITH_PORT.fullmatch(text.strip()):
        text = found[1] or found[2]
    try:
        address = ip_address(text.strip().partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


_WITH_PORT = re.compile(r"\[([^\]]*)\](?::\d+)?|([\d.]+):\d+")


@lru_cache(maxsize=4096)
def _network(text: str) -> Network:
    return ip_network(text)


def _within(address: IPv4Address | IPv6Address | None, of: Iterable[Network]) -> bool:
    return address is not None and any(address in network for network in of)


# --- what is shown


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
