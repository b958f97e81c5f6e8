"""The list of models, as OpenAI's clients and as Anthropic's read it."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic.types import ModelInfo
from flask.testing import FlaskClient
from openai.types import Model

from tests.web.test_tokens import client  # noqa: F401

ANTHROPIC = {"anthropic-version": "2023-06-01"}


def test_openais_clients_read_the_list(client: FlaskClient) -> None:  # noqa: F811
    answer = client.get("/v1/models").get_json()

    assert answer["object"] == "list"
    assert [Model.model_validate(each).id for each in answer["data"]] == ["org/caller", "plain", "vectors"]
    assert [(each["max_model_len"], each["kind"]) for each in answer["data"]] == [
        *((4096, "chat"), (512, "chat")),
        (256, "embedding"),
    ]
    assert answer == client.get("/v1/models").get_json()


def test_a_model_may_have_a_slash_in_its_name(client: FlaskClient) -> None:  # noqa: F811
    [listed, *_] = client.get("/v1/models").get_json()["data"]

    assert client.get("/v1/models/org/caller").get_json() == listed
    assert client.get("/v1/models/org%2Fcaller").get_json() == listed


def test_anthropics_clients_read_their_own_shape(client: FlaskClient) -> None:  # noqa: F811
    answer = client.get("/v1/models", headers=ANTHROPIC).get_json()

    assert [ModelInfo.model_validate(each).id for each in answer["data"]] == ["org/caller", "plain", "vectors"]
    assert (answer["has_more"], answer["first_id"], answer["last_id"]) == (False, "org/caller", "vectors")
    one = client.get("/v1/models/org/caller", headers=ANTHROPIC).get_json()
    assert one == answer["data"][0] and one["created_at"] == "1970-01-01T00:00:00Z"


@pytest.mark.parametrize(
    ("asked", "names", "more"),
    [
        ("limit=2", ["org/caller", "plain"], True),
        ("limit=2&after_id=plain", ["vectors"], False),
        ("limit=1&before_id=vectors", ["plain"], True),
        ("before_id=org/caller", [], False),
    ],
)
def test_anthropics_list_comes_in_pages(client: FlaskClient, asked: str, names: list[str], more: bool) -> None:  # noqa: F811
    answer = client.get(f"/v1/models?{asked}", headers=ANTHROPIC).get_json()

    assert ([each["id"] for each in answer["data"]], answer["has_more"]) == (names, more)


@pytest.mark.parametrize("asked", ["limit=0", "limit=1001", "limit=x", "limit=²", "after_id=none", "before_id=none"])
def test_a_page_that_there_is_not_is_refused(client: FlaskClient, asked: str) -> None:  # noqa: F811
    answer = client.get(f"/v1/models?{asked}", headers=ANTHROPIC)

    assert (answer.status_code, answer.get_json()["error"]["param"]) == (400, asked.partition("=")[0])


def test_openais_list_has_no_pages_and_yet_no_wrong_limit(client: FlaskClient) -> None:  # noqa: F811
    assert client.get("/v1/models?limit=1").status_code == 200
    assert client.get("/v1/models?limit=0").status_code == 400


@pytest.mark.parametrize("headers", [{}, ANTHROPIC])
def test_an_unknown_model_is_not_found(client: FlaskClient, headers: dict[str, Any]) -> None:  # noqa: F811
    answer = client.get("/v1/models/none", headers=headers)

    assert answer.status_code == 404
    assert answer.get_json()["error"]["code"] == "model_not_found"
