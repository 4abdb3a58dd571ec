"""The model of a pod: its path and volume, and the init container that fetches it."""

from __future__ import annotations

import re

import msgspec

from baton_kube.client import Object
from baton_operator import names
from baton_operator.api.field_types import quantity_bytes
from baton_operator.api.spec_model import IMAGE_URI, Model, is_fetched
from baton_protocol.config import ENGINE_HTTP_PORT

VOLUME = "model"
#: Name of the init container.
FETCHER = "model"
FOLDER = "/models"
TERMINATION_LOG = "/dev/termination-log"
_SHARED_RESOURCES = ("cpu", "memory", "ephemeral-storage")


class ModelSource(msgspec.Struct, frozen=True):
    """The model's path in the container, and the volume with its mount."""

    #: Folder of the model in the container.
    path: str
    volume: Object
    #: Read-only mount of the serving container.
    mount: Object


def source(model: Model, role: names.ConfiguredRole) -> ModelSource:
    """Return where `role` finds the model. `model.uri` matches `spec_model.MODEL_URI`.

    A host path is mounted at the same path. The volume has no type check, so that the engine
    reports a missing folder by name.
    """
    scheme, _, rest = model.uri.partition("://")
    if scheme == "file":
        path = rest.rstrip("/")
        return ModelSource(path, {"name": VOLUME, "hostPath": {"path": path}}, _mount(path))
    if scheme == "pvc":
        claim = rest.partition("/")[0]
        volume: Object = {
            "name": VOLUME,
            "persistentVolumeClaim": {"claimName": claim, "readOnly": True},
        }
        return ModelSource(f"{FOLDER}/{rest.rstrip('/')}", volume, _mount(f"{FOLDER}/{claim}"))
    if scheme == "image":
        match = re.fullmatch(IMAGE_URI, model.uri)
        assert match is not None, "the CRD accepts no other URI"
        volume = {"name": VOLUME, "image": {"reference": match[1], "pullPolicy": "IfNotPresent"}}
        return ModelSource(
            f"{FOLDER}/image{(match[5] or '').rstrip('/')}", volume, _mount(f"{FOLDER}/image")
        )
    return ModelSource(
        f"{FOLDER}/{_folder_name(model.uri, role)}", _cache_volume(model), _mount(FOLDER)
    )


def fetcher(
    model: Model,
    role: names.ConfiguredRole,
    *,
    image: str,
    env: list[Object],
    security: Object,
    resources: Object | None,
) -> Object | None:
    """Return the init container; None if the model needs none.

    Args:
        resources: resources of the serving container. The fetcher gets the same cores and memory,
            but no devices.
    """
    if not is_fetched(model.uri):
        return None
    limit = model.cache.size_limit if model.cache else None
    command = ["baton-model", "fetch", "--uri", model.uri, "--to", source(model, role).path]
    command += (
        ["--only", "tokenizer"] if role == "gateway" else ["--http-port", str(ENGINE_HTTP_PORT)]
    )
    command += ["--max-bytes", str(quantity_bytes(limit))] if limit else []
    container: Object = {
        "name": FETCHER,
        "image": image,
        "command": [*command, "--termination-log", TERMINATION_LOG],
        "env": [*env, {"name": "HF_HOME", "value": "/tmp/huggingface"}],
        "volumeMounts": [
            {"name": VOLUME, "mountPath": FOLDER},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": security,
    }
    if model.credentials_secret:
        container["envFrom"] = [{"secretRef": {"name": model.credentials_secret}}]
    shares = {
        kind: {
            name: amount for name, amount in (amounts or {}).items() if name in _SHARED_RESOURCES
        }
        for kind, amounts in (resources or {}).items()
        if kind in ("requests", "limits")
    }
    if any(shares.values()):
        container["resources"] = {kind: amounts for kind, amounts in shares.items() if amounts}
    return container


def _folder_name(uri: str, role: names.ConfiguredRole) -> str:
    """Return the folder of a model in a cache. It is the same for all pods that share the cache."""
    readable = re.sub(r"[^A-Za-z0-9.-]+", "-", uri.partition("://")[2])[:80].strip("-.")
    return f"{readable}-{names.content_hash(uri)}{'-tokenizer' if role == 'gateway' else ''}"


def _cache_volume(model: Model) -> Object:
    cache = model.cache
    if cache is not None and cache.host_path:
        return {"name": VOLUME, "hostPath": {"path": cache.host_path, "type": "DirectoryOrCreate"}}
    if cache is not None and cache.claim:
        return {"name": VOLUME, "persistentVolumeClaim": {"claimName": cache.claim}}
    return {
        "name": VOLUME,
        "emptyDir": {"sizeLimit": cache.size_limit} if cache and cache.size_limit else {},
    }


def _mount(path: str) -> Object:
    return {"name": VOLUME, "mountPath": path, "readOnly": True}
