"""Access to the gateway: the Secrets it reads (API keys, a certificate) and the ways in (Ingress, HTTPRoute)."""

from __future__ import annotations

from baton_operator import names
from baton_operator.builders.owner import Object, Owner, Scheme
from baton_protocol.config import AccessConfig

API_KEYS_PATH = "/etc/baton-api-keys"
TLS_PATH = "/etc/baton-tls"
ROUTE_API = "gateway.networking.k8s.io/v1"


PORTS: dict[Scheme, int] = {"http": 80, "https": 443}
"""Of the gateway's Service; a port has the name of its scheme, as the pods' ports have: each leads to the pods that speak it."""


def scheme(owner: Owner) -> Scheme:
    """What the gateway itself is to speak."""
    return "http" if owner.spec.gateway.tls is None else "https"


def schemes(owner: Owner) -> list[Scheme]:
    """Those that lead to a gateway. While TLS is switched on or off, two."""
    return sorted({scheme(owner), *owner.gateway_schemes})


def scheme_in_use(owner: Owner) -> Scheme:
    """The one by which a ready gateway is reached. While TLS is switched, that of before until a new one is ready."""
    wanted, ready = scheme(owner), owner.gateway_schemes
    return wanted if wanted in ready or not ready else ready[0]


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
    backend = {
        "service": {"name": names.gateway_name(owner.name), "port": {"name": scheme_in_use(owner)}}
    }
    rule = {
        "host": wanted.host,
        "http": {"paths": [{"path": "/", "pathType": "Prefix", "backend": backend}]},
    }
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
        optional: Object = {
            "namespace": parent.namespace,
            "sectionName": parent.section_name,
            "port": parent.port,
        }
        reference = {"group": ROUTE_API.partition("/")[0], "kind": "Gateway", "name": parent.name}
        parents.append(
            reference | {field: value for field, value in optional.items() if value is not None}
        )
    port = PORTS[scheme_in_use(owner)]
    backend = {"group": "", "kind": "Service", "name": names.gateway_name(owner.name), "port": port}
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
