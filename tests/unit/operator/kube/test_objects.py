"""Kinds and their API paths."""

from __future__ import annotations

from typing import Any

import pytest

from baton_kube.client import KubeError
from baton_operator import names
from baton_operator.kube.objects import Kube, resource_of

ROUTES = "/apis/gateway.networking.k8s.io/v1"


class Discovery:
    """A client of a server with these API groups only."""

    def __init__(self) -> None:
        self.groups: dict[str, list[str]] = {f"/apis/{names.API_VERSION}": [names.PLURAL]}

    async def get(self, path: str, **_: Any) -> dict[str, Any]:
        if path not in self.groups:
            raise KubeError(404, "NotFound", "404 page not found")
        return {"resources": [{"name": name} for name in self.groups[path]]}


async def test_a_removed_kind_is_not_requested() -> None:
    client = Discovery()
    kube = Kube(client)
    client.groups[ROUTES] = ["httproutes"]
    assert await kube.discover()
    assert kube.http_routes
    del client.groups[ROUTES]
    assert await kube.discover()
    assert not kube.http_routes


@pytest.mark.parametrize(
    ("path", "resource"),
    [
        ("/api/v1/namespaces/services/pods/a-decode-0", "pods"),
        ("/api/v1/namespaces/pods/services", "services"),
        (f"/apis/{names.API_VERSION}/namespaces/x/llmservices/y/status", "llmservices/status"),
        (f"/apis/{names.API_VERSION}/llmservices", "llmservices"),
        ("/version", ""),
    ],
)
def test_metric_labels_have_the_resource_but_no_object(path: str, resource: str) -> None:
    assert resource_of(path) == resource


@pytest.mark.parametrize("name", ["..", "../../victim/llmservices/s", ".?17", "a/b"])
def test_a_name_cannot_change_the_path(name: str) -> None:
    path = Kube(Discovery()).path("Secret", "ns", name)
    assert path.count("/") == "/api/v1/namespaces/ns/secrets/x".count("/")
