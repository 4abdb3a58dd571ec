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

    Operations are collective: every member calls them in the same order. They raise
    GroupBrokenError if a member is gone or `abort` was called, and TimeoutError if a member does
    not respond within the group's timeout.
    """

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum the members' tensors in place."""

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Concatenate the members' tensors, of equal shapes, along `dim` in rank order."""

    def all_to_all(
        self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Tensor:
        """Send consecutive runs of rows, one to each member, and receive one from each.

        Args:
            rows: [sum(send_counts), ...].
            send_counts: rows for each member, in rank order.
            recv_counts: rows from each member, equal to that member's `send_counts` for this one.

        Returns:
            [sum(recv_counts), ...], in rank order.
        """

    def send(self, tensor: Tensor, target: int) -> None:
        """Send a tensor to rank `target`, which calls `recv` with the same shape and dtype."""

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        """Fill `tensor` with the data that rank `source` sends."""

    def abort(self) -> None:
        """Make current and later operations raise GroupBrokenError at once.

        Call it when a member may be frozen. Any thread may call it; it is idempotent.
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
    """The groups of a worker. Global rank = pipeline rank * tensor size + tensor rank."""

    tensor: Group = field(default_factory=LoneGroup)
    #: The workers of the same tensor rank, one per stage.
    pipeline: Group = field(default_factory=LoneGroup)

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline.rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline.rank == self.pipeline.size - 1
