"""What every dialect shares: the draft a body becomes, the checks common to all bodies, and what an ending means.

A draft is a request before admission: what the body asks for, whichever API it came by. Nothing here is unset by
accident: null counts as absent, a known field of the wrong type is refused by name, an unknown field is ignored,
and a field that would change the answer but is not served yet is refused rather than ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from core.errors import BadRequest, ForebayError, GatewayLost, RequestFailed, Unavailable, WorkerLost
from core.values import Class, Ending, Outcome, Sampling

STOPS_MAX = 4  #: stop strings in a request
STOP_CHARS_MAX = 1024  #: in one stop string: every step of the engine compares with all of it
NAME_CHARS_MAX = 256  #: in the name of a model
ECHO_CHARS_MAX = 512  #: in a field that an answer repeats: it is kept as long as its stream can be shown again
INT32_MAX = 2**31 - 1  #: no count that a caller sends may be larger
METADATA_PAIRS_MAX = 16  #: OpenAI's own bounds, here and in the next two
METADATA_KEY_CHARS_MAX = 64
METADATA_VALUE_CHARS_MAX = 512

_CLASSES = {"priority": Class.INTERACTIVE, "flex": Class.BULK}

Dialect = Literal["chat", "responses"]
Value = TypeVar("Value", bound=BaseModel)


class Message(msgspec.Struct, frozen=True):
    """One turn of the conversation, as the chat template sees it."""

    role: str
    content: str


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """What a body asks for. Admission makes a Request of it."""

    dialect: Dialect
    model: str
    messages: tuple[Message, ...]
    max_tokens: int | None = None  #: None: as many as the model's entry in the catalogue says
    sampling: Sampling = Sampling(max_tokens=0)  #: but for max_tokens, which is admission's decision
    stream: bool = False
    timeout_s: float | None = None  #: how long the caller waits for it to begin
    linger_ms: int = 0  #: how long it may go on after its client went away
    include_usage: bool = False  #: a chat stream ends with a chunk that has the usage
    cls: Class = Class.DEFAULT
    echo: dict[str, Any] = {}  #: what a Responses answer repeats of its request


def _well_formed(text: str) -> str:
    # JSON can spell half a surrogate pair ("\ud800"), which neither a tokenizer nor an answer can carry.
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("text", "Input should be valid Unicode, without lone surrogates") from None
    return text


Text = Annotated[str, AfterValidator(_well_formed)]


def _part_text(part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise PydanticCustomError("content_part", "Every content part should be an object with a 'type'")
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise PydanticCustomError(
            "content_part",
            "Content parts of type '{kind}' are not supported, only text",
            {"kind": kind.encode("ascii", "replace").decode()[:NAME_CHARS_MAX]},
        )
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise PydanticCustomError("content_part", "The text of a content part should be a string")
    return text


def _content_text(content: object) -> str:
    """One string of whatever form a content has. Parts are joined by a newline, as vLLM does."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part_text(part) for part in content)
    raise PydanticCustomError("content", "Input should be a string, null or a list of text parts")


Content = Annotated[Text, BeforeValidator(_content_text)]


def _stops(stop: object) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else None
    if stops is None or not all(isinstance(each, str) for each in stops):
        raise PydanticCustomError("stop", "Input should be a string or a list of strings")
    if len(stops) > STOPS_MAX:
        raise PydanticCustomError("stop", "At most {most} stop strings are allowed", {"most": STOPS_MAX})
    if not all(0 < len(each) <= STOP_CHARS_MAX for each in stops):
        raise PydanticCustomError("stop", "A stop string should have 1 to {most} characters", {"most": STOP_CHARS_MAX})
    return stops


def _top_k(top_k: int) -> int:
    return max(top_k, 0)  # vLLM's callers also write -1 for "off"


Count = Annotated[int, Field(ge=1, le=INT32_MAX)]
Metadata = Annotated[
    dict[
        Annotated[Text, Field(max_length=METADATA_KEY_CHARS_MAX)],
        Annotated[Text, Field(max_length=METADATA_VALUE_CHARS_MAX)],
    ],
    Field(max_length=METADATA_PAIRS_MAX),
]


