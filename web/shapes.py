"""What answers look like, for the API's own description of itself. Answers are made elsewhere, key by key; that they
are so is tested by asking for them (tests/conformance/test_schemathesis.py). Pure.

A key that has no default here is always there. One that has may be left out.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Shape(BaseModel):
    model_config = ConfigDict(extra="allow")


# --- errors


class ErrorDetail(_Shape):
    """What is wrong. Always these four keys."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(_Shape):
    """Any refusal or failure."""

    error: ErrorDetail


class AnthropicErrorDetail(_Shape):
    type: str
    message: str


class AnthropicError(_Shape):
    """The same on Anthropic's paths."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


class Event(_Shape):
    """An event of a stream."""

    data: str = Field(description="JSON; of chat completions and completions the last is `[DONE]`")
    event: str = Field("", description="The `type` of the data, in Responses and Messages")
    id: str = Field("", description="In chat completions and completions: what `Last-Event-ID` names")


# --- chat completions, completions, embeddings


class _Cached(_Shape):
    cached_tokens: int


class _Reasoned(_Shape):
    reasoning_tokens: int


class Usage(_Shape):
    """The tokens of a request: what is paid for."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _Cached
    completion_tokens_details: _Reasoned


class CalledFunction(_Shape):
    name: str
    arguments: str = Field(description="JSON, as the model wrote it")


class ToolCall(_Shape):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(_Shape):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str = Field("", description="What a model that reasons thought first")
    tool_calls: list[ToolCall] = []


class _Token(_Shape):
    token: str
    logprob: float
    bytes: list[int]


class _TokenChoice(_Token):
    top_logprobs: list[_Token]


class ChatLogprobs(_Shape):
    content: list[_TokenChoice]
    refusal: None


class ChatChoice(_Shape):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(_Shape):
    """A whole answer. Streamed, it comes as `chat.completion.chunk` objects, and `[DONE]`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    service_tier: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionLogprobs(_Shape):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(_Shape):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]


class Completion(_Shape):
    """A whole answer."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    service_tier: str
    choices: list[CompletionChoice]
    usage: Usage


class Embedding(_Shape):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str = Field(description="Numbers; or float32 in base64, if that was asked for")


class _EmbeddingsUsage(_Shape):
    prompt_tokens: int
    total_tokens: int


class Embeddings(_Shape):
    """One vector for each input, in the order of the inputs."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: _EmbeddingsUsage


# --- Responses


class _InputDetails(_Shape):
    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(_Shape):
    input_tokens: int
    input_tokens_details: _InputDetails
    output_tokens: int
    output_tokens_details: _Reasoned
    total_tokens: int


class ResponseFault(_Shape):
    code: str
    message: str


class OutputItem(_Shape):
    """A `message`, a `reasoning` or a `function_call`."""

    type: Literal["message", "reasoning", "function_call"]
    id: str
    status: str


class IncompleteDetails(_Shape):
    reason: str


class Response(_Shape):
    """A response, ended or not. Beside these keys it repeats what it was asked with."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]
    error: ResponseFault | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    previous_response_id: str | None
    instructions: str | None
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    metadata: dict[str, str]
    store: bool
    background: bool
    service_tier: str


class DeletedResponse(_Shape):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItem(_Shape):
    type: str
    id: str


class InputItems(_Shape):
    """A page of what a response was given."""

    object: Literal["list"]
    data: list[InputItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(_Shape):
    object: Literal["response.input_tokens"]
    input_tokens: int


# --- Anthropic's Messages


class MessagesUsage(_Shape):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class ContentBlock(_Shape):
    """`text`, `thinking` or `tool_use`."""

    type: Literal["text", "thinking", "tool_use"]


class Message(_Shape):
    """A whole answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(_Shape):
    input_tokens: int


# --- models, tokens, keys, secrets, health


class Model(_Shape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    kind: Literal["chat", "embedding"]


class AnthropicModel(_Shape):
    """What is told of a model to who sends `anthropic-version`."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int


class Models(_Shape):
    object: Literal["list"]
    data: list[Model]


class AnthropicModels(_Shape):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


class Tokens(_Shape):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] = []


class Text(_Shape):
    prompt: str


class KeyLimits(_Shape):
    requests_per_minute: int | None
    concurrent_requests: int | None


class KeyUse(_Shape):
    requests_last_minute: int
    tokens_last_minute: int
    open_requests: int
    reset_ms: int


class Key(_Shape):
    """What the key may do, and has used."""

    object: Literal["key"]
    id: str
    kind: str
    project: str
    organization: str
    models: list[str]
    limits: KeyLimits
    used: KeyUse
    expires_at: str | None


class SecretSession(_Shape):
    type: Literal["responses"]
    model: str | None


class ClientSecret(_Shape):
    value: str
    expires_at: int
    session: SecretSession


class Health(_Shape):
    status: Literal["ok"]


class Ready(_Shape):
    """What the gateway waits for, if anything."""

    ready: bool
    store: bool
    listening: bool
    draining: bool
    models: dict[str, Any]
