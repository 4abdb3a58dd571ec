"""The response to GET /topology: members with their phases and reasons, and the operation."""

from __future__ import annotations

from baton_engine.elastic.coordinator.operation import Operation
from baton_engine.elastic.coordinator.topology_planner import TopologyPlanner
from baton_protocol.topology import MemberStatus, TopologyStatus


def topology_status(
    planner: TopologyPlanner, operation: Operation | None, now: float
) -> TopologyStatus:
    """Return the response to GET /topology."""
    present = planner.present
    return TopologyStatus(
        generation=0 if present is None else present.number,
        desired=sorted(planner.desired),
        members=member_statuses(planner, now),
        operation=None if operation is None else operation.status(now),
        store="" if present is None else f"{present.store_host}:{present.store_port}",
    )


def member_statuses(planner: TopologyPlanner, now: float) -> list[MemberStatus]:
    """Return the statuses of all registered instances.

    The members of the present generation come first, in rank order.
    """
    roster, present = planner.roster, planner.present
    ranks = (
        {}
        if present is None
        else {member.instance_id: rank for rank, member in enumerate(present.members)}
    )
    members = []
    for instance_id, rank in roster.ranks.items():
        status = rank.status
        reason = status.failure
        if instance_id in roster.replaced:
            reason = "another process of this name has registered"
        elif instance_id in roster.stalled:
            reason = (
                f"sends statuses, but its loop is stalled: no progress for {now - rank.moved:.1f} s"
            )
        elif instance_id not in roster.living:
            reason = f"has sent no status for {now - rank.seen:.1f} s"
        elif instance_id not in ranks:
            reason = planner.unfit(status) or reason
        members.append(
            MemberStatus(
                name=status.member.name,
                instance_id=instance_id,
                phase=status.phase,
                rank=ranks.get(instance_id),
                num_running=status.num_running,
                num_waiting=status.num_waiting,
                reason=reason,
            )
        )
    members.sort(key=lambda each: (each.rank is None, each.rank or 0, each.name, each.instance_id))
    return members
