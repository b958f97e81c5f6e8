"""What every dialect shares: the draft a body becomes, the checks common to all bodies, and what an ending means.

A draft is a request before admission: what the body asks for, whichever API it came by. Nothing here is unset by
accident: null counts as absent, a known field of the wrong type is refused by name, an unknown field is ignored,
and a field that would change the answer but is not served yet is refused rather than ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from core.errors import (
    BadRequest,
    Cancelled,
    ClassShed,
    ForebayError,
    GatewayLost,
    MoneySpent,
    RequestFailed,
    Unavailable,
    WorkerLost,
)
from core.values import Class, Ending, Outcome, Sampling, Tools
from web.dialects import schemas

STOPS_MAX = 4  #: stop strings in a request
STOP_CHARS_MAX = 1024  #: in one stop string: every step of the engine compares with all of it
NAME_CHARS_MAX = 256  #: in the name of a model
ECHO_CHARS_MAX = 512  #: in a field that an answer repeats: it is kept as long as its stream can be shown again
INT32_MAX = 2**31 - 1  #: no count that a caller sends may be larger
METADATA_PAIRS_MAX = 16  #: OpenAI's own bounds, here and in the next two
METADATA_KEY_CHARS_MAX = 64
METADATA_VALUE_CHARS_MAX = 512

STOP_TOKENS_MAX = 128  #: token ids that end an answer
BIASES_MAX = 1024  #: tokens that are made likelier or less likely
JSON_BYTES_MAX = 64 * 1024  #: in a schema, and in what a chat template is told
JSON_DEPTH_MAX = 64  #: objects and lists within each other in these
CHOICES_MAX = 1024  #: answers to choose one of
CHOICE_CHARS_MAX = 16 * 1024  #: in one of them: it is compiled before the first token
#: Alternatives told of each token, as at OpenAI: vLLM's own bound too. The engine looks at its whole vocabulary for the
#: first one already, so that 20 cost it what 5 do, and none of the prompt's tokens are told of.
LOGPROBS_MAX = 20
ANSWERS_MAX = 8  #: to one prompt: each is a sequence in the engine
MESSAGES_MAX = 4096  #: turns or items in a body: a chat template goes through them one by one
PARTS_MAX = 4096  #: in one content
TOLD_CHARS_MAX = 64  #: in what a chat template is told

_CLASSES = {"priority": Class.INTERACTIVE, "flex": Class.BULK}

Dialect = Literal["chat", "completions", "responses", "messages", "embeddings"]
#: What is paid for, and so how soon it is served: the names of OpenAI's service tiers.
Tier = Literal["default", "priority", "flex"]
Value = TypeVar("Value", bound=BaseModel)


#: What a body may ask for, and what it gets: OpenAI has two names for the same ones.
ServiceTier = Literal["auto", "default", "flex", "priority", "scale", "fast"]
_TIERS: Mapping[str, Tier] = {"flex": "flex", "priority": "priority", "fast": "priority"}


class Call(msgspec.Struct, frozen=True):
    """A call that the model made in an earlier turn."""

    id: str
    name: str
    arguments: str  #: JSON, as the model wrote it


class Message(msgspec.Struct, frozen=True):
    """One turn of the conversation, as the chat template sees it."""

    role: str
    content: str
    calls: tuple[Call, ...] = ()  #: of an assistant
    reasoning: str = ""  #: of an assistant
    call_id: str = ""  #: of a tool: the call that this is the result of
    name: str = ""  #: of a tool: the function; of others: a participant


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    """What a body asks for. Admission makes a Request of it."""

    dialect: Dialect
    model: str
    messages: tuple[Message, ...] = ()
    prompts: tuple[str | tuple[int, ...], ...] = ()  #: instead: taken as they are, text or token ids
    tools: Tools | None = None
    reasons: bool = True  #: the model may think first, if it can
    template: dict[str, Any] = {}  #: what else the chat template is told
    n: int = 1  #: answers to each prompt
    max_tokens: int | None = None  #: None: as many as the model's entry in the catalogue says
    sampling: Sampling = Sampling(max_tokens=0)  #: but for max_tokens, which is admission's decision
    stream: bool = False
    timeout_s: float | None = None  #: how long the caller waits for it to begin
    linger_ms: int = 0  #: how long it may go on after its client went away
    include_usage: bool = False  #: a chat stream ends with a chunk that has the usage
    cls: Class = Class.DEFAULT
    tier: Tier = "default"
    echo: dict[str, Any] = {}  #: what an answer repeats of its request
    store: bool = False  #: it is kept, and can be gone on from
    background: bool = False  #: nobody waits for it
    previous: str = ""  #: the stored response that it goes on from
    refers: tuple[str, ...] = ()  #: stored responses whose items it names, without going on from them
    items: list[Any] = []  #: the input as it was given, to be kept with the answer
    affinity: str = ""  #: `prompt_cache_key` and its like: requests that name the same share a prefix

    @property
    def width(self) -> int:
        """Answers in all."""
        return self.n * max(1, len(self.prompts))

    @property
    def named(self) -> bool:
        """One function must be called."""
        return self.tools is not None and bool(self.tools.named)


def well_formed(text: str) -> str:
    # JSON can spell half a surrogate pair ("\ud800"), which neither a tokenizer nor an answer can carry.
    try:
        text.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("text", "Input should be valid Unicode, without lone surrogates") from None
    if "\0" in text:  # which Postgres cannot keep, and no text has
        raise PydanticCustomError("text", "Input should have no NUL character")
    return text


Text = Annotated[str, AfterValidator(well_formed)]


def _part_text(number: int, part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise PydanticCustomError("content_part", "Every content part should be an object with a 'type'")
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise PydanticCustomError(
            "content_part",
            "Content parts of type '{kind}' are not supported, only text, and part [{number}] is one",
            {"kind": kind.encode("ascii", "replace").decode()[:NAME_CHARS_MAX], "number": number},
        )
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise PydanticCustomError("content_part", "The text of a content part should be a string")
    return text


def check_parts(content: Sized) -> None:
    """A content has not too many parts."""
    if len(content) > PARTS_MAX:
        raise PydanticCustomError("content", "At most {most} parts are allowed, so join them", {"most": PARTS_MAX})


def _content_text(content: object) -> str:
    """One string of whatever form a content has. Parts are joined by a newline, as vLLM does."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        check_parts(content)
        return "\n".join(_part_text(number, part) for number, part in enumerate(content))
    raise PydanticCustomError("content", "Input should be a string, null or a list of text parts")


