"""The result of a preview: the steps, and the changes of fields, groups and objects."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from baton_operator.names import MemberRole

#: `restore` creates a member of the earlier revision.
ActionName = Literal["request topology", "drain", "delete", "create", "restore"]
#: `standby` is an engine of an expert-parallel group that is not a rank of the topology.
State = Literal["no room", "starting", "standby", "ready", "draining", "terminating"]


class Action(msgspec.Struct, frozen=True, kw_only=True):
    """One action of the operator on prefill pods or on decode pods."""

    action: ActionName
    role: MemberRole
    members: list[str]
    reason: str


class MemberRow(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one prefill or decode pod after a step."""

    name: str
    role: MemberRole
    revision: str
    state: State
    #: Rank in the present generation of an expert-parallel group. None: not a rank.
    rank: int | None = None


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One reconcile that acted or observed a change."""

    number: int
    #: Simulated time since the edit of the spec.
    seconds: float
    #: Events in the cluster since the previous step.
    events: list[str]
    actions: list[Action]
    members: list[MemberRow]
    #: Topology generation of the expert-parallel group. 0: the group has no topology. None: the
    #: service has no expert-parallel group.
    generation: int | None


class FieldChange(msgspec.Struct, frozen=True, kw_only=True):
    """The change of one field of the spec. A value of None means that the field is unset."""

    path: str
    before: Any
    after: Any


class GroupChange(msgspec.Struct, frozen=True, kw_only=True):
    """How the prefill or decode group changes. Each pair is (before the edit, after the edit)."""

    role: MemberRole
    sizes: tuple[int, int]
    #: The first revision is empty if no member existed before.
    revisions: tuple[str, str]
    #: Limits of the update strategy after the edit, as numbers of members.
    max_surge: int
    max_unavailable: int


class Preview(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of a rollout, and what changes in the spec and in the cluster."""

    fields: list[FieldChange] = []
    groups: list[GroupChange] = []
    steps: list[Step] = []
    #: Simulated time from the edit to the end of the simulation.
    seconds: float = 0.0
    #: Objects other than member pods: "creates", "changes" or "deletes" -> kinds and names.
    objects: dict[str, list[str]] = {}
    #: Fields whose edits the operator does not apply while `spec.paused` is true.
    held_back: tuple[str, ...] = ()
    #: Why the rollout did not complete; empty if the rollout completed.
    waits_for: list[str] = []

    def fewest_ready(self, group: GroupChange) -> int:
        """Return the lowest number of ready members of `group` before the edit or after a step."""
        return min([group.sizes[0], *(_count(step, group.role, {"ready"}) for step in self.steps)])

    def most_members(self, group: GroupChange) -> int:
        """Return the highest number of members of `group` before the edit or after a step."""
        return max([group.sizes[0], *(_count(step, group.role) for step in self.steps)])


def _count(step: Step, role: MemberRole, states: set[State] | None = None) -> int:
    return sum(row.role == role and (states is None or row.state in states) for row in step.members)
