"""What a model's output means: vLLM's own reasoning and tool parsers, behind the Reader protocol.

How a request is put to them, and what they then ask of the engine (a grammar for calls, special tokens kept in the
text), is what vLLM's own server does: its renderer's `adjust_request`, its chat serving's `parse_delta`.

Two things are ours. A parser is fed one token at a time with that token's own text, however the output came, so that
what it gives is a function of the output alone: several of vLLM's parsers read a long piece otherwise than the same
tokens one by one, and a resumed stream feeds what was delivered again, in other pieces. And nothing is lost:
- a parser that raises is asked no more, and all it has not given yet, and all that comes, is text;
- an answer that ends without a call though something was held back for one is read once more by vLLM's reading of
  whole answers, and what that finds beyond what was given is given.

vLLM is imported when a Parsers is made, never with this module.
"""

from __future__ import annotations

import logging
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from core.catalog import Model
from core.telemetry import logs
from core.values import Request
from workers.engine import EngineRefused

log = logs.get(__name__)

#: Prompt tokens that output is decoded with: the first word's space depends on what it follows.
TAIL_TOKENS = 8

#: Grammar kinds, by vLLM's names.
_GRAMMARS = frozenset({"json", "json_object", "regex", "choice", "grammar"})

#: Longest grammar, and longest tools that one is made of, characters. Making one takes time that grows with it, on the
#: loop and in the engine, and is not interrupted. vLLM bounds the nesting.
GRAMMAR_CHARS = 65_536

#: What an atom of a pattern counts for among them, once the repeats are written out: it takes that much longer.
WRITTEN_OUT_CHARS = 8

