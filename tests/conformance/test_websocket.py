"""WebSocket by what others say of it: the Autobahn cases, Open Responses' scenarios, and openai-python's own client."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jsonschema
import kosoku
import llm_comply
import pytest
import requests
from openai import AsyncOpenAI
from openai.lib.responses_websocket import (
    AsyncResponsesWebSocketSession,
    ResponsesWebSocketError,
    ResponsesWebSocketLimits,
    ResponsesWebSocketSession,
)
from websockets.sync.client import ClientConnection, connect

from tests.platform import MODEL, Platform, free_ports, until

Event = dict[str, Any]

# --- Autobahn

#: Refused cleanly: text deltas gain nothing by compression (web/transports/safe_socket.py).
COMPRESSION = ("12.*", "13.*")
CORE, LIMITS = 247, 54


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    [port] = free_ports(1)
    process = subprocess.Popen([sys.executable, "-m", "tests.conformance.echo", str(port)])
    try:
        until(lambda: _answers(port), "the echo server")
        yield f"ws://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(20)


def _answers(port: int) -> bool:
    try:
        return requests.get(f"http://127.0.0.1:{port}/", timeout=1).status_code > 0
    except (requests.ConnectionError, requests.Timeout):
        return False


def verdicts(url: str, **which: Any) -> dict[str, tuple[str, str]]:
    async def run() -> list[Any]:
        try:
            return list(await kosoku.run_fuzzingclient(url, **which))
        except kosoku.FailureError as e:
            return list(e.results)

    results = asyncio.run(run())
    return {case.case_id: (case.behavior.value, case.behavior_close.value) for case in results}


def test_every_autobahn_case_passes(echo: str) -> None:
    """Of our own WebSocket class under our server's own configuration."""
    found = verdicts(echo, exclude_cases=list(COMPRESSION))
    limits = {case for case in found if case.startswith("9.")}

    assert {case: said for case, said in found.items() if set(said) - {"OK", "INFORMATIONAL"}} == {}
    assert (len(found) - len(limits), len(limits)) == (CORE, LIMITS)


# These cases leave files open that they read their messages from.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_compression_is_refused_cleanly(echo: str) -> None:
    found = verdicts(echo, cases=["12.1.1", "12.5.1", "13.1.1"])

    assert set(found.values()) == {("UNIMPLEMENTED", "OK")}


# --- Open Responses' eight scenarios (openresponses/openresponses, 2026-04-24), against the specification's own schemas


@pytest.fixture(scope="module")
def schemas() -> dict[str, Any]:
    path = Path(llm_comply.__file__).parent / "specs" / "openresponses.json"
    document: dict[str, Any] = json.loads(path.read_text())
    return document


class Session:
    """One connection, whose turns are sent one after the other."""

    def __init__(self, ws: ClientConnection, schemas: dict[str, Any]) -> None:
        self.ws, self.schemas = ws, schemas

    def check(self, what: Any, name: str) -> None:
        jsonschema.validate(what, {**self.schemas, "$ref": f"#/components/schemas/{name}"})

    def turn(self, text: Any, **fields: Any) -> Event:
        """The response, or the error frame, that a turn ends with."""
        asked = {"type": "response.create", "model": MODEL, "store": False, "input": text, **fields}
        self.check(asked, "WebSocketResponseCreateEvent")
        self.ws.send(json.dumps(asked))
        numbers: list[int] = []
        while True:
            event = json.loads(self.ws.recv(timeout=20))
            if event["type"] == "error":
                self.check(event, "WebSocketErrorEvent")
                return dict(event)
            numbers.append(event["sequence_number"])
            if event["type"] in ("response.completed", "response.incomplete", "response.failed"):
                assert numbers == sorted(set(numbers)), "each event has its own number"
                self.check(event["response"], "ResponseResource")
                return dict(event["response"])

    def answered(self, text: Any, **fields: Any) -> Event:
        response = self.turn(text, **fields)
        assert response.get("status") in ("completed", "incomplete") and response["output"], response
        return response