class Body(BaseModel):
    """The fields that every generating body has."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    model: Annotated[Text, Field(min_length=1, max_length=NAME_CHARS_MAX)]
    stream: bool = False
    service_tier: Text = "auto"
    timeout: Annotated[float, Field(gt=0, le=86_400)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX), AfterValidator(_top_k)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[tuple[Text, ...], BeforeValidator(_stops)] = ()
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    ignore_eos: bool = False
    metadata: Metadata = {}
    store: bool = False
    user: Text | None = None
    safety_identifier: Annotated[Text, Field(max_length=128)] | None = None
    prompt_cache_key: Annotated[Text, Field(max_length=ECHO_CHARS_MAX)] | None = None
    parallel_tool_calls: bool = True

    @model_validator(mode="before")
    @classmethod
    def _null_is_unset(cls, body: Any) -> Any:
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body

    def knobs(self) -> dict[str, Any]:
        """These fields by the names they have in a Draft."""
        asked = self.model_dump(include=set(Sampling.__struct_fields__) & set(Body.model_fields))
        return {
            "model": self.model,
            "stream": self.stream,
            "timeout_s": self.timeout,
            "cls": _CLASSES.get(self.service_tier, Class.DEFAULT),
            "sampling": Sampling(max_tokens=0, **asked),
        }


#: Fields that change the answer and are not served yet, with the values that ask for nothing.
UNSERVED: Mapping[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "structured_outputs": (),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "prompt_logprobs": (),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}


def validated(schema: type[Value], body: object, unserved: Mapping[str, tuple[Any, ...]]) -> Value:
    """The body as `schema` sees it.

    Raises:
      BadRequest: the first fault, naming its field.
    """
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.")
    for name, value in body.items():
        if value is not None:
            _refuse_unserved(name, value, unserved)
    try:
        return schema.model_validate(body)
    except ValidationError as e:
        raise _first_fault(e) from None


def _refuse_unserved(name: str, value: object, unserved: Mapping[str, tuple[Any, ...]]) -> None:
    if name.startswith("guided_"):
        # Ignored, it would give an answer that looks constrained and is not.
        raise not_served(name, "vLLM removed it, and structured output is not served yet")
    nothing = unserved.get(name)
    if nothing is None or any(type(value) is type(same) and value == same for same in nothing):
        return
    hint = f" or send {msgspec.json.encode(nothing[0]).decode()}" if nothing else ""
    raise not_served(name, f"leave it out{hint}")


def not_served(param: str, hint: str) -> BadRequest:
    """The refusal of a field that this platform does not serve yet."""
    return BadRequest(f"'{param}' is not supported yet: {hint}.", param=param, code="unsupported_parameter")


def _first_fault(e: ValidationError) -> BadRequest:
    fault = e.errors(include_url=False, include_context=False, include_input=False)[0]
    param = _path(fault["loc"])
    if fault["type"] == "missing":
        return BadRequest(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")
    message = "Input should be an object" if fault["type"] == "model_type" else fault["msg"]
    return BadRequest(f"Invalid '{param}': {message}.", param=param)


def _path(loc: tuple[int | str, ...]) -> str:
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in loc)
    # A key of `metadata` is the caller's own text, which may be long, or no text at all.
    return "".join(steps).lstrip(".").encode("ascii", "replace").decode()[:NAME_CHARS_MAX]


def error_of(ending: Ending) -> ForebayError:
    """The error that an ending without an answer stands for."""
    message = ending.message or None
    match ending.outcome:
        case Outcome.EXPIRED:
            return Unavailable(message or "The request waited longer than its deadline. Retry shortly.", code="expired")
        case Outcome.WORKER_LOST:
            return WorkerLost(message)
        case Outcome.GATEWAY_LOST:
            return GatewayLost(message)
        case Outcome.CANCELLED:
            return RequestFailed(message or "The request was cancelled.", code="cancelled")
        case _:
            return RequestFailed(message)
