"""The Ready condition of one group, from its pods."""

from __future__ import annotations

from datetime import timedelta

import pytest

from baton_kube.client import Object
from baton_operator.plan.refused_pods import PodRefusal
from baton_operator.status.report_group import ReportedGroup, group_verdict
from support.operator.reported_groups import BACK_OFF, FATAL, QUOTA, decode, sized_group
from support.operator.services import NOW, pod

UNSCHEDULABLE = {
    "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
    "message": "0/3 nodes have a free GPU",
}  # fmt: skip


def just_started(seconds: float) -> Object:
    return {"running": {"startedAt": (NOW - timedelta(seconds=seconds)).isoformat()}}


VERDICTS: dict[str, tuple[ReportedGroup, str, str, str]] = {
    "ready": (decode([pod(ready=True)]), "True", "PodsReady", "1 of 1"),
    "no pods yet": (decode([]), "False", "Starting", "0 of 1"),
    "loading": (decode([pod()]), "False", "Starting", "0 of 1"),
    "a fatal error during the back-off": (
        decode([pod(state=BACK_OFF, last=FATAL)]), "False", "ModelNotFound", "/models/x",
    ),
    "a fatal error of a terminated container": (
        decode([pod(state={"terminated": FATAL})]), "False", "ModelNotFound", "/models/x",
    ),
    "a fatal error and a restart one second ago": (
        decode([pod(state=just_started(1), last=FATAL)]), "False", "ModelNotFound", "/models/x",
    ),
    "a fatal error and a restart 15 minutes ago": (
        decode([pod(state=just_started(900), last=FATAL)]), "False", "ModelNotFound", "/models/x",
    ),
    "a fatal error outranks missing capacity": (
        decode([
            pod("demo-decode-0", conditions=[UNSCHEDULABLE]),
            pod("demo-decode-1", state=BACK_OFF, last=FATAL),
        ], 2),
        "False", "ModelNotFound", "demo-decode-1",
    ),
    "crash loop": (
        decode([pod(state=BACK_OFF, last={"exitCode": 1, "message": "boom"}, restarts=4)]),
        "False", "CrashLooping", "restarted 4 times, last ended with exit code 1: boom",
    ),
    "killed": (
        decode([pod(state=just_started(1), last={"exitCode": 137, "signal": 9}, restarts=1)]),
        "False", "ContainerTerminated", "by signal 9",
    ),
    "killed, before its first restart": (
        decode([pod(state=BACK_OFF, last={"exitCode": 137, "signal": 9}, restarts=0)]),
        "False", "ContainerTerminated", "by signal 9",
    ),
    "killed, from a kubelet that reports no signal": (
        decode([
            pod(state=BACK_OFF, last={"exitCode": 137, "message": "INFO serving"}, restarts=0),
        ]),
        "False", "ContainerTerminated", "by signal 9; 0 of",
    ),
    "out of memory": (
        decode([pod(state={"terminated": {"exitCode": 137, "reason": "OOMKilled"}})]),
        "False", "ContainerTerminated", "more memory",
    ),
    "no image": (
        decode([pod(state={"waiting": {"reason": "ImagePullBackOff", "message": "not found"}})]),
        "False", "ImagePull", "not found",
    ),
    "no capacity": (decode([pod(conditions=[UNSCHEDULABLE])]), "False", "NoCapacity", "free GPU"),
    "an engine that sleeps": (
        decode([pod("demo-decode-a")], a="Asleep"), "False", "EngineAsleep",
        "pod demo-decode-a is asleep; wake up with POST /wake_up on port 8000, with the service's "
        "token; 0 of 1",
    ),
    "two paused engines and one that sleeps": (
        decode(
            [pod(f"demo-decode-{letter}") for letter in "abc"], 3, a="Paused", b="Asleep",
            c="Paused",
        ),
        "False", "EngineAsleep",
        "pod demo-decode-b is asleep; wake up with POST /wake_up on port 8000, with the service's "
        "token; pods demo-decode-a, demo-decode-c are paused; resume with POST /resume on port "
        "8000, with the service's token; 0 of 3",
    ),
    "a paused engine beside a failure": (
        decode([pod("demo-decode-a"), pod(state=BACK_OFF, last=FATAL)], 2, a="Paused"), "False",
        "ModelNotFound", "/models/x",
    ),
    "a paused engine that is being drained": (
        decode([pod("demo-decode-a", draining=True)], a="Paused"), "False", "Draining",
        "waiting for pod demo-decode-a to end",
    ),
    "a node that refuses the pod": (
        decode([pod(phase="Failed", status={"reason": "OutOfcpu", "message": "no cpu left"})]),
        "False", "PodFailed", "OutOfcpu: no cpu left",
    ),
    "old pods do not count": (
        decode([pod(ready=True, revision="old")]), "False", "Progressing",
        "0 of 1 decode pods of the newest revision are ready, and 1 of earlier revisions",
    ),
    "a draining pod does not count": (
        decode([pod(ready=True, draining=True)]), "False", "Draining",
        "waiting for pod demo-decode-0 to end; 0 of 1",
    ),
    "an evicted pod beside enough ready ones": (
        decode([pod(ready=True), pod("demo-decode-1", phase="Failed")]), "True", "PodsReady",
        "1 of 1",
    ),
    "a surplus pod that drains": (
        decode([pod(ready=True), pod("demo-decode-1", ready=True, draining=True)]), "True",
        "PodsReady", "1 of 1",
    ),
    "scaled to zero": (decode([], 0), "False", "ScaledToZero", "set spec.decode.replicas"),
    "no prefill": (
        ReportedGroup(role="prefill", desired=0, pods=[]), "True", "NotRequested",
        "decode pods compute",
    ),
    "a gateway that starts": (
        ReportedGroup(role="gateway", desired=1, pods=[], updated=False), "False", "Starting",
        "0 of 1",
    ),
    "a gateway of an old template": (
        ReportedGroup(role="gateway", desired=1, pods=[pod(ready=True)], updated=False), "False",
        "Progressing", "1 of 1",
    ),
    "gateways of two templates": (
        ReportedGroup(
            role="gateway", desired=1, revision="new", updated=False,
            pods=[pod(ready=True), pod("demo-gateway-1", ready=True, revision="old")],
        ),
        "False", "Progressing",
        "1 of 1 gateway pods of the newest revision are ready, and 1 of earlier revisions",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("group", "status", "reason", "text"), VERDICTS.values(), ids=VERDICTS.keys()
)
def test_conditions_of_a_group(group: ReportedGroup, status: str, reason: str, text: str) -> None:
    verdict = group_verdict(group)
    assert verdict[:2] == (status, reason)
    assert text in verdict[2]


def test_a_group_at_zero_is_ready() -> None:
    status, reason, _ = group_verdict(sized_group("Idle", desired=0))
    assert (status, reason) == ("True", "ScaledToZero")
    unsized = ReportedGroup(role="decode", desired=0, pods=[])
    assert group_verdict(unsized)[:2] == ("False", "ScaledToZero")


def test_a_fatal_line_of_a_pod_precedes_a_refusal() -> None:
    group = ReportedGroup(
        role="decode",
        desired=2,
        pods=[pod(state={"terminated": FATAL})],
        revision="new",
        refusal=PodRefusal("QuotaExceeded", QUOTA),
    )
    assert group_verdict(group).reason == "ModelNotFound"
