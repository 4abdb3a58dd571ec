"""Compute the condition Scaling, of the autoscaler and of an expert-parallel topology. Pure."""

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
    """Return the verdict on the condition Scaling of a service; None if nothing scales its groups.

    Args:
        members: the prefill and decode groups.
    """
    of_topology = [
        topology_verdict(group.topology, group.desired) for group in members if group.topology
    ]
    sized = [group for group in members if group.autoscaling]
    return autoscaling_verdict(sized, of_topology[0] if of_topology else None)


def autoscaling_verdict(sized: list[ReportedGroup], of_topology: Verdict | None) -> Verdict | None:
    """Return the verdict on Scaling from both of its sources; None if there is neither.

    While an expert-parallel group is not at rest, and if `sized` is empty, the condition is
    `of_topology`. Otherwise the condition describes the groups in `sized`.

    Args:
        sized: the groups with `autoscaling`.
        of_topology: the condition Scaling of the expert-parallel group; None without such a group.
    """
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
