"""The planner: single decisions as a table, and convergence on a simulated cluster."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from services import NOW

from baton_operator.plan import STUCK_TERMINATING, GroupPlan, Member, plan_group

TIMEOUT_S = 60.0


def member(ordinal: int, **fields: Any) -> Member:
    """A ready member of the newest revision, but for `fields`."""
    ready = {"revision": "new", "ready": True, "serving": True}
    return Member(name=f"m-{ordinal}", ordinal=ordinal, **{**ready, **fields})


def plan(members: list[Member], desired: int) -> GroupPlan:
    return plan_group(members, desired=desired, revision="new", drain_timeout_s=TIMEOUT_S, now=NOW)


def deleted(result: GroupPlan) -> list[str]:
    return [deletion.name for deletion in result.delete]


EXPIRED = NOW - timedelta(seconds=TIMEOUT_S)
OLD = {"revision": "old"}
DOWN = {"ready": False, "serving": False}
DRAINS = {"draining": True, "drain_started": NOW}

DECISIONS: dict[str, tuple[list[Member], int, dict[str, Any]]] = {
    "an empty group is created at once": ([], 3, {"create": [0, 1, 2]}),
    "a full group is left alone": ([member(0), member(1)], 2, {}),
    "a gap is filled at its own ordinal": ([member(0), member(2)], 3, {"create": [1]}),
    "the highest ordinal drains first": ([member(0), member(1), member(2)], 2, {"drain": ["m-2"]}),
    "one that is not ready leaves before one that is": (
        [member(0, ready=False), member(1)], 1, {"drain": ["m-0"]},
    ),
    "one that never started needs no drain": ([member(0, **DOWN), member(1)], 1, {"delete": ["m-0"]}),
    "an old revision leaves before a new one": ([member(0, **OLD), member(1)], 1, {"drain": ["m-0"]}),
    "scaling to zero drains all": ([member(0), member(1)], 0, {"drain": ["m-1", "m-0"]}),
    "a draining member that has drained is deleted": (
        [member(0), member(1, **DRAINS, unfinished=0)], 1, {"delete": ["m-1"]},
    ),
    "a draining member that is busy stays": ([member(0), member(1, **DRAINS, unfinished=3)], 1, {}),
    "a draining member that does not answer stays": ([member(0), member(1, **DRAINS)], 1, {}),
    "a draining member goes when its time is up": (
        [member(0), member(1, draining=True, drain_started=EXPIRED, unfinished=3)], 1, {"delete": ["m-1"]},
    ),
    "a draining member holds its place": ([member(0), member(1, **DRAINS, unfinished=3)], 2, {}),
    "one that terminates holds its place": ([member(0), member(1, deletion=NOW)], 2, {}),
    "one stuck on a lost node does not": (
        [member(0), member(1, deletion=NOW - STUCK_TERMINATING)], 2, {"create": [2]},
    ),
    "one that was marked without a time drains like any other": (
        [member(0), member(1, draining=True, unfinished=3)], 1, {"drain": ["m-1"]},
    ),
    "one that failed at once is held for a while": (
        [member(0), member(1, **DOWN, failed=True, created=NOW - timedelta(seconds=2))], 2, {},
    ),
    "one that failed later is deleted": (
        [member(0), member(1, **DOWN, failed=True, created=NOW - timedelta(seconds=20))], 2, {"delete": ["m-1"]},
    ),
    "one that failed is deleted": ([member(0), member(1, **DOWN, failed=True)], 2, {"delete": ["m-1"]}),
    "one old member is replaced at a time": ([member(0, **OLD), member(1, **OLD)], 2, {"drain": ["m-1"]}),
    "a replacement must be ready before the next": ([member(0, **OLD), member(1, ready=False)], 2, {}),
    "a broken old member is replaced although the group is short": (
        [member(0, **OLD), member(1, **OLD, **DOWN)], 2, {"delete": ["m-1"]},
    ),
    "no replacement while another leaves": ([member(0, **OLD), member(1, deletion=NOW)], 2, {}),
    "a single member is replaced, too": ([member(0, **OLD)], 1, {"drain": ["m-0"]}),
}  # fmt: skip


@pytest.mark.parametrize(("members", "desired", "step"), DECISIONS.values(), ids=DECISIONS.keys())
def test_decision(members: list[Member], desired: int, step: dict[str, Any]) -> None:
    result = plan(members, desired)
    assert result.create == step.get("create", [])
    assert result.drain == step.get("drain", [])
    assert deleted(result) == step.get("delete", [])


def test_a_drain_under_way_is_looked_at_again_soon() -> None:
    assert plan([member(0), member(1, **DRAINS, unfinished=3)], 1).revisit_s
    assert plan([member(0)], 1).revisit_s is None


class Simulation:
    """A cluster that starts pods, drains engines and deletes pods as slowly as `draw` says."""

    def __init__(self, members: list[Member], draw: Any) -> None:
        self.members = {m.name: m for m in members}
        self.draw = draw
        self.now = NOW

    def step(self, desired: int) -> GroupPlan:
        before = list(self.members.values())
        result = plan_group(before, desired=desired, revision="new", drain_timeout_s=TIMEOUT_S, now=self.now)
        self._check(before, result, desired)
        for name in result.drain:
            self._set(name, draining=True, drain_started=self.now, unfinished=self.draw(st.integers(0, 2)))
        for name in deleted(result):
            self._set(name, deletion=self.now, ready=False)
        for ordinal in result.create:
            created = member(ordinal, **DOWN)
            assert created.name not in self.members, f"{created.name} exists"
            self.members[created.name] = created
        return result

    def _check(self, before: list[Member], result: GroupPlan, desired: int) -> None:
        by_name = {m.name: m for m in before}
        for name in deleted(result):
            gone = by_name[name]
            timed_out = gone.drain_started and self.now >= gone.drain_started + timedelta(seconds=TIMEOUT_S)
            assert gone.failed or not gone.serving or gone.unfinished == 0 or timed_out, f"{name} was not drained"
        ready = [m for m in before if m.ready and not m.draining and m.deletion is None]
        left = [m for m in ready if m.name not in result.drain and m.name not in deleted(result)]
        if len(left) < len(ready):
            assert len(left) >= desired - 1, "the step takes too many ready members"
        alive = sum(m.deletion is None or self.now < m.deletion + STUCK_TERMINATING for m in before)
        assert alive + len(result.create) <= max(desired, alive), "more members than wanted"

    def world(self) -> None:
        """Time passes; each member moves on or not."""
        self.now += timedelta(seconds=self.draw(st.sampled_from([1, 20, 70])))
        for m in list(self.members.values()):
            if not self.draw(st.booleans()):
                continue
            if m.deletion is not None:
                del self.members[m.name]
            elif m.draining and m.unfinished:
                self._set(m.name, unfinished=m.unfinished - 1)
            elif not m.ready and not m.failed and not m.draining:
                self._set(m.name, serving=True, ready=m.serving)

    def settle(self) -> None:
        """What is under way ends well."""
        for m in list(self.members.values()):
            if m.deletion is not None:
                del self.members[m.name]
            elif m.draining:
                self._set(m.name, unfinished=0)
            elif not m.failed:
                self._set(m.name, serving=True, ready=True)

    def _set(self, name: str, **fields: Any) -> None:
        self.members[name] = msgspec.structs.replace(self.members[name], **fields)


@st.composite
def any_member(draw: Any, ordinal: int) -> Member:
    serving = draw(st.booleans())
    draining = draw(st.booleans()) and draw(st.booleans())
    return member(
        ordinal,
        revision=draw(st.sampled_from(["old", "new"])),
        serving=serving,
        ready=serving and draw(st.booleans()),
        failed=not serving and draw(st.booleans()),
        draining=draining,
        drain_started=NOW if draining else None,
        unfinished=draw(st.sampled_from([None, 0, 2])) if draining else None,
    )


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_group_converges_and_never_loses_work_or_capacity(data: st.DataObject) -> None:
    ordinals = data.draw(st.sets(st.integers(0, 6), max_size=5))
    cluster = Simulation([data.draw(any_member(ordinal)) for ordinal in ordinals], data.draw)
    for _ in range(data.draw(st.integers(0, 12))):  # the user changes the size, the world is slow
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
    assert plan(members, desired) == GroupPlan(), "a converged group is left alone"
