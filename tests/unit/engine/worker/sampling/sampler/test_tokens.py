"""The sampler is a pure function of its inputs: seeds, biases, logprobs, greedy sampling."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton_engine.worker.sampling import sampler
from baton_engine.worker.sampling.sampler import SamplingInput
from baton_kernels.sampling import BestTokens
from baton_protocol.sampling_params import SamplingParams
from support.engine.sampling_inputs import EOS, sample, sampling_input

NO_TOKENS = np.zeros(0, dtype=np.int64)


def sample_one(logits: list[float], params: SamplingParams, **ids: list[int]) -> int:
    return sample(torch.tensor([logits]), [sampling_input(params, **ids)], EOS).token_ids[0]


def test_the_token_depends_on_the_seed_the_position_and_the_sample_index() -> None:
    logits = torch.zeros(1, 4096)

    def draw(seed: int = 7, position: int = 3, sample_index: int = 0) -> int:
        generated = np.zeros(position, dtype=np.int64)
        inputs = SamplingInput(SamplingParams(seed=seed), NO_TOKENS, generated, sample_index)
        return sample(logits, [inputs], EOS).token_ids[0]

    assert draw() == draw()
    assert len({draw(), draw(seed=8), draw(position=4), draw(sample_index=1)}) == 4


def test_greedy_sampling_takes_the_best_token_with_any_seed() -> None:
    for seed in range(5):
        assert sample_one([1.0, 3.0, 2.9], SamplingParams(temperature=0.0, seed=seed)) == 1


def test_stop_tokens_are_not_sampled_before_min_tokens() -> None:
    logits = [0.0, 5.0, 9.0, 7.0, 1.0]  # EOS is 2
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[3])
    assert sample_one(logits, params) == 1
    assert sample_one(logits, params, generated=[1]) == 1
    assert sample_one(logits, params, generated=[1, 1]) == 2


def test_eos_can_be_sampled_with_ignore_eos() -> None:
    assert sample_one([0.0, 1.0, 9.0], SamplingParams(temperature=0.0, ignore_eos=True)) == 2


def test_logit_bias_changes_the_choice_and_ignores_ids_outside_the_vocabulary() -> None:
    params = SamplingParams(temperature=0.0, logit_bias={0: 100.0, 1_000_000: 50.0})
    assert sample_one([0.0, 5.0, 1.0], params) == 0
    assert sample_one([0.0, 5.0, 1.0], SamplingParams(temperature=0.0, logit_bias={1: -100.0})) == 2


def test_logprobs_are_those_of_the_raw_logits_with_rank_and_top_tokens() -> None:
    logits = torch.tensor([[1.0, 4.0, 2.0, 3.0]])
    params = SamplingParams(temperature=0.0, logit_bias={1: -100.0}, logprobs=2)
    reported = sample(logits, [sampling_input(params)], EOS).logprobs[0]
    expected = logits[0].log_softmax(-1)
    assert (reported.token_id, reported.rank) == (3, 2)
    assert reported.logprob == pytest.approx(float(expected[3]))
    assert [token for token, _ in reported.top] == [1, 3]
    assert reported.top[0][1] == pytest.approx(float(expected[1]))
    only_sampled = sampling_input(SamplingParams(temperature=0.0, logprobs=0))
    assert sample(logits, [only_sampled], EOS).logprobs[0].top == []
    assert sample(logits, [sampling_input(SamplingParams(temperature=0.0))], EOS).logprobs == [None]


def test_sampling_does_not_change_its_logits() -> None:
    logits = torch.randn(1, 24)
    before = logits.clone()
    params = SamplingParams(top_k=2, logit_bias={1: 5.0}, min_tokens=3, presence_penalty=1.0)
    sample(logits, [sampling_input(params, [1])], EOS)
    assert torch.equal(logits, before)


def test_no_value_of_the_logits_decides_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's host would have to wait. Tensors of the device `meta` have no values to read."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(
        sampler, "greedy", lambda x, _: BestTokens(x.argmax(-1), x.amax(-1).isneginf())
    )
    monkeypatch.setattr(sampler, "draw_tokens", lambda x, params, keys: x.argmax(-1))
    inputs = [
        sampling_input(SamplingParams(temperature=0.0, allowed_token_ids=[2, 3])),
        sampling_input(SamplingParams(seed=1, logit_bias={1: 2.0}, repetition_penalty=1.1), [3]),
        sampling_input(SamplingParams(presence_penalty=1.0, bad_words_token_ids=[[3]]), [3]),
        sampling_input(SamplingParams(min_tokens=3)),
    ]
    for rows in (slice(None), slice(1, None)):
        logits = torch.empty(len(inputs[rows]), 40, device="meta")
        sampled = sampler.sample(logits, inputs[rows], EOS)
        assert sampled.token_ids.shape == (len(inputs[rows]),)


def test_a_temperature_near_zero_is_greedy() -> None:
    logits = [1.0, 3.0, 2.0, -1.0]
    for temperature in (5e-324, 1e-300, 1e-9):
        assert sample_one(logits, SamplingParams(temperature=temperature, top_p=0.9)) == 1
