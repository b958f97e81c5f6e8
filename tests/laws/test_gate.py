"""The gate, over every route and transport that there is: who is refused, in which words, and that it costs nothing.

What is asked is enumerated from the application itself, and its bodies are the examples of our own reference: a new
route is covered as soon as it is there.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest
import requests

from core import catalog, postgres
from core.accounts import keys, tenants
from core.limits import stopped
from core.redis import Store, tag
from tests.laws.test_sockets import Wire, wire
from tests.platform import MODEL, PEPPER, Platform, handshake, soon, until
from web.admission import Admission, new_id
from web.app import POLICIES, Gateway, create
from web.auth import Policy
from web.dialects.responses import response_id_of
from web.reference import OPERATIONS
from web.routes.socket import ENDPOINT
from web.subscriber import Subscriber

#: Whoever fails too often is told to wait, so each attempt comes from an address of its own.
_addresses = (f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}" for n in itertools.count(1))


# --- what there is


@dataclass(frozen=True)
class Way:
    """One method of one route, over one transport."""

    method: str
    path: str
    transport: str  #: "http", "sse" or "websocket"
    policy: Policy
    body: Any = None

    def __str__(self) -> str:
        return f"{self.method} {self.path} {self.transport}"

    @property
    def anthropic(self) -> bool:
        return self.path.startswith("/v1/messages")

    def at(self, response_id: str = "resp_none") -> str:
        """Its address."""
        return self.path.format(response_id=response_id, name=MODEL, asset="start.js")


def ways() -> Iterator[Way]:
    """All of them, of an application that is never run."""
    models = catalog.load(None)
    store = Store.connect("redis://127.0.0.1:1")
    subscriber = Subscriber(store, "", models, "none")
    admission = Admission(models, store, subscriber, {}, salt=b"")
    app = create(Gateway(catalog=models, store=store, gate=None, admission=admission, subscriber=subscriber))  # type: ignore[arg-type]
    told = {(one.method, one.path): one for one in OPERATIONS}
    for rule in sorted(app.url_map.iter_rules(), key=lambda rule: rule.rule):
        path = re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule.rule)
        policy = POLICIES[rule.endpoint]
        for method in sorted((rule.methods or set()) - {"HEAD", "OPTIONS"}):
            operation = told.get((method, path))
            body = json.loads(json.dumps(operation.example if operation else None).replace('"MODEL"', f'"{MODEL}"'))
            yield Way(method, path, "websocket" if rule.endpoint == ENDPOINT else "http", policy, body)
            if operation and operation.streams:
                yield Way(method, path, "sse", policy, body and {**body, "stream": True})


WAYS = list(ways())
KEYED = [way for way in WAYS if way.policy is not Policy.PUBLIC]
OF_ONE = [way for way in KEYED if "{response_id}" in way.path]


# --- who asks


@dataclass
class Callers:
    """Keys of all kinds, on one platform."""

    platform: Platform
    shown: dict[str, str] = field(default_factory=dict)  #: who -> what is sent as `Authorization`
    orgs: list[str] = field(default_factory=list)

    def key(self, org_id: str = "", *, project_id: str = "", **asked: Any) -> tuple[str, str]:
        """A new key, its text and its id, which gateways have been told of."""
        engine, org_id = postgres.connect(self.platform.database_url), org_id or self.platform.org_id
        with postgres.transaction(engine) as connection:
            project_id = project_id or tenants.projects(connection, org_id)[0].id
            plain, row = keys.create_key(
                connection, org_id=org_id, project_id=project_id, name="gate", pepper=PEPPER.encode(), **asked
            )
        self.project(org_id, engine)
        return plain, row.id

    def organisation(self, name: str) -> str:
        engine = postgres.connect(self.platform.database_url)
        with postgres.transaction(engine) as connection:
            made = tenants.create_organisation(connection, name)
            tenants.create_project(connection, org_id=made.id, name="p")
        engine.dispose()
        self.orgs.append(made.id)
        return made.id

    def project(self, org_id: str, engine: postgres.Engine) -> None:
        keys.project_all(engine, self.platform.store, org_id)
        engine.dispose()

    def revoke(self, key_id: str) -> None:
        """As the command does: Postgres, then every gateway at once."""
        engine = postgres.connect(self.platform.database_url)
        with postgres.transaction(engine) as connection:
            record = keys.revoke(connection, key_id, now=datetime.now(UTC))
        self.platform.store.run(stopped.stop(record.org_id, stopped.field_of(key_id), stopped.REVOKED))
        self.project(record.org_id, engine)

    def suspend(self, org_id: str) -> None:
        engine = postgres.connect(self.platform.database_url)
        with postgres.transaction(engine) as connection:
            tenants.suspend(connection, org_id, reason="a test", now=datetime.now(UTC))
        self.platform.store.run(stopped.stop(org_id, stopped.ORG, stopped.SUSPENDED))
        self.project(org_id, engine)

    def accepted(self) -> dict[str, set[Any]]:
        """All that an accepted request would have left."""
        client = self.platform.store.client
        engine = postgres.connect(self.platform.database_url)
        with postgres.transaction(engine) as connection:
            kept = set(connection.execute(postgres.text("SELECT id FROM responses")).scalars())
        engine.dispose()
        holds = {name for org in (self.platform.org_id, *self.orgs) for name in _open(client, org)}
        return {"rows": set(client.hkeys(tag(MODEL) + "rows")), "holds": holds, "responses": kept}


def _open(client: Any, org_id: str) -> list[Any]:
    found: list[Any] = client.zrange(tag("org:" + org_id) + "open", 0, -1)
    return found


@pytest.fixture(scope="module")
def callers(_platform: Platform) -> Callers:
    """One of each, made once."""
    made = Callers(_platform)
    good, _ = made.key()
    revoked, revoked_id = made.key()
    made.revoke(revoked_id)
    expired, _ = made.key(expires_at=datetime.now(UTC) - timedelta(seconds=1))
    suspended_org = made.organisation("suspended")
    suspended, _ = made.key(suspended_org)
    made.suspend(suspended_org)
    bearer = {
        "wrong secret": keys.mint("live", keys.parse(good).key_id),
        "unknown key": keys.mint("live", "A" * keys.ID_LENGTH),
        "malformed": good[:-1] + ("x" if good[-1] != "x" else "y"),
        "revoked": revoked,
        "expired": expired,
        "suspended": suspended,
        "admin": made.key(kind="admin")[0],
        "test": made.key(kind="test")[0],
        "only generates": made.key(scopes=["generate"])[0],
        "only lists models": made.key(scopes=["models.read"])[0],
        "elsewhere": made.key(networks=["192.0.2.0/24"])[0],
    }
    made.shown = {"no key": "", **{who: f"Bearer {key}" for who, key in bearer.items()}}
    return made


#: What each is told, whatever it asks.
BAD = dict.fromkeys(
    ["no key", "wrong secret", "unknown key", "malformed", "revoked", "expired"], (401, "invalid_api_key")
)
NEVER = {**BAD, "suspended": (403, "organisation_suspended"), "elsewhere": (403, "address_not_allowed")}
#: What the others may do.
SCOPES = {
    "admin": {"admin"},
    "test": {"generate", "models.read", "usage.read"},
    "only generates": {"generate"},
    "only lists models": {"models.read"},
}


def told_to(policy: Policy) -> dict[str, tuple[int, str]]:
    """Who is refused something of this policy, and how."""
    refused = dict(NEVER)
    for who, scopes in SCOPES.items():
        if policy.scope not in scopes:
            crossed = (who == "admin") != (policy is Policy.ADMIN)
            refused[who] = (403, "not_allowed" if crossed else "missing_scope")
    if policy is Policy.ADMIN:
        refused["suspended"] = (403, "organisation_suspended")
    return refused


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    error: Any
    headers: Mapping[str, str]


#: OpenAI's codes, as Anthropic has only types.
ANTHROPIC = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def ask(
    platform: Platform, way: Way, authorization: str, *, response_id: str = "resp_none", gateway: int = 0
) -> Answer:
    """Ask in that way, from an address that nobody has come from."""
    headers = {"X-Forwarded-For": next(_addresses), **({"Authorization": authorization} if authorization else {})}
    if way.transport == "websocket":
        named = {name.replace("-", "_"): value for name, value in headers.items()}
        status, said = handshake(platform, **{"Authorization": None, **named})
        body = said.partition("\r\n\r\n")[2]
        return Answer(status, json.loads(body).get("error") if status != 101 else None, {})
    url = f"http://127.0.0.1:{platform.ports[gateway]}{way.at(response_id)}"
    params = {"stream": "true"} if way.method == "GET" and way.transport == "sse" else None
    answer = requests.request(way.method, url, json=way.body, params=params, headers=headers, timeout=20)
    is_json = bool(answer.content) and answer.headers.get("content-type", "").startswith("application/json")
    return Answer(answer.status_code, answer.json().get("error") if is_json else None, answer.headers)


def refusal(way: Way, answer: Answer) -> tuple[int, str]:
    """Its status and code. Anthropic's errors have a type alone, which is looked at here."""
    if not way.anthropic:
        assert answer.error is None or set(answer.error) >= {"message", "type", "param", "code"}
        return answer.status, (answer.error or {}).get("code") or ""
    assert answer.error["type"] == ANTHROPIC[answer.status]
    return answer.status, ""


