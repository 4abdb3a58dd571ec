"""The guide to adding a model, whose example is qwen2: its code is current and its script runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from baton_engine.models.architectures import qwen2
from baton_engine.random_checkpoint import create_checkpoint

GUIDE = Path(__file__).parents[5] / "docs" / "internals" / "adding-a-model.md"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_checkpoint(
        tmp_path_factory.mktemp("models") / "qwen3", "qwen3", num_layers=2, vocab_size=300
    )


def test_the_guide_to_adding_a_model_shows_the_current_code_of_qwen2() -> None:
    assert Path(qwen2.__file__).read_text() in GUIDE.read_text()


def test_the_parity_script_of_the_guide_runs_and_reports_small_differences(original: Path) -> None:
    blocks = re.findall(r"^```bash\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    [script] = [block for block in blocks if "MODEL_DIR" in block]
    done = subprocess.run(
        ["bash", "-e", "-c", script.replace("MODEL_DIR", str(original))],
        cwd=GUIDE.parents[2],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    gaps = re.findall(r"^chunks of \d+: .* differ by (\S+) at most$", done.stdout, re.MULTILINE)
    assert len(gaps) == 2
    assert all(float(gap) < 1e-4 for gap in gaps)
