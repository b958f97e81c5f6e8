"""The log of endings: one entry per accepted request, until Postgres has it. Redis only; billing/events.py reads it.

| key           | type   | ttl  | writer                   | reader                           | holds         |
|---------------|--------|------|--------------------------|----------------------------------|---------------|
| {model}:usage | STREAM | none | finish (tasks/lua), with | billing/events, group `billing`; | one entry per |
|               |        |      | the request's own row    | strike_out deletes               | ended request |

An entry's fields: `id` (the request's UUIDv7), `attempt`, `outcome`, `worker`, `input`, `cached`, `output`,
`reasoning` (tokens as decimal strings) and `facts` (msgpack, made by admission, which workers pass on unread). Its
stream id says when it entered, and so to which hour it belongs: ids only grow, so hours close.

Bound     none by length: an entry leaves when it is struck out, after Postgres committed it. With Postgres away the
          stream grows by about 350 bytes a request.
Dies      a consumer between COMMIT and strike_out: its entries are delivered again, and Postgres knows their ids.
          A consumer for good: another claims what it left after STALE_MS. The store: what its log had comes back.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta
from uuid import UUID

import msgspec

from core.redis import Call, Script, command, tag
from core.values import Outcome, Request, Usage

GROUP = "billing"
#: Entries taken at once: one transaction's worth.
COUNT = 500
#: How long an entry may lie with a consumer before another takes it, milliseconds; longer than any batch's commit.
STALE_MS = 60_000

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: What Postgres keeps in a bigint.
_TOKENS_MAX = 2**63 - 1
_ATTEMPT_MAX = 2**31 - 1


class BadEntry(Exception):
    """An entry of the usage log that cannot be read."""


class Facts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What admission knows and a worker must not choose: who pays, for which model, at which price."""

    org_id: str
    project_id: str
    key_id: str
    model: str
    tier: str = "standard"
    price_id: int = 0  #: 0: the model had no price
    admitted_ms: int = 0
    scopes: tuple[str, ...] = ()  #: whose limits bind it; empty: its key's alone


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One ending, as `finish` entered it."""

    entry_id: str  #: the stream's own, "<ms>-<n>"
    id: str
    attempt: int
    outcome: Outcome
    worker: str
    usage: Usage
    facts: Facts

    @property
    def entered_at(self) -> datetime:
        return _EPOCH + timedelta(milliseconds=int(self.entry_id.partition("-")[0]))

    def payload(self) -> bytes:
        """What the ending says, in one spelling. Not when it entered: the same ending may be entered twice."""
        usage = self.usage
        tokens = (usage.input_tokens, usage.cached_tokens, usage.output_tokens, usage.reasoning_tokens)
        return msgspec.json.encode((self.id, self.attempt, self.outcome, self.worker, tokens, self.facts))

    def sha256(self) -> bytes:
        return hashlib.sha256(self.payload()).digest()


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """An entry not yet read. Without fields: it was deleted before anybody confirmed it."""

    entry_id: str
    fields: dict[bytes, bytes]


class Claimed(msgspec.Struct, frozen=True, kw_only=True):
    """What one look at dead consumers' entries gave, and where to look next ("0-0": all seen)."""

    cursor: str
    items: list[Item]


def stream(model: str) -> str:
    """The key of a model's log, for the script that enters endings."""
    return tag(model) + "usage"


def facts(request: Request) -> bytes:
    """A request's facts as admission hands them to the queue."""
    caller = request.caller
    return msgspec.msgpack.encode(
        Facts(
            org_id=caller.org_id,
            project_id=caller.project_id,
            key_id=caller.key_id,
            model=request.model,
            tier=request.tier,
            price_id=request.price_id,
            admitted_ms=request.admitted_ms,
            scopes=request.scopes,
        )
    )


def read(item: Item) -> Entry:
    """The entry in an item.

    Raises:
      BadEntry: saying what is wrong with it.
    """
    try:
        entry = _entry(item.entry_id, item.fields)
    except KeyError as e:
        raise BadEntry(f"no field {e.args[0].decode()}") from None
    except (ValueError, msgspec.DecodeError) as e:
        raise BadEntry(str(e)) from None
    if fault := _fault(entry):
        raise BadEntry(fault)
    return entry


