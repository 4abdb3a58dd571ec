"""The KV memory of one rank: cache blocks, host blocks, and copies between blocks.

Host blocks hold the KV of swapped requests and evicted prefixes.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from baton_engine.executor.step import BlockCopy, SchedulerOutput
from baton_engine.worker.devices import DTYPES
from baton_kernels.block_copy import copy_blocks, swap_blocks
from baton_kv_transfer.memory.layout import KVCacheLayout


class KVMemory:
    """The KV blocks of one rank, on the device and on the host."""

    def __init__(
        self,
        layout: KVCacheLayout,
        num_swap_blocks: int,
        device: torch.device,
        num_offload_blocks: int = 0,
    ) -> None:
        """Allocate the cache, zeroed, and the host blocks.

        With a GPU, host blocks are pinned now, because pinning them later would delay a step. On a
        CPU, their pages become resident at their first use.

        Args:
            layout: layout of the cache,
                [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim].
            num_swap_blocks: number of host blocks for swapped requests.
            device: device of the cache.
            num_offload_blocks: number of host blocks of the offload tier.
        """
        self.layout = layout
        self.num_swap_blocks = num_swap_blocks
        self.num_offload_blocks = num_offload_blocks
        self.cache = _empty_pages(self._shape(layout.num_blocks), DTYPES[layout.dtype], device)
        self._storage_nbytes = int(self.cache.untyped_storage().nbytes())
        self._initialize()

    @property
    def is_dropped(self) -> bool:
        return self.cache.untyped_storage().nbytes() == 0

    def store_evicted(self, step: SchedulerOutput) -> None:
        """Copy to host memory (the offload tier) the KV blocks that the step evicts.

        Call this before any other write of the step to the cache.
        """
        if not step.store:
            return
        swap_blocks(self.cache, self._offloaded, _pairs(step.store))
        # A peer may write to these blocks, and does not wait for CUDA streams.
        if step.connector.loads and self.cache.is_cuda:
            torch.cuda.current_stream(self.cache.device).synchronize()

    def move_blocks(self, step: SchedulerOutput) -> None:
        """Run all block copies of the step except those of `store_evicted`.

        The order is: swap out, swap in, restore from the offload tier, copy within the cache.
        """
        if step.swap_out:
            swap_blocks(self.cache, self._swapped, _pairs(step.swap_out))
        if step.swap_in:
            swap_blocks(self._swapped, self.cache, _pairs(step.swap_in))
        if step.restore:
            swap_blocks(self._offloaded, self.cache, _pairs(step.restore))
        if step.block_copies:
            copy_blocks(self.cache, _pairs(step.block_copies))

    def drop(self) -> None:
        """Release the memory of the cache and the host blocks. The KV is lost.

        `cache` remains the same tensor object, without storage.
        """
        if self.cache.is_cuda:
            torch.cuda.synchronize(self.cache.device)  # copies may be running
        self.cache.untyped_storage().resize_(0)
        self._swapped = self._offloaded = torch.empty(0)

    def restore(self) -> None:
        """Allocate the dropped cache, zeroed, and the host blocks again. Do nothing if not dropped.

        The address may differ, and a small cache may not begin at a page boundary.
        """
        if self.is_dropped:
            self.cache.untyped_storage().resize_(self._storage_nbytes)
            self._initialize()

    def _initialize(self) -> None:
        """Zero the cache, and allocate the host blocks."""
        _ask_for_huge_pages(self.cache)
        self.cache.zero_()
        self._swapped, self._offloaded = (
            torch.empty(self._shape(count), dtype=self.cache.dtype, pin_memory=self.cache.is_cuda)
            for count in (self.num_swap_blocks, self.num_offload_blocks)
        )

    def _shape(self, num_blocks: int) -> tuple[int, ...]:
        layout = self.layout
        return (
            num_blocks,
            layout.num_kv_heads,
            layout.num_layers,
            2,
            layout.block_size,
            layout.head_dim,
        )


def _empty_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialized tensor. On a CPU, the tensor begins at a page boundary.

    Without this alignment, each block would touch one more page. Few processors prefetch across
    pages.
    """
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    num_elements = math.prod(shape)
    elements = torch.empty(
        num_elements + mmap.PAGESIZE // dtype.itemsize, dtype=dtype, device=device
    )
    skipped = -elements.data_ptr() % mmap.PAGESIZE // dtype.itemsize
    return elements[skipped : skipped + num_elements].view(shape)


def _ask_for_huge_pages(cache: Tensor) -> None:
    """Advise Linux to use huge pages for a cache on a CPU. Call this before the first write.

    Attention reads blocks at scattered addresses. With pages of 4 KiB, each block needs another
    address translation. If Linux cannot use huge pages, nothing changes.
    """
    if cache.device.type != "cpu" or sys.platform != "linux":
        return
    start, end = cache.data_ptr(), cache.data_ptr() + cache.nbytes
    first_page = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
    if first_page < end:
        libc = ctypes.CDLL(None)
        libc.madvise(
            ctypes.c_void_p(first_page), ctypes.c_size_t(end - first_page), mmap.MADV_HUGEPAGE
        )


def _pairs(copies: Sequence[BlockCopy]) -> Tensor:
    """Return a tensor of the source and target of each copy: int64 [n, 2]."""
    return torch.from_numpy(np.array(copies, dtype=np.int64))
