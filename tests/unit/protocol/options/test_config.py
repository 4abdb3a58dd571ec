"""The configuration: its JSON, its compatibility hash, and paths in containers."""

from __future__ import annotations

import msgspec
import pytest

from baton_protocol.options.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    compatibility_hash,
    container_path,
)


def test_configuration_round_trips_through_json_and_refuses_unknown_fields() -> None:
    config = EngineConfig(model=ModelConfig(path="/m"), cache=CacheConfig(num_blocks=7))
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config
    with pytest.raises(msgspec.ValidationError, match="blok_size"):
        msgspec.json.decode(
            b'{"model": {"path": "/m"}, "cache": {"blok_size": 1}}', type=EngineConfig
        )


def test_the_compatibility_hash_depends_on_everything_that_pods_share() -> None:
    files = {"config.json": b"{}", "index.json": b"1"}
    base = compatibility_hash(files, "float32", "L")
    assert base == compatibility_hash(dict(reversed(files.items())), "float32", "L")
    others = [
        compatibility_hash({**files, "config.json": b"{1}"}, "float32", "L"),
        compatibility_hash(files, "bfloat16", "L"),
        compatibility_hash(files, "float32", "M"),
        compatibility_hash(files, "float32", "L", "int8"),
    ]
    assert len({base, *others}) == 5


def test_container_paths_are_mapped_below_the_pod_root(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("POCKETKUBE_POD_ROOT", raising=False)
    assert str(container_path("/models/x")) == "/models/x"
    (tmp_path / "models/x").mkdir(parents=True)
    monkeypatch.setenv("POCKETKUBE_POD_ROOT", str(tmp_path))
    assert container_path("/models/x") == tmp_path / "models/x"
    assert str(container_path("/elsewhere")) == "/elsewhere"
