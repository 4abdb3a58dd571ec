"""The memory through which peers read and write the KV cache of a rank.

For a cache in host memory, this memory is the cache itself. For a cache on a GPU, it consists of
slots in pinned host memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from baton_kernels.block_checksum import sum_runs
from baton_kernels.block_copy import swap_blocks
from baton_kv_transfer.memory.layout import HeadRange, KVCacheLayout
from baton_kv_transfer.memory.slot_memory import HostMemory, SlotMemory
from baton_kv_transfer.memory.staged_memory import StagedMemory


class PeerMemory:
    """The memory through which peers access one KV cache.

    The worker's thread creates this object. The connector's thread uses the attribute `memory`.
    """

    def __init__(
        self,
        cache: Tensor,
        layout: KVCacheLayout,
        staging_bytes: int,
        *,
        staged: bool | None = None,
    ) -> None:
        """Allocate staging slots in host memory, if blocks are copied through such slots.

        Args:
            cache: [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim], contiguous.
            layout: layout of the cache.
            staging_bytes: limit on the size of all slots together.
            staged: whether blocks are copied through slots. None: only for a cache on a GPU.

        Raises:
            ValueError: peers cannot exchange blocks of this layout, or staging_bytes is less than
                one block.
        """
        self._cache = cache
        self._first_head = layout.first_kv_head
        self._stream = torch.cuda.Stream(cache.device) if cache.is_cuda else None
        self._computed: torch.cuda.Event | None = None
        self.memory: SlotMemory
        if not (cache.is_cuda if staged is None else staged):
            self.memory = HostMemory(cache.data_ptr(), layout, sum_runs)
            return
        num_slots = min(staging_bytes // layout.block_nbytes, layout.num_blocks)
        self._slots = torch.empty(
            (num_slots, *cache.shape[1:]), dtype=cache.dtype, pin_memory=cache.is_cuda
        )
        self.memory = StagedMemory(
            self._slots.data_ptr(),
            num_slots,
            layout,
            copy_out=self._copy_out,
            copy_in=self._copy_in,
            sum_runs=sum_runs,
        )

    def mark(self) -> None:
        """Make the connector's later copies wait for the GPU work that this thread has queued.

        The call itself does not wait.
        """
        if self._stream is not None:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._cache.device))
            self._computed = event

    # Called by the connector's thread

    def _copy_out(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        with self._in_order():
            swap_blocks(self._cache, self._slots, _pairs(block_ids, slots))

    def _copy_in(self, slots: Sequence[int], block_ids: Sequence[int], heads: HeadRange) -> None:
        cache_heads = self._cache.shape[1]
        with self._in_order():
            if heads.count == cache_heads:
                swap_blocks(self._slots, self._cache, _pairs(slots, block_ids))
                return
            first = heads.first - self._first_head
            rows = [
                (slot * cache_heads + head, block_id * cache_heads + head)
                for slot, block_id in zip(slots, block_ids, strict=True)
                for head in range(first, first + heads.count)
            ]
            sources, targets = zip(*rows, strict=True)
            swap_blocks(
                self._slots.flatten(0, 1), self._cache.flatten(0, 1), _pairs(sources, targets)
            )

    @contextmanager
    def _in_order(self) -> Iterator[None]:
        """Run the copies in the `with` block after the GPU work queued before the last `mark` call.

        At the end of the `with` block, wait for the copies. Other streams of the device continue.
        """
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._cache.device), torch.cuda.stream(self._stream):
            if self._computed is not None:
                self._stream.wait_event(self._computed)
            yield
            self._stream.synchronize()


def _pairs(sources: Sequence[int], targets: Sequence[int]) -> Tensor:
    """Return a tensor of (source, target) pairs: int64 [n, 2]."""
    return torch.from_numpy(np.array([sources, targets], dtype=np.int64).T.copy())
