"""The models that a key may use, as OpenAI lists them, and as Anthropic does for who sends `anthropic-version`."""

from __future__ import annotations

from typing import Any

from flask import Blueprint, Response, g, jsonify, request

from core.catalog import Model
from core.errors import BadRequest, UnknownModel
from web.app import gateway
from web.auth import may_use

blueprint = Blueprint("models", __name__)

#: The catalogue keeps no date, and SDKs require one: the epoch is Anthropic's own way to say that it is not known.
CREATED_S, CREATED_AT = 0, "1970-01-01T00:00:00Z"
#: Models in a page of Anthropic's list, and how many there may be.
PAGE, PAGE_MAX = 20, 1000


@blueprint.get("/v1/models")
def models() -> Response:
    found, limit = [model for name, model in gateway().catalog.items() if may_use(g.caller, name)], _limit()
    if _of_anthropic():
        return jsonify(_page(found, limit))
    return jsonify(object="list", data=[_object(model) for model in found])


@blueprint.get("/v1/models/<path:name>")
def model(name: str) -> Response:
    found = gateway().catalog.get(name)
    if found is None or not may_use(g.caller, name):
        raise UnknownModel(f"The model `{name}` does not exist, or this key may not use it.", param="model")
    return jsonify(_info(found) if _of_anthropic() else _object(found))


def _of_anthropic() -> bool:
    return "anthropic-version" in request.headers


def _object(model: Model) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": CREATED_S,
        "owned_by": "forebay",
        "max_model_len": model.context_tokens,
        "kind": model.kind,
    }


def _info(model: Model) -> dict[str, Any]:
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": CREATED_AT,
        "lifecycle": "active",
        "capabilities": None,
        "max_input_tokens": model.context_tokens,
        "max_tokens": model.context_tokens,
    }


def _page(found: list[Model], limit: int) -> dict[str, Any]:
    """The part of the list after `after_id`, or before `before_id`."""
    names = [model.name for model in found]
    if (before := request.args.get("before_id")) is not None:
        end = _index(names, before, "before_id")
        shown, more = found[max(0, end - limit) : end], end > limit
    else:
        after = request.args.get("after_id")
        start = 0 if after is None else _index(names, after, "after_id") + 1
        shown, more = found[start : start + limit], len(found) > start + limit
    ends = {"first_id": shown[0].name, "last_id": shown[-1].name} if shown else {"first_id": None, "last_id": None}
    return {"data": [_info(model) for model in shown], "has_more": more, **ends}


def _limit() -> int:
    said = request.args.get("limit", str(PAGE))
    if not (said.isascii() and said.isdecimal() and len(said) <= 4 and 1 <= int(said) <= PAGE_MAX):
        raise BadRequest(f"Invalid 'limit': Input should be a number from 1 to {PAGE_MAX}.", param="limit")
    return int(said)


def _index(names: list[str], name: str, param: str) -> int:
    if name not in names:
        raise BadRequest(f"Invalid '{param}': there is no such model.", param=param)
    return names.index(name)
