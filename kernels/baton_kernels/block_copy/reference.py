"""Block copies one after the other, for tests."""

from __future__ import annotations

from torch import Tensor


def copy_blocks_reference(kv_cache: Tensor, pairs: Tensor) -> None:
    """Compute `baton_kernels.block_copy.copy_blocks`, with the same arguments."""
    swap_blocks_reference(kv_cache, kv_cache, pairs)


def swap_blocks_reference(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """Compute `baton_kernels.block_copy.swap_blocks`, with the same arguments."""
    for source_block, target_block in pairs.tolist():
        target[target_block] = source[source_block].to(target.device)
