"""The revision of pods that replace dead ones during a rollout or a pause."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from baton_kube.client import Object
from baton_operator.observe.observation import is_ready
from baton_operator.status.status_probes import StatusProbes
from baton_protocol.process.health import Health
from support.operator.simulation.simulated_service import Service, settled

SPEC: dict[str, Any] = {
    "model": {"uri": "file:///m"},
    "decode": {"replicas": 2},
    "progressDeadlineSeconds": 60,
}
BROKEN = {"spec": {"containers": [{"name": "engine", "env": [{"name": "BROKEN", "value": "1"}]}]}}
#: The edit also changes the configuration. Its pods never become ready.
EDIT: dict[str, Any] = {"engine": {"maxNumSeqs": 3}, "decode": {"template": BROKEN}}


@pytest.fixture
def service() -> Iterator[Service]:
    with settled(SPEC) as made:
        yield made


def revisions(service: Service) -> Counter[str]:
    return Counter(
        pod["metadata"]["labels"]["serving.baton.dev/revision"] for pod in service.pods()
    )


def lose(service: Service, revision: str) -> None:
    """Remove all pods of this revision."""
    for pod in service.pods():
        if pod["metadata"]["labels"]["serving.baton.dev/revision"] == revision:
            service.nodes.pod_vanishes(pod["metadata"]["name"])


def ready(service: Service) -> int:
    return int(service.object()["status"]["decode"]["ready"])


def configurations(service: Service) -> tuple[set[str], set[str]]:
    """Return the names of ConfigMaps that pods mount, and of those that exist."""
    volumes = [volume for pod in service.pods() for volume in pod["spec"]["volumes"]]
    used = {volume["configMap"]["name"] for volume in volumes if "configMap" in volume}
    return used, {each["metadata"]["name"] for each in service.server.list("configmaps")}


def test_pods_that_die_during_a_stalled_rollout_get_the_previous_revision(service: Service) -> None:
    (before,) = revisions(service)
    service.patch(EDIT)
    service.rounds(20)
    assert (
        service.object()["status"]["specRevision"] != service.object()["status"]["servedRevision"]
    )
    lose(service, before)
    service.rounds(21)
    assert revisions(service)[before] == 2
    assert len(service.pods()) == 3, "only the pod of the failing revision remains"
    assert ready(service) == 2
    used, made = configurations(service)
    assert used <= made, "a configuration was deleted that a replacement needs"

    service.patch({"decode": {"template": None}})
    service.settle()
    assert before not in revisions(service)
    status = service.object()["status"]
    assert status["servedRevision"] == status["specRevision"]


def test_a_new_pod_that_sleeps_does_not_stall_the_rollout(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def readiness(_: StatusProbes, pods: list[Object]) -> dict[str, Health]:
        return {pod["metadata"]["name"]: Health("Asleep", "m") for pod in pods if not is_ready(pod)}

    monkeypatch.setattr(StatusProbes, "readiness", readiness)
    (before,) = revisions(service)
    service.patch(EDIT)
    service.rounds(20)
    assert (
        service.condition("Updating")["reason"]
        == service.condition("DecodeReady")["reason"]
        == "EngineAsleep"
    )
    lose(service, before)
    service.rounds(3)
    assert before not in revisions(service), "lost pods are replaced by the new revision"
    assert len(service.pods()) >= 2


def test_a_new_pod_that_wakes_up_has_the_whole_deadline_to_be_ready(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    asleep = True

    async def readiness(_: StatusProbes, pods: list[Object]) -> dict[str, Health]:
        unready = [pod["metadata"]["name"] for pod in pods if not is_ready(pod)]
        return dict.fromkeys(unready, Health("Asleep", "m")) if asleep else {}

    monkeypatch.setattr(StatusProbes, "readiness", readiness)
    (before,) = revisions(service)
    service.patch(EDIT)
    service.rounds(20)
    asleep = False
    service.rounds(2)
    assert service.condition("Updating")["reason"] != "RolloutStalled"
    lose(service, before)
    service.reconcile()
    assert before not in revisions(service), "lost pods are replaced by the new revision"
    service.rounds(20)
    assert service.condition("Updating")["reason"] == "RolloutStalled"


def test_a_new_pod_without_room_does_not_stall_the_rollout(service: Service) -> None:
    service.nodes.capacity = 2
    service.patch({**EDIT, "updateStrategy": {"decode": {"surgeTimeoutSeconds": 86400}}})
    service.rounds(40)
    assert service.condition("Updating")["reason"] == "WaitingForCapacity"
    assert service.condition("Ready")["reason"] == "NoCapacity"
    (lost, kept) = (pod["metadata"]["name"] for pod in service.pods() if is_ready(pod))
    service.nodes.pod_vanishes(lost)
    service.reconcile()
    old = [pod for pod in service.pods() if is_ready(pod)]
    assert [pod["metadata"]["name"] for pod in old] == [kept]
    assert len(revisions(service)) == 2
    assert revisions(service).total() - len(old) == 2, "the lost pod is replaced by a new one"


def test_pods_that_die_in_a_pause_during_a_rollout_get_the_previous_revision(
    service: Service,
) -> None:
    (before,) = revisions(service)
    service.patch(EDIT)
    service.rounds(3)
    assert revisions(service)[before] == 2
    service.patch({"paused": True})
    newer = revisions(service)
    lose(service, before)
    service.rounds(5)
    assert revisions(service) - newer == Counter(), "the edit has no pod yet"
    assert revisions(service)[before] == 1, "the new pod and one other must exist"
    service.patch({"paused": False, "decode": {"template": None}})
    service.settle()
    assert before not in revisions(service)


def test_a_revision_that_never_served_is_not_restored() -> None:
    service = Service()
    try:
        service.create({**SPEC, "decode": {"replicas": 2, "template": BROKEN}})
        service.rounds(20)
        (broken,) = revisions(service)
        service.patch({"decode": {"template": None}})
        service.rounds(3)
        assert not revisions(service)[broken]
        assert "servedRevision" not in service.object()["status"]
        service.settle()
    finally:
        service.close()
