"""When the host blocks of a KV cache are allocated and pinned, with stand-ins for a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from baton_engine.worker.memory import kv_memory
from baton_kv_transfer.memory.layout import KVCacheLayout
from support.engine.fake_gpu import GPUTensor

LAYOUT = KVCacheLayout(
    num_blocks=4,
    num_kv_heads=2,
    num_layers=1,
    block_size=8,
    head_dim=4,
    dtype="float32",
    first_kv_head=0,
    total_kv_heads=2,
)


def test_the_host_blocks_of_a_gpu_are_pinned_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step or a preemption would wait for seconds while large memory is pinned."""
    pinned: list[int] = []
    empty = torch.empty

    def allocate(shape: tuple[int, ...], pin_memory: bool, **options: Any) -> torch.Tensor:
        if pin_memory:
            pinned.append(shape[0])
        return empty(shape, **options)

    def on_gpu(shape: tuple[int, ...], dtype: torch.dtype, _: torch.device) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype).as_subclass(GPUTensor)

    monkeypatch.setattr(kv_memory, "_empty_pages", on_gpu)
    monkeypatch.setattr(torch, "empty", allocate)
    kv_memory.KVMemory(LAYOUT, 2, torch.device("cpu"), num_offload_blocks=3)
    assert pinned == [2, 3]
