"""ExternalLauncherExecutor under torchrun, with workers without a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton_engine.executor.external_launcher import ExternalLauncherExecutor
from baton_engine.models.errors import ConfigurationError
from baton_protocol.options.config import KVRole
from support.engine.fake_workers import engine_config
from support.engine.ranks.torchrun import run_under_torchrun, run_without_an_agent


@pytest.mark.parametrize("run", [run_under_torchrun, run_without_an_agent])
def test_all_ranks_get_the_tokens_of_the_output_rank_and_the_results_of_all_ranks(
    run: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    """The ranks have a service key, which their store checks."""
    key = tmp_path / "key"
    key.write_text("k" * 64)
    results = run(2, tmp_path, "fake", 1, 2, str(key))
    for result in results:
        assert result["num_blocks"] == 99, "the smallest of all ranks"
        assert result["outputs"] == [0, 1, 2, 3]
        assert result["ranks"] == [0, 1]
        kind, text = result["error"]
        assert kind == "WorkerError"
        assert "worker 1 failed in raise_on: KeyError" in text


def test_torchrun_must_start_as_many_ranks_as_the_configuration_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_an_unreadable_service_key_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_kv_transfer_with_several_ranks_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every rank has a scheduler. Transfers end at different times, so their steps would differ."""
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
