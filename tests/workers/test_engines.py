"""The laws of the Engine protocol, on all three fillings: scripted, timed (real vLLM, fake step) and vllm."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
import pytest

import core.catalog
from core.catalog import Model
from core.stream.frames import Delta, Logprob, Output, Run, joined
from core.values import Caller, Request, Sampling, Tools
from workers.engine import EngineDead, EngineRefused, EngineStats, Piece
from workers.resume import Plan, Seam, plan
from workers.scripted import ScriptedEngine, script_seed, scripted_token, scripted_tokens
from workers.vllm.engine import VllmEngine

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("FOREBAY_DATA", ROOT / ".forebay"))
MODEL = core.catalog.load()["smollm2-135m-instruct"]
#: The same as one that calls tools, which a grammar sees to.
CALLING = msgspec.structs.replace(MODEL, engine=msgspec.structs.replace(MODEL.engine, tool_parser="hermes"))
#: And as one that makes vectors: its last hidden state.
EMBEDDING = msgspec.structs.replace(MODEL, kind="embedding", slots=4)

#: "What is the capital of France?" through SmolLM2's chat template.
CANARY = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182]
CANARY += [2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]

T = TypeVar("T")


def request(name: str, prompt: list[int] | None = None, cache_salt: str = "", **sampling: Any) -> Request:
    return Request(
        id=name,
        model=MODEL.name,
        caller=Caller(org_id="org", project_id="project", key_id="key"),
        gateway="gateway",
        prompt_token_ids=prompt or list(range(1000, 1020)),
        sampling=Sampling(**{"max_tokens": 8, "ignore_eos": True} | sampling),
        cache_salt=cache_salt,
    )


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    cached_tokens: int = 0
    pieces: int = 0

    def add(self, piece: Piece) -> None:
        self.tokens += piece.tokens
        self.text += piece.text
        self.finish, self.cached_tokens, self.pieces = piece.finish, piece.cached_tokens, self.pieces + 1


class Started:
    """A started engine and the one loop it lives on."""

    def __init__(self, kind: str, engine: ScriptedEngine | VllmEngine, loop: asyncio.AbstractEventLoop) -> None:
        self.kind, self.engine, self._loop = kind, engine, loop
        self.told: Callable[[], None] = lambda: None
        engine.on_step(self._tell)

    def _tell(self) -> None:
        self.told()

    def run(self, work: Coroutine[Any, Any, T], within_s: float = 60) -> T:
        return self._loop.run_until_complete(asyncio.wait_for(work, within_s))

    async def ask(self, request: Request, cut: int = 0, each: Callable[[Piece], None] = lambda _: None) -> Answer:
        answer = Answer()
        async with aclosing(self.engine.generate(request, cut)) as pieces:
            async for piece in pieces:
                answer.add(piece)
                each(piece)
        return answer

    async def open(self, request: Request) -> tuple[AsyncGenerator[Piece], Piece]:
        """A stream that has given its first piece."""
        pieces = self.engine.generate(request)
        return pieces, await anext(pieces)

    async def idle(self, within_s: float = 5) -> EngineStats:
        """Its counts once nothing runs; the last ones seen if that takes too long."""
        end_s = time.monotonic() + within_s
        while (self.engine.stats().running or self.engine.stats().waiting) and time.monotonic() < end_s:
            await asyncio.sleep(0.01)
        return self.engine.stats()


def make(kind: str, model: Model = MODEL) -> ScriptedEngine | VllmEngine:
    return ScriptedEngine(model) if kind == "scripted" else VllmEngine(model, DATA, timed=kind == "timed")


def start(kind: str, model: Model = MODEL) -> Iterator[Started]:
    loop = asyncio.new_event_loop()
    engine = make(kind, model)
    loop.run_until_complete(engine.start())
    yield Started(kind, engine, loop)
    loop.run_until_complete(engine.stop())
    loop.close()


@pytest.fixture(scope="module", params=["scripted", "timed", "vllm"])
def started(request: pytest.FixtureRequest) -> Iterator[Started]:
    yield from start(request.param, CALLING if request.param == "vllm" else MODEL)


@pytest.fixture
def scripted(started: Started) -> Started:
    """Engines whose every token is known."""
    if started.kind == "vllm":
        pytest.skip("a real model's tokens are its own")
    return started


@pytest.fixture
def real(started: Started) -> Started:
    if started.kind != "vllm":
        pytest.skip("asks for a real model")
    return started


@pytest.fixture
def processes(started: Started) -> Started:
    if started.kind == "scripted":
        pytest.skip("has no process of its own")
    return started


def test_the_canary_gets_its_answer(started: Started) -> None:
    """The model answers what the catalogue expects; without a model any answer will do."""
    prompt = started.run(started.engine.prompt_ids(MODEL.canary.prompt))
    answer = started.run(started.ask(request("canary", prompt, max_tokens=20, temperature=0, ignore_eos=False)))

    if started.kind != "scripted":
        assert prompt == CANARY
    if started.kind == "vllm":
        assert (answer.text, answer.finish) == (MODEL.canary.answer, "stop")
    assert answer.text


def test_a_request_ends_at_max_tokens(started: Started) -> None:
    answer = started.run(started.ask(request("short", max_tokens=5)))

    assert (len(answer.tokens), answer.finish) == (5, "length")


def test_a_request_ends_where_the_context_does(started: Started) -> None:
    """vLLM cuts max_tokens to what is left of the context, and so do the others."""
    prompt = list(range(100, 100 + MODEL.context_tokens - 3))

    answer = started.run(started.ask(request("brim", prompt, max_tokens=50)))

    assert (len(answer.tokens), answer.finish) == (3, "length")


def test_requests_run_together(started: Started) -> None:
    """As many as there are slots share the steps: all are under way before any has ended."""
    seen: list[int] = []

    async def together() -> list[Answer]:
        started.told = lambda: seen.append(started.engine.stats().running)
        return await asyncio.gather(*[started.ask(request(f"many{i}", max_tokens=8)) for i in range(MODEL.slots + 2)])

    answers = started.run(together())

    assert [len(answer.tokens) for answer in answers] == [8] * (MODEL.slots + 2)
    assert max(seen) == MODEL.slots
    assert started.run(started.idle()).running == 0


def test_every_piece_of_a_step_is_handed_out_before_the_callback(started: Started) -> None:
    """Once all run, each callback finds one piece of one token from every request, just handed over."""
    names = [f"step{i}" for i in range(6)]
    since: dict[str, list[int]] = {}
    steps: list[dict[str, list[int]]] = []
    delays_s: list[float] = []
    last_s = 0.0

    def got(name: str) -> Callable[[Piece], None]:
        def each(piece: Piece) -> None:
            nonlocal last_s
            last_s = time.monotonic()
            since.setdefault(name, []).append(len(piece.tokens))

        return each

    def told() -> None:
        nonlocal since
        if since:
            delays_s.append(time.monotonic() - last_s)
            steps.append(since)
        since = {}

    async def together() -> None:
        started.told = told
        await asyncio.gather(*[started.ask(request(name, max_tokens=20), each=got(name)) for name in names])

    started.run(together())
    started.run(started.idle())

    assert sum(sum(sum(pieces) for pieces in step.values()) for step in steps) == 20 * len(names)
    together_steps = [step for step in steps if len(step) == len(names)]
    assert len(together_steps) >= 12
    assert all(pieces == [1] for step in together_steps for pieces in step.values())
    # Told a step late, the callback would find the pieces older than the step's 13 ms.
    assert sorted(delays_s)[len(delays_s) // 2] < 0.005


def test_closing_a_stream_frees_the_engine(started: Started) -> None:
    async def leave() -> EngineStats:
        pieces, _ = await started.open(request("left", max_tokens=1000))
        await pieces.aclose()
        return await started.idle()

    stats = started.run(leave())

    assert (stats.running, stats.waiting) == (0, 0)


def test_cancelling_a_reader_frees_the_engine(started: Started) -> None:
    """At whatever moment it comes: also while the request is only on its way into the engine."""

    async def cancel_early_and_late() -> EngineStats:
        for delay_s in (0, 0.001, 0.05):
            task = asyncio.create_task(started.ask(request("cancelled", max_tokens=1000)))
            await asyncio.sleep(delay_s)
            task.cancel()
            await asyncio.wait([task])
        await started.ask(request("after", max_tokens=3))
        return await started.idle()

    assert started.run(cancel_early_and_late()).running == 0
    if isinstance(started.engine, VllmEngine):
        assert started.engine._engine.get_num_unfinished_requests() == 0
        assert started.engine._run_ids == {}


def test_an_aborted_request_ends_at_once_and_says_so(started: Started) -> None:
    async def abort() -> tuple[float, Answer]:
        under_way = asyncio.Event()
        reader = asyncio.create_task(started.ask(request("aborted", max_tokens=1000), each=lambda _: under_way.set()))
        await under_way.wait()
        begin_s = time.monotonic()
        await started.engine.abort("aborted")
        answer = await reader
        return time.monotonic() - begin_s, answer

    took_s, answer = started.run(abort())

    assert answer.finish == "abort" and 0 < len(answer.tokens) < 1000
    assert took_s < 1
    assert started.run(started.idle()).running == 0


def test_the_last_piece_of_an_abort_is_followed_by_the_callback(started: Started) -> None:
    """Nobody else need be running, so no step need follow; the publisher must hear of it all the same."""
    ended: list[bool] = []
    told_after_the_end = asyncio.Event()

    async def abort() -> None:
        started.told = lambda: told_after_the_end.set() if ended else None
        task = asyncio.create_task(
            started.ask(request("flushed", max_tokens=1000), each=lambda p: ended.append(True) if p.finish else None)
        )
        await asyncio.sleep(0.2)
        await started.engine.abort("flushed")
        await task
        await asyncio.wait_for(told_after_the_end.wait(), 1)

    started.run(abort())


def test_aborting_a_stranger_does_nothing(started: Started) -> None:
    async def abort() -> Answer:
        reader = asyncio.create_task(started.ask(request("bystander", max_tokens=10)))
        await started.engine.abort("stranger")
        return await reader

    assert started.run(abort()).finish == "length"


def test_a_second_attempt_of_an_id_does_not_end_with_the_first(started: Started) -> None:
    async def twice() -> Answer:
        pieces, _ = await started.open(request("again", max_tokens=1000))
        second = asyncio.create_task(started.ask(request("again", max_tokens=10)))
        await asyncio.sleep(0.05)
        await pieces.aclose()
        return await second

    assert started.run(twice()).finish == "length"


@pytest.mark.parametrize("fault", [{"prompt": list(range(100, 100 + MODEL.context_tokens))}, {"max_tokens": 0}])
def test_a_refused_request_leaves_the_others_alone(started: Started, fault: dict[str, Any]) -> None:
    async def refuse() -> Answer:
        other = asyncio.create_task(started.ask(request("well", max_tokens=10)))
        with pytest.raises(EngineRefused):
            await started.ask(request("refused", **fault))
        return await other

    assert started.run(refuse()).finish == "length"


def test_a_ping_comes_back_from_a_busy_engine(started: Started) -> None:
    async def ping() -> None:
        pieces, _ = await started.open(request("busy", max_tokens=100))
        await started.engine.ping()
        await pieces.aclose()

    started.run(ping())


@pytest.mark.parametrize("seed", [None, 7, -1])
def test_a_scripted_stream_is_known_beforehand(scripted: Started, seed: int | None) -> None:
    asked = request("known", max_tokens=100, seed=seed)

    answer = scripted.run(scripted.ask(asked))

    assert answer.tokens == scripted_tokens(script_seed(asked), 100)


def test_a_resumed_stream_goes_on_with_the_same_tokens(scripted: Started) -> None:
    """Greedy too, whose seed is its prompt: what was delivered is not part of it."""
    samplings: list[dict[str, Any]] = [{"temperature": 0}, {"seed": 3}, {}]
    for sampling in samplings:
        first = request("resumed", max_tokens=60, **sampling)
        whole = scripted_tokens(script_seed(first), 60)
        rest = request("resumed", first.prompt_token_ids + whole[:25], max_tokens=35, **sampling)

        answer = scripted.run(scripted.ask(rest, cut=25))

        assert (answer.tokens, answer.finish) == (whole[25:], "length")


def test_a_stop_string_ends_a_stream_before_it(started: Started) -> None:
    """The text is cut before the stop string; the tokens that spelled it count."""
    whole = started.run(started.ask(request("stop", CANARY, max_tokens=15, temperature=0)))
    stop = whole.text[5:8]
    at = whole.text.index(stop)

    answer = started.run(started.ask(request("stop", CANARY, max_tokens=15, temperature=0, stop=(stop,))))

    assert (answer.text, answer.finish) == (whole.text[:at], "stop")
    assert answer.tokens == whole.tokens[: len(answer.tokens)]
    assert stop not in answer.text and len(answer.tokens) < 15


def test_the_text_of_tokens_is_the_text_that_was_streamed(started: Started) -> None:
    answer = started.run(started.ask(request("said", CANARY, max_tokens=12, temperature=0)))

    assert started.engine.text_of(answer.tokens, CANARY) == answer.text


@pytest.mark.parametrize("cut", [3, 6, 9])
def test_a_resumed_stream_shows_the_same_text_and_stops_at_the_same_string(started: Started, cut: int) -> None:
    """Wherever the stop string lies: before the cut it was held back, and after it the engine sees only its end."""
    asked = request("seam", CANARY, max_tokens=15, temperature=0)
    answer = started.run(started.ask(asked))
    stop = started.engine.text_of(answer.tokens[:10], CANARY)[-6:]
    stopping = replace_stop(asked, stop)
    whole = started.run(started.ask(stopping))
    cut = min(cut, len(whole.tokens) - 1)
    hold = started.engine.text_of(answer.tokens[:cut], CANARY)[: -(len(stop) - 1)]
    before = Output("seam")
    before.add([Delta("seam", 1, 0, tuple(answer.tokens[:cut]), hold)])

    begun = plan(stopping, before, lambda ids: started.engine.text_of(ids, CANARY))
    seam = Seam(begun, stopping, lambda ids: started.engine.text_of(ids, CANARY))
    rest = started.run(resumed(started, stopping, begun, seam))

    assert (hold + rest.text, answer.tokens[:cut] + rest.tokens) == (whole.text, whole.tokens)
    assert (rest.finish, whole.finish) == ("stop", "stop")


def replace_stop(asked: Request, stop: str) -> Request:
    return msgspec.structs.replace(asked, sampling=msgspec.structs.replace(asked.sampling, stop=(stop,)))


async def resumed(started: Started, asked: Request, begun: Plan, seam: Seam) -> Answer:
    answer = Answer()
    async with aclosing(started.engine.generate(begun.request(asked), begun.cut)) as pieces:
        async for piece in pieces:
            answer.add(seam.join(piece))
            if answer.finish:
                break
    return answer


def test_a_cut_within_a_character_is_moved_back_before_it(processes: Started) -> None:
    """An engine would take half a character for the prompt's, and give text of the prompt as output."""
    assert isinstance(processes.engine, VllmEngine)
    tokenizer = processes.engine._engine.get_tokenizer()
    ids = tokenizer.encode("ab 😀漢", add_special_tokens=False)
    for n in range(1, len(ids) + 1):
        text = processes.engine.text_of(ids[:n], CANARY)
        before = Output("wide")
        before.add([Delta("wide", 1, 0, tuple(ids[:n]), text.rstrip("\ufffd"))])
        asked = request("wide", CANARY, max_tokens=20)
        begun = plan(asked, before, lambda ids: processes.engine.text_of(ids, CANARY))

        assert not processes.engine.text_of(begun.tokens, CANARY).endswith("\ufffd")
        assert n - begun.cut < 4 and (begun.cut == n or text.endswith("\ufffd"))


