"""Processes of a cluster end with their parent."""

import os
import subprocess
import sys
import time
from pathlib import Path


def test_a_component_ends_with_its_parent() -> None:
    child = "from pocketkube.lifecycle import die_with_parent; import time; die_with_parent(); "
    child += "print('up', flush=True); time.sleep(60)"
    parent = (
        "import subprocess, sys; "
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE); "
        "p.stdout.readline(); print(p.pid, flush=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", parent], capture_output=True, text=True, timeout=20, check=True
    )
    pid, deadline = int(done.stdout), time.monotonic() + 60
    while pid in [int(entry) for entry in os.listdir("/proc") if entry.isdigit()] and _state(
        pid
    ) not in ("Z", ""):
        assert time.monotonic() < deadline, f"process {pid} still alive"
        time.sleep(0.02)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
