"""A key and two prompts that are looked for everywhere after all has happened to them that can.

`SAID` is in prompts that nobody asked to store, `KEPT` in those that a caller did. Each is searched in the forms that
carry it: as it is, in base64 and in hex. What is left out of the search is named, each with its reason, and is shown to
have been there: a search that finds nothing anywhere proves nothing.
"""

from __future__ import annotations

import base64
import json
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
import psycopg2
import psycopg2.extras
import pytest
import redis
import requests
from click.testing import CliRunner
from websockets.exceptions import WebSocketException
from websockets.sync.client import connect

from core.accounts import keys
from core.redis import tag
from ops.cli import cli
from tests import platform as platforms
from tests.laws.test_keys import new_key
from tests.platform import CATALOG, MODEL, PEPPER, Platform, command, commands_environ, handshake, kill, until

SAID = "canaryq7said"
KEPT = "canaryq7kept"
TOOLS = f"{MODEL}-tools"
VECTORS = f"{MODEL}-vectors"
CATALOGUE = f"""{CATALOG}
[models.{TOOLS}]
tokenizer = "bytes"
context_tokens = 4096
max_output_tokens = 256
engine = {{ tool_parser = "scripted", reasoning_parser = "scripted" }}
workers = {{ min = 1, max = 1 }}
[models.{VECTORS}]
kind = "embedding"
tokenizer = "bytes"
context_tokens = 4096
workers = {{ min = 1, max = 1 }}
"""
SALT = "a salt for tests only"

#: Redis keys that hold a prompt that nobody asked to store, and until when.
PAYLOAD = {
    r"f1:\{[^}]+\}:body:[0-9a-f-]{36}": "the prompt: until its worker, or its client's leaving, ends the request; "
    "a day at most (BODY_MS)",
}
#: Those that hold one that its caller asked to store.
PAYLOAD_KEPT = {
    **PAYLOAD,
    r"f1:\{[^}]+\}:view:[0-9a-f-]{36}": "its input items and instructions, for whichever gateway sees its end: until "
    "15 minutes past it (FORGET_MS); long items until its row is in Postgres",
}
#: Postgres tables that hold one that its caller asked to store: for as long as the organisation says.
TABLES_KEPT = {"responses": "the response that its caller asked to store, and may read, go on from and delete"}


@dataclass
class Evidence:
    """Everything that was said, by place."""

    texts: list[tuple[str, str]] = field(default_factory=list)

    def add(self, where: str, said: str | bytes) -> None:
        self.texts.append((where, said if isinstance(said, str) else said.decode("latin-1")))

    def of(self, word: str) -> list[str]:
        """The places where it is, in any form."""
        found = re.compile("|".join(map(re.escape, forms(word))), re.IGNORECASE)
        return sorted({where for where, text in self.texts if found.search(text)})


def forms(word: str) -> list[str]:
    """A word as it may be written: plain, in hex, in base64 wherever in a longer text it stands."""
    raw = word.encode()
    shifted = (base64.b64encode(b"\0" * n + raw)[4 if n else 0 : -4].decode() for n in range(3))
    return [word, raw.hex(), *shifted]


def secret_of(key: str) -> str:
    """The part of a key that nobody may know: what follows its id."""
    return key.removeprefix("fb_live_")[keys.ID_LENGTH :].strip("_")[:20]


@pytest.fixture(scope="module")
def cage() -> Iterator[Platform]:
    yield from platforms.alone(catalog=CATALOGUE)


@dataclass
class Asker:
    """Asks in the canaries' name, and writes down every error that it is told."""

    platform: Platform
    evidence: Evidence
    statuses: list[int] = field(default_factory=list)

    def ask(self, method: str, path: str, body: Any = None, *, key: str | None = None, **options: Any) -> Any:
        headers = {"Authorization": f"Bearer {self.platform.key if key is None else key}", **options.pop("headers", {})}
        url = f"http://127.0.0.1:{self.platform.ports[len(self.statuses) % 2]}{path}"
        answer = requests.request(method, url, json=body, headers=headers, timeout=30, **options)
        self.note(f"{method} {path}", answer.status_code, answer.text)
        return answer

    def note(self, what: str, status: int, said: str) -> None:
        self.statuses.append(status)
        if status >= 400:
            self.evidence.add(f"error {status} of {what}", said)


