"""The engine benchmark: its parts that need no model, and its arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OCCUPANCY = """
import json, memory, workload
works = workload.sample(scale=0.1)
runs = [memory.occupancy(works, 512, way) for way in (memory.PAGED, memory.RESERVED)]
print(json.dumps([run["waste_percent"] for run in runs]))
"""


def test_requests_with_reserved_memory_waste_more_of_it_than_paged_ones() -> None:
    folders = [str(BENCHMARKS / "engine"), str(BENCHMARKS), *sys.path]
    process = subprocess.run(
        [sys.executable, "-c", OCCUPANCY],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    paged, reserved = json.loads(process.stdout)
    assert 0 < paged < reserved < 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--part", "serving"], "serving needs --peers"),
        (["--peers", "--part", "decode"], "decode is not measured with --peers"),
    ],
)
def test_a_part_is_refused_with_the_option_that_it_does_not_fit(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    process = subprocess.run(
        [sys.executable, BENCHMARKS / "engine" / "bench.py", *arguments],
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *sys.path]), "HOME": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert process.returncode == 2
    assert message in process.stderr
