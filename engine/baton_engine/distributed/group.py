"""A process group as the layers see it: rank, size and operations on tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


class Group(Protocol):
    """Ranks that exchange tensors. Operations are collective: every member calls them in the same order.

    Every operation raises GroupBrokenError when a member is gone or `abort` was called, and TimeoutError when a member does not
    answer within the group's timeout.
    """

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The members' sum, in place."""

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """The members' tensors, of equal shapes, joined along `dim` in rank order."""

    def all_to_all(
        self, rows: Tensor, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Tensor:
        """Sends consecutive runs of rows, one to each member, and receives one from each.

        Args:
            rows: [sum(send_counts), ...].
            send_counts: rows for each member, in rank order.
            recv_counts: rows from each member; what that one's `send_counts` say.

        Returns:
            [sum(recv_counts), ...], in rank order.
        """

    def send(self, tensor: Tensor, target: int) -> None:
        """To the member of rank `target`, which receives it into a tensor of the same shape and dtype."""

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        """Fills `tensor` with what the member of rank `source` sends."""

    def abort(self) -> None:
        """Gives the group up: operations under way and to come raise GroupBrokenError at once. From any thread; idempotent.

        For members that do not answer and are not known to be gone, such as frozen ones.
        """

    def close(self) -> None:
        """Leaves the group. Idempotent."""


class LoneGroup:
    """A group of one: nothing to exchange."""

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
        raise RuntimeError("a group of one has nobody to send to")

    def recv(self, tensor: Tensor, source: int) -> Tensor:
        raise RuntimeError("a group of one has nobody to receive from")

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class ParallelContext:
    """Where a worker stands. Global rank = pipeline rank * tensor size + tensor rank."""

    tensor: Group = field(default_factory=LoneGroup)
    pipeline: Group = field(default_factory=LoneGroup)
    """The workers of the same tensor rank, one per stage."""

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline.rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline.rank == self.pipeline.size - 1
