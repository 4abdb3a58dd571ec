"""Expert-parallel groups generate the model's tokens while they grow, shrink and lose members."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from baton_engine.random_checkpoint import create_checkpoint
from support.elastic.expert_group import SHAPE, VOCAB_SIZE, ExpertGroup
from support.load import Load, Stream
from support.parity import reference_model
from support.pods import pods
from support.waiting import until


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_checkpoint(
        tmp_path_factory.mktemp("experts") / request.param, request.param, **SHAPE
    )


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> torch.nn.Module:
    return reference_model(checkpoint)


@pytest.fixture
def group(checkpoint: Path, tmp_path: Path) -> Iterator[ExpertGroup]:
    with pods(tmp_path, 30) as processes:
        yield ExpertGroup(processes, checkpoint, num_redundant_experts=1)


def generate(group: ExpertGroup, numbers: list[int], width: int) -> list[Stream]:
    load = Load(
        f"http://{group.gateway.address}:8080",
        width=width,
        vocab_size=VOCAB_SIZE,
        max_tokens=(8, 40),
    )
    return list(asyncio.run(load.replay(numbers)).values())


def test_grows_shrinks_and_recovers(group: ExpertGroup, model: torch.nn.Module) -> None:
    """1 -> 3 -> 2 ranks (the first one leaves), then a member is killed and restarted."""
    group.start(1)
    first = next(iter(group.ranks))
    group.assert_all_right(generate(group, list(range(4)), 4), model, "one rank")
    names = [first, group.add_rank(), group.add_rank()]
    group.scale(names)
    group.assert_all_right(generate(group, list(range(12)), 12), model, "three ranks")
    group.assert_all_right(generate(group, [20], 1), model, "three ranks, two of them idle")
    group.scale(names[1:])
    group.assert_all_right(generate(group, list(range(30, 36)), 6), model, "two ranks")
    group.ranks[names[2]].kill()
    group.wait_for([names[1]], timeout_s=60)
    group.assert_all_right(generate(group, list(range(40, 44)), 4), model, "the survivor")
    group.ranks[names[2]].restart()
    group.wait_for(names[1:], timeout_s=60)
    group.assert_all_right(generate(group, list(range(50, 56)), 6), model, "with the successor")


async def start_six_streams(group: ExpertGroup) -> asyncio.Task[dict[int, Stream]]:
    """Start six long streams, and return once all of them run."""
    url = f"http://{group.gateway.address}:8080"
    load = Load(url, width=6, vocab_size=VOCAB_SIZE, max_tokens=(300, 400))
    streams = asyncio.create_task(load.replay(list(range(6))))
    ranks = group.ranks.values()
    await until(
        lambda: sum(rank.metric("baton:num_requests_running") for rank in ranks) >= 6,
        "six running requests",
        30,
    )
    return streams


@pytest.mark.parametrize(
    "checkpoint", ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.chaos)], indirect=True
)
def test_a_deleted_group_finishes_its_requests_and_exits(
    group: ExpertGroup, model: torch.nn.Module
) -> None:
    """All ranks get SIGTERM at the same time, and exit well before the drain timeout of 30 s."""
    group.start(3)

    async def delete_under_load() -> list[Stream]:
        streams = await start_six_streams(group)
        for rank in group.ranks.values():
            rank.process.send_signal(signal.SIGTERM)
        return list((await streams).values())

    streams = asyncio.run(delete_under_load())
    ended_at = time.monotonic()
    for rank in group.ranks.values():
        assert rank.process.wait(timeout=60) == 0, rank.tail()
    took_s = time.monotonic() - ended_at
    assert took_s < 20, f"{took_s:.1f} s after the last request\n{group.tails()}"
    group.assert_all_right(streams, model, "while the group is deleted")


@pytest.mark.chaos
def test_a_rank_that_hangs_in_a_step_is_removed_and_its_requests_resume(
    checkpoint: Path, model: torch.nn.Module, tmp_path: Path
) -> None:
    """One worker of the rank is frozen, but its engine responds.

    The removal takes the sum of `step_stall_after_s` and `stall_after_s`.
    """
    with pods(tmp_path, 38) as processes:
        group = ExpertGroup(processes, checkpoint, tensor_parallel_size=2)
        group.start(2)
        first, second = group.ranks

        async def hang_under_load() -> list[Stream]:
            streams = await start_six_streams(group)
            worker = psutil.Process(group.ranks[second].process.pid).children()[0]
            worker.suspend()
            try:
                await asyncio.to_thread(group.wait_for, [first], timeout_s=75)
                return list((await streams).values())
            finally:
                worker.resume()

        group.assert_all_right(asyncio.run(hang_under_load()), model, "while a worker hangs")


@pytest.mark.chaos
@pytest.mark.parametrize("num_redundant_experts", [0, 3])
def test_groups_of_every_size_generate_the_models_tokens(
    checkpoint: Path, model: torch.nn.Module, tmp_path: Path, num_redundant_experts: int
) -> None:
    """Greedy and seeded streams on busy and idle ranks. `make elastic` runs this slow test."""
    with pods(tmp_path, 36) as processes:
        group = ExpertGroup(processes, checkpoint, num_redundant_experts=num_redundant_experts)
        group.start(8, timeout_s=240)
        names = sorted(group.ranks)
        for size in (8, 4, 3, 2, 1):
            group.scale(names[-size:])
            for what, numbers, width in (
                ("all busy", range(100 * size, 100 * size + 24), 24),
                ("some idle", range(100 * size + 30, 100 * size + 33), 3),
                ("one stream", range(100 * size + 40, 100 * size + 42), 1),
            ):
                group.assert_all_right(
                    generate(group, list(numbers), width), model, f"{size} ranks, {what}"
                )
