"""What is refused at the edge: requests for a topology, and statuses that contradict themselves."""

from __future__ import annotations

from dataclasses import dataclass

from baton_engine.elastic.roster import MAX_DIGITS
from baton_engine.protocol.topology import Placement, Status, TopologyRequest

MAX_EXPERTS = 2**16
MAX_LAYERS = 2**12


@dataclass(frozen=True, slots=True)
class Refusal:
    field: str
    """Of the request."""
    message: str


def check_request(request: TopologyRequest, last: TopologyRequest | None) -> Refusal | None:
    """`last`: the one that was accepted before."""
    if not request.operation_id:
        return Refusal("operation_id", "must not be empty")
    if not request.members or not all(request.members):
        return Refusal("members", "must be one or more names of pods")
    if len(set(request.members)) != len(request.members):
        return Refusal("members", "names a pod twice")
    if last is not None and last.operation_id == request.operation_id and set(last.members) != set(request.members):
        return Refusal("operation_id", f"{request.operation_id} was used for {', '.join(sorted(last.members))}")
    return None


def check_status(status: Status) -> None:
    """Raises ValueError: its parts do not fit each other, so that nothing can be concluded from it."""
    member = status.member
    if not member.name or not member.instance_id:
        raise ValueError("a rank without a name or an instance id")
    if not (0 <= status.num_experts <= MAX_EXPERTS and 0 <= status.num_sparse_layers <= MAX_LAYERS):
        raise ValueError(f"{member.name}: {status.num_sparse_layers} sparse layers of {status.num_experts} experts")
    shape = [status.num_experts] * status.num_sparse_layers
    if status.loads is not None and [len(layer) for layer in status.loads.tokens] != shape:
        raise ValueError(
            f"{member.name}: loads are not of {status.num_sparse_layers} layers, {status.num_experts} experts"
        )
    if status.num_redundant_experts < 0:
        raise ValueError(f"{member.name}: {status.num_redundant_experts} redundant experts")
    for generation in (status.generation, status.committed):
        if generation is None:
            continue
        if not generation.members or not 1 <= generation.number < 10**MAX_DIGITS or not generation.nonce:
            raise ValueError(f"{member.name}: a generation without members, number or nonce")
        if not _fits(generation.placement, generation.size, status):
            raise ValueError(f"{member.name}: generation {generation.number} has a placement for something else")


def _fits(placement: Placement, num_ranks: int, status: Status) -> bool:
    return len(placement) == status.num_sparse_layers and all(len(layer) == num_ranks for layer in placement)