def text_part(*kinds: str) -> dict[str, Any]:
    """The schema of a part of a content: text of one of these kinds, or a refusal."""
    text, refusal = {"type": "string"}, {"type": "string", "const": "refusal"}
    forms = (("text", {"type": "string", "enum": list(kinds)}), ("refusal", refusal))
    return {
        "anyOf": [
            text,
            *(
                {"type": "object", "properties": {"type": kind, name: text}, "required": ["type", name]}
                for name, kind in forms
            ),
        ]
    }


_Part = Annotated[Any, WithJsonSchema(text_part("text", "input_text", "output_text"))]
Content = Annotated[Text, BeforeValidator(_content_text, json_schema_input_type=str | list[_Part] | None)]


_Stop = Annotated[str, Field(min_length=1, max_length=STOP_CHARS_MAX)]
#: What `_stops` takes.
_StopForms = _Stop | Annotated[list[_Stop], Field(max_length=STOPS_MAX)]


def _stops(stop: object) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else None
    if stops is None or not all(isinstance(each, str) for each in stops):
        raise PydanticCustomError("stop", "Input should be a string or a list of strings")
    if len(stops) > STOPS_MAX:
        raise PydanticCustomError("stop", "At most {most} stop strings are allowed", {"most": STOPS_MAX})
    if not all(0 < len(each) <= STOP_CHARS_MAX for each in stops):
        raise PydanticCustomError("stop", "A stop string should have 1 to {most} characters", {"most": STOP_CHARS_MAX})
    return stops


def _biases(biases: object) -> object:
    if not isinstance(biases, dict):
        raise PydanticCustomError("logit_bias", "Input should be an object of token ids and numbers")
    if len(biases) > BIASES_MAX:
        raise PydanticCustomError("logit_bias", "At most {most} tokens are allowed", {"most": BIASES_MAX})
    return {_token_id(token): bias for token, bias in biases.items()}


