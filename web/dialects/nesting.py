"""JSON as it may come from a client: what reads it must not be what it breaks. Pure.

The decoder stops by itself where the interpreter's stack would end, some 900 levels down, and says so. But what comes
after it walks the value too, each in its own way, and so a body is bounded far below that, and before anybody walks.
"""

from __future__ import annotations

from typing import Any

import msgspec

from core.errors import BadRequest

#: Objects and lists within each other in a body: twice what a schema may have (draft.JSON_DEPTH_MAX).
DEPTH_MAX = 128


def decoded(raw: bytes | str) -> Any:
    """The JSON value.

    Raises:
      BadRequest: it is none, or nested too deeply.
    """
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeError) as e:
        raise BadRequest(f"It is not valid JSON: {e}.", code="invalid_json") from None
    except RecursionError:
        raise _too_deep() from None
    if _opened(raw) > DEPTH_MAX and is_deep(value, DEPTH_MAX):
        raise _too_deep()
    return value


def _opened(raw: bytes | str) -> int:
    """No value is nested deeper than this, and counting it takes a millisecond at most."""
    if isinstance(raw, bytes):
        return raw.count(b"[") + raw.count(b"{")
    return raw.count("[") + raw.count("{")


def is_deep(value: Any, most: int) -> bool:
    """There are more than so many objects and lists within each other. Level by level, without recursion."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(most):
        level = [
            member
            for each in level
            for member in (each.values() if type(each) is dict else each)
            if type(member) is dict or type(member) is list
        ]
        if not level:
            return False
    return True


def _too_deep() -> BadRequest:
    return BadRequest(
        f"It is nested more than {DEPTH_MAX} deep. Make it flatter.",
        code="invalid_json",
    )
