"""Measures an automatic rebalance: a router sends most tokens to few experts of one rank.

The routers of the checkpoint prefer the experts 0, 2, 4 and 6. A new group of two ranks has them
all on the first rank, so the other rank waits for the first one in each layer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from baton_engine.random_checkpoint import create_checkpoint
from baton_protocol.topology import COORDINATOR_HTTP_PORT
from support.elastic.expert_group import VOCAB_SIZE, ExpertGroup
from support.load import Load, Stream
from support.waiting import until

PART = "skewed experts"
THRESHOLD = 1.2
WINDOW_S = 20.0
MAX_MOVE_BYTES = 2 * 2**30
COORDINATOR_FLAGS = (
    f"--rebalance-threshold={THRESHOLD}",
    f"--rebalance-window-s={WINDOW_S}",
    f"--rebalance-max-move-bytes={MAX_MOVE_BYTES}",
)
HOT = (0, 2, 4, 6)
#: Approximate value of input 0 of every router, divided by the norm weight of this input.
CONSTANT = 8.0
#: Approximate difference of the logits of hot experts and other experts.
PREFERENCE = 4.0
THROUGHPUT_S = 15.0
TIMEOUT_S = 300.0
#: Shape of a model in which the experts take most of a step's time.
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "num_layers": 4,
    "num_experts": 16,
    "moe_intermediate_size": 512,
    "vocab_size": VOCAB_SIZE,
    "seed": 11,
}


def skewed_checkpoint(folder: Path) -> Path:
    """Create a checkpoint whose routers choose the experts HOT for most tokens."""
    checkpoint = create_checkpoint(folder, "qwen3_moe", **SHAPE)
    path = checkpoint / "model.safetensors"
    weights = load_file(path)
    # Input 0 has the same value in all tokens, so its router weights act as biases of the logits.
    weights["model.embed_tokens.weight"][:, 0] = CONSTANT
    for name, values in weights.items():
        if name.endswith("mlp.gate.weight"):
            values[list(HOT), 0] += PREFERENCE / CONSTANT
    save_file(weights, path, metadata={"format": "pt"})
    return checkpoint


def coordinator_metric(group: ExpertGroup, sample: str) -> float:
    """Return a sample of the coordinator, such as `name` or `name{label="value"}`."""
    _, body = group.coordinator.get(COORDINATOR_HTTP_PORT, "/metrics")
    return next(
        float(line.removeprefix(f"{sample} "))
        for line in body.splitlines()
        if line.startswith(f"{sample} ")
    )


async def tokens_per_s(load: Load) -> float:
    started, before = time.monotonic(), sum(len(stream.token_ids) for stream in load.streams)
    await asyncio.sleep(THROUGHPUT_S)
    tokens = sum(len(stream.token_ids) for stream in load.streams) - before
    return round(tokens / (time.monotonic() - started), 1)


async def rebalance(group: ExpertGroup, load: Load) -> tuple[dict[str, Any], list[Stream]]:
    """Measure an automatic rebalance under load. Return its figures and the streams during it."""

    async def wait(condition: Callable[[], bool], what: str) -> None:
        try:
            await until(lambda: asyncio.to_thread(condition), what, TIMEOUT_S, every_s=0.2)
        except AssertionError as error:
            error.add_note(group.tails())
            raise

    def metric(name: str) -> float:
        return coordinator_metric(group, f"baton:topology_{name}")

    done = 'operations_total{kind="rebalance",outcome="done"}'
    bytes_before, moves_before = (
        metric("expert_moved_bytes_total"),
        metric("expert_moves_total"),
    )
    speed_before = await tokens_per_s(load)
    assert metric(done) == 0, "the rebalance came before the throughput was measured"
    await wait(lambda: metric(done) > 0, "the rebalance")
    affected = [stream for stream in load.streams if not stream.finished]
    before = metric('rebalance_imbalance{when="before"}')
    speed_after = await tokens_per_s(load)
    await wait(lambda: metric("expert_imbalance") != before, "the window after the rebalance")
    operation = group.topology().operation
    row = {
        "part": PART,
        "max_over_mean_before": round(before, 3),
        "max_over_mean_expected": round(metric('rebalance_imbalance{when="after"}'), 3),
        "max_over_mean_after": round(metric("expert_imbalance"), 3),
        "experts_moved": round(metric("expert_moves_total") - moves_before),
        "bytes_moved": round(metric("expert_moved_bytes_total") - bytes_before),
        "preparing_s": round(operation.seconds["preparing"], 3) if operation else None,
        "tokens_per_s_before": speed_before,
        "tokens_per_s_after": speed_after,
    }
    return row, affected
