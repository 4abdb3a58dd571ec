"""The gateway's pods as `report` judges them: a Deployment makes them, and an HTTPRoute may lead to them. Pure."""

from __future__ import annotations

from typing import Any

from baton_operator import names
from baton_operator.builders.access import PORTS
from baton_operator.builders.owner import Owner, Scheme
from baton_operator.desired import Desired
from baton_operator.observe import Observation, is_ready
from baton_operator.refusals import refusal_of_deployment
from baton_operator.report import Group
from baton_operator.report_route import route_problem

Object = dict[str, Any]


def gateway_group(
    owner: Owner, wanted: Desired, observed: Observation, deployment: Object | None, route: Object | None
) -> Group:
    """`deployment`, `route`: as they are; None: there is none."""
    return Group(
        role="gateway",
        desired=owner.spec.gateway.replicas,
        pods=observed.role_pods("gateway"),
        updated=deployment is not None and _rolled_out(deployment),
        template_revision=_revision(wanted),
        refusal=refusal_of_deployment(deployment) if deployment else None,
        route=route_problem(route) if route else None,
        missing=observed.missing,
    )


def gateway_schemes(pods: list[Object]) -> tuple[Scheme, ...]:
    """What those that are ready speak, by the names of their ports."""
    spoken: set[Scheme] = set()
    for pod in pods:
        if is_ready(pod) and "deletionTimestamp" not in pod["metadata"]:
            ports = {port.get("name") for each in pod["spec"]["containers"] for port in each.get("ports") or []}
            spoken |= ports & PORTS.keys()
    return tuple(sorted(spoken))


def _revision(wanted: Desired) -> str | None:
    for obj in wanted.objects:
        labels = obj["metadata"]["labels"]
        if obj["kind"] == "Deployment" and labels[names.LABEL_ROLE] == "gateway":
            return str(obj["spec"]["template"]["metadata"]["labels"][names.LABEL_REVISION])
    return None


def _rolled_out(deployment: Object) -> bool:
    """Whether the Deployment's controller has seen the newest template and replaced every pod."""
    status = deployment.get("status") or {}
    seen = status.get("observedGeneration", 0) >= deployment["metadata"]["generation"]
    return seen and status.get("updatedReplicas", 0) == status.get("replicas", 0) == deployment["spec"]["replicas"]
