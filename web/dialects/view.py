"""What is put down of a request so that any gateway can show its stream again. Pure.

It holds what an answer repeats of its request and who may see it: never the prompt, and so not `instructions` either,
which a stream that is shown again leaves null. When it was made is in its id, its counts are in its ending.
"""

from __future__ import annotations

from typing import Any

import msgspec

from core.values import Caller
from web.dialects.draft import Dialect, Draft

#: Fields of the echo that are a part of the prompt.
_PROMPT = ("instructions",)


class View(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request, as its answers show it."""

    dialect: Dialect
    model: str
    caller: Caller  #: whose key made it: nobody else may see it
    stream: bool = True
    linger_ms: int = 0
    include_usage: bool = False
    echo: dict[str, Any] = {}


_decoder = msgspec.msgpack.Decoder(View)


def view_of(draft: Draft, caller: Caller) -> View:
    return View(
        dialect=draft.dialect,
        model=draft.model,
        caller=caller,
        stream=draft.stream,
        linger_ms=draft.linger_ms,
        include_usage=draft.include_usage,
        echo={name: None if name in _PROMPT else value for name, value in draft.echo.items()},
    )


def encode(view: View) -> bytes:
    return msgspec.msgpack.encode(view)


def decode(raw: bytes) -> View:
    """Read a view of this version or an older one.

    Raises:
      msgspec.DecodeError: it is no view.
    """
    return _decoder.decode(raw)
