"""What operators stop: a paused model keeps what waits and starts nothing; a shed class is refused and ended."""

from __future__ import annotations

import msgspec
import pytest
from dramatiq import Message
from dramatiq.errors import RateLimitExceeded

from core.accounts import stops
from core.postgres import Engine, transaction
from core.values import Class, Outcome
from tasks.broker import QueueBroker
from tasks.queue import Stops
from tasks.stops import project
from tests.conftest import Database
from tests.tasks.conftest import Bench

STORES = ("single", "cluster")
BULK = frozenset({Class.BULK})


def halt(bench: Bench, *, paused: bool = False, shed: frozenset[Class] = frozenset()) -> bool:
    """Stop so much; returns whether something shed is left to end."""
    mark = bench.store.run(bench.queue.mark())
    halted = bench.store.run(bench.queue.halt(Stops(paused=paused, shed=shed), mark))
    assert halted.done
    return halted.left


def test_a_paused_model_accepts_nothing_and_claims_nothing_and_goes_on_where_it_was(bench: Bench) -> None:
    bench.beat()
    bench.put("a")
    bench.put("b", cls=Class.INTERACTIVE)
    halt(bench, paused=True)

    assert bench.put("c").status == "paused" and bench.put("c").refused
    assert bench.claim(want=4) == [] and bench.seen("c").state == "unknown"
    assert {bench.seen("a").state, bench.seen("b").state} == {"waiting"}

    halt(bench)
    assert bench.put("c").status == "accepted"
    assert bench.claim(want=4) == ["b", "a", "c"]


def test_what_runs_goes_on_while_its_model_is_paused(bench: Bench) -> None:
    bench.put("a")
    bench.put("b")
    first, second = bench.take(), bench.take()
    halt(bench, paused=True)

    assert bench.store.run(bench.queue.deliver("w1", [first])) == [True]
    assert bench.finish(first)
    assert bench.ending("a").outcome == "completed"
    bench.store.run(bench.queue.hand_back("w1", [second]))
    assert bench.claim() == [], "but what comes back waits"
    halt(bench)
    assert bench.claim() == ["b"]


def test_a_claim_whose_reply_was_lost_is_told_again_though_the_model_was_paused_since(bench: Bench) -> None:
    bench.put("a")
    call = bench.queue.claim("w1", 1, lease_ms=3000, nonce="n")
    told = bench.store.run(call)
    halt(bench, paused=True)
    assert bench.store.run(call).claims == told.claims and len(told.claims) == 1


def test_nobody_is_preempted_for_what_is_paused_or_shed(bench: Bench) -> None:
    """A beat says the most urgent class in which something may be claimed."""
    bench.put("a", cls=Class.INTERACTIVE, background=True)
    bench.put("b", cls=Class.DEFAULT)
    assert bench.beat().urgent == Class.INTERACTIVE
    halt(bench, shed=frozenset({Class.INTERACTIVE}))
    assert bench.beat().urgent == Class.DEFAULT
    halt(bench, paused=True)
    assert bench.beat().urgent == 9


def test_whoever_waits_in_person_may_give_up_while_the_model_is_paused(bench: Bench) -> None:
    bench.beat()
    bench.put("a", patience_ms=2_000)
    bench.put("b")
    halt(bench, paused=True)
    bench.wait(2_000)
    assert bench.ending("a").outcome == "expired" and bench.seen("b").state == "waiting"


def test_resuming_wakes_a_worker_that_sleeps(bench: Bench) -> None:
    bench.put("a")
    halt(bench, paused=True)
    bench.valkey.delete(bench.key("wake"))
    halt(bench)
    assert bench.valkey.exists(bench.key("wake"))


def test_what_waits_of_a_class_that_is_shed_ends_at_once_and_is_told_of(bench: Bench) -> None:
    bench.put("a", cls=Class.BULK, gateway="g")
    bench.put("b", cls=Class.DEFAULT, gateway="g")
    assert not halt(bench, shed=BULK)

    ending = bench.ending("a")
    assert (ending.outcome, ending.attempt, ending.usage.output_tokens) == (Outcome.SHED, 0, 0)
    assert bench.outcomes() == [("a", "shed")]
    [frame] = bench.heard("gateway:g")
    assert [one["outcome"] for one in msgspec.msgpack.decode(frame)["endings"]] == ["shed"]
    assert bench.put("c", cls=Class.BULK).status == "shed"
    assert bench.claim(want=4) == ["b"]


