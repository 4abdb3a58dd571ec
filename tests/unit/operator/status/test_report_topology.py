"""The topology in the status: requests to the coordinator, conditions and Events."""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from baton_kube.client import Object
from baton_operator.api import llmservice
from baton_operator.names import ANNOTATION_SERVICE_KEY
from baton_operator.observe.pod_clients import CoordinatorClient
from baton_operator.plan.topology_view import (
    TopologyView,
    filter_by_service_key,
    recorded_topology,
    topology_for_status,
    without_waiting_operation,
)
from baton_operator.status.report_group import ReportedGroup, group_verdict
from baton_operator.status.report_topology import GroupTopology, operation_events, topology_verdict
from baton_protocol.process.health import Health
from baton_protocol.topology import (
    MemberStatus,
    OperationPhase,
    OperationStatus,
    RankPhase,
    TopologyRequest,
    TopologyStatus,
)
from support.http_server import serving
from support.operator.services import pod, service

ADDRESS = "10.96.0.9"


def entry(
    name: str, rank: int | None = None, phase: RankPhase = RankPhase.SERVING, instance: str = "i"
) -> MemberStatus:
    return MemberStatus(name=name, instance_id=instance, phase=phase, rank=rank)


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


def status(
    *names: str, generation: int = 3, last: llmservice.OperationStatus | None = None
) -> llmservice.TopologyStatus:
    ranks = [
        llmservice.RankStatus(name=name, rank=rank, phase="serving")
        for rank, name in enumerate(names)
    ]
    return llmservice.TopologyStatus(
        coordinator=ADDRESS, generation=generation, ranks=ranks, operation=last
    )


@pytest.mark.parametrize(
    ("code", "body"),
    [(200, b"{}"), (200, b"no JSON"), (400, b'{"reason": "BadRequest"}'), (503, b"")],
)
async def test_an_invalid_response_is_no_topology(code: int, body: bytes) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=code, body=body)

    routes = web.get("/topology", answer), web.put("/topology", answer)
    async with serving(*routes) as port, aiohttp.ClientSession() as session:
        client = CoordinatorClient(session, port=port)
        assert await client.topology("127.0.0.1") is None
        request = TopologyRequest(operation_id="x", members=["a"])
        assert await client.request_topology("127.0.0.1", request) is None


async def test_an_unreachable_coordinator_gives_no_topology() -> None:
    async with aiohttp.ClientSession() as session:
        assert await CoordinatorClient(session, port=1).topology("127.0.0.1") is None


def test_a_restarted_rank_has_the_phase_of_its_new_process_and_stays_a_rank() -> None:
    both = [entry("a", rank=0, instance="old"), entry("a", phase=RankPhase.LOADING, instance="new")]
    assert TopologyView(TopologyStatus(generation=3, desired=["a"], members=both), None).is_rank(
        "a"
    )
    retired = [
        entry("a", phase=RankPhase.SERVING, instance="old"),
        entry("a", phase=RankPhase.STANDBY, instance="new"),
    ]
    view = TopologyView(TopologyStatus(generation=4, desired=[], members=retired), None)
    assert not view.is_rank("a")
    assert view.is_standby("a")


def test_the_record_survives_a_restart_of_the_coordinator_but_drops_deleted_pods() -> None:
    before = status("a", "b", generation=7)
    away = topology_for_status(None, before, {"a", "b"}, ADDRESS)
    assert away == before
    starting = topology_for_status(
        TopologyStatus(generation=0, desired=[], members=[]), before, {"a"}, ADDRESS
    )
    assert (starting.generation, [rank.name for rank in starting.ranks]) == (7, ["a"])
    partly = topology_for_status(
        TopologyStatus(generation=7, desired=["a", "b"], members=[entry("a", 0)]),
        before,
        {"a", "b"},
        ADDRESS,
    )
    assert partly == before
    newer = topology_for_status(
        TopologyStatus(generation=8, desired=["a"], members=[entry("a", 0)]),
        before,
        {"a", "b"},
        ADDRESS,
    )
    assert [rank.name for rank in newer.ranks] == ["a"]


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


def test_ranks_of_another_coordinator_are_ignored() -> None:
    def stored(topology: Any) -> Object:
        return {"status": {"decode": {"topology": topology}}}

    recorded = msgspec.to_builtins(status("a"))
    assert recorded_topology(stored(recorded), ADDRESS) == status("a")
    assert recorded_topology(stored(recorded), "10.96.0.10") is None
    assert recorded_topology(stored({"generation": "?"}), ADDRESS) is None
    assert recorded_topology(service(), ADDRESS) is None


def test_time_alone_does_not_change_the_status() -> None:
    def at(seconds: float) -> llmservice.TopologyStatus | None:
        running = OperationStatus(
            operation_id="op", kind="scale", phase=OperationPhase.PREPARING, generation=4,
            seconds={"waiting": 1.25, "preparing": seconds},
        )  # fmt: skip
        return topology_for_status(
            TopologyStatus(generation=3, desired=[], members=[], operation=running),
            None,
            set(),
            ADDRESS,
        )

    assert at(1.0) == at(2.0)
    assert at(1.0).operation.seconds == llmservice.OperationSeconds(waiting=1.25)


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
