"""Structs for the JSON of OpenAI responses, complete or as chunks of a stream."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class Usage(msgspec.Struct, kw_only=True):
    #: Tokens of all prompts.
    prompt_tokens: int
    #: Generated tokens of all choices.
    completion_tokens: int
    #: Sum of `prompt_tokens` and `completion_tokens`.
    total_tokens: int
    #: `cached_tokens`: prompt tokens taken from a prefix cache.
    prompt_tokens_details: dict[str, int] | None = None
    #: `reasoning_tokens`: generated tokens of the reasoning, if the model writes one.
    completion_tokens_details: dict[str, int] | UnsetType = UNSET


class TopLogprob(msgspec.Struct, kw_only=True):
    #: Text of the token.
    token: str
    #: Natural logarithm of the token's probability.
    logprob: float
    #: UTF-8 bytes of the token.
    bytes: list[int]


class TokenLogprob(TopLogprob, kw_only=True):
    #: The most likely tokens at the position of the token.
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    #: One entry for each token.
    content: list[TokenLogprob]


class PromptTokenLogprob(msgspec.Struct, kw_only=True):
    """The logprob of one candidate token at one prompt position, in vLLM's form."""

    #: Natural logarithm of the token's probability.
    logprob: float
    #: Rank of the token by probability: 1 for the most likely token.
    rank: int
    #: Text of the token.
    decoded_token: str


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Logprobs in the form of OpenAI's completions.

    The first token of an echoed prompt has no logprob: its entries in `token_logprobs` and
    `top_logprobs` are null.
    """

    #: Text of each token.
    tokens: list[str] = []
    #: Log-probability of each token.
    token_logprobs: list[float | None] = []
    #: For each token, the log-probabilities of the most likely tokens by text.
    top_logprobs: list[dict[str, float] | None] = []
    #: Number of characters before each token in the choice's text.
    text_offset: list[int] = []


class CalledFunctionDelta(msgspec.Struct, kw_only=True):
    #: Name of the tool. A stream sends it only in the first chunk of the call.
    name: str | UnsetType = UNSET
    #: JSON text of the arguments. A chunk adds its text to the text of earlier chunks.
    arguments: str


class ChatToolCall(msgspec.Struct, kw_only=True):
    """A tool call of a response, or the part of a tool call that a chunk adds."""

    #: Number of the call in the message. Only in chunks.
    index: int | UnsetType = UNSET
    #: Id of the call, which the message with its result repeats.
    id: str | UnsetType = UNSET
    #: Always `function`.
    type: str | UnsetType = UNSET
    #: The tool and its arguments.
    function: CalledFunctionDelta


class ChatResponseMessage(msgspec.Struct, kw_only=True):
    #: The generated text. Null if there are only tool calls.
    content: str | None
    #: Text of the reasoning before the content, if the model writes one.
    reasoning_content: str | UnsetType = UNSET
    #: Calls of tools, if there are any.
    tool_calls: list[ChatToolCall] | UnsetType = UNSET
    #: Author of the message.
    role: str = "assistant"
    #: Always null.
    refusal: str | None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    #: Number of the choice, from 0 on.
    index: int
    #: The answer.
    message: ChatResponseMessage
    #: Log-probabilities of the generated tokens. Null unless the request has `logprobs`.
    logprobs: ChatLogprobs | None
    #: `stop`, `length`, `repetition` or `tool_calls`.
    finish_reason: str | None
    #: The stop string or stop token that ended the text. Null: EOS, or another reason.
    stop_reason: int | str | None = None
    #: Generated token ids, if the request has `return_token_ids`.
    token_ids: list[int] | UnsetType = UNSET
    #: NaN logits of the choice's tokens, if there were any and the engine counts them.
    num_nans_in_logits: int | UnsetType = UNSET


class ModelResponse(msgspec.Struct, kw_only=True):
    """Base of the responses and chunks in OpenAI's form: the fields that all of them have."""

    #: Id of the request, the same in all chunks.
    id: str
    #: Unix time of the request, in seconds.
    created: int
    #: Name of the served model.
    model: str


