"""A Hypothesis state machine that tests the real operator, with kopf, on a simulated cluster.

Its rules edit the service, and make pods, nodes, engines, the coordinator, the API server, watches
and the operator fail. The operator must reach the desired state, leave no unused object, and
restart no pod without need.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from support.operator.simulation.api_server import Fault
from support.operator.simulation.nodes import BROKEN
from support.operator.simulation.simulated_service import WATCHED, Service
from support.operator.simulation.watches import Lists

SIZES = st.integers(0, 3)
BOUNDS = st.sampled_from([(0, 1), (1, 0), (2, 0), (1, 1), ("50%", "25%"), (0, "100%")])
#: More than most steps send, so that sometimes nothing fails.
REQUESTS = st.integers(0, 80)
DELAYS = st.lists(st.integers(0, 4), min_size=1, max_size=5)
#: Pods and services are drawn more often.
KINDS = st.sampled_from([*WATCHED, "Pod", "LLMService"])
DEATHS = st.sampled_from(["container_dies", "pod_fails", "pod_vanishes", "pod_is_deleted"])


def template(value: str, broken: bool) -> dict[str, Any]:
    env = [{"name": "SETTING", "value": value}, *([BROKEN] if broken else [])]
    return {"spec": {"containers": [{"name": "engine", "env": env}]}}


class Machine(RuleBasedStateMachine):
    """The state machine. `Service.reconcile()` checks each step, `Service.settle()` the end."""

    def __init__(self) -> None:
        super().__init__()
        self.service = Service()

    def _roles(self) -> list[str]:
        return ["prefill", "decode"] if self.service.object()["spec"].get("prefill") else ["decode"]

    @initialize(
        prefill=st.booleans(),
        decode=SIZES,
        expert=st.booleans(),
        capacity=st.sampled_from([3, 100]),
    )
    def create(self, prefill: bool, decode: int, expert: bool, capacity: int) -> None:
        spec: dict[str, Any] = {"model": {"uri": "file:///models/m"}}
        spec["decode"] = {"replicas": decode, "parallelism": {"expert": expert}}
        if prefill:
            spec["prefill"] = {"replicas": 1}
        self.service.nodes.capacity = capacity
        self.service.create(spec)
        self.service.reconcile()

    # The user

    @rule(data=st.data(), replicas=SIZES)
    def scale(self, data: st.DataObject, replicas: int) -> None:
        self.service.patch({data.draw(st.sampled_from(self._roles())): {"replicas": replicas}})

    @rule(data=st.data(), value=st.sampled_from("abc"), broken=st.booleans())
    def change_a_template(self, data: st.DataObject, value: str, broken: bool) -> None:
        self.service.patch(
            {data.draw(st.sampled_from(self._roles())): {"template": template(value, broken)}}
        )

    @rule(value=st.sampled_from([4, 5]))
    def change_all_engines(self, value: int) -> None:
        self.service.patch({"engine": {"maxNumSeqs": value}})

    @rule(prefill=st.booleans())
    def switch_prefill(self, prefill: bool) -> None:
        self.service.patch({"prefill": {"replicas": 1} if prefill else None})

    @rule(expert=st.booleans())
    def switch_expert(self, expert: bool) -> None:
        self.service.patch({"decode": {"parallelism": {"expert": expert}}})

    @rule(data=st.data(), bounds=BOUNDS)
    def change_the_bounds(self, data: st.DataObject, bounds: tuple[int | str, int | str]) -> None:
        role = data.draw(st.sampled_from(["prefill", "decode"]))
        strategy = {"maxSurge": bounds[0], "maxUnavailable": bounds[1], "surgeTimeoutSeconds": 10}
        self.service.patch({"updateStrategy": {role: strategy}})

    @rule(paused=st.booleans())
    def pause(self, paused: bool) -> None:
        self.service.patch({"paused": paused})

    @rule(replicas=st.integers(1, 2))
    def scale_the_gateway(self, replicas: int) -> None:
        self.service.patch({"gateway": {"replicas": replicas}})

    @rule(again=st.booleans())
    def delete_and_create(self, again: bool) -> None:
        spec = self.service.object()["spec"]
        self.service.delete()
        self.service.reconcile()
        self.service.create(spec if again else {"model": {"uri": "file:///models/n"}})

    # The operator

    @rule(deliver_events=st.booleans(), delays=DELAYS)
    def reconcile(self, deliver_events: bool, delays: list[int]) -> None:
        self.service.reconcile(deliver_events=deliver_events, delays=delays)

    @rule(
        request=REQUESTS,
        fault=st.sampled_from(list(Fault)),
        writes=st.booleans(),
        deliver_events=st.booleans(),
        delays=DELAYS,
    )
    def reconcile_with_a_fault(
        self, request: int, fault: Fault, writes: bool, deliver_events: bool, delays: list[int]
    ) -> None:
        faults = {request % 20 if writes else request: fault}
        self.service.reconcile(
            faults, hit_writes=writes, deliver_events=deliver_events, delays=delays
        )

    @rule(data=st.data(), deliver_events=st.booleans())
    def reconcile_with_many_faults(self, data: st.DataObject, deliver_events: bool) -> None:
        faults = data.draw(st.dictionaries(REQUESTS, st.sampled_from(list(Fault)), max_size=8))
        self.service.reconcile(faults, deliver_events=deliver_events)

    @precondition(lambda self: self.service.pods())
    @rule(data=st.data(), request=st.integers(0, 10), how=DEATHS, delays=DELAYS)
    def something_dies_during_a_reconcile(
        self, data: st.DataObject, request: int, how: str, delays: list[int]
    ) -> None:
        name = self._pod(data)

        def dies() -> None:
            if any(pod["metadata"]["name"] == name for pod in self.service.pods()):
                getattr(self.service.nodes, how)(name)

        self.service.reconcile(actions={request: dies}, delays=delays)

    @rule(data=st.data(), request=st.integers(0, 10), replicas=SIZES, delays=DELAYS)
    def scale_during_a_reconcile(
        self, data: st.DataObject, request: int, replicas: int, delays: list[int]
    ) -> None:
        role = data.draw(st.sampled_from(self._roles()))
        edit = {role: {"replicas": replicas}}
        self.service.reconcile(actions={request: lambda: self.service.patch(edit)}, delays=delays)

    @rule()
    def the_operator_restarts(self) -> None:
        self.service.operator_restarts()

    @rule(
        kind=KINDS,
        lists=st.sampled_from(["500", "429", "break"]),
        patience=st.sampled_from([0.0, 1.0, 40.0]),
    )
    def the_operator_restarts_and_cannot_list(
        self, kind: str, lists: Lists, patience: float
    ) -> None:
        self.service.wire(kind).lists = lists
        self.service.operator_restarts()
        self.service.passes(patience)
        self.service.events_come()
        self.service.wire(kind).lists = "work"
        self.service.reconcile()

    # The watches

    @rule(kind=KINDS, forgets=st.booleans())
    def a_watch_breaks(self, kind: str, forgets: bool) -> None:
        self.service.wire(kind).breaks(forgets=forgets)

    @rule(kind=KINDS, silent=st.booleans())
    def a_watch_falls_silent(self, kind: str, silent: bool) -> None:
        self.service.wire(kind).is_silent = silent

    @rule(kind=KINDS, events=st.integers(0, 3))
    def events_are_late(self, kind: str, events: int) -> None:
        self.service.wire(kind).lets_through(events)

    @rule(kind=KINDS)
    def late_events_come(self, kind: str) -> None:
        self.service.wire(kind).lets_through(None)
        self.service.events_come()

    @rule(kind=KINDS, repeats=st.booleans())
    def events_come_twice(self, kind: str, repeats: bool) -> None:
        self.service.wire(kind).repeats = repeats

    @rule(kind=KINDS, events=st.integers(1, 3))
    def events_are_lost(self, kind: str, events: int) -> None:
        self.service.wire(kind).to_lose = events
        self.service.lost_events = True

    # The coordinator

    @rule(up=st.booleans())
    def the_coordinator_dies_or_returns(self, up: bool) -> None:
        (self.service.coordinator.returns if up else self.service.coordinator.dies)()

    @rule(refuses=st.integers(0, 2), loses=st.integers(0, 2))
    def the_coordinator_fails(self, refuses: int, loses: int) -> None:
        self.service.coordinator.refuses, self.service.coordinator.loses = refuses, loses

    # The world

    @rule(data=st.data(), seconds=st.sampled_from([1.0, 12.0, 40.0]))
    def time_passes(self, data: st.DataObject, seconds: float) -> None:
        self.service.reconcile()
        self.service.world(lambda: data.draw(st.booleans()), seconds)

    @rule(steps=st.integers(1, 8))
    def all_goes_well_for_a_while(self, steps: int) -> None:
        for _ in range(steps):
            self.service.reconcile()
            self.service.world(lambda: True, 6.0)

    @rule(capacity=st.integers(2, 8))
    def nodes_come_and_go(self, capacity: int) -> None:
        self.service.nodes.capacity = capacity

    def _pod(self, data: st.DataObject) -> str:
        return str(
            data.draw(st.sampled_from([pod["metadata"]["name"] for pod in self.service.pods()]))
        )

    @precondition(lambda self: self.service.pods())
    @rule(data=st.data(), how=DEATHS)
    def something_dies(self, data: st.DataObject, how: str) -> None:
        getattr(self.service.nodes, how)(self._pod(data))

    @precondition(lambda self: self.service.pods())
    @rule(data=st.data(), unfinished=st.integers(0, 3), answers=st.booleans())
    def an_engine_is_busy(self, data: st.DataObject, unfinished: int, answers: bool) -> None:
        name = self._pod(data)
        (pod,) = [each for each in self.service.pods() if each["metadata"]["name"] == name]
        if address := pod.get("status", {}).get("podIP"):
            self.service.nodes.unfinished[address] = unfinished
            (self.service.silent.discard if answers else self.service.silent.add)(address)

    def teardown(self) -> None:
        try:
            if self.service.exists:
                self._settle()
        finally:
            self.service.close()

    def _settle(self) -> None:
        """End all faults, and check that the service reaches the desired state.

        Also check this on full nodes, and check that an edit during a pause changes no pod.
        """
        self._mend("y")
        spec = self.service.object()["spec"]
        wanted = sum(spec[role]["replicas"] for role in self._roles())
        self.service.nodes.capacity = max(self.service.nodes.capacity, wanted)
        self.service.settle()
        self.service.nodes.capacity = wanted
        self._mend("z")
        self.service.settle()
        self.service.patch({"paused": True})
        self.service.reconcile()
        pods, deployments = self.service.pods(), self.service.server.list("deployments.apps")
        self.service.patch({"image": "baton:paused"})
        for _ in range(3):
            self.service.reconcile()
            self.service.world(lambda: True, 20.0)
        assert self.service.pods() == pods, "an edit in a pause"
        assert self.service.server.list("deployments.apps") == deployments, "an edit in a pause"

    def _mend(self, value: str) -> None:
        mended: dict[str, Any] = {
            role: {"template": template(value, broken=False)} for role in self._roles()
        }
        self.service.patch({"paused": False, **mended})


# Long enough for a busy machine: pytest-timeout would raise within one of kopf's tasks.
