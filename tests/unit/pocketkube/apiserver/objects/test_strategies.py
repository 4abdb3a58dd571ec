"""Steps of a write that only one kind has."""

from dataclasses import replace

from pocketkube.apiserver.cluster_state import ClusterState
from pocketkube.apiserver.objects.object_registry import WriteOptions
from pocketkube.apiserver.resources import RequestInfo

OPTIONS = WriteOptions("test")


def test_a_custom_kind_with_the_name_of_a_built_in_one_has_none_of_its_steps() -> None:
    cluster = ClusterState("token", "127.96.0.0/24")
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "schema": {
            "openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
        },
    }
    definition = {
        "metadata": {"name": "services.example.dev"},
        "spec": {
            "group": "example.dev",
            "scope": "Namespaced",
            "names": {"plural": "services", "kind": "Service"},
            "versions": [version],
        },
    }
    definitions = cluster.catalog.find("apiextensions.k8s.io", "v1", "customresourcedefinitions")
    cluster.registry.create(RequestInfo(definitions), definition, OPTIONS)
    services = RequestInfo(cluster.catalog.find("example.dev", "v1", "services"), "default")
    service = {"apiVersion": "example.dev/v1", "kind": "Service", "metadata": {"name": "x"}}
    created = cluster.registry.create(services, {**service, "spec": {"a": 1}}, OPTIONS)
    assert (created["spec"], "status" in created) == ({"a": 1}, False)
    updated = cluster.registry.update(
        replace(services, name="x"), {**created, "spec": {"a": 2}}, OPTIONS
    )
    assert updated["spec"] == {"a": 2}


def test_an_update_of_a_service_without_address_keeps_it() -> None:
    cluster = ClusterState("token", "127.96.0.0/24")
    services = RequestInfo(cluster.catalog.builtin("services"), "default")
    service = {"metadata": {"name": "x"}, "spec": {"ports": [{"port": 80}]}}
    created = cluster.registry.create(services, service, OPTIONS)
    changed = {**service, "spec": {"ports": [{"port": 81}]}}
    updated = cluster.registry.update(replace(services, name="x"), changed, OPTIONS)
    assert updated["spec"]["clusterIP"] == created["spec"]["clusterIP"]
    assert created["spec"]["clusterIP"].startswith("127.96.0.")
