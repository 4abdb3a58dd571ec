"""Samples tokens by a pure function of logits, sampling parameters, tokens and sample index.

No random generator keeps state: the noise of a candidate token is a hash (baton_kernels.sampling).
Therefore another pod that continues a request draws the same tokens. The other requests in the
batch make no difference.

    processed   logits after bias, penalties and masks               logits_processing.py
    greedy      argmax of the processed logits; of equal logits,     temperature 0
                the lowest id
    random      argmax of (processed / temperature + Gumbel noise)   baton_kernels.sampling
                over the ids that min_p, top_k and top_p keep: a
                sample of their softmax
    beams       the best continuations by log-probability; the best  logprobs.py
                one is the sampled token

Log-probabilities of raw logits are reported, except for beams.

Logits that are NaN count as -inf. If all logits of a row are masked or NaN, the row gets the
model's EOS, so its request ends and other requests continue. `SamplerOutput.impossible_rows` lists
such rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from baton_engine.worker.sampling.logits_processing import (
    SamplingInput,
    end_token_ids,
    process_logits,
)
from baton_engine.worker.sampling.logprobs import beam_candidates, token_logprobs, without_nans
from baton_kernels.sampling import draw_tokens
from baton_kernels.sampling.noise import noise_key
from baton_kernels.sampling.vocabulary_blocks import best_tokens
from baton_protocol.messages import TokenLogprobs

__all__ = ["SamplerOutput", "SamplingInput", "sample"]


@dataclass(slots=True)
class SamplerOutput:
    """The tokens of a step, and the log-probabilities to report."""

    token_ids: list[int]
    #: None for rows that did not request log-probabilities. For beam searches, see `sample`.
    logprobs: list[TokenLogprobs | None]
    #: Rows in which no token was possible. The token of such a row is EOS.
    impossible_rows: list[int] = field(default_factory=list)


def sample(
    logits: Tensor,
    inputs: Sequence[SamplingInput],
    eos_token_ids: Sequence[int],
    grammar_bitmask: Tensor | None = None,
) -> SamplerOutput:
    """Sample one token per row.

    For a row of a beam search, `logprobs[row].top` has the best continuations: at least
    2 * beam_width, of which at least beam_width are not end tokens. If fewer tokens are possible,
    `top` has all possible tokens.

    Args:
        logits: raw logits, float32 [rows, vocab_size]; not changed.
        inputs: one per row.
        eos_token_ids: EOS tokens of the model. They are masked until min_tokens are generated.
        grammar_bitmask: int32 [rows, ceil(vocab_size / 32)], on the logits' device, in the form of
            GrammarOutput.bitmask. Rows of requests without a grammar are all -1.
    """
    if not inputs:
        return SamplerOutput([], [])
    processed = process_logits(logits, inputs, eos_token_ids, grammar_bitmask)
    best, tokens = best_tokens(processed)
    unusual: list[int] = best.isfinite().logical_not_().nonzero()[:, 0].tolist()
    impossible: list[int] = []
    if unusual:  # NaN, +inf, or all masked
        processed = processed.clone() if processed is logits else processed
        processed[unusual] = without_nans(processed[unusual])
        best, tokens = best_tokens(processed)
        impossible = best.eq(-torch.inf).nonzero()[:, 0].tolist()

    random_rows = [
        row
        for row, item in enumerate(inputs)
        if item.params.temperature > 0 and not item.params.beam_width and row not in impossible
    ]
    if random_rows:
        chosen = [inputs[row] for row in random_rows]
        keys = [noise_key(item.params.seed, item.position, item.sample_index) for item in chosen]
        params = [item.params for item in chosen]
        if len(random_rows) == len(inputs):
            tokens = draw_tokens(processed, params, keys)
        else:
            index = torch.tensor(random_rows, device=logits.device)
            tokens[index] = draw_tokens(processed[index], params, keys)
    if impossible:
        tokens[impossible] = next(
            (token for token in eos_token_ids if 0 <= token < logits.shape[-1]), 0
        )
    token_ids: list[int] = tokens.tolist()
    return SamplerOutput(
        token_ids, _logprobs(logits, processed, inputs, eos_token_ids, token_ids), impossible
    )


def _logprobs(
    logits: Tensor,
    processed: Tensor,
    inputs: Sequence[SamplingInput],
    eos_token_ids: Sequence[int],
    token_ids: Sequence[int],
) -> list[TokenLogprobs | None]:
    result: list[TokenLogprobs | None] = [None] * len(inputs)
    beam_rows = [row for row, item in enumerate(inputs) if item.params.beam_width]
    if beam_rows:
        widths = [inputs[row].params.beam_width for row in beam_rows]
        num_ends = [len(end_token_ids(inputs[row].params, eos_token_ids)) for row in beam_rows]
        counts = [width + max(width, ends) for width, ends in zip(widths, num_ends, strict=True)]
        for row, found in zip(
            beam_rows, beam_candidates(processed[beam_rows], counts), strict=True
        ):
            result[row] = found
    asking = [
        row
        for row, item in enumerate(inputs)
        if item.params.logprobs is not None and not item.params.beam_width
    ]
    if asking:
        raw = logits if len(asking) == len(inputs) else logits[asking]
        num_top = [inputs[row].params.logprobs or 0 for row in asking]
        for row, reported in zip(
            asking, token_logprobs(raw, [token_ids[row] for row in asking], num_top), strict=True
        ):
            result[row] = reported
    return result
