"""What is put down of a request so that any gateway can show its stream again. Pure.

It holds what an answer repeats of its request and who may see it. The prompt only of a response that is to be stored,
and only until it is: its input items, for whichever gateway sees its end. Of all others not even `instructions`,
tools and schemas, which a stream that is shown again leaves empty. When it was made is in its id, its counts are in
its ending.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from core.errors import BadRequest
from core.values import Caller
from web.dialects.draft import Dialect, Draft, Tier

#: Fields of a Responses echo that are a part of the prompt, and what is shown where it is not kept.
_PROMPT: dict[str, Any] = {"instructions": None, "tools": []}


class View(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request, as its answers show it."""

    dialect: Dialect
    model: str
    caller: Caller  #: whose key made it: nobody else may see it
    stream: bool = True
    linger_ms: int = 0
    include_usage: bool = False
    tier: Tier = "default"
    width: int = 1  #: answers in all
    named: bool = False  #: one function had to be called
    echo: dict[str, Any] = {}
    background: bool = False
    previous: str = ""  #: the stored response that it goes on from
    once: str = ""  #: the hash of the Idempotency-Key that it came with (core/limits/idempotency.py)
    items: bytes | None = None  #: JSON: what is to be stored of its input; None: nothing, or it is

    def kept(self) -> View:
        """The same, once it is stored."""
        return msgspec.structs.replace(self, items=None)


_decoder = msgspec.msgpack.Decoder(View)


def view_of(draft: Draft, caller: Caller) -> View:
    """How a draft's answers show it.

    Raises:
      BadRequest: its items cannot be written down.
    """
    return View(
        dialect=draft.dialect,
        model=draft.model,
        caller=caller,
        stream=draft.stream,
        linger_ms=draft.linger_ms,
        include_usage=draft.include_usage,
        tier=draft.tier,
        width=draft.width,
        named=draft.named,
        echo=echo_of(draft) if draft.store else _without_prompt(echo_of(draft)),
        background=draft.background,
        previous=draft.previous,
        items=_items(draft.items) if draft.store else None,
    )


def echo_of(shown: Draft | View) -> dict[str, Any]:
    """What an answer repeats of its request, as it was served: admission and storage may have decided otherwise."""
    if isinstance(shown, View):
        return shown.echo
    served: dict[str, Any] = {"store": shown.store, "background": shown.background, "service_tier": shown.tier}
    if shown.tools is None:
        served["tools"] = []
    return {name: served.get(name, value) for name, value in shown.echo.items()}


def _without_prompt(echo: dict[str, Any]) -> dict[str, Any]:
    bare = {name: _PROMPT.get(name, value) for name, value in echo.items()}
    format_ = bare.get("text", {}).get("format", {})
    return {**bare, "text": {**bare["text"], "format": {**format_, "schema": {}}}} if "schema" in format_ else bare


def _items(items: list[Any]) -> bytes:
    # ASCII, since what we do not read of an item may hold half a surrogate pair.
    try:
        return json.dumps(items, separators=(",", ":")).encode()
    except RecursionError:
        raise BadRequest("Invalid 'input': it is nested too deeply.", param="input") from None


def encode(view: View) -> bytes:
    return msgspec.msgpack.encode(view)


def decode(raw: bytes) -> View:
    """Read a view of this version or an older one.

    Raises:
      msgspec.DecodeError: it is no view.
    """
    return _decoder.decode(raw)
