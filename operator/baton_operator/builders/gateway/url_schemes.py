"""The URL schemes that the gateway serves, and the ports of its Service for them."""

from __future__ import annotations

from baton_operator.builders.resolved_service import ResolvedService, Scheme

#: Ports of the gateway's Service by scheme. In Service and pods the scheme is the name of the port,
#: so each port of the Service selects the pods that serve its scheme.
PORTS: dict[Scheme, int] = {"http": 80, "https": 443}


def served_scheme(resolved: ResolvedService) -> Scheme:
    """Return the URL scheme that new gateway pods serve, according to the spec."""
    return "http" if resolved.spec.gateway.tls is None else "https"


def scheme_in_use(resolved: ResolvedService) -> Scheme:
    """Return the URL scheme that clients should use now.

    After an edit of `gateway.tls`, this is the old scheme until a pod with the new scheme is ready.
    """
    wanted, ready = served_scheme(resolved), resolved.gateway_schemes
    return wanted if wanted in ready or not ready else ready[0]