class ChatCompletion(ModelResponse, kw_only=True):
    #: The answers.
    choices: list[ChatChoice]
    #: Numbers of tokens.
    usage: Usage
    #: Kind of the response.
    object: str = "chat.completion"
    #: Logprobs of the rendered prompt's tokens (vLLM's extension).
    prompt_logprobs: list[dict[int, PromptTokenLogprob] | None] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, kw_only=True):
    #: Author of the message. Sent only in the first chunk of a choice.
    role: str | UnsetType = UNSET
    #: Text that the chunk adds. It may be empty.
    content: str | UnsetType = UNSET
    #: Text that the chunk adds to the reasoning.
    reasoning_content: str | UnsetType = UNSET
    #: What the chunk adds to tool calls.
    tool_calls: list[ChatToolCall] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    #: Number of the choice, from 0 on.
    index: int
    #: What the chunk adds to the message.
    delta: ChatDelta
    #: Log-probabilities of the chunk's tokens. Null unless the request has `logprobs`.
    logprobs: ChatLogprobs | None = None
    #: `stop`, `length`, `repetition` or `tool_calls`. Null in chunks before the choice's last one.
    finish_reason: str | None = None
    #: The stop string or stop token that ended the text. Null: EOS, or another reason.
    stop_reason: int | str | None = None
    #: Generated token ids, if the request has `return_token_ids`.
    token_ids: list[int] | UnsetType = UNSET
    #: NaN logits of the choice's tokens, if there were any and the engine counts them.
    num_nans_in_logits: int | UnsetType = UNSET


class ChatCompletionChunk(ModelResponse, kw_only=True):
    #: One choice, or none in the chunk with `usage`.
    choices: list[ChatChunkChoice]
    #: Numbers of tokens. With `stream`, only in the last chunk, if `include_usage` is set.
    usage: Usage | UnsetType | None = UNSET
    #: Kind of the response.
    object: str = "chat.completion.chunk"


class CompletionChoice(msgspec.Struct, kw_only=True):
    #: Number of the choice, from 0 on, over all prompts.
    index: int
    #: The generated text, or the text that a chunk adds.
    text: str
    #: Log-probabilities of the tokens. Null unless the request has `logprobs`.
    logprobs: CompletionLogprobs | None = None
    #: `stop`, `length` or `repetition`. Null in chunks before the choice's last one.
    finish_reason: str | None = None
    #: The stop string or stop token that ended the text. Null: EOS, or another reason.
    stop_reason: int | str | None = None
    #: Generated token ids, if the request has `return_token_ids`.
    token_ids: list[int] | UnsetType = UNSET
    #: NaN logits of the choice's tokens, if there were any and the engine counts them.
    num_nans_in_logits: int | UnsetType = UNSET
    #: Logprobs of the prompt's tokens (vLLM's extension).
    prompt_logprobs: list[dict[int, PromptTokenLogprob] | None] | UnsetType = UNSET


class Completion(ModelResponse, kw_only=True):
    """The response to a completion request, or a chunk of its stream, with the same fields."""

    #: The answers. A chunk has one choice, or none if it has `usage`.
    choices: list[CompletionChoice]
    #: Numbers of tokens. With `stream`, only in the last chunk, if `include_usage` is set.
    usage: Usage | UnsetType | None = UNSET
    #: Kind of the response.
    object: str = "text_completion"


class ModelCard(msgspec.Struct, kw_only=True):
    #: Name of the model.
    id: str
    #: Unix time at which the gateway started, in seconds.
    created: int
    #: Limit on tokens of prompt and answer together. Null until a decode engine has been ready.
    max_model_len: int | None = None
    #: Owner of the model.
    owned_by: str = "baton"
    #: Kind of this object.
    object: str = "model"


class ModelList(msgspec.Struct, kw_only=True):
    #: The served model.
    data: list[ModelCard]
    #: Kind of the response.
    object: str = "list"


class Version(msgspec.Struct, kw_only=True):
    #: Version of Baton.
    version: str


class TokenizeResponse(msgspec.Struct, kw_only=True):
    """vLLM's response to /tokenize."""

    #: Number of tokens.
    count: int
    #: The token ids.
    tokens: list[int]
    #: Limit on tokens of prompt and answer together. Null until a decode engine has been ready.
    max_model_len: int | None = None
    #: Text of each token. Null unless the request asks for it.
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct, kw_only=True):
    """vLLM's response to /detokenize."""

    #: The text.
    prompt: str


class ErrorDetail(msgspec.Struct, kw_only=True):
    #: The problem and its remedy.
    message: str
    #: Kind of error, which the HTTP status determines.
    type: str
    #: The invalid field, such as `messages[0].content`. Null if no single field is invalid.
    param: str | None = None
    #: Machine-readable reason. Null if there is none.
    code: str | None = None


class ErrorBody(msgspec.Struct, kw_only=True):
    #: The error.
    error: ErrorDetail
