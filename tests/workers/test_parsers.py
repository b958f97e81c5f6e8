"""What is read out of a model's output does not depend on how it came, and nothing of it is lost."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from core.catalog import EngineKnobs, Model
from core.stream.frames import Run, joined
from core.values import Caller, Request, Sampling, Tools
from workers.engine import EngineRefused
from workers.vllm.parsers import GRAMMAR_CHARS, OutputReader, Parsers, written_out

DATA = Path(os.environ.get("FOREBAY_DATA", Path(__file__).parents[2] / ".forebay"))

#: What the vocabularies of models that think or call have, and the small model's has not.
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

WEATHER: dict[str, Any] = {
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CLOCK: dict[str, Any] = {"name": "clock", "parameters": {"type": "object", "properties": {}}}

HERMES_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln 😀"}}\n</tool_call>'
QWEN_CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nKöln 😀\n</parameter>\n</function>\n</tool_call>"

#: Tool parser, reasoning parser, and what a model of the kind writes a call as.
PAIRS = {
    "hermes": ("hermes", "", HERMES_CALL),
    "deepseek_r1": ("", "deepseek_r1", ""),
    "qwen3": ("", "qwen3", ""),
    "hermes+deepseek_r1": ("hermes", "deepseek_r1", HERMES_CALL),
    "hermes+qwen3": ("hermes", "qwen3", HERMES_CALL),
    "qwen3_xml+qwen3": ("qwen3_xml", "qwen3", QWEN_CALL),
    "pythonic": ("pythonic", "", '[weather(city="Köln 😀"), weather(city="Bonn")]'),
}

Runs = list[tuple[str, str]]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The small model's, with the marks as special tokens."""
    from vllm.tokenizers import get_tokenizer

    source, folder = DATA / "models" / "smollm2-135m-instruct", tmp_path_factory.mktemp("marked")
    spelled = json.loads((source / "tokenizer.json").read_text())
    after = max(spelled["model"]["vocab"].values()) + 1
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    spelled["added_tokens"] += [{"id": after + n, "content": mark} | plain for n, mark in enumerate(MARKS)]
    (folder / "tokenizer.json").write_text(json.dumps(spelled))
    (folder / "tokenizer_config.json").write_text((source / "tokenizer_config.json").read_text())
    return get_tokenizer(str(folder))


class Reading:
    """One model's parsers, and its output as an engine would give it."""

    def __init__(self, name: str, tokenizer: Any) -> None:
        tool, reasoning, self.call = PAIRS[name]
        self.tokenizer = tokenizer
        self.parsers = Parsers(
            Model(context_tokens=9000, engine=EngineKnobs(tool_parser=tool, reasoning_parser=reasoning)), tokenizer
        )
        self.tools = Tools(functions=(WEATHER, CLOCK)) if tool else None

    def request(self, prompt: str = "Hi", stop: tuple[str, ...] = (), tools: Tools | None = None) -> Request:
        return Request(
            id="read",
            model="m",
            caller=Caller(org_id="org", project_id="project", key_id="key"),
            gateway="gateway",
            prompt_token_ids=self.ids(prompt),
            sampling=Sampling(max_tokens=1000, stop=stop),
            tools=tools or self.tools,
        )

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def reader(self, request: Request) -> OutputReader:
        reader = self.parsers.reader(request)
        assert reader is not None
        return reader

    def engine(self, request: Request) -> Any:
        """The engine's own detokenizer of this request."""
        from types import SimpleNamespace

        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        asked, _ = self.parsers.asked_of_engine(request)
        params = SamplingParams(stop=list(request.sampling.stop), skip_special_tokens=asked["skip_special_tokens"])
        return IncrementalDetokenizer.from_new_request(
            self.tokenizer,
            SimpleNamespace(  # type: ignore[arg-type]
                request_id="", prompt_token_ids=request.prompt_token_ids, prompt_embeds=None, sampling_params=params
            ),
        )

    def pieces(self, request: Request, output: Sequence[int], cuts: Sequence[int]) -> list[tuple[str, list[int], bool]]:
        """The output in pieces, up to a stop string or the end token, as an engine with a slow reader gives it."""
        engine, given, begin = self.engine(request), [], 0
        for end in [*sorted({cut for cut in cuts if 0 < cut < len(output)}), len(output)]:
            tokens = list(output[begin:end])
            ended = end == len(output) and tokens[-1] == self.tokenizer.eos_token_id
            stopped = engine.update(tokens, ended) is not None
            finished = stopped or end == len(output)
            kept = engine.output_token_ids[begin:]
            given.append((engine.get_next_output_text(finished, delta=True), list(kept), finished))
            if finished:
                break
            begin = end
        return given

    def read(self, request: Request, output: Sequence[int], cuts: Sequence[int] = ()) -> tuple[Runs, int]:
        reader, runs = self.reader(request), Runs()
        for text, tokens, finished in self.pieces(request, output, cuts):
            runs += reader.feed(text, tokens, finished=finished)
        return whole(runs), reader.reasoning_tokens

    def said(self, text: str, request: Request | None = None) -> Runs:
        return self.read(request or self.request(), [*self.ids(text), self.tokenizer.eos_token_id])[0]


