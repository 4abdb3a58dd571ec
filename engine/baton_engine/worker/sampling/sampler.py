"""Samples tokens by a pure function of logits, sampling parameters, tokens and sample index.

No random generator keeps state: the noise of a candidate token is a hash (baton_kernels.sampling).
Therefore another pod that continues a request draws the same tokens. The tokens of a request do not
depend on the other requests in the batch.

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
model's EOS, so its request ends and other requests continue.

On a GPU, `sample` does not wait for the device. `report_logprobs` waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from baton_engine.worker.devices import to_device
from baton_engine.worker.sampling.logits_processing import (
    SamplingInput,
    end_token_ids,
    process_logits,
)
from baton_engine.worker.sampling.logprobs import beam_candidates, token_logprobs, without_nans
from baton_kernels.sampling import draw_tokens, greedy
from baton_kernels.sampling.noise import noise_key
from baton_protocol.engine_messages import TokenLogprobs

__all__ = ["SamplerOutput", "SamplingInput", "fallback_token", "report_logprobs", "sample"]


class SamplerOutput(NamedTuple):
    """One token per row, on the device of the logits."""

    #: int64 [rows].
    token_ids: Tensor
    #: Whether no token of the row was possible, bool [rows]. The token of such a row is EOS. None:
    #: there is no such row.
    is_impossible: Tensor | None
    #: Processed logits without NaN, float32 [rows, vocab_size]. In an impossible row, only EOS is
    #: not -inf.
    processed: Tensor


def fallback_token(eos_token_ids: Sequence[int], vocab_size: int) -> int:
    """Return the token of rows in which no token is possible: the model's EOS, or 0 without EOS."""
    return next((token for token in eos_token_ids if 0 <= token < vocab_size), 0)


def sample(
    logits: Tensor,
    inputs: Sequence[SamplingInput],
    eos_token_ids: Sequence[int],
    grammar_bitmask: Tensor | None = None,
) -> SamplerOutput:
    """Sample one token per row.

    Args:
        logits: raw logits, float32 [rows, vocab_size]; not changed.
        inputs: one per row.
        eos_token_ids: EOS tokens of the model. They are masked until `min_tokens` are generated.
        grammar_bitmask: int32 [rows, ceil(vocab_size / 32)], on the logits' device, in the form of
            GrammarOutput.bitmask. Rows of requests without a grammar are all -1.
    """
    processed = process_logits(logits, inputs, eos_token_ids, grammar_bitmask)
    fallback = fallback_token(eos_token_ids, logits.shape[-1])
    token_ids, is_impossible = greedy(processed, fallback)
    if is_impossible is not None:
        processed = without_nans(processed, out=None if processed is logits else processed)
        processed[:, fallback].masked_fill_(is_impossible, 0.0)
    random_rows = [
        row
        for row, item in enumerate(inputs)
        if item.params.temperature > 0 and not item.params.beam_width
    ]
    if random_rows:
        chosen = [inputs[row] for row in random_rows]
        keys = [noise_key(item.params.seed, item.position, item.sample_index) for item in chosen]
        params = [item.params for item in chosen]
        if len(random_rows) == len(inputs):
            token_ids = draw_tokens(processed, params, keys)
        else:
            index = to_device(np.array(random_rows), logits.device)
            token_ids[index] = draw_tokens(processed[index], params, keys)
    return SamplerOutput(token_ids, is_impossible, processed)


def report_logprobs(
    logits: Tensor,
    sampled: SamplerOutput,
    inputs: Sequence[SamplingInput],
    eos_token_ids: Sequence[int],
) -> list[TokenLogprobs | None]:
    """Return the log-probabilities to report for each row. None: the row's request asks for none.

    For a row of a beam search, `top` has the best continuations: at least 2 * beam_width, of which
    at least beam_width are not end tokens. If fewer tokens are possible, `top` has all possible
    tokens.

    Args:
        logits: raw logits, the argument of `sample`.
        sampled: the result of `sample`.
        inputs: the argument of `sample`.
        eos_token_ids: the argument of `sample`.
    """
    result: list[TokenLogprobs | None] = [None] * len(inputs)
    beam_rows = [row for row, item in enumerate(inputs) if item.params.beam_width]
    if beam_rows:
        widths = [inputs[row].params.beam_width for row in beam_rows]
        num_ends = [len(end_token_ids(inputs[row].params, eos_token_ids)) for row in beam_rows]
        counts = [width + max(width, ends) for width, ends in zip(widths, num_ends, strict=True)]
        processed = sampled.processed[beam_rows]
        if sampled.is_impossible is not None:
            processed.masked_fill_(sampled.is_impossible[beam_rows, None], -torch.inf)
        for row, found in zip(beam_rows, beam_candidates(processed, counts), strict=True):
            result[row] = found
    asking = [
        row
        for row, item in enumerate(inputs)
        if item.params.logprobs is not None and not item.params.beam_width
    ]
    if asking:
        raw, token_ids = logits, sampled.token_ids
        if len(asking) < len(inputs):
            raw, token_ids = logits[asking], token_ids[asking]
        num_top = [inputs[row].params.logprobs or 0 for row in asking]
        for row, reported in zip(
            asking, token_logprobs(raw, token_ids.tolist(), num_top), strict=True
        ):
            result[row] = reported
    return result
