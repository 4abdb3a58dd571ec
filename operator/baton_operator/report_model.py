"""ModelAvailable: whether pods have the model, and how far those are that fetch or load it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from baton_engine.protocol.progress import Health
from baton_operator.api import Model
from baton_operator.api_model import ModelStatus, is_fetched
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
        "ModelSourceUnavailable",
        "ModelSourceUnsupported",
        "ModelUriInvalid",
        "NoSpace",
    }
)
"""FATAL reasons of fetchers and engines that are about the model's files."""
IMAGE_VOLUME_UNSUPPORTED = "ImageVolumeUnsupported"


class _Fetched(msgspec.Struct):
    """What the fetcher leaves in its termination log."""

    revision: str


def model_verdict(
    model: Model, pods: list[Object], health: Mapping[str, Health], refusal: str | None, now: datetime
) -> Verdict:
    """Judges members that are to stay.

    Args:
        health: of those that fetch or load, by pod name.
        refusal: why the API server would not take a pod, None if it took all.
    """
    if refusal and model.uri.startswith("image://") and "volume" in refusal.lower():
        text = "this cluster does not take image volumes (Kubernetes 1.31 and newer do, with the feature ImageVolume)"
        return "False", IMAGE_VOLUME_UNSUPPORTED, f"{text}: {refusal}"
    staying = sorted((pod for pod in pods if not leaving(pod)), key=lambda pod: str(pod["metadata"]["name"]))
    for pod in staying:
        verdict = None if is_ready(pod) else fatal(pod, now)
        if verdict and verdict.reason in MODEL_REASONS:
            return "False", verdict.reason, verdict.message
    for pod in staying:
        if missing := _missing_claim(pod):
            return "False", "ModelMissing", missing
    if not staying:
        return "Unknown", "NotObserved", "no pod has looked for the model yet"
    have = [pod for pod in staying if _has_model(model, pod)]
    under_way = still_loading(staying, health)
    if have:
        counts = f"{len(have)} of {len(staying)} pods have the model"
        return "True", "Available", f"{counts}; {under_way[1]}" if under_way else counts
    if under_way:
        return ("False" if is_fetched(model.uri) else "Unknown"), *under_way
    return "Unknown", "Starting", "no pod has come to its model yet"


def still_loading(pods: list[Object], health: Mapping[str, Health]) -> tuple[str, str] | None:
    """Reason and message of the first of `pods` that fetches or loads; None if none says so."""
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"])):
        name = pod["metadata"]["name"]
        if found := health.get(name):
            progress = f": {found.progress}" if found.progress and str(found.progress) else ""
            return found.reason, f"pod {name}: {found.message}{progress}"
    return None


def model_status(model: Model, pods: list[Object], previous: Object | None) -> ModelStatus | None:
    """What the fetchers found, of the newest pod that tells; kept from `previous` while no pod does."""
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp")), reverse=True):
        ended = _fetcher_state(pod).get("terminated") or {}
        if ended.get("exitCode") == 0:
            try:
                found = msgspec.json.decode(ended.get("message") or "", type=_Fetched)
            except msgspec.DecodeError:
                continue
            return ModelStatus(uri=model.uri, revision=found.revision)
    if previous and previous.get("uri") == model.uri and is_fetched(model.uri):
        return ModelStatus(uri=model.uri, revision=str(previous.get("revision")))
    return None


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
