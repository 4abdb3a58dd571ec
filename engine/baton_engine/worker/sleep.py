"""Releases the weights and the KV memory of a model runner, and restores them."""

from __future__ import annotations

import torch

from baton_engine.worker.memory.freed_memory import return_freed_memory
from baton_engine.worker.model_runner import ModelRunner

#: The tags that `wake_up` accepts.
WEIGHTS, KV_CACHE = "weights", "kv_cache"


def sleep(runner: ModelRunner, level: int) -> None:
    """Release the KV cache and the weights until `wake_up`.

    Level 1 moves the weights from a GPU to host memory, and does not change weights on a CPU.
    Level 2 drops the weights. All KV is lost at both levels, so the scheduler must compute the KV
    again.

    Raises:
        ValueError: the level is not 1 or 2.
    """
    if level not in (1, 2):
        raise ValueError(
            f"sleep level must be 1 (weights go to host memory) or 2 (weights are dropped), "
            f"got {level}"
        )
    runner.finish_steps()
    runner.loaded.drop_graphs()
    if runner.kv is not None:
        runner.kv.drop()
    if level == 1:
        runner.loaded.move_to_host()
    else:
        runner.loaded.drop()
    if runner.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.accelerator.empty_host_cache()  # pinned host blocks
    return_freed_memory()


def wake_up(runner: ModelRunner, tags: list[str] | None = None) -> None:
    """Restore the weights and an empty KV cache after `sleep`.

    When both have been restored, in one call or in two, graphs are captured again.

    Args:
        runner: the runner that sleeps.
        tags: what to restore in this call: "weights", "kv_cache" or both. None: both.

    Raises:
        ValueError: a tag is unknown.
        ModelInvalid: the checkpoint can no longer be read.
    """
    wanted = {WEIGHTS, KV_CACHE} if tags is None else set(tags)
    if unknown := wanted - {WEIGHTS, KV_CACHE}:
        raise ValueError(
            f"wake_up tags must be {WEIGHTS} or {KV_CACHE}, got {', '.join(sorted(unknown))}"
        )
    loaded, kv = runner.loaded, runner.kv
    slept = loaded.is_absent or (kv is not None and kv.is_dropped)
    if WEIGHTS in wanted:
        loaded.restore()
    if KV_CACHE in wanted and kv is not None:
        kv.restore()
    if slept and not loaded.is_absent and kv is not None and not kv.is_dropped:
        loaded.forward.prepare(kv.cache)
