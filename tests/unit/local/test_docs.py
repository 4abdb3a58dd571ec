"""Documents that repeat what the code says are checked against it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"


def test_the_table_of_kinds_and_verbs_is_the_one_the_server_has():
    command = [sys.executable, "-m", "baton_local.control_plane.embedded.resources"]
    table = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()
    assert table.startswith("| group/version")
    assert table in (DOCS / "local.md").read_text()
