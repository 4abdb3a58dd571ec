"""Structs for the JSON of OpenAI responses, complete or as chunks of a stream."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    #: `cached_tokens`: prompt tokens taken from a prefix cache.
    prompt_tokens_details: dict[str, int] | None = None


class TopLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[TokenLogprob]


class PromptTokenLogprob(msgspec.Struct, kw_only=True):
    """The logprob of one candidate token at one prompt position, in vLLM's form."""

    logprob: float
    #: 1 for the most likely token.
    rank: int
    decoded_token: str


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Logprobs in the form of OpenAI's completions. A prompt's first token has no logprob."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    #: Number of characters before each token in the choice's text.
    text_offset: list[int] = []


class ChatResponseMessage(msgspec.Struct, kw_only=True):
    content: str
    role: str = "assistant"
    refusal: str | None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatResponseMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    #: NaN logits of the choice's tokens, if there were any and the engine counts them.
    num_nans_in_logits: int | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    #: Logprobs of the rendered prompt's tokens (vLLM's extension).
    prompt_logprobs: list[dict[int, PromptTokenLogprob] | None] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    #: NaN logits of the choice's tokens, if there were any and the engine counts them.
    num_nans_in_logits: int | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET
    #: NaN logits of the choice's tokens, if there were any and the engine counts them.
    num_nans_in_logits: int | UnsetType = UNSET
    prompt_logprobs: list[dict[int, PromptTokenLogprob] | None] | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """The response of a completion, or a chunk of a streamed response. Both have these fields."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"


class Model(msgspec.Struct, kw_only=True):
    id: str
    created: int
    max_model_len: int | None = None
    owned_by: str = "baton"
    object: str = "model"


class ModelList(msgspec.Struct, kw_only=True):
    data: list[Model]
    object: str = "list"


class TokenizeResponse(msgspec.Struct, kw_only=True):
    """vLLM's response to /tokenize."""

    count: int
    tokens: list[int]
    max_model_len: int | None = None
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct, kw_only=True):
    """vLLM's response to /detokenize."""

    prompt: str


class ErrorDetail(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, kw_only=True):
    error: ErrorDetail
