"""Word sums in Triton: a program sums a part of one block's heads, and torch adds up the parts."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from baton_kernels.block_checksum.reference import OUTER_OFFSET, PERIOD, WORD_BYTES, factors
from baton_kernels.launch_configurations import Configuration, configuration

#: Configurations that the tuner measures. tile: words per tile, a divisor of PERIOD. tiles: tiles
#: per program.
CANDIDATES: list[Configuration] = [
    {"tile": tile, "tiles": tiles, "num_warps": num_warps}
    for tile in (512, 1024, 2048)
    for tiles in (1, 4, 16)
    for num_warps in (4, 8)
]


@triton.jit(do_not_specialize_on_alignment=["block_ids_ptr"])  # may be a view at any offset
def _block_sums_kernel(
    out_ptr,  # [num_block_ids, parts]
    words_ptr,  # [num_blocks, words_per_block]
    block_ids_ptr,  # [num_block_ids]
    inner_ptr,  # [PERIOD]
    outer_ptr,  # [periods]
    words_per_block,
    first_word,
    num_words,
    PERIOD: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    block = tl.load(block_ids_ptr + tl.program_id(0)).to(tl.int64)
    run_ptr = words_ptr + block * words_per_block + first_word
    part = tl.program_id(1)
    lane = tl.arange(0, TILE)
    sums = tl.zeros([TILE], dtype=tl.int64)
    for start in range(part * TILES * TILE, min((part + 1) * TILES * TILE, num_words), TILE):
        word = tl.load(run_ptr + start + lane, mask=start + lane < num_words, other=0)
        folded = word ^ ((word >> 32) & 0xFFFFFFFF)
        weight = tl.load(inner_ptr + start % PERIOD + lane) * tl.load(outer_ptr + start // PERIOD)
        sums += folded * weight
    tl.store(out_ptr + tl.program_id(0) * tl.num_programs(1) + part, tl.sum(sums, axis=0))


def block_sums_triton(
    kv_cache: Tensor,
    block_ids: Tensor,
    first_head: int,
    num_heads: int,
) -> Tensor:
    """Implement `baton_kernels.block_checksum.block_sums` in Triton, for checked arguments."""
    if len(block_ids) == 0:
        return torch.empty(0, dtype=torch.int64, device=kv_cache.device)
    words = kv_cache.flatten(1).view(torch.uint8).view(torch.int64)  # [num_blocks, words_per_block]
    head_words = kv_cache[0, 0].nbytes // WORD_BYTES
    num_words = num_heads * head_words
    if kv_cache.is_cuda:  # an upload from pageable memory would block
        block_ids = block_ids.pin_memory().to(kv_cache.device, non_blocking=True)
    inner, outer = _weights(num_words, kv_cache.device)
    default = {"tile": 1024, "tiles": 4, "num_warps": 4}
    # Blocks are long, so all launches share one shape class.
    config = configuration("block_checksum", "any", kv_cache.device, default)
    parts = triton.cdiv(num_words, config["tile"] * config["tiles"])
    out = torch.empty(len(block_ids), parts, dtype=torch.int64, device=kv_cache.device)
    _block_sums_kernel[(len(block_ids), parts)](
        out,
        words,
        block_ids,
        inner,
        outer,
        words.shape[1],
        first_head * head_words,
        num_words,
        PERIOD=PERIOD,
        TILE=config["tile"],
        TILES=config["tiles"],
        num_warps=config["num_warps"],
    )
    return out.sum(1)


@functools.lru_cache(maxsize=8)
def _weights(num_words: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the two factors of the weights for a run of `num_words` words.

    Word i has the weight inner[i % PERIOD] * outer[i // PERIOD].

    Returns:
        inner, of shape [PERIOD], and outer, of shape [ceil(num_words / PERIOD)].
    """
    return factors(0, PERIOD).to(device), factors(OUTER_OFFSET, -(-num_words // PERIOD)).to(device)
