"""Responses mode over WebSocket: commands in, events out, lanes side by side (lanes.py decides whose turn it is).

The handler reads; what it starts is answered in greenlets of their own, one for each lane that is busy, and gone when
there is no work. So a closed socket or a `response.cancel` is seen at once, whatever is being generated.

`Sockets` looks after all of a process's connections once a second: pings, age, what became of their keys, their count.
Those of a key or an organisation that was stopped are ended sooner (web/stopping.py).

    1001  this gateway shuts down, or the connection is AGE_S old        the client connects again
    1008  key_revoked, invalid_api_key (it has expired),                 it does not
          organisation_suspended, or the client floods
    1009  a message is too large                                         clients fall back to HTTP on exactly this code
    1011  a fault of ours                                                it connects again
    1012  the gateway ended in the middle of an answer, which goes on:   `response.resume` at another gateway
    1013  pings were not answered. One that reads nothing for SEND_S is dropped: no close frame can reach it
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from itertools import chain
from typing import Any

import msgspec
import orjson
import simple_websocket

from core.accounts import keys, sockets
from core.accounts.keys import KeyRecord
from core.errors import (
    BadRequest,
    ForebayError,
    KeyRevoked,
    LimitReached,
    NotAllowed,
    OrganisationSuspended,
    RequestFailed,
    StoreDown,
    Unauthenticated,
    Unavailable,
    UnknownModel,
)
from core.limits import headers, scopes
from core.redis import AWAY, Store
from core.telemetry import logs
from core.values import Limit
from web.admission import Admission, Admitted, new_id
from web.auth import may_use
from web.dialects import commands, responses
from web.dialects.commands import Cancel, Create, Refused, Resume, Steer
from web.dialects.draft import Draft
from web.dialects.events import ResponsesAnswer
from web.dialects.framing import Comment, created_s
from web.history import History
from web.refusals import whose
from web.stream import Stream
from web.transports.http import events
from web.transports.lanes import Conversation, Lane, Lanes, Recent
from web.transports.safe_socket import GOING_AWAY, INTERNAL, POLICY

log = logs.get(__name__)

#: How old a connection may be, seconds; an answer that is under way then has AGE_GRACE_S more to be finished.
AGE_S, AGE_GRACE_S = 3600.0, 300.0
#: Sockets that one process holds: fewer than its connections, so that HTTP is served beside them.
SOCKETS_MAX = 9_000
#: How many a key may have open, if the settings do not say.
KEY_SOCKETS = 100
#: How often the sockets are looked after, seconds.
LOOK_S = 1.0
#: When to connect again where no seat is free, ms.
GUESS_MS = 10_000
#: How long the lanes of one that is stopped have to say so, before the connection does, seconds.
STOP_S = 0.25

_TERMINAL = frozenset({"response.completed", "response.incomplete", "response.failed"})

Asked = Create | Resume


class Socket:
    """One connection."""

    def __init__(
        self,
        ws: Any,
        admission: Admission,
        caller: KeyRecord,
        linger_ms: int = 0,
        *,
        history: History | None = None,
        model: str = "",
        seat: str = "",
    ) -> None:
        """`model`: the only one that may be used here. `seat`: what it is counted by."""
        self.ws, self.admission, self.caller, self.linger_ms = ws, admission, caller, linger_ms
        self.history, self.model, self.seat = history or History(admission), model, seat
        self._lanes: Lanes[Asked] = Lanes()
        self._recent = Recent()
        self._lock = threading.Lock()
        self._running: dict[Lane, Stream] = {}
        self._closed = self._stopping = False
        self._opened_s, self._aged = time.monotonic(), False

    @property
    def idle(self) -> bool:
        return self._lanes.idle

    def serve(self) -> None:
        """Read until the client is gone; then let go of what it asked for."""
        try:
            while True:
                self._obey(self.ws.receive())
        except (simple_websocket.ConnectionClosed, OSError):
            log.debug("socket_closed")
        except Exception:  # a fault of ours: Flask would answer it with an HTTP status, on top of the frames
            log.exception("socket_broken")
            self.close(INTERNAL, "a fault of ours")
        finally:
            self._leave()

    def close(self, code: int, why: str) -> None:
        """Say goodbye, and let go of what was asked for: at once, however long the client takes to answer."""
        try:
            self.ws.close(code, why)
        except (simple_websocket.ConnectionClosed, OSError):
            log.debug("socket_closed_first")
        self._leave()

    def stop(self, error: ForebayError) -> None:
        """Its key may not go on: each lane that is busy says so, then the connection, which is closed. Never waits; one
        whose client takes none of it is closed when it is stopped again."""
        why = error.error_code or error.type
        if self._stopping:
            self.close(POLICY, why)
            return
        self._closed = self._stopping = True
        with self._lock:
            self._lanes.clear()
            running = list(self._running.values())
        for stream in running:
            stream.break_off(error)
        threading.Thread(target=self._stop, args=(error, why), name="socket-stops", daemon=True).start()

    def _stop(self, error: ForebayError, why: str) -> None:
        until_s = time.monotonic() + STOP_S
        while self._running and time.monotonic() < until_s:
            time.sleep(0.01)
        self._send_quietly(commands.error_frame(error))
        self.close(POLICY, why)

    def tend(self, now_s: float) -> None:
        """Ping it, and end it when it is too old. Called now and then; never waits."""
        self.ws.tend(now_s)
        age_s = now_s - self._opened_s
        self._aged = age_s >= AGE_S
        if self._aged and not self._closed and (self.idle or age_s >= AGE_S + AGE_GRACE_S):
            self._closed = True
            threading.Thread(target=self._retire, name="socket-retires", daemon=True).start()

    def _retire(self) -> None:
        self._send_quietly(commands.error_frame(_too_old()))
        self.close(GOING_AWAY, "this connection is too old")

    # --- reading

    def _obey(self, frame: Any) -> None:
        if not isinstance(frame, str):
            self._send(commands.error_frame(BadRequest("Send text frames with JSON in them.", code="invalid_json")))
            return
        match command := commands.parse_event(frame):
            case Create() | Resume():
                self._line_up(command, len(frame))
            case Cancel():
                self._cancel(command)
            case Steer():
                self._send(commands.steer_failed(command))
            case Refused():
                self._recent.failed(command.stream_id, command.previous)
                self._send(commands.error_frame(command.error, command.stream_id))

    def _line_up(self, asked: Asked, size_bytes: int) -> None:
        if self._aged:
            self._send(commands.error_frame(_too_old(), asked.stream_id))
            return
        with self._lock:
            verdict = self._lanes.ask(asked.stream_id, asked, size_bytes)
        match verdict:
            case "start":
                self._start(asked)
            case "too many lanes":
                self._send(commands.error_frame(_too_many_lanes(), asked.stream_id))
            case "flood":
                self._send(commands.error_frame(_flooded(), asked.stream_id))
                self.close(POLICY, "too many responses wait on this connection")

    def _cancel(self, cancel: Cancel) -> None:
        for running in list(self._running.values()):
            if cancel.response_id == "resp_" + running.request.id.replace("-", ""):
                # Its ending tells the rest.
                self.admission.subscriber.cancel(running.request.id, running.request.model)
                return
        unknown = BadRequest("No such response is running here.", param="response_id", code="response_not_found")
        self._send(commands.error_frame(unknown, cancel.stream_id))

    def _leave(self) -> None:
        self._closed = True
        with self._lock:
            self._lanes.clear()
            running = list(self._running.values())
        for stream in running:
            stream.break_off(RequestFailed("The client went away.", code="client_gone"))
            self.admission.leave(stream)

    # --- answering

    def _start(self, asked: Asked) -> None:
        threading.Thread(target=self._answer_from, args=(asked,), name="socket-lane", daemon=True).start()

    def _answer_from(self, asked: Asked) -> None:
        """Answer this, and then what may begin after it."""
        begins = [asked]
        while begins:
            asked, *others = begins
            for other in others:
                self._start(other)
            try:
                self._answer(asked)
            finally:
                with self._lock:
                    begins = self._lanes.done(asked.stream_id)

    def _answer(self, asked: Asked) -> None:
        if self._closed:
            return
        try:
            if isinstance(asked, Create):
                self._create(asked)
            else:
                stream, framing = self.history.resumed(self.caller, asked.response_id, asked.starting_after)
                self._show(stream, events(stream, framing), asked.stream_id)
        except ForebayError as refused:
            self._send_quietly(commands.error_frame(refused, asked.stream_id))
        except (simple_websocket.ConnectionClosed, OSError):
            log.debug("answer_unheard")
        except Exception:  # the outermost edge of this greenlet: the connection must learn of it
            log.exception("answer_failed")
            self._send_quietly(commands.error_frame(ForebayError(), asked.stream_id))

    def _create(self, create: Create) -> None:
        lane = create.stream_id
        try:
            self._check_model(create.draft.model)
            draft, earlier = self._prepared(create.draft)
            turn = (earlier, draft)
            if not create.generate:
                request_id = new_id()
                unstored = msgspec.structs.replace(draft, store=False)
                self._tell(ResponsesAnswer(request_id, unstored, created_s(request_id)).warmed(), lane, turn)
                return
            admitted = self.admission.admit(self.caller, self._to_store(draft, earlier), "websocket")
        except ForebayError:
            self._recent.failed(lane, create.draft.previous)
            raise
        stream = admitted.stream
        said = chain(_left(admitted), events(stream, self.history.framing(stream, draft)))
        self._show(stream, said, lane, turn)

    def _prepared(self, draft: Draft) -> tuple[Draft, Conversation]:
        """The draft with the conversation that it goes on from, and that conversation: of this connection, or stored.
        A socket is itself what waits, so nothing here is done in the background."""
        previous = draft.previous
        echo = {**draft.echo, "background": False}
        draft = msgspec.structs.replace(draft, previous="", background=False, echo=echo, linger_ms=self.linger_ms)
        draft = self.history.prepared(self.caller, draft)
        if not previous:
            return draft, ()
        earlier = self._recent.find(previous)
        if earlier is None:
            earlier = (_encoded(self.history.before(self.caller, previous)),)
        items = [item for turn in earlier for item in json.loads(turn)]
        return responses.continued(msgspec.structs.replace(draft, previous=previous), items), earlier

    def _to_store(self, draft: Draft, earlier: Conversation) -> Draft:
        """What goes on from a response that is not stored is stored with all that came before it: by the name of that
        response nobody else would find it."""
        if not (draft.store and self._recent.only_here(draft.previous)):
            return draft
        before = [item for turn in earlier for item in json.loads(turn)]
        return msgspec.structs.replace(draft, previous="", items=[*before, *draft.items])

    def _check_model(self, name: str) -> None:
        if self.model not in ("", name):
            raise NotAllowed(f"This connection's client secret is for the model `{self.model}` only.", param="model")
        if name not in self.admission.catalog or not may_use(self.caller, name):
            raise UnknownModel(f"The model `{name}` does not exist, or this key may not use it.", param="model")

    def _show(
        self,
        stream: Stream,
        said: Iterator[Any],
        lane: Lane,
        turn: tuple[Conversation, Draft] | None = None,
    ) -> None:
        stream.reader = self.caller.key_id
        with self._lock:
            self._running[lane] = stream
        try:
            if not self._closed:
                self._tell(said, lane, turn)
        finally:
            with self._lock:
                del self._running[lane]
            self.admission.release(stream)

    def _tell(self, said: Iterator[Any] | list[Any], lane: Lane, turn: tuple[Conversation, Draft] | None) -> None:
        for event in said:
            if isinstance(event, Comment):  # sockets are kept by their pings
                continue
            if turn is not None and event["type"] in _TERMINAL:
                self._remember(*turn, lane, event)  # before it is told: the next turn may come on another lane
            self._send(event, lane)

    def _remember(self, earlier: Conversation, draft: Draft, lane: Lane, last: dict[str, Any]) -> None:
        if last["type"] == "response.failed":
            self._recent.failed(lane, draft.previous)
            return
        try:
            turn = _encoded([*draft.items, *last["response"]["output"]])
        except RecursionError:
            log.info("turn_too_deep")
        else:
            stored = last["response"]["store"]
            self._recent.keep(lane, last["response"]["id"], (*earlier, turn), stored=stored)

    def _send(self, event: dict[str, Any], stream_id: str | None = None) -> None:
        named = event if stream_id is None else {**event, "stream_id": stream_id}
        self.ws.send(orjson.dumps(named).decode())

    def _send_quietly(self, event: dict[str, Any]) -> None:
        try:
            self._send(event)
        except (simple_websocket.ConnectionClosed, OSError):
            log.debug("answer_unheard")


def _left(admitted: Admitted) -> Iterator[dict[str, Any]]:
    """What is left of its limits, as OpenAI tells it on a socket, before anything of the response."""
    event = headers.event(admitted.left, "event_" + new_id().replace("-", ""))
    if event is not None:
        yield event


class Sockets:
    """The open connections of one gateway process."""

    def __init__(self, store: Store, *, key_sockets: int = KEY_SOCKETS, most: int = SOCKETS_MAX) -> None:
        self.store, self.key_sockets, self.most = store, key_sockets, most
        self._open: set[Socket] = set()
        self._keeper: threading.Thread | None = None
        self._stayed_s = time.monotonic()

    def __iter__(self) -> Iterator[Socket]:
        return iter(list(self._open))

    def __len__(self) -> int:
        return len(self._open)

    def sit(self, caller: KeyRecord) -> str:
        """Take a seat for a socket that is about to be opened. It is given back by `discard`, or in SEAT_MS.

        Raises:
          LimitReached: its key, project or organisation has as many as it may.
          Unavailable: this process has.
          StoreDown: nobody can tell.
        """
        if len(self._open) >= self.most:
            raise Unavailable("This gateway has as many WebSockets as it can hold. Retry shortly.")
        seat, most = new_id(), self._most(caller)
        try:
            full = self.store.run(sockets.sit(caller.org_id, seat, most))
        except AWAY:
            raise StoreDown from None
        if full is None:
            return seat
        raise LimitReached(
            f"{whose(Limit(scope=full), '')} may have {most[full]} WebSockets open, and has. Connect again when one is "
            "closed; nobody knows when that is, and `retry-after` is a guess.",
            retry_after_ms=GUESS_MS,
            headers={"x-limit-scope": headers.kind(full)},
        )

    def _most(self, caller: KeyRecord) -> dict[str, int | None]:
        """How many each scope of a caller may have. A key always has a bound."""
        told = {limit.scope: limit.connections for limit in caller.limits}
        most = {scope: told.get(scope) for scope in _scopes(caller)}
        key = next(iter(most))
        return {**most, key: self.key_sockets if most[key] is None else most[key]}

    def add(self, socket: Socket) -> None:
        self._open.add(socket)
        if self._keeper is None:
            self._keeper = threading.Thread(target=self._keep, name="sockets", daemon=True)
            self._keeper.start()

    def discard(self, socket: Socket) -> None:
        self._open.discard(socket)
        caller = socket.caller
        try:
            self.store.run(sockets.leave(caller.org_id, _scopes(caller), socket.seat))
        except AWAY:
            log.info("seat_kept", key_id=caller.key_id)  # for SEAT_MS

    def _keep(self) -> None:
        while True:
            time.sleep(LOOK_S)
            try:
                self.look(time.monotonic())
            except AWAY as e:
                log.warning("sockets_look_failed", error=repr(e))
            except Exception:  # a fault of ours; sockets without a keeper would be worse than one that tries again
                log.exception("sockets_look_failed")

    def look(self, now_s: float) -> None:
        """Ping, end what is too old, and ask after the keys.

        Raises:
          AWAY: the store is; the pings are out by then.
        """
        for socket in self:
            socket.tend(now_s)
        self._check_keys()
        if now_s - self._stayed_s >= sockets.STAY_S:
            self._stay()
            self._stayed_s = now_s

    def _check_keys(self) -> None:
        """The limits of each are those of now, and so is what it may do."""
        by_key: dict[str, list[Socket]] = {}
        for socket in self:
            by_key.setdefault(socket.caller.key_id, []).append(socket)
        records = self.store.run_all([keys.read(key_id) for key_id in by_key])
        for record, some in zip(records, by_key.values(), strict=True):
            if record is None:
                continue
            error = _stopped(record)
            for socket in some:
                socket.caller = record
                if error is not None:
                    socket.stop(error)

    def _stay(self) -> None:
        """Say of all that they are open: one call an organisation."""
        open_in: dict[str, dict[str, list[str]]] = {}
        for socket in self:
            seats = open_in.setdefault(socket.caller.org_id, {})
            for scope in _scopes(socket.caller):
                seats.setdefault(scope, []).append(socket.seat)
        self.store.run_all([sockets.stay(org_id, seats) for org_id, seats in open_in.items()])


def _scopes(caller: KeyRecord) -> tuple[str, ...]:
    """Where its sockets are counted, narrowest first."""
    return scopes.of_key(caller.key_id), scopes.of_project(caller.project_id), scopes.ORGANISATION


def _stopped(record: KeyRecord) -> ForebayError | None:
    """What ends the sockets of a key; None: it is good."""
    if record.revoked:
        return KeyRevoked()
    if record.suspended:
        return OrganisationSuspended()
    return None if record.usable(time.time_ns() // 1_000_000) else Unauthenticated("This API key has expired.")


def _encoded(items: list[Any]) -> bytes:
    # ASCII, since what nobody reads of an item may hold half a surrogate pair.
    return json.dumps(items, separators=(",", ":")).encode()


def _too_old() -> BadRequest:
    return BadRequest(
        f"Responses websocket connection limit reached ({AGE_S / 60:.0f} minutes). "
        "Create a new websocket connection to continue.",
        code="websocket_connection_limit_reached",
    )


def _too_many_lanes() -> BadRequest:
    return BadRequest(
        "This connection has as many lanes as it may. Use one of them, or another connection.",
        param="stream_id",
        code="websocket_stream_limit_reached",
    )


def _flooded() -> BadRequest:
    return BadRequest("Too many responses wait on this connection.", code="too_many_pending_responses")
