"""Fixtures of the engine's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from baton_engine.random_checkpoint import create_checkpoint
from baton_engine.worker import model_runner
from support.engine.engine_process import EngineProcess
from support.engine.step_driver import VOCAB_SIZE


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model, for tests that need no other architecture. They only read it."""
    path = tmp_path_factory.mktemp("checkpoint") / "tiny"
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "vocab_size": VOCAB_SIZE}
    return create_checkpoint(path, "qwen3", seed=3, **sizes)


@pytest.fixture
def one_thread() -> None:
    """Run torch in one thread: tensors are tiny, so more threads only add waits."""
    torch.set_num_threads(1)


@pytest.fixture
def _restore_sampled_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo `support.engine.fake_gpu.defer_tokens` after the test."""
    monkeypatch.setattr(model_runner, "SampledTokens", model_runner.SampledTokens)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., EngineProcess]]:
    engines: list[EngineProcess] = []

    def start_engine(*flags: str, **env: str) -> EngineProcess:
        engines.append(EngineProcess(tmp_path, *flags, **env))
        return engines[-1]

    yield start_engine
    for engine in engines:
        engine.kill()


@pytest.fixture(scope="module")
def shared_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine that the tests of a module only read."""
    engine = EngineProcess(tmp_path_factory.mktemp("engine"))
    engine.wait_ready()
    yield engine
    engine.kill()
