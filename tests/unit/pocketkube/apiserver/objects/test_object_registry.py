"""The registry creates and updates objects, and refuses writes in conflict with the stored one."""

from dataclasses import replace

import pytest

from pocketkube.apiserver.cluster_state import ClusterState
from pocketkube.apiserver.errors import ApiError
from pocketkube.apiserver.objects.object_registry import WriteOptions
from pocketkube.apiserver.resources import RequestInfo

OPTIONS = WriteOptions("test")
BODY = {"metadata": {"name": "m"}, "data": {"a": "1"}}


@pytest.fixture
def cluster() -> ClusterState:
    return ClusterState("token", "127.96.0.0/24")


@pytest.fixture
def maps(cluster: ClusterState) -> RequestInfo:
    return RequestInfo(cluster.catalog.builtin("configmaps"), "default")


def test_a_second_object_of_a_name_is_a_conflict(cluster: ClusterState, maps: RequestInfo) -> None:
    cluster.registry.create(maps, BODY, OPTIONS)
    with pytest.raises(ApiError) as refused:
        cluster.registry.create(maps, BODY, OPTIONS)
    assert refused.value.code == 409


def test_an_update_of_an_outdated_version_is_a_conflict(
    cluster: ClusterState, maps: RequestInfo
) -> None:
    one = replace(maps, name="m")
    first = cluster.registry.create(maps, BODY, OPTIONS)
    second = cluster.registry.update(one, {**first, "data": {"a": "2"}}, OPTIONS)
    with pytest.raises(ApiError) as refused:
        cluster.registry.update(one, {**first, "data": {"a": "3"}}, OPTIONS)
    assert refused.value.code == 409
    assert cluster.registry.get(one) == second


def test_an_update_keeps_the_fields_that_the_server_sets(
    cluster: ClusterState, maps: RequestInfo
) -> None:
    created = cluster.registry.create(maps, BODY, OPTIONS)["metadata"]
    updated = cluster.registry.update(
        replace(maps, name="m"), {"metadata": {"uid": created["uid"]}}, OPTIONS
    )["metadata"]
    assert {key: updated[key] for key in ("uid", "creationTimestamp", "namespace")} == {
        key: created[key] for key in ("uid", "creationTimestamp", "namespace")
    }
    assert updated["resourceVersion"] != created["resourceVersion"]


def test_a_dry_run_returns_the_object_without_storing_it(
    cluster: ClusterState, maps: RequestInfo
) -> None:
    created = cluster.registry.create(maps, BODY, WriteOptions("test", dry_run=True))
    assert created["data"] == BODY["data"]
    with pytest.raises(ApiError) as missing:
        cluster.registry.get(replace(maps, name="m"))
    assert missing.value.code == 404
