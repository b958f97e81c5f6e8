"""What admission knows of workers and answers: requests that nobody could hold are refused, not queued for ever."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from billing import prices
from billing.rating import Price
from core import catalog, fleet
from core.accounts.keys import KeyRecord
from core.errors import ContextTooLong, UnknownModel
from core.lengths import Lengths, learn
from core.limits import counters
from core.limits.counters import Need, Terms, Used
from core.redis import Call, Store
from core.values import Caller, Limit, Outcome, Request, Sampling, Usage, WorkerState
from tasks.queue import Bounds
from tests.web.test_coming_back import ASKED, CHAT, MODEL, TOML, Place
from web import limiter
from web.admission import Admission, _held_by, _need

NOBODY: Any = SimpleNamespace()


def announce(store: Store, name: str, kv_tokens: int) -> None:
    row = fleet.Worker(worker=name, host="h", model="m", state=WorkerState.READY, kv_tokens=kv_tokens)
    store.run(fleet.announce_worker(row))


def admission(store: Store) -> Admission:
    return Admission(NOBODY, store, NOBODY, {}, salt=b"")


def test_what_fits_the_largest_worker_is_let_in_as_it_is() -> None:
    assert _held_by(1000, 600, 400, 400) == 400
    assert _held_by(0, 600, 400, 400) == 400, "no worker has said"


def test_a_limit_that_the_client_did_not_name_is_cut_to_what_there_is() -> None:
    assert _held_by(1000, 600, 500, None) == 400


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "asked", "param"),
    [(600, 500, 500, "max_tokens"), (1000, 1, None, "messages"), (1200, 500, 500, "messages")],
)
def test_what_no_worker_can_hold_is_refused_with_the_numbers(
    prompt: int, max_tokens: int, asked: int | None, param: str
) -> None:
    with pytest.raises(ContextTooLong) as refused:
        _held_by(1000, prompt, max_tokens, asked)

    said = refused.value
    assert (said.status, said.code, said.param) == (400, "context_length_exceeded", param)
    for number in (prompt, max_tokens, prompt + max_tokens, 1000):
        assert str(number) in str(said)


def test_the_largest_worker_counts_and_is_looked_at_now_and_then_only(store: Store) -> None:
    announce(store, "small", 500)
    announce(store, "large", 9000)
    announce(store, "starting", 0)
    gate = admission(store)
    assert gate._known("m", "k")[2] == 9000

    announce(store, "larger", 20_000)
    assert gate._known("m", "k")[2] == 9000
    gate._fleets.clear()
    assert gate._known("m", "k")[2] == 20_000
    assert gate._known("unknown", "k")[2] == 0


def test_what_is_known_comes_in_one_exchange(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(20):
        store.run(learn("m", "k", 100))
    exchanges: list[int] = []
    run_all = store.run_all

    def counted(calls: Sequence[Call[Any]]) -> list[Any]:
        exchanges.append(len(calls))
        return run_all(calls)

    monkeypatch.setattr(store, "run_all", counted)
    gate = admission(store)

    price, learned, _, held = gate._known("m", "k", (b"x",))
    gate._known("m", "k")

    assert price is None and 91 < learned.expected(1000) <= 128
    assert held == [[]]
    assert exchanges == [4, 3]


def test_a_tier_without_a_price_of_its_own_costs_what_any_does(store: Store) -> None:
    gate = admission(store)
    assert gate._known("m", "k", (), "flex")[0] is None

    def price(id_: int, tier: str) -> Price:
        each = {"input_per_mtok": Decimal(1), "cached_input_per_mtok": Decimal(1), "output_per_mtok": Decimal(1)}
        return Price(id=id_, model="m", tier=tier, currency="USD", since_ms=0, **each)

    store.run(prices.project([price(1, "standard"), price(2, "flex")]))
    told = [gate._known("m", "k", (), tier)[0] for tier in ("default", "priority", "flex")]
    assert [(one.id, one.tier) for one in told if one] == [(1, "standard"), (1, "standard"), (2, "flex")]


@pytest.mark.parametrize(("width", "asked", "held"), [(4, None, 100), (4, 100, 100), (2, None, 200)])
def test_several_answers_are_held_all_at_once(width: int, asked: int | None, held: int) -> None:
    assert _held_by(1000, 600, 500 if asked is None else asked, asked, width) == held


def test_several_answers_that_no_worker_can_hold_are_refused() -> None:
    with pytest.raises(ContextTooLong) as refused:
        _held_by(1000, 600, 101, 101, 4)
    assert "4 times 101" in str(refused.value) and refused.value.param == "max_tokens"


# --- what it holds


def asked(max_tokens: int, prompt: int = 7, **fields: Any) -> Request:
    caller = Caller(org_id="o", project_id="p", key_id="k")
    sampling = Sampling(max_tokens=max_tokens)
    return Request(
        id="r", model="m", caller=caller, gateway="", prompt_token_ids=[1] * prompt, sampling=sampling, **fields
    )


def learned(tokens: int) -> Lengths:
    """A hundred answers of one length."""
    return Lengths(model=tuple(100 if at == 2 * (tokens.bit_length() - 1) else 0 for at in range(35)))


@pytest.mark.parametrize(
    ("request_", "named", "need"),
    [
        (asked(500), True, (7, 500, 500)),  # all that the client named
        (asked(9000), True, (7, 9000, 6225)),  # in one window what 62.25 s can bring at 100 tokens a second
        (asked(500), False, (7, 125, 1)),  # what its first report will ask for, and less where there is less
        (asked(20), False, (7, 20, 1)),
        (asked(500, n=3), True, (7, 1500, 1500)),
        (asked(500, more_prompts=((1, 2), (3,))), True, (10, 1500, 1500)),
        (asked(0, task="embed"), False, (7, 0, 0)),
    ],
)
def test_a_hold_covers_what_may_come_and_at_least_a_windows(
    request_: Request, named: bool, need: tuple[int, int, int]
) -> None:
    found = _need(request_, learned(64), 100.0, asked=named)
    assert (found.input_tokens, found.output_tokens, found.least_output_tokens) == need


def test_without_a_limit_or_a_history_all_that_it_may_have_is_held_at_first() -> None:
    found = _need(asked(500), Lengths(), 100.0, asked=False)
    assert found == Need(input_tokens=7, output_tokens=500, least_output_tokens=1, pace=100.0)


def test_tokens_count_by_the_pinned_price_and_the_models_weight() -> None:
    each = {"input_per_mtok": Decimal(1), "cached_input_per_mtok": Decimal("0.1"), "output_per_mtok": Decimal("2.5")}
    price = Price(id=1, model="m", tier="standard", currency="USD", since_ms=0, **each)
    assert limiter.terms(price, 0.25) == Terms(cached_weight=250, prices=(10**10, 10**9, 25 * 10**9))
    assert limiter.terms(None, 0.0) == Terms()


# --- at a gateway

LIMITED = (Limit(scope="key:mine", requests_per_minute=10), Limit(scope="org", tokens_per_minute=100_000))


class Door:
    """One key, which may use one model, and is limited on request."""

    def __init__(self, *limits: Limit, models: tuple[str, ...] = ()) -> None:
        self.record = KeyRecord(
            key_id="mine", org_id="o", project_id="p", secret_hmac=b"", limits=limits, models=models
        )

    def authenticate(self, authorization: str, **_: Any) -> KeyRecord:
        return self.record


@pytest.fixture
def place(store: Store, valkey_url: str, tmp_path: Path) -> Iterator[Place]:
    path = tmp_path / "catalog.toml"
    path.write_text(TOML)
    place = Place(store, valkey_url, catalog.load(path))
    for one in place.gateways:
        one.gate = Door(*LIMITED)  # type: ignore[assignment]
    yield place
    for one in place.gateways:
        one.subscriber.streams.clear()
        one.subscriber.stop()


def whole(answer: Any) -> bytes:
    """All of a stream, and its end at the gateway."""
    said: bytes = answer.get_data()
    answer.close()
    return said


def used(store: Store) -> list[Used]:
    return store.run(counters.used("o", LIMITED))


def test_a_request_carries_the_scopes_that_it_is_held_under(place: Place) -> None:
    answer = place.ask("/v1/chat/completions", CHAT)
    request = place.worker.request(place.worker.claim())
    assert request.scopes == ("key:mine", "org") and request.allowance_tokens is None
    answer.close()


def test_of_a_key_that_nothing_else_binds_the_scope_goes_without_saying(place: Place) -> None:
    place.gateways[0].gate = Door()  # type: ignore[assignment]
    answer = place.ask("/v1/chat/completions", CHAT)
    assert place.worker.request(place.worker.claim()).scopes == ()
    answer.close()


def test_an_answer_is_settled_with_what_it_used_as_it_ends(place: Place) -> None:
    for number in (1, 2):
        answer = place.ask("/v1/responses", ASKED, number)
        work = place.worker.claim()
        place.worker.say(work, "Hello", f"g{number}")
        assert [one.open for one in used(place.store)] == [1, 1] and used(place.store)[1].held_tokens > 0
        place.worker.finish(work)
        assert b"response.completed" in whole(answer)
        assert used(place.store)[1].open == 0
    assert [(one.requests, one.output_tokens, one.held_tokens) for one in used(place.store)] == [(2, 10, 0)] * 2


def test_a_stream_that_moved_is_settled_where_it_ends(place: Place) -> None:
    """At a gateway that did not admit it: the hold knows its scopes."""
    place.ask("/v1/responses", ASKED, headers={"X-Forebay-Linger": "60"})
    work = place.worker.claim()
    place.worker.say(work, "Hello")
    name = "resp_" + work.id.replace("-", "")
    again = place.get(f"/v1/responses/{name}?stream=true&starting_after=0", number=2)
    assert again.status_code == 200
    place.gateways[0].admission.limiter.settle = None  # type: ignore[assignment,method-assign]

    place.worker.finish(work)

    assert b"response.completed" in whole(again)
    assert [(one.open, one.output_tokens) for one in used(place.store)] == [(0, 5)] * 2


def test_what_a_full_queue_refuses_costs_nothing(place: Place) -> None:
    place.gateways[0].subscriber.queues[MODEL].bounds = Bounds(waiting=1)
    first = place.ask("/v1/chat/completions", CHAT)
    refused = [place.ask("/v1/chat/completions", CHAT).status_code for _ in range(4)]

    assert refused == [503] * 4
    assert [(one.requests, one.open) for one in used(place.store)] == [(1, 1)] * 2
    first.close()


def test_admission_takes_three_exchanges_and_limits_none_of_their_own(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is known, the hold, the queue: as many for four scopes as for one."""
    gateway = place.gateways[0]
    answers = [place.ask("/v1/chat/completions", CHAT)]  # which also looks at the workers, and loads scripts
    exchanges: list[str] = []
    for name in ("run", "run_all"):
        monkeypatch.setattr(gateway.store, name, counting(getattr(gateway.store, name), name, exchanges))

    answers.append(place.ask("/v1/chat/completions", CHAT))

    assert [one for one in exchanges if one != "watch"][:3] == ["run_all", "reserve", "enqueue"]
    assert exchanges.count("reserve") == 1 and "used" not in exchanges
    for answer in answers:
        answer.close()


