"""The ledger that every chaos run ends with: what was sent has ended once, and nothing is left of it.

sent     = ended, each with one usage entry and one terminal record
left     = nothing: no claim, no place in a line, no sum, no index
relayed <= billed <= emitted, and where they differ the request's outcome says why
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from core.redis import Store, command
from core.values import ANSWERED, Outcome, Usage
from tasks.queue import Queue

#: What must be empty when nothing is open.
EMPTY = {
    "ZCARD": ("waiting", "tenants", "claims", "deadlines", "delays", "held", "due", "homes"),
    "HLEN": ("tasks", "depths", "saving"),
}
#: Counters that go up and down again.
LEVEL = ("waiting0", "waiting1", "waiting2", "waiting3", "waiting_tokens", "waiting_preferred")
#: Outcomes after which a client may have been shown less than was billed: it was not there any more.
CUT_OFF = frozenset({Outcome.CANCELLED, Outcome.GATEWAY_LOST, Outcome.WORKER_LOST, Outcome.FAILED})
#: Those that a worker ends, when there is one, and says what it has made so far. Without one, nothing is billed.
STOPPED = frozenset({Outcome.CANCELLED, Outcome.GATEWAY_LOST})


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Of one request, where they were counted."""

    emitted: int  #: by engines, all attempts
    billed: int
    relayed: int  #: to its client
    left: bool = False  #: its client went away before the end, whether or not the engine had come to it


@dataclass
class Ledger:
    """What was found wrong, and how the requests ended."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def fault(self, wrong: bool, said: str) -> None:
        if wrong:
            self.faults.append(said)


def check(
    store: Store,
    queue: Queue,
    sent: Iterable[str],
    tokens: Mapping[str, Tokens] | None = None,
    entries: Mapping[str, int] | None = None,
) -> Ledger:
    """Compare what was sent with what the store says, when nothing is open any more. `entries`: the usage entries of
    each request, where they have been collected; without, they are still in the store."""
    ledger = Ledger()
    sent = set(sent)
    _endings(ledger, store, queue, sent, _entries(store, queue) if entries is None else entries)
    _left(ledger, store, queue)
    for request_id, counted in (tokens or {}).items():
        _tokens(ledger, store, queue, request_id, counted)
    return ledger


def _entries(store: Store, queue: Queue) -> Counter[str]:
    usage = command("XRANGE", queue.prefix + "usage", "-", "+", reply=list)
    return Counter(fields[b"id"].decode() for _, fields in store.run(usage))


def _endings(ledger: Ledger, store: Store, queue: Queue, sent: set[str], entries: Mapping[str, int]) -> None:
    """One terminal record and one usage entry for each; none for anything else."""
    ledger.fault(
        any(count > 1 for count in entries.values()), f"ended twice: {[i for i, n in entries.items() if n > 1]}"
    )
    ledger.fault(bool(sent - set(entries)), f"never ended: {sorted(sent - set(entries))}")
    ledger.fault(bool(set(entries) - sent), f"never sent: {sorted(set(entries) - sent)}")
    for request_id in sorted(sent):
        seen = store.run(queue.peek(request_id))
        ledger.fault(seen.ending is None, f"{request_id} is {seen.state}")
        ledger.outcomes[seen.ending.outcome if seen.ending else seen.state] += 1


def _left(ledger: Ledger, store: Store, queue: Queue) -> None:
    for verb, names in EMPTY.items():
        for name in names:
            left = store.run(command(verb, queue.prefix + name, reply=int))
            ledger.fault(left > 0, f"{left} left in {name}")
    counters = store.run(command("HMGET", queue.prefix + "counters", *LEVEL, reply=list))
    for name, value in zip(LEVEL, counters, strict=True):
        ledger.fault(int(value or 0) != 0, f"{name} is {int(value or 0)}")
    sums = store.run(command("HVALS", queue.prefix + "sums", reply=list))
    ledger.fault(any(int(one) for one in sums), "a sum of no claims is not zero")


def _tokens(ledger: Ledger, store: Store, queue: Queue, request_id: str, counted: Tokens) -> None:
    ending = store.run(queue.peek(request_id)).ending
    if ending is None:
        return
    said = f"{request_id} ({ending.outcome}): {counted}"
    ledger.fault(not counted.relayed <= counted.emitted, f"more relayed than emitted, {said}")
    ledger.fault(not counted.billed <= counted.emitted, f"more billed than emitted, {said}")
    if ending.outcome in ANSWERED and counted.left:
        ledger.fault(counted.relayed > counted.billed, f"an answer is billed as it was made, {said}")
    elif ending.outcome in ANSWERED:
        ledger.fault(counted.relayed != counted.billed, f"an answer is billed as it was shown, {said}")
    elif ending.outcome in STOPPED and ending.usage != Usage():
        ledger.fault(counted.relayed > counted.billed, f"its worker stopped it and told less than was shown, {said}")
    elif ending.outcome not in CUT_OFF:
        ledger.fault(counted.billed > 0, f"billed for nothing, {said}")
