"""An engine with asynchronous scheduling whose sampled tokens reach the host late.

Each request must generate the tokens that it generates alone and without asynchronous scheduling.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from baton_engine.core.engine_core import EngineCore
from baton_engine.executor.base import executor_name, load_executor_class
from baton_protocol.engine_messages import EngineCoreRequest, FinishReason
from baton_protocol.options.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from baton_protocol.sampling_params import SamplingParams
from support.engine.step_driver import VOCAB_SIZE, random_prompts

pytestmark = pytest.mark.usefixtures("_restore_sampled_tokens")

NUM_TOKENS = 16
#: One of ten tokens ends a request. The next step runs the request before the scheduler has the
#: token.
ENDS = list(range(0, VOCAB_SIZE, 10))
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"stop_token_ids": ENDS},
    {"temperature": 0.0, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 0.9, "top_p": 0.9, "repetition_penalty": 1.2, "min_tokens": 5},
    {"top_k": 30, "stop_token_ids": ENDS, "bad_words_token_ids": [[7, 8], [9]]},
    {"logprobs": 1},
]


@contextmanager
def engine(checkpoint: Path, *, num_blocks: int, **sections: Any) -> Iterator[EngineCore]:
    swap = sections.pop("swap_memory_bytes", 0)
    config = EngineConfig(
        model=ModelConfig(path=str(checkpoint), dtype="float32", max_model_len=128),
        cache=CacheConfig(num_blocks=num_blocks, swap_memory_bytes=swap, watermark=0.0),
        device="cpu",
        num_threads=1,
        **sections,
    )
    executor_class = load_executor_class(executor_name(config))
    core = EngineCore(config, executor_class(config, "instance", lambda: None))
    try:
        yield core
    finally:
        core.shutdown()


def make_requests() -> list[EngineCoreRequest]:
    prompts = random_prompts([1 + 5 * n for n in range(2 * len(KINDS))])
    return [
        EngineCoreRequest(
            f"r{n}",
            prompt,
            SamplingParams(seed=n, max_tokens=NUM_TOKENS, ignore_eos=True, **KINDS[n % len(KINDS)]),
        )
        for n, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> dict[str, list[int]]:
    """Return the tokens of each request alone."""
    with engine(checkpoint, num_blocks=64) as core:
        return {
            request.request_id: generate(core, [request], random.Random(0))[request.request_id]
            for request in make_requests()
        }


def generate(
    core: EngineCore,
    requests: list[EngineCoreRequest],
    draw: random.Random,
    aborted: dict[str, int] | None = None,
) -> dict[str, list[int]]:
    """Add the requests at random steps and return their tokens.

    Args:
        aborted: number of tokens after which a request is aborted.
    """
    waiting, tokens = list(requests), {request.request_id: [] for request in requests}
    while waiting or core.has_requests:
        while waiting and (not core.has_requests or draw.random() < 0.4):
            assert core.add_request(waiting.pop(0)) is None
        for output in core.step_fn():
            assert output.finish_reason is not FinishReason.ERROR, output.error
            tokens[output.request_id] += output.new_token_ids
            if (aborted or {}).get(output.request_id) == len(tokens[output.request_id]):
                core.abort_requests([output.request_id])
    return tokens


@pytest.mark.parametrize(
    ("executor", "tensor", "mode", "seed"),
    [
        ("uniproc", 1, "recompute", 0),
        ("uniproc", 1, "swap", 1),
        ("multiproc", 1, "recompute", 2),
        ("multiproc", 2, "swap", 3),
    ],
)
def test_requests_that_join_end_and_are_preempted_generate_the_same(
    checkpoint: Path,
    alone: dict[str, list[int]],
    executor: str,
    tensor: int,
    mode: str,
    seed: int,
) -> None:
    aborted = {"r0": 3, "r3": 7, "r8": 1, "r10": 9}
    with engine(
        checkpoint,
        num_blocks=11,
        swap_memory_bytes=2**22,
        scheduler=SchedulerConfig(
            async_scheduling=True, max_num_batched_tokens=48, preemption_mode=mode
        ),
        parallel=ParallelConfig(
            tensor_parallel_size=tensor,
            executor_class=executor,
            worker_class="support.engine.fake_gpu.DeferringWorker",
        ),
    ) as core:
        tokens = generate(core, make_requests(), random.Random(seed), aborted)
        preemptions = core.get_stats().num_preemptions
    assert preemptions > 0, "nothing was preempted"
    for request_id, expected in alone.items():
        got = tokens[request_id]
        if request_id in aborted:
            assert len(got) >= min(aborted[request_id], len(expected))
            expected = expected[: len(got)]
        assert got == expected, request_id
    assert any(len(got) < NUM_TOKENS for r, got in tokens.items() if r not in aborted)
