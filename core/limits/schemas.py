"""How many different JSON schemas an organisation sends: each fills the engine's cache of grammars, which all share.

| key                | type | ttl | writer | reader | holds                                            |
|--------------------|------|-----|--------|--------|--------------------------------------------------|
| {org:<id>}:schemas | ZSET | 60 s| note   | note   | hash of a schema -> when it was sent last, ms    |

Promise   in any 60 seconds at most PER_MINUTE different ones of an organisation go on, at whatever gateways. One that
          was sent within the minute goes on for nothing. A refusal changes nothing.
Dies      Redis: no admission (503), for it is the queue's own, not the limits'. Cluster: one tag, {org:<id>}.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from core.redis import Call, scripts, tag
from core.values import Sampling, Tools

_SCRIPTS = scripts(Path(__file__).with_name("lua"), shared=(), verbs=("schema_note",))

#: Different ones of an organisation in a minute. An application has a handful; one that puts its data into its schemas
#: (an enum of what it has just found) has one a request, and this is two a second. Compiling the dearest that is taken
#: takes an engine some 150 ms, so that an organisation can have no more than a third of a processor with it.
PER_MINUTE = 120
MINUTE_MS = 60_000


def digest(sampling: Sampling, tools: Tools | None) -> str:
    """What two requests have in common whose grammars are the same, but for spaces and the order of keys; empty: there
    is none to compile, or that of any JSON, which is every organisation's."""
    functions = [tools.functions, tools.choice, tools.parallel] if tools and tools.bound else []
    grammar = {} if sampling.grammar.get("json_object") else sampling.grammar
    if not (grammar or functions):
        return ""
    written = msgspec.json.encode([grammar, functions], order="deterministic")
    return hashlib.sha256(written).hexdigest()[:32]


def note(org_id: str, digest: str) -> Call[int]:
    """It is sent. 0: it may go on; else how long it is until it may, ms, if no others are sent."""
    return Call(
        script=_SCRIPTS["schema_note"],
        keys=(f"{tag('org:' + org_id)}schemas",),
        args=(digest, PER_MINUTE, MINUTE_MS),
        reply=lambda raw: 0 if raw[0] == 1 else int(raw[1]),
    )