def whole(runs: Runs) -> Runs:
    return [(run.kind, run.text) for run in joined(Run(kind, text) for kind, text in runs)]


@pytest.fixture(scope="module")
def readings(tokenizer: Any) -> dict[str, Reading]:
    return {name: Reading(name, tokenizer) for name in PAIRS}


#: What outputs are made of, whole and broken: in any order a model may write it.
PARTS = [
    "Let me see. ",
    "漢😀",
    "\n",
    "<",
    "{",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "garbage",
    "CALL",
]


@given(
    name=st.sampled_from(sorted(PAIRS)),
    parts=st.lists(st.sampled_from(PARTS), min_size=1, max_size=8),
    keep=st.integers(0, 60),
    ends=st.booleans(),
    cuts=st.lists(st.integers(1, 120), max_size=12),
    stop=st.sampled_from([(), ("see",), ("garb", "\n"), ("</tool",)]),
    thinks=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_what_is_read_does_not_depend_on_the_pieces(
    readings: dict[str, Reading],
    name: str,
    parts: list[str],
    keep: int,
    ends: bool,
    cuts: list[int],
    stop: tuple[str, ...],
    thinks: bool,
) -> None:
    """Nor on what the detokenizer held back in each, nor where the output breaks off."""
    reading = readings[name]
    output = reading.ids("".join(parts).replace("CALL", reading.call))
    output = [*output, reading.tokenizer.eos_token_id] if ends or not output else output[: max(1, len(output) - keep)]
    request = reading.request("Hi<think>\n" if thinks else "Hi", stop)

    one_by_one = reading.read(request, output, range(len(output)))

    assert reading.read(request, output, cuts) == one_by_one
    assert reading.read(request, output) == one_by_one


@given(
    name=st.sampled_from(sorted(PAIRS)),
    parts=st.lists(st.sampled_from([part for part in PARTS if part != "漢😀"]), min_size=1, max_size=8),
    cut=st.integers(1, 60),
)
@settings(max_examples=80, deadline=None)
def test_a_resumed_output_is_read_as_an_unbroken_one(
    readings: dict[str, Reading], name: str, parts: list[str], cut: int
) -> None:
    """What was delivered is fed again, token by token, in the text of plain decoding, which leaves special tokens out;
    the rest as it comes."""
    reading = readings[name]
    text = "".join(parts).replace("CALL", reading.call.replace(" 😀", ""))
    output = [*reading.ids(text), reading.tokenizer.eos_token_id]
    cut = min(cut, len(output) - 1)
    assume(output[cut - 1] != output[cut])  # of a mark twice, once with its text and once without, which had it?
    request = reading.request()
    engine = reading.engine(request)
    engine.update(output[:cut], False)
    before = engine.get_next_output_text(False, delta=True)
    engine.update(output[cut:], True)

    reader = reading.reader(request)
    runs = Runs()
    for token in output[:cut]:
        plain = reading.tokenizer.decode([token], skip_special_tokens=True)
        runs += reader.feed(plain, [token], finished=False)
    runs += reader.feed(engine.output_text[len(before) :], output[cut:], finished=True)

    assert whole(runs) == reading.read(request, output)[0]


@pytest.mark.parametrize("name", ["hermes", "qwen3_xml+qwen3", "pythonic"])
def test_calls_come_with_whole_names_and_with_arguments_that_are_json(readings: dict[str, Reading], name: str) -> None:
    reading = readings[name]
    request = reading.request()
    before = "hm</think>" if "qwen3" in name else ""
    text = before + (
        reading.call if name == "pythonic" else f"{reading.call}\n{reading.call.replace('Köln 😀', 'Bonn')}"
    )
    reader, runs = reading.reader(request), Runs()
    for piece, tokens, finished in reading.pieces(
        request, [*reading.ids(text), reading.tokenizer.eos_token_id], range(99)
    ):
        runs += reader.feed(piece, tokens, finished=finished)

    assert [text for kind, text in runs if kind.startswith("call")] == ["weather", "weather"]
    read = dict(whole(runs))
    assert json.loads(read["arguments:0"]) == {"city": "Köln 😀"}
    assert json.loads(read["arguments:1"]) == {"city": "Bonn"}


def test_text_before_a_call_is_text(readings: dict[str, Reading]) -> None:
    [said, call, _] = readings["hermes"].said("Let me see. " + HERMES_CALL)

    assert said == ("text", "Let me see. ") and call == ("call:0", "weather")


def test_a_call_without_arguments_has_empty_ones(readings: dict[str, Reading]) -> None:
    read = readings["hermes"].said('<tool_call>{"name": "clock"}</tool_call>')

    assert read == [("call:0", "clock"), ("arguments:0", "{}")]


def test_only_one_call_is_read_where_only_one_is_allowed(readings: dict[str, Reading]) -> None:
    reading = readings["hermes"]
    request = reading.request(tools=Tools(functions=(WEATHER,), parallel=False))

    read = reading.said(HERMES_CALL * 2, request)

    assert [kind for kind, _ in read] == ["call:0", "arguments:0"]


@pytest.mark.parametrize("name", ["deepseek_r1", "qwen3", "hermes+qwen3"])
@pytest.mark.parametrize("prompt", ["Hi", "Hi<think>\n"])
def test_thinking_may_have_begun_with_the_prompt(readings: dict[str, Reading], name: str, prompt: str) -> None:
    reading = readings[name]
    own = "" if "<think>" in prompt else "<think>"
    output = [*reading.ids(f"{own}I think so</think>Yes"), reading.tokenizer.eos_token_id]

    read, reasoning_tokens = reading.read(reading.request(prompt), output)

    assert read == [("reasoning", "I think so"), ("text", "Yes")]
    assert reasoning_tokens == len(reading.ids("I think so"))


@pytest.mark.parametrize("name", ["deepseek_r1", "qwen3"])
def test_thinking_that_the_prompt_has_ended_is_over(readings: dict[str, Reading], name: str) -> None:
    reading = readings[name]
    output = [*reading.ids("Yes, so"), reading.tokenizer.eos_token_id]

    read, reasoning_tokens = reading.read(reading.request("Hi<think>\n\n</think>\n\n"), output)

    assert (read, reasoning_tokens) == ([("text", "Yes, so")], 0)


@pytest.mark.parametrize("text", ["<tool_call>garbage</tool_call>", "see <tool_c", "<tool_call>{"])
def test_what_was_held_back_for_a_call_that_is_none_is_text(readings: dict[str, Reading], text: str) -> None:
    assert readings["hermes"].said(text) == [("text", text)]


@pytest.mark.parametrize("at", [1, 4, 9, 12])
def test_a_parser_that_raises_loses_nothing(
    readings: dict[str, Reading], monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """What it had held back and all that follows is text, whatever it might have meant."""
    reading = readings["hermes"]
    request = reading.request()
    reader, calls = reading.reader(request), 0
    parse = reader._parser.parse_delta

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= at:
            raise KeyError("arguments")
        return parse(*args, **kwargs)

    monkeypatch.setattr(reader._parser, "parse_delta", failing)
    text = "Let me <see> <tool_call>\n[1, 2]\n</tool_call> and on"
    runs = Runs()
    for piece, tokens, finished in reading.pieces(request, reading.ids(text), range(99)):
        runs += reader.feed(piece, tokens, finished=finished)

    assert whole(runs) == [("text", text)]
    assert calls == at


def test_text_that_is_not_that_of_its_tokens_is_passed_on(readings: dict[str, Reading]) -> None:
    """The text is right and the tokens are, so both are kept, though they cannot be put side by side."""
    reading = readings["hermes"]
    reader = reading.reader(reading.request())

    runs = [*reader.feed("Good day", reading.ids("Hello there"), finished=False), *reader.feed("!", [], finished=True)]

    assert whole(runs) == [("text", "Good day!")]


def test_nothing_is_read_where_there_is_nothing_to_read(readings: dict[str, Reading], tokenizer: Any) -> None:
    plain = Parsers(Model(context_tokens=9000), tokenizer)
    asked = readings["deepseek_r1"].request()

    assert plain.reader(asked) is None
    assert plain.asked_of_engine(asked) == ({}, {})
    hermes = readings["hermes"]
    without = Request(**{name: getattr(asked, name) for name in asked.__struct_fields__ if name != "tools"})
    assert hermes.parsers.reader(without) is None


def test_a_model_that_calls_no_tools_refuses_them(readings: dict[str, Reading]) -> None:
    reading = readings["deepseek_r1"]
    reader = reading.parsers.reader(reading.request(tools=Tools(functions=(WEATHER,), choice="none")))

    assert reader is not None
    with pytest.raises(EngineRefused, match="calls no tools"):
        reading.parsers.reader(reading.request(tools=Tools(functions=(WEATHER,))))


@pytest.mark.parametrize("choice", ["required", "=weather"])
@pytest.mark.parametrize("name", ["hermes", "qwen3_xml+qwen3"])
def test_a_forced_call_has_a_grammar(readings: dict[str, Reading], name: str, choice: str) -> None:
    reading = readings[name]
    tools = Tools(functions=(WEATHER, CLOCK), choice=choice)

    params, _ = reading.parsers.asked_of_engine(reading.request(tools=tools))

    tag = params["structured_outputs"].structural_tag
    assert "weather" in tag and ("clock" in tag) is (choice == "required")
    assert params["skip_special_tokens"] is False


def test_a_call_that_is_free_has_no_grammar_unless_its_function_is_strict(readings: dict[str, Reading]) -> None:
    reading = readings["hermes"]
    free, _ = reading.parsers.asked_of_engine(reading.request())
    strict = Tools(functions=(WEATHER | {"strict": True},))
    bound, _ = reading.parsers.asked_of_engine(reading.request(tools=strict))

    assert free["structured_outputs"] is None
    assert '"city"' in bound["structured_outputs"].structural_tag


def test_tools_may_be_long_unless_a_grammar_is_made_of_them(readings: dict[str, Reading]) -> None:
    reading = readings["hermes"]
    long = WEATHER | {"description": "x" * GRAMMAR_CHARS}

    assert reading.parsers.asked_of_engine(reading.request(tools=Tools(functions=(long,))))
    with pytest.raises(EngineRefused, match="too long"):
        reading.parsers.asked_of_engine(reading.request(tools=Tools(functions=(long,), choice="required")))


@pytest.mark.parametrize(
    ("choice", "functions"),
    [("=clock", (WEATHER,)), ("auto", ({"name": "weather", "parameters": "none"},)), ("auto", ({"parameters": {}},))],
)
def test_malformed_tools_are_refused(
    readings: dict[str, Reading], choice: str, functions: tuple[dict[str, Any], ...]
) -> None:
    reading = readings["hermes"]
    with pytest.raises(EngineRefused):
        reading.parsers.asked_of_engine(reading.request(tools=Tools(functions=functions, choice=choice)))


@pytest.mark.parametrize(
    "grammar",
    [
        {"json": {"enum": ["x" * GRAMMAR_CHARS]}},
        {"regex": "x" * (GRAMMAR_CHARS + 1)},
        {"json": {"type": "string", "pattern": "^(x{1,500}y){1,500}$"}},
        {"json": {"patternProperties": {"^(x{500}y){500}$": {"type": "string"}}}},
        {"json": {}, "regex": "x"},
        {"jason": {}},
    ],
)
def test_a_grammar_that_is_too_long_or_none_is_refused(readings: dict[str, Reading], grammar: dict[str, Any]) -> None:
    reading = readings["qwen3"]
    request = reading.request()
    asked = Request(
        **{name: getattr(request, name) for name in request.__struct_fields__}
        | {"sampling": Sampling(max_tokens=9, grammar=grammar)}
    )

    with pytest.raises(EngineRefused):
        reading.parsers.asked_of_engine(asked)


@pytest.mark.parametrize(
    ("pattern", "atoms"),
    [
        ("", 0),
        ("[0-9]{3}-[0-9]{2}", 6),
        ("^(ab{3}){2,10}$", 42),
        (r"\d{2}\.[a\]}{9}]{4}", 7),
        ("((x{10}){10}){10}", 1000),
        ("x{1,}y{3,}", 4),
        (")x{2}(", 3),
        ("a{999999999999}", GRAMMAR_CHARS),
    ],
)
def test_the_repeats_of_a_pattern_are_counted(pattern: str, atoms: int) -> None:
    """vLLM writes them out, which takes minutes for some that are a few characters long."""
    assert written_out(pattern) == atoms


@pytest.mark.parametrize(("tool", "reasoning"), [("nobody's", ""), ("", "nobody's"), ("llama3_json", "")])
def test_a_parser_that_is_not_for_the_model_is_found_at_the_start(tokenizer: Any, tool: str, reasoning: str) -> None:
    with pytest.raises(TypeError):
        Parsers(Model(context_tokens=9000, engine=EngineKnobs(tool_parser=tool, reasoning_parser=reasoning)), tokenizer)
