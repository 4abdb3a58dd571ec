"""Computes log-probabilities of sampled tokens, of prompt tokens and of beam candidates.

Log-probabilities of sampled and prompt tokens come from the raw logits. Log-probabilities of beam
candidates come from the processed logits. All are at least MIN_LOGPROB, because JSON has no
infinity.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from baton_kernels.sampling.vocabulary_blocks import row_chunks
from baton_protocol.engine_messages import PromptLogprobs, TokenLogprobs

MIN_LOGPROB = -9999.0


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """Return the log-probability and rank of each row's chosen token, and the likeliest tokens.

    The likeliest tokens are in descending order of log-probability.

    Args:
        logits: raw logits, float32 [rows, vocab_size]. NaN counts as -inf.
        token_ids: chosen token of each row.
        num_top: number of likeliest tokens to return for each row.
    """
    result: list[TokenLogprobs] = []
    for rows in row_chunks(logits):
        result += _chunk_logprobs(logits[rows], token_ids[rows], num_top[rows])
    return result


def prompt_logprobs(logits: Tensor, next_token_ids: Sequence[int], num_top: int) -> PromptLogprobs:
    """Return each prompt token's log-probability and rank, and the likeliest tokens.

    Args:
        logits: raw logits of n consecutive prompt positions, float32 [n, vocab_size].
        next_token_ids: the n prompt tokens that these positions predict.
        num_top: number of likeliest tokens to return for each position.
    """
    return token_logprobs(logits, next_token_ids, [num_top] * len(next_token_ids))


def beam_candidates(processed: Tensor, num_candidates: Sequence[int]) -> list[TokenLogprobs]:
    """Return the likeliest next tokens of each beam.

    The attribute `top` of a result has these tokens, the likeliest first. Impossible tokens are
    left out, so `top` may have fewer than `num_candidates` tokens.

    Args:
        processed: processed logits of one beam per row, float32 [rows, vocab_size], without NaN.
            Masked tokens are -inf.
        num_candidates: number of tokens to return for each row.
    """
    values, ids = processed.log_softmax(dim=-1).topk(min(max(num_candidates), processed.shape[-1]))
    result = []
    for row_ids, row_values, count in zip(
        ids.tolist(), values.tolist(), num_candidates, strict=True
    ):
        top = [
            (token_id, value)
            for token_id, value in zip(row_ids, row_values, strict=True)
            if value > MIN_LOGPROB
        ]
        best_id, best = top[0] if top else (row_ids[0], MIN_LOGPROB)
        result.append(TokenLogprobs(best_id, best, 1, top[:count]))
    return result


def count_nans(logits: Tensor) -> list[int]:
    """Return the number of NaNs in each row of logits [rows, vocab_size]."""
    return logits.isnan().sum(dim=-1).tolist()


def without_nans(logits: Tensor, out: Tensor | None = None) -> Tensor:
    """Replace NaN by -inf, and +inf by the largest finite number. Return the result.

    Args:
        out: tensor for the result, which may be `logits` itself. None: a new tensor.
    """
    largest = torch.finfo(logits.dtype).max
    return torch.nan_to_num(logits, nan=-torch.inf, posinf=largest, neginf=-torch.inf, out=out)


def _chunk_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    logprobs = logits.log_softmax(dim=-1)
    if bool(logprobs[:, 0].isnan().any()):  # one NaN, or infinity, makes its whole row NaN
        logprobs = without_nans(logits).log_softmax(dim=-1).nan_to_num(nan=MIN_LOGPROB)
    chosen = logprobs.gather(-1, torch.tensor(token_ids, device=logits.device)[:, None])
    ranks: list[int] = ((logprobs > chosen).sum(dim=-1) + 1).tolist()
    values, ids = logprobs.topk(min(max(num_top), logprobs.shape[-1]))
    tops = zip(ids.tolist(), values.clamp_min(MIN_LOGPROB).tolist(), strict=True)
    return [
        TokenLogprobs(
            token_id, logprob, rank, list(zip(top_ids[:count], top_values[:count], strict=True))
        )
        for token_id, logprob, rank, (top_ids, top_values), count in zip(
            token_ids,
            chosen[:, 0].clamp_min(MIN_LOGPROB).tolist(),
            ranks,
            tops,
            num_top,
            strict=True,
        )
    ]
