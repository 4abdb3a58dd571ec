"""The topology in the status: ranks, conditions and Events."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton_kube.client import Object
from baton_operator.api import llmservice
from baton_operator.names import ANNOTATION_SERVICE_KEY
from baton_operator.plan.topology_view import (
    filter_by_service_key,
    without_waiting_operation,
)
from baton_operator.status.report_group import ReportedGroup, group_verdict
from baton_operator.status.report_topology import GroupTopology, operation_events, topology_verdict
from baton_protocol.process.health import Health
from support.operator.services import pod
from support.operator.topology_statuses import status


def operation(
    phase: str, kind: str = "scale", generation: int = 4, id_: str = "op", reason: str = ""
) -> llmservice.OperationStatus:
    return llmservice.OperationStatus(
        id=id_,
        kind=kind,
        phase=phase,
        generation=generation,
        reason=reason,
        seconds=llmservice.OperationSeconds(),
    )


def test_a_group_at_zero_waits_for_no_ranks() -> None:
    waits = operation("waiting", "form", reason="waits for demo-decode-0")
    assert without_waiting_operation(status(generation=4, last=waits)) == status(generation=4)
    scaled = operation("done", "scale")
    assert without_waiting_operation(status(generation=4, last=scaled)) == status(
        generation=4, last=scaled
    )
    leaving = status("demo-decode-0", last=waits)
    assert without_waiting_operation(leaving) == leaving, "the leaving rank still exists"
    assert without_waiting_operation(None) is None
    assert (
        operation_events(
            status(last=scaled), without_waiting_operation(status(generation=4, last=waits))
        )
        == []
    )


FAILED = operation("failed", reason="c: no memory")
VERDICTS: dict[str, tuple[Any, set[str], int, tuple[str, str, str]]] = {
    "at rest": (
        status("a", "b"), {"a", "b"}, 2,
        ("False", "AtRest", "generation 3 of the topology has 2 ranks"),
    ),
    "scaled to zero": (
        status(last=operation("waiting", "form")), {"a"}, 0,
        ("False", "AtRest", "the group is scaled to zero"),
    ),
    "before the first status": (None, set(), 2, ("True", "Forming", "0 of 2")),
    "forming": (
        status(last=operation("waiting", "form"), generation=0), {"a", "b"}, 2,
        ("True", "Forming", "a, b"),
    ),
    "growing": (
        status("a", last=operation("preparing")), {"a", "b"}, 2,
        ("True", "ScalingUp", "preparing generation 4"),
    ),
    "growing, and pods load": (
        status("a"), {"a"}, 2, ("True", "ScalingUp", "waiting for pods to join the group: 1 of 2"),
    ),
    "shrinking": (
        status("a", "b", last=operation("committing")), {"a"}, 1,
        ("True", "ScalingDown", "committing"),
    ),
    "committing": (
        status("a", "b", last=operation("committing")), {"a", "b"}, 2,
        ("True", "Committing", "committing"),
    ),
    "recovering": (
        status("a", "b", last=operation("preparing", "recover")), {"a"}, 2,
        ("True", "Recovering", ""),
    ),
    "rebalancing": (
        status("a", last=operation("preparing", "rebalance")), {"a"}, 1,
        ("True", "Rebalancing", ""),
    ),
    "failed": (
        status("a", "b", last=FAILED), {"a", "b", "c"}, 3,
        ("False", "ScaleFailed", "no memory; generation 3 keeps"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("topology", "requested", "desired", "verdict"), VERDICTS.values(), ids=VERDICTS.keys()
)
def test_the_scaling_condition(
    topology: llmservice.TopologyStatus | None,
    requested: set[str],
    desired: int,
    verdict: tuple[str, str, str],
) -> None:
    got = topology_verdict(
        GroupTopology(status=topology, reachable=True, requested=frozenset(requested)), desired
    )
    assert got[:2] == verdict[:2]
    assert verdict[2] in got[2]


def test_an_unreachable_coordinator_is_reported() -> None:
    assert topology_verdict(GroupTopology(status=status("a"), reachable=False), 1)[:2] == (
        "Unknown",
        "CoordinatorUnreachable",
    )


def test_ready_counts_serving_ranks() -> None:
    pods = [pod(f"demo-decode-{ordinal}", ready=True) for ordinal in range(2)]
    one = GroupTopology(status=status("demo-decode-0"), reachable=True)
    group = ReportedGroup(role="decode", desired=2, pods=pods, revision="new", topology=one)
    assert group.ready == 1
    assert group_verdict(group)[:2] == ("False", "ScalingUp")
    assert "1 of 2 decode ranks serve" in group_verdict(group)[2]
    two = GroupTopology(status=status("demo-decode-0", "demo-decode-1"), reachable=True)
    assert group_verdict(msgspec.structs.replace(group, topology=two))[0] == "True"
    away = msgspec.structs.replace(one, reachable=False)
    assert group_verdict(msgspec.structs.replace(group, topology=away))[0] == "True", (
        "serving ranks must be ready"
    )
    more = msgspec.structs.replace(group, topology=away, desired=3)
    assert group_verdict(more)[:2] == ("False", "CoordinatorUnreachable")
    first = msgspec.structs.replace(more, topology=GroupTopology(status=None, reachable=False))
    assert group_verdict(first)[:2] == ("False", "Starting"), (
        "the condition must be that of a starting group"
    )


def test_ranks_that_are_paused_or_asleep_do_not_serve() -> None:
    pods = [pod(f"demo-decode-{ordinal}") for ordinal in range(2)]
    topology = GroupTopology(status=status("demo-decode-0", "demo-decode-1"), reachable=True)
    group = ReportedGroup(
        role="decode",
        desired=2,
        pods=pods,
        revision="new",
        topology=topology,
        suspended={"demo-decode-1": Health("Paused", "m")},
    )
    assert group.ready == 1
    verdict = group_verdict(group)
    assert verdict[:2] == ("False", "EnginePaused")
    assert verdict[2].startswith("pod demo-decode-1 is paused;")
    assert verdict[2].endswith("1 of 2 decode ranks serve")


def test_problems_of_the_coordinator_are_reported_for_its_ranks() -> None:
    topology = GroupTopology(status=None, reachable=False)
    state = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
    coordinators = [pod("demo-coordinator-0", state=state)]
    group = ReportedGroup(
        role="decode",
        desired=1,
        pods=[pod()],
        revision="new",
        topology=topology,
        coordinators=coordinators,
    )
    verdict = group_verdict(group)
    assert verdict[:2] == ("False", "ImagePull")
    assert "pod demo-coordinator-0" in verdict[2]


def test_events_of_an_operation() -> None:
    waiting, running = (
        status(last=operation("waiting", generation=0)),
        status(last=operation("preparing")),
    )
    failed, done = status(last=FAILED), status(last=operation("done"))

    def reasons(
        before: llmservice.TopologyStatus | None, now: llmservice.TopologyStatus | None
    ) -> list[str]:
        return [event.reason for event in operation_events(before, now)]

    started, ended, broke = (
        "TopologyOperationStarted",
        "TopologyOperationEnded",
        "TopologyOperationFailed",
    )
    assert reasons(None, waiting) == [started]
    assert reasons(waiting, running) == []
    assert reasons(running, done) == [ended]
    assert reasons(done, done) == []
    assert reasons(running, failed) == [broke]
    assert reasons(failed, running) == [started], "a repeated failure must cause another event"
    assert reasons(None, done) == [started, ended], (
        "an operation between two reconciles must cause an event"
    )
    assert reasons(done, status(last=operation("done", id_="another"))) == [started, ended]
    assert reasons(done, None) == []
    (event,) = operation_events(running, failed)
    assert event.warning
    assert "c: no memory" in event.message


def test_ranks_with_another_key_are_not_waited_for() -> None:
    def with_key(name: str, key: str) -> Object:
        return {"metadata": {"name": name, "annotations": {ANNOTATION_SERVICE_KEY: key}}}

    known = status("m-0", "m-1", "m-2", "gone")
    pods = [with_key("m-0", "old"), with_key("m-1", "new"), {"metadata": {"name": "m-2"}}]
    left = filter_by_service_key(known, pods, "new")
    assert [rank.name for rank in left.ranks] == ["m-1", "gone"]
    assert left.generation == known.generation
    assert filter_by_service_key(None, [], "new") is None
