"""An all_to_all of rows as one of bytes, which every backend can move whatever the dtype is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class RowBytes(NamedTuple):
    received: Tensor
    """[sum(recv_counts), ...], to be filled through `target`."""
    source: Tensor
    """[sum(send_nbytes)] uint8."""
    target: Tensor
    """[sum(recv_nbytes)] uint8: the memory of `received`."""
    send_nbytes: list[int]
    """By rank."""
    recv_nbytes: list[int]


def row_bytes(
    rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], size: int
) -> RowBytes:
    """Arguments as in `Group.all_to_all`; `size` is the group's.

    Raises:
        ValueError: the counts do not fit the group or the rows.
    """
    if not len(send_counts) == len(recv_counts) == size or sum(send_counts) != len(rows):
        raise ValueError(
            f"all_to_all of {len(rows)} rows among {size} ranks: send_counts {list(send_counts)} and recv_counts "
            f"{list(recv_counts)} need an entry per rank, and send_counts must add up to the rows"
        )
    dense = rows.contiguous()
    received = dense.new_empty((sum(recv_counts), *dense.shape[1:]))
    row_nbytes = dense.element_size() * dense.shape[1:].numel()
    return RowBytes(
        received,
        dense.view(-1).view(torch.uint8),
        received.view(-1).view(torch.uint8),
        [count * row_nbytes for count in send_counts],
        [count * row_nbytes for count in recv_counts],
    )
