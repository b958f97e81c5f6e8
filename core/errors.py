"""One tree of errors. A class's docstring is its default message and says what to do next.

    ForebayError                     500  server_error
    ├── BadRequest                   400  invalid_request_error
    │   ├── ContextTooLong           400    context_length_exceeded
    │   ├── BadFraming               400    bad_framing
    │   ├── TooSlow                  408    request_timeout
    │   ├── LengthNeeded             411    length_required
    │   ├── BodyTooLarge             413    request_too_large
    │   ├── AddressTooLong           414    uri_too_long
    │   ├── WrongForm                415    unsupported_media_type
    │   ├── KeyReused                422    idempotency_key_reused
    │   └── HeadersTooLarge          431    headers_too_large
    ├── Unauthenticated              401    invalid_api_key
    │   └── KeyRevoked               401    key_revoked
    ├── NotAllowed                   403  permission_error
    │   └── OrganisationSuspended    403    organisation_suspended
    ├── NotFound                     404    not_found
    │   └── UnknownModel             404    model_not_found
    ├── Gone                         410  invalid_request_error / stream_expired
    ├── WrongMethod                  405    method_not_allowed
    ├── UpgradeNeeded                426    upgrade_required
    ├── LimitReached                 429  requests / rate_limit_exceeded       retry after …
    │   ├── TokensReached            429  tokens / rate_limit_exceeded         retry after …
    │   └── TooManyFailures          429  requests / too_many_failures         retry after …
    ├── MoneySpent                   429  insufficient_quota
    ├── Unavailable                  503    overloaded                         retry after …
    │   ├── StoreDown                503    store_unavailable
    │   ├── AccountsDown             503    accounts_unavailable
    │   ├── HistoryDown              503    history_unavailable
    │   ├── LimitsDown               503    limits_unavailable
    │   ├── MoneyDown                503    money_unavailable
    │   ├── Draining                 503    draining
    │   ├── ModelPaused              503    model_paused
    │   └── ClassShed                503    class_shed
    └── RequestFailed                500    generation_failed
        ├── Cancelled                500    cancelled
        ├── WorkerLost               500    worker_lost
        └── GatewayLost              500    gateway_lost

`status` is the HTTP status; `type` and `code` are OpenAI's; `retry` is what `x-should-retry` says.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

#: A key, or a client secret, wherever a caller may have put it; of a key its kind and id may be told.
_SECRET = re.compile(r"((?:fb_(?:live|test|admin)_(?:[0-9A-Za-z]{12}_)?|ek_))[0-9A-Za-z_-]{16,}")


def without_secrets(text: str) -> str:
    """The text with all keys cut short. No error and no log line repeats one, whoever wrote it where."""
    return _SECRET.sub(r"\1...", text)


class ForebayError(Exception):
    """Something went wrong on our side. Please retry; if it persists, quote the request id to your operator."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None
    retry: ClassVar[bool] = True
    after_ms: ClassVar[int | None] = None  #: when to retry, unless an instance knows better

    def __init__(
        self,
        message: str | None = None,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_ms: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`headers`: what else the caller is told, where an answer has headers."""
        self.headers = dict(headers or {})
        self.partial: dict[str, Any] = {}  #: what was made and paid for, shown beside the error where there is a body
        self.message = without_secrets(message or " ".join((self.__doc__ or "").split()))
        self.param = param and without_secrets(param)
        self.error_code = code or self.code
        self.retry_after_ms = self.after_ms if retry_after_ms is None else retry_after_ms
        super().__init__(self.message)

    def envelope(self) -> dict[str, Any]:
        """The OpenAI error object: always these four keys, `code` a string or null."""
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.error_code}


class BadRequest(ForebayError):
    """The request is not valid."""

    status, type, code, retry = 400, "invalid_request_error", "invalid_value", False


class ContextTooLong(BadRequest):
    """The prompt is longer than the model's context. Shorten it."""

    code = "context_length_exceeded"


class BadFraming(BadRequest):
    """The request is not well-formed HTTP, or its body broke off."""

    code = "bad_framing"


class TooSlow(BadRequest):
    """The request body took too long to arrive. Send it again."""

    status, code, retry = 408, "request_timeout", True


class LengthNeeded(BadRequest):
    """The request has no body of known length. Send Content-Length, or a chunked body."""

    status, code = 411, "length_required"


class BodyTooLarge(BadRequest):
    """The request body is too large."""

    status, code = 413, "request_too_large"


class AddressTooLong(BadRequest):
    """The address of the request is too long."""

    status, code = 414, "uri_too_long"


class WrongForm(BadRequest):
    """Bodies are JSON, and not compressed."""

    status, code = 415, "unsupported_media_type"


class KeyReused(BadRequest):
    """This Idempotency-Key was sent with another request. Use a new key for each request."""

    status, code = 422, "idempotency_key_reused"


class HeadersTooLarge(BadRequest):
    """The headers of the request are too large, or too many."""

    status, code = 431, "headers_too_large"


class Unauthenticated(ForebayError):
    """The API key is missing or not valid. Send it as `Authorization: Bearer fb_…`."""

    status, type, code, retry = 401, "invalid_request_error", "invalid_api_key", False


class KeyRevoked(Unauthenticated):
    """This API key was revoked while something of it was open here. That was ended, and is billed as far as it came."""

    code = "key_revoked"


class NotAllowed(ForebayError):
    """This API key may not do that."""

    status, type, code, retry = 403, "permission_error", "not_allowed", False


class OrganisationSuspended(NotAllowed):
    """This organisation is suspended: what it had open was ended, and nothing more is accepted. Ask your operator."""

    code = "organisation_suspended"


class NotFound(ForebayError):
    """There is nothing at this address. The API lives under /v1."""

    status, type, code, retry = 404, "invalid_request_error", "not_found", False


class UnknownModel(NotFound):
    """There is no such model. `GET /v1/models` lists those that this key may use."""

    code = "model_not_found"


class Gone(ForebayError):
    """This stream is no longer kept: it can be shown for 15 minutes after its end. Send the request again."""

    status, type, code, retry = 410, "invalid_request_error", "stream_expired", False


class WrongMethod(ForebayError):
    """This address does not answer to that HTTP method."""

    status, type, code, retry = 405, "invalid_request_error", "method_not_allowed", False


class UpgradeNeeded(ForebayError):
    """This address speaks WebSocket (version 13)."""

    status, type, code, retry = 426, "invalid_request_error", "upgrade_required", False


class LimitReached(ForebayError):
    """A limit of this API key is reached. Retry after the time given in `retry-after`."""

    status, type, code, retry = 429, "requests", "rate_limit_exceeded", True


class TokensReached(LimitReached):
    """A limit of this organisation's tokens is reached. Retry after the time given in `retry-after`."""

    type = "tokens"


class TooManyFailures(LimitReached):
    """Too many keys that are no good came from this address: it is told of no other before the time in `retry-after`.
    Good keys are let in meanwhile, so check which one is sent."""

    code, retry = "too_many_failures", False  # of itself: the same key is no better then


class MoneySpent(ForebayError):
    """The money for this is used up: a prepaid balance, or a budget of the day or the month. Waiting does not help."""

    status, type, code, retry = 429, "insufficient_quota", "insufficient_quota", False


class Unavailable(ForebayError):
    """The platform cannot take this request now. Retry shortly."""

    status, type, code, retry, after_ms = 503, "server_error", "overloaded", True, 1_000


class StoreDown(Unavailable):
    """The queue cannot be reached. Nothing was accepted; retry shortly."""

    code = "store_unavailable"


class AccountsDown(Unavailable):
    """This key was not seen lately and the account database cannot be reached. Retry shortly."""

    code = "accounts_unavailable"


class HistoryDown(Unavailable):
    """Stored responses cannot be reached. Nothing was accepted; retry shortly."""

    code = "history_unavailable"


class LimitsDown(Unavailable):
    """Limits cannot be counted at the moment, and without that nothing can be accepted of you. Nothing was; retry after
    the time given in `retry-after`."""

    code, after_ms = "limits_unavailable", 2_000


class MoneyDown(Unavailable):
    """How much money there is cannot be read at the moment. Nothing was accepted; retry after the time given in
    `retry-after`."""

    code, after_ms = "money_unavailable", 2_000


class Draining(Unavailable):
    """This gateway is shutting down. Retry: another one takes the request."""

    code = "draining"


class ModelPaused(Unavailable):
    """This model is paused for the moment. Nothing was accepted; retry after the time given in `retry-after`."""

    code, after_ms = "model_paused", 10_000


class ClassShed(Unavailable):
    """Requests of this class are not served for the moment. Nothing was run or billed; retry after the time given in
    `retry-after`, or ask with a more urgent `service_tier`."""

    code, after_ms = "class_shed", 10_000


class RequestFailed(ForebayError):
    """The generation failed. You are not charged for it; please retry."""

    code = "generation_failed"


class Cancelled(RequestFailed):
    """The request was cancelled."""

    code, retry = "cancelled", False  # whoever cancelled it does not want it again


class WorkerLost(RequestFailed):
    """The worker died in the middle of a sampled answer, which cannot be continued. Please retry."""

    code = "worker_lost"


class GatewayLost(RequestFailed):
    """The gateway that held its stream died, and nobody came back for it in time. Please retry."""

    code = "gateway_lost"
