"""Finding the few best tokens of many rows without sorting them: the vocabulary in blocks, by their maxima.

The k-th largest block maximum is a logit that at least k tokens reach, and the blocks below it hold none of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK_SIZE = 64
#: Logits handled at a time on a CPU, so that what is computed from them stays in its cache.
CPU_CHUNK = 2**18
#: The same on a GPU, whose memory it bounds: 128 MiB per float64 copy.
GPU_CHUNK = 2**24

_LOWEST = torch.finfo(torch.float32).min


def row_chunks(logits: Tensor) -> Iterator[slice]:
    """Slices of the rows, to be handled one after the other."""
    chunk = max((CPU_CHUNK if logits.device.type == "cpu" else GPU_CHUNK) // logits.shape[-1], 1)
    return (slice(start, start + chunk) for start in range(0, len(logits), chunk))


def block_maxima(logits: Tensor) -> Tensor:
    """Of shape [rows, ceil(vocab_size / BLOCK_SIZE)]; the last block may be shorter."""
    whole = logits.shape[-1] // BLOCK_SIZE * BLOCK_SIZE
    maxima = logits[:, :whole].unflatten(-1, (-1, BLOCK_SIZE)).amax(dim=-1)
    if whole < logits.shape[-1]:
        maxima = torch.cat((maxima, logits[:, whole:].amax(dim=-1, keepdim=True)), dim=-1)
    return maxima


def best_tokens(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Per row the largest logit and its token id, the lowest of equal ones; [rows] each. A NaN makes the logit NaN."""
    best, block = block_maxima(logits).max(dim=-1, keepdim=True)
    token_ids = _tokens_of(block, logits.shape[-1])
    offset = logits.gather(-1, token_ids).argmax(dim=-1, keepdim=True)
    return best[:, 0], token_ids.gather(-1, offset)[:, 0]


def rank_bound(sorted_maxima: Tensor, rank: Tensor) -> Tensor:
    """A logit that at least `rank` tokens reach, as near as the blocks tell, and that no masked (-inf) token reaches.

    Args:
        sorted_maxima: block maxima, descending, float32 of shape [rows, blocks].
        rank: int64 of shape [rows, 1], at least 1.
    """
    num_blocks = sorted_maxima.shape[-1]
    bound = sorted_maxima.gather(-1, (rank - 1).clamp_max(num_blocks - 1))
    return bound.masked_fill_(rank > num_blocks, _LOWEST).clamp_min_(_LOWEST)


def tokens_at_least(logits: Tensor, maxima: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Row indices and ids of the tokens that reach their row's bound ([rows, 1]), ordered by row, then id."""
    rows, blocks = (maxima >= bound).nonzero(as_tuple=True)
    token_ids = _tokens_of(blocks[:, None], logits.shape[-1])
    reach = logits[rows[:, None], token_ids] >= bound[rows]
    reach[:, 1:] &= (
        token_ids[:, 1:] > token_ids[:, :-1]
    )  # the last token stands for those past the end
    return rows[:, None].expand_as(token_ids)[reach], token_ids[reach]


def _tokens_of(blocks: Tensor, vocab_size: int) -> Tensor:
    """Ids in the blocks [n, 1]: [n, BLOCK_SIZE]; past the vocabulary's end the last id again."""
    return (blocks * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=blocks.device)).clamp_max(
        vocab_size - 1
    )
