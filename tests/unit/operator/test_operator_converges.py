"""The real operator, kopf included, under everything that can happen at once: edits, deaths, slow and full nodes, engines
and a coordinator that do not answer, an API server that fails, watches that break, lag and lose events, and its own death at any
request. It gets to what was asked for, leaves nothing behind, and restarts nobody without need."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from service_simulation import KEY, RESYNC_S, WATCHED, Service, settled
from simulated_api_server import Fault
from simulated_nodes import BROKEN
from simulated_watches import Lists

from baton_operator.handlers import INACTIVITY_S
from baton_operator.observe.observation import member

SIZES = st.integers(0, 3)
BOUNDS = st.sampled_from([(0, 1), (1, 0), (2, 0), (1, 1), ("50%", "25%"), (0, "100%")])
REQUESTS = st.integers(0, 80)
"""More than most steps need: then nothing goes wrong."""
DELAYS = st.lists(st.integers(0, 4), min_size=1, max_size=5)
KINDS = st.sampled_from([*WATCHED, "Pod", "LLMService"])
"""Pods and services matter most."""
DEATHS = st.sampled_from(["container_dies", "pod_fails", "pod_vanishes", "pod_is_deleted"])


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

    @rule(told=st.booleans(), delays=DELAYS)
    def reconcile(self, told: bool, delays: list[int]) -> None:
        self.service.reconcile(told=told, delays=delays)

    @rule(
        request=REQUESTS,
        fault=st.sampled_from(list(Fault)),
        writes=st.booleans(),
        told=st.booleans(),
        delays=DELAYS,
    )
    def reconcile_with_a_fault(
        self, request: int, fault: Fault, writes: bool, told: bool, delays: list[int]
    ) -> None:
        faults = {request % 20 if writes else request: fault}
        self.service.reconcile(faults, hit_writes=writes, told=told, delays=delays)

    @rule(data=st.data(), told=st.booleans())
    def reconcile_with_many_faults(self, data: st.DataObject, told: bool) -> None:
        faults = data.draw(st.dictionaries(REQUESTS, st.sampled_from(list(Fault)), max_size=8))
        self.service.reconcile(faults, told=told)

    @precondition(lambda self: self.service.pods())
    @rule(data=st.data(), request=st.integers(0, 10), how=DEATHS, delays=DELAYS)
    def something_dies_meanwhile(
        self, data: st.DataObject, request: int, how: str, delays: list[int]
    ) -> None:
        name = self._pod(data)

        def dies() -> None:
            if any(pod["metadata"]["name"] == name for pod in self.service.pods()):
                getattr(self.service.nodes, how)(name)

        self.service.reconcile(meanwhile={request: dies}, delays=delays)

    @rule(data=st.data(), request=st.integers(0, 10), replicas=SIZES, delays=DELAYS)
    def scale_meanwhile(
        self, data: st.DataObject, request: int, replicas: int, delays: list[int]
    ) -> None:
        role = data.draw(st.sampled_from(self._roles()))
        edit = {role: {"replicas": replicas}}
        self.service.reconcile(meanwhile={request: lambda: self.service.patch(edit)}, delays=delays)

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
        """All goes well from now on; then again, on nodes that are full, and an edit in a pause."""
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


# Longer than it takes on a machine with other work: pytest-timeout would raise within one of kopf's tasks.
TestService = pytest.mark.timeout(1800)(Machine.TestCase)
TestService.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


def test_members_of_all_states_are_seen() -> None:
    """The simulation is worth its checks only if its pods look as real ones do to the operator."""
    service = Service()
    try:
        service.create({"model": {"uri": "file:///m"}, "decode": {"replicas": 2}})
        service.nodes.capacity = 1
        seen: set[tuple[bool, bool, bool]] = set()
        for _ in range(4):
            service.reconcile()
            service.world(lambda: True, 1.0)
            members = [member(pod) for pod in service.pods()]
            seen |= {(m.no_room_since is not None, m.serving, m.ready) for m in members}
        assert seen == {
            (False, False, False),
            (True, False, False),
            (False, True, False),
            (False, True, True),
        }
    finally:
        service.close()


@pytest.fixture
def service() -> Iterator[Service]:
    """Three decode pods that serve, and an operator that has looked at them."""
    with settled({"model": {"uri": "file:///m"}, "decode": {"replicas": 3}}) as made:
        made.reconcile()
        assert not made.runtime.controller.is_due(KEY)
        yield made


def test_what_was_just_written_is_known_before_the_watch_shows_it(service: Service) -> None:
    before = service.pods()
    service.wire("Pod").lets_through(0)
    service.patch({"decode": {"replicas": 5}})
    service.reconcile()
    made = [pod for pod in service.pods() if pod not in before]
    assert len(made) == 2
    service.reconcile()
    assert not service.client.told, "pods are made that exist"
    service.settle()
    assert len(service.pods()) == 5


def test_an_event_from_before_a_write_does_not_undo_it(service: Service) -> None:
    """A member that drains is not marked a second time: `Service.reconcile` sees to it."""
    service.wire("Pod").lets_through(0)
    for pod in service.pods():
        service.nodes.unfinished[pod["status"]["podIP"]] = 1
        service.server.edit(
            "pods", pod["metadata"]["name"], lambda obj: obj["status"].update(reason="seen")
        )
    service.patch({"decode": {"replicas": 2}})
    service.reconcile()
    assert [what for what, _ in service.client.told] == ["drained"]
    service.wire("Pod").lets_through(3)
    service.reconcile()
    assert not service.client.told
    service.settle()


def becomes_due(service: Service, within_s: float) -> bool:
    """Whether the watches make the service due in time."""
    assert within_s < RESYNC_S, "that would be the resync"
    began = service.server.seconds()
    while service.server.seconds() < began + within_s and not service.runtime.controller.is_due(
        KEY
    ):
        service.passes(0.5)
        service.events_come()
    return service.runtime.controller.is_due(KEY)


@pytest.mark.parametrize("forgets", [False, True], ids=["cut", "cut and 410"])
def test_a_pod_deleted_while_the_watch_was_cut_is_replaced_without_waiting_for_the_resync(
    service: Service, forgets: bool
) -> None:
    service.wire("Pod").lets_through(0)
    service.nodes.pod_vanishes(service.pods()[0]["metadata"]["name"])
    service.events_come()
    assert not service.runtime.controller.is_due(KEY)
    service.wire("Pod").breaks(forgets=forgets)
    service.wire("Pod").lets_through(0 if forgets else None)
    assert becomes_due(service, within_s=5.0)
    service.wire("Pod").lets_through(None)
    service.reconcile()
    assert len(service.pods()) == 3


def test_an_empty_list_makes_services_due_too(service: Service) -> None:
    """Nothing in it names the service."""
    service.wire("Pod").lets_through(0)
    for pod in service.server.list("pods"):
        service.server.remove("pods", pod["metadata"]["name"])
    service.wire("Pod").breaks(forgets=True)
    assert becomes_due(service, within_s=5.0)


def test_a_pod_deleted_while_the_watch_was_silent_is_replaced_without_waiting_for_the_resync(
    service: Service,
) -> None:
    service.wire("Pod").is_silent = True
    service.nodes.pod_vanishes(service.pods()[0]["metadata"]["name"])
    service.events_come()
    assert not service.runtime.controller.is_due(KEY)
    service.passes(INACTIVITY_S / 2)
    service.events_come()
    service.wire("Pod").is_silent = False
    assert becomes_due(service, within_s=INACTIVITY_S)
    service.reconcile()
    assert len(service.pods()) == 3


def test_an_event_that_is_lost_without_a_word_is_made_good_by_the_resync(service: Service) -> None:
    service.wire("Pod").to_lose = 1
    gone = service.pods()[0]["metadata"]["name"]
    service.nodes.pod_vanishes(gone)
    assert not becomes_due(service, within_s=RESYNC_S - 1.0), "nothing can show it"
    service.lost_events = True
    service.settle()
    assert len(service.pods()) == 3


def test_a_look_at_a_service_at_rest_takes_five_reads(service: Service) -> None:
    service.server.edit(
        "pods",
        service.pods()[0]["metadata"]["name"],
        lambda obj: obj["status"].update(reason="seen"),
    )
    service.reconcile()
    assert service.client.requests == 5, "the service, its pods, Deployments, Services and key"
    assert not service.client.writes


@pytest.mark.parametrize(
    "storage",
    ["roles.rbac.authorization.k8s.io", "configmaps", "networkpolicies.networking.k8s.io"],
)
def test_what_somebody_deletes_beside_the_members_is_made_again(
    service: Service, storage: str
) -> None:
    (name, *_) = [obj["metadata"]["name"] for obj in service.server.list(storage)]
    service.server.remove(storage, name)
    service.reconcile()
    assert service.server.get(storage, name) is not None
