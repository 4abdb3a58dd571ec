"""Fixtures of the fuzz tests: a small checkpoint and a service key."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from baton_engine.random_checkpoint import create_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "llama"
    return create_checkpoint(folder, "llama", num_layers=2, hidden_size=64, seed=3)


@pytest.fixture(scope="session")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("key") / "key"
    file.write_text(secrets.token_hex(32))
    return str(file)
