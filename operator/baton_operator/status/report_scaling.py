"""Compute the condition Scaling, from autoscaler status and expert-parallel topology. Pure."""

from __future__ import annotations

from baton_operator.status.diagnose import Verdict
from baton_operator.status.reasons import (
    METRICS_MISSING,
    METRICS_STALE,
    ON_TARGET,
    Progress,
    Settled,
)
from baton_operator.status.report_group import ReportedGroup
from baton_operator.status.report_topology import topology_verdict

_NO_MEASUREMENTS = (METRICS_MISSING, METRICS_STALE)  # the autoscaler has no measurements


def scaling_verdict(members: list[ReportedGroup]) -> Verdict | None:
    """Return the verdict on the condition Scaling.

    The condition describes the expert-parallel topology if the topology changes, is unknown, or
    its last change failed. Otherwise it describes the groups with `autoscaling`. Without such
    groups, it describes the topology, which then is at rest.

    Args:
        members: the prefill and decode groups.

    Returns:
        None if no group is expert-parallel or has `autoscaling`.
    """
    of_topology = next(
        (topology_verdict(group.topology, group.desired) for group in members if group.topology),
        None,
    )
    sized = [group for group in members if group.autoscaling]
    if not sized or (of_topology is not None and of_topology.reason != Settled.AT_REST):
        return of_topology
    statuses = [group.autoscaling for group in sized if group.autoscaling is not None]
    messages = " ".join(status.message for status in statuses)
    for group in sized:
        if len(group.pods) != group.desired or group.ready != group.desired:
            return Verdict(
                "True",
                Progress.SCALING_UP if group.ready < group.desired else Progress.SCALING_DOWN,
                f"{group.ready} of {group.desired} {group.role} pods serve. {messages}",
            )
    reason = min(
        (status.reason for status in statuses),
        key=lambda reason: (reason not in _NO_MEASUREMENTS, reason == ON_TARGET),
    )
    return Verdict("Unknown" if reason in _NO_MEASUREMENTS else "False", reason, messages)
