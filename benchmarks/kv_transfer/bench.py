"""Block transfers between two processes of one host: our transports against NIXL, and against what the machine gives.

    make bench SUBJECT=kv_transfer [ARGS="--max-mib 256 --repeats 7"]

Each library runs in a pair of processes of its own, with its own UCX and the same settings of it: with UCX_TLS unset ours is
`auto`, which is `shm` here, with UCX_TLS=tcp it is `ucx`. Blocks are taken in different random orders on both sides, so none
merge: one descriptor per block. A figure is the blocks' bytes over the time of
the whole transfer: `off` from posting to DONE; `on` with every block summed by its producer, moved, and proved by its consumer, in
pieces that overlap (agent_pair.py). Our API wakes who waits; NIXL's is polled, by one pair every 100 us, by another every 20.
Only the pair that is measured runs, the others are stopped. Whose turn is first changes with every repeat; shapes of up to 16 MiB,
whose milliseconds vary most, are repeated three times as often. A ratio, of NIXL's time to ours, is the median of the repeats'
ratios, because the machine may be busy, and the lower of the two pairs', so that the better NIXL counts.
The goal is for every shape with blocks from 64 KiB up, READ and WRITE, with checksums: the table says for each row
whether it is met. Ceilings: ceilings.py. NIXL runs if `nixl_cu12` is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import statistics
from typing import Any

import ceilings
from agent_pair import NIXL_POLL_S, AgentPair

from report import Goal, print_table, write

BLOCK_KIB = (16, 64, 256, 1024, 4096)
NUM_BLOCKS = (1, 16, 256, 1024, 4096)
TLS = {"default": "", "tcp": "tcp"}
OURS = {"default": "auto", "tcp": "ucx"}
"""Our transport that runs beside NIXL with each."""
GOAL_FROM_KIB = 64
SHORT_BYTES = 16 * 2**20
"""Shapes of no more bytes are repeated SHORT_REPEATS times as often."""
SHORT_REPEATS = 3
CEILING_BYTES = 64 * 2**20


def measure(pairs: dict[str, AgentPair], shape: tuple[int, int], repeats: int, proved: bool) -> dict[str, float | None]:
    """GB/s of each library and operation, and how many times as fast as the better of the others ours is.

    Args:
        shape: (number of blocks, bytes of a block).
    """
    num_bytes = shape[0] * shape[1]
    row: dict[str, float | None] = {}
    for op in ("READ", "WRITE"):
        seconds: dict[str, list[float]] = {library: [] for library in pairs}
        order = list(pairs)
        for repeat in range(repeats + 1):
            for library in order:
                measured = pairs[library].seconds(op, proved)
                if repeat:  # the first is for warming up
                    seconds[library].append(measured)
            order.append(order.pop(0))
        for library, values in seconds.items():
            row[f"{library} {op}"] = round(num_bytes / statistics.median(values) / 1e9, 3)
        ratios = [
            statistics.median(other / ours for ours, other in zip(seconds["ours"], values, strict=True))
            for library, values in seconds.items()
            if library != "ours"
        ]
        if ratios:
            row[f"ratio {op}"] = round(min(ratios), 2)
    return row


def judge(row: dict[str, Any]) -> str:
    """What the table says about the goal."""
    missed = [op for op in ("READ", "WRITE") if row.get(f"ratio {op}", 1.0) < 1.0]
    return f"missed: {', '.join(missed)}" if missed else "met"


def measure_ceilings(kib: int, max_bytes: int, repeats: int) -> dict[str, Any]:
    block_bytes, num_bytes = kib * 1024, max(kib * 1024, min(max_bytes, CEILING_BYTES))
    row: dict[str, Any] = {
        "part": "ceilings, GB/s",
        "block_kib": kib,
        "memcpy": ceilings.memcpy(block_bytes, num_bytes, repeats),
        "shared memcpy": ceilings.shared_memcpy(block_bytes, num_bytes, repeats),
        "tcp socket": ceilings.socket_copy(block_bytes, num_bytes, repeats),
    }
    for (name, tls), op in itertools.product(TLS.items(), ("get", "put")):
        row[f"ucx_perftest {op}, {name}"] = ceilings.perftest(op, tls, block_bytes, num_bytes)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput of KV block transports between two processes.")
    parser.add_argument("--max-mib", type=int, default=256, help="shapes with more MiB in all are not run")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--block-kib", type=int, nargs="+", default=BLOCK_KIB)
    parser.add_argument("--tls", nargs="+", choices=list(TLS), default=list(TLS))
    args = parser.parse_args()
    max_bytes = args.max_mib * 2**20
    others = list(NIXL_POLL_S) if importlib.util.find_spec("nixl_cu12") else []
    shapes = [(num_blocks, kib * 1024) for kib, num_blocks in itertools.product(args.block_kib, NUM_BLOCKS)]
    table: list[dict[str, Any]] = []
    goals: list[Goal] = []
    for name in args.tls:
        pairs = {"ours": AgentPair(OURS[name], TLS[name], max_bytes)}
        pairs |= {library: AgentPair(library, TLS[name], max_bytes) for library in others}
        for proved in (False, True):
            part = f"{OURS[name]}, UCX_TLS {name}, checksums {'on' if proved else 'off'}, GB/s"
            rows: list[dict[str, Any]] = []
            for shape in shapes:
                row: dict[str, Any] = {"part": part, "block_kib": shape[1] // 1024, "num_blocks": shape[0]}
                rows.append(row)
                if shape[0] * shape[1] > max_bytes:
                    row["goal"] = f"not run: {shape[0] * shape[1] // 2**20} MiB"
                    continue
                for pair in pairs.values():
                    pair.prepare(*shape)
                times = SHORT_REPEATS if shape[0] * shape[1] <= SHORT_BYTES else 1
                row |= measure(pairs, shape, times * args.repeats, proved)
                if proved and shape[1] >= GOAL_FROM_KIB * 1024:
                    row["goal"] = judge(row)
                print(row, flush=True)
            table += rows
            if proved:
                ratios = [
                    row[f"ratio {op}"]
                    for row, op in itertools.product(rows, ("READ", "WRITE"))
                    if "goal" in row and f"ratio {op}" in row
                ]
                goals.append(
                    Goal(
                        f"{OURS[name]} over NIXL, UCX_TLS {name}, checksums on, least of all shapes",
                        min(ratios, default=None),
                        1.0,
                        "ratio",
                    )
                )
        for pair in pairs.values():
            pair.close()
    table += [measure_ceilings(kib, max_bytes, args.repeats) for kib in args.block_kib]
    print_table(table)
    write("kv_transfer", table, goals, repeats=args.repeats, max_mib=args.max_mib)


if __name__ == "__main__":
    main()
