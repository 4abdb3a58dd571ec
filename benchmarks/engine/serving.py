"""Measures `baton serve` beside `vllm serve`, with the same client."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from peers.installation import Installation
from peers.server import MODEL, Load, Server
from workload import checkpoint

from report import Goal

Rows = list[dict[str, Any]]
TARGET_ITL_S = 0.02
TARGET = f"targetItlMilliseconds {TARGET_ITL_S * 1000:g}"
BATON, BATON_TARGET = "Baton", f"Baton, {TARGET}"
#: vLLM's default leaves one core to its scheduler.
VLLM, VLLM_ALL_CORES = "vLLM, default", "vLLM, all cores"
AGAINST = {VLLM: "vllm serve's default", VLLM_ALL_CORES: "vllm serve with all cores"}
LOADS = {
    "1 at once": Load(1, 16),
    "16 at once": Load(16, 160),
    "16 at once, lengths vary by half": Load(16, 160, variation=0.5),
    "64 at once": Load(64, 256),
}
MAIN_LOAD = "16 at once"
KV_CACHE_GIB = 2
NUM_CORES = os.cpu_count() or 1


def measure(peers: Installation, repeats: int, scale: float) -> tuple[Rows, list[Goal]]:
    """Measure latency and throughput of servers in bfloat16, under Poisson arrivals."""
    model = checkpoint(peers.checkpoints / "llama")
    measured: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with _servers(model, peers) as servers:
        for repeat in range(repeats):
            for index, (load_name, full_load) in enumerate(LOADS.items()):
                num_requests = max(4, int(full_load.num_requests * scale))
                load = dataclasses.replace(full_load, num_requests=num_requests)
                seed = 100 * repeat + index
                names = [name for name in servers if name != BATON_TARGET or load.concurrency == 16]
                for name in names[:: 1 if repeat % 2 else -1]:
                    report = servers[name].measure(load, peers.python("vllm"), model, seed)
                    measured.setdefault((load_name, name), []).append(report)
                    tokens_per_s = report["output_throughput"]
                    print(f"  {name}, {load_name}: {tokens_per_s:.1f} tokens/s", flush=True)
        starts = {name: server.start_s for name, server in servers.items()}
    rows: Rows = [
        {"part": f"serving, {load_name}", "way": name} | _row(report)
        for load_name in LOADS
        for name in starts
        for report in measured.get((load_name, name), [])
    ]
    rows += [
        {"part": "start to the first answer", "way": name, "seconds": round(seconds, 1)}
        for name, seconds in starts.items()
    ]
    ours = measured[MAIN_LOAD, BATON_TARGET]
    where = "serving 16 at once"
    goals = []
    for peer, against in AGAINST.items():
        pairs = list(zip(ours, measured[MAIN_LOAD, peer], strict=True))
        throughput, ttft = (
            median(our[key] / their[key] for our, their in pairs)
            for key in ("output_throughput", "mean_ttft_ms")
        )
        goals += [
            Goal(f"{where}: output tokens/s against {against}", throughput, 1.5, "x"),
            Goal(f"{where}: mean TTFT against {against}", ttft, 0.5, "x", at_most=True),
        ]
    return rows, [
        *goals,
        Goal(
            f"{where}: p99 ITL against the mean TPOT, with {TARGET}",
            median(one["p99_itl_ms"] / one["mean_tpot_ms"] for one in ours),
            2.0,
            "x",
            at_most=True,
        ),
        Goal("baton serve: start to the first answer", starts[BATON], 12.0, "s", at_most=True),
    ]


def _row(report: dict[str, Any]) -> dict[str, float]:
    columns = {
        "tokens/s": "output_throughput",
        "TTFT mean, ms": "mean_ttft_ms",
        "TTFT p99, ms": "p99_ttft_ms",
        "TPOT mean, ms": "mean_tpot_ms",
        "ITL p99, ms": "p99_itl_ms",
    }
    return {column: round(report[key], 1) for column, key in columns.items()}


@contextmanager
def _servers(model: Path, peers: Installation) -> Iterator[dict[str, Server]]:
    serve: list[str | Path] = [Path(sys.executable).with_name("baton"), "serve", model]
    serve += ["--served-model-name", MODEL, "--dtype", "bfloat16"]
    serve += ["--kv-cache-memory-bytes", str(KV_CACHE_GIB * 2**30)]
    vllm: list[str | Path] = [peers.python("vllm"), "-m", "vllm.entrypoints.openai.api_server"]
    vllm += ["--model", model, "--served-model-name", MODEL, "--dtype", "bfloat16"]
    limits = ["--max-num-seqs", "64", "--max-model-len", "1024"]
    cache = {"VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB)}
    ways: dict[str, tuple[Sequence[str | Path], dict[str, str]]] = {
        BATON: (serve, {}),
        BATON_TARGET: ([*serve, "--target-itl-s", str(TARGET_ITL_S)], {}),
        VLLM: (vllm, cache),
        VLLM_ALL_CORES: (vllm, cache | {"VLLM_CPU_OMP_THREADS_BIND": f"0-{NUM_CORES - 1}"}),
    }
    servers: dict[str, Server] = {}
    try:
        for name, (command, environment) in ways.items():
            port = _free_port()
            arguments = [*command, *limits, "--port", str(port)]
            servers[name] = Server(arguments, port, peers.logs / f"{name}.log", environment)
            print(f"  {name}: first answer after {servers[name].start_s:.1f} s", flush=True)
        yield servers
    finally:
        for server in servers.values():
            server.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
