"""Which JSON schemas an engine is made to keep to: those that cost little to compile, whatever compiles them. Pure.

An engine turns a schema into an automaton before the first token, on the processor that all its streams share, and
keeps it. What makes that dear is counted here and refused, with what to do instead:

patterns     are regular expressions of a strange hand. The engine makes automata of them and never goes back, so their
             size is what hurts, and most of all in how many places of one the same text may be at once: parts of any
             length beside and in each other. Both are bounded, with repeats written out. An endless repeat holds
             another only beside what parts them ("(a+,)+", not "(a+)+"); nothing looks around or back. The worst that
             was found to pass takes xgrammar 2.7 s ("[^x]{0,12}" four times), all of one schema together 8 s, with a
             vocabulary of 49,000 on one core; addresses, dates and versions take 3 to 18 ms.
references   stay within the schema ("#/…"): nothing is fetched. They end at something else than a reference, and the
             schema with all of them written out is bounded; one that contains itself (a tree) is fine.
sizes        properties, values of enums, counts of items and characters; how large and deep the JSON may be is bounded
             where it is read (`draft.Json`).

What is no schema at all is for the engine to say. Data that looks like a schema (in a `const`) is counted as one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

PROPERTIES_MAX = 1000  #: of all objects in a schema: a thousand take some 130 ms to compile
ENUM_MAX = 1000  #: values of all enums, as at OpenAI
COUNT_MAX = 100_000  #: in minLength, maxItems and their like
PATTERNS_MAX = 32
PATTERN_CHARS_MAX = 256
ATOMS_MAX = 1024  #: of a pattern with its counted repeats written out: they take some 40 ms to compile
TRIALS_MAX = 192  #: ranges of a pattern, "{1,3}" or "?", times what they range over together
LOOPS_MAX = 24  #: repeats without end of a pattern, written out
TOGETHER_MAX = 4  #: of each of these, all patterns of a schema that differ may have so many times as much
REFERENCES_MAX = 256
REFERENCE_DEPTH_MAX = 32  #: what is referred to refers on
WRITTEN_OUT_MAX = 20_000  #: objects of a schema with its references written out

_COUNTS = frozenset(
    ("minLength", "maxLength", "minItems", "maxItems", "minContains", "maxContains", "minProperties", "maxProperties")
)


def fault(schema: Any) -> str | None:
    """What is too dear about a schema, and what to do about it; None: nothing."""
    nodes = list(_nodes(schema))
    return _too_many(nodes) or _bad_patterns(nodes) or _bad_references(schema, nodes)


def _nodes(schema: Any) -> Iterator[Mapping[str, Any]]:
    """Every object in it."""
    rest = [schema]
    while rest:
        part = rest.pop()
        if isinstance(part, dict):
            yield part
            rest += part.values()
        elif isinstance(part, list):
            rest += part


def _too_many(nodes: Sequence[Mapping[str, Any]]) -> str | None:
    properties = sum(len(node["properties"]) for node in nodes if isinstance(node.get("properties"), dict))
    if properties > PROPERTIES_MAX:
        return f"It has {properties} properties; {PROPERTIES_MAX} are allowed, so ask for less in one answer"
    values = sum(len(node["enum"]) for node in nodes if isinstance(node.get("enum"), list))
    if values > ENUM_MAX:
        return f"Its enums have {values} values; {ENUM_MAX} are allowed, so use a plain string where there are many"
    for name in _COUNTS:
        if any(isinstance(node.get(name), int | float) and node[name] > COUNT_MAX for node in nodes):
            return f"A '{name}' is above {COUNT_MAX}; leave it out, max_tokens ends the answer before"
    return None


# --- patterns


def _bad_patterns(nodes: Sequence[Mapping[str, Any]]) -> str | None:
    patterns = [pattern for node in nodes for pattern in _patterns(node)]
    if len(patterns) > PATTERNS_MAX:
        return f"It has {len(patterns)} patterns; {PATTERNS_MAX} are allowed, so check the others yourself"
    measured = [_measured(pattern) for pattern in patterns]
    if found := next((found for _, found in measured if found), None):
        return found
    for name, most in (("atoms", ATOMS_MAX), ("trials", TRIALS_MAX), ("loops", LOOPS_MAX)):
        if sum(getattr(whole, name) for whole, _ in measured) > TOGETHER_MAX * most:
            return "Its patterns are too large together; use fewer, or 'maxLength' where they only count characters"
    return None


def _patterns(node: Mapping[str, Any]) -> list[str]:
    named = node.get("patternProperties")
    own = node.get("pattern")
    return [*([own] if isinstance(own, str) else []), *(named if isinstance(named, dict) else ())]


_TOKEN = re.compile(
    r"\\(?P<escaped>u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[uUpP]\{[^}]*\}|c[A-Za-z]|0[0-7]{0,2}|.)|\[\^?\]?(?:\\.|[^\]\\])*\]"
    r"|\((?P<extended>\?:?)?|(?P<repeat>[*+?]|\{(?P<least>\d+)(?P<comma>,?)(?P<most>\d*)\})|(?P<anchor>[\^$])|.",
    re.DOTALL,
)


@dataclass
class _Piece:
    """What a repeat would be of: an atom or a group; or the group that is still open."""

    atoms: int = 0
    loose: bool = False  #: it holds a repeat whose number is not fixed
    loops: int = 0  #: repeats without end in it
    parted: bool = True  #: each of its branches, so far, has a part that is always there and not repeated: a separator
    ranges: int = 0  #: parts whose length may differ, though not without end
    spread: int = 0  #: by how much they differ, together
    branch: int = 0  #: atoms of the branch that is open
    part: bool = False  #: the open branch has a separator
    counted: int = 0  #: loops of the branches that are not open
    shortest: int = ATOMS_MAX + 1  #: of the branches that are not open
    longest: int = 0

    def end_branch(self) -> None:
        """It is over here, or another follows."""
        self.parted &= self.part
        if self.loops == self.counted:  # one without end has loops, which are counted
            self.shortest, self.longest = min(self.shortest, self.branch), max(self.longest, self.branch)
        self.branch, self.part, self.counted = 0, False, self.loops

    def differ(self, atoms: int) -> None:
        """The length of a part of it may differ by so much."""
        if atoms > 0:
            self.ranges, self.spread = self.ranges + 1, self.spread + atoms

    def add(self, piece: _Piece, copies: int = 1) -> None:
        """It holds another, so often."""
        self.atoms, self.branch = self.atoms + copies * piece.atoms, self.branch + copies * piece.atoms
        self.ranges, self.spread = self.ranges + copies * piece.ranges, self.spread + copies * piece.spread
        self.loops, self.loose = self.loops + copies * piece.loops, self.loose or piece.loose

    @property
    def trials(self) -> int:
        """How many ways there may be to be somewhere in it: each range beside each other one,
        and half so many for each repeat without end."""
        return self.spread * (2 * self.ranges + self.loops) // 2 if self.ranges > 1 else 0


def pattern_fault(pattern: str) -> str | None:
    """What is too dear about a regular expression; None: nothing."""
    return _measured(pattern)[1]


def _measured(pattern: str) -> tuple[_Piece, str | None]:
    """What it comes to, and what is too dear about it."""
    scan = _Scan()
    whole = scan.open[0]
    if len(pattern) > PATTERN_CHARS_MAX:
        return whole, f"A pattern has {len(pattern)} characters; {PATTERN_CHARS_MAX} are allowed, so check it yourself"
    for token in _TOKEN.finditer(pattern):
        if found := scan.take(token):
            return whole, found
        if sum(piece.atoms for piece in scan.open) > ATOMS_MAX:
            return whole, f"A pattern has more than {ATOMS_MAX} atoms with its repeats written out; use smaller counts"
    if len(scan.open) > 1:
        return whole, _MALFORMED
    whole.end_branch()
    whole.differ(whole.longest - whole.shortest)
    if whole.trials > TRIALS_MAX or whole.loops > LOOPS_MAX:
        return whole, _RANGES
    return whole, None


_MALFORMED = "A pattern is no well-formed regular expression; mend it or leave it out"
_NESTED = (
    "A pattern has a repeat within a repeat and nothing that parts them, such as '(a+)+'; write it with one, such as "
    "'a+', or with what is between, such as '(a+,)+'"
)
_RANGES = (
    "A pattern has too many repeats of any number, such as '{0,9}' or '*', in or beside each other; use fixed counts"
)
_LOOKS = "A pattern looks around or back, or names a group; use plain groups, '(…)' or '(?:…)', and no references"


class _Scan:
    """A pattern from left to right."""

    def __init__(self) -> None:
        self.open = [_Piece()]  #: the groups, the innermost last
        self.last: _Piece | None = None  #: what was read last, and may be repeated
        self._repeated = False  #: a repeat was the last token, which a "?" makes lazy

    def take(self, token: re.Match[str]) -> str | None:
        repeated, self._repeated = self._repeated, False
        text = token[0]
        if token["repeat"]:
            return None if text == "?" and repeated else self._repeat(token)
        self._settle()
        if text.startswith("("):
            self.open.append(_Piece())
            return _LOOKS if token["extended"] == "?" else None
        if text == ")":
            return self._close()
        if text == "|":
            self.open[-1].end_branch()
        elif token["escaped"] and token["escaped"] in "123456789k":
            return _LOOKS
        elif not token["anchor"] and token["escaped"] not in ("b", "B"):
            self.last = _Piece(1)
            self.open[-1].add(self.last)
        return _MALFORMED if text in ("[", "\\") else None

    def _settle(self) -> None:
        """What was read last is not repeated."""
        self.open[-1].part |= self.last is not None and self.last.parted
        self.last = None

    def _close(self) -> str | None:
        if len(self.open) == 1:
            return _MALFORMED
        piece = self.last = self.open.pop()
        piece.end_branch()
        piece.differ(piece.longest - piece.shortest)
        self.open[-1].add(piece)
        return None

    def _repeat(self, token: re.Match[str]) -> str | None:
        piece, whole = self.last, self.open[-1]
        if piece is None:
            return _MALFORMED
        least, most = _times(token)
        if not piece.parted and (piece.loose if most is None else piece.loops and most > 1):
            return _NESTED
        copies = max(least, 1) if most is None else most
        whole.add(piece, max(copies, 1) - 1)
        whole.loose, whole.loops = whole.loose or least != most, whole.loops + (most is None)
        whole.differ(piece.spread if most is None else (most - least) * piece.atoms)  # without end, it begins anywhere
        whole.part |= piece.parted and least == most and least > 0
        self.last, self._repeated = None, True
        return None


def _times(token: re.Match[str]) -> tuple[int, int | None]:
    """How often at least and at most; None: without end. No more than is refused anyway."""
    if token["least"] is None:
        return int(token[0] == "+"), 1 if token[0] == "?" else None
    least = min(int(token["least"][:9]), ATOMS_MAX + 1)
    if not token["comma"]:
        return least, least
    return least, min(int(token["most"][:9]), ATOMS_MAX + 1) if token["most"] else None


# --- references

_REFER = "put it under '$defs', and refer to '#/$defs/…'"


def _bad_references(schema: Any, nodes: Sequence[Mapping[str, Any]]) -> str | None:
    referring = [node for node in nodes if isinstance(node.get("$ref"), str)]
    if any(name in node for node in nodes for name in ("$dynamicRef", "$recursiveRef")):
        return "It has a '$dynamicRef'; use '$ref'"
    if len(referring) > REFERENCES_MAX:
        return f"It has {len(referring)} references; {REFERENCES_MAX} are allowed, so write the small ones out"
    targets: dict[int, Any] = {}
    for node in referring:
        if not node["$ref"].startswith("#"):
            return f"A '$ref' leads out of the schema, and nothing is fetched; {_REFER}"
        try:
            targets[id(node)] = _at(schema, node["$ref"])
        except LookupError:
            return f"A '$ref' leads to nothing in the schema; {_REFER}"
    return _endless(referring, targets) or _too_large(schema, targets)


def _at(schema: Any, reference: str) -> Any:
    """What a JSON pointer leads to.

    Raises:
      LookupError: nothing.
    """
    found = schema
    for step in unquote(reference[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isascii() and name.isdecimal() and len(name) <= 9:
            found = found[int(name)]
        elif isinstance(found, dict):
            found = found[name]
        else:
            raise LookupError(name)
    return found


def _endless(referring: Sequence[Mapping[str, Any]], targets: Mapping[int, Any]) -> str | None:
    for node in referring:
        at: Any = node
        for _ in range(REFERENCE_DEPTH_MAX + 1):
            if id(at) not in targets:
                break
            at = targets[id(at)]
        else:
            return "A '$ref' leads to another, again and again; refer to what is meant"
    return None


def _too_large(schema: Any, targets: Mapping[int, Any]) -> str | None:
    sizes: dict[int, int] = {}  #: of what is measured; 0: of what is being measured, and so contains itself
    try:
        whole = _written_out(schema, targets, sizes, 0)
    except RecursionError:
        return f"Its references lead more than {REFERENCE_DEPTH_MAX} deep; make it flatter"
    if whole > WRITTEN_OUT_MAX:
        return f"It has more than {WRITTEN_OUT_MAX} objects with its references written out; use fewer of them"
    return None


def _written_out(part: Any, targets: Mapping[int, Any], sizes: dict[int, int], deep: int) -> int:
    """Objects of a part, with those that it refers to. Each is measured once, so that it takes no time to speak of.

    Raises:
      RecursionError: references lead too deep.
    """
    if not isinstance(part, dict | list):
        return 0
    if id(part) in sizes:
        return sizes[id(part)]
    if deep > REFERENCE_DEPTH_MAX:
        raise RecursionError
    sizes[id(part)] = 0
    within = part.values() if isinstance(part, dict) else part
    size = isinstance(part, dict) + sum(_written_out(each, targets, sizes, deep) for each in within)
    if id(part) in targets:
        size += _written_out(targets[id(part)], targets, sizes, deep + 1)
    sizes[id(part)] = min(size, WRITTEN_OUT_MAX + 1)
    return sizes[id(part)]