#: What a regular expression is made of: counted repeats, escapes, sets of characters, and the rest one by one.
_ATOM = re.compile(r"\{(?P<least>\d+)(?:,(?P<most>\d*))?\}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)

#: By how much an output has grown when its reasoning tokens are counted again.
_GROWN = 17 / 16

#: What chat templates call the switch for thinking; each parser looks at the one of its model.
_NO_THINKING = {"enable_thinking": False, "thinking": False}


class Parsers:
    """A model's parsers, of which each request has its own pair.

    Raises:
      TypeError: vLLM has no parser of that name, or it cannot read this tokenizer.
    """

    def __init__(self, model: Model, tokenizer: Any, model_config: Any = None) -> None:
        from vllm.parser.parser_manager import ParserManager

        for name in ("vllm.parser", "vllm.reasoning", "vllm.tool_parsers"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # they would quote what they cannot read
        self._model, self._tokenizer, self._config = model, tokenizer, model_config
        self._class = ParserManager.get_parser(
            tool_parser_name=model.engine.tool_parser or None,
            reasoning_parser_name=model.engine.reasoning_parser or None,
            enable_auto_tools=bool(model.engine.tool_parser),
            model_name=str(model.weights),
            is_harmony=getattr(getattr(model_config, "hf_config", None), "model_type", "") == "gpt_oss",
            tokenizer=tokenizer,
        )

    def reader(self, request: Request) -> OutputReader | None:
        """What reads the output; None: it is all text.

        Raises:
          EngineRefused: it asks for calls of a model that makes none, or its tools are malformed.
        """
        if not self._reads(request):
            return None
        asked, parser = self._adjusted(request)
        return OutputReader(request, asked, parser, lambda: self._parser(request, asked), self._tokenizer)

    def asked_of_engine(self, request: Request) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the request's tools and grammar ask of the engine: for SamplingParams, and for `generate`.

        Raises:
          EngineRefused: they are malformed, too long, or more than the model can do.
        """
        if not (request.tools or request.sampling.grammar or self._reads(request)):
            return {}, {}
        asked, parser = self._adjusted(request)
        params = {
            "structured_outputs": asked.extract_structured_outputs(),
            "skip_special_tokens": asked.skip_special_tokens,
            "spaces_between_special_tokens": asked.spaces_between_special_tokens,
        }
        stop_token_ids = {*request.sampling.stop_token_ids, *(asked.stop_token_ids or ())}
        return params | {"stop_token_ids": sorted(stop_token_ids)}, self._thinking(request, asked, parser)

    def _reads(self, request: Request) -> bool:
        if request.tools and request.tools.choice != "none" and not self._model.calls:
            raise EngineRefused("this model calls no tools")
        calls = bool(request.tools) and self._model.calls
        return self._class is not None and (calls or (request.reasons and bool(self._model.engine.reasoning_parser)))

    def _thinking(self, request: Request, asked: Any, parser: Any) -> dict[str, Any]:
        """A grammar begins where thinking ends; the engine is told whether that is at once."""
        if not self._model.engine.reasoning_parser:
            return {}
        if not request.reasons or parser is None:
            return {"reasoning_ended": True}
        return {
            "reasoning_ended": asked.resolve_reasoning_ended(parser, list(request.prompt_token_ids)),
            "reasoning_parser_kwargs": {"chat_template_kwargs": _template(request)},
        }

    def _adjusted(self, request: Request) -> tuple[Any, Any]:
        """The request in vLLM's words, as its server would put it to the engine, and its parser."""
        with _faults():
            asked = _in_vllms_words(request)
            if not self._reads(request):
                return asked, None
            parser = self._parser(request, asked)
            if self._class.always_adjust_request or self._class.reasoning_parser_cls or asked.tool_choice != "none":
                asked = parser.adjust_request(asked)
            if request.tools and asked.structured_outputs is not None:
                _bound({"tools": request.tools.functions})
            return asked, parser

    def _parser(self, request: Request, asked: Any) -> Any:
        return self._class(
            self._tokenizer, asked.tools, chat_template_kwargs=_template(request), model_config=self._config
        )


def _template(request: Request) -> dict[str, Any]:
    return {} if request.reasons else dict(_NO_THINKING)


def _in_vllms_words(request: Request) -> Any:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.sampling_params import StructuredOutputsParams

    body: dict[str, Any] = {"messages": [{"role": "user", "content": ""}], "stream": True}
    if request.sampling.grammar:
        body["structured_outputs"] = StructuredOutputsParams(**_bounded(request.sampling.grammar))
    if tools := request.tools:
        body["tools"] = [{"type": "function", "function": function} for function in tools.functions]
        body["tool_choice"] = {"type": "function", "function": {"name": tools.named}} if tools.named else tools.choice
        body["parallel_tool_calls"] = tools.parallel
        if tools.named:  # it is a call's arguments that the grammar would say, and vLLM refuses both together
            body.pop("structured_outputs", None)
    return ChatCompletionRequest(**body)


def _bounded(grammar: dict[str, Any]) -> dict[str, Any]:
    if len(grammar) != 1 or not grammar.keys() <= _GRAMMARS:
        raise EngineRefused(f"a grammar is one of {', '.join(sorted(_GRAMMARS))}")
    _bound(grammar)
    # An empty schema allows any JSON; vLLM takes an empty one for none at all.
    return {"json": "{}"} if grammar.get("json") in ({}, True) else grammar


def _bound(grammar: dict[str, Any]) -> None:
    [(name, spec)] = grammar.items()
    if _size([spec], [spec] if name == "regex" else []) > GRAMMAR_CHARS:
        raise EngineRefused(f"the {name} of this request is too long: {GRAMMAR_CHARS} characters of it at most")


def _size(rest: list[Any], patterns: list[Any]) -> int:
    """About as long as its JSON, with the repeats of patterns written out, as vLLM does; without recursion, which a
    deep one could exhaust."""
    size = 0
    while rest:
        part = rest.pop()
        if isinstance(part, dict):
            rest += [*part.keys(), *part.values()]
            patterns += [part.get("pattern"), *(part.get("patternProperties") or ())]
        elif isinstance(part, list | tuple):
            rest += part
        size += len(part) + 2 if isinstance(part, str) else 2
    return size + WRITTEN_OUT_CHARS * sum(written_out(pattern) for pattern in patterns if isinstance(pattern, str))


def written_out(pattern: str) -> int:
    """About how many atoms a regular expression has when its counted repeats are written out."""
    sizes, last = [0], 0  #: of the open groups, the innermost last; of what a repeat would be of
    for atom in _ATOM.finditer(pattern):
        most = atom["most"] or atom["least"]
        if most:
            sizes[-1] += last * (min(int(most[:9]), GRAMMAR_CHARS) - 1)
            last *= min(int(most[:9]), GRAMMAR_CHARS)
        elif atom[0] == "(":
            sizes.append(0)
        elif atom[0] == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        else:
            last = 1
            sizes[-1] += 1
    return sum(sizes)


@contextmanager
def _faults() -> Iterator[None]:
    """Whatever vLLM finds wrong with a request, as our refusal."""
    from pydantic import ValidationError
    from vllm.exceptions import VLLMClientError

    try:
        yield
    except ValidationError as e:
        fault = e.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, fault["loc"]))
        raise EngineRefused(f"{where}: {fault['msg']}" if where else str(fault["msg"])) from None
    except VLLMClientError as e:
        # The first argument only: the rest may quote the request.
        raise EngineRefused(str(e.args[0]) if e.args else str(e)) from None
    except (TypeError, ValueError, RecursionError) as e:
        raise EngineRefused(f"vLLM cannot make sense of the tools or the grammar ({type(e).__name__})") from e


