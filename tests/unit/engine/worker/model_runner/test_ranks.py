"""Model runners of tensor-parallel and pipeline-parallel ranks against one runner."""

from __future__ import annotations

import queue
from pathlib import Path

import msgspec
import pytest

from baton_engine.distributed.group import ParallelContext
from baton_engine.executor.step import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from baton_engine.random_checkpoint import create_checkpoint
from baton_engine.worker.memory_profiling import profile_num_blocks
from baton_engine.worker.model_runner import ModelRunner
from baton_protocol.options.config import CacheConfig, CompilationConfig
from baton_protocol.sampling_params import SamplingParams
from support.engine.fake_gpu import RecordedRuns
from support.engine.model_cases import run_ranks
from support.engine.step_driver import (
    GREEDY,
    NUM_SWAP_BLOCKS,
    VOCAB_SIZE,
    Request,
    StepDriver,
    make_runner,
    random_prompts,
    runner_config,
)

DEADLINE_S = 60.0
EAGER = CompilationConfig(enforce_eager=True)
GRAPHS = CompilationConfig(
    mode="eager", cudagraph_mode="full_and_piecewise", capture_sizes=(1, 3, 16)
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks") / "qwen3_moe"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 3, "vocab_size": VOCAB_SIZE}
    return create_checkpoint(path, "qwen3_moe", seed=3, **sizes)


class RankRunner:
    """A rank's runner that returns the last rank's outputs, as an executor does.

    All ranks run the same steps.
    """

    def __init__(
        self, runner: ModelRunner, outputs: list[queue.Queue[ModelRunnerOutput]], rank: int
    ) -> None:
        self.runner, self.config = runner, runner.config
        self._outputs, self._rank = outputs, rank

    def execute_model(self, step: SchedulerOutput) -> None:
        self.runner.execute_model(step)

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        own = self.runner.sample_tokens(grammar)
        if self._rank == len(self._outputs) - 1:
            for others in self._outputs:
                others.put(own)
        elif not self.runner.parallel.is_last_stage:
            assert own == ModelRunnerOutput()
        output = self._outputs[self._rank].get(timeout=DEADLINE_S)
        if self.runner.parallel.is_last_stage:
            assert own.sampled_token_ids == output.sampled_token_ids, (
                "tensor ranks sampled different tokens"
            )
        return output


def make_requests() -> list[Request]:
    reporting = SamplingParams(
        temperature=0.7,
        seed=5,
        logprobs=2,
        prompt_logprobs=1,
        return_routed_experts=True,
        presence_penalty=0.2,
    )
    return [
        Request(str(n), prompt, 10, reporting if n % 2 else GREEDY)
        for n, prompt in enumerate(random_prompts([1, 40, 17, 9]))
    ]


@pytest.mark.parametrize(
    ("tensor_size", "pipeline_size", "compilation"),
    [(1, 2, EAGER), (1, 3, EAGER), (2, 1, EAGER), (2, 2, EAGER), (2, 1, GRAPHS), (1, 2, GRAPHS)],
)
def test_ranks_generate_and_report_the_same_as_one_runner(
    checkpoint: Path,
    tensor_size: int,
    pipeline_size: int,
    compilation: CompilationConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = make_requests()
    StepDriver(make_runner(checkpoint), seed=2).run(expected, max_chunk=13, join_probability=0.5)
    if compilation is GRAPHS:
        monkeypatch.setattr(
            "baton_engine.worker.loaded_model.graph_backend", lambda device: RecordedRuns()
        )
    outputs: list[queue.Queue[ModelRunnerOutput]] = [
        queue.Queue() for _ in range(tensor_size * pipeline_size)
    ]

    def serve(parallel: ParallelContext) -> list[Request]:
        runner = ModelRunner(
            msgspec.structs.replace(runner_config(checkpoint), compilation=compilation), parallel
        )
        runner.load_model()
        kv_cache = runner.allocate_kv_cache(256, NUM_SWAP_BLOCKS)
        assert kv_cache[0].nbytes == runner.spec.kv_cache_layout(1).block_nbytes
        runner.warm_up()
        kv_cache.fill_(float("nan"))
        rank = parallel.pipeline.rank * tensor_size + parallel.tensor.rank
        requests = make_requests()
        driver = StepDriver(
            RankRunner(runner, outputs, rank), seed=2, send_token_ids=pipeline_size > 1
        )
        driver.run(requests, max_chunk=13, join_probability=0.5)
        return requests

    for requests in run_ranks(serve, tensor_size, pipeline_size):
        for request, reference in zip(requests, expected, strict=True):
            assert request.generated == reference.generated
            assert request.routed_experts == reference.routed_experts
            assert [entry.token_id for entry in request.prompt_logprobs] == request.prompt[
                1 : len(request.prompt)
            ] * (request.params.prompt_logprobs is not None)
            for kind in ("logprobs", "prompt_logprobs"):
                found = [entry.logprob for entry in getattr(request, kind)]
                assert found == pytest.approx(
                    [entry.logprob for entry in getattr(reference, kind)], abs=1e-4
                )


def test_the_memory_budget_of_an_engine_holds_as_many_blocks_with_any_number_of_ranks(
    checkpoint: Path,
) -> None:
    """Each of four ranks holds half the heads and half the layers of a block."""
    cache = CacheConfig(swap_memory_bytes=8 * 2**20)  # the default depends on the free memory
    config = msgspec.structs.replace(runner_config(checkpoint), cache=cache)
    alone = profile_num_blocks(ModelRunner(config))
    assert min(alone) > 0

    def profile(parallel: ParallelContext) -> tuple[int, int]:
        return profile_num_blocks(ModelRunner(config, parallel))

    assert run_ranks(profile, tensor_size=2, pipeline_size=2) == [alone] * 4
