"""Measures the engine: throughput, batch-1 decode, overhead and KV memory, also beside peers.

    make bench SUBJECT=engine [ARGS="--peers --repeats 5"]

`--quick` shrinks everything (a minute instead of half an hour) and writes no result. `--part NAME`
measures one part, and keeps the results of all others. `--peers` measures the parts beside vLLM,
llama.cpp, OpenVINO and sentence-transformers. It first installs them into a folder, which takes 15
minutes and 6 GB, once. A repeat of all parts beside peers takes 15 minutes. method.md describes the
parts.
"""

from __future__ import annotations

import argparse
import inspect
import math
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import beside_peers
import machine
import memory
import overhead
import prefill_samples
import torch
from engine_runs import Engine
from peers.installation import Installation
from remote import Remote
from transformers_runs import Transformers
from workload import VOCAB_SIZE, Work, checkpoint, num_parameters, sample

import report
from report import Goal

Rows = list[dict[str, Any]]
RUN_TIMEOUT_S = 600.0  #: Timeout of one run of a candidate.
#: A way is not repeated if its first run took this many times the shortest run.
HOPELESS = 10.0


def throughput(path: Path, repeats: int, scale: float) -> tuple[Rows, list[Goal]]:
    """Measure output tokens per second on 64 requests, against the faster way of transformers."""
    works = sample(scale=scale)
    wanted = sum(work.num_output_tokens for work in works)
    engine = Remote(Engine, path, max_num_seqs=64, kv_cache_memory_bytes=3 * 2**30)
    peer, continuous, bounds = (
        Remote(Transformers, path),
        Remote(Transformers, path),
        Remote(machine.Machine),
    )

    def generate_batch() -> float:
        """Return the seconds; infinity after a timeout."""
        try:
            return float(continuous.call("generate_batch", works, timeout_s=RUN_TIMEOUT_S))
        except TimeoutError:
            return math.inf

    ways: dict[str, Callable[[], float]] = {
        "baton": lambda: engine.call("generate", works),
        "transformers generate, sorted batches of 16": lambda: peer.call("generate", works, 16),
        "transformers generate_batch": generate_batch,
    }
    warm_up = [Work(work.prompt[:16], 2) for work in works[:4]]
    engine.call("generate", warm_up)
    peer.call("generate", warm_up, 4)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    gemm: list[dict[str, float]] = []
    for _ in range(repeats):
        gemm.append(bounds.call("gemm_flops"))
        for name, run in ways.items():
            if seconds[name] and seconds[name][0] > HOPELESS * min(
                values[0] for values in seconds.values()
            ):
                continue
            seconds[name].append(run())
            print(f"  {name}: {seconds[name][-1]:.1f} s", flush=True)
    for process in (engine, peer, continuous, bounds):
        process.close()
    _, num_read = num_parameters(path)
    # The model never runs the last token of a request.
    num_computed = sum(work.num_tokens - 1 for work in works)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    rates = {kind: statistics.median(one[kind] for one in gemm) for kind in gemm[0]}
    best_peer = min(value for name, value in median.items() if name != "baton")
    rows: Rows = [
        {
            "part": "throughput",
            "way": name,
            "seconds": round(value, 2) if value < math.inf else f"over {RUN_TIMEOUT_S:g}",
            "runs": len(seconds[name]),
            "output_tokens_per_s": round(wanted / value, 1)
            if value < math.inf
            else f"under {wanted / RUN_TIMEOUT_S:.1f}",
            "gemm_fraction": round(2 * num_read * num_computed / value / max(rates.values()), 3)
            if name == "baton"
            else None,
        }
        for name, value in median.items()
    ]
    rows.append(
        {"part": "GEMM, GFLOP/s", **{kind: round(rate / 1e9, 1) for kind, rate in rates.items()}}
    )
    return rows, [
        Goal(
            "throughput against the better of transformers' two ways",
            best_peer / median["baton"],
            3.0,
            "x",
        )
    ]


def decode(path: Path, repeats: int, scale: float) -> tuple[Rows, list[Goal]]:
    """Measure batch-1 decode against the roofline: read bandwidth / bytes that a token reads."""
    engine, bounds = (
        Remote(Engine, path, max_num_seqs=1, kv_cache_memory_bytes=2**28, async_scheduling=True),
        Remote(machine.Machine),
    )
    _, num_read = num_parameters(path)
    num_tokens = max(8, int(128 * scale))
    prompt = list(range(300, 332))
    engine.call("generate", [Work(prompt, 4)])
    rates, bandwidths = [], []
    # Many short runs, because the available bandwidth changes within minutes.
    for _ in range(3 * repeats):
        bandwidths.append(bounds.call("read_bandwidth"))
        # The difference of two lengths excludes the prefill and the cost of a call.
        short, long = (engine.call("generate", [Work(prompt, 2 + n)]) for n in (0, num_tokens))
        rates.append(num_tokens / (long - short))
    engine.close()
    bounds.close()
    ratios = [
        rate * num_read * 4 / bandwidth for rate, bandwidth in zip(rates, bandwidths, strict=True)
    ]
    row = {
        "part": "decode",
        "tokens_per_s": round(statistics.median(rates), 2),
        "read_bandwidth_gb_s": round(statistics.median(bandwidths) / 1e9, 2),
        "weight_gb_per_token": round(num_read * 4 / 1e9, 3),
    }
    return [row], [
        Goal("batch-1 decode against the memory roofline", statistics.median(ratios), 0.7, "x")
    ]


