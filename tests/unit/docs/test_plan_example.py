"""The example of docs/start/local.md is what `baton plan` prints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.install.rendered_chart import ROOT

SAMPLE = ROOT / "manifests/samples/experts.yaml"


def test_the_plan_of_one_more_replica(tmp_path: Path) -> None:
    new = tmp_path / "new.yaml"
    new.write_text(SAMPLE.read_text().replace("replicas: 2", "replicas: 3"))
    baton = Path(sys.executable).parent / "baton"
    command = [str(baton), "plan", str(SAMPLE), str(new)]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert f"```\n{printed.strip()}\n```" in (ROOT / "docs/start/local.md").read_text()
