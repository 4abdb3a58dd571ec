"""The most likely tokens in Triton, in one launch. Programs combine their results by atomic max."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.configurations import configuration
from baton_kernels.sampling.triton_kernel import DEFAULT, shape_class
from baton_kernels.sampling.triton_search import logit_key

_INFINITE_KEY = 0x7F800000  # logit key of +inf


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
    x = tl.where(x == x, x, float("inf"))  # a NaN becomes +inf, which makes the row not finite
    tl.atomic_max(best_ptr + row, tl.max((logit_key(x).to(tl.int64) << 32) - token, axis=0))


def greedy_triton(logits: Tensor) -> list[int] | None:
    """Implement `baton_kernels.sampling.greedy` in Triton."""
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return []
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    config = configuration("sampling", shape_class(num_rows, vocab_size), logits.device, DEFAULT)
    best = torch.full((num_rows,), -(2**63), dtype=torch.int64, device=logits.device)
    _greedy_kernel[(num_rows, triton.cdiv(vocab_size, config["tile"]))](
        best,
        logits,
        vocab_size,
        logits.stride(0),
        TILE=config["tile"],
        num_warps=config["num_warps"],
    )
    packed = best.cpu().numpy()
    token_ids = -packed & 0xFFFFFFFF
    keys = (packed + token_ids) >> 32
    is_finite = (keys >= -_INFINITE_KEY) & (keys < _INFINITE_KEY)
    return token_ids.tolist() if is_finite.all() else None