def test_greedy_decoding_repeats_itself(started: Started) -> None:
    first, second = (started.run(started.ask(request(name, CANARY, temperature=0, max_tokens=6))) for name in "ab")

    assert first.tokens == second.tokens


def test_a_prefix_is_cached_within_a_salt_and_not_beyond(processes: Started) -> None:
    prompt = list(range(2000, 2200))

    cached = [
        processes.run(processes.ask(request("prefix", prompt, cache_salt=salt))).cached_tokens
        for salt in ("one", "one", "two")
    ]

    assert cached[0] == cached[2] == 0
    assert 150 <= cached[1] < 200


def test_a_real_models_resume_goes_on_with_the_same_text(real: Started) -> None:
    whole = real.run(real.ask(request("long", CANARY, temperature=0, max_tokens=20, ignore_eos=False)))

    rest = real.run(
        real.ask(request("long", CANARY + whole.tokens[:4], temperature=0, max_tokens=16, ignore_eos=False), cut=4)
    )

    assert whole.tokens[:4] + rest.tokens == whole.tokens


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"capital": {"type": "string", "maxLength": 20}, "people": {"type": "integer", "maximum": 99}},
    "required": ["capital", "people"],
    "additionalProperties": False,
}


def test_an_answer_keeps_to_its_schema(real: Started) -> None:
    asked = request("json", CANARY, max_tokens=100, temperature=0, ignore_eos=False, grammar={"json": SCHEMA})

    answer = real.run(real.ask(asked))

    assert answer.finish == "stop"
    assert set(json.loads(answer.text)) == {"capital", "people"}


