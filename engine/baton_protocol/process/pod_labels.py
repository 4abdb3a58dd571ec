"""Labels and annotations that more than one component reads (docs/internals/pods.md)."""

from __future__ import annotations

GROUP = "serving.baton.dev"

LABEL_SERVICE = f"{GROUP}/service"
LABEL_ROLE = f"{GROUP}/role"
#: "true" on an engine's pod: gateways send the pod no new request.
ANNOTATION_DRAINING = f"{GROUP}/draining"
#: "true" on the gateway's Service: no decode engine starts until the service is scaled up by hand.
ANNOTATION_SCALED_TO_ZERO = f"{GROUP}/scaled-to-zero"
