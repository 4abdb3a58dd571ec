"""Converts an all_to_all of rows of any dtype to an all_to_all of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class RowBytes(NamedTuple):
    """The tensors of an all_to_all, and the number of bytes to and from each rank."""

    received: Tensor  # [sum(recv_counts), ...]
    source: Tensor  # [sum(send_nbytes)] uint8
    target: Tensor  # [sum(recv_nbytes)] uint8: the memory of `received`
    send_nbytes: list[int]  # by rank
    recv_nbytes: list[int]  # by rank


def row_bytes(
    rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int], size: int
) -> RowBytes:
    """Return the tensors and byte counts with which an all_to_all sends and receives rows.

    `size` is the number of ranks of the group. `Group.all_to_all` describes the other arguments.

    Raises:
        ValueError: the counts do not match the group or the rows.
    """
    if not len(send_counts) == len(recv_counts) == size or sum(send_counts) != len(rows):
        raise ValueError(
            f"all_to_all of {len(rows)} rows among {size} ranks: send_counts {list(send_counts)} "
            f"and recv_counts {list(recv_counts)} need an entry for each rank, and the sum of "
            "send_counts must be the number of rows"
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
