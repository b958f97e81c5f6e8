"""The API's own description: whole, true to the models that check bodies, and with nothing from elsewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import schemathesis.openapi
from flask.testing import FlaskClient
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from core import catalog
from core.errors import BadRequest
from core.redis import Store
from tests.web.test_tokens import TOML, Door
from web.admission import Admission
from web.app import POLICIES, Gateway, create
from web.auth import Policy
from web.dialects import chat, completions, embeddings, messages, responses
from web.dialects.draft import validated, without_nulls
from web.reference import ASSETS, OPERATIONS, document, kinds_of_errors, llms
from web.render import ByteRenderer
from web.routes import reference, secrets, tokens
from web.routes.socket import ENDPOINT
from web.subscriber import Subscriber

DOCUMENT = document(reference.BODIES)


@pytest.fixture
def client(store: Store, valkey_url: str, tmp_path: Path) -> Iterator[FlaskClient]:
    """Of an application to which nobody has shown a key."""
    path = tmp_path / "catalog.toml"
    path.write_text(TOML)
    models = catalog.load(path)
    subscriber = Subscriber(store, valkey_url, models, "g1")
    admission = Admission(models, store, subscriber, {name: ByteRenderer() for name in models}, salt=b"s")
    parts = Gateway(catalog=models, store=store, gate=Door(), admission=admission, subscriber=subscriber)  # type: ignore[arg-type]
    with create(parts).test_client() as client:
        yield client


# --- the document


def test_every_route_is_described_and_nothing_else(client: FlaskClient) -> None:
    routes = {
        (method, re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule.rule))
        for rule in client.application.url_map.iter_rules()
        if rule.endpoint not in (ENDPOINT, "health.metrics")  # a WebSocket, told of in words; and the operator's own
        for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}
    }
    described = {(method.upper(), path) for path, methods in DOCUMENT["paths"].items() for method in methods}
    assert described == routes == {(one.method, one.path) for one in OPERATIONS}
    assert len(OPERATIONS) == len(described)
    assert "WebSocket" in DOCUMENT["paths"]["/v1/responses"]["post"]["description"]


def test_a_key_is_asked_for_where_the_document_says_so(client: FlaskClient) -> None:
    rules = {rule.rule: rule.endpoint for rule in client.application.url_map.iter_rules()}
    public = {one.path for one in OPERATIONS if one.public}
    assert {rules[re.sub(r"{(\w+)}", r"<\1>", path)] for path in public} == {
        endpoint for endpoint, policy in POLICIES.items() if policy is Policy.PUBLIC
    }
    for one in OPERATIONS:
        if not one.public:
            answer = client.open(one.path.replace("{", "").replace("}", ""), method=one.method, json={})
            assert answer.status_code == 401, one.path


def test_the_document_is_openapi_3_1_by_its_own_schema() -> None:
    schemathesis.openapi.from_dict(DOCUMENT).validate()
    assert DOCUMENT["openapi"] == "3.1.0"
    for name, schema in DOCUMENT["components"]["schemas"].items():
        Draft202012Validator.check_schema(schema)
        assert not name.startswith("_")


def test_every_reference_leads_somewhere() -> None:
    refs = set(re.findall(r'"\$ref": ?"#/([^"]+)"', json.dumps(DOCUMENT)))
    for ref in refs:
        found: Any = DOCUMENT
        for step in ref.split("/"):
            found = found[step]
    for one in OPERATIONS:
        assert not one.body or f"components/schemas/{one.body}" in refs
    names = [method["operationId"] for methods in DOCUMENT["paths"].values() for method in methods.values()]
    assert len(set(names)) == len(names)


def test_the_page_has_the_document_as_it_is_without_a_key(client: FlaskClient) -> None:
    answer = client.get("/openapi.json")
    assert answer.status_code == 200
    assert answer.get_json() == DOCUMENT
    again = client.get("/openapi.json", headers={"If-None-Match": answer.headers["ETag"]})
    assert (again.status_code, again.data) == (304, b"")


# --- bodies


def _validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(
        {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}  # as OpenAPI resolves them
    )


def _tokenize(body: Any) -> None:
    validated(tokens.TokenizeBody, body, tokens._UNSERVED_OF_CHAT if body.get("messages") is not None else {})
    if body.get("messages") is not None:
        chat.parse({name: body[name] for name in tokens._CHAT if name in body})


#: How each body is checked, up to where the model that is named comes in.
PARSERS: dict[str, Callable[[Any], object]] = {
    "ChatBody": chat.parse,
    "CompletionsBody": completions.parse,
    "CountBody": messages.parse_count,
    "DetokenizeBody": lambda body: validated(tokens.DetokenizeBody, body, {}),
    "EmbeddingsBody": embeddings.parse,
    "MessagesBody": messages.parse,
    "ResponsesBody": responses.parse,
    "SecretBody": lambda body: validated(secrets.SecretBody, without_nulls(body), {}),
    "TokenizeBody": _tokenize,
}
VALIDATORS = {name: _validator(name) for name in PARSERS}
EXAMPLES = {one.body: one.example for one in OPERATIONS if one.body}

_json = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.floats(-1, 2) | st.sampled_from(["", "text", "function", "f"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "text", "name"]), inner),
    max_leaves=4,
)
_LEAVES: dict[str, st.SearchStrategy[Any]] = {
    "string": st.sampled_from(["f", "text", ""]),
    "integer": st.integers(-1, 3),
    "number": st.sampled_from([0, 0.5, 1, -1]),
    "boolean": st.booleans(),
    "null": st.none(),
}


_CALL = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
_TOOL = {"type": "function", "function": {"name": "f"}}
_USER = {"role": "user", "content": "x"}
#: Fields whose forms no single type tells, and whether they are right.
FORMS: list[tuple[str, dict[str, Any], bool]] = [
    ("ChatBody", {"messages": [{"role": "assistant", "tool_calls": [_CALL]}, _USER]}, True),
    ("ChatBody", {"messages": [{"role": "assistant", "tool_calls": []}]}, False),
    ("ChatBody", {"messages": [{"role": "assistant"}]}, False),
    ("ChatBody", {"messages": [{"role": "assistant", "content": None, "function_call": None}]}, True),
    ("ChatBody", {"messages": [{"role": "assistant", "content": "x", "function_call": ""}]}, False),
    ("ChatBody", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, "y"]}]}, True),
    ("ChatBody", {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]}, True),
    ("ChatBody", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, False),
    ("ChatBody", {"tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, True),
    ("ChatBody", {"tools": [_TOOL], "tool_choice": "required"}, True),
    ("ChatBody", {"tools": [_TOOL], "tool_choice": {"type": "function"}}, False),
    ("ChatBody", {"tools": [_TOOL], "tool_choice": "f"}, False),
    ("ChatBody", {"functions": [{"name": "f"}]}, False),
    ("ChatBody", {"function_call": "auto"}, True),
    ("ChatBody", {"function_call": {"name": "f"}}, False),
    ("ChatBody", {"stop": "x"}, True),
    ("ChatBody", {"stop": ["x", "y"]}, True),
    ("ChatBody", {"stop": ""}, False),
    ("ChatBody", {"stop": ["x"] * 5}, False),
    ("ChatBody", {"response_format": {"type": "json_schema"}}, False),
    ("ChatBody", {"response_format": {"type": "json_schema", "json_schema": {"name": "f"}}}, True),
    ("ChatBody", {"structured_outputs": {"json": '{"type": "object"}'}}, True),
    ("ChatBody", {"structured_outputs": {"choice": ["a"], "json": None, "other": False}}, True),
    ("ChatBody", {"structured_outputs": {"choice": ["a"], "json": {}}}, False),
    ("ChatBody", {"structured_outputs": {}}, False),
    ("ChatBody", {"logit_bias": {"5": 1}}, True),
    *(("CompletionsBody", {"prompt": prompt}, True) for prompt in ([1], ["x"], [[1], [2, 3]], ["x", [1]])),
    *(("CompletionsBody", {"prompt": prompt}, False) for prompt in ([], [[]], [-1], [True], [0.5], 1, {})),
    ("CompletionsBody", {"suffix": ""}, True),
    ("CompletionsBody", {"suffix": "x"}, False),
    ("EmbeddingsBody", {"input": ["x", [1]]}, True),
    ("EmbeddingsBody", {"dimensions": 5}, False),
    ("ResponsesBody", {"input": [_USER, {**_USER, "type": None}, {**_USER, "type": "message"}]}, True),
    ("ResponsesBody", {"input": [{**_USER, "type": "reasoning"}]}, True),
    ("ResponsesBody", {"input": [{"type": "function_call"}]}, False),
    ("ResponsesBody", {"input": [_USER, {"type": "web_search_call", "status": 1}]}, True),
    ("ResponsesBody", {"input": [_USER, {"type": "nothing"}]}, False),
    ("ResponsesBody", {"input": [{"id": "msg_x"}], "previous_response_id": "resp_x"}, True),
    ("ResponsesBody", {"input": [{"id": "msg_x", "role": "user"}], "previous_response_id": "resp_x"}, False),
    ("ResponsesBody", {"input": [{"role": "user", "content": None}, _USER]}, True),
    ("ResponsesBody", {"input": [{"role": "user", "content": ["x", {"type": "image", "text": "x"}]}]}, False),
    ("ResponsesBody", {"input": None, "previous_response_id": "resp_x"}, True),
    ("ResponsesBody", {"tools": [{"type": "web_search"}, {"type": "function", "name": "f"}]}, True),
    ("ResponsesBody", {"tools": [{"type": "function"}]}, False),
    ("ResponsesBody", {"tool_choice": {"type": "file_search"}}, False),
    ("ResponsesBody", {"text": {"format": {"type": "json_schema", "name": "f"}}}, False),
    ("ResponsesBody", {"text": {"format": {"type": "json_schema", "name": "f", "schema": {}}}}, True),
    ("MessagesBody", {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, True),
    ("MessagesBody", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, False),
    ("MessagesBody", {"messages": [{"role": "user", "content": None}]}, False),
    ("MessagesBody", {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c"}]}]}, True),
    ("MessagesBody", {"messages": [{"role": "user", "content": [{"type": "tool_result", "content": 1}]}]}, False),
    ("MessagesBody", {"system": [{"type": "text", "text": "x"}]}, True),
    ("MessagesBody", {"system": [{"type": "thinking", "thinking": "x"}]}, False),
    ("MessagesBody", {"tools": [{"name": "f", "input_schema": {}, "type": None, "strict": None}]}, True),
    ("MessagesBody", {"tools": [{"name": "f", "input_schema": {}, "type": ""}]}, False),
    ("MessagesBody", {"tools": [{"name": "f"}]}, False),
    ("MessagesBody", {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "tool"}}, False),
    ("MessagesBody", {"thinking": {"type": "enabled"}}, False),
    ("TokenizeBody", {"prompt": None, "messages": [_USER]}, True),
    ("SecretBody", {"session": None, "expires_after": {"anchor": "created_at", "seconds": 60}}, True),
    ("SecretBody", {"expires_after": {"seconds": 1}}, False),
]


@pytest.mark.parametrize(("name", "fields", "right"), FORMS)
def test_a_form_is_right_to_the_document_as_it_is_to_the_model(name: str, fields: dict[str, Any], right: bool) -> None:
    body = {**EXAMPLES[name], **fields}
    assert VALIDATORS[name].is_valid(body) == right
    try:
        PARSERS[name](body)
    except BadRequest:
        assert not right
    else:
        assert right


def nearly(draw: Callable[[st.SearchStrategy[Any]], Any], schema: dict[str, Any]) -> Any:
    """A value of about this schema: now and then something else is in it, or something is left out."""
    if draw(st.integers(0, 15)) == 0:
        return draw(_json)
    if "$ref" in schema:
        return nearly(draw, _resolved(schema))
    if "anyOf" in schema:
        way = _resolved(draw(st.sampled_from(schema["anyOf"])))
        fields = {
            **schema.get("properties", {}),
            **{n: f for n, f in way.get("properties", {}).items() if "not" not in f},
        }
        return nearly(draw, {**way, **({"properties": fields} if fields else {})})
    if "const" in schema or "enum" in schema:
        return draw(st.sampled_from(schema.get("enum") or [schema["const"]]))
    if "properties" in schema:
        few = {name: draw(st.integers(0, 9)) for name in schema["properties"]}
        return {
            name: nearly(draw, field)
            for name, field in schema["properties"].items()
            if few[name] > (0 if name in schema.get("required", ()) else 6)
        }
    if schema.get("type") == "array":
        return [nearly(draw, schema.get("items", {})) for _ in range(draw(st.integers(0, 2)))]
    return draw(_LEAVES.get(schema.get("type", ""), _json))


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = (
        DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    )
    return found


def test_every_body_has_an_example_that_is_valid() -> None:
    assert EXAMPLES.keys() == PARSERS.keys() == reference.BODIES.keys()
    for name, example in EXAMPLES.items():
        VALIDATORS[name].validate(example)
        PARSERS[name](example)


@pytest.mark.parametrize("name", sorted(PARSERS))
@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_no_body_is_accepted_that_the_document_calls_invalid(name: str, data: st.DataObject) -> None:
    schema = DOCUMENT["components"]["schemas"][name]
    fields = {field: how for way in (schema, *_ways(schema)) for field, how in way.get("properties", {}).items()}
    named = data.draw(st.sets(st.sampled_from(sorted(fields)), min_size=1, max_size=2))
    body = {**EXAMPLES[name], **{field: nearly(data.draw, fields[field]) for field in named}}
    try:
        PARSERS[name](body)
    except BadRequest:
        return
    VALIDATORS[name].validate(body)


def _ways(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (_resolved(way) for way in schema.get("anyOf", ()) if "$ref" in way)


@pytest.mark.parametrize("name", sorted(PARSERS))
def test_null_is_valid_where_it_is_taken_and_nowhere_else(name: str) -> None:
    schema = DOCUMENT["components"]["schemas"][name]
    for way in (schema, *_ways(schema)):
        for field in way.get("properties", ()):
            body = {**EXAMPLES[name], field: None}
            try:
                PARSERS[name](body)
                taken = True
            except BadRequest:
                taken = False
            assert VALIDATORS[name].is_valid(body) == taken, field


# --- the page


class _Named(HTMLParser):
    """The addresses that a page names, and what runs in it."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.inline = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = dict(attrs)
        self.addresses += [told[name] or "" for name in ("src", "href") if name in told]
        self.inline |= tag == "style" or (tag == "script" and "src" not in told) or "style" in told
        self.inline |= any(name.startswith("on") for name in told)


