"""What the API says of itself: one table of its operations, an OpenAPI document and /llms.txt made of it. Pure.

The bodies are described by the models that check them, the answers by web/shapes.py, the errors by core/errors.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, TypeAdapter

from core import errors
from core.errors import ForebayError
from web import shapes
from web.dialects import messages
from web.dialects.draft import TEMPLATE_KNOBS

Schema = dict[str, Any]

VERSION = "1"

ABOUT = """\
Forebay is an LLM serving platform with one durable, fair queue in front of its GPUs. Its API is that of OpenAI \
(chat completions, completions, Responses over HTTP, SSE and WebSocket, embeddings) and of Anthropic (Messages), so \
that their clients work unchanged: set the base URL and the key.

**Fields.** Unknown fields are ignored, null is as good as absent, a known field of the wrong type is refused with its \
name in `param`, and a known field that would change the answer and is not served yet is refused too.

**Waiting.** A request that cannot start yet is queued, not refused. A stream says its place: `response.queued` events \
with a `queue` object in Responses, comments (`: queued place=3 estimate_ms=1500`) in chat. `service_tier` chooses \
the class: `priority`, `default` or `flex`. `timeout` (seconds) bounds the wait.

**Streams** (`"stream": true`) are server-sent events. A failure after the first byte is an event in the form of the \
API, never an invented end. A silent stream sends a keep-alive every 15 seconds.

**Going on with a stream.** A connection that broke is no loss, while the request runs and for 15 minutes after its \
end. Responses: `GET /v1/responses/{response_id}?stream=true&starting_after=N` with the last `sequence_number`. Chat \
and completions: the same `POST` again with `Last-Event-ID`, the `id:` of the last chunk; nothing is billed again.

**Retrying.** `Idempotency-Key` (1 to 255 printable ASCII characters) makes a `POST` safe to repeat: the same key and \
body are answered with the same request, also while it runs; another body is a 422. `x-should-retry` says whether a \
retry may help, `retry-after` and `retry-after-ms` when.

**WebSocket.** `GET /v1/responses` with `Upgrade: websocket` opens Responses mode: frames are \
`{"type": "response.create", …}` with the fields of `POST /v1/responses`, answers are the events of its stream. \
`stream_id` names a lane; lanes run side by side, each in order. `response.cancel` and `response.resume` \
(`response_id`, `starting_after`) are ours. A browser offers the subprotocols `responses` and \
`forebay.secret.SECRET`, with a client secret (`POST /v1/client_secrets`); a long-lived key there is refused.

