"""Measures block transfers between two processes of a host, with Baton and with NIXL.

    make bench SUBJECT=kv_transfer [ARGS="--max-mib 256 --repeats 7"]

Each transport runs in its own pair of processes. Baton's UCX and NIXL's UCX have the same settings.
There are two parts:

    tcp       UCX_TLS=tcp: Baton's transports `ucx` and `tcp` are compared with NIXL.
    default   UCX_TLS is not set: Baton's transport `auto`, which selects `shm` on one host, is
              compared with NIXL. NIXL then uses UCX's shared memory.

Each process has its blocks in a random order, so that no two blocks merge. A transfer therefore has
one descriptor per block. A figure is the bytes of all blocks divided by the time of the transfer.
With checksums off, the time ends with DONE. With checksums on, the producer computes checksums and
the consumer verifies them, in overlapping pieces (agent_pair.py).

Baton's agent wakes its process. One NIXL pair polls every 100 us, another every 20 us. Only the
measured pair runs, and all others are stopped. Each repeat begins with another pair. Short
transfers vary most and are repeated more often (REPEATS).

A ratio is NIXL's time divided by Baton's time, as the median over the repeats. Of the ratios to the
two NIXL pairs, the lower one counts.

Two counts show the limit of a transfer with checksums. The first is the CPU time of both processes
divided by the time of the transfer. A value of 2.0 means that two cores were busy. The second is
how often the processes' threads went to sleep.

    copies      At least 1.5 cores were busy. Each byte is summed twice. Each byte is also copied
                twice through a socket, or once by process_vm_readv.
    wake-ups    Fewer cores were busy: the processes wait for each other.

ceilings.py measures the machine's limits. NIXL is measured if `nixl_cu12` is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import statistics
from typing import Any

import ceilings
from agent_pair import NIXL_POLL_S, AgentPair, Sample

from report import Goal, print_table, replace

BLOCK_KIB = (16, 64, 256, 1024, 4096)
NUM_BLOCKS = (1, 16, 256, 1024, 4096)
TLS = {"tcp": "tcp", "default": ""}
#: Part -> transports of Baton. The goals refer to the first one.
OURS = {"tcp": ("ucx", "tcp"), "default": ("auto",)}
#: Part -> smallest shape that the goals count: (KiB of a block, bytes of all blocks).
GOAL_FROM = {"tcp": (64, 4 * 2**20), "default": (0, 0)}
#: (maximum size of a shape in bytes, factor by which its repeats are multiplied).
REPEATS = ((4 * 2**20, 21), (16 * 2**20, 3))
BUSY_PROCESSORS = 1.5
CEILING_BYTES = 64 * 2**20

Row = dict[str, Any]


def measure(
    pairs: dict[str, AgentPair], part: str, shape: tuple[int, int], repeats: int, verify: bool
) -> Row:
    """Measure all pairs with one shape of transfer.

    Args:
        shape: (number of blocks, bytes of a block).
        verify: whether checksums are on.

    Returns:
        A row with the GB/s of each transport and operation, and the ratios to NIXL. With checksums
        the row also has the limits.
    """
    num_bytes = shape[0] * shape[1]
    row: Row = {}
    for op in ("READ", "WRITE"):
        samples: dict[str, list[Sample]] = {library: [] for library in pairs}
        order = list(pairs)
        for repeat in range(repeats + 1):
            for library in order:
                sample = pairs[library].measure(op, verify)
                if repeat:  # the first is for warming up
                    samples[library].append(sample)
            order.append(order.pop(0))
        for library, taken in samples.items():
            row[f"{library} {op}"] = round(
                num_bytes / statistics.median(one.seconds for one in taken) / 1e9, 3
            )
        for ours in OURS[part]:
            ratios = [
                statistics.median(
                    other.seconds / one.seconds
                    for one, other in zip(samples[ours], samples[library], strict=True)
                )
                for library in NIXL_POLL_S
                if library in samples
            ]
            if ratios:
                row[f"{ours} ratio {op}"] = round(min(ratios), 2)
        if verify:
            row |= limit(OURS[part][0], op, samples[OURS[part][0]])
    return row


def limit(name: str, op: str, samples: list[Sample]) -> Row:
    busy = statistics.median(sample.cpu_seconds / sample.seconds for sample in samples)
    return {
        f"{name} {op} processors": round(busy, 2),
        f"{name} {op} sleeps": statistics.median(sample.wakeups for sample in samples),
        f"{name} {op} limit": "copies" if busy >= BUSY_PROCESSORS else "wake-ups",
    }


def goals_of(part: str, rows: list[Row]) -> list[Goal]:
    """Return the goals of `part`, from those `rows` whose shapes count (GOAL_FROM)."""
    ours = OURS[part][0]
    least_kib, least_bytes = GOAL_FROM[part]
    ratios = [
        row[key]
        for row in rows
        if row["block_kib"] >= least_kib
        and row["block_kib"] * 1024 * row["num_blocks"] >= least_bytes
        for key in (f"{ours} ratio READ", f"{ours} ratio WRITE")
        if key in row
    ]
    least = min(ratios, default=None)
    if part == "default":
        return [Goal(f"{ours} over NIXL, checksums on, least of all shapes", least, 1.1, "ratio")]
    shapes = f"{least_bytes // 2**20} MiB and more in blocks of {least_kib} KiB and more"
    name = f"{ours} over NIXL over TCP, checksums on, {shapes}"
    median = statistics.median(ratios) if ratios else None
    return [
        Goal(f"{name}, median", median, 1.0, "ratio"),
        Goal(f"{name}, least", least, 0.8, "ratio"),
    ]


def measure_ceilings(kib: int, max_bytes: int, repeats: int) -> Row:
    block_bytes, num_bytes = kib * 1024, max(kib * 1024, min(max_bytes, CEILING_BYTES))
    row: Row = {
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
    parser = argparse.ArgumentParser(
        description="Throughput of KV block transports between two processes."
    )
    parser.add_argument(
        "--max-mib", type=int, default=256, help="shapes with more MiB in all are not run"
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--block-kib", type=int, nargs="+", default=BLOCK_KIB)
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=list(TLS),
        default=list(TLS),
        help="fewer than all write no result",
    )
    args = parser.parse_args()
    max_bytes = args.max_mib * 2**20
    others = list(NIXL_POLL_S) if importlib.util.find_spec("nixl_cu12") else []
    shapes = [
        (num_blocks, kib * 1024)
        for kib, num_blocks in itertools.product(args.block_kib, NUM_BLOCKS)
    ]
    table: list[Row] = []
    goals: list[Goal] = []
    for part in args.parts:
        pairs = {
            library: AgentPair(library, TLS[part], max_bytes) for library in (*OURS[part], *others)
        }
        for verify in (False, True):
            rows: list[Row] = []
            for num_blocks, block_bytes in shapes:
                num_bytes = num_blocks * block_bytes
                if num_bytes > max_bytes:
                    continue
                for pair in pairs.values():
                    pair.prepare(num_blocks, block_bytes)
                times = next((times for most, times in REPEATS if num_bytes <= most), 1)
                title = f"{part}, checksums {'on' if verify else 'off'}, GB/s"
                row = {"part": title, "block_kib": block_bytes // 1024, "num_blocks": num_blocks}
                rows.append(
                    row
                    | measure(pairs, part, (num_blocks, block_bytes), times * args.repeats, verify)
                )
                print(rows[-1], flush=True)
            table += rows
        goals += goals_of(part, rows)
        for pair in pairs.values():
            pair.close()
    if tuple(args.parts) != tuple(TLS):
        print(*goals, sep="\n")
        return
    table += [measure_ceilings(kib, max_bytes, args.repeats) for kib in args.block_kib]
    print_table(table)
    replace("kv_transfer", table, goals, repeats=args.repeats, max_mib=args.max_mib)


if __name__ == "__main__":
    main()
