"""The store's label index and its watches."""

from dataclasses import replace

from pocketkube.apiserver.cluster_state import ClusterState
from pocketkube.apiserver.objects import deletion
from pocketkube.apiserver.objects.object_registry import WriteOptions
from pocketkube.apiserver.resources import RequestInfo
from pocketkube.apiserver.serving.selectors import label_selector, required_labels
from pocketkube.apiserver.store import Store


def test_a_list_by_labels_reflects_creations_updates_and_deletions() -> None:
    cluster = ClusterState("token", "127.96.0.0/24")
    options = WriteOptions("test")
    maps = RequestInfo(cluster.catalog.builtin("configmaps"), "default")

    def names(selector: str) -> list[str]:
        matches, labels = label_selector(selector), required_labels(selector)
        return [
            obj["metadata"]["name"]
            for obj in cluster.store.list("configmaps", "default", matches, labels)
        ]

    for name, labels in (("c", {"a": "1"}), ("b", {"a": "1", "b": "2"}), ("a", {"b": "2"})):
        cluster.registry.create(maps, {"metadata": {"name": name, "labels": labels}}, options)
    assert names("a=1") == ["b", "c"]
    assert names("a=1,b==2") == ["b"]
    assert names("a=1,b!=2") == ["c"]
    assert names("a=1,b=3") == []
    cluster.registry.update(replace(maps, name="c"), {"metadata": {"labels": {"b": "2"}}}, options)
    cluster.deletion.delete(replace(maps, name="a"), deletion.DeleteOptions())
    assert (names("a=1"), names("b=2")) == (["b"], ["b", "c"])


async def test_a_watch_that_is_not_read_is_ended() -> None:
    store = Store(window=10)
    store.open("configmaps")
    queue = store.subscribe("configmaps", None)
    for number in range(50):
        metadata = {"name": "m", "namespace": "default", "uid": "1"}
        store.put("configmaps", {"metadata": metadata, "n": number})
    assert queue.qsize() == 1
    assert queue.get_nowait() is None, "the watch did not end"
