"""Steps without requests, for warm-up and for measuring the memory of the largest step."""

from __future__ import annotations

import numpy as np
import torch

from baton_engine.models.forward_context import ForwardBatch, ForwardContext
from baton_engine.worker.forward.forward_runner import ForwardRunner
from baton_engine.worker.sampling.sampler import SamplingInput, sample
from baton_kernels.sampling import greedy
from baton_protocol.sampling_params import SamplingParams

#: Number of tokens of the prompt in the first warm-up step, on any device.
WARM_UP_TOKENS = 32


def largest(max_num_batched_tokens: int, max_num_seqs: int) -> list[int]:
    """Return the query lengths of the step that takes the most memory.

    This step uses the whole token budget, with as many sequences as possible.
    """
    num_seqs = min(max_num_batched_tokens, max_num_seqs)
    each, left = divmod(max_num_batched_tokens, num_seqs)
    return [each + 1] * left + [each] * (num_seqs - left)


def typical(
    longest: int, max_num_seqs: int, max_num_batched_tokens: int, device: torch.device
) -> list[tuple[list[int], int]]:
    """Return (query lengths, sequence length) of each warm-up step.

    Triton compiles a kernel separately for integer arguments that are 1 or a multiple of 16, and
    for each tile size. Therefore a GPU runs more steps than a CPU: single queries, few queries and
    mixed lengths. The number of tokens selects the tile size, so the steps also include prompts
    whose lengths are the powers of two.

    Args:
        longest: maximum number of tokens of one sequence.
        max_num_seqs: maximum number of sequences in a step.
        max_num_batched_tokens: maximum number of tokens in a step.
        device: device on which the steps run.
    """
    num_tokens = min(WARM_UP_TOKENS, longest, max_num_batched_tokens)
    steps = [([num_tokens], num_tokens), ([1] * min(num_tokens, max_num_seqs), num_tokens)]
    if device.type == "cuda":
        odd = max(1, num_tokens - 1)
        steps += [
            ([odd], odd),
            ([odd, 1], num_tokens),
            ([1], num_tokens),
            ([1] * min(3, max_num_seqs), odd),
        ]
        steps += [([1], longest), ([30] + [1] * 9, 32)]
        steps += [([2**power], 2**power) for power in range(max_num_batched_tokens.bit_length())]
    return [
        (query_lens, seq_len)
        for query_lens, seq_len in steps
        if len(query_lens) <= max_num_seqs
        and sum(query_lens) <= max_num_batched_tokens
        and seq_len <= longest
    ]


def make_batch(
    query_lens: list[int], seq_len: int | None, kv_cache: torch.Tensor, device: torch.device
) -> ForwardBatch:
    """Return a batch of dummy sequences that reads KV block 0 and writes no KV.

    Args:
        query_lens: number of tokens to run in each sequence.
        seq_len: length of every sequence. None: each sequence is as long as its query.
    """
    num_tokens, num_seqs = sum(query_lens), len(query_lens)
    seq_lens = query_lens if seq_len is None else [seq_len] * num_seqs
    num_blocks = -(-max(seq_lens) // kv_cache.shape[4])
    context = ForwardContext(
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
        block_tables=torch.zeros((num_seqs, num_blocks), dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        kv_cache=kv_cache,
        max_seqlen_q=max(query_lens),
    )
    input_ids, positions = torch.zeros((2, num_tokens), dtype=torch.int64, device=device)
    return ForwardBatch(input_ids, positions, context)


def no_batch(kv_cache: torch.Tensor, device: torch.device) -> ForwardContext:
    """Return the `ForwardContext` of a step without tokens."""
    none = torch.empty(0, dtype=torch.int32, device=device)
    return ForwardContext(
        none.long(), none.view(0, 1), none.new_zeros(1), none, kv_cache, max_seqlen_q=0
    )


@torch.inference_mode()
def run(
    forward: ForwardRunner, query_lens: list[int], seq_len: int | None, kv_cache: torch.Tensor
) -> None:
    """Run a step of dummy sequences, and sample if this rank has the model's output layer.

    The step writes no KV and does not wait for other pipeline stages. `make_batch` describes the
    arguments.
    """
    model = forward.model
    received = None
    if not model.parallel.is_first_stage:
        shape = (sum(query_lens), model.config.hidden_size)
        received = torch.zeros(shape, dtype=forward.dtype, device=forward.device)
    hidden = forward.run(make_batch(query_lens, seq_len, kv_cache, forward.device), received)
    if model.head is not None:
        logits = model.compute_logits(hidden[: len(query_lens)])
        greedy(logits, fallback=0)
        sample(logits, sampling_inputs(len(query_lens)), model.config.eos_token_ids)


def sampling_inputs(num_rows: int) -> list[SamplingInput]:
    """Return sampler inputs, alternately random (with top-k, top-p and min-p) and greedy."""
    ids = np.zeros(1, dtype=np.int64)
    kinds = [
        SamplingParams(temperature=1.0, top_p=0.9, top_k=8, min_p=0.01),
        SamplingParams(temperature=0.0),
    ]
    return [SamplingInput(kinds[row % len(kinds)], ids, ids[:0]) for row in range(num_rows)]
