"""Choosing tokens: the most likely one, or a sample of what filters keep.

    token = argmax over the kept t of (logits[t] / temperature + noise[t])           Gumbel-max

is a sample of the softmax over the kept tokens. The noise is a hash of (key, t) (noise.py), so nothing holds state. The filters
apply in this order, each to what the one before left: min_p, top_k (ties: lower ids stay), top_p (the smallest set of best tokens
that reaches it; ties likewise). The most likely token always stays.

Nothing is sorted as a whole, neither in C++ (../cpu/source/sampling.h) nor in torch (cpu.py) nor on a GPU (triton_kernel.py). They
agree: the random bits are the same; logits are compared in float32, probabilities summed in fixed point, which is exact in any
order; scores are float64. Only where two scores, or a sum and top_p, differ in the last bits of an implementation's exp and log can
the chosen token differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from baton_kernels.cpu import ops_for
from baton_kernels.sampling.cpu import draw_tokens_cpu
from baton_kernels.sampling.noise import signed
from baton_kernels.sampling.parameters import MIN_TEMPERATURE, DrawParams

__all__ = ["DrawParams", "draw_tokens", "greedy"]


def draw_tokens(logits: Tensor, params: Sequence[DrawParams], keys: Sequence[int]) -> Tensor:
    """Draws one token per row, by device of the logits; on a GPU nothing waits for the device.

    Args:
        logits: float32 of shape [rows, vocab_size]; finite, or -inf for masked tokens, at least one per row is not; not changed.
        params: per row.
        keys: per row, from `noise.noise_key`.

    Returns:
        Token ids, int64 of shape [rows].
    """
    if logits.is_cuda:
        from baton_kernels.sampling.triton_kernel import draw_tokens_triton

        return draw_tokens_triton(logits, params, keys)
    if (ops := ops_for(logits)) is not None:
        vocab_size = logits.shape[-1]
        drawn: Tensor = ops.draw_tokens(
            logits,
            [max(p.temperature, MIN_TEMPERATURE) for p in params],
            [p.top_k if 0 < p.top_k < vocab_size else 0 for p in params],
            [p.top_p for p in params],
            [p.min_p for p in params],
            [signed(key) for key in keys],
        )
        return drawn
    return draw_tokens_cpu(logits, params, keys)


def greedy(logits: Tensor) -> list[int] | None:
    """The most likely token of each row, of equal ones the lowest; None if a row has a NaN or +inf, or nothing but -inf.

    Reads the device once, and waits for it.

    Args:
        logits: float32 of shape [rows, vocab_size].
    """
    if logits.is_cuda:
        from baton_kernels.sampling.triton_greedy import greedy_triton

        token_ids: list[int] = greedy_triton(logits).tolist()
        return None if -1 in token_ids else token_ids
    values = logits.numpy()
    winners = values.argmax(axis=-1)  # of a row with a NaN, that
    best = np.take_along_axis(values, winners[:, None], axis=-1)
    return winners.tolist() if np.isfinite(best).all() else None
