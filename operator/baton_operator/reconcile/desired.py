"""The desired state of a service: its objects, and the templates of its member pods.

The operator applies the objects. `plan` decides which member pods are created and deleted.
"""

from __future__ import annotations

import msgspec

from baton_kube.client import Object
from baton_operator import names
from baton_operator.api.rules import valid_spec
from baton_operator.builders import (
    config_maps,
    coordinator_deployment,
    coordinator_service,
    disruption_budget,
    engine_account,
    headless_service,
    network_policy,
)
from baton_operator.builders.absent import Absent
from baton_operator.builders.gateway import (
    gateway_account,
    gateway_deployment,
    gateway_role,
    gateway_role_binding,
    gateway_service,
    http_route,
    ingress,
)
from baton_operator.builders.member_pods import MemberTemplate
from baton_operator.builders.resolved_service import ResolvedService
from baton_operator.builders.restrictions import Restrictions
from baton_operator.observe.observation import Observation, gateway_schemes
from baton_operator.reconcile_errors import InvalidSpec

#: Placeholder for the address of a coordinator's Service that has none yet. The checks do not
#: depend on the address.
_ANY_ADDRESS = "192.0.2.1"


class Desired(msgspec.Struct, frozen=True, kw_only=True):
    """The desired state of one service."""

    resolved: ResolvedService  #: The service from which this state is computed.
    objects: list[Object]  #: In the order of creation: an object comes after those it refers to.
    absent: list[Absent]  #: Objects that must not exist.
    members: dict[names.MemberRole, MemberTemplate]  #: Members of other roles stay as they are.
    gateway_revision: str  #: Newest revision of the gateway's pods.

    @property
    def config_maps(self) -> set[str]:
        """Names of the desired ConfigMaps."""
        return {obj["metadata"]["name"] for obj in self.objects if obj["kind"] == "ConfigMap"}

    @property
    def has_http_route(self) -> bool:
        """Whether the spec has an HTTPRoute and the API server supports the kind."""
        return any(obj["kind"] == "HTTPRoute" for obj in self.objects)


def resolve(
    observed: Observation, spec: Object, restrictions: Restrictions | None = None
) -> ResolvedService:
    """Return the observed service with the decoded and validated `spec`.

    Args:
        restrictions: what the spec may request. The builders check it. None: everything.

    Raises:
        InvalidSpec: the spec is invalid. The message names the field.
    """
    metadata = observed.service["metadata"]
    try:
        decoded = valid_spec(spec)
    except ValueError as error:
        raise InvalidSpec(error) from error
    return ResolvedService(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        spec=decoded,
        coordinator=observed.coordinator if decoded.decode.parallelism.expert else None,
        gateway_schemes=gateway_schemes(observed.role_pods("gateway")),
        restrictions=restrictions,
    )


def compute_desired(
    resolved: ResolvedService,
    policy_api: str | None,
    *,
    keep_coordinator: bool = False,
    operator_namespace: str | None = None,
    http_routes: bool = False,
) -> Desired:
    """Return the desired state of a service. No request is sent.

    An expert-parallel group has no template until the coordinator's Service has an address.

    Args:
        policy_api: apiVersion of PodDisruptionBudgets; None if the API server has none.
        keep_coordinator: whether ranks exist, so that a coordinator stays even if the spec no
            longer needs it.
        operator_namespace: namespace of the operator's pod, for network policies. None: the
            operator does not run in the cluster.
        http_routes: whether the API server has HTTPRoutes.

    Raises:
        ValueError: a template overlay cannot be merged, or a field requests what
            `resolved.restrictions` do not allow.
    """
    is_postponed = resolved.is_expert_parallel and resolved.coordinator is None
    if is_postponed:  # raises an error for a refused template before any object is created
        MemberTemplate(msgspec.structs.replace(resolved, coordinator=_ANY_ADDRESS), "decode")
    roles = [role for role in names.CONFIGURED_ROLES if not (role == "decode" and is_postponed)]
    configured = [role for role in roles if role != "prefill" or resolved.has_prefill]
    has_coordinator = resolved.is_expert_parallel or keep_coordinator
    coordinator: list[Object | Absent] = []  # empty: an existing one is kept
    if resolved.is_expert_parallel:
        coordinator = [coordinator_service.build(resolved), coordinator_deployment.build(resolved)]
    elif not has_coordinator:
        name = names.coordinator_name(resolved.name)
        coordinator = [Absent("Deployment", name), Absent("Service", name)]
    gateway = gateway_deployment.build(resolved)
    # NetworkPolicies come before the pods that they protect.
    parts: list[Object | Absent] = [
        *(config_maps.build(resolved, role) for role in configured),
        network_policy.build_members(resolved, operator_namespace),
        network_policy.build_coordinator(
            resolved, operator_namespace, has_coordinator=has_coordinator
        ),
        engine_account.build(resolved),
        *coordinator,
        gateway_account.build(resolved),
        gateway_role.build(resolved),
        gateway_role_binding.build(resolved),
        headless_service.build(resolved),
        gateway_service.build(resolved),
        gateway,
        ingress.build(resolved),
    ]
    if http_routes:
        parts.append(http_route.build(resolved))
    if policy_api:
        parts += [
            disruption_budget.build(resolved, role, policy_api) for role in names.CONFIGURED_ROLES
        ]
    return Desired(
        resolved=resolved,
        objects=[part for part in parts if isinstance(part, dict)],
        absent=[part for part in parts if isinstance(part, Absent)],
        members={
            role: MemberTemplate(resolved, role) for role in names.MEMBER_ROLES if role in roles
        },
        gateway_revision=gateway_deployment.revision_of(gateway),
    )
