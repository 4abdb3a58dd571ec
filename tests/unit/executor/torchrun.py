"""Runs launched_rank.py under torchrun, on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

WAIT_S = 180.0


def run_under_torchrun(num_ranks: int, results: Path, *arguments: object) -> list[dict[str, Any]]:
    """What each rank wrote, in rank order."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
        *(str(Path(__file__).with_name("launched_rank.py")), str(results), *map(str, arguments)),
    ]
    process = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=WAIT_S, check=False, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    return [json.loads((results / f"{rank}.json").read_text()) for rank in range(num_ranks)]
