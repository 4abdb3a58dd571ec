"""The real operator with kopf on a simulated cluster: it converges after any faults."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

from baton_operator.observe.observation import member
from baton_operator.process.kopf_settings import INACTIVITY_S
from support.operator.simulation.convergence_machine import Machine
from support.operator.simulation.simulated_service import KEY, RESYNC_S, Service, settled

TestService = pytest.mark.timeout(1800)(Machine.TestCase)
TestService.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


def test_simulated_pods_cover_all_member_states() -> None:
    """The checks need simulated pods that the operator observes like real ones."""
    service = Service()
    try:
        service.create({"model": {"uri": "file:///m"}, "decode": {"replicas": 2}})
        service.nodes.capacity = 1
        seen: set[tuple[bool, bool, bool]] = set()
        for _ in range(4):
            service.reconcile()
            service.world(lambda: True, 1.0)
            members = [member(pod) for pod in service.pods()]
            seen |= {(m.no_room_since is not None, m.started, m.ready) for m in members}
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
    """A service with three serving decode pods that the operator has observed."""
    with settled({"model": {"uri": "file:///m"}, "decode": {"replicas": 3}}) as made:
        made.reconcile()
        assert not made.runtime.controller.is_due(KEY)
        yield made


def test_a_write_is_known_before_its_event_arrives(service: Service) -> None:
    before = service.pods()
    service.wire("Pod").lets_through(0)
    service.patch({"decode": {"replicas": 5}})
    service.reconcile()
    made = [pod for pod in service.pods() if pod not in before]
    assert len(made) == 2
    service.reconcile()
    assert not service.client.confirmed, "existing pods were created again"
    service.settle()
    assert len(service.pods()) == 5


def test_an_event_from_before_a_write_is_ignored(service: Service) -> None:
    """A draining member is not marked a second time, which `Service.reconcile` checks."""
    service.wire("Pod").lets_through(0)
    for pod in service.pods():
        service.nodes.unfinished[pod["status"]["podIP"]] = 1
        service.server.edit(
            "pods", pod["metadata"]["name"], lambda obj: obj["status"].update(reason="seen")
        )
    service.patch({"decode": {"replicas": 2}})
    service.reconcile()
    assert [what for what, _ in service.client.confirmed] == ["drained"]
    service.wire("Pod").lets_through(3)
    service.reconcile()
    assert not service.client.confirmed
    service.settle()


def becomes_due(service: Service, within_s: float) -> bool:
    """Wait until the service is due. Return whether it becomes due before the resync."""
    assert within_s < RESYNC_S, "the resync would be due"
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


def test_an_empty_list_makes_services_due(service: Service) -> None:
    """The list has no object that names the service."""
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


def test_the_resync_corrects_a_silently_lost_event(service: Service) -> None:
    service.wire("Pod").to_lose = 1
    gone = service.pods()[0]["metadata"]["name"]
    service.nodes.pod_vanishes(gone)
    assert not becomes_due(service, within_s=RESYNC_S - 1.0), (
        "the lost event must not be detected earlier"
    )
    service.lost_events = True
    service.settle()
    assert len(service.pods()) == 3


def test_a_reconcile_of_an_unchanged_service_takes_five_reads(service: Service) -> None:
    service.server.edit(
        "pods",
        service.pods()[0]["metadata"]["name"],
        lambda obj: obj["status"].update(reason="seen"),
    )
    service.reconcile()
    assert service.client.requests == 5, (
        "expected reads of the service, its pods, Deployments, Services and key"
    )
    assert not service.client.writes


@pytest.mark.parametrize(
    "storage",
    ["roles.rbac.authorization.k8s.io", "configmaps", "networkpolicies.networking.k8s.io"],
)
def test_deleted_objects_other_than_members_are_recreated(service: Service, storage: str) -> None:
    (name, *_) = [obj["metadata"]["name"] for obj in service.server.list(storage)]
    service.server.remove(storage, name)
    service.reconcile()
    assert service.server.get(storage, name) is not None
