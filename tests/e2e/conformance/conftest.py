"""Fixtures of the conformance tests: an API client, a namespace per test and a custom resource."""

import base64
import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from baton_kube.client import Object
from pocketkube.control_plane.embedded import EmbeddedControlPlane
from pocketkube.control_plane.real import RealControlPlane
from support.waiting import eventually


class Api:
    """Sends requests to one control plane. Methods return `requests.Response`."""

    def __init__(self, kubeconfig: Path) -> None:
        document = yaml.safe_load(kubeconfig.read_text())
        cluster = document["clusters"][0]["cluster"]
        self.kubeconfig = kubeconfig
        self.server = cluster["server"]
        authority = kubeconfig.with_suffix(".ca")
        authority.write_bytes(base64.b64decode(cluster["certificate-authority-data"]))
        self.http = requests.Session()
        self.http.trust_env = False  # no proxy and no certificate bundle of the environment
        self.http.verify = str(authority)
        self.http.headers["Authorization"] = f"Bearer {document['users'][0]['user']['token']}"
        self.http.headers["User-Agent"] = "conformance/1"
        self.minor = int(self.get("/version").json()["minor"].rstrip("+"))

    def request(
        self, method: str, path: str, body: Any = None, kind: str = "application/json", **query: str
    ) -> requests.Response:
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": kind} if body is not None else {}
        return self.http.request(
            method, self.server + path, params=query, data=data, headers=headers, timeout=20
        )

    def get(self, path: str, **query: str) -> requests.Response:
        return self.request("GET", path, **query)

    def post(self, path: str, body: Any, **query: str) -> requests.Response:
        return self.request("POST", path, body, **query)

    def put(self, path: str, body: Any, **query: str) -> requests.Response:
        return self.request("PUT", path, body, **query)

    def delete(self, path: str, body: Any = None, **query: str) -> requests.Response:
        return self.request("DELETE", path, body, **query)

    def patch(
        self, path: str, body: Any, kind: str = "merge-patch+json", **query: str
    ) -> requests.Response:
        return self.request("PATCH", path, body, f"application/{kind}", **query)

    def apply(self, path: str, body: Any, manager: str, **query: str) -> requests.Response:
        return self.patch(path, body, "apply-patch+yaml", fieldManager=manager, **query)

    def watch(self, path: str, **query: str) -> list[Object]:
        """Return all events until the server ends the watch, after the query's timeoutSeconds."""
        response = self.http.get(self.server + path, params={"watch": "true", **query}, timeout=20)
        if response.status_code != 200:
            return [{"type": "ERROR", "object": response.json()}]
        return [json.loads(line) for line in response.text.splitlines()]

    def as_bearer(self, token: str, path: str) -> requests.Response:
        """Send a GET with this token instead of the administrator's."""
        return self.http.get(
            self.server + path, headers={"Authorization": f"Bearer {token}"}, timeout=20
        )

    def kubectl(self, *arguments: str, stdin: Any = None) -> subprocess.CompletedProcess[str]:
        program = shutil.which("kubectl")
        if program is None:
            pytest.skip("kubectl is not installed")
        environment = {
            **os.environ,
            "KUBECONFIG": str(self.kubeconfig),
            "HOME": str(self.kubeconfig.parent),
        }
        text = None if stdin is None else json.dumps(stdin)
        return subprocess.run(
            [program, *arguments],
            input=text,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def relay_definition(group: str) -> Object:
    """A definition like LLMService's: groups, defaults, bounds, keyed lists, status and scale."""
    group_schema = {
        "type": "object",
        "properties": {
            "replicas": {"type": "integer", "format": "int32", "minimum": 0, "default": 1},
            "parallelism": {
                "type": "object",
                "default": {},
                "properties": {
                    "tensor": {"type": "integer", "minimum": 1, "default": 1},
                    "expert": {"type": "boolean"},
                },
            },
        },
    }
    condition = {
        "type": "object",
        "required": ["type", "status"],
        "properties": {
            name: {"type": "string"} for name in ("type", "status", "reason", "message")
        },
    }
    spec = {
        "type": "object",
        "required": ["model"],
        "properties": {
            "model": {
                "type": "object",
                "required": ["uri"],
                "properties": {
                    "uri": {"type": "string", "minLength": 1, "pattern": "^[a-z]+://"},
                    "dtype": {
                        "type": "string",
                        "enum": ["auto", "float32", "bfloat16"],
                        "default": "auto",
                    },
                },
            },
            "prefill": group_schema,
            "decode": {**group_schema, "default": {}},
            "ports": {
                "type": "array",
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name"],
                "items": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {"name": {"type": "string"}, "port": {"type": "integer"}},
                },
            },
            "zones": {
                "type": "array",
                "x-kubernetes-list-type": "set",
                "items": {"type": "string"},
            },
            "args": {"type": "array", "items": {"type": "string"}},
            "template": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
        },
    }
    status = {
        "type": "object",
        "properties": {
            "observedGeneration": {"type": "integer"},
            "replicas": {"type": "integer"},
            "selector": {"type": "string"},
            "conditions": {
                "type": "array",
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["type"],
                "items": condition,
            },
        },
    }
    version = {
        "name": "v1alpha1",
        "served": True,
        "storage": True,
        "schema": {
            "openAPIV3Schema": {
                "type": "object",
                "required": ["spec"],
                "properties": {"spec": spec, "status": status},
            }
        },
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.decode.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            {
                "name": "Ready",
                "type": "string",
                "jsonPath": '.status.conditions[?(@.type=="Ready")].status',
            },
            {"name": "Decode", "type": "integer", "jsonPath": ".spec.decode.replicas"},
            {"name": "Model", "type": "string", "priority": 1, "jsonPath": ".spec.model.uri"},
            {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
        ],
    }
    names = {"plural": "relays", "singular": "relay", "kind": "Relay", "shortNames": ["rly"]}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"relays.{group}"},
        "spec": {"group": group, "scope": "Namespaced", "names": names, "versions": [version]},
    }


def install(api: Api, definition: Object) -> None:
    """Create a definition and wait until its resources are served."""
    response = api.post(CRDS, definition)
    assert response.status_code == 201, response.text
    spec = definition["spec"]
    path = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"

    def established() -> bool:
        status = api.get(f"{CRDS}/{definition['metadata']['name']}").json().get("status", {})
        return any(
            c["type"] == "Established" and c["status"] == "True"
            for c in status.get("conditions") or []
        )

    eventually(established, f"{path} established")
    eventually(lambda: api.get(path).ok, f"{path} served")


class Relays:
    """Paths and bodies of the custom resource in one namespace."""

    def __init__(self, group: str, namespace: str) -> None:
        self.api_version = f"{group}/v1alpha1"
        self.path = f"/apis/{self.api_version}/namespaces/{namespace}/relays"

    def body(self, name: str, **spec: Any) -> Object:
        spec = {"model": {"uri": "file:///models/x"}, **spec}
        return {
            "apiVersion": self.api_version,
            "kind": "Relay",
            "metadata": {"name": name},
            "spec": spec,
        }

    def at(self, name: str, sub: str = "") -> str:
        return f"{self.path}/{name}" + (f"/{sub}" if sub else "")


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
