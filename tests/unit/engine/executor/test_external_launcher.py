"""ExternalLauncherExecutor under torchrun, with workers without a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton_engine.executor.external_launcher import ExternalLauncherExecutor
from baton_engine.models.errors import ConfigurationError
from baton_protocol.config import KVRole
from support.engine.fake_workers import engine_config
from support.engine.torchrun import run_under_torchrun, run_without_an_agent


@pytest.mark.parametrize("run", [run_under_torchrun, run_without_an_agent])
def test_all_ranks_see_the_output_ranks_tokens_and_every_ranks_results(
    run: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    """With a service key, which is their store's."""
    key = tmp_path / "key"
    key.write_text("k" * 64)
    results = run(2, tmp_path, "fake", 1, 2, str(key))
    for result in results:
        assert result["num_blocks"] == 99, "the least of all ranks"
        assert result["outputs"] == [0, 1, 2, 3]
        assert result["ranks"] == [0, 1]
        kind, text = result["error"]
        assert kind == "WorkerError"
        assert "worker 1 failed in raise_on: KeyError" in text


def test_it_must_be_started_by_torchrun_with_as_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigurationError, match="needs RANK in the environment"):
        ExternalLauncherExecutor(engine_config(), "instance", lambda: None)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    executor = ExternalLauncherExecutor(engine_config(tensor=2), "instance", lambda: None)
    with pytest.raises(ConfigurationError, match="torchrun started 3 ranks"):
        executor.initialize()
    executor.shutdown()


def test_a_key_that_cannot_be_had_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = msgspec.structs.replace(engine_config(tensor=2), service_key_file="/nothing/there")
    executor = ExternalLauncherExecutor(config, "instance", lambda: None)
    with pytest.raises(
        ConfigurationError, match="service_key_file /nothing/there cannot be read"
    ) as error:
        executor.initialize()
    assert error.value.reason == "ServiceKeyInvalid"
    executor.shutdown()


def test_several_ranks_refuse_to_move_kv_blocks_between_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Transfers end when they end: their schedulers would not decide the same any more."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    executor = ExternalLauncherExecutor(
        engine_config(tensor=2, kv_role=KVRole.BOTH), "instance", lambda: None
    )
    with pytest.raises(
        ConfigurationError, match=r"has 2 ranks and kv_transfer\.role is both"
    ) as error:
        executor.initialize()
    assert error.value.reason == "KVTransferInvalid"
    executor.shutdown()
