"""Block copies in Triton: one program per (pair, tile of a block)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _copy_blocks_kernel(  # type: ignore[no-untyped-def]  # Triton types its parameters itself
    cache_ptr,  # [num_blocks, elements_per_block]
    pairs_ptr,  # [num_pairs, 2]
    elements_per_block,
    TILE: tl.constexpr,
):
    pair = tl.program_id(0)
    source = tl.load(pairs_ptr + 2 * pair).to(tl.int64)
    target = tl.load(pairs_ptr + 2 * pair + 1).to(tl.int64)
    element = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = element < elements_per_block
    content = tl.load(cache_ptr + source * elements_per_block + element, mask=mask)
    tl.store(cache_ptr + target * elements_per_block + element, content, mask=mask)


def copy_blocks_triton(kv_cache: Tensor, pairs: Tensor) -> None:
    """Arguments as `baton_kernels.block_copy.copy_blocks`; no block is a target and in another pair, too."""
    if len(pairs) == 0:
        return
    elements_per_block = kv_cache[0].numel()
    tile = 4096
    _copy_blocks_kernel[(len(pairs), triton.cdiv(elements_per_block, tile))](
        kv_cache, pairs.contiguous().to(kv_cache.device, non_blocking=True), elements_per_block, TILE=tile, num_warps=8
    )
