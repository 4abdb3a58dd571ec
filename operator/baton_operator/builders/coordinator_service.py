"""The Service of the coordinator of an expert-parallel group."""

from __future__ import annotations

from baton_kube.client import Object
from baton_operator import names
from baton_operator.builders.resolved_service import ResolvedService
from baton_protocol.topology import COORDINATOR_HTTP_PORT, COORDINATOR_PORT


def build(resolved: ResolvedService) -> Object:
    """Return the Service through which ranks and the operator connect to the coordinator."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": resolved.metadata(names.coordinator_name(resolved.name), "coordinator"),
        "spec": {
            "type": "ClusterIP",
            "selector": names.selector(resolved.name, "coordinator"),
            "ports": [
                {
                    "name": "ranks",
                    "port": COORDINATOR_PORT,
                    "targetPort": "ranks",
                    "protocol": "TCP",
                },
                {
                    "name": "http",
                    "port": COORDINATOR_HTTP_PORT,
                    "targetPort": "http",
                    "protocol": "TCP",
                },
            ],
        },
    }
