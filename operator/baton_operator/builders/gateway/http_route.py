"""The HTTPRoute, which exposes the gateway through a Gateway of the Gateway API."""

from __future__ import annotations

from baton_kube.client import Object
from baton_operator import names
from baton_operator.builders.absent import Absent
from baton_operator.builders.gateway import url_schemes
from baton_operator.builders.resolved_service import ResolvedService

ROUTE_API = "gateway.networking.k8s.io/v1"


def build(resolved: ResolvedService) -> Object | Absent:
    """Return the HTTPRoute; Absent if the spec does not request one."""
    name = names.gateway_name(resolved.name)
    wanted = resolved.spec.gateway.http_route
    if wanted is None:
        return Absent("HTTPRoute", name)
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
    port = url_schemes.PORTS[url_schemes.scheme_in_use(resolved)]
    backend = {"group": "", "kind": "Service", "name": name, "port": port}
    matches = [{"path": {"type": "PathPrefix", "value": "/"}}]
    return {
        "apiVersion": ROUTE_API,
        "kind": "HTTPRoute",
        "metadata": resolved.metadata(name, "gateway"),
        "spec": {
            "parentRefs": parents,
            **({"hostnames": list(wanted.hostnames)} if wanted.hostnames else {}),
            "rules": [{"matches": matches, "backendRefs": [{**backend, "weight": 1}]}],
        },
    }
