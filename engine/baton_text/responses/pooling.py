"""Structs for the JSON of responses of pooling models."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from baton_text.responses.openai import ModelResponse


class PoolingUsage(msgspec.Struct, kw_only=True):
    #: Tokens of all prompts.
    prompt_tokens: int
    #: The same as `prompt_tokens`.
    total_tokens: int
    #: `cached_tokens`: prompt tokens taken from a prefix cache.
    prompt_tokens_details: dict[str, int]


class Embedding(msgspec.Struct, kw_only=True):
    #: Number of the text in the request.
    index: int
    #: The entries of the vector, or with `encoding_format` `base64` a text with these bytes.
    embedding: list[float] | str
    #: Always this value.
    object: str = "embedding"


class EmbeddingResponse(ModelResponse, kw_only=True):
    #: One embedding for each text, in the order of the request.
    data: list[Embedding]
    #: Token counts of the request.
    usage: PoolingUsage
    #: Always this value.
    object: str = "list"


class Score(msgspec.Struct, kw_only=True):
    #: Number of the pair in the request.
    index: int
    #: Higher for more similar or more relevant texts: a probability, or the cosine of embeddings.
    score: float
    #: Always this value.
    object: str = "score"


class ScoreResponse(ModelResponse, kw_only=True):
    #: One score for each pair, in the order of the request.
    data: list[Score]
    #: Token counts of the request.
    usage: PoolingUsage
    #: Always this value.
    object: str = "list"


class RankedText(msgspec.Struct, kw_only=True):
    #: Text of the document.
    text: str


class RankedDocument(msgspec.Struct, kw_only=True):
    #: Number of the document in the request.
    index: int
    #: As `score` of `/v1/score`.
    relevance_score: float
    #: The document, unless `return_documents` is false.
    document: RankedText | UnsetType = UNSET


class RerankResponse(msgspec.Struct, kw_only=True):
    #: Id of the response.
    id: str
    #: Name of the served model.
    model: str
    #: The documents, the most relevant first.
    results: list[RankedDocument]
    #: Token counts of the request.
    usage: PoolingUsage
