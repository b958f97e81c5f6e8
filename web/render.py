"""Chat template and token ids, without torch or transformers; equal to vLLM's own, but for one thing.

What a caller writes is text. A special token spelled in a message ("<|im_end|>") would end the turn and begin one
in another's name, so it reaches the model as the characters it is made of; and so does one in a tool's description, in
the arguments of a call, in whatever else the caller tells the template. Cutting the prompt at the messages and
encoding the pieces apart would not do: tokens run across those seams, and a template may trim or split a message.
So the prompt stays one string, and the two kinds of special token are told apart in it:

1. In what the caller wrote, each spelled special token is replaced by a seal, a string that the caller cannot have
   guessed. A part of one at either end of a text is kept apart by an empty seal, lest a neighbour complete it.
2. The template renders. Every special token now in the text is the template's own: it becomes an alias, a token
   that we added to the tokenizer under a name that nobody knows, with the rules of the original.
3. Seals become what they stood for, and the whole is encoded, with special tokens as text and aliases as tokens.
4. Aliases become the ids they stand for.

Where the caller wrote no special tokens nothing is sealed, and the ids are those of the ordinary way.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, Protocol

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.parser
import jinja2.sandbox
from jinja2 import nodes
from tokenizers import AddedToken, Tokenizer

from core.catalog import Model
from core.errors import BadRequest
from web.dialects.draft import Call, Message

#: Variables of a template that are not the caller's to set.
RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "continue_final_message"})
#: What a template raises on values that it was not written for, besides its own errors.
_STUMBLES = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class BadTokenizer(Exception):
    """A model's tokenizer files are missing or not usable."""


class Renderer(Protocol):
    """From a conversation to the token ids that the engine gets. Seconds of CPU for long ones: run it off the hub."""

    @property
    def vocabulary(self) -> int:
        """Every token id is below it."""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        template: Mapping[str, Any] = {},
    ) -> list[int]:
        """The prompt, up to where the assistant begins.

        tools: the functions it may call, each {"type": "function", "function": {name, description?, parameters?}}.
        template: what else the chat template is told; what it does not ask for is passed over.

        Raises:
          BadRequest: the template refuses it.
        """

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """A text that is the prompt itself. Special tokens that it spells are tokens; `special`: the tokenizer puts
        its own round it, such as a first one."""

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """The text of these tokens; `special`: with the special ones."""

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary writes it."""


def for_model(model: Model, data: Path) -> Renderer:
    """The renderer of a catalogue entry.

    Raises:
      BadTokenizer: its files are missing.
    """
    folder = model.tokenizer_folder(data)
    return ByteRenderer() if folder is None else HfRenderer(folder, model.chat_template, chats=model.kind == "chat")


def is_long(
    chars: int, messages: Sequence[Message], tools: Sequence[dict[str, Any]], template: Mapping[str, Any]
) -> bool:
    """Whether there are more characters than this to render, about, wherever the caller wrote them. It looks no
    further than it must."""
    left = chars
    rest: list[Any] = [template, *tools, *messages]
    while rest and left >= 0:
        left -= 4
        match rest.pop():
            case str() as text:
                left -= len(text)
            case Message() as message:
                rest += [message.content, message.reasoning, message.name, *message.calls]
            case Call() as call:
                rest += [call.name, call.arguments]
            case Mapping() as members:
                rest += [*members.keys(), *members.values()]
            case list() | tuple() as values:
                rest += values
    return left < 0


class ByteRenderer:
    """A token is a byte, and the prompt reads like a play. For models that need no tokenizer files."""

    vocabulary = 256

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        template: Mapping[str, Any] = {},
    ) -> list[int]:
        lines = [f"tools: {_plain_json(list(tools))}\n"] if tools else []
        lines += map(_line, messages)
        return list("".join([*lines, "assistant: "]).encode())

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        return bytes(token_ids).decode("utf-8", "replace")

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        return [chr(token_id) for token_id in token_ids]


def _line(message: Message) -> str:
    """A turn of the play; what was thought before it, and the calls after it, each on a line of its own."""
    thought = f"reasoning: {message.reasoning}\n" if message.reasoning else ""
    calls = (_plain_json({"id": call.id, "name": call.name, "arguments": call.arguments}) for call in message.calls)
    return f"{thought}{message.role}: {message.content}\n" + "".join(f"{call}\n" for call in calls)


def _plain_json(value: Any) -> str:
    return _whole(json.dumps(value, ensure_ascii=False))


class HfRenderer:
    """A model's own `tokenizer.json` and chat template."""

    def __init__(self, folder: Path, chat_template: str = "", *, chats: bool = True) -> None:
        """`chat_template`: a file to use instead of the model's own; `chats`: it needs one."""
        config = json.loads(_read(folder / "tokenizer_config.json"))
        own = {"default": _read(Path(chat_template))} if chat_template else None
        sources = own or (_template_sources(folder, config) if chats else {})
        self._templates = {name: _Template.of(source) for name, source in sources.items()}
        self._names = _token_names(config)
        self._tokenizer = Tokenizer.from_str(_read(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocabulary = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self._specials = _Specials(self._tokenizer)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        template: Mapping[str, Any] = {},
    ) -> list[int]:
        seal = _Seal(self._specials)
        prompt = self._specials.alias(self._templated(messages, tools, template, seal))
        return self._ids(seal.open(prompt), special=False)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return self._ids(self._specials.alias(text), special=special)

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=not special)

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]

    def _ids(self, prompt: str, *, special: bool) -> list[int]:
        # `encode` would hold the GIL, and with it every stream of this gateway, for as long as it takes.
        encoding = self._tokenizer.encode_batch([prompt], add_special_tokens=special)[0]
        return self._specials.own_ids(encoding.ids)

    def _templated(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], told: Mapping[str, Any], seal: _Seal
    ) -> str:
        template = self._template(with_tools=bool(tools))
        try:
            told = {name: seal.close_all(value) for name, value in told.items() if template.asks_for(name)}
            turns = [_turn(message, seal.close, in_parts=template.in_parts) for message in messages]
            functions = [_tool(tool, seal) for tool in tools] or None
            return template.render(turns, functions, {**self._names, **told})
        except _STUMBLES as e:
            # Most templates check the order of roles with `raise_exception`, and say what is wrong.
            reason = seal.open(str(e))
            raise BadRequest(f"The model's chat template refuses this: {reason}", param="messages") from None

    def _template(self, *, with_tools: bool) -> _Template:
        if not self._templates:
            raise BadRequest("This model takes no conversation, only texts.", param="messages")
        return self._templates["tool_use" if with_tools and "tool_use" in self._templates else "default"]


