"""A simulated cluster of ranks and their coordinator, for tests of the planner."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from baton_operator.api import llmservice
from baton_operator.plan.plan_expert_group import ExpertGroup, plan_expert_group
from baton_operator.plan.plan_group import DesiredGroup, GroupPlan, Member, Update
from baton_operator.plan.topology_view import TopologyView, topology_for_status
from baton_protocol.topology import (
    MemberStatus,
    OperationPhase,
    OperationStatus,
    RankPhase,
    TopologyRequest,
    TopologyStatus,
)
from support.operator.services import NOW

ADDRESS = "10.96.0.9"
TIMEOUT_S = 60.0
#: Time in which ranks find a new coordinator.
REGISTERED_WITHIN = timedelta(seconds=5)


@dataclass
class Pod:
    """A simulated pod and its process."""

    ordinal: int
    revision: str
    group: str
    created: datetime
    instance: str
    running: bool = False
    failed: bool = False
    drain_started: datetime | None = None
    unfinished: int = 0
    deletion: datetime | None = None
    #: Registered with the running coordinator.
    registered: bool = False
    #: Scheduled to a node.
    bound: bool = False
    no_room_since: datetime | None = None

    @property
    def name(self) -> str:
        return f"m-{self.ordinal}"


@dataclass
class Operation:
    id: str
    kind: str
    #: Instance by name.
    target: dict[str, str]
    phase: OperationPhase = OperationPhase.PREPARING
    reason: str = ""


@dataclass
class Simulation:
    """The simulated cluster, and the state that each part of it has observed."""

    desired: int = 2
    update: Update = field(default_factory=Update)
    #: Number of pods for which the nodes have room.
    capacity: int = 100
    revision: str = "r0"
    group: str = "g"
    now: datetime = NOW
    pods: dict[str, Pod] = field(default_factory=dict)
    generation: int = 0
    #: Ranks of the present generation: instance by name.
    ranks: dict[str, str] = field(default_factory=dict)
    coordinator_up: bool = True
    coordinator_since: datetime = NOW
    #: The next requests to the coordinator that get no reply and have no effect.
    refuses: int = 0
    #: The next requests that take effect but whose replies are lost.
    loses: int = 0
    request: TopologyRequest | None = None
    operation: Operation | None = None
    fail_next: bool = False
    recorded: llmservice.TopologyStatus | None = None
    requests: list[TopologyRequest] = field(default_factory=list)
    _instances: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def _revision(self) -> str:
        """The revision of new pods."""
        return f"{self.group}-{self.revision}"

    # The operator

    def reconcile(self) -> GroupPlan:
        topology = self._answered()
        group = ExpertGroup(
            target=DesiredGroup(
                size=self.desired,
                revision=self._revision,
                update=self.update,
                drain_timeout_s=TIMEOUT_S,
            ),
            service_uid="uid",
            name=self.group,
            view=None if topology is None else TopologyView(topology, self.recorded),
        )
        plan = plan_expert_group([self._member(pod) for pod in self.pods.values()], group, self.now)
        self._check(plan, topology is not None)
        if plan.request is not None:
            self.requests.append(plan.request)
            if not self.refuses:
                self.request = plan.request
            topology = self._answered()
        for name in plan.drain:
            self.pods[name].drain_started = self.now
        for deletion in plan.delete:
            self.pods[deletion.name].deletion = self.now + timedelta(seconds=30)
        for ordinal in plan.create:
            pod = Pod(ordinal, self._revision, self.group, self.now, f"i{next(self._instances)}")
            assert pod.name not in self.pods, f"{pod.name} exists"
            self.pods[pod.name] = pod
        self.recorded = topology_for_status(topology, self.recorded, set(self.pods), ADDRESS)
        return plan

    def _answered(self) -> TopologyStatus | None:
        """Return the coordinator's response to a request; None for no response."""
        if self.refuses:
            self.refuses -= 1
            return None
        if self.loses:
            self.loses -= 1
            return None
        return self.topology()

    def _check(self, plan: GroupPlan, was_answered: bool) -> None:
        living = {
            name: instance for name, instance in self.ranks.items() if self._lives(name, instance)
        }
        needed = dict(living)
        if self.operation is not None and self._is_changing():
            needed |= self.operation.target
        for deletion in plan.delete:
            pod = self.pods[deletion.name]
            if pod.failed or needed.get(pod.name) != pod.instance:
                continue
            last = (
                list(living) == [pod.name] and not pod.unfinished and pod.drain_started is not None
            )
            assert last, f"{pod.name} is a member: {deletion.why}"
        if not was_answered:
            assert plan.request is None
            assert all(self.pods[deletion.name].failed for deletion in plan.delete), (
                "nothing is known of the topology"
            )
        alive = [pod for pod in self.pods.values() if pod.deletion is None]
        if plan.create:
            staying = [pod for pod in alive if pod.drain_started is None and not pod.failed]
            all_may_go = max(1, self.update.max_unavailable) >= self.desired
            begins = not staying or (
                all_may_go and all(pod.revision != self._revision for pod in staying)
            )
            most = max(self.desired + max(1, self.update.max_surge), len(alive) + begins)
            assert len(alive) + len(plan.create) <= most, (
                f"{plan.create} beside {[pod.name for pod in alive]}"
            )

    def _member(self, pod: Pod) -> Member:
        asked = pod.drain_started is not None and pod.running
        return Member(
            name=pod.name,
            ordinal=pod.ordinal,
            revision=pod.revision,
            ready=pod.running and (self.ranks.get(pod.name) == pod.instance or not pod.group),
            failed=pod.failed,
            started=pod.running,
            draining=pod.drain_started is not None,
            drain_started=pod.drain_started,
            unfinished=pod.unfinished if asked else None,
            deletion=pod.deletion,
            created=pod.created,
            expert_group=pod.group,
            no_room_since=pod.no_room_since,
        )

    # The coordinator

    def topology(self) -> TopologyStatus | None:
        if not self.coordinator_up:
            return None
        known = self._known()
        order = list(self.ranks)
        members = [
            MemberStatus(
                name=pod.name,
                instance_id=pod.instance,
                phase=RankPhase.SERVING
                if self.ranks.get(pod.name) == pod.instance
                else RankPhase.STANDBY,
                rank=order.index(pod.name)
                if known and self.ranks.get(pod.name) == pod.instance
                else None,
            )
            for pod in self.pods.values()
            if pod.registered
        ]
        operation = self.operation and OperationStatus(
            operation_id=self.operation.id,
            kind=self.operation.kind,
            phase=self.operation.phase,
            generation=self.generation + 1,
            reason=self.operation.reason,
        )
        return TopologyStatus(
            generation=self.generation if known else 0,
            desired=sorted(self._asked_for()),
            members=members,
            operation=operation or None,
        )

    def _known(self) -> bool:
        """Return whether a running rank has reported its generation to the coordinator."""
        return any(
            self._lives(name, instance) and self.pods[name].registered
            for name, instance in self.ranks.items()
        )

    def _asked_for(self) -> set[str]:
        if self.request is not None:
            return set(self.request.members)
        return set(self.ranks) if self._known() else set()

    def _lives(self, name: str, instance: str) -> bool:
        pod = self.pods.get(name)
        return pod is not None and pod.running and pod.instance == instance

    def _is_changing(self) -> bool:
        changing = (OperationPhase.PREPARING, OperationPhase.COMMITTING)
        return self.operation is not None and self.operation.phase in changing

    def coordinate(self) -> None:
        """Simulate one step of the coordinator."""
        if not self.coordinator_up:
            return
        living = {name: each for name, each in self.ranks.items() if self._lives(name, each)}
        if self.ranks and not living:
            self.ranks = {}
        if any(not self.pods[name].registered for name in living):
            return  # it has not settled yet
        if self.operation is not None and self._is_changing():
            self._advance(self.operation, living)
            return
        standby = {
            p.name: p.instance
            for p in self.pods.values()
            if p.registered and p.running and p.deletion is None
        }
        usable = {
            name: each for name, each in (standby | living).items() if name in self._asked_for()
        }
        broken = len(living) != len(self.ranks)
        if not usable and broken:
            usable = living
        if usable and (usable != self.ranks or broken):
            kind = "form" if not self.ranks else "recover" if broken else "scale"
            # Ranks recover by themselves.
            requested = self.request is not None and kind != "recover"
            self.operation = Operation(self.request.operation_id if requested else "", kind, usable)

    def _advance(self, operation: Operation, living: dict[str, str]) -> None:
        lost = [name for name, each in operation.target.items() if not self._lives(name, each)]
        obsolete = operation.kind == "scale" and not set(operation.target) <= self._asked_for()
        if lost or (obsolete and operation.phase is OperationPhase.PREPARING):
            operation.phase, operation.reason = (
                OperationPhase.SUPERSEDED,
                "something else is asked for",
            )
        elif operation.phase is OperationPhase.PREPARING and self.fail_next:
            self.fail_next = False
            operation.phase, operation.reason = OperationPhase.FAILED, "no memory"
        elif operation.phase is OperationPhase.PREPARING:
            operation.phase = OperationPhase.COMMITTING
        else:
            operation.phase = OperationPhase.DONE
            self.generation += 1
            self.ranks = dict(operation.target)

    # Pods, containers and time

    def pod_starts(self, pod: Pod) -> None:
        if not pod.bound and sum(each.bound for each in self.pods.values()) >= self.capacity:
            pod.no_room_since = pod.no_room_since or self.now
            return
        pod.bound, pod.no_room_since = True, None
        if not pod.failed:
            # It registers before the kubelet reports it as started.
            pod.running, pod.registered = (
                True,
                self.coordinator_up,
            )

    def container_dies(self, pod: Pod) -> None:
        """Simulate that the container of `pod` dies and the kubelet starts another container."""
        pod.running = pod.registered = False
        pod.unfinished = 0
        pod.instance = f"i{next(self._instances)}"

    def pod_vanishes(self, pod: Pod) -> None:
        """Simulate that `pod` is lost together with its node."""
        del self.pods[pod.name]

    def pod_is_deleted(self, pod: Pod) -> None:
        """Simulate that another client deletes `pod`, whose process keeps running for a while."""
        pod.deletion = pod.deletion or self.now + timedelta(seconds=30)

    def coordinator_dies(self) -> None:
        self.coordinator_up, self.request, self.operation = False, None, None
        for pod in self.pods.values():
            pod.registered = False

    def coordinator_returns(self) -> None:
        if not self.coordinator_up:
            self.coordinator_up, self.coordinator_since = True, self.now

    def world(self, moves: Callable[[], bool], seconds: float) -> None:
        """Let time pass. `moves()` decides for each part of the cluster whether it progresses."""
        self.now += timedelta(seconds=seconds)
        for pod in list(self.pods.values()):
            if not moves():
                continue
            if pod.deletion is not None:
                del self.pods[pod.name]
            elif not pod.running:
                self.pod_starts(pod)
            elif pod.unfinished:
                pod.unfinished -= 1
        for pod in self.pods.values():
            found = moves() or self.now >= self.coordinator_since + REGISTERED_WITHIN
            pod.registered = pod.registered or (
                found and pod.running and self.coordinator_up and pod.deletion is None
            )
        self.coordinate()

    def settle(self) -> None:
        """End all faults, and check that the group reaches the desired state."""
        self.coordinator_returns()
        self.fail_next = False
        self.refuses = self.loses = 0
        self.capacity = max(self.capacity, self.desired)
        for _ in range(150):
            plan = self.reconcile()
            self.world(lambda: True, 5.0)
            idle = not (plan.create or plan.drain or plan.delete or plan.request)
            if idle and self.is_settled():
                return
        raise AssertionError(f"not settled: {self}")

    def is_settled(self) -> bool:
        pods = list(self.pods.values())
        up_to_date = all(
            pod.revision == self._revision and pod.drain_started is None and pod.deletion is None
            for pod in pods
        )
        members = {pod.name: pod.instance for pod in pods} == self.ranks
        return len(pods) == self.desired and up_to_date and members and not self._is_changing()
