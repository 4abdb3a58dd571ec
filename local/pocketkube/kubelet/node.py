"""Write the Node object of the kubelet and the node's Lease."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
from datetime import UTC, datetime

from baton_kube.client import KubeClient, KubeError, Object
from pocketkube.timestamps import timestamp

logger = logging.getLogger(__name__)

LEASE_NAMESPACE = "kube-node-lease"
LEASE_RENEW_S = 10
LEASE_DURATION_S = 40
#: Number of lease renewals per status write.
STATUS_EVERY = 6


def allocatable() -> dict[str, str]:
    """Return the resources that the node reports: at least 64 CPUs and 512 GiB of memory.

    For a larger machine, these are its actual CPUs and memory. The kubelet does not enforce
    resource limits.
    """
    memory_kib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 1024
    # The minimum lets samples that are written for servers fit on a laptop.
    cpus = max(os.cpu_count() or 1, 64)
    return {
        "cpu": str(cpus),
        "memory": f"{max(memory_kib, 512 * 2**20)}Ki",
        "pods": "500",
        "ephemeral-storage": "1Ti",
    }


class Node:
    """Registers the node, and renews its lease and status."""

    def __init__(self, api: KubeClient, name: str, address: str, port: int) -> None:
        self._api = api
        self._name = name
        self._address = address
        self._port = port
        self._capacity = allocatable()
        self._ready_since = timestamp()

    async def register(self) -> None:
        """Create or update the Node object, and mark the node as ready.

        Raises:
            KubeError: the API server refuses the request.
            OSError: the API server does not answer.
        """
        metadata: Object = {
            "name": self._name,
            "labels": {
                "kubernetes.io/hostname": self._name,
                "kubernetes.io/os": "linux",
                "kubernetes.io/arch": {"x86_64": "amd64", "aarch64": "arm64"}.get(
                    platform.machine(), platform.machine()
                ),
                "pocketkube/kubelet": "processes",
            },
        }
        try:
            await self._api.create(
                "/api/v1/nodes",
                {"kind": "Node", "apiVersion": "v1", "metadata": metadata, "spec": {}},
            )
        except KubeError as error:
            if error.status != 409:
                raise
            await self._api.merge(
                self._path, {"metadata": {k: v for k, v in metadata.items() if k != "name"}}
            )
        await self.write_status(ready=True)

    async def run(self) -> None:
        """Renew the lease every `LEASE_RENEW_S` until cancelled.

        Every `STATUS_EVERY`th renewal also writes the node's status.
        """
        beat = 0
        while True:
            try:
                await self._renew_lease()
                if beat % STATUS_EVERY == 0:
                    await self.write_status(ready=True)
                beat += 1
            except (KubeError, OSError) as error:
                logger.warning(
                    "renewing the Lease or the status of node %s failed, retrying in %d s: %s",
                    self._name,
                    LEASE_RENEW_S,
                    error,
                )
            await asyncio.sleep(LEASE_RENEW_S)

    async def write_status(self, *, ready: bool) -> None:
        """Write the node's status, with the condition Ready set to `ready`.

        Raises:
            KubeError: the API server refuses the request.
            OSError: the API server does not answer.
        """
        status: Object = {
            "capacity": self._capacity,
            "allocatable": self._capacity,
            "addresses": [{"type": "InternalIP", "address": self._address}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._port}},
            "conditions": self._conditions(ready),
            "nodeInfo": {
                "architecture": platform.machine(),
                "bootID": "",
                "containerRuntimeVersion": "process://1",
                "kernelVersion": platform.release(),
                "kubeProxyVersion": "",
                "kubeletVersion": "v1.20.0-pocketkube",
                "machineID": "",
                "operatingSystem": "linux",
                "osImage": platform.system(),
                "systemUUID": "",
            },
        }
        await self._api.merge(f"{self._path}/status", {"status": status})

    def _conditions(self, ready: bool) -> list[Object]:
        now = timestamp()
        pressures = {
            "MemoryPressure": "KubeletHasSufficientMemory",
            "DiskPressure": "KubeletHasNoDiskPressure",
            "PIDPressure": "KubeletHasSufficientPID",
        }
        conditions = [
            {
                "type": kind,
                "status": "False",
                "reason": reason,
                "message": "not measured: resources are not enforced here",
                "lastHeartbeatTime": now,
                "lastTransitionTime": self._ready_since,
            }
            for kind, reason in pressures.items()
        ]
        running = "the kubelet is running"
        return [
            *conditions,
            {
                "type": "Ready",
                "status": "True" if ready else "False",
                "reason": "KubeletReady" if ready else "KubeletStopped",
                "message": running if ready else "the kubelet has shut down",
                "lastHeartbeatTime": now,
                "lastTransitionTime": self._ready_since if ready else now,
            },
        ]

    @property
    def _path(self) -> str:
        return f"/api/v1/nodes/{self._name}"

    async def _renew_lease(self) -> None:
        spec = {
            "holderIdentity": self._name,
            "leaseDurationSeconds": LEASE_DURATION_S,
            "renewTime": timestamp(datetime.now(UTC), micro=True),
        }
        collection = f"/apis/coordination.k8s.io/v1/namespaces/{LEASE_NAMESPACE}/leases"
        try:
            await self._api.merge(f"{collection}/{self._name}", {"spec": spec})
            return
        except KubeError as error:
            if error.status != 404:
                raise
        lease: Object = {
            "kind": "Lease",
            "apiVersion": "coordination.k8s.io/v1",
            "metadata": {"name": self._name, "namespace": LEASE_NAMESPACE},
            "spec": spec,
        }
        await self._api.create(collection, lease)
