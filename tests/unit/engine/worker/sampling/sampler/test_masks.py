"""Beams, invalid logits and batches of any order in the sampler."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from baton_kernels.sampling.noise import (
    gumbel,
    keys_tensor,
    least_mantissa,
    noise_key,
    noise_mantissa,
)
from baton_protocol.sampling_params import SamplingParams
from support.engine.bitmasks import bitmask
from support.engine.sampling_inputs import EOS, Sampled, sample, sampling_input


@pytest.mark.parametrize(
    "fields", [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 0.01}, {"top_p": 0.01}]
)
def test_a_nan_logit_is_never_sampled_and_an_infinite_one_always(fields: dict[str, Any]) -> None:
    logits = torch.tensor([[1.0, math.nan, 3.0, 2.0], [1.0, math.nan, 3.0, math.inf]])
    assert sample(logits, [sampling_input(SamplingParams(**fields))] * 2, EOS).token_ids == [2, 3]


def test_a_beam_row_gets_the_best_continuations_of_the_processed_logits() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(beam_width=3, min_tokens=1, logit_bias={7: 8.0}, temperature=1.0)
    output = sample(logits, [sampling_input(params), sampling_input(SamplingParams(seed=3))], EOS)
    expected = logits[0].clone()
    expected[7] += 8
    expected[2] = -math.inf
    values, ids = expected.log_softmax(-1).topk(6)
    found = output.logprobs[0]
    assert [token for token, _ in found.top] == ids.tolist()
    assert [value for _, value in found.top] == pytest.approx(values.tolist())
    assert output.token_ids[0] == found.token_id == 7
    assert output.logprobs[1] is None


def test_a_beam_row_gets_its_width_of_continuations_besides_stop_tokens() -> None:
    logits = torch.arange(20.0)[None]
    params = SamplingParams(beam_width=2, stop_token_ids=[19, 18, 17, 16])
    found = sample(logits, [sampling_input(params)], EOS).logprobs[0]
    not_ended = [token for token, _ in found.top if token not in (*EOS, *params.stop_token_ids)]
    assert len(not_ended) >= 2


def test_a_beam_row_lists_only_possible_continuations() -> None:
    beam = sampling_input(SamplingParams(beam_width=4))
    masked = sample(torch.zeros(1, 40), [beam], EOS, bitmask(40, {5, 6})).logprobs[0]
    assert {token for token, _ in masked.top} == {5, 6}
    impossible = sample(torch.full((1, 40), math.nan), [beam], EOS).logprobs[0]
    assert impossible.top == []


# ---- draw_tokens reads few tokens and must choose the same token as a search of the whole row


@given(noise=st.floats(-5, 45))
def test_the_least_mantissa_is_a_lower_bound(noise: float) -> None:
    bound = least_mantissa(torch.tensor([noise], dtype=torch.float64))
    assert 0 <= int(bound) < 2**52
    if int(bound) > 0:
        assert float(gumbel(bound - 1)) <= noise + 1e-6
        mantissa = noise_mantissa(
            keys_tensor([noise_key(1, 2, 3)], torch.device("cpu")), torch.arange(4000)
        )
        enough = gumbel(mantissa) >= noise
        assert bool((mantissa[enough] >= bound).all())


def test_rows_get_the_same_result_in_any_order_and_batch_size() -> None:
    """The vocabulary is large, all filters are used, and batches cross the chunk size."""
    draw = random.Random(5)
    logits = torch.randn(40, 16_000, generator=torch.Generator().manual_seed(5)) * 3
    inputs = [
        sampling_input(
            SamplingParams(
                seed=draw.choice([seed, seed - 2**63, 2**64 - 1 - seed]),
                temperature=draw.choice([0.0, 0.7, 1.0, 1.5]),
                top_k=draw.choice([0, 50]),
                top_p=draw.choice([1.0, 0.9, 0.999]),
                min_p=draw.choice([0.0, 0.02]),
                presence_penalty=draw.choice([0.0, 0.5]),
                logprobs=draw.choice([None, 2]),
            ),
            generated=[draw.randrange(16_000) for _ in range(20)],
        )
        for seed in range(40)
    ]

    def outcome(output: Sampled) -> list[Any]:
        return list(zip(output.token_ids, output.logprobs, strict=True))

    whole = outcome(sample(logits, inputs, EOS))
    order = draw.sample(range(40), 40)
    shuffled = outcome(sample(logits[order], [inputs[i] for i in order], EOS))
    assert shuffled == [whole[i] for i in order]
    for i in range(0, 40, 7):
        assert outcome(sample(logits[[i]], [inputs[i]], EOS)) == [whole[i]]
