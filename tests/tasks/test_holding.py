"""What the queue lets in, what it holds, and what it gives up: bounds, held requests, patience, dead letters."""

from __future__ import annotations

import pytest

from core.values import Class, Outcome
from tasks.queue import Close
from tests.tasks.conftest import LEASE_MS, Bench

STORES = ("single", "cluster")

# --- nobody is there yet


def test_what_comes_while_no_worker_is_alive_is_held_and_its_patience_begins_when_one_is(bench: Bench) -> None:
    assert not bench.put("a", patience_ms=500).alive
    bench.wait(60_000)
    assert bench.seen("a").state == "waiting", "its own deadline has long passed"

    bench.beat()  # a worker with no room yet
    bench.clock.advance(499)
    bench.beat()
    assert bench.seen("a").state == "waiting"
    bench.clock.advance(1)
    bench.beat()

    assert bench.ending("a").outcome == "expired"


def test_what_the_last_worker_leaves_behind_is_held_for_the_next(bench: Bench) -> None:
    """Whether it waited already or comes back: while nobody could have run it, its deadline means nothing."""
    bench.beat()
    bench.put("back", patience_ms=5000)
    assert bench.claim() == ["back"]
    bench.put("waits", patience_ms=5000)
    bench.die()
    bench.wait(60_000)
    assert [bench.seen(name).state for name in ("back", "waits")] == ["waiting", "waiting"]
    assert bench.valkey.zcard(bench.key("held")) == 2

    bench.beat("w2")
    bench.clock.advance(4999)
    assert bench.claim("w2") == ["back"]
    bench.clock.advance(1)
    bench.beat("w2")
    assert bench.ending("waits").outcome == "expired"


def test_with_a_worker_alive_nothing_is_held(bench: Bench) -> None:
    bench.beat()

    assert bench.put("a", patience_ms=500).alive
    bench.clock.advance(500)
    bench.beat()

    assert bench.ending("a").outcome == "expired"


def test_what_is_held_waits_a_quarter_of_an_hour_at_most(bench: Bench) -> None:
    bench.put("a")
    bench.wait(899_000)
    assert bench.seen("a").state == "waiting"

    bench.wait(1000)

    assert (bench.ending("a").outcome, bench.claim()) == ("expired", [])


def test_without_patience_of_its_own_a_held_request_waits_for_ever_once_a_worker_was_there(bench: Bench) -> None:
    bench.put("a")
    bench.beat()
    bench.die()
    bench.wait(1_000_000, 1000)

    assert bench.claim() == ["a"]


def test_a_held_request_that_is_claimed_and_comes_back_is_not_held_any_more(bench: Bench) -> None:
    """More are held than one claim's timers release: those that are claimed at once must be let go of all the same."""
    for n in range(40):
        bench.put(f"r{n}", patience_ms=5000)
    claims = bench.look(want=32).claims
    bench.store.run(bench.queue.hand_back("w1", claims))

    assert bench.valkey.zcard(bench.key("held")) == 8
    assert sum(bool(bench.row(f"r{n}").get("held")) for n in range(40)) == 8
    for _ in range(4):
        bench.beat()
        bench.wait(1000)
    assert bench.valkey.zcard(bench.key("held")) == 0
    assert bench.valkey.zcard(bench.key("waiting")) == 40
    bench.beat()
    bench.wait(2000)
    assert {outcome for _, outcome in bench.outcomes()} == {"expired"} and len(bench.outcomes()) == 40


def test_what_comes_back_waits_anew(bench: Bench) -> None:
    """It has not waited while it ran: a long answer whose worker dies must not expire in the middle."""
    bench.put("a", patience_ms=500)
    claim = bench.take()
    for _ in range(10):
        bench.clock.advance(1000)
        bench.beat("w1", [claim])

    bench.die()
    bench.beat("w2")
    assert bench.seen("a").state == "waiting"
    bench.clock.advance(500)
    bench.beat("w2")

    assert bench.ending("a").outcome == "expired"


# --- bounds


def test_no_more_requests_wait_for_a_model_than_it_may_have(bench: Bench) -> None:
    bench.bound(waiting=3)
    for n in range(3):
        assert bench.put(f"r{n}", tenant=f"t{n}").status == "accepted"

    refused = bench.put("one more", tenant="other", input_tokens=5)

    assert (refused.status, refused.whose, refused.waiting, refused.waiting_tokens) == ("full", "model", 3, 9)
    assert bench.put("r1").status == "known", "what is known is no new request, however full it is"
    bench.claim()
    assert bench.put("one more").status == "accepted"


