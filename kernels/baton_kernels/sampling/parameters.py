"""The sampling parameters of a row."""

from __future__ import annotations

from typing import Protocol

#: Lower temperatures count as this one, to avoid overflow. The most likely token wins in any case.
MIN_TEMPERATURE = 1e-5


class DrawParams(Protocol):
    """The parameters of one row."""

    @property
    def temperature(self) -> float:
        """Positive divisor of the logits."""

    @property
    def top_k(self) -> int:
        """Number of best tokens to keep. Keeps all if <= 0 or >= the vocabulary's size."""

    @property
    def top_p(self) -> float:
        """Probability mass to keep: the smallest set of best tokens that reaches it. 1: all."""

    @property
    def min_p(self) -> float:
        """Lower bound of a kept token's probability, relative to the best token's. 0: all."""
