"""Corrupt received blocks before an engine verifies them, as a faulty network would.

For the chaos tests of the KV wire.

Blocks are corrupted while the file `$BATON_TEST_DAMAGE/$POD_IP` exists. If it contains "once", only
the blocks of the next verification are corrupted.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from baton_kv_transfer.memory.layout import HeadRange
from baton_kv_transfer.memory.slot_memory import HostMemory

ORDER = Path(os.environ["BATON_TEST_DAMAGE"]) / os.environ.get("POD_IP", "none")
plain = HostMemory.block_sums


def damaged(self: HostMemory, slots: Sequence[int], heads: HeadRange) -> NDArray[np.uint64]:
    if ORDER.exists():
        if ORDER.read_text() == "once":
            ORDER.unlink()
        nbytes = self.layout.block_nbytes
        for slot in slots:
            byte = ctypes.c_uint8.from_address(self.base_address + int(slot) * nbytes + nbytes // 3)
            byte.value ^= 0x40
    return plain(self, slots, heads)


HostMemory.block_sums = damaged  # type: ignore[method-assign]
