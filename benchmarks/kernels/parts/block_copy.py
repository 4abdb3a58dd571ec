"""Measures copies of whole KV blocks.

Blocks are copied within the cache, and between the device and pinned host memory.
"""

from __future__ import annotations

import costs
import torch
from measure import Result, Rows, Setting, best_peer, check, gb_s, us
from paged_batch import BLOCK_SIZE, random_cache
from torch import Tensor

NUM_LAYERS = 32
NUM_PAIRS = [4, 64, 256]


def run(setting: Setting) -> Result:
    from baton_kernels.block_copy import copy_blocks, swap_blocks

    counts = [2, 5] if setting.quick else NUM_PAIRS
    num_layers = 2 if setting.quick else NUM_LAYERS
    cache = random_cache(4 * max(counts) * BLOCK_SIZE, num_layers, setting.dtype, setting.device)
    host = torch.empty(
        (max(counts), *cache.shape[1:]), dtype=cache.dtype, pin_memory=setting.is_gpu
    )
    flat_host = torch.empty_like(host, pin_memory=setting.is_gpu)
    rows: Rows = []
    for count in counts:
        ids = torch.randperm(len(cache))[: 2 * count]
        pairs, out = (
            ids.view(2, count).T.contiguous(),
            torch.stack((ids[:count], torch.arange(count)), 1),
        )
        back = out.flip(1)
        source, target = (column.to(setting.device) for column in pairs.T)

        def by_index(source: Tensor = source, target: Tensor = target) -> None:
            cache.index_copy_(0, target, cache.index_select(0, source))

        before = cache.clone()
        copy_blocks(cache, pairs)
        copied = cache.clone()
        cache.copy_(before)
        by_index()
        check(f"copy of {count} blocks", copied, cache, 0)
        swap_blocks(cache, host, out)
        _wait(setting)
        check(f"swap of {count} blocks out", host[:count], cache[source].cpu(), 0)
        cache[source] = 0
        swap_blocks(host, cache, back)
        check(f"swap of {count} blocks in", cache[source].cpu(), host[:count], 0)

        ways = {
            "copy": (
                lambda pairs=pairs: copy_blocks(cache, pairs),
                costs.block_copy(cache, count).nbytes,
                {"index_select, index_copy": [by_index]},
            ),
            "swap out": (
                lambda out=out: swap_blocks(cache, host, out),
                costs.block_swap(cache, count).nbytes,
                {"one copy": [lambda n=count: flat_host[:n].copy_(cache[:n], non_blocking=True)]},
            ),
            "swap in": (
                lambda back=back: swap_blocks(host, cache, back),
                costs.block_swap(cache, count).nbytes,
                {"one copy": [lambda n=count: cache[:n].copy_(flat_host[:n], non_blocking=True)]},
            ),
        }
        for name, (call, nbytes, peers) in ways.items():
            # No graph: the pairs come from the host with every call.
            seconds = setting.seconds([call], graph=False)
            peer, peer_seconds, _ = best_peer(setting, peers, graph=False)
            rows.append(
                {
                    "part": "block copies",
                    "what": name,
                    "blocks": count,
                    "us": us(seconds),
                    "GB/s": gb_s(nbytes, seconds),
                    "of copy": round(nbytes / seconds / setting.copy_bandwidth, 3)
                    if name == "copy"
                    else None,
                    "best peer": peer,
                    "against it": round(peer_seconds / seconds, 2),
                }
            )
    return rows, []


def _wait(setting: Setting) -> None:
    if setting.is_gpu:
        torch.cuda.synchronize()
