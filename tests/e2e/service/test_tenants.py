"""A restricted operator refuses the attacks of a tenant, and serves their other LLMServices."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from baton_kube.client import Object, connect
from baton_operator import names
from baton_operator.api.crd import custom_resource_definition
from baton_operator.kube.objects import Kube
from pocketkube.control_plane.embedded import EmbeddedControlPlane
from pocketkube.control_plane.real import RealControlPlane
from support.operator.operator_process import start_operator
from support.waiting import until

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
CRD = f"{names.PLURAL}.{names.GROUP}"
MODEL = {"uri": "pvc://models/x"}
#: Specs by name of the service, and the field that the condition names.
ATTACKS: dict[str, tuple[Object, str]] = {
    "host-path": (
        {"decode": {"template": {"spec": {"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}}}},
        "decode.template.spec.volumes[v]",
    ),
    "privileged": (
        {
            "gateway": {
                "template": {
                    "spec": {
                        "containers": [{"name": "gateway", "securityContext": {"privileged": True}}]
                    }
                }
            }
        },
        "gateway.template.spec.containers[gateway].securityContext.privileged",
    ),
    "cache": (
        {"model": {"uri": "hf://o/m", "cache": {"hostPath": "/mnt/cache/../../etc"}}},
        "model.cache.hostPath",
    ),
}


class Tenant:
    """The creator of LLMServices in one namespace."""

    def __init__(self, kube: Kube, namespace: str, log: Path) -> None:
        self.kube, self.namespace, self.log = kube, namespace, log

    async def create(self, name: str, **spec: Any) -> None:
        await self.kube.create(
            {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "metadata": {"name": name, "namespace": self.namespace},
                "spec": {"model": MODEL, **spec},
            }
        )

    async def patch(self, name: str, spec: Object) -> None:
        await self.kube.merge(names.KIND, self.namespace, name, {"spec": spec})

    async def owned(self, kind: str, name: str) -> set[str]:
        """Return the names of a service's objects of this kind."""
        found = await self.kube.list_all(kind, self.namespace, {names.LABEL_SERVICE: name})
        return {obj["metadata"]["name"] for obj in found}

    async def wait_for_pod(self, name: str) -> None:
        async def exists() -> bool:
            return f"{name}-decode-0" in await self.owned("Pod", name)

        await until(exists, f"the decode pod of {name}; {self.log.read_text()[-2000:]}")

    async def wait_for_refusal(self, name: str) -> str:
        """Wait until the service's present spec is refused. Return the message."""

        async def refused() -> str:
            service = await self.kube.read(names.KIND, self.namespace, name)
            assert service is not None
            (ready,) = [
                each
                for each in (service.get("status") or {}).get("conditions", [{"type": "Ready"}])
                if each["type"] == "Ready"
            ]
            is_current = ready.get("observedGeneration") == service["metadata"]["generation"]
            is_refused = is_current and ready["reason"] == "InvalidSpec"
            return str(ready["message"]) if is_refused else ""

        return str(await until(refused, f"{name} refused; {self.log.read_text()[-2000:]}"))


@pytest.fixture
async def tenant(
    control_plane: EmbeddedControlPlane | RealControlPlane, tmp_path: Path
) -> AsyncIterator[Tenant]:
    """A tenant of an operator process that is restricted."""
    namespace, log = f"tenant-{uuid.uuid4().hex[:8]}", tmp_path / "operator.log"
    async with connect(control_plane.kubeconfig) as client:
        kube = Kube(client)
        await client.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
        await client.create(CRDS, custom_resource_definition(rules=False))
        await until(kube.discover, "the CRD to be served")
        flags = ("--http-port", "0", "--namespace", namespace, "--templates", "restricted")
        process = start_operator(control_plane.kubeconfig, log, *flags)
        try:
            yield Tenant(kube, namespace, log)
            process.terminate()
            assert process.wait(20) == 0, log.read_text()[-2000:]
            assert "Traceback" not in log.read_text(), log.read_text()[-3000:]
        finally:
            process.kill()
            process.wait()
            await client.delete(f"{CRDS}/{CRD}")
            await client.delete(f"/api/v1/namespaces/{namespace}")

            async def is_gone() -> bool:
                return not await kube.discover()

            await until(is_gone, "the CRD to be gone")


@pytest.mark.timeout(300)
async def test_attacks_are_reported_and_create_no_pod(tenant: Tenant) -> None:
    for name, (spec, field) in ATTACKS.items():
        await tenant.create(name, **spec)
        message = await tenant.wait_for_refusal(name)
        assert message.startswith(f"spec: {field}")
        assert "the operator's setting" in message
    await tenant.create("fine")
    await tenant.wait_for_pod("fine")
    for name in ATTACKS:
        assert await tenant.owned("Pod", name) == set()
        assert await tenant.owned("Deployment", name) == set()

    # An edit that is refused leaves the pods in service.
    before = await tenant.owned("Pod", "fine")
    spec, _ = ATTACKS["privileged"]
    await tenant.patch("fine", spec)
    await tenant.wait_for_refusal("fine")
    assert await tenant.owned("Pod", "fine") == before
    # A corrected service is created.
    await tenant.patch("host-path", {"decode": {"template": None}})
    await tenant.wait_for_pod("host-path")
