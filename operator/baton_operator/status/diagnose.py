"""Find out why a group of pods is not ready. Pure.

`diagnose` runs the checks in `_POLICIES` in their order, the most specific check first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Literal, NamedTuple

import msgspec

from baton_kube.client import Object
from baton_operator.builders.engine_settings import name_fields
from baton_operator.names import ANNOTATION_DRAINING
from baton_operator.observe.observation import Reference, condition, is_ready, parse_time
from baton_operator.status.missing_references import may_lack_objects, references
from baton_operator.status.reasons import Failure
from baton_protocol.process.health import Health

#: The last line that a component prints if its configuration is wrong (docs/internals/pods.md).
FATAL = re.compile(r"^FATAL ([A-Z][A-Za-z0-9]{0,99}): (.*)$", re.MULTILINE)
#: Number of restarts from which an unready container counts as crash looping. One restart is enough
#: if the kubelet reports CrashLoopBackOff.
CRASH_LOOP_RESTARTS = 2
LOST = "ContainerStatusUnknown"  # reason of a container that was lost with its node or kubelet
SIGNALLED = 128  # the exit code after a signal is this number plus the number of the signal


class Verdict(NamedTuple):
    """The status, the reason and the message of a condition."""

    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str


class Diagnosis(msgspec.Struct, frozen=True):
    """Why pods are not ready: the reason and the message of a condition."""

    reason: str
    message: str


Policy = Callable[[Object], Diagnosis | None]


def diagnose(pods: list[Object], missing: frozenset[Reference] = frozenset()) -> Diagnosis | None:
    """Return the most specific failure among the pods that are not ready.

    None: no failure was found, so the pods may only need more time.

    Args:
        missing: Secrets and ConfigMaps that do not exist.
    """
    unready = sorted_by_name(pod for pod in pods if not is_ready(pod))
    policies: tuple[Policy, ...] = (partial(_missing_object, missing=missing), *_POLICIES)
    found = (policy(pod) for policy in policies for pod in unready)
    return next(filter(None, found), None)


def diagnose_fatal(pod: Object) -> Diagnosis | None:
    """Return the FATAL line of a failed container as a diagnosis; None if there is no such line.

    In the message, the field of the spec follows each engine option. Call this function only for a
    pod that is not ready.
    """
    for _, terminated in _failures(pod):
        if lines := FATAL.findall(terminated.get("message") or ""):
            reason, message = lines[-1]
            return Diagnosis(reason, f"{name_fields(message)} (pod {pod['metadata']['name']})")
    return None


def _missing_object(pod: Object, missing: frozenset[Reference]) -> Diagnosis | None:
    if not missing or not may_lack_objects(pod):
        return None
    for reference, where in references(pod).items():
        if reference in missing:
            what = f"pod {pod['metadata']['name']}: {reference.kind} {reference.name}"
            text = f"{what} does not exist in the pod's namespace ({where}); create it"
            return Diagnosis(f"{reference.kind}NotFound", text)
    return None


def _waiting(
    pod: Object, reason: str, states: Collection[str], words: str = "", hint: str = ""
) -> Diagnosis | None:
    """Return a diagnosis with `reason` if a container's waiting reason is in `states`, else None.

    Args:
        states: values of `state.waiting.reason` in the status of a container.
        words: text after the pod's name in the message.
        hint: text at the end of the message.
    """
    for container in _containers(pod):
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") in states:
            text = waiting.get("message") or waiting["reason"]
            return Diagnosis(reason, f"pod {pod['metadata']['name']}{words}: {text}{hint}")
    return None


def _no_capacity(pod: Object) -> Diagnosis | None:
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") != "False" or scheduled.get("reason") != "Unschedulable":
        return None
    text = scheduled.get("message") or "no node fits"
    return Diagnosis(
        Failure.NO_CAPACITY, f"pod {pod['metadata']['name']} cannot be scheduled: {text}"
    )


def _crash_looping(pod: Object) -> Diagnosis | None:
    for container, terminated in _failures(pod):
        waiting = container.get("state", {}).get("waiting") or {}
        restarts = container.get("restartCount", 0)
        often = restarts >= (
            1 if waiting.get("reason") == "CrashLoopBackOff" else CRASH_LOOP_RESTARTS
        )
        if often and not _was_ready_since(pod, terminated.get("startedAt")):
            times = f"{restarts} times" if restarts > 1 else "once"
            text = f"restarted {times}, last {_ending(terminated)}"
            hint = "see its earlier log with kubectl logs --previous"
            return Diagnosis(Failure.CRASH_LOOPING, f"pod {pod['metadata']['name']} {text}; {hint}")
    return None


def _terminated(pod: Object) -> Diagnosis | None:
    for _, terminated in _failures(pod):
        return Diagnosis(
            Failure.CONTAINER_TERMINATED, f"pod {pod['metadata']['name']} {_ending(terminated)}"
        )
    return None


def _ended(pod: Object) -> Diagnosis | None:
    """Return why the pod has failed, for example an eviction; None if its phase is not Failed."""
    status = pod.get("status", {})
    if status.get("phase") != "Failed":
        return None
    why = (
        ": ".join(text for text in (status.get("reason"), status.get("message")) if text)
        or "its containers ended"
    )
    text = f"pod {pod['metadata']['name']} failed: {why}; another pod replaces it"
    return Diagnosis(Failure.POD_FAILED, text)


_IMAGE_STATES = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "RegistryUnavailable",
)
_ERROR_STATES = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
_POLICIES: tuple[Policy, ...] = (
    diagnose_fatal,
    partial(
        _waiting,
        reason=Failure.IMAGE_PULL,
        states=_IMAGE_STATES,
        words=" cannot get its image",
        hint="; check the name of the image and imagePullSecrets",
    ),
    partial(_waiting, reason=Failure.CONTAINER_ERROR, states=_ERROR_STATES),
    _no_capacity,
    _crash_looping,
    _terminated,
    _ended,
)


def _containers(pod: Object) -> list[Object]:
    """Return the container statuses of the pod, except those of init containers that succeeded."""
    status = pod.get("status", {})
    init = [
        container
        for container in status.get("initContainerStatuses") or []
        if ((container.get("state") or {}).get("terminated") or {}).get("exitCode") != 0
    ]
    return [*init, *(status.get("containerStatuses") or [])]


def _failures(pod: Object) -> Iterator[tuple[Object, Object]]:
    """Yield (container status, termination state) of each failed container of an unready pod.

    After a restart, the container counts as failed until the pod is ready again.
    """
    for container in _containers(pod):
        state = container.get("state") or {}
        last, running = (container.get("lastState") or {}).get("terminated"), state.get("running")
        if state.get("terminated"):
            yield container, state["terminated"]
        elif not last or last.get("reason") == LOST:
            continue
        elif not running or (
            last.get("exitCode") and not _was_ready_since(pod, running.get("startedAt"))
        ):
            yield container, last


def _was_ready_since(pod: Object, time: str | None) -> bool:
    """Return whether the pod, which is not ready now, was ready at any moment after `time`."""
    since, lost = parse_time(time), parse_time(condition(pod, "Ready").get("lastTransitionTime"))
    return since is not None and lost is not None and lost > since


def _ending(terminated: Object) -> str:
    """Return how a container ended, for example `ended with exit code 1: <last line of output>`.

    The output of a killed process is left out, because it does not show why the process was killed.
    """
    code = terminated.get("exitCode", 0)
    if terminated.get("reason") == "OOMKilled":
        return "ended because it used more memory than its limit; raise its memory limit"
    if signal := terminated.get("signal") or max(code - SIGNALLED, 0):
        return f"ended by signal {signal}"
    lines = (terminated.get("message") or "").strip().splitlines()
    return f"ended with exit code {code}" + (f": {lines[-1]}" if lines else "")


def diagnose_loading(pods: list[Object], health: Mapping[str, Health]) -> Diagnosis | None:
    """Return the progress of one pod that fetches or loads the model.

    The pod is one whose last attempt to fetch or load has failed, if there is one. Otherwise it is
    the first pod by name.

    Args:
        health: replies to `GET /health` of pods that fetch or load the model, by pod name.

    Returns:
        None if none of `pods` has such a reply.
    """
    reporting = {pod["metadata"]["name"] for pod in pods} & health.keys()
    if not reporting:
        return None
    name = min(reporting, key=lambda name: (not health[name].error, name))
    found = health[name]
    progress = f": {found.progress}" if str(found.progress or "") else ""
    error = f": {found.error}; the pod tries again" if found.error else ""
    return Diagnosis(found.reason, f"pod {name}: {found.message}{progress}{error}")


def retry_text(pods: list[Object], health: Mapping[str, Health]) -> str:
    """Return the progress of an attempt to fetch or load the model again after a failure.

    The caller appends this text to the message of a failure.

    Args:
        health: as in `diagnose_loading`.

    Returns:
        Empty if none of `pods` reports its progress in numbers.
    """
    measured = {name: found for name, found in health.items() if str(found.progress or "")}
    under_way = diagnose_loading(pods, measured)
    return f"; {under_way.message}" if under_way else ""


def is_leaving(pod: Object) -> bool:
    """Return whether the pod is marked as draining or is being deleted."""
    annotations = pod["metadata"].get("annotations") or {}
    return annotations.get(ANNOTATION_DRAINING) == "true" or bool(
        pod["metadata"].get("deletionTimestamp")
    )


def sorted_by_name(pods: Iterable[Object]) -> list[Object]:
    """Return the pods, sorted by name."""
    return sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))


def pods_text(pods: list[Object]) -> str:
    """Return the names of the pods for a message, as `pod a` or `pods a, b`."""
    names = ", ".join(pod["metadata"]["name"] for pod in sorted_by_name(pods))
    return f"pod{'s' if len(pods) > 1 else ''} {names}"
