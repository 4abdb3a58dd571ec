"""What masks, grammars, beams and bad logits do to a batch."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_engine.worker.sampling.logprobs import MIN_LOGPROB, count_nans, prompt_logprobs
from baton_engine.worker.sampling.sampler import SamplerOutput, SamplingInput, sample
from baton_kernels.sampling import draw_tokens
from baton_kernels.sampling.noise import (
    gumbel,
    gumbel_noise,
    keys_tensor,
    least_mantissa,
    noise_key,
    noise_mantissa,
)
from baton_protocol.sampling import SamplingParams

EOS = [2]
GREEDY: dict[str, Any] = {"temperature": 0.0}


def row(
    params: SamplingParams, generated: list[int] | None = None, prompt: list[int] | None = None
) -> SamplingInput:
    return SamplingInput(
        params, np.array(prompt or [], dtype=np.int64), np.array(generated or [], dtype=np.int64)
    )


def greedy(logits: list[float], ids: dict[str, list[int]] | None = None, **fields: Any) -> int:
    item = row(SamplingParams(temperature=0.0, **fields), **(ids or {}))
    return sample(torch.tensor([logits]), [item], EOS).token_ids[0]


def bitmask(vocab_size: int, *rows: set[int] | None) -> torch.Tensor:
    """None: no grammar."""
    mask = np.full((len(rows), -(-vocab_size // 32)), -1, dtype=np.int32)
    for index, allowed in enumerate(rows):
        if allowed is not None:
            mask[index] = 0
            for token in allowed:
                mask.view(np.uint32)[index, token // 32] |= np.uint32(1 << token % 32)
    return torch.from_numpy(mask)


def test_nothing_but_allowed_ids_is_sampled() -> None:
    assert greedy([9.0, 5.0, 7.0, 1.0], allowed_token_ids=[1, 3]) == 1
    assert greedy([9.0, 5.0, 7.0, 1.0], allowed_token_ids=[3, 77]) == 3


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
def test_a_bad_word_is_not_completed_wherever_it_began(
    prompt: list[int], generated: list[int], masked: bool
) -> None:
    token = greedy(
        [0.0, 9.0, 0.0, 5.0],
        {"prompt": prompt, "generated": generated},
        bad_words_token_ids=[[4, 5, 1]],
    )
    assert token == (3 if masked else 1)


def test_a_bad_word_of_one_token_is_never_sampled() -> None:
    assert greedy([0.0, 9.0, 0.0, 5.0], bad_words_token_ids=[[1], [3, 3, 3]]) == 3


def test_a_grammar_masks_its_own_row_only() -> None:
    logits = torch.arange(40.0).expand(3, -1)
    inputs = [
        row(SamplingParams(**GREEDY)),
        row(SamplingParams(top_k=1)),
        row(SamplingParams(**GREEDY)),
    ]
    assert sample(logits, inputs, EOS, bitmask(40, {3, 31, 35}, {0, 33}, None)).token_ids == [
        35,
        33,
        39,
    ]
    assert sample(logits, inputs, EOS, bitmask(40, None, None, {31})).token_ids == [39, 39, 31]


def test_a_row_without_any_possible_token_ends_and_leaves_the_others_alone() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    logits[1] = math.nan
    logits[3] = -math.inf
    params = SamplingParams(seed=1, top_p=0.9, logprobs=2)
    inputs = [
        row(params),
        row(params),
        row(SamplingParams(temperature=0.0, allowed_token_ids=[3])),
        row(SamplingParams(temperature=0.0)),
        row(params),
    ]
    output = sample(logits, inputs, EOS, bitmask(40, None, None, {4}, None, None))
    assert output.impossible_rows == [1, 2, 3]
    assert [output.token_ids[i] for i in (1, 2, 3)] == [2, 2, 2]
    alone = [sample(logits[[i]], [inputs[i]], EOS) for i in (0, 4)]
    assert [output.token_ids[0], output.token_ids[4]] == [single.token_ids[0] for single in alone]
    assert [output.logprobs[0], output.logprobs[4]] == [single.logprobs[0] for single in alone]
    assert output.logprobs[1] is not None
    assert output.logprobs[1].logprob == MIN_LOGPROB
    assert sample(logits[[1]], [row(params)], []).token_ids == [0]


@pytest.mark.parametrize(
    "fields", [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 0.01}, {"top_p": 0.01}]
)
def test_nan_counts_as_impossible_and_infinity_as_certain(fields: dict[str, Any]) -> None:
    logits = torch.tensor([[1.0, math.nan, 3.0, 2.0], [1.0, math.nan, 3.0, math.inf]])
    assert sample(logits, [row(SamplingParams(**fields))] * 2, EOS).token_ids == [2, 3]


def test_nans_are_counted_per_row() -> None:
    logits = torch.zeros(3, 5)
    logits[1, 2:] = math.nan
    assert count_nans(logits) == [0, 3, 0]


def test_beam_rows_get_the_best_continuations_of_the_processed_logits() -> None:
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(beam_width=3, min_tokens=1, logit_bias={7: 8.0}, temperature=1.0)
    output = sample(logits, [row(params), row(SamplingParams(seed=3))], EOS)
    expected = logits[0].clone()
    expected[7] += 8
    expected[2] = -math.inf
    values, ids = expected.log_softmax(-1).topk(6)
    found = output.logprobs[0]
    assert found is not None
    assert [token for token, _ in found.top] == ids.tolist()
    assert [value for _, value in found.top] == pytest.approx(values.tolist())
    assert output.token_ids[0] == found.token_id == 7
    assert output.logprobs[1] is None


def test_beam_rows_get_enough_continuations_when_many_tokens_end() -> None:
    logits = torch.arange(20.0)[None]
    params = SamplingParams(beam_width=2, stop_token_ids=[19, 18, 17, 16])
    found = sample(logits, [row(params)], EOS).logprobs[0]
    assert found is not None
    going_on = [token for token, _ in found.top if token not in (*EOS, *params.stop_token_ids)]
    assert len(going_on) >= 2


def test_a_beam_row_lists_possible_continuations_only() -> None:
    found = sample(
        torch.zeros(1, 40), [row(SamplingParams(beam_width=4))], EOS, bitmask(40, {5, 6})
    ).logprobs[0]
    assert found is not None
    assert {token for token, _ in found.top} == {5, 6}
    dead_end = sample(
        torch.full((1, 40), math.nan), [row(SamplingParams(beam_width=4))], EOS
    ).logprobs[0]
    assert dead_end is not None
    assert dead_end.top == []


def test_prompt_logprobs_are_of_the_following_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 30, generator=torch.Generator().manual_seed(2))
    following = [3, 1, 4, 1, 5, 9, 2]
    monkeypatch.setattr("baton_kernels.sampling.vocabulary_blocks.CPU_CHUNK", 60)
    reported = prompt_logprobs(logits, following, 2)
    expected = logits.log_softmax(-1)
    for position, (token, entry) in enumerate(zip(following, reported, strict=True)):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(expected[position, token]))
        assert entry.rank == int((expected[position] > expected[position, token]).sum()) + 1
        assert [top for top, _ in entry.top] == expected[position].topk(2).indices.tolist()
    assert prompt_logprobs(logits[:0], [], 2) == []
    assert prompt_logprobs(logits[:1], [3], 0)[0].top == []


# ---- the fast way of drawing chooses what looking at every token chooses


def drawn_by_looking_at_all(logits: torch.Tensor, params: SamplingParams, key: int) -> int:
    """The definition, in float64 over the whole row."""
    scaled = logits.double() / params.temperature
    if params.min_p:
        scaled[scaled < scaled.max() + math.log(params.min_p)] = -math.inf
    values, ids = scaled.sort(descending=True, stable=True)
    if params.top_k > 0:
        values[params.top_k :] = -math.inf
    probs = values.softmax(-1)
    dropped = probs.cumsum(-1) - probs >= (params.top_p if params.top_p < 1 else math.inf)
    dropped[0] = False
    values[dropped] = -math.inf
    kept = torch.full_like(scaled, -math.inf).scatter(0, ids, values)
    return int((kept + gumbel_noise([key], len(logits), logits.device)[0]).argmax())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.sampled_from([1, 7, 64, 65, 500, 4097, 20_000]),
    scale=st.sampled_from([0.0, 0.1, 2.0, 10.0]),
    masked=st.sampled_from([0.0, 0.5, 0.999]),
)
def test_drawing_agrees_with_looking_at_every_token(
    seed: int, vocab_size: int, scale: float, masked: float
) -> None:
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    params = [
        SamplingParams(
            temperature=draw.choice([0.3, 1.0, 1.7]),
            top_k=draw.choice([0, 0, 1, 40, 3000]),
            top_p=draw.choice([1.0, 1.0, 0.3, 0.95, 0.9999]),
            min_p=draw.choice([0.0, 0.0, 0.1, 1e-6]),
        )
        for _ in range(12)
    ]
    logits = torch.randn(len(params), vocab_size, generator=generator) * scale
    hidden = torch.rand(logits.shape, generator=generator) < masked
    hidden[:, 0] = False
    logits[hidden] = -math.inf
    keys = [noise_key(seed, position, 0) for position in range(len(params))]
    expected = [drawn_by_looking_at_all(logits[i], params[i], keys[i]) for i in range(len(params))]
    assert draw_tokens(logits, params, keys).tolist() == expected


@pytest.mark.parametrize("scale", [0.1, 1.0, 1.7, 4.0], ids=["flat", "wide", "narrow", "peaked"])
def test_top_p_keeps_as_many_tokens_as_it_needs(scale: float) -> None:
    """From a few to most of the vocabulary: each size of candidate set is enough for one of these."""
    logits = torch.randn(6, 80_000, generator=torch.Generator().manual_seed(3)) * scale
    params = [SamplingParams(top_p=top_p) for top_p in (0.2, 0.5, 0.8, 0.9, 0.99, 0.999)]
    keys = [noise_key(11, position, 0) for position in range(6)]
    expected = [drawn_by_looking_at_all(logits[i], params[i], keys[i]) for i in range(6)]
    assert draw_tokens(logits, params, keys).tolist() == expected


@given(noise=st.floats(-5, 45))
def test_the_least_mantissa_is_a_bound_from_below(noise: float) -> None:
    bound = least_mantissa(torch.tensor([noise], dtype=torch.float64))
    assert 0 <= int(bound) < 2**52
    if int(bound) > 0:
        assert float(gumbel(bound - 1)) <= noise + 1e-6
        mantissa = noise_mantissa(
            keys_tensor([noise_key(1, 2, 3)], torch.device("cpu")), torch.arange(4000)
        )
        enough = gumbel(mantissa) >= noise
        assert bool((mantissa[enough] >= bound).all())


def test_rows_are_alike_in_any_order_and_batch_size() -> None:
    """Large vocabulary, every filter, both sides of the chunk size."""
    draw = random.Random(5)
    logits = torch.randn(40, 16_000, generator=torch.Generator().manual_seed(5)) * 3
    inputs = [
        row(
            SamplingParams(
                seed=seed,
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

    def outcome(output: SamplerOutput) -> list[Any]:
        return list(zip(output.token_ids, output.logprobs, strict=True))

    whole = outcome(sample(logits, inputs, EOS))
    order = draw.sample(range(40), 40)
    shuffled = outcome(sample(logits[order], [inputs[i] for i in order], EOS))
    assert shuffled == [whole[i] for i in order]
    for i in range(0, 40, 7):
        assert outcome(sample(logits[[i]], [inputs[i]], EOS)) == [whole[i]]
