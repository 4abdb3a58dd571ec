"""Builds of the CPU kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton_kernels.cpu import build, instruction_sets


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder for compiled files, as on an x86 machine."""
    monkeypatch.setattr(instruction_sets, "BUILT", tmp_path)
    monkeypatch.setattr(build, "BUILT", tmp_path)
    x86_64 = instruction_sets.sets_for_machine("x86_64")
    monkeypatch.setattr(instruction_sets, "sets_for_machine", lambda machine="x86_64": x86_64)
    return tmp_path