@contextmanager
def session(platform: Platform, schemas: dict[str, Any]) -> Iterator[Session]:
    headers = {"Authorization": f"Bearer {platform.key}"}
    with connect(platform.url.replace("http", "ws") + "/v1/responses", additional_headers=headers) as ws:
        yield Session(ws, schemas)


def not_found(said: Event) -> bool:
    return said["type"] == "error" and said["error"]["code"] == "previous_response_not_found" and said["status"] == 400


def test_websocket_response(platform: Platform, schemas: dict[str, Any]) -> None:
    with session(platform, schemas) as one:
        one.answered([{"type": "message", "role": "user", "content": "Count from 1 to 3."}])


def test_websocket_sequential_responses(platform: Platform, schemas: dict[str, Any]) -> None:
    with session(platform, schemas) as one:
        first, second = one.answered("Reply with exactly: first"), one.answered("Reply with exactly: second")
    assert first["id"] != second["id"]


def test_websocket_continuation(platform: Platform, schemas: dict[str, Any]) -> None:
    """Only the new input is sent; the prompt is the whole conversation."""
    with session(platform, schemas) as one:
        first = one.answered("Remember the code word: cobalt. Reply with OK.")
        second = one.answered("What is the code word?", previous_response_id=first["id"])
        third = one.answered("And now?", previous_response_id=second["id"])
    assert second["previous_response_id"] == first["id"]
    sizes = [response["usage"]["input_tokens"] for response in (first, second, third)]
    assert sizes[1] > sizes[0] + first["usage"]["output_tokens"] / 2 and sizes[2] > sizes[1]


def test_websocket_reconnect_store_false_recovery(platform: Platform, schemas: dict[str, Any]) -> None:
    with session(platform, schemas) as one:
        first = one.answered("Remember the code word: copper. Reply with OK.")
    with session(platform, schemas) as again:
        assert not_found(again.turn("Try to continue.", previous_response_id=first["id"]))
        again.answered([{"type": "message", "role": "user", "content": "Start a new response."}])


def test_a_stored_response_is_gone_on_from_after_a_reconnect(platform: Platform, schemas: dict[str, Any]) -> None:
    with session(platform, schemas) as one:
        first = one.answered("Remember the code word: tin.", store=True)
        assert first["store"] is True
    with session(platform, schemas) as again:
        second = again.answered("Go on.", previous_response_id=first["id"])
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]


@pytest.mark.parametrize("how", [{"generate": False, "store": True}, {"store": False}])
def test_what_goes_on_from_what_is_not_stored_is_stored_with_all_before_it(
    platform: Platform, schemas: dict[str, Any], how: dict[str, Any]
) -> None:
    """A warm-up says that it is not stored, whatever it asks for."""
    with session(platform, schemas) as one:
        first = one.turn("Remember the code word: bismuth.", **how)
        second = one.answered("Go on.", previous_response_id=first["id"], store=True)
        third = one.answered("And on.", previous_response_id=second["id"], store=True)
    assert (first["store"], second["store"], third["store"]) == (False, True, True)
    with session(platform, schemas) as again:
        fourth = again.answered("And on.", previous_response_id=third["id"], store=True)
        assert not_found(again.turn("And on.", previous_response_id=first["id"]))
    assert second["previous_response_id"] == first["id"]
    sizes = [response["usage"]["input_tokens"] for response in (second, third, fourth)]
    assert sizes[0] < sizes[1] < sizes[2]


def test_websocket_generate_false(platform: Platform, schemas: dict[str, Any]) -> None:
    """A warm-up has an id, no output and no cost, and can be gone on from."""
    with session(platform, schemas) as one:
        warm = one.turn("Remember the code word: zinc.", generate=False)
        assert (warm["status"], warm["output"], warm["usage"]["total_tokens"]) == ("completed", [], 0)
        after = one.answered("Go on.", previous_response_id=warm["id"])
        alone = one.answered("Go on.")
    assert after["usage"]["input_tokens"] > alone["usage"]["input_tokens"]


