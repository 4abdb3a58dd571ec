"""An engine without expert parallelism does not import its package."""

from __future__ import annotations

import subprocess
import sys


def test_the_import_of_the_worker_does_not_import_the_experts_package() -> None:
    program = (
        "import sys, baton_engine.worker.worker; "
        "print([name for name in sys.modules if name.startswith('baton_engine.worker.experts')])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr
