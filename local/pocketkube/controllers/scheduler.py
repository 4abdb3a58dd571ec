"""The scheduler: bind each pending pod to a node."""

from __future__ import annotations

from baton_kube.client import KubeClient, Object
from baton_kube.reflector import Reflector, key_of
from pocketkube.conditions import has_condition
from pocketkube.controllers.work_queue import WorkQueue
from pocketkube.event_recorder import EventRecorder


class Scheduler:
    """Binds each pod without a node to the schedulable node whose name sorts first.

    Args:
        pods: cache of the cluster's pods. The caller calls `pods.run()`.
        nodes: cache of the cluster's nodes. The caller calls `nodes.run()`.
    """

    def __init__(
        self, api: KubeClient, events: EventRecorder, pods: Reflector, nodes: Reflector
    ) -> None:
        self._api = api
        self._events = events
        self._pods = pods
        self._nodes = nodes
        self._queue = WorkQueue("schedule", self._schedule)
        pods.subscribe(self._pod_changed)
        nodes.subscribe(lambda old, new: self.queue_pending())

    async def run(self) -> None:
        """Bind queued pods until cancelled. Call this when both caches are synced."""
        await self._queue.run()

    def queue_pending(self) -> None:
        """Queue all pods without a node."""
        for key, pod in self._pods.objects.items():
            if not pod["spec"].get("nodeName"):
                self._queue.add(key)

    def _pod_changed(self, old: Object | None, new: Object | None) -> None:
        if new is not None and not new["spec"].get("nodeName"):
            self._queue.add(key_of(new))

    async def _schedule(self, key: str) -> None:
        pod = self._pods.objects.get(key)
        if pod is None or pod["spec"].get("nodeName") or pod["metadata"].get("deletionTimestamp"):
            return
        schedulable = (name for name, node in self._nodes.objects.items() if _is_schedulable(node))
        node = min(schedulable, default=None)
        if node is None:
            self._events.record(
                pod, "Pod", "FailedScheduling", "no node is ready; is the kubelet running?"
            )
            return
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        binding: Object = {
            "kind": "Binding",
            "apiVersion": "v1",
            "metadata": {"name": metadata["name"], "namespace": metadata["namespace"]},
            "target": {"kind": "Node", "apiVersion": "v1", "name": node},
        }
        await self._api.create(f"{path}/binding", binding)
        self._events.record(pod, "Pod", "Scheduled", f"Assigned {key} to {node}")


def _is_schedulable(node: Object) -> bool:
    return not (node.get("spec") or {}).get("unschedulable") and has_condition(node, "Ready")