def test_a_key_and_a_prompt_are_nowhere_but_where_they_must_be(cage: Platform) -> None:
    evidence = Evidence()
    asker = Asker(cage, evidence)
    until(lambda: len(cage.workers()) == 2, "its workers")

    for scene in (good, bad, strange, over_sockets, after_faults_of_stores, with_killed_workers):
        scene(asker)
    operate(asker)
    with running(asker) as runs:
        look(cage, evidence)
        held = evidence.of(SAID)
    until(lambda: not cage.store.client.exists(runs), "the prompt of what is over to be gone")

    print(f"{len(evidence.texts)} places, {len(asker.statuses)} answers")
    assert {200, 400, 401, 404, 413} <= set(asker.statuses)
    assert len(secret_of(cage.key)) == 20 and secret_of(cage.key) in cage.key
    leaks = {
        "the key": evidence.of(secret_of(cage.key)),
        "the pepper": evidence.of(PEPPER),
        "the salt": evidence.of(SALT),
        "a prompt": unexplained(held, PAYLOAD, {}),
        "a prompt to be kept": unexplained(evidence.of(KEPT), PAYLOAD_KEPT, TABLES_KEPT),
    }
    assert {what: where for what, where in leaks.items() if where} == {}
    # And the search finds what is there.
    assert f"redis {runs}" in held
    assert any(where.startswith("table responses") for where in evidence.of(KEPT))


def unexplained(places: list[str], redis_keys: dict[str, str], tables: dict[str, str]) -> list[str]:
    named = [*(f"redis {pattern}" for pattern in redis_keys), *(f"table {name}.*" for name in tables)]
    if tables:
        # The last statement of an idle connection, for who may read the table anyway.
        named.append("table pg_stat_activity.*INSERT INTO responses.*")
    return [where for where in places if not any(re.fullmatch(each, where, re.DOTALL) for each in named)]


# --- what happens to them


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": SAID}], "max_tokens": 5, **fields}


