"""Relay, the custom resource of the conformance tests: its definition, paths and bodies."""

from typing import Any

from baton_kube.client import Object
from support.conformance.api_client import Api
from support.waiting import eventually

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
