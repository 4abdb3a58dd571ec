"""Draws tokens in torch. Only a few candidates per row are computed in float64.

Candidates are the tokens whose logits reach a bound: the k-th largest maximum of the vocabulary's
blocks, where k is top_k or a constant. In a row with top_k or top_p, every token that the filters
keep is a candidate. Other rows take up to two rounds. The first round compares about 64 likely
candidates. The best score determines how much noise another token needs to win. The second round
compares the few tokens with so much noise.

Probabilities are summed in fixed point, which is exact in any order. So the result of a row does
not depend on the other rows of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from baton_kernels.sampling.noise import gumbel, keys_tensor, least_mantissa, noise_mantissa
from baton_kernels.sampling.parameters import MIN_TEMPERATURE, DrawParams
from baton_kernels.sampling.vocabulary_blocks import (
    block_maxima,
    rank_bound,
    row_chunks,
    tokens_at_least,
)

#: The bound is the FEW-th largest block maximum. If top_p keeps tokens below it, the MANY-th is
#: tried. If top_p keeps tokens below that bound as well, all tokens are candidates.
FEW, MANY = 64, 1024
#: Fixed-point scale of probabilities, which are relative to the most likely token's. The sum of
#: 2**20 tokens is exact in float64.
_UNIT = 2.0**32
_LOWEST = torch.finfo(torch.float32).min


def draw_tokens_cpu(logits: Tensor, params: Sequence[DrawParams], keys: Sequence[int]) -> Tensor:
    """Implement `baton_kernels.sampling.draw_tokens` in torch."""
    drawn = [
        _sample_chunk(logits[rows], params[rows], keys_tensor(keys[rows], logits.device))
        for rows in row_chunks(logits)
    ]
    return torch.cat(drawn)


@dataclass(slots=True)
class _Rows:
    """Sampling parameters of rows, each a column of shape [rows, 1]; float64 unless noted."""

    keys: Tensor  #: int64.
    temperature: Tensor
    log_min_p: Tensor  #: -inf: no min_p.
    top_k: Tensor  #: int64; vocab_size: no top_k.
    top_p: Tensor  #: inf: no top_p.
    best: Tensor  #: The largest of logits / temperature.
    #: Sum in fixed point of the probabilities of the tokens that min_p keeps. top_p is a share of
    #: this sum. 0: the sum over the candidates is used.
    total: Tensor

    def take(self, index: Tensor) -> _Rows:
        return _Rows(*(getattr(self, name)[index] for name in self.__slots__))


def _sample_chunk(logits: Tensor, params: Sequence[DrawParams], keys: Tensor) -> Tensor:
    vocab_size, device = logits.shape[-1], logits.device

    def column(values: Sequence[float], dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)[:, None]

    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    maxima = block_maxima(logits)
    sorted_maxima = maxima.sort(dim=-1, descending=True).values
    temperature = column([max(p.temperature, MIN_TEMPERATURE) for p in params])
    rows = _Rows(
        keys=keys[:, None],
        temperature=temperature,
        log_min_p=column([math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params]),
        top_k=column(top_k, torch.int64),
        top_p=column([p.top_p if p.top_p < 1 else math.inf for p in params]),
        best=sorted_maxima[:, :1].double() / temperature,
        total=torch.zeros_like(temperature),
    )
    floor = _min_p_bound(rows)
    few = column([k if k < vocab_size else FEW for k in top_k], torch.int64)
    bound = torch.maximum(floor, rank_bound(sorted_maxima, few))
    whole = [row for row, p in enumerate(params) if p.top_p < 1 and top_k[row] == vocab_size]
    if whole:
        index = torch.tensor(whole, device=device)
        bound[index], rows.total[index] = _top_p_bound(
            logits[index], rows.take(index), sorted_maxima[index], floor[index]
        )
    token_ids, scores = _draw(logits, tokens_at_least(logits, maxima, bound), rows)

    free = column(
        [p.top_p >= 1 and k == vocab_size for p, k in zip(params, top_k, strict=True)], torch.bool
    )
    index = (free & (bound > floor)).nonzero()[:, 0]
    if len(index):
        mine, others, to_beat = rows.take(index), logits, scores[index]
        if len(index) < len(params):
            others = logits[index]
        # A token below the bound can win only if its noise mantissa is at least this number.
        needed = least_mantissa(to_beat - bound[index].double() / mine.temperature)
        possible = noise_mantissa(mine.keys, torch.arange(vocab_size, device=device)) >= needed
        possible &= (others < bound[index]) & (others >= floor[index])
        drawn, score = _draw(others, possible.nonzero(as_tuple=True), mine)
        token_ids[index] = torch.where(score > to_beat, drawn, token_ids[index])
    return token_ids[:, 0]


def _draw(logits: Tensor, candidates: Sequence[Tensor], rows: _Rows) -> tuple[Tensor, Tensor]:
    """Apply min_p, top_k and top_p to the candidates, and choose the token with the best score.

    Args:
        logits: float32 of shape [rows, vocab_size].
        candidates: row indices and token ids, ordered by row, then id.
        rows: parameters of each row.

    Returns:
        Chosen token ids and their scores, [rows, 1] each. A score is logit / temperature + noise,
        or -inf in a row where no candidate remains.
    """
    token_ids, present = _compact(candidates, len(logits))
    scaled = (logits.gather(-1, token_ids).double() / rows.temperature).masked_fill_(
        ~present, -math.inf
    )
    scaled.masked_fill_(scaled < rows.best + rows.log_min_p, -math.inf)
    if bool((rows.top_k < logits.shape[-1]).any() | (rows.top_p < 1).any()):
        scaled, order = scaled.sort(dim=-1, descending=True, stable=True)
        token_ids = token_ids.gather(-1, order)
        scaled.masked_fill_(
            torch.arange(scaled.shape[-1], device=scaled.device) >= rows.top_k, -math.inf
        )
        weights = _fixed_point(scaled, rows.best)
        total = torch.where(rows.total > 0, rows.total, weights.sum(dim=-1, keepdim=True))
        # A token stays if the tokens before it do not reach top_p.
        drop = weights.cumsum(dim=-1) - weights >= rows.top_p * total
        drop[:, 0] = False
        scaled.masked_fill_(drop, -math.inf)
    scores, winner = (scaled + gumbel(noise_mantissa(rows.keys, token_ids))).max(
        dim=-1, keepdim=True
    )
    return token_ids.gather(-1, winner), scores


def _min_p_bound(rows: _Rows) -> Tensor:
    """Return, for each row, a lower bound of the logits that min_p keeps: float32 [rows, 1]."""
    least = (rows.best + rows.log_min_p) * rows.temperature
    # A slack larger than the error of rounding to float32.
    slack = 1e-6 * (least.abs() + (rows.best * rows.temperature).abs())
    return torch.nan_to_num(least - slack, nan=_LOWEST).clamp_min_(_LOWEST).float()


def _top_p_bound(
    logits: Tensor, rows: _Rows, sorted_maxima: Tensor, floor: Tensor
) -> tuple[Tensor, Tensor]:
    """Return, for each row, a lower bound of the logits that top_p keeps.

    Returns:
        The lower bound, and the sum of the probabilities of the tokens that min_p keeps. Each has
        the shape [rows, 1], and the sum is in fixed point (`_fixed_point`).
    """
    scaled = logits.double().div_(rows.temperature)
    if bool((rows.log_min_p > -math.inf).any()):
        scaled.masked_fill_(scaled < rows.best + rows.log_min_p, -math.inf)
    weights = _fixed_point(scaled, rows.best)
    total = weights.sum(dim=-1, keepdim=True)
    bound, done = floor, torch.zeros_like(rows.top_k, dtype=torch.bool)
    for count in (FEW, MANY):
        tighter = torch.maximum(floor, rank_bound(sorted_maxima, torch.full_like(rows.keys, count)))
        enough = (weights * (logits >= tighter)).sum(dim=-1, keepdim=True) >= rows.top_p * total
        bound = torch.where(enough & ~done, tighter, bound)
        done |= enough
        if bool(done.all()):
            break
    return bound, total


def _fixed_point(scaled: Tensor, best: Tensor) -> Tensor:
    """Return exp(scaled - best) in units of 2**-32, rounded.

    This is the token's probability relative to the probability of the row's most likely token.
    """
    return (scaled - best).exp_().mul_(_UNIT).round_()


def _compact(places: Sequence[Tensor], num_rows: int) -> tuple[Tensor, Tensor]:
    """Collect the column indices of each row, and pad them to equal length.

    Args:
        places: row indices and column indices of the entries, ordered by row.
        num_rows: number of rows.

    Returns:
        Column indices [num_rows, largest number of entries in a row, at least 1], and a mask that
        is false for padding.
    """
    rows, columns = places
    counts = torch.bincount(rows, minlength=num_rows)
    width = max(int(counts.max()), 1)
    slots = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
    compact = torch.zeros(num_rows, width, dtype=torch.int64, device=rows.device)
    compact[rows, slots] = columns
    return compact, torch.arange(width, device=rows.device) < counts[:, None]