def test_the_page_and_all_that_it_names_comes_from_here(client: FlaskClient) -> None:
    page = client.get("/docs")
    named = _Named(page.text)
    assert page.status_code == 200
    assert page.mimetype == "text/html"
    assert {name.removeprefix("docs/") for name in named.addresses} == {*ASSETS, "llms.txt"}
    assert not named.inline
    kinds = {"css": "text/css", "js": "text/javascript", "png": "image/png", "txt": "text/plain"}
    for name in named.addresses:
        answer = client.get(f"/{name}")
        assert (answer.status_code, answer.mimetype) == (200, kinds[name.rpartition(".")[2]]), name
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.data
    script = client.get("/docs/start.js").text
    assert "://" not in page.text + script
    assert '"openapi.json"' in script
    # The renderer would ask a validator elsewhere.
    assert "validatorUrl: null" in script
    assert all(
        url.startswith("data:") for url in re.findall(r"url\([\"']?([^)\"']+)", client.get("/docs/swagger-ui.css").text)
    )


def test_the_page_may_talk_to_nobody_else(client: FlaskClient) -> None:
    policy = client.get("/docs").headers["Content-Security-Policy"]
    told = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert told["default-src"] == told["base-uri"] == told["frame-ancestors"] == "'none'"
    assert told["script-src"] == told["connect-src"] == "'self'"
    assert not re.search(r"https?:|\*|unsafe", policy)


