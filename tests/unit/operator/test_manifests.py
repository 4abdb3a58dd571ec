"""The generated manifests, and the check of stale ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from baton_operator.manifests import main

MANIFESTS = Path(__file__).parents[3] / "manifests"


def test_the_manifests_are_up_to_date() -> None:
    assert main(["--check", str(MANIFESTS)]) == 0


def test_check_names_stale_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifests = tmp_path / "manifests"
    shutil.copytree(MANIFESTS, manifests)
    assert main([str(manifests)]) == 0
    assert main(["--check", str(manifests)]) == 0
    (manifests / "crd/llmservices.yaml").write_text("changed")
    (tmp_path / "charts/baton/files/crd-spec.yaml").unlink()
    assert main(["--check", str(manifests)]) == 1
    stderr = capsys.readouterr().err
    assert "manifests/crd/llmservices.yaml" in stderr
    assert "charts/baton/files/crd-spec.yaml" in stderr
