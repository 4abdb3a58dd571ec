"""Compute the condition ModelAvailable, and the model in the status. Pure.

ModelAvailable shows whether pods have the model, and the progress of pods that fetch or load it.
"""

from __future__ import annotations

import msgspec

from baton_kube.client import Object
from baton_operator.api.spec_model import Model, ModelStatus, needs_download
from baton_operator.builders.model_volume import FETCHER, source
from baton_operator.observe.observation import condition, is_ready
from baton_operator.status.diagnose import (
    Verdict,
    diagnose_fatal,
    diagnose_loading,
    retry_text,
    sorted_by_name,
)
from baton_operator.status.reasons import Failure, Progress, Settled
from baton_operator.status.report_group import ReportedGroup

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


def model_verdict(
    model: Model, members: list[ReportedGroup], refusal: str, before: Object
) -> Verdict:
    """Return the verdict on the condition ModelAvailable.

    The condition describes only members of the newest revision, because other members may have
    another model.

    Args:
        refusal: why the API server refused a pod, or else the first problem of this reconcile.
            Empty: no pod was refused, and there is no problem.
        before: the previous status of the service.
    """
    if model.uri.startswith("image://") and "volume" in refusal.lower():
        text = (
            "this cluster refuses image volumes "
            "(they need Kubernetes 1.31 or newer with the feature ImageVolume)"
        )
        return Verdict("False", Failure.IMAGE_VOLUME_UNSUPPORTED, f"{text}: {refusal}")
    pods = sorted_by_name(pod for group in members for pod in group.newest)
    health = {name: found for group in members for name, found in group.loading.items()}
    for pod in pods:
        found = None if is_ready(pod) else diagnose_fatal(pod)
        if found and found.reason in MODEL_REASONS:
            return Verdict("False", found.reason, f"{found.message}{retry_text([pod], health)}")
    if missing := next(filter(None, (_missing_claim(model, pod) for pod in pods)), None):
        return Verdict("False", Failure.MODEL_MISSING, missing)
    had_before = _had_model(model, before)
    if not pods and had_before:
        return _verdict_without_pods(model, members)
    if not pods:
        return Verdict("Unknown", Settled.NOT_OBSERVED, "no pod of the newest revision exists yet")
    suspended = {name for group in members for name in group.suspended}
    have = [pod for pod in pods if _has_model(model, pod) or pod["metadata"]["name"] in suspended]
    under_way = diagnose_loading(pods, health)
    if have:
        counts = f"{len(have)} of {len(pods)} pods have the model"
        text = f"{counts}; {under_way.message}" if under_way else counts
        return Verdict("True", Settled.AVAILABLE, text)
    if had_before and not needs_download(model.uri):
        text = under_way.message if under_way else "earlier pods had the model; new pods load it"
        return Verdict("True", Settled.AVAILABLE, text)
    if under_way:
        return Verdict(
            "False" if needs_download(model.uri) else "Unknown", under_way.reason, under_way.message
        )
    return Verdict("Unknown", Progress.STARTING, "no pod has reported progress on the model yet")


def _verdict_without_pods(model: Model, members: list[ReportedGroup]) -> Verdict:
    """Return the verdict on ModelAvailable for groups without pods of the newest revision.

    Call this function only if earlier pods had the model.
    """
    if any(group.current for group in members):
        text = "earlier pods had the model; no pod of the newest revision runs yet"
        return Verdict("True", Settled.AVAILABLE, text)
    is_kept = model.cache is not None and bool(model.cache.host_path or model.cache.claim)
    again = "; the next pod downloads it again" if needs_download(model.uri) and not is_kept else ""
    return Verdict("True", Settled.AVAILABLE, f"earlier pods had the model; no pod runs now{again}")


def _had_model(model: Model, before: Object) -> bool:
    """Return whether pods had the model at `model.uri`, according to the status `before`."""
    was_available = condition({"status": before}, MODEL_AVAILABLE).get("status") == "True"
    return was_available and (before.get("model") or {}).get("uri") == model.uri


def model_status(
    model: Model, members: list[ReportedGroup], previous: Object | None
) -> ModelStatus | None:
    """Return the model for the status; None if no pod has or had the model.

    The revision is the one that the newest pod fetched or, without a fetch, the one in `previous`.

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


def _missing_claim(model: Model, pod: Object) -> str | None:
    """Return a message if the PersistentVolumeClaim of the model does not exist, else None."""
    text = condition(pod, "PodScheduled").get("message") or ""
    # The volume is the same in all namespaces.
    claim = source(model, "decode", "").volume.get("persistentVolumeClaim", {}).get("claimName")
    is_missing = f'persistentvolumeclaim "{claim}" not found' in text
    return f"pod {pod['metadata']['name']}: {text}; create the claim" if is_missing else None
