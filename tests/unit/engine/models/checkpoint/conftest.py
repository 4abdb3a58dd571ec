"""A small model, and a copy of it that the test may damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from baton_engine.random_checkpoint import create_checkpoint


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_checkpoint(
        tmp_path_factory.mktemp("models") / "qwen3", "qwen3", num_layers=2, vocab_size=300
    )


@pytest.fixture
def checkpoint(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))