def _token_id(token: object) -> int:
    """A token's id, which JSON must spell as a string where it is a key."""
    text = str(token)
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and int(text) <= INT32_MAX):
        raise PydanticCustomError("logit_bias", "Its keys should be token ids")
    return int(text)


def _bounded_json(value: Any) -> Any:
    """A schema or the like, which is handed on as it is: it must be small enough, and fit what carries it."""
    try:
        size_bytes = len(msgspec.msgpack.encode(value))
        _check_texts(value, JSON_DEPTH_MAX)
    except (UnicodeEncodeError, OverflowError, TypeError):
        raise PydanticCustomError("json", "Input should have valid Unicode and numbers of at most 64 bits") from None
    except RecursionError:
        raise PydanticCustomError(
            "json", "Input should be nested at most {most} deep", {"most": JSON_DEPTH_MAX}
        ) from None
    if size_bytes > JSON_BYTES_MAX:
        raise PydanticCustomError("json", "Input should have at most {most} bytes", {"most": JSON_BYTES_MAX})
    return value


def _check_texts(value: Any, deeper: int) -> None:
    if isinstance(value, str):
        well_formed(value)
    elif isinstance(value, dict | list):
        if not deeper:
            raise RecursionError
        for each in (*value, *value.values()) if isinstance(value, dict) else value:
            _check_texts(each, deeper - 1)


def _decoded(schema: object) -> object:
    try:
        return msgspec.json.decode(schema) if isinstance(schema, str) else schema
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        raise PydanticCustomError("json", "Input should be an object, or one spelled in JSON") from None


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


TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
#: An object of the caller's own, bounded.
Json = Annotated[dict[str, Any], AfterValidator(_bounded_json)]


def _compilable(schema: Any) -> Any:
    if fault := schemas.fault(schema):
        raise PydanticCustomError("schema", "{fault}", {"fault": fault})
    return schema


#: A JSON schema that answers are to keep to.
Schema = Annotated[Json, AfterValidator(_compilable)]
_Choice = Annotated[Text, Field(min_length=1, max_length=CHOICE_CHARS_MAX)]


def without_nulls(body: Any) -> Any:
    """Null is unset, as typed clients send it for every field they know."""
    return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body


def described(form: Any) -> BeforeValidator:
    """What is checked later, and so has a type of its own, is said in a schema to have this form."""
    return BeforeValidator(_as_it_is, json_schema_input_type=form)


def _as_it_is(value: Any) -> Any:
    return value


def nullable(schema: dict[str, Any]) -> None:
    """Says in a schema that null is unset, as `without_nulls` has it."""
    fields = schema["properties"]
    for name in fields.keys() - set(schema.get("required", ())):
        default = {"default": fields[name].pop("default")} if "default" in fields[name] else {}
        fields[name] = {"anyOf": [fields[name], {"type": "null"}], **default}


def needed(kind: str, *names: str) -> Callable[[dict[str, Any]], None]:
    """Says in a schema that what is of one type needs more fields than others do."""

    def extra(schema: dict[str, Any]) -> None:
        others = [each for each in schema["properties"]["type"]["enum"] if each != kind]
        fields = {name: {"not": {"type": "null"}} for name in names}
        schema["anyOf"] = [
            {"properties": {"type": {"enum": others}}},
            {"properties": {"type": {"const": kind}, **fields}, "required": list(names)},
        ]

    return extra


def _one_of_its_fields(schema: dict[str, Any]) -> None:
    """Says in a schema that one way is chosen, and that what is null or false chooses none."""
    fields, unset = schema.pop("properties"), {"enum": [None, False]}
    schema["anyOf"] = [
        {
            "properties": {**dict.fromkeys(fields, unset), name: {"anyOf": field["anyOf"][:-1]}},
            "required": [name],
            "additionalProperties": unset,
        }
        for name, field in fields.items()
    ]


#: Ways of vLLM's that no caller is trusted with.
_RAW = frozenset(("regex", "grammar", "structural_tag"))


