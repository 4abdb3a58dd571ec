"""Pauses and the revision history on a simulated cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from baton_operator import names
from baton_operator.revision_history import LIMIT, _pod_fields, held_back
from support.operator.simulation.simulated_service import NAME, Service, settled

SPEC: dict[str, Any] = {"model": {"uri": "file:///m"}, "decode": {"replicas": 2}}


@pytest.fixture
def service() -> Iterator[Service]:
    with settled(SPEC) as made:
        yield made


def records(service: Service) -> list[Any]:
    found = service.server.list("controllerrevisions.apps")
    return sorted(found, key=lambda each: each["revision"])


def revisions(service: Service) -> set[str]:
    return {pod["metadata"]["labels"]["serving.baton.dev/revision"] for pod in service.pods()}


def test_a_pause_delays_edits_and_replaces_dead_pods_with_the_previous_revision(
    service: Service,
) -> None:
    before = revisions(service)
    service.patch({"paused": True})
    service.patch({"engine": {"maxNumSeqs": 3}, "gateway": {"maxConcurrentRequests": 3}})
    members = {pod["metadata"]["name"] for pod in service.pods()}
    deployment = service.server.get("deployments.apps", f"{NAME}-gateway")
    service.rounds(12)
    assert service.server.get("deployments.apps", f"{NAME}-gateway") == deployment
    assert {pod["metadata"]["name"] for pod in service.pods()} == members
    assert service.condition("Updating")["reason"] == "Paused"

    service.nodes.pod_vanishes(f"{NAME}-decode-1")
    service.patch({"decode": {"replicas": 3}})
    service.rounds(12)
    assert len(service.pods()) == 3, "the dead pod must be replaced and the group must grow"
    assert revisions(service) == before

    service.patch({"paused": False})
    service.settle()
    assert revisions(service).isdisjoint(before)


def test_a_pause_names_the_waiting_edits(service: Service) -> None:
    def updating() -> str:
        service.rounds(2)
        found = service.condition("Updating")
        assert found["reason"] == "Paused"
        return str(found["message"])

    service.patch({"paused": True})
    assert updating() == "no edit waits; later edits wait until spec.paused is false"
    service.patch({"decode": {"replicas": 3}, "progressDeadlineSeconds": 60})
    assert updating() == "no edit waits; later edits wait until spec.paused is false", (
        "a pause must not delay these edits"
    )
    service.patch(
        {
            "image": "reg/other:1",
            "decode": {"parallelism": {"tensor": 2}},
            "gateway": {"limits": {}},
        }
    )
    assert updating() == "edits of decode.parallelism, image wait until spec.paused is false"
    service.patch({"image": None, "decode": {"parallelism": None}})
    assert updating() == "no edit waits; later edits wait until spec.paused is false"


@pytest.mark.parametrize("size", [0, 2])
def test_a_group_that_an_edit_in_a_pause_removes_keeps_its_size(size: int) -> None:
    with settled({**SPEC, "prefill": {"replicas": 1}}) as service:
        service.patch({"prefill": {"replicas": size}})
        service.settle()
        before = service.pods()
        service.patch({"paused": True, "prefill": None})
        service.rounds(3)
        assert service.pods() == before
        service.patch({"paused": False})
        service.settle()
        assert len(service.pods()) == 2


def test_an_invalid_edit_during_a_pause_is_named() -> None:
    kept = {"model": {"uri": "file:///m"}, "paused": True}
    assert held_back(kept, {**kept, "engine": {"maxNumSeqs": "many"}}) == ("engine",)
    assert held_back(kept, {**kept, "model": {"uri": "file:///n"}, "paused": False}) == (
        "model.uri",
    )


def test_a_service_that_is_paused_from_the_start_is_not_created() -> None:
    service = Service()
    try:
        service.create({**SPEC, "paused": True})
        service.rounds(3)
        assert not service.pods()
        assert service.condition("Ready")["reason"] == "Paused"
        service.patch({"paused": False})
        service.settle()
    finally:
        service.close()


def test_each_spec_is_recorded_once_and_the_oldest_ones_are_dropped(
    service: Service,
) -> None:
    (first,) = records(service)
    assert first["data"]["spec"]["model"] == {**SPEC["model"], "dtype": "auto"}
    service.patch({"decode": {"replicas": 1}})
    service.settle()
    assert records(service) == [first], "a change of the size was recorded"
    for number in range(1, LIMIT + 3):
        service.patch({"engine": {"maxNumSeqs": number}})
        service.reconcile()
    assert len(records(service)) == LIMIT + 1
    assert records(service)[0] == first, "the last spec with which all pods were ready must be kept"
    assert records(service)[-1]["data"]["spec"]["engine"]["maxNumSeqs"] == LIMIT + 2
    service.settle()
    service.patch({"engine": {"maxNumSeqs": LIMIT + 3}})
    service.reconcile()
    assert len(records(service)) == LIMIT
    assert first not in records(service)


def test_a_record_of_a_deleted_service_of_the_same_name_is_ignored(
    service: Service,
) -> None:
    (first,) = records(service)
    service.patch({"engine": {"maxNumSeqs": 3}})
    name = f"{NAME}-{names.content_hash(_pod_fields(service.object()['spec']))}"
    (owner,) = first["metadata"]["ownerReferences"]
    metadata = {
        **first["metadata"],
        "name": name,
        "uid": "old",
        "ownerReferences": [{**owner, "uid": "gone"}],
    }
    service.server.cluster.store.put("controllerrevisions.apps", {**first, "metadata": metadata})
    service.reconcile()
    assert service.condition("Ready")["reason"] == "NameConflict"
    service.settle()  # the garbage collector deletes it
    assert name in [each["metadata"]["name"] for each in records(service)]


def test_a_spec_that_returns_becomes_the_newest_record_again(service: Service) -> None:
    before = revisions(service)
    (first,) = records(service)
    service.patch({"engine": {"maxNumSeqs": 3}})
    service.settle()
    service.patch({"engine": {"maxNumSeqs": None}})
    service.settle()
    assert revisions(service) == before
    assert [each["metadata"]["name"] for each in records(service)][-1] == first["metadata"]["name"]
    assert len(records(service)) == 2


def test_a_pause_whose_record_is_gone_does_nothing(service: Service) -> None:
    service.patch({"paused": True})
    for each in records(service):
        service.server.remove("controllerrevisions.apps", each["metadata"]["name"])
    service.patch({"engine": {"maxNumSeqs": 3}})
    before = service.pods()
    service.rounds(3)
    assert service.pods() == before
    assert service.condition("Ready")["reason"] == "Paused"


def test_a_rollback_during_a_rollout_keeps_the_pods_that_were_not_replaced(
    service: Service,
) -> None:
    """The new revision is never ready. Only its own pod is removed, and no other is restarted."""
    before = {pod["metadata"]["uid"] for pod in service.pods()}
    broken = {
        "spec": {"containers": [{"name": "engine", "env": [{"name": "BROKEN", "value": "1"}]}]}
    }
    service.patch({"decode": {"template": broken}, "progressDeadlineSeconds": 30})
    service.rounds(20)
    assert before < {pod["metadata"]["uid"] for pod in service.pods()}, (
        "the other pods must keep serving"
    )
    assert len(service.pods()) == 3, "the rollout must stop at the surge"
    assert (
        service.condition("Updating")["reason"]
        == service.condition("Ready")["reason"]
        == "RolloutStalled"
    )
    assert service.condition("Available")["reason"] == "MinimumPodsReady", "old pods must count"
    service.patch({"decode": {"template": None}})
    service.settle()
    assert {pod["metadata"]["uid"] for pod in service.pods()} == before
