"""A schema is compiled on the engine's own processor: what would be dear there is refused here."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.errors import BadRequest
from web.dialects import chat, messages, responses, schemas
from web.dialects.schemas import fault, pattern_fault

USER = [{"role": "user", "content": "hi"}]
BOMB = {"type": "string", "pattern": "(a+)+$"}


@pytest.mark.parametrize(
    "pattern",
    [
        "",
        r"^\d{4}-\d{2}-\d{2}$",
        r"^(\([0-9]{3}\))?[0-9]{3}-[0-9]{4}$",
        "^[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}$",
        r"^[^@\s]+@[^@\s]+\.[a-z]{2,}$",
        r"^-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?$",
        "^(GET|POST|PUT)(,(GET|POST|PUT))*$",
        "^(?:abc)+?$",
        r"[\]()+*]{1,5}",
        "[]a]+",
        r"\(\)\+{3}",
        "a{,3}",  # no repeat: those characters
        r"\p{L}+",
        r"^\d{1,3}(\.\d{1,3}){3}$",
        r"^(?:(?:25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)\.){3}(?:25[0-5]|2[0-4][0-9]|[01]?[0-9][0-9]?)$",
        "^[a-z]+(-[a-z]+)*$",
        r"^[a-zA-Z0-9._%+-]+@[a-zA-Z0-9-]+(\.[a-zA-Z0-9-]+)*\.[a-zA-Z]{2,}$",
        r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d{1,9})?(Z|[+-]\d{2}:\d{2})$",
        "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
        r"^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(?:-((?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)"
        r"(?:\.(?:0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*))*))?(?:\+([0-9a-zA-Z-]+(?:\.[0-9a-zA-Z-]+)*))?$",
        r"^\+?(\d{1,3})?[-. ]?\(?\d{3}\)?[-. ]?\d{3}[-. ]?\d{4}$",
        r"^\$?\d{1,3}(,\d{3})*(\.\d{2})?$",
        "^.{1,1000}$",
        "((a?)b)*",
        "([a-z]+,){2,9}",
        "(a{1,3}){5}",
        "(?:x(?:y*)z)+",
    ],
)
def test_what_people_write_passes(pattern: str) -> None:
    assert pattern_fault(pattern) is None


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(a+)+", "repeat within a repeat"),
        ("(a*)*b", "repeat within a repeat"),
        ("(a*)*", "repeat within a repeat"),
        ("(a|a*)*", "repeat within a repeat"),
        ("(a+,|b+)*", "repeat within a repeat"),
        ("(a+|)+", "repeat within a repeat"),
        ("(a+b?)*", "repeat within a repeat"),
        ("((a+))+", "repeat within a repeat"),
        ("(a+){9}", "repeat within a repeat"),
        (r"(a+\b)+", "repeat within a repeat"),
        (r"(\u0061+)+", "repeat within a repeat"),
        (r"(\p{L}+)+", "repeat within a repeat"),
        ("(a{1,9}){9}", "any number"),
        ("[^x]{0,9}" * 20, "any number"),
        ("a?" * 99, "any number"),
        ("(.|..|...|....|.....){1,60}", "any number"),
        ("(([^x]+[^y])+[^z]){100}", "any number"),
        ("(([^x]{1,40}[^y])*[^z]*[^x])*", "any number"),
        ("(((a{2,}))){0,}", "repeat within a repeat"),
        ("a{2000}", "atoms"),
        ("(a{40}){40}", "atoms"),
        ("((a{9}){9}){99999999999999999999}", "atoms"),
        ("(?=a)b", "looks around"),
        ("(?!a)b", "looks around"),
        ("(?<=a)b", "looks around"),
        ("(?P<n>a)", "looks around"),
        (r"(a)\1", "looks around"),
        ("a" * 257, "256"),
        ("(", "well-formed"),
        (")", "well-formed"),
        ("*a", "well-formed"),
        ("a**", "well-formed"),
        ("a++", "well-formed"),
        ("(|*)", "well-formed"),
        ("[a", "well-formed"),
        ("\\", "well-formed"),
    ],
)
def test_what_is_dear_to_match_or_to_compile_is_refused(pattern: str, why: str) -> None:
    assert why in (pattern_fault(pattern) or "")


@given(st.text("()[]{}*+?|\\^$a1,:=!<", max_size=40))
def test_any_text_is_judged(pattern: str) -> None:
    assert pattern_fault(pattern) is None or isinstance(pattern_fault(pattern), str)


@pytest.fixture(scope="module")
def compiler() -> Any:
    """The engine's, for a vocabulary of which all is in every class that is wide."""
    xgrammar = pytest.importorskip("xgrammar")
    words = [chr(a) + chr(b) + "tion" for a in range(97, 123) for b in range(97, 123)]
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo([*words, "<end>"]), max_threads=1, cache_enabled=False)


