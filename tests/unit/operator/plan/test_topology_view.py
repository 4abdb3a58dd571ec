"""The topology that the planner sees: ranks of the current coordinator and pods."""

from __future__ import annotations

from typing import Any

import msgspec

from baton_kube.client import Object
from baton_operator.api import llmservice
from baton_operator.plan.topology_view import TopologyView, recorded_topology, topology_for_status
from baton_protocol.topology import (
    MemberStatus,
    OperationPhase,
    OperationStatus,
    RankPhase,
    TopologyStatus,
)
from support.operator.services import service
from support.operator.topology_statuses import ADDRESS, status


def entry(
    name: str, rank: int | None = None, phase: RankPhase = RankPhase.SERVING, instance: str = "i"
) -> MemberStatus:
    return MemberStatus(name=name, instance_id=instance, phase=phase, rank=rank)


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