def _turn(message: Message, close: Callable[[str], str], *, in_parts: bool) -> dict[str, Any]:
    """A message as vLLM hands it to the template, key by key."""
    turn: dict[str, Any] = {"role": message.role, "content": _content(message, close, in_parts=in_parts)}
    if message.calls:
        turn["tool_calls"] = [_call(call, close) for call in message.calls]
    if message.reasoning:
        turn["reasoning"] = turn["reasoning_content"] = close(message.reasoning)
    if message.call_id:
        turn["tool_call_id"] = close(message.call_id)
    if message.name:
        turn["name"] = close(message.name)
    return turn


def _content(message: Message, close: Callable[[str], str], *, in_parts: bool) -> str | list[dict[str, str]]:
    content = close(message.content)
    if not in_parts or message.role == "tool":
        return content
    return [{"type": "text", "text": content}] if content or not message.calls else []


def _call(call: Call, close: Callable[[str], str]) -> dict[str, Any]:
    # The order of the keys is that of the types which vLLM reads requests with; a template may print the whole.
    function = {"arguments": _closed(_arguments(call.arguments), close), "name": close(call.name)}
    return {"id": close(call.id), "function": function, "type": "function"}


def _arguments(arguments: str) -> dict[str, Any]:
    """Templates want an object. What is none lies in the past, where nobody can mend it, and is an empty one."""
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _tool(tool: dict[str, Any], seal: _Seal) -> dict[str, Any]:
    """A tool with the keys, and in the order, that vLLM's own schema gives it."""
    function = tool.get("function", {})
    known = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        known["strict"] = function["strict"]
    return {"type": "function", "function": seal.close_all(known)}


