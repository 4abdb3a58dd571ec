"""The bodies of requests to pooling models."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from baton_protocol.pooling_params import PoolingParams
from baton_text.request_error import RequestError
from baton_text.requests.generation_request import check_32_bits, check_cache_salt
from baton_text.requests.prompt_forms import PromptForms, num_prompts, prompt_list


class PoolingRequest(msgspec.Struct, kw_only=True):
    """The fields of all requests to pooling models."""

    #: Name of the served model. It may be left out.
    model: str | None = None
    #: Requests with lower values run first. The gateway refuses values below
    #: `gateway.limits.minPriority`, 0 by default. Bounds: 32 bits.
    priority: int | None = None
    #: Only requests with the same salt share cached blocks of the prefix. With API keys, they must
    #: also be requests of one client (`gateway.apiKeys.cacheSharing`).
    cache_salt: str | None = None
    #: Ignored.
    user: str | None = None

    def validate(self) -> None:
        """Check all fields.

        Raises:
            RequestError: a field is invalid. `param` names the first invalid field.
        """
        check_32_bits("priority", self.priority)
        check_cache_salt(self.cache_salt)

    @property
    def num_sequences(self) -> int:
        """Upper bound of the number of prompts. Only valid after `validate`."""
        raise NotImplementedError


class EmbeddingRequest(PoolingRequest, kw_only=True):
    """The body of POST /v1/embeddings."""

    #: A text, a list of texts, a list of token ids, or a list of lists of token ids.
    input: PromptForms
    #: `base64`: each embedding is a text with its float32 values, little endian. Unset: `float`.
    encoding_format: Literal["float", "base64"] | None = None
    #: Number of leading entries of the embeddings to return, for a model that is trained for this
    #: (Matryoshka). Unset: all. Bounds: 1 or more.
    dimensions: int | None = None
    #: Divide embeddings by their Euclidean norm. Unset: as the model's checkpoint says.
    normalize: bool | None = None
    #: Add special tokens, such as EOS, to texts. Unset: true.
    add_special_tokens: bool | None = None

    def validate(self) -> None:
        super().validate()
        prompt_list(self.input, "input")
        if self.dimensions is not None and not 1 <= self.dimensions < 2**31:
            raise RequestError(
                f"dimensions must be in [1, {2**31 - 1}], got {self.dimensions}",
                param="dimensions",
            )

    @property
    def num_sequences(self) -> int:
        return num_prompts(self.input)

    @property
    def prompts(self) -> list[str | list[int]]:
        return prompt_list(self.input, "input")

    @property
    def pooling_params(self) -> PoolingParams:
        return PoolingParams(self.dimensions, self.normalize)


class ScoreRequest(PoolingRequest, kw_only=True):
    """The body of vLLM's POST /v1/score."""

    #: Names of the fields with the first and the second texts of pairs, for errors.
    PAIR_FIELDS: ClassVar[tuple[str, str]] = ("text_1", "text_2")

    #: The first texts of the pairs, or one text for all pairs.
    text_1: str | list[str]
    #: The second texts of the pairs, one or many.
    text_2: str | list[str]

    def validate(self) -> None:
        super().validate()
        if not self.pairs:
            raise RequestError("text_2 must not be empty", param="text_2")

    @property
    def num_sequences(self) -> int:
        # An embedding model runs each text. A classifier runs fewer sequences, one for each pair.
        return sum(1 if isinstance(each, str) else len(each) for each in (self.text_1, self.text_2))

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The pairs of texts to score. A single `text_1` is paired with each text of `text_2`.

        Raises:
            RequestError: `text_1` has neither one text nor as many texts as `text_2`.
        """
        first, second = (
            [each] if isinstance(each, str) else each for each in (self.text_1, self.text_2)
        )
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise RequestError(
                f"text_1 must have one text, or as many as text_2, got {len(first)} and "
                f"{len(second)}",
                param="text_1",
            )
        return list(zip(first, second, strict=True))


class RerankDocument(msgspec.Struct, kw_only=True):
    """A document of a rerank request, given as a JSON object instead of a string."""

    #: Text of the document.
    text: str


class RerankRequest(PoolingRequest, kw_only=True):
    """The body of POST /v1/rerank, in the form of Jina's and Cohere's APIs."""

    PAIR_FIELDS: ClassVar[tuple[str, str]] = ("query", "documents")

    #: The text for which documents are relevant.
    query: str
    #: The documents, as texts or as objects with the text.
    documents: list[str | RerankDocument]
    #: Number of documents to return, the most relevant ones. Unset: all. Bounds: 1 or more.
    top_n: int | None = None
    #: Return the texts of the documents. Unset: true.
    return_documents: bool | None = None

    def validate(self) -> None:
        super().validate()
        if not self.documents:
            raise RequestError("documents must not be empty", param="documents")
        if self.top_n is not None and not 1 <= self.top_n < 2**31:
            raise RequestError(
                f"top_n must be in [1, {2**31 - 1}], got {self.top_n}", param="top_n"
            )

    @property
    def num_sequences(self) -> int:
        return 1 + len(self.documents)  # as for ScoreRequest

    @property
    def texts(self) -> list[str]:
        """The texts of the documents."""
        return [each if isinstance(each, str) else each.text for each in self.documents]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [(self.query, text) for text in self.texts]
