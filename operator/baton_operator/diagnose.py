"""Why a group of pods is not ready: a chain of small policies, the most telling first. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import msgspec

from baton_operator.names import ANNOTATION_DRAINING
from baton_operator.observe import is_ready, parse_time
from baton_operator.report_topology import STATIONS

Object = dict[str, Any]

FATAL = re.compile(r"^FATAL ([A-Z][A-Za-z0-9]*): (.*)$", re.MULTILINE)
"""Last words of a component whose configuration is wrong (docs/architecture.md)."""
FORGIVEN_AFTER = timedelta(seconds=5)
"""A container that has run this long since its last failure has got past it."""
CRASH_LOOP_RESTARTS = 2
SIGNALLED = 128
"""Exit codes beyond it are those of a process that a signal ended: the signal's number is added."""
_IMAGE_REASONS = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"}

PROGRESS_REASONS = {"Starting", "Progressing", "Draining", "ScaledToZero", "Fetching", "Loading", *STATIONS}
"""Reasons that are stations on the way, not failures."""


class Diagnosis(msgspec.Struct, frozen=True):
    reason: str
    message: str


def diagnose(pods: list[Object], now: datetime) -> Diagnosis | None:
    """What keeps the first of `pods` that is not ready from it; None if nothing more than time is known of any."""
    unready = [pod for pod in pods if not is_ready(pod)]
    for policy in _POLICIES:
        for pod in sorted(unready, key=lambda pod: str(pod["metadata"]["name"])):
            if diagnosis := policy(pod, now):
                return diagnosis
    return None


def fatal(pod: Object, now: datetime) -> Diagnosis | None:
    """The component said itself what is wrong."""
    for container in _containers(pod):
        terminated = _failure(container, now)
        if terminated and (lines := FATAL.findall(terminated.get("message") or "")):
            reason, message = lines[-1]
            return Diagnosis(reason, f"{message} (pod {pod['metadata']['name']})")
    return None


def _image_pull(pod: Object, now: datetime) -> Diagnosis | None:
    for container in _containers(pod):
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") in _IMAGE_REASONS:
            text = waiting.get("message") or waiting["reason"]
            return Diagnosis("ImagePull", f"pod {pod['metadata']['name']} cannot get its image: {text}")
    return None


def _no_capacity(pod: Object, now: datetime) -> Diagnosis | None:
    for condition in pod.get("status", {}).get("conditions") or []:
        unschedulable = condition["type"] == "PodScheduled" and condition["status"] == "False"
        if unschedulable and condition.get("reason") == "Unschedulable":
            text = condition.get("message") or "no node fits"
            return Diagnosis("NoCapacity", f"pod {pod['metadata']['name']} cannot be scheduled: {text}")
    return None


def _volume(pod: Object, now: datetime) -> Diagnosis | None:
    for container in _containers(pod):
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") in ("CreateContainerConfigError", "CreateContainerError", "RunContainerError"):
            text = waiting.get("message") or waiting["reason"]
            return Diagnosis("ContainerError", f"pod {pod['metadata']['name']}: {text}")
    return None


def _crash_looping(pod: Object, now: datetime) -> Diagnosis | None:
    for container in _containers(pod):
        waiting = container.get("state", {}).get("waiting") or {}
        restarts = container.get("restartCount", 0)
        looping = restarts >= (1 if waiting.get("reason") == "CrashLoopBackOff" else CRASH_LOOP_RESTARTS)
        terminated = _failure(container, now)
        if looping and terminated:
            end = _ending(terminated)
            return Diagnosis("CrashLooping", f"pod {pod['metadata']['name']} restarted {restarts} times, last {end}")
    return None


def _terminated(pod: Object, now: datetime) -> Diagnosis | None:
    for container in _containers(pod):
        if terminated := _failure(container, now):
            return Diagnosis("ContainerTerminated", f"pod {pod['metadata']['name']} {_ending(terminated)}")
    return None


def _ended(pod: Object, now: datetime) -> Diagnosis | None:
    """The pod as a whole failed: refused by its node, evicted, or not to be restarted."""
    status = pod.get("status", {})
    if status.get("phase") != "Failed":
        return None
    why = ": ".join(text for text in (status.get("reason"), status.get("message")) if text) or "its containers ended"
    return Diagnosis("PodFailed", f"pod {pod['metadata']['name']} failed: {why}")


_POLICIES: tuple[Callable[[Object, datetime], Diagnosis | None], ...] = (
    fatal,
    _image_pull,
    _volume,
    _no_capacity,
    _crash_looping,
    _terminated,
    _ended,
)


def leaving(pod: Object) -> bool:
    """Whether the pod is on its way out: marked as draining, or being deleted."""
    annotations = pod["metadata"].get("annotations") or {}
    return annotations.get(ANNOTATION_DRAINING) == "true" or bool(pod["metadata"].get("deletionTimestamp"))


def _containers(pod: Object) -> list[Object]:
    status = pod.get("status", {})
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def _failure(container: Object, now: datetime) -> Object | None:
    """How the container ended last, unless it has run long enough since."""
    state = container.get("state") or {}
    if state.get("terminated"):
        return dict(state["terminated"])
    started = parse_time((state.get("running") or {}).get("startedAt"))
    if started and now - started > FORGIVEN_AFTER:
        return None
    last = (container.get("lastState") or {}).get("terminated")
    return dict(last) if last else None


def _ending(terminated: Object) -> str:
    """`with exit code 1: <last line>`. Who was killed could not say why: its last line is about something else."""
    code = terminated.get("exitCode", 0)
    if terminated.get("reason") == "OOMKilled":
        return "ended because it used more memory than its limit"
    if signal := terminated.get("signal") or max(code - SIGNALLED, 0):
        return f"ended by signal {signal}"
    lines = (terminated.get("message") or "").strip().splitlines()
    return f"ended with exit code {code}" + (f": {lines[-1]}" if lines else "")
