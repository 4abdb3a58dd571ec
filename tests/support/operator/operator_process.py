"""Run the operator process on a real kube-apiserver, with exactly the rights of its manifests.

For the tests of the operator process.

Tests write the status of objects, as the kubelet and the Deployment controller do.
"""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton_kube.client import Object, connect
from baton_operator.kube.objects import Kube
from baton_operator.names import GROUP
from pocketkube.control_plane.real import find_assets
from pocketkube.kubeconfig import write_account_kubeconfig
from support.waiting import until

DEADLINE_S = 60.0
RESYNC_S = 0.5
NAMESPACE = "default"
MANIFESTS = Path(__file__).parents[3] / "manifests"

needs_api_server = pytest.mark.skipif(
    find_assets() is None,
    reason="no kube-apiserver: run `make control-plane` or set KUBEBUILDER_ASSETS",
)


async def install(admin: Path) -> Path:
    """Apply the CRD, the account and the cluster-wide RBAC of manifests/, as an administrator does.

    Returns:
        The path of a kubeconfig for the operator's ServiceAccount, in the folder of `admin`.
    """
    accounts = "/api/v1/namespaces/baton-system/serviceaccounts"
    paths = {
        "Namespace": "/api/v1/namespaces",
        "ServiceAccount": accounts,
        "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
        "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
        "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    }
    async with connect(admin) as connection:
        kube = Kube(connection)
        for file in sorted(MANIFESTS.glob("*/*.yaml")):
            for obj in yaml.safe_load_all(file.read_text()):
                if path := paths.get(obj["kind"]):
                    await kube.client.create(path, obj)
        await until(kube.discover, "the CRD to be served")
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        made = await kube.client.create(f"{accounts}/baton-operator/token", request)
    return write_account_kubeconfig(
        admin, admin.with_name("operator.kubeconfig"), made["status"]["token"]
    )


def start_operator(
    kubeconfig: Path, log: Path, *flags: str, **environment: str
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "baton_operator.cli", "--kubeconfig", str(kubeconfig)]
    # The services have models in folders of the node. A later flag overrides this one.
    command += ["--templates", "unrestricted"]
    with log.open("ab") as output:
        return subprocess.Popen(
            [*command, "--host", "127.0.0.1", *flags],
            stdout=output,
            stderr=output,
            env=os.environ | environment,
        )


@dataclass
class Operator:
    """The running operator process."""

    http_port: int

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.http_port}/metrics", timeout=10
        ) as response:
            lines = response.read().decode().splitlines()
        return next(float(line.split()[-1]) for line in lines if line.split()[0] == name)

    async def wait_for_reconciles(self, times: int) -> None:
        """Wait until the operator has reconciled every service `times` more times."""
        looks = times * self.metric("baton_operator_services") + self.metric(
            "baton_operator_reconcile_seconds_count"
        )

        async def are_reconciled() -> bool:
            return self.metric("baton_operator_reconcile_seconds_count") >= looks

        await until(are_reconciled, f"{times} resyncs")


class Cluster:
    """One LLMService. Tests write the status of its pods in place of a kubelet."""

    def __init__(self, kube: Kube, name: str) -> None:
        self.kube, self.name = kube, name

    async def create(self, **spec: Any) -> None:
        body = {"model": {"uri": "file:///models/x"}, **spec}
        metadata = {"name": self.name, "namespace": NAMESPACE}
        await self.kube.create(
            {
                "apiVersion": f"{GROUP}/v1alpha1",
                "kind": "LLMService",
                "metadata": metadata,
                "spec": body,
            }
        )

    async def patch(self, spec: Object) -> None:
        await self.kube.merge("LLMService", NAMESPACE, self.name, {"spec": spec})

    async def pods(self) -> dict[str, Object]:
        pods = await self.kube.list_all("Pod", NAMESPACE, {f"{GROUP}/service": self.name})
        return {pod["metadata"]["name"]: pod for pod in pods}

    async def names(self, *wanted: str) -> dict[str, Object]:
        """Wait until exactly the pods `wanted` of the service exist. Return name -> pod."""
        full = {f"{self.name}-{short}" for short in wanted}

        async def check() -> Any:
            pods = await self.pods()
            return pods if set(pods) == full else None

        return dict(await until(check, f"exactly the pods {sorted(full)}"))

    async def run(self, pod: str, ip: str = "127.201.0.1", ready: bool = True) -> None:
        """Write the status of the running pod `pod` of the service."""
        flag = "True" if ready else "False"
        container = {
            "name": "engine", "image": "x", "imageID": "x", "restartCount": 0, "ready": ready,
            "started": True,
            "state": {"running": {"startedAt": "2020-01-01T00:00:00Z"}},
        }  # fmt: skip
        status = {
            "phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}],
            "containerStatuses": [container],
            "conditions": [{"type": "Ready", "status": flag}],
        }  # fmt: skip
        await self.kube.merge("Pod", NAMESPACE, f"{self.name}-{pod}", {"status": status}, "status")

    async def run_gateway(self) -> None:
        """Create a pod of the gateway's Deployment. Write the status of the pod and Deployment."""

        async def deployed() -> Any:
            return await self.kube.read("Deployment", NAMESPACE, f"{self.name}-gateway")

        deployment = await until(deployed, "the gateway Deployment")
        template = deployment["spec"]["template"]
        await self.kube.create(
            {
                "apiVersion": "v1", "kind": "Pod", "spec": template["spec"],
                "metadata": {
                    "name": f"{self.name}-gateway-0", "namespace": NAMESPACE,
                    **template["metadata"],
                },
            }
        )  # fmt: skip
        await self.run("gateway-0")
        counts = {"observedGeneration": 1, "replicas": 1, "updatedReplicas": 1, "readyReplicas": 1}
        await self.kube.merge(
            "Deployment", NAMESPACE, f"{self.name}-gateway", {"status": counts}, "status"
        )

    async def service(self) -> Object:
        found = await self.kube.read("LLMService", NAMESPACE, self.name)
        assert found
        return found

    async def condition(self, type_: str, status: str, reason: str | None = None) -> Object:
        """Wait until the service has this condition for its newest generation. Return it."""

        async def check() -> Any:
            service = await self.service()
            for condition in service.get("status", {}).get("conditions", []):
                right = condition["type"] == type_ and condition["status"] == status
                newest = condition["observedGeneration"] == service["metadata"]["generation"]
                if right and newest and reason in (None, condition["reason"]):
                    return condition
            return None

        try:
            return dict(await until(check, f"{type_}={status} {reason}"))
        except AssertionError as error:
            raise AssertionError(
                f"{error}; status: {(await self.service()).get('status')}"
            ) from None
