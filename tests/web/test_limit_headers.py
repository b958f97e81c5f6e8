"""What callers are told of their limits: on every answer, in their API's words, and why they are refused."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from billing import prices
from billing.rating import Price
from core import catalog
from core.accounts.keys import KeyRecord
from core.errors import ForebayError, MoneySpent, OrganisationSuspended, Unauthenticated
from core.limits import balances, counters, headers, stopped
from core.limits.balances import Figures
from core.limits.counters import Need, Refused
from core.limits.scopes import Left
from core.postgres import DatabaseAway
from core.redis import Store
from core.values import Limit
from tests.web.test_coming_back import ASKED, CHAT, MODEL, TOML, Place
from tests.web.test_sockets import Wire
from web import refusals
from web.refusals import GUESS_MS, Asked
from web.transports.sockets import Socket

NOON = 1_780_000_000_000  #: 2026-05-28, 20:26:40 UTC, ms
ASK = Asked("m", Need(input_tokens=30, output_tokens=70, least_output_tokens=70))


def left(scope: str = "key:k", reset_ms: int = 2_500, **numbers: int | None) -> Left:
    """What a scope has left: `requests=(limit, left)` and so on."""
    limits = {f"{name}_per_minute": told[0] for name, told in numbers.items() if isinstance(told, tuple)}
    lefts = {name: told[1] for name, told in numbers.items() if isinstance(told, tuple)}
    every = dict.fromkeys(("requests", "tokens", "input_tokens", "output_tokens")) | lefts
    return Left(limit=Limit(scope=scope, **limits), reset_ms=reset_ms, **every)


# --- the headers


def test_the_scope_with_least_left_is_told_of_each_rate() -> None:
    lefts = [
        left("key:k", requests=(10, 9), tokens=(100, 50)),  # type: ignore[arg-type]
        left("org", 61_000, requests=(1000, 3)),  # type: ignore[arg-type]
        left("model:m", 100, tokens=(1000, 600)),  # type: ignore[arg-type]
    ]

    assert headers.told(lefts, now_ms=NOON) == {
        "x-ratelimit-limit-requests": "1000",
        "x-ratelimit-remaining-requests": "3",
        "x-ratelimit-reset-requests": "1m1s",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "50",
        "x-ratelimit-reset-tokens": "2.5s",
        "x-limit-scope": "org",
    }


def test_input_and_output_are_told_apart_where_they_are_limited_apart() -> None:
    told = headers.told([left(input_tokens=(100, 40), output_tokens=(50, 50))], now_ms=NOON)  # type: ignore[arg-type]

    assert (told["x-ratelimit-limit-input-tokens"], told["x-ratelimit-remaining-input-tokens"]) == ("100", "40")
    assert (told["x-ratelimit-limit-output-tokens"], told["x-ratelimit-reset-output-tokens"]) == ("50", "0ms")
    assert "x-ratelimit-limit-tokens" not in told and "x-ratelimit-limit-requests" not in told


def test_nothing_is_told_where_nothing_is_limited() -> None:
    assert headers.told([left(), left("org")], now_ms=NOON) == {}
    assert headers.event([left()], "event_1") is None


def test_what_is_left_is_never_below_nothing() -> None:
    """A debt is not shown as less than nothing, which clients take for an error."""
    [told] = [headers.told([left(tokens=(10, -5))], now_ms=NOON)]  # type: ignore[arg-type]
    assert told["x-ratelimit-remaining-tokens"] == "0"


def test_anthropics_headers_say_when_in_whole_seconds_and_never_too_early() -> None:
    told = headers.told([left(requests=(10, 9))], now_ms=NOON, anthropic=True)  # type: ignore[arg-type]

    assert told["anthropic-ratelimit-requests-limit"] == "10"
    assert told["anthropic-ratelimit-requests-remaining"] == "9"
    assert told["anthropic-ratelimit-requests-reset"] == "2026-05-28T20:26:43Z"
    again = datetime.fromisoformat(told["anthropic-ratelimit-requests-reset"])
    assert 2_500 <= again.timestamp() * 1000 - NOON < 3_500


def test_the_event_is_openais() -> None:
    told = headers.event([left(requests=(10, 9), input_tokens=(100, 40))], "event_1")  # type: ignore[arg-type]

    assert told == {
        "type": "rate_limits.updated",
        "event_id": "event_1",
        "rate_limits": [
            {"name": "requests", "limit": 10, "remaining": 9, "reset_seconds": 2.5},
            {"name": "input_tokens", "limit": 100, "remaining": 40, "reset_seconds": 2.5},
        ],
    }


# --- refusals


def refused(reason: str, limit: Limit | None, retry_after_ms: int | None = None) -> ForebayError:
    return refusals.told(Refused(reason=reason, limit=limit, retry_after_ms=retry_after_ms, left=()), ASK, NOON)


@pytest.mark.parametrize(
    ("limits", "param", "numbers"),
    [
        ({"tokens_per_minute": 90}, "max_tokens", ("90", "30", "70")),
        ({"tokens_per_minute": 30}, "messages", ("30", "70")),
        ({"input_tokens_per_minute": 29}, "messages", ("29", "30")),
        ({"output_tokens_per_minute": 69}, "max_tokens", ("69", "70")),
        ({"input_tokens_per_minute": 30, "output_tokens_per_minute": 69}, "max_tokens", ("69", "70")),
    ],
)
def test_what_never_fits_is_a_400_with_the_numbers(limits: dict[str, int], param: str, numbers: Sequence[str]) -> None:
    error = refused("too_large", Limit(scope="key:k", **limits))

    assert (error.status, error.error_code, error.param, error.retry) == (400, "request_exceeds_limit", param, False)
    assert error.retry_after_ms is None
    assert "This key" in error.message and all(number in error.message for number in numbers)


@pytest.mark.parametrize(
    ("scope", "says"),
    [
        ("key:k", "This key"),
        ("project:p", "This project"),
        ("org", "This organisation may"),
        ("model:m", "This organisation at model `m`"),
    ],
)
def test_a_refusal_names_whose_limit_it_is(scope: str, says: str) -> None:
    error = refused("requests", Limit(scope=scope, requests_per_minute=7), 1_234)

    assert says in error.message and "7 requests" in error.message
    assert (error.status, error.type, error.error_code, error.retry) == (429, "requests", "rate_limit_exceeded", True)
    assert error.retry_after_ms == 1_234
    assert error.headers["x-limit-scope"] == scope.partition(":")[0]


@pytest.mark.parametrize(("reason", "kind"), [("tokens", "requests that run"), ("concurrency", "requests open")])
def test_what_depends_on_a_request_that_runs_says_that_its_time_is_a_guess(reason: str, kind: str) -> None:
    error = refused(reason, Limit(scope="key:k", tokens_per_minute=9, concurrent_requests=4))

    assert kind in error.message and "is a guess" in error.message
    assert error.retry_after_ms == GUESS_MS


def test_tokens_that_leave_the_window_come_back_when_it_is_told() -> None:
    for reason in ("tokens", "input_tokens", "output_tokens"):
        error = refused(reason, Limit(scope="key:k"), 40_500)
        assert (error.type, error.retry_after_ms, "guess" in error.message) == ("tokens", 40_500, False)


@pytest.mark.parametrize(
    ("reason", "renews"),
    [("day", "2026-05-29T00:00:00Z"), ("month", "2026-06-01T00:00:00Z")],
)
def test_a_budget_renews_with_its_period(reason: str, renews: str) -> None:
    limit = Limit(scope="project:p", money_per_day=Decimal("1.50"), money_per_month=Decimal("1.50"))
    error = refused(reason, limit)

    assert isinstance(error, MoneySpent) and (error.status, error.retry) == (429, False)
    assert (error.type, error.error_code) == ("insufficient_quota", "insufficient_quota")
    assert "This project may spend 1.5 a" in error.message and renews in error.message
    assert error.retry_after_ms == datetime.fromisoformat(renews).timestamp() * 1000 - NOON


def test_a_budget_renews_with_the_year_too() -> None:
    last_day = int(datetime(2026, 12, 31, 23, 59, 59, tzinfo=UTC).timestamp() * 1000)
    spent = Refused(reason="month", limit=Limit(scope="org"), retry_after_ms=None, left=())
    assert refusals.told(spent, ASK, last_day).retry_after_ms == 1_000


def test_a_balance_does_not_renew() -> None:
    error = refused("balance", Limit(scope="org", prepaid=True))
    assert isinstance(error, MoneySpent) and error.retry_after_ms is None and "credit" in error.message


def test_who_is_stopped_is_told_what_the_gate_tells() -> None:
    assert isinstance(refused("revoked", None), Unauthenticated)
    assert isinstance(refused("suspended", None), OrganisationSuspended)


# --- on every answer

#: A token of input costs 10,000 units of 1e-10, and one of output twice that.
PRICE = Price(
    id=1, model=MODEL, tier="standard", currency="USD", since_ms=0, input_per_mtok=Decimal(1),
    cached_input_per_mtok=Decimal("0.5"), output_per_mtok=Decimal(2),
)  # fmt: skip

LIMITS: Mapping[str, tuple[Limit, ...]] = {
    "mine": (),
    "limited": (
        Limit(scope="key:limited", requests_per_minute=100, tokens_per_minute=5000, concurrent_requests=2),
        Limit(scope="project:p", input_tokens_per_minute=4000, output_tokens_per_minute=3000),
        Limit(scope=f"model:{MODEL}", requests_per_minute=50),
        Limit(scope="model:another", requests_per_minute=1),
    ),
    "small": (Limit(scope="key:small", tokens_per_minute=10),),
    "paying": (Limit(scope="key:paying", money_per_day=Decimal(2)),),
    "prepaid": (),
}


class Door:
    """Keys of one organisation, by their limits."""

    def authenticate(self, authorization: str, **_: Any) -> KeyRecord:
        key_id = authorization.removeprefix("Bearer ")
        if key_id not in LIMITS:
            raise Unauthenticated
        plan = "prepaid" if key_id == "prepaid" else "postpaid"
        return KeyRecord(key_id=key_id, org_id="o", project_id="p", secret_hmac=b"", limits=LIMITS[key_id], plan=plan)


@pytest.fixture
def place(store: Store, valkey_url: str, tmp_path: Path) -> Iterator[Place]:
    path = tmp_path / "catalog.toml"
    path.write_text(TOML)
    place = Place(store, valkey_url, catalog.load(path))
    for one in place.gateways:
        one.gate = Door()  # type: ignore[assignment]
        one.keepalive_s = 0.3
    yield place
    for one in place.gateways:
        one.subscriber.streams.clear()
        one.subscriber.stop()


def ask(place: Place, path: str = "/v1/responses", body: Any = None, key: str = "limited", **said: str) -> Any:
    shown = {"Authorization": f"Bearer {key}", **{name.replace("_", "-"): value for name, value in said.items()}}
    answer = place.ask(path, {**ASKED, **(body or {})} if path == "/v1/responses" else body, headers=shown)
    answer.close()
    return answer


def test_an_accepted_request_is_told_what_is_left_with_itself_held(place: Place) -> None:
    told = ask(place, body={"max_output_tokens": 100}).headers

    [held] = place.store.run(counters.used("o", [LIMITS["limited"][0]]))
    assert held.held_tokens > 50 and held.open == 1
    assert told["x-ratelimit-limit-tokens"] == "5000"
    prompt = 4000 - int(told["x-ratelimit-remaining-input-tokens"])
    assert told["x-ratelimit-remaining-tokens"] == str(5000 - prompt - 100), "all that it may come to"
    assert (told["x-ratelimit-limit-requests"], told["x-ratelimit-remaining-requests"]) == ("50", "49")
    assert told["x-ratelimit-limit-input-tokens"] == "4000"
    assert told["x-ratelimit-remaining-output-tokens"] == "2900"
    assert told["x-limit-scope"] == "project", "its output is nearest to its end"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/responses", {"temperature": "hot"}, 400),
        ("/v1/responses", {"model": "none"}, 404),
        ("/v1/chat/completions", [], 400),
        ("/v1/messages", {}, 400),
        ("/v1/completions", {}, 400),
        ("/v1/embeddings", {}, 400),
    ],
)
def test_a_refusal_that_reserves_nothing_is_told_what_there_is(place: Place, path: str, body: Any, status: int) -> None:
    answer = ask(place, path, body)

    assert answer.status_code == status
    assert answer.headers["x-ratelimit-remaining-requests"] == "100"
    assert answer.headers["x-ratelimit-remaining-tokens"] == "5000"
    assert ("anthropic-ratelimit-requests-remaining" in answer.headers) == (path == "/v1/messages")


def test_anthropics_endpoint_has_both_apis_headers(place: Place) -> None:
    said = {"model": MODEL, "max_tokens": 10, "messages": [{"role": "user", "content": "hello"}], "stream": True}
    told = ask(place, "/v1/messages", said).headers

    assert told["anthropic-ratelimit-requests-limit"] == told["x-ratelimit-limit-requests"] == "50"
    for kind in ("tokens", "input-tokens", "output-tokens"):
        assert told[f"anthropic-ratelimit-{kind}-remaining"] == told[f"x-ratelimit-remaining-{kind}"]
        assert datetime.fromisoformat(told[f"anthropic-ratelimit-{kind}-reset"]).tzinfo is not None


def test_a_429_says_whose_limit_it_is_and_costs_no_request(place: Place) -> None:
    shown = {"Authorization": "Bearer limited"}
    open_ones = [place.ask("/v1/responses", {**ASKED, "max_output_tokens": 9}, headers=shown) for _ in range(2)]

    for answer in [ask(place) for _ in range(3)]:
        error = answer.get_json()["error"]
        assert (answer.status_code, error["code"], error["type"]) == (429, "rate_limit_exceeded", "requests")
        assert (answer.headers["retry-after-ms"], answer.headers["x-limit-scope"]) == (str(GUESS_MS), "key")
        assert answer.headers["x-ratelimit-remaining-requests"] == "48", "those two"
    for answer in open_ones:
        answer.close()


def test_what_never_fits_is_told_so_and_not_when_to_retry(place: Place) -> None:
    answer = ask(place, key="small")

    assert answer.status_code == 400 and answer.get_json()["error"]["code"] == "request_exceeds_limit"
    assert answer.headers["x-should-retry"] == "false" and "retry-after" not in answer.headers
    assert answer.headers["x-ratelimit-remaining-tokens"] == "10"


def test_a_key_without_limits_is_told_none(place: Place) -> None:
    told = ask(place, key="mine").headers
    assert not [name for name in dict(told) if "ratelimit" in name or name == "x-limit-scope"]


def test_who_is_not_known_is_told_of_nobodys_limits(place: Place) -> None:
    answer = ask(place, key="nobody")
    assert answer.status_code == 401 and "x-limit-scope" not in answer.headers


def test_a_key_that_was_revoked_a_moment_ago_is_told_what_an_unknown_one_is(place: Place) -> None:
    """Its record says nothing yet: the reservation itself refuses."""
    place.store.run(stopped.stop("o", stopped.field_of("limited"), stopped.REVOKED))

    revoked, unknown = ask(place), ask(place, key="nobody")

    assert revoked.status_code == 401
    assert revoked.get_json() == unknown.get_json()


def test_money_that_nobody_can_read_is_a_503_and_never_a_429(place: Place) -> None:
    """No lease is open, and this gateway has no way to Postgres."""
    answer = ask(place, key="paying")

    assert answer.status_code == 503 and answer.get_json()["error"]["code"] == "money_unavailable"
    assert int(answer.headers["retry-after-ms"]) > 0


def test_a_budget_that_is_spent_is_a_429_that_is_not_to_be_retried(place: Place) -> None:
    spent = Figures(lease=0, day=0, day_spent=2 * balances.UNITS, month=1970 * 12)
    place.store.run(balances.open_lease("o", "key:paying", spent))
    place.store.run(prices.project([PRICE]))

    answer = ask(place, key="paying")

    assert (answer.status_code, answer.headers["x-should-retry"]) == (429, "false")
    assert answer.get_json()["error"]["type"] == "insufficient_quota"
    assert answer.headers["x-limit-scope"] == "key"


def test_a_lease_is_opened_once_and_the_request_is_told_what_it_covers(place: Place) -> None:
    """Postgres is asked off the common path: when the store does not know, and once."""
    opened: list[tuple[str, str]] = []

    def lease(org_id: str, scope: str) -> None:
        opened.append((org_id, scope))
        figures = Figures(lease=0, day=0, day_spent=2 * balances.UNITS - 1_000_000, month=1970 * 12)
        place.store.run(balances.open_lease(org_id, scope, figures))

    place.store.run(prices.project([PRICE]))
    place.gateways[0].admission.limiter.lease = lease

    answers = [place.ask("/v1/chat/completions", CHAT, headers={"Authorization": "Bearer paying"}) for _ in range(2)]

    request = place.worker.request(place.worker.claim())
    assert opened == [("o", "key:paying")]
    assert request.allowance_tokens == (1_000_000 - request.input_tokens * 10_000) // 20_000
    assert [answer.status_code for answer in answers] == [200, 429], "the first holds what there is"
    for answer in answers:
        answer.close()


def test_prices_that_come_back_at_this_moment_are_paid(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store has none when the price is looked up, and all of them a moment later: nothing is to run free."""
    admission = place.gateways[0].admission
    looked_up = admission._known

    def looked_up_just_before(*args: Any) -> Any:
        found = looked_up(*args)
        place.store.run(prices.project([PRICE]))
        return found

    monkeypatch.setattr(admission, "_known", looked_up_just_before)
    admission.limiter.lease = lambda org_id, scope: place.store.run(
        balances.open_lease(org_id, scope, Figures(lease=0, day=0, month=1970 * 12))
    )
    with place.ask("/v1/chat/completions", CHAT, headers={"Authorization": "Bearer paying"}) as answer:
        assert answer.status_code == 200
        request = place.worker.request(place.worker.claim())

    assert request.price_id == PRICE.id and request.allowance_tokens


