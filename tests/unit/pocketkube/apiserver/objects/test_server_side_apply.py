"""Server-side apply by several managers: ownership and content stay consistent."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pocketkube.apiserver.cluster_state import ClusterState
from pocketkube.apiserver.errors import ApiError
from pocketkube.apiserver.objects.object_registry import WriteOptions
from pocketkube.apiserver.resources import RequestInfo

MANAGERS = st.sampled_from(["one", "two", "three"])
DATA = st.dictionaries(st.sampled_from("abcd"), st.sampled_from("12"), max_size=3)
STEPS = st.lists(
    st.tuples(MANAGERS, st.sampled_from(["apply", "force", "patch"]), DATA), min_size=1, max_size=12
)
APPLY = "application/apply-patch+yaml"


def _owners(obj) -> dict[str, set[str]]:
    return {
        entry["manager"]: set(entry["fieldsV1"].get("f:data", {}))
        for entry in obj["metadata"].get("managedFields", [])
        if entry["operation"] == "Apply"
    }


@given(STEPS)
@settings(max_examples=60, deadline=None)
def test_applied_fields_are_stored_and_owned_by_their_managers(steps) -> None:
    cluster = ClusterState("token", "127.96.0.0/24")
    info = RequestInfo(cluster.catalog.builtin("configmaps"), "default", "m")
    for manager, how, data in steps:
        body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "m"}, "data": data}
        before = cluster.store.get("configmaps", "default", "m")
        options = WriteOptions(manager, force=how == "force")
        try:
            if how == "patch":
                if before is None:
                    continue
                after = cluster.registry.patch(
                    info, "application/merge-patch+json", {"data": data}, options
                )
            else:
                after = cluster.registry.patch(info, APPLY, body, options)
        except ApiError as error:
            refused = (error.code, how)
        else:
            refused = None
        if refused:
            assert refused == (409, "apply")
            assert cluster.store.get("configmaps", "default", "m") == before, (
                "a refused apply changed the object"
            )
            continue
        stored = after.get("data", {})
        assert {key: stored.get(key) for key in data} == data
        if how != "patch":
            assert _owners(after).get(manager, set()) == {f"f:{key}" for key in data}
            if before is not None:
                dropped = _owners(before).get(manager, set()) - {f"f:{key}" for key in data}
                held = {
                    field
                    for entry in before["metadata"]["managedFields"]
                    if (entry["manager"], entry["operation"]) != (manager, "Apply")
                    for field in entry["fieldsV1"].get("f:data", {})
                }
                assert not {f"f:{key}" for key in stored} & (dropped - held), (
                    "a field without owners was kept"
                )
        for fields in _owners(after).values():
            assert fields <= {f"f:{key}" for key in stored}, "a missing field has an owner"


def test_an_apply_without_a_status_removes_its_conditions_and_keeps_the_rest() -> None:
    cluster = ClusterState("token", "127.96.0.0/24")
    pod = RequestInfo(cluster.catalog.builtin("pods"), "default", "p")
    body = {"apiVersion": "v1", "kind": "Pod"}
    containers = [{"name": "c", "image": "i"}]
    cluster.registry.patch(
        pod, APPLY, {**body, "spec": {"containers": containers}}, WriteOptions("one")
    )
    cluster.store.put("pods", {**cluster.registry.stored(pod), "status": {}})
    status = {"conditions": [{"type": "Ready", "status": "True"}]}
    one = replace(pod, subresource="status")
    cluster.registry.patch(one, APPLY, {**body, "status": status}, WriteOptions("one"))
    after = cluster.registry.patch(one, APPLY, body, WriteOptions("one"))
    assert after["status"] == {}
    assert after["spec"]["containers"][0]["name"] == "c"
