"""The real Reconciler under everything that can happen at once: edits, deaths, slow and full nodes, engines that do not answer, an
API server that fails, and its own death at any request. It gets to what was asked for, and restarts nobody without need."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from service_simulation import BROKEN, Service
from simulated_api_server import Fault

from baton_operator.observe import member

SIZES = st.integers(0, 3)
BOUNDS = st.sampled_from([(0, 1), (1, 0), (2, 0), (1, 1), ("50%", "25%"), (0, "100%")])
REQUESTS = st.integers(0, 80)
"""More than most steps need: then nothing goes wrong."""


def template(value: str, broken: bool) -> dict[str, Any]:
    env = [{"name": "SETTING", "value": value}, *([BROKEN] if broken else [])]
    return {"spec": {"containers": [{"name": "engine", "env": env}]}}


class Machine(RuleBasedStateMachine):
    """The checks are in `Service.reconcile`, the end in `Service.settle`."""

    def __init__(self) -> None:
        super().__init__()
        self.service = Service()

    def _roles(self) -> list[str]:
        return ["prefill", "decode"] if self.service.object()["spec"].get("prefill") else ["decode"]

    @initialize(prefill=st.booleans(), decode=SIZES, expert=st.booleans(), capacity=st.sampled_from([3, 100]))
    def create(self, prefill: bool, decode: int, expert: bool, capacity: int) -> None:
        spec: dict[str, Any] = {"model": {"uri": "file:///models/m"}}
        spec["decode"] = {"replicas": decode, "parallelism": {"expert": expert}}
        if prefill:
            spec["prefill"] = {"replicas": 1}
        self.service.capacity = capacity
        self.service.create(spec)
        self.service.reconcile()

    # The user

    @rule(data=st.data(), replicas=SIZES)
    def scale(self, data: st.DataObject, replicas: int) -> None:
        self.service.patch({data.draw(st.sampled_from(self._roles())): {"replicas": replicas}})

    @rule(data=st.data(), value=st.sampled_from("abc"), broken=st.booleans())
    def change_a_template(self, data: st.DataObject, value: str, broken: bool) -> None:
        self.service.patch({data.draw(st.sampled_from(self._roles())): {"template": template(value, broken)}})

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

    @rule()
    def reconcile(self) -> None:
        self.service.reconcile()

    @rule(request=REQUESTS, fault=st.sampled_from(list(Fault)), writes=st.booleans())
    def reconcile_with_a_fault(self, request: int, fault: Fault, writes: bool) -> None:
        self.service.reconcile({request % 20 if writes else request: fault}, hit_writes=writes)

    @rule(data=st.data())
    def reconcile_with_many_faults(self, data: st.DataObject) -> None:
        faults = data.draw(st.dictionaries(REQUESTS, st.sampled_from(list(Fault)), max_size=8))
        self.service.reconcile(faults)

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
        self.service.capacity = capacity

    def _pod(self, data: st.DataObject) -> str:
        return str(data.draw(st.sampled_from([pod["metadata"]["name"] for pod in self.service.pods()])))

    @precondition(lambda self: self.service.pods())
    @rule(data=st.data(), how=st.sampled_from(["container_dies", "pod_fails", "pod_vanishes"]))
    def something_dies(self, data: st.DataObject, how: str) -> None:
        getattr(self.service, how)(self._pod(data))

    @precondition(lambda self: self.service.pods())
    @rule(data=st.data(), unfinished=st.integers(0, 3), answers=st.booleans())
    def an_engine_is_busy(self, data: st.DataObject, unfinished: int, answers: bool) -> None:
        name = self._pod(data)
        (pod,) = [each for each in self.service.pods() if each["metadata"]["name"] == name]
        if address := pod.get("status", {}).get("podIP"):
            self.service.unfinished[address] = unfinished
            (self.service.silent.discard if answers else self.service.silent.add)(address)

    def teardown(self) -> None:
        try:
            if self.service.exists:
                self._settle()
        finally:
            self.service.close()

    def _settle(self) -> None:
        """All goes well from now on; then again, on nodes that are full, and an edit in a pause."""
        self._mend("y")
        spec = self.service.object()["spec"]
        wanted = sum(spec[role]["replicas"] for role in self._roles())
        self.service.capacity = max(self.service.capacity, wanted)
        self.service.settle()
        self.service.capacity = wanted
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
        mended: dict[str, Any] = {role: {"template": template(value, broken=False)} for role in self._roles()}
        self.service.patch({"paused": False, **mended})


TestService = Machine.TestCase
TestService.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)


def test_members_of_all_states_are_seen() -> None:
    """The simulation is worth its checks only if its pods look as real ones do to the operator."""
    service = Service()
    try:
        service.create({"model": {"uri": "file:///m"}, "decode": {"replicas": 2}})
        service.capacity = 1
        seen: set[tuple[bool, bool, bool]] = set()
        for _ in range(4):
            service.reconcile()
            service.world(lambda: True, 1.0)
            members = [member(pod) for pod in service.pods()]
            seen |= {(m.no_room_since is not None, m.serving, m.ready) for m in members}
        assert seen == {(False, False, False), (True, False, False), (False, True, False), (False, True, True)}
    finally:
        service.close()
