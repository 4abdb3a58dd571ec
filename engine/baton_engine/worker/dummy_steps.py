"""Steps of sequences that exist nowhere: to warm up, and to measure the memory that the largest step takes."""

from __future__ import annotations

import numpy as np
import torch

from baton_engine.models.layers import ForwardBatch
from baton_engine.protocol.sampling import SamplingParams
from baton_engine.worker.sampler import SamplingInput

WARM_UP_TOKENS = 32


def largest(max_num_batched_tokens: int, max_num_seqs: int) -> list[int]:
    """Query lengths of the step that takes the most memory: every token of the budget, every sequence sampling."""
    num_seqs = min(max_num_batched_tokens, max_num_seqs)
    each, left = divmod(max_num_batched_tokens, num_seqs)
    return [each + 1] * left + [each] * (num_seqs - left)


def typical(longest: int, max_num_seqs: int, device: torch.device) -> list[tuple[list[int], int]]:
    """(query lengths, sequence length) of steps to warm up with: prefill, and decode.

    Triton compiles a kernel again for integer arguments that are 1, or multiples of 16; so a GPU sees some of each.

    Args:
        longest: tokens that one sequence may have.
    """
    num_tokens = min(WARM_UP_TOKENS, longest)
    steps = [([num_tokens], num_tokens), ([1] * min(num_tokens, max_num_seqs), num_tokens)]
    if device.type == "cuda":
        odd = max(1, num_tokens - 1)
        steps += [([odd], odd), ([odd, 1], num_tokens), ([1], num_tokens), ([1] * min(3, max_num_seqs), odd)]
    return steps


def make_batch(
    query_lens: list[int], seq_len: int | None, kv_cache: torch.Tensor, device: torch.device
) -> ForwardBatch:
    """A batch that reads block 0 and writes no KV.

    Args:
        seq_len: of every sequence; None: each is as long as its query.
    """
    num_tokens, num_seqs = sum(query_lens), len(query_lens)
    seq_lens = query_lens if seq_len is None else [seq_len] * num_seqs
    num_blocks = -(-max(seq_lens) // kv_cache.shape[4])
    return ForwardBatch(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
        block_tables=torch.zeros((num_seqs, num_blocks), dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        kv_cache=kv_cache,
    )


def sampling_inputs(num_rows: int) -> list[SamplingInput]:
    """Rows that take every part of the sampler in turn: greedy, random, filtered."""
    ids = np.zeros(1, dtype=np.int64)
    kinds = [SamplingParams(temperature=1.0, top_p=0.9, top_k=8, min_p=0.01), SamplingParams(temperature=0.0)]
    return [SamplingInput(kinds[row % len(kinds)], ids, ids[:0]) for row in range(num_rows)]
