"""Run all ranks of a process group as processes, forked from a process that has imported torch.

For the tests of process groups.

Each rank runs the scenario and writes its results to FOLDER/<rank>, one JSON value per line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from baton_engine.distributed import shared_memory_group
from baton_engine.distributed.group import Group
from baton_engine.distributed.process_group import create_group
from baton_engine.distributed.store.socket_store import connect_store
from baton_engine.distributed.store.wire import StoreAddress
from support.waiting import eventually

CPU = torch.device("cpu")


def write(value: Any) -> None:
    print(json.dumps(value), flush=True)


def attempt(action: Callable[[], object]) -> None:
    """Call `action`. Write the type and text of its error, and the seconds until the error."""
    started = time.monotonic()
    try:
        action()
        write(["nothing was raised", "", 0.0])
    except Exception as error:
        write([type(error).__name__, str(error), time.monotonic() - started])


def operations(rank: int, size: int, address: StoreAddress) -> None:
    group = create_group("test", rank, size, connect_store(address, 30), 1, CPU, 30)
    write(type(group).__name__)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        values = torch.arange(6, dtype=dtype).view(2, 3) + rank
        returned = group.all_reduce(values)
        write([returned is values, values.tolist()])
    transposed = torch.full((3, 2), float(rank)).t()
    group.all_reduce(transposed)
    write(transposed.tolist())
    write(group.all_gather(torch.full((2, 1), rank)).tolist())
    write(group.all_gather(torch.full((2, 3), rank).t(), dim=0).tolist())
    large = torch.arange(600_011) % 1000  # more than the buffers of shared memory hold
    gathered = group.all_gather((large + rank).float())
    write(gathered.tolist() == torch.cat([large + r for r in range(size)]).tolist())
    reduced = group.all_reduce(large.float() * (rank + 1))
    write(torch.equal(reduced, large.float() * (size * (size + 1) // 2)))
    if rank == 0:
        group.send(torch.tensor([1.5, 2.5]), size - 1)
        write(group.recv(torch.zeros(2, 2).t(), size - 1).tolist())
    elif rank == size - 1:
        write(group.recv(torch.zeros(2), 0).tolist())
        group.send(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 0)
    else:
        write("bystander")
    group.close()
    group.close()
    attempt(lambda: group.all_reduce(torch.zeros(1)))


def death(rank: int, size: int, address: StoreAddress) -> None:
    """Run a scenario: the last rank dies, and the others form the group of the next generation."""
    store = connect_store(address, 30)
    group = create_group("test", rank, size, store, 1, CPU, 60)
    if rank == size - 1:
        os._exit(0)
    attempt(lambda: group.all_reduce(torch.zeros(4)))
    attempt(lambda: group.recv(torch.zeros(4), size - 1))
    group.close()
    survivors = create_group("test", rank, size - 1, store, 2, CPU, 60)
    write(survivors.all_reduce(torch.ones(1)).tolist())


def operations_that_wait(group: Group, peer: int) -> dict[str, Callable[[], object]]:
    ones = [1] * group.size
    return {
        "all_reduce": lambda: group.all_reduce(torch.zeros(4)),
        "all_gather": lambda: group.all_gather(torch.zeros(4)),
        "all_to_all": lambda: group.all_to_all(torch.zeros(group.size, 4), ones, ones),
        "recv": lambda: group.recv(torch.zeros(4), peer),
    }


def freeze(rank: int, size: int, address: StoreAddress) -> None:
    """Run a scenario: the last rank is frozen, and the others wait until a thread aborts them."""
    store = connect_store(address, 30)
    groups = {
        name: create_group(name, rank, size, store, 1, CPU, 60)
        for name in ("all_reduce", "all_gather", "all_to_all", "recv")
    }
    frozen = int(groups["recv"].all_gather(torch.tensor([os.getpid()]))[-1])
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    await_state(frozen, "T")
    for name, group in groups.items():
        aborted: list[float] = []

        def abort(group: Group = group, aborted: list[float] = aborted) -> None:
            aborted.append(time.monotonic())
            group.abort()
            group.abort()

        thread = threading.Timer(0.3, abort)
        thread.start()
        operation = operations_that_wait(group, size - 1)[name]
        attempt(operation)
        write(time.monotonic() - aborted[0])
        thread.join()
        attempt(operation)
        group.close()
        group.abort()
    if rank == 0:
        store.get("rank 1 is done")
        os.kill(frozen, signal.SIGKILL)
    else:
        store.set("rank 1 is done", "")


def await_state(pid: int, state: str) -> None:
    stat = Path(f"/proc/{pid}/stat")
    eventually(
        lambda: stat.read_text().rpartition(") ")[2][0] == state, f"process {pid} {state}", 30
    )


def kill(rank: int, size: int, address: StoreAddress) -> None:
    """Run a scenario: the last rank is killed while all ranks exchange rows without a pause."""
    group = create_group("test", rank, size, connect_store(address, 30), 1, CPU, 60)
    victim = int(group.all_gather(torch.tensor([os.getpid()]))[-1])
    counts = [100_000] * size
    rows = torch.zeros(sum(counts), 4)
    killed: list[float] = []

    def kill_victim() -> None:
        os.kill(victim, signal.SIGKILL)
        killed.append(time.monotonic())

    if rank == 0:
        threading.Timer(0.3, kill_victim).start()

    def exchange() -> None:
        while True:
            group.all_to_all(rows, counts, counts)

    attempt(exchange)
    write(time.monotonic() - killed[0] if killed else None)


if __name__ == "__main__":
    torch.set_num_threads(1)
    scenario, transport, folder, size, port = *sys.argv[1:4], *map(int, sys.argv[4:])
    members = []
    for rank in range(size):
        if member := os.fork():
            members.append(member)
            continue
        os.dup2(os.open(Path(folder, str(rank)), os.O_WRONLY | os.O_CREAT), sys.stdout.fileno())
        if transport == "gloo" and rank == 1:  # one remote rank makes all members use gloo
            shared_memory_group._on_this_host = lambda path, token_hex: False
        {f.__name__: f for f in (operations, death, freeze, kill)}[scenario](
            rank, size, StoreAddress("127.0.0.1", port)
        )
        sys.exit()
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(member, 0)[1]) for member in members))
