"""What is wrong is refused before anything is queued, as JSON in the OpenAI envelope, and costs nothing."""

from __future__ import annotations

from typing import Any

import pytest
import requests

from core.accounts import keys
from tests.platform import MODEL, Platform, handshake

HELLO = [{"role": "user", "content": "hello"}]
GOOD = {"model": MODEL, "messages": HELLO, "max_tokens": 3}
CHAT = "/v1/chat/completions"


def envelope(answer: requests.Response) -> dict[str, Any]:
    """The error object, checked for its form."""
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and (error["code"] is None or isinstance(error["code"], str))
    return error


@pytest.fixture(autouse=True)
def costs_nothing(platform: Platform) -> Any:
    before = (len(platform.rows()), platform.store.client.keys("f1:{org:*}:hold:*"))
    yield
    assert (len(platform.rows()), platform.store.client.keys("f1:{org:*}:hold:*")) == before


@pytest.mark.parametrize(
    ("changed", "status", "param"),
    [
        ({"model": "nothing-like-it"}, 404, "model"),
        ({"model": 5}, 400, "model"),
        ({"model": None}, 400, "model"),
        ({"messages": None}, 400, "messages"),
        ({"messages": []}, 400, "messages"),
        ({"messages": "hello"}, 400, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages[0].content"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": "many"}, 400, "max_tokens"),
        ({"max_tokens": 10**6}, 400, "max_tokens"),
        ({"temperature": 9}, 400, "temperature"),
        ({"stream": "yes"}, 400, "stream"),
        ({"n": 9}, 400, "n"),
        ({"min_tokens": 4}, 400, "min_tokens"),
        ({"prompt_embeds": "AAAA"}, 400, "prompt_embeds"),
        ({"prompt_logprobs": 1}, 400, "prompt_logprobs"),
        ({"chat_template": "{{ 1 }}"}, 400, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, 400, "chat_template_kwargs"),
        ({"structured_outputs": {"regex": "(a+)+$"}}, 400, "structured_outputs"),
        ({"structured_outputs": {"json": {"pattern": "(a+)+$"}}}, 400, "structured_outputs.json"),
        ({"structured_outputs": {"json": {"$ref": "http://a/b"}}}, 400, "structured_outputs.json"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, 400, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "messages"),
    ],
)
def test_a_bad_field_is_named(platform: Platform, changed: dict[str, Any], status: int, param: str) -> None:
    answer = platform.post(CHAT, {**GOOD, **changed})

    assert (answer.status_code, envelope(answer)["param"]) == (status, param)


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"model": NaN}', b"[" * 900 + b"]" * 900]
)
def test_what_is_not_a_json_object_is_refused(platform: Platform, raw: bytes) -> None:
    answer = requests.post(
        platform.url + CHAT, data=raw, headers={"Authorization": f"Bearer {platform.key}"}, timeout=10
    )

    assert answer.status_code == 400
    assert envelope(answer)["type"] == "invalid_request_error"


def unknown_key() -> str:
    return keys.mint("live", "A" * keys.ID_LENGTH)


@pytest.mark.parametrize("key", ["", "sk-other", "fb_live_short", "unknown", "last letter changed"])
def test_a_wrong_key_is_401_on_every_address(platform: Platform, key: str) -> None:
    if key == "unknown":
        key = unknown_key()
    if key == "last letter changed":
        key = platform.key[:-1] + ("a" if platform.key[-1] != "a" else "b")
    for path in (CHAT, "/v1/responses"):
        answer = platform.post(path, GOOD, key=key)
        assert (answer.status_code, envelope(answer)["code"]) == (401, "invalid_api_key")
    answer = requests.get(f"{platform.url}/v1/models", headers={"Authorization": f"Bearer {key}"}, timeout=10)
    assert answer.status_code == 401


def test_no_key_is_401(platform: Platform) -> None:
    assert requests.post(platform.url + CHAT, json=GOOD, timeout=10).status_code == 401


def test_a_body_too_large_is_413(platform: Platform) -> None:
    answer = platform.post(CHAT, {**GOOD, "metadata": {"x": "y" * (4 * 2**20)}})

    assert (answer.status_code, envelope(answer)["code"]) == (413, "request_too_large")


def test_an_unknown_path_is_404_and_a_wrong_method_405(platform: Platform) -> None:
    unknown = platform.post("/v1/nothing", {})
    wrong = requests.get(platform.url + CHAT, headers={"Authorization": f"Bearer {platform.key}"}, timeout=10)

    assert (unknown.status_code, envelope(unknown)["code"]) == (404, "not_found")
    assert (wrong.status_code, envelope(wrong)["code"]) == (405, "method_not_allowed")
    assert "POST" in wrong.headers["allow"]


def test_the_sdk_raises_its_own_errors(platform: Platform) -> None:
    import openai

    with pytest.raises(openai.NotFoundError) as caught:
        platform.client().chat.completions.create(model="nothing-like-it", messages=HELLO)  # type: ignore[call-overload]
    assert caught.value.code == "model_not_found" and caught.value.request_id


# --- WebSocket


def test_a_socket_is_refused_before_the_upgrade(platform: Platform) -> None:
    assert handshake(platform)[0] == 101
    status, said = handshake(platform, Authorization="Bearer nobody")
    assert status == 401 and "invalid_api_key" in said
    assert handshake(platform, Sec_WebSocket_Version="8")[0] == 426
    assert handshake(platform, Sec_WebSocket_Key=None)[0] == 400


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        ("not json", "invalid_json"),
        ('{"a":' * 100_000, "invalid_json"),
        ('{"a":' * 500 + "1" + "}" * 500, "invalid_json"),
        (
            '{"type": "response.create", "model": "scripted", "input": "x", "prompt_embeds": "x"}',
            "unsupported_parameter",
        ),
        ('{"type": "response.dance"}', "unknown_event"),
        ('{"type": "response.create", "model": "nothing", "input": "x"}', "model_not_found"),
        ('{"type": "response.create", "model": "scripted"}', "missing_required_parameter"),
        ('{"type": "response.create", "model": "scripted", "input": "x", "max_output_tokens": -1}', "invalid_value"),
        ('{"type": "response.cancel", "response_id": "resp_1"}', "response_not_found"),
    ],
)
def test_a_bad_frame_is_answered_and_leaves_the_socket_open(platform: Platform, frame: str, code: str) -> None:
    import orjson
    from websockets.sync.client import connect

    url = platform.url.replace("http", "ws") + "/v1/responses"
    with connect(url, additional_headers={"Authorization": f"Bearer {platform.key}"}) as ws:
        for _ in range(2):
            ws.send(frame)
            answer = orjson.loads(ws.recv(timeout=10))
            assert (answer["type"], answer["error"]["code"]) == ("error", code)


def test_a_frame_too_large_closes_with_1009(platform: Platform) -> None:
    """Clients fall back to HTTP on exactly this code."""
    from websockets.exceptions import ConnectionClosed
    from websockets.sync.client import connect

    url = platform.url.replace("http", "ws") + "/v1/responses"
    with connect(url, additional_headers={"Authorization": f"Bearer {platform.key}"}, max_size=None) as ws:
        ws.send("x" * (4 * 2**20 + 1))
        with pytest.raises(ConnectionClosed) as caught:
            ws.recv(timeout=10)
    assert caught.value.rcvd is not None and caught.value.rcvd.code == 1009
