"""The most likely tokens in Triton, in one launch. Programs combine their results by atomic max."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.launch_configurations import configuration
from baton_kernels.sampling.parameters import BestTokens
from baton_kernels.sampling.triton_kernel import DEFAULT, shape_class
from baton_kernels.sampling.triton_search import logit_key

_MASKED_KEY = -0x7F800001  # logit key of -inf
_LOWEST = tl.constexpr(-(2**63))


@triton.jit
def _greedy_kernel(
    best_ptr,  # int64 [rows]: logit key * 2**32 - token id
    logits_ptr,  # [rows, vocab_size]
    vocab_size,
    stride_logits_row,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(
        logits_ptr + row * stride_logits_row + token, mask=token < vocab_size, other=float("-inf")
    )
    packed = (logit_key(x).to(tl.int64) << 32) - token
    packed = tl.where(x > float("-inf"), packed, _LOWEST)  # a NaN gets _LOWEST
    tl.atomic_max(best_ptr + row, tl.max(packed, axis=0))


def greedy_triton(logits: Tensor, fallback: int) -> BestTokens:
    """Implement `baton_kernels.sampling.greedy` in Triton."""
    num_rows, vocab_size = logits.shape
    # Less than the packed key of any token that is not masked.
    nothing = (_MASKED_KEY << 32) - fallback
    best = torch.full((num_rows,), nothing, dtype=torch.int64, device=logits.device)
    if num_rows:
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        config = configuration(
            "sampling", shape_class(num_rows, vocab_size), logits.device, DEFAULT
        )
        _greedy_kernel[(num_rows, triton.cdiv(vocab_size, config["tile"]))](
            best,
            logits,
            vocab_size,
            logits.stride(0),
            TILE=config["tile"],
            num_warps=config["num_warps"],
        )
    is_impossible = best == nothing
    return BestTokens(best.neg_().bitwise_and_(0xFFFFFFFF), is_impossible)
