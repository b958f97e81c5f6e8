"""A gateway's open streams: whatever is lost, repeated or run again, a client gets its answer once, or an error."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import redis
from hypothesis import assume, given
from hypothesis import strategies as st
from redis.exceptions import ConnectionError as RedisConnectionError
from structlog.testing import capture_logs

from core.errors import RequestFailed
from core.outlook import Pace, Starting
from core.redis import Call
from core.stream.frames import Delta, Frame, Logprob, Run, Takeover, cut_of, decode, encode, joined
from core.stream.log import Output, cut_log, gateway_channel, log_step, save, saved
from core.telemetry import metrics
from core.values import Caller, Ending, Outcome, Request, Sampling, Usage, WorkerState
from tasks.queue import WATCH_MAX, Bounds, Claim, Queue, generation
from tests.conftest import TimedStore
from web.stream import KEPT_MAX, Again, Broken, Ended, Event, Running, Stream, Text, Waiting
from web.subscriber import FILL_PAUSES_S, REST_S, Subscriber

MODEL = "m"
LEASE_MS = 60_000
PATIENCE_S = 10.0


def request(
    name: str = "r",
    *,
    stream: bool = True,
    temperature: float = 0.0,
    gateway: str = "g",
    key: str = "k",
    org: str = "o",
    linger_ms: int = 0,
    repetition_penalty: float = 1.0,
) -> Request:
    return Request(
        id=name,
        model=MODEL,
        caller=Caller(org_id=org, project_id="p", key_id=key),
        gateway=gateway,
        prompt_token_ids=[1, 2],
        sampling=Sampling(max_tokens=50, temperature=temperature, repetition_penalty=repetition_penalty),
        stream=stream,
        linger_ms=linger_ms,
    )


def opened(asked: Request | None = None, *, attached: bool = False) -> Stream:
    """A stream of which no gap is filled, but by the test."""
    return Stream(asked or request(), lambda stream: None, attached=attached)


def piece(token: int) -> str:
    """A token's text: none, one or a few characters."""
    return chr(97 + token) * (token % 4)


def text_of(tokens: list[int]) -> str:
    return "".join(map(piece, tokens))


def attempt(
    tokens: list[int], cuts: list[int], number: int = 1, hold: int = 0, start: int = 0, name: str = "r"
) -> list[Delta]:
    """All deltas of one attempt from the token `start` on. Engines keep `hold` characters back, since a stop string may
    have begun in them."""
    edges = sorted({cut for cut in cuts if start < cut < len(tokens)} | {start, len(tokens)})

    def said(edge: int) -> str:
        whole = text_of(tokens[:edge])
        return whole if edge == len(tokens) else whole[: max(0, len(whole) - hold)]

    return [
        Delta(
            name,
            number,
            a,
            tuple(tokens[a:b]),
            said(b).removeprefix(said(a)),
            len(said(a)),
            cut=cut_of(tokens[:a]) if a == start and number > 1 else "",
        )
        for a, b in pairwise(edges)
    ]


def ending(number: int = 1, output: int = 0, outcome: Outcome = Outcome.COMPLETED, name: str = "r") -> Ending:
    return Ending(id=name, attempt=number, outcome=outcome, usage=Usage(input_tokens=2, output_tokens=output))


def taken(stream: Stream) -> list[Event]:
    """What its reader finds now."""
    events = []
    while (event := stream.next(0)) is not None:
        events.append(event)
    return events


def text(events: list[Event]) -> str:
    """What a client has in the end: texts since the last time it was told to forget."""
    got = ""
    for event in events:
        if isinstance(event, Again):
            got = ""
        elif isinstance(event, Text):
            got += event.text
    return got


# --- the state machine

answers = st.lists(st.integers(0, 9), min_size=1, max_size=16)
cuts = st.lists(st.integers(1, 16), max_size=8)


@st.composite
def histories(draw: st.DrawFn, *, lossy: bool = False) -> tuple[list[int], list[Delta], int]:
    """(answer, deltas as a gateway may get them, attempts): attempts that die anywhere, deltas sent again, and what
    older attempts still send while the next one runs."""
    tokens, hold, attempts = draw(answers), draw(st.integers(0, 3)), draw(st.integers(1, 3))
    came: list[Delta] = []
    stale: list[Delta] = []
    for number in range(1, attempts + 1):
        deltas = attempt(tokens, draw(cuts), number, hold)
        alive = len(deltas) if number == attempts else draw(st.integers(0, len(deltas)))
        for i, delta in enumerate(deltas[:alive]):
            if lossy and draw(st.booleans()):
                continue
            came.append(delta)
            came += deltas[draw(st.integers(0, i)) : i + 1] if draw(st.booleans()) else []
            came += stale[: draw(st.integers(0, len(stale)))]
        stale += deltas[alive:]
    return tokens, came, attempts


@given(histories(), st.booleans(), st.data())
def test_any_history_gives_the_client_its_text_exactly_once(
    history: tuple[list[int], list[Delta], int], stream: bool, data: st.DataObject
) -> None:
    """Attempts, repeats and different cuts of the same tokens, read as fast or as slowly as one likes."""
    tokens, deltas, attempts = history
    one = opened(request(stream=stream))
    events: list[Event] = []

    for delta in deltas:
        one.take(delta)
        if data.draw(st.booleans()):
            events += taken(one)
    one.end(ending(attempts, len(tokens)))
    events += taken(one)

    assert text(events) == text_of(tokens)
    assert isinstance(events[-1], Ended)
    assert list(one.tokens) == tokens
    assert one.ended
    if stream:
        offsets = [event.offset for event in events if isinstance(event, Text)]
        assert offsets == sorted(set(offsets)), "a cursor only grows"
        assert not any(isinstance(event, Again) for event in events)


@given(histories(lossy=True), st.booleans())
def test_what_was_lost_is_filled_in_and_without_that_it_ends_with_an_error(
    history: tuple[list[int], list[Delta], int], kept: bool
) -> None:
    """What the client has is always a beginning of the answer; it is told that it ended well only if it has it all."""
    tokens, deltas, attempts = history
    one = opened()

    with capture_logs():
        for delta in deltas:
            one.take(delta)
        one.end(ending(attempts, len(tokens)))
        if not one.fill(output_of(attempt(tokens, [], attempts) if kept else [])):
            assert not kept
            one.give_up()
    events = taken(one)

    assert text_of(tokens).startswith(text(events))
    if isinstance(events[-1], Ended):
        assert text(events) == text_of(tokens)
    else:
        assert not kept
        assert isinstance(events[-1], Broken) and isinstance(events[-1].error, RequestFailed)


@given(answers, cuts, cuts, st.data())
def test_a_second_attempt_that_differs_ends_as_an_error_never_a_splice(
    tokens: list[int], cuts_1: list[int], cuts_2: list[int], data: st.DataObject
) -> None:
    first = attempt(tokens, cuts_1)
    delivered = first[: data.draw(st.integers(1, len(first)))]
    shown = max((delta.offset + len(delta.tokens) for delta in delivered if delta.text), default=0)
    assume(shown)
    at = data.draw(st.integers(0, shown - 1))
    other = [*tokens[:at], (tokens[at] + 1) % 10, *tokens[at + 1 :]]
    one = opened()

    for delta in [*delivered, *attempt(other, cuts_2, 2)]:
        one.take(delta)
    one.end(ending(2, len(other)))
    events = taken(one)

    assert text(events) == "".join(delta.text for delta in delivered)
    assert isinstance(events[-1], Broken) and "another gave a different answer" in events[-1].error.message
    assert not one.ended, "so that closing it cancels what still runs"


