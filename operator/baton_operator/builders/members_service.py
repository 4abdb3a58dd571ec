"""The headless Service that gives member pods their DNS names."""

from __future__ import annotations

from baton_operator import names
from baton_operator.builders.owner import Object, Owner
from baton_protocol.config import ENGINE_HTTP_PORT, ENGINE_PORT, KV_PORT


def service(owner: Owner) -> Object:
    """Covers pods that are not ready, too: peers must be found while they start."""
    ports = {"engine": ENGINE_PORT, "kv": KV_PORT, "http": ENGINE_HTTP_PORT}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": owner.metadata(names.members_service_name(owner.name)),
        "spec": {
            "type": "ClusterIP",
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {names.LABEL_SERVICE: owner.name, names.LABEL_MEMBER: "true"},
            "ports": [
                {"name": name, "port": port, "targetPort": port, "protocol": "TCP"}
                for name, port in ports.items()
            ],
        },
    }
