"""Gumbel noise: its distribution, and bits that never change."""

from __future__ import annotations

import math

import pytest
import torch

from baton_kernels.sampling.noise import gumbel_noise, noise_key

# noise_key(1, 2, 3) and its first noise values.
PINNED_KEY = 7702586659592502839
PINNED_NOISE = [-0.7127349559443145, 0.1898373233540049, 3.076466515988269]


def test_noise_of_different_positions_and_sample_indices_is_independent() -> None:
    """The noise of each key is standard Gumbel, without correlation between keys."""
    keys = [noise_key(5, position, index) for position in range(200) for index in range(5)]
    noise = gumbel_noise(keys, 100, torch.device("cpu"))
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.03)
    correlation = torch.corrcoef(noise[:50])
    assert float((correlation - torch.eye(50)).abs().max()) < 0.5
    assert len({tuple(r) for r in noise.tolist()}) == len(keys)


def test_noise_has_the_pinned_bits() -> None:
    """Other bits would change the tokens of a request that moves from an old to a new pod."""
    noise = gumbel_noise([noise_key(1, 2, 3)], 3, torch.device("cpu"))[0]
    assert noise_key(1, 2, 3) == PINNED_KEY
    torch.testing.assert_close(noise, torch.tensor(PINNED_NOISE, dtype=torch.float64))


def test_noise_is_that_of_splitmix64() -> None:
    """The expected values follow the published generator on Python integers."""
    key, mask = noise_key(9, 0, 0), 2**64 - 1
    noise = gumbel_noise([key], 5, torch.device("cpu"))[0].tolist()
    for token in range(5):
        z = (key + (token + 1) * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        u = (((z ^ (z >> 31)) >> 12) + 0.5) * 2.0**-52
        assert noise[token] == pytest.approx(-math.log(-math.log(u)), rel=1e-12)
