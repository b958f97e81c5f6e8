"""A customer who wants more than he may have: more tokens, more money's worth, others' data, a store that grows.

Each law is an attack that succeeded once, or came near: what it gains is measured where it counts, in usage rows and in
the stores, not in what the gateway says.
"""

from __future__ import annotations

import random
import socket as sockets
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, TypeVar

import pytest
import redis
import requests
import uuid6

from billing import prices
from core import postgres
from core.accounts import keys, secrets, tenants
from core.errors import LimitsDown
from core.lengths import lengths
from core.limits import balances, counters
from core.limits.counters import Need, Reserved, Terms
from core.limits.scopes import of_key
from core.redis import Call, RedisConnectionError, Store
from core.values import Caller, Limit, Request, Sampling, Usage
from tests.conftest import Clock, TimedStore
from tests.laws.test_limits import Key, charged, limited
from tests.laws.test_money import ANSWER, INPUT, OUTPUT, SPENT, Payer, ask, result, served_of
from tests.laws.test_money import payer as payer
from tests.laws.test_sockets import wire
from tests.platform import MODEL, Platform, command, until
from web.admission import new_id
from web.limiter import GIVE_UP_S, Limiter
from web.refusals import Asked

T = TypeVar("T")
HELLO = [{"role": "user", "content": "hello"}]


# --- tokens


def test_a_crowd_of_long_answers_behind_short_ones_gets_no_more_than_the_limit(platform: Platform) -> None:
    """Nobody names a limit; what such answers come to was learned of a dozen of one token each. All come at once, and
    what each will ask for with its first report is held before the next one is let in."""
    key = limited(platform, tokens_per_minute=3000)
    for n in range(12):
        assert ask(platform, key.text, n % 2, max_tokens=1).status_code == 200
    until(lambda: platform.store.run(lengths(MODEL, key.id)).quantile(0.95) == 1, "its answers to be learned")

    def long(n: int) -> int:
        body = {"model": MODEL, "messages": HELLO}
        return key.post("/v1/chat/completions", body, n % 2).status_code

    with ThreadPoolExecutor(48) as pool:
        statuses = Counter(pool.map(long, range(64)))
    key.quiet()

    assert statuses[429] and statuses[200] > 5, statuses
    assert sum(map(charged, key.rows())) <= 3000


def test_whatever_way_a_client_leaves_all_that_was_processed_is_counted(platform: Platform) -> None:
    """Before the first token, in the middle, with several prompts and answers, in the background, over lanes, with
    keys sent again: the window has what the usage rows have, to the token, and nothing is held."""
    key = limited(platform, tokens_per_minute=10**7, concurrent_requests=500)

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda n: leave(key, n), range(84)))
    key.quiet()

    rows, used = key.rows(), key.used
    assert len(rows) == used.requests > 84
    assert sum(map(charged, rows)) == used.input_tokens + used.output_tokens
    assert (used.held_tokens, used.open) == (0, 0)
    started = [row for row in rows if row["outcome"] == "cancelled" and row["output_tokens"]]
    assert started and all(row["input_tokens"] for row in started)


