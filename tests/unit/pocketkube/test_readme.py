"""The README's table of kinds is the generated one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[3] / "local" / "pocketkube" / "README.md"


def test_the_readme_has_the_generated_table_of_kinds() -> None:
    command = [sys.executable, "-m", "pocketkube.apiserver.resources"]
    table = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()
    assert table.startswith("| group/version")
    assert table in README.read_text()