# --- the laws


def test_every_route_has_a_policy_and_every_keyed_one_is_asked_here() -> None:
    assert {way.policy for way in KEYED} == set(Policy) - {Policy.PUBLIC}
    assert {way.transport for way in KEYED} == {"http", "sse", "websocket"}
    assert len({(way.method, way.path, way.transport) for way in WAYS}) == len(WAYS) > 30
    for way in KEYED:
        assert way.method != "POST" or way.body or way.path.endswith("/cancel"), f"{way} has no example"


@pytest.mark.parametrize("way", KEYED, ids=str)
def test_nobody_passes_who_may_not_and_nothing_is_accepted(platform: Platform, callers: Callers, way: Way) -> None:
    """Every one of them, in this way: the status, the code, and that neither queue, limits nor tables know of it."""
    before, refused = callers.accepted(), told_to(way.policy)
    answers = {who: ask(platform, way, callers.shown[who]) for who in refused}

    expected = {who: (status, "" if way.anthropic else code) for who, (status, code) in refused.items()}
    assert {who: refusal(way, answer) for who, answer in answers.items()} == expected
    if way.transport != "websocket":
        assert {answer.headers["x-should-retry"] for answer in answers.values()} == {"false"}
    bad = [json.dumps(answers[who].error) for who in BAD]
    assert len(set(bad)) == 1, "of a key that is no good nobody is told why"
    after = callers.accepted()
    assert {what: after[what] - before[what] for what in after} == {what: set() for what in after}


