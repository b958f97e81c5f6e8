"""The instruments of a storm: a client that knows what it must be told, and says what is wrong."""

from __future__ import annotations

import io

import pytest

from ops.chaos.crowd import Manner, Visit, _events

WHOLE = "<whole>"
PART = "<part>"
OTHER = "<other>"


@pytest.mark.parametrize(("manner", "text", "ends", "wrong"), [
    ("sampled", WHOLE, ["length"], ""),
    ("greedy", WHOLE, ["length"], ""),
    ("seeded", PART, ["worker_lost"], ""),
    ("sampled", PART, ["left"], ""),
    ("sampled", "", ["gone"], ""),
    ("sampled", WHOLE, [], "told 0 endings: []"),
    ("sampled", WHOLE, ["length", "length"], "told 2 endings: ['length', 'length']"),
    ("sampled", PART, ["length"], "told that it is whole, and it is not"),
    ("greedy", OTHER, ["length"], "shown a text that is not the engine's"),
    ("seeded", OTHER, ["worker_lost"], "shown a text that is not the engine's"),
    ("sampled", WHOLE + "a", ["length"], "shown a text that is not the engine's"),
    ("sampled", PART, ["worker_lost"], "lost with its worker, and could have gone on"),
    ("greedy", "", ["worker_lost"], "lost with its worker, and could have gone on"),
    ("sampled", PART, ["generation_failed"], "told 'generation_failed' without need"),
])  # fmt: skip
def test_a_client_says_what_is_wrong_with_what_it_was_told(
    manner: Manner, text: str, ends: list[str], wrong: str
) -> None:
    visit = Visit(kind="stream", manner=manner, model="m", prompt="p", seed=7, asked=40, request_id="r", ends=ends)
    whole = visit.expected()
    other = Visit(kind="stream", manner=manner, model="m", prompt="q", seed=8, asked=40, request_id="s").expected()
    assert len(whole) == 40 and other != whole

    visit.text = text.replace(WHOLE, whole).replace(PART, whole[:17]).replace(OTHER, other)

    assert visit.fault() == wrong


def test_an_event_that_is_cut_off_is_not_read() -> None:
    """Else a client would come back with the number of something that it has not seen."""
    sent = b": waiting\n\nid: a:1\ndata: {1}\n\nid: a:2\ndata: {2}\n\ndata: [DONE]\n\n"
    whole = [("a:1", "{1}"), ("a:2", "{2}"), ("", "[DONE]")]

    assert list(_events(io.BytesIO(sent))) == whole
    for cut in range(len(sent)):
        read = list(_events(io.BytesIO(sent[:cut])))
        assert read == whole[: len(read)]
        assert len(read) == sent[:cut].replace(b": waiting\n\n", b"").count(b"\n\n")