def _closed(value: Any, close: Callable[[str], str]) -> Any:
    """The value with every string in it closed, names of members too."""
    match value:
        case str():
            return close(value)
        case dict():
            return {close(str(name)): _closed(member, close) for name, member in value.items()}
        case list() | tuple():
            return [_closed(member, close) for member in value]
        case _:
            return value


def _whole(text: str) -> str:
    """The text without half surrogate pairs, which JSON can spell inside of JSON, and a tokenizer cannot read."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


class _Specials:
    """The special tokens of one tokenizer, which from now on reads them as text, and their aliases."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokens = {token.content: (id_, token) for id_, token in _added(tokenizer) if token.special}
        #: Longest first, since a spelled one is the longest that fits.
        self.contents = sorted(tokens, key=len, reverse=True)
        self.pattern = _any_of(self.contents)
        self.heads = {content[:n] for content in tokens for n in range(1, len(content))}
        self.tails = {content[n:] for content in tokens for n in range(1, len(content))}
        self.head_ends = {head[-1] for head in self.heads}
        self.tail_begins = {tail[0] for tail in self.tails}
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
    """What stands for special tokens in what the caller wrote of one prompt. Its key is new for each, and never gets
    out."""

    def __init__(self, specials: _Specials) -> None:
        self._specials = specials
        # Private-use characters: a template's `upper`, `trim` or `tojson` leaves them as they are.
        self._key = "".join(chr(0xE000 + byte) for byte in secrets.token_bytes(16))
        self._marks = {content: self._mark(n) for n, content in enumerate(specials.contents)}
        self._empty = self._mark(len(specials.contents))

    def close(self, text: str) -> str:
        """The text without special tokens, and with an empty seal at each end that is a part of one."""
        text = self._specials.pattern.sub(lambda match: self._marks[match[0]], _whole(text))
        # Templates trim, so the ends that count are those of the trimmed text.
        body = text.strip()
        before = self._empty if self._begins_as_tail(body) else ""
        after = self._empty if self._ends_as_head(body) else ""
        if not (before or after):
            return text
        left, right = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
        return f"{left}{before}{body}{after}{right}"

    def close_all(self, value: Any) -> Any:
        """The same for every string in a JSON value."""
        return _closed(value, self.close)

    def open(self, text: str) -> str:
        """The text with everything in it again that was sealed."""
        stood_for = {mark: content for content, mark in self._marks.items()} | {self._empty: ""}
        text = re.sub(f"{self._key}.", lambda match: stood_for[match[0]], text)
        # A filter may have made it ASCII (`tojson(ensure_ascii=true)`), or Python's own spelling (a dict as it is).
        escaped = re.escape(_escaped(self._key)) + r"(?:\\u(d[89ab]..)\\u(d[c-f]..)|\\U(000f....))"
        return re.sub(escaped, lambda match: _escaped(stood_for[self._key + _spelled(match)]), text)

    def _begins_as_tail(self, body: str) -> bool:
        tails = self._specials.tails
        return body[:1] in self._specials.tail_begins and any(body[:n] in tails for n in self._lengths())

    def _ends_as_head(self, body: str) -> bool:
        heads = self._specials.heads
        return body[-1:] in self._specials.head_ends and any(body[-n:] in heads for n in self._lengths())

    def _lengths(self) -> range:
        return range(1, len(self._specials.contents[0]) if self._specials.contents else 1)

    def _mark(self, n: int) -> str:
        return self._key + chr(0xF0000 + n)


def _escaped(text: str) -> str:
    return json.dumps(text)[1:-1]


def _spelled(match: re.Match[str]) -> str:
    """The character of an escape: one number, or a surrogate pair."""
    high, low, whole = match.groups()
    return chr(int(whole, 16)) if whole else bytes.fromhex(high + low).decode("utf-16-be")


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


