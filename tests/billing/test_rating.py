"""Money is exact: linear in tokens, never rounded, and nobody pays for what we broke."""

from __future__ import annotations

from decimal import Decimal, Inexact

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing import rating
from billing.rating import Price
from core.values import Outcome, Usage

money = st.decimals(0, 10_000, places=rating.PRICE_DECIMALS, allow_nan=False)
counts = st.integers(0, 10**12)


@st.composite
def usages(draw: st.DrawFn) -> Usage:
    input_tokens, output_tokens = draw(counts), draw(counts)
    return Usage(
        input_tokens=input_tokens,
        cached_tokens=draw(st.integers(0, input_tokens)),
        output_tokens=output_tokens,
        reasoning_tokens=draw(st.integers(0, output_tokens)),
    )


def price(input_per_mtok: Decimal, cached: Decimal, output: Decimal) -> Price:
    return Price(
        id=1, model="m", tier="standard", currency="USD", since_ms=0,
        input_per_mtok=input_per_mtok, cached_input_per_mtok=cached, output_per_mtok=output,
    )  # fmt: skip


prices = st.builds(price, money, money, money)


@given(usages(), usages(), prices)
def test_the_rate_of_a_sum_is_the_sum_of_the_rates(a: Usage, b: Usage, at: Price) -> None:
    """So an hour is rated as a whole and loses nothing."""
    both = Usage(
        input_tokens=a.input_tokens + b.input_tokens,
        cached_tokens=a.cached_tokens + b.cached_tokens,
        output_tokens=a.output_tokens + b.output_tokens,
    )

    whole = rating.amount(both, at)

    assert whole == rating.amount(a, at) + rating.amount(b, at)


def test_cached_input_and_reasoning_are_counted_once() -> None:
    at = price(Decimal(3), Decimal("0.3"), Decimal(15))
    usage = Usage(input_tokens=1_000_000, cached_tokens=900_000, output_tokens=100_000, reasoning_tokens=50_000)

    assert rating.amount(usage, at) == Decimal("0.3") + Decimal("0.27") + Decimal("1.5")


def test_what_would_need_rounding_is_refused() -> None:
    with pytest.raises(Inexact):
        rating.amount(Usage(output_tokens=10**40 + 1), price(Decimal(0), Decimal(0), Decimal("0." + "3" * 30)))


@pytest.mark.parametrize("outcome", list(Outcome))
def test_only_what_the_caller_got_or_left_is_paid_for(outcome: Outcome) -> None:
    usage = Usage(input_tokens=10, output_tokens=5)

    paid = rating.billed(outcome, usage)

    assert paid == (usage if outcome in ("completed", "length", "cancelled", "stopped") else Usage())


@given(money)
def test_money_is_shown_with_every_digit_that_counts(amount: Decimal) -> None:
    shown = rating.plain(amount)

    assert Decimal(shown) == amount
    assert "E" not in shown and not (("." in shown) and shown.endswith("0"))
