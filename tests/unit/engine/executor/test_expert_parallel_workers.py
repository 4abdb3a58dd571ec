"""Expert parallelism with real workers: topology changes, deaths and freezes keep the tokens."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest

from baton_engine.distributed.group_errors import GroupBrokenError
from baton_engine.distributed.store.store_server import open_store
from baton_engine.distributed.store.wire import StoreAddress
from baton_engine.executor.base import Executor, ModelInfo, WorkerDiedError
from baton_engine.executor.multiproc.multiproc_executor import MultiprocExecutor
from baton_engine.executor.step import ModelRunnerOutput, SchedulerOutput
from baton_engine.executor.uniproc import UniProcExecutor
from baton_engine.random_checkpoint import create_checkpoint
from baton_engine.worker.experts.preparation import Preparation, PreparationState
from baton_protocol.topology import Generation, TopologyMember
from support.engine.greedy_steps import (
    NUM_TOKENS,
    PROMPTS,
    generate_in_one_process,
    make_step,
    model_config,
)
from support.engine.ranks.expert_ranks import place_experts
from support.waiting import eventually

WAIT_S = 60.0
DETECTION_S = 5.0
NUM_EXPERTS, NUM_LAYERS = 8, 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": NUM_LAYERS,
        "num_experts": NUM_EXPERTS,
    }
    return create_checkpoint(
        tmp_path_factory.mktemp("experts") / "model", "qwen3_moe", seed=4, **sizes
    )


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> dict[str, list[int]]:
    return generate_in_one_process(model_config(checkpoint))


@dataclass
class Rank:
    """An engine's executor and its requests."""

    name: str
    executor: Executor
    info: ModelInfo
    serves: list[str] = field(default_factory=list)
    generated: dict[str, list[int]] = field(default_factory=dict)
    #: The requests that the next step sends to the workers as new.
    is_new: set[str] = field(default_factory=set)

    def serve(self, request_id: str, generated: Sequence[int] = ()) -> None:
        self.serves.append(request_id)
        self.generated[request_id] = list(generated)
        self.is_new.add(request_id)

    def next_step(self) -> SchedulerOutput:
        """Return a step of the first request that has not ended, or an empty step."""
        request_id = next((r for r in self.serves if len(self.generated[r]) < NUM_TOKENS), None)
        if request_id is None:
            return SchedulerOutput([], [], {}, [])
        generated = self.generated[request_id]
        if request_id not in self.is_new or not generated:
            return make_step(request_id, generated, 0)
        [first] = make_step(request_id, [], 0).new_requests
        new = replace(first, generated_token_ids=generated)
        return SchedulerOutput(
            [new], [], {request_id: len(PROMPTS[request_id]) + len(generated)}, []
        )

    def start(self, step: SchedulerOutput) -> Future[ModelRunnerOutput]:
        self.executor.execute_model(step)
        return self.executor.sample_tokens(None)

    def take(self, output: ModelRunnerOutput) -> None:
        for request_id, token in output.sampled_token_ids.items():
            self.generated[request_id].append(token)
            self.is_new.discard(request_id)


class Ranks:
    """Starts engines and commits generations of them."""

    def __init__(
        self, checkpoint: Path, store: StoreAddress, kind: type[Executor], tensor: int
    ) -> None:
        self.checkpoint, self._store, self._kind, self._tensor = checkpoint, store, kind, tensor
        self._number = 0
        self.all: list[Rank] = []

    def add(self, count: int) -> list[Rank]:
        config = model_config(self.checkpoint, tensor=self._tensor)
        parallel = msgspec.structs.replace(config.parallel, enable_expert_parallel=True)
        added = []
        for _ in range(count):
            name = f"rank-{len(self.all)}"
            executor = self._kind(
                msgspec.structs.replace(config, parallel=parallel), name, lambda: None
            )
            added.append(Rank(name, executor, executor.initialize()))
            self.all.append(added[-1])
        return added

    def generation(self, ranks: Sequence[Rank]) -> Generation:
        self._number += 1
        members = tuple(
            TopologyMember(rank.name, rank.name, "127.0.0.1", 0, 0, 0) for rank in ranks
        )
        placement = place_experts(NUM_LAYERS, NUM_EXPERTS, len(ranks))
        return Generation(self._number, f"nonce-{self._number}", members, placement, *self._store)

    def commit(self, ranks: Sequence[Rank]) -> Generation:
        """Prepare and commit the next generation, with these ranks."""
        generation = self.generation(ranks)
        for rank in ranks:
            rank.executor.collective_rpc("prepare_generation", (generation, None), timeout_s=WAIT_S)
        for rank in ranks:
            wait_prepared(rank, generation)
        for rank in ranks:
            rank.executor.collective_rpc("commit_generation", (generation.nonce,), timeout_s=WAIT_S)
        return generation

    def shutdown(self) -> None:
        for rank in self.all:
            rank.executor.shutdown()


