"""Compute the status of a pod from the states of its containers. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from baton_kube.client import Object
from pocketkube.containers.container_state import ContainerState, Running, Terminated, Waiting
from pocketkube.timestamps import parse_time, timestamp


@dataclass
class PodRuntime:
    """The state of a pod that the kubelet keeps in memory."""

    host_ip: str
    pod_ip: str = ""
    start_time: datetime | None = None
    init: dict[str, ContainerState] = field(default_factory=dict)
    main: dict[str, ContainerState] = field(default_factory=dict)
    #: Whether the containers are being stopped and will not be started again.
    stopping: bool = False


def pod_status(pod: Object, runtime: PodRuntime, previous: Object, now: datetime) -> Object:
    """Compute the fields of the pod's status that the kubelet sets.

    Args:
        previous: the last status. An unchanged condition keeps its transition time.
    """
    phase = pod_phase(pod, runtime)
    status: Object = {
        "phase": phase,
        "conditions": _conditions(runtime, phase, previous, now),
        "hostIP": runtime.host_ip,
        "podIP": runtime.pod_ip or None,
        "podIPs": [{"ip": runtime.pod_ip}] if runtime.pod_ip else None,
        "startTime": timestamp(runtime.start_time) if runtime.start_time else None,
        "containerStatuses": _container_statuses(pod["spec"]["containers"], runtime.main),
    }
    if init := pod["spec"].get("initContainers"):
        status["initContainerStatuses"] = _container_statuses(init, runtime.init, init=True)
    return status


def pod_phase(pod: Object, runtime: PodRuntime) -> str:
    """Return the pod's phase: Pending, Running, Succeeded or Failed."""
    policy = pod["spec"].get("restartPolicy") or "Always"
    for state in runtime.init.values():
        if not state.has_succeeded:
            has_failed = isinstance(state.state, Terminated) and policy == "Never"
            return "Failed" if has_failed or runtime.stopping else "Pending"
    states = list(runtime.main.values())
    if any(isinstance(state.state, Running) for state in states):
        return "Running"
    if any(isinstance(state.state, Waiting) for state in states):
        # The phase is Running while a container waits for a restart, but Pending while it waits
        # for its first start.
        return (
            "Running"
            if all(state.last or not isinstance(state.state, Waiting) for state in states)
            else "Pending"
        )
    if policy == "Always" and not runtime.stopping:
        return "Running"
    if all(state.has_succeeded for state in states):
        return "Succeeded"
    return "Failed" if policy == "Never" or runtime.stopping else "Running"


def inherited_state(previous: Object, restart_policy: str, *, init: bool = False) -> ContainerState:
    """Compute the initial state of a container after a restart of the kubelet.

    No process survives the end of the kubelet, so a container that was running is now terminated.
    A terminated container stays terminated if the restart policy forbids a restart. Otherwise, the
    container is started again, which increments its restart count.

    Args:
        previous: the container's status in the API; empty for a new container.
    """
    states, before = previous.get("state") or {}, (previous.get("lastState") or {})
    result = ContainerState(
        Waiting("PodInitializing" if init else "ContainerCreating"),
        last=_read_terminated(before["terminated"]) if before.get("terminated") else None,
        restart_count=int(previous.get("restartCount", 0)),
        container_id=previous.get("containerID", ""),
    )
    is_final = restart_policy == "Never"
    if ended := states.get("terminated"):
        end = _read_terminated(ended)
        has_succeeded = end.exit_code == 0
        is_final |= has_succeeded and (init or restart_policy == "OnFailure")
    elif running := states.get("running"):
        end = Terminated(
            137,
            "ContainerStatusUnknown",
            "the container ended together with the kubelet that ran it",
            started_at=parse_time(running.get("startedAt")),
            container_id=result.container_id,
        )
    else:
        return result
    if is_final:
        result.state = end
    else:
        result.last = end
    return result


def _read_terminated(ended: Object) -> Terminated:
    return Terminated(
        int(ended["exitCode"]),
        ended.get("reason", "Error"),
        ended.get("message", ""),
        started_at=parse_time(ended.get("startedAt")),
        finished_at=parse_time(ended.get("finishedAt")),
        container_id=ended.get("containerID", ""),
    )


def _container_statuses(
    containers: list[Object], states: Mapping[str, ContainerState], *, init: bool = False
) -> list[Object]:
    result = []
    for container in containers:
        state = states.get(container["name"]) or ContainerState()
        entry: Object = {
            "name": container["name"],
            "image": container.get("image") or "none",
            "imageID": "",
            "restartCount": state.restart_count,
            "ready": state.has_succeeded if init else state.is_ready,
            "state": _state(state.state),
        }
        if not init:
            entry["started"] = isinstance(state.state, Running) and state.started
        if state.last:
            entry["lastState"] = _state(state.last)
        if state.container_id:
            entry["containerID"] = state.container_id
        result.append(entry)
    return result


def _state(state: Waiting | Running | Terminated) -> Object:
    if isinstance(state, Running):
        return {"running": {"startedAt": timestamp(state.started_at)}}
    if isinstance(state, Waiting):
        return {
            "waiting": {"reason": state.reason}
            | ({"message": state.message} if state.message else {})
        }
    ended = {
        "exitCode": state.exit_code,
        "reason": state.reason,
        "message": state.message,
        "startedAt": timestamp(state.started_at) if state.started_at else None,
        "finishedAt": timestamp(state.finished_at) if state.finished_at else None,
        "containerID": state.container_id,
    }
    return {
        "terminated": {key: value for key, value in ended.items() if value or key == "exitCode"}
    }


def _conditions(runtime: PodRuntime, phase: str, previous: Object, now: datetime) -> list[Object]:
    incomplete = [name for name, state in runtime.init.items() if not state.has_succeeded]
    unready = [name for name, state in runtime.main.items() if not state.is_ready]
    initialized = ready = (True, "", "")
    if incomplete:
        text = f"containers with incomplete status: [{' '.join(incomplete)}]"
        initialized = (False, "ContainersNotInitialized", text)
    if phase == "Succeeded":
        initialized, ready = (True, "PodCompleted", ""), (False, "PodCompleted", "")
    elif phase == "Failed":
        ready = (False, "PodFailed", "")
    elif unready or incomplete:
        text = f"containers with unready status: [{' '.join(unready)}]"
        ready = (False, "ContainersNotReady", text)
    # Condition type -> (whether the condition is True, reason, message).
    verdicts = {
        "PodScheduled": (True, "", ""),
        "Initialized": initialized,
        "ContainersReady": ready,
        "Ready": ready,
    }
    before = {condition["type"]: condition for condition in previous.get("conditions") or []}
    # Other conditions, of a scheduler or of readiness gates, are kept.
    result = [condition for condition in before.values() if condition["type"] not in verdicts]
    for kind, (truth, reason, message) in verdicts.items():
        value = "True" if truth else "False"
        old = before.get(kind)
        changed_at = old.get("lastTransitionTime") if old and old["status"] == value else None
        condition = {
            "type": kind,
            "status": value,
            "lastTransitionTime": changed_at or timestamp(now),
        }
        result.append(
            condition
            | ({"reason": reason} if reason else {})
            | ({"message": message} if message else {})
        )
    return result
