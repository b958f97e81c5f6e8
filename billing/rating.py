"""All arithmetic of money. Exact: Decimals in, Decimals out, and a result that would need rounding is an error.

Rating is linear in tokens at one price, so the rate of a sum is the sum of the rates, to the last digit: an hour can
be rated as a whole.
"""

from __future__ import annotations

from decimal import Context, Decimal, Inexact, InvalidOperation

import msgspec

from core.values import Outcome, Usage

#: Endings that are paid for, as counted: the caller got, or walked away from, what was generated. Whatever ended by
#: our fault or never ran costs nothing.
BILLED = frozenset({Outcome.COMPLETED, Outcome.LENGTH, Outcome.CANCELLED, Outcome.STOPPED})

#: Decimals of a price per million tokens, as the table keeps it.
PRICE_DECIMALS = 10
#: Prices per million tokens stay below this, as the table keeps them.
PRICE_LIMIT = 10**10

#: Twenty digits of price times nineteen of tokens fit; what does not is refused, never rounded.
_EXACT = Context(prec=60, traps=[Inexact, InvalidOperation])
_MILLION = 6


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the price book. Prices are per million tokens."""

    id: int
    model: str
    tier: str
    currency: str
    since_ms: int  #: when it took effect
    input_per_mtok: Decimal
    cached_input_per_mtok: Decimal
    output_per_mtok: Decimal


def billed(outcome: Outcome, usage: Usage) -> Usage:
    """The tokens that are paid for."""
    return usage if outcome in BILLED else Usage()


def amount(usage: Usage, price: Price) -> Decimal:
    """What the tokens cost. Cached input is a part of the input, and reasoning of the output: neither counts twice."""
    parts = (
        (usage.input_tokens - usage.cached_tokens, price.input_per_mtok),
        (usage.cached_tokens, price.cached_input_per_mtok),
        (usage.output_tokens, price.output_per_mtok),
    )
    total = Decimal(0)
    for tokens, per_mtok in parts:
        total = _EXACT.fma(Decimal(tokens), per_mtok, total)
    return _EXACT.scaleb(total, -_MILLION)


def plain(money: Decimal) -> str:
    """Money as JSON and tables show it: every digit that counts, none that does not, no exponent."""
    shown = f"{money:f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown
