"""The planner of expert-parallel groups: a table of decisions, and runs on a simulated cluster."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from baton_operator.api import llmservice
from baton_operator.plan.plan_expert_group import (
    JOIN_TOGETHER,
    UNREGISTERED,
    ExpertGroup,
    operation_id,
    plan_expert_group,
)
from baton_operator.plan.plan_group import DesiredGroup, GroupPlan, Member
from baton_operator.plan.topology_view import TopologyView
from baton_protocol.topology import (
    MemberStatus,
    OperationPhase,
    OperationStatus,
    RankPhase,
    TopologyStatus,
)
from support.operator.services import NOW
from support.operator.simulation.simulated_expert_group import Simulation

TIMEOUT_S = 60.0
STANDBY, SERVING, LOADING = RankPhase.STANDBY, RankPhase.SERVING, RankPhase.LOADING


def member(ordinal: int, **fields: Any) -> Member:
    """Return a started member of the newest revision, with these fields changed."""
    started = {
        "revision": "new",
        "ready": True,
        "started": True,
        "expert_group": "g",
        "created": NOW - 2 * JOIN_TOGETHER,
    }
    return Member(name=f"m-{ordinal}", ordinal=ordinal, **{**started, **fields})


def ranks(
    *ordinals: int, others: tuple[int, ...] = (), phase: RankPhase = STANDBY, **fields: Any
) -> TopologyStatus:
    """Return a requested generation of these. `others` are registered, but in no topology."""
    members = [
        MemberStatus(name=f"m-{o}", instance_id=f"i{o}", phase=SERVING, rank=r)
        for r, o in enumerate(ordinals)
    ]
    members += [MemberStatus(name=f"m-{o}", instance_id=f"i{o}", phase=phase) for o in others]
    known = {"generation": 3, "desired": sorted(f"m-{o}" for o in ordinals), "members": members}
    return TopologyStatus(**{**known, **fields})


def operation(phase: OperationPhase, kind: str = "scale") -> OperationStatus:
    return OperationStatus(operation_id="op", kind=kind, phase=phase, generation=4)


def recorded(generation: int, *ordinals: int) -> llmservice.TopologyStatus:
    listed = [
        llmservice.RankStatus(name=f"m-{o}", rank=r, phase="serving")
        for r, o in enumerate(ordinals)
    ]
    return llmservice.TopologyStatus(coordinator="10.96.0.9", generation=generation, ranks=listed)


def plan(
    members: list[Member],
    desired: int,
    topology: TopologyStatus | None,
    record: llmservice.TopologyStatus | None = None,
    name: str = "g",
) -> GroupPlan:
    group = ExpertGroup(
        target=DesiredGroup(size=desired, revision="new", drain_timeout_s=TIMEOUT_S),
        service_uid="uid", name=name,
        view=None if topology is None else TopologyView(topology, record),
    )  # fmt: skip
    return plan_expert_group(members, group, NOW)


DOWN = {"ready": False, "started": False}
FRESH = {**DOWN, "created": NOW - timedelta(seconds=2)}
OLD = {"revision": "old"}
OTHER = {"revision": "old", "expert_group": "h"}
ALONE = {"revision": "old", "expert_group": ""}
NO_ROOM = {**DOWN, "no_room_since": NOW - timedelta(minutes=5)}
DRAINED = {"draining": True, "drain_started": NOW - timedelta(seconds=2), "unfinished": 0}
NOTHING = TopologyStatus(generation=0, desired=[], members=[])

DECISIONS: dict[str, tuple[list[Member], int, TopologyStatus | None, dict[str, Any]]] = {
    "an empty group is created at once": ([], 2, NOTHING, {"create": [0, 1]}),
    "an empty group is created without a coordinator": ([], 2, None, {"create": [0, 1]}),
    "members that have started form a group": (
        [member(0), member(1)], 2, ranks(others=(0, 1), generation=0), {"asked": ["m-0", "m-1"]},
    ),
    "the first generation waits for a member that was just created": (
        [member(0), member(1, **FRESH)], 2, NOTHING, {},
    ),
    "the first generation does not wait for a member that does not start": (
        [member(0), member(1, **DOWN)], 2, NOTHING, {"asked": ["m-0"]},
    ),
    "draining ranks leave the topology if a new member has no room": (
        [member(0, **OLD, **DRAINED), member(1, **OLD, **DRAINED), member(2, **NO_ROOM)], 1,
        ranks(0, 1), {"asked": ["m-0"]},
    ),
    "draining ranks serve while a new member starts": (
        [member(0, **OLD, **DRAINED), member(1, **OLD, **DRAINED), member(2, **DOWN)], 1,
        ranks(0, 1), {},
    ),
    "a requested topology is not requested again": ([member(0), member(1)], 2, ranks(0, 1), {}),
    "a group that grows creates pods first": (
        [member(0), member(1)], 4, ranks(0, 1), {"create": [2, 3]},
    ),
    "started pods are requested as ranks": (
        [member(0), member(1), member(2), member(3)], 4, ranks(0, 1, others=(2, 3)),
        {"asked": ["m-0", "m-1", "m-2", "m-3"]},
    ),
    "a join waits for the generation that is being prepared": (
        [member(0), member(1), member(2)], 3,
        ranks(0, 1, others=(2,), operation=operation(OperationPhase.PREPARING)), {},
    ),
    "a departure does not wait for the generation that is being prepared": (
        [member(0), member(1), member(2)], 2,
        ranks(0, 1, 2, operation=operation(OperationPhase.PREPARING)), {"asked": ["m-0", "m-1"]},
    ),
    "a smaller topology without the highest ordinals is requested first": (
        [member(0), member(1), member(2), member(3)], 2, ranks(0, 1, 2, 3),
        {"asked": ["m-0", "m-1"]},
    ),
    "a member whose departure is requested stays while it is a rank": (
        [member(0), member(1)], 1, ranks(0, 1, desired=["m-0"]), {},
    ),
    "a retired member that still serves stays": (
        [member(0), member(1)], 1, ranks(0, others=(1,), phase=SERVING), {},
    ),
    "a surplus standby member is drained": (
        [member(0), member(1)], 1, ranks(0, others=(1,)), {"drain": ["m-1"]},
    ),
    "a standby member is deleted when it has drained": (
        [member(0), member(1, **DRAINED)], 1, ranks(0, others=(1,)), {"delete": ["m-1"]},
    ),
    "a drained member stays while a generation is being prepared": (
        [member(0), member(1, **DRAINED)], 1,
        ranks(0, others=(1,), operation=operation(OperationPhase.PREPARING)), {},
    ),
    "a drained member stays while a generation is committed": (
        [member(0), member(1, **DRAINED)], 1,
        ranks(0, others=(1,), operation=operation(OperationPhase.COMMITTING)), {},
    ),
    "a drained member stays while it is in the requested topology": (
        [member(0), member(1, **DRAINED)], 1, ranks(0, others=(1,), desired=["m-0", "m-1"]),
        {"asked": ["m-0"]},
    ),
    "a drained member stays while the coordinator does not answer": (
        [member(0), member(1, **DRAINED)], 1, None, {},
    ),
    "a failed member is replaced while the coordinator does not answer": (
        [member(0), member(1, **DOWN, failed=True)], 2, None, {"delete": ["m-1"], "create": [2]},
    ),
    "a rank that failed leaves the topology and is replaced": (
        [member(0), member(1, **DOWN, failed=True)], 2, ranks(0, 1),
        {"delete": ["m-1"], "create": [2], "asked": ["m-0"]},
    ),
    "a member that failed right after its creation is kept and not replaced yet": (
        [member(0), member(1, **FRESH, failed=True)], 2, ranks(0, desired=["m-0"]), {},
    ),
    "a rank whose container restarts stays": (
        [member(0), member(1, **DOWN)], 2, ranks(0, 1), {},
    ),
    "a surplus member that never started is deleted": (
        [member(0), member(1, **DOWN)], 1, ranks(0), {"delete": ["m-1"]},
    ),
    "a member deleted by another client leaves the topology and is replaced": (
        [member(0), member(1, deletion=NOW)], 2, ranks(0, 1), {"asked": ["m-0"], "create": [2]},
    ),
    "rollout: a new member is created first": (
        [member(0, **OLD), member(1, **OLD)], 2, ranks(0, 1), {"create": [2]},
    ),
    "rollout: the new member joins while both old ones stay": (
        [member(0, **OLD), member(1, **OLD), member(2)], 2, ranks(0, 1, others=(2,)),
        {"asked": ["m-0", "m-1", "m-2"]},
    ),
    "rollout: one old member leaves the topology after the join": (
        [member(0, **OLD), member(1, **OLD), member(2)], 2, ranks(0, 1, 2),
        {"asked": ["m-0", "m-2"]},
    ),
    "rollout: a revision that does not start replaces no member": (
        [member(0, **OLD), member(1, **OLD), member(2, **DOWN)], 2, ranks(0, 1), {},
    ),
    "scaling to zero: the topology shrinks to one rank first": (
        [member(0), member(1)], 0, ranks(0, 1), {"asked": ["m-0"]},
    ),
    "scaling to zero: the last rank drains": ([member(0)], 0, ranks(0), {"drain": ["m-0"]}),
    "scaling to zero: the last rank is deleted when it has drained": (
        [member(0, **DRAINED)], 0, ranks(0), {"delete": ["m-0"]},
    ),
    "a group that grows again replaces the draining rank": (
        [member(0, **DRAINED), member(1)], 1, ranks(0, others=(1,)), {"asked": ["m-1"]},
    ),
    "independent engines: a first rank is created beside them": (
        [member(0, **ALONE), member(1, **ALONE)], 2, NOTHING, {"create": [2]},
    ),
    "independent engines: one drains when the first rank serves": (
        [member(0, **ALONE), member(1, **ALONE), member(2)], 2, ranks(2), {"drain": ["m-1"]},
    ),
    "independent engines: one is deleted when it has drained": (
        [member(0, **ALONE), member(1, **ALONE, **DRAINED), member(2)], 2, ranks(2),
        {"delete": ["m-1"]},
    ),
    "another model: the old group stays until a new pod has started": (
        [member(0, **OTHER), member(1, **OTHER), member(2, **FRESH)], 2, ranks(0, 1), {},
    ),
    "another model: the old group shrinks to one rank": (
        [member(0, **OTHER), member(1, **OTHER), member(2)], 2, ranks(0, 1, others=(2,)),
        {"asked": ["m-0"]},
    ),
    "another model: the last rank of the old group drains": (
        [member(0, **OTHER), member(2)], 2, ranks(0, others=(2,)),
        {"drain": ["m-0"], "create": [1]},
    ),
    "another model: the new group forms when the old one is gone": (
        [member(1), member(2)], 2, ranks(others=(1, 2), generation=0), {"asked": ["m-1", "m-2"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("members", "desired", "topology", "step"), DECISIONS.values(), ids=DECISIONS.keys()
)
def test_decisions(
    members: list[Member], desired: int, topology: TopologyStatus | None, step: dict[str, Any]
) -> None:
    result = plan(members, desired, topology)
    assert result.create == step.get("create", [])
    assert result.drain == step.get("drain", [])
    assert [deletion.name for deletion in result.delete] == step.get("delete", [])
    assert (result.request.members if result.request else None) == step.get("asked")


def test_ranks_not_registered_with_a_new_coordinator_are_still_members() -> None:
    starting = TopologyStatus(generation=0, desired=[], members=[])
    members = [member(0), member(1), member(2, **DOWN)]
    asked = plan(members, 2, starting, recorded(7, 0, 1, 2)).request
    assert asked.members == ["m-0", "m-1"]
    assert plan(members, 2, starting, recorded(7, 0, 1, 2)).delete == []
    partly = ranks(0, generation=7)
    assert plan([member(0), member(1, **DRAINED)], 1, partly, recorded(7, 0, 1)).delete == []
    newer = ranks(0, generation=8, others=(1,))
    assert [
        each.name
        for each in plan([member(0), member(1, **DRAINED)], 1, newer, recorded(7, 0, 1)).delete
    ] == ["m-1"]


def test_a_pod_that_never_registered_is_deleted_only_after_a_time() -> None:
    soon = member(1, draining=True, drain_started=NOW - UNREGISTERED / 2, unfinished=0)
    late = member(1, draining=True, drain_started=NOW - UNREGISTERED, unfinished=0)
    assert plan([member(0), soon], 1, ranks(0)).delete == []
    assert [each.name for each in plan([member(0), late], 1, ranks(0)).delete] == ["m-1"]


@pytest.mark.parametrize("topology", [ranks(0), NOTHING], ids=["listed", "recorded"])
@pytest.mark.parametrize("container", [{}, DOWN], ids=["runs", "is down"])
def test_the_last_rank_drains_even_if_its_container_is_down(
    topology: TopologyStatus, container: dict[str, Any]
) -> None:
    def step(**fields: Any) -> tuple[list[str], list[str]]:
        result = plan([member(0, **container, **fields)], 0, topology, recorded(3, 0))
        return result.drain, [each.name for each in result.delete]

    assert step() == (["m-0"], [])
    soon = {**DRAINED, "drain_started": NOW - UNREGISTERED / 2}
    is_known = topology is not NOTHING and not container
    assert step(**soon) == ([], ["m-0"] if is_known else []), (
        "deleted although its process may register"
    )
    assert step(**{**DRAINED, "drain_started": NOW - UNREGISTERED}) == ([], ["m-0"])


def test_a_group_whose_containers_are_all_down_can_scale_to_zero() -> None:
    down = plan([member(0, **DOWN), member(1, **DOWN)], 0, NOTHING, recorded(3, 0, 1))
    assert (down.drain, down.delete) == (["m-0", "m-1"], [])
    marked = {**DOWN, "draining": True, "drain_started": NOW - UNREGISTERED}
    members = [member(0, **marked), member(1, **marked)]
    assert [each.name for each in plan(members, 0, NOTHING, recorded(3, 0, 1)).delete] == [
        "m-0",
        "m-1",
    ]
    assert plan([member(0), *members[1:]], 0, NOTHING, recorded(3, 0, 1)).delete == [], (
        "deleted although one of them runs again"
    )


def test_an_earlier_engine_leaves_before_the_last_rank() -> None:
    members = [member(0, **OLD), member(1, **ALONE), member(2, expert_group="")]
    assert plan(members, 2, ranks(0), name="").drain == ["m-1"], (
        "the rank left although only it and the earlier engine serve"
    )
    assert (
        plan([*members[:2], member(2, **DOWN, expert_group="")], 2, ranks(0), name="").drain == []
    )


def test_an_operations_id_depends_on_the_observation_and_the_previous_id() -> None:
    group = ExpertGroup(
        target=DesiredGroup(size=2, revision="new", drain_timeout_s=TIMEOUT_S),
        service_uid="uid",
        name="g",
        view=None,
    )
    done = operation(OperationPhase.DONE)
    first = operation_id(group, ["m-0", "m-1"], ranks(0))
    assert first == operation_id(group, ["m-0", "m-1"], ranks(0))
    assert first != operation_id(group, ["m-0"], ranks(0))
    assert first != operation_id(group, ["m-0", "m-1"], ranks(0, generation=4))
    assert first != operation_id(group, ["m-0", "m-1"], ranks(0, operation=done))


def test_running_changes_are_checked_again_and_groups_at_rest_are_not() -> None:
    assert plan([member(0)], 1, ranks(0)).revisit_s is None
    assert (
        plan([member(0)], 1, ranks(0, operation=operation(OperationPhase.DONE))).revisit_s is None
    )
    assert plan([member(0)], 1, ranks(0, operation=operation(OperationPhase.WAITING))).revisit_s
    assert (
        plan(
            [], 0, ranks(desired=["m-0"], operation=operation(OperationPhase.WAITING, "form"))
        ).revisit_s
        is None
    )
    assert plan([member(0)], 1, None).revisit_s
    assert plan([member(0), member(1)], 1, ranks(0, 1)).revisit_s
    assert plan([member(0), member(1, **FRESH)], 2, ranks(0)).revisit_s, (
        "the deadline passes without an event"
    )


def grown(desired: int) -> Simulation:
    simulation = Simulation(desired=desired)
    simulation.settle()
    return simulation


def test_a_group_forms_grows_and_shrinks_in_one_operation_each() -> None:
    simulation = grown(2)
    for desired in (4, 3, 6, 2):
        simulation.desired = desired
        simulation.settle()
    assert [len(request.members) for request in simulation.requests] == [2, 4, 3, 6, 2]
    assert len({request.operation_id for request in simulation.requests}) == 5


def test_a_repeated_request_for_earlier_members_is_another_operation() -> None:
    simulation = grown(1)
    for desired in (2, 1, 2):
        simulation.desired = desired
        simulation.settle()
    twice = [request.operation_id for request in simulation.requests if len(request.members) == 2]
    assert len(set(twice)) == 2


def test_a_new_revision_never_removes_a_serving_rank() -> None:
    simulation = grown(3)
    simulation.revision = "r1"
    for _ in range(60):
        simulation.reconcile()
        simulation.world(lambda: True, 1.0)
        assert len(simulation.ranks) >= 3
        assert len(simulation.pods) <= 4
    assert simulation.is_settled()


def test_a_failed_operation_keeps_the_old_topology_until_a_retry_succeeds() -> None:
    simulation = grown(2)
    simulation.desired, simulation.fail_next = 3, True
    before = dict(simulation.ranks)
    for _ in range(20):
        simulation.reconcile()
        simulation.world(lambda: True, 1.0)
        if simulation.operation and simulation.operation.phase is OperationPhase.FAILED:
            break
    else:
        raise AssertionError("no operation failed")
    assert simulation.ranks == before
    simulation.settle()
    assert len(simulation.ranks) == 3


def test_an_unreachable_coordinator_stops_only_deletions() -> None:
    simulation = grown(3)
    simulation.coordinator_dies()
    simulation.desired = 1
    before = dict(simulation.ranks)
    for _ in range(10):
        plan = simulation.reconcile()
        assert not plan.delete
        assert not plan.drain
        simulation.world(lambda: True, 1.0)
    assert simulation.ranks == before
    simulation.settle()


def test_ranks_with_an_earlier_key_drain_and_leave() -> None:
    others = [member(0, expert_group="old key"), member(1, expert_group="old key")]
    coordinator = ranks(others=(2,), generation=0)
    held_up = plan([*others, member(2)], 2, coordinator, recorded(3, 0, 1))
    assert held_up.drain == [], (
        "recorded ranks count, because the new coordinator never receives their statuses"
    )
    first = plan([*others, member(2)], 2, coordinator, recorded(3))
    assert (sorted(first.drain), first.request) == (["m-0", "m-1"], None)
    since = NOW - timedelta(seconds=TIMEOUT_S)
    left = [member(o, expert_group="old key", draining=True, drain_started=since) for o in (0, 1)]
    assert {
        deletion.name for deletion in plan([*left, member(2)], 2, coordinator, recorded(3)).delete
    } == {
        "m-0",
        "m-1",
    }
    formed = plan(
        [member(2), member(3)], 2, ranks(others=(2, 3), generation=0), recorded(3)
    ).request
    assert formed.members == ["m-2", "m-3"]
