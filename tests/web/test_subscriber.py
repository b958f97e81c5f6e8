"""A gateway's open streams: whatever is lost, repeated or run again, a client gets its answer once, or an error."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import ConnectionError as RedisConnectionError
from structlog.testing import capture_logs

from core.errors import RequestFailed
from core.redis import Call, Store
from core.stream.frames import Delta, Frame, encode
from core.stream.log import gateway_channel
from core.values import Caller, Ending, Outcome, Request, Sampling, Usage
from tasks.queue import WATCH_MAX, Claim, Queue, generation
from web.subscriber import Again, Broken, Ended, Event, Running, Stream, Subscriber, Text, Waiting

MODEL = "m"
LEASE_MS = 60_000
PATIENCE_S = 10.0


def request(name: str = "r", *, stream: bool = True, temperature: float = 0.0) -> Request:
    return Request(
        id=name,
        model=MODEL,
        caller=Caller(org_id="o", project_id="p", key_id="k"),
        gateway="g",
        prompt_token_ids=[1, 2],
        sampling=Sampling(max_tokens=50, temperature=temperature),
        stream=stream,
    )


def piece(token: int) -> str:
    """A token's text: none, one or a few characters."""
    return chr(97 + token) * (token % 4)


def text_of(tokens: list[int]) -> str:
    return "".join(map(piece, tokens))


