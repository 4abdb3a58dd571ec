"""The interface of a process group: rank, size and operations on tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

#: Delay in seconds before a member closes its groups of a retired generation. A slower member may
#: still read what the last step sent.
RETIREMENT_GRACE_S = 5.0


class Group(Protocol):
    """Ranks that exchange tensors.

    All members call the collective operations in the same order. Operations raise GroupBrokenError
    if a member is gone or `abort` was called, and TimeoutError if a member does not respond
    within the group's timeout.
    """

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Replace `tensor` with the sum of all members' tensors, and return `tensor`."""

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Return all members' tensors, concatenated along `dim` in rank order.

        The tensors must have the same shape.
        """

    def all_to_all(
        self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Tensor:
        """Send some rows to each member, and return the rows that the members send to this rank.

        Args:
            rows: [sum(send_counts), ...], ordered by the rank that receives them.
            send_counts: number of rows for each member, in rank order.
            recv_counts: number of rows from each member, in rank order. Each number must equal that
                member's `send_counts` entry for this rank.

        Returns:
            [sum(recv_counts), ...], ordered by the rank that sent them.
        """

    def send(self, tensor: Tensor, target: int) -> None:
        """Send a tensor to rank `target`, which calls `recv` with the same shape and dtype."""

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        """Fill `tensor` with the data that rank `source` sends, and return `tensor`."""

    def abort(self) -> None:
        """Make current and later operations raise GroupBrokenError without waiting for members.

        Call this method when a member may be frozen. Thread-safe and idempotent.
        """

    def close(self) -> None:
        """Leave the group. Idempotent."""


class LoneGroup:
    """A group of one rank, without communication."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return tensor

    def all_to_all(
        self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Tensor:
        return rows

    def send(self, tensor: Tensor, target: int) -> None:
        raise RuntimeError("a group of one rank cannot send")

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        raise RuntimeError("a group of one rank cannot receive")

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class ParallelContext:
    """The tensor-parallel group and the pipeline group of a worker.

    The global rank is the pipeline rank times the tensor-parallel size, plus the tensor-parallel
    rank.
    """

    tensor: Group = field(default_factory=LoneGroup)
    #: The workers of the same tensor-parallel rank, one per pipeline stage.
    pipeline: Group = field(default_factory=LoneGroup)

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline.rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline.rank == self.pipeline.size - 1
