"""Deleting: finalizers, grace periods, owners, collections and namespaces."""

import pytest

from support.waiting import eventually

POD = {"terminationGracePeriodSeconds": 20, "containers": [{"name": "c", "image": "i"}]}


def test_a_finalizer_keeps_a_deleted_object(api, core) -> None:
    path = f"{core}/configmaps/f"
    api.post(f"{core}/configmaps", {"metadata": {"name": "f", "finalizers": ["baton.dev/hold"]}})
    held = api.delete(path)
    assert held.status_code == 200
    assert api.get(path).json()["metadata"]["deletionTimestamp"]
    api.patch(path, {"metadata": {"finalizers": None}})
    assert api.get(path).status_code == 404


def test_no_finalizer_is_added_to_a_deleted_object(api, core) -> None:
    path = f"{core}/configmaps/f"
    api.post(f"{core}/configmaps", {"metadata": {"name": "f", "finalizers": ["baton.dev/hold"]}})
    api.delete(path)
    added = api.patch(path, {"metadata": {"finalizers": ["baton.dev/hold", "baton.dev/more"]}})
    assert added.status_code == 422
    api.patch(path, {"metadata": {"finalizers": None}})


def test_delete_obeys_preconditions(api, core) -> None:
    api.post(f"{core}/configmaps", {"metadata": {"name": "p"}})
    body = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": "another"}}
    assert api.delete(f"{core}/configmaps/p", body).status_code == 409
    assert api.get(f"{core}/configmaps/p").status_code == 200


def test_a_scheduled_pod_is_deleted_with_grace(api, core) -> None:
    path = f"{core}/pods/p"
    api.post(f"{core}/pods", {"metadata": {"name": "p"}, "spec": {**POD, "nodeName": "nowhere"}})
    first = api.delete(path).json()
    assert first["metadata"]["deletionGracePeriodSeconds"] == 20
    assert first["metadata"]["deletionTimestamp"]
    shorter = api.delete(path, gracePeriodSeconds="5").json()
    assert shorter["metadata"]["deletionGracePeriodSeconds"] == 5
    assert api.get(path).status_code == 200
    assert api.delete(path, {"gracePeriodSeconds": 0}).status_code == 200
    assert api.get(path).status_code == 404


def test_an_unscheduled_pod_is_deleted_at_once(api, core) -> None:
    api.post(
        f"{core}/pods", {"metadata": {"name": "p"}, "spec": {**POD, "schedulerName": "nobody"}}
    )
    api.delete(f"{core}/pods/p")
    assert api.get(f"{core}/pods/p").status_code == 404


def _owned(owner, name, **reference) -> dict[str, object]:
    metadata = owner["metadata"]
    reference = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "name": metadata["name"],
        "uid": metadata["uid"],
        **reference,
    }
    return {"metadata": {"name": name, "ownerReferences": [reference]}}


def test_dependents_are_deleted_with_their_owner(api, core) -> None:
    owner = api.post(f"{core}/configmaps", {"metadata": {"name": "owner"}}).json()
    api.post(f"{core}/secrets", _owned(owner, "child"))
    api.delete(f"{core}/configmaps/owner", propagationPolicy="Background")
    eventually(
        lambda: api.get(f"{core}/secrets/child").status_code == 404, "the dependent collected"
    )


@pytest.mark.late  # the real garbage collector discovers new kinds every 30 s
def test_dependents_of_a_custom_resource_are_deleted_with_it(api, relays, core) -> None:
    owner = api.post(relays.path, relays.body("owner")).json()
    api.post(f"{core}/secrets", _owned(owner, "child", apiVersion=relays.api_version, kind="Relay"))
    api.delete(relays.at("owner"))
    eventually(
        lambda: api.get(f"{core}/secrets/child").status_code == 404,
        "the dependent collected",
        timeout_s=90,
    )


def test_orphaned_dependents_are_kept(api, core) -> None:
    owner = api.post(f"{core}/configmaps", {"metadata": {"name": "owner"}}).json()
    api.post(f"{core}/secrets", _owned(owner, "child"))
    api.delete(f"{core}/configmaps/owner", propagationPolicy="Orphan")
    eventually(lambda: api.get(f"{core}/configmaps/owner").status_code == 404, "the owner gone")
    child = api.get(f"{core}/secrets/child").json()
    assert not child["metadata"].get("ownerReferences")


def test_foreground_deletion_waits_for_blocking_dependents(api, core) -> None:
    owner = api.post(f"{core}/configmaps", {"metadata": {"name": "owner"}}).json()
    child = _owned(owner, "child", blockOwnerDeletion=True)
    child["metadata"]["finalizers"] = ["baton.dev/hold"]
    api.post(f"{core}/secrets", child)
    api.delete(f"{core}/configmaps/owner", propagationPolicy="Foreground")
    eventually(
        lambda: api.get(f"{core}/secrets/child").json()["metadata"].get("deletionTimestamp"),
        "the dependent marked",
    )
    assert api.get(f"{core}/configmaps/owner").json()["metadata"]["finalizers"] == [
        "foregroundDeletion"
    ]
    api.patch(f"{core}/secrets/child", {"metadata": {"finalizers": None}})
    eventually(lambda: api.get(f"{core}/configmaps/owner").status_code == 404, "the owner gone")


def test_delete_collection_obeys_selectors(api, core) -> None:
    for name, tier in (("a", "x"), ("b", "x"), ("c", "y")):
        api.post(f"{core}/secrets", {"metadata": {"name": name, "labels": {"tier": tier}}})
    assert api.delete(f"{core}/secrets", labelSelector="tier=x").status_code == 200
    left = api.get(f"{core}/secrets", labelSelector="tier").json()["items"]
    assert [item["metadata"]["name"] for item in left] == ["c"]


def test_deleting_a_namespace_deletes_its_content(api, namespace, core) -> None:
    api.post(f"{core}/configmaps", {"metadata": {"name": "in"}})
    api.delete(f"/api/v1/namespaces/{namespace}")
    eventually(
        lambda: api.get(f"/api/v1/namespaces/{namespace}").status_code == 404,
        "the namespace gone",
        60,
    )
    assert api.get(f"{core}/configmaps/in").status_code == 404
