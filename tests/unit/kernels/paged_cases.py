"""Builds paged KV caches for tests: the engine's cross-layer layout, shuffled blocks, and NaN wherever nothing was written."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class PagedCase:
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_tables: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    scale: float
    window: int | None = None

    def to(self, device: str) -> PagedCase:
        # The whole allocation moves, so that views keep their strides.
        kv_cache = self.key_cache._base
        assert kv_cache is not None
        moved = kv_cache.to(device)
        key_cache, value_cache = layer_views(moved, layer=1)
        tensors = [t.to(device) for t in (self.block_tables, self.cu_seqlens_q, self.seq_lens)]
        return PagedCase(self.query.to(device), key_cache, value_cache, *tensors, self.scale, self.window)

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float, int | None]:
        return (
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_tables,
            self.cu_seqlens_q,
            self.seq_lens,
            self.scale,
            self.window,
        )


def layer_views(kv_cache: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """[num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim] -> the layer's keys and values, strided."""
    return kv_cache[:, :, layer, 0], kv_cache[:, :, layer, 1]


def paged_case(
    lengths: list[tuple[int, int]],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    share_first_block: bool = False,
    window: int | None = None,
) -> PagedCase:
    """A case of sequences given as (query length, total length). Unwritten slots and table padding hold NaN or nonsense."""
    blocks_of = [-(-total // block_size) for _, total in lengths]
    num_blocks = sum(blocks_of) + 3
    kv_cache = torch.full((num_blocks, num_kv_heads, 3, 2, block_size, head_dim), float("nan"), dtype=dtype)
    free = torch.randperm(num_blocks).tolist()
    block_tables = torch.full((len(lengths), max(blocks_of) + 1), 2**30, dtype=torch.int32)
    for seq, (_, total) in enumerate(lengths):
        for index in range(blocks_of[seq]):
            shared = share_first_block and index == 0 and seq > 0
            block = int(block_tables[0, 0]) if shared else free.pop()
            block_tables[seq, index] = block
            filled = min(block_size, total - index * block_size)
            if not shared:
                kv_cache[block, :, 1, :, :filled] = torch.randn(num_kv_heads, 2, filled, head_dim).to(dtype)
    query_lengths = torch.tensor([0] + [q for q, _ in lengths])
    key_cache, value_cache = layer_views(kv_cache, layer=1)
    return PagedCase(
        query=torch.randn(int(query_lengths.sum()), num_heads, head_dim).to(dtype),
        key_cache=key_cache,
        value_cache=value_cache,
        block_tables=block_tables,
        cu_seqlens_q=query_lengths.cumsum(0).int(),
        seq_lens=torch.tensor([total for _, total in lengths], dtype=torch.int32),
        scale=head_dim**-0.5,
        window=window,
    )