def wait_prepared(rank: Rank, generation: Generation) -> None:
    def prepared() -> bool:
        states: list[Preparation] = rank.executor.collective_rpc("preparation", timeout_s=WAIT_S)
        assert all(state.state is not PreparationState.FAILED for state in states), states
        return all(
            state == Preparation(generation.nonce, PreparationState.PREPARED) for state in states
        )

    eventually(
        prepared, timeout_s=WAIT_S, what=f"{rank.name} prepares generation {generation.number}"
    )


def run_step(ranks: Sequence[Rank]) -> None:
    """Run one step of the wave on all ranks."""
    steps = [rank.next_step() for rank in ranks]
    wave_tokens = tuple(step.total_num_scheduled_tokens for step in steps)
    for step in steps:
        step.wave_tokens = wave_tokens
    futures = [rank.start(step) for rank, step in zip(ranks, steps, strict=True)]
    for rank, future in zip(ranks, futures, strict=True):
        rank.take(future.result(WAIT_S))


def finish(ranks: Sequence[Rank]) -> dict[str, list[int]]:
    while any(len(tokens) < NUM_TOKENS for rank in ranks for tokens in rank.generated.values()):
        run_step(ranks)
    return {request_id: tokens for rank in ranks for request_id, tokens in rank.generated.items()}


def bytes_of_expert(checkpoint: Path) -> int:
    """Return the size of the float32 weights of one expert."""
    config = json.loads((checkpoint / "config.json").read_text())
    return 3 * config["hidden_size"] * config["moe_intermediate_size"] * 4


@pytest.fixture
def make_ranks(checkpoint: Path) -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []
    store = open_store("127.0.0.1")

    def make(kind: type[Executor], tensor: int = 1) -> Ranks:
        made.append(Ranks(checkpoint, store.address, kind, tensor))
        return made[-1]

    yield make
    for ranks in made:
        ranks.shutdown()
    store.close()


@pytest.mark.parametrize(
    ("kind", "tensor"), [(UniProcExecutor, 1), (MultiprocExecutor, 1), (MultiprocExecutor, 2)]
)
def test_ranks_join_and_leave_between_steps(
    kind: type[Executor],
    tensor: int,
    make_ranks: Callable[..., Ranks],
    expected: dict[str, list[int]],
) -> None:
    """Use two ranks, then three, then two; requests that stay on their rank are not affected."""
    ranks = make_ranks(kind, tensor)
    first, second = ranks.add(2)
    assert first.info.expert_bytes == bytes_of_expert(ranks.checkpoint)
    ranks.commit([first, second])
    first.serve("a")
    second.serve("b")
    run_step([first, second])
    run_step([first, second])
    (third,) = ranks.add(1)
    ranks.commit([first, second, third])
    third.serve("c")
    run_step([first, second, third])
    loads = second.executor.collective_rpc("expert_loads", timeout_s=WAIT_S)
    assert [sum(layer) for layer in loads[0].tokens] == [2, 2], (
        "one token of two experts since the commit"
    )
    assert loads.count(loads[0]) == tensor
    ranks.commit([third, second])
    first.executor.collective_rpc("leave_generation", timeout_s=WAIT_S)
    second.serve("a", first.generated.pop("a"))
    assert finish([third, second]) == expected


