"""Fixtures of the conformance tests: an API client, a namespace per test and a custom resource."""

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from baton_kube.client import Object
from pocketkube.control_plane.embedded import EmbeddedControlPlane
from pocketkube.control_plane.real import RealControlPlane
from support.conformance.api_client import Api
from support.conformance.relay_resource import CRDS, Relays, install, relay_definition
from support.waiting import eventually


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `late` run after the others of this folder."""
    places = [
        place for place, item in enumerate(items) if item.path.parent == Path(__file__).parent
    ]
    ordered = sorted(
        (items[place] for place in places),
        key=lambda item: item.get_closest_marker("late") is not None,
    )
    for place, item in zip(places, ordered, strict=True):
        items[place] = item


@pytest.fixture(scope="session")
def api(control_plane: EmbeddedControlPlane | RealControlPlane) -> Api:
    return Api(control_plane.kubeconfig)


@pytest.fixture
def namespace(api: Api) -> Iterator[str]:
    name = f"case-{uuid.uuid4().hex[:8]}"
    assert api.post("/api/v1/namespaces", {"metadata": {"name": name}}).status_code == 201
    pod = {
        "metadata": {"name": "first"},
        "spec": {"containers": [{"name": "c", "image": "example/i:1"}]},
    }
    # Until admission has seen the default account and its secret, it refuses each pod.
    eventually(
        lambda: api.post(f"/api/v1/namespaces/{name}/pods", pod, dryRun="All").ok,
        "a pod of the default service account is admitted",
    )
    yield name
    api.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture(scope="session")
def relay_group(api: Api) -> str:
    group = "conformance.baton.dev"
    if not api.get(f"{CRDS}/relays.{group}").ok:
        install(api, relay_definition(group))
    return group


@pytest.fixture
def relays(relay_group: str, namespace: str) -> Relays:
    return Relays(relay_group, namespace)


@pytest.fixture
def core(namespace: str) -> str:
    """Return the path of the namespace's core/v1 objects."""
    return f"/api/v1/namespaces/{namespace}"


@pytest.fixture
def apps(namespace: str) -> str:
    return f"/apis/apps/v1/namespaces/{namespace}"


@pytest.fixture
def define(api: Api) -> Iterator[Callable[[Object], None]]:
    """Return a function that installs a definition for one test."""
    names: list[str] = []

    def call(definition: Object) -> None:
        names.append(definition["metadata"]["name"])
        install(api, definition)

    yield call
    for name in names:
        api.delete(f"{CRDS}/{name}")


@pytest.fixture
def relay_crd() -> Callable[[str], Object]:
    return relay_definition


@pytest.fixture
def deployment() -> Object:
    """A Deployment with zero replicas: no controller changes it."""
    container = {"name": "main", "image": "example/image:1", "ports": [{"containerPort": 80}]}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "web"},
        "spec": {
            "replicas": 0,
            "selector": {"matchLabels": {"app": "web"}},
            "template": {
                "metadata": {"labels": {"app": "web"}},
                "spec": {"containers": [container]},
            },
        },
    }