def test_websocket_previous_response_not_found(platform: Platform, schemas: dict[str, Any]) -> None:
    with session(platform, schemas) as one:
        said = one.turn("This should fail.", previous_response_id="resp_openresponses_missing_1")
        assert not_found(said) and said["error"]["param"] == "previous_response_id"
        assert "resp_openresponses_missing_1" in said["error"]["message"]


def test_websocket_failed_continuation_evicts_cache(platform: Platform, schemas: dict[str, Any]) -> None:
    orphan = [{"type": "function_call_output", "call_id": "call_missing", "output": "No such call."}]
    with session(platform, schemas) as one:
        first = one.answered("Remember the code word: ember. Reply with OK.")
        failed = one.turn(orphan, previous_response_id=first["id"])
        assert failed["type"] == "error" and failed["status"] == 400
        assert not_found(one.turn("Try to continue.", previous_response_id=first["id"]))


def test_a_failed_fork_on_another_lane_keeps_the_response(platform: Platform, schemas: dict[str, Any]) -> None:
    orphan = [{"type": "function_call_output", "call_id": "call_missing", "output": "No such call."}]
    with session(platform, schemas) as one:
        first = one.answered("Remember the code word: ember.")
        fork = {"type": "response.create", "stream_id": "fork", "model": MODEL, "store": False}
        one.ws.send(json.dumps({**fork, "input": orphan, "previous_response_id": first["id"]}))
        assert json.loads(one.ws.recv(timeout=10))["stream_id"] == "fork"
        one.answered("Go on.", previous_response_id=first["id"])


def test_websocket_compact_new_chain(platform: Platform, schemas: dict[str, Any]) -> None:
    """A compacted window begins a new chain without previous_response_id. There is no `/v1/responses/compact` here, and
    so no such window of ours: the client's own, of items in the same form, stands for it."""
    window = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "The code word: slate."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "OK."}]},
    ]
    with session(platform, schemas) as one:
        response = one.answered([*window, {"type": "message", "role": "user", "content": "Continue."}], tools=[])
    assert response["previous_response_id"] is None


# --- openai-python

LANES = ResponsesWebSocketLimits(
    max_lanes=4, max_events_per_lane=1024, max_events=4096, max_bytes_per_lane=2**22, max_bytes=2**24,
    max_response_bytes=None,
)  # fmt: skip


def create(text: str, **fields: Any) -> Any:
    return {"type": "response.create", "model": MODEL, "input": text, "store": False, **fields}


def test_the_sdks_lanes_sync(platform: Platform) -> None:
    client = platform.client()
    with client.responses.connect() as connection, ResponsesWebSocketSession(connection, limits=LANES) as lanes:
        one, two = lanes.lane("one"), lanes.lane("two")
        one.send(create("hello"))
        two.send(create("good evening"))
        first, second = two.get_final_response(timeout=20), one.get_final_response(timeout=20)
        assert first.output_text and second.output_text and first.id != second.id
        one.send(create("go on", previous_response_id=second.id))
        assert one.get_final_response(timeout=20).previous_response_id == second.id
        two.send(create("go on", previous_response_id="resp_nothing"))
        with pytest.raises(ResponsesWebSocketError):
            two.get_final_response(timeout=20)
        lanes.default.send(create("hello", generate=False))
        assert lanes.default.get_final_response(timeout=20).output == []


def test_the_sdks_lanes_async(platform: Platform) -> None:
    async def run() -> list[str]:
        async with (
            AsyncOpenAI(base_url=f"{platform.url}/v1", api_key=platform.key, max_retries=0) as client,
            client.responses.connect() as connection,
            AsyncResponsesWebSocketSession(connection, limits=LANES) as lanes,
        ):
            both = [lanes.lane("one"), lanes.lane("two")]
            for lane in both:
                await lane.send(create("hello"))
            return [
                response.output_text for response in await asyncio.gather(*[one.get_final_response() for one in both])
            ]

    assert all(asyncio.run(asyncio.wait_for(run(), 30)))
