"""Access to the gateway: its Ingress or HTTPRoute, and the Secrets that it reads."""

from __future__ import annotations

from baton_operator import names
from baton_operator.builders.owner import Object, Owner, Scheme
from baton_protocol.config import AccessConfig

API_KEYS_PATH = "/etc/baton-api-keys"
TLS_PATH = "/etc/baton-tls"
ROUTE_API = "gateway.networking.k8s.io/v1"


#: Ports of the gateway's Service. Service and pods name a port by its scheme, so each port leads to
#: the pods that serve it.
PORTS: dict[Scheme, int] = {"http": 80, "https": 443}


def scheme(owner: Owner) -> Scheme:
    """Return the scheme that new gateway pods serve."""
    return "http" if owner.spec.gateway.tls is None else "https"


def schemes(owner: Owner) -> list[Scheme]:
    """Return the schemes of the Service: two while TLS is switched on or off."""
    return sorted({scheme(owner), *owner.gateway_schemes})


def scheme_in_use(owner: Owner) -> Scheme:
    """Return a scheme that a ready gateway serves.

    While TLS is switched, it is the old one until a new pod is ready.
    """
    wanted, ready = scheme(owner), owner.gateway_schemes
    return wanted if wanted in ready or not ready else ready[0]


def config(owner: Owner) -> AccessConfig:
    """Return the part of the gateway's configuration about access."""
    gateway = owner.spec.gateway
    return AccessConfig(
        api_keys_dir=API_KEYS_PATH if gateway.api_keys else "",
        tls_dir=TLS_PATH if gateway.tls else "",
        max_concurrent_per_client=gateway.limits.max_concurrent_per_key,
        max_prompt_tokens=gateway.limits.max_prompt_tokens,
        max_completion_tokens=gateway.limits.max_completion_tokens,
    )


def mounts(owner: Owner) -> list[tuple[Object, Object]]:
    """Return (volume, mount) of each Secret that the gateway reads.

    The kubelet starts the pod when the Secrets exist.
    """
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
    """Return the Ingress; None if the spec has none."""
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
    """Return the HTTPRoute; None if the spec has none."""
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
