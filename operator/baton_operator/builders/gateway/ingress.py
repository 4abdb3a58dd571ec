"""The Ingress, which exposes the gateway under a host name."""

from __future__ import annotations

from baton_kube.client import Object
from baton_operator import names
from baton_operator.builders.absent import Absent
from baton_operator.builders.gateway import url_schemes
from baton_operator.builders.resolved_service import ResolvedService


def build(resolved: ResolvedService) -> Object | Absent:
    """Return the Ingress; Absent if the spec does not request one.

    Raises:
        ValueError: the operator's restrictions refuse an annotation.
    """
    name = names.gateway_name(resolved.name)
    wanted = resolved.spec.gateway.ingress
    if wanted is None:
        return Absent("Ingress", name)
    metadata = resolved.metadata(name, "gateway")
    if wanted.annotations:
        if resolved.restrictions is not None:
            path = "gateway.ingress.annotations"
            resolved.restrictions.check_annotations(wanted.annotations, path)
        metadata["annotations"] = dict(wanted.annotations)
    backend = {
        "service": {
            "name": name,
            "port": {"name": url_schemes.scheme_in_use(resolved)},
        }
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
