"""Measures wasted KV memory: allocated slots without a token, with paging and with reservation."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from instant import InstantExecutor
from workload import MAX_MODEL_LEN, Work

from baton_engine.core.engine_core import EngineCore
from baton_engine.executor.step import SchedulerOutput
from baton_engine.kv_cache.block_pool import Block
from baton_engine.scheduling.request import Request
from baton_engine.scheduling.scheduler import Scheduler
from baton_engine.scheduling.scheduler_state import SchedulerState
from baton_protocol.engine_messages import EngineCoreRequest
from baton_protocol.options.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from baton_protocol.sampling_params import SamplingParams

BLOCK_SIZE = 16
MAX_NUM_BATCHED_TOKENS = 512


class ReservedScheduler(Scheduler):
    """A scheduler that allocates MAX_MODEL_LEN tokens for every request, as before paging."""

    def __init__(self, state: SchedulerState) -> None:
        super().__init__(state)
        allocate = state.kv.allocate

        def reserve(
            request: Request, num_tokens: int, cached: Sequence[Block] = (), **options: Any
        ) -> list[int] | None:
            return allocate(request, MAX_MODEL_LEN, cached, **options)

        state.kv.allocate = reserve  # type: ignore[method-assign]


RESERVED = "memory.ReservedScheduler"
PAGED = "baton_engine.scheduling.scheduler.Scheduler"


def requests_of(works: list[Work]) -> list[EngineCoreRequest]:
    return [
        EngineCoreRequest(
            f"request-{i}",
            work.prompt,
            SamplingParams(temperature=0.0, max_tokens=work.num_output_tokens, ignore_eos=True),
            arrival_time=float(i),
        )
        for i, work in enumerate(works)
    ]


def occupancy(works: list[Work], num_blocks: int, scheduler_class: str = PAGED) -> dict[str, Any]:
    """Run the sample without a model and measure the occupancy over all steps.

    Waste is the share of allocated slots without a computed token.
    """
    config = EngineConfig(
        model=ModelConfig(path="instant"),
        cache=CacheConfig(
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            enable_prefix_caching=False,
            swap_memory_bytes=0,
        ),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            max_num_seqs=len(works),
            scheduler_class=scheduler_class,
        ),
    )
    executor = InstantExecutor(config, "instant", lambda: None)
    core = EngineCore(config, executor)
    pool = core.scheduler.state.kv.pool
    allocated = used = 0
    running: list[int] = []

    def observe(step: SchedulerOutput) -> None:
        nonlocal allocated, used
        allocated += (pool.num_blocks - pool.num_free_blocks) * BLOCK_SIZE
        used += sum(
            request.num_computed_tokens for request in core.scheduler.state.running.values()
        )
        running.append(len(core.scheduler.state.running))

    executor.before_step = observe
    for request in requests_of(works):
        refusal = core.add_request(request)
        assert refusal is None, refusal
    while core.has_requests:
        core.step_fn()
    stats = core.get_stats()
    core.shutdown()
    return {
        "steps": len(running),
        "waste_percent": round(100 * (1 - used / allocated), 2),
        "mean_running": round(statistics.fmean(running), 1),
        "max_running": max(running),
        "preemptions": stats.num_preemptions,
    }
