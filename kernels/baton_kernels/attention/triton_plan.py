"""Plan of paged attention in Triton: the grids, launch configuration and workspace of a step.

`plan_launch` reads only shapes, dtypes and host values, so the host never waits for the device. All
layers of the step launch the kernels of `triton_kernel` with the same plan.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from baton_kernels.attention import split_kv
from baton_kernels.attention.split_kv_triton import Partials
from baton_kernels.launch_configurations import Configuration, configuration

#: Configurations that the tuner measures. Some need more shared memory than a GPU has.
DECODE_CANDIDATES: list[Configuration] = [
    {
        "BLOCK_M": 16,
        "KV_TILE": tile,
        "PROGRAMS_PER_SM": programs,
        "num_warps": warps,
        "num_stages": stages,
    }
    for tile, warps in ((32, 2), (64, 4), (128, 4), (128, 8))
    for stages in (2, 3, 4, 5)
    for programs in (1, 2, 3)
]
PREFILL_CANDIDATES: list[Configuration] = [
    {
        "BLOCK_M": rows,
        "KV_TILE": tile,
        "PROGRAMS_PER_SM": 2,
        "num_warps": warps,
        "num_stages": stages,
    }
    for rows, tile, warps in (
        (64, 32, 4),
        (64, 64, 4),
        (128, 32, 8),
        (128, 64, 8),
        (128, 128, 8),
        (128, 64, 4),
        (256, 64, 16),
    )
    for stages in (2, 3, 4)
]


def shape_class(decode: bool, rows: int, head_dim: int, kv_dtype: torch.dtype) -> str:
    """Return the shape class, the key of the tuned launch configuration for these sizes.

    An example is "decode/rows=16/head_dim=128/bfloat16".

    Args:
        decode: whether the queries of each sequence fit into one query block, or the average number
            of queries per sequence is at most 4.
        rows: minimum number of rows of a query block. A larger block leaves less shared memory for
            key tiles.
        head_dim: dimension of a head.
        kv_dtype: dtype of the KV cache.
    """
    kind = f"decode/rows={rows}" if decode else "prefill"
    return f"{kind}/head_dim={head_dim}/{str(kv_dtype).removeprefix('torch.')}"


def default_configuration(decode: bool, head_dim: int, kv_dtype: torch.dtype) -> Configuration:
    """Return the launch configuration for devices without measurements.

    The size of a KV tile is chosen so that its keys and values take at most about 32 KiB.
    """
    tile = min(64, max(16, 16384 // (triton.next_power_of_2(head_dim) * kv_dtype.itemsize)))
    if decode:
        stages = 4 if kv_dtype.itemsize == 1 else 3
        return {
            "BLOCK_M": 16,
            "KV_TILE": tile,
            "PROGRAMS_PER_SM": 2,
            "num_warps": 4,
            "num_stages": stages,
        }
    if kv_dtype.itemsize == 4:  # float32 uses no tensor cores: products are computed in registers
        return {
            "BLOCK_M": 64,
            "KV_TILE": min(tile, 32),
            "PROGRAMS_PER_SM": 2,
            "num_warps": 8,
            "num_stages": 2,
        }
    return {"BLOCK_M": 128, "KV_TILE": tile, "PROGRAMS_PER_SM": 2, "num_warps": 8, "num_stages": 3}


@functools.cache
def _num_sms(device: torch.device) -> int:
    return (
        torch.cuda.get_device_properties(device).multi_processor_count
        if device.type == "cuda"
        else 4
    )


class Launch(NamedTuple):
    """The grids, constants and workspace of a step's attention kernels."""

    #: Number of programs per KV head. A program computes a query block; or, in decode steps, a
    #: sequence or a segment of one.
    items: int
    target_segments: int  #: 0: no sequence is split.
    #: Upper bound of a sequence's queries, if all of them fit into one query block. Otherwise 1.
    max_queries: int
    shared: dict[str, int]  #: Constants of both kernels.
    constants: dict[str, int]  #: Other constants of the attention kernel.
    partials: Partials | None  #: Workspace that all layers reuse. None: no sequence is split.


def plan_launch(
    query: Tensor,
    key_cache: Tensor,
    block_tables: Tensor,
    num_seqs: int,
    window: int | None,
    max_seqlen_q: int | None,
) -> Launch:
    """Return the grids, constants and workspace of a step's attention kernels.

    The function reads only shapes, dtypes and host values. See
    `baton_kernels.attention.plan_attention` for the arguments.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, block_size = key_cache.shape[1:3]
    group = num_heads // num_kv_heads
    one_block = split_kv.fits_one_block(max_seqlen_q, group)
    # The number of queries per sequence may be unknown. If it is small on average, large query
    # blocks would be mostly empty.
    decode = one_block or num_tokens <= 4 * num_seqs
    max_queries = (max_seqlen_q or 1) if one_block else 1
    rows = max(16, triton.next_power_of_2(max_queries * group))
    config = configuration(
        "attention",
        shape_class(decode, rows, head_dim, key_cache.dtype),
        query.device,
        default_configuration(decode, head_dim, key_cache.dtype),
    )
    block_m, kv_tile = max(config["BLOCK_M"], rows), config["KV_TILE"]
    block_q = block_m // group

    target_segments = 0
    if one_block:
        max_tiles = triton.cdiv(block_tables.shape[1] * block_size, kv_tile)
        target_segments = split_kv.target_segments(
            num_seqs, num_kv_heads, max_tiles, _num_sms(query.device), config["PROGRAMS_PER_SM"]
        )
    items = num_seqs + (target_segments if one_block else num_tokens // block_q)
    rows_of_items = (items, num_kv_heads, block_m)
    partials = (
        _empty_partials(rows_of_items, head_dim, num_seqs, query.device)
        if target_segments
        else None
    )
    shared = {
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "HEAD_DIM_PADDED": max(16, triton.next_power_of_2(head_dim)),
        "GROUP": group,
        "BLOCK_M": block_m,
    }
    constants = {
        "BLOCK_SIZE": block_size,
        "BLOCK_Q": block_q,
        "KV_TILE": kv_tile,
        "WINDOW": window or 0,
        "ONE_BLOCK": one_block,
        "MIN_TILES": split_kv.MIN_TILES,
        "SCAN": split_kv.SCAN,
        "num_warps": config["num_warps"],
        "num_stages": config["num_stages"],
    }
    return Launch(items, target_segments, max_queries, shared, constants, partials)


def _empty_partials(
    rows: tuple[int, int, int], head_dim: int, num_seqs: int, device: torch.device
) -> Partials:
    """Allocate memory for the results of segments. `rows` is [items, num_kv_heads, BLOCK_M]."""
    sums, maxima = torch.empty((2, *rows), dtype=torch.float32, device=device).unbind()
    return Partials(
        torch.empty((*rows, head_dim), dtype=torch.float32, device=device),
        sums,
        maxima,
        torch.empty((num_seqs, 2), dtype=torch.int32, device=device),
    )
