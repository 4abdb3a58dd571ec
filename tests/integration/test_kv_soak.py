"""Random KV transfers between engines that cancel, die, freeze and corrupt blocks.

A short soak test always runs. The long one runs with
`BATON_SOAK_TRANSFERS=10000 pytest tests/integration/test_kv_soak.py -k long -s`.
See support/kv_transfer/kv_soak.py.
"""

from __future__ import annotations

import importlib.util
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from baton_protocol.options.config import KVRole
from support.kv_transfer.kv_soak import UNEXPECTED, Soak
from support.kv_transfer.kv_soak_engine import EngineSpec

NUM_TRANSFERS = int(os.environ.get("BATON_SOAK_TRANSFERS", "0"))
SEED = int(os.environ.get("BATON_SOAK_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
CHAOS: dict[str, Any] = {"corrupt": 0.01, "cancel": 0.1}


def producer(name: str, transport: str, *heads: int, **options: Any) -> EngineSpec:
    return EngineSpec(name, KVRole.PRODUCER, heads, transport, **{**CHAOS, **options})


def consumer(name: str, transport: str, mode: str, *heads: int, **options: Any) -> EngineSpec:
    return EngineSpec(name, KVRole.CONSUMER, heads, transport, mode, **{**CHAOS, **options})


def run(soak: Soak) -> None:
    """Run the soak test, and print its seed and counts."""
    started = time.monotonic()
    try:
        soak.run()
    finally:
        took_s = time.monotonic() - started
        print(f"BATON_SOAK_SEED={SEED}, {took_s:.0f} s: {dict(sorted(soak.counts.items()))}")
    assert soak.counts["blocks right"]
    assert soak.counts["loads whole"] > soak.counts["loads cut short"]
    # Producers die and are disconnected, but send only valid messages. All engines are compatible.
    assert not any(soak.counts[f"failed: {reason}"] for reason in UNEXPECTED), soak.unexpected


def key_options(folder: Path) -> dict[str, str]:
    (folder / "key").write_text("the service key of the soak")
    return {"service_key_file": str(folder / "key")}


def test_soak(tmp_path: Path) -> None:
    keyed = key_options(tmp_path)
    one_process = [
        producer("p0", "inproc", 2, 2),
        consumer("pull0", "inproc", "pull", 4),
        consumer("push0", "inproc", "push", 1, 3, num_slots=40),
    ]
    apart = [
        [producer("p1", "ucx", 4, **keyed)],
        [
            consumer("pull1", "ucx", "pull", 2, 2, **keyed),
            consumer("push1", "ucx", "push", 4, **keyed),
        ],
    ]
    run(Soak([one_process, *apart], seed=SEED, num_transfers=300, kills=3, freezes=1))


@pytest.mark.skipif(not NUM_TRANSFERS, reason="set BATON_SOAK_TRANSFERS to run it")
@pytest.mark.timeout(NUM_TRANSFERS * 0.2 + 600)
def test_long_soak(tmp_path: Path) -> None:
    keyed = key_options(tmp_path)
    processes = [
        [
            producer("p0", "inproc", 2, 2),
            producer("p1", "inproc", 4, num_slots=60),
            consumer("pull0", "inproc", "pull", 1, 1, 1, 1),
            consumer("push0", "inproc", "push", 3, 1, num_slots=50),
        ],
        [producer("p2", "ucx", 4, **keyed)],
        [producer("p3", "ucx", 2, 2, num_slots=64, **keyed)],
        [consumer("pull1", "ucx", "pull", 4, **keyed)],
        [consumer("push1", "ucx", "push", 4, **keyed)],
        [consumer("pull2", "ucx", "pull", 2, 2, num_slots=48, **keyed)],
        [consumer("push2", "ucx", "push", 1, 3, num_slots=48, **keyed)],
    ]
    if importlib.util.find_spec("nixl_cu12") is not None:
        processes += [
            [producer("p4", "nixl", 4, **keyed)],
            [consumer("pull3", "nixl", "pull", 4, **keyed)],
            [consumer("push3", "nixl", "push", 2, 2, **keyed)],
        ]
    soak = Soak(
        processes,
        seed=SEED,
        num_transfers=NUM_TRANSFERS,
        num_at_a_time=48,
        kills=NUM_TRANSFERS // 150,
        freezes=NUM_TRANSFERS // 150,
    )
    run(soak)
    assert soak.counts["damaged"]
    assert soak.counts["checksum failures"]
    assert soak.counts["loads of another prompt"]
    assert soak.counts["kills"]
    assert soak.counts["freezes"]