PARTS = st.lists(
    st.sampled_from(["[^x]", "[^y]", ".", "(", ")", "|", "*", "+", "?", "{0,9}", "{1,40}", "{12}", "[^x]{0,12}"]),
    max_size=30,
)


@settings(max_examples=60)
@given(parts=PARTS)
def test_no_pattern_that_passes_is_slow_to_compile(compiler: Any, parts: list[str]) -> None:
    """With a seventieth of a model's words, so in so much less than seconds."""
    pattern = "".join(parts)
    if pattern_fault(pattern) is None:
        began_s = time.process_time()
        with suppress(RuntimeError):  # what the engine's own reading refuses
            compiler.compile_json_schema(json.dumps({"type": "string", "pattern": pattern}))
        assert time.process_time() - began_s < 1


def _chained(length: int, width: int = 1) -> dict[str, Any]:
    """Definitions that each refer to the next, so many times."""
    last = {f"d{length}": {"type": "string"}}
    each = {
        f"d{n}": {"properties": {f"p{m}": {"$ref": f"#/$defs/d{n + 1}"} for m in range(width)}} for n in range(length)
    }
    return {"$defs": {**each, **last}, "$ref": "#/$defs/d0"}


TREE = {"$defs": {"node": {"type": "object", "properties": {"left": {"$ref": "#/$defs/node"}, "right": {"$ref": "#"}}}},
        "$ref": "#/$defs/node"}  # fmt: skip


@pytest.mark.parametrize(
    "schema",
    [
        {},
        None,
        True,
        TREE,
        {"properties": {"pattern": {"type": "string"}, "$ref": {"type": "string"}, "enum": {"enum": [1]}}},
        {"definitions": {"a/b~": {}, "c": [{}, {}]}, "anyOf": [{"$ref": "#/definitions/a~1b~0"}]},
        {"definitions": {"a/b~": {}, "c": [{}, {}]}, "anyOf": [{"$ref": "#/definitions/c/1"}]},
        {"properties": {f"p{n}": {} for n in range(schemas.PROPERTIES_MAX)}},
        {"enum": list(range(schemas.ENUM_MAX))},
        {"maxLength": schemas.COUNT_MAX, "minItems": 3.0},
        _chained(20),
    ],
)  # fmt: skip
def test_what_models_are_made_of_passes(schema: Any) -> None:
    assert fault(schema) is None


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"properties": {f"p{n}": {} for n in range(schemas.PROPERTIES_MAX + 1)}}, "properties"),
        ({"anyOf": [{"properties": {f"p{n}{m}": {} for n in range(600)}} for m in range(2)]}, "properties"),
        ({"enum": list(range(schemas.ENUM_MAX + 1))}, "enums"),
        ({"items": {"minItems": schemas.COUNT_MAX + 1}}, "minItems"),
        ({"maxLength": 1e18}, "maxLength"),
        ({"properties": {"default": {"const": BOMB}}}, "repeat within a repeat"),
        ({"patternProperties": {"(a+)+": {}}}, "repeat within a repeat"),
        ({"anyOf": [{"pattern": "a"}] * (schemas.PATTERNS_MAX + 1)}, "patterns"),
        ({"anyOf": [{"pattern": f"[^{n}]{{1000}}"} for n in range(5)]}, "together"),
        ({"anyOf": [{"pattern": f"[^{n}]{{0,12}}" * 4} for n in range(5)]}, "together"),
        ({"anyOf": [{"pattern": "a*" * 24}] * 5}, "together"),
        ({"$ref": "http://169.254.169.254/schema"}, "leads out"),
        ({"$ref": "file:///etc/passwd"}, "leads out"),
        ({"$ref": "other.json#/a"}, "leads out"),
        ({"$ref": "#/$defs/none"}, "leads to nothing"),
        ({"$ref": "#name"}, "again and again"),
        ({"$ref": "#/$defs/a/7", "$defs": {"a": []}}, "leads to nothing"),
        ({"$ref": "#"}, "again and again"),
        ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "again and again"),
        ({"$dynamicRef": "#a"}, "$dynamicRef"),
        ({"anyOf": [{"$ref": "#/$defs/a"}] * 257, "$defs": {"a": {}}}, "references"),
        (_chained(33), "deep"),
        (_chained(30, width=2), "written out"),
    ],
)
def test_what_is_dear_to_compile_is_refused_with_what_to_do(schema: Any, why: str) -> None:
    found = fault(schema)

    assert found is not None and why in found
    assert any(mark in found for mark in (";", ",")), "and what to do"


