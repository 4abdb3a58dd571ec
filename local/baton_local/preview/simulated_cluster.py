"""The simulated cluster: prefill and decode pods that start, drain and end.

The cluster has no clock: its methods get the time as an argument.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any

import msgspec

from baton_local.preview.simulated_coordinator import NEVER, SimulatedCoordinator
from baton_local.preview.steps import State
from baton_operator import names
from baton_operator.plan.plan_group import Member
from baton_protocol.topology import TopologyStatus

#: Time from the deletion of a pod to its end.
GONE_AFTER = timedelta(seconds=1)


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """The behavior of the simulated cluster."""

    #: Time from the binding of a pod to a node until the pod serves.
    ready_after_s: float = 30.0
    #: Time from the start of a drain until all requests are finished.
    drain_after_s: float = 5.0
    #: Whether pods of the new spec never become ready.
    never_ready: bool = False
    #: Number of prefill and decode pods that the nodes have room for; None for no limit.
    capacity: int | None = None


class Pod(Member, frozen=True, kw_only=True):
    """A simulated prefill or decode pod: a `Member` with the times of its next state changes."""

    role: names.MemberRole
    becomes_ready: bool = True
    #: Time at which the pod becomes ready; None if the pod is not bound to a node.
    ready_at: datetime | None = None
    drained_at: datetime | None = None
    gone_at: datetime | None = None

    @property
    def next_event_at(self) -> datetime:
        """Time of the pod's next state change; `NEVER` if there is none."""
        if self.gone_at is not None:
            return self.gone_at
        starts_at = NEVER if self.started or self.ready_at is None else self.ready_at
        return min(starts_at, self.drained_at or NEVER)

    @property
    def state(self) -> State:
        if self.deletion is not None:
            return "terminating"
        if self.no_room_since is not None:
            return "no room"
        if self.draining:
            return "draining"
        if not self.started:
            return "starting"
        return "ready" if self.ready else "standby"


class Cluster:
    """The simulated prefill and decode pods of one service, and their coordinator."""

    def __init__(self, conditions: Conditions, pods: Iterable[Pod]) -> None:
        """Create a cluster with `pods`, all of which are ready."""
        self._conditions = conditions
        self.pods = {pod.name: pod for pod in pods}
        self.coordinator = SimulatedCoordinator(
            name for name, pod in self.pods.items() if pod.expert_group
        )

    def of_role(self, role: names.MemberRole) -> list[Pod]:
        return sorted(
            (pod for pod in self.pods.values() if pod.role == role), key=lambda pod: pod.ordinal
        )

    def topology(self) -> TopologyStatus:
        return self.coordinator.status(
            pod.name for pod in self.of_role("decode") if pod.started and pod.expert_group
        )

    def next_event_at(self) -> datetime:
        """Return the time of the next event in the cluster; `NEVER` if there is none."""
        return min(
            [self.coordinator.phase_ends_at, *(pod.next_event_at for pod in self.pods.values())]
        )

    def create(self, pod: Pod, now: datetime) -> None:
        self.pods[pod.name] = pod
        self._bind(now)

    def drain(self, name: str, now: datetime) -> None:
        drained_at = now + timedelta(seconds=self._conditions.drain_after_s)
        self._change(name, draining=True, drain_started=now, unfinished=1, drained_at=drained_at)

    def delete(self, name: str, now: datetime) -> None:
        self._change(name, deletion=now, gone_at=now + GONE_AFTER)

    def advance(self, now: datetime) -> list[str]:
        """Apply all events that are due at `now`. Return a description of each event."""
        changed: dict[str, list[str]] = {}
        for pod in [
            pod
            for role in names.MEMBER_ROLES
            for pod in self.of_role(role)
            if pod.next_event_at <= now
        ]:
            if pod.gone_at is not None:
                del self.pods[pod.name]
                event = "gone"
            elif not pod.started:
                self._change(pod.name, started=True)
                event = "started, stands by" if pod.expert_group else "ready"
            else:
                self._change(pod.name, unfinished=0, drained_at=None)
                event = "drained"
            changed.setdefault(event, []).append(pod.name)
        if bound := self._bind(now):
            changed["bound to a node"] = bound
        running = [pod for pod in self.pods.values() if pod.started and pod.deletion is None]
        events = [f"{', '.join(found)}: {event}" for event, found in changed.items()]
        events += self.coordinator.advance(now, {pod.name for pod in running if pod.expert_group})
        for pod in list(self.pods.values()):
            ready = pod in running and (not pod.expert_group or pod.name in self.coordinator.ranks)
            if ready != pod.ready:
                self._change(pod.name, ready=ready, unready_since=None if ready else now)
        return events

    def _bind(self, now: datetime) -> list[str]:
        """Bind pods to nodes in the order of creation, while the nodes have room.

        Returns:
            The names of the bound pods that had to wait for room.
        """
        unbound = [
            pod for pod in self.pods.values() if pod.ready_at is None and pod.deletion is None
        ]
        num_bound = sum(pod.ready_at is not None for pod in self.pods.values())
        capacity = self._conditions.capacity
        room = len(unbound) if capacity is None else max(0, capacity - num_bound)
        ready_at = now + timedelta(seconds=self._conditions.ready_after_s)
        for pod in unbound[:room]:
            self._change(
                pod.name,
                ready_at=ready_at if pod.becomes_ready else NEVER,
                unready_since=now,
                no_room_since=None,
            )
        for pod in unbound[room:]:
            self._change(pod.name, no_room_since=pod.no_room_since or now)
        return [pod.name for pod in unbound[:room] if pod.no_room_since is not None]

    def _change(self, name: str, **fields: Any) -> None:
        self.pods[name] = msgspec.structs.replace(self.pods[name], **fields)
