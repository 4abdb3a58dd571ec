"""What a row's draw depends on besides its logits and its noise."""

from __future__ import annotations

from typing import Protocol

#: Lower ones count as this: the most likely token wins anyway, and nothing overflows.
MIN_TEMPERATURE = 1e-5


class DrawParams(Protocol):
    """Of one row; anything with these fields."""

    @property
    def temperature(self) -> float:
        """Over 0."""

    @property
    def top_k(self) -> int:
        """Only so many best tokens stay; 0 or less, or the vocabulary's size and more: all."""

    @property
    def top_p(self) -> float:
        """The smallest set of best tokens stays whose probabilities reach it; 1: all."""

    @property
    def min_p(self) -> float:
        """Tokens stay that have at least this much of the best one's probability; 0: all."""
