"""The leash: what running requests have come to goes to the store of limits, and how far they may go comes back.

    each second     all that run: one call for each organisation, of counters.REPORT_MAX requests at most
    at a start      this one, beside its first step: one whose caller was stopped meanwhile ends within a round trip
    at its end of money  this one, and its answers wait: there may be more by now

Promise   no request puts more output than its money covers, to the token, all its answers together: its allowance is
          what admission said until a report says more, and only as much as was last asked for while one is under way.
          Requests of a key that was revoked, or an organisation that was suspended, end within a second or so.
          A rate limit ends nothing: what is beyond it is counted as debt, and logged.
Dies      the store of limits: requests go on, without reports, up to their allowances; who is at the end of its own
          asks for PATIENCE_S, and is stopped there. A worker: the next attempt goes on with the same hold and asks.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from core.limits import pace, scopes
from core.limits.counters import REPORT_MAX, Report, progress
from core.limits.counters import Leash as Told
from core.redis import AWAY, AsyncStore, RedisError
from core.telemetry import logs, metrics
from core.values import CALLER_STOPPED, Request, Usage
from tasks.runner import Held, Runner
from workers.engine import Piece
from workers.resume import Decode, Plan, said_until

log = logs.get(__name__)

#: How often all that run are reported, seconds.
BEAT_S = 1.0
#: Pause between tries while the store is away and somebody waits, seconds.
_PAUSE_S = 0.1
#: How long a request at the end of its money asks for more of a store that is away, seconds.
PATIENCE_S = 5.0
#: Output that no money bounds.
UNBOUND = 2**62
#: A pace is measured over at least so much, seconds: what comes in one burst says little.
_MARK_S = 0.5


class MoneySpent(Exception):
    """The request ends here: its money covers no more."""


@dataclass(eq=False)
class Lead:
    """One running attempt on the leash."""

    request: Request
    held: Held
    allowance: int  #: output in all that it may put
    begun_s: float = 0.0  #: when its first token came; 0: none has
    counted: bool = False  #: what of its prompt was cached is known
    mark_s: float = 0.0  #: since when its pace is measured, and its output then
    mark_tokens: int = 0
    needs: int = 0  #: output in all that waits for money
    debt_tokens: int = 0  #: beyond its limits, so far
    unheard: bool = False  #: the store said nothing when it was last asked: away, or it refused the report

    @property
    def bound(self) -> bool:
        """Money bounds it."""
        return self.request.allowance_tokens is not None

    @property
    def most_tokens(self) -> int:
        """Output of all its answers."""
        return self.request.width * self.request.sampling.max_tokens if self.request.task == "generate" else 0

    def begin(self, *, counted: bool) -> None:
        """The engine has given the first of an answer."""
        self.counted = counted
        if not self.begun_s:
            self.begun_s = self.mark_s = time.monotonic()
            self.mark_tokens = self.held.usage.output_tokens


@dataclass(eq=False)
class Leash:
    """Asks for all requests of one worker."""

    store: AsyncStore  #: of limits
    runner: Runner
    pace: float  #: tokens a second of the model's fastest answer
    leads: dict[Lead, None] = field(default_factory=dict)
    _due: dict[Lead, list[asyncio.Future[None]]] = field(default_factory=lambda: defaultdict(list))
    _woken: asyncio.Event = field(default_factory=asyncio.Event)
    _away: bool = False

    def follow(self, request: Request, held: Held) -> Lead:
        """An attempt begins. It is asked for at once, and nobody waits for that."""
        allowance = UNBOUND if request.allowance_tokens is None else request.allowance_tokens
        lead = Lead(request, held, allowance)
        self.leads[lead] = None
        self._ask_soon(lead)
        return lead

    def leave(self, lead: Lead) -> None:
        """It is over here."""
        del self.leads[lead]
        self._due.pop(lead, None)
        if lead.debt_tokens:
            log.info("limit_exceeded", request_id=lead.request.id, debt_tokens=lead.debt_tokens)

    async def covers(self, lead: Lead, tokens: int) -> bool:
        """Whether its money covers so many tokens of output in all. Asks, where it did not when it was last asked."""
        if tokens <= lead.allowance:
            return True
        lead.needs = max(lead.needs, tokens)
        lead.unheard = False
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await self._ask_soon(lead)
                return tokens <= lead.allowance
        lead.unheard = True
        return tokens <= lead.allowance

    def _ask_soon(self, lead: Lead) -> asyncio.Future[None]:
        asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._due[lead].append(asked)
        self._woken.set()
        return asked

    # --- the loop

    async def run(self) -> None:
        """The asking loop. A store that is away is asked again: at once for who waits, else with the next beat."""
        beat_s = time.monotonic()
        while True:
            all_due = time.monotonic() >= beat_s
            if all_due:
                beat_s = max(beat_s + BEAT_S, time.monotonic())
            if not await self.ask(all_due=all_due):
                await asyncio.sleep(_PAUSE_S)
            await self._until(beat_s)

    async def _until(self, due_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(due_s - time.monotonic(), 0)):
                await self._woken.wait()

    async def ask(self, *, all_due: bool = True) -> bool:
        """Report all that run, or those that ask. False: the store is away."""
        self._woken.clear()
        due, self._due = self._due, defaultdict(list)
        batches = list(_batches(self.leads if all_due else due))
        try:
            if batches:
                await self._report(batches)
        except AWAY as e:
            self._again(due)
            if not self._away:
                log.warning("limits_away", error=repr(e), requests=len(self.leads))
            self._away = True
            return False
        self._away = False
        for asked in (asked for askers in due.values() for asked in askers):
            if not asked.done():
                asked.set_result(None)
        return True

    def _again(self, due: dict[Lead, list[asyncio.Future[None]]]) -> None:
        """They were not told. Those that nobody waits for wait for the next beat."""
        for lead, askers in due.items():
            if lead.needs and lead in self.leads:
                self._due[lead] += askers
        if self._due:
            self._woken.set()

    async def _report(self, batches: list[list[Lead]]) -> None:
        now_s = time.monotonic()
        calls = [
            progress(batch[0].request.caller.org_id, [self._of(lead, now_s) for lead in batch]) for batch in batches
        ]
        try:
            replies = await self.store.run_all(calls)
        except RedisError as e:
            if isinstance(e, AWAY):
                raise
            await self._report_apart(batches, e)
            return
        for batch, leashes in zip(batches, replies, strict=True):
            for lead, told in zip(batch, leashes, strict=True):
                self._heed(lead, told)

    async def _report_apart(self, batches: list[list[Lead]], e: RedisError) -> None:
        """One call is refused: the others are not to go without, and its own were not told what they may."""
        if len(batches) == 1:
            log.error("report_refused", org_id=batches[0][0].request.caller.org_id, error=repr(e))
            for lead in batches[0]:
                lead.unheard = True
            return
        for batch in batches:
            await self._report([batch])

    def _of(self, lead: Lead, now_s: float) -> Report:
        """What one has come to. From here on it goes no further than the answer to this will surely let it."""
        request, output = lead.request, lead.held.usage.output_tokens
        tokens_s = self._pace(lead, output, now_s)
        left = max(lead.most_tokens - output, 0)
        money = 0
        if lead.bound:
            money = min(left, max(self._ahead(lead, tokens_s), lead.needs - output))
            lead.allowance = min(lead.allowance, output + money)
        key_id = request.caller.key_id
        return Report(
            request_id=request.id,
            key_id=key_id,
            scopes=scopes.names(request.scopes, key_id),
            usage=lead.held.usage if lead.counted else Usage(output_tokens=output),
            hold_tokens=pace.likely(tokens_s, left, _usual(lead, output)),
            pace=tokens_s,
            money_tokens=money,
        )

    def _pace(self, lead: Lead, output: int, now_s: float) -> float:
        """Tokens a second, of all its answers together."""
        model_pace = self.pace * lead.request.width
        if not lead.begun_s:
            return model_pace
        made, since_s = output - lead.held.cut, now_s - lead.mark_s
        last_s = since_s if since_s >= _MARK_S else 0.0
        tokens_s = pace.measured(model_pace, now_s - lead.begun_s, made, last_s, output - lead.mark_tokens)
        if last_s:
            lead.mark_s, lead.mark_tokens = now_s, output
        return tokens_s

    def _ahead(self, lead: Lead, tokens_s: float) -> int:
        """Output to have money held for: a window's, and at least what it can make until the next report comes."""
        least = self.pace * lead.request.width * pace.MARGIN_S
        return math.ceil(max(tokens_s * pace.WINDOW_S, least))

    def _heed(self, lead: Lead, told: Told) -> None:
        if told.debt_tokens:
            lead.debt_tokens += told.debt_tokens
            metrics.limits_debt_tokens.labels(lead.request.model).inc(told.debt_tokens)
        if lead.bound and told.open and told.allowance_tokens is not None:  # a hold that was lost is not without bounds
            lead.allowance = told.allowance_tokens
        if told.stopped and self.runner.held.get(lead.request.id) is lead.held:
            why = CALLER_STOPPED.get(told.stopped, "it was stopped")
            log.info("caller_stopped", request_id=lead.request.id, why=told.stopped)
            self.runner.let_go(lead.request.id, "cancelled", message=why)


