"""The filters and the draw with a full sort, row by row. The truth for tests."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from baton_kernels.sampling.noise import gumbel_noise
from baton_kernels.sampling.parameters import MIN_TEMPERATURE, DrawParams


def draw_tokens_reference(
    logits: Tensor, params: Sequence[DrawParams], keys: Sequence[int]
) -> Tensor:
    """Arguments and result as `baton_kernels.sampling.draw_tokens`."""
    vocab_size = logits.shape[-1]
    winners = []
    for row, wish, key in zip(logits, params, keys, strict=True):
        scaled, token_ids = (row.double() / max(wish.temperature, MIN_TEMPERATURE)).sort(
            descending=True, stable=True
        )
        best = scaled[0].clone()
        if wish.min_p > 0:
            scaled[scaled < best + math.log(wish.min_p)] = -math.inf
        if 0 < wish.top_k < vocab_size:
            scaled[wish.top_k :] = -math.inf
        if wish.top_p < 1:
            weights = ((scaled - best).exp() * 2.0**32).round()
            drop = weights.cumsum(0) - weights >= wish.top_p * weights.sum()
            drop[0] = False
            scaled[drop] = -math.inf
        noise = gumbel_noise([key], vocab_size, logits.device)[0]
        winners.append(token_ids[(scaled + noise[token_ids]).argmax()])
    return torch.stack(winners)
