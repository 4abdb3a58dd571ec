"""The kernel benchmark and tuner run all measurements with tiny sizes in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PARTS = {
    "attention_decode",
    "attention_prefill",
    "moe",
    "kv_write",
    "block_copy",
    "block_checksum",
    "elementwise",
    "sampling",
    "engine_step",
    "cpu_attention",
}


def output_of(script: str, *arguments: str) -> str:
    """Return the output of a script, which must succeed."""
    process = subprocess.run(
        [sys.executable, BENCHMARKS / "kernels" / script, "--quick", *arguments],
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *sys.path]),
            "TRITON_INTERPRET": "1",
            "CUDA_VISIBLE_DEVICES": "",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stdout
    return process.stdout


def test_every_part_of_the_benchmark_runs() -> None:
    """Each part compares its kernels with their references before it measures them."""
    assert set(output_of("bench.py").splitlines()) >= PARTS


@pytest.mark.parametrize("operation", ["norm", "kv_write", "sampling"])
def test_the_tuner_compares_candidates(operation: str) -> None:
    assert "(2 tried)" in output_of("tune.py", "--only", operation)