@pytest.mark.parametrize("way", [way for way in KEYED if (way.method, way.transport) == ("GET", "http")], ids=str)
def test_a_head_is_judged_like_its_get(platform: Platform, callers: Callers, way: Way) -> None:
    """Flask answers it by itself, and so it is another way in."""
    head = replace(way, method="HEAD")
    for who, (status, _) in told_to(way.policy).items():
        assert ask(platform, head, callers.shown[who]).status == status, who


@pytest.mark.parametrize("way", KEYED, ids=str)
def test_whoever_may_is_let_in(platform: Platform, callers: Callers, way: Way) -> None:
    """Else everything above would hold of a gate that is shut."""
    refused = told_to(way.policy)
    for who in (who for who in SCOPES if who not in refused):
        assert ask(platform, way, callers.shown[who]).status not in (401, 403, 429), who


@pytest.mark.parametrize("way", [way for way in WAYS if way.policy is Policy.PUBLIC], ids=str)
def test_what_is_public_asks_for_no_key_and_reads_none(platform: Platform, callers: Callers, way: Way) -> None:
    for who in ("no key", "wrong secret", "malformed", "suspended"):
        assert ask(platform, way, callers.shown[who]).status == 200, who


@pytest.mark.parametrize("header", ["Authorization", "x-api-key"])
def test_a_key_is_judged_alike_in_either_header(platform: Platform, callers: Callers, header: str) -> None:
    for who, (status, code) in NEVER.items():
        key = callers.shown[who].removeprefix("Bearer ")
        shown = {header: f"Bearer {key}" if header == "Authorization" else key}
        answer = requests.get(
            f"{platform.url}/v1/key", headers={**shown, "X-Forwarded-For": next(_addresses)}, timeout=10
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), who


# Other tenants


