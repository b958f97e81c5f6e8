"""Background work at a gateway: committed before it is accepted, then fed to the queue, its end written down.

A gateway looks every LOOK_S after what it has accepted itself, in the queue alone; and every SWEEP_S after whatever is
in the backlog (core/responses.py) and nobody has looked at for REST_S, which is how the work of a gateway that died is
found. All of it may be done twice, or by two gateways at once: the queue takes an id once, and a row ends once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial

import msgspec

from core import responses as table
from core.accounts.keys import KeyRecord
from core.errors import BadRequest, HistoryDown
from core.limits.scopes import Left
from core.postgres import DatabaseAway, DBAPIError
from core.redis import AWAY, RedisError
from core.telemetry import logs, metrics
from core.values import Class, Request
from tasks.queue import Accepted, Seen, generation
from web.dialects import view
from web.dialects.draft import Draft
from web.dialects.framing import ResponsesFraming
from web.dialects.view import View
from web.history import History, Response, row_of

log = logs.get(__name__)

#: How often a gateway looks after what it has accepted, and after the backlog, seconds.
LOOK_S, SWEEP_S = 1.0, 5.0
#: A row that was looked at is left alone for so long, seconds.
REST_S = 5.0
#: Rows of the backlog that are looked at in one go.
SWEEP_ROWS = 200
#: Requests that a gateway looks after itself. What it accepts beyond them is found in the backlog.
KNOWN_MAX = 10_000
#: Refused requests of which it is not known whether they are in the backlog. Past it the oldest is forgotten: if it is
#: there, it runs.
DOUBTFUL_MAX = 10_000


class Feed(msgspec.Struct, frozen=True):
    """What the queue is given, as it is kept in the backlog."""

    request: Request
    view: bytes


class Backlog:
    """Accepts background work, and sees to its end."""

    def __init__(self, history: History) -> None:
        self.history, self.admission, self.store = history, history.admission, history.store
        self.queues = history.queues
        self._known: dict[str, str] = {}  #: request -> model: accepted here, and not seen to end
        self._doubtful: dict[str, str] = {}  #: request -> model: refused, but perhaps committed
        self._closed = False

    def accept(
        self, caller: KeyRecord, draft: Draft, request_id: str | None = None
    ) -> tuple[Request, tuple[Left, ...], Response]:
        """Take background work: it is in Postgres when this returns, and ends whatever dies. With what is left of its
        limits, and the queued object.

        Raises:
          HistoryDown: it cannot be written down, so nothing was accepted.
          ForebayError: as `Admission.admit`.
        """
        prepared = self.admission.prepare(caller, draft, request_id)
        request, shown = prepared.request, prepared.shown
        cls = Class.DEFAULT if draft.cls <= Class.INTERACTIVE else Class.BULK
        request = msgspec.structs.replace(request, gateway="", background=True, cls=cls, patience_ms=0, linger_ms=0)
        queued = ResponsesFraming(request.id, found := view.decode(shown)).so_far([], True, None)
        try:
            self._commit(request, found, queued, shown)
            self._put(request, shown)
        except BaseException:
            self.admission.forgo(request)
            raise
        self.admission.note(caller, request, "background")
        if len(self._known) < KNOWN_MAX:
            self._known[request.id] = request.model
        return request, prepared.left, queued

    def _commit(self, request: Request, shown: View, queued: Response, raw: bytes) -> None:
        body = msgspec.msgpack.encode(Feed(request, raw))
        try:
            kept = self.history.write(row_of(request.id, shown, queued), shown.items or b"[]", body)
        except DatabaseAway:
            self._doubt(request)
            raise HistoryDown from None
        if not kept:
            raise BadRequest("Your organisation keeps no responses, which background needs.", param="background")

    def _put(self, request: Request, shown: bytes) -> None:
        """Onto the queue. If that is away, it is fed from the backlog later; if it is full, or an operator has stopped
        such work, nothing was accepted."""
        try:
            accepted: Accepted = self.store.run(self.queues[request.model].enqueue(generation(request, shown)))
        except (*AWAY, RedisError) as e:
            log.warning("background_not_queued", request_id=request.id, error=repr(e))
            return
        if accepted.refused:
            self._doubt(request)
            self._withdraw()
            if request.id not in self._doubtful:
                raise self.admission.full(request, accepted)
            del self._doubtful[request.id]  # it stays: there will be room
        elif accepted.status == "accepted" and not accepted.alive:
            self.admission.want(request.model)

    def _doubt(self, request: Request) -> None:
        while len(self._doubtful) >= DOUBTFUL_MAX:
            self._doubtful.pop(next(iter(self._doubtful)))
        self._doubtful[request.id] = request.model

    # --- the loop

    def start(self) -> None:
        threading.Thread(target=self._forever, name="backlog", daemon=True).start()

    def stop(self) -> None:
        self._closed = True

    def _forever(self) -> None:
        swept_s = time.monotonic()
        while not self._closed:
            time.sleep(LOOK_S)
            try:
                self._withdraw()
                self.look(list(self._known.items()))
                if time.monotonic() - swept_s >= SWEEP_S:
                    swept_s = time.monotonic()
                    self.sweep()
            except (*AWAY, RedisError, HistoryDown) as e:
                log.warning("backlog_not_looked_after", error=repr(e))
            except DBAPIError as e:  # but not what it says, which may be the customer's words
                log.error("backlog_refused", error=type(e).__name__)
            except Exception:  # a fault of ours; without this loop no background work would end
                log.exception("loop_failed", loop="backlog")
                metrics.loops_failed.labels("backlog").inc()

    def _withdraw(self) -> None:
        """Take out of the backlog what was refused and may be in it; another gateway may have fed it by now."""
        for request_id, model in list(self._doubtful.items()):
            try:
                self.history.read(partial(table.withdraw, response_id=request_id))
            except HistoryDown:
                return
            self._cancel(request_id, model)
            self._doubtful.pop(request_id, None)

    def _cancel(self, request_id: str, model: str) -> None:
        self.admission.subscriber.cancel(request_id, model, anywhere=True)

    def sweep(self) -> None:
        """Look after what nobody else looks after."""
        while not self._closed:
            due = self.history.read(partial(table.due, rest_s=REST_S, limit=SWEEP_ROWS))
            self.look([(row.id, row.model) for row in due])
            if len(due) < SWEEP_ROWS:
                return

    def look(self, work: Sequence[tuple[str, str]]) -> None:
        """What has ended is written down; what the queue does not know is fed to it."""
        for model in {model for _, model in work}:
            ids = [request_id for request_id, of in work if of == model]
            if (queue := self.queues.get(model)) is None:
                log.error("backlog_without_model", model=model, requests=len(ids))
                continue
            for start in range(0, len(ids), SWEEP_ROWS):
                some = ids[start : start + SWEEP_ROWS]
                self._looked(model, zip(some, self.store.run_all([queue.peek(one) for one in some]), strict=True))

    def _looked(self, model: str, work: Iterable[tuple[str, Seen]]) -> None:
        for request_id, seen in work:
            try:
                if seen.state == "unknown":
                    self._feed(request_id)
                elif seen.ending is not None:
                    self._collect(request_id, model, seen)
            except (*AWAY, RedisError, HistoryDown):
                raise
            except DBAPIError as e:  # but not what it says, which may be the customer's words
                log.error("backlog_refused", request_id=request_id, error=type(e).__name__)
                self._known.pop(request_id, None)
            except Exception:  # a fault of ours in one must not keep all that come after it from their ends
                log.exception("background_not_looked_after", request_id=request_id)
                metrics.loops_failed.labels("backlog").inc()
                self._known.pop(request_id, None)  # the next look after the backlog finds it

    def _feed(self, request_id: str) -> None:
        """The queue has not had it, or has lost it."""
        feed = self._body(request_id)
        if feed is None:
            self._known.pop(request_id, None)  # it has ended, or is deleted
            return
        accepted: Accepted = self.store.run(
            self.queues[feed.request.model].enqueue(generation(feed.request, feed.view), again=True)
        )
        if accepted.status == "accepted":
            metrics.background_fed.inc()
            log.warning("background_fed", request_id=request_id)
            if self._body(request_id) is None:  # cancelled, deleted or withdrawn meanwhile, which found nothing queued
                self._cancel(request_id, feed.request.model)

    def _collect(self, request_id: str, model: str, seen: Seen) -> None:
        raw = self.store.run(self.queues[model].view(request_id))
        if raw is None and (feed := self._body(request_id)) is not None:
            raw = feed.view
        if raw is None or self.history.collect(request_id, view.decode(raw), seen):
            self._known.pop(request_id, None)

    def _body(self, request_id: str) -> Feed | None:
        raw = self.history.read(partial(table.body, response_id=request_id))
        return None if raw is None else msgspec.msgpack.decode(raw, type=Feed)