def attempt(tokens: list[int], cuts: list[int], number: int = 1, hold: int = 0) -> list[Delta]:
    """All deltas of one attempt. Engines keep `hold` characters back, since a stop string may have begun in them."""
    edges = sorted({cut for cut in cuts if 0 < cut < len(tokens)} | {0, len(tokens)})

    def said(edge: int) -> str:
        whole = text_of(tokens[:edge])
        return whole if edge == len(tokens) else whole[: max(0, len(whole) - hold)]

    return [
        Delta("r", number, a, tuple(tokens[a:b]), said(b).removeprefix(said(a)), len(said(a)))
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
    one = Stream(request(stream=stream))
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


@given(histories(lossy=True))
def test_a_lost_delta_ends_the_stream_with_an_error_or_does_not_matter(
    history: tuple[list[int], list[Delta], int],
) -> None:
    """What the client has is always a beginning of the answer; it is told that it ended well only if it has it all."""
    tokens, deltas, attempts = history
    one = Stream(request())

    with capture_logs():
        for delta in deltas:
            one.take(delta)
        one.end(ending(attempts, len(tokens)))
    events = taken(one)

    assert text_of(tokens).startswith(text(events))
    if isinstance(events[-1], Ended):
        assert text(events) == text_of(tokens)
    else:
        assert isinstance(events[-1], Broken) and isinstance(events[-1].error, RequestFailed)


@given(answers, cuts, cuts, st.data())
def test_a_second_attempt_that_differs_ends_as_an_error_never_a_splice(
    tokens: list[int], cuts_1: list[int], cuts_2: list[int], data: st.DataObject
) -> None:
    first = attempt(tokens, cuts_1)
    delivered = first[: data.draw(st.integers(1, len(first)))]
    at = data.draw(st.integers(0, sum(len(delta.tokens) for delta in delivered) - 1))
    other = [*tokens[:at], (tokens[at] + 1) % 10, *tokens[at + 1 :]]
    one = Stream(request())

    for delta in [*delivered, *attempt(other, cuts_2, 2)]:
        one.take(delta)
    one.end(ending(2, len(other)))
    events = taken(one)

    assert text(events) == "".join(delta.text for delta in delivered)
    assert isinstance(events[-1], Broken) and "another gave a different answer" in events[-1].error.message
    assert not one.ended, "so that closing it cancels what still runs"


def test_an_answer_that_is_not_streamed_starts_anew_with_each_attempt() -> None:
    """Nothing of it has reached the client, so a second sample may differ."""
    one = Stream(request(stream=False, temperature=1.0))

    for delta in [*attempt([1, 2, 3, 5], [2], 1)[:1], *attempt([7, 6, 5], [1], 2)]:
        one.take(delta)
    one.end(ending(2, 3))
    events = taken(one)

    assert [type(event) for event in events] == [Again, Running, Text, Again, Running, Text, Ended]
    assert text(events) == text_of([7, 6, 5])


def test_an_attempt_of_which_only_the_ending_came_is_not_told_with_an_older_ones_text() -> None:
    one = Stream(request(stream=False, temperature=1.0))
    for delta in attempt([1, 2, 3, 5], [], 1):
        one.take(delta)

    with capture_logs():
        one.end(ending(2, 3))

    assert isinstance(taken(one)[-1], Broken)


def test_an_older_attempts_delta_is_fenced_before_and_after_the_newer_ones_first() -> None:
    old, new = attempt([1, 2, 3], [1, 2], 1), attempt([1, 2, 3], [1, 2], 2)
    one = Stream(request())

    for delta in (old[0], new[0], old[1], old[2], new[1], new[2]):
        one.take(delta)
    one.end(ending(2, 3))

    assert text(taken(one)) == text_of([1, 2, 3])


def test_an_ending_that_is_no_answer_needs_no_more_tokens() -> None:
    """A cancelled or lost request counted more than was relayed: that is no gap."""
    for outcome in (Outcome.CANCELLED, Outcome.WORKER_LOST, Outcome.FAILED, Outcome.EXPIRED):
        one = Stream(request())
        one.take(attempt([1], [])[0])
        one.end(ending(1, 9, outcome))

        assert isinstance(taken(one)[-1], Ended)


def test_nothing_is_delivered_after_the_end() -> None:
    one = Stream(request())
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
    one = Stream(request())
    tokens = [1, 2, 3, 5, 6, 7]
    for delta in attempt(tokens, [1, 2, 3, 4, 5]):
        one.take(delta)
    one.end(ending(1, 6))

    events = taken(one)

    assert events == [Running(), Text(text_of(tokens), 6), Ended(ending(1, 6))]


def test_a_reader_waits_for_what_comes() -> None:
    one = Stream(request())
    assert one.next(0.01) is None

    later = threading.Timer(0.02, one.waits, (3,))
    later.start()
    assert one.next(PATIENCE_S) == Waiting(3)
    later.join()


def test_a_place_is_told_when_it_changes() -> None:
    one = Stream(request())
    for place in (3, 3, 2, 2, 2, 1):
        one.waits(place)

    assert taken(one) == [Waiting(3), Waiting(2), Waiting(1)]


# --- against the queue


class Away(Store):
    """A store that can be taken away."""

    away = False

    def run(self, call: Call[Any]) -> Any:
        if self.away:
            raise RedisConnectionError("away")
        return super().run(call)


class Gateway:
    """A subscriber under test, and a worker's hand in its queue. Nothing listens unless a test pumps."""

    def __init__(self, store: Store, url: str) -> None:
        self.store = Away(store.client, clock=store.loaded.clock)
        self.subscriber = Subscriber(self.store, url, [MODEL, "other"], "g")
        self.queue = Queue(MODEL)

    def open(self, asked: Request) -> Stream:
        stream = self.subscriber.open(asked)
        self.store.run(self.queue.enqueue(generation(asked)))
        stream.accepted = True
        return stream

    def claim(self, nonce: str = "n") -> Claim:
        [claim] = self.store.run(self.queue.claim("w", 1, lease_ms=LEASE_MS, nonce=nonce)).claims
        return claim

    def finish(self, claim: Claim, output: int, outcome: Outcome = Outcome.COMPLETED) -> None:
        usage = Usage(input_tokens=2, output_tokens=output)
        assert self.store.run(self.queue.finish("w", claim, outcome, usage))

    def receive(self, *deltas: Delta) -> None:
        self.subscriber.receive(encode(Frame(worker="w", deltas=deltas)))

    def state(self, name: str = "r") -> str:
        return self.store.run(self.queue.watch("side", [name], lease_ms=1000))[0].state

    def outcome(self, name: str = "r") -> str:
        seen = self.store.run(self.queue.watch("side", [name], lease_ms=1000))[0]
        return seen.ending.outcome if seen.ending else seen.state

    def forget(self) -> None:
        """The store loses everything."""
        for key in self.store.client.scan_iter("f1:*"):
            self.store.client.delete(key)


@pytest.fixture
def gateway(store: Store, valkey_url: str) -> Gateway:
    return Gateway(store, valkey_url)


def test_a_lost_terminal_frame_is_found_by_watch(gateway: Gateway) -> None:
    stream = gateway.open(request())
    claim = gateway.claim()
    gateway.receive(*attempt([1, 2, 3], []))
    gateway.finish(claim, 3)

    gateway.subscriber.watch()

    last = taken(stream)[-1]
    assert isinstance(last, Ended) and last.ending.usage.output_tokens == 3


def test_deltas_that_are_later_than_the_watch_are_waited_for_one_more_look(gateway: Gateway) -> None:
    """An ending is told by a script, the tokens came by pub/sub: they may still lie in this process's socket."""
    late, lost = gateway.open(request("r")), gateway.open(request("lost"))
    for name in ("r", "lost"):
        gateway.finish(gateway.claim(name), 3)

    gateway.subscriber.watch()
    assert taken(late) == taken(lost) == [Running()]
    gateway.receive(*attempt([1, 2, 3], []))
    with capture_logs():
        gateway.subscriber.watch()

    assert [type(event) for event in taken(late)] == [Text, Ended]
    assert [type(event) for event in taken(lost)] == [Broken]


def test_a_request_that_waits_learns_its_place(gateway: Gateway) -> None:
    first, second = gateway.open(request("a")), gateway.open(request("b"))
    gateway.subscriber.watch()
    assert (taken(first), taken(second)) == ([Waiting(1)], [Waiting(2)])

    gateway.claim()
    gateway.subscriber.watch()

    assert (taken(first), taken(second)) == ([], [Waiting(1)])


def test_a_request_the_store_forgot_is_enqueued_again_and_goes_on(gateway: Gateway) -> None:
    """Greedy: another run makes the same tokens, and the client sees no seam."""
    stream = gateway.open(request())
    gateway.claim()
    gateway.receive(*attempt([1, 2, 3, 5], [2])[:1])
    gateway.forget()

    with capture_logs():
        gateway.subscriber.watch()
    again = gateway.claim("again")
    gateway.receive(*attempt([1, 2, 3, 5], [1, 3], again.attempt))
    gateway.finish(again, 4)
    gateway.subscriber.watch()

    assert again.attempt == 2, "frames of the first are fenced"
    assert text(events := taken(stream)) == text_of([1, 2, 3, 5])
    assert isinstance(events[-1], Ended)


def test_a_sampled_answer_that_the_store_forgot_half_way_ends_as_lost(gateway: Gateway) -> None:
    stream = gateway.open(request(temperature=1.0))
    gateway.claim()
    gateway.receive(*attempt([1, 2, 3], [2])[:1])
    gateway.forget()

    with capture_logs():
        gateway.subscriber.watch()
    gateway.subscriber.watch()

    last = taken(stream)[-1]
    assert isinstance(last, Ended) and last.ending.outcome == "worker_lost"


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

    gateway.subscriber.watch()

    assert [taken(stream) for stream in streams] == [[Waiting(n + 1)] for n in range(WATCH_MAX + 1)]


def test_closing_a_stream_cancels_what_has_not_ended(gateway: Gateway) -> None:
    open_, ended = gateway.open(request("open")), gateway.open(request("ended"))
    claims = [gateway.claim(name) for name in ("open", "ended")]
    gateway.finish(claims[1], 0)
    gateway.subscriber.watch()

    for stream in (open_, ended, open_):
        gateway.subscriber.close(stream)

    differ = gateway.store.run(gateway.queue.beat("w", [], lease_ms=LEASE_MS))
    assert differ is not None and [(claim.id, claim.cancelled) for claim in differ.values()] == [("open", True)]
    assert gateway.outcome("ended") == "completed"
    assert gateway.subscriber.streams == {}


def test_a_cancel_while_the_store_is_away_is_made_when_it_is_back(gateway: Gateway) -> None:
    stream = gateway.open(request())
    gateway.store.away = True
    gateway.subscriber.close(stream)
    with pytest.raises(RedisConnectionError):
        gateway.subscriber.watch()
    gateway.store.away = False
    assert gateway.state() == "waiting"

    gateway.subscriber.watch()
    gateway.subscriber.watch()

    assert gateway.outcome() == "cancelled"
    assert gateway.subscriber._abandoned == {}


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
    assert [entry["event"] for entry in logs] == ["subscription_lost"]


def test_the_pump_listens_to_every_model(gateway: Gateway, valkey: redis.Redis) -> None:
    with pumping(gateway.subscriber):
        channels = [gateway_channel(model, "g") for model in (MODEL, "other")]

        assert [count for _, count in valkey.pubsub_numsub(*channels)] == [1, 1]