def response(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": SAID, "max_output_tokens": 5, "store": False, **fields}


TOOL = {"name": "look", "description": SAID, "parameters": {"type": "object", "description": SAID}}


def good(asker: Asker) -> None:
    """What is answered: each API, whole and streamed, stored and not, now and in the background, once and again."""
    ask = asker.ask
    for stream in (False, True):
        ask("POST", "/v1/chat/completions", chat(stream=stream, user=SAID, prompt_cache_key=SAID, stop=[SAID]))
        ask(
            "POST", "/v1/completions", {"model": MODEL, "prompt": SAID, "echo": True, "max_tokens": 5, "stream": stream}
        )
        ask("POST", "/v1/messages", {**chat(stream=stream), "system": SAID, "metadata": {"user_id": SAID}})
        ask("POST", "/v1/responses", response(stream=stream, instructions=SAID, tools=[{"type": "function", **TOOL}]))
        ask("POST", "/v1/responses", response(input=KEPT, instructions=KEPT, store=True, stream=stream))
    tools = {"model": TOOLS, "tools": [{"type": "function", "function": TOOL}], "tool_choice": "required"}
    ask("POST", "/v1/chat/completions", chat(**tools))
    called = {
        "role": "assistant",
        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": f'{{"a":"{SAID}"}}'}}],
    }
    result = {"role": "tool", "tool_call_id": "c", "content": SAID}
    ask("POST", "/v1/chat/completions", chat(messages=[called, result], model=TOOLS))
    ask("POST", "/v1/chat/completions", chat(response_format={"type": "json_schema", "json_schema": {
        "name": "a", "schema": {"type": "object", "description": SAID}}}))  # fmt: skip
    ask("POST", "/v1/embeddings", {"model": VECTORS, "input": [SAID]})
    ask("POST", "/tokenize", {"model": MODEL, "prompt": SAID})
    ask("POST", "/v1/responses/input_tokens", response())
    ask("POST", "/v1/messages/count_tokens", chat())
    for _ in range(2):
        ask("POST", "/v1/chat/completions", chat(), headers={"Idempotency-Key": SAID})
    ask("POST", "/v1/chat/completions", chat(max_tokens=6), headers={"Idempotency-Key": SAID})
    first = ask("POST", "/v1/responses", response(input=KEPT, store=True, background=True)).json()["id"]
    until(lambda: ask("GET", f"/v1/responses/{first}").json()["status"] not in ("queued", "in_progress"), "its end")
    ask("POST", "/v1/responses", response(input=KEPT, store=True, previous_response_id=first))
    ask("GET", f"/v1/responses/{first}/input_items")
    gone = ask("POST", "/v1/responses", response(input=KEPT, store=True)).json()["id"]
    ask("DELETE", f"/v1/responses/{gone}")
    for path in ("/v1/models", "/v1/key", "/openapi.json", "/docs", "/llms.txt", "/health", "/ready"):
        ask("GET", path)
    ask("POST", "/v1/client_secrets", {})


def bad(asker: Asker) -> None:
    """What is refused, for the prompt's sake or beside it."""
    ask = asker.ask
    faults: list[dict[str, Any]] = [
        {"temperature": 9}, {"max_tokens": 10**9}, {"n": 99}, {"min_tokens": 9}, {"tools": [5]},
        {"logit_bias": {"x": 1}},
        {"messages": [{"role": SAID, "content": SAID}]}, {"messages": [{"role": "user", "content": SAID * 500}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": SAID}}]}]},
        {"messages": [{"role": "user", "content": SAID + "\\ud800"}]}, {"prompt_embeds": SAID}, {"chat_template": SAID},
        {"structured_outputs": {"regex": SAID}}, {"guided_regex": SAID}, {"metadata": {"a": {"b": SAID}}},
        {"structured_outputs": {"json": {"pattern": f"({SAID}+)+"}}}, {"structured_outputs": {"json": {"$ref": SAID}}},
        {"timeout": 0.001}, {"stream": SAID}, {"seed": SAID}, {"model": VECTORS},
    ]  # fmt: skip
    for fault in faults:
        for path in ("/v1/chat/completions", "/v1/messages"):
            ask("POST", path, chat(**fault))
    ask("POST", "/v1/completions", {"model": MODEL, "prompt": SAID, "suffix": SAID})
    ask("POST", "/v1/embeddings", {"model": VECTORS, "input": [SAID, {"a": SAID}]})
    ask("POST", "/v1/responses", response(previous_response_id="resp_" + "0" * 32))
    ask("POST", "/v1/responses", response(background=True))
    ask("POST", "/v1/chat/completions", chat(metadata={"a": "x" * 5 * 2**20}))
    for raw in (SAID, f'{{"a": "{SAID}"', f'["{SAID}"]', "[" * 5000 + SAID):
        _raw(asker, raw.encode())


def _raw(asker: Asker, raw: bytes) -> None:
    headers = {"Authorization": f"Bearer {asker.platform.key}", "Content-Type": "application/json"}
    answer = requests.post(f"{asker.platform.url}/v1/chat/completions", data=raw, headers=headers, timeout=10)
    asker.note("raw", answer.status_code, answer.text)


def strange(asker: Asker) -> None:
    """The key where it should not be, and keys that are nearly it."""
    key, ask = asker.platform.key, asker.ask
    other = "b" if key[-1] == "a" else "a"
    swapped = key.replace("fb_live_", "fb_admin_")
    for wrong in (
        key[:-1] + other,
        key + "x",
        key.upper(),
        swapped,
        key[8:],
        f"{key} {key}",
        base64.b64encode(key.encode()).decode(),
    ):
        ask("POST", "/v1/chat/completions", chat(), key=wrong)
        ask("GET", "/v1/models", key="", headers={"x-api-key": wrong})
    ask("GET", "/metrics")
    for path in (
        f"/v1/models/{key}",
        f"/v1/responses/{key}",
        f"/v1/nothing/{key}",
        f"/v1/models?key={key}",
        f"/{SAID}",
    ):
        ask("GET", path)
    basic = base64.b64encode(f"user:{key}".encode()).decode()
    for headers in (
        {"Authorization": f"Basic {basic}"}, {"Authorization": key}, {"X-Client-Request-Id": key}, {"Cookie": key},
        {"X-Request-Id": key}, {"Idempotency-Key": key}, {"User-Agent": key}, {"Referer": f"http://a/?{key}"},
        {"X-Forwarded-For": key}, {"Last-Event-ID": key}, {"X-Forebay-Linger": key}, {"Origin": key},
    ):  # fmt: skip
        ask("POST", "/v1/chat/completions", chat(), headers=headers)
    asker.note("a body with it", 0, ask("POST", "/v1/chat/completions", {"model": key, "messages": key}).reason)
    for words in (
        f"GET /{key} HTTP/9.9",
        f"{key} / HTTP/1.1",
        f"GET / HTTP/1.1\r\n{key}",
        f"GET / HTTP/1.1\r\nHost: a\r\nX: {key}\0",
    ):
        _spoken(asker, words)


def _spoken(asker: Asker, words: str) -> None:
    with socket.create_connection(("127.0.0.1", asker.platform.ports[0]), timeout=10) as sock:
        sock.sendall(f"{words}\r\n\r\n".encode())
        sock.settimeout(3)
        try:
            asker.note("no HTTP", 400, sock.recv(65536).decode())
        except TimeoutError:
            asker.note("no HTTP", 0, "")


def over_sockets(asker: Asker) -> None:
    """Good and bad frames, and the key among the subprotocols and in the address."""
    platform = asker.platform
    url, headers = platform.url.replace("http", "ws") + "/v1/responses", {"Authorization": f"Bearer {platform.key}"}
    frames = [
        {"type": "response.create", **response()},
        {"type": "response.create", **response(input=KEPT, store=True)},
        {"type": "response.create", **response(generate=False)},
        {"type": "response.create", **response(max_output_tokens=-1)},
        {"type": "response.create", **response(text={"format": {"type": SAID}})},
        {"type": f"response.{SAID}"},
    ]
    with connect(url, additional_headers=headers) as ws:
        for frame in frames:
            ws.send(json.dumps(frame))
            while (event := json.loads(ws.recv(timeout=15)))["type"] not in _LAST:
                pass
            if event["type"] == "error":
                asker.note("a frame", 400, json.dumps(event))
        ws.send(SAID)
        asker.note("a frame", 400, str(ws.recv(timeout=15)))
        ws.send(json.dumps({"type": "response.create", **response(max_output_tokens=250)}))
    for protocols in (f"responses, {platform.key}", f"responses, openai-insecure-api-key.{platform.key}"):
        asker.note("a handshake", *handshake(platform, Authorization=None, Sec_WebSocket_Protocol=protocols))
    asker.note("a handshake", *handshake(platform, f"/v1/responses?token={platform.key}"))
    try:
        connect(url, subprotocols=[f"forebay.secret.{platform.key}"]).close()  # type: ignore[list-item]
    except WebSocketException as e:
        asker.note("a handshake", 401, str(e))


_LAST = ("response.completed", "response.incomplete", "response.failed", "error")


def after_faults_of_stores(asker: Asker) -> None:
    """A store that takes no writes, one that stands still, and a table that is locked while an answer is to be kept."""
    client, most = asker.platform.store.client, "maxmemory"
    client.config_set(most, 1)
    try:
        for _ in range(3):
            asker.ask("POST", "/v1/chat/completions", chat())
            asker.ask("POST", "/v1/responses", response(input=KEPT, store=True))
    finally:
        client.config_set(most, 0)
    _again(asker)
    client.client_pause(3_000)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: asker.ask("POST", "/v1/chat/completions", chat(stream=n % 2 == 0)), range(4)))
    _again(asker)
    with _locked(asker.platform, "responses"):
        asker.ask("POST", "/v1/responses", response(input=KEPT, store=True))
        asker.ask("POST", "/v1/responses", response(input=KEPT, store=True, background=True))
    _again(asker)


def _again(asker: Asker) -> None:
    until(lambda: asker.ask("POST", "/v1/chat/completions", chat()).status_code == 200, "answers again", 30)


@contextmanager
def _locked(platform: Platform, table: str) -> Iterator[None]:
    connection = psycopg2.connect(platform.database_url.replace("+psycopg2", ""))
    try:
        connection.cursor().execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
        yield
    finally:
        connection.rollback()
        connection.close()


def with_killed_workers(asker: Asker) -> None:
    """A client that leaves, a worker that dies under a stream, and a request that takes every worker with it."""
    platform = asker.platform
    url, headers = f"{platform.url}/v1/chat/completions", {"Authorization": f"Bearer {platform.key}"}
    with requests.post(url, json=chat(stream=True, max_tokens=250), headers=headers, stream=True, timeout=30) as answer:
        next(answer.iter_lines())
    before = {letter.decode() for letter in platform.store.client.zrange(tag(MODEL) + "dead", 0, -1)}
    with ThreadPoolExecutor(1) as pool:
        poison = pool.submit(asker.ask, "POST", "/v1/chat/completions", chat(max_tokens=250, seed=1))
        until(lambda: _kills(platform) or poison.done(), "the poison to be given up", 60)
        poison.result(30)
    until(lambda: len(platform.workers()) == 2, "two workers", 60)
    letters = {letter.decode() for letter in platform.store.client.zrange(tag(MODEL) + "dead", 0, -1)} - before
    for letter in letters:
        asker.evidence.add("dead letter", command(platform, "queue", "dead", "show", letter).stdout)


def _kills(platform: Platform) -> bool:
    """Kill whoever runs something; False."""
    for worker, _ in platform.claims():
        try:
            kill(int(worker.rpartition(":")[2]), signal.SIGKILL)
        except ProcessLookupError:
            time.sleep(0.1)
    return False


COMMANDS = (
    "org list", "org show {org_id}", "project list --org {org_id}", "key list", "key show {key_id}",
    "limits show --org {org_id}", "credit balance {org_id}", "credit list {org_id}", "usage", "shed",
    "queue list", "queue dead list", "model list", "audit list --limit 1000", "audit verify",
    "key rotate {other_id}", "key revoke {other_id}", "key show {key}", "key rotate {key}", "key revoke {key}",
)  # fmt: skip


def operate(asker: Asker) -> None:
    """What operators look at and do, also with a key where its id belongs."""
    platform = asker.platform
    _, other_id = new_key(platform)
    names = {"org_id": platform.org_id, "key_id": platform.key_id, "other_id": other_id, "key": platform.key}
    environ = {**commands_environ(platform), "FOREBAY_PEPPER": PEPPER}
    for words in COMMANDS:
        for form in ([], ["--json"]):
            done = CliRunner().invoke(cli, [*words.format(**names).split(), *form], env=environ)
            assert done.exit_code == (1 if "{key}" in words else 0), done.output
            asker.evidence.add(f"forebay {words}", done.output)


@contextmanager
def running(asker: Asker) -> Iterator[str]:
    """A request whose prompt is where prompts are: its key in Redis."""
    platform = asker.platform
    with ExitStack() as stack:
        before = set(platform.rows())
        body = chat(max_tokens=256, ignore_eos=True, stream=True)
        url, headers = f"{platform.url}/v1/chat/completions", {"Authorization": f"Bearer {platform.key}"}
        answers = [
            stack.enter_context(requests.post(url, json=body, headers=headers, stream=True, timeout=30))
            for _ in range(2)
        ]
        assert {answer.status_code for answer in answers} == {200}
        with frozen(platform):
            [request_id, *_] = sorted(set(platform.rows()) - before)
            yield f"{tag(MODEL)}body:{request_id}"


@contextmanager
def frozen(platform: Platform) -> Iterator[None]:
    """Nobody works while we look."""
    workers = [psutil.Process(int(row.worker.rpartition(":")[2])) for row in platform.workers()]
    for worker in workers:
        worker.suspend()
    try:
        yield
    finally:
        for worker in workers:
            worker.resume()


# --- where they are looked for


def look(platform: Platform, evidence: Evidence) -> None:
    for where in (_logs, _metrics, _redis, _postgres, _processes):
        where(platform, evidence)


def _logs(platform: Platform, evidence: Evidence) -> None:
    """All that processes write: ours, and the stores' own."""
    paths = [
        path for path in platform.data.rglob("*") if path.is_file() and path.suffix in (".log", ".out", ".err", ".pid")
    ]
    assert {"web0.log", "web1.log", "host.log", "scaler.log", "valkey.log", "postgres.log"} <= {
        path.name for path in paths
    }
    for path in paths:
        evidence.add(f"log {path.name}", path.read_bytes())


def _metrics(platform: Platform, evidence: Evidence) -> None:
    admin, _ = new_key(platform, kind="admin")
    for port in platform.ports:
        answer = requests.get(
            f"http://127.0.0.1:{port}/metrics", headers={"Authorization": f"Bearer {admin}"}, timeout=10
        )
        assert answer.status_code == 200
        evidence.add("metrics", answer.text)


_READ: dict[bytes, Callable[[redis.Redis, bytes], Any]] = {
    b"string": lambda client, key: client.get(key),
    b"hash": lambda client, key: [part for pair in client.hgetall(key).items() for part in pair],
    b"list": lambda client, key: client.lrange(key, 0, -1),
    b"set": lambda client, key: list(client.smembers(key)),
    b"zset": lambda client, key: client.zrange(key, 0, -1),
    b"stream": lambda client, key: [p for _, entry in client.xrange(key) for pair in entry.items() for p in pair],
}


def _redis(platform: Platform, evidence: Evidence) -> None:
    """Every key and its value, and what the server itself remembers of commands."""
    client = platform.store.client
    for key in client.scan_iter(count=1000):
        evidence.add(f"redis {key.decode()}", key)
        value = _READ[client.type(key)](client, key)
        for part in value if isinstance(value, list) else [value]:
            evidence.add(f"redis {key.decode()}", part or b"")
    told = client.config_get("commandlog-*-than")
    assert len(told) == 3 and set(told.values()) == {"-1"}, "it remembers none, however slow or large"
    for kind in ("slow", "large-request", "large-reply"):
        evidence.add(f"redis command log, {kind}", repr(client.execute_command("COMMANDLOG", "GET", "-1", kind)))
    evidence.add("redis clients", repr(client.client_list()))
    evidence.add("redis accounts", repr(client.acl_log()))


def _postgres(platform: Platform, evidence: Evidence) -> None:
    """Every row of every table, bytes as hex; and the statements that the server remembers."""
    connection = psycopg2.connect(platform.database_url.replace("+psycopg2", ""))
    try:
        cursor = connection.cursor()
        cursor.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        names = [name for (name,) in cursor.fetchall()]
        assert {"api_keys", "usage_events", "responses", "organisations"} <= set(names)
        for name in names:
            cursor.execute(f'SELECT row_to_json(t)::text FROM "{name}" AS t')
            for (row,) in cursor.fetchall():
                evidence.add(f"table {name}", row)
        cursor.execute("SELECT query FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
        for (query,) in cursor.fetchall():
            evidence.add(f"table pg_stat_activity: {query[:200].strip()}", query)
    finally:
        connection.close()


def _processes(platform: Platform, evidence: Evidence) -> None:
    """What `ps` shows to everybody, and what each process was told."""
    told = [process for pid in platform.supervisor.pids().values() for process in _family(pid)]
    workers = [process for process in told if "workers.main" in process.cmdline()]
    assert len(told) > 4 and len(workers) >= 2
    for process in told:
        evidence.add(f"command line of {process.name()}", " ".join(process.cmdline()))
        # Gateways, the clock and the agent are given the pepper; the agent gives it to no worker.
        withheld = {} if process in workers else {"FOREBAY_PEPPER", "FOREBAY_SALT"}
        environ = {name: value for name, value in process.environ().items() if name not in withheld}
        evidence.add(f"environment of {' '.join(process.cmdline()[1:4])}", json.dumps(environ))
        assert process not in workers or "DATABASE_URL" not in environ
    for process in psutil.process_iter(["cmdline"]):
        if str(platform.data) in " ".join(process.info["cmdline"] or ()):
            evidence.add("command line of a store", " ".join(process.info["cmdline"]))


def _family(pid: int) -> list[psutil.Process]:
    leader = psutil.Process(pid)
    return [leader, *leader.children(recursive=True)]


# --- the search itself


@pytest.mark.parametrize("before", range(4))
def test_a_canary_is_found_in_whatever_form(before: int) -> None:
    text = b"x" * before + SAID.encode() + b"yz"
    for form in (text, base64.b64encode(text), text.hex().encode(), json.dumps({"a": text.decode()}).encode()):
        evidence = Evidence()
        evidence.add("here", form)
        assert evidence.of(SAID) == ["here"] and evidence.of(KEPT) == []


def test_what_is_not_named_is_a_leak() -> None:
    body = "redis f1:{m}:body:" + "0" * 8 + "-0000-0000-0000-" + "0" * 12

    assert unexplained([body, "log web0.log", "table responses"], PAYLOAD, {}) == ["log web0.log", "table responses"]
    assert unexplained([body, "table responses", "table usage_events"], PAYLOAD_KEPT, TABLES_KEPT) == [
        "table usage_events"
    ]