@pytest.fixture(scope="module")
def foreign(_platform: Platform, callers: Callers) -> tuple[str, dict[str, str]]:
    """A stored response of ours, and whoever else would like it: another organisation, and another project."""
    made = _platform.post("/v1/responses", {"model": MODEL, "input": "hello", "max_output_tokens": 3}).json()
    other = callers.organisation("other")
    engine = postgres.connect(_platform.database_url)
    with postgres.transaction(engine) as connection:
        project = tenants.create_project(connection, org_id=_platform.org_id, name="aside")
    engine.dispose()
    keyed = {"another organisation": callers.key(other)[0], "another project": callers.key(project_id=project.id)[0]}
    return made["id"], {who: f"Bearer {key}" for who, key in keyed.items()}


@pytest.mark.parametrize("way", OF_ONE, ids=str)
def test_anothers_response_is_to_everybody_else_one_that_never_was(
    platform: Platform, foreign: tuple[str, dict[str, str]], way: Way
) -> None:
    """Word for word, but for the id."""
    theirs, askers = foreign
    unknown = response_id_of(new_id())
    for who, shown in askers.items():
        found, absent = (ask(platform, way, shown, response_id=one) for one in (theirs, unknown))
        assert found.status == absent.status == 404, who
        assert json.dumps(found.error).replace(theirs, "") == json.dumps(absent.error).replace(unknown, "")
    mine = Way("GET", "/v1/responses/{response_id}", "http", Policy.GENERATE)
    assert ask(platform, mine, f"Bearer {platform.key}", response_id=theirs).status == 200, "and it is there still"


@pytest.mark.parametrize("transport", ["http", "sse", "websocket"])
def test_nobody_goes_on_from_anothers_response(
    platform: Platform, foreign: tuple[str, dict[str, str]], transport: str
) -> None:
    theirs, askers = foreign
    unknown = response_id_of(new_id())
    for shown in askers.values():
        errors = []
        for one in (theirs, unknown):
            body = {"model": MODEL, "input": "go on", "previous_response_id": one, "stream": transport == "sse"}
            if transport == "websocket":
                with wire(platform, key=shown.removeprefix("Bearer ")) as ws:
                    ws.send("create", **body)
                    said = ws.next()
                    assert said["type"] == "error"
                    error = said["error"]
            else:
                way = Way("POST", "/v1/responses", transport, Policy.GENERATE, body)
                error = ask(platform, way, shown).error
            errors.append(json.dumps(error).replace(one, ""))
        assert errors[0] == errors[1] and "previous_response" in errors[0]


