"""Sampling parameters of one row of logits, and the most likely tokens of rows."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

#: Lower temperatures are raised to this value, to avoid overflow. With this value, the most likely
#: token wins unless other logits are almost equal.
MIN_TEMPERATURE = 1e-5


class DrawParams(Protocol):
    """Sampling parameters of one row of logits."""

    @property
    def temperature(self) -> float:
        """Positive divisor of the logits."""

    @property
    def top_k(self) -> int:
        """Number of most likely tokens to keep. Values <= 0 or >= vocab_size keep all tokens."""

    @property
    def top_p(self) -> float:
        """Probability that the kept set of most likely tokens must reach. 1 keeps all tokens."""

    @property
    def min_p(self) -> float:
        """Minimum ratio of a token's probability to the highest probability. 0 keeps all tokens."""


class BestTokens(NamedTuple):
    """The most likely token of each row, on the device of the logits."""

    #: int64 of shape [rows].
    token_ids: Tensor
    #: Whether all logits of the row are -inf or NaN, bool of shape [rows]. None: every row has a
    #: finite maximum and no NaN. On a GPU it is never None, because the host would have to wait for
    #: the device.
    is_impossible: Tensor | None
