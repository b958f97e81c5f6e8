"""Where an attempt goes on: cuts between characters, stop strings over the seam, outputs that had come to their end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.stream.frames import Delta, Logprob, Output, joined
from core.values import Caller, Request, Sampling, Tools
from workers.engine import Piece
from workers.markup import ANSWER, ARGUMENTS, CALL, DONE, THINK, MarkReader
from workers.resume import Delivered, Differs, Parts, Plan, Seam, StopMatcher, completed_by, plan, spelled

#: Two characters of four and three bytes, one token a byte.
WIDE = "😀漢".encode()


def by_byte(ids: Sequence[int]) -> str:
    """A byte tokenizer's decoder."""
    return bytes(ids).decode("utf-8", errors="replace")


def request(n: int = 100, **sampling: Any) -> Request:
    return Request(
        id="a",
        model="m",
        caller=Caller(org_id="o", project_id="p", key_id="k"),
        gateway="g",
        prompt_token_ids=[1, 2, 3],
        sampling=Sampling(max_tokens=n, **sampling),
    )


def delivered(tokens: Sequence[int], text: str, finish: str = "") -> Output:
    output = Output("a")
    output.add([Delta("a", 1, 0, tuple(tokens), text, 0, finish=finish)])
    return output


@pytest.mark.parametrize("n", range(len(WIDE) + 3))
def test_a_cut_falls_between_characters(n: int) -> None:
    """Else the engine would take the broken one for the prompt's, and give text of the prompt as output."""
    tokens = (b"ab" + WIDE)[:n]
    text = tokens.decode("utf-8", errors="ignore")

    begun = plan(request(), delivered(tokens, text), by_byte)

    assert bytes(begun.tokens) == text.encode()
    assert n - begun.cut < 4
    assert (begun.at, begun.held, begun.finish) == (len(text), "", "")


def test_bytes_that_never_make_a_character_do_not_move_the_cut_for_ever() -> None:
    tokens = b"ab" + b"\xff" * 20

    assert plan(request(), delivered(tokens, "ab"), by_byte).cut == len(tokens)


@pytest.mark.parametrize(
    "sampling",
    [
        {"seed": 1},
        {"seed": 1, "temperature": 1.5},
        {"presence_penalty": 1.0},
        {"temperature": 0, "repetition_penalty": 1.1},
        {"grammar": {"json_object": True}},
        {"min_tokens": 3},
    ],
)
def test_what_cannot_be_gone_on_with_begins_anew(sampling: dict[str, Any]) -> None:
    assert plan(request(**sampling), delivered(b"abc", "abc"), by_byte) == Plan()


def test_an_attempt_goes_on_with_the_output_as_part_of_its_prompt() -> None:
    asked = request(10, stop=("x",))

    rest = plan(asked, delivered(b"abc", "abc"), by_byte).request(asked)

    assert rest.prompt_token_ids == [1, 2, 3, *b"abc"]
    assert (rest.sampling.max_tokens, rest.sampling.stop) == (7, ()), "stop strings may lie over the seam: we look"
    assert Plan().request(asked) is asked


@pytest.mark.parametrize("sampling", [{}, {"seed": 1}])
def test_nothing_is_asked_of_an_engine_when_all_tokens_are_there(sampling: dict[str, Any]) -> None:
    """Not even where the output could not be gone on with. What was held back is still owed."""
    begun = plan(request(5, stop=("efg",), **sampling), delivered(b"abcde", "abc"), by_byte)

    assert (begun.cut, begun.at, begun.held, begun.finish) == (5, 3, "de", "length")


def test_an_output_that_broke_off_within_a_character_at_its_last_token_keeps_its_tokens() -> None:
    begun = plan(request(3), delivered(b"a\xf0\x9f", "a"), by_byte)

    assert (begun.cut, begun.held, begun.finish) == (3, "", "length")


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_an_output_that_says_how_it_finished_is_at_its_end(finish: str) -> None:
    begun = plan(request(stop=("d",)), delivered(b"abcd", "abc", finish), by_byte)

    assert (begun.cut, begun.at, begun.held, begun.finish) == (4, 3, "", finish)


def test_a_stop_string_in_what_was_held_back_ends_it() -> None:
    begun = plan(request(stop=("cd", "a long one")), delivered(b"abcde", "ab"), by_byte)

    assert (begun.cut, begun.held, begun.finish, begun.stop) == (4, "", "stop", "cd")