class StructuredOutputs(BaseModel):
    """vLLM's: what an answer must be like. One of its ways, but for raw regular expressions and grammars."""

    model_config = ConfigDict(strict=True, frozen=True, json_schema_extra=_one_of_its_fields)

    as_json: Annotated[Schema, BeforeValidator(_decoded, json_schema_input_type=dict[str, Any] | str)] | None = Field(
        None, alias="json"
    )
    choice: (
        Annotated[list[_Choice], Field(min_length=1, max_length=CHOICES_MAX), AfterValidator(_bounded_json)] | None
    ) = None
    json_object: Literal[True] | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_way(cls, asked: Any) -> Any:
        asked = without_nulls(asked)
        if not isinstance(asked, dict):
            return asked
        ways = {name: value for name, value in asked.items() if value is not False}
        for name in _RAW & ways.keys():
            # It would be compiled by the engine as it is, however long that takes.
            raise PydanticCustomError("raw_grammar", "'{name}' is not taken; send 'json' or 'choice'", {"name": name})
        known = {field.alias or name for name, field in cls.model_fields.items()}
        if len(ways) != 1 or not ways.keys() <= known:
            raise PydanticCustomError(
                "structured_outputs",
                "Input should have one of {known}, and nothing else",
                {"known": ", ".join(sorted(known))},
            )
        return ways

    def terms(self) -> dict[str, Any]:
        return self.model_dump(by_alias=True, exclude_none=True)