class SingleTokens:
    """Output in any pieces -> its tokens one by one, each with the text that is its own.

    Text may lag its tokens (half a character, a stop string that may have begun) and end before them (a stop string, an
    end token). A special token's text may be missing: a resumed stream's is decoded without such.
    """

    def __init__(self, text_of: Callable[[int], str], special: frozenset[int], stops: bool) -> None:
        self._text_of, self._special, self._stops = text_of, special, stops
        self._waiting: deque[tuple[int, str]] = deque()
        self._text = ""
        self._astray = False  #: the text is not that of the tokens

    def feed(self, text: str, tokens: Sequence[int], *, finished: bool) -> Iterator[tuple[str, list[int]]]:
        self._text += text
        self._waiting.extend((token, self._text_of(token)) for token in tokens)
        while self._waiting and not self._astray and (ready := self._next()) is not None:
            yield ready
        if self._astray:
            yield self._everything()
        elif finished:
            yield from self._rest()

    def _next(self) -> tuple[str, list[int]] | None:
        """The next token, if its text is there."""
        token, own = self._waiting[0]
        if self._text.startswith(own):
            self._text = self._text[len(own) :]
        elif own.startswith(self._text):
            return None
        elif token not in self._special:
            self._astray = True
            return None
        self._waiting.popleft()
        return own, [token]

    def _rest(self) -> Iterator[tuple[str, list[int]]]:
        """No more text comes: of what the last tokens say, it has what it has."""
        while self._waiting:
            token, own = self._waiting.popleft()
            # An end token has no text, nor has what a stop string took; one in the midst was left out by decoding.
            if token not in self._special or not self._waiting or self._stops:
                own, self._text = self._text[: len(own)], self._text[len(own) :]
            yield own, [token]
        if self._text:
            yield self._everything()

    def _everything(self) -> tuple[str, list[int]]:
        text, tokens = self._text, [token for token, _ in self._waiting]
        self._text = ""
        self._waiting.clear()
        return text, tokens