def output_of(deltas: Iterable[Delta], name: str = "r") -> Output:
    output = Output(name)
    output.add(deltas)
    return output


@st.composite
def hand_overs(draw: st.DrawFn) -> tuple[list[int], list[tuple[str, Any]], int]:
    """(answer, what happens in its order, attempts): workers that die anywhere, each continued from what it had logged.

    What happens: "log" a delta, "get" one (pub/sub may lose it), "fence", "zombie": an older attempt, which samples
    something else once it has been taken over, still sends and even saves.
    """
    tokens, hold, attempts = draw(answers), draw(st.integers(0, 3)), draw(st.integers(1, 4))
    happens: list[tuple[str, Any]] = []
    zombies: list[Delta] = []
    start = 0
    for number in range(1, attempts + 1):
        deltas = attempt(tokens, draw(cuts), number, hold, start) if start < len(tokens) else []
        alive = len(deltas) if number == attempts else draw(st.integers(0, len(deltas)))
        if number > 1:
            happens += [("fence", number)]
            happens += [("zombie", zombie) for zombie in zombies[: draw(st.integers(0, len(zombies)))]]
            said = output_of(delta for verb, delta in happens if verb == "log").text
            happens.append(("log", Delta("r", number, start, (), "", len(said), cut=cut_of(tokens[:start]))))
        for delta in deltas[:alive]:
            happens.append(("log", delta))
            if draw(st.booleans()):
                happens.append(("get", delta))
            if draw(st.booleans()):
                happens.append(("fill", None))
        if alive and alive < len(deltas):
            late = deltas[alive]
            zombies.append(msgspec.structs.replace(late, tokens=tuple((t + 1) % 10 for t in late.tokens), text="?"))
        start = deltas[alive].offset if alive < len(deltas) else len(tokens)
    return tokens, happens, attempts


@given(hand_overs(), st.booleans(), st.booleans())
def test_a_hand_over_continues_a_sampled_answer_without_a_gap_or_a_repeat(
    history: tuple[list[int], list[tuple[str, Any]], int], streamed: bool, told: bool
) -> None:
    """Not told of takeovers, it may relay what a zombie made: then it ends with an error."""
    tokens, happens, attempts = history
    lost: list[Stream] = []
    one = Stream(request(temperature=1.0, stream=streamed), lost.append)
    store = Output("r")

    def fill() -> None:
        if lost and one.fill(store):
            lost.clear()

    with capture_logs():
        for verb, what in happens:
            match verb:
                case "log":
                    store.add([what])
                case "get":
                    one.take(what)
                case "fence" if told:
                    one.fence(what)
                case "zombie":
                    one.take(what)
                    store.add([what])
                case "fill":
                    fill()
        one.end(ending(attempts, len(tokens)))
        fill()
    events = taken(one)

    assert one.over
    if told or isinstance(events[-1], Ended):
        assert isinstance(events[-1], Ended)
        assert text(events) == text_of(tokens)
        assert list(one.tokens) == tokens and one.text == text_of(tokens)


def test_a_cut_that_does_not_fit_what_was_relayed_ends_with_an_error_and_never_splices() -> None:
    """As many tokens and characters, and others."""
    one = opened(request(temperature=1.0))
    one.take(attempt([1, 2], [])[0])

    one.take(attempt([5, 2, 3, 7], [], 2, 0, 2)[0])

    events = taken(one)
    assert text(events) == text_of([1, 2])
    assert isinstance(events[-1], Broken) and "another gave a different answer" in events[-1].error.message
    assert one.failed and not one.ended, "so that closing it cancels what still runs"


@pytest.mark.parametrize("before", [[1, 2, 3], [1, 6, 3]])
def test_what_is_missing_before_a_cut_is_filled_in_if_it_goes_with_what_was_relayed(before: list[int]) -> None:
    one = opened(request(temperature=1.0))
    one.take(attempt([1, 2], [])[0])
    first = attempt([*before, 5], [], 2, 0, 3)[0]

    with capture_logs():
        one.take(first)
        assert one.fill(output_of([Delta("r", 2, 0, tuple(before), text_of(before)), first]))

    events = taken(one)
    if before == [1, 2, 3]:
        assert text(events) == text_of([*before, 5]) and not one.over
    else:
        assert text(events) == text_of([1, 2]) and isinstance(events[-1], Broken)


def test_tokens_without_text_are_dropped_when_the_cut_lies_before_them() -> None:
    """Half of a character: a worker that takes over makes the whole character anew, perhaps another."""
    one = opened(request(temperature=1.0))
    for delta in attempt([1, 4], [1]):  # the text of 4 is empty
        one.take(delta)
    for delta in attempt([1, 5, 6], [2], 2, 0, 1):
        one.take(delta)
    one.end(ending(2, 3))

    assert text(events := taken(one)) == text_of([1, 5, 6])
    assert isinstance(events[-1], Ended) and list(one.tokens) == [1, 5, 6]


def test_a_newer_attempt_of_which_the_first_delta_is_lost_is_a_gap_wherever_it_goes_on() -> None:
    """Its tokens before may be others than ours, although they are as many."""
    one = opened(request(temperature=1.0))
    one.take(attempt([1, 2], [])[0])
    second = attempt([1, 3, 5], [2], 2, 0, 1)

    with capture_logs():
        one.take(second[1])
        one.fill(output_of([*attempt([1], []), *second]))

    assert isinstance(taken(one)[-1], Broken), "and what was shown is not in the answer"


def test_what_comes_while_a_gap_is_filled_is_kept_within_a_bound_and_beyond_it_filled_too() -> None:
    tokens = [1] * (KEPT_MAX + 9)
    deltas = attempt(tokens, list(range(len(tokens))))
    lost: list[Stream] = []
    one = Stream(request(), lost.append)

    with capture_logs():
        for delta in (deltas[0], *deltas[2:]):
            one.take(delta)
        assert not one.over and len(one._kept) == KEPT_MAX
        assert one.fill(output_of(deltas[:4]))
        assert len(one.tokens) == 2 + KEPT_MAX
        one.take(Delta("r", 1, len(tokens), (1,), "b", len(tokens)))
        one.end(ending(1, len(tokens) + 1))
        assert one.fill(output_of(deltas))

    assert lost == [one, one]
    assert text(events := taken(one)) == text_of(tokens) + "b" and isinstance(events[-1], Ended)


def test_the_end_waits_for_what_is_missing_before_it() -> None:
    one = opened()
    deltas = attempt([1, 2, 3], [2])
    one.take(deltas[0])

    with capture_logs():
        one.end(ending(1, 3))
        assert not one.over
        assert not one.fill(output_of(deltas[:1]))
        assert one.fill(output_of(deltas))

    assert [type(event) for event in taken(one)] == [Running, Text, Ended]


