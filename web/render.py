"""Chat template and token ids, without torch or transformers; equal to vLLM's own, but for one thing.

What a caller writes is text. A special token spelled in a message ("<|im_end|>") would end the turn and begin one
in another's name, so it reaches the model as the characters it is made of. Cutting the prompt at the messages and
encoding the pieces apart would not do: tokens run across those seams, and a template may trim or split a message.
So the prompt stays one string, and the two kinds of special token are told apart in it:

1. In the messages, each spelled special token is replaced by a seal, a string that the caller cannot have guessed.
   A part of one at either end of a message is kept apart by an empty seal, lest a neighbour complete it.
2. The template renders. Every special token now in the text is the template's own: it becomes an alias, a token
   that we added to the tokenizer under a name that nobody knows, with the rules of the original.
3. Seals become what they stood for, and the whole is encoded, with special tokens as text and aliases as tokens.
4. Aliases become the ids they stand for.

For messages without special tokens nothing is sealed, and the ids are those of the ordinary way.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, Protocol

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from tokenizers import AddedToken, Tokenizer

from core.catalog import Model
from core.errors import BadRequest
from web.dialects.draft import Message


class BadTokenizer(Exception):
    """A model's tokenizer files are missing or not usable."""


class Renderer(Protocol):
    """From a conversation to the token ids that the engine gets. Seconds of CPU for long ones: run it off the hub."""

    def render(self, messages: Sequence[Message]) -> list[int]:
        """The prompt, up to where the assistant begins. Raises BadRequest when the template refuses it."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens, special ones left out."""


def for_model(model: Model, data: Path) -> Renderer:
    """The renderer of a catalogue entry.

    Raises:
      BadTokenizer: its files are missing.
    """
    folder = model.tokenizer_folder(data)
    return ByteRenderer() if folder is None else HfRenderer(folder)


class ByteRenderer:
    """A token is a byte, and the prompt reads like a play. For models that need no tokenizer files."""

    def render(self, messages: Sequence[Message]) -> list[int]:
        lines = "".join(f"{message.role}: {message.content}\n" for message in messages)
        return list(f"{lines}assistant: ".encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode("utf-8", "replace")


class HfRenderer:
    """A model's own `tokenizer.json` and chat template."""

    def __init__(self, folder: Path) -> None:
        config = json.loads(_read(folder / "tokenizer_config.json"))
        self._template = _compile(_template_source(folder, config))
        self._names = _token_names(config)
        self._tokenizer = Tokenizer.from_str(_read(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._specials = _Specials(self._tokenizer)

    def render(self, messages: Sequence[Message]) -> list[int]:
        seal = _Seal(self._specials)
        prompt = self._specials.alias(self._templated(messages, seal))
        # `encode` would hold the GIL, and with it every stream of this gateway, for as long as it takes.
        encoding = self._tokenizer.encode_batch([seal.open(prompt)], add_special_tokens=False)[0]
        return self._specials.own_ids(encoding.ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    def _templated(self, messages: Sequence[Message], seal: _Seal) -> str:
        turns = [{"role": message.role, "content": seal.close(message.content)} for message in messages]
        try:
            return self._template.render(messages=turns, add_generation_prompt=True, **self._names)
        except jinja2.TemplateError as e:
            # Most templates check the order of roles with `raise_exception`, and say what is wrong.
            reason = seal.open(str(e))
            raise BadRequest(f"The model's chat template refuses this: {reason}", param="messages") from None


class _Specials:
    """The special tokens of one tokenizer, which from now on reads them as text, and their aliases."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokens = {token.content: (id_, token) for id_, token in _added(tokenizer) if token.special}
        #: Longest first, since a spelled one is the longest that fits.
        self.contents = sorted(tokens, key=len, reverse=True)
        self.pattern = _any_of(self.contents)
        self.heads = {content[:n] for content in tokens for n in range(1, len(content))}
        self.tails = {content[n:] for content in tokens for n in range(1, len(content))}
        nonce = secrets.token_hex(16)
        self._aliases = {content: f"\ue000{nonce}.{n}\ue001" for n, content in enumerate(self.contents)}
        tokenizer.add_tokens([_renamed(tokens[content][1], alias) for content, alias in self._aliases.items()])
        tokenizer.encode_special_tokens = True
        self._own_ids = {tokenizer.token_to_id(alias): tokens[content][0] for content, alias in self._aliases.items()}

    def alias(self, prompt: str) -> str:
        """The prompt with each special token under its alias."""
        return self.pattern.sub(lambda match: self._aliases[match[0]], prompt)

    def own_ids(self, token_ids: Iterable[int]) -> list[int]:
        """The ids with each alias turned back into its special token."""
        own = self._own_ids
        return [own.get(token_id, token_id) for token_id in token_ids]


class _Seal:
    """What stands for special tokens in the messages of one prompt. Its key is new for each, and never gets out."""

    def __init__(self, specials: _Specials) -> None:
        self._specials = specials
        # Private-use characters: a template's `upper`, `trim` or `tojson` leaves them as they are.
        self._key = "".join(chr(0xE000 + byte) for byte in secrets.token_bytes(16))
        self._marks = {content: self._mark(n) for n, content in enumerate(specials.contents)}
        self._empty = self._mark(len(specials.contents))

    def close(self, text: str) -> str:
        """The text without special tokens, and with an empty seal at each end that is a part of one."""
        text = self._specials.pattern.sub(lambda match: self._marks[match[0]], text)
        # Templates trim, so the ends that count are those of the trimmed text.
        body = text.strip()
        lengths = range(1, len(self._specials.contents[0]) if self._specials.contents else 1)
        before = self._empty if any(body[:n] in self._specials.tails for n in lengths) else ""
        after = self._empty if any(body[-n:] in self._specials.heads for n in lengths) else ""
        if not (before or after):
            return text
        left, right = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
        return f"{left}{before}{body}{after}{right}"

    def open(self, text: str) -> str:
        """The text with everything in it again that was sealed."""
        stood_for = {mark: content for content, mark in self._marks.items()} | {self._empty: ""}
        return re.sub(f"{self._key}.", lambda match: stood_for[match[0]], text)

    def _mark(self, n: int) -> str:
        return self._key + chr(0xF0000 + n)


def _added(tokenizer: Tokenizer) -> Iterable[tuple[int, AddedToken]]:
    return tokenizer.get_added_tokens_decoder().items()


def _any_of(contents: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, contents)) or r"(?!)")


def _renamed(token: AddedToken, name: str) -> AddedToken:
    # Not special itself, or it too would be read as text.
    return AddedToken(name, lstrip=token.lstrip, rstrip=token.rstrip, normalized=token.normalized, special=False)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as e:
        raise BadTokenizer(f"{path}: {e.strerror}. `make setup` prepares the models of the catalogue") from None


def _template_source(folder: Path, config: dict[str, Any]) -> str:
    """The chat template: a file of its own, or else in the configuration, alone or by the name `default`."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return _read(path)
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {each["name"]: each["template"] for each in template}.get("default")
    if not isinstance(template, str):
        raise BadTokenizer(f"{folder}: no chat template, neither in chat_template.jinja nor in tokenizer_config.json")
    return template


def _token_names(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and its like, which templates use."""
    named = {name: token for name, token in config.items() if name.endswith("_token")}
    contents = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks for training what the assistant said; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str) -> jinja2.Template:
    """The template in the environment that all chat templates are written for, which is that of transformers."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _to_json(value: Any, ensure_ascii: bool = False, **form: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **form)  # jinja's own escapes HTML


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now(UTC).strftime(form)
