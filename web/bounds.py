"""What is refused because of the model that is asked for it: a draft was checked without knowing the model. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from core.catalog import Model
from core.errors import BadRequest
from core.values import Tools
from web.dialects.draft import Draft

#: Where each dialect has its prompt.
PROMPT_FIELDS = {"completions": "prompt", "embeddings": "input"}


def prompt_field(draft: Draft) -> str:
    return PROMPT_FIELDS.get(draft.dialect, "messages")


def check(model: Model, draft: Draft) -> None:
    """What can be seen before the prompt is known.

    Raises:
      BadRequest: the model cannot do it.
    """
    if model.kind == "embedding" and draft.dialect != "embeddings":
        raise _unsupported(f"`{model.name}` makes embeddings and does not answer: send to /v1/embeddings.", "model")
    if model.kind != "embedding" and draft.dialect == "embeddings":
        raise _unsupported(f"`{model.name}` makes no embeddings: `GET /v1/models` lists the models.", "model")
    if model.kind != "embedding" and draft.width > model.slots:
        raise BadRequest(
            f"{draft.width} answers were asked for, and this model makes {model.slots} at once at most.", param="n"
        )


def tools_for(model: Model, draft: Draft) -> Tools | None:
    """The functions that the model is given.

    Raises:
      BadRequest: it could not call them.
    """
    tools = draft.tools
    if tools is None or model.calls:
        return tools
    # Clients of Responses send their tools with every request, so those that may be left alone are.
    if tools.choice == "none" or (draft.dialect == "responses" and not tools.forced):
        return None
    raise _unsupported(f"`{model.name}` calls no tools. Leave out 'tools', or send tool_choice \"none\".", "tools")


def check_tokens(draft: Draft, prompts: Sequence[Sequence[int]], vocabulary: int) -> None:
    """What can be seen once the prompt is.

    Raises:
      BadRequest: a prompt is empty, or a token is not one of the model's.
    """
    param = prompt_field(draft)
    if not all(prompts):
        raise BadRequest(f"Invalid '{param}': a prompt should have a token at least.", param=param)
    given = (max(prompt) for prompt in draft.prompts if not isinstance(prompt, str))
    for name, tokens in (
        (param, given),
        ("stop_token_ids", draft.sampling.stop_token_ids),
        ("logit_bias", draft.sampling.logit_bias),
    ):
        check_known(name, tokens, vocabulary)


def check_known(param: str, tokens: Iterable[int], vocabulary: int) -> None:
    for token in tokens:
        if token >= vocabulary:
            raise BadRequest(
                f"Invalid '{param}': there is no token {token}, only those below {vocabulary}.", param=param
            )


def _unsupported(message: str, param: str) -> BadRequest:
    return BadRequest(message, param=param, code="unsupported_parameter" if param == "tools" else "unsupported_model")
