"""Choice of tokens: the most likely token, or a random draw from the tokens that filters keep.

    token = argmax over the kept t of (logits[t] / temperature + noise[t])           Gumbel-max

The result is a sample of the softmax over the kept tokens. The noise is a hash of (key, t)
(noise.py), so there is no generator state. The filters are min_p, top_k and top_p, in this order.
Each filter applies to the tokens that the previous filter kept. top_p keeps the smallest set of
most likely tokens whose probabilities reach top_p. Among ties, lower ids are kept. The most likely
token is always kept.

The implementations are C++ (../cpu/source/sampling.h), torch (torch_cpu.py) and Triton
(triton_kernel.py). None of them sorts a whole row. All use the same random bits and compare logits
in float32. They sum probabilities in fixed point, which is exact in any order, and compute scores
in float64. Implementations differ only in the last bits of exp and log. So they can draw different
tokens only if these bits decide between two scores, or whether a sum of probabilities reaches
top_p.

Counted cost (`benchmarks/kernels/costs.py`):

    bytes       the logits, once
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from baton_kernels.cpu import ops_for
from baton_kernels.sampling.noise import signed
from baton_kernels.sampling.parameters import MIN_TEMPERATURE, BestTokens, DrawParams
from baton_kernels.sampling.torch_cpu import draw_tokens_cpu

__all__ = ["BestTokens", "DrawParams", "draw_tokens", "greedy"]


def draw_tokens(logits: Tensor, params: Sequence[DrawParams], keys: Sequence[int]) -> Tensor:
    """Draw one token per row, on the device of the logits.

    On a GPU the call does not wait for the device. The logits are not changed.

    Args:
        logits: float32 of shape [rows, vocab_size]. Masked tokens have -inf. Other logits are
            finite, and each row has at least one finite logit.
        params: sampling parameters of each row.
        keys: noise key of each row, from `noise.noise_key`.

    Returns:
        Token ids, int64 of shape [rows].
    """
    if logits.is_cuda:
        from baton_kernels.sampling.triton_kernel import draw_tokens_triton

        return draw_tokens_triton(logits, params, keys)
    if (ops := ops_for(logits)) is not None:
        vocab_size = logits.shape[-1]
        return ops.draw_tokens(
            logits,
            [max(p.temperature, MIN_TEMPERATURE) for p in params],
            [p.top_k if 0 < p.top_k < vocab_size else 0 for p in params],
            [p.top_p for p in params],
            [p.min_p for p in params],
            [signed(key) for key in keys],
        )
    return draw_tokens_cpu(logits, params, keys)


def greedy(logits: Tensor, fallback: int) -> BestTokens:
    """Return the most likely token of each row; among ties, the lowest id.

    On a GPU the call does not wait for the device. The logits are not changed.

    Args:
        logits: float32 of shape [rows, vocab_size]. A NaN counts as -inf.
        fallback: token id to return for rows in which all logits are -inf or NaN.
    """
    if logits.is_cuda:
        from baton_kernels.sampling.triton_greedy import greedy_triton

        return greedy_triton(logits, fallback)
    values = logits.numpy()
    winners = values.argmax(axis=-1)  # the first NaN, if a row has one
    best = values[np.arange(len(values)), winners]
    is_finite = np.isfinite(best)
    if is_finite.all():
        return BestTokens(torch.from_numpy(winners), None)
    unusual = np.flatnonzero(~is_finite)
    possible = np.where(np.isnan(values[unusual]), -np.inf, values[unusual])
    winners[unusual] = possible.argmax(axis=-1)
    is_impossible = np.zeros(len(values), dtype=np.bool_)
    is_impossible[unusual] = np.isneginf(possible.max(axis=-1))
    winners[is_impossible] = fallback
    return BestTokens(torch.from_numpy(winners), torch.from_numpy(is_impossible))