def test_a_decoder_that_gives_other_text_than_was_streamed_shows_nothing_twice() -> None:
    assert plan(request(), delivered(b"abc", " abc"), by_byte).held == ""


@pytest.mark.parametrize("known", [0, 2, 5])
def test_the_marker_saves_what_was_delivered_under_the_new_attempts_number(known: int) -> None:
    output = delivered(b"abcde", "abcde")
    marker = plan(request(), output, by_byte).marker(output, 2, known, known)

    assert marker == [Delta("a", 2, known, tuple(b"abcde"[known:]), "abcde"[known:], known)]


def test_a_marker_that_cuts_back_what_is_saved_begins_at_the_cut() -> None:
    output = delivered(b"ab" + WIDE[:3], "ab")
    [marker] = plan(request(), output, by_byte).marker(output, 2, 5, 2)
    output.add([marker])

    assert (marker.offset, marker.at, marker.tokens) == (2, 2, ())
    assert (output.attempt, bytes([*output.tokens]), output.text) == (2, b"ab", "ab")


def test_a_marker_tells_the_next_attempt_too_that_the_output_is_whole() -> None:
    output = delivered(b"abc", "abc", "stop")
    begun = plan(request(), output, by_byte)
    output.add(begun.marker(output, 2, 0, 0))

    assert plan(request(), output, by_byte) == begun


# --- stop strings


def one_pass(text: str, stops: Sequence[str]) -> tuple[str, int] | None:
    """Character by character: where the first match is complete; of two at once, the first in the list."""
    for end in range(1, len(text) + 1):
        for stop in stops:
            if stop and text[:end].endswith(stop):
                return text[: end - len(stop)], end
    return None


LETTERS = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", max_size=4), max_size=3)


@given(pieces=st.lists(LETTERS, max_size=6), held=LETTERS, stops=STOPS)
def test_stop_strings_are_found_as_in_one_pass_however_text_is_cut(
    pieces: list[str], held: str, stops: list[str]
) -> None:
    matcher = StopMatcher(stops, held)
    text = ""
    for piece in pieces:
        text += matcher.add(piece)
        known = one_pass(held + "".join(pieces), stops)
        assert known is None or known[0].startswith(text), "nothing of a stop string is given out"
    text += matcher.rest()

    assert (text, matcher.end) == (one_pass(held + "".join(pieces), stops) or (held + "".join(pieces), None))


