"""Saved output and logs: whatever is read, in whatever state they were left, is a beginning of what was delivered."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from core.redis import Store
from core.stream.frames import Delta, Frame, Output, Takeover, cut_of, decode, encode
from core.stream.log import cut_log, log_step, logged, publish, save, saved
from core.values import Ending

ID = "a"


def delta(attempt: int, tokens: list[int], start: int, end: int, finish: str = "") -> Delta:
    """Tokens `start` to `end` of an attempt's; token n's text is one character."""
    piece = tokens[start:end]
    return Delta(ID, attempt, start, tuple(piece), "".join(map(chr, piece)), start, finish=finish)


def merged(*deltas: Delta) -> Output:
    output = Output(ID)
    output.add(deltas)
    return output


@dataclass
class History:
    """A request's way through several workers, as the store has it: each delivers, saves, repeats itself, and dies."""

    chance: random.Random
    outputs: list[list[int]] = field(default_factory=list)  #: of each attempt, the whole
    kept: list[Delta] = field(default_factory=list)
    logs: list[list[Delta]] = field(default_factory=list)
    late: list[Delta] = field(default_factory=list)  #: saves of attempts that are over

    def attempt(self) -> None:
        """It goes on from what it reads, logs and saves some more, and is gone."""
        number = len(self.outputs) + 1
        output = Output(ID)
        output.add(self.kept)
        known = len(output.tokens)
        if self.logs:
            output.add(self.logs[-1])
        cut = len(output.tokens)
        tokens = [*output.tokens, *(self.chance.randrange(97, 123) for _ in range(self.chance.randrange(12)))]
        self.outputs.append(tokens)
        if number > 1:
            self.kept.append(delta(number, tokens, known, cut))
        self._run(number, tokens, cut)

    def _run(self, number: int, tokens: list[int], cut: int) -> None:
        log: list[Delta] = []
        unsaved = at = cut
        while at < len(tokens):
            end = min(len(tokens), at + self.chance.randrange(1, 4))
            log.append(delta(number, tokens, at, end))
            at = end
            if self.chance.random() < 0.3:
                self._say(self.kept, delta(number, tokens, unsaved, at))
                if self.chance.random() < 0.7:  # else its reply was lost: it is saved again, and more with it
                    unsaved, log = at, log[-1:]
        if self.chance.random() < 0.3:
            self.late.append(delta(number, tokens, unsaved, len(tokens)))
        self.logs.append([one for one in log for _ in range(self.chance.choice((1, 1, 2)))])

    def _say(self, to: list[Delta], what: Delta) -> None:
        to += [what] * self.chance.choice((1, 1, 2))


@given(seed=st.integers(0, 10**6), attempts=st.integers(1, 5))
def test_what_is_read_after_any_history_is_what_the_last_attempt_delivered(seed: int, attempts: int) -> None:
    """Saves and log entries made twice, overlapping saves, cut logs, and late saves of attempts that were over."""
    history = History(random.Random(seed))
    for number in range(1, attempts + 1):
        history.attempt()
        if number > 1:
            history.kept += history.late
            history.late = []

    output = Output(ID)
    output.add(history.kept)
    saved_only = list(output.tokens)
    for log in history.logs:
        output.add(log)

    assert list(output.tokens) == history.outputs[-1]
    assert output.text == "".join(map(chr, output.tokens)) and output.chars == len(output.text)
    assert saved_only == history.outputs[-1][: len(saved_only)]
    assert [d.offset for d in output.deltas] == [
        sum(len(e.tokens) for e in output.deltas[:n]) for n in range(len(output.deltas))
    ]


@given(seed=st.integers(0, 10**6))
def test_adding_everything_again_changes_nothing(seed: int) -> None:
    history = History(random.Random(seed))
    history.attempt()
    history.attempt()
    everything = [*history.kept, *history.logs[-1]]
    output = merged(*everything)
    once = [*output.deltas]
    output.add(everything)

    assert output.deltas == once


def test_a_gap_is_not_bridged() -> None:
    tokens = list(b"abcdef")

    assert list(merged(delta(1, tokens, 0, 2), delta(1, tokens, 3, 6)).tokens) == tokens[:2]


def test_a_newer_attempt_cuts_back_within_a_delta() -> None:
    output = merged(delta(1, list(b"abcdef"), 0, 6, "stop"), delta(2, list(b"abcxyz"), 3, 5))

    assert (bytes([*output.tokens]), output.text, output.attempt, output.finish) == (b"abcxy", "abcxy", 2, "")


