"""Read the state of a simulated group, for tests of the controller."""

from __future__ import annotations

from baton_protocol.topology import Directive, Generation, OperationPhase, OperationStatus
from support.elastic.simulated_group import SimulatedGroup
from support.elastic.simulated_rank import SimulatedRank


def directive_of(group: SimulatedGroup, rank: SimulatedRank) -> Directive:
    return group.controller.directive_for(rank.id)


def operation(group: SimulatedGroup) -> OperationStatus:
    return group.status().operation


def recovered(group: SimulatedGroup) -> bool:
    return any(
        (each.kind, each.outcome) == ("recover", OperationPhase.DONE) for each in group.ended
    )


def generation_of(rank: SimulatedRank) -> Generation:
    return rank.generation


def names_of(generation: Generation) -> list[str]:
    return [member.name for member in generation.members]