def test_postgres_away_is_a_503_that_says_it_is_the_money(place: Place) -> None:
    def lease(org_id: str, scope: str) -> None:
        raise DatabaseAway("away")

    place.gateways[0].admission.limiter.lease = lease
    answer = ask(place, key="paying")
    assert (answer.status_code, answer.get_json()["error"]["code"]) == (503, "money_unavailable")


def test_a_socket_is_told_before_each_response(place: Place) -> None:
    ws = Wire()
    caller = Door().authenticate("Bearer limited")
    socket = Socket(ws, place.gateways[0].admission, caller)
    ws.inbox.put(json.dumps({"type": "response.create", "model": MODEL, "input": "hello", "max_output_tokens": 9}))
    ws.inbox.put(None)

    socket._obey(ws.receive())
    first, second = ws.sent.get(timeout=10), ws.sent.get(timeout=10)

    assert (first["type"], second["type"]) == ("rate_limits.updated", "response.created")
    assert uuid.UUID(first["event_id"].removeprefix("event_"))
    assert {one["name"]: one["remaining"] for one in first["rate_limits"]}["requests"] == 49
    socket._leave()


# --- /v1/key


def test_a_key_sees_every_scope_that_may_bind_it(place: Place) -> None:
    with place.ask("/v1/responses", {**ASKED, "max_output_tokens": 100}, headers={"Authorization": "Bearer limited"}):
        told = place.get("/v1/key", key="limited").get_json()
        prompt = place.worker.request(place.worker.claim()).input_tokens

    by_scope = {one["scope"]: one for one in told["limited"]}
    assert set(by_scope) == {"key:limited", "project:p", f"model:{MODEL}"}
    own = by_scope["key:limited"]
    assert own["limits"]["tokens_per_minute"] == 5000 and own["limits"]["money_per_day"] is None
    assert own["used"]["requests"] == 1 and own["debt_tokens"] == 0
    assert own["remaining"]["tokens"] == 5000 - prompt - 100, "all that it may come to"
    assert "money" not in own


def test_a_key_sees_its_money_to_the_last_digit(place: Place) -> None:
    figures = Figures(lease=0, day=0, day_spent=12_345_678_901, month=1970 * 12)
    place.store.run(balances.open_lease("o", "key:paying", figures))

    [told] = place.get("/v1/key", key="paying").get_json()["limited"]

    assert told["limits"]["money_per_day"] == "2"
    assert told["money"] == {"held": "0", "balance_left": None, "day_left": "0.7654321099", "month_left": None}


def test_a_key_sees_all_that_is_left_of_a_balance_of_millions(place: Place) -> None:
    """Which is more than is held at once, and more than a double has digits for."""
    figures = Figures(lease=0, granted=12_000_000 * balances.UNITS, grants=1, spent=5_000_000 * balances.UNITS + 1)
    place.store.run(balances.open_lease("o", "org", figures))

    told = place.get("/v1/key", key="prepaid").get_json()["limited"]

    [money] = [one["money"] for one in told if one["scope"] == "org"]
    assert money == {"held": "0", "balance_left": "6999999.9999999999", "day_left": None, "month_left": None}
