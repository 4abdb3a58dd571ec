"""Run the operator's planner on a simulated cluster, whose clock jumps to the next event."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import msgspec

from baton_local.preview.simulated_cluster import Cluster, Conditions, Pod
from baton_local.preview.simulated_coordinator import NEVER
from baton_local.preview.steps import Action, ActionName, MemberRow, Preview, Step
from baton_local.preview.target import (
    COORDINATOR,
    PreviewTarget,
    field_changes,
    group_changes,
    object_changes,
    target_of,
)
from baton_operator import names
from baton_operator.api import llmservice
from baton_operator.builders.member_pods import MemberTemplate
from baton_operator.plan.plan_group import GroupPlan, Member, progress_deadline_of
from baton_operator.plan.plan_members import plan_members, update_of
from baton_operator.plan.topology_view import TopologyView, topology_for_status
from baton_operator.revision_history import held_back, previous_revisions_of, with_sizes

START = datetime(2000, 1, 1, tzinfo=UTC)
#: A rollout has stopped if nothing changes for this time plus the longest deadline of the spec.
PATIENCE = timedelta(seconds=60)


def preview(
    old: PreviewTarget | None, new: PreviewTarget, conditions: Conditions, max_steps: int
) -> Preview:
    """Simulate the rollout after an edit from `old` to `new`. Return its steps and changes.

    Args:
        old: the service before the edit, with all members ready; None for a new service.
        new: the service after the edit.
        conditions: the behavior of the simulated cluster.
        max_steps: largest number of steps to simulate.
    """
    wanted = new
    waiting: tuple[str, ...] = ()
    if new.resolved.spec.paused:
        if old is None:
            return Preview(waits_for=["spec.paused is true, and nothing was rolled out before"])
        waiting = held_back(old.spec, new.spec)
        new = target_of(
            {"metadata": {"name": new.resolved.name}, "spec": with_sizes(old.spec, new.spec)}
        )
    rollout = _Rollout(old, new, conditions)
    waits_for = rollout.run(max_steps)
    return Preview(
        fields=[] if old is None else list(field_changes(old, wanted)),
        groups=group_changes(old, new),
        steps=rollout.steps,
        objects=object_changes(old, new),
        held_back=waiting,
        waits_for=waits_for,
        seconds=rollout.seconds,
    )


class _Rollout:
    """Simulates the operator's reconciles of one service after an edit of its spec."""

    def __init__(
        self, old: PreviewTarget | None, new: PreviewTarget, conditions: Conditions
    ) -> None:
        self.steps: list[Step] = []
        self._now = START
        self._owner, self._templates = new.resolved, new.desired.members
        self._previous = (
            {} if old is None else previous_revisions_of(new.resolved, old.spec, self._templates)
        )
        self._recorded: llmservice.TopologyStatus | None = None
        self._never_ready = conditions.never_ready
        self._cluster = Cluster(conditions, [] if old is None else self._pods_of(old))

    @property
    def seconds(self) -> float:
        """Simulated seconds since the edit."""
        return (self._now - START).total_seconds()

    def _pods_of(self, old: PreviewTarget) -> Iterator[Pod]:
        """Yield all members of `old` as ready pods."""
        for role, template in old.desired.members.items():
            for ordinal in range(old.resolved.replicas(role)):
                pod = self._pod(role, template, ordinal)
                yield msgspec.structs.replace(
                    pod, started=True, ready=True, unready_since=None, ready_at=START
                )

    def run(self, max_steps: int) -> list[str]:
        """Reconcile until the rollout is complete or stalls, or `max_steps` steps are recorded.

        Returns:
            The reasons why the rollout is not complete; empty if it is complete.
        """
        last_change, patience = self._now, PATIENCE + self._longest_deadline()
        while True:
            events = self._cluster.advance(self._now)
            plans = {role: self._plan(role) for role in self._templates}
            actions = [action for role, plan in plans.items() for action in self._apply(role, plan)]
            waits_for = self._waits_for()
            if events or actions:
                if len(self.steps) == max_steps:
                    return [f"the limit of {max_steps} steps (--steps) is reached", *waits_for]
                self._record_step(events, actions)
                last_change = self._now
                continue  # each change starts a reconcile at once
            next_event_at = self._cluster.next_event_at()
            revisit_at = min(
                (self._now + timedelta(seconds=s) for p in plans.values() if (s := p.revisit_s)),
                default=NEVER,
            )
            is_over = next_event_at == NEVER and (
                not waits_for or self._now > last_change + patience
            )
            if is_over or min(next_event_at, revisit_at) == NEVER:
                return waits_for
            self._now = min(next_event_at, revisit_at)

    def _longest_deadline(self) -> timedelta:
        spec = self._owner.spec
        surges = (
            spec.update_strategy.prefill.surge_timeout_seconds,
            spec.update_strategy.decode.surge_timeout_seconds,
        )
        return timedelta(
            seconds=max(spec.progress_deadline_seconds, spec.drain_timeout_seconds, *surges)
        )

    def _plan(self, role: names.MemberRole) -> GroupPlan:
        members: list[Member] = [*self._cluster.of_role(role)]
        topology = self._cluster.topology()
        self._recorded = topology_for_status(
            topology, self._recorded, self._cluster.pods, COORDINATOR
        )
        return plan_members(
            self._owner,
            role,
            self._templates[role],
            members,
            self._now,
            view=TopologyView(topology, self._recorded),
            has_coordinator=True,
            has_previous_revision=role in self._previous,
        )

    def _apply(self, role: names.MemberRole, plan: GroupPlan) -> list[Action]:
        """Carry out `plan` on the simulated cluster, and return the actions.

        `GroupPlan` defines the order of the actions.
        """
        cluster, template = self._cluster, self._templates[role]
        replicas, update = self._owner.replicas(role), update_of(self._owner, role)
        present = cluster.of_role(role)
        done: dict[tuple[ActionName, str], list[str]] = {}
        if plan.request is not None:
            ranks, members = set(cluster.coordinator.ranks), set(plan.request.members)
            changes = ((members - ranks, "to join"), (ranks - members, "to leave"))
            why = "; ".join(
                f"{', '.join(sorted(found))} {verb}" for found, verb in changes if found
            )
            done["request topology", why] = plan.request.members
            cluster.coordinator.request(plan.request)
        for name in plan.drain:
            is_outdated = cluster.pods[name].revision != template.revision and not update.paused
            why = "it is of the earlier revision" if is_outdated else f"replicas is {replicas}"
            done.setdefault(("drain", why), []).append(name)
            cluster.drain(name, self._now)
        for deletion in plan.delete:
            done.setdefault(("delete", deletion.why), []).append(deletion.name)
            cluster.delete(deletion.name, self._now)
        is_rollout = any(pod.revision != template.revision for pod in present) and not update.paused
        why = f"{len(present)} of {replicas} exist"
        if is_rollout:
            why = f"rollout: {len(present)} exist, at most {replicas + update.max_surge} may"
        for ordinal in plan.create:
            pod = self._pod(role, template, ordinal, becomes_ready=not self._never_ready)
            done.setdefault(("create", why), []).append(pod.name)
            cluster.create(pod, self._now)
        why = (
            "of the earlier revision: the new one is not ready within "
            f"{update.progress_deadline_s:g} s"
        )
        for ordinal in plan.restore:
            pod = self._pod(role, self._previous[role].template, ordinal)
            done.setdefault(("restore", why), []).append(pod.name)
            cluster.create(pod, self._now)
        return [
            Action(action=action, role=role, members=members, reason=why)
            for (action, why), members in done.items()
        ]

    def _pod(
        self,
        role: names.MemberRole,
        template: MemberTemplate,
        ordinal: int,
        *,
        becomes_ready: bool = True,
    ) -> Pod:
        return Pod(
            name=names.member_name(self._owner.name, role, ordinal),
            ordinal=ordinal,
            revision=template.revision,
            created=self._now,
            unready_since=self._now,
            expert_group=template.expert_group,
            role=role,
            becomes_ready=becomes_ready,
        )

    def _record_step(self, events: list[str], actions: list[Action]) -> None:
        cluster, ranks = self._cluster, self._cluster.coordinator.ranks
        pods = [pod for role in self._templates for pod in cluster.of_role(role)]
        rows = [
            MemberRow(
                name=pod.name,
                role=pod.role,
                revision=pod.revision,
                state=pod.state,
                rank=ranks.index(pod.name) if pod.expert_group and pod.name in ranks else None,
            )
            for pod in pods
        ]
        has_ranks = self._owner.is_expert_parallel or any(pod.expert_group for pod in pods)
        step = Step(
            number=len(self.steps) + 1,
            seconds=self.seconds,
            events=events,
            actions=actions,
            members=rows,
            generation=cluster.topology().generation if has_ranks else None,
        )
        self.steps.append(step)

    def _waits_for(self) -> list[str]:
        """Return the reasons why the rollout is not complete; empty if it is complete."""
        reasons: dict[str, list[str]] = {}
        for role, template in self._templates.items():
            pods, replicas = self._cluster.of_role(role), self._owner.replicas(role)
            for pod in pods:
                if reason := self._obstacle(pod, template):
                    reasons.setdefault(reason, []).append(pod.name)
            if len(pods) < replicas:
                reasons.setdefault(f"{len(pods)} of {replicas} members exist", []).append(role)
        return [f"{', '.join(subjects)}: {reason}" for reason, subjects in reasons.items()]

    def _obstacle(self, pod: Pod, template: MemberTemplate) -> str:
        """Return why `pod` is not in its final state; empty if it is in its final state."""
        update = update_of(self._owner, pod.role)
        is_outdated = pod.revision != template.revision and not update.paused
        deadline_s = update.progress_deadline_s
        is_late = progress_deadline_of(
            [(pod.unready_since, pod.no_room_since)], deadline_s, self._now
        ).has_passed
        match pod.state:
            case "ready":
                return (
                    "of the earlier revision, and needed until new members are ready"
                    if is_outdated
                    else ""
                )
            case "no room":
                return "no node has room"
            case "starting" if is_late:
                return f"not ready within progressDeadlineSeconds ({deadline_s:g} s)"
            case "starting" if pod.ready_at == NEVER:
                return "never becomes ready"
            case state:
                return state
