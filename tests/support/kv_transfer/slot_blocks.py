"""Blocks of a small KV cache, and a device that only copies.

For the tests of the slot memory and of the staged memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from baton_kv_transfer.memory import checksum
from baton_kv_transfer.memory.layout import HeadRange, KVCacheLayout
from baton_kv_transfer.memory.staged_memory import StagedMemory

#: The second of three workers.
LAYOUT = KVCacheLayout(
    num_blocks=6,
    num_kv_heads=3,
    num_layers=2,
    block_size=4,
    head_dim=6,
    dtype="bfloat16",
    first_kv_head=3,
    total_kv_heads=9,
)

ALL_HEADS = LAYOUT.heads


def random_blocks() -> np.ndarray:
    """Return random blocks: uint8 [num_blocks, heads, head_nbytes]."""
    shape = (LAYOUT.num_blocks, LAYOUT.num_kv_heads, LAYOUT.head_nbytes)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def expected_sums(rows: np.ndarray) -> list[int]:
    """Return the sums of contiguous copies of rows [n, ...]."""
    rows = np.ascontiguousarray(rows)
    addresses = rows.ctypes.data + np.arange(len(rows)) * rows[0].nbytes
    return checksum.sum_runs(addresses, rows[0].nbytes).tolist()


class Device:
    """Simulated device blocks, and slots in host memory."""

    def __init__(self, num_slots: int) -> None:
        self.blocks = random_blocks()
        self.slots = np.zeros((num_slots, LAYOUT.num_kv_heads, LAYOUT.head_nbytes), dtype=np.uint8)
        self.memory = StagedMemory(
            self.slots.ctypes.data, num_slots, LAYOUT, copy_out=self.copy_out, copy_in=self.copy_in
        )

    def copy_out(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        self.slots[list(slots)] = self.blocks[list(block_ids)]

    def copy_in(self, slots: Sequence[int], block_ids: Sequence[int], heads: HeadRange) -> None:
        mine = slice(heads.first - LAYOUT.first_kv_head, heads.end - LAYOUT.first_kv_head)
        self.blocks[list(block_ids), mine] = self.slots[list(slots), mine]
