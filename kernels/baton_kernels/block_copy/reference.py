"""Block copies one after the other, for tests."""

from __future__ import annotations

from torch import Tensor


def copy_blocks_reference(kv_cache: Tensor, pairs: Tensor) -> None:
    """Implement `baton_kernels.block_copy.copy_blocks` in torch."""
    swap_blocks_reference(kv_cache, kv_cache, pairs)


def swap_blocks_reference(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """Implement `baton_kernels.block_copy.swap_blocks` in torch."""
    for source_block, target_block in pairs.tolist():
        target[target_block] = source[source_block].to(target.device)
