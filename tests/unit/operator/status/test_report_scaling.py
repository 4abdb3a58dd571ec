"""The condition that reports the autoscaler."""

from __future__ import annotations

from baton_operator.api import llmservice
from baton_operator.status.report_group import ReportedGroup
from baton_operator.status.report_scaling import scaling_verdict
from baton_operator.status.report_topology import GroupTopology
from support.operator.reported_groups import sized_group
from support.operator.topology_statuses import status as topology_status


def test_the_scaling_condition_reports_the_autoscaler() -> None:
    def verdict(*groups: ReportedGroup) -> tuple[str, str] | None:
        found = scaling_verdict(list(groups))
        return found[:2] if found else None

    def expert_group(operation: llmservice.OperationStatus | None) -> ReportedGroup:
        topology = GroupTopology(
            status=topology_status("a", last=operation), reachable=True, requested=frozenset("a")
        )
        return ReportedGroup(role="decode", desired=1, pods=[], topology=topology)

    assert verdict() is None
    assert verdict(sized_group("OnTarget")) == ("False", "OnTarget")
    assert verdict(sized_group("AtMaximum")) == ("False", "AtMaximum")
    assert verdict(sized_group("MetricsMissing")) == ("Unknown", "MetricsMissing")
    assert verdict(sized_group("ITLAboveTarget", desired=2)) == ("True", "ScalingUp")
    operation = llmservice.OperationStatus(
        id="op",
        kind="scale",
        phase="committing",
        generation=4,
        seconds=llmservice.OperationSeconds(),
    )
    assert verdict(sized_group("OnTarget"), expert_group(operation)) == ("True", "Committing")
    assert verdict(sized_group("OnTarget"), expert_group(None)) == (
        "False",
        "OnTarget",
    )
