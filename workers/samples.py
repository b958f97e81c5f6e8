"""The least that a JSON schema is content with: what an engine without a model answers under a grammar. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: From this depth on a schema that contains itself is cut short: where there is a choice, the plainest is taken.
DEEP = 3
#: And here, or after so many values, nothing more is made, since a schema may ask for what has no end.
DEEPEST = 24
VALUES_MAX, CHARS_MAX = 10_000, 1_000_000

#: No bound of a number.
BOUNDLESS = 2**62

_WORD = "abc"
_PLAINNESS = ("null", "boolean", "integer", "number", "string", "array", "object")


@dataclass
class _Document:
    """What references are looked up in, and how much may still be made of it."""

    schema: Any
    left: int = VALUES_MAX


def sample(schema: Any) -> Any:
    """An instance of the schema. `pattern`, `format`, `not`, `if` and their like are passed over."""
    return _sample(schema, _Document(schema), 0)


def _sample(schema: Any, root: _Document, depth: int) -> Any:
    root.left -= 1
    if depth >= DEEPEST or root.left < 0:
        return None
    if not isinstance(schema, Mapping):
        return _WORD
    schema = _plain(schema, root, depth)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    return _OF_TYPE.get(_type_of(schema), _null)(schema, root, depth)


def _plain(schema: Mapping[str, Any], root: _Document, depth: int) -> Mapping[str, Any]:
    """The schema with its references followed and one of each choice taken."""
    for _ in range(DEEPEST):
        root.left -= 1
        if depth >= DEEPEST or root.left < 0:
            break
        if "$ref" in schema:
            schema = _merged(_at(root.schema, schema["$ref"]), _without(schema, "$ref"))
        elif "allOf" in schema:
            rest, parts = _without(schema, "allOf"), schema["allOf"]
            for part in parts:
                rest = _merged(rest, _plain(part, root, depth + 1) if isinstance(part, Mapping) else {})
            schema = rest
        elif choices := schema.get("anyOf") or schema.get("oneOf"):
            chosen = _chosen(choices, depth)
            schema = _merged(_without(schema, "anyOf", "oneOf"), chosen if isinstance(chosen, Mapping) else {})
        else:
            return schema
    return {"type": "null"}  # it refers to itself and to nothing else


def _without(schema: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in schema.items() if name not in names}


def _merged(one: Any, other: Mapping[str, Any]) -> dict[str, Any]:
    """What satisfies both, as far as it is properties and bounds."""
    both = dict(one) if isinstance(one, Mapping) else {}
    for name, value in other.items():
        if name == "properties":
            both[name] = {**both.get(name, {}), **value}
        elif name == "required":
            both[name] = [*dict.fromkeys([*both.get(name, ()), *value])]
        elif name in ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties") and name in both:
            both[name] = max(both[name], value)
        elif name in ("maximum", "exclusiveMaximum", "maxLength", "maxItems") and name in both:
            both[name] = min(both[name], value)
        else:
            both[name] = value
    return both


def _at(root: Any, reference: str) -> Any:
    """What a reference within the document means; what lies elsewhere may be anything."""
    found = root
    for escaped in reference.removeprefix("#").split("/")[1:]:
        name = escaped.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdigit() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, Mapping) and name in found:
            found = found[name]
        else:
            return {}
    return found if reference.startswith("#") else {}


def _chosen(choices: list[Any], depth: int) -> Any:
    """The first; deep down the plainest, so that what contains itself comes to an end."""
    if depth < DEEP:
        return choices[0]
    return min(choices, key=_depth_of)


def _depth_of(choice: Any) -> int:
    if not isinstance(choice, Mapping):
        return 0
    if any(name in choice for name in ("$ref", "anyOf", "oneOf", "allOf")):
        return len(_PLAINNESS)
    return 0 if "const" in choice or "enum" in choice else _PLAINNESS.index(_type_of(choice))


def _type_of(schema: Mapping[str, Any]) -> str:
    named = schema.get("type")
    if isinstance(named, list):
        named = named[0] if named else "null"
    if named in _PLAINNESS:
        return str(named)
    if "properties" in schema or "required" in schema:
        return "object"
    return "array" if "items" in schema or "prefixItems" in schema else "string"


def _object(schema: Mapping[str, Any], root: _Document, depth: int) -> dict[str, Any]:
    """What is required; all that is named, where nothing is, unless that goes too deep."""
    named: Mapping[str, Any] = schema.get("properties") or {}
    wanted = schema.get("required", named if depth < DEEP else ())
    more = schema.get("additionalProperties", {})
    made = {name: _sample(named.get(name, more), root, depth + 1) for name in wanted}
    for n in range(min(schema.get("minProperties", 0), VALUES_MAX)):
        if len(made) >= schema["minProperties"]:
            break
        name = next((name for name in named if name not in made), f"key{n}")
        made[name] = _sample(named.get(name, more), root, depth + 1)
    return made


def _array(schema: Mapping[str, Any], root: _Document, depth: int) -> list[Any]:
    first = schema.get("prefixItems") or []
    rest = schema.get("items", {})
    count = min(schema.get("minItems", 0), VALUES_MAX)
    schemas = [*first, *[rest] * count][:count]
    return [_sample(one, root, depth + 1) for one in schemas]


def _string(schema: Mapping[str, Any], _root: _Document, _depth: int) -> str:
    chars = max(schema.get("minLength", 0), min(len(_WORD), schema.get("maxLength", len(_WORD))))
    chars = min(int(chars), CHARS_MAX)
    return (_WORD * (chars // len(_WORD) + 1))[:chars]


def _integer(schema: Mapping[str, Any], _root: _Document, _depth: int) -> int:
    low = max(math.ceil(_edge(schema, "minimum", -BOUNDLESS)), _edge(schema, "exclusiveMinimum", -BOUNDLESS) // 1 + 1)
    high = min(_edge(schema, "maximum", BOUNDLESS) // 1, math.ceil(_edge(schema, "exclusiveMaximum", BOUNDLESS)) - 1)
    return math.floor(_nearest_zero(low, high, schema.get("multipleOf", 1)))


def _number(schema: Mapping[str, Any], _root: _Document, _depth: int) -> float:
    """Beside an exclusive edge; by one, or half way to the other edge where that is nearer."""
    low, high = _edge(schema, "minimum", -BOUNDLESS), _edge(schema, "maximum", BOUNDLESS)
    above, below = _edge(schema, "exclusiveMinimum", -BOUNDLESS), _edge(schema, "exclusiveMaximum", BOUNDLESS)
    middle = (max(low, above) + min(high, below)) / 2
    low = low if low > above else min(above + 1, middle)
    high = high if high < below else max(below - 1, middle)
    return _nearest_zero(low, high, schema.get("multipleOf", 0))


def _edge(schema: Mapping[str, Any], name: str, otherwise: float) -> float:
    edge = schema.get(name, otherwise)
    return edge if isinstance(edge, int | float) else otherwise


def _nearest_zero(low: float, high: float, step: float) -> float:
    if low <= 0 <= high:
        return 0
    edge = low if low > 0 else high
    return (math.ceil(edge / step) if low > 0 else math.floor(edge / step)) * step if step else edge


def _boolean(_schema: Mapping[str, Any], _root: _Document, _depth: int) -> bool:
    return True


def _null(_schema: Mapping[str, Any], _root: _Document, _depth: int) -> None:
    return None


_OF_TYPE = {
    "object": _object,
    "array": _array,
    "string": _string,
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
}
