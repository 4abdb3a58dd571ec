"""The roster: the numbers in nonces, and the instances that are living."""

from __future__ import annotations

import pytest

from baton_engine.elastic.coordinator.roster import nonce_of, number_of


@pytest.mark.parametrize("number", [0, 7, 10**15 - 1])
def test_a_nonce_contains_its_number(number: int) -> None:
    assert number_of(nonce_of(number, "4f.a")) == number


@pytest.mark.parametrize("nonce", ["", "7", ".a", "-1.a", "1e3.a", "\u0667.a", "9" * 16 + ".a"])
def test_a_nonce_of_an_untrusted_rank_without_a_number_counts_as_0(nonce: str) -> None:
    assert number_of(nonce) == 0
