"""The log of endings: what is entered comes out once confirmed, whole, and never twice confirmed."""

from __future__ import annotations

import msgspec
import pytest
import uuid6

from core import usage
from core.redis import Store, command
from core.usage import BadEntry, Facts, Item
from core.values import Caller, Outcome, Request, Sampling, Usage

STORES = ("single", "cluster")

MODEL = "tiny"
REQUEST = Request(
    id=str(uuid6.uuid7()),
    model=MODEL,
    caller=Caller(org_id="o", project_id="p", key_id="k"),
    gateway="g",
    prompt_token_ids=[1, 2],
    sampling=Sampling(max_tokens=5),
    price_id=7,
    admitted_ms=1,
)
FIELDS: dict[str, object] = {
    "id": REQUEST.id,
    "attempt": 2,
    "outcome": "length",
    "worker": "w1",
    "input": 10,
    "cached": 4,
    "output": 7,
    "reasoning": 3,
    "facts": usage.facts(REQUEST),
}


def enter(store: Store, **other: object) -> None:
    words = [word for pair in {**FIELDS, **other}.items() for word in pair]
    store.run(command("XADD", usage.stream(MODEL), "*", *words, reply=bool))


def opened(store: Store) -> Store:
    store.run(usage.open_group(MODEL))
    return store


def test_an_entry_says_what_admission_knew_and_what_the_worker_counted(store: Store) -> None:
    enter(opened(store))

    [item] = store.run(usage.read_new(MODEL, "c1"))
    entry = usage.read(item)

    assert (entry.id, entry.attempt, entry.outcome, entry.worker) == (REQUEST.id, 2, Outcome.LENGTH, "w1")
    assert entry.usage == Usage(input_tokens=10, cached_tokens=4, output_tokens=7, reasoning_tokens=3)
    assert entry.facts == Facts(org_id="o", project_id="p", key_id="k", model=MODEL, price_id=7, admitted_ms=1)
    assert int(entry.entered_at.timestamp() * 1000) == int(item.entry_id.partition("-")[0])


def test_opening_the_group_again_changes_nothing_and_skips_nothing(store: Store) -> None:
    """The group begins at the log's first entry: what was entered before it was made counts too."""
    enter(store)

    assert store.run_all([usage.open_group(MODEL), usage.open_group(MODEL)]) == [True, True]

    assert len(store.run(usage.read_new(MODEL, "c1"))) == 1
    store.run(usage.open_group(MODEL))
    assert store.run(usage.read_new(MODEL, "c1")) == []


def test_an_entry_stays_with_its_consumer_until_it_is_struck_out(store: Store) -> None:
    enter(opened(store))
    [item] = store.run(usage.read_new(MODEL, "c1"))

    assert store.run(usage.read_new(MODEL, "c2")) == []
    assert store.run(usage.read_pending(MODEL, "c1")) == [item]
    store.run_all([usage.strike_out(MODEL, [item.entry_id])] * 2)

    assert store.run(usage.read_pending(MODEL, "c1")) == []
    assert store.run(usage.length(MODEL)) == 0
    assert store.run(usage.oldest_ms(MODEL)) is None


def test_what_a_dead_consumer_left_is_taken_over(store: Store) -> None:
    enter(opened(store))
    [item] = store.run(usage.read_new(MODEL, "dead"))

    fresh = store.run(usage.claim_stale(MODEL, "c2"))
    stale = store.run(usage.claim_stale(MODEL, "c2", stale_ms=0))

    assert fresh.items == []
    assert (stale.items, stale.cursor) == ([item], "0-0")
    assert store.run(usage.oldest_ms(MODEL)) == int(item.entry_id.partition("-")[0])


def test_the_same_ending_entered_twice_has_one_fingerprint(store: Store) -> None:
    opened(store)
    enter(store)
    enter(store)
    enter(store, output=8)

    first, repeat, other = (usage.read(item).sha256() for item in store.run(usage.read_new(MODEL, "c1")))

    assert first == repeat != other


def test_a_fact_that_a_newer_release_adds_does_not_disturb_this_one() -> None:
    known = msgspec.msgpack.decode(usage.facts(REQUEST))
    newer = msgspec.msgpack.encode({**known, "region": "eu"})
    fields = {name.encode(): str(value).encode() for name, value in FIELDS.items()}

    old = usage.read(Item(entry_id="1-0", fields={**fields, b"facts": usage.facts(REQUEST)}))
    new = usage.read(Item(entry_id="1-0", fields={**fields, b"facts": newer}))

    assert old == new


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("id", b"not an id"),
        ("id", b"\xff\xfe"),
        ("outcome", b"exploded"),
        ("input", b"many"),
        ("input", b"-1"),
        ("output", str(2**63).encode()),
        ("attempt", str(2**31).encode()),
        ("worker", b"a\0b"),
        ("facts", b"\xc1"),
        ("facts", msgspec.msgpack.encode({"org_id": 3})),
        ("facts", None),
    ],
)
def test_an_entry_that_makes_no_sense_is_one_exception(field: str, value: bytes | None) -> None:
    fields = {name.encode(): str(told).encode() for name, told in FIELDS.items()} | {b"facts": usage.facts(REQUEST)}
    fields.pop(field.encode())
    if value is not None:
        fields[field.encode()] = value

    with pytest.raises(BadEntry):
        usage.read(Item(entry_id="1-0", fields=fields))