def test_experts_are_copied_between_engines(
    make_ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture
) -> None:
    """A joining rank receives its experts over the weight group and reads none from disk."""
    caplog.set_level(logging.INFO, "baton_engine.worker.experts.generations")
    ranks = make_ranks(UniProcExecutor)
    ranks.commit(ranks.add(2))
    ranks.add(1)
    ranks.commit(ranks.all)
    line = next(
        line
        for line in caplog.messages
        if line.startswith("generation 2 prepared") and "rank 2 of 3" in line
    )
    assert line.endswith("kept: 0, received from other ranks: 6, read from the checkpoint: 0"), (
        "three slots in each of two layers"
    )


def test_the_death_of_a_worker_breaks_the_step_and_the_other_ranks_continue(
    make_ranks: Callable[..., Ranks], expected: dict[str, list[int]]
) -> None:
    ranks = make_ranks(MultiprocExecutor)
    first, second, lost = ranks.add(3)
    ranks.commit([first, second, lost])
    first.serve("a")
    second.serve("b")
    lost.serve("c")
    run_step([first, second, lost])
    futures = start_without([first, second], lost)
    os.kill(lost.executor.worker_pids[0], signal.SIGKILL)
    assert_broken_in_time(futures)
    ranks.commit([first, second])
    first.serve("c", lost.generated.pop("c"))
    ranks.all.remove(lost)
    lost.executor.shutdown()
    assert finish([first, second]) == expected


def test_all_tensor_ranks_drop_a_step_that_one_of_them_cannot_finish(
    make_ranks: Callable[..., Ranks], expected: dict[str, list[int]]
) -> None:
    """The workers of the lost rank die at different times; those of the other rank must agree."""
    ranks = make_ranks(MultiprocExecutor, 2)
    first, lost = ranks.add(2)
    ranks.commit([first, lost])
    first.serve("a")
    run_step([first, lost])
    futures = start_without([first], lost)
    os.kill(lost.executor.worker_pids[1], signal.SIGKILL)
    with pytest.raises(WorkerDiedError):
        lost.executor.collective_rpc("preparation", timeout_s=WAIT_S)
    first.executor.interrupt()
    assert_broken_in_time(futures)
    ranks.all.remove(lost)
    lost.executor.shutdown()
    ranks.commit([first])
    first.serve("b")
    first.serve("c")
    assert finish([first]) == expected


@pytest.mark.parametrize("kind", [UniProcExecutor, MultiprocExecutor])
def test_a_step_that_waits_for_a_rank_without_response_can_be_interrupted(
    kind: type[Executor], make_ranks: Callable[..., Ranks], expected: dict[str, list[int]]
) -> None:
    ranks = make_ranks(kind)
    first, silent = ranks.add(2)
    generation = ranks.commit([first, silent])
    first.serve("a")
    futures = start_without([first], silent)
    first.executor.interrupt("of another generation")
    with pytest.raises(TimeoutError):
        futures[0].result(0.5)
    first.executor.interrupt(generation.nonce)
    assert_broken_in_time(futures)
    with pytest.raises(GroupBrokenError):
        start_without([first], silent)[0].result(DETECTION_S)
    ranks.commit([first])
    first.executor.interrupt(generation.nonce)
    first.serve("b")
    first.serve("c")
    assert finish([first]) == expected


def start_without(ranks: Sequence[Rank], absent: Rank) -> list[Future[ModelRunnerOutput]]:
    """Start a step that one rank does not join."""
    steps = [rank.next_step() for rank in ranks]
    for step in steps:
        step.wave_tokens = (*(each.total_num_scheduled_tokens for each in steps), 1)
    assert absent not in ranks
    return [rank.start(step) for rank, step in zip(ranks, steps, strict=True)]


def assert_broken_in_time(futures: Sequence[Future[ModelRunnerOutput]]) -> None:
    started = time.monotonic()
    for future in futures:
        with pytest.raises(GroupBrokenError):
            future.result(WAIT_S)
    assert time.monotonic() - started < DETECTION_S