def test_nobody_reads_anothers_stream_by_its_name(platform: Platform, foreign: tuple[str, dict[str, str]]) -> None:
    """Of chat by `Last-Event-ID`, of a response over a socket."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3, "stream": True}
    made = platform.post("/v1/chat/completions", body)
    last = re.findall(r"^id: (\S+)$", made.text, re.MULTILINE)[-1]
    theirs, askers = foreign
    for shown in askers.values():
        headers = {"Authorization": shown, "Last-Event-ID": last}
        answer = requests.get(f"{platform.url}/v1/chat/completions", headers=headers, timeout=10)
        assert answer.status_code == 404
        with wire(platform, key=shown.removeprefix("Bearer ")) as ws:
            ws.send("resume", response_id=theirs)
            ws.send("resume", response_id=response_id_of(new_id()))
            one, two = ws.next(), ws.next()
        assert (one["status"], one["error"]["code"]) == (404, "not_found") and one["error"] == two["error"]


# What a key may use


def test_a_model_that_a_key_may_not_use_is_one_that_does_not_exist(platform: Platform, callers: Callers) -> None:
    key, _ = callers.key(models=["another"])
    shown = f"Bearer {key}"
    listed = requests.get(f"{platform.url}/v1/models", headers={"Authorization": shown}, timeout=10).json()
    assert listed["data"] == []
    for way in KEYED:
        if not ((way.body and "model" in json.dumps(way.body)) or "{name}" in way.path) or way.transport == "websocket":
            continue
        absent = Way(way.method, way.path.replace("{name}", "none"), way.transport, way.policy, _of_none(way.body))
        found, missing = ask(platform, way, shown), ask(platform, absent, f"Bearer {platform.key}")
        assert found.status == missing.status == 404, way
        assert json.dumps(found.error).replace(f"`{MODEL}`", "") == json.dumps(missing.error).replace("`none`", ""), way
    with wire(platform, key=key) as ws:
        ws.create()
        said = ws.next()
        assert (said["status"], said["error"]["code"]) == (404, "model_not_found")


def _of_none(body: Any) -> Any:
    return json.loads(json.dumps(body).replace(f'"{MODEL}"', '"none"'))


def test_a_key_that_is_bound_to_a_network_is_believed_only_through_our_proxies(
    platform: Platform, callers: Callers
) -> None:
    """The tests come from 127.0.0.1, which is a proxy here; what it is sent by others stands further left."""
    shown = callers.shown["elsewhere"]

    def status(forwarded: str) -> int:
        headers = {"Authorization": shown, "X-Forwarded-For": forwarded}
        return requests.get(f"{platform.url}/v1/key", headers=headers, timeout=10).status_code

    assert status("192.0.2.7") == status("127.0.0.9, 192.0.2.7") == 200
    assert status("192.0.2.7, 203.0.113.9") == status("") == 403


def test_an_address_that_fails_too_often_is_told_when_to_come_and_its_good_keys_go_on(
    platform: Platform, callers: Callers
) -> None:
    """Counted over both gateways. A good key is one that Redis knows: from the moment on at which it is made."""
    address = next(_addresses)

    def status(key: str, gateway: int) -> requests.Response:
        url = f"http://127.0.0.1:{platform.ports[gateway]}/v1/key"
        headers = {"Authorization": f"Bearer {key}", "X-Forwarded-For": address}
        return requests.get(url, headers=headers, timeout=10)

    bad = callers.shown["unknown key"].removeprefix("Bearer ")
    assert [status(bad, n % 2).status_code for n in range(20)] == [401] * 20
    refused = status(bad, 0)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_failures")
    assert 0 < int(refused.headers["retry-after-ms"]) <= 60_000
    assert status(callers.shown["revoked"].removeprefix("Bearer "), 1).status_code == 429, "whatever is wrong"
    assert status(platform.key, 0).status_code == status(platform.key, 1).status_code == 200
    key, _ = callers.key()
    assert status(key, 0).status_code == status(key, 1).status_code == 200


def test_connections_are_bounded_over_gateways_and_the_scope_is_named(platform: Platform, callers: Callers) -> None:
    key, key_id = callers.key()
    engine = postgres.connect(platform.database_url)
    with postgres.transaction(engine) as connection:
        connection.execute(
            postgres.text("INSERT INTO limits (org_id, scope, connections) VALUES (:org, :scope, 2)"),
            {"org": platform.org_id, "scope": f"key:{key_id}"},
        )
    callers.project(platform.org_id, engine)

    with wire(platform, 0, key=key), wire(platform, 1, key=key):
        status, said = handshake(platform, Authorization=f"Bearer {key}")
        assert status == 429 and "x-limit-scope: key\r\n" in said.lower()
    until(lambda: handshake(platform, Authorization=f"Bearer {key}")[0] == 101, "a seat")


# What is open


class Open:
    """Everything that one key can have open, at two gateways. The model has two places, and reads out for half a
    minute: two of these run, and the others wait."""

    def __init__(self, platform: Platform, key: str, pool: ThreadPoolExecutor) -> None:
        self.platform, self.key = platform, key
        message, prompt = {"messages": [{"role": "user", "content": "hello"}]}, {"input": "hello"}
        long = {"model": MODEL, "max_tokens": 1000, "stream": True}
        self.asked: dict[str, Future[requests.Response]] = {}
        chat, whole, anthropic = {**long, **message}, {**long, **message, "stream": False}, {**long, **message}
        response = {"model": MODEL, **prompt, "max_output_tokens": 1000, "stream": True}
        for name, gateway, path, body in (
            ("chat", 0, "/v1/chat/completions", chat),
            ("response", 1, "/v1/responses", response),
            ("message", 1, "/v1/messages", anthropic),
            ("completion", 0, "/v1/completions", {**long, "prompt": "hello"}),
            ("whole", 1, "/v1/chat/completions", whole),
            ("background", 0, "/v1/responses", {**response, "background": True}),
        ):
            self.asked[name] = pool.submit(self._ask, gateway, path, body)
            count = len(self.asked)
            until(lambda count=count: len(self.ids()) >= count, f"{name} to be accepted")  # type: ignore[misc]

    def ids(self) -> set[str]:
        return {name for name, row in self.platform.rows().items() if row.state != "ended"}

    def _ask(self, gateway: int, path: str, body: Any) -> requests.Response:
        url = f"http://127.0.0.1:{self.platform.ports[gateway]}{path}"
        return requests.post(url, json=body, headers={"Authorization": f"Bearer {self.key}"}, timeout=60)

    def check(self, status: int, code: str, kind: str) -> None:
        """Each has ended in its own words."""
        answers = {name: asked.result(1) for name, asked in self.asked.items()}
        assert answers["whole"].status_code == status and answers["whole"].json()["error"]["code"] == code
        for name in ("chat", "completion"):
            lines = [line for line in answers[name].text.split("\n\n") if "data: {" in line]
            assert json.loads(lines[-1].partition("data: ")[2])["error"]["code"] == code, name
        for name in ("response", "background"):
            [last] = re.findall(r"^event: response.failed\ndata: (.*)$", answers[name].text, re.MULTILINE)
            assert json.loads(last)["response"]["error"]["code"] == code, name
        [last] = re.findall(r"^event: error\ndata: (.*)$", answers["message"].text, re.MULTILINE)
        assert json.loads(last)["error"]["type"] == kind


@pytest.mark.parametrize("what", ["key", "organisation"])
def test_all_that_is_open_ends_within_a_second_at_every_gateway(slow: Platform, what: str) -> None:
    """Streams of every API, running, waiting and in the background, and sockets, busy and idle. They leave queue and
    engine, and what was made of them is billed."""
    made = Callers(slow)
    org_id = made.organisation(f"stopped {what}") if what == "organisation" else slow.org_id
    key, key_id = made.key(org_id)
    status, code, kind = (
        (401, "key_revoked", "authentication_error")
        if what == "key"
        else (403, "organisation_suspended", "permission_error")
    )
    with ThreadPoolExecutor(8) as pool, wire(slow, 1, key=key) as busy, wire(slow, 0, key=key) as idle:
        open_ = Open(slow, key, pool)
        busy.create(tokens=1000)
        until(lambda: len(open_.ids()) == 7, "the socket's")
        ids = open_.ids()
        ran = {request_id for _, request_id in until(lambda: len(slow.claims()) == 2 and slow.claims(), "two to run")}
        frames = [pool.submit(partial(_closed, one)) for one in (busy, idle)]
        stop = made.revoke if what == "key" else made.suspend
        stop(key_id if what == "key" else org_id)

        soon(lambda: all(asked.done() for asked in [*open_.asked.values(), *frames]), "all of it to end")
        open_.check(status, code, kind)
        for closed, got in (frame.result() for frame in frames):
            assert closed == 1008
            assert (got[-1]["type"], got[-1]["status"], got[-1]["error"]["code"]) == ("error", status, code)
        failed = [event for event in busy.got if event["type"] == "response.failed"]
        assert [event["response"]["error"]["code"] for event in failed] == [code]
        for gateway in (0, 1):
            again = open_._ask(gateway, "/v1/chat/completions", {})
            assert again.status_code == (401 if what == "key" else 403)
    until(lambda: not open_.ids() and not slow.claims(), "queue and engine to be rid of them")
    billed = {request_id: slow.usage_of(request_id) for request_id in ids}
    assert {row["outcome"] for row in billed.values()} == {"cancelled"}
    assert all(billed[request_id]["output_tokens"] > 0 for request_id in ran)
    assert max(row["output_tokens"] for row in billed.values()) < 200, "of a thousand"


def _closed(one: Wire) -> tuple[int, list[dict[str, Any]]]:
    return one.closed()


def test_a_frame_of_a_key_that_was_just_revoked_begins_nothing(platform: Platform, callers: Callers) -> None:
    """The handshake was let in; the first frame comes before the gateway has looked."""
    key, key_id = callers.key()
    with wire(platform, key=key) as ws:
        before = callers.accepted()
        callers.revoke(key_id)
        ws.create()
        code, got = ws.closed()

    assert code == 1008 and {event["error"]["code"] for event in got} <= {"key_revoked", "invalid_api_key"}
    assert callers.accepted()["rows"] - before["rows"] == set()