def _template_sources(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """The chat templates by name: files of their own, or else in the configuration. There is always a `default`."""
    sources = _template_files(folder) or _configured_templates(config)
    if "default" not in sources:
        raise BadTokenizer(f"{folder}: no chat template, neither in chat_template.jinja nor in tokenizer_config.json")
    return sources


def _template_files(folder: Path) -> dict[str, str]:
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (path := folder / "chat_template.jinja").exists():
        files["default"] = path
    return {name: _read(path) for name, path in files.items()} if "default" in files else {}


def _configured_templates(config: dict[str, Any]) -> dict[str, str]:
    template = config.get("chat_template")
    if isinstance(template, list):
        return {each["name"]: each["template"] for each in template}
    return {"default": template} if isinstance(template, str) else {}


def _token_names(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and its like, which templates use."""
    named = {name: token for name, token in config.items() if name.endswith("_token")}
    contents = {name: token.get("content") if isinstance(token, dict) else token for name, token in named.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks for training what the assistant said; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@dataclass(frozen=True)
class _Template:
    """A chat template, and what its source tells of what it wants."""

    compiled: jinja2.Template
    variables: frozenset[str]
    in_parts: bool  #: it goes through the parts of a content, and so gets a list

    @classmethod
    def of(cls, source: str) -> _Template:
        """The template in the environment that all chat templates are written for, which is that of transformers."""
        environment = _environment()
        tree = environment.parse(source)
        variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
        return cls(environment.from_string(source), variables, _goes_through_parts(tree))

    def asks_for(self, name: str) -> bool:
        """A caller may set this variable."""
        return name in self.variables and name not in RESERVED

    def render(self, turns: list[dict[str, Any]], tools: list[dict[str, Any]] | None, told: dict[str, Any]) -> str:
        """The prompt; what a template is always told is there, if only as none."""
        told = {"documents": None, **told, "messages": turns, "tools": tools, "add_generation_prompt": True}
        return self.compiled.render(told)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **form: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **form)  # jinja's own escapes HTML


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now(UTC).strftime(form)


def _goes_through_parts(tree: nodes.Template) -> bool:
    """A template has a loop over the content of a message, which then is a list of parts. By vLLM's rules: of what a
    loop over the messages sets, of what such a content is given to a macro as, or of a variable named `content`."""
    messages = _aliases(tree, "messages")
    loops = list(tree.find_all(nodes.For))
    turns = {
        loop.target.name for loop in loops if _reach(loop.iter) in messages and isinstance(loop.target, nodes.Name)
    }
    contents = {(turn, "content") for turn in turns}
    in_macros = {id(loop): macro for macro in tree.find_all(nodes.Macro) for loop in macro.find_all(nodes.For)}
    for loop in loops:
        macro = in_macros.get(id(loop))
        named = {("content",)} if macro is None else _given(tree, macro, contents)
        if _reach(loop.iter) in contents or (isinstance(loop.iter, nodes.Name) and _reach(loop.iter) in named):
            return True
    return False


def _reach(node: nodes.Node | None) -> tuple[str, ...]:
    """A variable, or a member of one, through filters and slices; empty: something else."""
    match node:
        case nodes.Filter(node=inner) | nodes.Test(node=inner) | nodes.Getitem(node=inner, arg=nodes.Slice()):
            return _reach(inner)
        case nodes.Getattr(node=nodes.Name(name=name), attr=member):
            return (name, member)
        case nodes.Getitem(node=nodes.Name(name=name), arg=nodes.Const(value=str() as member)):
            return (name, member)
        case nodes.Name(name=name):
            return (name,)
        case _:
            return ()


def _aliases(tree: nodes.Template, name: str) -> set[tuple[str, ...]]:
    """A variable, and those that were set to it or to a part of it."""
    names: set[tuple[str, ...]] = {(name,)}
    known = 0
    while known < len(names):
        known = len(names)
        sets = [each for each in tree.find_all(nodes.Assign) if _reach(each.node) in names]
        names |= {(each.target.name,) for each in sets if isinstance(each.target, nodes.Name)}
    return names


def _given(tree: nodes.Template, macro: nodes.Macro, contents: set[tuple[str, str]]) -> set[tuple[str, ...]]:
    """The arguments of a macro that some call gives the content of a message."""
    names: set[tuple[str, ...]] = set()
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
            by_place = zip(macro.args, call.args, strict=False)
            names |= {(arg.name,) for arg, value in by_place if _reach(value) in contents}
            names |= {(given.key,) for given in call.kwargs if _reach(given.value) in contents}
    return names
