"""Groups whose ranks are threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar
from unittest import mock

import torch
from torch import Tensor

from baton_engine.distributed import process_group
from baton_engine.distributed.group import Group
from baton_engine.distributed.process_group import TorchGroup, create_group
from baton_engine.distributed.shared_memory_group import SharedMemoryGroup
from baton_engine.distributed.store.socket_store import connect_store
from baton_engine.distributed.store.store_server import open_store

WAIT_S = 60.0
CPU = torch.device("cpu")
KINDS = {"gloo": TorchGroup, "shared memory": SharedMemoryGroup}
T = TypeVar("T")


class Ranks:
    """Ranks of groups as threads of this process."""

    def __init__(self, kind: str, size: int) -> None:
        self.size = size
        self.pool = ThreadPoolExecutor(size)
        self.store = open_store("127.0.0.1")
        self.address = self.store.address
        self.kind = kind

    def each(self, run: Callable[[int], T]) -> list[T]:
        """Run `run(rank)` on all ranks at the same time; return the results by rank."""
        return list(self.pool.map(run, range(self.size), timeout=WAIT_S))

    def join(
        self, name: str = "test", *, nonce: str = "", timeout_s: float = WAIT_S
    ) -> list[Group]:
        def join(rank: int) -> Group:
            return create_group(
                name,
                rank,
                self.size,
                connect_store(self.address, WAIT_S),
                1,
                CPU,
                timeout_s,
                nonce=nonce,
            )

        if self.kind == "shared memory":
            groups = self.each(join)
        else:
            with mock.patch.object(process_group, "over_shared_memory", lambda group, *_: group):
                groups = self.each(join)
        assert {type(group) for group in groups} == {KINDS[self.kind]}
        return groups

    def close(self) -> None:
        self.pool.shutdown()
        self.store.close()


def check_all_to_all(
    ranks: Ranks, groups: list[Group], rows: list[Tensor], counts: list[list[int]]
) -> None:
    """Compare the result of all_to_all on every rank with the expected rows.

    Args:
        counts: counts[source][target].
    """

    def run(rank: int) -> Tensor:
        return groups[rank].all_to_all(rows[rank], counts[rank], [row[rank] for row in counts])

    for rank, received in enumerate(ranks.each(run)):
        runs = [source.split(count)[rank] for source, count in zip(rows, counts, strict=True)]
        assert (received.shape, received.dtype) == (
            (sum(map(len, runs)), *rows[0].shape[1:]),
            rows[0].dtype,
        )
        expected = torch.cat([as_bytes(run) for run in runs])
        assert torch.equal(as_bytes(received), expected)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def random_rows(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Return random bits, which include NaNs."""
    generator = torch.Generator().manual_seed(seed)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return (
        torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
        .view(dtype)
        .view(shape)
    )
