"""Why a group of pods is not ready: a chain of small policies, the most telling first. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec

from baton_operator.names import ANNOTATION_DRAINING
from baton_operator.observe import is_ready, parse_time
from baton_operator.references import Reference, may_lack_objects, references
from baton_operator.report_route import ROUTE_PENDING
from baton_operator.report_topology import STATIONS

Object = dict[str, Any]

FATAL = re.compile(r"^FATAL ([A-Z][A-Za-z0-9]*): (.*)$", re.MULTILINE)
"""Last words of a component whose configuration is wrong (docs/architecture.md)."""
CRASH_LOOP_RESTARTS = 2
LOST = "ContainerStatusUnknown"
"""Of a container that ended with its node, or its kubelet."""
SIGNALLED = 128
"""Exit codes beyond it are those of a process that a signal ended: the signal's number is added."""
_IMAGE_REASONS = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}

PROGRESS_REASONS = {
    *("Starting", "Progressing", "Draining", "ScaledToZero", "Fetching", "Loading"),
    ROUTE_PENDING,
    *STATIONS,
}
"""Reasons that are stations on the way, not failures."""


class Diagnosis(msgspec.Struct, frozen=True):
    reason: str
    message: str


Policy = Callable[[Object], Diagnosis | None]


def diagnose(pods: list[Object], missing: frozenset[Reference] = frozenset()) -> Diagnosis | None:
    """What keeps the first of `pods` that is not ready from it; None if nothing more than time is known of any.

    Args:
        missing: Secrets and ConfigMaps that do not exist.
    """
    unready = by_name(pod for pod in pods if not is_ready(pod))
    policies: tuple[Policy, ...] = (partial(_missing_object, missing=missing), *_POLICIES)
    found = (policy(pod) for policy in policies for pod in unready)
    return next(filter(None, found), None)


def fatal(pod: Object) -> Diagnosis | None:
    """The component said itself what is wrong."""
    for container in _containers(pod):
        terminated = _failure(pod, container)
        if terminated and (lines := FATAL.findall(terminated.get("message") or "")):
            reason, message = lines[-1]
            return Diagnosis(reason, f"{message} (pod {pod['metadata']['name']})")
    return None


def _missing_object(pod: Object, missing: frozenset[Reference]) -> Diagnosis | None:
    if not missing or not may_lack_objects(pod):
        return None
    for reference, where in references(pod).items():
        if reference in missing:
            text = (
                f"{reference.kind} {reference.name} does not exist in its namespace ({where}); it waits until it does"
            )
            return Diagnosis(f"{reference.kind}NotFound", f"pod {pod['metadata']['name']}: {text}")
    return None


def _image_pull(pod: Object) -> Diagnosis | None:
    for container in _containers(pod):
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") in _IMAGE_REASONS:
            text = waiting.get("message") or waiting["reason"]
            return Diagnosis("ImagePull", f"pod {pod['metadata']['name']} cannot get its image: {text}")
    return None


def _no_capacity(pod: Object) -> Diagnosis | None:
    for condition in pod.get("status", {}).get("conditions") or []:
        unschedulable = condition["type"] == "PodScheduled" and condition["status"] == "False"
        if unschedulable and condition.get("reason") == "Unschedulable":
            text = condition.get("message") or "no node fits"
            return Diagnosis("NoCapacity", f"pod {pod['metadata']['name']} cannot be scheduled: {text}")
    return None


def _volume(pod: Object) -> Diagnosis | None:
    for container in _containers(pod):
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") in ("CreateContainerConfigError", "CreateContainerError", "RunContainerError"):
            text = waiting.get("message") or waiting["reason"]
            return Diagnosis("ContainerError", f"pod {pod['metadata']['name']}: {text}")
    return None


def _crash_looping(pod: Object) -> Diagnosis | None:
    for container in _containers(pod):
        waiting = container.get("state", {}).get("waiting") or {}
        restarts = container.get("restartCount", 0)
        often = restarts >= (1 if waiting.get("reason") == "CrashLoopBackOff" else CRASH_LOOP_RESTARTS)
        terminated = _failure(pod, container)
        if often and terminated and not _was_ready_since(pod, terminated.get("startedAt")):
            end = _ending(terminated)
            return Diagnosis("CrashLooping", f"pod {pod['metadata']['name']} restarted {restarts} times, last {end}")
    return None


def _terminated(pod: Object) -> Diagnosis | None:
    for container in _containers(pod):
        if terminated := _failure(pod, container):
            return Diagnosis("ContainerTerminated", f"pod {pod['metadata']['name']} {_ending(terminated)}")
    return None


def _ended(pod: Object) -> Diagnosis | None:
    """The pod as a whole failed: refused by its node, evicted, or not to be restarted."""
    status = pod.get("status", {})
    if status.get("phase") != "Failed":
        return None
    why = ": ".join(text for text in (status.get("reason"), status.get("message")) if text) or "its containers ended"
    return Diagnosis("PodFailed", f"pod {pod['metadata']['name']} failed: {why}")


_POLICIES: tuple[Policy, ...] = (
    fatal,
    _image_pull,
    _volume,
    _no_capacity,
    _crash_looping,
    _terminated,
    _ended,
)


def by_name(pods: Iterable[Object]) -> list[Object]:
    """Return the pods in the order of their names."""
    return sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))


def leaving(pod: Object) -> bool:
    """Whether the pod is on its way out: marked as draining, or being deleted."""
    annotations = pod["metadata"].get("annotations") or {}
    return annotations.get(ANNOTATION_DRAINING) == "true" or bool(pod["metadata"].get("deletionTimestamp"))


def _containers(pod: Object) -> list[Object]:
    """Without init containers that have done their work."""
    status = pod.get("status", {})
    init = [
        container
        for container in status.get("initContainerStatuses") or []
        if ((container.get("state") or {}).get("terminated") or {}).get("exitCode") != 0
    ]
    return [*init, *(status.get("containerStatuses") or [])]


def _failure(pod: Object, container: Object) -> Object | None:
    """How the container of a pod that is not ready failed last, until it was ready again: to start again is no success."""
    state = container.get("state") or {}
    if state.get("terminated"):
        return dict(state["terminated"])
    last = (container.get("lastState") or {}).get("terminated")
    running = state.get("running")
    if not last or last.get("reason") == LOST:
        return None
    if running and (not last.get("exitCode") or _was_ready_since(pod, running.get("startedAt"))):
        return None
    return dict(last)


def _was_ready_since(pod: Object, time: str | None) -> bool:
    """Whether a pod that is not ready was so at some moment after `time`."""
    since = parse_time(time)
    for condition in pod.get("status", {}).get("conditions") or []:
        lost = parse_time(condition.get("lastTransitionTime"))
        if condition["type"] == "Ready" and since is not None and lost is not None:
            return lost > since
    return False


def _ending(terminated: Object) -> str:
    """`with exit code 1: <last line>`. Who was killed could not say why: its last line is about something else."""
    code = terminated.get("exitCode", 0)
    if terminated.get("reason") == "OOMKilled":
        return "ended because it used more memory than its limit"
    if signal := terminated.get("signal") or max(code - SIGNALLED, 0):
        return f"ended by signal {signal}"
    lines = (terminated.get("message") or "").strip().splitlines()
    return f"ended with exit code {code}" + (f": {lines[-1]}" if lines else "")
