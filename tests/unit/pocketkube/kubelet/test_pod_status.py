"""The status of a pod, from the states of its containers."""

from datetime import UTC, datetime, timedelta

import pytest

from pocketkube.kubelet.pod_status import (
    ContainerState,
    PodRuntime,
    Running,
    Terminated,
    Waiting,
    inherited_state,
    pod_phase,
    pod_status,
)
from support.pocketkube.sample_pod import POD

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def ended(code: int) -> Terminated:
    return Terminated(code, "Completed" if code == 0 else "Error", "", NOW, NOW, "process://x")


def runtime(state: Waiting | Running | Terminated, *, ready: bool = False) -> PodRuntime:
    return PodRuntime(
        "127.77.0.1",
        "127.77.0.2",
        NOW,
        main={"main": ContainerState(state, started=True, ready=ready)},
    )


@pytest.mark.parametrize(
    ("state", "policy", "phase"),
    [
        (Waiting(), "Always", "Pending"),
        (Running(NOW), "Always", "Running"),
        (ended(0), "Never", "Succeeded"),
        (ended(1), "Never", "Failed"),
        (ended(1), "OnFailure", "Running"),
        (ended(0), "OnFailure", "Succeeded"),
        (ended(0), "Always", "Running"),
    ],
)
def test_the_phase_follows_from_states_and_restart_policy(
    state: Waiting | Running | Terminated, policy: str, phase: str
) -> None:
    assert pod_phase({"spec": {"restartPolicy": policy}}, runtime(state)) == phase


def test_a_condition_keeps_its_transition_time_until_its_status_changes() -> None:
    first = pod_status(POD, runtime(Running(NOW), ready=True), {}, NOW)
    later = pod_status(POD, runtime(Running(NOW), ready=True), first, NOW + timedelta(minutes=1))
    assert later == first
    flipped = pod_status(POD, runtime(Running(NOW)), later, NOW + timedelta(minutes=2))
    times = {c["type"]: c["lastTransitionTime"] for c in flipped["conditions"]}
    assert times["Ready"] == "2026-01-01T00:02:00Z"
    assert times["Initialized"] == "2026-01-01T00:00:00Z"


def test_conditions_of_other_components_are_kept() -> None:
    foreign = {
        "type": "DisruptionTarget",
        "status": "True",
        "lastTransitionTime": "2025-01-01T00:00:00Z",
    }
    assert (
        foreign
        in pod_status(POD, runtime(Running(NOW)), {"conditions": [foreign]}, NOW)["conditions"]
    )


def test_a_new_kubelet_treats_running_containers_as_terminated() -> None:
    before = {
        "restartCount": 3,
        "containerID": "process://old",
        "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
    }
    state = inherited_state(before, "Always")
    assert isinstance(state.state, Waiting)
    assert (state.last.exit_code, state.restart_count) == (137, 3)
    assert isinstance(inherited_state(before, "Never").state, Terminated)
    completed = {**before, "state": {"terminated": {"exitCode": 0}}}
    assert isinstance(inherited_state(completed, "OnFailure").state, Terminated)
    assert isinstance(inherited_state(completed, "Always").state, Waiting)
