"""Compute the condition ModelAvailable, and the model in the status. Pure.

ModelAvailable shows whether pods have the model, and the progress of pods that fetch or load it.
The first verdict of `_POLICIES` is the condition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import msgspec

from baton_kube.client import Object
from baton_operator.api.spec_model import Model, ModelStatus, needs_download
from baton_operator.builders.model_volume import FETCHER, source
from baton_operator.observe.observation import condition, is_ready
from baton_operator.status.diagnose import (
    Diagnosis,
    Verdict,
    diagnose_fatal,
    diagnose_loading,
    retry_text,
    sorted_by_name,
)
from baton_operator.status.reasons import Failure, Progress, Settled
from baton_operator.status.report_group import ReportedGroup
from baton_protocol.process.health import Health

#: FATAL reasons of fetchers and engines that are about the model's files.
MODEL_REASONS = {
    *(
        "ModelAccessDenied",
        "ModelCacheInvalid",
        "ModelChanged",
        "ModelCorrupt",
        "ModelInvalid",
        "ModelMissing",
    ),
    *(
        "ModelNotFound",
        "ModelSourceInvalid",
        "ModelSourceUnavailable",
        "ModelSourceUnsupported",
        "ModelUriInvalid",
    ),
    "NoSpace",
}
MODEL_AVAILABLE = "ModelAvailable"


class _Fetched(msgspec.Struct):
    """The content that the init container for the model writes to its termination log."""

    revision: str


class _ModelState(NamedTuple):
    """The state of the model, as observed on the pods of the newest revision.

    Other pods do not count, because they may have another model.
    """

    model: Model
    #: Why the API server refused a pod. If no pod was refused: the first problem of this reconcile.
    #: Empty: no pod was refused, and there is no problem.
    refusal: str
    had_model: bool  # whether pods had this model, according to the previous status
    has_pods: bool  # whether pods of any revision exist
    pods: list[Object]  # of the newest revision, sorted by name
    suspended: set[str]  # names of the pods that are paused or asleep
    health: Mapping[str, Health]  # replies of pods that fetch or load the model, by pod name
    loading: Diagnosis | None  # the progress of one of `pods`


def model_verdict(
    model: Model, members: list[ReportedGroup], refusal: str, before: Object
) -> Verdict:
    """Return the verdict on the condition ModelAvailable.

    Args:
        refusal: as in `_ModelState`.
        before: the previous status of the service.
    """
    was_available = condition({"status": before}, MODEL_AVAILABLE).get("status") == "True"
    pods = sorted_by_name(pod for group in members for pod in group.newest)
    health = {name: reply for group in members for name, reply in group.loading.items()}
    state = _ModelState(
        model=model,
        refusal=refusal,
        had_model=was_available and (before.get("model") or {}).get("uri") == model.uri,
        has_pods=any(group.current for group in members),
        pods=pods,
        suspended={name for group in members for name in group.suspended},
        health=health,
        loading=diagnose_loading(pods, health),
    )
    return next(found for policy in _POLICIES if (found := policy(state)))


def _image_volume_refused(state: _ModelState) -> Verdict | None:
    if not state.model.uri.startswith("image://") or "volume" not in state.refusal.lower():
        return None
    text = (
        "this cluster refuses image volumes "
        "(they need Kubernetes 1.31 or newer with the feature ImageVolume)"
    )
    return Verdict("False", Failure.IMAGE_VOLUME_UNSUPPORTED, f"{text}: {state.refusal}")


def _fatal(state: _ModelState) -> Verdict | None:
    for pod in state.pods:
        found = None if is_ready(pod) else diagnose_fatal(pod)
        if found and found.reason in MODEL_REASONS:
            text = f"{found.message}{retry_text([pod], state.health)}"
            return Verdict("False", found.reason, text)
    return None


def _claim_missing(state: _ModelState) -> Verdict | None:
    # The name of the claim does not depend on the role or the namespace.
    volume = source(state.model, "decode", "").volume
    claim = volume.get("persistentVolumeClaim", {}).get("claimName")
    for pod in state.pods:
        text = condition(pod, "PodScheduled").get("message") or ""
        if f'persistentvolumeclaim "{claim}" not found' in text:
            message = f"pod {pod['metadata']['name']}: {text}; create the claim"
            return Verdict("False", Failure.MODEL_MISSING, message)
    return None


def _without_pods(state: _ModelState) -> Verdict | None:
    if state.pods:
        return None
    if not state.had_model:
        return Verdict("Unknown", Settled.NOT_OBSERVED, "no pod of the newest revision exists yet")
    text = "earlier pods had the model; no pod of the newest revision runs yet"
    if not state.has_pods:
        cache = state.model.cache
        is_kept = cache is not None and bool(cache.host_path or cache.claim)
        is_lost = needs_download(state.model.uri) and not is_kept
        again = "; the next pod downloads it again" if is_lost else ""
        text = f"earlier pods had the model; no pod runs now{again}"
    return Verdict("True", Settled.AVAILABLE, text)


def _pods_have_model(state: _ModelState) -> Verdict | None:
    have = [
        pod
        for pod in state.pods
        if _has_model(state.model, pod) or pod["metadata"]["name"] in state.suspended
    ]
    if not have:
        return None
    counts = f"{len(have)} of {len(state.pods)} pods have the model"
    text = f"{counts}; {state.loading.message}" if state.loading else counts
    return Verdict("True", Settled.AVAILABLE, text)


def _pods_had_model(state: _ModelState) -> Verdict | None:
    if not state.had_model or needs_download(state.model.uri):
        return None
    waiting = "earlier pods had the model; new pods load it"
    return Verdict("True", Settled.AVAILABLE, state.loading.message if state.loading else waiting)


def _pods_load_model(state: _ModelState) -> Verdict:
    if not state.loading:
        text = "no pod has reported progress on the model yet"
        return Verdict("Unknown", Progress.STARTING, text)
    return Verdict(
        "False" if needs_download(state.model.uri) else "Unknown",
        state.loading.reason,
        state.loading.message,
    )


#: What the pods may show, the most urgent first. The condition is the first verdict.
_POLICIES: tuple[Callable[[_ModelState], Verdict | None], ...] = (
    _image_volume_refused,
    _fatal,
    _claim_missing,
    _without_pods,
    _pods_have_model,
    _pods_had_model,
    _pods_load_model,
)


def model_status(
    model: Model, members: list[ReportedGroup], previous: Object | None
) -> ModelStatus | None:
    """Return the model for the status; None if no pod has or had the model.

    The model's revision comes from the most recently created pod whose fetch succeeded. Without
    such a pod, it comes from `previous`.

    Args:
        previous: the model in the previous status.
    """
    pods = [pod for group in members for pod in group.newest]
    for pod in sorted(
        pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp")), reverse=True
    ):
        ended = _fetcher_end(pod)
        if ended.get("exitCode") == 0:
            try:
                found = msgspec.json.decode(ended.get("message") or "", type=_Fetched)
            except msgspec.DecodeError:
                continue
            return ModelStatus(uri=model.uri, revision=found.revision)
    if previous and previous.get("uri") == model.uri:
        return ModelStatus(uri=model.uri, revision=previous.get("revision"))
    return ModelStatus(uri=model.uri) if any(_has_model(model, pod) for pod in pods) else None


def _has_model(model: Model, pod: Object) -> bool:
    return _fetcher_end(pod).get("exitCode") == 0 if needs_download(model.uri) else is_ready(pod)


def _fetcher_end(pod: Object) -> Object:
    """Return the termination state of the init container that fetches the model.

    Empty: the init container has not ended, or the pod does not have it.
    """
    containers = pod.get("status", {}).get("initContainerStatuses") or []
    state = next((each.get("state") for each in containers if each["name"] == FETCHER), None) or {}
    return state.get("terminated") or {}