@pytest.mark.parametrize(
    "name",
    [
        "swagger-ui.js", "index.html", "LICENSE", "VERSION", "oauth2-redirect.html", "favicon-32x32.png",
        "..", "../__init__.py", "%2e%2e/__init__.py", "..%2f__init__.py", "%2fetc%2fpasswd", "//etc/passwd",
        "swagger-ui.css/../../__init__.py", "swagger-ui.css%00", "..%5c__init__.py",
    ],
)  # fmt: skip
def test_no_other_file_is_served(client: FlaskClient, name: str) -> None:
    answer = client.get(f"/docs/{name}")
    assert answer.status_code in (308, 404)  # Werkzeug merges slashes
    if answer.status_code == 308:
        assert client.get(f"/docs/{name}", follow_redirects=True).status_code == 404


# --- /llms.txt


def test_llms_txt_tells_of_every_operation_and_every_error(client: FlaskClient) -> None:
    answer = client.get("/llms.txt")
    assert (answer.status_code, answer.mimetype) == (200, "text/plain")
    told = answer.text
    assert told == llms(reference.LIMITS)
    assert told.startswith("# Forebay\n\n> ")
    for one in OPERATIONS:
        assert f"`{one.method} {one.path}`" in told
    for kind in kinds_of_errors():
        assert f"- {kind.status} `{kind.code or kind.type}`" in told
    for word in (
        "Base URL",
        "Bearer",
        "x-api-key",
        "starting_after",
        "Last-Event-ID",
        "Idempotency-Key",
        "retry-after",
    ):
        assert word in told
    for link in re.findall(r"\]\((/[^)]*)\)", told):
        assert client.get(link).status_code == 200
