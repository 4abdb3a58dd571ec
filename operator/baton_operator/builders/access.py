"""Access to the gateway: the Secrets it reads (API keys, a certificate) and the ways in (Ingress, HTTPRoute)."""

from __future__ import annotations

from typing import Literal

from baton_engine.protocol.config import AccessConfig
from baton_operator import names
from baton_operator.builders.owner import Object, Owner

API_KEYS_PATH = "/etc/baton-api-keys"
TLS_PATH = "/etc/baton-tls"
ROUTE_API = "gateway.networking.k8s.io/v1"


def scheme(owner: Owner) -> Literal["http", "https"]:
    """What the gateway itself speaks."""
    return "http" if owner.spec.gateway.tls is None else "https"


def service_port(owner: Owner) -> int:
    """Of the gateway's Service; its name is the scheme."""
    return 80 if owner.spec.gateway.tls is None else 443


def config(owner: Owner) -> AccessConfig:
    """What the gateway reads of it."""
    gateway = owner.spec.gateway
    return AccessConfig(
        api_keys_dir=API_KEYS_PATH if gateway.api_keys else "",
        tls_dir=TLS_PATH if gateway.tls else "",
        max_concurrent_per_client=gateway.limits.max_concurrent_per_key,
        max_prompt_tokens=gateway.limits.max_prompt_tokens,
        max_completion_tokens=gateway.limits.max_completion_tokens,
    )


def mounts(owner: Owner) -> list[tuple[Object, Object]]:
    """(volume, mount) of each Secret that the gateway reads. A pod waits until the Secret exists."""
    gateway = owner.spec.gateway
    secrets = []
    if gateway.api_keys:
        secrets.append(("api-keys", gateway.api_keys.secret_name, API_KEYS_PATH))
    if gateway.tls:
        secrets.append(("tls", gateway.tls.secret_name, TLS_PATH))
    return [
        (
            {"name": name, "secret": {"secretName": secret, "defaultMode": 0o444}},
            {"name": name, "mountPath": path, "readOnly": True},
        )
        for name, secret, path in secrets
    ]


def ingress(owner: Owner) -> Object | None:
    """None when no ingress was asked for."""
    wanted = owner.spec.gateway.ingress
    if wanted is None:
        return None
    metadata = owner.metadata(names.gateway_name(owner.name), "gateway")
    if wanted.annotations:
        metadata["annotations"] = dict(wanted.annotations)
    backend = {"service": {"name": names.gateway_name(owner.name), "port": {"name": scheme(owner)}}}
    rule = {"host": wanted.host, "http": {"paths": [{"path": "/", "pathType": "Prefix", "backend": backend}]}}
    spec: Object = {"ingressClassName": wanted.class_name} if wanted.class_name else {}
    if wanted.tls:
        spec["tls"] = [{"hosts": [wanted.host], "secretName": wanted.tls.secret_name}]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "Ingress",
        "metadata": metadata,
        "spec": {**spec, "rules": [rule]},
    }


def http_route(owner: Owner) -> Object | None:
    """None when no route was asked for."""
    wanted = owner.spec.gateway.http_route
    if wanted is None:
        return None
    parents = []
    for parent in wanted.parent_refs:
        optional: Object = {"namespace": parent.namespace, "sectionName": parent.section_name, "port": parent.port}
        reference = {"group": ROUTE_API.partition("/")[0], "kind": "Gateway", "name": parent.name}
        parents.append(reference | {field: value for field, value in optional.items() if value is not None})
    backend = {"group": "", "kind": "Service", "name": names.gateway_name(owner.name), "port": service_port(owner)}
    matches = [{"path": {"type": "PathPrefix", "value": "/"}}]
    return {
        "apiVersion": ROUTE_API,
        "kind": "HTTPRoute",
        "metadata": owner.metadata(names.gateway_name(owner.name), "gateway"),
        "spec": {
            "parentRefs": parents,
            **({"hostnames": list(wanted.hostnames)} if wanted.hostnames else {}),
            "rules": [{"matches": matches, "backendRefs": [{**backend, "weight": 1}]}],
        },
    }
