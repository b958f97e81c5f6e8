"""The least that a schema is content with: valid by the schema's own rules, and finite."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.samples import sample

NODE = {
    "type": "object",
    "properties": {
        "value": {"type": "integer"},
        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
        "more": {"type": "array", "items": {"$ref": "#/$defs/node"}},
    },
    "required": ["value", "next", "more"],
}

SCHEMAS: list[Any] = [
    {},
    True,
    {"type": "object"},
    {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
    {"type": "array", "items": {"$ref": "#/$defs/node"}, "minItems": 2, "$defs": {"node": NODE}},
    {"properties": {"a": {"$ref": "#"}, "b": {"type": "boolean"}}},
    {"definitions": {"a/b": {"const": {"x": 1}}}, "$ref": "#/definitions/a~1b"},
    {"type": ["string", "null"], "minLength": 5},
    {"type": "string", "maxLength": 1},
    {"enum": ["red", "green"], "type": "string"},
    {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}]},
    {"allOf": [{"properties": {"a": {"type": "number"}}, "required": ["a"]}, {"required": ["b"]}], "type": "object"},
    {"anyOf": [{"required": ["a"]}, {"required": ["b"]}], "properties": {"a": {"type": "null"}}, "type": "object"},
    {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "minItems": 3, "items": {"const": 7}},
    {"type": "object", "minProperties": 2, "properties": {"a": {"type": "integer"}}, "required": []},
    {"type": "object", "additionalProperties": False, "properties": {"a": {"format": "date"}}, "required": ["a"]},
]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_sample_is_valid(schema: Any) -> None:
    jsonschema.Draft202012Validator(schema).validate(sample(schema))


def test_only_what_is_required_is_there_and_all_where_nothing_is() -> None:
    named = {"a": {"type": "integer"}, "b": {"type": "string"}}

    assert sample({"type": "object", "properties": named, "required": ["b"]}) == {"b": "abc"}
    assert sample({"type": "object", "properties": named}) == {"a": 0, "b": "abc"}


@given(
    kind=st.sampled_from(["integer", "number"]),
    low=st.none() | st.integers(-20, 20),
    high=st.none() | st.integers(-20, 20),
    above=st.none() | st.integers(-20, 20),
    below=st.none() | st.integers(-20, 20),
    times=st.none() | st.sampled_from([1, 2, 5]),
)
def test_numbers_keep_to_their_bounds(
    kind: str, low: int | None, high: int | None, above: int | None, below: int | None, times: int | None
) -> None:
    edges = {"minimum": low, "maximum": high, "exclusiveMinimum": above, "exclusiveMaximum": below, "multipleOf": times}
    schema = {"type": kind} | {name: edge for name, edge in edges.items() if edge is not None}
    validator = jsonschema.Draft202012Validator(schema)
    if any(validator.is_valid(number / 2 if kind == "number" else number) for number in range(-100, 100)):
        validator.validate(sample(schema))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#"}]},
        {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
        {"allOf": [{"$ref": "#"}] * 5},
        {"type": "object", "properties": {n: {"$ref": "#"} for n in "abcde"}, "required": list("abcde")},
        {"$ref": "#/nowhere"},
        {"$ref": "https://elsewhere.example/schema"},
        {"type": "nonsense"},
    ],
)
def test_what_no_finite_value_satisfies_comes_to_an_end_all_the_same(schema: Any) -> None:
    sample(schema)