@pytest.mark.parametrize(
    ("grammar", "keeps"),
    [
        ({"regex": "[0-9]{3}-[0-9]{2}"}, lambda text: re.fullmatch("[0-9]{3}-[0-9]{2}", text)),
        ({"choice": ["Paris", "London"]}, lambda text: text in {"Paris", "London"}),
        ({"grammar": 'root ::= "yes" | "no"'}, lambda text: text in {"yes", "no"}),
        ({"json": {}}, lambda text: text.strip()[0] in '{["-0123456789tfn'),
        ({"json_object": True}, lambda text: text.strip()[0] == "{"),
    ],
)
def test_an_answer_keeps_to_its_grammar(real: Started, grammar: dict[str, Any], keeps: Callable[[str], object]) -> None:
    asked = request("grammar", CANARY, max_tokens=40, temperature=0, ignore_eos=False, grammar=grammar)

    assert keeps(real.run(real.ask(asked)).text)


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "grammar",
    [
        {"json": {"type": "nonsense"}},
        {"json": {"$ref": "#/nowhere"}},
        {"json": {"type": "array", "uniqueItems": True}},
        {"json": deep(100)},
        {"json": {"enum": ["x" * 100_000]}},
        {"regex": "(["},
        {"regex": "x" * 100_000},
        {"choice": []},
        {"grammar": "no grammar at all"},
        {"grammar": ""},
        {"grammar": 7},
        {"json_object": False},
    ],
)
def test_a_grammar_that_is_none_is_refused_and_the_engine_lives(real: Started, grammar: dict[str, Any]) -> None:
    async def refuse() -> Answer:
        other = asyncio.create_task(real.ask(request("well", max_tokens=10)))
        with pytest.raises(EngineRefused):
            await real.ask(request("refused", grammar=grammar))
        return await other

    assert real.run(refuse()).finish == "length"
    assert real.run(real.ask(request("after", grammar={"choice": ["yes"]}, ignore_eos=False))).text == "yes"


