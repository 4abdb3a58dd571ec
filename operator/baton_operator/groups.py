"""The groups of pods as `report` judges them: members and gateway, from what was observed and what is desired. Pure."""

from __future__ import annotations

from baton_kube.client import Object
from baton_operator import names
from baton_operator.api_groups import AutoscalingStatus
from baton_operator.builders.member import MemberTemplate
from baton_operator.builders.owner import Owner
from baton_operator.desired import Desired
from baton_operator.diagnose import Diagnosis
from baton_operator.observe import Observation
from baton_operator.refusals import refusal_of_deployment
from baton_operator.report_group import Group, diagnose_route
from baton_operator.report_topology import GroupTopology
from baton_operator.topology import asleep, record, recorded_for


def member_group(
    owner: Owner,
    role: names.MemberRole,
    template: MemberTemplate,
    observed: Observation,
    autoscaling: AutoscalingStatus | None,
    refusal: Diagnosis | None,
) -> Group:
    """`refusal`: why the API server takes no further pod of the group."""
    coordinators: list[Object] = []
    if template.expert_group:
        coordinators = observed.role_pods("coordinator")
        deployment = observed.owned("Deployment", names.coordinator_name(owner.name))
        refusal = refusal or (refusal_of_deployment(deployment) if deployment else None)
    return Group(
        role=role,
        desired=owner.replicas(role),
        pods=observed.role_pods(role),
        revision=template.revision,
        topology=_topology(observed, owner) if template.expert_group else None,
        autoscaling=autoscaling,
        loading=observed.loading,
        refusal=refusal,
        missing=observed.missing,
        coordinators=coordinators,
    )


def gateway_group(owner: Owner, desired: Desired, observed: Observation, *, has_route: bool) -> Group:
    """`has_route`: an HTTPRoute is wanted, and the API server has them."""
    name = names.gateway_name(owner.name)
    deployment = observed.owned("Deployment", name)
    route = observed.owned("HTTPRoute", name) if has_route else None
    return Group(
        role="gateway",
        desired=owner.spec.gateway.replicas,
        pods=observed.role_pods("gateway"),
        updated=deployment is not None and _is_rolled_out(deployment),
        template_revision=_revision(desired),
        refusal=refusal_of_deployment(deployment) if deployment else None,
        route=diagnose_route(route) if route else None,
        missing=observed.missing,
    )


def _topology(observed: Observation, owner: Owner) -> GroupTopology:
    """Return the topology for the status, after this step."""
    assert owner.coordinator is not None, "a template of ranks needs it"
    pods = {pod["metadata"]["name"] for pod in observed.pods}
    topology, recorded = observed.topology, recorded_for(observed.service, owner.coordinator)
    status = record(topology, recorded, pods, owner.coordinator)
    return GroupTopology(
        status=status if owner.replicas("decode") else asleep(status),
        reachable=topology is not None,
        asked_for=frozenset(topology.desired) if topology else frozenset(),
    )


def _revision(desired: Desired) -> str | None:
    for obj in desired.objects:
        labels = obj["metadata"]["labels"]
        if obj["kind"] == "Deployment" and labels[names.LABEL_ROLE] == "gateway":
            return str(obj["spec"]["template"]["metadata"]["labels"][names.LABEL_REVISION])
    return None


def _is_rolled_out(deployment: Object) -> bool:
    """Whether the Deployment's controller has seen the newest template and replaced every pod."""
    status = deployment.get("status") or {}
    seen = status.get("observedGeneration", 0) >= deployment["metadata"]["generation"]
    return seen and status.get("updatedReplicas", 0) == status.get("replicas", 0) == deployment["spec"]["replicas"]