def counting(method: Any, name: str, exchanges: list[str]) -> Any:
    def counted(calls: Any) -> Any:
        exchanges.append(calls.script.name if name == "run" and calls.script else name)
        return method(calls)

    return counted


def test_a_model_that_a_key_may_not_use_does_not_exist_for_it(place: Place) -> None:
    place.gateways[0].gate = Door(models=("another",))  # type: ignore[assignment]
    said = place.ask("/v1/chat/completions", CHAT), place.ask("/v1/chat/completions", {**CHAT, "model": "none"})

    forbidden, unknown = (answer.get_json()["error"] for answer in said)
    assert [answer.status_code for answer in said] == [404, 404]
    assert forbidden == {**unknown, "message": unknown["message"].replace("none", MODEL)}
    with pytest.raises(UnknownModel):
        place.gateways[0].admission._model(place.gateways[0].gate.authenticate(""), MODEL)


def test_usage_that_costs_nothing_is_settled_as_unbilled(place: Place) -> None:
    """Of what failed nothing is paid, and all of it counts against the limits."""
    settled: list[tuple[Usage, bool]] = []
    ours = place.gateways[0].admission.limiter
    settle = ours.settle

    def noted(request: Request, usage: Usage, *, billed: bool, forgo: bool = False) -> None:
        settled.append((usage, billed))
        settle(request, usage, billed=billed, forgo=forgo)

    ours.settle = noted  # type: ignore[method-assign]
    for outcome in (Outcome.COMPLETED, Outcome.FAILED):
        answer = place.ask("/v1/chat/completions", CHAT)
        work = place.worker.claim()
        place.worker.finish(work, outcome)
        whole(answer)

    assert [billed for _, billed in settled] == [True, False]
    assert all(usage.input_tokens == 3 for usage, _ in settled)
