"""An API server and an operator process per module."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from baton_kube.client import connect
from baton_operator.api.crd import custom_resource_definition
from baton_operator.kube.objects import Kube
from pocketkube.control_plane.embedded import EmbeddedControlPlane
from pocketkube.control_plane.real import RealControlPlane, find_assets
from pocketkube.ports import free_ports
from support.operator.operator_process import RESYNC_S, Operator, install, start_operator
from support.waiting import until


@pytest.fixture(scope="module")
def kubeconfigs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Kubeconfigs of `admin` and of `operator`, for an API server without controllers."""
    assets = find_assets()
    assert assets
    plane = RealControlPlane(
        assets,
        tmp_path_factory.mktemp("control-plane"),
        service_network="127.96.0.0/16",  # tests listen on a Service's address in place of its pods
        apiserver_flags=(
            "--disable-admission-plugins=ServiceAccount",  # its controller does not run
            "--enable-admission-plugins=OwnerReferencesPermissionEnforcement",
        ),
        has_controllers=False,
    )
    plane.start()
    try:
        operator = asyncio.run(install(plane.kubeconfig))
        yield {"admin": plane.kubeconfig, "operator": operator}
    finally:
        plane.stop()


@pytest.fixture(scope="module")
def operator(
    kubeconfigs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Operator]:
    log = tmp_path_factory.mktemp("operator") / "log"
    [port] = free_ports(1)
    flags = ("--http-port", str(port), "--resync", str(RESYNC_S))
    process = start_operator(kubeconfigs["operator"], log, *flags)
    try:
        yield Operator(port)
        assert process.poll() is None, f"the operator ended:\n{log.read_text()[-3000:]}"
        process.terminate()
        assert process.wait(20) == 0, log.read_text()[-3000:]
        assert "Traceback" not in log.read_text(), log.read_text()
        assert "forbidden: user" not in log.read_text().lower(), log.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.fixture
async def kube(kubeconfigs: dict[str, Path], operator: Operator) -> AsyncIterator[Kube]:
    async with connect(kubeconfigs["admin"]) as connection:
        client = Kube(connection)
        await client.discover()
        yield client


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedControlPlane]:
    """An embedded control plane with the CRD."""
    plane = EmbeddedControlPlane(tmp_path_factory.mktemp("plane"))
    plane.start(timeout_s=60)
    try:
        asyncio.run(_create_definition(plane.kubeconfig))
        yield plane
    finally:
        plane.stop()


async def _create_definition(kubeconfig: Path) -> None:
    async with connect(kubeconfig) as client:
        await client.create(
            "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", custom_resource_definition()
        )
        await until(Kube(client).discover, "the CRD to be served")
