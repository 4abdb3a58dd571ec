"""The gateway's Service."""

from __future__ import annotations

from baton_kube.client import Object
from baton_operator import names
from baton_operator.builders.gateway.url_schemes import PORTS, served_scheme
from baton_operator.builders.resolved_service import ResolvedService


def build(resolved: ResolvedService) -> Object:
    """Return the gateway's Service.

    While a rollout changes `gateway.tls`, the Service has a port for HTTP and a port for HTTPS.

    If the LLMService is scaled to zero by hand, the Service has an annotation, which the gateway
    pods watch. Unlike their configuration, an annotation can change without a rollout.
    """
    metadata = resolved.metadata(names.gateway_name(resolved.name), "gateway")
    if resolved.is_scaled_to_zero_by_hand:
        metadata["annotations"] = {names.ANNOTATION_SCALED_TO_ZERO: "true"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "type": "ClusterIP",
            "selector": names.selector(resolved.name, "gateway"),
            "ports": [
                {
                    "name": scheme,
                    "port": PORTS[scheme],
                    "targetPort": scheme,
                    "protocol": "TCP",
                }
                for scheme in sorted({served_scheme(resolved), *resolved.gateway_schemes})
            ],
        },
    }