def test_an_answer_that_is_not_streamed_starts_anew_with_each_attempt() -> None:
    """Nothing of it has reached the client, so a second sample may differ."""
    one = opened(request(stream=False, temperature=1.0))

    for delta in [*attempt([1, 2, 3, 5], [2], 1)[:1], *attempt([7, 6, 5], [1], 2)]:
        one.take(delta)
    one.end(ending(2, 3))
    events = taken(one)

    assert [type(event) for event in events] == [Again, Running, Text, Again, Running, Text, Ended]
    assert text(events) == text_of([7, 6, 5])


def test_an_attempt_of_which_only_the_ending_came_is_not_told_with_an_older_ones_text() -> None:
    one = opened(request(stream=False, temperature=1.0))
    for delta in attempt([1, 2, 3, 5], [], 1):
        one.take(delta)

    with capture_logs():
        one.end(ending(2, 3))
    assert not one.over
    assert one.fill(output_of(attempt([7, 6, 5], [], 2)))

    events = taken(one)
    assert text(events) == text_of([7, 6, 5])
    assert isinstance(events[-1], Ended)


def test_an_older_attempts_delta_is_fenced_before_and_after_the_newer_ones_first() -> None:
    old, new = attempt([1, 2, 3], [1, 2], 1), attempt([1, 2, 3], [1, 2], 2)
    one = opened()

    for delta in (old[0], new[0], old[1], old[2], new[1], new[2]):
        one.take(delta)
    one.end(ending(2, 3))

    assert text(taken(one)) == text_of([1, 2, 3])


def test_an_ending_that_is_no_answer_needs_no_more_tokens() -> None:
    """A cancelled or lost request counted more than was relayed: that is no gap."""
    for outcome in (Outcome.CANCELLED, Outcome.WORKER_LOST, Outcome.FAILED, Outcome.EXPIRED):
        one = opened()
        one.take(attempt([1], [])[0])
        one.end(ending(1, 9, outcome))

        assert isinstance(taken(one)[-1], Ended)


def test_nothing_is_delivered_after_the_end() -> None:
    one = opened()
    deltas = attempt([1, 2, 3, 5], [2])
    one.take(deltas[0])
    one.end(ending(1, 2))
    assert isinstance(taken(one)[-1], Ended)

    one.take(deltas[1])
    one.take(attempt([1], [], 2)[0])
    one.waits(3)
    one.end(ending(2, 9))
    one.break_off(RequestFailed("late"))

    assert taken(one) == []
    assert one.ending is not None and one.ending.attempt == 1


def test_texts_are_merged_for_a_slow_reader() -> None:
    one = opened()
    tokens = [1, 2, 3, 5, 6, 7]
    for delta in attempt(tokens, [1, 2, 3, 4, 5]):
        one.take(delta)
    one.end(ending(1, 6))

    events = taken(one)

    assert events == [Running(), Text(text_of(tokens), 6), Ended(ending(1, 6))]


def test_a_reader_waits_for_what_comes() -> None:
    one = opened()
    assert one.next(0.01) is None

    later = threading.Timer(0.02, one.waits, (3,))
    later.start()
    assert one.next(PATIENCE_S) == Waiting(3)
    later.join()


def test_a_place_is_told_when_it_changes() -> None:
    one = opened()
    for place in (3, 3, 2, 2, 2, 1):
        one.waits(place)

    assert taken(one) == [Waiting(3), Waiting(2), Waiting(1)]


# --- against the queue


class Away(TimedStore):
    """A store that can be taken away."""

    away = False

    def run(self, call: Call[Any]) -> Any:
        self._reach()
        return super().run(call)

    def run_all(self, calls: Sequence[Call[Any]]) -> list[Any]:
        self._reach()
        return super().run_all(calls)

    def _reach(self) -> None:
        if self.away:
            raise RedisConnectionError("away")


class Gateway:
    """A subscriber under test, and a worker's hand in its queue. Nothing listens unless a test pumps."""

    def __init__(self, store: TimedStore, url: str, name: str = "g") -> None:
        self.store = Away(store.client, store.time)
        self.subscriber = Subscriber(self.store, url, [MODEL, "other"], name)
        self.queue = Queue(MODEL)

    def open(self, asked: Request) -> Stream:
        stream = self.subscriber.open(asked)
        self.store.run(self.queue.enqueue(generation(asked)))
        stream.accepted = True
        return stream

    def claim(self, nonce: str = "n", worker: str = "w") -> Claim:
        [claim] = self.store.run(self.queue.claim(worker, 1, lease_ms=LEASE_MS, nonce=nonce)).claims
        return claim

    def alive(self, worker: str = "w") -> None:
        self.store.run(self.queue.beat(worker, [], lease_ms=LEASE_MS))

    def lose(self, worker: str = "w") -> None:
        """Its host saw it die."""
        assert self.store.run(self.queue.tick(worker)).buried

    def finish(self, claim: Claim, output: int, outcome: Outcome = Outcome.COMPLETED, worker: str = "w") -> None:
        usage = Usage(input_tokens=2, output_tokens=output)
        assert self.store.run(self.queue.finish(worker, claim, outcome, usage))

    def receive(self, *deltas: Delta) -> None:
        self.subscriber.receive(encode(Frame(worker="w", deltas=deltas)))

    def log(self, *deltas: Delta, worker: str = "w") -> bytes:
        """What a worker does before it publishes."""
        return self.store.run(log_step(MODEL, worker, [encode(Frame(worker=worker, deltas=deltas))]))

    def deliver(self, claim: Claim, *deltas: Delta, worker: str = "w") -> None:
        """A worker's step: marked, logged, and received here."""
        assert self.store.run(self.queue.deliver(worker, [claim])) == [True]
        self.log(*deltas, worker=worker)
        self.receive(*deltas)

    def save(self, *deltas: Delta) -> None:
        self.store.run_all([call for delta in deltas for call in save(MODEL, delta)])

    def output(self, name: str = "r") -> Output:
        return output_of(self.store.run(saved(MODEL, name)), name)

    def fill(self) -> None:
        """The filler's tries, without its pauses."""
        for _ in range(1 + len(FILL_PAUSES_S)):
            self.subscriber.filler.fill()
            for gap in self.subscriber.filler.gaps.values():
                gap.due_s = 0.0

    def state(self, name: str = "r") -> str:
        return self.store.run(self.queue.watch(self.subscriber.gateway, [name])).seen[0].state

    def outcome(self, name: str = "r") -> str:
        seen = self.store.run(self.queue.watch(self.subscriber.gateway, [name])).seen[0]
        return seen.ending.outcome if seen.ending else seen.state

    def forget(self) -> None:
        """The store loses everything."""
        for key in self.store.client.scan_iter("f1:*"):
            self.store.client.delete(key)


@pytest.fixture
def gateway(store: TimedStore, valkey_url: str) -> Iterator[Gateway]:
    gateway = Gateway(store, valkey_url)
    yield gateway
    gateway.subscriber.stop()


@pytest.fixture
def other(store: TimedStore, valkey_url: str) -> Gateway:
    """Another gateway."""
    return Gateway(store, valkey_url, "h")


