"""The checkpoint of chaos tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton_engine.random_checkpoint import create_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_checkpoint(tmp_path_factory.mktemp("chaos") / "tiny", "llama", seed=5)
