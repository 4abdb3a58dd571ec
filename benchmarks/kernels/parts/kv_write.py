"""Measures the KV write, which stores new keys and values in the slots of the cache.

Copy bandwidth is the limit.
"""

from __future__ import annotations

import costs
import torch
from measure import Result, Rows, Setting, best_peer, check, gb_s, us
from paged_batch import BLOCK_SIZE, HEAD_DIM, NUM_KV_HEADS, random_cache
from torch import Tensor

TOKENS = [1, 64, 256, 8192]
TOKENS_ON_CPU = [1, 64, 1024]
NUM_LAYERS = 32


def run(setting: Setting) -> Result:
    from baton_kernels.kv_write import plan_write, write_kv

    counts = [1, 37] if setting.quick else TOKENS if setting.is_gpu else TOKENS_ON_CPU
    num_layers = 2 if setting.quick else NUM_LAYERS if setting.is_gpu else 8
    cache = random_cache(2 * max(counts), num_layers, setting.dtype, setting.device)
    rows: Rows = []
    for num_tokens in counts:
        slots = torch.randperm(len(cache) * BLOCK_SIZE, device=setting.device)[:num_tokens]
        kv = [
            torch.randn(2, num_tokens, NUM_KV_HEADS, HEAD_DIM, device=setting.device).to(
                setting.dtype
            )
            for _ in range(num_layers)
        ]
        plan = plan_write(cache[:, :, 0, 0], slots)
        block, offset = slots // BLOCK_SIZE, slots % BLOCK_SIZE

        def ours(layer: int, kv: list[Tensor] = kv, slots: Tensor = slots, plan=plan) -> None:  # type: ignore[no-untyped-def]
            write_kv(*kv[layer], cache[:, :, layer, 0], cache[:, :, layer, 1], slots, plan)

        def assignment(
            layer: int, kv: list[Tensor] = kv, block: Tensor = block, offset: Tensor = offset
        ) -> None:
            for which in range(2):
                cache[block, :, layer, which, offset] = kv[layer][which]

        before = cache.clone()
        ours(1)
        written = cache.clone()
        cache.copy_(before)
        assignment(1)
        check(f"KV write of {num_tokens} tokens", written, cache, 0)
        seconds = setting.seconds(
            [lambda layer=layer, f=ours: f(layer) for layer in range(num_layers)]
        )
        peers = {
            "indexed assignment": [
                lambda layer=layer, f=assignment: f(layer) for layer in range(num_layers)
            ]
        }
        peer, peer_seconds, _ = best_peer(setting, peers)
        nbytes = costs.kv_write(kv[0][0], slots).nbytes
        rows.append(
            {
                "part": "KV write",
                "tokens": num_tokens,
                "us": us(seconds),
                "GB/s": gb_s(nbytes, seconds),
                "of copy": round(nbytes / seconds / setting.copy_bandwidth, 3),
                "best peer": peer,
                "against it": round(peer_seconds / seconds, 2),
            }
        )
    return rows, []
