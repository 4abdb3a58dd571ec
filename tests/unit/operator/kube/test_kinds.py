"""Kinds and their paths, and the service of an event."""

from __future__ import annotations

from typing import Any

import kopf
import pytest

from baton_kube.client import KubeError
from baton_operator import names
from baton_operator.handlers import keys_of
from baton_operator.kube.kinds import Kube, resource_of
from baton_operator.names import Key

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
    assert list(keys_of("Pod", event(labels={names.LABEL_SERVICE: name}))) == []
    path = Kube(Discovery()).path("Secret", "ns", name)
    assert path.count("/") == "/api/v1/namespaces/ns/secrets/x".count("/")


def event(
    labels: dict[str, str] | None = None, references: list[dict[str, Any]] | None = None
) -> kopf.Meta:
    body = {
        "metadata": {
            "namespace": "ns",
            "name": "o",
            "labels": labels or {},
            "ownerReferences": references or [],
        }
    }
    return kopf.Body(body).metadata


def test_an_event_belongs_to_the_service_of_its_label_and_to_its_controller() -> None:
    owner = {"apiVersion": names.API_VERSION, "kind": names.KIND, "name": "demo", "uid": "u"}
    others = [{**owner, "name": f"s{number}"} for number in range(1000)]
    assert list(keys_of("Pod", event(references=[*others, {**owner, "controller": True}]))) == [
        Key("ns", "demo")
    ]
    assert set(keys_of("Pod", event({names.LABEL_SERVICE: "a"}, others))) == {Key("ns", "a")}
    foreign = {**owner, "apiVersion": "other.dev/v1", "controller": True}
    assert list(keys_of("Pod", event(references=[foreign]))) == []
