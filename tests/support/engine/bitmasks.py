"""The bitmasks of grammars."""

from __future__ import annotations

import numpy as np
import torch


def bitmask(vocab_size: int, *rows: set[int] | None) -> torch.Tensor:
    """Return a mask of the allowed tokens of each row; None allows all, as without a grammar."""
    mask = np.full((len(rows), -(-vocab_size // 32)), -1, dtype=np.int32)
    for index, allowed in enumerate(rows):
        if allowed is not None:
            mask[index] = 0
            for token in allowed:
                mask.view(np.uint32)[index, token // 32] |= np.uint32(1 << token % 32)
    return torch.from_numpy(mask)
