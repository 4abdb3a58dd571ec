"""Conditions of pods that fail repeatedly: they are stable until the pods are ready."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_kube.client import Object
from baton_operator.status.report import report
from baton_operator.status.report_group import ReportedGroup
from baton_protocol.process.health import Health, LoadProgress
from support.operator.services import NOW, observed, pod, resolved, service

TYPO = "file:///models/typo"
BACK_OFF = {
    "waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}
}
LOADING = Health("Loading", "loading /models/typo")


def at(seconds: float) -> str:
    """Return a time as the API writes it, in whole seconds."""
    return (NOW + timedelta(seconds=seconds)).replace(microsecond=0).isoformat()


def not_found(started: float, finished: float) -> Object:
    message = "loading\nFATAL ModelNotFound: /models/typo does not exist"
    return {
        "exitCode": 78,
        "message": message,
        "startedAt": at(started),
        "finishedAt": at(finished),
    }


def killed(started: float, finished: float) -> Object:
    return {"exitCode": 137, "signal": 9, "startedAt": at(started), "finishedAt": at(finished)}


def running(since: float) -> Object:
    return {"running": {"startedAt": at(since)}}


def unready(since: float) -> list[Object]:
    """Return a Ready condition that became False at this time."""
    return [{"type": "Ready", "status": "False", "lastTransitionTime": at(since)}]


def failing(name: str, *, since: float, **fields: Any) -> Object:
    """Return a pod that is not ready since `since`."""
    made = pod(name, **fields)
    made["status"]["conditions"] = unready(since)
    return made


class Reported:
    """The status of a service with one decode group, updated for each state of its pods."""

    def __init__(self, uri: str = TYPO) -> None:
        self.model = {"uri": uri}
        self.before: Object = service()

    def when(
        self, pods: list[Object], loading: dict[str, Health] | None = None, at: datetime = NOW
    ) -> dict[str, tuple[str, str, str]]:
        """Return (status, reason, message) of each condition."""
        group = ReportedGroup(
            role="decode", desired=2, pods=pods, revision="new", loading=loading or {}
        )
        status = report(
            observed(self.before),
            resolved(model=self.model),
            {"decode": group},
            problem=None,
            now=at,
        )
        self.before = {**service(), "status": msgspec.to_builtins(status)}
        return {
            each.type: (each.status, each.reason, each.message) for each in status.conditions or []
        }


def restarts(name: str) -> list[tuple[Object, dict[str, Health]]]:
    """Return states of a pod that is never ready, from its first start to its third."""
    health = {name: LOADING}
    first, second = not_found(0, 20), not_found(30, 50)
    return [
        (failing(name, since=0, state=running(0)), health),
        (failing(name, since=0, state={"terminated": first}), {}),
        (failing(name, since=0, state=BACK_OFF, last=first), {}),
        (failing(name, since=0, state=running(30), last=first, restarts=1), {}),
        (failing(name, since=0, state=running(30), last=first, restarts=1), health),
        (failing(name, since=0, state={"terminated": second}, last=first, restarts=1), {}),
        (failing(name, since=0, state=BACK_OFF, last=second, restarts=1), {}),
        (failing(name, since=0, state=running(80), last=second, restarts=2), health),
    ]


def old(ordinal: int) -> Object:
    return pod(f"demo-decode-{ordinal}", revision="old", ready=True)


def test_a_missing_model_is_reported_through_all_restarts() -> None:
    reported = Reported()
    reported.before = {
        **service(),
        "status": {
            "model": {"uri": "file:///models/x"},
            "conditions": [
                {
                    "type": "ModelAvailable",
                    "status": "True",
                    "reason": "Available",
                    "lastTransitionTime": at(-60),
                }
            ],
        },
    }
    states = restarts("demo-decode-2")
    first = reported.when([old(0), old(1), states[0][0]], states[0][1], NOW + timedelta(seconds=9))
    assert first["ModelAvailable"][:2] == ("Unknown", "Loading"), (
        "the model of other pods must not affect the condition"
    )
    for step, (member, health) in enumerate(states[1:], 1):
        conditions = reported.when([old(0), old(1), member], health, NOW + timedelta(seconds=100))
        for type_ in ("ModelAvailable", "DecodeReady", "Ready"):
            assert conditions[type_][:2] == ("False", "ModelNotFound"), (
                f"{type_} in state {step}: {conditions[type_]}"
            )
        assert "/models/typo does not exist" in conditions["Updating"][2], step
        assert conditions["Updating"][:2] == ("True", "Starting")


@given(st.permutations(range(1, 8)), st.lists(st.integers(1, 7), max_size=6))
def test_a_pod_that_restarts_does_not_hide_the_failure_of_another(
    order: list[int], others: list[int]
) -> None:
    reported, ours, theirs = Reported(), restarts("demo-decode-0"), restarts("demo-decode-1")
    for mine, yours in zip(order, [*others, *order], strict=False):
        member, health = ours[mine]
        other, other_health = theirs[yours]
        conditions = reported.when(
            [member, other], health | other_health, NOW + timedelta(seconds=100)
        )
        assert conditions["ModelAvailable"][:2] == ("False", "ModelNotFound")
        assert conditions["DecodeReady"][:2] == ("False", "ModelNotFound")


def test_a_failure_is_over_when_the_pod_was_ready_since() -> None:
    reported = Reported()
    once = failing("demo-decode-0", since=90, state=running(30), last=not_found(0, 20), restarts=1)
    assert reported.when([once])["DecodeReady"][1] == "Starting", (
        "the pod was ready until 60 s after its start"
    )
    ready = pod("demo-decode-0", ready=True, state=running(30), last=not_found(0, 20), restarts=1)
    conditions = reported.when([ready, pod("demo-decode-1", ready=True)])
    assert conditions["ModelAvailable"][:2] == ("True", "Available")
    assert conditions["DecodeReady"][0] == "True"


def test_a_restarted_container_also_reports_its_progress() -> None:
    last = {
        "exitCode": 1,
        "message": "FATAL ModelSourceUnavailable: nothing came for 300 s",
        "startedAt": at(0),
    }
    again = failing("demo-decode-0", since=0, state=running(30), last=last, restarts=1)
    health = {
        "demo-decode-0": Health("Fetching", "fetching hf://org/m", LoadProgress(2**30, 4 * 2**30))
    }
    for type_ in ("ModelAvailable", "DecodeReady"):
        verdict = Reported("hf://org/m").when([again], health)[type_]
        assert verdict[:2] == ("False", "ModelSourceUnavailable")
        assert "nothing came for 300 s" in verdict[2]
        assert "25 % of 4.0 GiB" in verdict[2]


#: Time at which the pods of these tests were last ready.
READY_UNTIL = 1000.0


@pytest.mark.parametrize(
    ("state", "last", "count", "reason"),
    [
        ({"terminated": killed(0, READY_UNTIL)}, None, 0, "ContainerTerminated"),
        (BACK_OFF, killed(0, READY_UNTIL), 3, "ContainerTerminated"),
        (running(READY_UNTIL + 1), killed(0, READY_UNTIL), 4, "ContainerTerminated"),
        (
            {"terminated": killed(READY_UNTIL + 1, READY_UNTIL + 9)},
            killed(0, READY_UNTIL),
            4,
            "CrashLooping",
        ),
        (BACK_OFF, killed(READY_UNTIL + 1, READY_UNTIL + 9), 4, "CrashLooping"),
        (running(READY_UNTIL + 20), killed(READY_UNTIL + 1, READY_UNTIL + 9), 5, "CrashLooping"),
    ],
)
def test_a_pod_that_was_ready_between_restarts_has_no_crash_loop(
    state: Object, last: Object | None, count: int, reason: str
) -> None:
    """A pod that runs for a month may restart more than once."""
    member = failing("demo-decode-0", since=READY_UNTIL, state=state, last=last, restarts=count)
    assert Reported().when([member])["DecodeReady"][:2] == ("False", reason)


@pytest.mark.parametrize(
    "last",
    [
        {"exitCode": 0, "startedAt": at(0), "finishedAt": at(READY_UNTIL)},
        {"exitCode": 137, "reason": "ContainerStatusUnknown", "startedAt": at(0)},
    ],
    ids=["it was reported to end", "its node ended"],
)
def test_a_restart_without_a_failure_is_reported_as_loading(last: Object) -> None:
    member = failing(
        "demo-decode-0", since=READY_UNTIL, state=running(READY_UNTIL + 60), last=last, restarts=3
    )
    verdict = Reported().when([member], {"demo-decode-0": LOADING})["DecodeReady"]
    assert verdict[:2] == ("False", "Loading")


def test_a_completed_init_container_is_no_failure() -> None:
    done = {"exitCode": 0, "message": '{"revision":"c0ffee"}', "startedAt": at(30)}
    earlier = {
        "exitCode": 1,
        "message": "FATAL ModelSourceUnavailable: no network",
        "startedAt": at(0),
    }
    member = failing("demo-decode-0", since=0, state=running(60))
    member["status"]["initContainerStatuses"] = [
        {
            "name": "model",
            "restartCount": 1,
            "state": {"terminated": done},
            "lastState": {"terminated": earlier},
        }
    ]
    conditions = Reported("hf://org/m").when([member], {"demo-decode-0": LOADING})
    assert conditions["DecodeReady"][:2] == ("False", "Loading")
    assert conditions["ModelAvailable"][:2] == ("True", "Available")


def test_pods_of_an_earlier_revision_do_not_make_another_model_available() -> None:
    reported = Reported()
    reported.when([])
    for pods in (
        [old(0), old(1)],
        [old(0), old(1), failing("demo-decode-2", since=0, state=running(0))],
    ):
        conditions = reported.when(pods)
        assert conditions["ModelAvailable"][0] == "Unknown", conditions["ModelAvailable"]
        assert reported.before["status"].get("model") is None
