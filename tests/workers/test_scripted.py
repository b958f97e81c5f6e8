"""What the scripted engine says, and that whoever knows the request knows it beforehand."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.catalog import EngineKnobs, Model, StepProfile
from core.values import Caller, Request, Sampling, Tools
from workers.engine import EngineRefused, Piece
from workers.markup import ANSWER, ARGUMENTS, CALL, DONE, THINK, MarkReader
from workers.scripted import REASONING_TOKENS, ScriptedEngine, scripted_tokens

STEP = StepProfile(base_ms=0, sequence_ms=0, prefill_ms=0)
PLAIN = Model(name="m", context_tokens=2000, slots=8, step=STEP)
CALLS = msgspec.structs.replace(PLAIN, engine=EngineKnobs(tool_parser="scripted"))
THINKS = msgspec.structs.replace(PLAIN, engine=EngineKnobs(tool_parser="scripted", reasoning_parser="scripted"))
VECTORS = msgspec.structs.replace(PLAIN, kind="embedding")

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTIONS = ({"name": "get_weather", "parameters": CITY}, {"name": "get_time"}, {"name": "add"})


def tools(choice: str = "auto", *, parallel: bool = True) -> Tools:
    return Tools(functions=FUNCTIONS, choice=choice, parallel=parallel)


def request(prompt: str = "user: hello\nassistant: ", n: int = 40, **more: Any) -> Request:
    of_sampling = {field: more.pop(field) for field in Sampling.__struct_fields__ if field in more}
    return Request(
        id="r",
        model="m",
        caller=Caller(org_id="o", project_id="p", key_id="k"),
        gateway="g",
        prompt_token_ids=list(prompt.encode()),
        sampling=Sampling(**{"max_tokens": n, "seed": 3} | of_sampling),
        **more,
    )


def pieces_of(model: Model, asked: Request, cut: int = 0) -> list[Piece]:
    async def ask() -> list[Piece]:
        engine = ScriptedEngine(model)
        await engine.start()
        try:
            return [piece async for piece in engine.generate(asked, cut)]
        finally:
            await engine.stop()

    return asyncio.run(ask())


def answer(model: Model, asked: Request) -> tuple[list[tuple[str, str]], str | None]:
    """What is read of it, and how it finished."""
    reader = ScriptedEngine(model).reader(asked)
    runs: list[tuple[str, str]] = []
    pieces = pieces_of(model, asked)
    for piece in pieces:
        fed = [("text", piece.text)]
        if reader is not None:
            fed = reader.feed(piece.text, piece.tokens, finished=piece.finish is not None)
        for kind, text in fed:
            runs.append((kind, runs.pop()[1] + text) if runs and runs[-1][0] == kind else (kind, text))
    return runs, pieces[-1].finish


def script(n: int, seed: int = 3) -> str:
    return bytes(scripted_tokens(seed, n)).decode()


def calls(*names: str) -> list[tuple[str, str]]:
    arguments = {"get_weather": '{"city": "abc"}'}
    return [
        run
        for n, name in enumerate(names)
        for run in ((f"call:{n}", name), (f"arguments:{n}", arguments.get(name, "{}")))
    ]


# --- tools


@pytest.mark.parametrize("model", [PLAIN, CALLS])
def test_a_request_for_text_is_answered_by_its_script_alone(model: Model) -> None:
    assert answer(model, request()) == ([("text", script(40))], "length")
    assert ScriptedEngine(model).reader(request()) is None


def test_a_function_that_must_be_is_called() -> None:
    assert answer(CALLS, request(n=99, tools=tools("=get_time"))) == (calls("get_time"), "stop")
    assert answer(CALLS, request(n=99, tools=tools("required"))) == (calls("get_weather"), "stop")
    assert answer(CALLS, request(n=99, tools=tools("none"))) == ([("text", script(99))], "length")


@pytest.mark.parametrize(
    ("asked", "called"),
    [
        ("How is the WEATHER?", ["get_weather"]),
        ("call get_time", ["get_time"]),
        ("the weather at what time", ["get_weather", "get_time"]),
        ("add these", ["add"]),
        ("please get it", []),
        ("hello", []),
    ],
)
def test_functions_that_the_user_speaks_of_are_called(asked: str, called: list[str]) -> None:
    """Not those that only the list of tools, or an earlier turn, names."""
    listed = f"tools: {json.dumps([*FUNCTIONS])}\nuser: add something\nassistant: done\nuser: {asked}\nassistant: "
    runs, finish = answer(CALLS, request(listed, 99, tools=tools()))

    assert (runs, finish) == ((calls(*called), "stop") if called else ([("text", script(99))], "length"))


def test_calls_are_parallel_only_where_they_may_be() -> None:
    both = "user: get_time and get_weather\nassistant: "

    assert answer(CALLS, request(both, 99, tools=tools("required")))[0] == calls("get_weather", "get_time")
    assert answer(CALLS, request(both, 99, tools=tools("required", parallel=False)))[0] == calls("get_weather")
    assert answer(CALLS, request(both, 99, tools=tools(parallel=False)))[0] == calls("get_weather")


def test_a_functions_result_is_answered_with_text() -> None:
    turns = 'user: the weather?\nassistant: \n{"id": "1", "name": "get_weather", "arguments": "{}"}\ntool: sunny\n'
    result = f"{turns}assistant: "

    assert answer(CALLS, request(result, tools=tools())) == ([("text", script(40))], "length")
    assert answer(CALLS, request(result, 99, tools=tools("required")))[0] == calls("get_weather")


def test_a_model_without_tools_refuses_them() -> None:
    with pytest.raises(EngineRefused, match="no tools"):
        ScriptedEngine(PLAIN).reader(request(tools=tools()))
    assert ScriptedEngine(PLAIN).reader(request(tools=tools("none"))) is None


def test_a_call_that_is_cut_off_ends_as_one() -> None:
    assert answer(CALLS, request(n=20, tools=tools("required"))) == (
        [("call:0", "get_weather"), ("arguments:0", '{"city"')],
        "length",
    )
    assert answer(CALLS, request(n=5, tools=tools("required"))) == ([], "length"), "a name is told whole or not at all"


# --- thinking


def test_a_model_that_thinks_does_so_first() -> None:
    thought = ("reasoning", script(REASONING_TOKENS, 3 ^ 1))

    assert answer(THINKS, request(n=REASONING_TOKENS + 2 + 30)) == ([thought, ("text", script(30))], "length")
    assert answer(THINKS, request(n=99, tools=tools("=add"))) == ([thought, *calls("add")], "stop")
    assert answer(THINKS, request(n=99, grammar={"choice": ["a", "b"]})) == ([thought, ("text", "a")], "stop")
    assert answer(THINKS, request(reasons=False)) == ([("text", script(40))], "length")


@given(st.lists(st.integers(1, 4), max_size=40))
def test_the_reader_says_the_same_however_it_is_fed(sizes: list[int]) -> None:
    said = f"{THINK}hm{ANSWER}so{CALL}f{ARGUMENTS}{{}}{DONE}{CALL}g{ARGUMENTS}[1]{DONE}"
    reader, runs, at = MarkReader(), [], 0
    for size in [*sizes, len(said)]:
        part, at = said[at : at + size], at + size
        runs += reader.feed(part, list(part.encode()), finished=at >= len(said))

    kinds = [kind for n, (kind, _) in enumerate(runs) if n == 0 or runs[n - 1][0] != kind]
    assert kinds == ["reasoning", "text", "call:0", "arguments:0", "call:1", "arguments:1"]
    assert "".join(text for _, text in runs) == "hmsof{}g[1]"
    assert reader.reasoning_tokens == 4


# --- grammars


@pytest.mark.parametrize(
    "grammar",
    [
        {"json": CITY},
        {"json": json.dumps(CITY)},
        {"json": {"type": "object", "properties": {"word": {"const": "漢😀"}}, "required": ["word"]}},
        {"json_object": True},
    ],
)
def test_an_answer_keeps_to_its_grammar_and_stops_where_it_ends(grammar: dict[str, Any]) -> None:
    [(kind, text)], finish = answer(PLAIN, request(n=200, grammar=grammar))
    made = json.loads(text)

    assert (kind, finish) == ("text", "stop")
    assert made and isinstance(made, dict)
    assert "const" not in json.dumps(grammar) or made == {"word": "漢😀"}
    assert "�" not in text


def test_a_grammar_that_is_cut_off_ends_at_its_length_and_at_a_character() -> None:
    word = {"type": "string", "const": "漢😀"}

    for n in range(1, 9):
        [piece] = [piece for piece in pieces_of(PLAIN, request(n=n, grammar={"json": word})) if piece.finish]
        assert piece.finish == "length"
    assert answer(PLAIN, request(n=5, grammar={"json": word}))[0] == [("text", '"漢')]


@pytest.mark.parametrize(
    "grammar",
    [{"regex": "a+"}, {"grammar": "root ::= 'a'"}, {"json": {"type": "object", "properties": 3}}, {"json": "{"}],
)
def test_a_grammar_that_is_not_scripted_is_refused(grammar: dict[str, Any]) -> None:
    with pytest.raises(EngineRefused):
        pieces_of(PLAIN, request(grammar=grammar))


# --- sampling


def test_what_would_end_it_does_not_before_its_least_length() -> None:
    text = script(200)
    first = text.index("k")
    later = text.index("k", first + 1)
    stopped = pieces_of(PLAIN, request(n=200, stop=("k",), min_tokens=first + 1))
    by_token = pieces_of(PLAIN, request(n=200, stop_token_ids=(ord("k"),), min_tokens=first + 1))

    for pieces in (stopped, by_token):
        assert "".join(piece.text for piece in pieces) == text[:later] and pieces[-1].finish == "stop"
        assert sum(len(piece.tokens) for piece in pieces) == later + 1
    assert (stopped[-1].stop, by_token[-1].stop) == ("k", "")
    assert sum(len(piece.tokens) for piece in pieces_of(PLAIN, request(n=200, stop_token_ids=(ord("k"),)))) == first + 1


@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_logprobs_are_plausible_and_the_same_again(top: int) -> None:
    told = [one for piece in pieces_of(PLAIN, request(logprobs=top)) for one in piece.logprobs]

    assert "".join(one.token for one in told) == script(40)
    for one in told:
        assert -3 < one.logprob < 0 and len(one.top) == top == len({token for token, _ in one.top})
        assert sum(math.exp(logprob) for _, logprob in one.top) < 1
        assert not top or one.top[0] == (one.token, one.logprob)
    assert told == [one for piece in pieces_of(PLAIN, request(logprobs=top)) for one in piece.logprobs]


@pytest.mark.parametrize("model", [CALLS, THINKS])
@pytest.mark.parametrize("cut", [1, 5, 14, 20, 29, 30])
def test_a_resumed_output_goes_on_with_the_same_tokens(model: Model, cut: int) -> None:
    asked = request("user: what time?\nassistant: ", 99, seed=None, tools=tools())
    whole = [token for piece in pieces_of(model, asked) for token in piece.tokens]
    rest = msgspec.structs.replace(asked, prompt_token_ids=[*asked.prompt_token_ids, *whole[:cut]])

    pieces = pieces_of(model, rest, min(cut, len(whole)))

    assert [token for piece in pieces for token in piece.tokens] == whole[cut:] and pieces[-1].finish == "stop"


# --- vectors


def test_a_vector_is_its_prompts_own_and_of_unit_length() -> None:
    async def embed(prompts: list[list[int]]) -> list[tuple[float, ...]]:
        engine = ScriptedEngine(VECTORS)
        await engine.start()
        try:
            return [await engine.embed(request(task="embed"), prompt) for prompt in prompts]
        finally:
            await engine.stop()

    one, other, again = asyncio.run(embed([[1, 2, 3], [1, 2, 4], [1, 2, 3]]))

    assert one == again != other and len(one) == 16
    assert math.hypot(*one) == pytest.approx(1)
    with pytest.raises(EngineRefused):
        asyncio.run(embed([[1] * 2001]))
    with pytest.raises(EngineRefused):
        asyncio.run(ScriptedEngine(PLAIN).embed(request(task="embed"), [1]))
