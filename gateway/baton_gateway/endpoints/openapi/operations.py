"""The operations of the clients' port and their errors, for `/openapi.json` and the references."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from baton_gateway.errors import MESSAGES_PATH, RESPONSES_PATH
from baton_protocol.pooling import Task
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


class Failure(NamedTuple):
    """Errors with one status and one meaning."""

    status: int
    #: The machine-readable reasons. Empty: there is none.
    codes: tuple[str, ...]
    meaning: str

    @property
    def quoted_codes(self) -> str:
        return ", ".join(f"`{code}`" for code in self.codes) or "none"


#: The errors of all paths.
FAILURES = (
    Failure(
        400,
        ("invalid_json", "invalid_type", "missing_required_parameter"),
        "the body is no JSON object, or a field is missing or has a wrong type",
    ),
    Failure(400, ("unsupported_parameter",), "the gateway does not support the field or its value"),
    Failure(
        400,
        ("unsupported_endpoint",),
        "the model does not do what the endpoint is for: it generates text, returns embeddings, or "
        "scores pairs of texts",
    ),
    Failure(400, ("context_length_exceeded",), "the prompt and the answer do not fit the context"),
    Failure(
        400,
        ("prompt_too_long",),
        "the prompt exceeds `gateway.limits.maxPromptTokens`, or a text for `/tokenize` or "
        "`/detokenize` is too long",
    ),
    Failure(
        400,
        ("request_too_large",),
        "the body has too many JSON values, or the pairs of `/v1/score` or `/v1/rerank` have too "
        "many characters",
    ),
    Failure(400, ("invalid_body", "invalid_http"), "the request cannot be read"),
    Failure(400, (), "any other wrong value; `param` names the field, if the error belongs to one"),
    Failure(
        400,
        ("previous_response_not_found",),
        "the gateway does not keep the response of `previous_response_id`",
    ),
    Failure(401, ("invalid_api_key",), "the key is missing or wrong"),
    Failure(
        404,
        ("model_not_found", "unknown_url", "previous_response_not_found"),
        "another model, another path, or a response that is not kept",
    ),
    Failure(405, ("method_not_allowed",), "another method"),
    Failure(408, ("timeout",), "the body did not arrive in time"),
    Failure(413, ("request_too_large",), "the body has too many bytes"),
    Failure(415, ("unsupported_media_type",), "another content type"),
    Failure(
        429,
        ("rate_limit_exceeded",),
        "too many sequences run at once, or too many requests wait at the engines; the response "
        "has `Retry-After`",
    ),
    Failure(
        500,
        ("internal_error",),
        "the gateway or an engine failed; the gateway's log has the reason under the id in the "
        "message",
    ),
    Failure(
        503,
        ("too_many_bytes",),
        "the bodies of all requests together are too large; the response has `Retry-After`",
    ),
    Failure(
        503,
        ("no_ready_engine", "draining", "service_unavailable"),
        "no engine is ready, the service is scaled to zero, no other engine continues a request "
        "whose engine was lost, the chat templates of requests take too long, or the gateway "
        "shuts down; the response has `Retry-After`",
    ),
    Failure(504, ("timeout",), "the request took too long"),
)


@dataclass(frozen=True)
class Operation:
    """A method of a path.

    Args:
        summary: what it does.
        response: type of the JSON body of status 200; None: the body is empty or text.
        body: type of the JSON body of requests; None: requests have no body.
        events: types of the data of a stream's events. Empty: there are no streams.
        errors: statuses of its errors, besides those of every path.
        example: a body of a request.
        tasks: what the model must do, one of these. Empty: any model serves the operation.
    """

    summary: str
    response: Struct | None = None
    body: Struct | None = None
    events: tuple[Struct, ...] = ()
    errors: tuple[int, ...] = ()
    example: Mapping[str, object] | None = None
    tasks: tuple[Task, ...] = ()


#: The operations of the clients' port, by method and path.
OPERATIONS: dict[tuple[str, str], Operation] = {
    ("POST", "/v1/chat/completions"): Operation(
        "Answer a conversation.",
        openai.ChatCompletion,
        ChatCompletionRequest,
        (openai.ChatCompletionChunk,),
        _GENERATION_ERRORS,
        {"messages": _CONVERSATION, "max_tokens": 64},
        (Task.GENERATE,),
    ),
    ("POST", "/v1/completions"): Operation(
        "Continue one or more prompts.",
        openai.Completion,
        CompletionRequest,
        (openai.Completion,),
        _GENERATION_ERRORS,
        {"prompt": "Hello", "max_tokens": 64},
        (Task.GENERATE,),
    ),
    ("POST", RESPONSES_PATH): Operation(
        "Answer a conversation, and keep it for the next request.",
        responses_api.Response,
        ResponsesRequest,
        (responses_api.ResponseEvent,),
        _GENERATION_ERRORS,
        {"input": "Hello", "max_output_tokens": 64},
        (Task.GENERATE,),
    ),
    ("POST", MESSAGES_PATH): Operation(
        "Answer a conversation, in Anthropic's form.",
        anthropic.Message,
        MessagesRequest,
        anthropic.EVENTS,
        _GENERATION_ERRORS,
        {"messages": _CONVERSATION, "max_tokens": 64},
        (Task.GENERATE,),
    ),
    ("POST", "/v1/embeddings"): Operation(
        "Return the embeddings of one or more texts.",
        pooling.EmbeddingResponse,
        EmbeddingRequest,
        errors=_GENERATION_ERRORS,
        example={"input": "Hello"},
        tasks=(Task.EMBED,),
    ),
    ("POST", "/v1/score"): Operation(
        "Score pairs of texts.",
        pooling.ScoreResponse,
        ScoreRequest,
        errors=_GENERATION_ERRORS,
        example={"text_1": "Hello", "text_2": ["Good morning", "Good night"]},
        tasks=(Task.EMBED, Task.CLASSIFY),
    ),
    ("POST", "/v1/rerank"): Operation(
        "Order documents by their relevance for a query.",
        pooling.RerankResponse,
        RerankRequest,
        errors=_GENERATION_ERRORS,
        example={"query": "Hello", "documents": ["Good morning", "Good night"]},
        tasks=(Task.EMBED, Task.CLASSIFY),
    ),
    ("GET", f"{RESPONSES_PATH}/{{response}}"): Operation(
        "Return a kept response.", responses_api.Response, errors=(404, 429, 503)
    ),
    ("DELETE", f"{RESPONSES_PATH}/{{response}}"): Operation(
        "Forget a kept response.", responses_api.DeletedResponse, errors=(404,)
    ),
    ("POST", f"{MESSAGES_PATH}/count_tokens"): Operation(
        "Count the tokens of a prompt.",
        anthropic.InputTokens,
        CountTokensRequest,
        errors=_BODY_ERRORS,
        example={"messages": _CONVERSATION},
    ),
    ("POST", "/tokenize"): Operation(
        "Convert a prompt or a conversation to token ids, as generation does.",
        openai.TokenizeResponse,
        TokenizeRequest,
        errors=_BODY_ERRORS,
        example={"prompt": "Hello"},
    ),
    ("POST", "/detokenize"): Operation(
        "Convert token ids to text.",
        openai.DetokenizeResponse,
        DetokenizeRequest,
        errors=_BODY_ERRORS,
        example={"tokens": [1, 2]},
    ),
    ("GET", "/v1/models"): Operation("List the served model.", openai.ModelList),
    ("GET", "/v1/models/{model}"): Operation(
        "Describe the served model.", openai.Model, errors=(404,)
    ),
    ("GET", "/"): Operation("Return 200, for load balancers that request no other path."),
    ("GET", "/health"): Operation("Return 200 while the gateway's process runs."),
    ("GET", "/ready"): Operation("Return 200 if the gateway accepts requests.", errors=(503,)),
    ("GET", "/version"): Operation("Return Baton's version.", openai.Version),
    ("GET", "/openapi.json"): Operation("Return this document."),
}
