"""The models that a key may use."""

from __future__ import annotations

from typing import Any

from flask import Blueprint, Response, jsonify

from core.catalog import Model
from core.errors import UnknownModel
from web.app import gateway

blueprint = Blueprint("models", __name__)


@blueprint.get("/v1/models")
def models() -> Response:
    return jsonify(object="list", data=[_object(model) for model in gateway().catalog.values()])


@blueprint.get("/v1/models/<path:name>")
def model(name: str) -> Response:
    found = gateway().catalog.get(name)
    if found is None:
        raise UnknownModel(f"The model `{name}` does not exist, or this key may not use it.", param="model")
    return jsonify(_object(found))


def _object(model: Model) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": 0,  # the catalogue keeps no date, and SDKs require the key
        "owned_by": "forebay",
        "max_model_len": model.context_tokens,
    }
