"""What tests of the controller ask a simulated group."""

from __future__ import annotations

from baton_protocol.topology import Directive, Generation, OperationPhase, OperationStatus
from support.elastic.simulated_group import SimulatedGroup
from support.elastic.simulated_rank import SimulatedRank


def told(group: SimulatedGroup, rank: SimulatedRank) -> Directive:
    directive = group.controller.directive_for(rank.id)
    assert directive is not None
    return directive


def operation(group: SimulatedGroup) -> OperationStatus:
    found = group.status().operation
    assert found is not None
    return found


def recovered(group: SimulatedGroup) -> bool:
    return any(
        (each.kind, each.outcome) == ("recover", OperationPhase.DONE) for each in group.ended
    )


def generation_of(rank: SimulatedRank) -> Generation:
    assert rank.generation is not None
    return rank.generation


def names_of(generation: Generation) -> list[str]:
    return [member.name for member in generation.members]
