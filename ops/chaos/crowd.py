"""Clients of every kind, who come again and again until they are told to stop, and know what they must be told.

    stream     a chat stream, read to its end; cut off, it goes on after its last event, at any gateway
    whole      an answer that is not streamed
    socket     a response over a WebSocket; cut off, it is gone on with over another one
    leaver     a chat stream whose client goes away in the middle
    lingerer   one that says so, goes away, and comes back

On the scripted engine a token is a function of the seed, of the prompt (greedy) or of the request's id (sampled), so a
client knows every token that it may be shown, whichever workers and gateways made and passed it on.
"""

from __future__ import annotations

import json
import random
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Literal, get_args

from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, CloseConnection, RejectConnection, TextMessage
from wsproto.events import Request as Upgrade
from wsproto.utilities import ProtocolError

from core.values import Caller, Request, Sampling
from web.dialects.draft import Message
from web.render import ByteRenderer
from workers.scripted import script_seed, scripted_tokens

Kind = Literal["stream", "whole", "socket", "leaver", "lingerer"]
Manner = Literal["sampled", "greedy", "seeded"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MANNERS: tuple[Manner, ...] = get_args(Manner)

#: Tokens of an answer: some are always at their beginning, some at their end.
TOKENS = (50, 400)
#: How long a client is told nothing before it takes its connection for dead, seconds. Longer than any fault.
SILENCE_S = 20.0
#: How often a client that was refused tries again, and how long in all, seconds.
AGAIN_S, PATIENCE_S = 0.25, 30.0
#: How long a lingerer may stay away, and does.
LINGER_S, AWAY_S = 10, 0.4
#: What a stream ends with when its worker died and it could not be gone on with: chat's word, and a response's.
LOST = frozenset({"worker_lost", "server_error"})
#: Refusals that mean "not now".
LATER = frozenset({429, 502, 503})


class CutOff(Exception):
    """The connection ended before the answer did."""


class Refused(Exception):
    """An answer with an error's status, before anything was accepted or gone on with."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(f"{status} {code}")
        self.status, self.code = status, code


@dataclass
class Visit:
    """One request, as its client saw it."""

    kind: Kind
    manner: Manner
    model: str
    prompt: str
    seed: int
    asked: int  #: tokens
    leaves_at: int = 0  #: tokens after which its client goes away
    request_id: str = ""
    text: str = ""
    cursor: str = ""  #: what to come back with: an event's id, or its number
    ends: list[str] = field(default_factory=list)  #: must come to one
    returns: int = 0
    refused: list[str] = field(default_factory=list)  #: "503 store_unavailable", before it was accepted
    unsure: int = 0  #: tries that were cut off before it was known whether they were accepted

    @property
    def left(self) -> bool:
        """Its client did not wait for the end, or could not."""
        return self.ends in (["left"], ["gone"])

    @property
    def sampling(self) -> Sampling:
        seed = self.seed if self.manner == "seeded" else None
        return Sampling(max_tokens=self.asked, temperature=0.0 if self.manner == "greedy" else 1.0, seed=seed)

    def expected(self) -> str:
        """The whole text, had nothing ended it before."""
        request = Request(
            id=self.request_id, model=self.model, caller=Caller(org_id="", project_id="", key_id=""), gateway="",
            prompt_token_ids=ByteRenderer().render([Message("user", self.prompt)]), sampling=self.sampling,
        )  # fmt: skip
        return bytes(scripted_tokens(script_seed(request), self.asked)).decode()

    def fault(self) -> str:
        """What is wrong with what its client was told; empty: nothing."""
        if len(self.ends) != 1:
            return f"told {len(self.ends)} endings: {self.ends}"
        if self.left and not self.text:
            return ""
        expected, end = self.expected(), self.ends[0]
        if not expected.startswith(self.text):
            return "shown a text that is not the engine's"
        if end == "length":
            return "" if self.text == expected else "told that it is whole, and it is not"
        if end in LOST:
            # Also where nothing has been shown: what was on its way to a client is not offered anew.
            return "" if self.manner == "seeded" else "lost with its worker, and could have gone on"
        return "" if self.left else f"told {end!r} without need"

    def body(self) -> dict[str, Any]:
        """Of a chat request."""
        return {"max_tokens": self.asked, "messages": [{"role": "user", "content": self.prompt}], **self._common()}

    def create(self) -> dict[str, Any]:
        """Of a response over a socket."""
        return {"type": "response.create", "max_output_tokens": self.asked, "input": self.prompt, **self._common()}

    def _common(self) -> dict[str, Any]:
        seeded = {"seed": self.seed} if self.manner == "seeded" else {}
        return {"model": self.model, "temperature": self.sampling.temperature, **seeded}


@dataclass
class Crowd:
    """So many clients at once, each in a thread of its own."""

    gateways: Sequence[tuple[str, int]]
    key: str
    model: str
    seed: int
    visits: list[Visit] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def open(self, count: int) -> None:
        for n in range(count):
            chance = random.Random(f"{self.seed}.{n}")
            thread = threading.Thread(target=self._come_again, args=(n, chance), daemon=True)
            self._threads.append(thread)
            thread.start()

    def finish(self, timeout_s: float) -> bool:
        """Nobody new comes; whether all who are there have come to their end in time."""
        self.over.set()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def faults(self) -> Iterator[str]:
        for visit in self.visits:
            if wrong := visit.fault():
                yield f"{visit.kind} {visit.request_id} ({visit.manner}, {len(visit.text)} of {visit.asked}): {wrong}"

    def unsure(self) -> int:
        """Requests that may have been accepted without anybody's having learned of it."""
        return sum(visit.unsure + len(visit.refused) for visit in self.visits)

    def refusals(self) -> Counter[str]:
        return Counter(refusal for visit in self.visits for refusal in visit.refused)

    def _come_again(self, n: int, chance: random.Random) -> None:
        while not self.over.is_set():
            visit = self._visit(n, chance)
            self.visits.append(visit)
            try:
                _Client(self, visit, chance).live()
            except (LookupError, TypeError, ValueError, ProtocolError) as e:  # an answer that is none of ours
                visit.ends.append(repr(e))

    def _visit(self, n: int, chance: random.Random) -> Visit:
        asked = chance.randint(*TOKENS)
        return Visit(
            kind=KINDS[n % len(KINDS)],
            manner=chance.choices(MANNERS, (5, 3, 2))[0],
            model=self.model,
            prompt=f"{n}.{chance.getrandbits(40)}",
            seed=chance.getrandbits(40),
            asked=asked,
            leaves_at=chance.randint(1, asked // 2),
        )


class _Client:
    """One visit under way."""

    def __init__(self, crowd: Crowd, visit: Visit, chance: random.Random) -> None:
        self.crowd, self.visit, self.chance = crowd, visit, chance

    def live(self) -> None:
        match self.visit.kind:
            case "whole":
                self._begin(self._ask_whole)
            case "socket":
                self._begin(self._ask_socket)
            case _:
                self._begin(self._ask_stream)

    def _begin(self, ask: Callable[[], None]) -> None:
        """Until it is accepted, and then until it is over."""
        visit, deadline = self.visit, time.monotonic() + PATIENCE_S
        while True:
            try:
                (self._go_on if visit.request_id else ask)()
                return
            except Refused as e:
                if not visit.request_id:
                    visit.refused.append(str(e))
                if e.status not in LATER or time.monotonic() > deadline:
                    visit.ends.append(f"refused: {e}")
                    return
            except ConnectionRefusedError:
                pass
            except (OSError, CutOff):
                visit.unsure += not visit.request_id
                if visit.kind == "whole" or (self.crowd.over.is_set() and not visit.request_id):
                    visit.ends.append("gone")
                    return
            if time.monotonic() > deadline:
                visit.ends.append("nobody answers")
                return
            time.sleep(AGAIN_S)

    def _go_on(self) -> None:
        """Where it was cut off."""
        self.visit.returns += 1
        if self.visit.kind == "socket":
            number = {"starting_after": int(self.visit.cursor)} if self.visit.cursor else {}
            self._talk({"type": "response.resume", "response_id": self._response_id(), **number})
        else:
            self._read_stream({"Last-Event-ID": self.visit.cursor or f"{self.visit.request_id}:0"})

    # --- chat

    def _ask_whole(self) -> None:
        with self._post("/v1/chat/completions", self.visit.body(), {}) as raw:
            self.visit.request_id = self._head(raw)["x-request-id"]
            answer = _decoded(raw.read())
        [choice] = answer["choices"]
        self.visit.text = choice["message"]["content"]
        self.visit.ends.append(choice["finish_reason"])

    def _ask_stream(self) -> None:
        lingers = {"X-Forebay-Linger": str(LINGER_S)} if self.visit.kind == "lingerer" else {}
        self._read_stream(lingers, leaves_at=0 if self.visit.kind == "stream" else self.visit.leaves_at)
        if self.visit.kind == "lingerer" and not self.visit.ends:
            time.sleep(AWAY_S)
            raise CutOff
        if not self.visit.ends:
            self.visit.ends.append("left")

    def _read_stream(self, headers: Mapping[str, str], leaves_at: int = 0) -> None:
        """To its end, or until its client leaves."""
        body = {**self.visit.body(), "stream": True}
        with self._post("/v1/chat/completions", body, headers) as raw:
            self.visit.request_id = self._head(raw)["x-request-id"]
            for event_id, data in _events(raw):
                if data == "[DONE]":
                    return
                self._take_chunk(json.loads(data))
                self.visit.cursor = event_id or self.visit.cursor
                if leaves_at and len(self.visit.text) >= leaves_at and not self.visit.ends:
                    return
        if not self.visit.ends:
            raise CutOff

    def _take_chunk(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.visit.ends.append(chunk["error"]["code"])
            return
        for choice in chunk["choices"]:
            self.visit.text += choice["delta"].get("content") or ""
            self.visit.ends += [choice["finish_reason"]] if choice["finish_reason"] else []

    @contextmanager
    def _post(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Iterator[BinaryIO]:
        """Asks as HTTP/1.0, which is answered without chunks."""
        raw = json.dumps(body).encode()
        host, port = self.chance.choice(self.crowd.gateways)
        said = {"Authorization": f"Bearer {self.crowd.key}", "Content-Length": str(len(raw)), **headers}
        head = [f"POST {path} HTTP/1.0", "Content-Type: application/json", *(f"{k}: {v}" for k, v in said.items())]
        with socket.create_connection((host, port), timeout=SILENCE_S) as connection:
            connection.sendall("\r\n".join([*head, "", ""]).encode() + raw)
            with connection.makefile("rb") as answer:
                yield answer

    @staticmethod
    def _head(raw: Any) -> dict[str, str]:
        status = raw.readline().split()
        if len(status) < 2:
            raise CutOff
        headers: dict[str, str] = {}
        while (line := raw.readline().strip()) != b"":
            name, _, value = line.decode().partition(": ")
            headers[name.lower()] = value
        if status[1] != b"200":
            raise Refused(int(status[1]), _decoded(raw.read())["error"]["code"])
        return headers

    # --- sockets

    def _ask_socket(self) -> None:
        self._talk(self.visit.create())

    def _talk(self, command: Mapping[str, Any]) -> None:
        """Send a command, and hear its response to the end."""
        with closing(_Wire(self.chance.choice(self.crowd.gateways), self.crowd.key)) as wire:
            wire.send(json.dumps(command))
            for frame in wire.frames():
                self._take_event(json.loads(frame))
                if self.visit.ends:
                    return
        raise CutOff

    def _take_event(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == "error":
            raise Refused(event["status"], event["error"]["code"])
        if kind == "response.created":
            self.visit.request_id = str(uuid.UUID(event["response"]["id"].removeprefix("resp_")))
        elif kind == "response.output_text.delta":
            self.visit.text += event["delta"]
        elif kind == "response.completed":
            self.visit.ends.append("stop")
        elif kind == "response.incomplete":
            reason = (event["response"]["incomplete_details"] or {}).get("reason", event["response"]["status"])
            self.visit.ends.append("length" if reason == "max_output_tokens" else reason)
        elif kind == "response.failed":
            self.visit.ends.append(event["response"]["error"]["code"])
        self.visit.cursor = str(event["sequence_number"])

    def _response_id(self) -> str:
        return "resp_" + self.visit.request_id.replace("-", "")


class _Wire:
    """One WebSocket. Made, it is open."""

    def __init__(self, gateway: tuple[str, int], key: str) -> None:
        self._ws = WSConnection(ConnectionType.CLIENT)
        self._sock = socket.create_connection(gateway, timeout=SILENCE_S)
        try:
            headers = [(b"Authorization", f"Bearer {key}".encode())]
            self._say(Upgrade(host=gateway[0], target="/v1/responses", extra_headers=headers))
            if not isinstance(event := next(self._heard(), None), AcceptConnection):
                # Not upgraded, so nothing was asked.
                raise ConnectionRefusedError(event.status_code if isinstance(event, RejectConnection) else "cut off")
        except OSError as e:
            self._sock.close()
            raise ConnectionRefusedError(str(e)) from e

    def send(self, text: str) -> None:
        self._say(TextMessage(data=text))

    def frames(self) -> Iterator[str]:
        """Until it is closed."""
        parts: list[str] = []
        for event in self._heard():
            if isinstance(event, TextMessage):
                parts.append(event.data)
                if event.message_finished:
                    yield "".join(parts)
                    parts.clear()

    def close(self) -> None:
        with suppress(OSError, ProtocolError):
            self._say(CloseConnection(code=1000))
        self._sock.close()

    def _say(self, event: Any) -> None:
        self._sock.sendall(self._ws.send(event))

    def _heard(self) -> Iterator[Any]:
        while data := self._sock.recv(65536):
            self._ws.receive_data(data)
            for event in self._ws.events():
                yield event
                if isinstance(event, CloseConnection | RejectConnection):
                    return


def _events(raw: Any) -> Iterator[tuple[str, str]]:
    """(id, data) of each server-sent event that came whole."""
    event_id = data = ""
    for line in raw:
        if not line.endswith(b"\n"):
            return
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name == "id":
            event_id = value
        elif name == "data":
            data = value
        elif not name and data:
            yield event_id, data
            event_id = data = ""


def _decoded(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        raise CutOff from None