@pytest.mark.parametrize("choice", ["required", "=weather"])
def test_a_forced_call_is_one(real: Started, choice: str) -> None:
    """Whatever the model would have said: a grammar sees to it."""
    function = {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Bonn"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    }
    asked = msgspec.structs.replace(
        request("call", CANARY, max_tokens=100, temperature=0, ignore_eos=False),
        tools=Tools(functions=(function,), choice=choice, parallel=False),
    )
    reader = real.engine.reader(asked)
    assert reader is not None
    runs: list[Run] = []

    def read(piece: Piece) -> None:
        fed = reader.feed(piece.text, piece.tokens, finished=piece.finish is not None)
        runs.extend(Run(kind, text) for kind, text in fed)

    answer = real.run(real.ask(asked, each=read))

    [call, arguments] = joined(runs)
    assert (answer.finish, call) == ("stop", Run("call:0", "weather"))
    assert arguments.kind == "arguments:0" and json.loads(arguments.text)["city"] in {"Paris", "Bonn"}


def test_what_cannot_be_done_is_refused(processes: Started) -> None:
    """A script is no sentence of any grammar; and a model that answers makes no vectors."""
    asked = request("refused")
    if processes.kind == "timed":
        with pytest.raises(EngineRefused):
            processes.run(processes.ask(request("refused", grammar={"json": SCHEMA})))
    with pytest.raises(EngineRefused):
        processes.run(processes.engine.embed(asked, CANARY))


@pytest.mark.parametrize("alternatives", [0, 3])
def test_each_token_comes_with_its_logarithm(real: Started, alternatives: int) -> None:
    told: list[Logprob] = []
    asked = request("likely", CANARY, max_tokens=8, temperature=0, ignore_eos=False, logprobs=alternatives)

    answer = real.run(real.ask(asked, each=lambda piece: told.extend(piece.logprobs)))

    assert len(told) == len(answer.tokens)
    assert "".join(one.token for one in told).startswith(answer.text)
    for one in told:
        assert -9999 <= one.logprob <= 0 and len(one.top) == alternatives
        assert [value for _, value in one.top] == sorted((value for _, value in one.top), reverse=True)
    if alternatives:
        assert all(one.top[0] == (one.token, one.logprob) for one in told), "greedy takes the likeliest"


def test_no_logarithm_is_infinite(real: Started) -> None:
    """What a grammar forbids has minus infinity, which JSON cannot say."""
    told: list[Logprob] = []
    asked = request("sure", CANARY, max_tokens=6, ignore_eos=False, logprobs=20, grammar={"choice": ["Paris"]})

    real.run(real.ask(asked, each=lambda piece: told.extend(piece.logprobs)))

    values = [value for one in told for value in (one.logprob, *[value for _, value in one.top])]
    assert values and all(-9999 <= value <= 0 for value in values)


def test_logarithms_are_told_only_if_asked_for(real: Started) -> None:
    told: list[Logprob] = []

    real.run(real.ask(request("silent", CANARY), each=lambda piece: told.extend(piece.logprobs)))

    assert told == []


def test_a_bias_decides_and_an_unknown_token_is_refused(real: Started) -> None:
    biased = real.run(real.ask(request("biased", CANARY, max_tokens=4, temperature=0, logit_bias={1234: 500.0})))

    assert biased.tokens == [1234] * 4
    with pytest.raises(EngineRefused):
        real.run(real.ask(request("biased", CANARY, logit_bias={10**6: 1.0})))


def test_an_answer_is_no_shorter_than_asked_and_ends_at_a_stop_token(real: Started) -> None:
    sampling: dict[str, Any] = {"max_tokens": 30, "temperature": 0, "ignore_eos": False}
    plain = real.run(real.ask(request("plain", CANARY, **sampling)))
    longer = real.run(real.ask(request("longer", CANARY, min_tokens=20, **sampling)))
    shorter = real.run(real.ask(request("shorter", CANARY, stop_token_ids=(plain.tokens[3],), **sampling)))

    assert len(plain.tokens) < 20 <= len(longer.tokens)
    assert (shorter.tokens, shorter.finish) == (plain.tokens[:4], "stop")


def test_the_stop_string_that_ended_it_is_told(processes: Started) -> None:
    whole = processes.run(processes.ask(request("stop", CANARY, max_tokens=15, temperature=0)))
    stop, told = whole.text[5:8], list[str]()
    asked = request("stop", CANARY, max_tokens=15, temperature=0, stop=("never there", stop))

    processes.run(processes.ask(asked, each=lambda piece: told.append(piece.stop)))

    assert told[-1] == stop and not any(told[:-1])


@pytest.fixture(scope="module")
def embedding() -> Iterator[Started]:
    yield from start("vllm", EMBEDDING)


def vector(engine: Started, prompt: list[int], name: str = "embed") -> tuple[float, ...]:
    asked = msgspec.structs.replace(request(name, prompt), task="embed")
    return engine.run(engine.engine.embed(asked, prompt))


def likeness(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


def test_a_text_has_a_vector_of_its_own(embedding: Started) -> None:
    """Of length one, the same again but for what a cached prefix rounds otherwise, and another for another text."""
    first, again, other = vector(embedding, CANARY), vector(embedding, CANARY), vector(embedding, CANARY[5:])

    assert len(first) == 576 and sum(x * x for x in first) == pytest.approx(1, abs=1e-3)
    assert likeness(first, again) > 0.999 > likeness(first, other)


def test_many_texts_are_embedded_together(embedding: Started) -> None:
    async def together() -> list[tuple[float, ...]]:
        asked = [msgspec.structs.replace(request(f"many{n}", CANARY[n:]), task="embed") for n in range(12)]
        return await asyncio.gather(*[embedding.engine.embed(one, one.prompt_token_ids) for one in asked])

    vectors = embedding.run(together())

    assert likeness(vectors[3], vector(embedding, CANARY[3:])) > 0.999
    assert embedding.run(embedding.idle()).running == 0


@pytest.mark.parametrize("delay_s", [0, 0.001, 0.05])
def test_cancelling_an_embedding_frees_the_engine(embedding: Started, delay_s: float) -> None:
    async def cancel() -> EngineStats:
        long = list(range(1000, 1000 + MODEL.context_tokens - 1))
        asked = msgspec.structs.replace(request("cancelled", long), task="embed")
        task = asyncio.create_task(embedding.engine.embed(asked, long))
        await asyncio.sleep(delay_s)
        task.cancel()
        await asyncio.wait([task])
        return await embedding.idle(within_s=20)

    assert embedding.run(cancel()).running == 0
    assert isinstance(embedding.engine, VllmEngine)
    assert embedding.engine._engine.get_num_unfinished_requests() == 0
    assert embedding.engine._run_ids == {}


def test_an_aborted_embedding_says_so(embedding: Started) -> None:
    async def abort() -> None:
        long = list(range(1000, 1000 + MODEL.context_tokens - 1))
        task = asyncio.create_task(
            embedding.engine.embed(msgspec.structs.replace(request("aborted", long), task="embed"), long)
        )
        await asyncio.sleep(0.02)
        await embedding.engine.abort("aborted")
        with pytest.raises(EngineRefused):
            await task

    embedding.run(abort())


def test_an_embedding_engine_answers_nothing_and_takes_no_more_than_its_context(embedding: Started) -> None:
    with pytest.raises(EngineRefused):
        embedding.run(embedding.ask(request("answer")))
    with pytest.raises(EngineRefused):
        vector(embedding, list(range(100, 101 + MODEL.context_tokens)))
    with pytest.raises(EngineRefused):
        vector(embedding, [])
    assert vector(embedding, CANARY)


def test_a_ping_finds_a_frozen_engine(processes: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped engine process holds its sockets open and looks healthy to vLLM; only its silence tells."""
    monkeypatch.setattr(processes.engine, "_ping_s", 0.5)
    process = engine_process()

    process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(EngineDead):
            processes.run(processes.engine.ping())
    finally:
        process.send_signal(signal.SIGCONT)


def test_a_dead_engine_is_noticed_at_once_and_leaves_no_process(processes: Started) -> None:
    """The last test of an engine: it kills it. Its own workers go with it."""

    async def kill() -> float:
        reader, _ = await processes.open(request("doomed", max_tokens=1000))
        begin_s = time.monotonic()
        engine_process().send_signal(signal.SIGKILL)
        with pytest.raises(EngineDead):
            async for _ in reader:
                pass
        return time.monotonic() - begin_s

    family = engine_process().children(recursive=True)
    took_s = processes.run(kill())
    with pytest.raises(EngineDead):
        processes.run(processes.engine.ping())
    with pytest.raises(EngineDead):
        processes.run(processes.ask(request("late")))

    assert took_s < 2
    assert survivors(family, within_s=5) == []


def engine_process() -> psutil.Process:
    [process] = [child for child in psutil.Process().children() if "EngineCore" in title(child)]
    return process


def title(process: psutil.Process) -> str:
    return " ".join(process.cmdline()) or process.name()


def survivors(family: list[psutil.Process], within_s: float) -> list[psutil.Process]:
    """Who of them still runs after a while; a zombie runs no more."""
    end_s = time.monotonic() + within_s
    while (left := [process for process in family if runs(process)]) and time.monotonic() < end_s:
        time.sleep(0.1)
    return left


def runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


ORPHANING = """
import asyncio, sys
from pathlib import Path
import core.catalog
from workers.vllm.engine import VllmEngine

async def main():
    engine = VllmEngine(core.catalog.load()[sys.argv[1]], Path(sys.argv[2]), timed=True)
    await engine.start()
    print("started", flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize(("when", "gone_s"), [("while it starts", 20), ("started", 5)])
def test_a_killed_worker_leaves_no_engine_behind(tmp_path: Path, when: str, gone_s: float) -> None:
    """Nothing of ours runs on when the worker process is killed: the engine process watches its parent.

    One that is still importing can look only when it has done so, and must not wait for its parent's greeting then.
    """
    script = tmp_path / "orphaning.py"
    script.write_text(ORPHANING)
    command = [sys.executable, str(script), MODEL.name, str(DATA)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": str(ROOT)}) as worker:
        if when == "started":
            assert worker.stdout is not None
            assert b"started\n" in worker.stdout, "the engine did not start"
        while not (
            family := [process for process in family_of(worker.pid) if "resource_tracker" not in title(process)]
        ):
            time.sleep(0.1)
        worker.kill()

    assert survivors(family, within_s=gone_s) == []


def family_of(pid: int) -> list[psutil.Process]:
    return list(psutil.Process(pid).children(recursive=True))


@pytest.mark.parametrize("slow", [False, True])
def test_a_slow_reader_gets_its_steps_merged_and_loses_none(slow: bool) -> None:
    """A reader that is busy for many steps finds what it missed in one piece; the engine's memory stays bounded."""
    model = core.catalog.Model(context_tokens=1000, step=core.catalog.StepProfile(base_ms=1, sequence_ms=0))
    asked = request("slow", max_tokens=200, seed=1)

    async def read() -> Answer:
        engine, answer = ScriptedEngine(model), Answer()
        await engine.start()
        async with aclosing(engine.generate(asked)) as pieces:
            async for piece in pieces:
                answer.add(piece)
                if slow:
                    await asyncio.sleep(0.05)
        await engine.stop()
        return answer

    answer = asyncio.run(read())

    assert answer.tokens == scripted_tokens(1, 200) and answer.text == bytes(answer.tokens).decode()
    assert answer.pieces < 50 if slow else answer.pieces > 150


def test_a_scripted_engine_without_a_step_time_leaves_the_loop_to_others() -> None:
    model = core.catalog.Model(
        context_tokens=10_000, step=core.catalog.StepProfile(base_ms=0, sequence_ms=0, prefill_ms=0)
    )

    async def turns_of_another() -> int:
        engine, turns = ScriptedEngine(model), 0
        await engine.start()

        async def read() -> None:
            async with aclosing(engine.generate(request("fast", max_tokens=1000))) as pieces:
                async for _ in pieces:
                    pass

        reader = asyncio.create_task(read())
        while not reader.done():
            turns += 1
            await asyncio.sleep(0)
        await engine.stop()
        return turns

    assert asyncio.run(turns_of_another()) > 500


def test_a_stopped_engine_ends_its_streams_and_takes_no_more() -> None:
    async def stop() -> str | None:
        engine = ScriptedEngine(MODEL)
        await engine.start()
        pieces = engine.generate(request("running", max_tokens=1000))
        last = await anext(pieces)
        await engine.stop()
        async for piece in pieces:
            last = piece
        with pytest.raises(EngineDead):
            await anext(engine.generate(request("late")))
        with pytest.raises(EngineDead):
            await engine.ping()
        return last.finish

    assert asyncio.run(stop()) == "abort"


def test_scripted_tokens_are_letters_that_depend_on_seed_and_place_alone() -> None:
    tokens = scripted_tokens(5, 300)

    assert set(bytes(tokens)) <= set(b"abcdefghijklmn ")
    assert scripted_tokens(5, 100, start=200) == tokens[200:]
    assert [scripted_token(5, k) for k in (299, 0, 64)] == [tokens[299], tokens[0], tokens[64]]
    assert scripted_tokens(6, 300) != tokens
