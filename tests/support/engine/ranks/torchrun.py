"""Run launched_rank.py on loopback, under torchrun or without a launcher's store.

For the tests of executors.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pocketkube.ports import free_ports

WAIT_S = 180.0
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


def run_under_torchrun(num_ranks: int, results: Path, *arguments: object) -> list[dict[str, Any]]:
    """Run the ranks under torchrun and return their results in rank order."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
        *(str(Path(__file__).with_name("launched_rank.py")), str(results), *map(str, arguments)),
    ]
    process = subprocess.run(
        command,
        env=os.environ | ENVIRONMENT,
        timeout=WAIT_S,
        check=False,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    return _written(num_ranks, results)


def run_without_an_agent(num_ranks: int, results: Path, *arguments: object) -> list[dict[str, Any]]:
    """Run the ranks without a launcher's store, and return their results in rank order."""
    [port] = free_ports(1)
    environment = os.environ | {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
    }
    environment |= ENVIRONMENT | {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    command = [
        sys.executable,
        str(Path(__file__).with_name("launched_rank.py")),
        str(results),
        *map(str, arguments),
    ]
    processes = [
        subprocess.Popen(
            command,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=WAIT_S)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return _written(num_ranks, results)


def _written(num_ranks: int, results: Path) -> list[dict[str, Any]]:
    return [json.loads((results / f"{rank}.json").read_text()) for rank in range(num_ranks)]