class OutputReader:
    """Reads one request's output, by its model's parsers."""

    def __init__(self, request: Request, asked: Any, parser: Any, another: Callable[[], Any], tokenizer: Any) -> None:
        self._id, self._asked, self._parser, self._another = request.id, asked, parser, another
        self._prompt = list(request.prompt_token_ids)
        self._single = SingleTokens(
            _detokenizer(tokenizer, self._prompt, asked), _special(tokenizer), bool(request.sampling.stop)
        )
        self._tokens: list[int] = []
        self._whole = ""  #: all text
        self._unsaid = ""  #: text at its end that the parser was told and has said nothing of
        self._content = ""  #: said
        self._called: set[int] = set()
        self._broken = False
        self._counted = self._reasoning_tokens = 0
        self._thinks = parser.reasoning_parser is not None and not parser.is_reasoning_end(self._prompt)
        parser.set_prompt_token_ids(self._prompt)

    @property
    def reasoning_tokens(self) -> int:
        """Of those fed when last counted: at the end, and each time that the output has grown by a good part. Counting
        goes through all of it, and a long output would be gone through for each of its tokens."""
        return self._reasoning_tokens

    def _count(self) -> int:
        self._counted = len(self._tokens)
        count = self._parser.count_reasoning_tokens
        if getattr(self._parser.reasoning_parser, "engine_based_streaming", False):
            return int(count(self._tokens))
        # The others count from where thinking begins, which the end of the prompt may have done.
        before = self._prompt[-TAIL_TOKENS:]
        return int(count([*before, *self._tokens])) - int(count(before))

    def feed(self, text: str, tokens: Sequence[int], *, finished: bool) -> list[tuple[str, str]]:
        runs: list[tuple[str, str]] = []
        self._tokens += tokens
        for part, single in self._single.feed(text, tokens, finished=finished):
            runs += self._part(part, single)
        if finished:
            runs += self._end()
        if self._thinks and (finished or len(self._tokens) >= self._counted * _GROWN):
            self._reasoning_tokens = self._count()
        return runs

    def _part(self, text: str, tokens: list[int], finished: bool = False) -> list[tuple[str, str]]:
        if self._broken:
            return [("text", text)] if text else []
        self._whole += text
        self._unsaid += text
        try:
            said = self._parser.parse_delta(text, tokens, self._asked, self._prompt, finished=finished)
            return self._runs(said)
        except Exception as e:  # noqa: BLE001  vLLM's parsers are many, and what a model writes is anything
            self._failed(e)
            self._broken = True
            return [("text", self._unsaid)] if self._unsaid else []

    def _runs(self, said: Any) -> list[tuple[str, str]]:
        if said is None:
            return []
        runs = [("reasoning", said.reasoning or ""), ("text", said.content or "")]
        for call in said.tool_calls or ():
            runs += self._call(call.index, call.function)
        runs = [(kind, text) for kind, text in runs if text]
        if runs:
            # Plain text is known to the letter; what is behind anything else is markup, and dealt with.
            plain = len(runs) == 1 and ":" not in runs[0][0] and self._unsaid.startswith(runs[0][1])
            self._unsaid = self._unsaid[len(runs[0][1]) :] if plain else ""
        self._content += said.content or ""
        return runs

    def _call(self, number: int, function: Any) -> list[tuple[str, str]]:
        if function is None or (number > 0 and self._asked.parallel_tool_calls is False):
            return []
        name = (function.name or "") if number not in self._called else ""
        if name:
            self._called.add(number)
        return [(f"call:{number}", name), (f"arguments:{number}", function.arguments or "")]

    def _end(self) -> list[tuple[str, str]]:
        # A step of its own, after the last token: whether the end comes with a token depends on the pieces.
        runs = self._part("", [], finished=True)
        if self._broken:
            return runs
        if self._called and not any(kind.startswith("arguments") for kind, _ in runs):
            runs += self._last_arguments()
        if not self._called and self._unsaid.strip():
            runs += self._read_again()
        return runs

    def _last_arguments(self) -> list[tuple[str, str]]:
        """What vLLM adds when a call is part of the last step."""
        tool_parser = self._parser.tool_parser
        rest = tool_parser.get_remaining_unstreamed_args() if tool_parser is not None else ""
        number = max(self._called)
        return [(f"arguments:{number}", rest)] if rest else []

    def _failed(self, error: Exception) -> None:
        """No more than its name: what it says may quote the answer."""
        log.warning("parser_failed", request=self._id, error=type(error).__name__)

    def _read_again(self) -> list[tuple[str, str]]:
        try:
            parser = self._another()
            parser.set_prompt_token_ids(self._prompt)
            _, content, calls = parser.parse(
                self._whole, self._asked, enable_auto_tools=True, model_output_token_ids=self._tokens
            )
        except Exception as e:  # noqa: BLE001
            self._failed(e)
            return [("text", self._unsaid)]
        runs = []
        if content and content.startswith(self._content):
            runs = [("text", content[len(self._content) :])]
        for number, call in enumerate(calls or ()):
            runs += self._call(number, call)
        return [(kind, text) for kind, text in runs if text]


def _detokenizer(tokenizer: Any, prompt: list[int], asked: Any) -> Callable[[int], str]:
    """The engine's own way from tokens to text, for one output."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.detokenizer import IncrementalDetokenizer

    params = SamplingParams(
        skip_special_tokens=asked.skip_special_tokens,
        spaces_between_special_tokens=asked.spaces_between_special_tokens,
    )
    output: Any = SimpleNamespace(
        request_id="", prompt_token_ids=prompt[-TAIL_TOKENS:], prompt_embeds=None, sampling_params=params
    )
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, output)

    def text_of(token: int) -> str:
        detokenizer.update([token], False)
        return str(detokenizer.get_next_output_text(finished=False, delta=True))

    return text_of


def _special(tokenizer: Any) -> frozenset[int]:
    """The tokens that decoding may leave out."""
    fast = getattr(tokenizer, "_tokenizer", None)
    if fast is None:
        return frozenset(map(int, tokenizer.all_special_ids))
    return frozenset(token for token, added in fast.get_added_tokens_decoder().items() if added.special)
