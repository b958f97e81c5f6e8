"""Tokens of texts and texts of tokens, in vLLM's own shapes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from flask import Blueprint, Response, g
from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from core.catalog import Model
from core.errors import BadRequest, UnknownModel
from web import bounds
from web.app import gateway
from web.auth import may_use
from web.dialects import chat
from web.dialects.draft import NAME_CHARS_MAX, Text, TokenId, nullable, validated, without_nulls
from web.render import Renderer
from web.transports.http import body

blueprint = Blueprint("tokens", __name__)

#: Characters of a text, and ids of tokens, in a request. No prompt of 100,000 tokens comes near.
TEXT_CHARS_MAX = 2**20
TOKENS_MAX = 2**20

#: What makes the prompt of a conversation, in a chat body.
_CHAT = ("model", "messages", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort", "chat_template")
#: Every conversation ends where the assistant begins, and its template has the special tokens.
_UNSERVED: dict[str, tuple[Any, ...]] = {"add_generation_prompt": (True,), "continue_final_message": (False,)}
_UNSERVED_OF_CHAT = {**_UNSERVED, "add_special_tokens": (False,)}


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", json_schema_extra=nullable)

    model: Annotated[Text, Field(min_length=1, max_length=NAME_CHARS_MAX)]

    @model_validator(mode="before")
    @classmethod
    def _null_is_unset(cls, asked: Any) -> Any:
        return without_nulls(asked)


class TokenizeBody(_Body):
    prompt: Annotated[Text, Field(max_length=TEXT_CHARS_MAX)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False


def _conversation() -> type[BaseModel]:
    """The same of a conversation, whose fields `chat` checks. For the schema."""
    told: dict[str, Any] = {
        name: (field.annotation, field) for name, field in chat.ChatBody.model_fields.items() if name in _CHAT
    }
    told["add_special_tokens"] = (Literal[False], False)
    return create_model("Conversation", __base__=TokenizeBody, **told)


TokenizeForms: Any = TokenizeBody | _conversation()


class DetokenizeBody(_Body):
    tokens: Annotated[list[TokenId], Field(max_length=TOKENS_MAX)]


@blueprint.post("/tokenize")
@blueprint.post("/v1/tokenize")
def tokenize() -> Response:
    """The tokens of a text, or of a conversation as it would be admitted."""
    given = body()
    chats = isinstance(given, dict) and given.get("messages") is not None
    asked = validated(TokenizeBody, given, _UNSERVED_OF_CHAT if chats else {})
    model, renderer = _model(asked.model)
    if chats and isinstance(given, dict):
        tokens = _of_chat(given)
    elif asked.prompt is not None:
        tokens = renderer.encode(asked.prompt, special=asked.add_special_tokens)
    else:
        raise BadRequest("Either 'prompt' or 'messages' is required.", param="prompt")
    strings = {"token_strs": renderer.pieces(tokens)} if asked.return_token_strs else {}
    return _json({"count": len(tokens), "max_model_len": model.context_tokens, "tokens": tokens, **strings})


@blueprint.post("/detokenize")
@blueprint.post("/v1/detokenize")
def detokenize() -> Response:
    """The text of these tokens, special ones too."""
    asked = validated(DetokenizeBody, body(), {})
    _, renderer = _model(asked.model)
    bounds.check_known("tokens", asked.tokens, renderer.vocabulary)
    return _json({"prompt": renderer.decode(asked.tokens, special=True)})


def _of_chat(given: dict[str, Any]) -> list[int]:
    draft = chat.parse({name: given[name] for name in _CHAT if name in given})
    [tokens] = gateway().admission.prompts(g.caller, draft)
    return tokens


def _model(name: str) -> tuple[Model, Renderer]:
    parts = gateway()
    model = parts.catalog.get(name)
    if model is None or not may_use(g.caller, name):
        raise UnknownModel(f"The model `{name}` does not exist, or this key may not use it.", param="model")
    return model, parts.admission.renderers[name]


def _json(answer: dict[str, Any]) -> Response:
    # The standard library would hold every stream up, for a long list.
    return Response(orjson.dumps(answer), mimetype="application/json")