def test_a_class_that_is_shed_is_served_again_when_that_is_cleared(bench: Bench) -> None:
    halt(bench, shed=BULK)
    halt(bench)
    assert bench.put("a", cls=Class.BULK).status == "accepted"
    assert bench.claim() == ["a"]


def test_what_runs_of_it_goes_on_and_ends_if_it_comes_back(bench: Bench) -> None:
    bench.put("a", cls=Class.BULK)
    bench.put("b", cls=Class.BULK)
    first, second = bench.take(), bench.take()
    halt(bench, shed=BULK)
    assert bench.finish(first)
    bench.store.run(bench.queue.hand_back("w1", [second]))
    assert bench.outcomes() == [("a", "completed"), ("b", "shed")]


def test_a_delayed_task_ends_when_it_would_begin_to_wait(bench: Bench) -> None:
    bench.beat()
    bench.put("a", cls=Class.BULK, delay_ms=1_500)
    halt(bench, shed=BULK)
    assert bench.outcomes() == []
    bench.wait(2_000)
    assert bench.outcomes() == [("a", "shed")]


def test_background_work_that_was_accepted_is_held_and_not_ended(bench: Bench) -> None:
    bench.put("old", cls=Class.BULK, background=True)
    bench.put("a", cls=Class.BULK)
    halt(bench, shed=BULK)

    assert bench.put("new", cls=Class.BULK, background=True).status == "shed"
    assert bench.outcomes() == [("a", "shed")] and bench.claim() == []
    assert bench.seen("old").state == "waiting"
    halt(bench)
    assert bench.claim() == ["old"]


def test_held_background_work_stands_in_nobodys_way(bench: Bench) -> None:
    """More tenants' lines than a claim looks at, all of a class that is shed, and more urgent than what is not."""
    for n in range(40):
        bench.put(f"held{n}", tenant=f"t{n}", cls=Class.DEFAULT, background=True)
    bench.put("a", tenant="late", cls=Class.BULK)
    halt(bench, shed=frozenset({Class.DEFAULT}))
    assert bench.claim(want=3) == ["a"]
    assert bench.look(want=3).passed_class == 9


def test_held_background_work_that_is_overdue_stands_in_nobodys_way(bench: Bench) -> None:
    """One claim in sixteen goes to who is overdue longest, of those that may be claimed."""
    bench.beat()
    for n in range(100):
        bench.put(f"held{n}", cls=Class.DEFAULT, background=True)
    bench.put("late", cls=Class.BULK)
    halt(bench, shed=frozenset({Class.DEFAULT}))
    bench.wait(300_000, step_ms=1_000)
    for n in range(100):
        bench.put(f"u{n}", tenant="urgent", cls=Class.INTERACTIVE)
    first = [bench.claim()[0] for _ in range(48)]
    assert "late" in first


def test_nobody_saves_room_for_held_background_work(bench: Bench) -> None:
    """A worker that lets its engine run empty for something large goes on with what is served."""
    bench.put("large", cls=Class.DEFAULT, need_tokens=100, background=True)
    small = {"kv_tokens": 10, "total_kv_tokens": 200}
    assert bench.claim(**small) == []
    bench.wait(2_000)
    assert bench.claim(**small) == [] and bench.row("large")["saver"] == "w1"
    bench.put("a", cls=Class.BULK)
    assert bench.claim(**small) == [], "nothing less urgent goes while it is saved for"

    halt(bench, shed=frozenset({Class.DEFAULT}))
    assert bench.claim(want=2, kv_tokens=200, total_kv_tokens=200) == ["a"]
    assert "saver" not in bench.row("large") or bench.row("large")["saver"] == ""
    halt(bench)
    assert bench.claim(kv_tokens=200) == ["large"]


def test_many_are_ended_in_pieces_and_by_whoever_comes_next(bench: Bench) -> None:
    """256 at a time by the command; some by each claim, beat and watch, should the command die."""
    for n in range(600):
        bench.put(f"a{n}", cls=Class.BULK, tenant=f"t{n % 7}", background=n % 3 == 0)
    assert halt(bench, shed=BULK)
    assert 0 < len(bench.outcomes()) <= 256
    for _ in range(20):
        bench.beat()
    assert len(bench.outcomes()) == 400 and set(dict(bench.outcomes()).values()) == {"shed"}
    assert not halt(bench, shed=BULK)
    assert bench.store.run(bench.queue.tick()).waiting == (0, 0, 0, 200)


