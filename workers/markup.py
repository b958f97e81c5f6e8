"""How the scripted engine says that it thinks, or calls a function: control characters in its own output. Pure.

    \\x01 REASONING \\x02            what it thinks, before everything else
    \\x03 NAME \\x04 ARGUMENTS \\x05  a call

No model writes so. What is called is a function of the request alone: a function that must be; else those that the last
user's turn speaks of, unless the conversation ends with a function's result.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from core.values import Tools
from workers.samples import sample

THINK, ANSWER, CALL, ARGUMENTS, DONE = (chr(n) for n in range(1, 6))

#: Shortest part of a function's name that names it in a user's turn.
WORD_CHARS = 4

_TURN = re.compile(r"^(tools|system|developer|user|assistant|tool|function|reasoning): ", re.MULTILINE)
_MARK = re.compile(f"([{THINK}-{DONE}])")
_KINDS = {THINK: "reasoning", ANSWER: "text", CALL: "call", ARGUMENTS: "arguments", DONE: "text"}


class MarkReader:
    """The Reader of workers/engine.py for this markup."""

    def __init__(self) -> None:
        self.reasoning_tokens = 0
        self._kind, self._call, self._name = "text", -1, ""
        self._thinks = False

    def feed(self, text: str, tokens: Sequence[int], *, finished: bool) -> list[tuple[str, str]]:
        for token in tokens:
            self._thinks = self._thinks or token == ord(THINK)
            self.reasoning_tokens += self._thinks
            self._thinks = self._thinks and token != ord(ANSWER)
        runs: list[tuple[str, str]] = []
        for part in filter(None, _MARK.split(text)):
            if part in _KINDS:
                runs += self._turn(part)
            elif self._kind == "call":
                self._name += part
            else:
                runs.append((f"arguments:{self._call}" if self._kind == "arguments" else self._kind, part))
        return runs

    def _turn(self, mark: str) -> list[tuple[str, str]]:
        self._kind = _KINDS[mark]
        if mark == CALL:
            self._call, self._name = self._call + 1, ""
        return [(f"call:{self._call}", self._name)] if mark == ARGUMENTS else []


def calls(tools: Tools | None, prompt: str) -> str:
    """The calls that answer this prompt, marked; empty: none does."""
    if tools is None or tools.choice == "none":
        return ""
    chosen = _chosen(tools, prompt)
    return "".join(f"{CALL}{one['name']}{ARGUMENTS}{_arguments(one)}{DONE}" for one in chosen)


def bound(grammar: dict[str, Any]) -> str | None:
    """The least that a grammar allows. None: this is no grammar that we can satisfy."""
    if "json" in grammar:
        schema = grammar["json"]
        return json.dumps(sample(json.loads(schema) if isinstance(schema, str) else schema), ensure_ascii=False)
    if grammar.get("json_object"):
        return json.dumps({"answer": "abc"})
    return str(grammar["choice"][0]) if grammar.get("choice") else None


def _arguments(function: dict[str, Any]) -> str:
    return json.dumps(sample({"type": "object", **(function.get("parameters") or {})}), ensure_ascii=False)


def _chosen(tools: Tools, prompt: str) -> Sequence[dict[str, Any]]:
    functions = tools.functions
    if tools.named:
        return [one for one in functions if one["name"] == tools.named][:1]
    turns = _turns(prompt)
    asked = next((said for role, said in reversed(turns) if role == "user"), "").lower()
    spoken_of = [one for one in functions if any(word in asked for word in _words(one["name"].lower()))]
    if tools.choice == "required":
        by_name = [one for one in functions if one["name"].lower() in asked]
        spoken_of = by_name or spoken_of or list(functions[:1])
    elif turns and turns[-1][0] in ("tool", "function"):
        return []
    return spoken_of if tools.parallel else spoken_of[:1]


def _words(name: str) -> list[str]:
    return [name, *(word for word in name.split("_") if len(word) >= WORD_CHARS)]


def _turns(prompt: str) -> list[tuple[str, str]]:
    """(role, what was said) of a conversation written as a play, without the answer's own beginning."""
    _, *parts = _TURN.split(prompt)
    turns = list(zip(parts[::2], parts[1::2], strict=True))
    return turns[:-1] if turns and turns[-1] == ("assistant", "") else turns