def test_a_rerun_from_the_start_replaces_all() -> None:
    output = merged(delta(1, list(b"abc"), 0, 3), delta(2, list(b"xyz"), 0, 0), delta(1, list(b"abcd"), 3, 4))

    assert (list(output.tokens), output.attempt, output.deltas) == ([], 2, [])


def test_text_that_comes_later_than_its_tokens_is_kept_in_place() -> None:
    output = merged(
        Delta(ID, 1, 0, (1, 2), "", 0),
        Delta(ID, 1, 2, (3,), "ab", 0),
        Delta(ID, 1, 0, (1, 2, 3, 4), "abc", 0),
        Delta(ID, 1, 4, (), "d", 3, finish="length"),
    )

    assert (list(output.tokens), output.text, output.finish) == ([1, 2, 3, 4], "abcd", "length")


def test_a_delta_of_the_release_before_is_read() -> None:
    """It knew no `finish`, and its reader skips ours."""
    frame = Frame(worker="w", deltas=(Delta(ID, 1, 0, (1,), "a"),))
    longer = encode(frame)

    assert decode(longer) == frame
    assert decode(b"\x82\xa1v\x01\xa6deltas\x91\x96\xa1a\x01\x00\x91\x01\xa1a\x00").deltas == frame.deltas


def test_what_a_newer_release_adds_to_a_frame_is_passed_over() -> None:
    """Fields at the end of a delta, and names in a frame, an ending and a takeover that this release does not know."""
    known = Frame(
        worker="w",
        deltas=(Delta(ID, 2, 0, (1,), "a", cut="c"),),
        endings=(Ending(id=ID, attempt=2, outcome="length"),),
        takeovers=(Takeover(ID, 2),),
    )
    newer = msgspec.msgpack.decode(encode(known))
    newer |= {"v": 2, "novelties": [{"id": ID}]}
    newer["deltas"][0] += ["novelty", 7]
    newer["endings"][0] |= {"novelty": 1}
    newer["takeovers"][0] |= {"novelty": 1}

    read = decode(msgspec.msgpack.encode(newer))

    assert msgspec.structs.replace(read, v=known.v) == known


def test_a_cut_is_a_hash_of_the_very_tokens() -> None:
    assert cut_of([1, 2]) == cut_of((1, 2)) != cut_of([1, 2, 3])
    assert cut_of([]) != ""


# --- in the store


@pytest.fixture
def live(valkey: redis.Redis) -> Store:
    return Store(valkey)


def test_a_step_is_one_entry_whatever_it_carries(live: Store, valkey: redis.Redis) -> None:
    frames = [Frame(worker="w", deltas=(delta(1, list(b"abc"), n, n + 1),)) for n in range(3)]

    live.run(log_step("m", "w", [encode(frame) for frame in frames[:2]]))
    live.run(log_step("m", "w", [encode(frames[2])]))

    assert valkey.xlen("f1:{m}:log:w") == 2
    assert live.run(logged("m", "w")) == frames
    assert live.run(logged("m", "stranger")) == []


def test_a_cut_log_keeps_its_entry_and_what_follows(live: Store, valkey: redis.Redis) -> None:
    frames = [Frame(worker="w", deltas=(delta(1, list(b"abc"), n, n + 1),)) for n in range(3)]
    entries = [live.run(log_step("m", "w", [encode(frame)])) for frame in frames]

    live.run_all(cut_log("m", "w", entries[1]))

    assert live.run(logged("m", "w")) == frames[1:]
    assert valkey.pttl("f1:{m}:log:w") > 0


def test_saved_output_outlives_its_request_for_a_while_only(live: Store, valkey: redis.Redis) -> None:
    pieces = [delta(1, list(b"abc"), 0, 2), delta(1, list(b"abc"), 2, 3, "stop")]

    live.run_all(save("m", pieces[0]))
    running_ms = valkey.pttl(f"f1:{{m}}:output:{ID}")
    live.run_all(save("m", pieces[1], ended=True))

    assert live.run(saved("m", ID)) == pieces
    assert live.run(saved("m", "stranger")) == []
    assert running_ms > valkey.pttl(f"f1:{{m}}:output:{ID}") > 0


def test_a_publish_says_whether_anybody_listens(live: Store) -> None:
    assert live.run(publish("m", "g", b"")) is False
