"""Everything that should exist for a service, but for its member pods, which `plan.py` moves one by one."""

from __future__ import annotations

import msgspec

from baton_operator import names
from baton_operator.builders import (
    access,
    config,
    coordinator,
    engine_account,
    gateway,
    members_service,
    network_policy,
)
from baton_operator.builders.disruption_budget import disruption_budget
from baton_operator.builders.member import MemberTemplate
from baton_operator.builders.owner import Object, Owner
from baton_operator.observe import Observation, gateway_schemes
from baton_operator.problems import InvalidSpec
from baton_operator.rules import valid_spec


class Desired(msgspec.Struct, frozen=True, kw_only=True):
    """The desired state of one service."""

    objects: list[Object]
    """In the order of creation: what others refer to comes first."""
    absent: list[tuple[str, str]]
    """(kind, name) of what must not exist any more."""
    members: dict[names.MemberRole, MemberTemplate]
    """A role that is missing is not to be touched yet."""

    @property
    def config_maps(self) -> set[str]:
        """Names of the ConfigMaps."""
        return {obj["metadata"]["name"] for obj in self.objects if obj["kind"] == "ConfigMap"}


def owner_of(observed: Observation) -> Owner:
    """Return the service with its spec decoded. Raises InvalidSpec naming the field."""
    metadata = observed.service["metadata"]
    try:
        spec = valid_spec(observed.service["spec"])
    except ValueError as error:
        raise InvalidSpec(error) from error
    return Owner(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        spec=spec,
        coordinator=observed.coordinator if spec.decode.parallelism.expert else None,
        gateway_schemes=gateway_schemes(observed.role_pods("gateway")),
    )


def desired(
    owner: Owner,
    policy_api: str | None,
    *,
    keep_coordinator: bool = False,
    operator_namespace: str | None = None,
    http_routes: bool = False,
) -> Desired:
    """Pure. Decode pods of an expert-parallel group have no template before the coordinator's Service has an address.

    Args:
        policy_api: version of the policy API as served, None if the server has none.
        keep_coordinator: pods that need it exist, though the service is no expert-parallel group any more.
        operator_namespace: where network policies find the operator; None: it is no pod of the cluster.
        http_routes: whether the server has them.

    Raises:
        ValueError: a template overlay cannot be merged.
    """
    roles: list[names.ConfiguredRole] = ["prefill", "decode", "gateway"] if owner.has_prefill else ["decode", "gateway"]
    postponed = owner.is_expert_parallel and owner.coordinator is None
    objects: list[Object] = [config.config_map(owner, role) for role in roles if not (role == "decode" and postponed)]
    absent: list[tuple[str, str]] = []
    # What keeps others out comes before what is to be kept.
    has_coordinator = owner.is_expert_parallel or keep_coordinator
    for policy, wanted in (
        (network_policy.members_policy(owner, operator_namespace), True),
        (network_policy.coordinator_policy(owner, operator_namespace), has_coordinator),
    ):
        if wanted and owner.spec.security.network_policy:
            objects.append(policy)
        else:
            absent.append((policy["kind"], policy["metadata"]["name"]))
    objects.append(engine_account.service_account(owner))
    if owner.is_expert_parallel:
        objects += [coordinator.service(owner), coordinator.deployment(owner)]
    elif not keep_coordinator:
        name = names.coordinator_name(owner.name)
        absent += [("Deployment", name), ("Service", name)]
    objects += [
        gateway.service_account(owner),
        gateway.role(owner),
        gateway.role_binding(owner),
        members_service.service(owner),
        gateway.service(owner),
        gateway.deployment(owner),
    ]
    if ingress := access.ingress(owner):
        objects.append(ingress)
    else:
        absent.append(("Ingress", names.gateway_name(owner.name)))
    if http_routes:
        if route := access.http_route(owner):
            objects.append(route)
        else:
            absent.append(("HTTPRoute", names.gateway_name(owner.name)))
    if policy_api:
        budgeted: tuple[names.ConfiguredRole, ...] = ("prefill", "decode", "gateway")
        for role in budgeted:
            if budget := disruption_budget(owner, role, policy_api):
                objects.append(budget)
            else:
                absent.append(("PodDisruptionBudget", f"{owner.name}-{role}"))
    return Desired(
        objects=objects,
        absent=absent,
        members={
            role: MemberTemplate(owner, role) for role in names.MEMBER_ROLES if not (role == "decode" and postponed)
        },
    )
