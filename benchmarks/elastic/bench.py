"""Measures the scaling of an expert-parallel group under load, compared with a control run.

    make bench SUBJECT=elastic [ARGS="--cycles 10"]

All processes run on this host and are started by tests/support. A seeded load generator keeps 32
streams open through a gateway. During the load the group scales 2 -> 4 -> 3 -> 6 -> 2 ranks,
`--cycles` times. The ranks that leave are drawn at random. The figures of a scaling operation are:

- the seconds of each phase, as the coordinator reports: new ranks start and load, then the commit
- the longest time between two tokens of any stream
- the pause of steps for the commit: the upper bound of the highest bucket with new counts in the
  ranks' histogram

Processes that start on two cores slow down all other processes. Therefore the control run has the
same load on two ranks that stay. Engines without requests start and stop at the same points of each
cycle. The goals refer to the difference between the two runs.

The part "skewed experts" measures an automatic rebalance; see skewed_experts.py.
`--only-skewed-experts` runs this part alone, and keeps the other results.

The benchmark also measures the throughput of groups of 1, 2 and 4 ranks, and the cost of the
exchange before each step. Every token of every stream is checked against `transformers`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import skewed_experts

from baton_engine.random_checkpoint import create_checkpoint
from report import Goal, print_table, replace, write
from support.elastic.expert_group import SHAPE, VOCAB_SIZE, ExpertGroup
from support.load import Load, Stream
from support.parity import assert_right_tokens, reference_model
from support.pods import Pod, Pods, pods

WIDTH = 32
SIZES = (4, 3, 6, 2)
PAUSES = "baton:topology_commit_pause_seconds_bucket"
REST_S = 1.0  #: Pause between two operations.
THROUGHPUT_S = 15.0
#: Published figures of others, on other hardware and with other models.
PUBLISHED = (
    ("vLLM, data-parallel 4 -> 5 (#20775)", "about 55 s; every request gets status 503"),
    ("vLLM, data-parallel 5 -> 4 (#20775)", "about 40 s; likewise"),
    ("vLLM, DeepSeek-V2-Lite, up / down (#43788)", "31 s / 7 s"),
    ("vLLM, 16 <-> 20 ranks on GB200, blocking", "pause of 99.6 s"),
    (
        "vLLM, 16 <-> 20 ranks on GB200, prepared beside, graphs reused",
        "58 s; pause of 0.82 s up, 1.96 s down",
    ),
)


def pause_buckets(ranks: list[Pod]) -> dict[float, float]:
    """Return the histogram of commit pauses of planned changes, summed over `ranks`.

    The result maps the upper bound of a bucket in seconds to its cumulative count.
    """
    counts: dict[float, float] = {}
    for pod in ranks:
        _, body = pod.get(8000, "/metrics")
        for line in body.splitlines():
            if line.startswith(PAUSES) and 'kind="planned"' in line:
                bound = float(line.split('le="')[1].split('"')[0])
                counts[bound] = counts.get(bound, 0.0) + float(line.rsplit(maxsplit=1)[1])
    return counts


def worst_pause_s(before: dict[float, float], after: dict[float, float]) -> float | None:
    """Return an upper bound of the longest pause between two results of `pause_buckets`.

    This is the upper bound of the highest bucket with new counts, in seconds; None without a pause.
    """
    grown = {bound: count - before.get(bound, 0.0) for bound, count in after.items()}
    total = max(grown.values(), default=0.0)
    return (
        min((bound for bound, count in grown.items() if count == total), default=None)
        if total > 0
        else None
    )


async def during(load: Load, work: Callable[[], Any]) -> tuple[Any, float, float]:
    """Run `work` in a thread while `load` runs.

    Returns:
        The result of `work`, the seconds that `work` took, and the longest token gap of a stream
        during this time, in seconds.
    """
    since = time.monotonic()
    result = await asyncio.to_thread(work)
    until = time.monotonic()
    await asyncio.sleep(REST_S)
    gaps = [
        after - before
        for stream in load.streams
        for before, after in zip(stream.times[1:], stream.times[2:], strict=False)
        if after > since and before < until
    ]
    return result, until - since, max(gaps, default=0.0)


def names_of(size: int, group: ExpertGroup, rng: random.Random) -> list[str]:
    """Return the names of the members of a topology with `size` ranks.

    A smaller topology keeps members that are drawn at random. For a larger topology new ranks are
    started.
    """
    names = sorted(group.ranks)
    if size < len(names):
        return rng.sample(names, size)
    return names + [group.add_rank() for _ in range(size - len(names))]


async def scale(group: ExpertGroup, load: Load, cycles: int, rows: list[dict[str, Any]]) -> None:
    rng = random.Random(1)
    for _ in range(cycles):
        for size in SIZES:
            before, pauses = len(group.ranks), pause_buckets(list(group.ranks.values()))

            def operation(size: int = size) -> Any:
                status = group.scale(names_of(size, group, rng))
                return status.operation

            done, took, gap = await during(load, operation)
            pause = worst_pause_s(pauses, pause_buckets(list(group.ranks.values())))
            rows.append(
                {
                    "part": "operations",
                    "operation": f"{before} -> {size}",
                    "seconds": round(took, 2),
                    **{
                        f"{phase}_s": round(seconds, 3)
                        for phase, seconds in (done.seconds if done else {}).items()
                    },
                    "commit_pause_at_most_s": pause,
                    "longest_gap_s": round(gap, 3),
                }
            )
            print(rows[-1], flush=True)


async def control(
    processes: Pods, checkpoint: Path, load: Load, cycles: int, rows: list[dict[str, Any]]
) -> None:
    """Start and stop engines without requests at the times when `scale` would change the ranks."""
    others: list[Pod] = []
    serial = 0
    for _ in range(cycles):
        size = 2
        for next_size in SIZES:

            def change(size: int = size, next_size: int = next_size) -> None:
                nonlocal serial
                for _ in range(next_size, size):
                    others.pop().kill()
                new = []
                for _ in range(size, next_size):
                    serial += 1
                    new.append(processes.engine(f"unrelated-{serial}", checkpoint))
                for pod in new:
                    pod.wait_ready(8000, timeout_s=120)
                others.extend(new)

            _, took, gap = await during(load, change)
            rows.append(
                {
                    "part": "control",
                    "operation": f"{size} -> {next_size}",
                    "seconds": round(took, 2),
                    "longest_gap_s": round(gap, 3),
                }
            )
            print(rows[-1], flush=True)
            size = next_size


async def throughput(group: ExpertGroup, load: Load, size: int) -> dict[str, Any]:
    started, before = time.monotonic(), sum(len(stream.token_ids) for stream in load.streams)
    ranks = list(group.ranks.values())
    steps = [pod.metric("baton:topology_num_steps_total") for pod in ranks]
    exchange = [pod.metric("baton:topology_exchange_seconds_total") for pod in ranks]
    await asyncio.sleep(THROUGHPUT_S)
    seconds = time.monotonic() - started
    tokens = sum(len(stream.token_ids) for stream in load.streams) - before
    num_steps = [
        pod.metric("baton:topology_num_steps_total") - s
        for pod, s in zip(ranks, steps, strict=True)
    ]
    exchanged = [
        pod.metric("baton:topology_exchange_seconds_total") - s
        for pod, s in zip(ranks, exchange, strict=True)
    ]
    per_step = [s / n * 1e3 for s, n in zip(exchanged, num_steps, strict=True) if n]
    return {
        "part": "throughput",
        "ranks": size,
        "tokens_per_s": round(tokens / seconds, 1),
        "steps_per_s": round(max(num_steps) / seconds, 1),
        "exchange_ms_per_step": round(statistics.median(per_step), 3) if per_step else None,
        "exchange_ms_fastest_rank": round(min(per_step), 3) if per_step else None,
    }


async def loaded(group: ExpertGroup, work: Callable[[Load], Any]) -> Load:
    """Run `work` under load, then stop the load. Return the load when its streams have ended."""
    assert group.gateway is not None
    load = Load(f"http://{group.gateway.address}:8080", width=WIDTH, vocab_size=VOCAB_SIZE)
    running = asyncio.create_task(load.run())
    try:
        await asyncio.sleep(2 * REST_S)
        await work(load)
    finally:
        load.stop()
        await running
    return load


def skewed(folder: Path, rows: list[dict[str, Any]]) -> list[Goal]:
    """Measure an automatic rebalance of skewed experts, and append the row."""
    checkpoint = skewed_experts.skewed_checkpoint(folder / "skewed")
    with pods(folder, 41) as processes:
        group = ExpertGroup(
            processes, checkpoint, coordinator_flags=skewed_experts.COORDINATOR_FLAGS
        )
        group.start(2)
        pauses = pause_buckets(list(group.ranks.values()))
        affected: list[Stream] = []

        async def measure(load: Load) -> None:
            row, streams = await skewed_experts.rebalance(group, load)
            affected.extend(streams)
            pause = worst_pause_s(pauses, pause_buckets(list(group.ranks.values())))
            rows.append({**row, "commit_pause_at_most_s": pause})

        load = asyncio.run(loaded(group, measure))
    row = rows[-1]
    row |= {"failed": len(load.failed), "longest_gap_s": round(load.longest_gap_s, 3)}
    print(row, flush=True)
    finished = [stream for stream in affected if stream.finished]
    assert_right_tokens(reference_model(checkpoint), finished, "streams during a rebalance")
    return [
        Goal(
            "load of the busiest rank after a rebalance",
            row["max_over_mean_after"],
            skewed_experts.THRESHOLD,
            "x mean",
            at_most=True,
        ),
        Goal(
            "load of the busiest rank after a rebalance, as a fraction of the load before",
            round(row["max_over_mean_after"] / row["max_over_mean_before"], 3),
            0.95,
            "",
            at_most=True,
        ),
        Goal("failed requests during a rebalance", row["failed"], 0, "requests", at_most=True),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Scaling of an expert-parallel group under load.")
    parser.add_argument("--cycles", type=int, default=10, help="repeats of 2 -> 4 -> 3 -> 6 -> 2")
    parser.add_argument(
        "--only-skewed-experts", action="store_true", help="only the rebalance of skewed experts"
    )
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if args.only_skewed_experts:
        with tempfile.TemporaryDirectory(prefix="baton-elastic-") as folder:
            goals = skewed(Path(folder), rows)
        print_table(rows)
        replace("elastic", rows, goals)
        return
    loads: list[Load] = []
    with tempfile.TemporaryDirectory(prefix="baton-elastic-") as folder:
        checkpoint = create_checkpoint(Path(folder) / "moe", "qwen3_moe", **SHAPE)
        with pods(Path(folder), 40) as processes:
            group = ExpertGroup(processes, checkpoint)
            group.start(2)
            loads.append(
                asyncio.run(loaded(group, lambda load: scale(group, load, args.cycles, rows)))
            )
            loads.append(
                asyncio.run(
                    loaded(
                        group, lambda load: control(processes, checkpoint, load, args.cycles, rows)
                    )
                )
            )
            for size in (1, 2, 4):
                group.scale(names_of(size, group, random.Random(size)))

                async def measure(load: Load, size: int = size) -> None:
                    rows.append(await throughput(group, load, size))
                    print(rows[-1], flush=True)

                loads.append(asyncio.run(loaded(group, measure)))
        skewed_rows: list[dict[str, Any]] = []
        skewed_goals = skewed(Path(folder), skewed_rows)
        model = reference_model(checkpoint)
        failed = sum(len(load.failed) for load in loads)
        for load in loads:
            assert_right_tokens(model, [s for s in load.streams if s.finished], "streams")
    changes = [row for row in rows if row["part"] == "operations"]
    unrelated = max(row["longest_gap_s"] for row in rows if row["part"] == "control")
    up = max(row["longest_gap_s"] for row in changes if row["operation"] in ("2 -> 4", "3 -> 6"))
    down = max(row["longest_gap_s"] for row in changes if row["operation"] in ("4 -> 3", "6 -> 2"))
    pauses = [
        row["commit_pause_at_most_s"]
        for row in changes
        if row["commit_pause_at_most_s"] is not None
    ]
    rows.append(
        {"part": "streams", "streams": sum(len(load.streams) for load in loads), "failed": failed}
    )
    rows += skewed_rows
    rows += [
        {"part": "published by others, other hardware", "system": system, "figure": text}
        for system, text in PUBLISHED
    ]
    print_table(rows)
    goals = [
        Goal("failed requests", failed, 0, "requests", at_most=True),
        Goal(
            "longest gap beyond the control, up", round(up - unrelated, 3), 1.0, "s", at_most=True
        ),
        Goal(
            "longest gap beyond the control, down",
            round(down - unrelated, 3),
            2.0,
            "s",
            at_most=True,
        ),
        Goal(
            "pause of the commit, upper bound", max(pauses, default=None), 0.25, "s", at_most=True
        ),
        *skewed_goals,
    ]
    write("elastic", rows, goals, cycles=args.cycles, width=WIDTH)


if __name__ == "__main__":
    main()