def test_no_more_tokens_wait_for_a_model_than_it_may_have_yet_one_alone_is_never_too_long(bench: Bench) -> None:
    bench.bound(tokens=100)
    assert bench.put("long", input_tokens=1000).status == "accepted"

    assert bench.put("short", input_tokens=1).whose == "model"
    bench.claim()
    assert bench.put("short", input_tokens=1).status == "accepted"
    assert bench.put("fits", input_tokens=99).status == "accepted"
    assert bench.put("over", input_tokens=1).status == "full"


def test_one_tenant_cannot_fill_the_queue_of_all(bench: Bench) -> None:
    bench.bound(tenant_waiting=2, tenant_tokens=50)
    assert [bench.put(f"r{n}", input_tokens=20).status for n in range(3)] == ["accepted", "accepted", "full"]

    refused = bench.put("r3", input_tokens=20)

    assert (refused.whose, refused.waiting, refused.waiting_tokens) == ("tenant", 2, 40)
    assert bench.put("other", tenant="u", input_tokens=20).status == "accepted"
    assert bench.put("tokens", tenant="u", input_tokens=31).whose == "tenant"
    assert bench.valkey.hget(bench.key("depths"), "t") == b"2", "what was refused left nothing"


# --- dead letters


def bury(bench: Bench, name: str) -> None:
    """Make a request take three workers down."""
    for worker in ("d1", "d2", "d3"):
        assert bench.claim(worker) == [name]
        bench.die(worker)


def test_a_request_that_takes_three_workers_down_is_a_dead_letter_and_can_be_retried(bench: Bench) -> None:
    bench.put("poison", body=b"body", tenant="t", input_tokens=3)
    bury(bench, "poison")

    total, [letter] = bench.store.run(bench.queue.dead_letters(0, 10))
    assert total == 1
    assert (letter.id, letter.losses, letter.attempt, letter.message) == ("poison", 3, 3, b"poison")
    assert bench.store.run(bench.queue.dead_letter("poison")) == letter
    assert bench.ending("poison").outcome == "failed"

    assert bench.store.run(bench.queue.retry_dead("poison")) == "retried"
    assert bench.store.run(bench.queue.dead_letters(0, 10)) == (0, [])
    claim = bench.take()
    assert (claim.attempt, claim.message) == (4, b"poison")
    assert bench.store.run(bench.queue.body("poison")) == b"body"
    assert bench.finish(claim)
    assert bench.outcomes() == [("poison", "failed")], "it was counted when it was given up"


def test_what_runs_well_beside_a_poison_is_not_given_up_with_it(bench: Bench) -> None:
    """What ends its worker makes no token there. Whoever made some has come through that once."""
    bench.put("innocent")
    claim = bench.take("w0")
    bench.store.run(bench.queue.deliver("w0", [claim]))
    bench.put("poison")
    bench.claim("w0")
    bench.die("w0")
    for worker in ("w1", "w2"):
        assert bench.claim(worker, 2) == ["innocent", "poison"]
        bench.die(worker)

    assert bench.ending("poison").outcome == "failed"
    assert bench.finish(bench.take())
    assert bench.outcomes() == [("poison", "failed"), ("innocent", "completed")]


def test_a_request_that_ends_each_worker_after_some_tokens_is_given_up_at_last(bench: Bench) -> None:
    """Not one that may go on from there, which ends the next worker at once: one that begins anew each time."""
    bench.put("poison")
    deaths = 0
    while bench.seen("poison").state != "ended":
        bench.store.run(bench.queue.deliver("w1", [bench.take()]))
        bench.die("w1")
        deaths += 1

    assert deaths == 12
    assert bench.ending("poison").outcome == "failed"


@pytest.mark.parametrize("died", [True, False])
def test_what_a_worker_hands_back_counts_as_a_loss_only_if_its_engine_died(bench: Bench, died: bool) -> None:
    bench.put("a")
    for _ in range(3):
        bench.store.run(bench.queue.hand_back("w1", [bench.take()], "its engine died", died=died))

    assert bench.seen("a").state == ("ended" if died else "waiting")


