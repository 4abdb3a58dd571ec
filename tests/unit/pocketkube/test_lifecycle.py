"""Processes of a cluster end with their parent."""

import subprocess
import sys
from pathlib import Path

from support.waiting import eventually


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
    eventually(lambda: has_ended(int(done.stdout)), "the end of the component")


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
