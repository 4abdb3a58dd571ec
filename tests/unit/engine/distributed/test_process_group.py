"""Process groups of real processes: operations, generations and failures of members."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from baton_engine.distributed.group import LoneGroup
from baton_engine.distributed.group_errors import GroupBrokenError
from baton_engine.distributed.process_group import create_group, create_parallel_context
from baton_engine.distributed.store.socket_store import connect_store
from baton_engine.distributed.store.store_server import open_store
from baton_engine.distributed.store.wire import StoreAddress
from baton_protocol.options.config import ParallelConfig
from baton_protocol.process.fatal import ConfigurationError
from support.engine import ranks

MEMBERS = Path(ranks.__file__).with_name("group_member.py")
WAIT_S = 60.0
CPU = torch.device("cpu")
T = TypeVar("T")


def run_members(scenario: str, transport: str, size: int, folder: Path) -> list[list[Any]]:
    """Run a scenario of `group_member` and return what each rank wrote, by rank."""
    store = open_store("127.0.0.1")
    process = subprocess.Popen(
        [
            sys.executable,
            str(MEMBERS),
            scenario,
            transport,
            str(folder),
            str(size),
            str(store.address.port),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )
    try:
        assert process.wait(WAIT_S) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        store.close()
    return [
        [json.loads(line) for line in (folder / str(rank)).read_text().splitlines()]
        for rank in range(size)
    ]


@pytest.mark.parametrize(
    ("transport", "size"), [("gloo", 3), ("shared memory", 2), ("shared memory", 3)]
)
def test_operations_give_the_same_results_on_every_transport(
    transport: str, size: int, tmp_path: Path
) -> None:
    outputs = run_members("operations", transport, size, tmp_path)
    offset = size * (size - 1) // 2
    total = [[size * v + offset for v in row] for row in ([0, 1, 2], [3, 4, 5])]
    for rank, output in enumerate(outputs):
        (
            kind,
            *reduced,
            transposed,
            gathered,
            gathered_rows,
            gathered_large,
            reduced_large,
            received,
            closed,
        ) = output
        assert kind == {"gloo": "TorchGroup", "shared memory": "SharedMemoryGroup"}[transport]
        assert reduced == [[True, total]] * 3, "all_reduce is in place, in every dtype"
        assert transposed == [[offset] * 3] * 2, "a tensor can be non-contiguous"
        assert gathered == [list(range(size))] * 2
        assert gathered_rows == [[r, r] for r in range(size) for _ in range(3)]
        assert gathered_large
        assert reduced_large
        if rank == 0:
            assert received == [[1, 2], [3, 4]]
        elif rank == size - 1:
            assert received == [1.5, 2.5]
        assert closed[0] == "RuntimeError"
        assert "the group is closed" in closed[1]


@pytest.mark.parametrize("transport", ["gloo", "shared memory"])
def test_a_dead_member_breaks_the_group_and_the_others_form_the_next(
    transport: str, tmp_path: Path
) -> None:
    outputs = run_members("death", transport, 3, tmp_path)
    for rank in (0, 1):
        reduce, recv, again = outputs[rank]
        for (kind, text, seconds), operation in ((reduce, "all_reduce"), (recv, "recv")):
            assert kind == "GroupBrokenError"
            assert f"{operation} in group test, rank {rank} of 3" in text
            assert "a member is gone" in text
            assert "rank 2" in text or "ranks " in text
            assert seconds < 5
        assert again == [2.0]


@pytest.mark.parametrize("transport", ["gloo", "shared memory"])
def test_another_thread_can_abort_a_wait_for_a_frozen_member(
    transport: str, tmp_path: Path
) -> None:
    outputs = run_members("freeze", transport, 3, tmp_path)
    for rank in (0, 1):
        assert len(outputs[rank]) == 4 * 3
        for i, operation in enumerate(("all_reduce", "all_gather", "all_to_all", "recv")):
            (kind, text, waited_s), seconds_since_abort, (kind_after, text_after, took_s) = outputs[
                rank
            ][3 * i : 3 * i + 3]
            assert kind == kind_after == "GroupBrokenError"
            assert f"{operation} in group {operation}, rank {rank} of 3" in text
            assert "the group was aborted" in text or "a member is gone" in text, (
                "the abort of the other rank can come first"
            )
            assert "the group was aborted" in text_after
            assert waited_s > seconds_since_abort or "a member is gone" in text, (
                "the operation had not started before the abort"
            )
            assert seconds_since_abort < 5
            assert took_s < 5


@pytest.mark.parametrize("transport", ["gloo", "shared memory"])
def test_kill_9_of_a_member_during_an_exchange_breaks_the_group_at_once(
    transport: str, tmp_path: Path
) -> None:
    outputs = run_members("kill", transport, 3, tmp_path)
    for rank in (0, 1):
        (kind, text, _), seconds = outputs[rank]
        assert kind == "GroupBrokenError"
        assert f"all_to_all in group test, rank {rank} of 3" in text
        assert "a member is gone" in text
        assert rank == 1 or seconds < 5


def test_operations_fail_when_a_member_has_left() -> None:
    def run(rank: int, address: StoreAddress) -> None:
        group = create_group("test", rank, 2, connect_store(address, WAIT_S), 1, CPU, WAIT_S)
        group.all_reduce(torch.zeros(4))
        if rank == 1:
            group.close()  # rank 0 may not have read all data
            return
        with pytest.raises(GroupBrokenError, match=r"a member is gone \(rank 1 has left\)"):
            group.all_reduce(torch.zeros(4))

    in_threads(2, run)


def in_threads(size: int, run: Callable[[int, StoreAddress], T]) -> list[T]:
    """Run `run(rank, store address)` in a thread per rank and return the results."""
    with contextlib.closing(open_store("127.0.0.1")) as store, ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size), [store.address] * size, timeout=WAIT_S))


def test_the_parallel_context_has_tensor_and_pipeline_groups() -> None:
    def run(rank: int, address: StoreAddress) -> list[object]:
        parallel = ParallelConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
        context = create_parallel_context(parallel, rank, address, 3, CPU, WAIT_S)
        return [
            (context.tensor.rank, context.pipeline.rank),
            (context.is_first_stage, context.is_last_stage),
            context.tensor.all_gather(torch.tensor([rank])).tolist(),
            context.pipeline.all_gather(torch.tensor([rank])).tolist(),
        ]

    assert in_threads(4, run) == [
        [(0, 0), (True, False), [0, 1], [0, 2]],
        [(1, 0), (True, False), [0, 1], [1, 3]],
        [(0, 1), (False, True), [2, 3], [0, 2]],
        [(1, 1), (False, True), [2, 3], [1, 3]],
    ]


def test_a_group_of_one_rank_needs_no_store() -> None:
    assert isinstance(create_group("test", 0, 1, HashStore(), 0, CPU, 1.0), LoneGroup)


def test_a_torch_without_nccl_is_an_invalid_configuration_for_cuda(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(ConfigurationError, match="need NCCL, which this build of torch lacks"):
        create_group("test", 0, 2, HashStore(), 0, torch.device("cuda"), 1.0)
