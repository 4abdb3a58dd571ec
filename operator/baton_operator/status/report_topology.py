"""Compute the condition and the Events about the topology of an expert-parallel group. Pure.

The topology is the set of ranks that serve together. Each change makes a new generation of it.
"""

from __future__ import annotations

import msgspec

from baton_operator.api.llmservice import OperationStatus, TopologyStatus
from baton_operator.kube.events import Event
from baton_operator.status.diagnose import Verdict
from baton_operator.status.reasons import Failure, Progress, Settled
from baton_protocol.topology import ACTIVE_PHASES, OperationPhase, RankPhase

_KINDS = {
    "form": Progress.FORMING,
    "recover": Progress.RECOVERING,
    "rebalance": Progress.REBALANCING,
}


class GroupTopology(msgspec.Struct, frozen=True, kw_only=True):
    """The topology of an expert-parallel group, as input of the status."""

    status: TopologyStatus | None  # None: no topology is known
    reachable: bool  # whether the coordinator replied in this reconcile
    requested: frozenset[str] = frozenset()  # members of the last request to the coordinator

    @property
    def serving(self) -> frozenset[str]:
        """Names of the ranks that serve; empty if the coordinator does not reply."""
        ranks = self.status.ranks if self.status and self.reachable else []
        return frozenset(rank.name for rank in ranks if rank.phase == RankPhase.SERVING)

    @property
    def has_ranks(self) -> bool:
        """Whether any ranks are known, from the coordinator or from the previous status."""
        return self.status is not None and bool(self.status.ranks)


def topology_verdict(topology: GroupTopology, desired: int) -> Verdict:
    """Return the verdict on the condition Scaling: True while the topology changes.

    Unknown: the coordinator does not reply.
    """
    if not topology.reachable:
        return Verdict(
            "Unknown",
            Failure.COORDINATOR_UNREACHABLE,
            "the coordinator does not answer; ranks keep serving, and none of them is removed; "
            "check the coordinator's pod",
        )
    status = topology.status
    operation, generation = (status.operation, status.generation) if status else (None, 0)
    ranks = {rank.name for rank in status.ranks} if status else set()
    if not desired and not ranks:
        return Verdict("False", Settled.AT_REST, "the group is scaled to zero")
    if operation and operation.phase in ACTIVE_PHASES:
        members = ", ".join(sorted(topology.requested))
        what = f"{operation.phase}{_after(' generation ', operation.generation)}"
        message = f"operation {operation.kind}: {what}, members {members}"
        return Verdict(
            "True",
            _reason(operation, ranks, topology.requested),
            message + _after(": ", operation.reason),
        )
    if operation and operation.phase == OperationPhase.FAILED:
        why = f"operation {operation.kind} failed: {operation.reason or 'no reason was given'}"
        serving = f"generation {generation} keeps serving with {len(ranks)} ranks"
        return Verdict("False", Failure.SCALE_FAILED, f"{why}; {serving}; the operation is retried")
    if len(ranks) < desired:
        reason = Progress.SCALING_UP if ranks else Progress.FORMING
        return Verdict(
            "True",
            reason,
            f"waiting for pods to join the group: {len(ranks)} of {desired} are ranks",
        )
    if len(ranks) > desired:
        return Verdict(
            "True",
            Progress.SCALING_DOWN,
            f"waiting for ranks to leave the group: {len(ranks)} exist, {desired} are desired",
        )
    return Verdict(
        "False", Settled.AT_REST, f"generation {generation} of the topology has {len(ranks)} ranks"
    )


def _reason(operation: OperationStatus, ranks: set[str], requested: frozenset[str]) -> str:
    if operation.kind != "scale":
        return _KINDS.get(operation.kind, Progress.SCALING_UP)
    if ranks == requested:  # after the commit, the status no longer shows which ranks join or leave
        return Progress.COMMITTING
    return Progress.SCALING_UP if requested - ranks else Progress.SCALING_DOWN


def _after(words: str, value: str | int | None) -> str:
    """Return `words` followed by `value`; empty if `value` is empty, 0 or None."""
    return f"{words}{value}" if value else ""


def operation_events(before: TopologyStatus | None, now: TopologyStatus | None) -> list[Event]:
    """Return Events about an operation that started, ended or failed between `before` and `now`."""
    operation, known = now.operation if now else None, before.operation if before else None
    if operation is None:
        return []
    is_same = known is not None and (known.id, known.kind) == (operation.id, operation.kind)
    if known is not None and not (is_same and known.generation in (0, operation.generation)):
        known = None  # another operation, or an earlier attempt at this one
    is_active = operation.phase in ACTIVE_PHASES
    was_active = known is not None and known.phase in ACTIVE_PHASES
    generation = _after(" to generation ", operation.generation)
    what = f"operation {operation.id} ({operation.kind}){generation}"
    events = []
    if known is None or (is_active and not was_active):
        events.append(Event("TopologyOperationStarted", f"{what} began"))
    if not is_active and (known is None or known.phase != operation.phase):
        if operation.phase == OperationPhase.FAILED:
            message = f"{what}: {operation.reason}"
            events.append(Event("TopologyOperationFailed", message, warning=True))
        else:
            message = f"{what}: {operation.phase}{_after(': ', operation.reason)}"
            events.append(Event("TopologyOperationEnded", message))
    return events
