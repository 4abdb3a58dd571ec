"""Run the controllers: watch objects, queue their keys, and apply the computed plans.

The controllers are level-triggered: a reconciliation depends only on the observed objects.
An object is reconciled after any change, after a failure and at each resync.
"""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime

from baton_kube.client import KubeClient, KubeError, Object
from baton_kube.reflector import Reflector, key_of
from pocketkube.controllers.deployment import plan_deployment
from pocketkube.controllers.replicaset import owned_by, plan_replica_set, pod_of
from pocketkube.controllers.scheduler import Scheduler
from pocketkube.controllers.work_queue import WorkQueue
from pocketkube.event_recorder import EventRecorder
from pocketkube.lifecycle import until_stopped

RESYNC_S = 15.0  # interval at which all objects are reconciled without an event
#: Longest wait until the watched objects show the controller's own writes. After this time, the
#: controller uses the objects as they are.
EXPECTATION_S = 10.0


class Controllers:
    """The Deployment controller, the ReplicaSet controller and the scheduler."""

    def __init__(self, api: KubeClient) -> None:
        self._api = api
        self._events = EventRecorder(api, "pocketkube-controllers")
        self._deployments = Reflector(api, "/apis/apps/v1/deployments")
        self._replica_sets = Reflector(api, "/apis/apps/v1/replicasets")
        self._pods = Reflector(api, "/api/v1/pods")
        self._nodes = Reflector(api, "/api/v1/nodes")
        self._scheduler = Scheduler(api, self._events, self._pods, self._nodes)
        self._deployment_queue = WorkQueue("deployment", self._reconcile_deployment)
        self._replica_set_queue = WorkQueue("replicaset", self._reconcile_replica_set)
        #: ReplicaSet uid -> (names of the last pods created, names of the last pods deleted, time).
        #: The watched pods may not show these writes yet.
        self._expected: dict[str, tuple[set[str], set[str], float]] = {}
        self._deployments.subscribe(
            lambda old, new: self._deployment_queue.add(key_of(_newest(old, new)))
        )
        self._replica_sets.subscribe(self._replica_set_changed)
        self._pods.subscribe(self._pod_changed)

    async def run(self, stop: asyncio.Event) -> None:
        """Run the controllers until `stop` is set."""
        caches = (self._deployments, self._replica_sets, self._pods, self._nodes)
        await until_stopped(
            stop, self._events.run(), self._work(caches), *(cache.run() for cache in caches)
        )

    async def _work(self, caches: tuple[Reflector, ...]) -> None:
        # With an incomplete cache, a controller would create objects that exist already.
        await asyncio.gather(*(cache.synced.wait() for cache in caches))
        await asyncio.gather(
            self._resync(),
            self._deployment_queue.run(),
            self._replica_set_queue.run(),
            self._scheduler.run(),
        )

    async def _resync(self) -> None:
        while True:
            for key in self._deployments.objects:
                self._deployment_queue.add(key)
            for key in self._replica_sets.objects:
                self._replica_set_queue.add(key)
            self._scheduler.queue_pending()
            await asyncio.sleep(RESYNC_S)

    def _replica_set_changed(self, old: Object | None, new: Object | None) -> None:
        replica_set = _newest(old, new)
        self._replica_set_queue.add(key_of(replica_set))
        self._add_owner(replica_set, "Deployment", self._deployment_queue)

    def _pod_changed(self, old: Object | None, new: Object | None) -> None:
        self._add_owner(_newest(old, new), "ReplicaSet", self._replica_set_queue)

    def _add_owner(self, obj: Object, kind: str, queue: WorkQueue) -> None:
        for reference in obj["metadata"].get("ownerReferences") or []:
            if reference.get("controller") and reference["kind"] == kind:
                queue.add(f"{obj['metadata']['namespace']}/{reference['name']}")

    def _owned(self, cache: Reflector, owner: Object) -> list[Object]:
        namespace = owner["metadata"]["namespace"]
        return [
            obj
            for obj in cache.objects.values()
            if obj["metadata"]["namespace"] == namespace and owned_by(obj, owner)
        ]

    async def _reconcile_deployment(self, key: str) -> None:
        deployment = self._deployments.objects.get(key)
        if deployment is None:
            return
        replica_sets = self._owned(self._replica_sets, deployment)
        plan = plan_deployment(deployment, replica_sets, datetime.now(UTC))
        base = f"/apis/apps/v1/namespaces/{deployment['metadata']['namespace']}"
        if plan.create is not None:
            try:
                await self._api.create(f"{base}/replicasets", plan.create)
            except KubeError as error:
                if error.status != 409:  # 409: it exists, and the cache lags
                    self._events.record(
                        deployment, "Deployment", "FailedCreate", str(error), api_version="apps/v1"
                    )
                    raise
        for name, replicas in plan.scale.items():
            await self._api.merge(f"{base}/replicasets/{name}", {"spec": {"replicas": replicas}})
            message = f"Scaled replica set {name} to {replicas}"
            self._events.record(
                deployment, "Deployment", "ScalingReplicaSet", message, api_version="apps/v1"
            )
        for name in plan.delete:
            await self._delete(f"{base}/replicasets/{name}")
        await self._write_status(
            f"{base}/deployments/{deployment['metadata']['name']}", deployment, plan.status
        )

    async def _reconcile_replica_set(self, key: str) -> None:
        replica_set = self._replica_sets.objects.get(key)
        if replica_set is None:
            return
        pods = self._owned(self._pods, replica_set)
        if not self._caught_up(replica_set, pods):
            asyncio.get_running_loop().call_later(0.2, self._replica_set_queue.add, key)
            return
        plan = plan_replica_set(replica_set, pods)
        namespace = replica_set["metadata"]["namespace"]
        collection = f"/api/v1/namespaces/{namespace}/pods"
        made: set[str] = set()
        removed: set[str] = set()
        self._expected[replica_set["metadata"]["uid"]] = (made, removed, time.monotonic())
        try:
            for _ in range(plan.create):
                pod = await self._api.create(collection, pod_of(replica_set))
                made.add(pod["metadata"]["name"])
        except KubeError as error:
            self._events.record(
                replica_set, "ReplicaSet", "FailedCreate", str(error), api_version="apps/v1"
            )
            raise
        for name in plan.delete:
            await self._delete(f"{collection}/{name}")
            removed.add(name)
        path = f"/apis/apps/v1/namespaces/{namespace}/replicasets/{replica_set['metadata']['name']}"
        await self._write_status(path, replica_set, plan.status)

    def _caught_up(self, replica_set: Object, pods: list[Object]) -> bool:
        """Return whether `pods` reflects the controller's last writes for `replica_set`.

        The writes are creations and deletions of pods. From outdated `pods`, the controller would
        create pods twice. If the writes are older than `EXPECTATION_S`, the result is always True.

        Args:
            pods: the pods of `replica_set`, as last received from the watch.
        """
        made, removed, when = self._expected.get(
            replica_set["metadata"]["uid"], (set(), set(), 0.0)
        )
        if time.monotonic() - when > EXPECTATION_S:
            return True
        made -= {pod["metadata"]["name"] for pod in pods}
        return not made and not any(
            pod["metadata"]["name"] in removed and not pod["metadata"].get("deletionTimestamp")
            for pod in pods
        )

    async def _delete(self, path: str) -> None:
        try:
            await self._api.delete(path)
        except KubeError as error:
            if error.status != 404:
                raise

    async def _write_status(self, path: str, obj: Object, status: Object) -> None:
        current = obj.get("status") or {}
        if any(current.get(key, 0) != value for key, value in status.items()):
            await self._api.merge(f"{path}/status", {"status": status})


def _newest(old: Object | None, new: Object | None) -> Object:
    """Return the newest state of an object: `new`, or `old` if the object was deleted."""
    obj = new or old
    assert obj is not None
    return obj
