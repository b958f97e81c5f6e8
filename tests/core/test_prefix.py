"""Prefix hashes are vLLM's own, and the index of who holds them stays small and true."""

from __future__ import annotations

import random
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from core.prefix import HOLD_MAX_MS, HOLDERS, MARK_BYTES, chain, checkpoints, depths, hold, holders
from core.redis import Store
from tests.conftest import Clock

SALT = "5a17" * 8
tokens = st.lists(st.integers(0, 200_000), max_size=80)


@pytest.fixture
def vllm_hashes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The block hashes that vLLM itself gives a prompt."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256_cbor)

    def hashes(prompt: list[int], block_tokens: int, salt: str) -> list[bytes]:
        request = Request(
            request_id="r",
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            cache_salt=salt or None,
            block_hasher=get_request_block_hasher(block_tokens, sha256_cbor),
        )
        return list(request.block_hashes)

    return hashes


@pytest.mark.parametrize("salt", ["", SALT], ids=["no salt", "salt"])
@pytest.mark.parametrize("block_tokens", [16, 32])
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 31, 32, 33, 100, 1000, 4096])
def test_the_hashes_are_vllms(vllm_hashes: Any, length: int, block_tokens: int, salt: str) -> None:
    """Token ids of every width that the encoding has: below 24, 256, 65,536 and above."""
    print(f"seed {length}")
    prompt = [random.Random(length + n).choice([3, 23, 24, 255, 256, 65_535, 65_536, 151_643]) for n in range(length)]

    assert chain(prompt, block_tokens, salt) == vllm_hashes(prompt, block_tokens, salt)
    assert len(chain(prompt, block_tokens, salt)) == length // block_tokens


@given(shared=tokens, mine=tokens, theirs=tokens)
def test_equal_prefixes_have_equal_hashes_and_nothing_else_has(
    shared: list[int], mine: list[int], theirs: list[int]
) -> None:
    a, b = shared + mine, shared + theirs

    for block, (one, other) in enumerate(zip(chain(a, 4, SALT), chain(b, 4, SALT), strict=False), 1):
        assert (one == other) == (a[: block * 4] == b[: block * 4])


def test_organisations_share_no_prefix() -> None:
    prompt = list(range(640))

    assert not set(chain(prompt, 16, "org a")) & set(chain(prompt, 16, "org b"))
    assert not set(checkpoints(chain(prompt, 16, "org a"))) & set(checkpoints(chain(prompt, 16, "org b")))


@given(st.integers(0, 8000), st.integers(0, 8000))
def test_checkpoints_lie_at_the_same_depths_in_every_prompt_and_close_enough(blocks: int, other: int) -> None:
    """Of any prefix at least half is seen, of one of eight blocks at least two thirds."""
    here, there = depths(blocks), depths(other)

    assert here == sorted(set(here))
    assert here[: len(there)] == there[: len(here)]
    assert len(here) <= 24
    if blocks:
        assert here[0] == 1
        assert here[-1] <= blocks < here[-1] * (1.5 if blocks >= 8 else 2)


@given(shared=st.lists(st.integers(0, 99), min_size=8, max_size=64), more=st.lists(st.integers(100, 199), max_size=64))
def test_two_prompts_meet_at_every_checkpoint_of_what_they_share(shared: list[int], more: list[int]) -> None:
    short, long = checkpoints(chain(shared, 2, "")), checkpoints(chain(shared + more, 2, ""))

    assert long[: len(short)] == short
    assert all(len(mark) == MARK_BYTES for mark in long)


def test_a_prefix_is_held_for_a_while_by_those_that_computed_it_last(store: Store, clock: Clock) -> None:
    for n in range(HOLDERS + 2):
        clock.advance(10)
        store.run(hold("m", f"w{n}", [b"deep", b"deeper"][: 1 + n % 2], hold_ms=1000))
    store.run(hold("m", "w3", [b"deep"], hold_ms=1000))

    assert store.run(holders("m", [b"deep", b"deeper", b"other"])) == [["w3", "w5", "w4", "w2"], ["w5", "w3", "w1"], []]
    assert store.run(holders("m", [])) == []

    clock.advance(980)
    assert store.run(holders("m", [b"deep"])) == [["w3", "w5", "w4"]]
    clock.advance(20)
    assert store.run(holders("m", [b"deep"])) == [[]]


def test_models_have_nothing_to_do_with_each_other(store: Store) -> None:
    store.run(hold("m", "w", [b"x"]))

    assert store.run(holders("n", [b"x"])) == [[]]


def test_random_prompts_leave_the_index_small(store: Store, clock: Clock, valkey: redis.Redis) -> None:
    """Scaled down from a million prompts and 200,000 hashes: what expires first goes first, also before its time."""
    chance = random.Random(1)

    for _ in range(3000):
        clock.advance(1)
        marks = [chance.randbytes(8) for _ in range(chance.randint(0, 23))]
        left = store.run(hold("m", "w", marks, most=500))
        assert left == valkey.zcard("f1:{m}:holders_due") <= 500 + len(marks)
    assert valkey.hlen("f1:{m}:holders") == valkey.zcard("f1:{m}:holders_due")
    assert store.run(holders("m", marks)) == [["w"]] * len(marks), "the newest are there"


def test_expired_hashes_go_as_others_come(store: Store, clock: Clock, valkey: redis.Redis) -> None:
    for n in range(100):
        store.run(hold("m", "w", [b"old%d" % n], hold_ms=1000))
    clock.advance(1000)

    for n in range(100):
        store.run(hold("m", "w", [b"new%d" % n], hold_ms=1000))

    assert valkey.hlen("f1:{m}:holders") == 100


def test_the_index_of_a_model_that_nobody_asks_for_any_more_goes_as_a_whole(store: Store, valkey: redis.Redis) -> None:
    store.run(hold("m", "w", checkpoints(chain(list(range(64)), 16, SALT))))

    for key in ("f1:{m}:holders", "f1:{m}:holders_due"):
        assert 0 < valkey.pttl(key) <= HOLD_MAX_MS


def test_a_repeated_hold_changes_nothing(store: Store) -> None:
    """Its reply may have been lost."""
    call = hold("m", "w", [b"x"])

    assert store.run(call) == store.run(call) == 1
    assert store.run(holders("m", [b"x"])) == [["w"]]