def test_the_look_itself_is_cheap() -> None:
    """Definitions that would be 2**30 objects, and the most references that there may be."""
    began_s = time.process_time()
    for _ in range(20):
        fault(_chained(30, width=8))
        fault({"properties": {f"p{n}": {"pattern": "(a{30}){30}"} for n in range(32)}})

    assert time.process_time() - began_s < 2


def _forms() -> list[tuple[Any, dict[str, Any], str]]:
    named = {"name": "f", "parameters": BOMB}
    chat_body, response = {"model": "m", "messages": USER}, {"model": "m", "input": "hi"}
    message = {**chat_body, "max_tokens": 9}
    formed = {"type": "json_schema", "json_schema": {"name": "a", "schema": BOMB}}
    text = {"format": {"type": "json_schema", "name": "a", "schema": BOMB}}
    output = {"format": {"type": "json_schema", "schema": BOMB}}
    used = {"tools": [{"name": "f", "input_schema": BOMB}], "tool_choice": {"type": "any"}}
    tools = {"tools": [{"type": "function", "function": named}]}
    strict = {"tools": [{"type": "function", "function": {**named, "strict": True}}]}
    return [
        (chat.parse, {**chat_body, "response_format": formed}, "response_format.json_schema.schema"),
        (chat.parse, {**chat_body, "structured_outputs": {"json": BOMB}}, "structured_outputs.json"),
        (chat.parse, {**chat_body, **tools, "tool_choice": "required"}, "tools"),
        (chat.parse, {**chat_body, **tools, "parallel_tool_calls": False}, "tools"),
        (chat.parse, {**chat_body, **strict}, "tools"),
        (responses.parse, {**response, "text": text}, "text.format.schema"),
        (responses.parse, {**response, "tools": [{"type": "function", **named, "strict": True}]}, "tools"),
        (messages.parse, {**message, "output_config": output}, "output_config.format.schema"),
        (messages.parse, {**message, **used}, "tools"),
    ]  # fmt: skip


@pytest.mark.parametrize(("parse", "body", "param"), _forms())
def test_every_form_of_every_dialect_is_looked_at(parse: Any, body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(body)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert "repeat within a repeat" in caught.value.message


def test_functions_that_are_only_told_of_may_be_anything() -> None:
    """No grammar is made of them, and the tools of agents come from everywhere."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": BOMB}}]

    assert chat.parse({"model": "m", "messages": USER, "tools": tools}).tools
    assert chat.parse({"model": "m", "messages": USER, "tools": tools, "tool_choice": "none"}).tools
