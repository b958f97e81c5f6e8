"""Learned lengths of answers, on a real Valkey."""

from __future__ import annotations

import random

import hypothesis.strategies as st
import pytest
import redis
from hypothesis import given

from core.lengths import ANSWERS_MIN, BINS, EXPECTED, KEY_MAX, TTL_MS, Lengths, _bin, _quantile, _upper, learn, lengths
from core.redis import Store

STORES = ("single", "cluster")


def told(store: Store, key: str, *answers: int, model: str = "m") -> None:
    store.run_all([learn(model, key, answer) for answer in answers])


def test_nothing_is_expected_until_a_few_answers_have_come(store: Store) -> None:
    assert store.run(lengths("m", "k")) == Lengths()
    told(store, "k", *[100] * (ANSWERS_MIN - 1))

    assert store.run(lengths("m", "k")).expected(1000) == 0
    told(store, "k", 100)
    assert store.run(lengths("m", "k")).expected(1000) > 0


def test_a_keys_own_answers_count_and_everybodys_where_it_has_too_few(store: Store) -> None:
    told(store, "short", *[20] * 50)
    told(store, "long", *[3000] * 50)
    told(store, "new", 3000)

    short, long, new, stranger = (
        store.run(lengths("m", key)).expected(10_000) for key in ("short", "long", "new", "x")
    )

    assert 16 < short <= 23 and 2897 < long <= 4096
    assert new == stranger > 1000
    assert store.run(lengths("another", "short")).expected(10_000) == 0


def test_no_more_is_expected_than_may_come(store: Store) -> None:
    told(store, "k", *[3000] * 20)

    assert store.run(lengths("m", "k")).expected(64) == 64


def test_what_was_learned_last_weighs_most(store: Store) -> None:
    """A key that begins to ask for other answers is believed after as many as its sketch counts."""
    told(store, "k", *[2000] * 2 * KEY_MAX)
    assert store.run(lengths("m", "k")).quantile(EXPECTED) > 1448

    told(store, "k", *[30] * KEY_MAX)
    assert store.run(lengths("m", "k")).quantile(0.5) <= 32


def test_a_sketch_stays_small_and_goes_when_it_learns_nothing(store: Store, valkey: redis.Redis) -> None:
    told(store, "k", *[random.Random(3).randrange(200_000) for _ in range(3000)])

    for key in ("f1:{m}:lengths:k", "f1:{m}:lengths"):
        assert valkey.strlen(key) <= 3 + 3 * BINS
        assert 0 < valkey.pttl(key) <= TTL_MS
    assert sum(store.run(lengths("m", "k")).key) < KEY_MAX


@pytest.mark.parametrize("q", [0.5, 0.7, 0.95])
def test_a_quantile_is_off_by_a_bin_at_most(store: Store, q: float) -> None:
    """Half an octave, whatever the lengths: here a heavy tail."""
    chance = random.Random(7)
    answers = sorted(min(100_000, int(chance.lognormvariate(5, 1))) for _ in range(200))
    told(store, "k", *answers)

    true = answers[int(q * len(answers))]
    assert true / 1.5 <= store.run(lengths("m", "k")).quantile(q) <= true * 1.5


@given(st.integers(0, 10**7))
def test_every_length_has_a_bin(tokens: int) -> None:
    at = _bin(tokens)

    assert 0 <= at < BINS
    assert tokens <= _upper(at) or at == BINS - 1
    assert at == 0 or tokens > _upper(at - 1)


@given(st.lists(st.integers(0, 300), min_size=BINS, max_size=BINS).filter(any), st.floats(0, 1), st.floats(0, 1))
def test_a_higher_quantile_is_never_shorter(counts: list[int], one: float, other: float) -> None:
    assert _quantile(counts, min(one, other)) <= _quantile(counts, max(one, other)) <= _upper(BINS - 1)
