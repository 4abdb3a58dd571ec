"""The planner: a table of decisions, and convergence on a simulated cluster."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton_operator.plan.plan_group import (
    STUCK_TERMINATING,
    DesiredGroup,
    GroupPlan,
    Member,
    Update,
    plan_group,
)
from support.operator.services import NOW

TIMEOUT_S = 60.0


def member(ordinal: int, **fields: Any) -> Member:
    """Return a ready member of the newest revision, with these fields changed."""
    ready = {"revision": "new", "ready": True, "started": True}
    return Member(name=f"m-{ordinal}", ordinal=ordinal, **{**ready, **fields})


IN_PLACE = Update(max_surge=0, max_unavailable=1)
SURGE = Update(max_surge=1, max_unavailable=0, surge_timeout_s=30.0)
PAUSED = Update(paused=True)


def target_of(desired: int, update: Update) -> DesiredGroup:
    return DesiredGroup(size=desired, revision="new", update=update, drain_timeout_s=TIMEOUT_S)


def plan(
    members: list[Member],
    desired: int,
    update: Update = IN_PLACE,
    *,
    has_previous_revision: bool = False,
) -> GroupPlan:
    return plan_group(
        members,
        target_of(desired, update),
        NOW,
        has_previous_revision=has_previous_revision,
    )


def deleted(result: GroupPlan) -> list[str]:
    return [deletion.name for deletion in result.delete]


EXPIRED = NOW - timedelta(seconds=TIMEOUT_S)
OLD = {"revision": "old"}
DOWN = {"ready": False, "started": False}
DRAINS = {"draining": True, "drain_started": NOW}

DECISIONS: dict[str, tuple[list[Member], int, dict[str, Any]]] = {
    "an empty group is created at once": ([], 3, {"create": [0, 1, 2]}),
    "a full group is left alone": ([member(0), member(1)], 2, {}),
    "a gap is filled at its own ordinal": ([member(0), member(2)], 3, {"create": [1]}),
    "the highest ordinal drains first": ([member(0), member(1), member(2)], 2, {"drain": ["m-2"]}),
    "a member that is not ready leaves before one that is": (
        [member(0, ready=False), member(1)], 1, {"drain": ["m-0"]},
    ),
    "a member that never started is deleted without a drain": (
        [member(0, **DOWN), member(1)], 1, {"delete": ["m-0"]},
    ),
    "a member of an old revision leaves before a new one": (
        [member(0, **OLD), member(1)], 1, {"drain": ["m-0"]},
    ),
    "scaling to zero drains all members": ([member(0), member(1)], 0, {"drain": ["m-1", "m-0"]}),
    "a draining member without unfinished requests is deleted": (
        [member(0), member(1, **DRAINS, unfinished=0)], 1, {"delete": ["m-1"]},
    ),
    "a draining member with unfinished requests stays": (
        [member(0), member(1, **DRAINS, unfinished=3)], 1, {},
    ),
    "a draining member that does not answer stays": ([member(0), member(1, **DRAINS)], 1, {}),
    "a draining member is deleted after the drain timeout": (
        [member(0), member(1, draining=True, drain_started=EXPIRED, unfinished=3)], 1,
        {"delete": ["m-1"]},
    ),
    "a draining member counts until it is gone": (
        [member(0), member(1, **DRAINS, unfinished=3)], 2, {},
    ),
    "a terminating member counts until it is gone": ([member(0), member(1, deletion=NOW)], 2, {}),
    "a member stuck terminating on a lost node does not count": (
        [member(0), member(1, deletion=NOW - STUCK_TERMINATING)], 2, {"create": [2]},
    ),
    "a member marked as draining without a time is drained again": (
        [member(0), member(1, draining=True, unfinished=3)], 1, {"drain": ["m-1"]},
    ),
    "a member that failed right after its creation is kept for some time": (
        [member(0), member(1, **DOWN, failed=True, created=NOW - timedelta(seconds=2))], 2, {},
    ),
    "a member that failed later is deleted": (
        [member(0), member(1, **DOWN, failed=True, created=NOW - timedelta(seconds=20))], 2,
        {"delete": ["m-1"]},
    ),
    "a failed member without a creation time is deleted": (
        [member(0), member(1, **DOWN, failed=True)], 2, {"delete": ["m-1"]},
    ),
    "no member is replaced while another one terminates": (
        [member(0, **OLD), member(1, deletion=NOW)], 2, {},
    ),
}  # fmt: skip

ROOMLESS = {**DOWN, "no_room_since": NOW - timedelta(seconds=31)}
WAITS_FOR_ROOM = {**DOWN, "no_room_since": NOW - timedelta(seconds=29)}

ROLLOUTS: dict[str, tuple[Update, list[Member], int, dict[str, Any]]] = {
    # In place: a new member needs the place of an old one.
    "in place: one old member is replaced at a time": (
        IN_PLACE, [member(0, **OLD), member(1, **OLD)], 2, {"drain": ["m-1"]},
    ),
    "in place: a replacement must be ready before the next": (
        IN_PLACE, [member(0, **OLD), member(1, ready=False)], 2, {},
    ),
    "in place: the new member is created when the old one is gone": (
        IN_PLACE, [member(0, **OLD)], 2, {"create": [1]},
    ),
    "in place: a broken old member is replaced first": (
        IN_PLACE, [member(0, **OLD, **DOWN), member(1, **OLD)], 2, {"delete": ["m-0"]},
    ),
    "in place: a single member is replaced": (
        IN_PLACE, [member(0, **OLD)], 1, {"drain": ["m-0"]},
    ),
    "in place: two members are replaced at a time with max_unavailable 2": (
        Update(max_surge=0, max_unavailable=2), [member(i, **OLD) for i in range(3)], 3,
        {"drain": ["m-2", "m-1"]},
    ),
    # With a surge: a new member is ready before an old one leaves.
    "surge: a new member is created first": (
        SURGE, [member(0, **OLD), member(1, **OLD)], 2, {"create": [2]},
    ),
    "surge: an old member stays while the new one starts": (
        SURGE, [member(0, **OLD), member(1, **OLD), member(2, **DOWN)], 2, {},
    ),
    "surge: an old member drains when the new one is ready": (
        SURGE, [member(0, **OLD), member(1, **OLD), member(2)], 2, {"drain": ["m-1"]},
    ),
    "surge: a draining member counts until it is gone": (
        SURGE, [member(0, **OLD), member(1, **OLD, **DRAINS, unfinished=1), member(2)], 2, {},
    ),
    "surge: the next new member is created when the old one is gone": (
        SURGE, [member(0, **OLD), member(2)], 2, {"create": [1]},
    ),
    "surge: no more new members are created than desired": (
        SURGE, [member(0), member(2), member(1, **OLD, **DRAINS, unfinished=1)], 2, {},
    ),
    "surge of two: two members are replaced at a time": (
        Update(max_surge=2), [member(0, **OLD), member(1, **OLD), member(2), member(3)], 2,
        {"drain": ["m-1", "m-0"]},
    ),
    "surge and max_unavailable: one member is created and one drains": (
        Update(max_surge=1, max_unavailable=1), [member(0, **OLD), member(1, **OLD)], 2,
        {"create": [2], "drain": ["m-1"]},
    ),
    "no member serves: all are replaced at once": (
        SURGE, [member(0, **OLD, **DOWN), member(1, **OLD, **DOWN)], 2,
        {"create": [2], "delete": ["m-0", "m-1"]},
    ),
    # A revision that is never ready.
    "a revision that is not ready replaces no member": (
        SURGE, [member(0, **OLD), member(1, **OLD), member(2, ready=False)], 2, {},
    ),
    "a revision that is not ready does not replace an old member that restarts": (
        SURGE, [member(0, **OLD), member(1, **OLD, **DOWN), member(2, ready=False)], 2, {},
    ),
    "a revision that is not ready does not replace the last member": (
        SURGE, [member(0, **OLD, **DOWN), member(1, ready=False)], 1, {},
    ),
    "in place: a revision that is not ready replaces one member only": (
        IN_PLACE, [member(0, **OLD), member(1, **DOWN)], 2, {},
    ),
    "going back: the broken member is deleted and the others stay": (
        SURGE, [member(0), member(1), member(2, **OLD, **DOWN)], 2, {"delete": ["m-2"]},
    ),
    "going back in place: the broken member is deleted": (
        IN_PLACE, [member(0), member(1, **OLD, **DOWN)], 2, {"delete": ["m-1"]},
    ),
    "going back in the middle: a member of the abandoned revision leaves first": (
        SURGE, [member(0), member(1, **OLD), member(2, **OLD)], 2, {"drain": ["m-2"]},
    ),
    "a third revision: the broken member of the second one leaves first": (
        SURGE, [member(0, **OLD), member(1, **OLD), member(2, revision="broken", **DOWN)], 2,
        {"delete": ["m-2"]},
    ),
    # A full cluster.
    "no room: an old member stays until the surge timeout": (
        SURGE, [member(0, **OLD), member(1, **OLD), member(2, **WAITS_FOR_ROOM)], 2, {},
    ),
    "no room: an old member drains after the surge timeout": (
        SURGE, [member(0, **OLD), member(1, **OLD), member(2, **ROOMLESS)], 2, {"drain": ["m-1"]},
    ),
    "no room: no second old member drains while a new member starts": (
        SURGE, [member(0, **OLD), member(2, **DOWN), member(3, **ROOMLESS)], 2, {},
    ),
    "no room: the next old member drains when the new one is ready": (
        SURGE, [member(0, **OLD), member(2), member(3, **ROOMLESS)], 2, {"drain": ["m-0"]},
    ),
    "no room without a rollout: no member drains": (
        SURGE, [member(0), member(1, **ROOMLESS)], 2, {},
    ),
    # Sizes that change during the rollout.
    "fewer desired in a rollout: old members drain": (
        SURGE, [member(0, **OLD), member(1, **OLD), member(2)], 1, {"drain": ["m-1", "m-0"]},
    ),
    "fewer desired while the new member starts: one serving member stays": (
        SURGE, [member(0, **OLD), member(1, **OLD), member(2, **DOWN)], 1, {"drain": ["m-1"]},
    ),
    "more desired in a rollout: members of the new revision are created": (
        SURGE, [member(0, **OLD), member(1)], 4, {"create": [2, 3, 4]},
    ),
    "none desired in a rollout: all drain": (
        SURGE, [member(0, **OLD), member(1)], 0, {"drain": ["m-1", "m-0"]},
    ),
    # Another client deletes members.
    "a member deleted by another client is replaced at once": (
        SURGE, [member(0), member(1, deletion=NOW)], 2, {"create": [2]},
    ),
    "two members deleted by another client: one is replaced at once within the surge": (
        SURGE, [member(0, deletion=NOW), member(1, deletion=NOW)], 2, {"create": [2]},
    ),
    "without a surge, a deleted member is replaced when it is gone": (
        IN_PLACE, [member(0), member(1, deletion=NOW)], 2, {},
    ),
    "a deleted member that was draining is replaced when it is gone": (
        SURGE, [member(0), member(1, **DRAINS, deletion=NOW)], 2, {},
    ),
    "paused: a member deleted by another client is replaced at once": (
        PAUSED, [member(0, **OLD), member(1, **OLD, deletion=NOW)], 2, {"create": [2]},
    ),
    # Paused.
    "paused: old members stay": (
        PAUSED, [member(0, **OLD), member(1, **OLD)], 2, {},
    ),
    "paused: a dead member is replaced": (PAUSED, [member(0, **OLD)], 2, {"create": [1]}),
    "paused: a group still grows": (PAUSED, [member(0, **OLD)], 3, {"create": [1, 2]}),
    "paused: a group still shrinks": (
        PAUSED, [member(0, **OLD), member(1, **OLD)], 1, {"drain": ["m-1"]},
    ),
    "paused in the middle of a rollout: the surge stays": (
        PAUSED, [member(0, **OLD), member(1, **OLD), member(2)], 2, {},
    ),
    "paused: a surplus of one revision leaves": (
        PAUSED, [member(0), member(1), member(2)], 2, {"drain": ["m-2"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("update", "members", "desired", "step"), ROLLOUTS.values(), ids=ROLLOUTS.keys()
)
def test_steps_of_a_rollout(
    update: Update, members: list[Member], desired: int, step: dict[str, Any]
) -> None:
    result = plan(members, desired, update)
    assert result.create == step.get("create", [])
    assert result.drain == step.get("drain", [])
    assert deleted(result) == step.get("delete", [])


STARTS = {**DOWN, "unready_since": NOW - timedelta(seconds=599)}
STALLS = {**DOWN, "unready_since": NOW - timedelta(seconds=601)}

WITH_PREVIOUS: dict[str, tuple[Update, list[Member], int, dict[str, Any]]] = {
    "a rollout that makes progress continues": (
        SURGE, [member(0, **OLD), member(1, **OLD)], 2, {"create": [2]},
    ),
    "before the deadline, an old member that died is replaced by a new one": (
        SURGE, [member(0, **OLD), member(2, **STARTS)], 2, {"create": [1]},
    ),
    "a stalled rollout: an old member that died is restored": (
        SURGE, [member(0, **OLD), member(2, **STALLS)], 2, {"restore": [1]},
    ),
    "a new member that makes progress hides no other that stalls the rollout": (
        SURGE, [member(2, **STARTS), member(3, **STALLS)], 2, {"restore": [0]},
    ),
    "a stalled rollout without a loss is left alone": (
        SURGE, [member(0, **OLD), member(1, **OLD), member(2, **STALLS)], 2, {},
    ),
    "a stalled rollout: all old members that died are restored": (
        SURGE, [member(2, **STALLS)], 2, {"restore": [0, 1]},
    ),
    "a stalled rollout: the only old member is restored": (
        SURGE, [member(1, **STALLS)], 1, {"restore": [0]},
    ),
    "a stalled rollout in place: no member is restored beyond the desired size": (
        IN_PLACE, [member(1, **STALLS)], 1, {},
    ),
    "a stalled rollout in place: an old member that died is restored": (
        IN_PLACE, [member(0, **OLD), member(2, **STALLS)], 3, {"restore": [1]},
    ),
    "a stalled rollout: new members that serve stay": (
        SURGE, [member(0, **OLD), member(1), member(2, **STALLS)], 3, {"restore": [3]},
    ),
    "a stalled rollout: more desired members are restored ones": (
        SURGE, [member(0, **OLD), member(1, **STALLS)], 3, {"restore": [2, 3]},
    ),
    "a stalled rollout: a second new member without room replaces no member": (
        SURGE,
        [
            *(member(n, **OLD) for n in (0, 1)), member(2, **STALLS),
            member(3, **DOWN, no_room_since=EXPIRED),
        ],
        3, {},
    ),
    "no room after the progress deadline: an old member drains": (
        SURGE, [member(0, **OLD), member(1, **OLD), member(2, **STALLS, no_room_since=EXPIRED)], 2,
        {"drain": ["m-1"]},
    ),
    "no room after the progress deadline: an old member that died is replaced by a new one": (
        SURGE, [member(0, **OLD), member(2, **STALLS, no_room_since=EXPIRED)], 2, {"create": [1]},
    ),
    "the new member became ready: the restored one is deleted": (
        SURGE, [member(0, **OLD), member(1, **OLD, **DOWN), member(2)], 2, {"delete": ["m-1"]},
    ),
    "paused: an old member that died is restored": (
        PAUSED, [member(0, **OLD)], 2, {"restore": [1]},
    ),
    "paused: a new member that died is restored as an old one": (
        PAUSED, [member(2)], 2, {"restore": [0]},
    ),
    "paused: a group grows by restored members": (
        PAUSED, [member(0, **OLD), member(1)], 4, {"restore": [2, 3]},
    ),
    "paused: the surge stays": (
        PAUSED, [member(0, **OLD), member(1, **OLD), member(2)], 2, {},
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("update", "members", "desired", "step"), WITH_PREVIOUS.values(), ids=WITH_PREVIOUS.keys()
)
def test_steps_of_a_rollout_with_a_previous_revision(
    update: Update, members: list[Member], desired: int, step: dict[str, Any]
) -> None:
    result = plan(members, desired, update, has_previous_revision=True)
    assert result.create == step.get("create", [])
    assert result.restore == step.get("restore", [])
    assert result.drain == step.get("drain", [])
    assert deleted(result) == step.get("delete", [])


def test_a_restored_member_is_not_replaced_while_it_starts() -> None:
    """Otherwise it would be deleted and created again without end."""
    stalled = member(0, ready=False, unready_since=NOW - timedelta(hours=1))
    update = Update(max_surge=1, max_unavailable=1)
    assert plan([stalled], 1, update, has_previous_revision=True).restore == [1]
    starting = member(1, ready=False, started=False, **OLD)
    result = plan([stalled, starting], 1, update, has_previous_revision=True)
    assert (result.restore, result.create, deleted(result), result.drain) == ([], [], [], [])


def test_a_rollout_is_checked_again_at_its_progress_deadline() -> None:
    members = [member(0, **OLD), member(2, **STARTS)]
    assert plan(members, 2, SURGE, has_previous_revision=True).revisit_s == pytest.approx(1.0)
    assert plan(members, 2, SURGE).revisit_s is None, "a stalled rollout is checked again"


@pytest.mark.parametrize(("members", "desired", "step"), DECISIONS.values(), ids=DECISIONS.keys())
def test_decisions(members: list[Member], desired: int, step: dict[str, Any]) -> None:
    result = plan(members, desired)
    assert result.create == step.get("create", [])
    assert result.drain == step.get("drain", [])
    assert deleted(result) == step.get("delete", [])


def test_a_member_without_room_is_checked_again_at_its_deadline() -> None:
    members = [member(0, **OLD), member(1, **OLD), member(2, **WAITS_FOR_ROOM)]
    assert plan(members, 2, SURGE).revisit_s == pytest.approx(1.0)


def test_a_running_drain_is_checked_again_soon() -> None:
    assert plan([member(0), member(1, **DRAINS, unfinished=3)], 1).revisit_s
    assert plan([member(0)], 1).revisit_s is None


class Simulation:
    """A simulated cluster that starts, drains and deletes pods at the speed of `draw`."""

    def __init__(
        self, members: list[Member], update: Update, draw: Any, *, has_previous_revision: bool
    ) -> None:
        self.members = {m.name: m for m in members}
        self.update = update
        self.has_previous_revision = has_previous_revision
        self.draw = draw
        self.now = NOW

    def step(self, desired: int) -> GroupPlan:
        before = list(self.members.values())
        result = plan_group(
            before,
            target_of(desired, self.update),
            self.now,
            has_previous_revision=self.has_previous_revision,
        )
        self._check(before, result, desired)
        for name in result.drain:
            self._set(
                name, draining=True, drain_started=self.now, unfinished=self.draw(st.integers(0, 2))
            )
        for name in deleted(result):
            self._set(name, deletion=self.now, ready=False)
        for ordinal in [*result.create, *result.restore]:
            roomless = self.now if self.draw(st.booleans()) else None
            revision = "new" if ordinal in result.create else "old"
            created = member(
                ordinal, **DOWN, revision=revision, unready_since=self.now, no_room_since=roomless
            )
            assert created.name not in self.members, f"{created.name} exists"
            self.members[created.name] = created
        return result

    def _check(self, before: list[Member], result: GroupPlan, desired: int) -> None:
        by_name = {m.name: m for m in before}
        for name in deleted(result):
            gone = by_name[name]
            timed_out = gone.drain_started and self.now >= gone.drain_started + timedelta(
                seconds=TIMEOUT_S
            )
            assert gone.failed or not gone.started or gone.unfinished == 0 or timed_out, (
                f"{name} was not drained"
            )
        leaving = {*result.drain, *deleted(result)}
        staying = [m for m in before if m.deletion is None and not m.failed and not m.draining]
        ready = [m for m in staying if m.ready]
        left = [m for m in ready if m.name not in leaving]
        if len(left) < len(ready):
            patience = timedelta(seconds=self.update.surge_timeout_s)
            in_place = any(
                m.no_room_since and self.now >= m.no_room_since + patience for m in staying
            )
            spared = max(self.update.max_unavailable, 1 if in_place else 0)
            assert len(left) >= desired - spared, "the step removes too many ready members"
        newest = [m for m in staying if m.revision == "new"]
        going = [m for m in newest if m.name in leaving]
        assert len(going) <= max(0, len(newest) - desired), (
            "a member of the newest revision is replaced"
        )
        alive = sum(m.deletion is None or self.now < m.deletion + STUCK_TERMINATING for m in before)
        most = max(desired + self.update.max_surge, alive)
        assert alive + len(result.create) + len(result.restore) <= most, "more members than wanted"

    def world(self) -> None:
        """Let time pass. Each member may or may not make progress."""
        self.now += timedelta(seconds=self.draw(st.sampled_from([1, 20, 70, 700])))
        for m in list(self.members.values()):
            if not self.draw(st.booleans()):
                continue
            if m.deletion is not None:
                del self.members[m.name]
            elif m.draining and m.unfinished:
                self._set(m.name, unfinished=m.unfinished - 1)
            elif not m.ready and not m.failed and not m.draining:
                since = None if m.started else m.unready_since
                self._set(
                    m.name, started=True, ready=m.started, unready_since=since, no_room_since=None
                )

    def settle(self) -> None:
        """Let running changes succeed."""
        for m in list(self.members.values()):
            if m.deletion is not None:
                del self.members[m.name]
            elif m.draining:
                self._set(m.name, unfinished=0)
            elif not m.failed:
                self._set(m.name, started=True, ready=True, unready_since=None, no_room_since=None)

    def _set(self, name: str, **fields: Any) -> None:
        self.members[name] = msgspec.structs.replace(self.members[name], **fields)


@st.composite
def any_member(draw: Any, ordinal: int) -> Member:
    serving = draw(st.booleans())
    draining = draw(st.booleans()) and draw(st.booleans())
    return member(
        ordinal,
        revision=draw(st.sampled_from(["old", "new"])),
        started=serving,
        ready=serving and draw(st.booleans()),
        failed=not serving and draw(st.booleans()),
        draining=draining,
        drain_started=NOW if draining else None,
        unfinished=draw(st.sampled_from([None, 0, 2])) if draining else None,
    )


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_group_converges_without_loss_of_work_or_capacity(data: st.DataObject) -> None:
    ordinals = data.draw(st.sets(st.integers(0, 6), max_size=5))
    bounds = data.draw(st.sampled_from([(0, 1), (1, 0), (1, 1), (2, 0), (0, 2), (2, 3)]))
    update = Update(max_surge=bounds[0], max_unavailable=bounds[1], surge_timeout_s=30.0)
    members = [data.draw(any_member(ordinal)) for ordinal in ordinals]
    cluster = Simulation(members, update, data.draw, has_previous_revision=data.draw(st.booleans()))
    # The user changes the size, and the cluster is slow.
    for _ in range(data.draw(st.integers(0, 12))):
        cluster.step(data.draw(st.integers(0, 5)))
        cluster.world()
    desired = data.draw(st.integers(0, 5))
    for _ in range(60):
        settled = dict(cluster.members)
        cluster.step(desired)
        cluster.settle()
        if cluster.members == settled:
            break
    members = list(cluster.members.values())
    assert len(members) == desired
    assert all(m.ready and m.revision == "new" and not m.draining for m in members)
    assert plan(members, desired, update) == GroupPlan(), "a converged group was changed"
