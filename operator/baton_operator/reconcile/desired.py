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
    coordinator_objects,
    gateway_objects,
    network_policy,
    service_accounts,
)
from baton_operator.builders.disruption_budget import disruption_budget
from baton_operator.builders.http_route import http_route
from baton_operator.builders.ingress import ingress
from baton_operator.builders.member_pods import MemberTemplate, headless_service
from baton_operator.builders.resolved_service import ResolvedService
from baton_operator.builders.restrictions import Restrictions
from baton_operator.observe.observation import Observation, gateway_schemes
from baton_operator.reconcile_errors import InvalidSpec

#: Stands for the address of a coordinator that has none yet. It has no effect on checks.
_ANY_ADDRESS = "192.0.2.1"


class Desired(msgspec.Struct, frozen=True, kw_only=True):
    """The desired state of one service."""

    resolved: ResolvedService  #: The service from which this state is computed.
    objects: list[Object]  #: In the order of creation: an object comes after those it refers to.
    absent: list[tuple[str, str]]  #: (kind, name) of objects that must not exist.
    members: dict[names.MemberRole, MemberTemplate]  #: Members of a missing role are not changed.
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
    """Return the desired state of a service. Pure.

    An expert-parallel group has no template until the coordinator's Service has an address.

    Args:
        policy_api: apiVersion of PodDisruptionBudgets; None if the API server has none.
        keep_coordinator: keep a coordinator that the spec no longer needs, because ranks exist.
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
    has_policies = resolved.spec.security.network_policy
    has_coordinator = resolved.is_expert_parallel or keep_coordinator
    gateway_deployment = gateway_objects.deployment(resolved)
    coordinator, gateway = names.coordinator_name(resolved.name), names.gateway_name(resolved.name)
    # Each part is an object, or (kind, name) of an object that must not exist. NetworkPolicies come
    # before the pods that they protect.
    parts: list[Object | tuple[str, str]] = [
        *(config_maps.config_map(resolved, role) for role in configured),
        network_policy.members_policy(resolved, operator_namespace)
        if has_policies
        else ("NetworkPolicy", names.members_service_name(resolved.name)),
        network_policy.coordinator_policy(resolved, operator_namespace)
        if has_policies and has_coordinator
        else ("NetworkPolicy", coordinator),
        service_accounts.engine_account(resolved),
    ]
    if resolved.is_expert_parallel:
        parts += [coordinator_objects.service(resolved), coordinator_objects.deployment(resolved)]
    elif not keep_coordinator:
        parts += [("Deployment", coordinator), ("Service", coordinator)]
    parts += [
        service_accounts.gateway_account(resolved),
        service_accounts.gateway_role(resolved),
        service_accounts.gateway_role_binding(resolved),
        headless_service(resolved),
        gateway_objects.service(resolved),
        gateway_deployment,
        ingress(resolved) or ("Ingress", gateway),
    ]
    if http_routes:
        parts.append(http_route(resolved) or ("HTTPRoute", gateway))
    if policy_api:
        for role in names.CONFIGURED_ROLES:
            budget = disruption_budget(resolved, role, policy_api)
            parts.append(budget or ("PodDisruptionBudget", f"{resolved.name}-{role}"))
    return Desired(
        resolved=resolved,
        objects=[part for part in parts if isinstance(part, dict)],
        absent=[part for part in parts if isinstance(part, tuple)],
        members={
            role: MemberTemplate(resolved, role) for role in names.MEMBER_ROLES if role in roles
        },
        gateway_revision=gateway_objects.revision_of(gateway_deployment),
    )
