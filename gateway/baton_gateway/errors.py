"""Failures as HTTP responses, in the shape of OpenAI's errors or of Anthropic's."""

from __future__ import annotations

import msgspec

from baton_protocol.engine_messages import ErrorCode
from baton_protocol.pooling_params import Task
from baton_text.request_error import RequestError, quote
from baton_text.responses.anthropic import MessageError, MessageErrorDetail
from baton_text.responses.openai import ErrorBody, ErrorDetail
from baton_text.responses.responses_api import ResponseError

#: Retry-After in seconds of a request that the gateway or an engine refuses because of its load.
RETRY_AFTER_S = 1
#: Retry-After in seconds of a request that gets no decode engine, because none is ready. A model
#: takes at least this long to load.
NO_ENGINE_RETRY_AFTER_S = 10
#: Retry-After in seconds while the service is scaled to zero by hand. No engine starts by itself,
#: so an early retry would fail too.
SCALED_TO_ZERO_RETRY_AFTER_S = 60
#: Limit on the characters of a message.
MAX_MESSAGE = 2000
#: Anthropic's API. Its errors have a shape of their own.
MESSAGES_PATH = "/v1/messages"
RESPONSES_PATH = "/v1/responses"
#: Kinds of errors by status, in each API. `error_body` has the kinds of other statuses.
_OPENAI_ERRORS = {404: "not_found_error", 429: "rate_limit_error"}
_MESSAGES_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


#: Messages for an endpoint that the model cannot serve, by the model's task.
_WRONG_TASK = {
    Task.GENERATE: "This model generates text and returns no embeddings or scores; use an endpoint "
    "such as /v1/chat/completions.",
    Task.EMBED: "This model returns embeddings and generates no text; use /v1/embeddings, "
    "/v1/score or /v1/rerank.",
    Task.CLASSIFY: "This model scores pairs of texts; use /v1/score or /v1/rerank.",
}


class APIError(Exception):
    """A failure that is reported to the client.

    Args:
        status: HTTP status. If a stream has begun, the client receives only the body.
        message: what happened and what to do about it.
        param: the request field that is invalid; None if no single field is invalid.
        code: machine-readable reason; None if there is none.
        retry_after_s: value of Retry-After in seconds; None: the response has no Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        #: Cut to MAX_MESSAGE characters, because errors of msgspec quote whole values.
        self.message = message[:MAX_MESSAGE]
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}


class EngineRefusalError(APIError):
    """Raised when an engine refuses a request as invalid (ErrorCode.INVALID)."""

    def __init__(self, message: str) -> None:
        super().__init__(400, message)


def error_body(path: str, error: APIError) -> ErrorBody | MessageError:
    """Return the JSON body of an error in the shape of the API at `path`."""
    if path.startswith(MESSAGES_PATH):
        fallback = "invalid_request_error" if error.status < 500 else "api_error"
        kind = _MESSAGES_ERRORS.get(error.status, fallback)
        return MessageError(error=MessageErrorDetail(type=kind, message=error.message))
    fallback = "invalid_request_error" if error.status < 500 else "server_error"
    kind = _OPENAI_ERRORS.get(error.status, fallback)
    detail = ErrorDetail(message=error.message, type=kind, param=error.param, code=error.code)
    return ErrorBody(error=detail)


def error_event(path: str, error: APIError) -> tuple[bytes, str]:
    """Return the event that ends a failed stream of the API at `path`, as (data, name)."""
    if path == RESPONSES_PATH:
        event = ResponseError(message=error.message, code=error.code, param=error.param)
        return msgspec.json.encode(event), event.type
    body = error_body(path, error)
    return msgspec.json.encode(body), body.type if isinstance(body, MessageError) else ""


def bad_request(error: RequestError) -> APIError:
    return APIError(400, str(error), param=error.param, code=error.code)


def check_model(model: str | None, served: str) -> None:
    """Raise APIError (404) if a request names another model than `served`.

    Args:
        model: model that the request names; None if it names no model.
        served: name of the served model.
    """
    if model not in (None, served):
        message = f"The model {quote(model)} does not exist; this server serves {served!r}."
        raise APIError(404, message, param="model", code="model_not_found")


def check_task(engine: Task, *wanted: Task) -> None:
    """Raise APIError (400) if an endpoint does not support the task of the engines.

    Args:
        engine: the task of the engines.
        wanted: the tasks that the endpoint supports.
    """
    if engine not in wanted:
        raise APIError(400, _WRONG_TASK[engine], code="unsupported_endpoint")


def context_length_exceeded(
    max_model_len: int, prompt_tokens: int, max_tokens: int, param: str
) -> APIError:
    message = (
        f"This model's maximum context length is {max_model_len} tokens. However, you requested "
        f"{prompt_tokens + max_tokens} tokens ({prompt_tokens} in the prompt, {max_tokens} in the "
        "completion). Please reduce the length of the prompt or the completion."
    )
    return APIError(400, message, param=param, code="context_length_exceeded")


def prompt_too_long(max_model_len: int, fewest_tokens: int, param: str) -> APIError:
    """Return the error for a prompt that is too long and has at least `fewest_tokens` tokens."""
    message = (
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt has "
        f"at least {fewest_tokens} tokens. Please reduce the length of the prompt."
    )
    return APIError(400, message, param=param, code="context_length_exceeded")


def overloaded(message: str) -> APIError:
    return APIError(429, message, code="rate_limit_exceeded", retry_after_s=RETRY_AFTER_S)


def unavailable(message: str, *, code: str = "service_unavailable") -> APIError:
    return APIError(503, message, code=code, retry_after_s=RETRY_AFTER_S)


def internal(message: str) -> APIError:
    return APIError(500, message, code="internal_error")


def gateway_failure(request_id: str) -> APIError:
    """Return the error for an exception in the gateway. The caller logs the exception."""
    return internal(f"The gateway failed. {see_log(request_id)}")


def see_log(request_id: str) -> str:
    """Return the sentence that replaces the text of an exception in a message to a client."""
    return f"The gateway's log has the reason under the id {request_id}."


def timed_out(timeout_s: float) -> APIError:
    return APIError(504, f"The request did not end within {timeout_s:g} s.", code="timeout")


def engine_failure(message: str, code: ErrorCode | None, request_id: str) -> APIError:
    """Convert an engine's error to the error that the client receives.

    The caller logs the engine's error.
    The client receives the engine's message only with codes that describe the request or the queue.
    Other messages may contain the text of an exception, which may name paths and addresses.

    Args:
        message: the engine's error message.
        code: the engine's error code; None if it sent none.
        request_id: id of the sequence in the logs of the gateway and the engine.
    """
    if code is ErrorCode.INVALID:
        return EngineRefusalError(message)
    if code is ErrorCode.LENGTH:
        return APIError(400, message, code="context_length_exceeded")
    if code is ErrorCode.OVERLOADED:
        return overloaded(message)
    if code is ErrorCode.DRAINING:
        return unavailable(f"The engine stopped before the request ended. {see_log(request_id)}")
    return internal(f"The engine failed. {see_log(request_id)}")
