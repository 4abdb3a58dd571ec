"""Conditions of pods that fail repeatedly: they do not alternate until the pods are ready."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton_operator.status.report import report
from baton_operator.status.report_group import Group
from baton_protocol.progress import Health, LoadProgress
from support.operator.services import NOW, Object, owner, pod, service

TYPO = "file:///models/typo"
BACK_OFF = {
    "waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}
}
LOADING = Health("Loading", "loading /models/typo")


def at(seconds: float) -> str:
    """As the API writes times: whole seconds."""
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
    """A Ready condition that became False then."""
    return [{"type": "Ready", "status": "False", "lastTransitionTime": at(since)}]


def failing(name: str, *, since: float, **fields: Any) -> Object:
    """A pod whose readiness was False from `since` on."""
    made = pod(name, **fields)
    made["status"]["conditions"] = unready(since)
    return made


class Told:
    """The service of one decode group, whose status is written again after each state of its pods."""

    def __init__(self, uri: str = TYPO) -> None:
        self.model = {"uri": uri}
        self.before: Object = service()

    def when(
        self, pods: list[Object], loading: dict[str, Health] | None = None, at: datetime = NOW
    ) -> dict[str, tuple[str, str, str]]:
        """status, reason and message of each condition."""
        group = Group(role="decode", desired=2, pods=pods, revision="new", loading=loading or {})
        status = report(
            self.before,
            owner(model=self.model),
            {"decode": group},
            cluster_ip=None,
            problem=None,
            now=at,
        )
        self.before = {**service(), "status": msgspec.to_builtins(status)}
        return {
            each.type: (each.status, each.reason, each.message) for each in status.conditions or []
        }


def restarts(name: str) -> list[tuple[Object, dict[str, Health]]]:
    """A pod that never was ready, from its first start to its third, and its status at each step."""
    says = {name: LOADING}
    first, second = not_found(0, 20), not_found(30, 50)
    return [
        (failing(name, since=0, state=running(0)), says),
        (failing(name, since=0, state={"terminated": first}), {}),
        (failing(name, since=0, state=BACK_OFF, last=first), {}),
        (failing(name, since=0, state=running(30), last=first, restarts=1), {}),
        (failing(name, since=0, state=running(30), last=first, restarts=1), says),
        (failing(name, since=0, state={"terminated": second}, last=first, restarts=1), {}),
        (failing(name, since=0, state=BACK_OFF, last=second, restarts=1), {}),
        (failing(name, since=0, state=running(80), last=second, restarts=2), says),
    ]


def old(ordinal: int) -> Object:
    return pod(f"demo-decode-{ordinal}", revision="old", ready=True)


def test_a_rollout_to_a_model_that_does_not_exist_says_so_through_all_restarts() -> None:
    told = Told()
    told.before = {
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
    first = told.when([old(0), old(1), states[0][0]], states[0][1], NOW + timedelta(seconds=9))
    assert first["ModelAvailable"][:2] == ("Unknown", "Loading"), (
        "that others have another model is no news of this one"
    )
    for step, (member, says) in enumerate(states[1:], 1):
        conditions = told.when([old(0), old(1), member], says, NOW + timedelta(seconds=100))
        for type_ in ("ModelAvailable", "DecodeReady", "Ready"):
            assert conditions[type_][:2] == ("False", "ModelNotFound"), (
                f"{type_} in state {step}: {conditions[type_]}"
            )
        assert "/models/typo does not exist" in conditions["Updating"][2], step
        assert conditions["Updating"][:2] == ("True", "Starting")


@given(st.permutations(range(1, 8)), st.lists(st.integers(1, 7), max_size=6))
def test_of_two_pods_that_fail_in_any_order_none_hides_the_other(
    order: list[int], others: list[int]
) -> None:
    told, ours, theirs = Told(), restarts("demo-decode-0"), restarts("demo-decode-1")
    for mine, yours in zip(order, [*others, *order], strict=False):
        member, says = ours[mine]
        other, also_says = theirs[yours]
        conditions = told.when([member, other], says | also_says, NOW + timedelta(seconds=100))
        assert conditions["ModelAvailable"][:2] == ("False", "ModelNotFound")
        assert conditions["DecodeReady"][:2] == ("False", "ModelNotFound")


def test_a_pod_that_got_ready_since_has_got_past_its_failure() -> None:
    told = Told()
    once = failing("demo-decode-0", since=90, state=running(30), last=not_found(0, 20), restarts=1)
    assert told.when([once])["DecodeReady"][1] == "Starting", (
        "it was ready until 60 s after it had started"
    )
    ready = pod("demo-decode-0", ready=True, state=running(30), last=not_found(0, 20), restarts=1)
    conditions = told.when([ready, pod("demo-decode-1", ready=True)])
    assert conditions["ModelAvailable"][:2] == ("True", "Available")
    assert conditions["DecodeReady"][0] == "True"


def test_what_runs_again_after_a_failure_tells_how_far_it_is_too() -> None:
    last = {
        "exitCode": 1,
        "message": "FATAL ModelSourceUnavailable: nothing came for 300 s",
        "startedAt": at(0),
    }
    again = failing("demo-decode-0", since=0, state=running(30), last=last, restarts=1)
    says = {
        "demo-decode-0": Health("Fetching", "fetching hf://org/m", LoadProgress(2**30, 4 * 2**30))
    }
    for type_ in ("ModelAvailable", "DecodeReady"):
        verdict = Told("hf://org/m").when([again], says)[type_]
        assert verdict[:2] == ("False", "ModelSourceUnavailable")
        assert "nothing came for 300 s" in verdict[2]
        assert "25 % of 4.0 GiB" in verdict[2]


READY_UNTIL = 1000.0
"""When the pods of these tests were ready last."""


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
def test_a_crash_loop_is_of_those_who_do_not_get_ready_between(
    state: Object, last: Object | None, count: int, reason: str
) -> None:
    """A pod that lives for a month ends more than once."""
    member = failing("demo-decode-0", since=READY_UNTIL, state=state, last=last, restarts=count)
    assert Told().when([member])["DecodeReady"][:2] == ("False", reason)


@pytest.mark.parametrize(
    "last",
    [
        {"exitCode": 0, "startedAt": at(0), "finishedAt": at(READY_UNTIL)},
        {"exitCode": 137, "reason": "ContainerStatusUnknown", "startedAt": at(0)},
    ],
    ids=["it was told to end", "its node ended"],
)
def test_what_starts_again_after_no_failure_of_its_own_loads(last: Object) -> None:
    member = failing(
        "demo-decode-0", since=READY_UNTIL, state=running(READY_UNTIL + 60), last=last, restarts=3
    )
    verdict = Told().when([member], {"demo-decode-0": LOADING})["DecodeReady"]
    assert verdict[:2] == ("False", "Loading")


def test_an_init_container_that_has_done_its_work_is_no_failure() -> None:
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
    conditions = Told("hf://org/m").when([member], {"demo-decode-0": LOADING})
    assert conditions["DecodeReady"][:2] == ("False", "Loading")
    assert conditions["ModelAvailable"][:2] == ("True", "Available")


def test_pods_of_an_earlier_revision_do_not_vouch_for_another_model() -> None:
    told = Told()
    told.when([])
    for pods in (
        [old(0), old(1)],
        [old(0), old(1), failing("demo-decode-2", since=0, state=running(0))],
    ):
        conditions = told.when(pods)
        assert conditions["ModelAvailable"][0] == "Unknown", conditions["ModelAvailable"]
        assert told.before["status"].get("model") is None