def test_a_lost_terminal_frame_is_found_by_watch(gateway: Gateway) -> None:
    stream = gateway.open(request())
    claim = gateway.claim()
    gateway.receive(*attempt([1, 2, 3], []))
    gateway.finish(claim, 3)

    gateway.subscriber.watch()

    last = taken(stream)[-1]
    assert isinstance(last, Ended) and last.ending.usage.output_tokens == 3


def test_an_ending_that_is_found_before_its_output_is_filled_from_what_was_saved_or_ends_with_an_error(
    gateway: Gateway,
) -> None:
    whole, lost = gateway.open(request("whole")), gateway.open(request("lost"))
    for name in ("whole", "lost"):
        gateway.finish(gateway.claim(name), 3)
    gateway.save(*attempt([1, 2, 3], [], name="whole"))

    with capture_logs() as said:
        gateway.subscriber.watch()
        assert taken(whole) == taken(lost) == []
        gateway.fill()

    assert [type(event) for event in taken(whole)] == [Running, Text, Ended]
    assert [type(event) for event in taken(lost)] == [Broken]
    assert [entry["event"] for entry in said] == ["stream_gap", "stream_gap", "stream_gap_stays"]


def test_a_request_that_waits_learns_its_place(gateway: Gateway) -> None:
    first, second = gateway.open(request("a")), gateway.open(request("b"))
    gateway.alive()
    gateway.subscriber.watch()
    assert (taken(first), taken(second)) == ([Waiting(1)], [Waiting(2)])

    gateway.claim()
    gateway.subscriber.watch()

    assert taken(first) == []
    [moved] = taken(second)
    assert isinstance(moved, Waiting) and moved.place == 1


def test_who_waits_learns_how_long_and_which_worker_it_waits_for(gateway: Gateway) -> None:
    stream = gateway.open(request())
    gateway.subscriber.watch()
    [asked] = taken(stream)
    assert asked == Waiting(1, Starting(state=WorkerState.LAUNCHING).left_ms, asked.worker)
    assert asked.worker is not None and asked.worker.state == WorkerState.LAUNCHING

    gateway.alive()
    gateway.subscriber.watch()
    assert taken(stream) == [Waiting(1)], "a worker is there, and how fast it will be nobody knows"

    gateway.subscriber.paces[MODEL] = Pace(starts=1.0, ms=2_000.0)
    stream.waits(1, gateway.subscriber.estimate_ms(MODEL, 1))
    assert taken(stream) == [Waiting(1, 2_000)]


def test_every_queue_is_watched_though_nothing_is_open(gateway: Gateway) -> None:
    """The watch is the gateway's lease."""
    gateway.subscriber.watch()

    for model in (MODEL, "other"):
        assert gateway.store.client.zscore(f"f1:{{{model}}}:gateways", "g") is not None
        assert gateway.subscriber.watched[model].waiting == 0


def test_a_dead_workers_late_deltas_are_dropped_from_the_takeover_on(gateway: Gateway, valkey: redis.Redis) -> None:
    """It was only stopped: it goes on sending, something else than the worker that has its request now."""
    stream = gateway.open(request(temperature=1.0))
    first = attempt([1, 2, 3, 9], [2, 3])
    gateway.deliver(gateway.claim(), first[0])
    listening = valkey.pubsub(ignore_subscribe_messages=True)
    listening.subscribe(gateway_channel(MODEL, "g"))
    listening.get_message(timeout=PATIENCE_S)

    gateway.lose()
    again = gateway.claim("again", "v")
    message = listening.get_message(timeout=PATIENCE_S)
    gateway.receive(first[1])  # in the socket before the takeover: logged, and so known to who takes over
    gateway.subscriber.receive(message["data"])
    gateway.receive(first[2])
    gateway.deliver(again, *attempt([1, 2, 3, 5, 6], [4], 2, 0, 3), worker="v")
    gateway.finish(again, 5, worker="v")
    gateway.subscriber.watch()
    listening.close()

    assert decode(message["data"]).takeovers == (Takeover("r", 2),)
    assert text(events := taken(stream)) == text_of([1, 2, 3, 5, 6])
    assert isinstance(events[-1], Ended)


def test_a_gap_before_the_cut_is_filled_before_the_next_worker_is_heard(gateway: Gateway) -> None:
    """The dead worker had logged more than arrived, saved a part of it, and the next one saved where it goes on."""
    stream = gateway.open(request(temperature=1.0))
    first = attempt([1, 2, 3, 5], [1, 2, 3])
    gateway.deliver(gateway.claim(), first[0])
    gateway.log(*first[1:])
    gateway.save(*first[:2])
    gateway.lose()
    again = gateway.claim("again", "v")
    second = attempt([1, 2, 3, 5, 6, 7], [5], 2, 0, 4)
    gateway.save(Delta("r", 2, 2, (3, 5), text_of([3, 5]), len(text_of([1, 2]))))
    with capture_logs():
        gateway.deliver(again, *second, worker="v")
    assert len(gateway.output().tokens) == 4
    filled = metrics.stream_filled._value.get()

    gateway.fill()
    gateway.finish(again, 6, worker="v")
    gateway.subscriber.watch()

    assert metrics.stream_filled._value.get() == filled + 1
    assert text(events := taken(stream)) == text_of([1, 2, 3, 5, 6, 7])
    assert isinstance(events[-1], Ended)


def test_streams_that_miss_something_of_one_worker_share_one_reading_of_its_log(gateway: Gateway) -> None:
    names = [f"r{n}" for n in range(5)]
    streams = [gateway.open(request(name)) for name in names]
    for name in names:
        gateway.claim(name)
    deltas = [attempt([1, 2, 3], [1, 2], name=name) for name in names]
    for step in range(3):
        gateway.log(*(each[step] for each in deltas))
    with capture_logs():
        gateway.receive(*(each[2] for each in deltas))

    before = reads(gateway, "xrange")
    gateway.fill()

    assert reads(gateway, "xrange") - before == 1
    assert [text(taken(stream)) for stream in streams] == [text_of([1, 2, 3])] * 5


def reads(gateway: Gateway, name: str) -> int:
    return int(gateway.store.client.info("commandstats").get(f"cmdstat_{name}", {}).get("calls", 0))


