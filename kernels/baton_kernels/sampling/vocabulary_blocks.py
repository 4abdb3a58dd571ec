"""Finds the best tokens of each row without sorting, by the maxima of vocabulary blocks.

A block is BLOCK_SIZE consecutive tokens of the vocabulary. At least k tokens reach the k-th largest
block maximum. Blocks with a smaller maximum contain none of these tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK_SIZE = 64
#: Number of logits that are processed at a time on a CPU, so that they stay in the CPU's cache.
CPU_CHUNK = 2**18
#: Number of logits that are processed at a time on a GPU. A copy in float64 then takes 128 MiB.
GPU_CHUNK = 2**24

_LOWEST = torch.finfo(torch.float32).min


def row_chunks(logits: Tensor) -> Iterator[slice]:
    """Return an iterator over slices of rows, each small enough to be processed at once."""
    chunk = max((CPU_CHUNK if logits.device.type == "cpu" else GPU_CHUNK) // logits.shape[-1], 1)
    return (slice(start, start + chunk) for start in range(0, len(logits), chunk))


def block_maxima(logits: Tensor) -> Tensor:
    """Return the largest logit of each block of BLOCK_SIZE tokens.

    The shape is [rows, ceil(vocab_size / BLOCK_SIZE)]. The last block may be shorter.
    """
    whole = logits.shape[-1] // BLOCK_SIZE * BLOCK_SIZE
    maxima = logits[:, :whole].unflatten(-1, (-1, BLOCK_SIZE)).amax(dim=-1)
    if whole < logits.shape[-1]:
        maxima = torch.cat((maxima, logits[:, whole:].amax(dim=-1, keepdim=True)), dim=-1)
    return maxima


def rank_bound(sorted_maxima: Tensor, rank: Tensor) -> Tensor:
    """Return, for each row, a finite lower bound of the logits of the `rank` most likely tokens.

    The bound is the `rank`-th largest block maximum. With fewer than `rank` blocks, the bound is
    the lowest float32. Masked (-inf) tokens do not reach the bound.

    Args:
        sorted_maxima: block maxima, descending, float32 of shape [rows, blocks].
        rank: int64 of shape [rows, 1], at least 1.
    """
    num_blocks = sorted_maxima.shape[-1]
    bound = sorted_maxima.gather(-1, (rank - 1).clamp_max(num_blocks - 1))
    return bound.masked_fill_(rank > num_blocks, _LOWEST).clamp_min_(_LOWEST)


def tokens_at_least(logits: Tensor, maxima: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """Return row indices and ids of the tokens that reach their row's bound, sorted by row and id.

    Args:
        logits: tensor of shape [rows, vocab_size].
        maxima: the logits' `block_maxima`.
        bound: tensor of shape [rows, 1].
    """
    rows, blocks = (maxima >= bound).nonzero(as_tuple=True)
    token_ids = _tokens_of(blocks[:, None], logits.shape[-1])
    reach = logits[rows[:, None], token_ids] >= bound[rows]
    reach[:, 1:] &= token_ids[:, 1:] > token_ids[:, :-1]  # ids past the end repeat the last token
    return rows[:, None].expand_as(token_ids)[reach], token_ids[reach]


def _tokens_of(blocks: Tensor, vocab_size: int) -> Tensor:
    """Return the ids of the tokens in each of `blocks` [n, 1], as [n, BLOCK_SIZE].

    Past the end of the vocabulary, the last id is repeated.
    """
    return (blocks * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=blocks.device)).clamp_max(
        vocab_size - 1
    )
