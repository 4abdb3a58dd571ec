"""The engine matches `transformers`: six architectures, one and several workers, all schedules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_engine import LLM, SamplingParams
from baton_engine.random_checkpoint import create_checkpoint
from support.parity import assert_greedy, prompts, reference_model

VOCAB_SIZE = 1024
NUM_TOKENS = 24
LOGPROB_TOLERANCE = 1e-4
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"arch": "llama", "rope_scaling": "llama3"},
    "mistral": {"arch": "mistral", "sliding_window": 20},
    "qwen2": {"arch": "qwen2"},
    "qwen3": {"arch": "qwen3", "rope_scaling": "yarn"},
    "mixtral": {"arch": "mixtral"},
    "qwen3_moe": {"arch": "qwen3_moe"},
}


@dataclass
class Case:
    name: str
    checkpoint: Path
    reference: torch.nn.Module


@pytest.fixture(scope="module", params=VARIANTS)
def case(request, tmp_path_factory) -> Case:
    arguments = dict(VARIANTS[request.param])
    path = create_checkpoint(
        tmp_path_factory.mktemp("checkpoints") / request.param, arguments.pop("arch"), **arguments
    )
    return Case(request.param, path, reference_model(path))


@contextmanager
def engine(case: Case, **options: Any) -> Iterator[LLM]:
    llm = LLM(str(case.checkpoint), dtype="float32", num_threads=1, **options)
    try:
        yield llm
    finally:
        llm.close()


def metric(llm: LLM, name: str) -> float:
    return next(metric.value for metric in llm.get_metrics() if metric.name == name)


@torch.inference_mode()
def check(
    case: Case, llm: LLM, what: str, *, count: int = 14, longest: int = 90, n: int = 1
) -> None:
    """Check greedy tokens by the tie rule, and their log-probabilities by LOGPROB_TOLERANCE."""
    prompt_ids = prompts(count, VOCAB_SIZE, longest=longest, seed=7)
    params = SamplingParams(
        temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0, n=n
    )
    results = llm.generate(prompt_ids, params, use_tqdm=False)
    for sample in range(n):
        outputs = [list(result.outputs[sample].token_ids) for result in results]
        assert_greedy(case.reference, prompt_ids, outputs, f"{case.name}, {what}")
    for prompt, result in zip(prompt_ids, results, strict=True):
        for output in result.outputs:
            ids = torch.tensor([prompt + list(output.token_ids)])
            reference = case.reference(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            for position, (token_id, logprobs) in enumerate(
                zip(output.token_ids, output.logprobs, strict=True)
            ):
                gap = abs(logprobs[token_id].logprob - reference[position, token_id].item())
                assert gap <= LOGPROB_TOLERANCE, (
                    f"{case.name}, {what}: token {position}: log-probability off by {gap:.1e}"
                )


@pytest.mark.parametrize(
    "enable_prefix_caching", [True, False], ids=["prefix-cache", "no-prefix-cache"]
)
@pytest.mark.parametrize("chunk", [1, 5, 16, 512])
def test_one_worker_with_chunked_prefill(case, chunk, enable_prefix_caching) -> None:
    with engine(
        case,
        max_num_batched_tokens=chunk,
        max_num_seqs=min(chunk, 16),
        enable_prefix_caching=enable_prefix_caching,
    ) as llm:
        count = 4 if chunk == 1 else 14
        check(case, llm, f"chunks of {chunk}", count=count)
        if enable_prefix_caching and chunk > 1:  # the prompts are now cached
            check(case, llm, f"chunks of {chunk}, cached", count=count)
            assert metric(llm, "baton:prefix_cache_hits_total") > 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption(case, mode) -> None:
    # Few more blocks than the longest request needs, so that running requests preempt each other.
    with engine(
        case, num_blocks=10, max_num_batched_tokens=64, max_model_len=128, preemption_mode=mode
    ) as llm:
        check(case, llm, f"preemption by {mode}", longest=60)
        check(case, llm, f"preemption by {mode}, two samples", longest=40, n=2)
        assert metric(llm, "baton:num_preemptions_total") > 0, "nothing was preempted"
        assert (metric(llm, "baton:num_swapped_out_blocks_total") > 0) == (mode == "swap")


def test_asynchronous_scheduling(case) -> None:
    with engine(case, max_num_batched_tokens=64, async_scheduling=True) as llm:
        check(case, llm, "asynchronous scheduling")


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)], ids=["tensor-2", "pipeline-2"])
def test_several_workers(case, tensor, pipeline) -> None:
    with engine(
        case,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        max_num_batched_tokens=64,
        num_blocks=24,
    ) as llm:
        check(case, llm, f"tensor {tensor}, pipeline {pipeline}")
        assert metric(llm, "baton:num_preemptions_total") > 0, "nothing was preempted"
