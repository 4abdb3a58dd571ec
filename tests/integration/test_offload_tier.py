"""Prefixes restored from host memory give the same greedy tokens as computed ones."""

from __future__ import annotations

from typing import Any

import pytest

from baton_engine import LLM, SamplingParams

VOCAB_SIZE = 1024
NUM_PREFIXES, PREFIX_TOKENS = 6, 70
NUM_TURNS, MAX_TOKENS = 3, 40
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "async": {"async_scheduling": True},
    "swap": {"preemption_mode": "swap", "max_tokens": MAX_TOKENS},
}


@pytest.fixture(scope="module")
def expected(checkpoint) -> list[list[int]]:
    """Return the tokens of all turns without a prefix cache."""
    return generate(checkpoint, max_tokens=MAX_TOKENS, enable_prefix_caching=False)[0]


def prompts(turn: int) -> list[list[int]]:
    """Return prompts that share long prefixes with those of the other turns."""
    return [
        [3 + (7 * prefix + 11 * position) % (VOCAB_SIZE - 3) for position in range(PREFIX_TOKENS)]
        + [5 + turn, 9]
        for prefix in range(NUM_PREFIXES)
    ]


def generate(
    checkpoint, *, max_tokens: int, **options: Any
) -> tuple[list[list[int]], dict[str, float]]:
    """Return the tokens of all turns and the engine's metrics."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    llm = LLM(str(checkpoint), dtype="float32", num_threads=1, max_model_len=128, **options)
    try:
        outputs = [
            list(result.outputs[0].token_ids)
            for turn in range(NUM_TURNS)
            for result in llm.generate(prompts(turn), params, use_tqdm=False)
        ]
        return outputs, {
            metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")
        }
    finally:
        llm.close()


@pytest.mark.parametrize("name", OPTIONS)
def test_restored_prefixes_give_the_same_tokens(checkpoint, expected, name) -> None:
    options = {"max_tokens": 6, **OPTIONS[name]}
    got, metrics = generate(
        checkpoint, num_blocks=12, max_num_seqs=4, offload_memory_bytes=2**24, **options
    )
    assert got == [tokens[: options["max_tokens"]] for tokens in expected]
    assert metrics["baton:offload_blocks_restored_total"] > NUM_PREFIXES
    assert metrics["baton:prompt_tokens_cached_total"] >= NUM_PREFIXES * 64
    if name == "swap":
        assert metrics["baton:num_swapped_in_blocks_total"] > 0, "nothing was swapped"
