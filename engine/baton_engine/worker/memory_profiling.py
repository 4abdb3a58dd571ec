"""Measures how many KV blocks fit in the memory that weights and steps of a rank leave."""

from __future__ import annotations

from functools import partial

import msgspec

from baton_engine.worker.forward import dummy_steps
from baton_engine.worker.memory.block_budget import blocks_on_cpu, blocks_on_gpu
from baton_engine.worker.memory.kv_memory import KVMemory
from baton_engine.worker.model_runner import ModelRunner


def profile_num_blocks(runner: ModelRunner) -> tuple[int, int]:
    """Return the numbers of (cache blocks, host swap blocks) that fit on this rank.

    On a GPU, the largest step is run to measure how much memory it takes. The number of swap blocks
    is 0 if the scheduler preempts by recomputation.

    Args:
        runner: the runner of this rank. On a CPU, its weights need not be loaded.

    Raises:
        ConfigurationError: not one block fits, or the configured numbers do not fit.
    """
    spec = runner.spec
    size, cache, scheduler = spec.block_size, spec.config.cache, spec.config.scheduler
    if scheduler.preemption_mode == "recompute":
        cache = msgspec.structs.replace(cache, swap_memory_bytes=0)
    if spec.device.type == "cpu":
        return blocks_on_cpu(cache, size)
    forward, kv = runner.loaded.forward, KVMemory(spec.kv_cache_layout(1), 0, spec.device)
    largest = dummy_steps.largest(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
    forward.compile(kv.cache)
    graph_bytes = forward.estimate_graph_bytes(kv.cache)
    run_largest = partial(dummy_steps.run, forward, largest, None, kv.cache)
    return blocks_on_gpu(cache, size, spec.device, run_largest, graph_bytes)