def test_what_is_left_to_end_is_served_if_that_is_cleared_meanwhile(bench: Bench) -> None:
    for n in range(300):
        bench.put(f"a{n}", cls=Class.BULK)
    assert halt(bench, shed=BULK)
    halt(bench)
    bench.beat()
    assert len(bench.outcomes()) == 256 and len(bench.claim(want=64)) == 44


def test_what_the_store_forgot_was_accepted_before_and_is_not_refused(bench: Bench) -> None:
    """A gateway puts it back: it waits while the model is paused; of a shed class it ends, unless it is background."""
    halt(bench, paused=True, shed=BULK)

    def again(name: str, **more: object) -> str:
        bench.store.run(bench.queue.enqueue(bench.task(name, **more), again=True))
        return bench.seen(name).state

    assert again("a") == "waiting"
    assert again("b", cls=Class.BULK) == "ended" and bench.ending("b").outcome == "shed"
    assert again("c", cls=Class.BULK, background=True) == "waiting"


def test_a_dead_letter_of_a_class_that_is_shed_is_not_retried(bench: Bench) -> None:
    for name, background in (("a", False), ("b", True)):
        bench.put(name, cls=Class.BULK, background=background)
        assert bench.finish(bench.take(), outcome=Outcome.FAILED, dead=True)
    halt(bench, shed=BULK)
    assert bench.store.run(bench.queue.retry_dead("a")) == "shed"
    assert bench.store.run(bench.queue.retry_dead("b")) == "retried" and bench.claim() == []
    halt(bench)
    assert bench.store.run(bench.queue.retry_dead("a")) == "retried"


def test_a_task_of_the_brokers_is_refused_in_dramatiqs_words(bench: Bench) -> None:
    halt(bench, paused=True)
    broker = QueueBroker(bench.store)
    broker.queues["m"] = bench.queue
    message: Message[None] = Message(queue_name="m", actor_name="a", args=(), kwargs={}, options={})
    with pytest.raises(RateLimitExceeded, match="paused"):
        broker.enqueue(message)


def test_the_queue_says_what_is_stopped(bench: Bench) -> None:
    assert bench.store.run(bench.queue.tick()).stops == Stops()
    halt(bench, paused=True, shed=frozenset({Class.DEFAULT, Class.BULK}))
    assert bench.store.run(bench.queue.tick()).stops == Stops(paused=True, shed=frozenset({2, 3}))


# --- what Postgres says


@pytest.fixture
def engine(database: Database) -> Engine:
    return database.engine()


def begin(engine: Engine, kind: stops.Kind, name: str, model: str = stops.EVERY) -> bool:
    with transaction(engine) as connection:
        return stops.begin(connection, kind, name, model, by_whom="ada")


def end(engine: Engine, kind: stops.Kind, name: str, model: str | None = None) -> int:
    with transaction(engine) as connection:
        return len(stops.end(connection, kind, name, model))


def told(bench: Bench, engine: Engine) -> Stops:
    assert project(bench.store, engine, ["m", "other"]) == []
    return bench.store.run(bench.queue.tick()).stops


def test_the_queues_are_told_what_postgres_says_and_nothing_else(bench: Bench, engine: Engine) -> None:
    assert begin(engine, "model", "m") and not begin(engine, "model", "m"), "a repeat changes nothing"
    begin(engine, "class", "bulk")
    begin(engine, "class", "default", "m")
    begin(engine, "class", "interactive", "other")
    begin(engine, "model", "a model that the catalogue no longer has")
    assert told(bench, engine) == Stops(paused=True, shed=frozenset({2, 3}))

    assert end(engine, "model", "m") == 1 and end(engine, "model", "m") == 0
    assert end(engine, "class", "default") == 1
    assert told(bench, engine) == Stops(shed=BULK)
    bench.valkey.flushall()
    assert told(bench, engine) == Stops(shed=BULK), "they are told again after a store lost everything"
    assert end(engine, "class", "bulk", "m") == 0, "it is shed of every model"
    assert end(engine, "class", "bulk") == 1
    assert told(bench, engine) == Stops()


def test_who_read_postgres_before_a_stop_does_not_undo_it(bench: Bench, engine: Engine) -> None:
    mark = bench.store.run(bench.queue.mark())
    begin(engine, "model", "m")
    assert told(bench, engine).paused
    late = bench.store.run(bench.queue.halt(Stops(), mark))
    assert not late.done and told(bench, engine).paused
