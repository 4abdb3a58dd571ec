"""Ranges of KV heads, the layout of a worker's KV memory, and the address of a worker."""

from __future__ import annotations

import msgspec


class HeadRange(msgspec.Struct, frozen=True, array_like=True):
    """KV heads [first, first + count) of the model."""

    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count

    def overlap(self, other: HeadRange) -> HeadRange:
        """Return the heads that are in both ranges; a range with count 0 if there are none."""
        first = max(self.first, other.first)
        return HeadRange(first, max(0, min(self.end, other.end) - first))


class RankAddress(msgspec.Struct, frozen=True, array_like=True):
    """Address of the side channel of one worker, and the KV heads of that worker."""

    host: str
    port: int
    heads: HeadRange


class KVCacheLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of one worker's KV memory.

    The memory is contiguous: [num_blocks, num_kv_heads, num_layers, 2, block_size, head_dim]. A
    range of heads of a block is one contiguous run, so engines with different tensor-parallel sizes
    can exchange ranges of heads.
    """

    num_blocks: int
    #: Number of KV heads of this worker.
    num_kv_heads: int
    num_layers: int
    block_size: int
    head_dim: int
    #: torch's name of the dtype, without `torch.`: float32, bfloat16 or float16.
    dtype: str
    #: Order of the dimensions: N blocks, H heads, L layers, 2 (key, value), B tokens, D head_dim.
    name: str = "NHL2BD"
    #: Index of this worker's first head in the model.
    first_kv_head: int = 0
    #: Number of KV heads of the whole model; 0: this worker has all heads of the model.
    total_kv_heads: int = 0

    @property
    def head_nbytes(self) -> int:
        """Size of one head in one block, in bytes: keys and values of all layers."""
        itemsize = {"float32": 4, "bfloat16": 2, "float16": 2}[self.dtype]
        return self.num_layers * 2 * self.block_size * self.head_dim * itemsize

    @property
    def block_nbytes(self) -> int:
        return self.num_kv_heads * self.head_nbytes

    @property
    def heads(self) -> HeadRange:
        return HeadRange(self.first_kv_head, self.num_kv_heads)

    @property
    def num_model_heads(self) -> int:
        return self.total_kv_heads or self.num_kv_heads


def explain_layout_mismatch(ours: KVCacheLayout, theirs: KVCacheLayout) -> str:
    """Return why workers with these layouts cannot exchange blocks; empty if they can.

    The number of blocks and the heads of the workers may differ.
    """
    for field in ("name", "dtype", "num_layers", "num_model_heads", "block_size", "head_dim"):
        mine, other = getattr(ours, field), getattr(theirs, field)
        if mine != other:
            return f"KV layouts differ in {field}: {mine} here, {other} at the peer"
    return ""
