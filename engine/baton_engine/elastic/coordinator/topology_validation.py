"""Validation of topology requests and of statuses."""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from baton_engine.elastic.coordinator.roster import MAX_DIGITS
from baton_engine.elastic.rank_name import RANK_NAME
from baton_protocol.topology import Placement, Status, TopologyMember, TopologyRequest

MAX_EXPERTS = 2**16
MAX_LAYERS = 2**12
MAX_REDUNDANT_EXPERTS = 2**12
#: Limit of the experts of all sparse layers together, and of the slots of a placement. The time to
#: plan a placement grows with both. Engines load at most 2**17 experts.
MAX_SLOTS = 2**20
MAX_MEMBERS = 2**10
#: Maximum number of characters of `Status.failure`. A longer text is truncated.
MAX_FAILURE = 2**12
OPERATION_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
#: An id or address: printable ASCII without white space.
PRINTABLE = re.compile(r"[!-~]{1,255}")


@dataclass(frozen=True, slots=True)
class OperationRefusal:
    """The field that makes a request invalid, and the reason."""

    field: str  # name of the request's field
    message: str


def check_request(
    request: TopologyRequest, last: TopologyRequest | None
) -> OperationRefusal | None:
    """Return why a request is invalid, or None if it is valid.

    Args:
        request: the request to check.
        last: the last accepted request.
    """
    if not OPERATION_ID.fullmatch(request.operation_id):
        return OperationRefusal(
            "operation_id", "must be 1 to 64 characters of A-Z, a-z, 0-9, '.', '_', ':' and '-'"
        )
    if not 1 <= len(request.members) <= MAX_MEMBERS or not all(
        map(RANK_NAME.fullmatch, request.members)
    ):
        return OperationRefusal(
            "members",
            f"must be 1 to {MAX_MEMBERS} pod names, each a DNS label of at most 63 characters",
        )
    if len(set(request.members)) != len(request.members):
        return OperationRefusal("members", "contains a pod name twice")
    if (
        last is not None
        and last.operation_id == request.operation_id
        and set(last.members) != set(request.members)
    ):
        return OperationRefusal(
            "operation_id",
            f"{request.operation_id} was used for other members, "
            f"{', '.join(sorted(last.members))}; use a new id",
        )
    return None


def check_status(status: Status) -> None:
    """Validate a status.

    Raises:
        ValueError: the status's fields contradict each other or exceed a limit.
    """
    member = status.member
    _check_member(member)
    if len(status.suspects) > MAX_MEMBERS:
        raise ValueError(
            f"{member.name}: {len(status.suspects)} suspects exceed the limit of {MAX_MEMBERS}"
        )
    names = (status.prepared, status.commit_seen, status.failed, *status.suspects)
    if not all(not name or PRINTABLE.fullmatch(name) for name in names):
        raise ValueError(f"{member.name}: a nonce or the instance id of a suspect is invalid")
    if not (0 <= status.num_experts <= MAX_EXPERTS and 0 <= status.num_sparse_layers <= MAX_LAYERS):
        raise ValueError(
            f"{member.name}: num_sparse_layers must be 0 to {MAX_LAYERS} and num_experts 0 to "
            f"{MAX_EXPERTS}, got {status.num_sparse_layers} and {status.num_experts}"
        )
    if not 0 <= status.num_redundant_experts <= MAX_REDUNDANT_EXPERTS:
        raise ValueError(
            f"{member.name}: num_redundant_experts must be 0 to "
            f"{MAX_REDUNDANT_EXPERTS}, got {status.num_redundant_experts}"
        )
    num_slots = status.num_sparse_layers * (status.num_experts + status.num_redundant_experts)
    if num_slots > MAX_SLOTS:
        raise ValueError(
            f"{member.name}: {num_slots} experts in all layers exceed the limit of {MAX_SLOTS}"
        )
    shape = [status.num_experts] * status.num_sparse_layers
    if status.loads is not None and [len(layer) for layer in status.loads.tokens] != shape:
        raise ValueError(
            f"{member.name}: the shape of the loads is not {status.num_sparse_layers} layers of "
            f"{status.num_experts} experts"
        )
    if status.expert_bytes < 0:
        raise ValueError(
            f"{member.name}: expert_bytes must not be negative, got {status.expert_bytes}"
        )
    for generation in (status.generation, status.committed):
        if generation is None:
            continue
        if (
            not generation.members
            or not 1 <= generation.number < 10**MAX_DIGITS
            or not generation.nonce
        ):
            raise ValueError(
                f"{member.name}: a generation has no members, no nonce or an invalid number"
            )
        if len(generation.members) > MAX_MEMBERS or not (
            PRINTABLE.fullmatch(generation.nonce) and PRINTABLE.fullmatch(generation.store_host)
        ):
            raise ValueError(
                f"{member.name}: a generation has {len(generation.members)} members (limit "
                f"{MAX_MEMBERS}), or its nonce or its host is not printable ASCII"
            )
        if generation.operation_id and not OPERATION_ID.fullmatch(generation.operation_id):
            raise ValueError(
                f"{member.name}: generation {generation.number} has an invalid operation id"
            )
        for each in generation.members:
            _check_member(each)
        if not _fits(generation.placement, generation.size, status):
            raise ValueError(
                f"{member.name}: the shape of the placement of generation {generation.number} is "
                f"not {status.num_sparse_layers} layers of {generation.size} ranks with at most "
                f"{MAX_SLOTS} slots"
            )


def truncate_failure(status: Status) -> Status:
    """Return the status with `failure` truncated to MAX_FAILURE characters."""
    if len(status.failure) <= MAX_FAILURE:
        return status
    return msgspec.structs.replace(status, failure=status.failure[:MAX_FAILURE] + "...")


def _check_member(member: TopologyMember) -> None:
    if not RANK_NAME.fullmatch(member.name):
        raise ValueError(f"the name of a rank must be a DNS label, got {member.name!r}")
    if not (PRINTABLE.fullmatch(member.instance_id) and PRINTABLE.fullmatch(member.host)):
        raise ValueError(f"{member.name}: the instance id or the address is invalid")
    if not all(
        0 <= port < 2**16 for port in (member.engine_port, member.link_port, member.store_port)
    ):
        raise ValueError(f"{member.name}: a port is not between 0 and {2**16 - 1}")


def _fits(placement: Placement, num_ranks: int, status: Status) -> bool:
    return (
        len(placement) == status.num_sparse_layers
        and all(len(layer) == num_ranks for layer in placement)
        and sum(sum(map(len, layer)) for layer in placement) <= MAX_SLOTS
    )
