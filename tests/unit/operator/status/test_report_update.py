"""The condition Updating and the counts per role, from pods."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

import pytest

from baton_kube.client import Object
from baton_operator.plan.refused_pods import PodRefusal
from baton_operator.status.report import report
from baton_operator.status.report_events import new_failures
from baton_operator.status.report_group import ReportedGroup
from baton_protocol.process.health import Health
from support.operator.services import NOW, observed, pod, resolved, service

DEADLINE_S = 600
LATE = {"creationTimestamp": (NOW - timedelta(seconds=DEADLINE_S + 1)).isoformat()}
RECENT = {"creationTimestamp": (NOW - timedelta(seconds=5)).isoformat()}
BACK_OFF = {"waiting": {"reason": "CrashLoopBackOff"}}
FATAL = {"exitCode": 78, "message": "FATAL ModelNotFound: /models/x does not exist"}


def made(which: Object, **fields: Any) -> Object:
    """Return `which` with these fields in its metadata."""
    return {**which, "metadata": {**which["metadata"], **fields}}


def new(ordinal: int, **fields: Any) -> Object:
    return made(pod(f"demo-decode-{ordinal}", revision="new", **fields), **RECENT)


def old(ordinal: int, **fields: Any) -> Object:
    return made(pod(f"demo-decode-{ordinal}", revision="old", **{"ready": True, **fields}), **LATE)


NO_ROOM = {
    "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
    "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
    "lastTransitionTime": NOW.isoformat(),
}  # fmt: skip
NO_MATCH = {
    **NO_ROOM, "message": "0/3 nodes are available: 3 node(s) didn't match Pod's node selector.",
    "lastTransitionTime": LATE["creationTimestamp"],
}  # fmt: skip
ONCE_READY = {
    "type": "Ready", "status": "False",
    "lastTransitionTime": (NOW - timedelta(seconds=60)).isoformat(),
}  # fmt: skip
SCHEDULED = {**ONCE_READY, "type": "PodScheduled", "status": "True"}

VERDICTS: dict[str, tuple[list[Object], str, str, str]] = {
    "all pods are of the newest revision": (
        [new(0, ready=True), new(1, ready=True)], "False", "UpToDate",
        "no pod of an earlier revision",
    ),
    "the first pods start": (
        [new(0), new(1)], "False", "UpToDate", "no pod of an earlier revision",
    ),
    "before the first new pod": (
        [old(0), old(1)], "True", "Replacing",
        "decode pods: 2 desired, 0 of the newest revision (0 ready)",
    ),
    "the new pod starts": (
        [old(0), old(1), new(2)], "True", "Starting", "waiting for pod demo-decode-2 to be",
    ),
    "the new pod fails before the deadline": (
        [old(0), old(1), new(2, state=BACK_OFF, last=FATAL)], "True", "Starting",
        "/models/x does not exist",
    ),
    "the old pod drains": (
        [old(0), old(1, draining=True), new(2, ready=True)], "True", "Draining",
        "waiting for pod demo-decode-1 to drain",
    ),
    "the old pod is being deleted": (
        [old(0), made(old(1), deletionTimestamp=NOW.isoformat()), new(2, ready=True)], "True",
        "Draining", "decode-1",
    ),
    "no room for the new pod": (
        [old(0), old(1), new(2, conditions=[NO_ROOM])], "True", "WaitingForCapacity",
        "no node has room for pod demo-dec",
    ),
    "a new pod starts, and no node has room for another": (
        [old(0), old(1), new(2), new(3, conditions=[NO_ROOM])], "True", "WaitingForCapacity",
        "no node has room for pod demo-decode-3;",
    ),
    "no room for the new pod after the deadline": (
        [old(0), old(1), made(new(2, conditions=[NO_ROOM]), **LATE)], "True", "WaitingForCapacity",
        "no node has room for pod demo-decode-2;",
    ),
    "no room for a new pod after the deadline of another": (
        [old(0), made(new(2), **LATE), made(new(3, conditions=[NO_ROOM]), **LATE)], "False",
        "RolloutStalled", f"pod demo-decode-2 was not ready within {DEADLINE_S} s; pods of the",
    ),
    "the node selector of the new pod matches no node until the deadline": (
        [old(0), old(1), made(new(2, conditions=[NO_MATCH]), **LATE)], "False", "RolloutStalled",
        "pod demo-decode-2 cannot be scheduled: 0/3 nodes are available: 3 node(s) didn't match",
    ),
    "the new pod is not ready at the deadline": (
        [old(0), old(1), made(new(2), **LATE)], "False", "RolloutStalled",
        "2 of earlier revisions (2 ready)",
    ),
    "the new pod fails until the deadline": (
        [old(0), made(new(2, state=BACK_OFF, last=FATAL), **LATE)], "False", "RolloutStalled",
        "/models/x does not exist",
    ),
    "the new pod was ready a minute ago": (
        [old(0), made(new(2, conditions=[ONCE_READY]), **LATE)], "True", "Starting",
        "waiting for pod demo-decode-2",
    ),
    "the new pod was scheduled a minute ago": (
        [old(0), made(new(2, conditions=[SCHEDULED]), **LATE)], "True", "Starting",
        "waiting for pod demo-decode-2",
    ),
    "an old pod on a lost node does not count": (
        [
            made(old(1), deletionTimestamp=(NOW - timedelta(hours=1)).isoformat()),
            new(0, ready=True),
        ],
        "False", "UpToDate", "",
    ),
    "an old pod that failed does not count": (
        [old(1, phase="Failed"), new(0, ready=True)], "False", "UpToDate", "",
    ),
}  # fmt: skip


def reported(
    pods: list[Object],
    suspended: Mapping[str, Health] = {},
    suspended_at: Mapping[str, datetime] = {},
    **spec: Any,
) -> Any:
    groups: dict[Any, ReportedGroup] = {
        "decode": ReportedGroup(
            role="decode",
            desired=2,
            pods=pods,
            revision="new",
            suspended=suspended,
            suspended_at=suspended_at,
        )
    }
    return report(observed(), resolved(**spec), groups, problem=None, now=NOW)


def condition(status: Any, type_: str) -> tuple[str, str, str]:
    (found,) = [each for each in status.conditions if each.type == type_]
    return found.status, found.reason, found.message


@pytest.mark.parametrize(
    ("pods", "status", "reason", "text"), VERDICTS.values(), ids=VERDICTS.keys()
)
def test_the_updating_condition(pods: list[Object], status: str, reason: str, text: str) -> None:
    verdict = condition(reported(pods), "Updating")
    assert verdict[:2] == (status, reason)
    assert text in verdict[2]


@pytest.mark.parametrize(
    ("reply", "reason", "text"),
    [
        ("Asleep", "EngineAsleep", "pod demo-decode-2 is asleep; wake up with POST /wake_up on"),
        ("Paused", "EnginePaused", "pod demo-decode-2 is paused; resume with POST /resume on"),
    ],
)
def test_a_new_pod_that_is_paused_or_asleep_does_not_stall_the_rollout(
    reply: str, reason: str, text: str
) -> None:
    suspended = {"demo-decode-2": Health(reply, "m")}
    suspended_at = {"demo-decode-2": NOW}
    pods = [old(0), old(1), made(new(2), **LATE)]
    verdict = condition(reported(pods, suspended, suspended_at), "Updating")
    assert verdict[:2] == ("True", reason)
    assert text in verdict[2]
    late = [*pods, made(new(3), **LATE)]
    verdict = condition(reported(late, suspended, suspended_at), "Updating")
    assert verdict[:2] == ("False", "RolloutStalled")
    assert "decode: pod demo-decode-3 was not ready" in verdict[2]


@pytest.mark.parametrize(
    ("seconds", "reason"), [(DEADLINE_S - 1, "Starting"), (DEADLINE_S, "RolloutStalled")]
)
def test_a_pod_that_woke_up_has_the_whole_deadline_to_be_ready(seconds: int, reason: str) -> None:
    pods = [old(0), old(1), made(new(2), **LATE)]
    woken = {"demo-decode-2": NOW - timedelta(seconds=seconds)}
    assert condition(reported(pods, suspended_at=woken), "Updating")[1] == reason


def test_no_room_after_the_deadline_is_reported_as_missing_capacity() -> None:
    status = reported([old(0), old(1), made(new(2, conditions=[NO_ROOM]), **LATE)])
    assert condition(status, "Ready")[:2] == ("False", "NoCapacity")
    events = [each.reason for each in new_failures(service(), status)]
    assert "NoCapacity" in events
    assert "RolloutStalled" not in events


def test_a_pause_is_reported_with_the_waiting_pods() -> None:
    verdict = condition(reported([old(0), new(1, ready=True)], paused=True), "Updating")
    assert verdict[:2] == ("False", "Paused")
    assert "1 of earlier revisions" in verdict[2]


def test_old_pods_do_not_count_as_updated() -> None:
    status = reported([old(0), old(1), made(new(2), **LATE)])
    assert condition(status, "DecodeReady")[0] == "False"
    assert condition(status, "Ready")[:2] == ("False", "RolloutStalled")
    assert (status.decode.ready, status.decode.updated, status.decode.revision) == (2, 1, "new")


def test_a_stalled_rollout_causes_one_event() -> None:
    status = reported([old(0), old(1), made(new(2), **LATE)])
    assert "RolloutStalled" in [each.reason for each in new_failures(service(), status)]
    known = service(
        [
            {
                "type": "Updating",
                "status": "False",
                "reason": "RolloutStalled",
                "lastTransitionTime": "x",
            }
        ]
    )
    assert "RolloutStalled" not in [each.reason for each in new_failures(known, status)]
    assert "UpToDate" not in [
        each.reason for each in new_failures(service(), reported([new(0, ready=True)]))
    ]


def test_the_group_with_the_most_urgent_obstacle_is_reported() -> None:
    refusal = PodRefusal("PodRefused", "the API server refuses pods")
    groups: dict[Any, ReportedGroup] = {
        role: ReportedGroup(role=role, desired=2, pods=pods, revision="new", refusal=refused)
        for role, pods, refused in (
            ("prefill", [old(0), new(1, conditions=[NO_ROOM])], None),
            ("decode", [old(2), new(3, conditions=[NO_ROOM])], refusal),
        )
    }
    status = report(observed(), resolved(), groups, problem=None, now=NOW)
    verdict = condition(status, "Updating")
    assert verdict[:2] == ("True", "PodRefused")
    assert verdict[2].startswith("decode: the API server refuses pods; prefill pods: 2 desired")


def test_the_gateway_is_included() -> None:
    gateways = [
        made(pod(f"gateway-{n}", ready=True, revision=rev), **RECENT)
        for n, rev in enumerate(["g1", "g2"])
    ]
    group = ReportedGroup(role="gateway", desired=2, pods=gateways, updated=False, revision="g2")
    status = report(observed(), resolved(), {"gateway": group}, problem=None, now=NOW)
    assert condition(status, "Updating")[:2] == ("True", "Replacing")
    assert (status.gateway.updated, status.gateway.revision) == (1, "g2")
