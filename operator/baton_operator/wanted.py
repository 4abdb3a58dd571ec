"""From an observed service to what should exist for it; what is wrong with its spec in one kind of exception."""

from __future__ import annotations

from baton_operator.api import decode_spec
from baton_operator.builders.owner import Owner
from baton_operator.desired import Desired, desired
from baton_operator.gateway_group import gateway_schemes
from baton_operator.kube import Kube
from baton_operator.observe import Observation
from baton_operator.problems import InvalidSpec
from baton_operator.rules import violations


def owner_of(observed: Observation) -> Owner:
    """Raises InvalidSpec naming the field."""
    metadata = observed.service["metadata"]
    try:
        spec = decode_spec(observed.service["spec"])
    except ValueError as error:  # msgspec.ValidationError is one
        raise InvalidSpec(str(error)) from error
    if broken := violations(spec):
        raise InvalidSpec("; ".join(broken))
    return Owner(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        spec=spec,
        coordinator=observed.coordinator,
        gateway_schemes=gateway_schemes(observed.role_pods("gateway")),
    )


def desired_of(owner: Owner, observed: Observation, kube: Kube, operator_namespace: str | None) -> Desired:
    """Raises InvalidSpec naming the field."""
    try:
        return desired(
            owner,
            kube.policy_api,
            keep_coordinator=observed.has_ranks,
            operator_namespace=operator_namespace,
            http_routes=kube.http_routes,
        )
    except ValueError as error:
        raise InvalidSpec(str(error)) from error
