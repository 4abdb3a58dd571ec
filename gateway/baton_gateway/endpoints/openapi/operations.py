"""The operations of the clients' port and their errors, for `/openapi.json` and the references."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from baton_gateway.errors import MESSAGES_PATH, RESPONSES_PATH
from baton_protocol.pooling_params import Task
from baton_text.requests.chat_request import ChatCompletionRequest
from baton_text.requests.completion_request import CompletionRequest
from baton_text.requests.messages_request import CountTokensRequest, MessagesRequest
from baton_text.requests.pooling_requests import EmbeddingRequest, RerankRequest, ScoreRequest
from baton_text.requests.responses_request import ResponsesRequest
from baton_text.requests.tokenize_requests import DetokenizeRequest, TokenizeRequest
from baton_text.responses import anthropic, openai, pooling, responses_api

Struct = type[msgspec.Struct]
_BODY_ERRORS = (404, 408, 413, 415, 429, 503)
_GENERATION_ERRORS = (*_BODY_ERRORS, 504)
_CONVERSATION = [{"role": "user", "content": "Hello"}]


class ErrorResponse(NamedTuple):
    """Error responses with the same HTTP status and the same meaning."""

    status: int
    #: The machine-readable reasons, if there are any.
    codes: tuple[str, ...]
    meaning: str

    @property
    def quoted_codes(self) -> str:
        return ", ".join(f"`{code}`" for code in self.codes) or "none"


#: The errors of all paths.
FAILURES = (
    ErrorResponse(
        400,
        ("invalid_json", "invalid_type", "missing_required_parameter"),
        "the body is not a JSON object, or a field is missing or has a wrong type",
    ),
    ErrorResponse(
        400, ("unsupported_parameter",), "the gateway does not support the field or its value"
    ),
    ErrorResponse(
        400,
        ("unsupported_endpoint",),
        "the model does not do what the endpoint is for: it generates text, returns embeddings, or "
        "scores pairs of texts",
    ),
    ErrorResponse(
        400, ("context_length_exceeded",), "the prompt and the answer do not fit the context"
    ),
    ErrorResponse(
        400,
        ("prompt_too_long",),
        "the prompt exceeds `gateway.limits.maxPromptTokens`, or a text for `/tokenize` or "
        "`/detokenize` is too long",
    ),
    ErrorResponse(
        400,
        ("request_too_large",),
        "the body has too many JSON values, or the pairs of `/v1/score` or `/v1/rerank` have too "
        "many characters",
    ),
    ErrorResponse(400, ("invalid_body", "invalid_http"), "the request cannot be read"),
    ErrorResponse(
        400, (), "any other wrong value; `param` names the field, if the error belongs to one"
    ),
    ErrorResponse(
        400,
        ("previous_response_not_found",),
        "the gateway does not keep the response of `previous_response_id`",
    ),
    ErrorResponse(401, ("invalid_api_key",), "the key is missing or wrong"),
    ErrorResponse(
        404,
        ("model_not_found", "unknown_url", "previous_response_not_found"),
        "another model, another path, or a response that is not kept",
    ),
    ErrorResponse(405, ("method_not_allowed",), "another method"),
    ErrorResponse(408, ("timeout",), "the body did not arrive in time"),
    ErrorResponse(413, ("request_too_large",), "the body has too many bytes"),
    ErrorResponse(415, ("unsupported_media_type",), "another content type"),
    ErrorResponse(
        429,
        ("rate_limit_exceeded",),
        "too many sequences run at once, or too many requests wait at the engines; the response "
        "has `Retry-After`",
    ),
    ErrorResponse(
        500,
        ("internal_error",),
        "the gateway or an engine failed; the gateway's log has the reason under the id in the "
        "message",
    ),
    ErrorResponse(
        503,
        ("too_many_bytes",),
        "the bodies of all requests together are too large; the response has `Retry-After`",
    ),
    ErrorResponse(
        503,
        ("no_ready_engine", "draining", "service_unavailable"),
        "no engine is ready, the service is scaled to zero, no other engine continues a request "
        "whose engine was lost, the chat templates of requests take too long, or the gateway "
        "shuts down; the response has `Retry-After`",
    ),
    ErrorResponse(504, ("timeout",), "the request took too long"),
)


@dataclass(frozen=True)
class OpenAPIOperation:
    """An HTTP method of a path, as described in the OpenAPI document.

    Args:
        summary: one sentence about the method.
        response: type of the JSON body of status 200; None if no struct describes the body.
        body: type of the JSON body of requests; None if requests have no body.
        events: types of the data of a stream's events. Empty if the operation has no streams.
        errors: statuses of the operation's errors, besides the errors that every path can return.
        example: example of a request body. None: there is none.
        tasks: the tasks of models that serve the operation. Empty if every model serves it.
    """

    summary: str
    response: Struct | None = None
    body: Struct | None = None
    events: tuple[Struct, ...] = ()
    errors: tuple[int, ...] = ()
    example: Mapping[str, object] | None = None
    tasks: tuple[Task, ...] = ()


#: The operations of the clients' port, by method and path.
OPERATIONS: dict[tuple[str, str], OpenAPIOperation] = {
    ("POST", "/v1/chat/completions"): OpenAPIOperation(
        "Answer a conversation.",
        openai.ChatCompletion,
        ChatCompletionRequest,
        (openai.ChatCompletionChunk,),
        _GENERATION_ERRORS,
        {"messages": _CONVERSATION, "max_tokens": 64},
        (Task.GENERATE,),
    ),
    ("POST", "/v1/completions"): OpenAPIOperation(
        "Continue one or more prompts.",
        openai.Completion,
        CompletionRequest,
        (openai.Completion,),
        _GENERATION_ERRORS,
        {"prompt": "Hello", "max_tokens": 64},
        (Task.GENERATE,),
    ),
    ("POST", RESPONSES_PATH): OpenAPIOperation(
        "Answer a conversation, and keep it for the next request.",
        responses_api.Response,
        ResponsesRequest,
        (responses_api.ResponseEvent,),
        _GENERATION_ERRORS,
        {"input": "Hello", "max_output_tokens": 64},
        (Task.GENERATE,),
    ),
    ("POST", MESSAGES_PATH): OpenAPIOperation(
        "Answer a conversation, in Anthropic's form.",
        anthropic.Message,
        MessagesRequest,
        anthropic.EVENTS,
        _GENERATION_ERRORS,
        {"messages": _CONVERSATION, "max_tokens": 64},
        (Task.GENERATE,),
    ),
    ("POST", "/v1/embeddings"): OpenAPIOperation(
        "Return the embeddings of one or more texts.",
        pooling.EmbeddingResponse,
        EmbeddingRequest,
        errors=_GENERATION_ERRORS,
        example={"input": "Hello"},
        tasks=(Task.EMBED,),
    ),
    ("POST", "/v1/score"): OpenAPIOperation(
        "Score pairs of texts.",
        pooling.ScoreResponse,
        ScoreRequest,
        errors=_GENERATION_ERRORS,
        example={"text_1": "Hello", "text_2": ["Good morning", "Good night"]},
        tasks=(Task.EMBED, Task.CLASSIFY),
    ),
    ("POST", "/v1/rerank"): OpenAPIOperation(
        "Order documents by their relevance for a query.",
        pooling.RerankResponse,
        RerankRequest,
        errors=_GENERATION_ERRORS,
        example={"query": "Hello", "documents": ["Good morning", "Good night"]},
        tasks=(Task.EMBED, Task.CLASSIFY),
    ),
    ("GET", f"{RESPONSES_PATH}/{{response}}"): OpenAPIOperation(
        "Return a kept response.", responses_api.Response, errors=(404, 429, 503)
    ),
    ("DELETE", f"{RESPONSES_PATH}/{{response}}"): OpenAPIOperation(
        "Forget a kept response.", responses_api.DeletedResponse, errors=(404,)
    ),
    ("POST", f"{MESSAGES_PATH}/count_tokens"): OpenAPIOperation(
        "Count the tokens of a prompt.",
        anthropic.InputTokens,
        CountTokensRequest,
        errors=_BODY_ERRORS,
        example={"messages": _CONVERSATION},
    ),
    ("POST", "/tokenize"): OpenAPIOperation(
        "Convert a prompt or a conversation to token ids, as generation does.",
        openai.TokenizeResponse,
        TokenizeRequest,
        errors=_BODY_ERRORS,
        example={"prompt": "Hello"},
    ),
    ("POST", "/detokenize"): OpenAPIOperation(
        "Convert token ids to text.",
        openai.DetokenizeResponse,
        DetokenizeRequest,
        errors=_BODY_ERRORS,
        example={"tokens": [1, 2]},
    ),
    ("GET", "/v1/models"): OpenAPIOperation("List the served model.", openai.ModelList),
    ("GET", "/v1/models/{model}"): OpenAPIOperation(
        "Describe the served model.", openai.ModelCard, errors=(404,)
    ),
    ("GET", "/"): OpenAPIOperation("Return 200, for load balancers that request no other path."),
    ("GET", "/health"): OpenAPIOperation("Return 200 while the gateway's process runs."),
    ("GET", "/ready"): OpenAPIOperation(
        "Return 200 if the gateway accepts requests.", errors=(503,)
    ),
    ("GET", "/version"): OpenAPIOperation("Return Baton's version.", openai.Version),
    ("GET", "/openapi.json"): OpenAPIOperation("Return this document."),
}
