"""What the dialects share about tools: a function as it is checked, the choice among them, the ids of calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from core.errors import BadRequest
from core.values import Tools
from web.dialects import schemas
from web.dialects.draft import Json, Text

TOOLS_MAX = 128  #: functions in a request
FUNCTION_NAME = r"^[a-zA-Z0-9_-]{1,64}$"

FunctionName = Annotated[str, Field(pattern=FUNCTION_NAME)]


class Function(BaseModel):
    """A function that the model may call, as OpenAI describes one."""

    model_config = ConfigDict(strict=True, frozen=True)

    name: FunctionName
    description: Text | None = None
    parameters: Json | None = None
    strict: bool | None = None

    def plain(self) -> dict[str, Any]:
        """What was said of it."""
        return self.model_dump(exclude_none=True)


def tools_of(
    functions: Sequence[dict[str, Any]], choice: str = "auto", *, parallel: bool = True, only: Collection[str] = ()
) -> Tools | None:
    """The functions that a model may call; None: none. `only`: of these.

    Raises:
      BadRequest: it must call one that there is not, or one whose arguments are too dear to be kept to.
    """
    wanted = Tools(functions=tuple(functions), choice=choice, parallel=parallel)
    names = {function["name"] for function in functions}
    for name in (*only, wanted.named):
        if name and name not in names:
            raise BadRequest(f"Invalid 'tool_choice': there is no function '{name}' in 'tools'.", param="tool_choice")
    if wanted.forced and not functions:
        raise BadRequest("Invalid 'tool_choice': there are no 'tools' to choose from.", param="tool_choice")
    if only:
        kept = tuple(function for function in functions if function["name"] in only)
        wanted = Tools(functions=kept, choice=choice, parallel=parallel)
    _check_compilable(wanted)
    return wanted if wanted.functions else None


def _check_compilable(tools: Tools) -> None:
    """The engine makes a grammar of the functions that it must call, of strict ones, and of all where it may make one
    call only; others are text to it, whatever they are."""
    for function in tools.functions:
        if _keeps_to(tools, function) and (fault := schemas.fault(function.get("parameters"))):
            raise BadRequest(f"Invalid 'tools': the parameters of '{function['name']}': {fault}.", param="tools")


def _keeps_to(tools: Tools, function: dict[str, Any]) -> bool:
    if tools.named:
        return bool(function["name"] == tools.named)
    return tools.bound and (tools.forced or not tools.parallel or bool(function.get("strict")))


def call_id(request_id: str, choice: int, call: int) -> str:
    """The id of an answer's call, the same on every gateway.

    OpenAI takes ids of at most 40 characters, and so long is this for 16 answers of 256 calls.
    """
    return f"call_{request_id.replace('-', '')}{choice:x}{call:02x}"
