"""What admission knows of workers and answers: requests that nobody could hold are refused, not queued for ever."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import pytest

from billing import prices
from billing.rating import Price
from core import fleet
from core.errors import ContextTooLong
from core.lengths import learn
from core.redis import Call, Store
from core.values import WorkerState
from web.admission import Admission, _held_by

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
