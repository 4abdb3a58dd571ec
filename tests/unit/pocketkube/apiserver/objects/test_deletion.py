"""A terminating object is removed with its last finalizer."""

from dataclasses import replace

import pytest

from pocketkube.apiserver.cluster_state import ClusterState
from pocketkube.apiserver.objects.deletion import DeleteOptions, is_released
from pocketkube.apiserver.objects.object_registry import WriteOptions
from pocketkube.apiserver.resources import RequestInfo


@pytest.mark.parametrize("dry_run", [False, True])
def test_the_update_that_removes_the_last_finalizer_removes_the_object(dry_run: bool) -> None:
    cluster = ClusterState("token", "127.96.0.0/24")
    maps = RequestInfo(cluster.catalog.builtin("configmaps"), "default")
    one = replace(maps, name="m")
    body = {"metadata": {"name": "m", "finalizers": ["example.com/f"]}}
    cluster.registry.create(maps, body, WriteOptions("test"))
    _, was_removed = cluster.deletion.delete(one, DeleteOptions())
    cluster.registry.update(one, {"metadata": {"name": "m"}}, WriteOptions("test", dry_run=dry_run))
    assert not was_removed
    assert (cluster.store.get("configmaps", "default", "m") is None) is not dry_run


@pytest.mark.parametrize(
    ("before", "after", "released"),
    [
        ({"finalizers": ["f"]}, {"deletionTimestamp": "t"}, True),
        ({"finalizers": ["f"]}, {"deletionTimestamp": "t", "finalizers": ["g"]}, False),
        ({"finalizers": ["f"]}, {"deletionTimestamp": "t", "deletionGracePeriodSeconds": 3}, False),
        ({"finalizers": ["f"]}, {}, False),
        ({}, {"deletionTimestamp": "t"}, False),
    ],
)
def test_only_a_terminating_object_without_a_grace_period_is_released(
    before: dict, after: dict, released: bool
) -> None:
    assert is_released(before, after) is released