def _batches(leads: Iterable[Lead]) -> Iterator[list[Lead]]:
    """As many at once as one call takes, of one organisation."""
    by_org: dict[str, list[Lead]] = defaultdict(list)
    for lead in leads:
        by_org[lead.request.caller.org_id].append(lead)
    for theirs in by_org.values():
        for at in range(0, len(theirs), REPORT_MAX):
            yield theirs[at : at + REPORT_MAX]


def _usual(lead: Lead, output: int) -> int:
    """What such answers still come to, where the client named no limit; one that is longer than usual has more to come
    all the same."""
    usual = lead.request.width * lead.request.usual_tokens
    return max(usual - output, 1) if usual else 0


class Purse:
    """What one answer has made, where money bounds its request: enough to end it inside a piece."""

    def __init__(self, leash: Leash, lead: Lead, decode: Decode, begun: Plan | None = None) -> None:
        """`begun`: delivered before, and gone on from."""
        self.decode = decode
        self.covers = partial(leash.covers, lead)
        self._tokens = list(begun.tokens) if begun else []
        self._texts = [decode(begun.tokens)[: begun.at]] if begun and begun.tokens else []

    def spend(self, piece: Piece) -> None:
        """The piece was handed on."""
        self._tokens += piece.tokens
        self._texts.append(piece.text)

    def said(self, piece: Piece, keep: int) -> str:
        """What the answer says beyond what was handed on, if of this piece's tokens the first `keep` count; less than
        0: as many of those before do not."""
        return said_until(self._tokens, "".join(self._texts), piece, keep, self.decode)


def ending_of(lead: Lead) -> str:
    """Why the money ended it, for people."""
    if lead.unheard:
        return "its money is used up, as far as was known: whether there is more could not be asked"
    return "its money is used up"
