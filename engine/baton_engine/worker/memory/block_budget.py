"""Computes the number of KV blocks that fit on a rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from baton_engine.models.errors import ConfigurationError
from baton_engine.worker.memory.host_memory import available_host_memory
from baton_protocol.options.config import CacheConfig

GIB = 2**30
#: Memory of the cache on a CPU, if neither cache.num_blocks nor cache.memory_bytes is set.
CPU_MEMORY_BYTES = 256 * 2**20
#: Memory for swap blocks if cache.swap_memory_bytes is not set, in percent of the host memory that
#: the offload tier leaves, and on a CPU also the KV cache.
SWAP_MEMORY_PERCENT = 5


@dataclass(frozen=True, slots=True)
class BlockSize:
    """Size of one KV block in bytes."""

    #: Bytes on this rank, which holds some layers and heads.
    rank: int
    #: Bytes on all ranks together. Budgets of host memory apply to a whole engine.
    engine: int


def blocks_on_cpu(cache: CacheConfig, size: BlockSize) -> tuple[int, int]:
    """Return the numbers of (cache blocks, host swap blocks) that fit in the configured budgets.

    If `cache.swap_memory_bytes` is None, swap blocks take SWAP_MEMORY_PERCENT of the memory that
    cache and offload blocks leave, but at most as much as the cache blocks. This computation
    assumes that all ranks run on this host.

    Raises:
        ConfigurationError: the cache budget is less than one block, or this rank's blocks need more
            than the available memory.
    """
    num_blocks = _configured_blocks(cache, size)
    if num_blocks is None:
        num_blocks = _blocks_in(CPU_MEMORY_BYTES, size)
    num_offload_blocks = offload_blocks(cache, size)
    available = available_host_memory()
    if cache.swap_memory_bytes is None:
        left = max(0, available - (num_blocks + num_offload_blocks) * size.engine)
        num_swap_blocks = min(num_blocks, left * SWAP_MEMORY_PERCENT // 100 // size.engine)
    else:
        num_swap_blocks = cache.swap_memory_bytes // size.engine
    needed = (num_blocks + num_swap_blocks + num_offload_blocks) * size.rank
    if needed > available:
        setting = "cache.memory_bytes" if cache.num_blocks is None else "cache.num_blocks"
        raise ConfigurationError(
            "InsufficientMemory",
            f"{num_blocks} KV blocks, {num_swap_blocks} swap blocks and {num_offload_blocks} "
            f"offload blocks need {needed / GIB:.2f} GiB, but {available / GIB:.2f} GiB are "
            f"available; lower {' or '.join([setting, *_host_settings(cache)])}",
        )
    return num_blocks, num_swap_blocks


def blocks_on_gpu(
    cache: CacheConfig,
    size: BlockSize,
    device: torch.device,
    run_largest_step: Callable[[], None],
    graph_bytes: int,
) -> tuple[int, int]:
    """Return the numbers of (cache blocks, host swap blocks) of a rank on a GPU.

    The number of cache blocks is one of these:

    1. `cache.num_blocks`, if it is set.
    2. The number that fits in `cache.memory_bytes`, if only `cache.memory_bytes` is set. These
       bytes are the memory of all ranks together.
    3. The number that fits on the GPU, if neither is set.

    The cache blocks must fit in the usable GPU memory, minus the memory of the largest step, of
    captured graphs and of other processes. In case 2, all GPU memory is usable. Otherwise, the
    fraction `cache.gpu_memory_utilization` is usable.

    The number of swap blocks is the number that fits in `cache.swap_memory_bytes`. If this setting
    is None, swap blocks take at most SWAP_MEMORY_PERCENT of the host memory that the offload tier
    leaves, and at most as much as the cache blocks.

    Args:
        cache: configuration of the cache.
        size: size of one block.
        device: GPU of this rank.
        run_largest_step: runs the largest step. `blocks_on_gpu` measures the peak memory of
            this call, including the weights.
        graph_bytes: memory of captured graphs.

    Raises:
        ConfigurationError: not one block fits, the configured number of blocks does not fit, or the
            host blocks do not fit in host memory.
    """
    configured = _configured_blocks(cache, size)
    num_swap_blocks = _pinned_swap_blocks(cache, size)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    run_largest_step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    by_memory = cache.num_blocks is None and cache.memory_bytes is not None
    utilization = 1.0 if by_memory else cache.gpu_memory_utilization
    room = (int(utilization * total) - peak - others - graph_bytes) // size.rank
    num_blocks = room if configured is None else configured
    if not 0 < num_blocks <= room:
        remedy = "lower scheduler.max_num_batched_tokens"
        if configured is not None:
            remedy += f" or cache.{'memory_bytes' if by_memory else 'num_blocks'}"
        if not by_memory:
            remedy += ", or raise cache.gpu_memory_utilization"
        raise ConfigurationError(
            "InsufficientMemory",
            f"the GPU has no room for {configured or 1} KV blocks of {size.rank} bytes: of "
            f"{total / GIB:.2f} GiB, the fraction {utilization} may be used, weights and "
            f"activations take {peak / GIB:.2f} GiB, CUDA graphs {graph_bytes / GIB:.2f} GiB and "
            f"other processes {others / GIB:.2f} GiB; {remedy}",
        )
    if cache.swap_memory_bytes is None:
        num_swap_blocks = min(num_swap_blocks, num_blocks)
    return num_blocks, num_swap_blocks


def _pinned_swap_blocks(cache: CacheConfig, size: BlockSize) -> int:
    """Return the number of swap blocks, which are pinned in host memory like offload blocks.

    Raises:
        ConfigurationError: the pinned blocks of all ranks on this host do not fit in the available
            host memory.
    """
    # Every rank of this host has a GPU of its own.
    num_ranks = min(torch.cuda.device_count(), size.engine // size.rank)
    num_offload_blocks = offload_blocks(cache, size)
    available = available_host_memory()
    pinned = num_ranks * _pinned_bytes(num_offload_blocks * size.rank)
    if cache.swap_memory_bytes is None:
        share = max(0, available - pinned) * SWAP_MEMORY_PERCENT // 100 // num_ranks
        # The largest power of two in the share, so that pinning does not round up beyond the share.
        num_swap_blocks = (1 << share.bit_length() >> 1) // size.rank
    else:
        num_swap_blocks = cache.swap_memory_bytes // size.engine
    pinned += num_ranks * _pinned_bytes(num_swap_blocks * size.rank)
    if pinned > available:
        raise ConfigurationError(
            "InsufficientMemory",
            f"{num_swap_blocks} swap blocks and {num_offload_blocks} offload blocks need "
            f"{pinned / GIB:.2f} GiB of pinned host memory, in which each GPU's part is rounded up "
            f"to a power of two, but {available / GIB:.2f} GiB are available; lower "
            f"{' or '.join(_host_settings(cache))}, or give the pod more memory",
        )
    return num_swap_blocks


def _pinned_bytes(nbytes: int) -> int:
    """Return the size of a pinned tensor of `nbytes`, which PyTorch rounds up to a power of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


def _host_settings(cache: CacheConfig) -> list[str]:
    """Return the names of the settings that reserve host blocks."""
    names = ("swap_memory_bytes", "offload_memory_bytes")
    return [f"cache.{name}" for name in names if getattr(cache, name)]


def _configured_blocks(cache: CacheConfig, size: BlockSize) -> int | None:
    """Return the number of blocks that the configuration sets, or None if it sets none."""
    if cache.num_blocks is not None or cache.memory_bytes is None:
        return cache.num_blocks
    return _blocks_in(cache.memory_bytes, size)


def _blocks_in(memory_bytes: int, size: BlockSize) -> int:
    if memory_bytes < size.engine:
        raise ConfigurationError(
            "InsufficientMemory",
            f"cache.memory_bytes={memory_bytes} does not hold one KV block of {size.engine} "
            "bytes; raise cache.memory_bytes",
        )
    return memory_bytes // size.engine


def offload_blocks(cache: CacheConfig, size: BlockSize) -> int:
    """Return the number of host blocks of the offload tier. All ranks get the same number."""
    return cache.offload_memory_bytes // size.engine
