"""Bad words, grammars and rows without a possible token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from baton_engine.worker.sampling.logprobs import MIN_LOGPROB
from baton_protocol.sampling_params import SamplingParams
from support.engine.bitmasks import bitmask
from support.engine.sampling_inputs import EOS, sample, sampling_input

GREEDY: dict[str, Any] = {"temperature": 0.0}


@pytest.mark.parametrize(
    ("prompt", "generated", "masked"),
    [
        ([], [4], False),
        ([], [4, 5], True),
        ([4], [5], True),
        ([4, 5], [], True),
        ([4, 5], [4], False),
        ([5], [], False),
    ],
)
def test_a_bad_word_that_began_in_prompt_or_output_is_not_completed(
    prompt: list[int], generated: list[int], masked: bool
) -> None:
    params = SamplingParams(temperature=0.0, bad_words_token_ids=[[4, 5, 1]])
    inputs = [sampling_input(params, prompt=prompt, generated=generated)]
    output = sample(torch.tensor([[0.0, 9.0, 0.0, 5.0]]), inputs, EOS)
    assert output.token_ids == [3 if masked else 1]


def test_a_grammar_masks_only_its_own_row() -> None:
    logits = torch.arange(40.0).expand(3, -1)
    inputs = [
        sampling_input(SamplingParams(**GREEDY)),
        sampling_input(SamplingParams(top_k=1)),
        sampling_input(SamplingParams(**GREEDY)),
    ]
    assert sample(logits, inputs, EOS, bitmask(40, {3, 31, 35}, {0, 33}, None)).token_ids == [
        35,
        33,
        39,
    ]
    assert sample(logits, inputs, EOS, bitmask(40, None, None, {31})).token_ids == [39, 39, 31]


def test_a_row_without_a_possible_token_gets_eos_and_does_not_change_the_others() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    logits[1] = math.nan
    logits[3] = -math.inf
    params = SamplingParams(seed=1, top_p=0.9, logprobs=2)
    inputs = [
        sampling_input(params),
        sampling_input(params),
        sampling_input(SamplingParams(temperature=0.0, allowed_token_ids=[3])),
        sampling_input(SamplingParams(temperature=0.0)),
        sampling_input(params),
    ]
    output = sample(logits, inputs, EOS, bitmask(40, None, None, {4}, None, None))
    assert output.impossible_rows == [1, 2, 3]
    assert [output.token_ids[i] for i in (1, 2, 3)] == [2, 2, 2]
    alone = [sample(logits[[i]], [inputs[i]], EOS) for i in (0, 4)]
    assert [output.token_ids[0], output.token_ids[4]] == [single.token_ids[0] for single in alone]
    assert [output.logprobs[0], output.logprobs[4]] == [single.logprobs[0] for single in alone]
    assert output.logprobs[1].logprob == MIN_LOGPROB
    assert sample(logits[[1]], [sampling_input(params)], []).token_ids == [0]
