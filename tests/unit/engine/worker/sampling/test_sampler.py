"""The sampler is a pure function with the right distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_engine.worker.sampling.sampler import SamplingInput, sample
from baton_kernels.sampling.noise import gumbel_noise, noise_key
from baton_protocol.sampling import SamplingParams

VOCAB_SIZE = 24
NUM_SEEDS = 20_000
EOS = [2]
# noise_key(1, 2, 3) and its first noise values.
PINNED_KEY = 7702586659592502839
PINNED_NOISE = [-0.7127349559443145, 0.1898373233540049, 3.076466515988269]
NO_TOKENS = np.zeros(0, dtype=np.int64)


def row(
    params: SamplingParams, generated: list[int] | None = None, prompt: list[int] | None = None
) -> SamplingInput:
    return SamplingInput(
        params, np.array(prompt or [], dtype=np.int64), np.array(generated or [], dtype=np.int64)
    )


def one(logits: list[float], params: SamplingParams, **ids: list[int]) -> int:
    return sample(torch.tensor([logits]), [row(params, **ids)], EOS).token_ids[0]


def logits_of(seed: int, rows: int = 1, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


def histogram(params: SamplingParams, logits: torch.Tensor) -> torch.Tensor:
    """Counts of each token over many seeds."""
    inputs = [
        row(
            SamplingParams(
                **{f: getattr(params, f) for f in params.__struct_fields__} | {"seed": s}
            )
        )
        for s in range(NUM_SEEDS)
    ]
    tokens = sample(logits.expand(NUM_SEEDS, -1), inputs, EOS).token_ids
    return torch.bincount(torch.tensor(tokens), minlength=logits.shape[-1])


def assert_distribution(counts: torch.Tensor, probs: torch.Tensor) -> None:
    """Pearson's chi-square at five standard deviations; tokens of probability 0 never appear."""
    possible = probs > 0
    assert counts[~possible].sum() == 0, "a token that was left out has been sampled"
    expected = probs[possible].double() * counts.sum()
    common = expected >= 5
    observed = torch.cat((counts[possible][common], counts[possible][~common].sum()[None])).double()
    expected = torch.cat((expected[common], expected[~common].sum()[None]))
    observed, expected = observed[expected > 0], expected[expected > 0]
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    degrees = len(expected) - 1
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees) + 5, (
        f"chi-square {chi_square:.1f} for {degrees} degrees"
    )


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_temperature_gives_the_softmax(temperature: float) -> None:
    logits = logits_of(0)
    assert_distribution(
        histogram(SamplingParams(temperature=temperature), logits),
        (logits[0] / temperature).softmax(-1),
    )


def test_top_k_keeps_the_best_k() -> None:
    logits = logits_of(1)
    probs = logits[0].softmax(-1)
    probs[probs.argsort(descending=True)[5:]] = 0
    assert_distribution(histogram(SamplingParams(top_k=5), logits), probs / probs.sum())


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    logits = logits_of(2)
    probs = logits[0].softmax(-1)
    order = probs.argsort(descending=True)
    size = int((probs[order].cumsum(-1) < 0.7).sum()) + 1
    assert 1 < size < VOCAB_SIZE
    probs[order[size:]] = 0
    assert_distribution(histogram(SamplingParams(top_p=0.7), logits), probs / probs.sum())


def test_min_p_drops_what_is_much_less_likely_than_the_best() -> None:
    logits = logits_of(3)
    probs = logits[0].softmax(-1)
    probs[probs < 0.2 * probs.max()] = 0
    assert_distribution(histogram(SamplingParams(min_p=0.2), logits), probs / probs.sum())


def test_positions_and_sample_indices_draw_independently() -> None:
    """Noise of neighbouring keys is uncorrelated, and each is standard Gumbel."""
    keys = [noise_key(5, position, index) for position in range(200) for index in range(5)]
    noise = gumbel_noise(keys, 100, torch.device("cpu"))
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.03)
    correlation = torch.corrcoef(noise[:50])
    assert float((correlation - torch.eye(50)).abs().max()) < 0.5
    assert len({tuple(r) for r in noise.tolist()}) == len(keys)


def test_noise_bits_are_pinned() -> None:
    """Changing them would make a request moved between an old and a new pod change its mind."""
    noise = gumbel_noise([noise_key(1, 2, 3)], 3, torch.device("cpu"))[0]
    assert noise_key(1, 2, 3) == PINNED_KEY
    torch.testing.assert_close(noise, torch.tensor(PINNED_NOISE, dtype=torch.float64))


