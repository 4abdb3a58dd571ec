"""A fake Deployment controller and fake kubelets, which make every pod ready immediately."""

from __future__ import annotations

import asyncio
from typing import Any

from baton_kube.client import KubeError
from baton_operator import names
from baton_operator.kube.objects import Kube

Object = dict[str, Any]

OURS = {names.LABEL_MANAGED_BY: names.MANAGER}
RUNNING = {"running": {"startedAt": "2020-01-01T00:00:00Z"}}


class FakeNodes:
    """Creates the pods of Deployments and makes all pods ready, until `run` is cancelled."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._limit = asyncio.Semaphore(8)
        self._work: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        await asyncio.gather(self._follow("Pod"), self._follow("Deployment"))

    async def _follow(self, kind: str) -> None:
        path, ours = self._kube.path(kind, None), names.serialized(OURS)
        _, version = await self._kube.client.list(path, label_selector=ours)
        while True:
            events = self._kube.client.watch(
                path, version, label_selector=ours, timeout_s=3600, silence_s=3600
            )
            async for type_, obj in events:
                version = obj["metadata"]["resourceVersion"]
                if type_ == "ADDED":
                    task = asyncio.ensure_future(self._start(kind, obj))
                    self._work.add(task)
                    task.add_done_callback(self._work.discard)

    async def _start(self, kind: str, obj: Object) -> None:
        async with self._limit:
            try:
                await (self._run_pod(obj) if kind == "Pod" else self._deploy(obj))
            except KubeError as error:
                if error.status not in (404, 409):  # deleted or replaced
                    raise

    async def _run_pod(self, pod: Object) -> None:
        metadata, ip = pod["metadata"], "127.255.255.254"
        containers = [
            {
                "name": c["name"],
                "image": c["image"],
                "imageID": "x",
                "restartCount": 0,
                "ready": True,
                "started": True,
            }
            | {"state": RUNNING}
            for c in pod["spec"]["containers"]
        ]
        conditions = [{"type": type_, "status": "True"} for type_ in ("PodScheduled", "Ready")]
        status = {
            "phase": "Running",
            "podIP": ip,
            "podIPs": [{"ip": ip}],
            "containerStatuses": containers,
        }
        patch = {"status": {**status, "conditions": conditions}}
        await self._kube.merge("Pod", metadata["namespace"], metadata["name"], patch, "status")

    async def _deploy(self, deployment: Object) -> None:
        metadata, template = deployment["metadata"], deployment["spec"]["template"]
        replicas = deployment["spec"]["replicas"]
        for number in range(replicas):
            name = {"name": f"{metadata['name']}-{number}", "namespace": metadata["namespace"]}
            # The owner of the Deployment owns the pods, which are deleted with it.
            owner = {"ownerReferences": metadata["ownerReferences"]}
            pod_metadata = {**template["metadata"], **name, **owner}
            await self._kube.create(
                {
                    "apiVersion": "v1",
                    "kind": "Pod",
                    "metadata": pod_metadata,
                    "spec": template["spec"],
                }
            )
        counts = dict.fromkeys(
            ("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), replicas
        )
        patch = {"status": {"observedGeneration": metadata["generation"], **counts}}
        await self._kube.merge(
            "Deployment", metadata["namespace"], metadata["name"], patch, "status"
        )