def engine_overhead(path: Path, repeats: int, scale: float) -> tuple[Rows, list[Goal]]:
    """Measure the engine's own work per request and step, with a model that takes no time."""
    rows = overhead.figures((64, 256, 1024), repeats)
    us = {row["running"]: row["us_per_request_and_step"] for row in rows}
    return rows, [
        Goal(
            "overhead per request at 1,024 running against 64",
            us[1024] / us[64],
            1.5,
            "x",
            at_most=True,
        )
    ]


def kv_memory(path: Path, repeats: int, scale: float) -> tuple[Rows, list[Goal]]:
    """Measure wasted KV memory, and paged against reserved KV in the same memory."""
    works = sample(scale=scale)
    everything = sum(-(-work.num_tokens // memory.BLOCK_SIZE) for work in works) + len(works)
    waste = memory.occupancy(works, everything)
    rows: Rows = [{"part": "kv waste", **waste}]
    # Memory for 8 requests of the maximum length.
    num_blocks = 8 * memory.MAX_MODEL_LEN // memory.BLOCK_SIZE
    paged = memory.occupancy(works, num_blocks)
    reserved = memory.occupancy(works, num_blocks, memory.RESERVED)
    rows += [
        {"part": "paged, same memory", **paged},
        {"part": "reserved maximum, same memory", **reserved},
    ]
    seconds: dict[str, list[float]] = {memory.PAGED: [], memory.RESERVED: []}
    for name, values in seconds.items():
        options = {
            "num_blocks": num_blocks,
            "scheduler_class": name,
            "enable_prefix_caching": False,
        }
        engine = Remote(Engine, path, max_num_seqs=64, **options)
        engine.call("generate", [Work(work.prompt[:16], 2) for work in works[:4]])
        values += [engine.call("generate", works) for _ in range(max(1, repeats - 1))]
        engine.close()
    wanted = sum(work.num_output_tokens for work in works)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    rows += [
        {
            "part": "same memory, real model",
            "way": way,
            "output_tokens_per_s": round(wanted / median[name], 1),
        }
        for way, name in (("paged", memory.PAGED), ("reserved maximum", memory.RESERVED))
    ]
    return rows, [
        Goal("KV memory waste at block size 16", waste["waste_percent"], 4.0, "%", at_most=True)
    ]


def prefix_caching(path: Path, repeats: int, scale: float) -> tuple[Rows, list[Goal]]:
    """Measure prefix caching without hits: prompts that share no block, on and off in turn."""
    works = [Work(work.prompt, max(1, work.num_output_tokens // 8)) for work in sample(scale=scale)]
    engine = Remote(Engine, path, max_num_seqs=64, kv_cache_memory_bytes=3 * 2**30)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    engine.call("generate", works)
    for run in range(5 * repeats):  # noise between runs exceeds a percent
        for enabled in (True, False) if run % 2 else (False, True):
            engine.call("use_prefix_caching", enabled)
            seconds[enabled].append(engine.call("generate", works))
    engine.close()
    ratios = [100 * (on / off - 1) for on, off in zip(seconds[True], seconds[False], strict=True)]
    row = {
        "part": "prefix caching, no hits",
        "on_s": round(statistics.median(seconds[True]), 2),
        "off_s": round(statistics.median(seconds[False]), 2),
        "pairs": len(ratios),
    }
    return [row], [
        Goal("prefix caching's cost at no hits", statistics.median(ratios), 1.0, "%", at_most=True)
    ]


PEERS = Path.home() / ".cache" / "baton" / "peers"
PARTS = {
    "overhead": engine_overhead,
    "decode": decode,
    "throughput": throughput,
    "memory": kv_memory,
    "prefix-caching": prefix_caching,
    "samples": prefill_samples.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--part",
        choices=PARTS | beside_peers.PARTS,
        action="append",
        help="run only this part; may be repeated",
    )
    parser.add_argument(
        "--peers",
        type=Path,
        nargs="?",
        const=PEERS,
        metavar="FOLDER",
        help=f"run only the parts beside other engines, installed in FOLDER ({PEERS})",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="shrink everything")
    parser.add_argument("--checkpoint", type=Path, help="folder that keeps the checkpoint")
    args = parser.parse_args()
    known = beside_peers.PARTS if args.peers else PARTS
    if unknown := [name for name in args.part or () if name not in known]:
        parser.error(f"{unknown[0]} {'is not measured with' if args.peers else 'needs'} --peers")
    scale, repeats = (0.1, 1) if args.quick else (1.0, args.repeats)
    conditions: dict[str, Any] = {"repeats": repeats, "torch": torch.__version__}
    rows: Rows = []
    goals: list[Goal] = []
    with tempfile.TemporaryDirectory() as folder:
        subject: Installation | Path
        if args.peers:
            subject = Installation(args.peers)
        else:
            subject = checkpoint(args.checkpoint or Path(folder) / "llama")
            conditions |= {"parameters": num_parameters(subject)[0], "vocab_size": VOCAB_SIZE}
        for name in args.part or known:
            print(f"{name}: {inspect.getdoc(known[name])}", flush=True)
            part_rows, part_goals = known[name](subject, repeats, scale)
            report.print_table(part_rows)
            rows += part_rows
            goals += part_goals
        if isinstance(subject, Installation):
            conditions |= subject.versions()
    if args.quick:
        report.show(goals)
    else:
        report.replace("engine", rows, goals, **conditions)


if __name__ == "__main__":
    main()
