"""Copies of whole KV blocks, within a cache (copy-on-write) or between device and host (swap).

    target[t] = source[s]      for each pair (s, t)

Pairs take effect in order. Caches have the shape [num_blocks, ...] and are contiguous, so a block
is one run of bytes with all heads and layers.

There is no C++: torch copies blocks on a CPU, and Triton (triton_kernel.py) on a GPU.

Counted cost (`benchmarks/kernels/costs.py`):

    bytes       copy: the blocks, read and written; swap: the blocks, once
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def copy_blocks(kv_cache: Tensor, pairs: Tensor) -> None:
    """Copy blocks within one cache, in the order of the pairs.

    On a GPU, the call does not wait for the device.

    Args:
        kv_cache: tensor of shape [num_blocks, ...], contiguous.
        pairs: (source block, target block) pairs, int64 of shape [n, 2], in host memory.

    Raises:
        ValueError: the cache is not contiguous, or the pairs are not int64 [n, 2] in host memory.
    """
    _check_cache(kv_cache)
    _check_pairs(pairs)
    if kv_cache.is_cuda:
        from baton_kernels.block_copy.triton_kernel import copy_blocks_triton

        copy_blocks_triton(kv_cache, kv_cache, _chains(pairs))
        return
    for run in _independent_runs(pairs):
        kv_cache.index_copy_(0, run[:, 1], kv_cache.index_select(0, run[:, 0]))


def swap_blocks(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """Copy blocks from one cache to another, between host and device or on the host.

    With a GPU, copies are queued on the current stream. The host cache must be in pinned memory,
    and may be read only after the stream was synchronized. If the blocks are consecutive in both
    caches, the GPU's copy engine copies them without using an SM. Otherwise one kernel launch
    copies the blocks, because the copy engine would need a call for each run of consecutive blocks.

    Args:
        source: tensor of shape [num_blocks, ...], contiguous.
        target: like source; the number of blocks may differ.
        pairs: (block of source, block of target) pairs, int64 of shape [n, 2], in host memory.
            Targets are distinct.

    Raises:
        ValueError: a cache is not contiguous, the blocks differ in shape or dtype, the pairs are
            not int64 [n, 2] in host memory, or with a GPU the host cache is not pinned.
    """
    _check_cache(source)
    _check_cache(target)
    _check_pairs(pairs)
    if source.shape[1:] != target.shape[1:] or source.dtype != target.dtype:
        raise ValueError(
            f"blocks differ: {source.dtype} {list(source.shape[1:])} and "
            f"{target.dtype} {list(target.shape[1:])}"
        )
    if not source.is_cuda and not target.is_cuda:
        target.index_copy_(0, pairs[:, 1], source.index_select(0, pairs[:, 0]))
        return
    for cache in (source, target):
        if not cache.is_cuda and not cache.is_pinned():
            raise ValueError(
                "the host's swap blocks are not in pinned memory; "
                "allocate them with pin_memory=True"
            )
    runs = list(_adjacent_runs(pairs))
    if len(runs) == 1:
        first_source, first_target, length = runs[0]
        target[first_target : first_target + length].copy_(
            source[first_source : first_source + length], non_blocking=True
        )
    elif runs:
        from baton_kernels.block_copy.triton_kernel import copy_blocks_triton

        copy_blocks_triton(source, target, [[(first, second)] for first, second in pairs.tolist()])


def _check_cache(cache: Tensor) -> None:
    if cache.dim() < 2 or not cache.is_contiguous():
        raise ValueError(
            "a cache must be contiguous, of shape [num_blocks, ...], not "
            f"{list(cache.shape)} with strides {list(cache.stride())}"
        )


def _check_pairs(pairs: Tensor) -> None:
    if pairs.dtype != torch.int64 or pairs.dim() != 2 or pairs.shape[1] != 2 or pairs.is_cuda:
        raise ValueError(
            f"pairs must be int64 [n, 2] in host memory, not {pairs.dtype} {list(pairs.shape)}"
        )


def _independent_runs(pairs: Tensor) -> Iterator[Tensor]:
    """Split the pairs into successive parts, in each of which the order of the pairs has no effect.

    Usually all pairs are in one part.
    """
    start = 0
    sources: set[int] = set()
    targets: set[int] = set()
    for index, (source, target) in enumerate(pairs.tolist()):
        if source in targets or target in targets or target in sources:
            yield pairs[start:index]
            start = index
            sources, targets = set(), set()
        sources.add(source)
        targets.add(target)
    if start < len(pairs):
        yield pairs[start:]


def _chains(pairs: Tensor) -> list[list[tuple[int, int]]]:
    """Group the pairs into chains that may be copied in parallel with each other.

    The pairs of one chain must be copied in order. A block that is a target in one chain occurs in
    no other chain.
    """
    listed: list[tuple[int, int]] = [(source, target) for source, target in pairs.tolist()]
    parent = {target: target for _, target in listed}  # a forest over written blocks

    def root(block: int) -> int:
        while parent[block] != block:
            block = parent[block]
        return block

    for source, target in listed:
        if source in parent:
            parent[root(source)] = root(target)
    chains: dict[int, list[tuple[int, int]]] = {}
    for source, target in listed:
        chains.setdefault(root(target), []).append((source, target))
    return list(chains.values())


def _adjacent_runs(pairs: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield (first source, first target, number of pairs) for each run of adjacent blocks.

    From one pair of a run to the next, the source and the target both increase by 1.
    """
    first_source = first_target = length = 0
    for source, target in pairs.tolist():
        if length and (source, target) == (first_source + length, first_target + length):
            length += 1
            continue
        if length:
            yield first_source, first_target, length
        first_source, first_target, length = source, target, 1
    if length:
        yield first_source, first_target, length
