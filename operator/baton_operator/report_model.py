"""ModelAvailable: whether pods have the model, and how far those are that fetch or load it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from baton_engine.protocol.progress import Health
from baton_operator.api_model import Model, ModelStatus, is_fetched
from baton_operator.builders.model import FETCHER
from baton_operator.diagnose import fatal, leaving
from baton_operator.observe import is_ready
from baton_operator.report_topology import Verdict

Object = dict[str, Any]

MODEL_REASONS = frozenset(
    {
        "ModelAccessDenied",
        "ModelCacheInvalid",
        "ModelChanged",
        "ModelCorrupt",
        "ModelInvalid",
        "ModelMissing",
        "ModelNotFound",
        "ModelSourceInvalid",
        "ModelSourceUnavailable",
        "ModelSourceUnsupported",
        "ModelUriInvalid",
        "NoSpace",
    }
)
"""FATAL reasons of fetchers and engines that are about the model's files."""
MODEL_AVAILABLE = "ModelAvailable"
AVAILABLE = "Available"
IMAGE_VOLUME_UNSUPPORTED = "ImageVolumeUnsupported"


class _Fetched(msgspec.Struct):
    """What the fetcher leaves in its termination log."""

    revision: str


def model_verdict(
    model: Model,
    pods: list[Object],
    health: Mapping[str, Health],
    refusal: str | None,
    *,
    had_before: bool = False,
    replaces: bool = False,
) -> Verdict:
    """Judges members of the newest revision that are to stay: what others have need not be this model.

    Args:
        health: of those that fetch or load, by pod name.
        refusal: why the API server would not take a pod, None if it took all.
        had_before: see `had_model`.
        replaces: whether pods of an earlier revision run.
    """
    if refusal and model.uri.startswith("image://") and "volume" in refusal.lower():
        text = "this cluster does not take image volumes (Kubernetes 1.31 and newer do, with the feature ImageVolume)"
        return "False", IMAGE_VOLUME_UNSUPPORTED, f"{text}: {refusal}"
    staying = sorted((pod for pod in pods if not leaving(pod)), key=lambda pod: str(pod["metadata"]["name"]))
    for pod in staying:
        verdict = None if is_ready(pod) else fatal(pod)
        if verdict and verdict.reason in MODEL_REASONS:
            return "False", verdict.reason, f"{verdict.message}{tries_again([pod], health)}"
    for pod in staying:
        if missing := _missing_claim(pod):
            return "False", "ModelMissing", missing
    if not staying and had_before and replaces:
        return "True", AVAILABLE, "no pod of the newest revision runs yet; those before had the model"
    if not staying and had_before:
        again = "; the next one fetches it again" if is_fetched(model.uri) and not _is_shared(model) else ""
        return "True", AVAILABLE, f"no pod runs; those before had the model{again}"
    if not staying:
        return "Unknown", "NotObserved", "no pod has looked for the model yet"
    have = [pod for pod in staying if _has_model(model, pod)]
    under_way = still_loading(staying, health)
    if have:
        counts = f"{len(have)} of {len(staying)} pods have the model"
        return "True", AVAILABLE, f"{counts}; {under_way[1]}" if under_way else counts
    if had_before and not is_fetched(model.uri):
        return "True", AVAILABLE, under_way[1] if under_way else "pods start; those before had the model"
    if under_way:
        return ("False" if is_fetched(model.uri) else "Unknown"), *under_way
    return "Unknown", "Starting", "no pod has come to its model yet"


def still_loading(pods: list[Object], health: Mapping[str, Health]) -> tuple[str, str] | None:
    """Reason and message of the first of `pods` that fetches or loads, those before the others that do not get on; None if none
    says so."""
    told = [name for name in sorted(str(pod["metadata"]["name"]) for pod in pods) if name in health]
    if not told:
        return None
    name = min(told, key=lambda name: not health[name].error)
    found = health[name]
    progress = f": {found.progress}" if found.progress and str(found.progress) else ""
    error = f": {found.error}; it tries again" if found.error else ""
    return found.reason, f"pod {name}: {found.message}{progress}{error}"


def tries_again(pods: list[Object], health: Mapping[str, Health]) -> str:
    """To be added to what failed last: how far the next attempt is, once there is a figure. Else empty: no news of a failure."""
    measured = {name: found for name, found in health.items() if found.progress and str(found.progress)}
    under_way = still_loading(pods, measured)
    return f"; {under_way[1]}" if under_way else ""


def had_model(model: Model, status: Object) -> bool:
    """Whether pods had this very model when there were some last. `status`: of the service, as it was written before."""
    said = any(c["type"] == MODEL_AVAILABLE and c["status"] == "True" for c in status.get("conditions") or [])
    return said and (status.get("model") or {}).get("uri") == model.uri


def model_status(model: Model, pods: list[Object], previous: Object | None) -> ModelStatus | None:
    """What pods have, and what the fetchers found, of the newest pod that tells; kept from `previous` while no pod does."""
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp")), reverse=True):
        ended = _fetcher_state(pod).get("terminated") or {}
        if ended.get("exitCode") == 0:
            try:
                found = msgspec.json.decode(ended.get("message") or "", type=_Fetched)
            except msgspec.DecodeError:
                continue
            return ModelStatus(uri=model.uri, revision=found.revision)
    if previous and previous.get("uri") == model.uri:
        return ModelStatus(uri=model.uri, revision=previous.get("revision"))
    return ModelStatus(uri=model.uri) if any(_has_model(model, pod) for pod in pods) else None


def _is_shared(model: Model) -> bool:
    """Whether what was fetched outlives the pod."""
    return model.cache is not None and bool(model.cache.host_path or model.cache.claim)


def _has_model(model: Model, pod: Object) -> bool:
    if is_fetched(model.uri):
        return (_fetcher_state(pod).get("terminated") or {}).get("exitCode") == 0
    return is_ready(pod)


def _fetcher_state(pod: Object) -> Object:
    for container in pod.get("status", {}).get("initContainerStatuses") or []:
        if container["name"] == FETCHER:
            return dict(container.get("state") or {})
    return {}


def _missing_claim(pod: Object) -> str | None:
    """The scheduler waits for a claim that does not exist."""
    for condition in pod.get("status", {}).get("conditions") or []:
        text = condition.get("message") or ""
        if condition["type"] == "PodScheduled" and "persistentvolumeclaim" in text and "not found" in text:
            return f"pod {pod['metadata']['name']}: {text}"
    return None
