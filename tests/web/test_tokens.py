"""Tokenize, detokenize and the list of models: vLLM's shapes, OpenAI's and Anthropic's, behind the gate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from flask.testing import FlaskClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core import catalog
from core.accounts.keys import KeyRecord
from core.errors import Unauthenticated
from core.redis import Store
from web.admission import Admission
from web.app import Gateway, create
from web.render import ByteRenderer
from web.routes import tokens
from web.subscriber import Subscriber

TOML = """
[models."org/caller"]
tokenizer = "bytes"
context_tokens = 4096
max_output_tokens = 64
engine = { tool_parser = "scripted" }

[models.plain]
tokenizer = "bytes"
context_tokens = 512
max_output_tokens = 64

[models.vectors]
kind = "embedding"
tokenizer = "bytes"
context_tokens = 256
max_output_tokens = 64
"""
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ASKED = [{"role": "user", "content": "hi"}]


class Door:
    """A gate that knows one key."""

    def authenticate(self, authorization: str, **_: Any) -> KeyRecord:
        if authorization != "Bearer mine":
            raise Unauthenticated
        return KeyRecord(key_id="mine", org_id="o", project_id="p", secret_hmac=b"")


@pytest.fixture
def client(store: Store, valkey_url: str, tmp_path: Any) -> Iterator[FlaskClient]:
    path = tmp_path / "catalog.toml"
    path.write_text(TOML)
    models = catalog.load(path)
    subscriber = Subscriber(store, valkey_url, models, "g1")
    renderers = {name: ByteRenderer() for name in models}
    admission = Admission(models, store, subscriber, renderers, salt=b"s")
    parts = Gateway(catalog=models, store=store, gate=Door(), admission=admission, subscriber=subscriber)  # type: ignore[arg-type]
    with create(parts).test_client() as client:
        client.environ_base["HTTP_AUTHORIZATION"] = "Bearer mine"
        yield client


def refused(answer: Any) -> tuple[int, str | None]:
    return answer.status_code, answer.get_json()["error"]["param"]


# --- tokens


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_a_text_and_its_tokens(client: FlaskClient, prefix: str) -> None:
    answer = client.post(f"{prefix}/tokenize", json={"model": "plain", "prompt": "hé"}).get_json()

    assert answer == {"count": 3, "max_model_len": 512, "tokens": [104, 195, 169]}
    back = client.post(f"{prefix}/detokenize", json={"model": "plain", "tokens": answer["tokens"]}).get_json()
    assert back == {"prompt": "hé"}


def test_the_spelling_of_each_token_is_told_if_asked_for(client: FlaskClient) -> None:
    answer = client.post("/tokenize", json={"model": "plain", "prompt": "hi", "return_token_strs": True}).get_json()

    assert answer["token_strs"] == ["h", "i"]


def test_a_conversation_has_the_tokens_that_it_would_be_admitted_with(client: FlaskClient) -> None:
    bare = client.post("/tokenize", json={"model": "org/caller", "messages": ASKED}).get_json()
    tools = client.post("/tokenize", json={"model": "org/caller", "messages": ASKED, "tools": [TOOL]}).get_json()

    assert bytes(bare["tokens"]) == b"user: hi\nassistant: "
    assert bytes(tools["tokens"]).startswith(b"tools: [") and tools["count"] == len(tools["tokens"]) > bare["count"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None, "prompt": "x"}, "model"),
        ({}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "x" * (tokens.TEXT_CHARS_MAX + 1)}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": ASKED, "tools": [TOOL]}, "tools"),
        ({"messages": ASKED, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": ASKED, "add_generation_prompt": False}, "add_generation_prompt"),
        ({"messages": ASKED, "chat_template": "x"}, "chat_template"),
    ],
)
def test_what_cannot_be_tokenized_is_refused_by_name(client: FlaskClient, fields: dict[str, Any], param: str) -> None:
    assert refused(client.post("/tokenize", json={"model": "plain", **fields})) == (400, param)


@pytest.mark.parametrize("tokens", [[-1], [256], [2**40], [1.5], ["1"], [True], "1", None, [1] * (2**20 + 1)])
def test_tokens_that_there_are_not_are_refused(client: FlaskClient, tokens: Any) -> None:
    status, param = refused(client.post("/detokenize", json={"model": "plain", "tokens": tokens}))

    assert status == 400 and (param or "").startswith("tokens")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")))
def test_a_text_comes_back_as_it_was(client: FlaskClient, text: str) -> None:
    found = client.post("/tokenize", json={"model": "plain", "prompt": text}).get_json()["tokens"]

    assert client.post("/detokenize", json={"model": "plain", "tokens": found}).get_json() == {"prompt": text}


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize"])
def test_both_need_a_key_and_a_model(client: FlaskClient, path: str) -> None:
    body = {"model": "none", "prompt": "x", "tokens": [1]}

    assert client.post(path, json=body).get_json()["error"]["code"] == "model_not_found"
    client.environ_base["HTTP_AUTHORIZATION"] = "Bearer other"
    assert client.post(path, json=body).status_code == 401


def test_an_embedding_model_has_tokens_too(client: FlaskClient) -> None:
    assert client.post("/tokenize", json={"model": "vectors", "prompt": "x"}).get_json()["count"] == 1
    assert refused(client.post("/tokenize", json={"model": "vectors", "messages": ASKED})) == (400, "model")


# --- keys


def test_a_key_may_come_in_anthropics_header(client: FlaskClient) -> None:
    del client.environ_base["HTTP_AUTHORIZATION"]

    assert client.get("/v1/models").status_code == 401
    assert client.get("/v1/models", headers={"x-api-key": "other"}).status_code == 401
    assert client.get("/v1/models", headers={"x-api-key": "mine"}).status_code == 200


# --- counting for Anthropic


def test_tokens_of_a_message_are_counted_without_being_generated(client: FlaskClient) -> None:
    asked = {"model": "org/caller", "system": "Be.", "messages": ASKED}

    answer = client.post("/v1/messages/count_tokens", json=asked)

    assert answer.get_json() == {"input_tokens": len("system: Be.\nuser: hi\nassistant: ")}
    wrong = client.post("/v1/messages/count_tokens", json={**asked, "model": "vectors"})
    assert (wrong.status_code, wrong.get_json()["error"]["type"]) == (400, "invalid_request_error")
    assert wrong.headers["request-id"] == wrong.get_json()["request_id"] == wrong.headers["x-request-id"]
