"""An engine without expert parallelism does not import the room of expert parallelism."""

from __future__ import annotations

import subprocess
import sys


def test_a_worker_is_imported_without_the_experts_room() -> None:
    program = (
        "import sys, baton_engine.worker.worker; "
        "print([name for name in sys.modules if name.startswith('baton_engine.worker.experts')])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr
