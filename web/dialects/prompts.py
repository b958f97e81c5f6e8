"""Prompts as they are: text or token ids, one or several, as completions and embeddings take them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from web.dialects.draft import INT32_MAX, TokenId, well_formed

Prompt = str | tuple[int, ...]
_Ids = Annotated[list[TokenId], Field(min_length=1)]
#: What `prompts` takes.
PromptForms = str | _Ids | Annotated[list[str | _Ids], Field(min_length=1)]


def prompts(given: object) -> tuple[Prompt, ...]:
    """A string, a list of strings, a list of token ids, or a list of such lists.

    Raises:
      PydanticCustomError: it is none of these.
    """
    if isinstance(given, str):
        return (well_formed(given),)
    if not isinstance(given, list) or not given:
        raise PydanticCustomError("prompt", "Input should be a string, token ids, or a list of either, and not empty")
    if isinstance(given[0], int):
        return (_ids(given),)
    return tuple(_prompt(each) for each in given)


def at_most(most: int) -> AfterValidator:
    """So many prompts. A `max_length` would be told of the text of one as well."""

    def check(given: tuple[Prompt, ...]) -> tuple[Prompt, ...]:
        if len(given) > most:
            raise PydanticCustomError("prompt", "At most {most} are allowed in a request", {"most": most})
        return given

    return AfterValidator(check)


def _prompt(given: Any) -> Prompt:
    return well_formed(given) if isinstance(given, str) else _ids(given)


def _ids(given: Any) -> tuple[int, ...]:
    if not isinstance(given, list) or not given or any(type(each) is not int for each in given):
        raise PydanticCustomError("prompt", "Input should be a string, token ids, or a list of either, and not empty")
    if min(given) < 0 or max(given) > INT32_MAX:
        raise PydanticCustomError("prompt", "A token id should be at least 0, and one that the model has")
    return tuple(given)
