"""Inputs of the sampler."""

from __future__ import annotations

import numpy as np

from baton_engine.worker.sampling.sampler import SamplingInput
from baton_protocol.sampling import SamplingParams

EOS = [2]


def sampling_input(
    params: SamplingParams, generated: list[int] | None = None, prompt: list[int] | None = None
) -> SamplingInput:
    return SamplingInput(
        params, np.array(prompt or [], dtype=np.int64), np.array(generated or [], dtype=np.int64)
    )
