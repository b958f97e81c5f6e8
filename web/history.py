"""Stored responses, as gateways use them: kept before their clients have the end, gone on from, shown, deleted.

What the queue remembers is shown from there (web/admission.py `recall`); what is older, or was kept, from Postgres.
No query runs between the tokens of a stream, and none takes longer than ANSWER_S from an answer: with Postgres away or
slow it goes out all the same, and says `store: false`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import gevent
import msgspec

from core import responses as table
from core.accounts.keys import KeyRecord
from core.errors import (
    BadRequest,
    ForebayError,
    Gone,
    HistoryDown,
    NotFound,
    RequestFailed,
    StoreDown,
    Unavailable,
)
from core.postgres import Connection, DatabaseAway, DBAPIError, Engine, transaction
from core.redis import AWAY
from core.responses import CONVERSATION_BYTES_MAX, TURNS_MAX, Stored, Turn
from core.stream.frames import Run
from core.stream.log import erase
from core.telemetry import logs, metrics
from core.values import Caller, Ending, Outcome, Usage
from tasks.queue import Queue, Seen
from web import bounds
from web.admission import Admission, Kept
from web.dialects import responses, view
from web.dialects.draft import STOP_CHARS_MAX, Draft
from web.dialects.events import Event
from web.dialects.framing import ResponsesFraming
from web.dialects.view import View
from web.stream import Stream
from web.transports.idempotency import attach

log = logs.get(__name__)

#: One statement may take so long, milliseconds,
STATEMENT_MS = 1_000
#: and everything that an answer waits for, seconds.
ANSWER_S = 1.0
#: Items longer than this are taken out of the store once they are in Postgres, bytes.
FEW_BYTES = 4_096
#: How long a cancelled response is waited for, seconds, and how often it is looked at.
CANCEL_S, LOOK_S = 5.0, 0.05
#: Input items in one page.
PAGE_MAX, PAGE = 100, 20

#: What of a Response object is not an echo of its request.
_FACTS = frozenset(
    {"id", "object", "created_at", "completed_at", "status", "error", "incomplete_details", "model", "output", "usage"}
)
#: An answer may have ended at a stop string, which its numbers count and a stored response does not tell of.
_UNKNOWN_STOP = Run("stop", " " * STOP_CHARS_MAX)
_OUTCOMES = {"completed": Outcome.COMPLETED, "incomplete": Outcome.LENGTH, "cancelled": Outcome.CANCELLED}

Response = dict[str, Any]


class KeptFraming(ResponsesFraming):
    """Of a response that is stored before its client has the end."""

    def __init__(self, request_id: str, shown: Draft | View, keep: Callable[[Response], Response], **at: int) -> None:
        super().__init__(request_id, shown, **at)
        self._keep = keep

    def ending(self, ending: Ending) -> list[Event]:
        events = list(super().ending(ending))
        if events:
            events[-1] = {**events[-1], "response": self._keep(events[-1]["response"])}
        return events

    def whole(self, runs: Any, ending: Ending) -> Response:
        return self._keep(super().whole(runs, ending))


class History:
    """The stored responses. Without a database there are none."""

    def __init__(self, admission: Admission, database: Engine | None = None) -> None:
        self.admission, self.database = admission, database
        self.store, self.queues = admission.store, admission.subscriber.queues

    # --- what a request asks of it

    def prepared(self, caller: KeyRecord, draft: Draft) -> Draft:
        """The draft with the conversation that it goes on from, and with the truth about what will be stored.

        Raises:
          BadRequest: there is no such conversation, or background work that may not be stored.
          HistoryDown: it cannot be read now.
        """
        if draft.store and not self.keeps(caller):
            draft = msgspec.structs.replace(draft, store=False, echo={**draft.echo, "store": False})
        if draft.background and not draft.store:
            raise BadRequest(
                "A background response is stored until it is fetched: it needs store=true, and an organisation that "
                "keeps responses.",
                param="background",
            )
        if draft.model in self.admission.catalog:  # the answer shows the tools that the model is given
            draft = msgspec.structs.replace(draft, tools=bounds.tools_for(self.admission.catalog[draft.model], draft))
        return self.continued(caller, draft)

    def continued(self, caller: KeyRecord, draft: Draft) -> Draft:
        """The draft with the conversation that it goes on from, or with the items that it names; raises as `before`."""
        if draft.previous:
            return responses.continued(draft, self.before(caller, draft.previous))
        return responses.continued(draft, [], self._named(caller, draft.refers)) if draft.refers else draft

    def _named(self, caller: KeyRecord, response_ids: Sequence[str]) -> list[Any]:
        """The items of responses. Those that are not there are missed by who needs them."""
        if not self.keeps(caller):
            return []
        if len(response_ids) > TURNS_MAX:
            raise BadRequest(f"The input names items of more than {TURNS_MAX} responses.", param="input")
        ids = [found for one in response_ids if (found := responses.request_id_of(one)) is not None]
        turns = self.read(partial(table.turns, project_id=caller.project_id, response_ids=ids))
        if _too_large(turns):
            raise BadRequest(f"The responses whose items the input names have {_TOO_LARGE}.", param="input")
        return [item for turn in turns for item in _said(turn)]

    def keeps(self, caller: KeyRecord) -> bool:
        return self.database is not None and caller.retention_days > 0

    def before(self, caller: KeyRecord, response_id: str) -> list[Any]:
        """The whole conversation up to and with a response: each turn's input items, then its output, oldest first.

        Raises:
          BadRequest: there is no such response for this caller, a part of its conversation is not kept any more, it has
            not ended, or it has too many turns.
          HistoryDown: it cannot be read now.
        """
        request_id = responses.request_id_of(response_id)
        if request_id is None or not self.keeps(caller):
            raise _no_previous(response_id)
        turns = self.read(partial(table.chain, project_id=caller.project_id, response_id=request_id))
        if len(turns) > TURNS_MAX:
            raise _bad_previous(
                f"The conversation before '{response_id}' has more than {TURNS_MAX} turns. Send its items as input.",
                "conversation_too_long",
            )
        if _too_large(turns):
            message = f"The conversation before '{response_id}' has {_TOO_LARGE}. Send what is needed of it as input."
            raise _bad_previous(message, "conversation_too_long")
        if not turns or turns[0].previous_id is not None:  # one without its beginning would be another conversation
            raise _no_previous(response_id)
        if turns[-1].status in table.OPEN:
            raise _bad_previous(f"Previous response with id '{response_id}' has not ended.", "previous_response_open")
        return [item for turn in turns for item in _said(turn)]

    # --- keeping

    def framing(self, stream: Stream, shown: Draft | View, **at: int) -> ResponsesFraming:
        """How a stream is said, so that its response is stored, if it is to be, before its client has the end."""
        found = view.decode(stream.view)
        if found.items is None:
            return ResponsesFraming(stream.request.id, shown, **at)
        return KeptFraming(stream.request.id, shown, partial(self.keep, stream.request.id, found), **at)

    def keep(self, request_id: str, shown: View, response: Response) -> Response:
        """Store a response that has ended. Returns it as its client shall see it, for it says whether it is stored.

        The answer goes out in any case.
        """
        if shown.items is None:
            return response
        try:
            kept = self.write(row_of(request_id, shown, response), shown.items)
        except (DatabaseAway, DBAPIError) as e:  # but not what it says, which may be the customer's words
            metrics.responses_unkept.inc()
            log.error("response_unkept", request_id=request_id, error=type(e).__name__)
            return response if shown.background else {**response, "store": False}
        if kept:
            metrics.responses_kept.inc()
            self._slim(request_id, shown)
        return response if kept else {**response, "store": False}

    def write(self, row: Stored, items: bytes, body: bytes | None = None) -> bool:
        """Write a row within ANSWER_S. False: it may not be kept.

        Raises:
          DatabaseAway: it may be written, and may be not.
        """
        assert self.database is not None
        with _within(ANSWER_S), transaction(self.database) as connection:
            return table.keep(connection, row, items.decode(), body)

    def _slim(self, request_id: str, shown: View) -> None:
        """What is in Postgres need not be in memory, too."""
        if len(shown.items or b"") <= FEW_BYTES:
            return
        try:
            self.store.run(self.queues[shown.model].show(request_id, view.encode(shown.kept())))
        except AWAY:
            log.warning("items_left", request_id=request_id)  # they go with the view, in 15 minutes

    # --- showing

    def show(self, caller: KeyRecord, response_id: str) -> Response:
        """A response as it is now.

        Raises:
          NotFound: there is none for this caller.
          StoreDown, HistoryDown: that cannot be told now.
        """
        request_id = _request_id(response_id)
        kept, fault = self._recall(caller, request_id)
        if kept is not None and kept.seen.state != "ended":
            return _so_far(kept)
        try:
            stored = self.find(caller, request_id)
        except HistoryDown:
            if kept is None:
                raise
            return _so_far(kept)
        if stored is not None and (kept is None or stored.ended):
            return _decoded(stored)
        if kept is None:
            raise fault
        # It ended and is not stored; background work soon will be.
        return _so_far(kept) if kept.view.background else {**_so_far(kept), "store": False}

    def find(self, caller: KeyRecord, request_id: str) -> Stored | None:
        """A response of the caller's project, from Postgres.

        Raises:
          HistoryDown: that cannot be told now.
        """
        if self.database is None:
            return None
        found: Stored | None = self.read(partial(table.find, project_id=caller.project_id, response_id=request_id))
        return found

    def resumed(self, caller: KeyRecord, response_id: str, after: int) -> tuple[Stream, ResponsesFraming]:
        """The stream of a response, brought here for a client that has everything up to a cursor.

        Raises:
          NotFound, Gone: there is no such stream for this caller.
          BadRequest: the cursor lies beyond its end, or it is not streamed.
        """
        kept = self.admission.recall(caller, _request_id(response_id), "responses")
        _check_streamed(kept.view.stream)
        responses.check_cursor(after, kept.runs, kept.seen.state == "ended")
        stream = attach(self.admission, kept)
        return stream, self.framing(stream, kept.view, after=after, delivered=kept.chars)

    def replayed(self, caller: KeyRecord, response_id: str, after: int) -> Iterator[Event] | None:
        """The events of a stored response whose stream is not kept any more. None: it is not stored.

        Raises:
          BadRequest: the cursor lies beyond its end, or it was not streamed.
          HistoryDown, Unavailable: it cannot be read now, or has not ended.
        """
        stored = self.find(caller, _request_id(response_id))
        if stored is None:
            return None
        _check_streamed(stored.streamed)
        if not stored.ended:
            raise Unavailable("The response is on its way back to the queue. Retry shortly.", retry_after_ms=1_000)
        response = _decoded(stored)
        runs = _runs(response["output"])
        responses.check_cursor(after, [*runs, _UNKNOWN_STOP], True)
        return _again(stored, response, runs, after)

    def unread(self, caller: KeyRecord, response: Response) -> Iterator[Event]:
        """The events of accepted background work that cannot be read from the queue: all of them if it is stored as it
        ended; else its name, and an error."""
        request_id = _request_id(response["id"])
        try:
            stored = self.find(caller, request_id)
        except HistoryDown:
            stored = None
        if stored is not None and stored.streamed and stored.ended:
            return _again(stored, found := _decoded(stored), _runs(found["output"]), -1)
        made = Caller(org_id=caller.org_id, project_id=caller.project_id, key_id=caller.key_id)
        shown = View(dialect="responses", model=response["model"], caller=made, echo=_echo_of(response))
        framing = ResponsesFraming(request_id, shown)
        away = RequestFailed("It goes on in the background, and cannot be streamed now: fetch it by its id.")
        return iter([*framing.answer.created(), *framing.failure(away)])

    def items(self, caller: KeyRecord, response_id: str) -> list[Any]:
        """The input items of a response.

        Raises:
          NotFound: there is none for this caller, or it is not stored.
          StoreDown, HistoryDown: that cannot be told now.
        """
        request_id = _request_id(response_id)
        kept, fault = self._recall(caller, request_id)
        if kept is not None and kept.view.items is not None:
            found: str | bytes | None = kept.view.items
        elif self.database is None:
            found = None
        else:
            found = self.read(partial(table.items, project_id=caller.project_id, response_id=request_id))
        if found is None:
            raise _absent() if kept is not None else fault
        return list(json.loads(found))

    # --- changing

    def delete(self, caller: KeyRecord, response_id: str) -> None:
        """Remove a response at once, here and from the queue. One that runs is cancelled.

        Raises:
          NotFound: there is none for this caller.
          StoreDown, HistoryDown: it may not be gone.
        """
        request_id = _request_id(response_id)
        kept, fault = self._recall(caller, request_id)
        if isinstance(fault, StoreDown):
            raise fault
        stored = self.find(caller, request_id)
        if stored is None and kept is None:
            raise fault
        if kept is not None:
            stored = stored or row_of(request_id, kept.view, {"status": "deleted"})
        assert stored is not None
        if self.database is not None:
            self.read(partial(table.delete, row=stored))
        self._erase(request_id, stored.model)

    def _erase(self, request_id: str, model: str) -> None:
        if (queue := self.queues.get(model)) is None:
            return
        try:
            self.store.run(queue.cancel(request_id))
            self.store.run_all([queue.hide(request_id), erase(model, request_id)])
        except AWAY:
            raise StoreDown("Its copy in the queue cannot be reached. Retry shortly.") from None

    def cancel(self, caller: KeyRecord, response_id: str) -> Response:
        """Stop a response that runs or waits. One that has ended is shown as it ended.

        Raises:
          NotFound: there is none for this caller.
          StoreDown, HistoryDown: it may go on.
        """
        request_id = _request_id(response_id)
        kept, fault = self._recall(caller, request_id)
        if isinstance(fault, StoreDown):
            raise fault
        if kept is None:
            self._cancel_unqueued(caller, request_id)
        elif kept.seen.state != "ended":
            self._cancel_queued(self.queues[kept.view.model], kept)
        return self.show(caller, response_id)

    def _cancel_queued(self, queue: Queue, kept: Kept) -> None:
        request_id = kept.request.id
        deadline_s = time.monotonic() + CANCEL_S
        try:
            self.store.run(queue.cancel(request_id))
            while (seen := self.store.run(queue.peek(request_id))).state in ("waiting", "running"):
                if time.monotonic() > deadline_s:
                    return
                time.sleep(LOOK_S)
        except AWAY:
            raise StoreDown from None
        log.info("response_cancelled", request_id=request_id)
        if kept.view.background and seen.ending is not None:
            self.collect(request_id, kept.view, seen)

    def _cancel_unqueued(self, caller: KeyRecord, request_id: str) -> None:
        """Background work that is on its way to the queue."""
        stored = self.find(caller, request_id)
        if stored is None or stored.ended:
            return
        row = msgspec.structs.replace(
            stored, status="cancelled", response=_encoded({**_decoded(stored), "status": "cancelled"})
        )
        self.read(partial(table.keep, row=row, items="[]"))
        try:
            if (queue := self.queues.get(stored.model)) is not None:
                self.store.run(queue.cancel(request_id))
        except AWAY:
            log.warning("cancel_lost", request_id=request_id)  # it is not fed to the queue again

    # --- background work

    def collect(self, request_id: str, shown: View, seen: Seen) -> bool:
        """Write down how background work ended, from what the queue has of it. False: not now.

        Raises:
          AWAY: the store is.
        """
        assert seen.ending is not None
        if shown.items is None:  # its reader has kept it
            return True
        output = self.admission.subscriber.filler.read(shown.model, request_id)
        response = ResponsesFraming(request_id, shown).so_far(output.runs, False, seen.ending)
        row = row_of(request_id, shown, response)
        try:
            kept = self.write(row, shown.items)
        except DatabaseAway as e:
            log.warning("background_uncollected", request_id=request_id, error=str(e))
            return False
        if kept:
            self._slim(request_id, shown)
        return True

    # ---

    def _recall(self, caller: KeyRecord, request_id: str) -> tuple[Kept | None, ForebayError]:
        """What the queue has of it, or what to say if it is nowhere else either."""
        try:
            return self.admission.recall(caller, request_id, "responses"), _absent()
        except StoreDown as e:
            return None, e
        except (NotFound, Gone):
            return None, _absent()

    def read(self, query: Callable[[Connection], Any]) -> Any:
        """What a query in a transaction of its own returns.

        Raises:
          HistoryDown: nothing is known to be changed.
        """
        assert self.database is not None
        try:
            with _within(2 * ANSWER_S), transaction(self.database) as connection:
                return query(connection)
        except DatabaseAway:
            raise HistoryDown from None


@contextmanager
def _within(limit_s: float) -> Iterator[None]:
    """Raises DatabaseAway when it takes longer, under gevent; elsewhere each statement has its own bound."""
    timer = gevent.Timeout(limit_s)
    try:
        with timer:
            yield
    except gevent.Timeout as late:
        if late is not timer:
            raise
        raise DatabaseAway(f"it took longer than {limit_s} s") from None


def row_of(request_id: str, shown: View, response: Response) -> Stored:
    """The row of a response."""
    made = shown.caller
    return Stored(
        id=request_id,
        org_id=made.org_id,
        project_id=made.project_id,
        key_id=made.key_id,
        model=shown.model,
        status=response["status"],
        previous_id=responses.request_id_of(shown.previous),
        streamed=shown.stream,
        background=shown.background,
        response=_encoded(response),
    )


def page(items: list[Any], *, limit: int, after: str | None, order: str) -> Response:
    """One page of a response's input items. `items` as they were given: what has no id gets one from its place.

    Raises:
      BadRequest: no item has the id `after`.
    """
    listed = items if order == "asc" else items[::-1]
    if after is not None:
        places = [at for at, item in enumerate(listed) if item["id"] == after]
        if not places:
            raise BadRequest("Invalid 'after': no input item of this response has that id.", param="after")
        listed = listed[places[0] + 1 :]
    shown = listed[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(listed) > limit,
    }


_PREFIXES = {"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def listed(response_id: str, items: list[Any]) -> list[Any]:
    """Input items as they are listed: each with a type and an id, and content in parts."""
    code = response_id.removeprefix("resp_")
    return [_listed(code, place, item) for place, item in enumerate(items) if isinstance(item, dict)]


def _listed(code: str, place: int, item: dict[str, Any]) -> dict[str, Any]:
    kind = item.get("type") or "message"
    whole = {**item, "type": kind, "id": item.get("id") or f"{_PREFIXES.get(kind, 'msg')}_{code}{place:04d}"}
    if kind == "message":
        whole.setdefault("status", "completed")
        if isinstance(content := item.get("content"), str):
            part = "output_text" if item.get("role") == "assistant" else "input_text"
            more: dict[str, Any] = {"annotations": [], "logprobs": []} if part == "output_text" else {}
            whole["content"] = [{"type": part, "text": content, **more}]
    return whole


_TOO_LARGE = f"more than {CONVERSATION_BYTES_MAX // 2**20} MiB"


def _too_large(turns: Sequence[Turn]) -> bool:
    return any(turn.whole_bytes > CONVERSATION_BYTES_MAX for turn in turns)


def _said(turn: Turn) -> list[Any]:
    output: list[Any] = json.loads(turn.response)["output"]
    return [*json.loads(turn.items), *output]


def _so_far(kept: Kept) -> Response:
    framing = ResponsesFraming(kept.request.id, kept.view)
    return framing.so_far(kept.runs, kept.seen.state == "waiting", kept.seen.ending)


def _again(stored: Stored, response: Response, runs: list[Run], after: int) -> Iterator[Event]:
    """The events of a response, from the object that they came to: one delta for each run."""
    made = ResponsesFraming(stored.id, _shown_again(stored, _echo_of(response)), after=after)
    for said in (made.began(), made.running()):
        yield from (event for event in said if isinstance(event, dict))
    for run in runs:
        yield from made.text(run)
    last = list(made.ending(_ending(stored, response)))
    for event in last:
        yield {**event, "response": response} if "response" in event else event


def _echo_of(response: Response) -> dict[str, Any]:
    return {name: value for name, value in response.items() if name not in _FACTS}


def _shown_again(stored: Stored, echo: dict[str, Any]) -> View:
    made = Caller(org_id=stored.org_id, project_id=stored.project_id, key_id=stored.key_id)
    return View(dialect="responses", model=stored.model, caller=made, echo=echo)


def _ending(stored: Stored, response: Response) -> Ending:
    told = response["usage"] or {"input_tokens": 0, "output_tokens": 0}
    usage = Usage(input_tokens=told["input_tokens"], output_tokens=told["output_tokens"])
    fault = response["error"] or {}
    outcome = _OUTCOMES.get(stored.status, Outcome.FAILED)
    return Ending(id=stored.id, attempt=1, outcome=outcome, usage=usage, message=fault.get("message", ""))


def _runs(output: list[dict[str, Any]]) -> list[Run]:
    """The runs that an output was made of."""
    runs: list[Run] = []
    for item in output:
        match item["type"]:
            case "function_call":
                calls = sum(run.kind.startswith("call:") for run in runs)
                runs += [Run(f"call:{calls}", item["name"]), Run(f"arguments:{calls}", item["arguments"])]
            case "reasoning":
                runs.append(Run("reasoning", "".join(part["text"] for part in item.get("content") or [])))
            case _:
                runs.append(Run("text", "".join(part.get("text", "") for part in item.get("content") or [])))
    return [run for run in runs if run.text]


def _encoded(response: Response) -> str:
    return json.dumps(response, separators=(",", ":"))


def _decoded(stored: Stored) -> Response:
    found: Response = json.loads(stored.response)
    return found


def _check_streamed(streamed: bool) -> None:
    if not streamed:
        raise BadRequest("Only a response that was created with stream=true can be streamed.", param="stream")


def _request_id(response_id: str) -> str:
    request_id = responses.request_id_of(response_id)
    if request_id is None:
        raise _absent()
    return request_id


def _absent() -> NotFound:
    return NotFound("There is no such response, or it is another project's.")


def _no_previous(response_id: str) -> BadRequest:
    return _bad_previous(f"Previous response with id '{response_id}' not found.", "previous_response_not_found")


def _bad_previous(message: str, code: str) -> BadRequest:
    return BadRequest(message, param="previous_response_id", code=code)
