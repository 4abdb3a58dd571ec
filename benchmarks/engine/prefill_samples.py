"""Counts the computed prompt tokens and moved KV bytes of several samples of one prompt.

A prefill engine, a decode engine and a gateway run as processes. The counts come from the engines'
metrics, and do not depend on the machine.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from baton_engine.random_checkpoint import create_checkpoint
from baton_protocol.options.config import ENGINE_HTTP_PORT, GATEWAY_PORT, KVRole
from report import Goal
from support.completions import complete_samples
from support.pods import Pod, pods

Rows = list[dict[str, Any]]
NUM_SAMPLES = (1, 4)
PROMPT_TOKENS = 1001  # with a partial block at the end
OUTPUT_TOKENS = 8
VOCAB_SIZE = 512


def measure(path: Path, repeats: int, scale: float) -> tuple[Rows, list[Goal]]:
    """Count the prompt tokens and KV bytes of n = 4 and of n = 1 with prefill pods."""
    rng = random.Random(3)
    rows: Rows = []
    with tempfile.TemporaryDirectory() as name, pods(Path(name), 42) as group:
        checkpoint = create_checkpoint(Path(name) / "llama", "llama", vocab_size=VOCAB_SIZE)
        prefill = group.engine("prefill", checkpoint, KVRole.PRODUCER)
        decode = group.engine("decode", checkpoint, KVRole.CONSUMER)
        gateway = group.gateway("gateway", checkpoint, {prefill: "prefill", decode: "decode"})
        for pod in (prefill, decode):
            pod.wait_ready(ENGINE_HTTP_PORT)
        gateway.wait_ready(GATEWAY_PORT)
        url = f"http://{gateway.address}:{GATEWAY_PORT}/v1"
        for num_samples in NUM_SAMPLES:
            before = _counts(prefill, decode)
            prompt = [rng.randrange(2, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]
            asyncio.run(complete_samples(url, prompt, num_samples, OUTPUT_TOKENS, seed=1))
            after = _counts(prefill, decode)
            rows.append(
                {"part": "samples through prefill pods", "n": num_samples}
                | {key: round(after[key] - before[key]) for key in after}
            )
    one, four = rows
    tokens, num_bytes = (
        sum(four[key] for key in keys) / sum(one[key] for key in keys)
        for keys in (("computed by prefill", "computed by decode"), ("bytes moved",))
    )
    name = "n = 4 through prefill pods, against n = 1"
    return rows, [
        # Each sample runs the last token of the prompt again, for its logits.
        Goal(f"{name}: prompt tokens computed", tokens, 1.01, "x", at_most=True),
        Goal(f"{name}: KV bytes moved", num_bytes, 1.0, "x", at_most=True),
    ]


def _counts(prefill: Pod, decode: Pod) -> dict[str, float]:
    return {
        "computed by prefill": prefill.metric("baton:prompt_tokens_computed_total"),
        "computed by decode": decode.metric("baton:prompt_tokens_computed_total"),
        "bytes moved": decode.metric("baton:kv_transfer_bytes_received_total"),
    }
