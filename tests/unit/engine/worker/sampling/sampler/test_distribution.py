"""Chi-square tests of sampled tokens against the exact distribution, for filters and their mixes.

The exact distribution is computed here from the definitions, token by token. Seeds are fixed, so
the result of a test does not depend on chance.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from baton_engine.worker.sampling.sampler import SamplingInput
from baton_protocol.sampling_params import SamplingParams
from support.engine.sampling_inputs import EOS, sample

VOCAB_SIZE = 24
#: More blocks than the first set of candidates holds, so most tokens are never read.
LARGE_VOCAB_SIZE = 8192
PROMPT, GENERATED = [3, 4, 4, 9], [5, 5, 5, 9, 11]
STANDARD_DEVIATIONS = 4.753  # p = 1e-6

Array = npt.NDArray[np.float64]

FILTERS: dict[str, dict[str, Any]] = {
    "temperature 1": {},
    "cold": {"temperature": 0.4},
    "hot": {"temperature": 2.5},
    "top_k": {"top_k": 5},
    "top_k 1": {"top_k": 1},
    "top_p": {"top_p": 0.7},
    "top_p, nearly all": {"top_p": 0.995},
    "min_p": {"min_p": 0.15},
    "top_k and top_p": {"top_k": 6, "top_p": 0.8},
    "min_p and top_p": {"min_p": 0.02, "top_p": 0.9},
    "all filters, hot": {"temperature": 1.8, "top_k": 9, "top_p": 0.85, "min_p": 0.05},
}
PROCESSING: dict[str, dict[str, Any]] = {
    "logit_bias": {"logit_bias": {1: 3.0, 7: -2.0, 11: 1.0}},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 0.8},
    "negative penalties": {
        "presence_penalty": -1.0,
        "frequency_penalty": -0.3,
        "repetition_penalty": 0.8,
    },
    "allowed_token_ids, one unknown": {"allowed_token_ids": [1, 2, 5, 9, 20, 77]},
    "bad_words": {
        "bad_words_token_ids": [[8], [11, 3], [9, 11, 6], [5, 11, 4], [9, 5, 5, 5, 9, 11, 10]]
    },
    "min_tokens": {"min_tokens": 6, "stop_token_ids": [12]},
    "everything": {
        "temperature": 1.4,
        "top_k": 12,
        "top_p": 0.9,
        "min_p": 0.01,
        "logit_bias": {1: 2.0, 12: 9.0},
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "bad_words_token_ids": [[8], [9, 11, 6]],
        "min_tokens": 6,
        "stop_token_ids": [12],
    },
}


def exact_distribution(logits: Array, p: SamplingParams) -> Array:
    """Return the probabilities of the token after PROMPT and GENERATED."""
    x, history = logits.copy(), [*PROMPT, *GENERATED]
    for token, bias in (p.logit_bias or {}).items():
        x[token] += bias
    for token in set(history):
        x[token] = (
            x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        )
    for token, count in Counter(GENERATED).items():
        x[token] -= p.frequency_penalty * count + p.presence_penalty
    if p.allowed_token_ids is not None:
        x[[token for token in range(len(x)) if token not in p.allowed_token_ids]] = -math.inf
    for *prefix, last in p.bad_words_token_ids or []:
        if history[len(history) - len(prefix) :] == prefix:
            x[last] = -math.inf
    if len(GENERATED) < p.min_tokens:
        x[[*EOS, *p.stop_token_ids]] = -math.inf
    probs = np.exp((x - x.max()) / p.temperature)
    probs[probs < p.min_p * probs.max()] = 0
    order = np.argsort(-probs, kind="stable")
    if p.top_k > 0:
        probs[order[p.top_k :]] = 0
    probs /= probs.sum()
    cumulative = 0.0
    for token in order:
        if cumulative >= p.top_p:
            probs[token] = 0
        cumulative += probs[token]
    return probs / probs.sum()


def draw(logits: Array, fields: dict[str, Any], num_draws: int) -> npt.NDArray[np.int64]:
    """Return how often each token is sampled, over seeds and sample indices, in one call."""
    prompt, generated = np.array(PROMPT), np.array(GENERATED)
    inputs = [
        SamplingInput(SamplingParams(seed=seed, **fields), prompt, generated, sample_index)
        for seed in range(num_draws // 4)
        for sample_index in range(4)
    ]
    rows = torch.tensor(logits, dtype=torch.float32).expand(len(inputs), -1)
    return np.bincount(sample(rows, inputs, EOS).token_ids, minlength=len(logits))


def assert_follows(counts: npt.NDArray[np.int64], probs: Array) -> None:
    assert counts[probs == 0].sum() == 0, "a token of probability 0 was sampled"
    expected = probs * counts.sum()
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    observed, expected = observed[expected > 1], expected[expected > 1]
    statistic = float(((observed - expected) ** 2 / expected).sum())
    degrees = max(len(expected) - 1, 1)
    # Wilson and Hilferty 1931: the cube root of a chi-square variable is nearly normal.
    spread = 2 / (9 * degrees)
    critical = degrees * (1 - spread + STANDARD_DEVIATIONS * math.sqrt(spread)) ** 3
    assert statistic < critical, (
        f"chi-square {statistic:.1f}, critical {critical:.1f} for {degrees} degrees of freedom"
    )


def normal_logits(seed: int, vocab_size: int, scale: float) -> Array:
    values = np.random.default_rng(seed).normal(size=vocab_size) * scale
    return values.astype(np.float32).astype(np.float64)


@pytest.mark.parametrize("name", [*FILTERS, *PROCESSING])
def test_a_small_vocabulary_is_sampled_from_the_exact_distribution(name: str) -> None:
    fields = (FILTERS | PROCESSING)[name]
    logits = normal_logits(len(name), VOCAB_SIZE, 2.0)
    probs = exact_distribution(logits, SamplingParams(**fields))
    assert name in ("temperature 1", "cold", "hot") or not np.allclose(
        probs, exact_distribution(logits, SamplingParams())
    )
    assert_follows(draw(logits, fields, 12_000), probs)


@pytest.mark.parametrize("scale", [0.3, 4.0], ids=["flat", "peaked"])
@pytest.mark.parametrize("name", FILTERS)
def test_a_large_vocabulary_is_sampled_from_the_exact_distribution(name: str, scale: float) -> None:
    """Few tokens are drawn often enough for the test, so it counts 40 bins of tokens by rank."""
    logits = normal_logits(len(name), LARGE_VOCAB_SIZE, scale)
    probs = exact_distribution(logits, SamplingParams(**FILTERS[name]))
    counts = draw(logits, FILTERS[name], 800)
    assert counts[probs == 0].sum() == 0, "a token of probability 0 was sampled"
    order = np.argsort(-probs, kind="stable")
    bins = np.minimum((np.cumsum(probs[order]) * 40).astype(int), 39)
    binned_counts = np.bincount(bins, weights=counts[order], minlength=40).astype(np.int64)
    assert_follows(binned_counts, np.bincount(bins, weights=probs[order], minlength=40))


def test_the_chi_square_check_fails_for_a_wrong_distribution() -> None:
    logits = normal_logits(0, VOCAB_SIZE, 2.0)
    counts = draw(logits, {}, 20_000)
    with pytest.raises(AssertionError, match="chi-square"):
        assert_follows(counts, exact_distribution(logits, SamplingParams(temperature=1.1)))
