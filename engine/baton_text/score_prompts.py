"""Joins two texts, such as a query and a document, to the prompt of a classifier."""

from __future__ import annotations

from typing import NamedTuple

from baton_protocol.pooling_params import PairFormat
from baton_text.tokenizer import Tokenizer

#: The prompt with which Qwen3-Reranker is trained. The model answers with yes or no.
_QWEN3_RERANKER = (
    "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class PairPrompt(NamedTuple):
    token_ids: list[int]
    #: Position of the first token of the second text. None: the model does not need it.
    second_text_start: int | None = None


def encode_pair(
    tokenizer: Tokenizer, pair_format: PairFormat, first: str, second: str
) -> PairPrompt:
    """Return the prompt with which a classifier scores a pair of texts.

    Raises:
        ValueError, TokenizerError: as for `Tokenizer.encode`.
    """
    if pair_format is PairFormat.TOKENIZER:
        return PairPrompt(*tokenizer.encode_pair(first, second))
    text = _QWEN3_RERANKER.format(instruction=_INSTRUCTION, query=first, document=second)
    return PairPrompt(tokenizer.encode(text, add_special_tokens=False))
