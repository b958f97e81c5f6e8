"""`Idempotency-Key`: a request that is sent again is shown again, and is not made a second time.

Whoever sends a key again, while the request runs or within 15 minutes of its end, is shown the one answer from its
beginning. The newest reader has the stream; those before it read on from what is saved (Subscriber.followed), so each
gets all of it, wherever it is connected. The request is cancelled when the last of them has gone. Refused requests, and
those that ended without an answer, free their key.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from core.accounts.keys import KeyRecord
from core.errors import BadRequest, ForebayError, Gone, KeyReused, LimitReached, NotFound, StoreDown, Unavailable
from core.limits import idempotency
from core.limits.idempotency import FRESH_MS, READERS_MAX, Name, Taken
from core.redis import AWAY, Store
from core.telemetry import logs
from core.values import ANSWERED
from tasks.queue import Seen
from web.admission import Admission, Admitted, Kept, new_id
from web.dialects.draft import Draft
from web.stream import Stream

log = logs.get(__name__)

Shown = TypeVar("Shown")

#: Characters of a key.
KEY_CHARS_MAX = 255
#: How long a request may take from its key to the queue before another who sends the key enqueues it, ms.
ADOPT_MS = 5_000
#: How long a key is waited for that is about to stand for something else, seconds, and how often it is looked at.
WAIT_S, LOOK_S = 30.0, 0.05


def checked(key: str) -> str:
    """A client's key.

    Raises:
      BadRequest: it is empty, too long or not printable ASCII.
    """
    if not 0 < len(key) <= KEY_CHARS_MAX or not key.isascii() or not key.isprintable():
        raise BadRequest(
            f"Invalid 'Idempotency-Key': it should be 1 to {KEY_CHARS_MAX} printable ASCII characters.",
            param="Idempotency-Key",
        )
    return key


def fingerprint(path: str, body: bytes) -> str:
    """What a request must have in common with the one that its key was first sent with."""
    return hashlib.sha256(path.encode() + b"\0" + body).hexdigest()


@dataclass
class Reader:
    """One connection that reads the answer a key stands for."""

    store: Store
    named: Name
    request_id: str
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    _others: bool | None = None

    def leave(self) -> bool:
        """It has gone, which counts once. True: others read on."""
        if self._others is None:
            self._others = False
            try:
                self._others = self.store.run(idempotency.leave(self.named, self.request_id, self.name)) > 0
            except AWAY:
                log.warning("leave_lost", request_id=self.request_id)
        return self._others


class Once:
    """Admits what comes with a key, or shows what it stands for."""

    def __init__(self, admission: Admission) -> None:
        self.admission, self.store = admission, admission.store
        self._beginning: set[str] = set()  #: requests that are being admitted in this process

    def admit(self, caller: KeyRecord, draft: Draft, transport: str, key: str, body: str) -> Admitted:
        """The request that the key stands for. `body`: its fingerprint.

        Raises:
          KeyReused: it stands for another body.
          ForebayError: it was refused; its key is free again.
        """
        if draft.model not in self.admission.catalog or self.admission.draining:
            return self.admission.admit(caller, draft, transport)  # which refuses it

        named = idempotency.name(caller.org_id, caller.key_id, checked(key))

        def begin(reader: Reader) -> Admitted:
            with self.admission.subscriber.sharing(reader.request_id):
                admitted = self.admission.admit(caller, draft, transport, request_id=reader.request_id, once=named.once)
                admitted.stream.leave = reader.leave
            return admitted

        def show(reader: Reader) -> Admitted | None:
            return self._show(caller, draft, reader)

        return self._resolve(named, body, begin, partial(self._fate, draft.model), show)

    def background(
        self,
        caller: KeyRecord,
        key: str,
        body: str,
        accept: Callable[[str], Shown],
        find: Callable[[str], Shown | None],
    ) -> Shown:
        """The same of what nobody waits for: accepted under an id, or found by it, for as long as it is stored."""

        def fate(taken: Taken) -> str:
            return self._unknown(taken) if find(taken.request_id) is None else "show"

        named = idempotency.name(caller.org_id, caller.key_id, checked(key))
        return self._resolve(
            named, body, lambda reader: accept(reader.request_id), fate, lambda reader: find(reader.request_id)
        )

    def _resolve(
        self,
        named: Name,
        body: str,
        begin: Callable[[Reader], Shown],
        fate: Callable[[Taken], str],
        show: Callable[[Reader], Shown | None],
    ) -> Shown:
        try:
            reader, replaced = Reader(self.store, named, new_id()), ""
            deadline_s = time.monotonic() + WAIT_S
            while time.monotonic() < deadline_s:
                taken = self.store.run(
                    idempotency.begin(named, reader.request_id, reader.name, body, instead_of=replaced)
                )
                if taken.mine:
                    return self._begin(reader, begin)
                if not taken.same:
                    raise KeyReused
                theirs = replace(reader, request_id=taken.request_id)
                match fate(taken):
                    case "show":
                        if (shown := show(theirs)) is not None:
                            return shown
                        replaced = taken.request_id
                    case "adopt":
                        reader = theirs if _joined(theirs) else reader
                    case "replace":
                        replaced = taken.request_id
                    case _:
                        time.sleep(LOOK_S)
        except AWAY:
            raise StoreDown from None
        raise Unavailable("The request that this Idempotency-Key stands for is beginning, or ending. Retry shortly.")

    def _fate(self, model: str, taken: Taken) -> str:
        """What to do about a request that another has begun."""
        seen: Seen = self.store.run(self.admission.subscriber.queues[model].peek(taken.request_id))
        if seen.state == "unknown":
            return self._unknown(taken)
        if seen.ending is not None:
            return "show" if seen.ending.outcome in ANSWERED else "replace"
        return "wait" if seen.cancelled else "show"

    def _unknown(self, taken: Taken) -> str:
        """Of one that is not there: not yet, not for long, or not any more."""
        if taken.age_ms >= FRESH_MS:
            return "replace"
        return "adopt" if taken.age_ms >= ADOPT_MS and taken.request_id not in self._beginning else "wait"

    def _begin(self, reader: Reader, begin: Callable[[Reader], Shown]) -> Shown:
        self._beginning.add(reader.request_id)
        try:
            return begin(reader)
        except ForebayError:
            self._free(reader)
            raise
        finally:
            self._beginning.discard(reader.request_id)

    def _free(self, reader: Reader) -> None:
        try:
            self.store.run(idempotency.free(reader.named, reader.request_id))
        except AWAY:
            log.warning("key_not_freed", request_id=reader.request_id)

    def _show(self, caller: KeyRecord, draft: Draft, reader: Reader) -> Admitted | None:
        """The stream of the request, brought here. None: it was forgotten, deleted or replaced."""
        if not _joined(reader):
            return None
        try:
            stream = _attached(self.admission, self.admission.recall(caller, reader.request_id, draft.dialect), reader)
        except ForebayError as e:
            reader.leave()
            if isinstance(e, NotFound | Gone):
                return None
            raise
        log.info("request_shown_again", request_id=reader.request_id)
        return Admitted(stream, (), 0, replayed=True)


def attach(admission: Admission, kept: Kept) -> Stream:
    """Bring a stream here for one who knows its request by name, and counts as a reader of its key, if it has one.

    Raises: as `Admission.attach`, and
      LimitReached: too many read it.
    """
    made, once = kept.view.caller, kept.view.once
    if not once or kept.seen.state == "ended":
        return admission.attach(kept)
    reader = Reader(admission.store, Name(org_id=made.org_id, key_id=made.key_id, once=once), kept.request.id)
    try:
        if not _joined(reader):
            return admission.attach(kept)
        return _attached(admission, kept, reader)
    except AWAY:
        raise StoreDown from None
    except ForebayError:
        reader.leave()
        raise


def _attached(admission: Admission, kept: Kept, reader: Reader) -> Stream:
    with admission.subscriber.sharing(reader.request_id):
        stream = admission.attach(kept)
        stream.leave = reader.leave
    return stream


def _joined(reader: Reader) -> bool:
    """Count it as a reader of its key. False: the key stands for another request now."""
    others = reader.store.run(idempotency.join(reader.named, reader.request_id, reader.name))
    if others == -2:
        message = f"{READERS_MAX} connections read the answer of this Idempotency-Key already."
        raise LimitReached(message, retry_after_ms=1_000)
    return bool(others >= 0)
