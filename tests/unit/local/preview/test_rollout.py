"""Previews of the samples: the operator's planner on a simulated cluster."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton_kube.client import Object
from baton_local.preview.rollout import preview
from baton_local.preview.simulated_cluster import Conditions
from baton_local.preview.steps import Preview, Step
from baton_local.preview.target import target_of

SAMPLES = Path(__file__).parents[4] / "manifests" / "samples"


def sample(name: str, **fields: Any) -> Object:
    """Return a sample with `fields` of its spec replaced. `a__b` is the field `b` of `a`."""
    return edited(yaml.safe_load((SAMPLES / f"{name}.yaml").read_text()), fields)


def edited(service: Object, fields: dict[str, Any]) -> Object:
    service = copy.deepcopy(service)
    for path, value in fields.items():
        *parents, field = path.split("__")
        node = service["spec"]
        for parent in parents:
            node = node.setdefault(parent, {})
        node[field] = value
    return service


def run(old: Object | None, new: Object, max_steps: int = 200, **conditions: Any) -> Preview:
    before = None if old is None else target_of(old)
    return preview(before, target_of(new), Conditions(**conditions), max_steps)


def done(result: Preview, action: str, role: str = "decode") -> list[str]:
    """Return the members to which the operator applied this action, in order."""
    found = [
        each
        for step in result.steps
        for each in step.actions
        if (each.action, each.role) == (action, role)
    ]
    return [name for each in found for name in each.members]


def states(step: Step) -> list[str]:
    return [row.state for row in step.members if row.role == "decode"]


def number(result: Preview, action: str) -> int:
    """Return the number of the first step with this action on the decode group."""
    return next(
        s.number
        for s in result.steps
        if any((a.action, a.role) == (action, "decode") for a in s.actions)
    )


SETTLING: dict[str, tuple[Object | None, Object, dict[str, Any]]] = {
    "creation": (None, sample("demo"), {}),
    "creation of an expert group": (None, sample("experts"), {}),
    "nothing changes": (sample("demo"), sample("demo"), {}),
    "scale up": (sample("demo"), sample("demo", decode__replicas=4), {}),
    "scale down": (sample("demo", decode__replicas=4), sample("demo"), {}),
    "scale to zero": (sample("demo"), sample("demo", decode__replicas=0), {}),
    "prefill is added": (sample("one-gpu"), sample("one-gpu", prefill__replicas=2), {}),
    "another image": (sample("demo"), sample("demo", image="b:2"), {}),
    "engines drain too slowly": (
        sample("demo"), sample("demo", image="b:2"), {"drain_after_s": 500.0},
    ),
    "everything is instantaneous": (
        sample("demo"), sample("demo", image="b:2"), {"ready_after_s": 0.0, "drain_after_s": 0.0},
    ),
    "another image, on full nodes": (sample("demo"), sample("demo", image="b:2"), {"capacity": 3}),
    "experts on": (sample("experts", decode__parallelism={}), sample("experts"), {}),
    "experts off": (sample("experts"), sample("experts", decode__parallelism={}), {}),
    "an expert group grows": (sample("experts"), sample("experts", decode__replicas=4), {}),
    "an expert group shrinks": (sample("experts", decode__replicas=4), sample("experts"), {}),
    "an expert group ends": (sample("experts"), sample("experts", decode__replicas=0), {}),
    "another image of an expert group": (sample("experts"), sample("experts", image="b:2"), {}),
    "another image of an expert group, on full nodes": (
        sample("experts"), sample("experts", image="b:2"), {"capacity": 2},
    ),
    "another model of an expert group": (
        sample("experts"), sample("experts", model__uri="file:///models/y"), {},
    ),
    "many ranks": (sample("many-nodes"), sample("many-nodes", decode__replicas=24), {}),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "conditions"), SETTLING.values(), ids=SETTLING)
def test_a_preview_settles_with_the_members_of_the_new_spec(
    old: Object | None, new: Object, conditions: dict[str, Any]
) -> None:
    result = run(old, new, **conditions)
    assert result.waits_for == []
    for group in result.groups:
        rows = (
            [row for row in result.steps[-1].members if row.role == group.role]
            if result.steps
            else []
        )
        if result.steps:
            assert [(row.revision, row.state) for row in rows] == [
                (group.revisions[1], "ready")
            ] * group.sizes[1]
    is_group = target_of(new).resolved.is_expert_parallel
    ranks = (
        sorted(row.rank for row in result.steps[-1].members if row.rank is not None)
        if result.steps
        else []
    )
    assert ranks == list(range(target_of(new).resolved.replicas("decode") if is_group else 0))
    assert [step.number for step in result.steps] == list(range(1, len(result.steps) + 1))


STRATEGIES = [{"maxSurge": s, "maxUnavailable": u} for s in (0, 1, 2, "50%") for u in (0, 1, 2)]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
@pytest.mark.parametrize("expert", [False, True], ids=["engines", "expert group"])
@pytest.mark.parametrize(("before", "after"), [(4, 4), (3, 5), (5, 3)])
def test_a_rollout_stays_within_its_bounds(
    strategy: Object, expert: bool, before: int, after: int
) -> None:
    fields = {"decode__parallelism": {"expert": expert}, "updateStrategy": {"decode": strategy}}
    old = sample("experts", decode__replicas=before, **fields)
    result = run(old, sample("experts", decode__replicas=after, image="b:2", **fields))
    assert result.waits_for == []
    group = next(group for group in result.groups if group.role == "decode")
    most = max(before, after + group.max_surge)
    fewest = min(before, after) - group.max_unavailable
    for step in result.steps:
        assert len(states(step)) <= most, step
        assert states(step).count("ready") >= fewest, step
    assert (result.most_members(group), result.fewest_ready(group)) <= (most, before)


def test_an_edit_of_one_role_does_not_change_the_others() -> None:
    result = run(
        sample("demo"), sample("demo", prefill__template={"metadata": {"labels": {"a": "b"}}})
    )
    assert done(result, "create", "prefill") == ["demo-prefill-1"]
    assert {action.role for step in result.steps for action in step.actions} == {"prefill"}


def test_an_expert_group_grows_in_one_operation_after_the_members_started() -> None:
    result = run(sample("experts"), sample("experts", decode__replicas=4))
    first, started, prepared, committed = result.steps
    assert [action.action for action in first.actions] == ["create"]
    assert [(action.action, action.reason) for action in started.actions] == [
        ("request topology", "experts-decode-2, experts-decode-3 to join")
    ]
    assert states(started) == ["ready", "ready", "standby", "standby"]
    assert (prepared.events, committed.generation) == (["generation 2 is prepared"], 2)
    assert [row.rank for row in committed.members] == [0, 1, 2, 3]


def test_members_leave_an_expert_group_only_after_the_commit() -> None:
    result = run(sample("experts", decode__replicas=4), sample("experts"))
    asked, _, committed, *_ = result.steps
    assert [action.action for action in asked.actions] == ["request topology"]
    assert (asked.generation, committed.generation) == (1, 2)
    assert number(result, "drain") == committed.number
    assert done(result, "delete") == ["experts-decode-2", "experts-decode-3"]
    for step in result.steps[: committed.number - 1]:
        assert states(step) == ["ready"] * 4


def test_a_pause_delays_edits_but_not_sizes() -> None:
    old = sample("demo")
    result = run(old, sample("demo", image="b:2", paused=True, decode__replicas=3))
    assert result.held_back == ("image",)
    assert done(result, "create") == ["demo-decode-2"]
    assert not done(result, "drain") + done(result, "create", "prefill")
    revisions = {row.revision for row in result.steps[-1].members if row.role == "decode"}
    assert revisions == {target_of(old).desired.members["decode"].revision}
    assert run(old, sample("demo", image="b:2", paused=True)).steps == []


def test_a_paused_service_is_not_created() -> None:
    result = run(None, sample("demo", paused=True))
    assert (result.steps, result.waits_for) == (
        [],
        ["spec.paused is true, and nothing was rolled out before"],
    )


@pytest.mark.parametrize("name", ["demo", "experts"])
def test_a_rollout_to_a_revision_that_is_never_ready_stops_and_the_earlier_one_serves(
    name: str,
) -> None:
    result = run(sample(name), sample(name, image="b:2"), never_ready=True)
    assert done(result, "create") == [f"{name}-decode-2"]
    assert not done(result, "drain") + done(result, "delete")
    assert states(result.steps[-1]) == ["ready", "ready", "starting"]
    assert f"{name}-decode-2: not ready within progressDeadlineSeconds (600 s)" in "; ".join(
        result.waits_for
    )
    assert result.seconds >= 600


def test_on_full_nodes_a_new_member_replaces_an_old_one_after_the_surge_timeout() -> None:
    old, new = (
        sample("one-gpu"),
        sample("one-gpu", image="b:2", updateStrategy__decode={"surgeTimeoutSeconds": 45}),
    )
    result = run(old, new, capacity=1)
    waiting, drained = result.steps[:2]
    assert states(waiting) == ["ready", "no room"]
    assert (drained.seconds, states(drained)) == (45, ["draining", "no room"])
    assert result.waits_for == []


def test_changed_fields_are_listed() -> None:
    result = run(sample("experts", decode__parallelism={}), sample("experts"))
    changed = {each.path: (each.before, each.after) for each in result.fields}
    assert changed == {
        "spec.decode.parallelism.expert": (False, True),
        "spec.decode.parallelism.redundantExperts": (0, 2),
    }
    assert "Deployment experts-coordinator" in result.objects["creates"]
    assert result.objects["changes"] == []


def test_an_autoscaled_group_has_its_first_size() -> None:
    scaling = {"minReplicas": 3, "maxReplicas": 5, "itlMilliseconds": 50}
    result = run(sample("demo"), sample("demo", decode__autoscaling=scaling))
    assert done(result, "create") == ["demo-decode-2"]
