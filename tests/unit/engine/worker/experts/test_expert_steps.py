"""Model runners of an expert-parallel group, each with its own requests, against one runner."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from baton_engine.distributed.group import ParallelContext
from baton_engine.distributed.group_errors import GroupBrokenError
from baton_engine.executor.step import (
    GrammarOutput,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from baton_engine.random_checkpoint import create_checkpoint
from baton_engine.worker.experts.generations import ExpertWorker, Generations
from baton_engine.worker.experts.preparation import PreparationState
from baton_engine.worker.memory_profiling import profile_num_blocks
from baton_engine.worker.model_runner import ModelRunner
from baton_protocol.options.config import ParallelConfig
from baton_protocol.sampling_params import SamplingParams
from support.engine.model_cases import DEADLINE_S, Meeting, ThreadGroup, run_threads
from support.engine.ranks.expert_ranks import ThreadNetwork, generation, place_experts
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
from support.waiting import eventually

NUM_LAYERS, NUM_EXPERTS = 3, 8
REPORTING = SamplingParams(
    temperature=0.7,
    seed=5,
    logprobs=2,
    prompt_logprobs=1,
    return_routed_experts=True,
    presence_penalty=0.2,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runners") / "model"
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": NUM_LAYERS,
        "vocab_size": VOCAB_SIZE,
    }
    return create_checkpoint(path, "mixtral", seed=3, **sizes)


class WaveRunner:
    """A rank's runner whose every step is a step of all ranks."""

    def __init__(self, runner: ModelRunner, control: ThreadGroup) -> None:
        self.runner, self.config, self._control = runner, runner.config, control

    def execute_model(self, step: SchedulerOutput) -> None:
        step.wave_tokens = self._vote(step.total_num_scheduled_tokens, has_work=True)[0]
        self.runner.execute_model(step)

    def sample_tokens(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        return self.runner.sample_tokens(grammar)

    def run_dummy_batches_until_all_ranks_end(self) -> None:
        while True:
            wave_tokens, any_has_work = self._vote(0, has_work=False)
            if not any_has_work:
                return
            self.runner.execute_model(SchedulerOutput([], [], {}, [], wave_tokens=wave_tokens))
            assert self.runner.sample_tokens(None) == ModelRunnerOutput()

    def _vote(self, num_tokens: int, has_work: bool) -> tuple[tuple[int, ...], bool]:
        votes = self._control.all_gather(torch.tensor([[num_tokens, has_work]]), dim=0).tolist()
        return tuple(tokens for tokens, _ in votes), any(work for _, work in votes)


def new_runner(path: Path, parallel: ParallelContext | None = None) -> ModelRunner:
    config = msgspec.structs.replace(
        runner_config(path), parallel=ParallelConfig(enable_expert_parallel=True)
    )
    runner = ModelRunner(config, parallel)
    runner.load_model()
    kv_cache = runner.allocate_kv_cache(256, NUM_SWAP_BLOCKS)
    profile_num_blocks(runner)
    runner.warm_up()
    # NaN shows reads of unwritten slots.
    kv_cache.fill_(float("nan"))
    return runner


def commit_first_generation(
    name: str, tensor_rank: int, runner: ModelRunner, network: ThreadNetwork, num_ranks: int
) -> Generations:
    worker = ExpertWorker(
        name,
        tensor_rank,
        runner.loaded.expert_store(),
        runner.spec.compatibility_hash,
        network.join,
        DEADLINE_S,
    )
    generations = Generations(worker)
    names = [f"rank-{rank}" for rank in range(num_ranks)]
    generations.prepare(
        generation(1, names, place_experts(NUM_LAYERS, NUM_EXPERTS, num_ranks, num_redundant=2))
    )
    eventually(
        lambda: generations.preparation().state is PreparationState.PREPARED,
        timeout_s=DEADLINE_S,
        what="all ranks prepare",
    )
    generations.commit("nonce-1")
    return generations


def make_requests(rank: int) -> list[Request]:
    """Return the requests of a rank; later ranks have fewer."""
    return [
        Request(f"{rank}-{n}", prompt, 8, REPORTING if n % 2 else GREEDY)
        for n, prompt in enumerate(random_prompts([1, 40, 17, 9][rank:], seed=rank))
    ]


@pytest.mark.parametrize(("num_ranks", "tensor_size"), [(1, 1), (3, 1), (2, 2)])
def test_ranks_generate_and_report_the_same_as_a_runner_without_a_group(
    checkpoint: Path, num_ranks: int, tensor_size: int
) -> None:
    network = ThreadNetwork()
    controls = [Meeting(num_ranks) for _ in range(tensor_size)]
    tensor_groups = [Meeting(tensor_size) for _ in range(num_ranks)]

    def serve(rank: int, tensor_rank: int) -> list[Request]:
        torch.set_num_threads(1)
        parallel = (
            ParallelContext(ThreadGroup(tensor_groups[rank], tensor_rank))
            if tensor_size > 1
            else None
        )
        runner = new_runner(checkpoint, parallel)
        commit_first_generation(f"rank-{rank}", tensor_rank, runner, network, num_ranks)
        wave = WaveRunner(runner, ThreadGroup(controls[tensor_rank], rank))
        requests = make_requests(rank)
        StepDriver(wave, seed=rank).run(requests, max_chunk=13, join_probability=0.5)
        wave.run_dummy_batches_until_all_ranks_end()
        return requests

    def end() -> None:
        for meeting in (*controls, *tensor_groups):
            meeting.barrier.abort()

    places = [
        (rank, tensor_rank) for rank in range(num_ranks) for tensor_rank in range(tensor_size)
    ]
    results = run_threads([lambda place=place: serve(*place) for place in places], on_error=end)
    for (rank, _), requests in zip(places, results, strict=True):
        expected = make_requests(rank)
        StepDriver(make_runner(checkpoint), seed=rank).run(
            expected, max_chunk=13, join_probability=0.5
        )
        for request, reference in zip(requests, expected, strict=True):
            assert request.generated == reference.generated
            assert request.routed_experts == reference.routed_experts
            for kind in ("logprobs", "prompt_logprobs"):
                found = [entry.logprob for entry in getattr(request, kind)]
                assert found == pytest.approx(
                    [entry.logprob for entry in getattr(reference, kind)], abs=1e-4
                )


def test_a_step_before_the_first_commit_is_refused(checkpoint: Path) -> None:
    driver = StepDriver(new_runner(checkpoint))
    with pytest.raises(RuntimeError, match="no generation has been committed"):
        driver.run([Request("r", [5, 6, 7], 2)])


def test_a_step_of_a_broken_group_samples_nothing_and_can_run_again(checkpoint: Path) -> None:
    """The scheduler drops such a step. The request continues after the next commit."""
    network = ThreadNetwork()
    runner = new_runner(checkpoint)
    generations = commit_first_generation("rank-0", 0, runner, network, 1)
    expected = Request("r", [5, 6, 7], 6)
    StepDriver(make_runner(checkpoint)).run([expected])
    request, driver = Request("r", [5, 6, 7], 6), StepDriver(runner)
    for _ in range(3):
        driver.step([request], max_chunk=24)
    shard = runner.loaded.model.sparse_layers[1][1].shard

    def broken(*_: object) -> torch.Tensor:
        raise GroupBrokenError("a member is gone")

    shard.mix = broken  # type: ignore[method-assign]
    num_generated, num_computed = len(request.generated), request.num_computed
    with pytest.raises(GroupBrokenError, match="a member is gone"):
        driver.step([request], max_chunk=24)
    assert runner.sample_tokens(None) == ModelRunnerOutput()
    assert len(request.generated) == num_generated
    request.num_computed, request.num_placeholders = num_computed, 0
    generations.prepare(generation(2, ["rank-0"], place_experts(NUM_LAYERS, NUM_EXPERTS, 1)))
    eventually(
        lambda: generations.preparation().state is PreparationState.PREPARED,
        timeout_s=DEADLINE_S,
        what="prepares",
    )
    generations.commit("nonce-2")
    while not request.done:
        driver.step([request], max_chunk=24)
    assert request.generated == expected.generated


def test_kv_is_not_reported_as_written_while_the_group_may_break(checkpoint: Path) -> None:
    """A broken group gives wrong hidden states, and wrong KV in all later layers."""
    runner = new_runner(checkpoint)
    commit_first_generation("rank-0", 0, runner, ThreadNetwork(), 1)
    new = NewRequestData("r", [5, 6, 7], [], GREEDY, 0, [0], 0)
    reports: list[str] = []
    runner.execute_model(
        SchedulerOutput([new], [], {"r": 3}, []), lambda: reports.append("written")
    )
    assert len(runner.sample_tokens(None).sampled_token_ids) == 1
    assert not reports
