"""The headless Service of a service's member pods."""

from __future__ import annotations

from baton_kube.client import Object
from baton_operator import names
from baton_operator.builders.resolved_service import ResolvedService
from baton_protocol.options.config import ENGINE_HTTP_PORT, ENGINE_PORT, KV_PORT


def build(resolved: ResolvedService) -> Object:
    """Return the headless Service that gives member pods their DNS names.

    Pods that are not ready also have a DNS name, because peers connect to each other during their
    start.
    """
    ports = {"engine": ENGINE_PORT, "kv": KV_PORT, "http": ENGINE_HTTP_PORT}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": resolved.metadata(names.members_service_name(resolved.name)),
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {names.LABEL_SERVICE: resolved.name, names.LABEL_MEMBER: "true"},
            "ports": [
                {"name": name, "port": port, "targetPort": port, "protocol": "TCP"}
                for name, port in ports.items()
            ],
        },
    }