class _Schema(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Text | None = None
    as_json: Schema | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """OpenAI's: the same, of two kinds."""

    model_config = ConfigDict(strict=True, frozen=True, json_schema_extra=needed("json_schema", "json_schema"))

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _Schema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise PydanticCustomError("response_format", "Its 'json_schema' is missing")
        return self

    def terms(self) -> dict[str, Any]:
        if self.type == "text":
            return {}
        schema = self.json_schema.as_json if self.type == "json_schema" and self.json_schema else None
        return {"json_object": True} if schema is None else {"json": schema}


#: What a caller may tell a chat template: how the model is to think, in the words of the models that ask for it. A
#: template is a program, so that whatever else it looks at is ours to say.
TEMPLATE_KNOBS = (
    "clear_thinking",
    "enable_thinking",
    "preserve_thinking",
    "reasoning_effort",
    "thinking",
    "thinking_budget",
)
_KnobForms = bool | Annotated[int, Field(ge=-1, le=INT32_MAX)] | Annotated[str, Field(max_length=TOLD_CHARS_MAX)]


def _knob(told: object) -> object:
    if isinstance(told, str) and len(told) <= TOLD_CHARS_MAX:
        return well_formed(told)
    if isinstance(told, int) and -1 <= told <= INT32_MAX:
        return told
    raise PydanticCustomError(
        "template", "Input should be true, false, a count or a word of {most} characters", {"most": TOLD_CHARS_MAX}
    )


_Knob = Annotated[Any, BeforeValidator(_knob, json_schema_input_type=_KnobForms | None)]  # null is unset


def _only_knobs(told: object) -> object:
    for name in told if isinstance(told, dict) else ():
        if name not in TEMPLATE_KNOBS:
            shown = str(name).encode("ascii", "replace").decode()[:NAME_CHARS_MAX]
            raise PydanticCustomError(
                "template",
                "'{name}' is not for a caller to tell the template, only {known}",
                {"name": shown, "known": ", ".join(TEMPLATE_KNOBS)},
            )
    return without_nulls(told)


def _knobs_schema(schema: dict[str, Any]) -> None:
    schema["propertyNames"] = {"enum": list(TEMPLATE_KNOBS)}


class Asked(BaseModel):
    """The fields that every body has."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False, json_schema_extra=nullable)

    model: Annotated[Text, Field(min_length=1, max_length=NAME_CHARS_MAX)]
    service_tier: ServiceTier = "auto"
    timeout: Annotated[float, Field(gt=0, le=86_400)] | None = None
    metadata: Metadata = {}
    user: Text | None = None
    safety_identifier: Annotated[Text, Field(max_length=128)] | None = None
    prompt_cache_key: Annotated[Text, Field(max_length=ECHO_CHARS_MAX)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_unset(cls, body: Any) -> Any:
        return without_nulls(body)

    @property
    def tier(self) -> Tier:
        """What it gets."""
        return _TIERS.get(self.service_tier, "default")

    def facts(self) -> dict[str, Any]:
        """These fields by the names they have in a Draft."""
        return {
            "model": self.model,
            "timeout_s": self.timeout,
            "cls": _CLASSES.get(self.tier, Class.DEFAULT),
            "tier": self.tier,
            "affinity": self.prompt_cache_key or "",
        }


class Body(Asked):
    """The fields that every generating body has."""

    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX), AfterValidator(_top_k)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[tuple[Text, ...], BeforeValidator(_stops, json_schema_input_type=_StopForms)] = ()
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    stop_token_ids: Annotated[list[TokenId], Field(max_length=STOP_TOKENS_MAX)] = Field(default_factory=list)
    logit_bias: Annotated[
        dict[int, Annotated[float, Field(ge=-100, le=100)]],
        BeforeValidator(_biases, json_schema_input_type=dict[str, Annotated[float, Field(ge=-100, le=100)]]),
    ] = Field(default_factory=dict)
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: Annotated[
        dict[str, _Knob], BeforeValidator(_only_knobs), Field(json_schema_extra=_knobs_schema)
    ] = {}
    store: bool = False
    parallel_tool_calls: bool = True

    def grammar(self) -> dict[str, Any]:
        """What the answer must be like, in the words of Sampling."""
        return self.structured_outputs.terms() if self.structured_outputs else {}

    def knobs(self) -> dict[str, Any]:
        """These fields by the names they have in a Draft."""
        asked = self.model_dump(include=(set(Sampling.__struct_fields__) & set(Body.model_fields)) - {"stop_token_ids"})
        return {
            **self.facts(),
            "stream": self.stream,
            "template": self.chat_template_kwargs,
            "sampling": Sampling(
                max_tokens=0, stop_token_ids=tuple(self.stop_token_ids), grammar=self.grammar(), **asked
            ),
        }


#: Fields that have hurt engines, with what to do instead. No body of any API may have them; docs/security.md says why.
HARMFUL: Mapping[str, str] = {
    **dict.fromkeys(("prompt_embeds", "prompt_embeddings", "inputs_embeds"), "send the prompt as text or token ids"),
    "chat_template": "the model's own is used, and 'chat_template_kwargs' says how it is to think",
    "prompt_logprobs": "leave it out; 'logprobs' tells of the answer's tokens",
    "logits_processors": "leave it out; 'logit_bias' makes tokens likelier",
    **dict.fromkeys(
        ("multi_modal_data", "mm_processor_kwargs", "media_io_kwargs", "image_url", "audio_url", "video_url"),
        "send text, no media and no address is taken",
    ),
}

#: Fields that change the answer and are not served yet, with the values that ask for nothing.
UNSERVED: Mapping[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "beam_width": (),
    "length_penalty": (1.0, 1),
    "early_stopping": (False,),
    "best_of": (1,),
    "documents": ([],),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "logprob_token_ids": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
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
        raise not_served(name, "vLLM removed it; send structured_outputs or response_format")
    if name in HARMFUL:
        raise BadRequest(f"'{name}' is not taken: {HARMFUL[name]}.", param=name, code="unsupported_parameter")
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
    # What is in angle brackets tells alternatives apart, and is nothing that the caller sent.
    real = [step for step in loc if not str(step).startswith("<")]
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in real)
    # A key of `metadata` is the caller's own text, which may be long, or no text at all.
    return "".join(steps).lstrip(".").encode("ascii", "replace").decode()[:NAME_CHARS_MAX]


def _money_spent(ending: Ending) -> MoneySpent:
    if not ending.usage.output_tokens:
        return MoneySpent(f"There is no answer: {ending.message}.") if ending.message else MoneySpent()
    return MoneySpent(f"The answer ends here: {ending.message or 'its money is used up'}. What there is of it is paid.")


def error_of(ending: Ending) -> ForebayError:
    """The error that an ending without an answer stands for."""
    message = ending.message or None
    match ending.outcome:
        case Outcome.EXPIRED:
            return Unavailable(message or "The request waited longer than its deadline. Retry shortly.", code="expired")
        case Outcome.STOPPED:
            return _money_spent(ending)
        case Outcome.SHED:
            return ClassShed()
        case Outcome.REFUSED:
            return BadRequest(message)
        case Outcome.WORKER_LOST:
            return WorkerLost(message)
        case Outcome.GATEWAY_LOST:
            return GatewayLost(message)
        case Outcome.CANCELLED:
            return Cancelled(message)
        case _:
            return RequestFailed(message)
