"""One local cluster per control plane and session, with the service `demo`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from baton_engine.random_checkpoint import create_checkpoint
from support.service.local_cluster import LocalClusterUnderTest, local_cluster, manifest

ARCHITECTURES = ("llama", "qwen3", "qwen3_moe")
PLANES = ("embedded", "real")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One small checkpoint per architecture."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {arch: create_checkpoint(root / arch, arch, seed=3) for arch in ARCHITECTURES}


@pytest.fixture(scope="session", params=PLANES)
def cluster(
    request: pytest.FixtureRequest, checkpoints: dict[str, Path]
) -> Iterator[LocalClusterUnderTest]:
    with local_cluster(request.param) as cluster:
        cluster.up(
            manifest("demo", checkpoints["qwen3"], gateway={"ingress": {"host": "demo.localhost"}})
        )
        yield cluster
        log = (cluster.home / "logs/operator.log").read_text()
        assert "forbidden" not in log.lower(), (
            f"the operator's roles do not suffice:\n{log[-3000:]}"
        )


@pytest.fixture
def demo(cluster: LocalClusterUnderTest, checkpoints: dict[str, Path]) -> str:
    """Return the name of a Ready service with one prefill and one decode pod.

    Earlier tests may have changed it, so the manifest is applied again.
    """
    cluster.apply(
        manifest("demo", checkpoints["qwen3"], gateway={"ingress": {"host": "demo.localhost"}})
    )
    cluster.wait_ready("demo")
    return "demo"
