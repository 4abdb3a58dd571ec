"""The README repeats the table of kinds that the code has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[3] / "local" / "pocketkube" / "README.md"


def test_the_table_of_kinds_is_the_one_the_server_has():
    command = [sys.executable, "-m", "pocketkube.apiserver.resources"]
    table = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()
    assert table.startswith("| group/version")
    assert table in README.read_text()