**Behind proxies** that give up on silence, `X-Forebay-Early: 1` answers a request that does not stream with 200 at \
once and white space while it waits; a failure is then in the body, with a `status`. `X-Forebay-Linger: SECONDS` lets \
a stream go on without its client."""

#: What is said of fields by their name, wherever no docstring says it.
FIELDS: Mapping[str, str] = {
    "model": "The name of a model, as `GET /v1/models` lists it.",
    "messages": "The conversation, oldest first.",
    "prompt": "Text or token ids, one prompt or several. They are taken as they are.",
    "input": "What is to be answered, or embedded.",
    "stream": "Send server-sent events as the answer is made.",
    "service_tier": "`priority` goes before everything else, `flex` after it, at prices of their own.",
    "timeout": "How long it may wait before it begins, seconds. Later it ends as `expired` and costs nothing.",
    "metadata": "Up to 16 pairs of your own.",
    "user": "Accepted, and not used.",
    "safety_identifier": "Accepted, and not used.",
    "prompt_cache_key": "Requests that name the same key share a prefix.",
    "temperature": "0 is greedy.",
    "top_p": "Sample among the likeliest tokens that make up this probability.",
    "top_k": "Sample among so many of the likeliest tokens; 0 or -1: all.",
    "min_p": "Leave out tokens less likely than this part of the likeliest.",
    "seed": "The same seed gives the same answer, as far as the model allows.",
    "stop": "Up to 4 texts that end the answer, and are not part of it.",
    "presence_penalty": "Make tokens less likely that were there.",
    "frequency_penalty": "Make tokens less likely the more often they were there.",
    "repetition_penalty": "The same for the prompt's tokens too, as a factor.",
    "ignore_eos": "Go on past the model's own end, up to `max_tokens`.",
    "min_tokens": "No end before so many tokens.",
    "stop_token_ids": "Tokens that end the answer.",
    "logit_bias": "Make tokens likelier or less likely: token id to a number from -100 to 100.",
    "structured_outputs": "vLLM's: a form for the answer.",
    "response_format": "A form for the answer: text, any JSON, or JSON of a schema.",
    "chat_template_kwargs": f"How the model is to think, in its chat template's words: {', '.join(TEMPLATE_KNOBS)}.",
    "store": "Keep the response, to be fetched or gone on from. The answer says whether it is kept.",
    "parallel_tool_calls": "Several calls in one turn are welcome.",
    "max_tokens": "The answer ends after so many tokens.",
    "max_completion_tokens": "OpenAI's newer name of `max_tokens`.",
    "max_output_tokens": "The answer ends after so many tokens, reasoning included.",
    "n": "How many answers to give.",
    "logprobs": "Tell how likely each token was.",
    "top_logprobs": "And so many of its alternatives.",
    "tools": "Functions that the model may call.",
    "tool_choice": "Which of them it may or must call.",
    "functions": "Replaced by `tools`, and refused.",
    "function_call": "Replaced by `tool_choice` and `tool_calls`.",
    "reasoning_effort": "`none` turns reasoning off, where the model can.",
    "reasoning": "How much to think first.",
    "verbosity": "Accepted, and not used.",
    "prediction": "Accepted, and not used.",
    "instructions": "A system message. It is not inherited from `previous_response_id`.",
    "previous_response_id": "The stored response whose conversation this goes on from.",
    "background": "Answer at once with a response that is `queued`; fetch it later.",
    "truncation": "Accepted. A conversation that does not fit is refused.",
    "include": "`message.output_text.logprobs` is the one that changes the answer.",
    "best_of": "Only the value of `n`.",
    "suffix": "Not supported: leave it out.",
    "echo": "Put the prompt before the answer.",
    "dimensions": "Not supported: leave it out.",
    "stream_options": "`include_usage` adds a last chunk with the usage.",
    "system": "The system prompt.",
    "thinking": "Whether the model reasons first.",
    "stop_sequences": "Texts that end the answer, and are not part of it.",
    "tokens": "Token ids of the model.",
}


@dataclass(frozen=True)
class Parameter:
    """One of the query, of a header, or of the path."""

    name: str
    place: str
    schema: Schema
    says: str

    def described(self) -> Schema:
        required = {"required": True} if self.place == "path" else {}
        return {"name": self.name, "in": self.place, **required, "description": self.says, "schema": self.schema}


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One method of one address."""

    method: str
    path: str
    name: str
    group: str
    says: str
    more: str = ""
    body: str = ""  #: the name of a model that the caller of `document` gives
    example: Any = None
    answers: tuple[type[BaseModel], ...] = ()
    text: str = ""  #: the content type of what is no JSON
    streams: bool = False
    parameters: tuple[Parameter, ...] = ()
    statuses: tuple[int, ...] = ()  #: of refusals, beside those that all have
    unready: type[BaseModel] | None = None  #: the answer with status 503, if it is no error
    public: bool = False

    @property
    def anthropic(self) -> bool:
        return self.path.startswith("/v1/messages")


def _string(**bounds: Any) -> Schema:
    return {"type": "string", **bounds}


#: The files of the page at /docs.
ASSETS = ("swagger-ui.css", "swagger-ui-bundle.js", "start.js", "favicon.png")

ONCE = Parameter(
    "Idempotency-Key",
    "header",
    _string(minLength=1, maxLength=255, pattern="^[ -~]+$"),
    "Makes the request safe to repeat: the same key and body are answered with the same request.",
)
RESPONSE_ID = Parameter("response_id", "path", _string(), "The id of a response.")
MODEL_NAME = Parameter("name", "path", _string(), "The name of a model. It may have slashes.")
_FLAG = {"type": "string", "enum": ["true", "false", "1", "0"]}
_PAGES = (
    Parameter("after_id", "query", _string(), "With `anthropic-version`: the models after this one."),
    Parameter("before_id", "query", _string(), "With `anthropic-version`: the models before this one."),
    Parameter("anthropic-version", "header", _string(), "If there is one, the answer has Anthropic's form."),
)
_HELLO = [{"role": "user", "content": "Hello"}]
_MODEL = "MODEL"  #: stands for a name in examples

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="POST",
        path="/v1/chat/completions",
        name="createChatCompletion",
        group="Completions",
        says="Answer a conversation.",
        more="With `Last-Event-ID` (the `id:` of a chunk) an earlier stream goes on, and the body is not looked at.",
        body="ChatBody",
        example={"model": _MODEL, "messages": _HELLO, "max_tokens": 16},
        answers=(shapes.ChatCompletion,),
        streams=True,
        parameters=(ONCE,),
    ),
    Operation(
        method="GET",
        path="/v1/chat/completions",
        name="resumeChatCompletion",
        group="Completions",
        says="Go on with a stream, as a browser's EventSource does.",
        more="Only with `Last-Event-ID`; without it the answer is 405.",
        streams=True,
        parameters=(Parameter("Last-Event-ID", "header", _string(), "The `id:` of the last chunk that came."),),
        statuses=(400, 410),
    ),
    Operation(
        method="POST",
        path="/v1/completions",
        name="createCompletion",
        group="Completions",
        says="Go on with a text.",
        more="With `Last-Event-ID` an earlier stream goes on, as in chat.",
        body="CompletionsBody",
        example={"model": _MODEL, "prompt": "Once", "max_tokens": 16},
        answers=(shapes.Completion,),
        streams=True,
        parameters=(ONCE,),
    ),
    Operation(
        method="POST",
        path="/v1/responses",
        name="createResponse",
        group="Responses",
        says="Answer an input, with items and typed events.",
        more="`GET` of the same address with `Upgrade: websocket` opens a WebSocket, whose frames are such bodies.",
        body="ResponsesBody",
        example={"model": _MODEL, "input": "Hello", "max_output_tokens": 16},
        answers=(shapes.Response,),
        streams=True,
        parameters=(ONCE,),
    ),
    Operation(
        method="GET",
        path="/v1/responses/{response_id}",
        name="getResponse",
        group="Responses",
        says="A response as it is now, or its stream.",
        answers=(shapes.Response,),
        streams=True,
        parameters=(
            RESPONSE_ID,
            Parameter("stream", "query", _FLAG, "Show its events, while it runs and after."),
            Parameter(
                "starting_after",
                "query",
                _string(pattern="^[0-9]{1,10}$"),
                "Only the events with a `sequence_number` above this.",
            ),
        ),
        statuses=(400, 410),
    ),
    Operation(
        method="DELETE",
        path="/v1/responses/{response_id}",
        name="deleteResponse",
        group="Responses",
        says="Delete a response and its input at once. One that runs is cancelled.",
        answers=(shapes.DeletedResponse,),
        parameters=(RESPONSE_ID,),
    ),
    Operation(
        method="POST",
        path="/v1/responses/{response_id}/cancel",
        name="cancelResponse",
        group="Responses",
        says="Stop a response. Again, or too late, it is shown as it ended.",
        answers=(shapes.Response,),
        parameters=(RESPONSE_ID,),
    ),
    Operation(
        method="GET",
        path="/v1/responses/{response_id}/input_items",
        name="listInputItems",
        group="Responses",
        says="What a response was given itself, without the turns before.",
        answers=(shapes.InputItems,),
        parameters=(
            RESPONSE_ID,
            Parameter("limit", "query", {"type": "integer", "minimum": 1, "maximum": 100}, "Items in a page."),
            Parameter("after", "query", _string(), "The items after the one with this id."),
            Parameter("order", "query", {"type": "string", "enum": ["asc", "desc"]}, "Newest first: `desc`."),
        ),
        statuses=(400,),
    ),
    Operation(
        method="POST",
        path="/v1/responses/input_tokens",
        name="countResponseTokens",
        group="Responses",
        says="How many tokens the prompt of such a response has.",
        body="ResponsesBody",
        example={"model": _MODEL, "input": "Hello"},
        answers=(shapes.InputTokens,),
    ),
    Operation(
        method="POST",
        path="/v1/embeddings",
        name="createEmbeddings",
        group="Completions",
        says="A vector for each text.",
        body="EmbeddingsBody",
        example={"model": _MODEL, "input": "Hello"},
        answers=(shapes.Embeddings,),
        parameters=(ONCE,),
    ),
    Operation(
        method="GET",
        path="/v1/models",
        name="listModels",
        group="Models and tokens",
        says="The models that this key may use.",
        answers=(shapes.Models, shapes.AnthropicModels),
        parameters=(
            *_PAGES,
            Parameter(
                "limit",
                "query",
                {"type": "integer", "minimum": 1, "maximum": 1000},
                "With `anthropic-version`: models in a page.",
            ),
        ),
        statuses=(400,),
    ),
    Operation(
        method="GET",
        path="/v1/models/{name}",
        name="getModel",
        group="Models and tokens",
        says="One model.",
        answers=(shapes.Model, shapes.AnthropicModel),
        parameters=(MODEL_NAME, _PAGES[-1]),
    ),
    Operation(
        method="POST",
        path="/v1/messages",
        name="createMessage",
        group="Messages",
        says="Answer a conversation.",
        body="MessagesBody",
        example={"model": _MODEL, "messages": _HELLO, "max_tokens": 16},
        answers=(shapes.Message,),
        streams=True,
        parameters=(ONCE,),
    ),
    Operation(
        method="POST",
        path="/v1/messages/count_tokens",
        name="countMessageTokens",
        group="Messages",
        says="How many input tokens such a body has.",
        body="CountBody",
        example={"model": _MODEL, "messages": _HELLO},
        answers=(shapes.TokenCount,),
    ),
    *(
        operation
        for prefix, suffix in (("/v1", ""), ("", "AtRoot"))
        for operation in (
            Operation(
                method="POST",
                path=f"{prefix}/tokenize",
                name=f"tokenize{suffix}",
                group="Models and tokens",
                says="The tokens of a text, or of a conversation as it would be admitted.",
                body="TokenizeBody",
                example={"model": _MODEL, "prompt": "Hello"},
                answers=(shapes.Tokens,),
            ),
            Operation(
                method="POST",
                path=f"{prefix}/detokenize",
                name=f"detokenize{suffix}",
                group="Models and tokens",
                says="The text of tokens.",
                body="DetokenizeBody",
                example={"model": _MODEL, "tokens": [72, 105]},
                answers=(shapes.Text,),
            ),
        )
    ),
    Operation(
        method="GET",
        path="/v1/key",
        name="getKey",
        group="Account",
        says="What this key may do, and has used in the last minute.",
        answers=(shapes.Key,),
    ),
    Operation(
        method="POST",
        path="/v1/client_secrets",
        name="createClientSecret",
        group="Account",
        says="A secret with which a page opens one WebSocket, within a minute if nothing else is asked for.",
        body="SecretBody",
        example={"session": {"model": _MODEL}},
        answers=(shapes.ClientSecret,),
    ),
    Operation(
        method="GET",
        path="/health",
        name="health",
        group="State",
        says="The process answers.",
        answers=(shapes.Health,),
        public=True,
    ),
    Operation(
        method="GET",
        path="/ready",
        name="ready",
        group="State",
        says="200 when a request sent now would be served.",
        answers=(shapes.Ready,),
        unready=shapes.Ready,
        public=True,
    ),
    Operation(
        method="GET",
        path="/openapi.json",
        name="openapi",
        group="Documents",
        says="This document.",
        text="application/json",
        public=True,
    ),
    Operation(
        method="GET",
        path="/docs",
        name="docs",
        group="Documents",
        says="This document as a page.",
        text="text/html",
        public=True,
    ),
    Operation(
        method="GET",
        path="/docs/{asset}",
        name="docsAsset",
        group="Documents",
        says="A file of that page.",
        text="*/*",
        parameters=(Parameter("asset", "path", _string(enum=list(ASSETS)), "The name of a file."),),
        statuses=(404,),
        public=True,
    ),
    Operation(
        method="GET",
        path="/llms.txt",
        name="llms",
        group="Documents",
        says="The same in short, for language models.",
        text="text/plain",
        public=True,
    ),
)