def test_what_is_cut_from_a_log_while_a_gap_is_filled_has_been_saved(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker saves and cuts its log between the two readings."""
    stream = gateway.open(request())
    claim = gateway.claim()
    deltas = attempt([1, 2, 3], [1, 2])
    for delta in deltas:
        entry = gateway.log(delta)
    read = gateway.store.run_all

    def interrupted(calls: Any) -> Any:
        replies = []
        for call in calls:
            replies += read([call])
            if call.script is not None:
                continue
            read(
                [*save(MODEL, deltas[0]), *save(MODEL, deltas[1]), *save(MODEL, deltas[2]), *cut_log(MODEL, "w", entry)]
            )
        return replies

    with capture_logs():
        gateway.receive(deltas[2])
    monkeypatch.setattr(gateway.store, "run_all", interrupted)
    gateway.subscriber.filler.fill()

    assert text(taken(stream)) == text_of([1, 2, 3]), "at the first try"
    gateway.finish(claim, 3)


def test_a_gap_that_is_found_while_the_store_is_away_waits_for_it(gateway: Gateway) -> None:
    stream = gateway.open(request())
    gateway.claim()
    deltas = attempt([1, 2, 3], [1, 2])
    gateway.log(*deltas)
    gateway.store.away = True
    with capture_logs():
        gateway.receive(deltas[2])
        for _ in range(9):
            gateway.fill()
    assert not stream.over and stream.text == ""

    gateway.store.away = False
    gateway.fill()

    assert text(taken(stream)) == text_of([1, 2, 3])


# --- streams that move


def test_a_stream_is_attached_to_from_another_gateway_and_goes_on_there_without_a_gap_or_a_repeat(
    gateway: Gateway, other: Gateway
) -> None:
    stream = gateway.open(request(temperature=1.0))
    claim = gateway.claim()
    deltas = attempt([1, 2, 3, 5, 6, 7], [1, 2, 3, 4, 5])
    gateway.deliver(claim, *deltas[:2])
    gateway.save(*deltas[:1])

    there = other.subscriber.attach(request(gateway="h"))
    assert there is not None
    gateway.log(deltas[2])  # its worker has not heard of it: this goes to the old gateway
    gateway.receive(deltas[2])
    gateway.log(deltas[3])
    other.receive(deltas[3])  # before the other has read anything
    other.fill()
    gateway.log(deltas[4])  # and this is lost on its way
    gateway.log(deltas[5])
    with capture_logs():
        other.receive(deltas[5])
        other.fill()
    gateway.subscriber.watch()
    gateway.subscriber.close(stream)
    claims = gateway.store.run(gateway.queue.beat("w", [], lease_ms=LEASE_MS)).claims
    gateway.finish(claim, 6)
    other.subscriber.watch()

    assert text(events := taken(there)) == text_of([1, 2, 3, 5, 6, 7])
    assert isinstance(events[-1], Ended)
    here = taken(stream)
    assert isinstance(here[-1], Broken) and here[-1].error.error_code == "stream_moved"
    assert claims == {"r": Claim(id="r", attempt=1, gateway="h")}, "who leaves a stream that has moved cancels nothing"


def test_a_stream_is_attached_to_anew_at_its_own_gateway(gateway: Gateway) -> None:
    stream = gateway.open(request())
    claim = gateway.claim()
    deltas = attempt([1, 2, 3], [1])
    gateway.deliver(claim, deltas[0])

    again = gateway.subscriber.attach(request())
    assert again is not None
    gateway.deliver(claim, deltas[1])
    gateway.fill()
    gateway.subscriber.close(stream)
    gateway.finish(claim, 3)
    gateway.subscriber.watch()

    assert text(events := taken(again)) == text_of([1, 2, 3])
    assert isinstance(events[-1], Ended)
    assert isinstance(taken(stream)[-1], Broken) and stream.moved


@pytest.mark.parametrize("outcome", [Outcome.COMPLETED, Outcome.CANCELLED])
def test_an_ended_request_is_shown_again_with_its_output_and_its_ending(
    gateway: Gateway, other: Gateway, outcome: Outcome
) -> None:
    gateway.open(request())
    claim = gateway.claim()
    gateway.save(*attempt([1, 2, 3], [2]))
    gateway.finish(claim, 3, outcome)

    there = other.subscriber.attach(request(gateway="h"))
    assert there is not None
    other.fill()

    assert text(events := taken(there)) == text_of([1, 2, 3])
    assert isinstance(events[-1], Ended) and events[-1].ending.outcome == outcome


def test_a_waiting_request_is_attached_to_and_learns_its_place(gateway: Gateway, other: Gateway) -> None:
    gateway.open(request())

    there = other.subscriber.attach(request(gateway="h"))
    assert there is not None
    other.fill()
    claim = other.claim()
    other.deliver(claim, *attempt([1, 2], []))
    other.finish(claim, 2)
    other.subscriber.watch()

    assert [type(event) for event in taken(there)] == [Waiting, Running, Text, Ended]


def test_a_stream_attached_to_between_two_workers_waits_for_what_the_next_one_goes_on_with(
    gateway: Gateway, other: Gateway
) -> None:
    """The dead one may yet save something: only where the next begins is certain."""
    gateway.open(request(temperature=1.0))
    gateway.deliver(gateway.claim(), *attempt([1, 2], [1]))
    gateway.lose()
    again = gateway.claim("again", "v")

    there = other.subscriber.attach(request(gateway="h"))
    assert there is not None
    gateway.log(Delta("r", 1, 2, (9,), "zzz", len(text_of([1, 2]))))
    other.fill()
    assert taken(there) == []
    gateway.save(Delta("r", 2, 0, (1, 2), text_of([1, 2])))
    with capture_logs():
        other.deliver(again, *attempt([1, 2, 3], [], 2, 0, 2), worker="v")
        other.fill()
    other.finish(again, 3, worker="v")
    other.subscriber.watch()

    assert text(events := taken(there)) == text_of([1, 2, 3])
    assert isinstance(events[-1], Ended)


def test_a_stream_of_another_key_is_unknown_here_and_elsewhere(gateway: Gateway, other: Gateway) -> None:
    stream = gateway.open(request())
    claim = gateway.claim()

    for one in (gateway, other):
        assert one.subscriber.attach(request(key="thief")) is None
        assert one.subscriber.attach(request("never")) is None
    gateway.deliver(claim, *attempt([1], []))

    assert not stream.moved and text(taken(stream)) == text_of([1])
    assert list(gateway.subscriber.streams) == ["r"] and other.subscriber.streams == {}


def test_an_attach_while_the_store_is_away_changes_nothing(gateway: Gateway) -> None:
    stream = gateway.open(request())
    gateway.store.away = True

    with pytest.raises(RedisConnectionError):
        gateway.subscriber.attach(request())

    assert gateway.subscriber.streams == {"r": stream} and not stream.moved


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["in order", "the other way round"])
def test_attaches_that_overlap_and_fail_leave_the_stream_with_its_reader(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, order: tuple[int, int]
) -> None:
    """A client that comes back again and again while the store is away."""
    stream = gateway.open(request())
    claim = gateway.claim()
    asked: list[threading.Event] = []

    def away(call: Call[Any]) -> Any:
        asked.append(fails := threading.Event())
        assert fails.wait(PATIENCE_S)
        raise RedisConnectionError("away")

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr(gateway.store, "run", away)
        attaches = []
        for n in range(2):
            attaches.append(pool.submit(gateway.subscriber.attach, request()))
            until(lambda before=n: len(asked) > before)
        for n in order:
            asked[n].set()
            assert isinstance(attaches[n].exception(PATIENCE_S), RedisConnectionError)
    gateway.deliver(claim, *attempt([1], []))

    assert gateway.subscriber.streams == {"r": stream} and text(taken(stream)) == text_of([1])


def test_a_client_that_comes_back_at_the_last_moment_is_not_cancelled(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.subscriber.close(gateway.open(request(linger_ms=10_000)))
    run = gateway.store.run

    def late(call: Call[Any]) -> Any:
        """The time of the stream runs out while the store is asked."""
        monkeypatch.setattr(gateway.store, "run", run)
        gateway.subscriber.end_lingerers(time.monotonic() + 0.5)
        return run(call)

    now_s = time.monotonic() + 9.9
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(gateway.store, "run", late)

    assert gateway.subscriber.attach(request()) is not None
    assert gateway.state() == "waiting"


def test_an_attached_request_that_the_store_forgot_ends_with_an_error(gateway: Gateway, other: Gateway) -> None:
    """Its prompt is not here. It does not linger either: there is nothing to come back to."""
    gateway.open(request())
    there = other.subscriber.attach(request(gateway="h", linger_ms=10_000))
    assert there is not None
    gateway.forget()

    with capture_logs():
        other.subscriber.watch()
    other.subscriber.close(there)

    assert isinstance(taken(there)[-1], Broken) and other.subscriber.streams == {}


def test_those_who_look_at_once_share_one_reading_of_the_log(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a gateway has died, all its clients come at once, and a log is that of a whole batch."""
    names = [f"r{n}" for n in range(6)]
    for name in names:
        gateway.open(request(name))
        claim = gateway.claim(name)
        gateway.store.run(gateway.queue.deliver("w", [claim]))
        gateway.log(*attempt([1, 2], [], name=name))
    filler, begun, goes_on = gateway.subscriber.filler, threading.Event(), threading.Event()
    found = filler.found

    def slow(model: str, ids: Sequence[str]) -> Iterator[Output]:
        begun.set()
        assert goes_on.wait(PATIENCE_S)
        return found(model, ids)

    monkeypatch.setattr(filler, "found", slow)
    before = reads(gateway, "xrange")
    with ThreadPoolExecutor(6) as pool:
        looks = [pool.submit(filler.read, MODEL, names[0])]
        assert begun.wait(PATIENCE_S)
        looks += [pool.submit(filler.read, MODEL, name) for name in names[1:]]
        until(lambda: [len(reading.ids) for reading in filler._readings.values()] == [5])
        goes_on.set()
        outputs = [look.result(PATIENCE_S) for look in looks]

    assert [(output.request_id, output.text) for output in outputs] == [(name, text_of([1, 2])) for name in names]
    assert reads(gateway, "xrange") - before == 2


def test_who_looks_again_and_again_has_to_wait_for_the_streams(gateway: Gateway) -> None:
    gateway.open(request())
    began_s = time.monotonic()

    for _ in range(4):
        gateway.subscriber.filler.read(MODEL, "r")

    assert time.monotonic() - began_s >= 3 * REST_S


def test_a_reading_that_fails_fails_for_all_and_the_next_one_does_not(gateway: Gateway) -> None:
    gateway.open(request())
    gateway.store.away = True
    with pytest.raises(RedisConnectionError):
        gateway.subscriber.filler.read(MODEL, "r")
    gateway.store.away = False

    assert gateway.subscriber.filler.read(MODEL, "r").text == ""


# --- readers that leave


def test_a_stream_whose_reader_left_goes_on_for_it_to_come_back(gateway: Gateway) -> None:
    stream = gateway.open(request(linger_ms=10_000))
    claim = gateway.claim()
    deltas = attempt([1, 2, 3], [1, 2])
    gateway.deliver(claim, deltas[0])

    for _ in range(2):  # the watch over its client sees it, and then the response closes
        stream.break_off(RequestFailed("gone"))
        gateway.subscriber.close(stream)
    gateway.deliver(claim, deltas[1])
    assert gateway.state() == "running" and list(stream.tokens) == [1, 2]
    assert isinstance(taken(stream)[-1], Broken)
    gateway.subscriber.end_lingerers(time.monotonic() + 9)
    again = gateway.subscriber.attach(request())
    assert again is not None
    gateway.fill()
    gateway.subscriber.end_lingerers(time.monotonic() + 11)
    gateway.deliver(claim, deltas[2])

    assert gateway.state() == "running"
    assert text(taken(again)) == text_of([1, 2, 3])


def test_a_stream_that_nobody_comes_back_to_is_cancelled(gateway: Gateway) -> None:
    stream = gateway.open(request(linger_ms=10_000))

    gateway.subscriber.close(stream)
    gateway.subscriber.end_lingerers(time.monotonic() + 9)
    assert gateway.state() == "waiting"
    gateway.subscriber.end_lingerers(time.monotonic() + 11)

    assert gateway.outcome() == "cancelled" and gateway.subscriber.streams == {}


def test_a_lingering_stream_that_moved_or_ended_is_let_go_of(gateway: Gateway, other: Gateway) -> None:
    moved, ended = gateway.open(request("moved", linger_ms=10_000)), gateway.open(request("ended", linger_ms=10_000))
    claims = [gateway.claim(name) for name in ("moved", "ended")]
    for stream in (moved, ended):
        gateway.subscriber.close(stream)
    gateway.finish(claims[1], 0)
    assert other.subscriber.attach(request("moved", gateway="h")) is not None

    gateway.subscriber.watch()
    gateway.subscriber.end_lingerers(time.monotonic())

    assert gateway.subscriber.streams == {} and other.state("moved") == "running"


def test_a_stream_without_a_reader_keeps_no_events(gateway: Gateway) -> None:
    """But the one that tells a reader to go which has not gone yet."""
    stalled, slow = gateway.open(request("a", linger_ms=10_000)), gateway.open(request("b", linger_ms=10_000))
    for stream in (stalled, slow):
        claim = gateway.claim(stream.request.id)
        gateway.deliver(claim, *attempt([1, 2, 3], [1, 2], name=stream.request.id))
    slow.break_off(RequestFailed("gone"))

    gateway.subscriber.close(stalled)
    gateway.subscriber.close(slow)

    assert stalled._events.qsize() <= 1
    assert [type(event) for event in taken(slow)] == [Broken]


def test_a_gap_of_a_stream_without_a_reader_is_filled_too(gateway: Gateway) -> None:
    stream = gateway.open(request(linger_ms=10_000))
    claim = gateway.claim()
    deltas = attempt([1, 2, 3], [1, 2])
    gateway.log(*deltas)
    with capture_logs():
        gateway.receive(deltas[1])
    stream.break_off(RequestFailed("gone"))
    gateway.subscriber.filler.fill()
    gateway.subscriber.close(stream)
    gateway.receive(deltas[2])
    gateway.fill()
    gateway.finish(claim, 3)
    gateway.subscriber.watch()

    assert stream.ended and stream.text == text_of([1, 2, 3])


def test_beyond_a_bound_the_oldest_lingering_stream_is_cancelled(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("web.subscriber.LINGERING_MAX", 2)
    for name in ("a", "b", "c"):
        gateway.subscriber.close(gateway.open(request(name, linger_ms=10_000)))

    assert [gateway.outcome(name) for name in ("a", "b", "c")] == ["cancelled", "waiting", "waiting"]


def test_nobodys_lingering_streams_are_cancelled_for_those_of_another_organisation(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("web.subscriber.LINGERING_MAX", 3)
    for name, org in (("a", "few"), ("b", "many"), ("c", "many"), ("d", "many"), ("e", "few")):
        gateway.subscriber.close(gateway.open(request(name, org=org, linger_ms=10_000)))

    assert [name for name in "abcde" if gateway.outcome(name) == "cancelled"] == ["b", "c"]


def test_a_request_the_store_forgot_is_put_back_and_resumes_where_it_was(gateway: Gateway) -> None:
    """Sampled: the next worker goes on from the tokens that this gateway has relayed."""
    stream = gateway.open(request(temperature=1.0))
    gateway.claim()
    gateway.receive(*attempt([1, 2, 3, 5], [2])[:1])
    gateway.forget()

    with capture_logs():
        gateway.subscriber.watch()
    gateway.receive(*attempt([1, 2, 9], [2])[1:])
    again = gateway.claim("again")
    relayed = gateway.output()
    gateway.receive(*attempt([1, 2, 3, 5], [3], again.attempt, 0, len(relayed.tokens)))
    gateway.finish(again, 4)
    gateway.subscriber.watch()

    assert (list(relayed.tokens), relayed.text) == ([1, 2], text_of([1, 2]))
    assert again.attempt > relayed.attempt > 1, "what the first still sends, or saves, is fenced"
    assert text(events := taken(stream)) == text_of([1, 2, 3, 5])
    assert isinstance(events[-1], Ended)


def test_what_is_put_back_says_what_its_characters_are(gateway: Gateway) -> None:
    """The next worker's reader holds its own against it."""
    stream = gateway.open(request(temperature=1.0))
    gateway.claim()
    gateway.receive(
        Delta("r", 1, 0, (1, 2), "hm", 0, "reasoning"),
        Delta("r", 1, 2, (3,), "f", 2, "call:0"),
        Delta("r", 1, 3, (), "{", 3, "arguments:0"),
        Delta("r", 1, 3, (4,), "}", 4, "arguments:0"),
    )
    gateway.forget()
    with capture_logs():
        gateway.subscriber.watch()

    kept = gateway.output()
    assert [(run.kind, run.text) for run in kept.runs] == [("reasoning", "hm"), ("call:0", "f"), ("arguments:0", "{}")]
    assert kept.runs == stream.runs and list(kept.tokens) == [1, 2, 3, 4]


def spoken() -> list[Delta]:
    """A thought, an answer and a stop string, with tokens that have no character where one gives way to the next."""
    said = [("reasoning", "hm"), ("reasoning", ""), ("text", "Hel"), ("text", ""), ("text", "lo"), ("text", "")]
    said += [("stop", "END"), ("stop", "")]
    texts = [text for _, text in said]
    return [
        Delta("r", 1, n, (n,), text, sum(map(len, texts[:n])), kind, logprobs=(Logprob(f"t{n}", -1.0),))
        for n, (kind, text) in enumerate(said)
    ]


def test_a_token_without_a_character_is_told_with_the_run_that_it_ended() -> None:
    """In events as in the whole answer, or the two would not say the same of a token."""
    stream = opened()
    for delta in spoken():
        stream.take(delta)
    stream.end(ending(1, len(spoken())))

    told = [Run(event.kind, event.text, event.logprobs) for event in taken(stream) if isinstance(event, Text)]

    assert joined(told) == stream.runs == output_of(spoken()).runs
    assert [[one.token for one in run.logprobs] for run in stream.runs] == [["t0", "t1"], ["t2", "t3", "t4", "t5"],
                                                                           ["t6", "t7"]]  # fmt: skip


def test_what_is_put_back_says_of_each_token_what_it_said() -> None:
    """Whoever reads it from the store shows an answer's log probabilities, and not those of a thought."""
    stream = opened()
    for delta in spoken():
        stream.take(delta)

    output = output_of(stream.delivered())

    assert output.runs == stream.runs and output.tokens == stream.tokens


def test_vectors_are_all_there_before_their_request_ends() -> None:
    """They have no tokens that could be counted, and a publish may be lost."""
    asked = msgspec.structs.replace(request(stream=False), task="embed", more_prompts=([3], [4]))
    deltas = [
        Delta("r", 1, 0, (), text, 4 * at, f"{k}/embedding")
        for at, (k, text) in enumerate([(1, "AAAA"), (0, "BBBB"), (2, "CCCC")])
    ]
    one = opened(asked)
    one.take(deltas[0])
    with capture_logs():
        one.end(ending(1, 0))
    assert one.ending is None

    assert one.fill(output_of(deltas))
    assert isinstance(taken(one)[-1], Ended) and [run.text for run in one.runs] == ["AAAA", "BBBB", "CCCC"]


def test_a_forgotten_request_that_finds_the_queue_full_is_put_back_once(gateway: Gateway) -> None:
    gateway.open(request())
    gateway.receive(*attempt([1, 2], []))
    gateway.forget()
    gateway.subscriber.queues = {MODEL: Queue(MODEL, Bounds(waiting=0)), "other": Queue("other")}

    with capture_logs():
        gateway.subscriber.watch()
        gateway.subscriber.watch()

    assert gateway.store.client.llen("f1:{m}:output:r") == 1


def test_a_stream_that_is_closed_while_the_queue_is_asked_is_not_enqueued_again(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = gateway.open(request())
    gateway.forget()
    run = gateway.store.run

    def closing(call: Any) -> Any:
        reply = run(call)
        if call.script is not None and call.script.name == "watch":
            gateway.subscriber.close(stream)
        return reply

    monkeypatch.setattr(gateway.store, "run", closing)
    gateway.subscriber.watch()

    assert gateway.state() == "unknown"


def test_an_answer_that_cannot_be_gone_on_with_ends_as_lost_when_the_store_forgot_it(gateway: Gateway) -> None:
    stream = gateway.open(request(temperature=1.0, repetition_penalty=1.1))
    gateway.claim()
    gateway.receive(*attempt([1, 2, 3], [2])[:1])
    gateway.forget()

    with capture_logs():
        gateway.subscriber.watch()
    gateway.subscriber.watch()

    last = taken(stream)[-1]
    assert isinstance(last, Ended) and last.ending.outcome == "worker_lost"


def test_a_queue_that_is_away_keeps_no_other_from_being_watched(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cluster each model lies on a node of its own. Unwatched, what is open there would end as lost."""
    run = gateway.store.run

    def partly(call: Call[Any]) -> Any:
        if any("{m}" in str(word) for word in (*call.keys, *call.args)):
            raise RedisConnectionError("its node is away")
        return run(call)

    monkeypatch.setattr(gateway.store, "run", partly)
    with capture_logs():
        gateway.subscriber.watch()

    assert gateway.store.client.zscore(Queue("other").prefix + "gateways", "g") is not None


def test_a_request_not_yet_accepted_is_not_asked_after(gateway: Gateway) -> None:
    """Else a watch between `open` and the enqueue would enqueue it itself, over the queue's refusal."""
    stream = gateway.subscriber.open(request())

    gateway.subscriber.watch()

    assert (gateway.state(), taken(stream)) == ("unknown", [])


def test_every_open_request_is_asked_after_however_many_there_are(gateway: Gateway) -> None:
    asked = [request(f"r{n}") for n in range(WATCH_MAX + 1)]
    streams = [gateway.subscriber.open(one) for one in asked]
    gateway.store.run_all([gateway.queue.enqueue(generation(one)) for one in asked])
    for stream in streams:
        stream.accepted = True
    gateway.alive()

    gateway.subscriber.watch()

    assert [taken(stream) for stream in streams] == [[Waiting(n + 1)] for n in range(WATCH_MAX + 1)]


def test_closing_a_stream_cancels_what_has_not_ended(gateway: Gateway) -> None:
    open_, ended = gateway.open(request("open")), gateway.open(request("ended"))
    claims = [gateway.claim(name) for name in ("open", "ended")]
    gateway.finish(claims[1], 0)
    gateway.subscriber.watch()

    for stream in (open_, ended, open_):
        gateway.subscriber.close(stream)

    differ = gateway.store.run(gateway.queue.beat("w", [], lease_ms=LEASE_MS)).claims
    assert differ is not None and [(claim.id, claim.cancelled) for claim in differ.values()] == [("open", True)]
    assert gateway.outcome("ended") == "completed"
    assert gateway.subscriber.streams == {}


def test_a_cancel_while_the_store_is_away_is_made_when_it_is_back(gateway: Gateway) -> None:
    stream = gateway.open(request())
    gateway.store.away = True
    gateway.subscriber.close(stream)
    with capture_logs():
        gateway.subscriber.watch()
    gateway.store.away = False
    assert gateway.state() == "waiting"

    gateway.subscriber.watch()
    gateway.subscriber.watch()

    assert gateway.outcome() == "cancelled"
    assert gateway.subscriber._abandoned == {}


def test_a_cancel_of_what_is_open_elsewhere_is_made_too_when_the_store_is_back(
    gateway: Gateway, other: Gateway
) -> None:
    """The last of its readers was here, and read it from what is saved."""
    other.open(request(gateway="h"))
    gateway.store.away = True
    gateway.subscriber.cancel("r", MODEL, anywhere=True)
    gateway.store.away = False

    gateway.subscriber.watch()

    assert gateway.outcome() == "cancelled"


def test_what_is_nobodys_here_or_cannot_be_read_is_passed_over(gateway: Gateway) -> None:
    stream = gateway.open(request())

    with capture_logs() as said:
        gateway.subscriber.receive(b"\xc1 no frame")
        gateway.subscriber.receive(encode(Frame(endings=(ending(name="stranger"),))))
        gateway.receive(Delta("stranger", 1, 0, (1,), "b"), *attempt([1], []))

    assert text(taken(stream)) == text_of([1])
    assert [one["event"] for one in said] == ["frame_unreadable"]


# --- the pump


@contextmanager
def pumping(subscriber: Subscriber) -> Iterator[None]:
    thread = threading.Thread(target=subscriber.pump)
    thread.start()
    try:
        assert subscriber.listening.wait(PATIENCE_S)
        yield
    finally:
        subscriber.stop()
        thread.join()


def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def listeners(valkey: redis.Redis) -> set[str]:
    """Connections that listen to both models."""
    return {client["id"] for client in valkey.client_list(_type="pubsub") if client["sub"] == "2"}


def test_the_pump_hands_on_frames_and_endings_and_comes_back_after_a_lost_connection(
    gateway: Gateway, valkey: redis.Redis
) -> None:
    stream = gateway.open(request())
    claim = gateway.claim()
    deltas = attempt([1, 2, 3], [2])
    channel = gateway_channel(MODEL, "g")

    with pumping(gateway.subscriber):
        valkey.publish(channel, encode(Frame(deltas=(deltas[0],))))
        assert [stream.next(PATIENCE_S), stream.next(PATIENCE_S)] == [Running(), Text(text_of([1, 2]), 2)]

        with capture_logs():
            [before] = listeners(valkey)
            valkey.client_kill_filter(_id=before)
            until(lambda: listeners(valkey) - {before})
        valkey.publish(channel, encode(Frame(deltas=(deltas[1],))))
        gateway.finish(claim, 3)

        assert stream.next(PATIENCE_S) == Text(text_of([3]), 3)
        assert isinstance(stream.next(PATIENCE_S), Ended)


def test_what_a_cut_subscription_missed_is_filled_in_while_tokens_go_on(gateway: Gateway, valkey: redis.Redis) -> None:
    gateway.subscriber.start()
    until(gateway.subscriber.listening.is_set)
    stream = gateway.open(request(temperature=1.0))
    claim = gateway.claim()
    channel = gateway_channel(MODEL, "g")
    tokens = [1 + n % 9 for n in range(60)]

    with capture_logs():
        for n, delta in enumerate(attempt(tokens, list(range(60)))):
            if n in (20, 40):
                [before] = listeners(valkey)
                valkey.client_kill_filter(_id=before)
            gateway.log(delta)
            valkey.publish(channel, encode(Frame(deltas=(delta,))))
            if n in (30, 50):
                until(lambda: listeners(valkey))
        until(gateway.subscriber.listening.is_set)
        gateway.save(*attempt(tokens, []))
        gateway.finish(claim, 60)
        events = [stream.next(PATIENCE_S)]
        while not isinstance(events[-1], Ended | Broken):
            events.append(stream.next(PATIENCE_S))
        gateway.subscriber.stop()

    assert text([event for event in events if event is not None]) == text_of(tokens)
    assert isinstance(events[-1], Ended)
    until(lambda: not listeners(valkey))


class Muffled:
    """A TCP door to a Unix socket that stops passing on what comes back, and closes nothing."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.mute = threading.Event()
        self.door = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self.door.getsockname()[1]}/0"
        self.open: list[socket.socket] = [self.door]

    def __enter__(self) -> Muffled:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for sock in self.open:
            sock.close()

    def _serve(self) -> None:
        try:
            while True:
                client, _ = self.door.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(self.path)
                self.open += [client, server]
                for source, sink, muffled in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._pass, args=(source, sink, muffled), daemon=True).start()
        except OSError:
            return

    def _pass(self, source: socket.socket, sink: socket.socket, muffled: bool) -> None:
        try:
            while data := source.recv(65536):
                if not (muffled and self.mute.is_set()):
                    sink.sendall(data)
        except OSError:
            return


def test_a_subscription_that_went_deaf_is_made_anew(
    gateway: Gateway, valkey: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network that swallows packets closes nothing: the gateway misses its own echo, and listens anew."""
    monkeypatch.setattr("web.subscriber.DEAF_S", 0.5)
    monkeypatch.setattr("web.subscriber.WATCH_S", 0.1)
    path = gateway.subscriber.redis_url.removeprefix("unix://").partition("?")[0]

    with Muffled(path) as proxy, capture_logs() as logs:
        gateway.subscriber.redis_url = proxy.url
        gateway.subscriber.start()
        until(lambda: gateway.subscriber.listening.is_set())
        proxy.mute.set()
        gateway.subscriber.redis_url = f"unix://{path}?db=0"
        [deaf] = listeners(valkey)
        until(lambda: listeners(valkey) - {deaf})
        gateway.subscriber.stop()

    until(lambda: not listeners(valkey))
    assert {entry["event"] for entry in logs} == {"subscription_lost"}


def test_the_pump_listens_to_every_model(gateway: Gateway, valkey: redis.Redis) -> None:
    with pumping(gateway.subscriber):
        channels = [gateway_channel(model, "g") for model in (MODEL, "other")]

        assert [count for _, count in valkey.pubsub_numsub(*channels)] == [1, 1]


def test_however_much_comes_at_once_everybody_else_has_a_turn(valkey_url: str) -> None:
    """128,000 deltas in one burst: without turns nothing else would run for a third of a second."""
    done = subprocess.run([sys.executable, "-m", "tests.web.crowded", valkey_url], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert float(done.stdout.splitlines()[-1]) < 100
