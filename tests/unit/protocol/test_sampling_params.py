"""Checks of sampling parameters: an error names the field."""

from __future__ import annotations

import pytest

from baton_protocol.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"presence_penalty": 3.0}, "presence_penalty"),
        ({"frequency_penalty": -3.0}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"logit_bias": {-1: 0.0}}, "logit_bias"),
        ({"logit_bias": {1: 101.0}}, "logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"seed": 2**64}, "seed"),
    ],
)
def test_invalid_sampling_params_are_refused_with_the_fields_name(params, field) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**params).validate()
