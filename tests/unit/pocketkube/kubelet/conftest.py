"""A kubelet's server with one pod."""

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from pocketkube.certificates import create_certificates
from pocketkube.containers.container_log import ContainerLog
from pocketkube.containers.process import ContainerProcess
from pocketkube.kubelet.kubelet_server import KubeletServer
from support.pocketkube.kubelet_client import Kubelet, client_context


@pytest.fixture
async def kubelet(
    container: tuple[ContainerProcess, ContainerLog], tmp_path: Path
) -> AsyncIterator[Kubelet]:
    process, log = container
    worker: Any = SimpleNamespace(
        pod={"metadata": {"namespace": "ns", "name": "p", "uid": "u"}},
        runners={
            "main": SimpleNamespace(process=process),
            "ended": SimpleNamespace(process=None),
        },
        runtime=SimpleNamespace(
            pod_ip="127.0.0.1", main={"main": SimpleNamespace(container_id="process://some-id")}
        ),
        log=lambda name, previous: (log.path, log),
    )
    cluster = create_certificates(tmp_path / "cluster", [])
    server = KubeletServer("n", {"uid": worker}, cluster.authority.read_bytes())
    port = await server.start("127.0.0.1")
    connector = aiohttp.TCPConnector(ssl=client_context(cluster))
    async with aiohttp.ClientSession(connector=connector) as session:
        yield Kubelet(f"https://127.0.0.1:{port}", session, process)
    await server.stop()
