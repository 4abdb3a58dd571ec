"""Plan the next step of one group: independent engines or expert-parallel ranks. Pure.

This module reads the size and the update strategy from the spec. `plan_group` or
`plan_expert_group` decides the step.
"""

from __future__ import annotations

from datetime import datetime

from baton_operator import names
from baton_operator.api.spec_groups import surge_and_unavailable
from baton_operator.builders.member_pods import MemberTemplate
from baton_operator.builders.resolved_service import ResolvedService
from baton_operator.plan.plan_expert_group import ExpertGroup, plan_expert_group
from baton_operator.plan.plan_group import DesiredGroup, GroupPlan, Member, Update, plan_group
from baton_operator.plan.topology_view import TopologyView


def plan_members(
    resolved: ResolvedService,
    role: names.MemberRole,
    template: MemberTemplate,
    members: list[Member],
    now: datetime,
    *,
    view: TopologyView | None,
    has_coordinator: bool,
    has_previous_revision: bool,
) -> GroupPlan:
    """Return the next step of one group.

    `plan_expert_group` also plans a group that is no longer expert-parallel, as long as it has
    ranks and a coordinator.

    Args:
        view: the topology; None if the coordinator did not reply.
        has_coordinator: whether the coordinator's Service has an address.
        has_previous_revision: as in `plan_group`.
    """
    target = DesiredGroup(
        size=resolved.replicas(role),
        revision=template.revision,
        update=update_of(resolved, role),
        drain_timeout_s=float(resolved.spec.drain_timeout_seconds),
    )
    if not (template.expert_group or (has_coordinator and any(m.expert_group for m in members))):
        return plan_group(members, target, now, has_previous_revision=has_previous_revision)
    group = ExpertGroup(
        target=target, service_uid=resolved.uid, name=template.expert_group, view=view
    )
    return plan_expert_group(members, group, now)


def update_of(resolved: ResolvedService, role: names.MemberRole) -> Update:
    """Return the update strategy of `role`, with percentages converted to numbers of members."""
    strategy = (
        resolved.spec.update_strategy.decode
        if role == "decode"
        else resolved.spec.update_strategy.prefill
    )
    max_surge, max_unavailable = surge_and_unavailable(strategy, resolved.replicas(role))
    return Update(
        max_surge=max_surge,
        max_unavailable=max_unavailable,
        surge_timeout_s=float(strategy.surge_timeout_seconds),
        progress_deadline_s=float(resolved.spec.progress_deadline_seconds),
        paused=resolved.spec.paused,
    )
