"""Parameters of a request to a pooling model, and the vector that the model returns."""

from __future__ import annotations

import enum
import math
import operator
import struct

import msgspec

from baton_protocol.sampling_params import SamplingParams


class Task(enum.StrEnum):
    """What an engine does with a prompt."""

    #: Generates tokens.
    GENERATE = "generate"
    #: Returns an embedding.
    EMBED = "embed"
    #: Returns the score of a pair of texts.
    CLASSIFY = "classify"


class PairFormat(enum.StrEnum):
    """How two texts become the prompt of a classifier."""

    #: The tokenizer joins the texts with its special tokens.
    TOKENIZER = "tokenizer"
    #: The chat format of Qwen3-Reranker.
    QWEN3_RERANKER = "qwen3_reranker"


class PoolingParams(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Parameters of one prompt for a pooling model. New fields go last and have a default."""

    #: Number of leading entries of the vector to return, for a model that is trained for this
    #: (Matryoshka embeddings). None: all entries.
    dimensions: int | None = None
    #: Whether the vector is divided by its Euclidean norm. None: as the checkpoint says.
    normalize: bool | None = None
    #: Position of the first token of the second text of a pair, for a model with token-type
    #: embeddings (BERT). None: all tokens have type 0.
    second_text_start: int | None = None

    def validate(self, task: Task, hidden_size: int) -> None:
        """Validate the parameters.

        Args:
            task: the model's task.
            hidden_size: largest value that `dimensions` may have.

        Raises:
            ValueError: a value is out of bounds. The message names the field and the bound.
        """
        if task is Task.CLASSIFY and (self.dimensions is not None or self.normalize is not None):
            raise ValueError("dimensions and normalize are for embeddings, and not for scores")
        if self.second_text_start is not None and self.second_text_start < 0:
            raise ValueError(
                f"second_text_start must not be negative, got {self.second_text_start}"
            )
        if self.dimensions is not None and not 1 <= self.dimensions <= hidden_size:
            raise ValueError(
                f"dimensions must be in [1, {hidden_size}] for this model, got {self.dimensions}"
            )


#: The sampling parameters of all requests with `PoolingParams`. The vector takes the place of the
#: first token, and the request ends with it.
NO_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1)


def dot(first: bytes, second: bytes) -> float:
    """Return the dot product of two `pooler_output` vectors: the cosine if both have length 1."""
    return math.fsum(map(operator.mul, unpack_vector(first), unpack_vector(second)))


def unpack_vector(pooler_output: bytes) -> tuple[float, ...]:
    """Return the float32 numbers that are packed in `EngineCoreOutput.pooler_output`."""
    return struct.unpack(f"<{len(pooler_output) // 4}f", pooler_output)
