"""The API's own description: /openapi.json, the page /docs over it, and /llms.txt. For everybody, without a key.

The page is Swagger UI, from the package that carries it: nothing of it comes from elsewhere.
"""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from importlib import resources
from typing import Any

import orjson
from flask import Blueprint, Response, request

from core.errors import NotFound
from web.dialects import chat, completions, draft, embeddings, messages, nesting, responses, schemas
from web.dialects.tools import TOOLS_MAX
from web.reference import ASSETS, document, llms
from web.routes import secrets, tokens
from web.transports.http import BODY_MAX, UPLOAD_S

blueprint = Blueprint("reference", __name__)

#: The models that check bodies, by the names that the table of operations calls them.
BODIES: dict[str, Any] = {
    "ChatBody": chat.ChatBody,
    "CompletionsBody": completions.CompletionsBody,
    "CountBody": messages.CountBody,
    "DetokenizeBody": tokens.DetokenizeBody,
    "EmbeddingsBody": embeddings.EmbeddingsBody,
    "MessagesBody": messages.MessagesBody,
    "ResponsesBody": responses.ResponsesBody,
    "SecretBody": secrets.SecretBody,
    "TokenizeBody": tokens.TokenizeForms,
}

LIMITS = {
    "body": f"{BODY_MAX // 2**20} MiB, within {UPLOAD_S:.0f} seconds",
    "context": "what `GET /v1/models` says of the model (`max_model_len`)",
    "rate": "requests and tokens per minute, requests at once, and money, of a key, its project and its organisation: "
    "`GET /v1/key`, and the `x-ratelimit-*` headers",
    "answers (`n`)": str(draft.ANSWERS_MAX),
    "stop strings": str(draft.STOPS_MAX),
    "tools": f"{TOOLS_MAX}, at Anthropic's address {messages.TOOLS_MAX}",
    "embedding inputs": str(embeddings.INPUTS_MAX),
    "messages or items": str(draft.MESSAGES_MAX),
    "nesting of a body": f"{nesting.DEPTH_MAX} levels",
    "JSON schemas": f"{draft.JSON_BYTES_MAX // 1024} KiB, {draft.JSON_DEPTH_MAX} levels, {schemas.PROPERTIES_MAX} "
    f"properties, {schemas.ENUM_MAX} values of enums, {schemas.PATTERNS_MAX} patterns of {schemas.PATTERN_CHARS_MAX} "
    "characters without a repeat within a repeat",
}

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Forebay API</title>
<link rel="icon" type="image/png" href="docs/favicon.png">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="reference"></div>
<noscript>This page needs JavaScript. The same in short: <a href="llms.txt">llms.txt</a>.</noscript>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
#: Without a validator, which would be asked over the network.
START = """SwaggerUIBundle({
  url: "openapi.json",
  dom_id: "#reference",
  deepLinking: true,
  validatorUrl: null,
  defaultModelsExpandDepth: -1,
  persistAuthorization: false,
});
"""
#: What the page may do. It carries a key while somebody tries things, so no other site has a word in it.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
#: The files of the page, and what they are; of those in the package, where. Nothing else is served.
KINDS = {"css": "text/css", "js": "text/javascript", "png": "image/png"}
FILES = {"favicon.png": "favicon-32x32.png"}
_HEADERS = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-cache"}


@blueprint.get("/openapi.json")
def openapi() -> Response:
    return _shown("openapi.json", "application/json")


@blueprint.get("/docs")
def docs() -> Response:
    response = _shown("docs", "text/html")
    response.headers["Content-Security-Policy"] = POLICY
    return response


@blueprint.get("/docs/<asset>")
def docs_asset(asset: str) -> Response:
    if asset not in ASSETS:
        raise NotFound
    return _shown(asset, KINDS[asset.rpartition(".")[2]])


@blueprint.get("/llms.txt")
def llms_txt() -> Response:
    return _shown("llms.txt", "text/plain")


def _shown(name: str, kind: str) -> Response:
    """Answered with 304 where the client has it."""
    content, etag = _made(name)
    response = Response(content, mimetype=kind, headers=_HEADERS)
    response.set_etag(etag)
    response.make_conditional(request)
    return response


@cache
def _made(name: str) -> tuple[bytes, str]:
    """What is shown under a name, and its ETag: made once."""
    match name:
        case "openapi.json":
            content = orjson.dumps(document(BODIES))
        case "docs":
            content = PAGE.encode()
        case "start.js":
            content = START.encode()
        case "llms.txt":
            content = llms(LIMITS).encode()
        case _:
            content = resources.files("flask_swagger_ui").joinpath("dist", FILES.get(name, name)).read_bytes()
    return content, blake2b(content, digest_size=16).hexdigest()
