"""From the topology of an expert-parallel group to its condition and its events. Pure."""

from __future__ import annotations

import msgspec

from baton_engine.protocol.topology import OperationPhase, RankPhase
from baton_operator import api
from baton_operator.topology import ACTIVE

Verdict = tuple[str, str, str]
"""status, reason, message of a condition."""

AT_REST = "AtRest"
SCALE_FAILED = "ScaleFailed"
UNREACHABLE = "CoordinatorUnreachable"
STATIONS = {"Forming", "ScalingUp", "ScalingDown", "Committing", "Recovering", "Rebalancing"}
"""Reasons of a group that is on its way."""
_ACTIVE = {str(phase) for phase in ACTIVE}
_KINDS = {"form": "Forming", "recover": "Recovering", "rebalance": "Rebalancing"}


class GroupTopology(msgspec.Struct, frozen=True, kw_only=True):
    """What the status is to say of an expert-parallel group."""

    status: api.TopologyStatus | None
    reachable: bool
    asked_for: frozenset[str] = frozenset()
    """Names that the coordinator was asked for last."""

    @property
    def serving(self) -> frozenset[str]:
        """Ranks that serve."""
        ranks = self.status.ranks if self.status and self.reachable else []
        return frozenset(rank.name for rank in ranks if rank.phase == RankPhase.SERVING)

    @property
    def has_ranks(self) -> bool:
        """A generation is known, perhaps from earlier."""
        return self.status is not None and bool(self.status.ranks)


def scaling_verdict(topology: GroupTopology, desired: int) -> Verdict:
    """Whether the topology is being changed. False when at rest, and with the reason when a change failed."""
    if not topology.reachable:
        return "Unknown", UNREACHABLE, "the coordinator does not answer; ranks serve on, and no member is removed"
    status = topology.status
    operation = status.operation if status else None
    ranks = {rank.name for rank in status.ranks} if status else set()
    if not desired and not ranks:
        return "False", AT_REST, "no ranks are wanted"
    if operation and operation.phase in _ACTIVE:
        return "True", _reason(operation, ranks, topology.asked_for), _message(operation, topology.asked_for)
    if operation and operation.phase == OperationPhase.FAILED:
        serving = f"generation {status.generation if status else 0} goes on with {len(ranks)} ranks"
        return (
            "False",
            SCALE_FAILED,
            f"{operation.kind}: {operation.reason or 'it did not say why'}; {serving}; it is tried again",
        )
    if len(ranks) < desired:
        what = "ScalingUp" if ranks else "Forming"
        return "True", what, f"waits for pods: {len(ranks)} of {desired} are ranks"
    if len(ranks) > desired:
        return "True", "ScalingDown", f"{len(ranks)} are ranks, {desired} are wanted"
    return "False", AT_REST, f"generation {status.generation if status else 0} with {len(ranks)} ranks"


def _reason(operation: api.OperationStatus, ranks: set[str], asked_for: frozenset[str]) -> str:
    if (
        operation.kind == "scale" and ranks == asked_for
    ):  # some have adopted it already: who came or went is not to be seen
        return "Committing"
    if operation.kind == "scale":
        return "ScalingUp" if asked_for - ranks else "ScalingDown"
    return _KINDS.get(operation.kind, "ScalingUp")


def _message(operation: api.OperationStatus, asked_for: frozenset[str]) -> str:
    members = ", ".join(sorted(asked_for))
    number = f" generation {operation.generation}" if operation.generation else ""
    why = f": {operation.reason}" if operation.reason else ""
    return f"{operation.phase}{number} with {members}{why}"


def operation_events(before: api.TopologyStatus | None, now: api.TopologyStatus | None) -> list[tuple[bool, str, str]]:
    """(warning, reason, message) of each event that is due: an operation began, ended, or failed."""
    operation, known = now.operation if now else None, before.operation if before else None
    if operation is None:
        return []
    begun = (operation.id, operation.kind, operation.generation)
    seen = known is not None and (known.id, known.kind) == begun[:2] and known.generation in (0, operation.generation)
    words = f"operation {operation.id} ({operation.kind})"
    to = f" to generation {operation.generation}" if operation.generation else ""
    events: list[tuple[bool, str, str]] = []
    if not seen or (known is not None and known.phase not in _ACTIVE and operation.phase in _ACTIVE):
        events.append((False, "TopologyOperationStarted", f"{words}{to} began"))
    ended = operation.phase not in _ACTIVE and not (seen and known is not None and known.phase == operation.phase)
    if ended and operation.phase == OperationPhase.FAILED:
        events.append((True, "TopologyOperationFailed", f"{words}{to}: {operation.reason}"))
    elif ended:
        why = f": {operation.reason}" if operation.reason else ""
        events.append((False, "TopologyOperationEnded", f"{words}{to}: {operation.phase}{why}"))
    return events