def test_a_worker_may_give_a_request_up_itself(bench: Bench) -> None:
    bench.put("a", body=b"body")
    claim = bench.take()

    assert bench.finish(claim, outcome=Outcome.FAILED, message="cannot be read", dead=True)
    assert bench.finish(claim, outcome=Outcome.FAILED, message="cannot be read", dead=True), "a repeat"

    total, [letter] = bench.store.run(bench.queue.dead_letters(0, 10))
    assert (total, letter.reason) == (1, "cannot be read")
    assert bench.store.run(bench.queue.body("a")) == b"body", "a letter keeps its body"
    assert bench.store.run(bench.queue.purge_dead("a"))
    assert bench.store.run(bench.queue.body("a")) is None
    assert not bench.store.run(bench.queue.purge_dead("a"))
    assert bench.store.run(bench.queue.dead_letter("a")) is None
    assert bench.store.run(bench.queue.retry_dead("a")) == "unknown"


def test_a_letter_without_its_body_cannot_be_retried(bench: Bench) -> None:
    bench.put("a", body=b"body")
    bench.finish(bench.take(), outcome=Outcome.FAILED, dead=True)
    bench.valkey.delete(bench.key("body:a"))

    assert bench.store.run(bench.queue.retry_dead("a")) == "gone"
    assert bench.claim() == []


def test_a_letter_whose_id_was_sent_again_is_not_run_beside_it(bench: Bench) -> None:
    bench.put("a", body=b"body")
    bench.finish(bench.take(), outcome=Outcome.FAILED, dead=True)
    bench.clock.advance(900_001)
    bench.store.run(bench.queue.tick())
    assert bench.put("a", body=b"again").status == "accepted"

    assert bench.store.run(bench.queue.retry_dead("a")) == "open"
    assert bench.store.run(bench.queue.purge_dead("a"))
    assert bench.store.run(bench.queue.body("a")) == b"again"
    assert bench.claim("w1", 5) == ["a"]


def test_a_retried_letter_is_not_overdue_at_once(bench: Bench) -> None:
    """Else a retry of many would go before everybody else's work."""
    bench.put("a", cls=Class.BULK)
    bench.finish(bench.take(), outcome=Outcome.FAILED, dead=True)
    bench.wait(400_000)
    bench.store.run(bench.queue.retry_dead("a"))

    assert bench.row("a")["due_ms"] == bench.clock.now_ms + 300_000


def test_letters_are_kept_a_week_newest_first_and_no_more_than_ten_thousand(bench: Bench) -> None:
    for n in range(3):
        bench.put(f"r{n}")
        bench.finish(bench.take(), outcome=Outcome.FAILED, dead=True)
        bench.clock.advance(1000)
    total, letters = bench.store.run(bench.queue.dead_letters(1, 1))
    assert (total, [letter.id for letter in letters]) == (3, ["r1"])

    old = {f"old{n}": 0 for n in range(9_997)}
    bench.valkey.zadd(bench.key("dead"), old)
    bench.put("last")
    bench.finish(bench.take(), outcome=Outcome.FAILED, dead=True)
    assert bench.valkey.zcard(bench.key("dead")) == 10_000
    assert bench.valkey.zscore(bench.key("dead"), "last") is not None

    bench.valkey.zrem(bench.key("dead"), *old)
    bench.clock.advance(7 * 24 * 3600 * 1000)
    bench.store.run(bench.queue.tick())
    assert bench.store.run(bench.queue.dead_letters(0, 10)) == (0, [])
    assert bench.valkey.hlen(bench.key("letters")) == 0


# --- many endings at once


def test_endings_of_one_exchange_are_each_by_themselves(bench: Bench) -> None:
    for name in "abc":
        bench.put(name, body=b"b", view=b"v")
    a, b = bench.look("w1", 2).claims
    c = bench.take("w2")
    closes = [Close(claim=one, outcome=Outcome.COMPLETED) for one in (a, c, b)]

    assert bench.store.run(bench.queue.finish_all("w1", closes)) == [True, False, True]
    assert bench.store.run(bench.queue.finish_all("w1", closes)) == [True, False, True]

    assert bench.outcomes() == [("a", "completed"), ("b", "completed")]
    assert [bench.store.run(bench.queue.body(name)) for name in "abc"] == [None, None, b"b"]
    ttls = [bench.valkey.pttl(bench.key("view:" + name)) for name in "abc"]
    assert ttls[0] <= 900_000 and ttls[1] <= 900_000
    assert ttls[2] > 900_000, "another worker's word does not shorten the life of what still runs"


def test_a_lease_is_what_the_worker_says(bench: Bench) -> None:
    bench.put("a")
    bench.take()
    bench.wait(LEASE_MS - 1000)
    assert bench.seen("a").state == "running"
    bench.wait(1000)
    assert bench.seen("a").state == "waiting"
