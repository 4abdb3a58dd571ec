"""The garbage collector deletes old events and objects whose owners are gone."""

import asyncio
from dataclasses import replace

from pocketkube.apiserver.cluster_state import ClusterState
from pocketkube.apiserver.objects import deletion, garbage_collection
from pocketkube.apiserver.objects.object_registry import WriteOptions
from pocketkube.apiserver.resources import RequestInfo
from support.waiting import until


def test_events_expire_while_the_cluster_is_busy(monkeypatch) -> None:
    async def run() -> None:
        monkeypatch.setattr(garbage_collection, "EXPIRE_EVERY_S", 0.05)
        cluster = ClusterState("token", "127.96.0.0/24")
        options = WriteOptions("test")
        events = RequestInfo(cluster.catalog.builtin("events"), "default")
        maps = RequestInfo(cluster.catalog.builtin("configmaps"), "default")
        old = {
            "metadata": {"name": "e"},
            "involvedObject": {"kind": "Pod"},
            "lastTimestamp": "2020-01-01T00:00:00Z",
        }
        cluster.registry.create(events, old, options)
        collector = asyncio.create_task(cluster.collector.run())

        def is_deleted_during_changes() -> bool:
            cluster.registry.create(maps, {"metadata": {"name": "m"}}, options)
            cluster.deletion.delete(replace(maps, name="m"), deletion.DeleteOptions())
            return not cluster.store.list("events")

        await until(is_deleted_during_changes, "the deletion of the event")
        collector.cancel()

    asyncio.run(run())


def test_the_collector_does_not_restore_a_deleted_object() -> None:
    """An object with a missing owner is deleted before the collector processes it."""
    cluster = ClusterState("token", "127.96.0.0/24")
    options = WriteOptions("test")
    maps = RequestInfo(cluster.catalog.builtin("configmaps"), "default")
    uid = cluster.registry.create(maps, {"metadata": {"name": "owner"}}, options)["metadata"]["uid"]
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner"}
    owners = [{**owner, "uid": uid}, {**owner, "uid": "gone"}]
    cluster.registry.create(maps, {"metadata": {"name": "m", "ownerReferences": owners}}, options)
    cluster.deletion.delete(replace(maps, name="m"), deletion.DeleteOptions())
    cluster.collector.drain()
    assert cluster.store.get("configmaps", "default", "m") is None
