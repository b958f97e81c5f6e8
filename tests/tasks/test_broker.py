"""Dramatiq's own actors, messages, middleware and Worker on our broker."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import dramatiq
import pytest
import redis
from dramatiq.brokers.stub import StubBroker

from core.redis import Store
from core.values import Class
from tasks.broker import QueueBroker, jobs_middleware

STORES = ("single", "cluster")


@pytest.fixture(params=["ours", "dramatiq's stub"])
def broker(request: pytest.FixtureRequest, valkey_url: str, valkey: redis.Redis) -> Iterator[dramatiq.Broker]:
    """The same laws hold on Dramatiq's stub broker: ours adds to its semantics and takes nothing away."""
    if request.param == "ours":
        store = Store.connect(valkey_url)
        yield QueueBroker(store, middleware=jobs_middleware())
        store.close()
    else:
        yield StubBroker(middleware=jobs_middleware())


@pytest.fixture
def ours(valkey_url: str, valkey: redis.Redis) -> Iterator[QueueBroker]:
    store = Store.connect(valkey_url)
    yield QueueBroker(store, middleware=jobs_middleware())
    store.close()


@dataclass
class Calls:
    seen: list[object] = field(default_factory=list)


def run(broker: dramatiq.Broker, queue: str = "default") -> None:
    worker = dramatiq.Worker(broker, worker_timeout=50, worker_threads=2)
    worker.start()
    try:
        broker.join(queue, timeout=10_000)
        worker.join()
    finally:
        worker.stop()


def test_dramatiqs_worker_runs_every_message_once(broker: dramatiq.Broker) -> None:
    calls, lock = Calls(), threading.Lock()

    @dramatiq.actor(broker=broker)
    def add(n: int) -> None:
        with lock:
            calls.seen.append(n)

    for n in range(50):
        add.send(n)
    run(broker)

    assert sorted(calls.seen) == list(range(50))  # type: ignore[type-var]


def test_a_failed_message_is_retried_with_its_delay(broker: dramatiq.Broker) -> None:
    calls = Calls()

    @dramatiq.actor(broker=broker, max_retries=2, min_backoff=20, max_backoff=50)
    def fail() -> None:
        calls.seen.append(1)
        if len(calls.seen) < 3:
            raise ValueError("not yet")

    fail.send()
    run(broker)

    assert len(calls.seen) == 3


def test_a_delayed_message_is_run_later_and_once(broker: dramatiq.Broker) -> None:
    calls = Calls()

    @dramatiq.actor(broker=broker)
    def later() -> None:
        calls.seen.append(1)

    later.send_with_options(delay=100)
    run(broker)

    assert calls.seen == [1]


def test_a_message_enqueued_twice_is_run_once(ours: QueueBroker) -> None:
    """The gateway repeats an enqueue whose reply was lost."""
    calls = Calls()

    @dramatiq.actor(broker=ours)
    def once() -> None:
        calls.seen.append(1)

    message = once.message()
    ours.enqueue(message)
    ours.enqueue(message)
    run(ours)

    assert calls.seen == [1]


def test_priorities_hold_across_messages_of_one_queue(ours: QueueBroker) -> None:
    calls = Calls()

    @dramatiq.actor(broker=ours)
    def note(name: str) -> None:
        calls.seen.append(name)

    note.send_with_options(args=("low",), **{"class": Class.BULK})
    note.send_with_options(args=("high",), **{"class": Class.INTERACTIVE})
    worker = dramatiq.Worker(ours, worker_timeout=50, worker_threads=1)
    worker.start()
    ours.join("default", timeout=10_000)
    worker.stop()

    assert calls.seen == ["high", "low"]


def test_what_a_stopped_worker_had_claimed_goes_to_the_next(ours: QueueBroker) -> None:
    """Closing a consumer hands back what it holds; nothing waits for a time-out."""

    @dramatiq.actor(broker=ours)
    def note() -> None: ...

    note.send()
    consumer = ours.consume("default")
    assert next(consumer) is not None
    consumer.close()

    other = ours.consume("default")
    message = next(other)
    assert message is not None
    other.ack(message)
    ours.join("default", timeout=1000)