def _entry(entry_id: str, fields: dict[bytes, bytes]) -> Entry:
    return Entry(
        entry_id=entry_id,
        id=str(UUID(fields[b"id"].decode())),
        attempt=int(fields[b"attempt"]),
        outcome=Outcome(fields[b"outcome"].decode()),
        worker=fields[b"worker"].decode(),
        usage=Usage(
            input_tokens=int(fields[b"input"]),
            cached_tokens=int(fields[b"cached"]),
            output_tokens=int(fields[b"output"]),
            reasoning_tokens=int(fields[b"reasoning"]),
        ),
        facts=msgspec.msgpack.decode(fields[b"facts"], type=Facts),
    )


def _fault(entry: Entry) -> str | None:
    """Why Postgres could not even be asked to take an entry."""
    facts, usage = entry.facts, entry.usage
    words = (entry.worker, facts.org_id, facts.project_id, facts.key_id, facts.model, facts.tier)
    if any("\0" in word for word in words):
        return "a zero byte in a text"
    tokens = (usage.input_tokens, usage.cached_tokens, usage.output_tokens, usage.reasoning_tokens)
    if not all(0 <= count <= _TOKENS_MAX for count in tokens) or not 0 <= entry.attempt <= _ATTEMPT_MAX:
        return "a count out of range"
    return None


#: XGROUP CREATE says BUSYGROUP when the group is there, which is what we want. From 0: nothing entered is skipped.
_OPEN = Script(
    "usage_open",
    """
local made = redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', 'MKSTREAM')
if type(made) == 'table' and made.err and not string.find(made.err, 'BUSYGROUP', 1, true) then return made end
return 1
""",
)

#: In one script: an entry that was confirmed but not deleted would never be delivered, nor leave.
_STRIKE_OUT = Script(
    "usage_strike_out",
    """
for i = 2, #ARGV do
  redis.call('XACK', KEYS[1], ARGV[1], ARGV[i])
  redis.call('XDEL', KEYS[1], ARGV[i])
end
return #ARGV - 1
""",
)


def open_group(model: str) -> Call[bool]:
    """Make the log and its consumer group where they are not there yet. Repeat at will."""
    return Call(script=_OPEN, keys=(stream(model),), args=(GROUP,), reply=bool)


def read_new(model: str, consumer: str) -> Call[list[Item]]:
    """Entries nobody has taken yet, oldest first; they are this consumer's until struck out."""
    return _read_group(model, consumer, ">")


def read_pending(model: str, consumer: str) -> Call[list[Item]]:
    """Entries this consumer took and never struck out."""
    return _read_group(model, consumer, "0")


def peek(model: str, count: int) -> Call[list[Item]]:
    """The oldest entries, whoever has taken them. Takes none."""
    words = ("XRANGE", stream(model), "-", "+", "COUNT", count)
    return command(*words, reply=_items)


def _read_group(model: str, consumer: str, after: str) -> Call[list[Item]]:
    words = ("XREADGROUP", "GROUP", GROUP, consumer, "COUNT", COUNT, "STREAMS", stream(model), after)
    return command(*words, reply=lambda streams: _items(streams[0][1]) if streams else [])


def claim_stale(model: str, consumer: str, cursor: str = "0-0", *, stale_ms: int = STALE_MS) -> Call[Claimed]:
    """Take over entries that lie with a dead consumer. One look sees a part: go on from the cursor until "0-0"."""
    words = ("XAUTOCLAIM", stream(model), GROUP, consumer, stale_ms, cursor, "COUNT", COUNT)
    return command(*words, reply=lambda r: Claimed(cursor=r[0].decode(), items=_items(r[1])))


def strike_out(model: str, entry_ids: list[str]) -> Call[int]:
    """Postgres has them: confirm and delete. Repeat at will."""
    return Call(script=_STRIKE_OUT, keys=(stream(model),), args=(GROUP, *entry_ids), reply=int)


def length(model: str) -> Call[int]:
    """Entries that Postgres has not confirmed."""
    return command("XLEN", stream(model), reply=int)


def oldest_ms(model: str) -> Call[int | None]:
    """When the oldest entry that Postgres has not confirmed entered; None when there is none."""
    words = ("XRANGE", stream(model), "-", "+", "COUNT", 1)
    return command(*words, reply=lambda r: int(r[0][0].partition(b"-")[0]) if r else None)


def _items(raw: list[tuple[bytes, dict[bytes, bytes]]]) -> list[Item]:
    return [Item(entry_id=entry_id.decode(), fields=fields) for entry_id, fields in raw]


def field_bytes(item: Item) -> bytes:
    """An item's fields as they came, for safe keeping."""
    return msgspec.msgpack.encode(item.fields)