@given(
    whole=st.text("ab漢", min_size=1, max_size=30),
    sizes=st.lists(st.integers(1, 5), min_size=30, max_size=30),
    at=st.integers(1, 90),
    stops=st.lists(st.text("ab漢", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_seam_shows_nothing(whole: str, sizes: list[int], at: int, stops: list[str]) -> None:
    """Text, tokens and end are those of the unbroken attempt, wherever it was broken and however steps are merged."""
    asked = request(len(whole.encode()), stop=tuple(stops))
    text, tokens, finish = unbroken(whole, stops)
    at = min(at, len(tokens) - 1)
    first = StopMatcher(stops)
    shown = first.add(tokens[:at].decode("utf-8", errors="ignore"))
    begun = plan(asked, delivered(tokens[:at], shown), by_byte)
    seam, end = Seam(begun, asked, by_byte), begun.finish
    made, said = bytes(begun.tokens), shown

    for piece in pieces(whole.encode(), begun, sizes):
        joined = seam.join(piece)
        made, said, end = made + bytes(joined.tokens), said + joined.text, joined.finish or ""
        if end:
            break

    if begun.cut:  # else the engine looks for stop strings itself
        assert (said, made, end) == (text, tokens, finish)


def unbroken(whole: str, stops: Sequence[str]) -> tuple[str, bytes, str]:
    known = one_pass(whole, stops)
    if known is None:
        return whole, whole.encode(), "length"
    return known[0], whole[: known[1]].encode(), "stop"


def pieces(source: bytes, begun: Plan, sizes: Sequence[int]) -> list[Piece]:
    """What an engine gives from the cut on: so many bytes at once, and each character's text with its last byte."""
    made, cut = [], begun.cut
    for size in [*sizes, len(source)]:
        tokens = source[cut : cut + size]
        text = source[: cut + size].decode("utf-8", errors="ignore")[len(source[:cut].decode("utf-8", "ignore")) :]
        cut += len(tokens)
        made.append(Piece(tokens=tuple(tokens), text=text, finish="length" if cut == len(source) else None))
        if cut == len(source):
            break
    return made


def test_tokens_count_up_to_the_one_that_completes_so_many_characters() -> None:
    tokens = b"a" + WIDE

    assert [completed_by(chars, tokens, by_byte) for chars in range(4)] == [0, 1, 5, 8]
    assert completed_by(9, tokens, by_byte) == len(tokens)


def test_a_piece_keeps_what_else_it_says() -> None:
    seam = Seam(Plan(tokens=(97,), at=0, held="a"), request(), by_byte)

    joined = seam.join(Piece(tokens=(98,), text="b", cached_tokens=3))

    assert joined == msgspec.structs.replace(Piece(tokens=(98,), cached_tokens=3), text="ab")


# --- kinds


KINDS = st.sampled_from(["text", "reasoning", "call:0", "1/text"])
PIECES = st.lists(st.tuples(KINDS, st.integers(0, 3), st.text("ab", max_size=3), st.booleans()), max_size=30)


@given(pieces=PIECES, looks=st.lists(st.integers(0, 3), min_size=30, max_size=30))
def test_what_is_saved_in_parts_is_what_was_put(pieces: list[tuple[str, int, str, bool]], looks: list[int]) -> None:
    """Whenever it was saved, and whatever was put between a save and its reply: runs, tokens and logprobs."""
    put, kept, parts = Output("a"), Output("a"), Parts("a", 1, 0, 0)
    waiting: list[tuple[int, list[Delta]]] = []
    token = 0
    for (kind, count, text, told), look in zip(pieces, looks, strict=False):
        tokens = tuple(range(token, token + count))
        logprobs = tuple(Logprob(str(one), -1.0) for one in tokens)
        put.add([Delta("a", 1, token, tokens, text, put.chars, kind if text else "text", logprobs=logprobs)])
        parts.add(kind if text else "text", tokens, text, logprobs)
        token += count
        if told and not waiting:
            waiting.append((look, parts.deltas()))
        elif waiting:
            _, deltas = waiting.pop()
            kept.add(deltas)
            parts.forget(deltas)
    for _, deltas in waiting:
        kept.add(deltas)
        parts.forget(deltas)
    kept.add(parts.deltas())

    assert list(kept.tokens) == list(range(token)) and kept.text == put.text
    assert [(run.kind, run.text) for run in kept.runs if run.text] == said(put)
    assert [one for delta in kept.deltas for one in delta.logprobs] == [Logprob(str(n), -1.0) for n in range(token)]
    assert len(parts.parts) <= 1 or parts.parts[0].kind != parts.parts[1].kind


def said(output: Output) -> list[tuple[str, str]]:
    runs = joined(run for run in output.runs if run.text)
    return [(run.kind, run.text) for run in runs]


SCRIPTS = st.sampled_from(
    [
        f"{THINK}ab漢c{ANSWER}the answer",
        f'{CALL}weather{ARGUMENTS}{{"city": "漢"}}{DONE}',
        f"{THINK}hm{ANSWER}I call{CALL}one{ARGUMENTS}{{}}{DONE}{CALL}two{ARGUMENTS}[]{DONE}",
        "just text 😀",
    ]
)
SIZES = st.lists(st.integers(1, 5), min_size=60, max_size=60)


def read(source: bytes, sizes: Sequence[int]) -> list[Delta]:
    """The deltas of an undisturbed attempt, in steps of such sizes, as generate.py makes them."""
    reader, deltas = MarkReader(), []
    offset = at = 0
    for piece in pieces(source, Plan(), sizes):
        runs = reader.feed(piece.text, piece.tokens, finished=piece.finish is not None)
        tokens = piece.tokens
        for kind, text in runs or [("text", "")]:
            deltas.append(Delta("a", 1, offset, tokens, text, at, kind))
            offset, at, tokens = offset + len(tokens), at + len(text), ()
    return deltas


@given(script=SCRIPTS, sizes=SIZES, other=SIZES)
def test_a_reader_says_the_same_however_the_output_is_cut(script: str, sizes: list[int], other: list[int]) -> None:
    outputs = [Output("a"), Output("a")]
    for output, cut in zip(outputs, (sizes, other), strict=True):
        output.add(read(script.encode(), cut))

    assert said(outputs[0]) == said(outputs[1])
    assert outputs[0].chars == outputs[1].chars


@given(script=SCRIPTS, sizes=SIZES, other=SIZES, at=st.integers(1, 60))
def test_an_output_that_is_read_goes_on_where_it_was_cut(
    script: str, sizes: list[int], other: list[int], at: int
) -> None:
    """In the middle of a call, its name or its arguments, of thinking, of a character: all of it once, in order."""
    source, asked = script.encode(), request()
    whole, before = Output("a"), Output("a")
    deltas = read(source, sizes)
    whole.add(deltas)
    before.add(deltas[: at % len(deltas)])
    begun = plan(asked, before, by_byte, reads=True)
    after = Output("a")
    after.add(before.deltas)
    after.add(begun.marker(before, 2, 0, 0))
    reader, delivered, seam = MarkReader(), Delivered(begun.runs), Seam(begun, asked, by_byte, reads=True)
    owed: list[tuple[str, str]] = []
    for piece in spelled(begun, (), lambda _, ids: by_byte(ids)):
        owed += delivered.beyond(reader.feed(seam.join(piece).text, piece.tokens, finished=False))
    for piece in pieces(source, begun, other):
        tokens = piece.tokens
        runs = delivered.beyond(reader.feed(seam.join(piece).text, tokens, finished=piece.finish is not None))
        for kind, text in [*owed, *runs] or [("text", "")]:
            after.add([Delta("a", 2, len(after.tokens), tokens, text, after.chars, kind)])
            tokens = ()
        owed = []

    assert said(after) == said(whole)
    assert bytes([*after.tokens]) == source


def test_a_reader_that_says_something_else_is_found_out() -> None:
    delivered = Delivered(joined(Output("a").runs))
    assert delivered.beyond([("text", "new")]) == [("text", "new")]
    output = Output("a")
    output.add([Delta("a", 1, 0, (1,), "abc", 0, "reasoning"), Delta("a", 1, 1, (), "de", 3, "text")])

    assert Delivered(output.runs).beyond([("reasoning", "abc"), ("text", "defg")]) == [("text", "fg")]
    assert Delivered(output.runs).beyond([("reasoning", "ab")]) == []
    for other in ([("text", "abc")], [("reasoning", "abd")], [("reasoning", "abc"), ("reasoning", "d")]):
        with pytest.raises(Differs):
            Delivered(output.runs).beyond(other)


def test_a_cut_between_tokens_keeps_text_that_came_without_any() -> None:
    """One step gave a whole character and half of another, and two kinds of text: the half goes, the text stays."""
    output = Output("a")
    output.add([Delta("a", 1, 0, (97, *WIDE[:2]), "a", 0, "reasoning"), Delta("a", 1, 3, (), "b", 1, "text")])
    begun = plan(request(), output, by_byte, reads=True)
    output.add(begun.marker(output, 2, 3, 2))

    assert (begun.cut, begun.at) == (1, 2)
    assert said(output) == [("reasoning", "a"), ("text", "b")] and list(output.tokens) == [97]


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2},
        {"more_prompts": ([1],)},
        {"tools": Tools(functions=({"name": "f"},), choice="required")},
    ],
)
def test_several_answers_and_calls_that_must_be_begin_anew(more: dict[str, Any]) -> None:
    asked = msgspec.structs.replace(request(3), **more)

    begun = plan(asked, delivered(b"ab", "ab"), by_byte)

    assert begun == Plan()


@pytest.mark.parametrize(
    ("strict", "choice", "parallel", "resumable"),
    [
        (False, "auto", True, True),
        (True, "auto", True, False),  # vLLM makes a grammar of it
        (False, "auto", False, False),  # and of one call at most
        (True, "none", False, True),
        (False, "required", True, False),
        (False, "=f", True, False),
    ],
)
def test_what_a_grammar_binds_is_not_gone_on_with(strict: bool, choice: str, parallel: bool, resumable: bool) -> None:
    tools = Tools(functions=({"name": "f", "strict": strict},), choice=choice, parallel=parallel)
    assert msgspec.structs.replace(request(), tools=tools).resumable is resumable
