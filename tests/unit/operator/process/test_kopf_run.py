"""`kopf run` runs the handlers without a Lease, for the cluster of $KUBECONFIG."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton_kube.client import connect
from baton_operator.kube.objects import Kube
from pocketkube.control_plane.embedded import EmbeddedControlPlane
from support.operator.operator_process import NAMESPACE, Cluster


@pytest.fixture
def kopf_run(plane: EmbeddedControlPlane, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of `kopf run`, which ends without an error at SIGTERM."""
    environment = {**os.environ, "KUBECONFIG": str(plane.kubeconfig)}
    environment.pop("KUBERNETES_SERVICE_HOST", None)
    log = tmp_path / "log"
    command = [sys.executable, "-m", "kopf", "run", "-m", "baton_operator.handlers"]
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "-n", NAMESPACE], env=environment, stdout=output, stderr=output
        )
    try:
        yield process
        process.terminate()
        assert process.wait(30) == 0, log.read_text()
        assert "Traceback" not in log.read_text(), log.read_text()
        assert "takes no Lease" in log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.mark.usefixtures("kopf_run")
async def test_kopf_run_creates_the_pods_of_a_service(plane: EmbeddedControlPlane) -> None:
    async with connect(plane.kubeconfig) as connection:
        service = Cluster(Kube(connection), "by-kopf-run")
        await service.create(model={"uri": "pvc://models/x"}, decode={"replicas": 2})
        await service.names("decode-0", "decode-1")


@pytest.mark.usefixtures("kopf_run")
async def test_kopf_run_restricts_services(plane: EmbeddedControlPlane) -> None:
    async with connect(plane.kubeconfig) as connection:
        service = Cluster(Kube(connection), "on-a-node")
        await service.create(model={"uri": "file:///models/x"})
        condition = await service.condition("Ready", "False", "InvalidSpec")
        assert "hostPaths does not allow the folder /models/x" in condition["message"]
        assert await service.pods() == {}