def leave(key: Key, n: int) -> None:
    dice = random.Random(n)
    soon_s = dice.choice((0.005, 0.02, 0.1, 0.3))
    text = "x" * dice.randint(1, 2000)
    with suppress(requests.RequestException):
        match n % 7:
            case 0:
                key.post("/v1/chat/completions", chat(text, 50), n // 7 % 2, timeout=soon_s)
            case 1:
                body = {"model": MODEL, "prompt": [text[:300]] * 4, "max_tokens": 9, "n": 2}
                key.post("/v1/completions", body, n // 7 % 2, timeout=max(soon_s, 0.1))
            case 2:
                key.post("/v1/embeddings", {"model": MODEL, "input": [text[:200]] * 9}, n // 7 % 2)
            case 3:
                body = {"model": MODEL, "input": text, "background": True, "stream": True, "max_output_tokens": 30}
                key.post("/v1/responses", body, n // 7 % 2, timeout=soon_s)
            case 4:
                sent = chat("x", 60, n=4)
                headers = {"Authorization": f"Bearer {key.text}", "Idempotency-Key": f"again {n % 3}"}
                url = f"http://127.0.0.1:{key.platform.ports[n // 7 % 2]}/v1/chat/completions"
                requests.post(url, json=sent, headers=headers, timeout=max(soon_s, 0.1))
            case 5:
                answer = key.post("/v1/responses", {"model": MODEL, "input": text, "max_output_tokens": 9}).json()
                more = {"model": MODEL, "input": "y", "previous_response_id": answer["id"], "max_output_tokens": 200}
                key.post("/v1/responses", {**more, "stream": True}, n // 7 % 2, timeout=soon_s)
            case 6:
                with wire(key.platform, n // 7 % 2, key=key.text) as ws:
                    for lane in range(4):
                        ws.create(lane=f"l{lane}", tokens=60)
                    ws.until("response.in_progress", "error")


def chat(text: str, tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": tokens, **more}


def asked_for(org_id: str, key_id: str) -> Request:
    caller = Caller(org_id=org_id, project_id="p", key_id=key_id)
    sampling = Sampling(max_tokens=50)
    return Request(id=new_id(), model=MODEL, caller=caller, gateway="", prompt_token_ids=[1] * 50, sampling=sampling)


def test_an_id_that_was_given_up_is_no_ticket(store: Store) -> None:
    """It was refused by the queue, or swept as its gateway died, and is asked for again under its Idempotency-Key, or
    comes after all: it is held like any other, and is not let in by what was."""
    request, limit = asked_for("o", "k"), Limit(scope=of_key("k"), tokens_per_minute=100)
    need = Need(input_tokens=50, output_tokens=50, least_output_tokens=50)

    def reserve(request_id: str) -> Any:
        return store.run(counters.reserve("o", request_id, "k", MODEL, [limit], need))

    assert isinstance(reserve(request.id), Reserved)
    Limiter(store).settle(request, Usage(), billed=False, forgo=True)
    assert isinstance(reserve("other"), Reserved)
    assert not isinstance(reserve(request.id), Reserved), "there is room for one"


class Deaf(TimedStore):
    """A store that does what it is asked, and whose answers are lost for a while."""

    lost = False

    def run(self, call: Call[T]) -> T:
        answer = super().run(call)
        if self.lost:
            raise RedisConnectionError("no answer came")
        return answer


@pytest.mark.parametrize("apart", [False, True])
def test_what_was_held_without_an_answer_is_free_as_soon_as_there_are_answers(
    valkey: redis.Redis, clock: Clock, apart: bool
) -> None:
    """The store was slow for a moment: nobody is told for half a minute that his places, or his money, are taken by
    requests that were refused. What was admitted without it is not given up."""
    store = Deaf(valkey, clock)
    gate = Limiter(store, apart=apart)
    limit = Limit(scope=of_key("k"), concurrent_requests=2)
    asked = Asked(MODEL, Need(input_tokens=50, output_tokens=50, least_output_tokens=50), "messages", False)

    def reserve(plan: str) -> None:
        gate.reserve(asked_for("o", "k"), [limit], asked, Terms(), plan=plan)

    def running() -> int:
        return TimedStore(valkey, clock).run(counters.used("o", [limit]))[0].open

    store.lost = True
    with pytest.raises(LimitsDown if apart else RedisConnectionError):
        reserve("prepaid")
    assert running() == 1
    store.lost = False
    until(lambda: running() == 0, "it to be given up", 5)

    reserve("prepaid")
    assert running() == 1
    store.lost = apart
    reserve("postpaid")
    store.lost = False
    time.sleep(3 * GIVE_UP_S)
    assert running() == 2, "of what was admitted nothing is"


# --- money


@contextmanager
def price(platform: Platform, dear: int) -> Iterator[None]:
    """What a million tokens cost is so many times what it was, for a while."""
    set_price(platform, dear)
    try:
        yield
    finally:
        set_price(platform, 1)


def set_price(platform: Platform, times: int) -> None:
    engine = postgres.connect(platform.database_url)
    with postgres.transaction(engine) as connection:
        made = prices.set_price(
            connection,
            MODEL,
            input_per_mtok=Decimal(INPUT * times),
            output_per_mtok=Decimal(OUTPUT * times),
            effective_from=datetime.now(UTC),
        )
    platform.store.run(prices.project([made]))
    engine.dispose()


def accounts_of(payer: Payer) -> list[balances.Account]:
    store = payer.platform.store
    found = (store.run(balances.account(payer.org_id, scope)) for scope in store.run(balances.leases(payer.org_id)))
    return [account for account in found if account is not None]


@pytest.mark.parametrize("times", [0, 100])
def test_a_price_that_changes_in_the_middle_of_an_answer_is_for_the_next_one(payer: Payer, times: int) -> None:
    """Cheaper or dearer, the answer that runs costs what it did when it was accepted, and its budget ends it there."""
    budget = payer.calls(1) + Decimal(100 * OUTPUT) / 10**6
    key = payer.key(money_per_month=budget)
    answer = requests.post(
        f"{payer.platform.url}/v1/chat/completions",
        json={"model": MODEL, "messages": HELLO, "max_tokens": 250, "stream": True},
        headers={"Authorization": f"Bearer {key}"},
        timeout=30,
        stream=True,
    )
    lines = answer.iter_lines()
    while b'"content":"' not in next(lines):
        pass
    with price(payer.platform, times):
        assert b"insufficient_quota" in b"".join(lines)
        assert result(ask(payer.platform, key)) == ("ok" if times == 0 else SPENT)

    row = payer.platform.usage_of(answer.headers["x-request-id"])
    assert (row["outcome"], row["output_tokens"]) == ("stopped", 100 + ANSWER)
    payer.quiet()
    assert [account.spent for account in accounts_of(payer)] == [balances.units_up(budget)]


def test_many_at_the_last_cent_spend_it_and_no_more(payer: Payer) -> None:
    """Streams and others, of one answer and of several: all begin at once, and each is told how far it may go."""
    budget = payer.calls(1) + Decimal(300 * OUTPUT) / 10**6
    key = payer.key(money_per_month=budget)

    def one(n: int) -> str:
        return result(ask(payer.platform, key, n % 2, max_tokens=200, n=1 + n % 3, stream=n % 2 == 0))

    with ThreadPoolExecutor(16) as pool:
        results = Counter(pool.map(one, range(16)))

    assert results[SPENT] > 8, results
    [account] = until(lambda: [one for one in accounts_of(payer) if not one.held], "nothing to be held")
    payer.quiet()
    assert balances.units_up(budget) / 2 < account.spent <= balances.units_up(budget)
    assert accounts_of(payer) == [account]


def test_a_store_that_lost_everything_costs_a_budget_no_more_than_what_ran(payer: Payer) -> None:
    """What runs goes as far as it was told before, which the new lease does not know of. Nothing else is beyond it."""
    platform, streams = payer.platform, 6
    most = Decimal(250 * OUTPUT + 100 * INPUT) / 10**6
    budget = 4 * most
    key = payer.key(money_per_month=budget)

    def stream(n: int) -> None:
        with suppress(requests.RequestException):
            ask(platform, key, n % 2, max_tokens=250, stream=True)

    with ThreadPoolExecutor(streams) as pool:
        running = [pool.submit(stream, n) for n in range(streams)]
        until(lambda: platform.holds(payer.org_id), "them to run")
        platform.store.client.flushall()
        served = list(served_of(platform, key, 30))
        for one in running:
            one.result()

    assert served[-1] in ("ok", SPENT)
    assert payer.spent() <= budget + streams * most


# --- whose


def raw(platform: Platform, *headers: bytes, path: bytes = b"/v1/models") -> int:
    """Ask by hand, with these header lines as they are."""
    lines = (b"GET " + path + b" HTTP/1.1", b"Host: x", b"Connection: close", *headers, b"", b"")
    with sockets.create_connection(("127.0.0.1", platform.ports[0]), timeout=10) as sock:
        sock.sendall(b"\r\n".join(lines))
        return int(sock.recv(65536).split()[1])


def test_no_spelling_of_a_key_is_another_one(platform: Platform) -> None:
    """Two that disagree, a good one beside a bad one, one in an address, one with a byte that some reader drops:
    whoever stands before us may have judged the other. Refused, all of them."""
    good = platform.key.encode()
    other = keys.mint("live", "A" * keys.ID_LENGTH).encode()
    bearer, wrong = b"Authorization: Bearer " + good, b"Authorization: Bearer " + other
    address = b"X-Forwarded-For: 10.77.0.%d"
    attempts: list[tuple[bytes, ...]] = [
        (bearer, bearer),
        (bearer, wrong),
        (wrong, bearer),
        (wrong, b"x-api-key: " + good),
        (b"x-api-key: " + other, b"x-api-key: " + good),
        (b"x_api_key: " + good,),
        (b"Authorization: Basic " + good,),
        (bearer + b", Bearer " + other,),
        (bearer + b"\0",),
        (b"Authorization: Bearer " + good[:20] + b"\0" + good[20:],),
        (b"Authorization: Bearer " + good.upper(),),
        (b"Authorization: Bearer " + good[:8] + "１２３４５６７８９０１２".encode() + good[20:],),
        (b"Authorization: Bearer", b" " + good),
        (b"Cookie: Authorization=Bearer " + good,),
    ]

    told = [raw(platform, *attempt, address % n) for n, attempt in enumerate(attempts)]

    assert set(told) <= {400, 401}, list(zip(attempts, told, strict=True))
    for path in (b"/v1/models?api_key=" + good, b"/v1/models?Authorization=Bearer%20" + good, b"/v1/models/" + good):
        assert raw(platform, address % 99, path=path) == 401
    assert raw(platform, bearer) == 200
    for name in ("scripted|priority", "scripted}", "{scripted}", "scripted,org", "model:scripted", "*", "scripted\n"):
        assert platform.post("/v1/chat/completions", chat("x", 1, model=name)).status_code == 404


def test_a_name_steers_no_terminal_and_breaks_no_table(platform: Platform) -> None:
    """Names are customers': brackets are no markup, and what would move a cursor or turn writing round is spelled."""
    names = ["[/red]", "\x1b[2J\x1b[31mred", "two\nlines", "\u202eevil", "\x9b2J"]
    engine = postgres.connect(platform.database_url)
    with postgres.transaction(engine) as connection:
        organisation = tenants.create_organisation(connection, f"[/{uuid6.uuid7()}]")
        for name in names:
            tenants.create_project(connection, org_id=organisation.id, name=name)
    engine.dispose()

    listed = command(platform, "project", "list", "--org", organisation.id)
    suspended = command(platform, "org", "weight", organisation.id, "2")

    assert (listed.returncode, listed.stderr) == (0, "")
    lines = listed.stdout.splitlines()
    assert len(lines) == 1 + 1 + len(names), "a heading, the first project, and a line for each"
    assert all(line.isprintable() for line in lines)
    assert "[/red]" in listed.stdout and "\\x1b[2J" in listed.stdout and "\\u202e" in listed.stdout
    assert suspended.returncode == 0 and organisation.name in suspended.stdout


# --- what is left


def test_whatever_is_refused_leaves_nothing_that_stays(platform: Platform) -> None:
    """Over limits, with keys and ids that nobody has, too large, malformed: every key that the stores have more of
    afterwards goes by itself, and in all they are fewer than one for each attempt."""
    key = limited(platform, requests_per_minute=1)
    assert ask(platform, key.text, max_tokens=1).status_code == 200
    platform.quiet()
    client = platform.store.client
    before = set(client.scan_iter(count=1000))

    with ThreadPoolExecutor(6) as pool:
        statuses = Counter(status for told in pool.map(lambda n: refused(key, n), range(30)) for status in told)
    after = set(client.scan_iter(count=1000)) - before

    assert set(statuses) == {400, 401, 404, 429}, statuses
    kinds = Counter(name.decode().rpartition(":")[2] for name in after)
    assert len(after) < statuses.total() / 3, kinds
    lasting = [name for name in after if client.ttl(name) == -1]
    assert lasting == []


def refused(key: Key, n: int) -> list[int]:
    unknown = keys.mint("live", "".join(random.Random(n).choices("ABCDEFGHJK", k=keys.ID_LENGTH)))
    headers = {"X-Forwarded-For": f"10.78.0.{n}"}
    asked: list[tuple[str, str, Any]] = [
        (key.text, "/v1/chat/completions", chat("x", 2)),
        (key.text, "/v1/responses", {"model": MODEL, "input": "x", "background": True}),
        (unknown, "/v1/chat/completions", chat("x", 2)),
        (key.text, "/v1/chat/completions", chat("x", 2, model=f"m{n}")),
        (key.text, "/v1/chat/completions", chat("x", 10**6)),
        (key.text, "/v1/responses", {"model": MODEL, "input": "x", "previous_response_id": f"resp_{n}"}),
    ]
    told = []
    for shown, path, body in asked:
        sent = {**headers, "Authorization": f"Bearer {shown}", "Idempotency-Key": f"refused {n} {path}"}
        told.append(requests.post(key.platform.url + path, json=body, headers=sent, timeout=20).status_code)
    return told


def test_a_key_is_given_so_many_client_secrets_in_a_minute(store: Store, clock: Clock) -> None:
    """Each waits in the store for ten minutes at most. A refusal counts for nothing: at the moment that it names there
    is room, and before it there is none."""
    for n in range(secrets.MINTED_MAX):
        clock.advance(n % 2)
        assert store.run(secrets.count("o", "k", f"ek_{n}")) == 0
    assert store.run(secrets.count("o", "other", "ek_x")) == 0
    assert store.run(secrets.count("o", "k", "ek_0")) == 0, "it was counted"

    clock.advance(1_000)
    wait_ms = store.run(secrets.count("o", "k", "ek_more"))
    clock.advance(wait_ms - 1)
    assert 0 < wait_ms <= 60_000 and store.run(secrets.count("o", "k", "ek_more")) == 1
    clock.advance(1)
    assert store.run(secrets.count("o", "k", "ek_more")) == 0


def test_who_mints_too_many_client_secrets_is_told_when_to_come(platform: Platform) -> None:
    key = limited(platform, connections=5)
    counts = [secrets.count(platform.org_id, key.id, f"ek_{n}") for n in range(secrets.MINTED_MAX)]
    platform.store.run_all(counts)

    told = key.post("/v1/client_secrets", {})

    assert (told.status_code, told.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 0 < int(told.headers["retry-after-ms"]) <= 60_000
