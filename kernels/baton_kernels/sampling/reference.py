"""Draws with a full sort, row by row, for tests."""

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
    """Implement `baton_kernels.sampling.draw_tokens` in torch."""
    vocab_size = logits.shape[-1]
    winners = []
    for row, p, key in zip(logits, params, keys, strict=True):
        scaled, token_ids = (row.double() / max(p.temperature, MIN_TEMPERATURE)).sort(
            descending=True, stable=True
        )
        best = scaled[0].clone()
        if p.min_p > 0:
            scaled[scaled < best + math.log(p.min_p)] = -math.inf
        if 0 < p.top_k < vocab_size:
            scaled[p.top_k :] = -math.inf
        if p.top_p < 1:
            weights = ((scaled - best).exp() * 2.0**32).round()
            drop = weights.cumsum(0) - weights >= p.top_p * weights.sum()
            drop[0] = False
            scaled[drop] = -math.inf
        noise = gumbel_noise([key], vocab_size, logits.device)[0]
        winners.append(token_ids[(scaled + noise[token_ids]).argmax()])
    return torch.stack(winners)
