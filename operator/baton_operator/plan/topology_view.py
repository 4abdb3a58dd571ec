"""The topology of an expert-parallel group, from the coordinator and from the status. Pure.

After a restart, the coordinator reports only the ranks that have registered again. So a rank that
only the status lists still counts as a rank, unless the coordinator reports a newer generation than
the status.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

from baton_operator import names
from baton_operator.api import llmservice
from baton_protocol.topology import (
    MemberStatus,
    OperationPhase,
    OperationStatus,
    RankPhase,
    TopologyStatus,
)


class TopologyView:
    """The observed topology of an expert-parallel group, with methods to look up its members.

    Args:
        topology: reply of the coordinator.
        recorded: topology in the status of the service.
    """

    def __init__(
        self, topology: TopologyStatus, recorded: llmservice.TopologyStatus | None
    ) -> None:
        self.topology = topology
        self.desired = frozenset(topology.desired)
        self._entries: dict[str, list[MemberStatus]] = {}
        for entry in topology.members:
            self._entries.setdefault(entry.name, []).append(entry)
        may_lack_ranks = recorded is not None and topology.generation <= recorded.generation
        self._recorded = (
            {rank.name for rank in recorded.ranks} if recorded and may_lack_ranks else set()
        )

    @property
    def ranks(self) -> frozenset[str]:
        """Names of the ranks in the current topology."""
        return frozenset(name for name in {*self._entries, *self._recorded} if self.is_rank(name))

    @property
    def operation(self) -> OperationStatus | None:
        return self.topology.operation

    @property
    def is_changing(self) -> bool:
        """Whether an operation is being prepared or committed.

        Until the operation ends, the coordinator's reply does not list the members of the new
        topology.
        """
        return self.operation is not None and self.operation.phase in (
            OperationPhase.PREPARING,
            OperationPhase.COMMITTING,
        )

    def is_registered(self, name: str) -> bool:
        """Return whether the coordinator reports a registered process of this name."""
        return name in self._entries

    def is_rank(self, name: str) -> bool:
        """Return whether the member is a rank in the current topology."""
        if not self.is_registered(name):
            return name in self._recorded
        return any(entry.rank is not None for entry in self._entries[name])

    def serves(self, name: str) -> bool:
        """Return whether the member is a rank in phase SERVING."""
        return any(
            entry.rank is not None and entry.phase is RankPhase.SERVING
            for entry in self._entries.get(name, ())
        )

    def is_standby(self, name: str) -> bool:
        """Return whether the member is in phase LOADING or STANDBY and is not a rank."""
        entries = self._entries.get(name, ())
        idle = any(entry.phase in (RankPhase.STANDBY, RankPhase.LOADING) for entry in entries)
        return idle and not self.is_rank(name)


def topology_for_status(
    topology: TopologyStatus | None,
    recorded: llmservice.TopologyStatus | None,
    pods: Collection[str],
    coordinator: str,
) -> llmservice.TopologyStatus | None:
    """Return the topology for the status; None if none is known.

    The result has the ranks in the coordinator's reply. After a restart of the coordinator, the
    result also has the recorded ranks that have not registered again. Without a reply, or if the
    restarted coordinator reports generation 0, the result has only the recorded ranks. Recorded
    ranks without a pod are left out.

    Args:
        topology: the coordinator's reply; None without a reply.
        recorded: topology in the status; None if the status has no valid topology.
        pods: names of the pods that exist.
        coordinator: address of the coordinator's Service.
    """
    operation = (
        _operation(topology.operation)
        if topology is not None and topology.operation is not None
        else None
    )
    recorded_ranks = (
        [rank for rank in recorded.ranks if rank.name in pods] if recorded is not None else []
    )
    if recorded is not None and (
        topology is None or topology.generation == 0 < recorded.generation
    ):
        return llmservice.TopologyStatus(
            coordinator=coordinator,
            generation=recorded.generation,
            ranks=recorded_ranks,
            operation=operation or recorded.operation,
        )
    if topology is None:
        return None
    view = TopologyView(topology, recorded)
    ranks = [
        llmservice.RankStatus(name=entry.name, rank=entry.rank, phase=str(entry.phase))
        for entry in topology.members
        if entry.rank is not None
    ]
    listed = {rank.name for rank in ranks}
    ranks += [
        rank for rank in recorded_ranks if rank.name not in listed and view.is_rank(rank.name)
    ]
    return llmservice.TopologyStatus(
        coordinator=coordinator, generation=topology.generation, ranks=ranks, operation=operation
    )


def without_waiting_operation(
    status: llmservice.TopologyStatus | None,
) -> llmservice.TopologyStatus | None:
    """Return `status`. If the group has no rank, leave out an operation that waits for members.

    After a scale to zero, such an operation never ends: the coordinator keeps waiting for the last
    requested member.
    """
    operation = status.operation if status else None
    if (
        status is None
        or operation is None
        or status.ranks
        or operation.phase != str(OperationPhase.WAITING)
    ):
        return status
    return msgspec.structs.replace(status, operation=None)


def recorded_topology(
    service: dict[str, Any], coordinator: str
) -> llmservice.TopologyStatus | None:
    """Return the topology in the service's status.

    None: the status has no valid topology, or its coordinator had another address.
    """
    found = ((service.get("status") or {}).get("decode") or {}).get("topology")
    if not found:
        return None
    try:
        recorded = msgspec.convert(found, llmservice.TopologyStatus)
    except msgspec.ValidationError:  # another version of the operator wrote it
        return None
    return recorded if recorded.coordinator == coordinator else None


def filter_by_service_key(
    recorded: llmservice.TopologyStatus | None, pods: list[dict[str, Any]], key_name: str
) -> llmservice.TopologyStatus | None:
    """Return `recorded` without ranks that have another service key.

    Such ranks cannot register with the coordinator.

    Args:
        pods: the service's pods.
        key_name: id of the service's key, from `service_key_secret.name_of`.
    """
    if recorded is None:
        return None
    excluded = {
        pod["metadata"]["name"]
        for pod in pods
        if (pod["metadata"].get("annotations") or {}).get(names.ANNOTATION_SERVICE_KEY, "")
        != key_name
    }
    ranks = [rank for rank in recorded.ranks if rank.name not in excluded]
    return msgspec.structs.replace(recorded, ranks=ranks)


def _operation(operation: OperationStatus) -> llmservice.OperationStatus:
    """Return `operation` as the status shows it, without the duration of its current phase.

    That duration would change the status in every reconcile.
    """
    seconds = {
        phase: round(duration, 3)
        for phase, duration in operation.seconds.items()
        if phase != operation.phase and phase in llmservice.OperationSeconds.__struct_fields__
    }
    return llmservice.OperationStatus(
        id=operation.operation_id or "-",
        kind=operation.kind,
        phase=str(operation.phase),
        generation=operation.generation,
        reason=operation.reason or None,
        seconds=llmservice.OperationSeconds(**seconds),
    )
