"""Greedy decoding of three prompts by hand-made steps, for comparing executors.

For the tests of executors.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from pathlib import Path

from baton_engine.executor.base import Executor
from baton_engine.executor.step import (
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from baton_engine.executor.uniproc import UniProcExecutor
from baton_protocol.options.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from baton_protocol.sampling_params import SamplingParams

PROMPTS = {"a": list(range(5, 25)), "b": list(range(700, 733)), "c": [3, 1, 4, 1, 5]}
NUM_TOKENS = 8
BLOCKS_PER_REQUEST = 4
GREEDY = SamplingParams(temperature=0.0)
WAIT_S = 120.0


def model_config(
    checkpoint: Path, tensor: int = 1, pipeline: int = 1, executor: str = "auto"
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(path=str(checkpoint), dtype="float32"),
        cache=CacheConfig(num_blocks=16, swap_memory_bytes=0),
        parallel=ParallelConfig(
            tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, executor_class=executor
        ),
        device="cpu",
        num_threads=1,
    )


def generate(executor: Executor) -> dict[str, list[int]]:
    """Generate with one request per step and `max_concurrent_batches` steps in flight."""
    generated: dict[str, list[int]] = {request_id: [] for request_id in PROMPTS}
    ready = deque(PROMPTS)
    in_flight: deque[tuple[str, Future[ModelRunnerOutput]]] = deque()
    step_id = 0
    while ready or in_flight:
        while ready and len(in_flight) < executor.max_concurrent_batches:
            request_id = ready.popleft()
            executor.execute_model(make_step(request_id, generated[request_id], step_id))
            in_flight.append((request_id, executor.sample_tokens(None)))
            step_id += 1
        request_id, future = in_flight.popleft()
        generated[request_id].append(future.result(WAIT_S).sampled_token_ids[request_id])
        if len(generated[request_id]) < NUM_TOKENS:
            ready.append(request_id)
    return generated


def generate_in_one_process(config: EngineConfig) -> dict[str, list[int]]:
    executor = UniProcExecutor(config, "instance", lambda: None)
    executor.initialize()
    generated = generate(executor)
    executor.shutdown()
    return generated


def make_step(request_id: str, generated: list[int], step_id: int) -> SchedulerOutput:
    prompt = PROMPTS[request_id]
    if not generated:
        first_block = list(PROMPTS).index(request_id) * BLOCKS_PER_REQUEST
        blocks = list(range(first_block, first_block + BLOCKS_PER_REQUEST))
        new = NewRequestData(request_id, prompt, [], GREEDY, 0, blocks, 0)
        return SchedulerOutput([new], [], {request_id: len(prompt)}, [], step_id=step_id)
    # With several pipeline stages, the first one does not sample and needs the last token.
    cached = CachedRequestData(request_id, [], len(prompt) + len(generated) - 1, generated[-1:])
    return SchedulerOutput([], [cached], {request_id: 1}, [], step_id=step_id)