def test_noise_is_splitmix64() -> None:
    """The tensor form agrees with the published generator on Python integers."""
    key, mask = noise_key(9, 0, 0), 2**64 - 1
    noise = gumbel_noise([key], 5, torch.device("cpu"))[0].tolist()
    for token in range(5):
        z = (key + (token + 1) * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        u = (((z ^ (z >> 31)) >> 12) + 0.5) * 2.0**-52
        assert noise[token] == pytest.approx(-math.log(-math.log(u)), rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(-(2**63), 2**64 - 1),
    others=st.lists(st.integers(0, 2**32), max_size=6),
    place=st.integers(0, 6),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
)
def test_a_row_is_sampled_alike_in_any_batch(
    seed: int, others: list[int], place: int, temperature: float, top_k: int, top_p: float
) -> None:
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, logprobs=2
    )
    mine, logits = row(params, generated=[4, 5]), logits_of(4)
    alone = sample(logits, [mine], EOS)
    place = min(place, len(others))
    inputs = [
        row(SamplingParams(seed=other, temperature=1.5, top_k=4, presence_penalty=1.0))
        for other in others
    ]
    inputs.insert(place, mine)
    batch = logits_of(5, rows=len(inputs))
    batch[place] = logits[0]
    together = sample(batch, inputs, EOS)
    assert together.token_ids[place] == alone.token_ids[0]
    assert together.logprobs[place] == alone.logprobs[0]


def test_same_seed_same_token_other_seed_position_or_index_other_tokens() -> None:
    logits = torch.zeros(1, 4096)

    def draw(seed: int = 7, position: int = 3, sample_index: int = 0) -> int:
        item = SamplingInput(
            SamplingParams(seed=seed), NO_TOKENS, np.zeros(position, dtype=np.int64), sample_index
        )
        return sample(logits, [item], EOS).token_ids[0]

    assert draw() == draw()
    assert len({draw(), draw(seed=8), draw(position=4), draw(sample_index=1)}) == 4


def test_greedy_takes_the_best_whatever_the_seed() -> None:
    assert [one([1.0, 3.0, 2.9], SamplingParams(temperature=0.0, seed=s)) for s in range(5)] == [
        1
    ] * 5


def test_end_tokens_wait_for_min_tokens() -> None:
    logits = [0.0, 5.0, 9.0, 7.0, 1.0]  # EOS is 2
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=[3])
    assert one(logits, params) == 1
    assert one(logits, params, generated=[1]) == 1
    assert one(logits, params, generated=[1, 1]) == 2


def test_ignore_eos_still_lets_eos_be_sampled() -> None:
    assert one([0.0, 1.0, 9.0], SamplingParams(temperature=0.0, ignore_eos=True)) == 2


def test_logit_bias_moves_the_choice_and_ignores_ids_outside_the_vocabulary() -> None:
    params = SamplingParams(temperature=0.0, logit_bias={0: 100.0, 1_000_000: 50.0})
    assert one([0.0, 5.0, 1.0], params) == 0
    assert one([0.0, 5.0, 1.0], SamplingParams(temperature=0.0, logit_bias={1: -100.0})) == 2


def test_presence_and_frequency_penalties_count_generated_tokens_only() -> None:
    logits = [2.0, 1.5, 0.0]
    presence = SamplingParams(temperature=0.0, presence_penalty=1.0)
    assert one(logits, presence, prompt=[0, 0]) == 0
    assert one(logits, presence, generated=[0]) == 1
    frequency = SamplingParams(temperature=0.0, frequency_penalty=0.3)
    assert one(logits, frequency, generated=[0]) == 0
    assert one(logits, frequency, generated=[0, 0]) == 1


def test_repetition_penalty_counts_the_prompt_too_and_works_on_both_signs() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    assert one([2.0, 1.5, 0.0], params, prompt=[0]) == 1
    assert one([-1.0, -1.5, -9.0], params, generated=[0]) == 1


def test_logprobs_are_raw_ranked_and_complete() -> None:
    logits = torch.tensor([[1.0, 4.0, 2.0, 3.0]])
    params = SamplingParams(temperature=0.0, logit_bias={1: -100.0}, logprobs=2)
    reported = sample(logits, [row(params)], EOS).logprobs[0]
    expected = logits[0].log_softmax(-1)
    assert reported is not None
    assert (reported.token_id, reported.rank) == (3, 2)
    assert reported.logprob == pytest.approx(float(expected[3]))
    assert [token for token, _ in reported.top] == [1, 3]
    assert reported.top[0][1] == pytest.approx(float(expected[1]))
    only_sampled = sample(logits, [row(SamplingParams(temperature=0.0, logprobs=0))], EOS).logprobs[
        0
    ]
    assert only_sampled is not None
    assert only_sampled.top == []
    assert sample(logits, [row(SamplingParams(temperature=0.0))], EOS).logprobs == [None]


def test_logits_are_not_changed() -> None:
    logits = logits_of(6)
    before = logits.clone()
    sample(
        logits,
        [
            row(
                SamplingParams(top_k=2, logit_bias={1: 5.0}, min_tokens=3, presence_penalty=1.0),
                [1],
            )
        ],
        EOS,
    )
    assert torch.equal(logits, before)


def test_a_vanishing_temperature_is_greedy() -> None:
    logits = [1.0, 3.0, 2.0, -1.0]
    for temperature in (5e-324, 1e-300, 1e-9):
        assert one(logits, SamplingParams(temperature=temperature, top_p=0.9)) == 1
