"""Measures the engine's overhead per running request and step, with a model that takes no time."""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

from instant import InstantExecutor

from baton_engine.core.engine_core import EngineCore
from baton_protocol.engine_messages import EngineCoreRequest
from baton_protocol.options.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from baton_protocol.sampling_params import SamplingParams

BLOCK_SIZE = 16
STEPS_PER_ROUND = BLOCK_SIZE  # every request takes exactly one new block
ROUNDS = 20


def us_per_request_and_step(num_running: int) -> float:
    """Return the microseconds per running request and step, as the median of ROUNDS rounds."""
    num_tokens = 1 + STEPS_PER_ROUND * (ROUNDS + 2)
    config = EngineConfig(
        model=ModelConfig(path="instant"),
        cache=CacheConfig(
            block_size=BLOCK_SIZE, num_blocks=num_running * (num_tokens // BLOCK_SIZE + 2)
        ),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=num_running, max_num_seqs=num_running, max_queue=num_running
        ),
    )
    core = EngineCore(config, InstantExecutor(config, "instant", lambda: None))
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    for i in range(num_running):
        refusal = core.add_request(
            EngineCoreRequest(f"request-{i}", [i + 1], params, arrival_time=float(i))
        )
        assert refusal is None, refusal
    for _ in range(STEPS_PER_ROUND):
        core.step_fn()
    gc.collect()
    gc.freeze()  # as the engine's process does
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(STEPS_PER_ROUND):
            outputs = core.step_fn()
        rounds.append(time.perf_counter() - start)
        assert len(outputs) == num_running, "not all requests were running"
    gc.unfreeze()
    core.shutdown()
    return statistics.median(rounds) / STEPS_PER_ROUND / num_running * 1e6


def figures(counts: tuple[int, ...], repeats: int) -> list[dict[str, Any]]:
    """Return a row per number of running requests.

    Each repeat measures all numbers, so that noise affects all of them.
    """
    values: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(repeats):
        for count in counts:
            values[count].append(us_per_request_and_step(count))
    return [
        {
            "part": "overhead",
            "running": count,
            "us_per_request_and_step": round(statistics.median(v), 3),
        }
        for count, v in values.items()
    ]
