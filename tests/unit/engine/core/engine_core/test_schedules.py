"""EngineCore with a real (tiny) model and worker gives the same greedy text in every schedule."""

from __future__ import annotations

from pathlib import Path

from baton_engine.core.engine_core import EngineCore
from baton_engine.executor.uniproc import UniProcExecutor
from baton_protocol.engine_messages import EngineCoreRequest
from baton_protocol.options.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from baton_protocol.sampling_params import SamplingParams

PROMPTS = [
    [(7 * i + 3 * j) % 500 for j in range(length)]
    for i, length in enumerate([1, 15, 16, 17, 40, 90])
]


def make_core(checkpoint: Path, *, num_blocks: int = 64, budget: int = 512) -> EngineCore:
    config = EngineConfig(
        model=ModelConfig(path=str(checkpoint), dtype="float32"),
        cache=CacheConfig(num_blocks=num_blocks),
        scheduler=SchedulerConfig(max_num_batched_tokens=budget),
        device="cpu",
        num_threads=1,
    )
    return EngineCore(config, UniProcExecutor(config, "instance", lambda: None))


def generate(core: EngineCore, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        assert core.add_request(EngineCoreRequest(f"r{index}", prompt, params)) is None
    texts: dict[str, list[int]] = {f"r{index}": [] for index in range(len(prompts))}
    while core.scheduler.has_work:
        for output in core.step():
            texts[output.request_id] += output.new_token_ids
    return list(texts.values())


def test_batching_chunking_prefix_hits_and_preemption_do_not_change_greedy_text(checkpoint) -> None:
    core = make_core(checkpoint)
    alone = [generate(core, [prompt])[0] for prompt in PROMPTS]
    core.reset_prefix_cache()
    assert generate(core, PROMPTS) == alone
    assert generate(core, PROMPTS) == alone
    assert core.get_stats().prefix_cache_hits > 0
    assert generate(make_core(checkpoint, budget=11), PROMPTS) == alone
    tight = make_core(checkpoint, num_blocks=5, budget=64)
    assert generate(tight, [prompt for prompt in PROMPTS if len(prompt) < 80]) == alone[:-1]
    assert tight.get_stats().num_preemptions > 0
    assert tight.get_stats().kv_cache_usage == 0
