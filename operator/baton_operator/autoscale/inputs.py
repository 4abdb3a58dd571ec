"""Convert the observed state of a service to the inputs of decisions and scrapes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from baton_operator import names
from baton_operator.autoscale.holds import RoleState
from baton_operator.autoscale.scrape import ScrapeTarget
from baton_operator.autoscale.settings import Settings
from baton_operator.builders.resolved_service import ResolvedService
from baton_operator.observe.observation import is_ready
from baton_operator.status.diagnose import is_leaving
from baton_operator.status.report_group import ReportedGroup
from baton_protocol.options.config import ENGINE_HTTP_PORT, GATEWAY_METRICS_PORT
from baton_protocol.topology import ACTIVE_PHASES


def role_states(
    resolved: ResolvedService,
    seen: Mapping[names.Role, ReportedGroup],
    settings: Mapping[names.MemberRole, Settings],
) -> dict[names.MemberRole, RoleState]:
    """Return the state of each observed group that has `autoscaling`, for `policy.decide`."""
    alone = resolved.replicas("prefill") == 0
    return {
        role: RoleState(
            role=role,
            size=resolved.replicas(role),
            pods=len(seen[role].pods),
            ready=seen[role].ready,
            operation=_operation(resolved, seen[role]),
            aggregated=role == "decode" and alone and isfinite(settings[role].targets.ttft_s),
        )
        for role in names.MEMBER_ROLES
        if role in settings and role in seen
    }


def _operation(resolved: ResolvedService, group: ReportedGroup) -> str:
    """Return the operation, such as a rollout, that must end before the group's size may change.

    Empty: there is no such operation.
    """
    operation = (
        group.topology.status.operation if group.topology and group.topology.status else None
    )
    if operation is not None and operation.phase in ACTIVE_PHASES:
        return f"topology operation {operation.id} ({operation.kind})"
    if group.topology is not None and not group.topology.reachable and group.topology.has_ranks:
        return "the wait for a reply of the coordinator"
    return "" if group.is_rolled_out or resolved.spec.paused else "a rollout"


def targets_of(resolved: ResolvedService, pods: list[dict[str, Any]]) -> list[ScrapeTarget]:
    """Return the scrape targets: the engines and gateways that are ready or draining."""
    targets = []
    for pod in pods:
        role = pod["metadata"]["labels"].get(names.LABEL_ROLE)
        address = pod.get("status", {}).get("podIP")
        if (
            role not in names.CONFIGURED_ROLES
            or not address
            or not (is_ready(pod) or _finishes(pod))
        ):
            continue
        restarts = sum(
            each.get("restartCount", 0) for each in pod["status"].get("containerStatuses") or []
        )
        targets.append(
            ScrapeTarget(
                pod=pod["metadata"]["name"],
                container=f"{pod['metadata']['uid']}/{restarts}",
                role=None if role == "gateway" else role,
                host=address,
                port=GATEWAY_METRICS_PORT if role == "gateway" else ENGINE_HTTP_PORT,
            )
        )
    return targets


def _finishes(pod: dict[str, Any]) -> bool:
    running = any(
        (each.get("state") or {}).get("running")
        for each in pod["status"].get("containerStatuses") or []
    )
    return running and is_leaving(pod) and not pod["metadata"].get("deletionTimestamp")
