"""What schemathesis is told before it asks (SCHEMATHESIS_HOOKS): the one thing that a document cannot say is which
models there are, and answers are short, so that more can be asked."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import schemathesis

from tests.platform import MODEL

ONCE = "Idempotency-Key"
#: Fields that say how much is to be made, and the most that is.
SHORT = {"max_tokens": 4, "max_completion_tokens": 4, "max_output_tokens": 4, "n": 2, "min_tokens": 4}


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: dict[str, Any]) -> None:
    """Only what is valid is changed, and stays so; what is not must be refused as it is."""
    once = str((case.headers or {}).get(ONCE, ""))
    if 0 < len(once) < 256 and once.isascii() and once.isprintable():
        case.headers[ONCE] = str(uuid4())  # one that was sent before would tell of another request
    body = case.body
    if not isinstance(body, dict):
        return
    if isinstance(name := body.get("model"), str) and 0 < len(name) <= 256:
        body["model"] = "vectors" if case.path == "/v1/embeddings" else MODEL
    if type(body.get("best_of")) is int and 0 < body["best_of"] <= 16:
        body["best_of"] = None  # no document can say that it must be the same as n
    session = body.get("session")
    if isinstance(session, dict) and isinstance(session.get("model"), str) and len(session["model"]) <= 256:
        session["model"] = MODEL
    for field, most in SHORT.items():
        asked = body.get(field)
        if (
            isinstance(asked, int | float)
            and not isinstance(asked, bool)
            and 1 <= asked < 2**31
            and asked == int(asked)
        ):
            body[field] = min(int(asked), most)  # to JSON Schema 1.0 is an integer, to us it is none
