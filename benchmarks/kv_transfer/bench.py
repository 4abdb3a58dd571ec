"""Throughput of one-sided block transfers between two processes on one host: our ucx transport, NIXL, plain memcpy.

    make bench SUBJECT=kv_transfer [ARGS="--max-mib 1024 --repeats 5"]

Every library runs in a pair of processes of its own, with its own UCX. Blocks are taken in random order on both sides, so
none merge: one descriptor per block. GB/s is bytes of the blocks over the time from posting to DONE, median of the repeats
after one warm-up; the content is compared after every READ. UCX_TLS and the rest of UCX's environment apply to both.
NIXL runs if `nixl_cu12` is installed. memcpy copies the same blocks one by one inside one process: the ceiling.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from report import Goal, write

BLOCK_KIB = (64, 256, 1024)
NUM_BLOCKS = (256, 1024, 4096)
DEADLINE_S = 120.0
POLL_S = 0.0002


def make_agent(library: str, name: str) -> Any:
    """Both libraries share one vocabulary, hence one type."""
    if library == "ucx":
        from baton_kv_transfer.agent import Agent

        return Agent(name, "ucx")
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


def allocate(num_bytes: int) -> np.ndarray:
    words = np.empty(num_bytes // 8, dtype=np.int64)
    words[:] = 0  # touches every page
    return words


def own_blocks(pipe: Connection, library: str, num_bytes: int) -> None:
    agent = make_agent(library, "owner")
    words = allocate(num_bytes)
    words[:] = np.arange(len(words))
    agent.register_memory([(words.ctypes.data, num_bytes, 0, "")], "DRAM")
    pipe.send((agent.get_agent_metadata(), words.ctypes.data))
    pipe.recv()  # until the reader is done


def rows(base: int, num_blocks: int, block_bytes: int) -> list[tuple[int, int, int]]:
    return [(base + i * block_bytes, block_bytes, 0) for i in range(num_blocks)]


def read_and_write(pipe: Connection, results: Connection, library: str, shape: tuple[int, int], repeats: int) -> None:
    num_blocks, block_bytes = shape
    num_bytes = num_blocks * block_bytes
    metadata, remote_base = pipe.recv()
    agent = make_agent(library, "reader")
    words = allocate(num_bytes)
    agent.register_memory([(words.ctypes.data, num_bytes, 0, "")], "DRAM")
    agent.add_remote_agent(metadata)
    local = agent.prep_xfer_dlist("NIXL_INIT_AGENT", rows(words.ctypes.data, num_blocks, block_bytes), "DRAM")
    remote = agent.prep_xfer_dlist("owner", rows(remote_base, num_blocks, block_bytes), "DRAM")
    order = np.random.default_rng(0).permutation(num_blocks).tolist()

    def run(op: str) -> float:
        handle = agent.make_prepped_xfer(op, local, order, remote, order)
        started = time.perf_counter()
        state = agent.transfer(handle)
        while state == "PROC":
            time.sleep(POLL_S)
            state = agent.check_xfer_state(handle)
            if time.perf_counter() - started > DEADLINE_S:
                raise TimeoutError(f"{library} {op} did not end within {DEADLINE_S:g} s")
        seconds = time.perf_counter() - started
        if state != "DONE":
            raise RuntimeError(f"{library} {op} ended in {state}")
        agent.release_xfer_handle(handle)
        return num_bytes / seconds / 1e9

    expected = np.arange(len(words))
    speeds: dict[str, list[float]] = {"READ": [], "WRITE": []}
    for _ in range(repeats + 1):
        words[:] = 0
        speeds["READ"].append(run("READ"))
        if not np.array_equal(words, expected):
            raise RuntimeError(f"{library} READ brought wrong bytes")
        speeds["WRITE"].append(run("WRITE"))
    results.send({op: statistics.median(values[1:]) for op, values in speeds.items()})
    pipe.send("done")


def measure(library: str, shape: tuple[int, int], repeats: int) -> dict[str, float]:
    context = mp.get_context("spawn")
    reader_end, owner_end = context.Pipe()
    results, results_end = context.Pipe(duplex=False)
    owner = context.Process(target=own_blocks, args=(owner_end, library, shape[0] * shape[1]), daemon=True)
    reader = context.Process(
        target=read_and_write, args=(reader_end, results_end, library, shape, repeats), daemon=True
    )
    owner.start()
    reader.start()
    for end in (reader_end, owner_end, results_end):
        end.close()
    try:
        if not results.poll(2 * DEADLINE_S):
            raise TimeoutError(f"{library}: no result within {2 * DEADLINE_S:g} s")
        return dict(results.recv())
    finally:
        for process in (reader, owner):
            process.join(10)
            if process.is_alive():
                process.kill()


def measure_memcpy(shape: tuple[int, int], repeats: int) -> dict[str, float]:
    num_blocks, block_bytes = shape
    source, target = (allocate(num_blocks * block_bytes).reshape(num_blocks, -1) for _ in range(2))
    order = np.random.default_rng(0).permutation(num_blocks).tolist()
    speeds = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        for index in order:
            target[index] = source[index]
        speeds.append(num_blocks * block_bytes / (time.perf_counter() - started) / 1e9)
    speed = statistics.median(speeds[1:])
    return {"READ": speed, "WRITE": speed}


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput of KV block transports between two processes.")
    parser.add_argument("--max-mib", type=int, default=1024, help="skip shapes with more MiB in all")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    libraries: dict[str, Callable[[tuple[int, int], int], dict[str, float]]] = {
        "ucx": lambda shape, repeats: measure("ucx", shape, repeats),
        "nixl": lambda shape, repeats: measure("nixl", shape, repeats),
        "memcpy": measure_memcpy,
    }
    try:
        import nixl_cu12  # noqa: F401
    except ImportError:
        del libraries["nixl"]
    print(f"UCX_TLS={os.environ.get('UCX_TLS', '(default)')}, GB/s, median of {args.repeats}")
    print(
        f"{'block KiB':>9} {'blocks':>6}  "
        + "  ".join(f"{name + ' get':>10} {name + ' put':>10}" for name in libraries)
    )
    table = []
    for kib in BLOCK_KIB:
        for num_blocks in NUM_BLOCKS:
            if kib * num_blocks > args.max_mib * 1024:
                continue
            row = {name: run((num_blocks, kib * 1024), args.repeats) for name, run in libraries.items()}
            table.append({"block_kib": kib, "num_blocks": num_blocks, "gb_per_s": row})
            cells = "  ".join(f"{speeds['READ']:>10.2f} {speeds['WRITE']:>10.2f}" for speeds in row.values())
            print(f"{kib:>9} {num_blocks:>6}  {cells}", flush=True)
    ratios = [
        row["gb_per_s"]["ucx"][op] / row["gb_per_s"]["nixl"][op]
        for row in table
        if "nixl" in row["gb_per_s"]
        for op in ("READ", "WRITE")
    ]
    goal = Goal("ucx over nixl, least over all shapes", min(ratios, default=None), 1.0, "ratio")
    write("kv_transfer", table, [goal], repeats=args.repeats, ucx_tls=os.environ.get("UCX_TLS", "default"), unit="GB/s")


if __name__ == "__main__":
    main()
