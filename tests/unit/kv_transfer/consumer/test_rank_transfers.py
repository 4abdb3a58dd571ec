"""The KV heads that the workers of an engine may have."""

from __future__ import annotations

import numpy as np
import pytest

from baton_kv_transfer.memory.layout import HeadRange, KVCacheLayout, RankAddress
from baton_kv_transfer.memory.slot_memory import HostMemory
from baton_kv_transfer.transfer_connector import TransferConnector
from baton_protocol.options.config import KVRole, KVTransferConfig
from support.kv_transfer.kv_processes import HOST


def test_workers_that_share_a_head_are_refused_with_both_numbers() -> None:
    config = KVTransferConfig(role=KVRole.PRODUCER, transport="inproc", port=0)
    connector = TransferConnector(config, instance_id="P", compatibility_hash="c", host=HOST)
    layout = KVCacheLayout(
        num_blocks=1,
        num_kv_heads=1,
        num_layers=1,
        block_size=4,
        head_dim=8,
        dtype="float32",
        total_kv_heads=2,
    )
    memory = np.zeros(layout.block_nbytes, dtype=np.uint8)
    ranks = [RankAddress(HOST, 1, HeadRange(rank // 2, 1)) for rank in range(4)]
    try:
        with pytest.raises(ValueError, match=r"4 workers.*have 4 KV heads, the model has 2"):
            connector.register_kv_cache(HostMemory(memory.ctypes.data, layout), ranks)
    finally:
        connector.shutdown()
