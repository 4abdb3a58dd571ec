"""Inputs and outputs of the sampler. For the tests of the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from baton_engine.worker.sampling import sampler
from baton_engine.worker.sampling.sampler import SamplingInput
from baton_protocol.engine_messages import TokenLogprobs
from baton_protocol.sampling_params import SamplingParams

EOS = [2]


class Sampled(NamedTuple):
    """The results of the sampler, by row."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    impossible_rows: list[int]


def sampling_input(
    params: SamplingParams, generated: list[int] | None = None, prompt: list[int] | None = None
) -> SamplingInput:
    return SamplingInput(
        params, np.array(prompt or [], dtype=np.int64), np.array(generated or [], dtype=np.int64)
    )


def sample(
    logits: Tensor,
    inputs: Sequence[SamplingInput],
    eos_token_ids: Sequence[int],
    grammar_bitmask: Tensor | None = None,
) -> Sampled:
    """Return the tokens of `sampler.sample` and their log-probabilities on the host."""
    sampled = sampler.sample(logits, inputs, eos_token_ids, grammar_bitmask)
    logprobs = sampler.report_logprobs(logits, sampled, inputs, eos_token_ids)
    impossible: list[int] = []
    if sampled.is_impossible is not None:
        impossible = sampled.is_impossible.nonzero()[:, 0].tolist()
    return Sampled(sampled.token_ids.tolist(), logprobs, impossible)
