"""Block copies in Triton: all pairs in one launch, within one cache or between two.

Two pairs are in the same chain if one of them writes a block that the other reads or writes. One
program copies one tile of every pair of a chain, in order. Tiles are independent of each other, and
so are chains. Usually a chain is one pair.

The kernel accesses a cache in pinned host memory by address (unified virtual addressing).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.launch_configurations import Configuration, configuration

#: Configurations that the tuner measures. tile: number of words per tile. A word has 1, 2, 4 or 8
#: bytes.
CANDIDATES: list[Configuration] = [
    {"tile": tile, "num_warps": num_warps}
    for tile in (512, 1024, 2048, 4096)
    for num_warps in (4, 8)
]


@triton.jit(do_not_specialize_on_alignment=["pairs_ptr"])  # a view of `table`
def _copy_blocks_kernel(
    source_ptr,  # [num_blocks, words_per_block]
    target_ptr,  # [num_blocks, words_per_block]
    pairs_ptr,  # [num_pairs, 2], ordered by chain
    chains_ptr,  # [num_chains + 1]: index of each chain's first pair, then num_pairs
    words_per_block,
    TILE: tl.constexpr,
):
    word = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = word < words_per_block
    first = tl.load(chains_ptr + tl.program_id(0))
    end = tl.load(chains_ptr + tl.program_id(0) + 1)
    for pair in range(first, end):
        source = tl.load(pairs_ptr + 2 * pair)
        target = tl.load(pairs_ptr + 2 * pair + 1)
        content = tl.load(source_ptr + source * words_per_block + word, mask=mask)
        tl.debug_barrier()  # no thread writes before all threads have read
        tl.store(target_ptr + target * words_per_block + word, content, mask=mask)
        tl.debug_barrier()  # no thread reads the next pair before all have written


def copy_blocks_triton(
    source: Tensor,
    target: Tensor,
    chains: list[list[tuple[int, int]]],
) -> None:
    """Copy blocks in one launch, without waiting for the device.

    Args:
        source: tensor of shape [num_blocks, ...], contiguous, on the device or in pinned host
            memory.
        target: like source, or `source` itself; the number of blocks may differ.
        chains: lists of (source block, target block) pairs, each copied in order. A block that is a
            target in one chain occurs in no other chain.
    """
    if not chains:
        return
    source, target = _words(source, target)
    device = target.device if target.is_cuda else source.device
    starts = torch.tensor([0, *(len(chain) for chain in chains)]).cumsum(0)
    pairs = torch.tensor([pair for chain in chains for pair in chain], dtype=torch.int64)
    table = torch.cat((starts, pairs.flatten()))
    if device.type == "cuda":  # an upload of a long table from pageable memory would block
        table = table.pin_memory().to(device, non_blocking=True)
    words_per_block = source.shape[1]
    # Blocks are long, so all launches share one shape class.
    config = configuration("block_copy", "any", device, {"tile": 1024, "num_warps": 4})
    _copy_blocks_kernel[(len(chains), triton.cdiv(words_per_block, config["tile"]))](
        source,
        target,
        table[len(starts) :],
        table,
        words_per_block,
        TILE=config["tile"],
        num_warps=config["num_warps"],
    )


def _words(*caches: Tensor) -> list[Tensor]:
    """View each cache as [num_blocks, words_per_block], in the same integer type.

    The type is the widest one whose size divides the block size in bytes and each cache's address.
    """
    for dtype in (torch.int64, torch.int32, torch.int16):
        size = dtype.itemsize
        if all(cache[0].nbytes % size == 0 and cache.data_ptr() % size == 0 for cache in caches):
            break
    else:
        dtype = torch.uint8
    return [cache.flatten(1).view(torch.uint8).view(dtype) for cache in caches]