#: Refusals that any request may meet, that one with a key may, that one with a body may, and that generating may.
_ANY = (405, 414, 431, 500)
_KEYED = (401, 403, 404, 429, 503)
_WITH_BODY = (400, 408, 411, 413, 415, 422, 429)


# --- the document


def document(bodies: Mapping[str, Any]) -> Schema:
    """The OpenAPI document. `bodies`: the models that check bodies, by the names that operations call them."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "Forebay", "version": VERSION, "description": ABOUT},
        "servers": [{"url": "/"}],
        "security": [{"bearer": []}, {"apiKey": []}],
        "tags": [{"name": group} for group in dict.fromkeys(one.group for one in OPERATIONS)],
        "paths": _paths(),
        "components": {
            "schemas": dict(_schemas(bodies)),
            "responses": dict(_refusals()),
            "headers": _HEADERS,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "`Authorization: Bearer fb_live_…`"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key."},
            },
        },
    }


_HEADERS: Schema = {
    "x-request-id": {"schema": {"type": "string"}, "description": "The request's id: quote it to your operator."},
    "x-should-retry": {
        "schema": {"type": "string", "enum": ["true", "false"]},
        "description": "Whether a retry may help.",
    },
    "retry-after": {"schema": {"type": "string"}, "description": "When to retry, seconds."},
    "retry-after-ms": {"schema": {"type": "string"}, "description": "When to retry, milliseconds."},
}


def _paths() -> Schema:
    paths: Schema = {}
    for one in OPERATIONS:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one)
    return paths


def _operation(one: Operation) -> Schema:
    described: Schema = {"operationId": one.name, "tags": [one.group], "summary": one.says.rstrip(".")}
    if one.more:
        described["description"] = one.more
    if one.public:
        described["security"] = []
    if one.parameters:
        described["parameters"] = [parameter.described() for parameter in one.parameters]
    if one.body:
        content = {"schema": _ref(one.body), "example": one.example}
        described["requestBody"] = {"required": True, "content": {"application/json": content}}
    return {**described, "responses": _answers(one)}


def _answers(one: Operation) -> Schema:
    answered: Schema = {"description": one.says, "headers": _told("x-request-id"), "content": dict(_content(one))}
    if one.answers == (shapes.Response,):
        answered["links"] = _LINKS
    answers = {"200": answered}
    for status in sorted(_statuses(one)):
        answers[str(status)] = {"$ref": f"#/components/responses/{_refusal_name(status, one.anthropic)}"}
    if one.unready:
        content = {"application/json": {"schema": _ref(one.unready.__name__)}}
        answers["503"] = {"description": "Not now.", "headers": _told("x-request-id"), "content": content}
    return answers


def _content(one: Operation) -> Iterator[tuple[str, Schema]]:
    if one.answers:
        refs = [_ref(answer.__name__) for answer in one.answers]
        yield "application/json", {"schema": refs[0] if len(refs) == 1 else {"anyOf": refs}}
    if one.streams:
        yield "text/event-stream", {"schema": _ref(shapes.Event.__name__)}
    if one.text:
        yield one.text, {} if one.text == "*/*" else {"schema": {"type": "object" if "json" in one.text else "string"}}


_LINKS: Schema = {
    name: {"operationId": name, "parameters": {"response_id": "$response.body#/id"}}
    for name in ("getResponse", "cancelResponse", "listInputItems", "deleteResponse")
}


def _statuses(one: Operation) -> set[int]:
    statuses = {*_ANY, *one.statuses, *(() if one.public else _KEYED), *(_WITH_BODY if one.body else ())}
    return {messages.status_of(status) for status in statuses} if one.anthropic else statuses


def _refusal_name(status: int, anthropic: bool) -> str:
    return f"{'Anthropic' if anthropic else ''}{status}"


def _refusals() -> Iterator[tuple[str, Schema]]:
    told = _told(*_HEADERS)
    for anthropic, shape in ((False, shapes.Error), (True, shapes.AnthropicError)):
        for status, why in sorted(_reasons().items()):
            shown = messages.status_of(status) if anthropic else status
            content = {"application/json": {"schema": _ref(shape.__name__)}}
            yield _refusal_name(shown, anthropic), {"description": why, "headers": told, "content": content}


def _reasons() -> dict[int, str]:
    """What each status is for, in the words of the errors themselves."""
    reasons: dict[int, list[str]] = {}
    for kind in kinds_of_errors():
        reasons.setdefault(kind.status, []).append(
            f"`{kind.code or kind.type}`: {inspect.cleandoc(kind.__doc__ or '')}"
        )
    return {status: "\n\n".join(lines) for status, lines in reasons.items()}


def kinds_of_errors(root: type[ForebayError] = ForebayError) -> Iterator[type[ForebayError]]:
    """The tree, from its root."""
    yield root
    for kind in root.__subclasses__():
        if kind.__module__ == errors.__name__:
            yield from kinds_of_errors(kind)


def _told(*names: str) -> Schema:
    return {name: {"$ref": f"#/components/headers/{name}"} for name in names}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


# --- schemas


def _schemas(bodies: Mapping[str, Any]) -> Iterator[tuple[str, Schema]]:
    """Those of bodies, whose parts are named after them, as dialects have parts of equal names; and of answers."""
    for name, body in bodies.items():
        yield from _schema(name, body, f"{name}.", FIELDS)
    answers = {answer for one in OPERATIONS for answer in one.answers} | {
        shapes.Error,
        shapes.AnthropicError,
        shapes.Event,
    }
    for answer in sorted(answers, key=lambda answer: answer.__name__):
        yield from _schema(answer.__name__, answer, "", {})


def _schema(name: str, of: Any, prefix: str, fields: Mapping[str, str]) -> Iterator[tuple[str, Schema]]:
    whole = TypeAdapter(of).json_schema(mode="validation")
    parts = whole.pop("$defs", {})
    names = {part: prefix + _part_name(part) for part in parts}

    def renamed(ref: str) -> str:
        return f"#/components/schemas/{names[ref.rpartition('/')[2]]}"

    for part, schema in parts.items():
        yield names[part], _tidy(schema, renamed)
    whole = _tidy(whole, renamed)
    for field, says in fields.items():
        if field in (found := whole.get("properties", {})):
            found[field].setdefault("description", says)
    yield name, whole


def _part_name(part: str) -> str:
    """Pydantic puts the module before the names of two parts that are equal, and so we keep its last word."""
    module, _, name = part.rpartition("___")
    return ".".join([*([module.rpartition("__")[2]] if module else []), name.lstrip("_")])


def _tidy(schema: Any, renamed: Callable[[str], str]) -> Any:
    """A schema as it is read: no titles that repeat names, no unions within unions, no oneOf whose ways overlap."""
    if isinstance(schema, list):
        return [_tidy(one, renamed) for one in schema]
    if not isinstance(schema, dict):
        return schema
    tidy: Schema = {}
    for key, value in schema.items():
        match key:
            case "properties":
                tidy[key] = {name: _tidy(field, renamed) for name, field in value.items()}
            case "$ref":
                tidy[key] = renamed(value)
            case "anyOf" | "oneOf":
                tidy["anyOf"] = _flat(_tidy(value, renamed))
            case "title" | "discriminator":
                pass
            case "default" if value is None:
                pass
            case "default" | "const" | "enum":
                tidy[key] = value
            case _:
                tidy[key] = _tidy(value, renamed)
    return tidy


def _flat(ways: Iterable[Schema]) -> list[Schema]:
    flat: list[Schema] = []
    for way in ways:
        for one in way["anyOf"] if way.keys() == {"anyOf"} else [way]:
            if one not in flat:
                flat.append(one)
    return flat


# --- /llms.txt


def llms(limits: Mapping[str, str]) -> str:
    """The same in short, as Markdown. `limits`: what is bounded, and how."""
    lines = ["# Forebay", "", "> " + ABOUT.partition("\n")[0], "", *_BASE, ""]
    for group in dict.fromkeys(one.group for one in OPERATIONS):
        lines += [f"## {group}", "", *(_line(one) for one in OPERATIONS if one.group == group), ""]
    lines += ["## How it behaves", "", ABOUT.partition("\n\n")[2], "", "## Limits", ""]
    lines += [f"- {what}: {bound}" for what, bound in limits.items()]
    lines += ["", "## Errors", "", *_ERRORS, ""]
    lines += [
        f"- {kind.status} `{kind.code or kind.type}`: {inspect.cleandoc(kind.__doc__ or '')}"
        for kind in kinds_of_errors()
    ]
    return "\n".join([*lines, "", "## Links", "", *_LINES_TO, ""])


_BASE = (
    "Base URL: `/v1` of the host that serves this file; Anthropic's clients take the host itself. Key: "
    "`Authorization: Bearer fb_live_…` or `x-api-key`. Bodies and answers are JSON.",
)
_ERRORS = (
    'An error is `{"error": {"message", "type", "param", "code"}}`, always these four keys; under `/v1/messages` it is '
    'Anthropic\'s `{"type": "error", "error": {"type", "message"}, "request_id"}`, with 529 for 503. `x-request-id` is '
    "on every answer.",
)
_LINES_TO = (
    "- [OpenAPI 3.1](/openapi.json): every field, answer and error",
    "- [Reference](/docs): the same as a page, to try",
)


def _line(one: Operation) -> str:
    key = "" if not one.public else " (no key)"
    return f"- `{one.method} {one.path}`{key}: {one.says}" + (f" {one.more}" if one.more else "")
