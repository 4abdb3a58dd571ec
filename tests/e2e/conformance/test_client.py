"""The Kubernetes client and reflector of Baton's own components, against each control plane."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from baton_kube.client import KubeClient, KubeError, connect
from baton_kube.reflector import Reflector
from support.waiting import until


@pytest.fixture
async def kube(api) -> AsyncIterator[KubeClient]:
    async with connect(api.kubeconfig) as kube:
        yield kube


async def test_an_object_is_applied_read_listed_and_deleted(kube, core) -> None:
    path = f"{core}/configmaps"
    body = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "a", "labels": {"x": "y"}},
    }
    made = await kube.apply(f"{path}/a", {**body, "data": {"k": "1"}}, field_manager="one")
    changed = await kube.apply(f"{path}/a", {**body, "data": {"k": "2"}}, field_manager="two")
    assert (changed["metadata"]["uid"], changed["data"]) == (made["metadata"]["uid"], {"k": "2"}), (
        "conflicts are forced"
    )
    assert (await kube.get(f"{path}/a", metadata_only=True))["metadata"]["uid"] == made["metadata"][
        "uid"
    ]
    version = changed["metadata"]["resourceVersion"]
    for not_older_than in (None, "0", version):

        async def listed(not_older_than: str | None = not_older_than) -> Any:
            found = await kube.list(path, label_selector="x=y", not_older_than=not_older_than)
            assert found[0] or not_older_than == "0", "only this list may be older"
            return found[0] and found

        found = await until(listed, "the object in the list", 30)
        assert [item["metadata"]["name"] for item in found[0]] == ["a"]
        assert int(found[1]) > 0
    with pytest.raises(KubeError) as caught:
        await kube.delete(f"{path}/a", uid="another")
    assert (caught.value.status, caught.value.reason) == (409, "Conflict")
    await kube.delete(f"{path}/a", uid=made["metadata"]["uid"])
    with pytest.raises(KubeError) as caught:
        await kube.get(f"{path}/a")
    assert (caught.value.status, caught.value.reason) == (404, "NotFound")


async def test_a_list_of_many_objects_is_complete(kube, core, monkeypatch) -> None:
    monkeypatch.setattr("baton_kube.client.PAGE_SIZE", 3)
    for index in range(8):
        await kube.create(
            f"{core}/configmaps", {"metadata": {"name": f"m{index}", "labels": {"page": "d"}}}
        )
    items, _ = await kube.list(f"{core}/configmaps", label_selector="page=d")
    assert [item["metadata"]["name"] for item in items] == [f"m{index}" for index in range(8)]


async def test_a_watch_ends_after_its_timeout_and_an_expired_version_is_refused(
    kube, core, relays
) -> None:
    path = f"{core}/configmaps"
    _, version = await kube.list(path)
    await kube.create(path, {"metadata": {"name": "w"}})
    async with aclosing(kube.watch(path, version, timeout_s=1.0, silence_s=30.0)) as events:
        seen = [(kind, obj["metadata"].get("name")) async for kind, obj in events]
    assert ("ADDED", "w") in seen
    await kube.create(relays.path, relays.body("r"))
    with pytest.raises(KubeError) as caught:
        async for _ in kube.watch(relays.path, "1", timeout_s=1.0, silence_s=30.0):
            pass
    assert caught.value.status == 410


async def test_the_reflector_follows_a_selection(kube, core) -> None:
    path = f"{core}/configmaps"
    await kube.create(path, {"metadata": {"name": "a", "labels": {"in": "yes"}}})
    mirror = Reflector(kube, path, label_selector="in=yes")
    async with asyncio.timeout(60), aclosing(mirror.changes()) as changes:
        while [name.rpartition("/")[2] for name in mirror.objects] != ["a"]:
            await anext(changes)
        await kube.merge(f"{path}/a", {"metadata": {"labels": {"in": "no"}}})
        while mirror.objects:
            await anext(changes)


async def test_discovery_lists_what_kopf_needs(kube) -> None:
    """Discovery must list the verbs list and watch, or kopf does not watch a resource.

    When it starts, kopf also reads `namespaces`.
    """
    async with kube.http_session() as session:
        for path in ("/api", "/apis"):
            async with session.get(kube.server + path) as response:
                assert response.status == 200, await response.text()
    served = {"/api/v1": {"namespaces", "pods", "events"}, "/apis/apps/v1": {"deployments"}}
    served["/apis/apiextensions.k8s.io/v1"] = {"customresourcedefinitions"}
    for path, expected in served.items():
        resources = (await kube.get(path))["resources"]
        assert expected <= {
            entry["name"] for entry in resources if {"list", "watch"} <= set(entry["verbs"])
        }
